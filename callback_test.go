package redismutex

// Foreign code (contexts, loggers, clients and their hooks) may call the library wherever the library calls it. A
// goroutine that waits for a mutex for ever stops the time of a bubble, so a test here that hangs panics, in real time.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
)

// mustEnd panics with all stacks if the test does not end. Call it outside of the bubble.
func mustEnd(t *testing.T) {
	watchdog := time.AfterFunc(2*time.Minute, func() {
		debug.SetTraceback("all")
		panic(t.Name() + " hangs: a deadlock")
	})
	t.Cleanup(func() { watchdog.Stop() })
}

// lost checks that locks have ended by a loss, and that no call on them blocks.
func (w *world) lost(locks ...*Lock) {
	w.Helper()
	for i, l := range locks {
		select {
		case <-l.Done():
		case <-time.After(DefaultTTL):
			w.Fatalf("lock %d of %d has not ended", i+1, len(locks))
		}
		w.matches(context.Cause(l), ErrLockLost)
		if err := l.Err(); err != context.Canceled {
			w.Error(err)
		}
		w.matches(l.UnlockContext(context.Background()), ErrLockLost)
		w.matches(l.Downgrade(l), ErrLockLost)
	}
}

// cutOff cuts all nodes off for longer than a lease.
func (ns *nodes) cutOff() {
	for _, l := range ns.links {
		l.Refuse(true) // in a hole go-redis would dial under a mutex
	}
	synctest.Wait() // a connection that is being made would outlive the cut
	for _, l := range ns.links {
		l.Cut()
	}
	redistest.Elapse(2 * DefaultTTL)
	for _, l := range ns.links {
		l.Refuse(false)
	}
	redistest.Elapse(2 * time.Second) // go-redis dials again
}

// The context of a nested lock may have the outer lock further up, but not as its parent: the loss calls its methods.
func TestLossEndsLocksNestedWithoutCancel(t *testing.T) {
	mustEnd(t)
	onOneAndFive(t, func(ns *nodes) {
		m := ns.mutex()
		for range 10 {
			first := ns.lock(m, true)
			second := ns.nested(context.WithoutCancel(first), m, true)
			all := []*Lock{first, second}
			for range 4 {
				all = append(all, ns.nested(second, m, true), ns.nested(context.WithoutCancel(second), m, false))
			}
			ns.cutOff()
			ns.lost(all...)
		}
	})
}

func TestLossEndsAllLocksOfAnOwner(t *testing.T) {
	mustEnd(t)
	onOneAndFive(t, func(ns *nodes) {
		m, me := ns.mutex(), WithOwner("me")
		for range 10 {
			first, second := ns.nested(ns.Context(), m, true, me), ns.nested(ns.Context(), m, true, me)
			all := []*Lock{first, second}
			for range 3 {
				all = append(all, ns.nested(first, m, true), ns.nested(second, m, true, me))
			}
			ns.cutOff()
			ns.lost(all...)
			ns.noOwners()
		}
	})
}

// Locks on two keys, each nested within the other's contexts, expire together.
func TestLocksNestedCrosswiseExpireTogether(t *testing.T) {
	mustEnd(t)
	onOneAndFive(t, func(ns *nodes) {
		m, me := ns.mutex(), WithOwner("me")
		a, b := WithKey("a"), WithKey("b")
		for range 10 {
			all := []*Lock{ns.nested(ns.Context(), m, true, me, a), ns.nested(ns.Context(), m, true, me, b)}
			for range 3 {
				inA := ns.nested(all[len(all)-1], m, true, me, a)
				inB := ns.nested(inA, m, true, me, b)
				all = append(all, inA, inB)
				all = append(all, ns.nested(context.WithoutCancel(inB), m, true, me, a), ns.nested(context.WithoutCancel(inA), m, true, me, b))
			}
			ns.cutOff()
			ns.lost(all...)
		}
	})
}

// A latecomer is a lock whose trust ends in the middle of a call that has it as its context: a process may be stopped
// at any moment.
type latecomer struct {
	*Lock
	asked func(what string) (over bool)
}

func (l latecomer) ask(what string) {
	if l.asked(what) {
		endTrust(l.Lock)
	}
}

func (l latecomer) Done() <-chan struct{} { l.ask("Done"); return l.Lock.Done() }
func (l latecomer) Err() error            { l.ask("Err"); return l.Lock.Err() }

func TestLockMayExpireWhileItIsNestedIn(t *testing.T) {
	mustEnd(t)
	onOneAndFive(t, func(ns *nodes) {
		m := ns.mutex()
		for _, opts := range [][]LockOption{nil, {WithOwner("me")}} {
			outer := ns.nested(ns.Context(), m, true, opts...)
			synctest.Wait() // on all nodes, none of which prolongs it later
			_, err := m.LockContext(latecomer{outer, func(what string) bool { return what == "Done" }}, opts...)
			if !errors.Is(err, ErrLockLost) {
				ns.Error(err)
			}
			ns.lost(outer)
			redistest.Elapse(DefaultTTL)
		}
	})
}

func TestLockMayExpireWhileItIsDowngraded(t *testing.T) {
	mustEnd(t)
	onOneAndFive(t, func(ns *nodes) {
		l := ns.lock(ns.mutex(), true)
		synctest.Wait() // on all nodes, none of which prolongs it later
		if err := l.Downgrade(latecomer{l, func(string) bool { return true }}); !errors.Is(err, ErrLockLost) {
			ns.Error(err)
		}
		ns.lost(l)
	})
}

// The same in real time, where chance decides which call the lock expires in.
func TestLockMayExpireDuringAnyCall(t *testing.T) {
	mustEnd(t)
	server := redistest.Start(t)
	link := faultnet.New(nil)
	const timeout = 300 * time.Millisecond
	// A line that counts others comes a second late, and must not reach the logger of the next test.
	own := WithLogger(slog.New(slog.DiscardHandler))
	m := NewMutex(server.Client(t, func(o *redis.Options) {
		o.Dialer, o.MaxRetries, o.DialerRetries, o.ReadTimeout, o.DialTimeout = link.Dial, -1, 1, timeout, timeout
	}), "x", WithTTL(200*time.Millisecond), own)
	t.Cleanup(func() { link.Hole(false, false); link.Cut() })
	until := func(f func(l *Lock) error) func(l *Lock) {
		return func(l *Lock) {
			for f(l) == nil {
			}
		}
	}
	nest := func(ctx func(l *Lock) context.Context, opts ...LockOption) func(l *Lock) {
		return until(func(l *Lock) error {
			// The key is a part of that of l.
			n, err := m.TryLockContext(ctx(l), append(opts, WithKey(l.Key()[len("x:"):]))...)
			if err == nil {
				n.Unlock()
			}
			return errors.Join(err, l.Err())
		})
	}
	busy := map[string]func(l *Lock){
		"nests":                nest(func(l *Lock) context.Context { return l }),
		"nests without cancel": nest(func(l *Lock) context.Context { return context.WithoutCancel(l) }),
		"nests for an owner":   nest(func(l *Lock) context.Context { return l }, WithOwner("me")),
		"downgrades":           until(func(l *Lock) error { return l.Downgrade(l) }),
	}
	for round := range 3 {
		var all sync.WaitGroup
		start := make(chan struct{})
		for name, f := range busy {
			for i := range 8 {
				var l *Lock
				redistest.Eventually(t, "the connections of the round before are replaced", func() (ok bool) {
					l, ok = m.Lock(WithKey(fmt.Sprint(name, round, i)))
					return ok
				})
				all.Go(func() {
					<-start
					f(l)
					<-l.Done()
					if err := l.UnlockContext(context.Background()); !errors.Is(err, ErrLockLost) || !errors.Is(context.Cause(l), ErrLockLost) {
						t.Error(err, context.Cause(l))
					}
				})
			}
		}
		close(start)
		link.Hole(true, true)
		all.Wait()
		link.Hole(false, false)
		link.Cut()
	}
}

// A caller is foreign code that calls the library wherever it is called.
type caller struct {
	back   func()
	inside atomic.Bool // stops the recursion: a call of its own calls it in turn
	mu     sync.Mutex
	left   map[string]int // how often it still does so
	called map[string]int
}

func (c *caller) call(by string) {
	c.mu.Lock()
	if c.called == nil {
		c.called, c.left = map[string]int{}, map[string]int{}
	}
	if c.called[by]++; c.called[by] == 1 {
		c.left[by] = budget
	}
	c.left[by]--
	again := c.left[by] > 0
	c.mu.Unlock()
	if again && c.inside.CompareAndSwap(false, true) {
		defer c.inside.Store(false)
		c.back()
	}
}

// budget limits how often a caller does so for the same reason, since each call leads to more.
const budget = 10

func (c *caller) refill() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for by := range c.left {
		c.left[by] = budget
	}
}

// in returns ctx with methods that call the library.
func (c *caller) in(ctx context.Context) context.Context { return callingContext{ctx, c} }

type callingContext struct {
	context.Context
	*caller
}

func (c callingContext) Done() <-chan struct{} { c.call("Done"); return c.Context.Done() }
func (c callingContext) Err() error            { c.call("Err"); return c.Context.Err() }
func (c callingContext) Value(key any) any     { c.call("Value"); return c.Context.Value(key) }
func (c callingContext) Deadline() (time.Time, bool) {
	c.call("Deadline")
	return c.Context.Deadline()
}

// As a logger.
func (c *caller) Enabled(context.Context, slog.Level) bool { c.call("Enabled"); return true }
func (c *caller) WithAttrs([]slog.Attr) slog.Handler       { return c }
func (c *caller) WithGroup(string) slog.Handler            { return c }
func (c *caller) Handle(_ context.Context, r slog.Record) error {
	c.call("Handle")
	r.Attrs(func(a slog.Attr) bool { _ = a.Value.String(); return true })
	return nil
}

// A callingClient is a client whose methods call the library.
type callingClient struct {
	*redis.Client
	*caller
}

func (c *callingClient) Options() *redis.Options { c.call("Options"); return c.Client.Options() }
func (c *callingClient) Process(ctx context.Context, cmd redis.Cmder) error {
	c.call("Process")
	return c.Client.Process(ctx, cmd)
}
func (c *callingClient) Pipeline() redis.Pipeliner { c.call("Pipeline"); return c.Client.Pipeline() }
func (c *callingClient) Info(ctx context.Context, section ...string) *redis.StringCmd {
	c.call("Info")
	return c.Client.Info(ctx, section...)
}
func (c *callingClient) Subscribe(ctx context.Context, channels ...string) *redis.PubSub {
	c.call("Subscribe")
	return c.Client.Subscribe(ctx, channels...)
}

// A callingHook calls the library, and so do the errors that it returns once the link fails.
type callingHook struct{ *caller }

func (h callingHook) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h callingHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.call("hook")
		err := next(ctx, cmd)
		if err != nil && !redis.HasErrorPrefix(err, "NOSCRIPT") {
			err = callingError{err, h.caller}
			cmd.SetErr(err)
		}
		return err
	}
}
func (h callingHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		h.call("hook")
		return next(ctx, cmds)
	}
}

type callingError struct {
	error
	*caller
}

func (e callingError) Error() string        { e.call("Error"); return e.error.Error() }
func (e callingError) Is(target error) bool { e.call("Is"); return e.error == target }
func (e callingError) Unwrap() error        { e.call("Unwrap"); return e.error }

// The text of a client's error is foreign code too. Here it calls the library each time, also while the lock expires.
func TestErrorsOfTheClientMayCallTheLibrary(t *testing.T) {
	mustEnd(t)
	onOneAndFive(t, func(ns *nodes) {
		var m *RWMutex
		var lock atomic.Pointer[Lock]
		foreign := &caller{back: func() {
			l := lock.Load()
			if l == nil {
				return
			}
			_ = l.Err()
			if inner, err := m.LockContext(l); err == nil {
				inner.Unlock()
			}
		}}
		m = NewRedlock(ns.process(func(_ int, rc *redis.Client) { rc.AddHook(callingHook{foreign}) }), "x")
		l := ns.lock(m, true)
		lock.Store(l)
		for range 40 {
			foreign.refill()
			for _, link := range ns.links {
				link.Refuse(true)
				link.Cut()
			}
			redistest.Elapse(DefaultTTL / 40)
		}
		ns.lost(l)
		foreign.mu.Lock()
		defer foreign.mu.Unlock()
		if foreign.called["Error"] == 0 {
			ns.Error("no error was asked for its text: a defect of the test")
		}
	})
}

// Foreign code runs under no mutex of the library, so it may call anything, and the lock that it is called for works.
func TestForeignCodeMayCallTheLibrary(t *testing.T) {
	everything := &caller{back: func() {}}
	t.Cleanup(func() { SetLog(NopLog) })
	ran := 0
	worlds := []string{"contexts", "loggers", "package log", "clients", "hooks", "all"}
	for _, which := range worlds {
		t.Run(which, func(t *testing.T) {
			mustEnd(t)
			ran++
			onOneAndFive(t, func(ns *nodes) {
				is := func(s string) bool { return which == s || which == "all" }
				foreign := &caller{back: func() {}}
				clients := ns.process(func(_ int, rc *redis.Client) {
					if is("hooks") {
						rc.AddHook(callingHook{foreign})
					}
				})
				var lock atomic.Pointer[Lock] // the lock under test
				var mutex func() *RWMutex
				foreign.back = func() {
					ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
					defer cancel()
					m := mutex()
					unlock := func(l *Lock, err error) {
						if err == nil {
							_ = l.UnlockContext(ctx)
						}
					}
					unlock(m.TryLockContext(ctx, WithKey("another")))
					unlock(m.TryLockContext(ctx, WithKey("another"), WithOwner("me")))
					l := lock.Load()
					if l == nil {
						return
					}
					_, _, _, _, _ = l.Err(), l.Value(some{}), l.Until(), l.Token(), context.Cause(l)
					_, _ = l.Deadline()
					if own, ok := FromContext(l); !ok || own != l {
						ns.Error("FromContext does not find it")
					}
					unlock(m.TryLockContext(l))
					unlock(m.TryRLockContext(context.WithoutCancel(l), WithOwner("me")))
					child, cancel := context.WithTimeout(l, time.Millisecond)
					defer cancel()
					_ = l.Downgrade(child)
				}
				if is("clients") {
					for i, rc := range clients {
						clients[i] = &callingClient{rc.(*redis.Client), foreign}
					}
				}
				mutex = func() *RWMutex {
					if is("loggers") { // else it is the package's
						return NewRedlock(clients, "x", WithLogger(slog.New(foreign)))
					}
					return NewRedlock(clients, "x")
				}
				if is("package log") {
					SetLog(func(format string, v ...any) { foreign.call("SetLog"); _ = fmt.Sprintf(format, v...) })
					defer SetLog(NopLog)
				}
				in := func(ctx context.Context) context.Context {
					if is("contexts") {
						return foreign.in(ctx)
					}
					return ctx
				}
				m, me, inBackground := mutex(), WithOwner("me"), in(context.Background())
				ask := func(ctx context.Context, opts ...LockOption) *Lock {
					ns.Helper()
					l, err := m.RLockContext(ctx, opts...) // it may have been downgraded
					if err != nil {
						ns.Fatal(err)
					}
					return l
				}
				for _, loses := range []func(l *Lock){
					func(*Lock) { ns.cutOff() },
					func(l *Lock) {
						for l.ctx.Err() == nil { // a renewal under way may have been faster
							endTrust(l)
							ask(in(context.Background()), me).Unlock()
						}
					},
					func(l *Lock) {
						for l.ctx.Err() == nil {
							endTrust(l)
							_ = l.Err()
						}
					},
					func(*Lock) {
						// Not at the instant of any call: a lock that is lost and acquired again at one
						// instant of virtual time is not seen to be lost.
						redistest.Elapse(DefaultTTL / 8)
						for _, m := range ns.minis {
							m.FlushAll()
						}
						redistest.Elapse(DefaultTTL)
					},
				} {
					foreign.refill()
					l, err := m.LockContext(inBackground, me)
					if err != nil {
						ns.Fatal(err)
					}
					lock.Store(l)
					all := []*Lock{l, ask(in(l)), ask(in(context.WithoutCancel(l)), me), ask(inBackground, me)}
					all = append(all, ask(in(all[1])), ask(in(all[2])))
					child, cancel := context.WithCancel(in(all[3]))
					ns.unlock(ask(in(child)))
					if _, err := ns.mutex().TryLockContext(inBackground); !errors.Is(err, ErrLock) {
						ns.Error(err)
					}
					if _, err := m.TryLockContext(inBackground, WithOwner("you")); !errors.Is(err, ErrLock) {
						ns.Error(err)
					}
					waits, stop := context.WithTimeout(inBackground, time.Second)
					if _, err := m.LockContext(in(waits), WithOwner("you")); !errors.Is(err, context.DeadlineExceeded) {
						ns.Error(err)
					}
					stop()
					_ = l.Downgrade(in(l))
					_ = l.Downgrade(in(child))
					foreign.refill()
					loses(l)
					ns.lost(all...)
					cancel()
					_, ok := m.RLock(WithContext(in(l))) // which is logged
					if ok {
						ns.Error("locked in a context that has ended")
					}
					lock.Store(nil)
					redistest.Elapse(2 * DefaultTTL)
					l = ask(inBackground)
					lock.Store(l)
					ns.unlock(l)
					if err := l.UnlockContext(inBackground); !errors.Is(err, ErrUnlocked) {
						ns.Error(err)
					}
					lock.Store(nil)
				}
				redistest.Elapse(2 * DefaultTTL)
				ns.noOwners()
				everything.mu.Lock()
				defer everything.mu.Unlock()
				for by, n := range foreign.called {
					if everything.called == nil {
						everything.called = map[string]int{}
					}
					everything.called[by] += n
				}
			})
		})
	}
	for _, by := range []string{"Done", "Err", "Value", "Deadline", "Enabled", "Handle", "SetLog", "Options", "Process", "Pipeline", "Info", "Subscribe", "hook", "Error"} {
		if everything.called[by] == 0 && ran == len(worlds) && !t.Failed() {
			t.Errorf("%s was never called: a defect of the test", by)
		}
	}
}
