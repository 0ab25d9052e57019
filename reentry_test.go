package redismutex

// A context or an owner that has a lock gets it again at once, and nobody else does. Time is virtual, on one node and
// on five.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/localqueue"
	"github.com/redismutex/redismutex/internal/redistest"
)

func onOneAndFive(t *testing.T, f func(*nodes)) {
	t.Helper()
	for _, n := range []int{1, 5} {
		onNodes(t, n, f)
	}
}

// nested locks within ctx, and fails if that has to wait.
func (w *world) nested(ctx context.Context, m *RWMutex, write bool, opt ...LockOption) *Lock {
	w.Helper()
	start := time.Now()
	l, err := verb(m, write)(ctx, opt...)
	if err != nil {
		w.Fatal(err)
	}
	if took := time.Since(start); took != 0 {
		w.Fatalf("it took %v, want no time", took)
	}
	return l
}

// some is the key of a value in a context; noContext is what a careless caller passes.
type some struct{}

var noContext context.Context

// verb returns LockContext or RLockContext.
func verb(m *RWMutex, write bool) func(context.Context, ...LockOption) (*Lock, error) {
	if write {
		return m.LockContext
	}
	return m.RLockContext
}

// try reports whether another process could get the lock.
func (ns *nodes) try(write bool) bool {
	ns.Helper()
	ask := ns.mutex().TryRLockContext
	if write {
		ask = ns.mutex().TryLockContext
	}
	l, err := ask(ns.Context())
	if err == nil {
		ns.unlock(l)
		synctest.Wait()
	} else if !errors.Is(err, ErrLock) {
		ns.Error(err)
	}
	return err == nil
}

// A call with the context of a lock gets that lock again without a command, even if others wait.
func TestLockIsReentrantThroughItsContext(t *testing.T) {
	for _, c := range []struct{ outer, inner bool }{{true, true}, {true, false}, {false, false}} {
		onOneAndFive(t, func(ns *nodes) {
			sent := &counter{}
			clients := ns.process(func(_ int, rc *redis.Client) { rc.AddHook(sent) })
			m := NewRedlock(clients, "x")
			slices.Reverse(clients)
			same := NewRedlock(clients, "x", WithTTL(time.Minute), WithLockIntent())
			outer := ns.lock(m, c.outer)
			next := ns.later(ns.mutex(), true)
			redistest.Elapse(time.Second)
			sent.reset()
			below, cancel := context.WithCancel(context.WithValue(outer, some{}, "value"))
			for _, m := range []*RWMutex{m, same} {
				inner := ns.nested(below, m, c.inner)
				if inner == outer || inner.ID() != outer.ID() || inner.Token() != outer.Token() || inner.Key() != outer.Key() {
					ns.Errorf("%q %d is not %q %d", inner.ID(), inner.Token(), outer.ID(), outer.Token())
				}
				if inner.Value(some{}) != "value" || !inner.Until().Equal(outer.Until()) {
					ns.Error("it is not what its context is")
				}
				ns.unlock(inner)
				if context.Cause(inner) != ErrUnlocked || outer.Err() != nil || below.Err() != nil {
					ns.Errorf("%v, %v", context.Cause(inner), outer.Err())
				}
			}
			if n, _ := sent.reset(); n != 0 {
				ns.Errorf("%d commands, want none", n)
			}
			cancel()
			ns.pending(next)
			ns.unlock(outer)
			ns.unlock(<-next)
			ns.empty()
		})
	}
}

// All calls are, with a context or as an option.
func TestEveryCallIsReentrant(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m := ns.mutex()
		outer := ns.lock(m, true)
		for _, call := range []func() (*Lock, bool){
			func() (*Lock, bool) { return m.Lock(WithContext(outer)) },
			func() (*Lock, bool) { return m.RLock(WithContext(outer)) },
			func() (*Lock, bool) { return m.TryLock(WithContext(outer)) },
			func() (*Lock, bool) { return m.TryRLock(WithContext(outer)) },
			func() (*Lock, bool) { l, err := m.TryLockContext(outer); return l, err == nil },
			func() (*Lock, bool) { l, err := m.TryRLockContext(outer); return l, err == nil },
		} {
			if l, ok := call(); !ok || l.ID() != outer.ID() {
				ns.Error("the call did not return the lock of its context")
			} else {
				ns.unlock(l)
			}
		}
		ns.unlock(outer)
	})
}

// A lock on another key or by other nodes is another lock.
func TestOnlyTheSameKeyOnTheSameNodesIsReentrant(t *testing.T) {
	onNodes(t, 5, func(ns *nodes) {
		clients := ns.process()
		m := NewRedlock(clients, "x")
		outer := ns.lock(m, true)
		synctest.Wait() // all nodes have granted it
		for name, other := range map[string]*RWMutex{
			"another process": ns.mutex(),
			"fewer nodes":     NewRedlock(clients[:3], "x"),
			"one node":        NewMutex(clients[0], "x"),
			"a node besides":  NewRedlock(append(clients[:4:4], ns.process()[4]), "x"),
		} {
			if _, err := other.TryLockContext(outer); !errors.Is(err, ErrLock) {
				ns.Errorf("%s: %v", name, err)
			}
		}
		inner := ns.nested(outer, m, true, WithKey("y"))
		if inner.ID() == outer.ID() || inner.Token() == outer.Token() {
			ns.Error("another key is the same lock")
		}
		// Yet both are found from there.
		for _, opt := range [][]LockOption{nil, {WithKey("y")}} {
			ns.unlock(ns.nested(inner, m, true, opt...))
		}
		ns.unlock(inner)
		ns.unlock(outer)
	})
}

// The mode of the outermost lock decides: a write lock within a read lock would wait for itself.
func TestWriteInsideReadIsRefusedAtOnce(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m := ns.mutex()
		outer := ns.lock(m, false)
		inner := ns.nested(outer, m, false)
		for _, ctx := range []context.Context{outer, inner, context.WithoutCancel(inner)} {
			for _, ask := range []func(context.Context, ...LockOption) (*Lock, error){m.LockContext, m.TryLockContext} {
				l, err := ask(ctx)
				ns.matches(err, ErrUpgrade)
				if l != nil || !strings.Contains(err.Error(), `"x"`) {
					ns.Errorf("%v, %v", l, err)
				}
			}
		}
		if l, ok := m.TryLock(WithContext(outer)); l != nil || ok {
			ns.Error("a write lock within a read lock was granted")
		}
		if outer.Err() != nil || inner.Err() != nil || ns.try(true) || !ns.try(false) {
			ns.Error("the read lock has changed")
		}
		ns.unlock(inner)
		ns.unlock(outer)

		writer := ns.lock(m, true)
		reader := ns.nested(writer, m, false)
		ns.unlock(ns.nested(reader, m, true)) // the outermost writes
		ns.unlock(writer)
		ns.unlock(ns.nested(context.WithoutCancel(reader), m, true)) // and did
		ns.unlock(reader)
		ns.empty()
	})
}

// Promise 8: the lock is held until its last nested lock is unlocked, in whatever order.
func TestAcquisitionIsReleasedWithItsLastLock(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m := ns.mutex()
		for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}, {1, 2, 0}, {0, 2, 1}, {2, 0, 1}} {
			outer := ns.lock(m, true)
			locks := []*Lock{outer, ns.nested(outer, m, false), ns.nested(context.WithoutCancel(outer), m, true)}
			next := ns.later(ns.mutex(), true)
			for i, at := range order {
				l := locks[at]
				for range 10 {
					redistest.Elapse(DefaultTTL)
				}
				if ns.try(false) {
					ns.Fatalf("%v: another has it with %d of 3 unlocked", order, i)
				}
				ns.unlock(l)
				ns.matches(l.UnlockContext(ns.Context()), ErrUnlocked)
				l.Unlock()
			}
			for _, l := range locks {
				if context.Cause(l) != ErrUnlocked {
					ns.Error(context.Cause(l))
				}
			}
			ns.unlock(<-next)
			ns.empty()
		}
	})
}

// An unlock ends the contexts derived from the lock, not those above or beside it.
func TestUnlockEndsWhatDescendsFromIt(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m := ns.mutex()
		outer := ns.lock(m, true)
		middle, beside := ns.nested(outer, m, true), ns.nested(outer, m, true)
		inner := ns.nested(middle, m, true)
		ns.unlock(middle)
		if outer.Err() != nil || beside.Err() != nil || context.Cause(inner) != ErrUnlocked {
			ns.Errorf("%v, %v, %v", outer.Err(), beside.Err(), context.Cause(inner))
		}
		ns.unlock(inner)
		ns.unlock(outer)
		if context.Cause(beside) != ErrUnlocked || ns.try(true) {
			ns.Error(context.Cause(beside))
		}
		ns.unlock(beside)
	})
}

// Promises 2 and 10: a loss ends all nested locks, whatever their contexts descend from, in the moment that trust ends.
func TestLossEndsAllLocksOfAnAcquisition(t *testing.T) {
	for name, lose := range map[string]func(ns *nodes){
		"cut off": func(ns *nodes) {
			for _, l := range ns.links {
				l.Hole(true, true)
			}
		},
		"forgotten": func(ns *nodes) {
			for _, m := range ns.minis {
				m.FlushAll()
			}
		},
	} {
		onOneAndFive(t, func(ns *nodes) {
			m := ns.mutex(WithDriftFactor(0))
			outer := ns.lock(m, true)
			inner := ns.nested(outer, m, false)
			apart := ns.nested(context.WithoutCancel(outer), m, true)
			owned := ns.nested(outer, m, true, WithOwner("me"))
			unlocked := ns.nested(outer, m, true)
			ns.unlock(unlocked)
			gone := ns.nested(outer, m, true)
			ns.unlock(ns.nested(gone, m, true))
			lose(ns)
			until := outer.Until()
			locks := []*Lock{outer, inner, apart, owned, gone}
			for _, l := range locks {
				<-l.Done()
				if late := time.Since(until); late > 0 {
					ns.Errorf("%s: %v too late", name, late)
				}
				if !errors.Is(context.Cause(l), ErrLockLost) {
					ns.Errorf("%s: %v", name, context.Cause(l))
				}
			}
			_, err := m.LockContext(inner)
			if !errors.Is(err, ErrLockLost) || !errors.Is(err, context.Canceled) {
				ns.Error(err)
			}
			for _, l := range locks {
				for range 2 {
					ns.matches(l.UnlockContext(ns.Context()), ErrLockLost)
				}
			}
			ns.matches(unlocked.UnlockContext(ns.Context()), ErrUnlocked)
			for _, l := range ns.links {
				heal(l)
				l.Cut()
			}
			redistest.Elapse(time.Minute)
			again := ns.nested(context.WithoutCancel(outer), m, true) // an ordinary one
			if again.Token() <= outer.Token() {
				ns.Errorf("token %d after %d, want a higher one", again.Token(), outer.Token())
			}
			ns.unlock(again)
			ns.noOwners()
		})
	}
}

// After a pause nested locks end before any timer fires.
func TestNestedLockOfAPausedProcessEndsAtOnce(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		outer := w.lock(m, true)
		inner := w.nested(context.WithoutCancel(outer), m, true)
		endTrust(outer)
		if _, err := m.TryLockContext(context.WithoutCancel(inner)); !errors.Is(err, ErrLock) {
			t.Error(err) // ordinary: Redis does not know yet
		}
		if outer.Err() == nil || !errors.Is(context.Cause(inner), ErrLockLost) {
			t.Errorf("%v, %v", outer.Err(), context.Cause(inner))
		}
	})
}

// The context of an ended lock is done and has the reason as its cause. Without cancellation it is an ordinary context.
func TestEndedLockIsNotReentrant(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m := ns.mutex()
		outer := ns.lock(m, true)
		inner := ns.nested(outer, m, true)
		ns.unlock(inner)
		if _, err := m.LockContext(inner); !errors.Is(err, ErrUnlocked) || !errors.Is(err, context.Canceled) {
			ns.Error(err)
		}
		ns.unlock(ns.nested(context.WithoutCancel(inner), m, true)) // in the outer one
		ns.unlock(outer)
		if _, err := m.TryLockContext(outer); !errors.Is(err, ErrUnlocked) {
			ns.Error(err)
		}
		other := ns.lock(ns.mutex(), true)
		synctest.Wait()
		_, err := m.TryLockContext(context.WithoutCancel(inner))
		ns.matches(err, ErrLock)
		ns.unlock(other)
		own := ns.nested(context.WithoutCancel(inner), m, true)
		if own.ID() == outer.ID() {
			ns.Error("the new lock has the id of the one that was unlocked")
		}
		ns.unlock(own)
		ns.empty()
	})
}

// Nothing nests in a lock that is unlocked or lost while the call looks at it.
func TestNothingNestsInALockThatHasJustEnded(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		outer := w.lock(m, true)
		inner := w.nested(outer, m, true)
		nest := func(in *Lock) { // in was alive when it was looked for
			t.Helper()
			l := &Lock{core: &core{held: localqueue.NestedIn(&in.held)}}
			if err := l.open(request{m: m, ctx: w.Context(), write: true}, in.core, nil); err != acquisition.ErrRetry {
				t.Error(err)
			}
			if l.Err() == nil {
				t.Error("the context that was made for it is left")
			}
		}
		w.unlock(inner)
		nest(inner)
		endTrust(outer)
		nest(outer)
		w.matches(outer.UnlockContext(w.Context()), ErrLockLost)
	})
}

// A nested lock ends with the context of its own call. A lock whose parent has ended protects the cleanup, which may
// lock again.
func TestNestedLockHasAContextOfItsOwn(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m := ns.mutex()
		parent, cancel := context.WithCancelCause(ns.Context())
		outer, err := m.LockContext(parent)
		if err != nil {
			ns.Fatal(err)
		}
		below, timeout := context.WithTimeout(outer, time.Minute)
		defer timeout()
		inner := ns.nested(below, m, true)
		if deadline, ok := inner.Deadline(); !ok || time.Until(deadline) != time.Minute {
			ns.Errorf("%v, %v", deadline, ok)
		}
		redistest.Elapse(time.Minute)
		synctest.Wait()
		if inner.Err() != context.DeadlineExceeded || outer.Err() != nil {
			ns.Errorf("%v, %v", inner.Err(), outer.Err())
		}
		if _, err := m.LockContext(inner); !errors.Is(err, context.DeadlineExceeded) {
			ns.Error(err)
		}
		enough := errors.New("enough")
		cancel(enough)
		if _, err := m.LockContext(outer); !errors.Is(err, enough) {
			ns.Error(err)
		}
		ns.unlock(ns.nested(context.WithoutCancel(outer), m, true))
		ns.unlock(outer)
		if ns.try(true) {
			ns.Error("the inner lock is not held any more")
		}
		ns.unlock(inner)
		ns.empty()
	})
}

func TestNestingGoesDeep(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m := ns.mutex()
		locks := []*Lock{ns.lock(m, true)}
		for i := range 100 {
			locks = append(locks, ns.nested(locks[i], m, i%2 == 0))
		}
		redistest.Elapse(time.Minute)
		for i, l := range slices.Backward(locks) {
			if l.Err() != nil || ns.try(false) {
				ns.Fatalf("%d: %v", i, context.Cause(l))
			}
			ns.unlock(l)
		}
		ns.empty()
	})
}

// A thousand goroutines share one read lock while a writer waits for all of them.
func TestManyNestUnderOneReaderWhileWritersWait(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m := ns.mutex()
		outer := ns.lock(m, false)
		next := ns.later(ns.mutex(), true)
		redistest.Elapse(time.Second)
		var all sync.WaitGroup
		for i := range 1000 {
			all.Go(func() {
				l := ns.nested(context.WithoutCancel(outer), m, false)
				for range i % 10 {
					ns.unlock(ns.nested(l, m, false))
					redistest.Elapse(time.Second)
				}
				ns.unlock(l)
			})
		}
		redistest.Elapse(500 * time.Millisecond)
		ns.pending(next)
		ns.unlock(outer)
		left := time.Now()
		all.Wait()
		took := time.Since(left)
		writer := <-next
		if took != 8500*time.Millisecond || time.Since(left) != took {
			ns.Errorf("the last unlocked after %v, the writer wrote after %v", took, time.Since(left))
		}
		ns.unlock(writer)
		ns.empty()
	})
}

func TestFromContextReturnsTheLock(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m := ns.mutex()
		if l, ok := FromContext(ns.Context()); ok || l != nil {
			ns.Error("a lock was found in a context without one")
		}
		if _, ok := FromContext(noContext); ok {
			ns.Error("a lock was found in a context without one")
		}
		outer := ns.lock(m, true)
		inner := ns.nested(outer, m, false)
		for ctx, want := range map[context.Context]*Lock{
			outer:                        outer,
			inner:                        inner,
			context.WithoutCancel(inner): inner,
			context.WithValue(outer, some{}, "value"): outer,
		} {
			if l, ok := FromContext(ctx); !ok || l != want {
				ns.Errorf("%v, %v", l, ok)
			}
		}
		ns.unlock(inner)
		if l, ok := FromContext(inner); !ok || l != inner || l.Err() == nil {
			ns.Error("the unlocked lock is not found, or has not ended")
		}
		ns.unlock(outer)
	})
}

// Owners.

// noOwners checks that no owner is left in the registry.
func (w *world) noOwners() {
	w.Helper()
	synctest.Wait()
	owners.Lock()
	defer owners.Unlock()
	if n := len(owners.m); n > 0 {
		w.Errorf("%d owners are left", n)
	}
}

func TestLockIsReentrantForItsOwner(t *testing.T) {
	for _, c := range []struct{ outer, inner bool }{{true, true}, {true, false}, {false, false}, {false, true}} {
		onOneAndFive(t, func(ns *nodes) {
			sent, me := &counter{}, WithOwner("me")
			clients := ns.process(func(_ int, rc *redis.Client) { rc.AddHook(sent) })
			m, same := NewRedlock(clients, "x"), NewRedlock(clients, "x", WithTTL(time.Minute))
			outer := ns.nested(ns.Context(), m, c.outer, me)
			synctest.Wait()
			sent.reset()
			next := ns.later(ns.mutex(), true)
			if !c.outer && c.inner {
				_, err := same.LockContext(ns.Context(), me)
				ns.matches(err, ErrUpgrade)
			} else {
				inner := ns.nested(ns.Context(), same, c.inner, me)
				if inner.ID() != outer.ID() {
					ns.Error("it is another lock")
				}
				ns.unlock(outer) // two acquisitions need two releases
				ns.pending(next)
				if outer.Err() == nil || inner.Err() != nil {
					ns.Errorf("%v, %v", outer.Err(), inner.Err())
				}
				outer = ns.nested(ns.Context(), m, c.inner, me)
				ns.unlock(inner)
			}
			if n, _ := sent.reset(); n != 0 {
				ns.Errorf("%d commands, want none", n)
			}
			ns.pending(next)
			ns.unlock(outer)
			ns.unlock(<-next)
			ns.empty()
			ns.noOwners()
		})
	}
}

// An owner is reentrant only on its own key and in its own process; another owner is not, nor a call without one.
func TestOwnerIsLocalToItsProcessAndKey(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		const name = "the owner" // with a space, so that no random id contains it
		m, me := ns.mutex(), WithOwner(name)
		l := ns.nested(ns.Context(), m, true, me)
		synctest.Wait()
		for _, ask := range []func() (*Lock, error){
			func() (*Lock, error) { return m.TryLockContext(ns.Context(), WithOwner("you")) },
			func() (*Lock, error) { return m.TryLockContext(ns.Context()) },
			func() (*Lock, error) { return ns.mutex().TryLockContext(ns.Context(), me) },
		} {
			_, err := ask()
			ns.matches(err, ErrLock)
		}
		other := ns.nested(ns.Context(), m, true, me, WithKey("y"))
		if other.ID() == l.ID() {
			ns.Error("another key is the same lock")
		}
		for _, mini := range ns.minis {
			if strings.Contains(mini.Dump(), name) {
				ns.Error("Redis knows the owner")
			}
		}
		ns.unlock(other)
		ns.unlock(l)
		// Those that were refused are forgotten too.
		ns.noOwners()
		_, err := m.LockContext(ns.Context(), WithOwner(""))
		ns.matches(err, ErrInvalid)
	})
}

// When calls of one owner wait side by side, the first grant serves all of them.
func TestOwnerDoesNotWaitForItself(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m, me := ns.mutex(), WithOwner("me")
		holder := ns.lock(ns.mutex(), true)
		var got [5]*Lock
		var all sync.WaitGroup
		for i := range got {
			all.Go(func() {
				l, err := m.LockContext(ns.Context(), me)
				if err != nil {
					ns.Error(err)
				}
				got[i] = l
			})
			synctest.Wait()
		}
		after := ns.later(ns.mutex(), true)
		redistest.Elapse(time.Second)
		ns.unlock(holder)
		freed := time.Now()
		all.Wait() // and none of them has unlocked
		if took := time.Since(freed); took > time.Second {
			ns.Errorf("it took %v, want at most %v", took, time.Second)
		}
		ns.pending(after)
		for i, l := range got {
			if l.ID() != got[0].ID() {
				ns.Errorf("%d has another lock", i)
			}
			ns.unlock(l)
		}
		if took := time.Since(freed); took > time.Second {
			ns.Errorf("it took %v, want at most %v", took, time.Second)
		}
		ns.unlock(<-after)
		redistest.Elapse(DefaultTTL)
		ns.empty()
		ns.noOwners()
	})
}

// An owner's wait for the write lock ends when the owner gets a read lock: it would wait for itself.
func TestOwnersWriteWaitEndsWithErrUpgradeOnceItReads(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m, me := ns.mutex(), WithOwner("me")
		holder := ns.lock(ns.mutex(), true)
		reads := make(chan *Lock)
		go func() { reads <- ns.nested0(m, false, me) }()
		synctest.Wait()
		writes := make(chan error)
		go func() { _, err := m.LockContext(ns.Context(), me); writes <- err }()
		redistest.Elapse(time.Second)
		ns.unlock(holder)
		l := <-reads
		ns.matches(<-writes, ErrUpgrade)
		ns.unlock(l)
		redistest.Elapse(DefaultTTL)
		ns.empty()
		ns.noOwners()
	})
}

// nested0 is nested, but may wait.
func (w *world) nested0(m *RWMutex, write bool, opt ...LockOption) *Lock {
	l, err := verb(m, write)(w.Context(), opt...)
	if err != nil {
		w.Error(err)
	}
	return l
}

// Another Unlock, which does no harm, does not take from the owner what it has locked since.
func TestSecondUnlockForgetsNoLaterLockOfTheOwner(t *testing.T) {
	inBubble(t, func(w *world) {
		m, owner := NewMutex(w.client(nil), "x"), WithOwner("me")
		for _, write := range []bool{true, false} {
			first := w.nested(w.Context(), m, write, owner)
			w.unlock(first)
			second := w.nested(w.Context(), m, write, owner)
			w.matches(first.UnlockContext(w.Context()), ErrUnlocked)
			w.unlock(w.nested(w.Context(), m, write, owner, WithWait(time.Second))) // in the second
			w.unlock(second)
		}
		w.noOwners()
	})
}

// Of locks that are nested in each other and unlocked at once, one releases all, and none was lost.
func TestNestedLocksAreUnlockedAtOnce(t *testing.T) {
	for _, turn := range []MutexOption{WithTurn(DefaultTurn), WithTurn(0)} {
		inBubble(t, func(w *world) {
			m := NewMutex(w.client(nil), "x", turn)
			for range 500 {
				outer := w.lock(m, true)
				locks := []*Lock{outer}
				for range 7 {
					locks = append(locks, w.nested(outer, m, true))
				}
				var all sync.WaitGroup
				for _, l := range locks {
					all.Go(func() { w.unlock(l) })
				}
				all.Wait()
			}
		})
	}
}

// Calls of one owner look at each other's locks as these are granted. Only the race detector sees it if they may not.
func TestOwnersCallsMayComeAtOnce(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				for range 100 {
					w.unlock(w.nested0(m, true, WithOwner("me")))
				}
			})
		}
		all.Wait()
		w.noOwners()
	})
}

// An owner's wait ends with its context and leaves nothing.
func TestOwnersWaitEndsWithItsContext(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m := ns.mutex()
		holder := ns.lock(ns.mutex(), true)
		ctx, cancel := context.WithTimeout(ns.Context(), time.Second)
		defer cancel()
		_, err := m.LockContext(ctx, WithOwner("me"))
		if !errors.Is(err, context.DeadlineExceeded) {
			ns.Error(err)
		}
		ns.noOwners()
		ns.unlock(holder)
		redistest.Elapse(time.Second)
		ns.empty()
	})
}

// An owner given to a nested call has the lock until that nested lock is unlocked.
func TestOwnerWithinAContext(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m, me := ns.mutex(), WithOwner("me")
		outer := ns.lock(m, true)
		inner := ns.nested(outer, m, true, me)
		ns.unlock(ns.nested(ns.Context(), m, true, me))
		ns.unlock(inner)
		ns.noOwners()
		_, err := m.TryLockContext(ns.Context(), me)
		ns.matches(err, ErrLock)
		inner = ns.nested(ns.nested(outer, m, false), m, true, me)
		ns.unlock(ns.nested(ns.Context(), m, true, me))
		ns.unlock(inner)
		ns.noOwners()
	})
}

// Many owners on several keys: no two owners share a lock.
func TestOwnersExcludeEachOther(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		inside := map[string]string{}
		var mu sync.Mutex
		m := ns.mutex()
		var all sync.WaitGroup
		for i := range 24 {
			owner, key := fmt.Sprint(i%4), fmt.Sprint(i%2)
			all.Go(func() {
				for range 5 {
					l := ns.nested0(m, true, WithOwner(owner), WithKey(key))
					mu.Lock()
					if by, held := inside[l.ID()]; held && by != owner+key {
						ns.Errorf("%s has what %s has", owner+key, by)
					}
					inside[l.ID()] = owner + key
					mu.Unlock()
					redistest.Elapse(10 * time.Millisecond)
					ns.unlock(l)
				}
			})
		}
		all.Wait()
		redistest.Elapse(DefaultTTL)
		ns.noOwners()
	})
}

// A nested lock allocates a Lock and its context, and little else.
func TestNestedLockCostsNoCommandAndFourAllocations(t *testing.T) {
	ctx := context.Background()
	m := NewMutex(redistest.Start(t).Client(t), "x")
	outer, err := m.LockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer outer.Unlock()
	if n := testing.AllocsPerRun(1000, func() {
		l, err := m.LockContext(outer)
		if err != nil {
			t.Fatal(err)
		}
		l.Unlock()
	}); n > 4 {
		t.Errorf("%v allocations", n)
	}
}
