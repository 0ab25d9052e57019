package sim

// This file has the workers: what the processes do with locks, and what each of them checks at once.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/history"
)

// A worker locks and unlocks, one key at a time.
type worker struct {
	*process
	name   string
	random *rand.Rand
	has    []*redismutex.Lock // what it holds at the moment, nested ones too
}

// orders are those besides first come, first served, and who goes first in them.
var orders = []struct {
	option func() redismutex.MutexOption
	write  bool
}{{redismutex.WithLockIntent, true}, {redismutex.WithReaderPriority, false}}

// An attempt is one call that locks, and what came of it.
type attempt struct {
	by    *process
	key   string
	ttl   time.Duration
	write bool
	try   bool
	order redismutex.MutexOption
	class string // the line that it waits in
	owner string

	span      *history.Span
	asked     int64
	got       int64
	foiled    bool // cancelled as somebody else unlocked
	confirmed bool // its unlock was: it was held to the end
	lost      bool // it was not
	orphan    bool // its context had ended with its parent by then
	over      bool
}

func (a *attempt) String() string {
	return fmt.Sprintf("%q by %s, ttl %v, write %v, try %v", a.key, a.by.name, a.ttl, a.write, a.try)
}

func (w *worker) run() {
	for w.pause(w.exp(5 * time.Second)) {
		w.attempt()
	}
}

// pause waits, and says whether to go on.
func (w *worker) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-w.stopping:
	case <-w.ctx.Done():
	}
	return false
}

func (w *worker) chance(p float64) bool { return w.random.Float64() < p }

// exp is a random time of that mean, within reason.
func (w *worker) exp(mean time.Duration) time.Duration {
	return min(time.Duration(w.random.ExpFloat64()*float64(mean)), 4*mean)
}

// begin draws what to ask for, and records that it is asked for.
func (w *worker) begin(cancel context.CancelFunc) *attempt {
	a := &attempt{
		by:    w.process,
		key:   keys[w.random.IntN(len(keys))],
		ttl:   ttls[w.random.IntN(len(ttls))],
		write: w.chance(0.6),
		try:   w.chance(0.2),
	}
	if w.mood == tardy && w.process.name == late {
		a.ttl = tardyTTL
	}
	if o := w.random.IntN(6); o < len(orders) {
		a.order = orders[o].option()
		if a.write == orders[o].write {
			a.class = "first"
		}
	}
	if w.chance(0.15) {
		a.owner = w.name
	}
	w.record(a)
	w.mu.Lock()
	w.waiters[a.key][a] = cancel
	w.mu.Unlock()
	return a
}

// record begins the operation of a in the history.
func (e *era) record(a *attempt) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if a.asked == 0 { // but where it is a downgrade
		a.asked = e.clock()
	}
	op := history.Op{Client: a.by.name + ", ttl " + a.ttl.String(), Key: a.key, Kind: history.Read, Try: a.try, Class: a.class}
	if a.write {
		op.Kind = history.Write
	}
	a.span = e.recorder.Begin(op)
	e.attempts = append(e.attempts, a)
}

func (w *worker) done(a *attempt) {
	w.mu.Lock()
	defer w.mu.Unlock()
	a.over = true
}

func (w *worker) attempt() {
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	a := w.begin(cancel)
	defer w.done(a)
	if w.chance(0.15) {
		defer time.AfterFunc(w.exp(a.ttl), cancel).Stop()
	}
	w.ambush(0.2, a.ttl)
	if w.chance(0.3) {
		// While it waits: shortly before its lease would be kept.
		defer time.AfterFunc(a.ttl/2-w.exp(a.ttl/8), func() { w.process.ambush(w.draw(int(a.asked)), a.ttl) }).Stop()
	}
	l, err := a.lock(w.mutex(a.ttl, a.order), ctx)
	w.mu.Lock()
	delete(w.waiters[a.key], a)
	foiled := a.foiled
	w.mu.Unlock()
	if foiled {
		w.injected(cancelled)
		w.took(cancelled, err != nil && errors.Is(err, context.Canceled))
	}
	if err == nil {
		w.hold(a, l, cancel)
	} else {
		w.refused(a, ctx, err)
	}
}

// lock asks by one of the eight calls.
func (a *attempt) lock(m *redismutex.RWMutex, ctx context.Context) (*redismutex.Lock, error) {
	opts := []redismutex.LockOption{redismutex.WithKey(a.key)}
	if a.owner != "" {
		opts = append(opts, redismutex.WithOwner(a.owner))
	}
	return [2][2]func(context.Context, ...redismutex.LockOption) (*redismutex.Lock, error){
		{m.RLockContext, m.TryRLockContext},
		{m.LockContext, m.TryLockContext},
	}[b2i(a.write)][b2i(a.try)](ctx, opts...)
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// refused takes an error of a call that locks.
func (w *worker) refused(a *attempt, ctx context.Context, err error) {
	w.lives(func() {
		held := errors.Is(err, redismutex.ErrLock)
		switch {
		case !sentinel(err, ctx), held && !a.try, !w.fails() && errors.Is(err, redismutex.ErrRedis):
			w.fail("%v: %v", a, err)
		}
		// A try that took longer may have been sent again, and what was sent first may come still.
		if held && len(w.nodes) == 1 && w.clock()-a.asked < int64(8*time.Millisecond) {
			a.span.Refused()
		} else {
			a.span.Failed(err)
		}
	})
	if w.chance(0.3) {
		w.ambush(1, a.ttl) // what it has left behind leaves in the background
	}
}

// hold works under a lock, and unlocks.
func (w *worker) hold(a *attempt, l *redismutex.Lock, cancel context.CancelFunc) {
	if !w.lives(func() {
		a.got = w.clock()
		a.span.Got(l.Token(), w.until(l))
		w.held[a] = l
		w.ids = l.ID()[:strings.LastIndexByte(l.ID(), ':')+1]
	}) {
		return
	}
	defer func() { // of the last that a is, after a downgrade
		w.lives(func() { delete(w.held, a) })
		w.done(a)
	}()
	span := a.span // a becomes another one with a downgrade
	seen := context.AfterFunc(l, func() { w.lives(span.Ended) })
	defer seen()
	if (l.Token() != 0) != a.write || l.Key() != "sim:"+a.key {
		w.fail("%v: key %q, token %d", a, l.Key(), l.Token())
	}
	if own, ok := redismutex.FromContext(l); !ok || own != l {
		w.fail("%v: FromContext does not find it", a)
	}

	if left := time.Until(l.Until()); left < a.ttl/4 {
		w.fail("%v: returned when it could be trusted for no more than %v", a, left)
	}

	outermost := len(w.has) == 0
	w.has = append(w.has, l)
	defer func(n int) { w.has = w.has[:n] }(len(w.has) - 1)
	if outermost && w.chance(0.15) {
		w.another(a, l)
	}

	write := a.write // it is still one to write
	for range w.random.IntN(3) + 1 {
		w.agrees(a, l)
		w.stores(a, l, write)
		if w.chance(0.2) {
			w.nest(a, l, write)
		}
		unlock := func() {}
		if w.chance(0.2) {
			unlock = w.family(a, l, write)
			w.ambush(0.5, 4*a.ttl) // for long enough that it is lost
		}
		w.ambush(0.1, a.ttl)
		work := w.exp(20 * time.Millisecond)
		switch n := w.random.IntN(10); {
		case n < 4: // to about the time at which it is kept, or its lease ends
			work = min(a.ttl/2*time.Duration(w.random.IntN(3)+1)+w.exp(20*time.Millisecond)-20*time.Millisecond, 6*time.Second)
		case n < 7:
			work = min(w.exp(a.ttl), 6*time.Second)
		}
		timer := time.NewTimer(work)
		select {
		case <-timer.C:
		case <-w.stopping:
		case <-w.ctx.Done():
		case <-l.Done():
		}
		timer.Stop()
		unlock()
		if !w.lives(func() { a.span.Until(w.until(l)) }) {
			return
		}
		if write && l.Err() == nil && w.chance(0.15) {
			a, write = w.downgrade(a, l), false
		}
		if w.chance(0.03) {
			cancel() // the parent: the lock is kept nevertheless until it is unlocked
		}
	}
	w.agrees(a, l)
	w.ambush(0.2, a.ttl)
	if w.chance(0.2) && w.pause(w.exp(a.ttl/2)) {
		w.stores(a, l, write) // maybe too late
	}
	w.unlock(a, l)
}

func (w *worker) until(l *redismutex.Lock) int64 { return int64(l.Until().Sub(w.start)) }

// unlock ends the hold, and may have one who waits for it give up as its turn comes.
func (w *worker) unlock(a *attempt, l *redismutex.Lock) {
	ctx := context.Background()
	if w.chance(0.2) {
		timely, cancel := context.WithTimeout(ctx, w.exp(a.ttl/4))
		defer cancel()
		ctx = timely
	}
	if !w.lives(a.span.Unlocking) {
		return
	}
	cause := context.Cause(l)
	a.orphan = cause != nil && !errors.Is(cause, redismutex.ErrLockLost)
	if w.chance(0.2) {
		time.AfterFunc(w.exp(2*distance), func() { w.foil(a.key) })
	}
	err := l.UnlockContext(ctx)
	w.lives(func() {
		switch {
		case err == nil:
			a.confirmed = true
			a.span.Freed()
		case errors.Is(err, redismutex.ErrLockLost):
			a.lost = true
		case errors.Is(err, redismutex.ErrRedis) && w.fails():
		case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		default:
			w.fail("%v: %v", a, err)
		}
		if err := l.UnlockContext(ctx); !errors.Is(err, redismutex.ErrUnlocked) && !errors.Is(err, redismutex.ErrLockLost) {
			w.fail("%v: a second unlock: %v", a, err)
		}
		if l.Err() == nil {
			w.fail("%v: unlocked, and its context is not done", a)
		}
	})
}

// foil cancels somebody who waits for a key.
func (e *era) foil(key string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var next *attempt
	for a := range e.waiters[key] {
		if !a.try && (next == nil || a.asked < next.asked) {
			next = a
		}
	}
	if next != nil {
		next.foiled = true
		e.waiters[key][next]()
	}
}

// downgrade makes the lock one to read: from the call on another operation, which begins to hold as the first ends.
func (w *worker) downgrade(a *attempt, l *redismutex.Lock) *attempt {
	read := *a
	read.write, read.try, read.class = false, true, "" // it did not wait
	w.record(&read)
	defer w.done(a)
	w.lives(func() {
		a.span.Unlocking()
		read.span.Got(0, w.until(l))
		delete(w.held, a)
		w.held[&read] = l
	})
	context.AfterFunc(l, func() { w.lives(read.span.Ended) })
	w.ambush(0.2, a.ttl)
	ctx := w.ctx
	if w.chance(0.5) {
		ctx = l
	}
	err := l.Downgrade(ctx)
	w.lives(func() {
		switch {
		case err == nil:
			a.confirmed = true
			a.span.Freed()
		case l.Err() != nil, w.fails() && errors.Is(err, redismutex.ErrRedis):
		default:
			w.fail("%v: downgrade: %v", a, err)
		}
	})
	return &read
}

// nest locks again within the lock.
func (w *worker) nest(a *attempt, l *redismutex.Lock, write bool) {
	inner := attempt{key: a.key, write: w.chance(0.5), try: w.chance(0.5), owner: a.owner}
	ctx := context.Context(l)
	if a.owner != "" && w.chance(0.5) {
		ctx = w.ctx
	}
	began := time.Now()
	again, err := inner.lock(w.mutex(ttls[0], nil), ctx)
	ended := l.Err() != nil || w.ctx.Err() != nil
	if err == nil && again.ID() != l.ID() { // of its own, as that of the owner had been lost
		if !ended {
			w.fail("%v: nested, and has another id", a)
		}
		again.Unlock()
		return
	}
	switch {
	case ended:
	case inner.write && !write:
		if !errors.Is(err, redismutex.ErrUpgrade) {
			w.fail("%v: to write within a lock to read: %v", a, err)
		}
	case err != nil || again.Token() != l.Token() || time.Since(began) != 0:
		w.fail("%v: nested: %v after %v", a, err, time.Since(began))
	}
	if err == nil {
		if err := again.UnlockContext(ctx); err != nil && l.Err() == nil {
			w.fail("%v: unlock of a nested lock: %v", a, err)
		}
	}
}

// family locks again within the lock, by contexts that descend from it in one way or another: from other locks nested
// in it, and from locks on other keys. What ends the lock ends all of them.
func (w *worker) family(a *attempt, l *redismutex.Lock, write bool) (unlock func()) {
	n := len(w.has)
	for range 1 + w.random.IntN(6) {
		ctx := context.Context(l)
		if w.chance(0.7) {
			ctx = w.has[w.random.IntN(len(w.has))]
		}
		if w.chance(0.5) {
			ctx = context.WithoutCancel(ctx)
		}
		inner := attempt{key: a.key, write: write && w.chance(0.5), try: true, owner: a.owner}
		again, err := inner.lock(w.mutex(ttls[0], nil), ctx)
		switch {
		case err != nil: // ctx has ended, or does not descend from the lock
		case again.ID() != l.ID():
			again.Unlock() // the lock has ended
		default:
			w.has = append(w.has, again)
		}
	}
	w.injected(family)
	return func() {
		lost := errors.Is(context.Cause(l), redismutex.ErrLockLost)
		for _, again := range w.has[n:] {
			err := again.UnlockContext(w.ctx)
			if again.Err() == nil || lost && !errors.Is(err, redismutex.ErrLockLost) {
				w.fail("%v: lost %v; its nested lock: %v, %v", a, lost, again.Err(), err)
			}
		}
		w.took(family, lost && len(w.has) > n)
		w.has = w.has[:n]
	}
}

// another locks another key within the lock.
func (w *worker) another(a *attempt, l *redismutex.Lock) {
	b := &attempt{by: a.by, key: keys[w.random.IntN(len(keys))], ttl: a.ttl, write: w.chance(0.5), try: true, owner: a.owner}
	if b.key == a.key {
		return
	}
	w.record(b)
	ctx := context.WithoutCancel(l)
	m, err := b.lock(w.mutex(b.ttl, nil), ctx)
	if err == nil {
		w.hold(b, m, func() {})
		return
	}
	w.refused(b, ctx, err)
	w.done(b)
}

// agrees looks whether the server knows of a lock that is trusted, and for how long: promise 2.
func (w *worker) agrees(a *attempt, l *redismutex.Lock) {
	if len(w.nodes) > 1 || w.mood == lossy {
		return
	}
	trusted := time.Until(l.Until())
	if l.Err() != nil || trusted <= 0 {
		return
	}
	if lease := w.era.nodes[0].lease(l.Key(), l.ID()); lease < trusted {
		w.fail("%v: trusted for %v, but its lease lasts %v", a, trusted, lease)
	}
}

// stores writes to what the lock protects, which checks the token.
func (w *worker) stores(a *attempt, l *redismutex.Lock, write bool) {
	if !write {
		return
	}
	w.lives(func() {
		w.mu.Lock()
		r := w.registers[a.key]
		last, _ := r.Read()
		err := r.Write(l.Token(), a.asked)
		w.mu.Unlock()
		switch {
		case err == nil && last > a.got:
			w.fail("%v: its write is stale, and was accepted", a)
		case err != nil && l.Err() == nil && w.mood != lossy:
			w.fail("%v: holds, and its write was refused: %v", a, err)
		}
	})
}
