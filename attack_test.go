package redismutex

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"net"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/localqueue"
)

// F1: a reader that joined a WRITE acquisition nests a write lock: must be ErrUpgrade.
func TestAttackNestedWriteInReaderOfWriteTurn(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		l := w.lock(m, true)
		r1, r2 := w.later(m, false), w.later(m, false)
		w.pending(r1)
		w.unlock(l)
		a, b := w.granted(r1, "r1"), w.granted(r2, "r2")
		n, err := m.LockContext(a)
		if !errors.Is(err, ErrUpgrade) {
			t.Errorf("write lock nested in a reader: err=%v, want ErrUpgrade; reader b.Err()=%v token=%d", err, b.Err(), n.Token())
			time.Sleep(10*time.Millisecond) // the turn ends: Redis gets a read lock
			other := NewMutex(w.client(nil), "x")
			synctest.Wait()
			if r := w.try(other, false); r != nil {
				t.Errorf("and another PROCESS reads while n writes: n.Err()=%v r.Err()=%v", n.Err(), r.Err())
				w.unlock(r)
			}
			w.unlock(n)
		}
		w.unlock(a)
		w.unlock(b)
	})
}

// F1b: by owner
func TestAttackNestedWriteInReaderOwner(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		l := w.lock(m, true)
		r1 := w.later(m, false)
		w.pending(r1)
		w.unlock(l)
		a := w.granted(r1, "r1")
		o, err := m.RLockContext(a, WithOwner("o"))
		if err != nil { t.Fatal(err) }
		n, err := m.LockContext(context.Background(), WithOwner("o"))
		if !errors.Is(err, ErrUpgrade) {
			t.Errorf("owner: err=%v, want ErrUpgrade", err)
			w.unlock(n)
		}
		w.unlock(o)
		w.unlock(a)
	})
}

// F4: nodes in another order share a queue.
func TestAttackNodeOrder(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		clients := ns.process()
		m1 := NewRedlock(clients, "x")
		rev := slices.Clone(clients)
		slices.Reverse(rev)
		m2 := NewRedlock(rev, "x")
		l := ns.lock(m1, true)
		next := ns.later(m2, true)
		ns.pending(next)
		time.Sleep(20 * time.Millisecond) // the turn is over
		if err := l.UnlockContext(ns.Context()); err != nil {
			t.Errorf("unlock of the first: %v", err)
		}
		synctest.Wait()
		var l2 *Lock
		start := time.Now()
		select {
		case l2 = <-next:
		case <-time.After(time.Minute):
			t.Fatal("second never granted")
		}
		if d := time.Since(start); d > 0 { t.Errorf("second granted after %v", d) }
		time.Sleep(10*time.Second)
		if l2.Err() != nil {
			t.Errorf("second lost: %v", context.Cause(l2))
		}
		if err := l2.UnlockContext(ns.Context()); err != nil {
			t.Errorf("unlock of the second: %v", err)
		}
		start = time.Now()
		m3 := ns.mutex()
		l3 := ns.lock(m3, true)
		if d := time.Since(start); d > 0 { t.Errorf("third (other process) granted after %v", d) }
		ns.unlock(l3)
	})
}

type panicHook struct{ on bool; pipe bool }

func (h *panicHook) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}
func (h *panicHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, c redis.Cmder) error {
		if h.on { h.on = false; panic("hook") }
		return next(ctx, c)
	}
}
func (h *panicHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, c []redis.Cmder) error {
		if h.pipe { h.pipe = false; panic("pipehook") }
		return next(ctx, c)
	}
}

// F2: a hook that panics on the caller's goroutine (recovered by the caller, as net/http does) leaves the queue stuck.
func TestAttackPanicHookAcquire(t *testing.T) {
	for name, opt := range map[string][]MutexOption{"turn": nil, "strict": {WithTurn(0)}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				rc := w.client(nil)
				h := &panicHook{}
				rc.AddHook(h)
				m := NewMutex(rc, "x", opt...)
				w.unlock(w.lock(m, true))
				h.on = true
				func() {
					defer func() { t.Log("recovered", recover()) }()
					m.Lock()
				}()
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				defer cancel()
				l, err := m.LockContext(ctx)
				if err != nil {
					t.Errorf("after a recovered panic: %v; queues %d", err, localqueue.Len())
				} else {
					w.unlock(l)
				}
			})
		})
	}
}

func TestAttackPanicHookUnlock(t *testing.T) {
	for name, opt := range map[string][]MutexOption{"turn": nil, "strict": {WithTurn(0)}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				rc := w.client(nil)
				h := &panicHook{}
				rc.AddHook(h)
				m := NewMutex(rc, "x", opt...)
				l := w.lock(m, true)
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				defer cancel()
				res := make(chan error, 1)
				go func() {
					l, err := m.LockContext(ctx)
					if err == nil { w.unlock(l) }
					res <- err
				}()
				w.pending(nil)
				time.Sleep(10*time.Millisecond)
				h.on, h.pipe = name == "strict", true
				func() {
					defer func() { t.Log("recovered", recover()) }()
					l.Unlock()
				}()
				if err := <-res; err != nil {
					t.Errorf("waiter after a recovered panic in Unlock: %v", err)
				}
				l3, err := m.LockContext(ctx)
				if err != nil { t.Errorf("third: %v", err) } else { w.unlock(l3) }
			})
		})
	}
}

// F5: LockContext hangs instead of ErrRedis when the queue has been acknowledged once.
func TestAttackFirstErrorWhileReaderHeld(t *testing.T) {
	for name, opt := range map[string][]MutexOption{"turn": nil, "strict": {WithTurn(0)}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				rc := w.client(w.link, func(o *redis.Options) { o.MaxRetries, o.ReadTimeout, o.DialerRetries = -1, time.Second, 1 })
				m := NewMutex(rc, "x", opt...)
				r := w.lock(m, false)
				time.Sleep(time.Second)
				w.link.Refuse(true)
				w.link.Cut()
				ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
				defer cancel()
				start := time.Now()
				_, err := m.LockContext(ctx)
				t.Logf("after %v: %v (reader: %v)", time.Since(start), err, r.Err())
				if !errors.Is(err, ErrRedis) { t.Errorf("want ErrRedis at once") }
				w.link.Refuse(false)
				r.Unlock()
			})
		})
	}
}

var _ sync.Mutex
