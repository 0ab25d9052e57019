package redismutex_test

// This file answers: is foreign data left alone, whatever the network does to the calls?

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/faultnet"
)

// foreign puts a sorted set, a set, a hash and a string without TTL under a key.
var foreign = map[string]func(s *scene, key string) error{
	"zset": func(s *scene, k string) error {
		return s.rc.ZAdd(s.Context(), k, redis.Z{Score: 1, Member: "data"}, redis.Z{Score: 2, Member: "more"}).Err()
	},
	"set":    func(s *scene, k string) error { return s.rc.SAdd(s.Context(), k, "data", "more").Err() },
	"hash":   func(s *scene, k string) error { return s.rc.HSet(s.Context(), k, "field", "data").Err() },
	"string": func(s *scene, k string) error { return s.rc.Set(s.Context(), k, "data", 0).Err() },
}

// Promise 10: also by the release in the background that follows a refused acquire. It
// carries a tombstone if the acquire may have been sent twice: the link is slow, a reply
// was lost, or the caller has given up meanwhile.
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
						if l, err := verb(mutex, write)(ctx); !errors.Is(err, redismutex.ErrNotLock) && !errors.Is(err, context.Canceled) {
							t.Errorf("%v, %v", l, err)
						}
						for range 15 { // the release comes in the background
							time.Sleep(10 * time.Millisecond)
							if after, ttl := s.rc.Dump(s.Context(), data).Val(), s.rc.TTL(s.Context(), data).Val(); after != before || ttl != -1 {
								t.Fatalf("%q became %q, with a TTL of %v", before, after, ttl)
							}
						}
					})
				}
			}
		}
	}
}

// Promise 10: the unlock of a lock one of whose keys has come to hold foreign data says
// so, and what is the lock's own is released.
func TestUnlockOfALockAmongForeignDataSaysSo(t *testing.T) {
	s := open(t)
	n := 0
	for _, where := range []string{"%s", "{%s}:lease", "{%s}:lock-intent"} {
		for what, put := range foreign {
			for _, write := range []bool{true, false} {
				n++
				name := fmt.Sprint("lock", n)
				data := fmt.Sprintf(where, name)
				mutex := redismutex.NewMutex(s.client(nil), name, redismutex.WithTTL(long))
				l := s.lock(verb(mutex, write))
				if write && where == "{%s}:lease" {
					continue // the unlock of a writer for whom nobody waits has no business with it
				}
				s.rc.Del(s.Context(), data)
				if err := put(s, data); err != nil {
					t.Fatal(err)
				}
				before := s.rc.Dump(s.Context(), data).Val()
				if err := l.UnlockContext(s.Context()); !errors.Is(err, redismutex.ErrNotLock) || errors.Is(err, redismutex.ErrRedis) {
					t.Errorf("%s at %s, %s: %v", what, data, kind(write), err)
				}
				if after, ttl := s.rc.Dump(s.Context(), data).Val(), s.rc.TTL(s.Context(), data).Val(); after != before || ttl != -1 {
					t.Errorf("%s at %s, %s: %q became %q, with a TTL of %v", what, data, kind(write), before, after, ttl)
				}
				if where != "%s" && s.rc.Exists(s.Context(), name).Val() != 0 {
					t.Errorf("%s at %s: the %s still holds", what, data, kind(write))
				}
			}
		}
	}
}

// Promise 10: those that wait learn of foreign data at the holder key, and those that
// come are refused, also where many wait.
func TestForeignHolderEndsEveryWait(t *testing.T) {
	s := open(t)
	holder := s.lock(s.mutex(nil, redismutex.WithTTL(short)).LockContext)
	mutex := s.mutex(nil, redismutex.WithTTL(short))
	rc, sent := s.client(nil), &counted{}
	rc.AddHook(sent)
	another := s.mutexOf(rc, redismutex.WithTTL(long))
	waiters := []<-chan outcome{later(another.LockContext)} // so that its process hears
	for i := range 100 {
		waiters = append(waiters, later(verb(mutex, i%2 == 0)))
	}
	s.waiting(101)
	s.rc.Set(s.Context(), key, "data", 0)
	for _, write := range []bool{true, false} {
		n := sent.number()
		ctx, cancel := context.WithTimeout(s.Context(), atOnce)
		if _, err := verb(another, write)(ctx); !errors.Is(err, redismutex.ErrNotLock) || sent.number()-n > 2 {
			t.Fatalf("a %s that comes: %v, after %d commands", kind(write), err, sent.number()-n)
		}
		cancel()
	}
	for _, waiter := range waiters {
		if o := <-waiter; !errors.Is(o.err, redismutex.ErrNotLock) {
			t.Fatal(o.err)
		}
	}
	if err := holder.UnlockContext(s.Context()); !errors.Is(err, redismutex.ErrNotLock) && !errors.Is(err, redismutex.ErrLockLost) {
		t.Error(err)
	}
	if got := s.rc.Get(s.Context(), key).Val(); got != "data" {
		t.Errorf("%q", got)
	}
}
