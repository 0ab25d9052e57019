package integration

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/redismutex/redismutex"
)

// Promises 2, 5 and 10: a full Redis (maxmemory, noeviction) keeps its locks: holders and waiters are renewed, an unlock
// hands on, a writer becomes a reader. New locks are refused with an error whose message says that Redis is full.
func TestLocksOutliveAFullRedis(t *testing.T) {
	s := open(t)
	const ttl = 2 * time.Second // a waiter that is renewed late loses its place, and a full Redis gives it no other
	process := func(name string) *redismutex.RWMutex {
		return redismutex.NewMutex(s.client(nil), name, redismutex.WithTTL(ttl))
	}
	writer, reader, another := s.lock(process("w").LockContext), s.lock(process("r").RLockContext), s.lock(process("r").RLockContext)
	downgraded, last := s.lock(process("d").LockContext), s.lock(process("l").RLockContext)
	behindWriter := later(process("w").LockContext)
	s.eventually("it waits", func() bool { return s.rc.ZCard(s.Context(), "{w}:lock-intent").Val() == 1 })
	readersBehind := later(process("w").RLockContext)
	behindReaders, behindLast := later(process("r").LockContext), later(process("l").LockContext)
	behindDowngraded := later(process("d").RLockContext)
	for name, n := range map[string]int64{"w": 2, "r": 1, "l": 1, "d": 1} {
		s.eventually("they wait", func() bool {
			return s.rc.ZCard(s.Context(), "{"+name+"}:lock-intent").Val() == n
		})
	}
	fresh := redismutex.NewMutex(s.client(nil), "fresh")
	s.unlock(s.lock(fresh.LockContext)) // the lock has a token counter
	if err := s.rc.ConfigSet(s.Context(), "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	refused := func(name string) {
		t.Helper()
		m := redismutex.NewMutex(s.client(nil), name)
		for name, call := range calls(m) {
			ctx, cancel := context.WithTimeout(s.Context(), atOnce)
			_, err := call(ctx)
			cancel()
			var e redis.Error
			if !errors.Is(err, redismutex.ErrRedis) || errors.Is(err, redismutex.ErrLock) || !errors.As(err, &e) ||
				!strings.Contains(fmt.Sprint(err), "full") {
				t.Errorf("%s on a full Redis: want an error that matches ErrRedis alone and says that Redis is full, got %v", name, err)
			}
		}
	}
	for _, name := range []string{"w", "r", "d", "l", "fresh", "new"} {
		refused(name)
	}
	outlive(t, 3*ttl/2, writer, reader, another, downgraded, last)
	for _, waiter := range []<-chan outcome{behindWriter, readersBehind, behindReaders, behindLast, behindDowngraded} {
		s.none(waiter)
	}
	if err := downgraded.Downgrade(s.Context()); err != nil {
		t.Error(err)
	}
	s.unlock(s.soon(behindDowngraded))
	s.unlock(downgraded)
	s.unlock(last)
	s.unlock(s.soon(behindLast))
	s.unlock(writer)
	next := s.soon(behindWriter)
	outlive(t, ttl, next)
	s.unlock(next)
	s.unlock(s.soon(readersBehind))
	s.unlock(another)
	s.none(behindReaders)
	s.unlock(reader)
	s.unlock(s.soon(behindReaders))
	refused("w")
	if err := s.rc.ConfigSet(s.Context(), "maxmemory", "0").Err(); err != nil {
		t.Fatal(err)
	}
	s.unlock(s.lock(process("w").LockContext))
}
