package integration

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/redistest"
)

// A Ring publishes and subscribes on different shards. So the library does not subscribe, and waiters poll.
func TestRingWorksByLooking(t *testing.T) {
	t.Parallel()
	shards := map[string]*redistest.Server{"one": redistest.Start(t), "two": redistest.Start(t)}
	ring := func() *redis.Ring {
		addrs := map[string]string{}
		for name, s := range shards {
			addrs[name] = s.Addr()
		}
		rc := redis.NewRing(&redis.RingOptions{Addrs: addrs})
		t.Cleanup(func() { rc.Close() })
		return rc
	}
	first, second := ring(), ring()
	var looks []*redis.Client
	for _, s := range shards {
		looks = append(looks, s.Client(t))
	}
	for i := range 8 {
		name := fmt.Sprint("k", i)
		a := redismutex.NewMutex(first, name, redismutex.WithTTL(long), inRedis)
		b := redismutex.NewMutex(second, name, redismutex.WithTTL(long), inRedis)
		holder := lock(t, a.LockContext)
		if _, err := b.TryLockContext(t.Context()); !errors.Is(err, redismutex.ErrLock) {
			t.Errorf("want an error that matches %q, got %v", redismutex.ErrLock, err)
		}
		waiters := []<-chan outcome{later(b.RLockContext), later(a.RLockContext)}
		redistest.Eventually(t, "both wait", func() bool { return second.ZCard(t.Context(), "{"+name+"}:lock-intent").Val() == 2 })
		for _, rc := range looks {
			if list := rc.Do(t.Context(), "CLIENT", "LIST", "TYPE", "pubsub").Val(); list != "" {
				t.Errorf("want no subscription, got %v", list)
			}
		}
		unlock(t, holder)
		for _, w := range waiters {
			unlock(t, soon(t, w))
		}
	}
	for _, rc := range looks {
		if rc.DBSize(t.Context()).Val() == 0 {
			t.Error("want locks on both shards, one has none")
		}
	}
}

// An AutoPipeliner works like any other client.
func TestAutoPipelinerLocks(t *testing.T) {
	t.Parallel()
	for name, opt := range map[string]*redis.AutoPipelineOptions{
		"default":     nil,
		"full duplex": {FullDuplex: true},
		"unordered":   {Unordered: true, MaxConcurrentBatches: 4},
	} {
		t.Run(name, func(t *testing.T) {
			const ttl = 600 * time.Millisecond
			s := open(t)
			auto := func() *redis.AutoPipeliner {
				ap, err := s.client(nil).AutoPipelineWithOptions(opt)
				if err != nil {
					t.Fatal(err)
				}
				return ap
			}
			first, second := auto(), auto()
			mutexes := []*redismutex.RWMutex{
				s.mutexOf(first, redismutex.WithTTL(long)), s.mutexOf(second, redismutex.WithTTL(long)),
			}
			strict := []*redismutex.RWMutex{
				s.mutexOf(first, redismutex.WithTTL(long), inRedis), s.mutexOf(second, redismutex.WithTTL(long), inRedis),
			}
			for i := range 4 {
				holder := s.lock(strict[i%2].LockContext)
				if _, err := strict[i/2].TryRLockContext(s.Context()); !errors.Is(err, redismutex.ErrLock) {
					t.Errorf("want an error that matches %q, got %v", redismutex.ErrLock, err)
				}
				waiter := later(acquire(strict[i/2], i%2 == 0))
				s.waiting(1)
				s.unlock(holder)
				s.unlock(s.soon(waiter))
			}

			held := s.lock(redismutex.NewMutex(first, "other", redismutex.WithTTL(ttl)).RLockContext)
			var w redistest.Witness
			start := time.Now()
			w.Crowd(16, func() bool { return time.Since(start) > ttl }, func(i int) (write bool, out func()) {
				l, err := acquire(mutexes[i%2], i%3 == 0)(s.Context())
				if err != nil {
					t.Error(err)
					return false, nil
				}
				return i%3 == 0, func() {
					if err := l.UnlockContext(s.Context()); err != nil {
						t.Error(err)
					}
				}
			})
			if w.Seen() > 0 {
				t.Errorf("want no overlap, saw %d: %v", w.Seen(), w.Overlaps)
			}
			outlive(t, 2*ttl, held)
			s.unlock(held)

			// The end of the context ends a wait in the queue.
			holder := s.lock(mutexes[0].LockContext)
			ctx, cancel := context.WithCancel(s.Context())
			waiter := laterIn(ctx, mutexes[1].LockContext)
			s.waiting(1)
			cancel()
			if o := <-waiter; !errors.Is(o.Err, context.Canceled) {
				t.Errorf("want an error that matches %q, got %v", context.Canceled, o.Err)
			}
			s.waiting(0)
			s.unlock(holder)
			s.empty(key)
		})
	}
}
