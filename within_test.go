package redismutex

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
)

// A wait that has run out names a holder or waiter, and leaves nothing in Redis.
func TestWaitThatRanOutNamesWhoIsInTheWay(t *testing.T) {
	for _, turn := range []MutexOption{WithTurn(DefaultTurn), WithTurn(0)} {
		inBubble(t, func(w *world) {
			m, other := NewMutex(w.client(nil), "x", turn), NewMutex(w.client(nil), "x", turn)
			for _, write := range []bool{true, false} {
				l := w.lock(m, true)
				ask := other.RLockContext
				if write {
					ask = other.LockContext
				}
				for _, wait := range []time.Duration{0, 3 * time.Second, 3 * DefaultTTL} {
					start := time.Now()
					_, err := ask(w.Context(), WithWait(wait))
					if took := time.Since(start); took != wait {
						w.Errorf("a wait of %v took %v", wait, took)
					}
					w.heldBy(err, l.ID())
					synctest.Wait()
					if waiting := w.queue(); len(waiting) != 0 {
						w.Errorf("after a wait of %v these wait on: %v", wait, waiting)
					}
				}
				w.unlock(l)
			}
		})
	}
}

// It takes no longer because the holder is of the same process, and so has the same client.
func TestWaitBehindTheOwnProcessEndsInTime(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		clients := ns.process()
		m, other := NewRedlock(clients, "x"), NewRedlock(clients, "x", WithTTL(2*DefaultTTL))
		for _, opt := range [][]LockOption{nil, {WithOwner("me")}} {
			l := ns.nested(ns.Context(), m, true, opt...)
			for _, wait := range []time.Duration{time.Second, 3 * DefaultTTL} {
				start := time.Now()
				_, err := other.LockContext(ns.Context(), WithWait(wait), WithOwner("another"))
				if took := time.Since(start); took != wait {
					ns.Errorf("a wait of %v took %v", wait, took)
				}
				var held *HeldError
				if ns.matches(err, ErrLock); !errors.As(err, &held) || node.AcquisitionOf(held.Holder) != node.AcquisitionOf(l.ID()) {
					ns.Errorf("want the holder %q, got: %v", l.ID(), err)
				}
			}
			ns.unlock(l)
		}
	})
}

// What is acquired in time is a lock like any other: only its context's parent bounds it.
func TestWaitBoundsTheWaitAndNotTheLock(t *testing.T) {
	inBubble(t, func(w *world) {
		m, other := NewMutex(w.client(nil), "x"), NewMutex(w.client(nil), "x")
		l := w.lock(m, true)
		time.AfterFunc(2*time.Second, func() { w.unlock(l) })
		for _, wait := range []time.Duration{3 * time.Second, time.Millisecond, 0} { // it waits; it is free
			got, err := other.LockContext(w.Context(), WithWait(wait))
			if err != nil {
				w.Fatalf("wait %v: %v", wait, err)
			}
			if _, bounded := got.Deadline(); bounded {
				w.Error("the lock has a deadline")
			}
			if redistest.Elapse(10 * time.Minute); got.Err() != nil {
				w.Errorf("the lock has ended: %v", context.Cause(got))
			}
			w.unlock(got)
		}
	})
}

func TestContextThatEndsBeforeTheWaitIsTheError(t *testing.T) {
	inBubble(t, func(w *world) {
		m, other := NewMutex(w.client(nil), "x"), NewMutex(w.client(nil), "x")
		l := w.lock(m, true)
		ctx, cancel := context.WithTimeout(w.Context(), time.Second)
		defer cancel()
		_, err := other.LockContext(ctx, WithWait(2*time.Second))
		w.matches(err, context.DeadlineExceeded)
		why := errors.New("the caller has left")
		ctx, stop := context.WithCancelCause(w.Context())
		time.AfterFunc(time.Second, func() { stop(why) })
		_, err = other.LockContext(ctx, WithWait(2*time.Second))
		if w.matches(err, context.Canceled); !errors.Is(err, why) {
			w.Errorf("the cause is missing: %v", err)
		}
		w.unlock(l)
	})
}

// A Redis that does not answer is not taken for a lock that others hold, and does not prolong the wait for long.
func TestWaitEndsAlthoughRedisDoesNotAnswer(t *testing.T) {
	inBubble(t, func(w *world) {
		l := w.lock(NewMutex(w.client(nil), "x"), true)
		m := NewMutex(w.client(w.link, func(o *redis.Options) { o.ReadTimeout = time.Hour }), "x")
		for _, since := range []string{"the wait", "the first call"} {
			if since == "the wait" {
				time.AfterFunc(time.Second, func() { w.link.Hole(true, true) })
			}
			start := time.Now()
			_, err := m.LockContext(w.Context(), WithWait(2*time.Second))
			if took := time.Since(start); took != 2*time.Second+lastTry {
				w.Errorf("no answer since %s: it took %v", since, took)
			}
			w.matches(err, ErrRedis)
		}
		w.unlock(l)
	})
}

func TestWaitIsRefusedWhereItMakesNoSense(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		_, err := m.LockContext(w.Context(), WithWait(-1))
		w.matches(err, ErrInvalid)
		for _, try := range []func(context.Context, ...LockOption) (*Lock, error){m.TryLockContext, m.TryRLockContext} {
			_, err := try(w.Context(), WithWait(time.Second))
			w.matches(err, ErrInvalid)
		}
	})
}

// With several nodes as with one.
func TestWaitOverSeveralNodesNamesTheHolder(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		l := ns.lock(ns.mutex(), true)
		m := ns.mutex()
		start := time.Now()
		_, err := m.LockContext(ns.Context(), WithWait(2*time.Second))
		var held *HeldError
		if ns.matches(err, ErrLock); !errors.As(err, &held) || node.AcquisitionOf(held.Holder) != node.AcquisitionOf(l.ID()) {
			ns.Errorf("want the holder %q, got %+v: %v", l.ID(), held, err)
		}
		if took := time.Since(start); took != 2*time.Second {
			ns.Errorf("a wait of 2 s took %v", took)
		}
		ns.unlock(l)
	})
}

// An endsAt is a context that has been canceled at an instant, and closes Done later.
type endsAt struct {
	context.Context
	at time.Time
}

func (c endsAt) Err() error {
	if time.Now().Before(c.at) {
		return nil
	}
	return context.Canceled
}

// Promise 10: errors of a context are those of the caller's own.
func TestWaitThatEndsWithTheContextReturnsItsError(t *testing.T) {
	inBubble(t, func(w *world) {
		m, other := NewMutex(w.client(nil), "x"), NewMutex(w.client(nil), "x")
		l := w.lock(m, true)
		why := errors.New("the caller has left")
		for _, wait := range []time.Duration{time.Millisecond, time.Second, time.Second + lastTry} {
			for range 200 {
				ctx, cancel := context.WithCancelCause(w.Context())
				time.AfterFunc(wait, func() { cancel(why) })
				_, err := other.LockContext(ctx, WithWait(time.Second))
				if errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ErrLock) && !errors.Is(err, why) {
					w.Fatalf("wait %v: %v", wait, err)
				}
			}
		}
		_, err := other.LockContext(endsAt{w.Context(), time.Now().Add(time.Second)}, WithWait(time.Second))
		w.matches(err, context.Canceled)
		w.unlock(l)
	})
}

// A lock that is free is not refused because of the caller's own request.
func TestWaitShorterThanARoundTripDoesNotStandInItsOwnWay(t *testing.T) {
	for _, turn := range []MutexOption{WithTurn(DefaultTurn), WithTurn(0)} {
		inBubble(t, func(w *world) {
			m := NewMutex(w.client(w.link), "x", turn)
			w.unlock(w.lock(m, true))
			w.link.SetDelay(4 * time.Millisecond)
			for _, wait := range []time.Duration{1, 2 * time.Millisecond, 6 * time.Millisecond} {
				l, err := m.LockContext(w.Context(), WithWait(wait))
				if err != nil {
					w.Errorf("wait %v: %v", wait, err)
				} else {
					w.unlock(l)
				}
				redistest.Elapse(time.Minute)
			}
		})
	}
}
