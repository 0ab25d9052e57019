package integration

// What an operator does, on real servers: find the holder of a lock, and end it by its id.

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/redistest"
)

func TestStoppedHolderIsFoundAndRevoked(t *testing.T) {
	t.Parallel()
	t.Run("one server", func(t *testing.T) {
		t.Parallel()
		s := redistest.Start(t)
		find(t, func() *redismutex.RWMutex {
			return redismutex.NewMutex(s.Client(t), "stock", redismutex.WithTTL(10*time.Second))
		}, func() {})
	})
	t.Run("three servers, of which one dies", func(t *testing.T) {
		t.Parallel()
		q := redistest.StartQuorum(t, 3)
		find(t, func() *redismutex.RWMutex {
			return redismutex.NewRedlock(q.Process(func(o *redis.Options) { o.MaxRetries = -1 }), "stock", redismutex.WithTTL(10*time.Second))
		}, q.Servers[0].Kill)
	})
}

// find has a holder and a waiter, finds the holder, and revokes it. Meanwhile kill ends one of the servers.
func find(t *testing.T, process func() *redismutex.RWMutex, kill func()) {
	ctx := context.Background()
	operator := process()
	l, err := process().LockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	next := redistest.Later(func() (*redismutex.Lock, error) { return process().LockContext(ctx) })
	var s *redismutex.State
	redistest.Eventually(t, "it waits", func() bool {
		s, err = operator.Inspect(ctx)
		return err == nil && s.Waiting == 1 && len(s.Waiters) == 1
	})
	if s.Mode != redismutex.Writing || len(s.Holders) != 1 || !s.Holders[0].Write || s.Holders[0].Lease > 10*time.Second || s.Token != l.Token() {
		t.Errorf("token %d:\n%v", l.Token(), s)
	}
	_, err = operator.TryLockContext(ctx)
	var held *redismutex.HeldError
	if !errors.As(err, &held) || held.Process != s.Holders[0].Process {
		t.Errorf("want the holder %+v, got %v", s.Holders[0], err)
	}
	kill()
	if err := operator.Revoke(ctx, s.Holders[0].ID); err != nil {
		t.Fatal(err)
	}
	got := <-next
	if got.Err != nil || got.Value.Token() <= l.Token() {
		t.Fatalf("the next one has the token %d after %d, %v", got.Value.Token(), l.Token(), got.Err)
	}
	<-l.Done()
	if cause := context.Cause(l); !errors.Is(cause, redismutex.ErrRevoked) {
		t.Errorf("the victim's lock has ended: %v", cause)
	}
	if err := operator.Revoke(ctx, "redismutex:nobody/1/abcdefghijklm.1:1000"); !errors.Is(err, redismutex.ErrNoSuchID) {
		t.Errorf("an id that is not there: %v", err)
	}
	if s, err = operator.Inspect(ctx); err != nil || s.Mode != redismutex.Writing || s.Waiting != 0 {
		t.Errorf("%v, %v", err, s)
	}
	got.Value.Unlock()
}
