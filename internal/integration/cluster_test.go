package integration

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/redistest"
)

// All keys of a lock are in one slot and declared: a master answers any other call with an error.
func TestClusterKeepsEveryCallInOneSlot(t *testing.T) {
	t.Parallel()
	c := redistest.Cluster(t, 3)
	first, second := c.Client(t), c.Client(t)
	masters := map[int]bool{}
	for _, name := range []string{"a", "b", "c", "d e", "замок", "{tag}x", "x{tag}", "x{tag}y{z}", "{", "{{tag}", "a\x00", strings.Repeat("long", 2500)} {
		for _, sub := range []string{"", "user 7", "{x}", "{"} {
			if sub == "{x}" && strings.Contains(name, "{") && !strings.Contains(name, "tag") {
				continue // "{:{x}" has a tag as well, but shows nothing that others do not
			}
			t.Run(fmt.Sprintf("%.10q+%q", name, sub), func(t *testing.T) {
				var opt []redismutex.LockOption
				if sub != "" {
					opt = append(opt, redismutex.WithKey(sub))
				}
				in := func(rc redis.Scripter, write, try bool) call {
					m := redismutex.NewMutex(rc, name, redismutex.WithTTL(long), inRedis)
					call := map[[2]bool]call{
						{true, true}: m.TryLockContext, {true, false}: m.LockContext,
						{false, true}: m.TryRLockContext, {false, false}: m.RLockContext,
					}[[2]bool{write, try}]
					return func(ctx context.Context, _ ...redismutex.LockOption) (*redismutex.Lock, error) {
						return call(ctx, opt...)
					}
				}
				holder := lock(t, in(first, true, false))
				masters[c.Owner(int(first.ClusterKeySlot(t.Context(), holder.Key()).Val()))] = true
				for _, write := range []bool{true, false} {
					if _, err := in(second, write, true)(t.Context()); !errors.Is(err, redismutex.ErrLock) {
						t.Errorf("want an error that matches %q, got %v", redismutex.ErrLock, err)
					}
				}
				// A message also arrives if it is published on another master.
				reader := later(in(second, false, false))
				redistest.Eventually(t, "it waits", func() bool { return waits(t, c, holder.Key()) == 1 })
				writer := later(in(first, true, false))
				redistest.Eventually(t, "both wait", func() bool { return waits(t, c, holder.Key()) == 2 })
				unlock(t, holder)
				unlock(t, soon(t, reader))
				unlock(t, soon(t, writer))
				unlock(t, lock(t, in(second, false, true)))
			})
		}
	}
	if len(masters) != 3 {
		t.Errorf("want locks on all 3 masters, they were on %v", masters)
	}
}

// Promises 2 and 5: a slot migrates while its locks are held and waited for.
func TestClusterSlotMigratesWhileHeld(t *testing.T) {
	t.Parallel()
	c := redistest.Cluster(t, 3)
	slots := 0
	run := func(what string, f func(t *testing.T, m migration)) {
		slots++
		m := migration{c: c, key: fmt.Sprint("lock", slots)}
		m.slot = int(c.Client(t).ClusterKeySlot(t.Context(), m.key).Val())
		m.to = (c.Owner(m.slot) + 1) % 3
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			f(t, m)
		})
	}

	// A writer's renewal needs one key, so the migration may take any time.
	for what, move := range map[string][]string{
		"opened": nil, "the holder moved": {"%s"}, "the holder still there": {"{%s}:token"}, "all moved": {"%s", "{%s}:token"},
	} {
		run("writer/"+what, func(t *testing.T, m migration) {
			const ttl = time.Second
			l := lock(t, m.mutex(t, ttl).LockContext)
			m.begin(t, move...)
			outlive(t, 2*ttl, l)
			m.end(t)
			outlive(t, ttl, l)
			unlock(t, l)
			unlock(t, lock(t, m.mutex(t, ttl).TryLockContext))
		})
	}

	// A reader's renewal needs several keys, which are on one master before and after. In between its state is unknown,
	// but the lock is not lost.
	run("reader", func(t *testing.T, m migration) {
		const ttl = 3 * time.Second
		var readers []*redismutex.Lock
		for range 3 {
			readers = append(readers, lock(t, m.mutex(t, ttl).RLockContext))
		}
		m.begin(t, "%s")
		m.end(t)
		outlive(t, ttl*3/2, readers[0])
		for _, l := range readers {
			unlock(t, l)
		}
		unlock(t, lock(t, m.mutex(t, ttl).TryLockContext))
	})

	// A waiter survives a migration that takes longer than its lease.
	run("waiter", func(t *testing.T, m migration) {
		const ttl = time.Second
		holder := lock(t, m.mutex(t, ttl).LockContext)
		waiter := later(m.mutex(t, ttl).LockContext)
		redistest.Eventually(t, "it waits", func() bool { return waits(t, m.c, m.key) == 1 })
		m.begin(t, "%s")
		outlive(t, 2*ttl, holder)
		m.end(t)
		unlock(t, holder)
		select {
		case o := <-waiter:
			if o.Err != nil {
				t.Fatal(o.Err)
			}
			unlock(t, o.Value)
		case <-time.After(redistest.Timeout):
			t.Fatalf("want the lock after the migration, have waited for %v", redistest.Timeout)
		}
	})

	// An unlock during the migration may not be confirmed, but the lock is free when its lease ends at the latest.
	for _, write := range []bool{true, false} {
		run("unlock/"+kind(write), func(t *testing.T, m migration) {
			l := lock(t, acquire(m.mutex(t, 2*time.Second), write))
			m.begin(t, "%s")
			if err := l.UnlockContext(t.Context()); err != nil && !errors.Is(err, redismutex.ErrRedis) {
				t.Errorf("want an error that matches %q, got %v", redismutex.ErrRedis, err)
			}
			m.end(t)
			unlock(t, soon(t, later(m.mutex(t, long).LockContext)))
		})
	}
}

// Promise 2: a master that hangs loses no locks on the other masters, although renewals share a pipeline.
func TestClusterMasterThatHangsLosesOnlyItsOwnLocks(t *testing.T) {
	t.Parallel()
	c := redistest.Cluster(t, 3)
	for _, n := range c.Nodes() {
		if err := n.Client(t).ConfigSet(t.Context(), "cluster-require-full-coverage", "no").Err(); err != nil {
			t.Fatal(err)
		}
	}
	rc := c.Client(t)
	m := redismutex.NewMutex(rc, key, redismutex.WithLogger(slog.New(slog.DiscardHandler)))
	var own, others []*redismutex.Lock
	for i := range 60 {
		l := lock(t, func(ctx context.Context, _ ...redismutex.LockOption) (*redismutex.Lock, error) {
			return m.LockContext(ctx, redismutex.WithKey(fmt.Sprint(i)))
		})
		if c.Owner(int(rc.ClusterKeySlot(t.Context(), l.Key()).Val())) == 0 {
			own = append(own, l)
		} else {
			others = append(others, l)
		}
	}
	c.Nodes()[0].Freeze()
	defer c.Nodes()[0].Thaw()
	for _, l := range own {
		select {
		case <-l.Done():
		case <-time.After(redistest.Timeout):
			t.Fatalf("want the locks on the master that hangs lost, one is still held after %v", redistest.Timeout)
		}
	}
	outlive(t, redismutex.DefaultTTL, others...)
}

// A migration of the slot of one lock's keys to another master.
type migration struct {
	c        *redistest.ClusterServers
	key      string
	slot, to int
}

func (m migration) mutex(t *testing.T, ttl time.Duration) *redismutex.RWMutex {
	return redismutex.NewMutex(m.c.Client(t), m.key, redismutex.WithTTL(ttl))
}

// begin opens the slot and moves the given keys, in which %s stands for the lock's key.
func (m migration) begin(t *testing.T, keys ...string) {
	t.Helper()
	m.c.BeginMigration(t, m.slot, m.to)
	for _, k := range keys {
		m.c.MoveKeys(t, m.slot, m.to, fmt.Sprintf(k, m.key))
	}
}

// end moves the other keys and closes the slot.
func (m migration) end(t *testing.T) {
	t.Helper()
	m.c.MoveKeys(t, m.slot, m.to)
	m.c.EndMigration(t, m.slot, m.to)
}

// waits returns the number of waiters for a lock in a cluster.
func waits(t *testing.T, c *redistest.ClusterServers, name string) int {
	t.Helper()
	rc := c.Client(t)
	defer rc.Close()
	n := 0
	for _, k := range []string{"{" + name + "}:lock-intent", name + ":lock-intent", name + ":its-lock-intent"} {
		n += int(rc.ZCard(t.Context(), k).Val())
	}
	return n
}
