// Package localqueue lets the goroutines of one process take turns under one acquisition: what Redis grants to the
// process, the process passes on among its own goroutines for a while, before others are served. The idea is lock
// cohorting (Dice, Marathe, Shavit, PPoPP 2012), bounded by time.
//
// # A turn
//
//	                        ┌───────────── the turn: 5 ms ─────────────┐
//	process A   pending ──► │ lock 1 │ lock 2 │ lock 3 │ … │ lock n    │ │ ──► [acquire for the head, release] ──► pending
//	                        grant                                      └─► the turn is over: lock n is the last
//	process B   pending ───────────────────────────────────────────────────► grant ──► its turn
//
// While a process holds, its goroutines wait here and not in Redis. When the turn is over and the last lock is unlocked,
// the acquisition is released; the one for the next goroutine goes in front, with the age of that request, and so takes
// the place in Redis that the request would have had.
//
// # The rules
//
//	T1   Requests with equal nodes, key, TTL, order, drift, node time-out, longest hold and turn share a queue
//	     (acquisition.Config.Init, enter). A strict request, and that of an owner, has one to itself (Alone).
//	T2   A lock is granted under an acquisition that is held, trusted, strong enough and in its turn (turn.serves). The
//	     head is served when its acquisition is granted, in any case.
//	T3   Under one acquisition there is one writer, or readers, or nobody (turn.serves).
//	T4   Nobody overtakes; by order of choice within its class (queue.line). Grant, loss and giving up are decided
//	     under the mutex of the queue; a request that is granted as its context ends returns the lock (queue.giveUp).
//	T5   A turn ends after its time, when little trust is left, or with the last of its tokens (turn.lasts).
//	T6   At most one acquisition waits in Redis, for the head, with the head's age (queue.choose).
//	T7   An acquisition without users that may not serve the head is released at once; the head's acquire goes in front
//	     (Lock.Unlock).
//	T8   When its turn is over, a read acquisition keeps its readers, and a write acquisition that has only readers is
//	     downgraded (queue.endTurns, turn.checkLater).
//	T9   A try is served if nobody waits, and fails without a call if it conflicts with a lock or a waiter of its queue;
//	     else it asks Redis, and begins no turn (queue.try).
//	T10  A token is the server's × 1024 + the number of the write lock under its acquisition (Lock.Token).
//	T11  A loss ends all locks under an acquisition, and the queue goes on (turn.OnLost). The first error ends all waits
//	     (queue.onAcquired), unless Redis has acknowledged something that stands for them (queue.choose). A hook or a
//	     logger that panics ends the wait of its own goroutine only (queue.acquire).
//	T12  An acquisition is renewed while one of its locks is not overdue. An overdue one ends the turn, and the head asks
//	     Redis without waiting for its end (Lock.MarkOverdue). A revoked acquisition ends all locks under it, as a loss does,
//	     or, if it waits, the wait of the head (queue.onAcquired).
//
// # Mutexes
//
// A queue has one mutex. It comes before that of an acquisition. One function, update, is called under it after every
// event: it serves the waiters that the rules allow, ends what is not used, and chooses which request stands in Redis. No
// foreign code (contexts, loggers, the client and its hooks) runs under it.
package localqueue

import (
	"cmp"
	"context"
	"sync"

	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
)

// A queue is the requests of this process for one key, those that wait and those that hold.
type queue struct {
	requests int32 // how many it has; guarded by the mutex of queues
	alone    bool  // it is that of one strict request, and none of queues; set once

	mu           sync.Mutex
	acknowledged bool  // since somebody waits, Redis has acknowledged something that stands for the waiters
	first        line  // the waiters of the class that goes first, by order of choice
	rest         line  // the other waiters
	pending      *turn // the acquisition that is made for the head; nil: none
	turns        *turn // the acquisitions that are held and may serve, the newest first

	aside map[*turn]struct{} // the others that are held: their turn is over, and they keep their readers, or a writer that is overdue
}

// acquire makes w wait until it is served, or will not be served, or ctx ends.
func (q *queue) acquire(ctx context.Context, w *waiter) error {
	q.mu.Lock()
	q.line(w).push(w)
	mine := q.update()
	if w.origin.Asked == 0 {
		w.origin.Asked = clock.Now()
	}
	// The head makes the request itself. If others that come later may go before it, another goroutine makes it: the head may
	// be served before the call returns.
	if q.head() != w || w.config.First(!w.write) {
		q.acquireInBackground(mine)
		mine = nil
	}
	q.mu.Unlock()
	returned := false
	defer func() {
		if returned {
			return
		}
		// A hook or a logger has panicked. What w has asked for has been withdrawn, and another one is made for the others.
		q.giveUp(w)
		if mine != nil {
			q.onAcquired(mine, acquisition.ErrRetry)
		}
	}()
	if mine != nil {
		err := mine.acq.Acquire(ctx)
		if err != nil && ctx.Err() != nil {
			q.giveUp(w)
			if err != acquisition.ErrWaiting {
				err = acquisition.ErrRetry // for the next one
			}
		}
		q.onAcquired(mine, err)
		mine = nil
	}
	err := q.wait(ctx, w)
	returned = true
	return err
}

// wait waits until w is served, or will not be served, or ctx ends.
func (q *queue) wait(ctx context.Context, w *waiter) error {
	q.mu.Lock()
	if !w.over {
		w.done = make(chan struct{})
	}
	q.mu.Unlock()
	if w.done != nil {
		if w.config.Trace != nil {
			w.config.Trace.Waiting(ctx, true)
		}
		select {
		case <-w.done:
		case <-ctx.Done():
			q.giveUp(w)
		}
	}
	if w.err == errGivenUp {
		return lockerr.Ended(ctx, w.keys.Name())
	}
	return w.err
}

// giveUp ends the wait of w, unless it is over: it may have been granted the lock a moment ago.
func (q *queue) giveUp(w *waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !w.over {
		q.end(w, errGivenUp)
		q.acquireInBackground(q.update())
	}
}

// try serves w at once or not at all. What it acquires begins no turn.
func (q *queue) try(ctx context.Context, w *waiter) error {
	if granted, err := q.tryLocally(w); granted || err != nil {
		return err
	}
	t := w.turn(q, true)
	if err := t.acq.Acquire(ctx); err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.push(t)
	err := q.grantAlone(t, w.lock)
	q.acquireInBackground(q.update())
	return err
}

// tryLocally grants w a lock if a turn allows it and nobody waits. It refuses w, with an error, if a lock or a waiter of this
// process is in the way. If neither, the caller asks Redis.
func (q *queue) tryLocally(w *waiter) (granted bool, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := clock.Now()
	waiting := q.head() != nil
	if q.line(w) == &q.first {
		waiting = !q.first.empty()
	}
	if !waiting {
		if t := q.turnFor(w, now); t != nil && q.grant(t, w.lock, w.write) {
			return true, nil
		}
	}
	excluded := waiting && (w.write || q.line(w) == &q.rest && (q.first.writes() || q.rest.writes()))
	t := q.conflicting(w, now)
	if t == nil && !excluded {
		return false, nil
	}
	return false, q.heldBy(w, t)
}

// conflicting returns an acquisition of this process whose locks exclude w, or nil.
func (q *queue) conflicting(w *waiter, now clock.Instant) *turn {
	excludes := func(t *turn) bool { return (t.users < 0 || w.write) && t.acq.Until() > now && t.acq.Lost() == nil }
	for t := q.turns; t != nil; t = t.next {
		if excludes(t) {
			return t
		}
	}
	for t := range q.aside {
		if excludes(t) {
			return t
		}
	}
	return nil
}

// heldBy returns the error of a try that t excludes. If t is nil, a waiter excludes it, and the error names the acquisition that
// the head waits for.
func (q *queue) heldBy(w *waiter, t *turn) error {
	if t == nil {
		t = cmp.Or(q.pending, q.turns)
	}
	id := ""
	if t != nil {
		id = t.acq.CurrentID()
	}
	return acquisition.Held(w.keys.Name(), id)
}

// line is where w waits.
func (q *queue) line(w *waiter) *line {
	if w.config.First(w.write) {
		return &q.first
	}
	return &q.rest
}

// head is the waiter that is served next, or nil.
func (q *queue) head() *waiter {
	if q.first.empty() {
		return q.rest.head()
	}
	return q.first.head()
}

// end ends the wait of w.
func (q *queue) end(w *waiter, err error) {
	q.line(w).remove(w)
	w.over, w.err = true, err
	if w.done != nil {
		close(w.done)
	}
}

// update is called after every event: an arrival, an unlock, a waiter that gives up, a grant, a loss, the end of a turn,
// a downgrade. It serves the waiters that the rules allow, ends what is not used, and chooses which request stands in
// Redis. It returns the acquisition that the caller must make, or nil.
func (q *queue) update() *turn {
	now := clock.Now()
	q.serve(now)
	q.endTurns(now)
	return q.choose(now)
}

// acquireInBackground makes an acquisition in the background.
func (q *queue) acquireInBackground(next *turn) {
	if next == nil {
		return
	}
	go func() {
		err := acquisition.ErrRetry // stays if a hook or a logger ends the goroutine
		defer func() { q.onAcquired(next, err) }()
		err = next.acq.Acquire(context.Background())
	}()
}

// behind makes a call behind the acquire of next. If a hook, a logger or a context panics meanwhile, another one is made.
func (q *queue) behind(next *turn, call func() error) error {
	go func() { q.onAcquired(next, next.acq.Wait(context.Background())) }()
	returned := false
	defer func() {
		if !returned {
			next.acq.Withdraw()
		}
	}()
	err := call()
	returned = true
	return err
}

// serve grants the lock to the head, and to the next one, while an acquisition may serve it.
func (q *queue) serve(now clock.Instant) {
	for w := q.head(); w != nil; w = q.head() {
		t := q.turnFor(w, now)
		if t == nil {
			return
		}
		if q.grant(t, w.lock, w.write) {
			q.end(w, nil)
		}
	}
}

// turnFor returns an acquisition that may serve w, or nil.
func (q *queue) turnFor(w *waiter, now clock.Instant) *turn {
	for t := q.turns; t != nil; t = t.next {
		if t.serves(w, now) {
			return t
		}
	}
	return nil
}

// grant grants l under t. If t has ended, grant drops it and returns false.
func (q *queue) grant(t *turn, l *Lock, write bool) bool {
	if t.acq.Use() != nil {
		q.drop(t)
		return false
	}
	g := l.grant
	if g.turn == nil { // others of its owner may be looking at that of a strict one
		g.turn = t
	}
	g.locks, g.number, g.write, g.wrote = 1, t.grants, write, write
	l.since, l.local = clock.Now(), t.ends != clock.Never && t.ends != clock.Past
	t.begin(g, l.since)
	t.add(l, write)
	return true
}

// grantAlone grants l under t, which was acquired for it alone: no turn begins.
func (q *queue) grantAlone(t *turn, l *Lock) error {
	t.ends = clock.Past
	if !q.grant(t, l, t.write) {
		return acquisition.ErrRetry
	}
	return nil
}

// push adds t to the acquisitions that are held.
func (q *queue) push(t *turn) { t.next, q.turns = q.turns, t }

// drop takes t out of the acquisitions that are held.
func (q *queue) drop(t *turn) {
	delete(q.aside, t)
	for at := &q.turns; *at != nil; at = &(*at).next {
		if *at == t {
			*at = t.next
			return
		}
	}
}

// putAside puts t, which is held, aside: it may serve nobody any more.
func (q *queue) putAside(t *turn) {
	q.drop(t)
	if q.aside == nil {
		q.aside = map[*turn]struct{}{}
	}
	q.aside[t] = struct{}{}
}

// endTurns ends acquisitions that have no users, and puts those aside that have only readers when their turn is over. A
// write acquisition is downgraded then, so that readers of others may join.
func (q *queue) endTurns(now clock.Instant) {
	for t := q.turns; t != nil; t = t.next {
		switch {
		case t.users == 0:
			q.drop(t)
			t.acq.Withdraw()
		case t.users < 0:
		case !t.lasts(now): // it has readers only; no event looks at it any more
			if t.write {
				t.write = false
				d := t.acq.BeginDowngrade()
				go func() { _ = d.Tell(context.Background(), nil) }() // renewals go on with what a node does not confirm
			}
			q.putAside(t)
		case t.write:
			t.checkLater(now)
		}
	}
}

// choose sees to it that an acquisition waits in Redis for the head, and for nobody else. While this process holds a write
// acquisition that is not put aside, nobody else can be granted the lock, and the age restores the place. It returns the one that
// the caller must make, or nil.
func (q *queue) choose(now clock.Instant) *turn {
	w, p := q.head(), q.pending
	if p != nil && (w == nil || w.write != p.write) {
		q.pending = nil
		if p.acq.Withdraw() {
			q.acknowledged = true
		}
	}
	if w == nil {
		q.acknowledged = false
		return nil
	}
	if q.pending != nil {
		return nil
	}
	for t := q.turns; t != nil; t = t.next {
		if t.write && t.acq.Lost() == nil { // its locks may not have been told of a loss yet
			q.acknowledged = true
			return nil
		}
	}
	t := w.turn(q, false)
	t.acq.Share(q.acknowledged)
	q.pending = t
	return t
}

// onAcquired handles the outcome of a pending acquisition.
func (q *queue) onAcquired(t *turn, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.pending != t: // it has been withdrawn
		t.acq.Withdraw()
		return
	case err == acquisition.ErrWaiting: // without the head that made it
		go func() { q.onAcquired(t, t.acq.Wait(context.Background())) }()
		return
	}
	q.pending = nil
	switch {
	case err == nil:
		q.acknowledged = true
		t.ends = clock.Never
		q.push(t)
	case lockerr.KindOf(err) == lockerr.ErrRevoked: // what waited for the head
		q.acknowledged = true
		if w := q.head(); w != nil {
			q.end(w, err)
		}
	case err != acquisition.ErrRetry: // Redis has not acknowledged any of the waits, so they would end one after the other
		for w := q.head(); w != nil; w = q.head() {
			q.end(w, err)
		}
	}
	q.acquireInBackground(q.update())
}

// onLost goes on without t, which was lost. Its locks count no more, and do not keep each other from the garbage collector.
func (q *queue) onLost(t *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.drop(t)
	t.scatter()
	if t.users != 0 {
		q.leave(t.acq.Config, t.acq.Keys, max(t.users, 1))
	}
	q.acquireInBackground(q.update())
}

// onTurnOver is called when a turn may be over.
func (q *queue) onTurnOver(t *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t.checking = false
	q.acquireInBackground(q.update())
}
