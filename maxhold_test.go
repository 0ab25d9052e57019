package redismutex

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/redismutex/redismutex/internal/redistest"
)

// maxHold is longer than a lease, so that a lock is renewed before it is over.
const maxHold = 10 * DefaultTTL

// overdue checks that a lock has ended because it was held for too long.
func (w *world) overdue(l *Lock) {
	w.Helper()
	synctest.Wait()
	if l.Err() == nil {
		w.Error("the lock goes on")
	}
	w.matches(context.Cause(l), ErrMaxHold)
	w.matches(l.Downgrade(w.Context()), ErrMaxHold)
}

// The context ends at that instant, one line in the log says why, and another process is granted the lock a TTL later at the
// latest although the holder never unlocks it.
func TestLockThatIsHeldForTooLongEnds(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		for _, turn := range []MutexOption{WithTurn(DefaultTurn), WithTurn(0)} {
			for _, kind := range []string{"writer", "reader", "downgraded"} {
				log := new(redistest.Log)
				m, other := ns.mutex(turn, WithMaxHold(maxHold), WithLogger(log.Logger())), ns.mutex(turn)
				l := ns.lock(m, kind != "reader")
				if kind == "downgraded" {
					ns.downgrade(l)
				}
				next := ns.later(other, true)
				for i, link := range ns.links { // the leases end one after the other
					link.SetDelay(time.Duration(i) * time.Millisecond)
				}
				start := time.Now()
				<-l.Done()
				if took := time.Since(start); took != maxHold {
					ns.Errorf("%s: its context ended after %v, want %v", kind, took, maxHold)
				}
				ns.overdue(l)
				if log.Count("held for too long") != 1 || log.Count("key=x") != 1 || log.Count("not unlocked in 40s") != 1 {
					ns.Errorf("%s: want a line in the log that names the key, got:\n%v", kind, log)
				}
				ns.pending(next)
				got := ns.within(DefaultTTL, next)
				synctest.Wait() // the holder has logged the end of its lease
				if n := log.Count(""); n != 2 || log.Count("held for too long") != n {
					ns.Errorf("%s: want another line, that its lease has ended, got:\n%v", kind, log)
				}
				ns.matches(l.UnlockContext(ns.Context()), ErrMaxHold)
				ns.unlock(got)
				for _, link := range ns.links {
					link.SetDelay(0)
				}
			}
		}
	})
}

// Unlock frees it at once, and returns why it had ended.
func TestUnlockOfAnOverdueLockFreesIt(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		for _, turn := range []MutexOption{WithTurn(DefaultTurn), WithTurn(0)} {
			for _, write := range []bool{true, false} {
				m, other := ns.mutex(turn, WithMaxHold(maxHold)), ns.mutex(turn)
				l := ns.lock(m, write)
				mine, others := ns.later(m, true), ns.later(other, true)
				<-l.Done()
				ns.pending(mine)
				ns.pending(others)
				ns.matches(l.UnlockContext(ns.Context()), ErrMaxHold)
				ns.matches(l.UnlockContext(ns.Context()), ErrUnlocked)
				ns.unlock(ns.granted(mine, "the lock was unlocked"))
				ns.unlock(ns.granted(others, "the lock was unlocked"))
			}
		}
	})
}

// A lock that is unlocked in time has no timer any more, and none ends a later one.
func TestLockThatIsUnlockedInTimeIsNotOverdue(t *testing.T) {
	inBubble(t, func(w *world) {
		log := new(redistest.Log)
		m := NewMutex(w.client(nil), "x", WithMaxHold(maxHold), WithLogger(log.Logger()))
		for range 3 {
			l := w.lock(m, true)
			redistest.Elapse(maxHold - time.Millisecond)
			w.unlock(l)
			w.matches(context.Cause(l), ErrUnlocked)
		}
		redistest.Elapse(2 * maxHold)
		if log.Count("") != 0 {
			w.Errorf("want nothing in the log, got:\n%v", log)
		}
	})
}

// It is the lock that is bounded, and not the context that it was acquired with: a lock goes on after its parent has ended.
func TestHoldIsBoundedAfterTheParentHasEnded(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x", WithMaxHold(maxHold))
		ctx, cancel := context.WithCancel(w.Context())
		l, err := m.LockContext(ctx)
		if err != nil {
			w.Fatal(err)
		}
		cancel()
		redistest.Elapse(maxHold - time.Millisecond)
		if !w.Redis.Exists("x") {
			w.Error("it was released when its parent ended")
		}
		redistest.Elapse(DefaultTTL)
		synctest.Wait()
		if w.Redis.Exists("x") {
			w.Error("it is still renewed")
		}
		w.matches(context.Cause(l), context.Canceled)
		w.matches(l.UnlockContext(w.Context()), ErrMaxHold)
	})
}

// Nested locks count from the outermost, by whatever mutex and however they are nested.
func TestNestedLocksCountFromTheOutermost(t *testing.T) {
	for _, turn := range []MutexOption{WithTurn(DefaultTurn), WithTurn(0)} {
		inBubble(t, func(w *world) {
			rc := w.client(nil)
			bounded, free := NewMutex(rc, "x", turn, WithMaxHold(maxHold)), NewMutex(rc, "x", turn)
			longer := NewMutex(rc, "x", turn, WithMaxHold(2*maxHold))
			owned := WithOwner("me")
			outer := w.nested(w.Context(), bounded, true, owned)
			start := time.Now()
			redistest.Elapse(maxHold / 2)
			locks := []*Lock{outer, w.nested(w.Context(), bounded, true, owned), w.nested(w.Context(), free, false, owned),
				w.nested(context.WithoutCancel(outer), free, true), w.nested(context.WithoutCancel(outer), longer, true)}
			for _, l := range locks {
				<-l.Done()
				if took := time.Since(start); took != maxHold {
					w.Errorf("it ended after %v, want %v", took, maxHold)
				}
				w.overdue(l)
			}
			for _, l := range locks {
				w.matches(l.UnlockContext(w.Context()), ErrMaxHold)
			}
			// A bound of the inner one's mutex that is shorter, or the only one, ends the inner one.
			for _, m := range []*RWMutex{free, longer} {
				outer = w.lock(m, true)
				redistest.Elapse(maxHold / 2)
				inner := w.nested(context.WithoutCancel(outer), bounded, true)
				redistest.Elapse(maxHold/2 - time.Millisecond)
				if inner.Err() != nil {
					w.Error("it ended too early")
				}
				redistest.Elapse(time.Millisecond)
				w.overdue(inner)
				redistest.Elapse(maxHold / 2)
				if outer.Err() != nil {
					w.Errorf("the outer one has ended: %v", context.Cause(outer))
				}
				w.matches(inner.UnlockContext(w.Context()), ErrMaxHold)
				w.unlock(outer)
			}
		})
	}
}

// T12: it is renewed while a reader under it is not overdue, and an overdue one ends the turn.
func TestOverdueReaderEndsItsTurnAndNotTheOthers(t *testing.T) {
	inBubble(t, func(w *world) {
		const turn = DefaultTTL / 4
		m, other := NewMutex(w.client(nil), "x", WithTurn(turn), WithMaxHold(turn/2)), NewMutex(w.client(nil), "x")
		first := w.lock(m, false)
		redistest.Elapse(turn / 4)
		second := w.lock(m, false)
		if first.ID() != second.ID() {
			w.Fatal("the readers do not share an acquisition")
		}
		<-first.Done()
		w.overdue(first)
		if second.Err() != nil {
			w.Errorf("the other one has ended, too: %v", context.Cause(second))
		}
		third := w.lock(m, false)
		if third.ID() == first.ID() {
			w.Error("the turn goes on")
		}
		w.unlock(third)
		w.unlock(second)
		next := w.later(other, true)
		w.pending(next)
		w.unlock(w.within(DefaultTTL, next))
		w.matches(first.UnlockContext(w.Context()), ErrMaxHold)
	})
	inBubble(t, func(w *world) { // for several leases
		const turn = DefaultTTL / 4
		m, long := NewMutex(w.client(nil), "x", WithTurn(turn), WithMaxHold(maxHold)), 3*DefaultTTL
		first := w.lock(m, false)
		redistest.Elapse(turn / 2)
		second := w.lock(m, false)
		<-first.Done()
		redistest.Elapse(turn/2 - time.Millisecond)
		if second.Err() != nil || first.ID() != second.ID() {
			w.Errorf("the other one has ended, too: %v", context.Cause(second))
		}
		<-second.Done()
		w.overdue(second)
		redistest.Elapse(long)
		w.empty()
	})
	inBubble(t, func(w *world) { // nested in one of two readers that share an acquisition
		rc := w.client(nil)
		free, bounded := NewMutex(rc, "x"), NewMutex(rc, "x", WithMaxHold(maxHold))
		first, second := w.lock(free, false), w.lock(free, false)
		nested := w.nested(context.WithoutCancel(second), bounded, false)
		w.unlock(first)
		<-nested.Done()
		w.overdue(nested)
		redistest.Elapse(3 * DefaultTTL)
		if second.Err() != nil {
			w.Errorf("the lock that it is nested in has ended, too: %v", context.Cause(second))
		}
		w.matches(nested.UnlockContext(w.Context()), ErrMaxHold)
		w.unlock(second)
	})
}

// T12: readers that are left under a write acquisition, one of them overdue, do not exclude readers of others.
func TestOverdueReaderOfAWriteAcquisitionLetsOthersRead(t *testing.T) {
	inBubble(t, func(w *world) {
		const turn = DefaultTTL / 4
		m := NewMutex(w.client(nil), "x", WithTurn(turn), WithMaxHold(turn/4))
		waiting := w.lock(m, true)
		overdue := w.later(m, false)
		w.unlock(waiting)
		first := w.granted(overdue, "the reader, in the turn of the writer")
		redistest.Elapse(turn / 8)
		second := w.lock(m, false)
		<-first.Done()
		synctest.Wait()
		other := w.try(NewMutex(w.client(nil), "x"), false)
		if other == nil {
			w.Fatal("another process cannot read")
		}
		w.unlock(other)
		w.unlock(second)
		w.matches(first.UnlockContext(w.Context()), ErrMaxHold)
	})
}

// T12, promise 6: the head of the process stands in Redis when its holder is overdue, and not only when that has ended.
func TestNobodyOvertakesTheHeadBehindAnOverdueLock(t *testing.T) {
	for _, unlocks := range []bool{true, false} {
		inBubble(t, func(w *world) {
			m, other := NewMutex(w.client(nil), "x", WithMaxHold(maxHold)), NewMutex(w.client(nil), "x")
			holder := w.lock(m, true)
			head := w.later(m, true)
			redistest.Elapse(time.Second)
			behind := w.later(other, true)
			if n := w.inRedis(); n != 1 {
				w.Errorf("%d wait in Redis while the lock is held, want that of the other process", n)
			}
			<-holder.Done()
			if n := w.inRedis(); n != 2 {
				w.Errorf("%d wait in Redis behind the overdue lock, want 2", n)
			}
			if w.try(m, false) != nil {
				w.Error("a try was granted beside the overdue lock")
			}
			if unlocks {
				w.matches(holder.UnlockContext(w.Context()), ErrMaxHold)
			} else {
				redistest.Elapse(DefaultTTL)
			}
			l := w.granted(head, "the head, which came first")
			w.pending(behind)
			w.unlock(l)
			w.unlock(w.within(DefaultTTL, behind))
			if !unlocks {
				w.matches(holder.UnlockContext(w.Context()), ErrMaxHold)
			}
		})
	}
}

// A waiter of the process is served when the lease of an overdue lock has ended, with a greater token.
func TestQueueGoesOnAfterAnOverdueLock(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x", WithMaxHold(maxHold))
		l := w.lock(m, true)
		next := w.later(m, true)
		<-l.Done()
		w.pending(next)
		redistest.Elapse(DefaultTTL)
		got := w.granted(next, "the lease has ended")
		if got.Token() <= l.Token() {
			w.Errorf("the token is %d after %d", got.Token(), l.Token())
		}
		w.unlock(got)
		w.matches(l.UnlockContext(w.Context()), ErrMaxHold)
	})
}

// A call within an overdue lock would wait for it: for its lease, or for ever if it is nested in one that goes on.
func TestNothingWaitsForTheOverdueLockItIsNestedIn(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		for _, turn := range []MutexOption{WithTurn(DefaultTurn), WithTurn(0)} {
			clients, owner := ns.process(), WithOwner("me")
			m, free := NewRedlock(clients, "x", turn, WithMaxHold(maxHold)), NewRedlock(clients, "x", turn)
			refused := func(ctx context.Context, opt ...LockOption) {
				ns.Helper()
				start := time.Now()
				for _, lock := range []func(context.Context, ...LockOption) (*Lock, error){m.LockContext, m.RLockContext, free.TryLockContext} {
					_, err := lock(ctx, opt...)
					ns.matches(err, ErrMaxHold)
				}
				if took := time.Since(start); took > 0 {
					ns.Errorf("it took %v", took)
				}
			}
			overdue := func(l *Lock) {
				ns.Helper()
				<-l.Done()
				synctest.Wait()
				refused(context.WithoutCancel(l))
				refused(context.WithoutCancel(l), WithOwner("another"))
				refused(ns.Context(), owner)
			}
			for _, end := range []func(*Lock){
				func(*Lock) { redistest.Elapse(DefaultTTL) },
				func(l *Lock) { ns.matches(l.UnlockContext(ns.Context()), ErrMaxHold) },
			} {
				l := ns.nested(ns.Context(), m, true, owner)
				overdue(l)
				end(l)
				ns.unlock(ns.nested(context.WithoutCancel(l), m, true))
				ns.unlock(ns.nested(ns.Context(), m, true, owner))
			}

			outer := ns.nested(ns.Context(), free, true, owner)
			inner := ns.nested(ns.Context(), m, true, owner)
			<-inner.Done()
			synctest.Wait()
			refused(context.WithoutCancel(inner))
			ns.unlock(ns.nested(ns.Context(), free, true, owner))                 // in the outer one,
			ns.unlock(ns.nested(context.WithoutCancel(inner), free, true, owner)) // also from here
			ns.matches(inner.UnlockContext(ns.Context()), ErrMaxHold)
			ns.unlock(outer)
		}
		ns.noOwners()
	})
}

// A renewal that is under way when the lock becomes overdue is the last one, whatever comes of it.
func TestRenewalUnderWayIsTheLastOne(t *testing.T) {
	for _, fails := range []bool{true, false} {
		inBubble(t, func(w *world) {
			const late = 100 * time.Millisecond
			m := NewMutex(w.client(w.link), "x", WithMaxHold(DefaultTTL/2+late))
			l := w.lock(m, true)
			redistest.Elapse(DefaultTTL/2 - late)
			w.link.SetDelay(2 * late)
			<-l.Done()
			start := time.Now()
			w.overdue(l)
			w.link.SetDelay(0)
			if fails {
				w.Redis.SetError("ERR not now")
				redistest.Elapse(DefaultTTL / 8)
				w.Redis.SetError("")
			}
			for w.Redis.Exists("x") {
				if took := time.Since(start); took > DefaultTTL+2*late {
					w.Fatalf("it is held %v after its end", took)
				}
				redistest.Elapse(late)
			}
			w.matches(l.UnlockContext(w.Context()), ErrMaxHold)
		})
	}
}

// A lock that was unlocked is not kept until its time would be over, although its timer is: Go removes a stopped timer once it
// is the first or the last of all.
func TestUnlockedLockIsNotKept(t *testing.T) {
	noCollector(t)
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x", WithMaxHold(time.Hour))
		defer time.AfterFunc(time.Minute, func() {}).Stop()
		l := w.lock(m, true)
		defer time.AfterFunc(2*time.Hour, func() {}).Stop()
		kept := weak.Make(l.core)
		w.unlock(l)
		synctest.Wait()
		runtime.GC()
		if kept.Value() != nil {
			w.Error("something still refers to it")
		}
	})
}

// A lock that was lost does not keep those that were lost with it.
func TestLostLockKeepsNoOther(t *testing.T) {
	noCollector(t)
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		l := w.lock(m, false)
		kept := make([]weak.Pointer[core], 10)
		for i := range kept {
			kept[i] = weak.Make(w.lock(m, false).core)
		}
		endTrust(l)
		w.matches(l.Err(), context.Canceled)
		synctest.Wait()
		runtime.GC()
		for _, k := range kept {
			if k.Value() != nil {
				w.Fatal("something still refers to another one")
			}
		}
		w.matches(l.UnlockContext(w.Context()), ErrLockLost)
	})
}

// The error names what became of the lock beside what f returned.
func TestDoReturnsThatTheLockWasOverdue(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x", WithMaxHold(maxHold))
		own := errors.New("own")
		err := m.Do(w.Context(), func(l *Lock) error { <-l.Done(); return own })
		if !errors.Is(err, own) || !errors.Is(err, ErrMaxHold) {
			w.Errorf("want both errors, got %v", err)
		}
		w.unlock(w.lock(m, true))
	})
}

func TestMaxHoldIsPositive(t *testing.T) {
	inBubble(t, func(w *world) {
		for _, d := range []time.Duration{0, -1} {
			_, err := NewMutex(w.client(nil), "x", WithMaxHold(d)).TryLockContext(w.Context())
			w.matches(err, ErrInvalid)
		}
	})
}

// Locks that are nested in one end with it.
func TestLockNestedInANestedOneEndsWithIt(t *testing.T) {
	inBubble(t, func(w *world) {
		rc := w.client(nil)
		free, bounded := NewMutex(rc, "x"), NewMutex(rc, "x", WithMaxHold(maxHold))
		outer := w.lock(free, true)
		middle := w.nested(outer, bounded, true)
		inner := w.nested(context.WithoutCancel(middle), free, true)
		<-middle.Done()
		w.overdue(middle)
		w.overdue(inner)
		w.matches(inner.UnlockContext(w.Context()), ErrMaxHold)
		w.matches(middle.UnlockContext(w.Context()), ErrMaxHold)
		w.unlock(outer)
	})
}
