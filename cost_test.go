package redismutex

// This file answers: what does a lock cost, in what can be counted? Commands,
// allocations, goroutines, bytes and round trips are exact, so they are guarded
// here; time is measured by the benchmarks.

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/redistest"
)

func TestUncontendedLockIsTwoCommands(t *testing.T) {
	for _, write := range []bool{true, false} {
		inBubble(t, func(w *world) {
			rc, sent := w.client(nil), &counter{}
			rc.AddHook(sent)
			m := NewMutex(rc, "x")
			w.unlock(w.lock(m, write)) // the server learns the scripts
			synctest.Wait()
			sent.reset()
			for range 10 {
				w.unlock(w.lock(m, write))
			}
			if n, _ := sent.reset(); n != 20 {
				t.Errorf("%d commands for 10 locks", n)
			}
		})
	}
}

// A contended lock is two commands, however many wait: an enter and a leave.
func TestContendedLockIsTwoCommands(t *testing.T) {
	for _, waiters := range []int{8, 64, 512} {
		inBubble(t, func(w *world) {
			rc, sent := w.client(nil, func(o *redis.Options) { o.PoolSize = 600 }), &counter{}
			rc.AddHook(sent)
			m := NewMutex(rc, "x")
			w.unlock(w.lock(m, true))
			holder := w.lock(m, true)
			first := w.later(m, true) // the mailbox opens
			synctest.Wait()
			sent.reset()
			const rounds = 3
			var wg sync.WaitGroup
			for range waiters {
				wg.Go(func() {
					for range rounds {
						w.unlock(w.lock(m, true))
					}
				})
			}
			synctest.Wait()
			w.unlock(holder)
			w.unlock(<-first)
			wg.Wait()
			if n, _ := sent.reset(); float64(n) > 2.2*float64(waiters*rounds) {
				t.Errorf("%d waiters: %d commands for %d locks", waiters, n, waiters*rounds)
			}
		})
	}
}

func TestAllocationsOfAnUncontendedLock(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	ctx := context.Background()
	m := NewMutex(redistest.Start(t).Client(t), "x")
	for _, write := range []bool{true, false} {
		lock := m.RLockContext
		if write {
			lock = m.LockContext
		}
		n := testing.AllocsPerRun(1000, func() {
			l, err := lock(ctx)
			if err != nil {
				t.Fatal(err)
			}
			l.Unlock()
		})
		t.Logf("writer=%v: %v allocations", write, n)
		if n > 20 {
			t.Errorf("writer=%v: %v allocations for Lock and Unlock", write, n)
		}
	}
}

// Renewals that fall due together share a round trip, and each lock's fate is
// its own.
func TestRenewalsShareRoundTripsNotFates(t *testing.T) {
	inBubble(t, func(w *world) {
		const n = 2000
		rc, sent := w.client(w.link), &counter{} // an in-memory pipe alone buffers nothing
		rc.AddHook(sent)
		m := NewMutex(rc, "x")
		locks := make([]*Lock, n)
		for i := range locks {
			l, err := m.LockContext(context.Background(), WithKey(fmt.Sprint(i)))
			if err != nil {
				t.Fatal(err)
			}
			locks[i] = l
		}
		synctest.Wait()
		sent.reset()
		time.Sleep(3 * DefaultTTL)
		commands, trips := sent.reset()
		if commands < 3*n || commands > 7*n || trips > commands/100 {
			t.Errorf("%d renewals in %d round trips", commands, trips)
		}
		w.m.Del("x:7")
		time.Sleep(DefaultTTL)
		for i, l := range locks {
			if (l.Err() != nil) != (i == 7) {
				t.Fatalf("lock %d: %v", i, context.Cause(l))
			}
			if i != 7 {
				w.unlock(l)
			}
		}
	})
}

// A held lock has no goroutine and no timer of its own, and is small.
func TestHeldLockIsSmall(t *testing.T) {
	const n = 2000
	m := NewMutex(redistest.Start(t).Client(t), "x")
	locks, names := make([]*Lock, n), make([]LockOption, n)
	for i := range names {
		names[i] = WithKey(fmt.Sprint(i))
	}
	hold := func() {
		for i := range locks {
			l, err := m.LockContext(context.Background(), names[i])
			if err != nil {
				t.Fatal(err)
			}
			locks[i] = l
		}
	}
	free := func() {
		for _, l := range locks {
			l.Unlock()
		}
		clear(locks)
	}
	hold() // the pool, the heap of the keeper: what is there once, is there now
	free()
	goroutines, bytes := runtime.NumGoroutine(), liveBytes()
	hold()
	perLock := (liveBytes() - bytes) / n
	if more := runtime.NumGoroutine() - goroutines; more > 0 {
		t.Errorf("%d goroutines for %d held locks", more, n)
	}
	t.Logf("%d bytes for a held lock", perLock)
	if !raceEnabled && perLock > 700 {
		t.Errorf("%d bytes for a held lock", perLock)
	}
	free()
}

func liveBytes() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
