package redismutex

// Many goroutines of one process, as many as its client has connections for many times over: nobody is late because of
// the others, and what the process holds is renewed. Time is virtual, and the way to Redis is slow, so that a crowd
// takes several TTLs.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/redistest"
)

// aFewConnections makes a pool that a crowd fills many times over, and from which no call gives up waiting.
func aFewConnections(o *redis.Options) { o.PoolSize, o.PoolTimeout = 4, time.Hour }

// slowNodes returns the clients of a process that has few connections to each node.
func (ns *nodes) slowNodes() (clients []redis.Scripter) {
	for i, m := range ns.minis {
		clients = append(clients, redistest.MiniClient(ns, m, aFewConnections, func(o *redis.Options) {
			o.Addr = fmt.Sprintf("10.0.0.%d:6379", i+1)
			o.Dialer = ns.links[i].Dial
			o.DialerRetries = 1
		}))
	}
	return clients
}

// Promises 1, 2 and 10: a crowd on a quorum gets its locks. Waiting in the client marks no node down, and renewals and
// releases go before acquires.
func TestCrowdOnAQuorumFailsNobody(t *testing.T) {
	for _, keys := range []int{1, 200} {
		onNodes(t, 3, func(ns *nodes) {
			var log redistest.Log
			m := NewRedlock(ns.slowNodes(), "x", WithLogger(log.Logger()))
			var held []*Lock
			for i := range 50 {
				l, err := m.LockContext(ns.Context(), WithKey(fmt.Sprint("held", i)))
				if err != nil {
					t.Fatal(err)
				}
				held = append(held, l)
			}
			for _, l := range ns.links {
				l.SetDelay(10 * time.Millisecond)
			}
			var all sync.WaitGroup
			for i := range 200 {
				all.Go(func() {
					l, err := m.LockContext(context.Background(), WithKey(fmt.Sprint(i%keys)))
					if err != nil {
						t.Error(err)
						return
					}
					if err := l.UnlockContext(context.Background()); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			for _, l := range held {
				if l.Err() != nil {
					t.Errorf("%d keys: %v", keys, context.Cause(l))
				}
				ns.unlock(l)
			}
			if log.Count("") > 0 {
				t.Errorf("%d keys: logged: %.500s", keys, log.String())
			}
		})
	}
}

// Promise 10: without a majority all of a crowd get their errors at about the same time, not one group after the other.
func TestCrowdOnADeadQuorumFailsTogether(t *testing.T) {
	for name, fail := range faults {
		onNodes(t, 5, func(ns *nodes) {
			m := NewRedlock(ns.slowNodes(), "x")
			ns.unlock(ns.lock(m, true))
			synctest.Wait() // a connection that is being made would outlive the cut
			for _, i := range []int{0, 2, 3} {
				fail(ns.links[i])
			}
			start := time.Now()
			var all sync.WaitGroup
			for i := range 400 {
				all.Go(func() {
					_, err := m.LockContext(ns.Context(), WithKey(fmt.Sprint(i)))
					ns.matches(err, ErrRedis)
				})
			}
			all.Wait()
			if took := time.Since(start); took > 3*m.config.Timeout {
				ns.Errorf("%s: the last got its error after %v", name, took)
			}
		})
	}
}

// Promise 10: the error of one call is returned to its caller only.
func TestErrorOfOneCallGoesToItsCallerOnly(t *testing.T) {
	inBubble(t, func(w *world) {
		rc, fails := w.client(nil, func(o *redis.Options) { o.PoolSize, o.PoolTimeout = 1, time.Hour }), &failOnce{}
		m := NewMutex(rc, "x")
		w.unlock(w.lock(m, true))
		rc.AddHook(fails)
		var errs atomic.Int64
		var all sync.WaitGroup
		for i := range 100 {
			all.Go(func() {
				l, err := m.LockContext(context.Background(), WithKey(fmt.Sprint(i)))
				if err != nil {
					errs.Add(1)
					return
				}
				w.unlock(l)
			})
		}
		all.Wait()
		if n := errs.Load(); n != 1 {
			t.Errorf("%d callers got an error, want 1", n)
		}
	})
}

// failOnce is a hook that refuses one call.
type failOnce struct{ failed atomic.Bool }

func (f *failOnce) DialHook(next redis.DialHook) redis.DialHook { return next }
func (f *failOnce) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "evalsha" && !f.failed.Swap(true) {
			return errors.New("refused by a hook")
		}
		return next(ctx, cmd)
	}
}
func (f *failOnce) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// Promise 2: renewals do not wait behind a crowd that acquires, or that releases.
func TestRenewalsDoNotWaitBehindACrowd(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(w.link, aFewConnections), "x")
		var held []*Lock
		for i := range 100 {
			l, err := m.LockContext(w.Context(), WithKey(fmt.Sprint("held", i)))
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, l)
		}
		w.link.SetDelay(20 * time.Millisecond)
		var all sync.WaitGroup
		for i := range 600 {
			all.Go(func() {
				l, err := m.LockContext(context.Background(), WithKey(fmt.Sprint(i)))
				if err != nil {
					t.Error(err)
					return
				}
				w.unlock(l)
			})
		}
		all.Wait()
		for _, l := range held {
			if l.Err() != nil {
				t.Error(context.Cause(l))
			}
			w.unlock(l)
		}
	})
}

// Promise 10: locks that are unlocked all at once wait to be released for longer than a TTL. They are renewed until
// then, and none is reported lost.
func TestUnlocksThatWaitForTheirTurnAreNotLost(t *testing.T) {
	for _, n := range []int{1, 3} {
		onNodes(t, n, func(ns *nodes) {
			m := NewRedlock(ns.slowNodes(), "x")
			locks := make([]*Lock, 400)
			for i := range locks {
				l, err := m.LockContext(ns.Context(), WithKey(fmt.Sprint(i)))
				if err != nil {
					t.Fatal(err)
				}
				locks[i] = l
			}
			for _, l := range ns.links {
				l.SetDelay(40 * time.Millisecond)
			}
			start := time.Now()
			var all sync.WaitGroup
			for _, l := range locks {
				all.Go(func() {
					if err := l.UnlockContext(context.Background()); err != nil {
						t.Errorf("%d nodes, after %v: %v", n, time.Since(start), err)
					}
				})
			}
			all.Wait()
			if took := time.Since(start); took < DefaultTTL {
				t.Errorf("it took %v, which is too short to show anything", took)
			}
		})
	}
}

// Promise 7: when Redis comes back empty, each of many waiters acquires again. Little else is sent, and the log has few
// lines, with the number of those left out.
func TestManyWaitersAreServedSoonAfterAnEmptyRestart(t *testing.T) {
	const many = 300
	for _, keys := range []int{1, many} {
		inBubble(t, func(w *world) {
			var log redistest.Log
			other := NewMutex(w.client(w.link), "x", WithLogger(slog.New(slog.DiscardHandler)))
			for i := range keys {
				if _, err := other.LockContext(w.Context(), WithKey(fmt.Sprint(i))); err != nil {
					t.Fatal(err)
				}
			}
			rc, sent := w.client(w.link), &counter{}
			rc.AddHook(sent)
			m := NewMutex(rc, "x", WithLogger(log.Logger()))
			var all sync.WaitGroup
			for i := range many {
				all.Go(func() {
					l, err := m.LockContext(context.Background(), WithKey(fmt.Sprint(i%keys)))
					if err != nil {
						t.Error(err)
						return
					}
					w.unlock(l)
				})
			}
			redistest.Elapse(time.Second)
			w.link.Refuse(true)
			w.link.Cut()
			redistest.Elapse(6 * time.Second)
			w.Redis.FlushAll()
			w.link.Refuse(false)
			sent.reset()
			back := time.Now()
			all.Wait()
			if took := time.Since(back); took > 5*time.Second {
				t.Errorf("%d keys: the last was granted after %v", keys, took)
			}
			redistest.Elapse(time.Minute)
			// An acquire and a release of the new id, a release of the old one, and what was tried meanwhile.
			if n, _ := sent.reset(); n > 6*many {
				t.Errorf("%d keys: %d commands for %d waiters", keys, n, many)
			}
			if n := log.Count(""); n > 100 {
				t.Errorf("%d keys: %d lines in the log: %.1000s", keys, n, log.String())
			}
		})
	}
}

// Promise 10: all waiters get ErrNotLock within a TTL after foreign data replaces the holder key, and the data stays as
// it is.
func TestWaitersGetErrNotLockForForeignData(t *testing.T) {
	for _, n := range []int{1, 5} {
		onNodes(t, n, func(ns *nodes) {
			holder := ns.lock(ns.mutex(), true)
			synctest.Wait() // until it is held on all nodes
			m := ns.mutex()
			told := make(chan error, 100)
			for i := range cap(told) {
				go func() {
					_, err := verb(m, i%2 == 0)(ns.Context())
					told <- err
				}()
			}
			synctest.Wait()
			for _, mini := range ns.minis {
				if err := mini.Set("x", "data"); err != nil {
					t.Fatal(err)
				}
			}
			start := time.Now()
			for range cap(told) {
				ns.matches(<-told, ErrNotLock)
			}
			if took := time.Since(start); took > DefaultTTL {
				t.Errorf("%d nodes: the last got its error after %v", n, took)
			}
			redistest.Elapse(time.Minute)
			for _, mini := range ns.minis {
				if data, err := mini.Get("x"); data != "data" || err != nil {
					t.Errorf("%d nodes: the data is now %q, %v", n, data, err)
				}
			}
			ns.matches(context.Cause(holder), ErrLockLost)
			if cause := context.Cause(holder); !strings.Contains(cause.Error(), ErrNotLock.Error()) {
				t.Errorf("%d nodes: %q does not name foreign data", n, cause)
			}
		})
	}
}

// Promise 10: a waiter on a client that is closed gets an error, as holders and new callers do.
func TestWaiterOnAClosedClientGetsAnError(t *testing.T) {
	for _, n := range []int{1, 3} {
		onNodes(t, n, func(ns *nodes) {
			holder := ns.lock(ns.mutex(), true)
			clients := ns.process()
			m := NewRedlock(clients, "x")
			told := make(chan error, 2)
			for i := range cap(told) {
				go func() { _, err := verb(m, i == 0)(context.Background()); told <- err }()
			}
			synctest.Wait()
			start := time.Now()
			for _, rc := range clients {
				rc.(*redis.Client).Close()
			}
			for range cap(told) {
				err := <-told
				ns.matches(err, ErrRedis)
				if !errors.Is(err, redis.ErrClosed) {
					t.Errorf("%d nodes: %q does not match redis.ErrClosed", n, err)
				}
			}
			if took := time.Since(start); took > DefaultTTL {
				t.Errorf("%d nodes: the last got its error after %v", n, took)
			}
			ns.unlock(holder)
		})
	}
}
