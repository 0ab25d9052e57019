package integration

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/redistest"
)

// The package documentation, "Where they end": a failover to a replica that knew of the lock loses nothing. One to a
// replica that did not loses the lock and ends its holder's context; waiters keep waiting, and are granted the lock.
func TestSentinelFailoverIsSurvived(t *testing.T) {
	t.Parallel()
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
		redistest.Eventually(t, "it waits", func() bool { return look.ZCard(t.Context(), intents).Val() == int64(i+1) })
	}
	redistest.Eventually(t, "the replica has it", func() bool { return onReplica(t, look) })
	old.Kill()
	rc := s.Client(t)
	redistest.Eventually(t, "another master takes writes", func() bool {
		if replicated {
			return rc.Set(t.Context(), "k", "v", 0).Err() == nil
		}
		return rc.FlushAll(t.Context()).Err() == nil
	})
	if s.Master() == old {
		t.Error("want another master, it is still the one that was killed")
	}
	if replicated {
		unlock(t, holder)
	}
	for range 2 {
		select {
		case o := <-waiters:
			if o.Err != nil {
				t.Fatal(o.Err)
			}
			if !replicated {
				select {
				case <-holder.Done():
				case <-time.After(ttl):
					t.Errorf("want the first holder's context done within %v of the second's grant, it is not", ttl)
				}
			}
			unlock(t, o.Value)
		case <-time.After(redistest.Timeout):
			t.Fatalf("want every waiter granted the lock, one has waited for %v", redistest.Timeout)
		}
	}
	if !replicated {
		if err := holder.UnlockContext(t.Context()); !errors.Is(err, redismutex.ErrLockLost) || !errors.Is(context.Cause(holder), redismutex.ErrLockLost) {
			t.Errorf("want the lock kept over the failover, its unlock returned %v, its cause is %v", err, context.Cause(holder))
		}
	}
	unlock(t, lock(t, mutex().LockContext))
}

// docs/operations.md, "Sentinel": with min-replicas-to-write 1 a master that its replica has left neither grants nor renews.
// So an old master that lives on beside the new one lets nobody hold a lock for longer than a TTL.
func TestMasterWithoutReplicasGrantsNothing(t *testing.T) {
	s := open(t)
	old := redismutex.NewMutex(s.client(nil), key, redismutex.WithTTL(short))
	held := s.lock(old.LockContext)
	if err := s.rc.ConfigSet(t.Context(), "min-replicas-to-write", "1").Err(); err != nil {
		t.Fatal(err)
	}
	for name, call := range calls(redismutex.NewMutex(s.client(nil), "other")) {
		ctx, cancel := context.WithTimeout(t.Context(), atOnce)
		_, err := call(ctx)
		cancel()
		if !errors.Is(err, redismutex.ErrRedis) || errors.Is(err, redismutex.ErrLock) || !strings.Contains(err.Error(), "NOREPLICAS") {
			t.Errorf("%s: want ErrRedis with the reply NOREPLICAS, got %v", name, err)
		}
	}
	select {
	case <-held.Done():
		if !errors.Is(context.Cause(held), redismutex.ErrLockLost) {
			t.Errorf("want ErrLockLost, got %v", context.Cause(held))
		}
	case <-time.After(atOnce):
		t.Errorf("want the lock ended within its TTL of %v, it is trusted until %v", short, held.Until())
	}
}

// onReplica reports whether all writes of a master are on its replica. WAIT covers the writes of its own connection only, so
// this connection writes first.
func onReplica(t *testing.T, master *redis.Client) bool {
	c := master.Conn()
	defer c.Close()
	return c.Set(t.Context(), "last", "write", 0).Err() == nil && c.Wait(t.Context(), 1, time.Second).Val() == 1
}
