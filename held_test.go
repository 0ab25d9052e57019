package redismutex

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
)

// heldBy checks that err is a HeldError that names that id, and matches ErrLock alone.
func (w *world) heldBy(err error, id string) {
	w.Helper()
	var held *HeldError
	w.matches(err, ErrLock)
	switch {
	case !errors.As(err, &held):
		w.Errorf("no HeldError: %v", err)
	case held.Key != "x" || held.Holder != id || held.Process != node.ProcessOf(id) || held.Process == "" || !strings.Contains(err.Error(), id):
		w.Errorf("want the holder %q of %q, got %+v: %v", id, "x", held, err)
	}
}

// Promise 10: a refused try names the holder or waiter in its way, of another process or of its own.
func TestRefusedTryNamesWhoIsInTheWay(t *testing.T) {
	for _, local := range []bool{false, true} {
		for _, turn := range []MutexOption{WithTurn(DefaultTurn), WithTurn(0)} {
			inBubble(t, func(w *world) {
				here := w.client(nil)
				m, other := NewMutex(here, "x", turn), NewMutex(w.client(nil), "x", turn)
				if local {
					other = NewMutex(here, "x", turn)
				}
				try := func(write bool) error {
					ask := other.TryRLockContext
					if write {
						ask = other.TryLockContext
					}
					_, err := ask(w.Context())
					return err
				}
				l := w.lock(m, true)
				w.heldBy(try(true), l.ID())
				w.heldBy(try(false), l.ID())
				w.unlock(l)
				r := w.lock(m, false)
				w.heldBy(try(true), r.ID())
				next := w.later(m, true)
				synctest.Wait()
				waiting, err := w.Redis.SortedSet(m.keys.Intents())
				if err != nil || len(waiting) != 1 {
					w.Fatalf("%v, waiting: %v", err, waiting)
				}
				for intent := range waiting {
					w.heldBy(try(false), intent[1:])
				}
				w.heldBy(try(true), r.ID())
				w.unlock(r)
				w.unlock(<-next)
			})
		}
	}
}

// With several nodes, each node that refuses names its holder.
func TestRefusalOfSeveralNodesNamesTheHolder(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		l := ns.lock(ns.mutex(), true)
		_, err := ns.mutex().TryLockContext(ns.Context())
		var held *HeldError
		if ns.matches(err, ErrLock); !errors.As(err, &held) || node.AcquisitionOf(held.Holder) != node.AcquisitionOf(l.ID()) {
			ns.Errorf("want the holder %q, got %+v: %v", l.ID(), held, err)
		}
		ns.unlock(l)
	})
}

// Promise 10: Held tells whether a context is under a lock on a key, and if not, why.
func TestHeldKnowsTheLocksOfAContext(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m, other := ns.mutex(), ns.mutex()
		for _, write := range []bool{true, false} {
			outer := ns.lock(m, write)
			other, err := verb(other, true)(outer, WithKey("other"))
			if err != nil {
				ns.Fatal(err)
			}
			inner := ns.nested(other, m, write)
			below, cancel := context.WithCancel(context.WithValue(inner, some{}, "value"))
			for _, ctx := range []context.Context{outer, other, inner, below, context.WithoutCancel(below)} {
				if err := Held(ctx, "x"); err != nil {
					ns.Errorf("under the lock: %v", err)
				}
				ns.matches(Held(ctx, "y"), ErrNotHeld)
			}
			ns.matches(Held(ns.Context(), "x"), ErrNotHeld)
			ns.matches(Held(outer, "x:other"), ErrNotHeld)
			if err := Held(inner, "x:other"); err != nil {
				ns.Errorf("under the lock on the other key: %v", err)
			}
			cancel() // code that cleans up is protected still
			if err := Held(below, "x"); err != nil {
				ns.Errorf("in a context that has ended, with a lock that has not: %v", err)
			}
			ns.unlock(inner)
			if err := Held(below, "x"); err != nil {
				ns.Errorf("under the outer lock, with the inner one unlocked: %v", err)
			}
			ns.unlock(outer)
			ns.matches(Held(below, "x"), ErrUnlocked)
			ns.matches(Held(outer, "x"), ErrUnlocked)
			ns.unlock(other)
		}
		ns.matches(Held(noContext, "x"), ErrInvalid)
	})
}

// Held tells why the innermost lock has ended.
func TestHeldTellsWhyALockHasEnded(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x", WithMaxHold(time.Hour))
		for want, end := range map[error]func(*Lock){
			ErrUnlocked: w.unlock,
			ErrLockLost: func(l *Lock) { w.Redis.FlushAll() },
			ErrRevoked: func(l *Lock) {
				if err := m.Revoke(w.Context(), l.ID()); err != nil {
					w.Error(err)
				}
			},
			ErrMaxHold: func(*Lock) { redistest.Elapse(time.Hour) },
		} {
			l := w.lock(m, true)
			end(l)
			<-l.Done()
			synctest.Wait()
			w.matches(Held(l, "x"), want)
			l.Unlock()
		}
		outer := w.lock(m, true)
		inner, err := m.LockContext(outer)
		if err != nil {
			w.Fatal(err)
		}
		w.unlock(inner)
		w.Redis.FlushAll()
		<-outer.Done()
		w.matches(Held(inner, "x"), ErrUnlocked)
		w.matches(Held(outer, "x"), ErrLockLost)
	})
}

// Promise 2: after a stop of the process, Held knows that the lease has ended before any timer fires.
func TestHeldKnowsTheTimeBeforeTheTimers(t *testing.T) {
	inBubble(t, func(w *world) {
		l := w.lock(NewMutex(w.client(nil), "x"), true)
		endTrust(l) // as if the time had passed in a stop
		w.matches(Held(l, "x"), ErrLockLost)
		if l.ctx.Err() == nil {
			w.Error("the context of the lock has not ended")
		}
	})
}

func TestHeldAllocatesNothing(t *testing.T) {
	inBubble(t, func(w *world) {
		outer := w.lock(NewMutex(w.client(nil), "x"), true)
		ctx, cancel := context.WithTimeout(context.WithValue(outer, some{}, "value"), time.Minute)
		defer cancel()
		if n := testing.AllocsPerRun(100, func() {
			if Held(ctx, "x") != nil {
				w.Error("want it held")
			}
		}); n != 0 {
			w.Errorf("want no allocation, got %v", n)
		}
		w.unlock(outer)
	})
}
