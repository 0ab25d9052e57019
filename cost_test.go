package redismutex

// The commands and round trips of a lock. They can be counted exactly, as allocations can (cost_memory_test.go); time is
// measured by the benchmarks.

import (
	"context"
	"fmt"
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
				t.Errorf("%d commands for 10 locks, want 20", n)
			}
			redistest.Elapse(time.Minute)
			if n, _ := sent.reset(); n != 0 {
				t.Errorf("%d commands in the minute after the last unlock, want none", n)
			}
		})
	}
}

// A contended lock is two commands, an acquire and a release, however many wait.
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
				t.Errorf("%d waiters: %d commands for %d locks, want at most 2.2 each", waiters, n, waiters*rounds)
			}
		})
	}
}

// The source of a script is sent to a server that does not know it, and to no other, also where an acquire goes in front of a
// release or a downgrade.
func TestSourceOfAScriptIsSentOnce(t *testing.T) {
	inBubble(t, func(w *world) {
		w.Admin.ScriptFlush(w.Context())
		rc, sent := w.client(nil), &counter{}
		rc.AddHook(sent)
		m := NewMutex(rc, "x")
		known := 0
		for round := range 4 {
			for _, write := range []bool{true, false} {
				l := w.lock(m, true)
				redistest.Elapse(2 * turnLength) // the turn is over
				next := w.later(m, write)
				w.unlock(l)
				w.unlock(w.granted(next, "the next one"))
			}
			l := w.lock(m, true)
			next := w.later(m, true)
			if err := l.Downgrade(w.Context()); err != nil {
				t.Fatal(err)
			}
			w.unlock(l)
			w.unlock(w.granted(next, "the next writer"))
			if round == 0 {
				known = sent.sources
			}
		}
		if known == 0 || sent.sources != known {
			t.Errorf("%d sources were sent, and %d of them in the first round; want all then", sent.sources, known)
		}
	})
}

// Renewals that are due together share a round trip. The loss of one lock does not affect the others.
func TestRenewalsShareRoundTripsNotFates(t *testing.T) {
	inBubble(t, func(w *world) {
		const n = 1000
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
		redistest.Elapse(3 * DefaultTTL)
		commands, trips := sent.reset()
		if commands < 3*n || commands > 7*n || trips > commands/100 {
			t.Errorf("%d renewals of %d locks in %d round trips, want 3 to 7 of each and at most one round trip for 100",
				commands, n, trips)
		}
		w.Redis.Del("x:7")
		redistest.Elapse(DefaultTTL)
		for i, l := range locks {
			if (l.Err() != nil) != (i == 7) {
				t.Fatalf("lock %d, of which only 7 was lost: %v", i, context.Cause(l))
			}
			if i != 7 {
				w.unlock(l)
			}
		}
	})
}
