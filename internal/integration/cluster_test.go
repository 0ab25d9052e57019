package redismutex_test

// This file answers: does the lock survive where there is more than one server,
// or a client that is not the plain one?

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

// Section 3: all keys of a lock are in one slot, and declared. A master answers
// anything else with an error.
func TestClusterKeepsEveryCallInOneSlot(t *testing.T) {
	t.Parallel()
	c := redistest.Cluster(t, 3)
	first, second := c.Client(t), c.Client(t)
	masters := map[int]bool{}
	for _, name := range []string{"a", "b", "c", "d e", "замок", "{tag}x", "x{tag}", "x{tag}y{z}", "{", "{{tag}", "a\x00", strings.Repeat("long", 2500)} {
		for _, sub := range []string{"", "user 7", "{x}", "{"} {
			if sub == "{x}" && strings.Contains(name, "{") && !strings.Contains(name, "tag") {
				continue // "{:{x}" has a tag as well, but nothing that is not tried elsewhere
			}
			t.Run(fmt.Sprintf("%.10q+%q", name, sub), func(t *testing.T) {
				var opt []redismutex.LockOption
				if sub != "" {
					opt = append(opt, redismutex.WithKey(sub))
				}
				in := func(rc redis.Scripter, write, try bool) ask {
					m := redismutex.NewMutex(rc, name, redismutex.WithTTL(long))
					ask := map[[2]bool]ask{
						{true, true}: m.TryLockContext, {true, false}: m.LockContext,
						{false, true}: m.TryRLockContext, {false, false}: m.RLockContext,
					}[[2]bool{write, try}]
					return func(ctx context.Context, _ ...redismutex.LockOption) (*redismutex.Lock, error) {
						return ask(ctx, opt...)
					}
				}
				holder := lock(t, in(first, true, false))
				masters[c.Owner(int(first.ClusterKeySlot(t.Context(), holder.Key()).Val()))] = true
				for _, write := range []bool{true, false} {
					if _, err := in(second, write, true)(t.Context()); !errors.Is(err, redismutex.ErrLock) {
						t.Error(err)
					}
				}
				// A message finds its way also if it is published on another master.
				reader := later(in(second, false, false))
				eventually(t, "it waits", func() bool { return waits(t, c, holder.Key()) == 1 })
				writer := later(in(first, true, false))
				eventually(t, "both wait", func() bool { return waits(t, c, holder.Key()) == 2 })
				unlock(t, holder)
				unlock(t, soon(t, reader))
				unlock(t, soon(t, writer))
				unlock(t, lock(t, in(second, false, true)))
			})
		}
	}
	if len(masters) != 3 {
		t.Errorf("only the masters %v were asked", masters)
	}
}

// Promises 2 and 5, and section 4: a slot migrates, with locks that are held and
// waited for.
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

	// A writer's keep needs one key, so it may take as long as it wants.
	for what, move := range map[string][]string{
		"opened": nil, "the holder moved": {"%s"}, "the holder still there": {"{%s}:token"}, "all moved": {"%s", "{%s}:token"},
	} {
		run("writer/"+what, func(t *testing.T, m migration) {
			const ttl = time.Second
			l := lock(t, m.mutex(t, ttl).LockContext)
			m.begin(t, move...)
			outlive(t, l, 2*ttl)
			m.end(t)
			outlive(t, l, ttl)
			unlock(t, l)
			unlock(t, lock(t, m.mutex(t, ttl).TryLockContext))
		})
	}

	// A reader's keep needs several keys, which are together before and after.
	// Between, it is unknown how it stands, which is not lost.
	run("reader", func(t *testing.T, m migration) {
		const ttl = 3 * time.Second
		var readers []*redismutex.Lock
		for range 3 {
			readers = append(readers, lock(t, m.mutex(t, ttl).RLockContext))
		}
		m.begin(t, "%s")
		m.end(t)
		outlive(t, readers[0], ttl*3/2)
		for _, l := range readers {
			unlock(t, l)
		}
		unlock(t, lock(t, m.mutex(t, ttl).TryLockContext))
	})

	// A waiter outlives one that takes longer than its lease.
	run("waiter", func(t *testing.T, m migration) {
		const ttl = time.Second
		holder := lock(t, m.mutex(t, ttl).LockContext)
		waiter := later(m.mutex(t, ttl).LockContext)
		eventually(t, "it waits", func() bool { return waits(t, m.c, m.key) == 1 })
		m.begin(t, "%s")
		outlive(t, holder, 2*ttl)
		m.end(t)
		unlock(t, holder)
		select {
		case o := <-waiter:
			if o.err != nil {
				t.Fatal(o.err)
			}
			unlock(t, o.lock)
		case <-time.After(patience):
			t.Fatal("it never gets the lock")
		}
	})

	// An unlock in the middle of it may not be confirmed, but the lock comes free
	// by it, or by the end of its lease.
	for _, write := range []bool{true, false} {
		run("unlock/"+kind(write), func(t *testing.T, m migration) {
			l := lock(t, verb(m.mutex(t, 2*time.Second), write))
			m.begin(t, "%s")
			if err := l.UnlockContext(t.Context()); err != nil && !errors.Is(err, redismutex.ErrRedis) {
				t.Error(err)
			}
			m.end(t)
			unlock(t, soon(t, later(m.mutex(t, long).LockContext)))
		})
	}
}

// The documentation, "Where they end": a failover to a replica that had heard of
// the lock loses nothing. One to a replica that had not loses the lock, and its
// holder learns that; waiters go on, and the lock works again.
func TestSentinelFailoverIsSurvived(t *testing.T) {
	t.Run("replicated", func(t *testing.T) { failOver(t, true) })
	t.Run("lost", func(t *testing.T) { failOver(t, false) })
}

func failOver(t *testing.T, replicated bool) {
	t.Parallel()
	s := redistest.Sentinel(t)
	ttl := map[bool]time.Duration{true: long, false: 6 * time.Second}[replicated]
	mutex := func() *redismutex.RWMutex { return redismutex.NewMutex(s.Client(t), key, redismutex.WithTTL(ttl)) }
	holder := lock(t, mutex().LockContext)
	old := s.Master()
	look := old.Client(t)
	waiters := make(chan outcome)
	for i := range 2 {
		waiter := later(mutex().LockContext)
		go func() { waiters <- <-waiter }()
		eventually(t, "it waits", func() bool { return look.ZCard(t.Context(), intents).Val() == int64(i+1) })
	}
	eventually(t, "the replica has it", func() bool { return onReplica(t, look) })
	old.Kill()
	rc := s.Client(t)
	eventually(t, "another master takes writes", func() bool {
		if replicated {
			return rc.Set(t.Context(), "k", "v", 0).Err() == nil
		}
		return rc.FlushAll(t.Context()).Err() == nil
	})
	if s.Master() == old {
		t.Error("nothing has failed over")
	}
	if replicated {
		unlock(t, holder)
	}
	for range 2 {
		select {
		case o := <-waiters:
			if o.err != nil {
				t.Fatal(o.err)
			}
			if !replicated {
				select {
				case <-holder.Done():
				case <-time.After(ttl):
					t.Error("two hold, and the first does not learn it")
				}
			}
			unlock(t, o.lock)
		case <-time.After(patience):
			t.Fatal("a waiter hangs")
		}
	}
	if !replicated {
		if err := holder.UnlockContext(t.Context()); !errors.Is(err, redismutex.ErrLockLost) || !errors.Is(context.Cause(holder), redismutex.ErrLockLost) {
			t.Error(err, context.Cause(holder))
		}
	}
	unlock(t, lock(t, mutex().LockContext))
}

// Section 4: a Ring publishes and subscribes on different shards, so it does not
// subscribe, and waiters look.
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
		a := redismutex.NewMutex(first, name, redismutex.WithTTL(long))
		b := redismutex.NewMutex(second, name, redismutex.WithTTL(long))
		holder := lock(t, a.LockContext)
		if _, err := b.TryLockContext(t.Context()); !errors.Is(err, redismutex.ErrLock) {
			t.Error(err)
		}
		waiters := []<-chan outcome{later(b.RLockContext), later(a.RLockContext)}
		eventually(t, "they wait", func() bool { return second.ZCard(t.Context(), "{"+name+"}:lock-intent").Val() == 2 })
		for _, rc := range looks {
			if list := rc.Do(t.Context(), "CLIENT", "LIST", "TYPE", "pubsub").Val(); list != "" {
				t.Errorf("it subscribes: %v", list)
			}
		}
		unlock(t, holder)
		for _, w := range waiters {
			unlock(t, soon(t, w))
		}
	}
	for _, rc := range looks {
		if rc.DBSize(t.Context()).Val() == 0 {
			t.Error("a shard was never asked")
		}
	}
}

// Section 5: an AutoPipeliner is a client like any other.
func TestAutoPipelinerLocks(t *testing.T) {
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
			for i := range 4 {
				holder := s.lock(mutexes[i%2].LockContext)
				if _, err := mutexes[i/2].TryRLockContext(s.Context()); !errors.Is(err, redismutex.ErrLock) {
					t.Error(err)
				}
				waiter := later(verb(mutexes[i/2], i%2 == 0))
				s.waiting(1)
				s.unlock(holder)
				s.unlock(s.soon(waiter))
			}

			held := s.lock(redismutex.NewMutex(first, "other", redismutex.WithTTL(ttl)).RLockContext)
			var w witness
			start := time.Now()
			w.crowd(16, func() bool { return time.Since(start) > ttl }, func(i int) (write bool, out func()) {
				l, err := verb(mutexes[i%2], i%3 == 0)(s.Context())
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
			if w.overlaps.Load() > 0 {
				t.Errorf("%d overlaps", w.overlaps.Load())
			}
			outlive(t, held, 2*ttl)
			s.unlock(held)

			// Its context ends a wait in the queue.
			holder := s.lock(mutexes[0].LockContext)
			ctx, cancel := context.WithCancel(s.Context())
			waiter := laterIn(ctx, mutexes[1].LockContext)
			s.waiting(1)
			cancel()
			if o := <-waiter; !errors.Is(o.err, context.Canceled) {
				t.Error(o.err)
			}
			s.waiting(0)
			s.unlock(holder)
			s.empty(key)
		})
	}
}

// What follows is what these tests share.

// A migration is that of the slot of one lock's keys to another master.
type migration struct {
	c        *redistest.ClusterServers
	key      string
	slot, to int
}

func (m migration) mutex(t *testing.T, ttl time.Duration) *redismutex.RWMutex {
	return redismutex.NewMutex(m.c.Client(t), m.key, redismutex.WithTTL(ttl))
}

// begin moves the keys that are named, where %s is the lock's, and no more.
func (m migration) begin(t *testing.T, keys ...string) {
	t.Helper()
	m.c.BeginMigration(t, m.slot, m.to)
	for _, k := range keys {
		m.c.MoveKeys(t, m.slot, m.to, fmt.Sprintf(k, m.key))
	}
}

// end moves the other keys.
func (m migration) end(t *testing.T) {
	t.Helper()
	m.c.MoveKeys(t, m.slot, m.to)
	m.c.EndMigration(t, m.slot, m.to)
}

// onReplica says whether all that a master has been told is on its replica. WAIT is about the writes of its own
// connection: on one that wrote nothing it says yes at once.
func onReplica(t *testing.T, master *redis.Client) bool {
	c := master.Conn()
	defer c.Close()
	return c.Set(t.Context(), "last", "write", 0).Err() == nil && c.Wait(t.Context(), 1, time.Second).Val() == 1
}

// outlive waits until l has been renewed so often that it outlives d from now.
func outlive(t *testing.T, l *redismutex.Lock, d time.Duration) {
	t.Helper()
	start := time.Now()
	eventually(t, "it is renewed", func() bool {
		if l.Err() != nil {
			t.Fatalf("lost after %v: %v", time.Since(start), context.Cause(l))
		}
		return l.Until().After(start.Add(d))
	})
}

// waits is how many wait in a cluster.
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

// Promise 2: a master that does not answer takes no locks with it that are on the others, although renewals share a
// pipeline.
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
		case <-time.After(patience):
			t.Fatal("a lock on the master that hangs is not lost")
		}
	}
	time.Sleep(redismutex.DefaultTTL) // and so would others be by now
	for _, l := range others {
		if l.Err() != nil {
			t.Errorf("a lock on another master is lost: %v", context.Cause(l))
		}
	}
}
