package redismutex

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/redismutex/redismutex/internal/redistest"
)

func TestDoHoldsTheLockWhileTheFunctionRuns(t *testing.T) {
	inBubble(t, func(w *world) {
		m, other := NewMutex(w.client(nil), "x"), NewMutex(w.client(nil), "x")
		mine := errors.New("mine")
		for write, do := range map[bool]func(context.Context, func(*Lock) error, ...LockOption) error{true: m.Do, false: m.RDo} {
			for _, want := range []error{nil, mine} {
				for _, early := range []bool{false, true} {
					var l *Lock
					err := do(w.Context(), func(lock *Lock) error {
						l = lock
						if w.try(other, true) != nil {
							w.Error("a writer got in")
						}
						if r := w.try(other, false); (r != nil) == write {
							w.Errorf("a reader got in: %v, and f writes: %v", r != nil, write)
						} else if r != nil {
							w.unlock(r)
						}
						if early {
							l.Unlock()
						}
						return want
					})
					if err != want {
						w.Errorf("want %v, got %v", want, err)
					}
					if !errors.Is(context.Cause(l), ErrUnlocked) || w.inRedis() != 0 {
						w.Errorf("it has not been unlocked: %v", context.Cause(l))
					}
				}
			}
			// What the options and the context do, they do here.
			ctx, cancel := context.WithCancel(w.Context())
			cancel()
			none := func(*Lock) error { w.Error("f was called without a lock"); return nil }
			w.matches(do(ctx, none), context.Canceled)
			w.matches(do(w.Context(), none, WithWait(-1)), ErrInvalid)
			var no context.Context
			w.matches(do(no, none), ErrInvalid)
		}
	})
}

// A panic, or the end of the goroutine, goes on, and leaves no lock.
func TestDoUnlocksAfterAPanic(t *testing.T) {
	inBubble(t, func(w *world) {
		m, other := NewMutex(w.client(nil), "x"), NewMutex(w.client(nil), "x")
		for what, f := range map[string]func(){"boom": func() { panic("boom") }, "": runtime.Goexit} {
			recovered := make(chan any)
			go func() {
				defer func() { recovered <- recover() }()
				_ = m.Do(w.Context(), func(*Lock) error { f(); return nil })
			}()
			if got := <-recovered; got != nil && got != what || got == nil && what != "" {
				w.Errorf("want the panic %q, got %v", what, got)
			}
			synctest.Wait()
			l := w.try(other, true)
			if l == nil {
				w.Fatalf("after %q the lock is held", what)
			}
			w.unlock(l)
		}
	})
}

// Promise 10: what became of the lock is returned beside the error of the function, whatever that is.
func TestDoTellsOfALossBesideTheErrorOfTheFunction(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		mine := errors.New("mine")
		for _, want := range []error{nil, mine} {
			err := m.Do(w.Context(), func(l *Lock) error {
				w.Redis.Del("x")
				<-l.Done()
				return want
			})
			if w.matches(err, ErrLockLost); want != nil && !errors.Is(err, want) {
				w.Errorf("the error of the function is missing: %v", err)
			}
		}
	})
}

// An unlock that is not confirmed is no failure of the work: the lock was held to the end.
func TestDoLogsAnUnlockThatIsNotConfirmed(t *testing.T) {
	inBubble(t, func(w *world) {
		log := &redistest.Log{}
		m := NewMutex(w.client(w.link), "x", WithLogger(log.Logger()))
		err := m.Do(w.Context(), func(*Lock) error {
			w.link.Refuse(true)
			w.link.Cut()
			return nil
		})
		if err != nil || !strings.Contains(log.String(), "unlock") {
			w.Errorf("want no error and a line in the log, got %v and %q", err, log)
		}
		w.link.Refuse(false)
		redistest.Elapse(2 * DefaultTTL)
	})
}
