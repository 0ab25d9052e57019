package integration

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
)

// foreign stores a sorted set, a set, a hash or a string without TTL under a key.
var foreign = map[string]func(s *single, key string) error{
	"zset": func(s *single, k string) error {
		return s.rc.ZAdd(s.Context(), k, redis.Z{Score: 1, Member: "data"}, redis.Z{Score: 2, Member: "more"}).Err()
	},
	"set":    func(s *single, k string) error { return s.rc.SAdd(s.Context(), k, "data", "more").Err() },
	"hash":   func(s *single, k string) error { return s.rc.HSet(s.Context(), k, "field", "data").Err() },
	"string": func(s *single, k string) error { return s.rc.Set(s.Context(), k, "data", 0).Err() },
}

// Promise 10: the release in the background that follows a refused acquire leaves foreign data alone. It carries a
// tombstone if the acquire may have been sent twice: the link is slow, a reply was lost, or the caller has given up.
func TestReleaseInTheBackgroundLeavesForeignDataAlone(t *testing.T) {
	s := open(t)
	warm := s.mutex(nil)
	s.unlock(s.lock(warm.LockContext))
	s.unlock(s.lock(warm.RLockContext))
	network := map[string]func(link *faultnet.Link, cancel func()){
		"slow":              func(link *faultnet.Link, _ func()) { link.SetDelay(10 * time.Millisecond) },
		"loses the reply":   func(link *faultnet.Link, _ func()) { link.LoseReply("try:", 1) },
		"loses two replies": func(link *faultnet.Link, _ func()) { link.LoseReply("try:", 2) },
		"slow, the caller gives up": func(link *faultnet.Link, cancel func()) {
			link.SetDelay(10 * time.Millisecond)
			time.AfterFunc(15*time.Millisecond, cancel)
		},
		"is not there while the caller gives up": func(link *faultnet.Link, cancel func()) {
			release := link.HoldReply("try:")
			time.AfterFunc(10*time.Millisecond, cancel)
			time.AfterFunc(30*time.Millisecond, release)
		},
	}
	n := 0
	for _, where := range []string{"%s", "{%s}:token", "{%s}:lease", "{%s}:lock-intent"} {
		for what, put := range foreign {
			for how, fault := range network {
				for _, write := range []bool{true, false} {
					if !write && where == "{%s}:token" {
						continue // a reader needs no token
					}
					n++
					name := fmt.Sprint("lock", n)
					data := fmt.Sprintf(where, name)
					t.Run(fmt.Sprintf(where+"/%s/%s", what, how, kind(write)), func(t *testing.T) {
						t.Parallel()
						if err := put(s, data); err != nil {
							t.Fatal(err)
						}
						before := s.rc.Dump(s.Context(), data).Val()
						link := faultnet.New(nil)
						mutex := redismutex.NewMutex(s.client(link), name, redismutex.WithTTL(5*time.Second))
						ctx, cancel := context.WithCancel(s.Context())
						defer cancel()
						fault(link, cancel)
						if l, err := acquire(mutex, write)(ctx); !errors.Is(err, redismutex.ErrNotLock) && !errors.Is(err, context.Canceled) {
							t.Errorf("want an error that matches ErrNotLock or context.Canceled, got %v, %v", l, err)
						}
						// Nothing announces the release in the background, so the data is watched for a while.
						for end := time.Now().Add(150 * time.Millisecond); time.Now().Before(end); {
							if after, ttl := s.rc.Dump(s.Context(), data).Val(), s.rc.TTL(s.Context(), data).Val(); after != before || ttl != -1 {
								t.Fatalf("want the data left alone, %q became %q, with a TTL of %v", before, after, ttl)
							}
						}
					})
				}
			}
		}
	}
}

// Promise 10: the unlock of a lock one of whose keys has been replaced by foreign data returns ErrNotLock, and releases the
// lock.
func TestUnlockAmongForeignDataReturnsErrNotLock(t *testing.T) {
	s := open(t)
	n := 0
	for _, where := range []string{"%s", "{%s}:lease", "{%s}:lock-intent"} {
		for what, put := range foreign {
			for _, write := range []bool{true, false} {
				n++
				name := fmt.Sprint("lock", n)
				data := fmt.Sprintf(where, name)
				mutex := redismutex.NewMutex(s.client(nil), name, redismutex.WithTTL(long))
				l := s.lock(acquire(mutex, write))
				if write && where == "{%s}:lease" {
					continue // the unlock of a writer without waiters does not touch it
				}
				s.rc.Del(s.Context(), data)
				if err := put(s, data); err != nil {
					t.Fatal(err)
				}
				before := s.rc.Dump(s.Context(), data).Val()
				if err := l.UnlockContext(s.Context()); !errors.Is(err, redismutex.ErrNotLock) || errors.Is(err, redismutex.ErrRedis) {
					t.Errorf("%s at %s, %s: want an error that matches ErrNotLock alone, got %v", what, data, kind(write), err)
				}
				if after, ttl := s.rc.Dump(s.Context(), data).Val(), s.rc.TTL(s.Context(), data).Val(); after != before || ttl != -1 {
					t.Errorf("%s at %s, %s: want the data left alone, %q became %q, with a TTL of %v", what, data, kind(write), before, after, ttl)
				}
				if where != "%s" && s.rc.Exists(s.Context(), name).Val() != 0 {
					t.Errorf("%s at %s: want the lock released, the %s still holds it", what, data, kind(write))
				}
			}
		}
	}
}

// Promise 10: foreign data at the holder key ends every wait with ErrNotLock and refuses new calls, even with many waiters.
func TestForeignHolderEndsEveryWait(t *testing.T) {
	s := open(t)
	const ttl = 2 * time.Second // a waiter learns of it at its next renewal, and 101 are renewed
	holder := s.lock(s.mutex(nil, redismutex.WithTTL(ttl)).LockContext)
	mutex := s.mutex(nil, redismutex.WithTTL(ttl), inRedis)
	rc, sent := s.client(nil), &redistest.Counter{}
	rc.AddHook(sent)
	another := s.mutexOf(rc, redismutex.WithTTL(long), inRedis)
	waiters := []<-chan outcome{later(another.LockContext)} // so that its process subscribes
	for i := range 100 {
		waiters = append(waiters, later(acquire(mutex, i%2 == 0)))
	}
	s.waiting(101)
	s.rc.Set(s.Context(), key, "data", 0)
	for _, write := range []bool{true, false} {
		n := sent.Commands()
		ctx, cancel := context.WithTimeout(s.Context(), atOnce)
		if _, err := acquire(another, write)(ctx); !errors.Is(err, redismutex.ErrNotLock) || sent.Commands()-n > 2 {
			t.Fatalf("a new %s: want ErrNotLock after 2 commands at most, got %v after %d", kind(write), err, sent.Commands()-n)
		}
		cancel()
	}
	for _, waiter := range waiters {
		if o := <-waiter; !errors.Is(o.Err, redismutex.ErrNotLock) {
			t.Fatal(o.Err)
		}
	}
	if err := holder.UnlockContext(s.Context()); !errors.Is(err, redismutex.ErrNotLock) && !errors.Is(err, redismutex.ErrLockLost) {
		t.Errorf("want an error that matches %q, got %v", redismutex.ErrLockLost, err)
	}
	if got := s.rc.Get(s.Context(), key).Val(); got != "data" {
		t.Errorf("want the data left alone, it is %q", got)
	}
}
