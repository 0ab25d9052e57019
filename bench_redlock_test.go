package redismutex_test

// What a majority of several nodes costs, beside one node. bench_test.go tells how to run the benchmarks.

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/redistest"
)

// BenchmarkQuorum compares Lock+Unlock on several nodes with the same on one of them, by turns. All nodes are
// called at once, so a longer distance hardly matters. A node that is not needed any more is not called, so there may be
// fewer than 2 commands for each lock and node.
func BenchmarkQuorum(b *testing.B) {
	for _, net := range []struct {
		name  string
		delay time.Duration
	}{{"loopback", 0}, {"1ms", 500 * time.Microsecond}} {
		for _, n := range []int{3, 5} {
			b.Run(fmt.Sprintf("%s/%dnodes", net.name, n), func(b *testing.B) {
				quorum, nodes := startNodes(b, n, net.delay)
				one, all := redismutex.NewMutex(nodes[0], "one"), redismutex.NewRedlock(nodes, "quorum")
				lock := func(m *redismutex.RWMutex) {
					l, err := m.LockContext(context.Background())
					must(b, err)
					must(b, l.UnlockContext(context.Background()))
				}
				const block = 50
				turn := func(m *redismutex.RWMutex) time.Duration {
					t := time.Now()
					for range block {
						lock(m)
					}
					return time.Since(t)
				}
				turn(one) // the clients dial, the servers learn the scripts
				turn(all)
				var oneTime, quorumTime time.Duration
				locks, sent, allocs := 0, 0, uint64(0)
				for b.Loop() {
					oneTime += turn(one)
					before, start := redistest.ScriptsRun(quorum.Admin...), mallocs()
					quorumTime += turn(all)
					allocs += mallocs() - start
					sent += redistest.ScriptsRun(quorum.Admin...) - before
					locks += block
				}
				b.ReportMetric(quorumTime.Seconds()/oneTime.Seconds(), "×one-node")
				b.ReportMetric(float64(quorumTime.Nanoseconds())/float64(locks), "ns/lock")
				b.ReportMetric(float64(sent)/float64(n*locks), "commands/node/lock")
				if net.delay == 0 { // a link allocates, too
					b.ReportMetric(float64(allocs)/float64(locks), "allocs/lock")
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// BenchmarkQuorumContended has 16 goroutines lock one key on 5 nodes.
func BenchmarkQuorumContended(b *testing.B) {
	const goroutines, n, turn = 16, 5, 2 * time.Second
	quorum, nodes := startNodes(b, n, 0)
	m := redismutex.NewRedlock(nodes, "quorum")
	locks := make([]int, goroutines)
	run := func() {
		var stop atomic.Bool
		time.AfterFunc(turn, func() { stop.Store(true) })
		var wg sync.WaitGroup
		for g := range goroutines {
			wg.Go(func() {
				for !stop.Load() {
					l, err := m.LockContext(context.Background())
					must(b, err)
					must(b, l.UnlockContext(context.Background()))
					locks[g]++
				}
			})
		}
		wg.Wait()
	}
	run()
	clear(locks)
	before := redistest.ScriptsRun(quorum.Admin...)
	var took time.Duration
	for b.Loop() {
		t := time.Now()
		run()
		took += time.Since(t)
	}
	sent := redistest.ScriptsRun(quorum.Admin...) - before
	b.ReportMetric(float64(sum(locks))/took.Seconds(), "locks/s")
	b.ReportMetric(float64(slices.Min(locks))/float64(slices.Max(locks)), "slowest/fastest")
	b.ReportMetric(float64(sent)/float64(n*sum(locks)), "commands/node/lock")
	b.ReportMetric(0, "ns/op")
}

// mallocs returns how many objects have been allocated. testing.AllocsPerRun would run on one CPU, where other nodes are
// called too late to be needed.
func mallocs() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.Mallocs
}

// startNodes starts a quorum and returns a client of each server, with a delay each way.
func startNodes(b *testing.B, n int, each time.Duration) (q *redistest.Quorum, nodes []redis.Scripter) {
	q = redistest.StartQuorum(b, n)
	for _, s := range q.Servers {
		nodes = append(nodes, distant(b, s, each))
	}
	return q, nodes
}
