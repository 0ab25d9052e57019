package sim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/history"
	engine "github.com/redismutex/redismutex/internal/node"
)

// Operators is what the workers of an era that look at locks, and revoke some, have done and seen. The mutex of the era
// guards it.
type operators struct {
	mailboxes map[string]*process // whose ids they begin
	calls     map[string][]*revocation
	sights    []*sight
	inner     []*innerCall
}

// An innerCall is a call within a lock on its key that stood in Redis by itself, since that lock had ended.
type innerCall struct {
	by       *process
	key      string
	from, to int64
}

// A revocation is a call that revoked an acquisition, or what all such calls together come to.
type revocation struct {
	acquisition string
	of          *process
	key         string
	ttl         time.Duration // of its mutex
	from        int64         // before the call
	to          int64         // after the call has returned nil; 0: it has not
	without     bool          // it certainly had no effect
}

// A sight is what was told of a lock at some time between from and to: a State, or the id of a HeldError.
type sight struct {
	key      string
	from, to int64
	state    *redismutex.State // nil: a HeldError
	holder   string
}

// The effects of operators, and of the bounds of waits and locks.
const (
	inspected     = "lock inspected"
	holderRevoked = "holder revoked"
	waiterRevoked = "waiter revoked"
	goneRevoked   = "id revoked that may be gone"
	heldTooLong   = "lock held for too long"
	waitedTooLong = "wait ran out"
)

// lastTry is how long the try after a wait that has run out takes: the time of the documentation, and on several nodes the
// longest node time-out.
const lastTry = 100*time.Millisecond + time.Second

// meet notes the ids of a client of p. The node has to be kept: another one would have other ids.
func (ops *operators) meet(p *process, rc redis.Scripter) *engine.Node {
	n := engine.Of(rc)
	p.mu.Lock()
	defer p.mu.Unlock()
	ops.mailboxes[n.Mailbox.Name()] = p
	return n
}

// processOf returns the process to which an id belongs, or nil.
func (e *era) processOf(id string) *process {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.operators.mailboxes[id[:max(0, strings.LastIndexByte(id, ':'))]]
}

// acquisition returns what the ids of one acquisition have in common. On one node it has one at a time.
func (e *era) acquisition(id string) string {
	if len(e.nodes) == 1 {
		return id
	}
	return engine.AcquisitionOf(id)
}

// operate looks at a lock, and sometimes revokes an acquisition that it has seen there, now or earlier.
func (w *worker) operate() {
	key := keys[w.random.IntN(len(keys))]
	ttl := ttls[w.random.IntN(len(ttls))]
	m := w.mutex(ttl)
	state := w.inspect(m, key)
	if state == nil || !w.chance(0.5) {
		return
	}
	var ids []string
	role := map[string]string{}
	for _, p := range state.Holders {
		ids, role[p.ID] = append(ids, p.ID), holderRevoked
	}
	for _, p := range state.Waiters {
		ids, role[p.ID] = append(ids, p.ID), waiterRevoked
	}
	w.seen[key] = append(w.seen[key], ids...)
	if w.chance(0.2) {
		ids = w.seen[key]
	}
	if len(ids) > 0 {
		id := ids[w.random.IntN(len(ids))]
		w.revoke(m, ttl, key, id, cmp.Or(role[id], goneRevoked))
	}
}

func (w *worker) inspect(m *redismutex.RWMutex, key string) (state *redismutex.State) {
	s := &sight{key: key}
	if !w.lives(func() { s.from = w.recorder.Now() }) {
		return nil
	}
	var err error
	s.state, err = m.Inspect(w.ctx, redismutex.WithKey(key))
	w.lives(func() {
		w.injected(inspected)
		if s.to = w.recorder.Now(); err == nil {
			w.took(inspected, len(s.state.Holders) > 0)
			w.saw(s)
			state = s.state
		} else if w.ctx.Err() == nil && !(w.fails() && errors.Is(err, redismutex.ErrRedis)) {
			w.fail("inspecting %q: want its state, or an error that this era explains, got %v", key, err)
		}
	})
	return state
}

func (e *era) saw(s *sight) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.operators.sights = append(e.operators.sights, s)
}

// within makes a call within the lock l on its key, which is no operation of the history.
func (w *worker) within(l *redismutex.Lock, inner *attempt, ctx context.Context) (*redismutex.Lock, error) {
	ttl := ttls[0]
	if w.mood == tardy { // l may have just been revoked: this is an acquire then, which may be late
		ttl = tardyTTL
	}
	from := w.clock()
	again, err := inner.lock(w.mutex(ttl), ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	if to := w.clock(); again == nil && to > from || again != nil && again.ID() != l.ID() {
		w.operators.inner = append(w.operators.inner, &innerCall{w.process, inner.key, from, to})
	}
	return again, err
}

func (w *worker) revoke(m *redismutex.RWMutex, ttl time.Duration, key, id, role string) {
	of := w.processOf(id)
	if of == nil {
		w.fail("inspecting %q: want ids of processes that lock it, got %q", key, id)
		return
	}
	r := &revocation{acquisition: w.acquisition(id), of: of, key: key, ttl: ttl}
	if !w.lives(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		r.from = w.recorder.Now()
		w.operators.calls[r.acquisition] = append(w.operators.calls[r.acquisition], r)
	}) {
		return
	}
	w.injected(role)
	err := m.Revoke(w.ctx, id, redismutex.WithKey(key))
	w.lives(func() {
		if w.ctx.Err() == nil && err != nil && !errors.Is(err, redismutex.ErrNoSuchID) && !(w.fails() && errors.Is(err, redismutex.ErrRedis)) {
			w.fail("revoking %q of %q: want nil, ErrNoSuchID or an error that this era explains, got %v", id, key, err)
		}
		w.took(goneRevoked, role == goneRevoked && (err == nil || errors.Is(err, redismutex.ErrNoSuchID)))
		w.mu.Lock()
		defer w.mu.Unlock()
		if err == nil {
			r.to = w.recorder.Now()
		}
		// If calls fail, one that was sent twice may have found nothing the second time.
		r.without = errors.Is(err, redismutex.ErrNoSuchID) && !w.fails()
	})
}

// revoked returns what the calls that may have revoked an acquisition come to: before the first of them it was not, and after
// the first that returned nil it was. It returns nil if there is none.
func (e *era) revoked(acquisition string) (all *revocation) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range e.operators.calls[acquisition] {
		switch {
		case r.without:
		case all == nil:
			sum := *r
			all = &sum
		case r.to != 0 && (all.to == 0 || r.to < all.to):
			all.to, all.ttl = r.to, r.ttl
		}
	}
	return all
}

func (e *era) mayBeRevoked(acquisition string) bool { return e.revoked(acquisition) != nil }

// outran checks the error of a call that others kept from the lock: which process it names, and when the wait ran out. It
// reports whether what was in the way may have been revoked, and only the process did not know yet.
func (w *worker) outran(a *attempt, err error) (unaware bool) {
	held := &redismutex.HeldError{}
	if !errors.As(err, &held) {
		return false
	}
	now := w.recorder.Now()
	if held.Holder != "" {
		w.saw(&sight{key: a.key, from: a.asked + int64(a.waits), to: now, holder: held.Holder})
	}
	if a.waits > 0 {
		w.injected(waitedTooLong)
		w.took(waitedTooLong, true)
		waited := time.Duration(now - a.asked)
		if waited < a.waits || !w.fails() && waited > a.waits+lastTry {
			w.fail("%v: want it to end when the wait has run out, it has after %v", a, waited)
		}
	}
	return a.try && w.mayBeRevoked(w.acquisition(held.Holder))
}

// revocations notes in the operations what was revoked, and when. An acquisition that waited ends one wait: that of the
// first one that ended, of those in its process that ended with ErrRevoked.
func (e *era) revocations(ops []history.Op) {
	var waits []*revocation
	for acquisition := range e.operators.calls {
		if r := e.revoked(acquisition); r != nil {
			waits = append(waits, r)
		}
	}
	slices.SortFunc(waits, func(a, b *revocation) int { return cmp.Compare(a.from, b.from) })
	for i := range ops {
		o, a := &ops[i], e.attempts[i]
		r := e.revoked(a.id)
		if a.id == "" || r == nil {
			continue
		}
		o.Revoked = r.from
		if r.to != 0 && (o.Freed == 0 || r.to < o.Freed) {
			o.Freed = r.to
		}
		waits = slices.DeleteFunc(waits, func(w *revocation) bool { return w.acquisition == a.id })
	}
	for _, i := range e.byEnd(ops) {
		o, a := &ops[i], e.attempts[i]
		if o.Got != 0 || !errors.Is(a.ended, redismutex.ErrRevoked) {
			continue
		}
		w := slices.IndexFunc(waits, func(r *revocation) bool { return r.of == a.by && r.key == a.key && r.from < o.Ended })
		if w < 0 {
			e.check(fmt.Errorf("want a wait ended with ErrRevoked only if it was revoked, and one wait for each that was:\n\t%v", o))
			continue
		}
		e.took(waiterRevoked, true)
		o.Revoked = waits[w].from
		if !e.fails() {
			o.Freed = o.Ended
		}
		waits = slices.Delete(waits, w, w+1)
	}
}

// triedAtLast returns ops, with those as tries whose wait ran out: they have left the queue, and end with a try.
func (e *era) triedAtLast(ops []history.Op) []history.Op {
	ops = slices.Clone(ops)
	for i := range ops {
		o, a := &ops[i], e.attempts[i]
		o.Try = o.Try || a.waits > 0 && cmp.Or(o.Got, o.Ended)-o.Asked >= int64(a.waits)
	}
	return ops
}

// byEnd returns the indexes of ops in the order in which they ended.
func (e *era) byEnd(ops []history.Op) []int {
	order := make([]int, len(ops))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int { return cmp.Compare(ops[i].Ended, ops[j].Ended) })
	return order
}

// ends checks why and when locks have ended that were revoked, or held for too long.
func (e *era) ends(ops []history.Op) {
	for i := range ops {
		o, a := &ops[i], e.attempts[i]
		end := history.Earlier(o.Unlocking, o.Ended)
		if o.Got == 0 || end == 0 { // the process was killed
			continue
		}
		e.endsInTime(o, a, end)
		r := e.revoked(a.id)
		switch {
		case errors.Is(a.ended, redismutex.ErrRevoked):
			if e.took(holderRevoked, true); r == nil || r.from > max(end, a.unlocked) {
				e.check(fmt.Errorf("want a lock ended with ErrRevoked only if it was revoked:\n\t%v", o))
			}
		case e.mood == calm && errors.Is(a.ended, redismutex.ErrLockLost) && o.Ended < o.Unlocking && r != nil && 2*r.ttl >= a.ttl:
			e.check(fmt.Errorf("want a revoked lock ended with ErrRevoked while Redis remembers, got %w:\n\t%v", a.ended, o))
		}
		if r == nil || r.to == 0 {
			continue
		}
		// Nothing renews it any more. If no call fails it learns of that at its next renewal; or at once, if it was renewed
		// before, so that its process listens.
		latest := a.ttl
		if !e.fails() {
			latest = a.ttl/2 + renewal
		}
		if e.mood == calm && a.got+int64(latest) < r.from {
			latest = queueing
		}
		if late := time.Duration(end-r.to) - latest; late > 0 && (len(e.nodes) == 1 || !e.fails()) && o.Got < r.to {
			e.check(fmt.Errorf("want a lock ended within %v after it was revoked at %v, it was %v later:\n\t%v", latest, time.Duration(r.to), late, o))
		}
	}
}

// endsInTime checks a lock against the bound of WithMaxHold.
func (e *era) endsInTime(o *history.Op, a *attempt, end int64) {
	const instant = int64(time.Microsecond) // the events of an instant are recorded some nanoseconds apart
	held := end - a.got                     // a downgraded lock counts from its grant
	if e.took(heldTooLong, a.most > 0 && held >= int64(a.most)); a.most > 0 {
		e.injected(heldTooLong)
	}
	switch tooLong := errors.Is(a.ended, redismutex.ErrMaxHold); {
	case a.most > 0 && held > int64(a.most)+instant && !a.orphan:
		e.check(fmt.Errorf("want a lock ended after %v, it was after %v:\n\t%v", a.most, time.Duration(held), o))
	case tooLong && (a.most == 0 || a.unlocked-a.got < int64(a.most)-instant):
		e.check(fmt.Errorf("want a lock ended with ErrMaxHold after %v (0: never), it was after %v:\n\t%v", a.most, time.Duration(held), o))
	}
}

// occupies returns until when an acquisition held the lock of p on the server, as far as a waiter for it needs to know: its
// own process may not know yet that it was revoked.
func (e *era) occupies(i int, p, waiter *history.Op) int64 {
	a := e.attempts[i]
	until := cmp.Or(p.Unlocking, p.Ended, p.Until) // it is held until it is unlocked, even if its parent context has ended
	if a.most > 0 {
		until = min(until, a.got+int64(a.most+a.ttl))
	}
	if r := e.revoked(a.id); r != nil && r.to != 0 && (p.Queue == "" || p.Queue != waiter.Queue) {
		until = min(until, r.to)
	}
	return until
}

// sighted checks that what was told of the locks is possible, and that nobody is missing.
func (e *era) sighted(ops []history.Op) {
	for _, s := range e.operators.sights {
		for _, told := range s.participants() {
			if !e.possible(ops, s, told) {
				e.check(fmt.Errorf("want nobody named who neither holds nor waits, %+v is, of %v, between %v and %v",
					told, e.nameOf(told.ID), time.Duration(s.from), time.Duration(s.to)))
			}
		}
		if s.state == nil || e.mood == lossy || len(e.nodes) > 1 && (e.mood != calm || !s.all()) {
			continue
		}
		for i := range ops {
			o, a := &ops[i], e.attempts[i]
			from, to, ok := o.Held()
			if !ok || o.Key != s.key || from > s.from || to < s.to {
				continue
			}
			holds := slices.ContainsFunc(s.state.Holders, func(p redismutex.Participant) bool { return e.acquisition(p.ID) == a.id })
			switch {
			case !holds:
				e.check(fmt.Errorf("want a holder named, it was not between %v and %v:\n\t%v\n%v", time.Duration(s.from), time.Duration(s.to), o, s.state))
			case a.write && s.state.Token/locksOfAToken != a.token/locksOfAToken:
				e.check(fmt.Errorf("want the token of the writer, got %d:\n\t%v", s.state.Token, o))
			}
		}
	}
}

// locksOfAToken is how many locks a process may pass on under one token of the server.
const locksOfAToken = 1024

// all reports whether all nodes have answered.
func (s *sight) all() bool {
	return !slices.ContainsFunc(s.state.Nodes, func(n redismutex.NodeState) bool { return n.Err != nil })
}

// A named participant is one that a sight names.
type named struct {
	redismutex.Participant
	as string
}

const (
	asHolder = "holder"
	asWaiter = "waiter"
	asEither = "in the way"
)

func (s *sight) participants() (ps []named) {
	if s.state == nil {
		return []named{{redismutex.Participant{ID: s.holder}, asEither}}
	}
	for _, p := range s.state.Holders {
		ps = append(ps, named{p, asHolder})
	}
	for _, p := range s.state.Waiters {
		ps = append(ps, named{p, asWaiter})
	}
	return ps
}

func (e *era) nameOf(id string) string {
	if p := e.processOf(id); p != nil {
		return p.name
	}
	return "nobody"
}

// possible reports whether a process may have held the lock, or waited for it, when a sight named it.
func (e *era) possible(ops []history.Op, s *sight, told named) bool {
	by, acquisition := e.processOf(told.ID), e.acquisition(told.ID)
	if r := e.revoked(acquisition); r != nil && r.to != 0 && r.to < s.from && !e.fails() && s.state != nil {
		return false
	}
	known := !e.fails() && slices.ContainsFunc(e.attempts, func(a *attempt) bool { return a.id == acquisition })
	for i := range ops {
		o, a := &ops[i], e.attempts[i]
		if a.by != by || a.key != s.key || o.Asked > s.to || e.stands(o, a) < s.from {
			continue
		}
		switch {
		case told.as == asHolder && known && a.id != acquisition: // another one of its process
		case told.as == asHolder && !told.Write && a.write: // a read acquisition serves readers
		case told.as == asWaiter && len(e.nodes) == 1 && (a.try || a.write != told.Write || !e.fails() && o.Got != 0 && o.Got+int64(queueing) < s.from):
		default:
			return true
		}
	}
	return slices.ContainsFunc(e.operators.inner, func(c *innerCall) bool {
		return c.by == by && c.key == s.key && c.from <= s.to && s.from <= c.to+int64(queueing)
	})
}

// stands returns until when what an attempt has asked for may have stood in Redis. It is released in the background if it
// is given up.
func (e *era) stands(o *history.Op, a *attempt) int64 {
	over := max(o.Asked, o.Got, o.Unlocking, o.Ended, o.Freed)
	switch {
	case !a.over:
		return math.MaxInt64
	case e.fails():
		return over + int64(doubt)
	}
	return over + int64(queueing)
}
