package redismutex

// Foreign code that panics, or ends its goroutine, stops nobody else.

import (
	"context"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/localqueue"
	"github.com/redismutex/redismutex/internal/redistest"
)

// A brokenContext panics when it is used, as a type does that embeds a nil context.
type brokenContext struct{ context.Context }

// An unlock whose context panics, on the goroutine of a caller that recovers, changes nothing: the lock can be unlocked
// with another one.
func TestUnlockWithABrokenContextChangesNothing(t *testing.T) {
	for _, turn := range []time.Duration{DefaultTurn, 0} {
		inBubble(t, func(w *world) {
			m := NewMutex(w.client(nil), "x", WithTurn(turn))
			l := w.lock(m, true)
			next := w.later(m, true)
			redistest.Elapse(2 * DefaultTurn)
			w.panics("an unlock", func() { _ = l.UnlockContext(brokenContext{}) })
			w.pending(next)
			if l.Err() != nil {
				t.Errorf("the lock has ended: %v", context.Cause(l))
			}
			w.unlock(l)
			w.unlock(w.within(DefaultTTL, next))
		})
	}
}

// A panickingHook panics with the next script, once it is set. Pipelines are sent by goroutines of the library, which nobody
// could recover.
type panickingHook struct{ command atomic.Bool }

func (h *panickingHook) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h *panickingHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, c redis.Cmder) error {
		err := next(ctx, c) // the server has done it
		if strings.HasPrefix(c.Name(), "eval") && h.command.CompareAndSwap(true, false) {
			panic("hook")
		}
		return err
	}
}
func (h *panickingHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// A moodyContext panics or ends the goroutine while mood is set.
type moodyContext struct {
	context.Context
	mood *atomic.Int32
}

func (c moodyContext) Value(key any) any {
	switch c.mood.Load() {
	case 1:
		panic("context")
	case 2:
		runtime.Goexit()
	}
	return c.Context.Value(key)
}

// T11: a loss that is told to a lock whose parent context ends the goroutine ends the other locks, and the queue goes on.
func TestLossWithABrokenParentStopsNobody(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		parent := moodyContext{ctx, new(atomic.Int32)}
		_, err := m.LockContext(parent)
		if err != nil {
			t.Fatal(err)
		}
		next := w.later(m, true)
		parent.mood.Store(2)
		w.Redis.FlushAll()
		w.unlock(w.within(2*DefaultTTL, next))
	})
}

// A caller that finds a loss before the timers do tells the other locks of it: what their contexts do wrong reaches the caller.
func TestPanicOfAnotherLockReachesTheCallerThatFindsTheLoss(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		l := w.lock(m, false)
		parent := moodyContext{context.WithoutCancel(w.Context()), new(atomic.Int32)}
		ctx, cancel := context.WithCancel(parent)
		defer cancel()
		parent.mood.Store(0)
		another, err := m.RLockContext(moodyContext{ctx, parent.mood})
		if err != nil {
			t.Fatal(err)
		}
		endTrust(l)
		parent.mood.Store(1)
		func() {
			defer func() {
				if why := recover(); why != "context" {
					t.Errorf("recovered %v, want what the context of the other lock panicked with", why)
				}
			}()
			_ = l.Err()
		}()
		parent.mood.Store(0)
		w.matches(l.Err(), context.Canceled)
		w.matches(another.Err(), context.Canceled)
		w.unlock(w.lock(m, true))
	})
}

// A context that panics in Done, once it is called for the nth time, after something else.
type lateContext struct {
	context.Context
	calls *atomic.Int32
	nth   int32
	first func()
}

func (c lateContext) Done() <-chan struct{} {
	if c.calls.Add(1) == c.nth {
		c.first()
		panic("context")
	}
	return c.Context.Done()
}

// T4: a lock that is granted to a call as its context panics is unlocked, and its queue is not forgotten before.
func TestLockThatIsGrantedAsTheContextPanicsIsUnlocked(t *testing.T) {
	for nth := int32(1); nth <= 3; nth++ {
		inBubble(t, func(w *world) {
			m := NewMutex(w.client(nil), "x")
			held := w.lock(m, true)
			ctx, cancel := context.WithCancel(w.Context())
			defer cancel()
			ended := make(chan any, 1)
			go func() {
				defer func() { ended <- recover() }()
				_, _ = m.LockContext(lateContext{ctx, new(atomic.Int32), nth, held.Unlock})
			}()
			if why := <-ended; why != "context" {
				t.Fatalf("recovered %v, want a panic", why)
			}
			synctest.Wait()
			l, err := m.TryLockContext(w.Context())
			if err != nil {
				t.Fatalf("Done panicked in call %d: %v", nth, err)
			}
			w.unlock(l)
			if n := localqueue.Len(); n != 0 {
				t.Errorf("%d queues are left", n)
			}
		})
	}
}

// A call whose context panics keeps no place in the limiter. What go-redis calls of a context is not tried: it does so on a
// goroutine of its own.
func TestCallWhoseContextPanicsKeepsNoPlace(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil, func(o *redis.Options) { o.PoolSize = 1 }), "x")
		panics := func(nth int32, f func(ctx context.Context) error) {
			defer func() {
				if why := recover(); why != "context" {
					t.Errorf("recovered %v, want a panic", why)
				}
			}()
			ctx, cancel := context.WithCancel(w.Context())
			defer cancel()
			t.Errorf("got %v, want a panic", f(lateContext{ctx, new(atomic.Int32), nth, func() {}}))
		}
		ctx, cancel := context.WithTimeout(w.Context(), time.Second)
		defer cancel()
		for nth := int32(1); nth <= 2; nth++ {
			panics(nth, func(ctx context.Context) error { _, err := m.LockContext(ctx); return err })
			l, err := m.LockContext(ctx)
			if err != nil {
				t.Fatalf("Done panicked in call %d: %v", nth, err)
			}
			panics(1, l.UnlockContext)
		}
		l, err := m.LockContext(ctx)
		if err != nil {
			t.Fatal(err)
		}
		w.unlock(l)
	})
}

// A hookOnce ends the goroutine of the next command, once it is set. If it has an argument, that command has it.
type hookOnce struct {
	on  *atomic.Bool
	arg any
}

func (h hookOnce) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h hookOnce) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
func (h hookOnce) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, c redis.Cmder) error {
		if (h.arg == nil || slices.Contains(c.Args(), h.arg)) && h.on.CompareAndSwap(true, false) {
			runtime.Goexit()
		}
		return next(ctx, c)
	}
}

// T11: a hook that ends the goroutine of an acquire in the background does not stop the queue.
func TestHookThatEndsABackgroundAcquireStopsNobody(t *testing.T) {
	inBubble(t, func(w *world) {
		rc, hook := w.client(nil), hookOnce{on: new(atomic.Bool)}
		m, other := NewMutex(rc, "x"), NewMutex(w.client(nil), "x")
		held := w.lock(other, true)
		ctx, cancel := context.WithCancel(context.Background())
		go m.RLockContext(ctx) // the head
		synctest.Wait()
		next := w.later(m, true)
		rc.AddHook(hook)
		hook.on.Store(true)
		cancel() // an acquire for a writer is made in the background
		synctest.Wait()
		if hook.on.Load() {
			t.Fatal("nothing was asked")
		}
		w.unlock(held)
		w.unlock(w.within(2*DefaultTTL, next))
	})
}

// A call whose hook ends the goroutine returns, whether its context can end or not.
func TestHookThatEndsACallEndsTheWait(t *testing.T) {
	inBubble(t, func(w *world) {
		rc, hook := w.client(nil), hookOnce{on: new(atomic.Bool)}
		m := NewMutex(rc, "x")
		rc.AddHook(hook)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		hook.on.Store(true)
		done := make(chan struct{})
		go func() {
			defer close(done)
			if l, err := m.LockContext(ctx); err == nil {
				l.Unlock()
			}
		}()
		select {
		case <-done:
		case <-time.After(10 * DefaultTTL):
			t.Fatalf("LockContext has not returned after %v", 10*DefaultTTL)
		}
	})
}

// A waiter whose server has lost its data asks again in the background. If a hook ends that goroutine, it asks once more.
func TestHookThatEndsAnAcquireInTheBackgroundEndsNoWait(t *testing.T) {
	for _, turn := range []time.Duration{0, DefaultTurn} {
		inBubble(t, func(w *world) {
			rc, hook := w.client(nil), hookOnce{new(atomic.Bool), "join:0"}
			held := w.lock(NewMutex(w.client(nil), "x"), true)
			next := w.later(NewMutex(rc, "x", WithTurn(turn)), true)
			rc.AddHook(hook)
			hook.on.Store(true)
			w.Redis.FlushAll()
			<-held.Done()
			w.unlock(w.within(3*DefaultTTL, next))
			if hook.on.Load() {
				t.Error("nothing was asked again")
			}
		})
	}
}

// A call without an error to return logs it, also where there is no mutex, or a bad one.
func TestBadMutexLogsItsError(t *testing.T) {
	if l, ok := (*RWMutex)(nil).Lock(); l != nil || ok {
		t.Error("nil was locked")
	}
	var own strings.Builder
	m := NewMutex(redis.NewClient(&redis.Options{}), "x", WithTurn(time.Hour), WithLogger(slog.New(slog.NewTextHandler(&own, nil))))
	if l, ok := m.Lock(); l != nil || ok || !strings.Contains(own.String(), "want at most a quarter of the TTL") {
		t.Errorf("its logger has %q", own.String())
	}
}

// A downgrade whose hook ends the goroutine returns, whether its context can end or not.
func TestHookThatEndsADowngradeEndsTheCall(t *testing.T) {
	for _, turn := range []time.Duration{0, DefaultTurn} {
		inBubble(t, func(w *world) {
			rc, hook := w.client(nil), hookOnce{new(atomic.Bool), "r"} // not the INFO of a first lock
			l := w.lock(NewMutex(rc, "x", WithTurn(turn)), true)
			rc.AddHook(hook)
			hook.on.Store(true)
			done := make(chan error, 1)
			go func() { done <- l.Downgrade(context.Background()) }()
			select {
			case err := <-done:
				w.matches(err, ErrRedis)
			case <-time.After(10 * DefaultTTL):
				t.Fatalf("Downgrade has not returned after %v", 10*DefaultTTL)
			}
			w.unlock(l)
		})
	}
}

// An unlock whose parent context panics, on the goroutine of a caller that recovers, does not leave the lock to be renewed
// for ever, nor its owner in memory.
func TestUnlockWithABrokenParentReleases(t *testing.T) {
	for turn, opt := range map[time.Duration][]LockOption{DefaultTurn: nil, 0: {WithOwner("one")}} {
		inBubble(t, func(w *world) {
			m := NewMutex(w.client(nil), "x", WithTurn(turn))
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			parent := moodyContext{ctx, new(atomic.Int32)}
			l, err := m.LockContext(parent, opt...)
			if err != nil {
				t.Fatal(err)
			}
			next := w.later(NewMutex(w.client(nil), "x"), true)
			parent.mood.Store(1)
			w.panics("an unlock", l.Unlock)
			w.unlock(w.within(2*DefaultTTL, next))
			w.noOwners()
		})
	}
}

// A call of an owner that ends in a panic leaves nothing of it in memory.
func TestOwnerIsForgottenAfterAPanic(t *testing.T) {
	inBubble(t, func(w *world) {
		rc, hook := w.client(nil), &panickingHook{}
		rc.AddHook(hook)
		m := NewMutex(rc, "x")
		hook.command.Store(true)
		w.panics("a lock", func() { m.Lock(WithOwner("one")) })
		w.noOwners()
	})
}

// A loss that is told to a lock whose parent context ends the goroutine is told to the locks that share its acquisition.
func TestLossWithABrokenParentEndsTheOtherLocks(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		parent := moodyContext{ctx, new(atomic.Int32)}
		if _, err := m.RLockContext(parent); err != nil {
			t.Fatal(err)
		}
		l := w.lock(m, false)
		parent.mood.Store(2)
		w.Redis.FlushAll()
		select {
		case <-l.Done():
		case <-time.After(2 * DefaultTTL):
			t.Errorf("a lock that was lost has not ended after %v", 2*DefaultTTL)
		}
	})
}
