package redismutex_test

// What a lock costs, beside the least that Redis can do. Every benchmark runs the floor and the lock by turns and reports
// their ratio, which holds on a noisy machine where a time does not. Run them with the client and the server on a core
// each:
//
//	REDISTEST_CPU=1 taskset -c 0 go test -run '^$' -bench . .

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
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

// BenchmarkUncontended compares Lock+Unlock with SET NX and a compare-and-delete script. A Trace without functions costs
// nothing.
func BenchmarkUncontended(b *testing.B) {
	cancellable, cancel := context.WithCancel(context.Background())
	defer cancel()
	for _, c := range []struct {
		name   string
		parent context.Context
		opt    []redismutex.MutexOption
	}{
		{"background", context.Background(), nil},
		{"background, empty Trace", context.Background(), []redismutex.MutexOption{redismutex.WithTrace(new(redismutex.Trace))}},
		{"cancellable", cancellable, nil},
	} {
		b.Run(c.name, func(b *testing.B) {
			rc, ctx := redistest.Start(b).Client(b), c.parent
			m := redismutex.NewMutex(rc, "bench", c.opt...)
			floor := func(i int) {
				id := fmt.Sprint("some-random-id-of-a-lock-", i)
				must(b, rc.SetNX(ctx, "floor", id, 4*time.Second).Err())
				must(b, compareAndDelete.Run(ctx, rc, []string{"floor"}, id).Err())
			}
			lock := func(int) {
				l, err := m.LockContext(ctx)
				must(b, err)
				must(b, l.UnlockContext(context.Background()))
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

// BenchmarkContended compares a lock that many goroutines compete for with a token that they pop from and push to a list.
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
				for range who.clients {
					clients = append(clients, distant(b, server, net.delay))
				}
				// Long enough that each goroutine has its turn many times.
				turn := 500 * time.Millisecond
				if net.delay > 0 {
					turn = 3 * time.Second
				}
				contend(b, clients, who.goroutines, turn)
			})
		}
	}
}

// contend runs the floor and the lock by turns.
func contend(b *testing.B, clients []*redis.Client, goroutines int, turn time.Duration) {
	ctx := context.Background()
	var mutexes []*redismutex.RWMutex
	for _, rc := range clients {
		mutexes = append(mutexes, redismutex.NewMutex(rc, "bench"))
	}
	must(b, clients[0].LPush(ctx, "token", "t").Err())
	floor := func(g int) {
		rc := clients[g%len(clients)]
		must(b, rc.BLPop(ctx, 0, "token").Err())
		must(b, rc.LPush(ctx, "token", "t").Err())
	}
	lock := func(g int) {
		l, err := mutexes[g%len(clients)].LockContext(ctx)
		must(b, err)
		must(b, l.UnlockContext(ctx))
	}
	run := func(f func(int)) (counts []int, waits []time.Duration) {
		counts = make([]int, goroutines)
		all := make([][]time.Duration, goroutines)
		var stop atomic.Bool
		time.AfterFunc(turn, func() { stop.Store(true) })
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
	run(floor)
	run(lock)
	var floors, sent int
	locks := make([]int, goroutines)
	var waits []time.Duration
	for b.Loop() {
		counts, _ := run(floor)
		floors += sum(counts)
		before := redistest.ScriptsRun(clients[0])
		counts, w := run(lock)
		sent += redistest.ScriptsRun(clients[0]) - before
		waits = append(waits, w...)
		for g, n := range counts {
			locks[g] += n
		}
	}
	slices.Sort(waits)
	b.ReportMetric(float64(sum(locks))/float64(floors), "×BLPOP")
	b.ReportMetric(float64(slices.Min(locks))/float64(slices.Max(locks)), "slowest/fastest")
	b.ReportMetric(float64(waits[len(waits)-1])/float64(waits[len(waits)/2]), "longest/median")
	b.ReportMetric(float64(sent)/float64(sum(locks)), "commands/lock")
	b.ReportMetric(float64(sum(locks))/(float64(b.N)*turn.Seconds()), "locks/s")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkHandoff measures, in round trips, how long a waiter in another
// process waits from the start of Unlock, beside BLPOP from the start of LPUSH.
func BenchmarkHandoff(b *testing.B) {
	ctx := context.Background()
	server := redistest.Start(b)
	holder, waiter := distant(b, server, 500*time.Microsecond), distant(b, server, 500*time.Microsecond)
	mine, theirs := redismutex.NewMutex(holder, "bench"), redismutex.NewMutex(waiter, "bench")
	var trip, floor, lock time.Duration
	for b.Loop() {
		must(b, holder.Ping(ctx).Err())
		t := time.Now()
		must(b, holder.Ping(ctx).Err())
		trip += time.Since(t)

		got := make(chan time.Time)
		go func() {
			must(b, waiter.BLPop(ctx, 0, "token").Err())
			got <- time.Now()
		}()
		for !strings.Contains(holder.Info(ctx, "clients").Val(), "blocked_clients:1") {
			runtime.Gosched()
		}
		t = time.Now()
		must(b, holder.LPush(ctx, "token", "t").Err())
		floor += (<-got).Sub(t)

		l, err := mine.LockContext(ctx)
		must(b, err)
		next := make(chan *redismutex.Lock)
		go func() {
			l, err := theirs.LockContext(ctx)
			must(b, err)
			got <- time.Now()
			next <- l
		}()
		for holder.ZCard(ctx, "{bench}:lock-intent").Val() == 0 {
			runtime.Gosched()
		}
		t = time.Now()
		must(b, l.UnlockContext(ctx))
		lock += (<-got).Sub(t)
		must(b, (<-next).UnlockContext(ctx))
	}
	b.ReportMetric(lock.Seconds()/trip.Seconds(), "round-trips")
	b.ReportMetric(floor.Seconds()/trip.Seconds(), "BLPOP-round-trips")
	b.ReportMetric(lock.Seconds()/floor.Seconds(), "×BLPOP")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkTenThousandReaders measures how long it takes until 10,000 readers
// that wait for one key all hold it, from the start of the writer's Unlock, and
// what the longest script of that was.
func BenchmarkTenThousandReaders(b *testing.B) {
	const readers = 10_000
	ctx := context.Background()
	server := redistest.Start(b)
	holder := server.Client(b)
	waiter := server.Client(b, func(o *redis.Options) { o.PoolTimeout = time.Minute }) // 10,000 calls at once
	mine := redismutex.NewMutex(holder, "bench", redismutex.WithTTL(time.Minute))
	theirs := redismutex.NewMutex(waiter, "bench", redismutex.WithTTL(time.Minute))
	var all, longest time.Duration
	for b.Loop() {
		l, err := mine.LockContext(ctx)
		must(b, err)
		var granted, left sync.WaitGroup
		unlock := make(chan struct{})
		granted.Add(readers)
		for range readers {
			left.Go(func() {
				l, err := theirs.RLockContext(ctx)
				must(b, err)
				granted.Done()
				<-unlock
				must(b, l.UnlockContext(ctx))
			})
		}
		for holder.ZCard(ctx, "{bench}:lock-intent").Val() < readers {
			runtime.Gosched()
		}
		must(b, holder.ConfigSet(ctx, "slowlog-log-slower-than", "500").Err())
		must(b, holder.Do(ctx, "SLOWLOG", "RESET").Err())
		t := time.Now()
		must(b, l.UnlockContext(ctx))
		granted.Wait()
		all += time.Since(t)
		for _, slow := range holder.SlowLogGet(ctx, 100).Val() {
			longest = max(longest, slow.Duration)
		}
		close(unlock)
		left.Wait()
	}
	b.ReportMetric(float64(all.Milliseconds())/float64(b.N), "ms-until-all-granted")
	b.ReportMetric(float64(longest.Microseconds())/1000, "ms-longest-script")
	b.ReportMetric(0, "ns/op")
}

// distant returns a client with a delay each way.
func distant(b *testing.B, server *redistest.Server, each time.Duration) *redis.Client {
	link := faultnet.New(nil)
	link.SetDelay(each)
	return server.Client(b, func(o *redis.Options) {
		o.PoolSize = 100
		if each > 0 {
			redistest.Through(link)(o)
		}
	})
}

func must(b *testing.B, err error) {
	if err != nil {
		panic(err) // b.Fatal is for the benchmark's own goroutine alone
	}
}

func sum(counts []int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}
