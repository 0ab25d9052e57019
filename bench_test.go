package redismutex_test

// This file answers: what does a lock cost, beside the least that Redis can do?
// Every benchmark runs the floor and the lock by turns and reports their ratio,
// which holds on a noisy machine where a time does not. Run them with the
// client and the server on a core each:
//
//	REDISTEST_CPU=1 taskset -c 0 go test -run '^$' -bench . .

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
)

var compareAndDelete = redis.NewScript(`
	if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
	return 0`)

// BenchmarkUncontended compares Lock+Unlock with SET NX and a
// compare-and-delete script.
func BenchmarkUncontended(b *testing.B) {
	parents := map[string]func() (context.Context, context.CancelFunc){
		"background":  func() (context.Context, context.CancelFunc) { return context.Background(), func() {} },
		"cancellable": func() (context.Context, context.CancelFunc) { return context.WithCancel(context.Background()) },
	}
	for name, parent := range parents {
		b.Run(name, func(b *testing.B) {
			rc := redistest.Start(b).Client(b)
			ctx, cancel := parent()
			defer cancel()
			m := redismutex.NewMutex(rc, "bench")
			floor := func(i int) {
				id := fmt.Sprint("some-random-id-of-a-lock-", i)
				if ok, err := rc.SetNX(ctx, "floor", id, 4*time.Second).Result(); err != nil || !ok {
					b.Fatal(ok, err)
				}
				if n, err := compareAndDelete.Run(ctx, rc, []string{"floor"}, id).Int(); err != nil || n != 1 {
					b.Fatal(n, err)
				}
			}
			lock := func(int) {
				l, err := m.LockContext(ctx)
				if err != nil {
					b.Fatal(err)
				}
				if err := l.UnlockContext(context.Background()); err != nil {
					b.Fatal(err)
				}
			}
			floor(0)
			lock(0)
			const block = 100
			var floorTime, lockTime time.Duration
			n := 0
			for b.Loop() {
				t0 := time.Now()
				for i := range block {
					floor(i)
				}
				t1 := time.Now()
				for i := range block {
					lock(i)
				}
				floorTime += t1.Sub(t0)
				lockTime += time.Since(t1)
				n += block
			}
			b.ReportMetric(lockTime.Seconds()/floorTime.Seconds(), "×floor")
			b.ReportMetric(float64(lockTime.Nanoseconds())/float64(n), "ns/lock")
		})
	}
}

// BenchmarkContended compares one lock that many goroutines want with a token
// that they pop from and push to a list.
func BenchmarkContended(b *testing.B) {
	for _, net := range []struct {
		name  string
		delay time.Duration
	}{{"loopback", 0}, {"1ms", 500 * time.Microsecond}} {
		for _, who := range []struct {
			name                string
			goroutines, clients int
		}{{"16goroutines", 16, 1}, {"64goroutines", 64, 1}, {"16clients", 16, 16}} {
			b.Run(net.name+"/"+who.name, func(b *testing.B) {
				server := redistest.Start(b)
				var clients []*redis.Client
				var sent atomic.Int64
				for range who.clients {
					link := faultnet.New(nil)
					link.SetDelay(net.delay)
					rc := server.Client(b, func(o *redis.Options) {
						o.PoolSize = 100
						if net.delay > 0 {
							o.Dialer = link.Dial
						}
					})
					clients = append(clients, rc)
				}
				contend(b, server, clients, who.goroutines, &sent)
			})
		}
	}
}

func contend(b *testing.B, server *redistest.Server, clients []*redis.Client, goroutines int, sent *atomic.Int64) {
	ctx := context.Background()
	var mutexes []*redismutex.RWMutex
	for _, rc := range clients {
		mutexes = append(mutexes, redismutex.NewMutex(rc, "bench"))
	}
	clients[0].LPush(ctx, "token", "t")
	floor := func(g int) {
		rc := clients[g%len(clients)]
		if err := rc.BLPop(ctx, 0, "token").Err(); err != nil {
			b.Error(err)
		}
		if err := rc.LPush(ctx, "token", "t").Err(); err != nil {
			b.Error(err)
		}
	}
	lock := func(g int) {
		l, err := mutexes[g%len(clients)].LockContext(ctx)
		if err != nil {
			b.Error(err)
			return
		}
		if err := l.UnlockContext(ctx); err != nil {
			b.Error(err)
		}
	}
	run := func(f func(int), d time.Duration) (counts []int, waits []time.Duration) {
		counts = make([]int, goroutines)
		all := make([][]time.Duration, goroutines)
		var stop atomic.Bool
		time.AfterFunc(d, func() { stop.Store(true) })
		var wg sync.WaitGroup
		for g := range goroutines {
			wg.Go(func() {
				for !stop.Load() {
					t := time.Now()
					f(g)
					all[g] = append(all[g], time.Since(t))
					counts[g]++
				}
			})
		}
		wg.Wait()
		return counts, slices.Concat(all...)
	}
	run(floor, 200*time.Millisecond)
	run(lock, 200*time.Millisecond)
	var floors, locks int
	var lockCounts = make([]int, goroutines)
	var waits []time.Duration
	before := commands(b, clients[0])
	var fl int64
	for b.Loop() {
		c0 := commands(b, clients[0])
		counts, _ := run(floor, 500*time.Millisecond)
		c1 := commands(b, clients[0])
		fl += c1 - c0
		floors += sum(counts)
		counts, w := run(lock, 500*time.Millisecond)
		locks += sum(counts)
		waits = append(waits, w...)
		for g, n := range counts {
			lockCounts[g] += n
		}
	}
	b.Logf("%.700s", func() string { _, r, _ := cut(clients[0].Info(ctx, "commandstats").Val(), "cmdstat_evalsha"); return r }())
	after := commands(b, clients[0])
	slices.Sort(waits)
	b.ReportMetric(float64(locks)/float64(floors), "×BLPOP")
	b.ReportMetric(float64(slices.Min(lockCounts))/float64(slices.Max(lockCounts)), "slowest/fastest")
	b.ReportMetric(jain(lockCounts), "jain")
	b.ReportMetric(float64(waits[len(waits)-1])/float64(waits[len(waits)/2]), "longest/median")
	b.ReportMetric(float64(after-before-fl)/float64(locks), "cmds/lock")
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(locks)/float64(b.N)*2, "locks/s")
}

func sum(counts []int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

func jain(counts []int) float64 {
	var s, q float64
	for _, c := range counts {
		s += float64(c)
		q += float64(c) * float64(c)
	}
	return s * s / math.Max(q*float64(len(counts)), 1)
}

// commands is how many scripts the server has been sent.
func commands(tb testing.TB, rc *redis.Client) (n int64) {
	info := rc.Info(context.Background(), "commandstats").Val()
	for _, name := range []string{"cmdstat_evalsha", "cmdstat_eval"} {
		var calls int64
		if _, rest, ok := cut(info, name+":calls="); ok {
			fmt.Sscanf(rest, "%d", &calls)
		}
		n += calls
	}
	return n
}

func cut(s, sep string) (string, string, bool) {
	for i := 0; i+len(sep) <= len(s); i++ {
		if s[i:i+len(sep)] == sep {
			return s[:i], s[i+len(sep):], true
		}
	}
	return s, "", false
}
