package redismutex

// A Lock that the garbage collector finds without an Unlock is released and logged. Time is virtual, and the garbage
// collector runs when a test asks for it.

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redismutex/redismutex/internal/redistest"
)

// noCollector turns the garbage collector off, except where a test asks for it.
func noCollector(t *testing.T) {
	percent := debug.SetGCPercent(-1)
	t.Cleanup(func() { debug.SetGCPercent(percent) })
}

// collect lets the locks be renewed, the garbage collector run, and the locks be renewed again, as often as n locks are
// nested in each other.
func collect(n int) {
	for range n {
		redistest.Elapse(DefaultTTL)
		synctest.Wait() // a renewal that looks at a lock meanwhile would keep it
		runtime.GC()
		redistest.Elapse(DefaultTTL)
		synctest.Wait()
	}
}

// forgets checks that a lock, or several in each other, that acquire acquires and forgets are released, and logged.
func forgets(ns *nodes, locks int, acquire func(m *RWMutex), opt ...MutexOption) {
	ns.Helper()
	log := new(redistest.Log)
	acquire(ns.mutex(append(opt, WithLogger(log.Logger()))...))
	redistest.Elapse(10 * DefaultTTL)
	if ns.try(true) {
		ns.Error("it was released before the garbage collector ran")
	}
	collect(locks)
	if !ns.try(true) {
		ns.Fatalf("it is held though it was forgotten:\n%v", log)
	}
	if n := log.Count(""); n != locks || log.Count("forgotten") != n || log.Count("key=x") != n {
		ns.Errorf("want %d lines that name the key of a forgotten lock, got:\n%v", locks, log)
	}
	if locks == 1 && log.Count("not unlocked in 4") != 1 { // 40 s, and until it was found
		ns.Errorf("want the age of the lock, got:\n%v", log)
	}
	ns.noOwners()
}

func TestForgottenLockIsReleased(t *testing.T) {
	noCollector(t)
	onOneAndFive(t, func(ns *nodes) {
		ctx := context.Background()
		for _, opt := range [][]MutexOption{nil, {WithTurn(0)}} {
			for _, write := range []bool{true, false} {
				forgets(ns, 1, func(m *RWMutex) { ns.nested(ctx, m, write) }, opt...)
				forgets(ns, 1, func(m *RWMutex) { ns.nested(ctx, m, write, WithOwner("me")) }, opt...)
			}
		}
	})
}

func TestForgottenNestedAndDowngradedLocksAreReleased(t *testing.T) {
	noCollector(t)
	onOneAndFive(t, func(ns *nodes) {
		ctx := context.Background()
		forgets(ns, 3, func(m *RWMutex) {
			ns.nested(ns.nested(ns.nested(ctx, m, true), m, true), m, false)
		})
		forgets(ns, 2, func(m *RWMutex) { // by owner, neither descends from the other
			ns.nested(ctx, m, true, WithOwner("me"))
			ns.nested(ctx, m, false, WithOwner("me"))
		})
		forgets(ns, 1, func(m *RWMutex) { ns.downgrade(ns.nested(ctx, m, true)) })
		forgets(ns, 1, func(m *RWMutex) { // of two that share an acquisition, one is unlocked
			inner := ns.nested(ns.nested(ctx, m, true), m, true)
			ns.unlock(inner)
		})
	})
}

// The next one of the process is served, as after an Unlock.
func TestForgottenLockIsPassedOn(t *testing.T) {
	noCollector(t)
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		w.lock(m, true)
		next := w.later(m, true)
		collect(1)
		w.unlock(w.granted(next, "the lock was forgotten"))
	})
}

// A context that descends from a lock keeps it, and so does a function that waits for its end.
func TestContextKeepsALock(t *testing.T) {
	noCollector(t)
	type key struct{}
	for name, derive := range map[string]func(w *world, l *Lock) (ctx context.Context, stop func()){
		"the lock":  func(_ *world, l *Lock) (context.Context, func()) { return l, func() {} },
		"WithValue": func(_ *world, l *Lock) (context.Context, func()) { return context.WithValue(l, key{}, 1), func() {} },
		"WithCancel": func(_ *world, l *Lock) (context.Context, func()) {
			ctx, stop := context.WithCancel(l)
			return ctx, stop
		},
		"only cancel": func(_ *world, l *Lock) (context.Context, func()) { _, stop := context.WithCancel(l); return nil, stop },
		"WithDeadline": func(_ *world, l *Lock) (context.Context, func()) {
			ctx, stop := context.WithTimeout(l, time.Hour)
			return ctx, stop
		},
		"AfterFunc": func(_ *world, l *Lock) (context.Context, func()) {
			stop := context.AfterFunc(l, func() {})
			return nil, func() { stop() }
		},
		"another lock": func(w *world, l *Lock) (context.Context, func()) {
			other := w.nested(l, NewMutex(w.client(nil), "y"), true)
			return other, other.Unlock
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				log, rc := new(redistest.Log), w.client(nil)
				m := NewMutex(rc, "x", WithLogger(log.Logger()))
				ctx, stop := derive(w, w.lock(m, true))
				collect(3)
				if held := w.Redis.Exists("x"); !held || log.Count("") != 0 {
					t.Errorf("held: %v, want true, and nothing in the log:\n%v", held, log)
				}
				runtime.KeepAlive(ctx)
				stop()
				ctx, stop = nil, nil
				collect(2)
				if held := w.Redis.Exists("x"); held || log.Count("forgotten") != 1 {
					t.Errorf("held: %v, want false, and one line in the log:\n%v", held, log)
				}
			})
		})
	}
}

// A goroutine that waits on Done alone learns of the end.
func TestForgottenLockEndsItsContext(t *testing.T) {
	noCollector(t)
	inBubble(t, func(w *world) {
		done := w.lock(NewMutex(w.client(nil), "x"), true).Done()
		collect(1)
		select {
		case <-done:
		default:
			t.Error("the lock was released, but its context has not ended")
		}
	})
}

// A lock that was unlocked or lost is not forgotten, though others share its acquisition.
func TestEndedLockIsNotForgotten(t *testing.T) {
	noCollector(t)
	inBubble(t, func(w *world) {
		log := new(redistest.Log)
		m := NewMutex(w.client(nil), "x", WithLogger(log.Logger()))
		writer := w.lock(m, true)
		redistest.Elapse(DefaultTTL) // it is renewed
		w.unlock(writer)
		stays := w.lock(m, false)
		leaves := w.lock(m, false)
		nested := w.nested(stays, m, false)
		redistest.Elapse(DefaultTTL)
		w.unlock(leaves)
		w.unlock(nested)
		leaves, nested, writer = nil, nil, nil
		collect(3)
		if log.Count("") != 0 {
			t.Errorf("the log has:\n%v", log)
		}
		w.Redis.FlushAll()
		w.lost(stays)
		stays = nil
		collect(1)
		if n := log.Count("forgotten"); n != 0 {
			t.Errorf("%d lines, want none:\n%v", n, log)
		}
	})
}

// The log names the key, the age, and what the library does.
func TestForgottenLockInTheLog(t *testing.T) {
	noCollector(t)
	inBubble(t, func(w *world) {
		var lines []string
		SetLog(func(format string, v ...any) { lines = append(lines, fmt.Sprintf(format, v...)) })
		defer SetLog(NopLog)
		w.lock(NewMutex(w.client(nil), "stock"), true)
		collect(1)
		want := `[ERROR] redismutex: "stock": a lock was forgotten, and is released: nothing refers to it any more, and it was not unlocked in `
		if len(lines) != 1 || !strings.HasPrefix(lines[0], want) {
			t.Errorf("got %q, want %q and an age", lines, want)
		}
	})
}

// A nested lock that has been held for too long, and is forgotten, does not keep the lock that it was nested in.
func TestForgottenOverdueLockKeepsNoOther(t *testing.T) {
	noCollector(t)
	for _, turn := range []MutexOption{WithTurn(DefaultTurn), WithTurn(0)} {
		inBubble(t, func(w *world) {
			rc, log := w.client(nil), new(redistest.Log)
			free, bounded := NewMutex(rc, "x", turn, WithLogger(log.Logger())), NewMutex(rc, "x", turn, WithMaxHold(time.Second))
			outer := w.lock(free, true)
			w.nested(context.WithoutCancel(outer), bounded, true)
			collect(1)
			if log.Count("forgotten") != 1 {
				w.Errorf("want a line for the lock that was forgotten, got:\n%v", log)
			}
			next := w.later(NewMutex(w.client(nil), "x"), true)
			if err := outer.UnlockContext(w.Context()); err != nil {
				w.Error(err)
			}
			w.unlock(w.granted(next, "nothing holds it any more"))
		})
	}
}
