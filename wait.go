package redismutex

// This file answers: how does a waiter get its lock?

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// A waiter stands in the queue under one id. Its caller sleeps on signal;
// the mailbox and the keeper tell it what happens.
type waiter struct {
	lock   *Lock
	signal chan struct{} // holds one

	mu      sync.Mutex
	granted bool
	token   uint64
	void    error // why the id is of no use any more: a void
	failing bool  // the last call failed, and the log knows
}

// A void ends an id, not the wait: the waiter enters anew under another one.
type void struct{ error }

func (v void) Unwrap() error { return v.error }

func isVoid(err error) bool {
	_, is := err.(void)
	return is
}

// wait waits until r is granted or its context ends. The first error is
// returned; once it has stood in the queue it outlives them.
func (m *RWMutex) wait(r request) (*Lock, error) {
	const minBackoff, maxBackoff = 10 * time.Millisecond, time.Second
	key, stood := r.keys.holder, false
	for failed := 0; ; failed++ {
		l, standing, err := m.stand(r)
		if err == nil {
			return l, nil
		}
		stood = stood || standing
		switch {
		case r.ctx.Err() != nil:
			return nil, ended(r.ctx, key)
		case isVoid(err):
		case !stood || !errors.Is(err, ErrRedis):
			return nil, err
		}
		if standing {
			failed = 0
		}
		if failed == 0 {
			m.log().error("a waiter enters anew", err)
			continue
		}
		backoff := time.NewTimer(min(minBackoff<<min(failed, 10), maxBackoff))
		select {
		case <-backoff.C:
		case <-r.ctx.Done():
			backoff.Stop()
		}
	}
}

// stand enters the queue under a new id, and says whether it stood there.
func (m *RWMutex) stand(r request) (_ *Lock, stood bool, _ error) {
	l := m.newLock(r)
	s, keeper := &l.stake, &m.ep.keeper
	w := &waiter{lock: l, signal: make(chan struct{}, 1)}

	// A message may overtake the reply to the enter: the mailbox is open, and
	// the waiter known to it, before that is sent.
	settled := m.ep.box.Join(s.n, w)
	defer m.ep.box.Leave(s.n)
	if !m.settle(r, settled) {
		return nil, false, ended(r.ctx, r.keys.holder)
	}

	start := now()
	reply, err := s.enter(r.ctx, false)
	if err != nil || reply.status != granted && reply.status != waiting {
		return nil, false, l.refused(r, start, reply, err)
	}
	l.answered(start)
	if reply.status == granted {
		if err := l.hold(r, start, reply); err != nil {
			return nil, true, err
		}
		return l, true, nil
	}
	if m.trusted(start) <= now() {
		return nil, true, l.late()
	}
	keeper.add(s, standing, w, start, reply)
	for {
		select {
		case <-w.signal:
			got, err := w.check(r)
			if err != nil {
				keeper.leave(s)
				return nil, true, err
			}
			if got {
				return l, true, nil
			}
		case <-r.ctx.Done():
			keeper.leave(s)
			return nil, true, ended(r.ctx, r.keys.holder)
		}
	}
}

// settle waits until the mailbox hears, or for so long that it is better to
// look than to listen. It is false if the context ended.
func (m *RWMutex) settle(r request, settled <-chan struct{}) bool {
	select {
	case <-settled:
		return true
	default:
	}
	patience := time.NewTimer(min(m.ttl/4, time.Second))
	defer patience.Stop()
	select {
	case <-settled:
	case <-patience.C:
	case <-r.ctx.Done():
		return false
	}
	return true
}

// check says whether the waiter has the lock. A grant runs with the lease that
// the waiter had when it came, so with little of that left it is kept first.
func (w *waiter) check(r request) (got bool, _ error) {
	w.mu.Lock()
	granted, token, ended := w.granted, w.token, w.void
	w.mu.Unlock()
	l := w.lock
	m := l.stake.m
	keeper := &m.ep.keeper
	switch {
	case ended != nil:
		return false, ended
	case !granted:
		return false, nil
	case l.until() < now().add(m.ttl/4):
		keeper.look(&l.stake)
		return false, nil
	}
	l.token = token
	l.descend(r.ctx)
	if !keeper.handOver(&l.stake, l) {
		l.cancel(ErrLockLost)
		return false, nil // and void says why, in a moment
	}
	return true, nil
}

func (w *waiter) wake() {
	select {
	case w.signal <- struct{}{}:
	default:
	}
}

// The mailbox tells.

func (w *waiter) Granted(token uint64) {
	w.mu.Lock()
	w.granted, w.token = true, token
	w.mu.Unlock()
	w.wake()
}

func (w *waiter) Key() string { return w.lock.Key() }

func (w *waiter) Look() { w.lock.stake.m.ep.keeper.look(&w.lock.stake) }

func (w *waiter) Deaf(err error) {
	w.lock.stake.m.log().error("redismutex: the subscription failed, so waiters look for themselves until it is back", err)
}

// The keeper tells.

func (w *waiter) kept(r reply) {
	w.mu.Lock()
	w.failing = false
	if r.status == granted {
		w.granted, w.token = true, uint64(r.value)
	}
	granted := w.granted // a "waiting" that arrives after the grant is old
	w.mu.Unlock()
	if granted {
		w.wake()
	}
}

func (w *waiter) unsure(err error) {
	w.mu.Lock()
	logged := w.failing
	w.failing = true
	w.mu.Unlock()
	if !logged {
		w.lock.stake.m.log().error("a waiter goes on", doing("keep", w.lock.Key(), err))
	}
}

func (w *waiter) over(why error) {
	w.lock.stake.bury = true
	w.mu.Lock()
	w.void = void{fmt.Errorf("redismutex: lock %q: %w", w.lock.Key(), why)}
	w.mu.Unlock()
	w.wake()
}

// What comes of an enter.

// answered notes whether the enter, begun at start, may have been sent twice.
func (l *Lock) answered(start instant) {
	l.stake.bury = time.Duration(now()-start) >= l.stake.m.ep.resend
}

// hold makes l a lock that was granted by a call begun at start.
func (l *Lock) hold(r request, start instant, reply reply) error {
	m := l.stake.m
	if m.trusted(start) <= now() {
		return l.late()
	}
	l.token = uint64(reply.value)
	l.descend(r.ctx)
	m.ep.keeper.add(&l.stake, holding, l, start, reply)
	return nil
}

func (l *Lock) descend(ctx context.Context) {
	l.ctx, l.cancel = context.WithCancelCause(ctx)
	l.stake.m.ep.inspect(l.stake.m.log())
}

// late gives up an id whose enter was answered when its lease had ended.
func (l *Lock) late() error {
	l.stake.bury = true
	l.stake.m.ep.keeper.leave(&l.stake)
	return void{redisError(fmt.Errorf("lock %q: the reply took longer than the TTL of %v", l.Key(), l.stake.m.ttl))}
}

// refused is the error for an enter, begun at start, that led to nothing. It
// sees to it that nothing comes of it later.
func (l *Lock) refused(r request, start instant, reply reply, err error) error {
	key := l.Key()
	switch {
	case reply.status == foreign:
		kind, data, _ := strings.Cut(reply.data, ":")
		return fmt.Errorf("%w: %q, a %s", ErrNotLock, data, kind)
	case errors.Is(err, ErrNotLock):
		return doing("lock", key, err)
	}
	l.answered(start)
	if err != nil {
		l.stake.bury = true
	}
	if l.stake.bury {
		l.stake.m.ep.keeper.leave(&l.stake)
	}
	switch {
	case err == errInterrupted:
		return ended(r.ctx, key)
	case err != nil:
		return doing("lock", key, err)
	case reply.status == busy:
		return fmt.Errorf("%w: %q", ErrLock, key)
	}
	return void{redisError(fmt.Errorf("lock %q: unexpected status %d", key, reply.status))}
}
