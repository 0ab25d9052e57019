// Package bench answers: how do the peers compare? It is a module of its own, so
// that what they need stays out of the go.mod that users of redismutex import.
package bench

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
)

const (
	nodes      = 5
	goroutines = 16
)

// BenchmarkRedlockUncontended compares Lock+Unlock with redsync's, by turns.
func BenchmarkRedlockUncontended(b *testing.B) {
	onNetworks(b, func(b *testing.B, m *redismutex.RWMutex, rs *redsync.Redsync) {
		ours, theirs := locker(m), redsyncLocker(rs, new(atomic.Int64))
		const block = 50
		turn := func(lock func(critical func())) time.Duration {
			t := time.Now()
			for range block {
				lock(func() {})
			}
			return time.Since(t)
		}
		turn(ours) // the clients dial, the servers learn the scripts
		turn(theirs)
		var oursTime, theirsTime time.Duration
		locks := 0
		for b.Loop() {
			oursTime += turn(ours)
			theirsTime += turn(theirs)
			locks += block
		}
		b.ReportMetric(oursTime.Seconds()/theirsTime.Seconds(), "×redsync-time")
		b.ReportMetric(float64(oursTime.Nanoseconds())/float64(locks), "ns/lock")
		b.ReportMetric(float64(theirsTime.Nanoseconds())/float64(locks), "redsync-ns/lock")
		b.ReportMetric(0, "ns/op")
	})
}

// BenchmarkRedlockContended has 16 goroutines want one lock, as soon as they have
// let go of it. Where redsync gives up, after the tries that it makes by default,
// it is asked again.
func BenchmarkRedlockContended(b *testing.B) {
	onNetworks(b, func(b *testing.B, m *redismutex.RWMutex, rs *redsync.Redsync) {
		var failures atomic.Int64
		newOurs := func() func(func()) { return locker(m) }
		newTheirs := func() func(func()) { return redsyncLocker(rs, &failures) }
		contend(newOurs, time.Second, &result{})
		contend(newTheirs, time.Second, &result{})
		failures.Store(0)
		const turn = 5 * time.Second
		var ours, theirs result
		for b.Loop() {
			contend(newOurs, turn, &ours)
			contend(newTheirs, turn, &theirs)
		}
		seconds := float64(b.N) * turn.Seconds()
		ours.report(b, "", seconds)
		theirs.report(b, "redsync-", seconds)
		b.ReportMetric(float64(ours.locks())/float64(theirs.locks()), "×redsync-locks")
		b.ReportMetric(float64(ours.handovers.Load())/float64(theirs.handovers.Load()), "×redsync-handovers")
		b.ReportMetric(float64(failures.Load()), "redsync-failures")
		b.ReportMetric(0, "ns/op")
	})
}

// onNetworks runs f on loopback, and with a delay of 0.5 ms each way. Both
// libraries use the same clients, and the lease that is redsync's default.
func onNetworks(b *testing.B, f func(*testing.B, *redismutex.RWMutex, *redsync.Redsync)) {
	for _, net := range []struct {
		name  string
		delay time.Duration
	}{{"loopback", 0}, {"1ms", 500 * time.Microsecond}} {
		b.Run(net.name, func(b *testing.B) {
			var clients []redis.Scripter
			var pools []redsyncredis.Pool
			for range nodes {
				link := faultnet.New(nil)
				link.SetDelay(net.delay)
				rc := redistest.Start(b).Client(b, func(o *redis.Options) {
					o.PoolSize = 100 // nobody waits for a connection
					if net.delay > 0 {
						o.Dialer = link.Dial
					}
				})
				clients, pools = append(clients, rc), append(pools, goredis.NewPool(rc))
			}
			f(b, redismutex.NewRedlock(clients, "redismutex", redismutex.WithTTL(8*time.Second)), redsync.New(pools...))
		})
	}
}

func locker(m *redismutex.RWMutex) (lockAndUnlock func(critical func())) {
	ctx := context.Background()
	return func(critical func()) {
		l, err := m.LockContext(ctx)
		must(err)
		critical()
		must(l.UnlockContext(ctx))
	}
}

// redsyncLocker makes a function for one goroutine: a mutex of redsync's is not
// safe for concurrent use.
func redsyncLocker(rs *redsync.Redsync, failures *atomic.Int64) (lockAndUnlock func(critical func())) {
	ctx := context.Background()
	m := rs.NewMutex("redsync")
	return func(critical func()) {
		for m.LockContext(ctx) != nil {
			failures.Add(1)
		}
		critical()
		_, err := m.UnlockContext(ctx)
		must(err)
	}
}

// contend has all goroutines lock and unlock until the turn is over. Each gets a
// function of its own.
func contend(newLocker func() (lockAndUnlock func(critical func())), turn time.Duration, r *result) {
	var over atomic.Bool
	time.AfterFunc(turn, func() { over.Store(true) })
	var all sync.WaitGroup
	for g := range goroutines {
		all.Go(func() {
			lock := newLocker()
			for !over.Load() {
				t := time.Now()
				lock(func() {
					r.longest[g] = max(r.longest[g], time.Since(t))
					if over.Load() {
						return
					}
					r.counts[g]++
					if r.last.Swap(int64(g)) != int64(g) {
						r.handovers.Add(1)
					}
					runtime.Gosched()
				})
			}
		})
	}
	all.Wait()
}

// A result is what became of the goroutines.
type result struct {
	counts    [goroutines]int           // how often each got the lock
	longest   [goroutines]time.Duration // how long it waited for it at the longest
	last      atomic.Int64              // who got it
	handovers atomic.Int64              // how often somebody else got it than before
}

func (r *result) locks() (n int) {
	for _, c := range r.counts {
		n += c
	}
	return n
}

func (r *result) report(b *testing.B, prefix string, seconds float64) {
	b.ReportMetric(float64(r.locks())/seconds, prefix+"locks/s")
	b.ReportMetric(float64(r.handovers.Load())/seconds, prefix+"handovers/s")
	b.ReportMetric(float64(slices.Min(r.counts[:]))/float64(slices.Max(r.counts[:])), prefix+"slowest/fastest")
	b.ReportMetric(float64(slices.Max(r.longest[:]).Milliseconds()), prefix+"longest-wait-ms")
}

func must(err error) {
	if err != nil {
		panic(err) // b.Fatal is for the benchmark's own goroutine alone
	}
}
