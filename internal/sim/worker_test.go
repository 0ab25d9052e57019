package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/history"
	"github.com/redismutex/redismutex/internal/redistest"
)

// A worker locks and unlocks, one key at a time.
type worker struct {
	*process
	name   string
	random *rand.Rand
	has    []*redismutex.Lock  // the locks that it holds, including nested ones
	seen   map[string][]string // by key, the ids that it has seen
}

// orders are the orders besides first come, first served, and whether writers come first in them.
var orders = []struct {
	option func() redismutex.MutexOption
	write  bool
}{{redismutex.WithLockIntent, true}, {redismutex.WithReaderPriority, false}}

// An attempt is one call that locks, and its outcome.
type attempt struct {
	by    *process
	key   string
	ttl   time.Duration
	write bool
	try   bool
	order redismutex.MutexOption
	class string // the queue in which it waits
	turn  time.Duration
	queue string // the local one; "" if it has none
	owner string
	ctx   context.Context // the parent of the lock; nil: none that ends
	most  time.Duration   // of WithMaxHold; 0: no bound
	waits time.Duration   // of WithWait; 0: no bound, or a try
	zero  bool            // a try by WithWait(0)

	span       *history.Span
	asked      int64
	id         string // of the acquisition under which it was granted
	ended      error  // why there was no lock, or why it ended before its unlock
	traced     bool   // a Trace is told of it
	downgraded bool   // it ended with a downgrade, which a Trace is not told of
	got        int64
	token      uint64
	foiled     bool  // canceled as another lock was unlocked
	confirmed  bool  // its unlock was confirmed: it was held to the end
	lost       bool  // its unlock returned ErrLockLost
	unlocked   int64 // when that was
	orphan     bool  // its context had ended with its parent before the unlock
	over       bool
}

func (a *attempt) String() string {
	return fmt.Sprintf("%q by %s, ttl %v, write %v, try %v, at most %v, waits %v", a.key, a.by.name, a.ttl, a.write, a.try, a.most, a.waits)
}

func (w *worker) run() {
	for w.pause(w.exp(5 * time.Second)) {
		if w.chance(0.15) {
			w.operate()
		} else {
			w.attempt()
		}
	}
}

// pause waits, and reports whether to go on.
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

// exp returns an exponentially distributed time with that mean, limited to four times the mean.
func (w *worker) exp(mean time.Duration) time.Duration {
	return min(time.Duration(w.random.ExpFloat64()*float64(mean)), 4*mean)
}

// begin draws an attempt and records its beginning.
func (w *worker) begin(cancel context.CancelFunc) *attempt {
	a := &attempt{
		by:    w.process,
		key:   keys[w.random.IntN(len(keys))],
		ttl:   ttls[w.random.IntN(len(ttls))],
		write: w.chance(0.6),
		try:   w.chance(0.2),
	}
	order := w.random.IntN(6)
	if order < len(orders) {
		a.order = orders[order].option()
		if a.write == orders[order].write {
			a.class = "first"
		}
	}
	if w.chance(0.15) {
		a.owner = w.name
	}
	if w.chance(0.6) { // as others of its process: they share a queue
		a.ttl, a.order, a.class, order = ttls[0], nil, "", len(orders)
	}
	if w.mood == tardy && w.process.name == late {
		a.ttl = tardyTTL
	}
	if w.chance(0.2) {
		a.most = w.process.most
	}
	if a.try {
		a.zero = w.chance(0.3)
	} else if w.chance(0.2) {
		a.waits = time.Millisecond + w.exp(2*time.Second)
	}
	a.turn = w.process.turn
	if a.turn != 0 && a.owner == "" {
		a.queue = fmt.Sprint(w.process.name, a.ttl, min(order, len(orders)), a.most, a.turn)
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
	if a.asked == 0 { // not a downgrade
		a.asked = e.clock()
	}
	op := history.Op{Client: a.by.name + ", ttl " + a.ttl.String(), Key: a.key, Kind: history.Read, Try: a.try, Class: a.class, Queue: a.queue}
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
	a.ctx = ctx
	defer w.done(a)
	if w.chance(0.15) {
		defer time.AfterFunc(w.exp(a.ttl), cancel).Stop()
	}
	w.ambush(0.2, a.ttl)
	if w.chance(0.3) {
		// While it waits, shortly before its lease is renewed.
		defer time.AfterFunc(a.ttl/2-w.exp(a.ttl/8), func() { w.process.ambush(w.draw(int(a.asked)), a.ttl) }).Stop()
	}
	a.traced = true
	m := w.mutex(a.ttl, a.order, a.maxHold(), redismutex.WithTurn(a.turn), redismutex.WithTrace(&w.account.trace))
	l, err := a.lock(m, context.WithValue(ctx, attemptKey{}, a))
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

// lock makes one of the four calls, with an owner or without.
func (a *attempt) lock(m *redismutex.RWMutex, ctx context.Context) (*redismutex.Lock, error) {
	opts := []redismutex.LockOption{redismutex.WithKey(a.key)}
	if a.owner != "" {
		opts = append(opts, redismutex.WithOwner(a.owner))
	}
	try := a.try
	switch {
	case a.waits > 0:
		opts = append(opts, redismutex.WithWait(a.waits))
	case a.zero:
		opts, try = append(opts, redismutex.WithWait(0)), false
	}
	return [2][2]func(context.Context, ...redismutex.LockOption) (*redismutex.Lock, error){
		{m.RLockContext, m.TryRLockContext},
		{m.LockContext, m.TryLockContext},
	}[b2i(a.write)][b2i(try)](ctx, opts...)
}

// maxHold returns the option of a's mutex, or nil.
func (a *attempt) maxHold() redismutex.MutexOption {
	if a.most == 0 {
		return nil
	}
	return redismutex.WithMaxHold(a.most)
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// refused records and checks the error of a call that locks.
func (w *worker) refused(a *attempt, ctx context.Context, err error) {
	w.lives(func() {
		a.ended = err
		held := errors.Is(err, redismutex.ErrLock)
		switch {
		case !sentinel(err, ctx), held && !a.try && a.waits == 0, !w.fails() && errors.Is(err, redismutex.ErrRedis):
			w.fail("%v: want the lock or an error that this era explains, got %v", a, err)
		}
		// A try that made no call was refused for a lock or a waiter of its own process, whose acquire may be late.
		if w.outran(a, err) || held && a.try && w.fails() && w.clock()-a.asked < int64(time.Microsecond) {
			a.span.Failed(err)
			a.span.Freed()
			return
		}
		// A try that took longer may have been sent twice, and the first copy may still arrive.
		if held && a.try && len(w.nodes) == 1 && w.clock()-a.asked < int64(8*time.Millisecond) {
			a.span.Refused()
		} else {
			a.span.Failed(err)
		}
	})
	if w.chance(0.3) {
		w.ambush(1, a.ttl) // while the request is released in the background
	}
}

// hold works while the lock is held, and unlocks it.
func (w *worker) hold(a *attempt, l *redismutex.Lock, cancel context.CancelFunc) {
	if !w.lives(func() {
		a.got, a.token, a.id = w.clock(), l.Token(), w.acquisition(l.ID())
		a.span.Got(l.Token(), w.until(l))
		w.held[a] = l
	}) {
		return
	}
	defer func() { // after a downgrade, a is another attempt
		w.lives(func() { delete(w.held, a) })
		w.done(a)
	}()
	span := a.span // a downgrade changes a
	seen := context.AfterFunc(l, func() { w.lives(span.Ended) })
	defer seen()
	if (l.Token() != 0) != a.write || l.Key() != "sim:"+a.key {
		w.fail("%v: want its key, and a token only for a writer, got %q and %d", a, l.Key(), l.Token())
	}
	if own, ok := redismutex.FromContext(l); !ok || own != l {
		w.fail("%v: want FromContext to return the lock itself, it does not", a)
	}

	if left := time.Until(l.Until()); left < a.ttl/4 {
		w.fail("%v: want the new lock trusted for a quarter of its TTL at least, it is for %v", a, left)
	}

	outermost := len(w.has) == 0
	w.has = append(w.has, l)
	defer func(n int) { w.has = w.has[:n] }(len(w.has) - 1)
	if outermost && w.chance(0.15) {
		w.another(a, l)
	}

	write := a.write // false after a downgrade
	for range w.random.IntN(3) + 1 {
		w.agrees(a, l)
		w.stores(a, l, write)
		if w.chance(0.2) {
			w.nest(a, l, write)
		}
		unlock := func() {}
		if w.chance(0.2) {
			unlock = w.family(a, l, write)
			w.ambush(0.5, 4*a.ttl) // long enough to lose the lock
		}
		w.ambush(0.1, a.ttl)
		work := w.exp(20 * time.Millisecond)
		switch n := w.random.IntN(10); {
		case n < 4: // until about its renewal, or the end of its lease
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
			cancel() // the parent context: the lock is renewed all the same until it is unlocked
		}
	}
	w.agrees(a, l)
	w.ambush(0.2, a.ttl)
	if w.chance(0.2) && w.pause(w.exp(a.ttl/2)) {
		w.stores(a, l, write) // which may be too late
	}
	if errors.Is(context.Cause(l), redismutex.ErrMaxHold) && w.chance(0.3) {
		w.pause(a.ttl + time.Second) // it is free without an unlock
	}
	w.unlock(a, l)
}

func (w *worker) until(l *redismutex.Lock) int64 { return int64(l.Until().Sub(w.start)) }

// unlock unlocks, and sometimes cancels a waiter at about the time of its grant.
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
	a.orphan = cause != nil && ending(cause) == nil
	if a.orphan && (a.ctx == nil || a.ctx.Err() == nil) {
		w.fail("%v: want the lock ended with its parent only, or for a reason of its own, it ended with %v", a, cause)
	}
	if w.chance(0.2) {
		time.AfterFunc(w.exp(2*distance), func() { w.foil(a.key) })
	}
	err := l.UnlockContext(ctx)
	w.lives(func() {
		a.unlocked = w.clock()
		// The error tells of a lock that was held for too long what has become of it since.
		if a.ended = ending(context.Cause(l)); a.ended == nil && !errors.Is(err, redismutex.ErrLockLost) {
			a.ended = ending(err)
		}
		switch {
		case err == nil:
			a.confirmed = true
			a.span.Freed()
		case errors.Is(err, redismutex.ErrLockLost):
			a.lost = true
		case ending(err) != nil:
			if !w.fails() {
				a.span.Freed()
			}
		case errors.Is(err, redismutex.ErrRedis) && w.fails():
		case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		default:
			w.fail("%v: want it unlocked, or an error that this era explains, got %v", a, err)
		}
		if err := l.UnlockContext(ctx); !errors.Is(err, redismutex.ErrUnlocked) && ending(err) == nil {
			w.fail("%v: want ErrUnlocked, or why the lock has ended, from a second unlock, got %v", a, err)
		}
		if l.Err() == nil {
			w.fail("%v: want its context done after the unlock, it is not", a)
		}
	})
}

// ending returns which of the ends of a lock err is; nil: none of them.
func ending(err error) error {
	for _, end := range []error{redismutex.ErrLockLost, redismutex.ErrRevoked, redismutex.ErrMaxHold} {
		if errors.Is(err, end) {
			return end
		}
	}
	return nil
}

// foil cancels the waiter for a key that asked first.
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

// downgrade turns a write lock into a read lock, which is another operation in the history. It is held from the call on,
// when the first one ends.
func (w *worker) downgrade(a *attempt, l *redismutex.Lock) *attempt {
	read := *a
	read.traced, a.downgraded = false, true
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
			w.fail("%v: want it downgraded, or an error that this era explains, got %v", a, err)
		}
	})
	return &read
}

// nest locks the same key again within the lock.
func (w *worker) nest(a *attempt, l *redismutex.Lock, write bool) {
	inner := attempt{key: a.key, write: w.chance(0.5), try: w.chance(0.5), owner: a.owner}
	ctx := context.Context(l)
	if a.owner != "" && w.chance(0.5) {
		ctx = w.ctx
	}
	began := time.Now()
	again, err := w.within(l, &inner, ctx)
	took := time.Since(began)
	redistest.Elapse(time.Nanosecond) // a loss may just be about to be told
	ended := l.Err() != nil || w.ctx.Err() != nil
	if err == nil && again.ID() != l.ID() { // a lock of its own, since the owner's was lost
		if !ended {
			w.fail("%v: want the nested lock to have the same id, it has another", a)
		}
		again.Unlock()
		return
	}
	switch {
	case ended:
	case inner.write && !write:
		if !errors.Is(err, redismutex.ErrUpgrade) {
			w.fail("%v: want ErrUpgrade for a write lock within a read lock, got %v", a, err)
		}
	case err != nil || again.Token() != l.Token() || took != 0:
		w.fail("%v: want a nested lock with the same token at once, got %v after %v", a, err, took)
	}
	if err == nil {
		if err := again.UnlockContext(ctx); err != nil && l.Err() == nil {
			w.fail("%v: want the nested lock unlocked, got %v", a, err)
		}
	}
}

// family locks the same key again within the lock, with contexts that descend from it directly, from other nested locks, or
// from locks on other keys. When the lock ends, all of them must end.
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
		again, err := w.within(l, &inner, ctx)
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
		end := ending(context.Cause(l))
		redistest.Elapse(time.Nanosecond) // each lock that is held for too long has a timer of its own
		lost := end != nil
		for _, again := range w.has[n:] {
			err := again.UnlockContext(w.ctx)
			// One that was held for too long may have been lost or revoked since.
			if again.Err() == nil || lost && !errors.Is(err, end) && !(end == redismutex.ErrMaxHold && ending(err) != nil) {
				w.fail("%v: want its nested locks ended with it (%v), one has Err %v, its unlock returned %v", a, end, again.Err(), err)
			}
		}
		w.took(family, lost && len(w.has) > n)
		w.has = w.has[:n]
	}
}

// another locks another key while the lock is held.
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

// agrees checks promise 2: a lock is trusted no longer than its lease on the server lasts.
func (w *worker) agrees(a *attempt, l *redismutex.Lock) {
	if len(w.nodes) > 1 || w.mood == lossy {
		return
	}
	trusted := time.Until(l.Until())
	if l.Err() != nil || trusted <= 0 || w.mayBeRevoked(a.id) {
		return
	}
	if lease := w.era.nodes[0].lease(l.Key(), l.ID()); lease < trusted {
		w.fail("%v: want it trusted no longer than its lease, it is for %v, the lease lasts %v", a, trusted, lease)
	}
}

// stores writes to the register that the lock protects, which checks the token.
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
			w.fail("%v: want its stale write refused, it was accepted", a)
		case err != nil && l.Err() == nil && w.mood != lossy && !w.mayBeRevoked(a.id):
			w.fail("%v: want the write of a holder accepted, got %v", a, err)
		}
	})
}
