package redismutex_test

// Crowds: ten thousand goroutines of one process that lock at once, a Redis that comes back empty while they wait, and
// a hundred thousand locks held by one client. The metrics are errors and lost locks.
//
//	REDISTEST_CPU=1 taskset -c 0 go test -run '^$' -bench 'Crowd|EmptyRestart|ManyHeld' -benchtime 1x .

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/redistest"
)

// A throng is one process with many goroutines, on one node or several.
type throng struct {
	testing.TB
	*redistest.Quorum
	nodes  []redis.Scripter // the process' clients
	log    redistest.Log
	errors atomic.Int64
	first  atomic.Pointer[error]
}

func newThrong(tb testing.TB, nodes int) *throng {
	c := &throng{TB: tb, Quorum: redistest.StartQuorum(tb, nodes)}
	c.nodes = c.Process()
	tb.Cleanup(func() {
		if err := c.first.Load(); err != nil {
			tb.Log("the first error: ", *err)
		}
		if n := c.log.Count(""); n > 0 {
			tb.Logf("%d lines in the log: %.2000s", n, c.log.String())
		}
	})
	return c
}

// mutex returns a strict one: each request stands in Redis, and not one for the whole process.
func (c *throng) mutex(name string) *redismutex.RWMutex {
	return redismutex.NewRedlock(c.nodes, name, redismutex.WithTurn(0), redismutex.WithLogger(c.log.Logger()))
}

// hold acquires n locks, spread over that many keys, and returns them.
func (c *throng) hold(n, keys int, write bool) []*redismutex.Lock {
	lock := acquire(c.mutex("held"), write)
	locks := make([]*redismutex.Lock, n)
	var all sync.WaitGroup
	for part := range 16 {
		all.Go(func() {
			for i := part; i < n; i += 16 {
				l, err := lock(context.Background(), redismutex.WithKey(fmt.Sprint(i%keys)))
				if err != nil {
					c.Error(err)
					return
				}
				locks[i] = l
			}
		})
	}
	all.Wait()
	if c.Failed() {
		c.FailNow()
	}
	return locks
}

func lost(locks []*redismutex.Lock) (n int) {
	for _, l := range locks {
		if l.Err() != nil {
			n++
		}
	}
	return n
}

func unlockAll(locks []*redismutex.Lock) {
	var all sync.WaitGroup
	for _, l := range locks {
		all.Go(l.Unlock)
	}
	all.Wait()
}

// lock has n goroutines lock and unlock one of that many keys each, and returns a function that waits for all of them.
func (c *throng) lock(n, keys int) (wait func()) {
	m := c.mutex("crowd")
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			l, err := m.LockContext(context.Background(), redismutex.WithKey(fmt.Sprint(i%keys)))
			if err == nil {
				err = l.UnlockContext(context.Background())
			}
			if err != nil {
				c.errors.Add(1)
				c.first.CompareAndSwap(nil, &err)
			}
		})
	}
	return all.Wait
}

// BenchmarkCrowd has 10,000 goroutines lock at once while the process holds 1,000 locks.
func BenchmarkCrowd(b *testing.B) {
	for _, nodes := range []int{1, 5} {
		for _, keys := range []int{1, 10000} {
			b.Run(fmt.Sprintf("nodes=%d/keys=%d", nodes, keys), func(b *testing.B) {
				c := newThrong(b, nodes)
				held := c.hold(1000, 1000, true)
				for b.Loop() {
					c.lock(10000, keys)()
				}
				b.ReportMetric(float64(c.errors.Load()), "errors")
				b.ReportMetric(float64(lost(held)), "lost")
				unlockAll(held)
			})
		}
	}
}

// BenchmarkEmptyRestart has 10,000 goroutines wait as Redis goes down, and come back empty after 6 s. It measures how
// long after that the last of them is granted.
func BenchmarkEmptyRestart(b *testing.B) {
	for _, keys := range []int{1, 10000} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			var took time.Duration
			lines := 0
			for range b.N {
				c := newThrong(b, 1)
				rc := c.Servers[0].Client(b)
				other := redismutex.NewMutex(rc, "crowd", redismutex.WithLogger(slog.New(slog.DiscardHandler)))
				for i := range keys {
					if _, err := other.LockContext(context.Background(), redismutex.WithKey(fmt.Sprint(i))); err != nil {
						b.Fatal(err)
					}
				}
				wait := c.lock(10000, keys)
				redistest.Eventually(b, "all goroutines wait", func() bool { return waitersOf(rc, "crowd", keys) == 10000 })
				c.Servers[0].Kill()
				time.Sleep(6 * time.Second) // the outage
				c.Servers[0].Restart(b)
				back := time.Now()
				wait()
				took += time.Since(back)
				lines += c.log.Count("")
				if n := c.errors.Load(); n > 0 {
					b.Errorf("%d errors", n)
				}
			}
			b.ReportMetric(took.Seconds()/float64(b.N), "s-until-served")
			b.ReportMetric(float64(lines)/float64(b.N), "log-lines")
		})
	}
}

// waitersOf returns the number of waiters for the keys of a mutex.
func waitersOf(rc *redis.Client, name string, keys int) (n int64) {
	pipe := rc.Pipeline()
	counts := make([]*redis.IntCmd, keys)
	for i := range counts {
		counts[i] = pipe.ZCard(context.Background(), fmt.Sprintf("{%s:%d}:lock-intent", name, i))
	}
	_, _ = pipe.Exec(context.Background())
	for _, c := range counts {
		n += c.Val()
	}
	return n
}

// BenchmarkManyHeld has one client hold 100,000 read locks for three TTLs.
func BenchmarkManyHeld(b *testing.B) {
	for _, keys := range []int{1, 100000} {
		for _, write := range []bool{false, true} {
			if write && keys == 1 {
				continue
			}
			b.Run(fmt.Sprintf("%ss/keys=%d", kind(write), keys), func(b *testing.B) {
				c := newThrong(b, 1)
				for range b.N {
					locks := c.hold(100000, keys, write)
					time.Sleep(3 * redismutex.DefaultTTL) // the load: all are renewed
					b.ReportMetric(float64(lost(locks)), "lost")
					unlockAll(locks)
				}
			})
		}
	}
}
