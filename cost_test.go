package redismutex

// This file answers: what does a lock cost, in what can be counted? Commands and
// round trips are exact, as are allocations (cost_memory_test.go), so they are
// guarded; time is measured by the benchmarks.

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
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
			time.Sleep(time.Minute)
			if n, _ := sent.reset(); n != 0 {
				t.Errorf("%d commands for locks that are unlocked", n)
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
