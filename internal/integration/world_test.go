package integration

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
)

func TestMain(m *testing.M) {
	// The faults would fill the log.
	redismutex.SetLog(redismutex.NopLog)
	redis.SetLogger(silence{})
	// The tests wait most of the time, so more than one per CPU can run.
	flag.Parse()
	if n, err := strconv.Atoi(flag.Lookup("test.parallel").Value.String()); err != nil || n < 8 {
		flag.Set("test.parallel", "8")
	}
	os.Exit(m.Run())
}

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

const (
	// long is a TTL of more than four times atOnce: a lock that is granted at once was not granted by a waiter's renewal,
	// which comes after half a TTL.
	long   = 20 * time.Second
	atOnce = 5 * time.Second

	// short is a TTL that a test waits out.
	short = 500 * time.Millisecond
)

// inRedis is the option of tests that look at the queue in Redis: every request stands there by itself.
var inRedis = redismutex.WithTurn(0)

// key is the lock of most tests; the others are its keys.
const (
	key     = "lock"
	intents = "{lock}:lock-intent"
	leases  = "{lock}:lease"
)

// A single is a server for one test.
type single struct {
	*testing.T
	server *redistest.Server
	rc     *redis.Client // looks at the keys
}

func open(t *testing.T, args ...string) *single {
	t.Helper()
	t.Parallel()
	server := redistest.Start(t, args...)
	return &single{t, server, server.Client(t)}
}

// client returns the client of another process. A nil link is a network that never fails.
func (s *single) client(link *faultnet.Link, mutate ...func(*redis.Options)) *redis.Client {
	return s.server.Client(s, append(mutate, redistest.Through(link))...)
}

// impatient makes a client time out early.
func impatient(o *redis.Options) {
	o.ReadTimeout = 200 * time.Millisecond
	o.DialTimeout = 200 * time.Millisecond
}

// twoWays sends commands through one client and receives messages through another.
type twoWays struct {
	*redis.Client
	messages *redis.Client
}

func (c twoWays) Subscribe(ctx context.Context, channels ...string) *redis.PubSub {
	return c.messages.Subscribe(ctx, channels...)
}

func (s *single) mutexOf(rc redis.Scripter, opt ...redismutex.MutexOption) *redismutex.RWMutex {
	return redismutex.NewMutex(rc, key, opt...)
}

// mutex returns a mutex in a process of its own.
func (s *single) mutex(link *faultnet.Link, opt ...redismutex.MutexOption) *redismutex.RWMutex {
	return s.mutexOf(s.client(link), opt...)
}

// A call is one of the four ways to lock.
type call func(context.Context, ...redismutex.LockOption) (*redismutex.Lock, error)

func acquire(m *redismutex.RWMutex, write bool) call {
	if write {
		return m.LockContext
	}
	return m.RLockContext
}

func try(m *redismutex.RWMutex, write bool) call {
	if write {
		return m.TryLockContext
	}
	return m.TryRLockContext
}

// calls are the four ways to lock, by name.
func calls(m *redismutex.RWMutex) map[string]call {
	return map[string]call{
		"LockContext": m.LockContext, "RLockContext": m.RLockContext,
		"TryLockContext": m.TryLockContext, "TryRLockContext": m.TryRLockContext,
	}
}

func kind(write bool) string { return map[bool]string{true: "writer", false: "reader"}[write] }

type outcome = redistest.Outcome[*redismutex.Lock]

// later makes a call in the background.
func later(c call) <-chan outcome { return laterIn(context.Background(), c) }

func laterIn(ctx context.Context, c call) <-chan outcome {
	return redistest.Later(func() (*redismutex.Lock, error) { return c(ctx) })
}

func (s *single) lock(c call) *redismutex.Lock           { s.Helper(); return lock(s.T, c) }
func (s *single) unlock(l *redismutex.Lock)              { s.Helper(); unlock(s.T, l) }
func (s *single) soon(c <-chan outcome) *redismutex.Lock { s.Helper(); return soon(s.T, c) }
func (s *single) eventually(what string, is func() bool) {
	s.Helper()
	redistest.Eventually(s.T, what, is)
}

func lock(t *testing.T, c call) *redismutex.Lock {
	t.Helper()
	l, err := c(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func unlock(t *testing.T, l *redismutex.Lock) {
	t.Helper()
	if err := l.UnlockContext(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// soon returns a lock that must be granted at once.
func soon(t *testing.T, c <-chan outcome) *redismutex.Lock {
	t.Helper()
	select {
	case o := <-c:
		if o.Err != nil {
			t.Fatal(o.Err)
		}
		return o.Value
	case <-time.After(atOnce):
		t.Fatalf("want the lock at once, have waited for %v", atOnce)
		return nil
	}
}

// outlive waits until all locks have been renewed beyond d from now.
func outlive(t *testing.T, d time.Duration, locks ...*redismutex.Lock) {
	t.Helper()
	start := time.Now()
	for _, l := range locks {
		redistest.Eventually(t, "it is renewed", func() bool {
			if l.Err() != nil {
				t.Fatalf("want it held for %v, lost after %v: %v", d, time.Since(start), context.Cause(l))
			}
			return l.Until().After(start.Add(d))
		})
	}
}

// never checks that the lock is not granted for a while.
func (s *single) never(c <-chan outcome, while time.Duration) {
	s.Helper()
	select {
	case o := <-c:
		s.Fatal("want it to wait, but the call has returned: ", o.Err)
	case <-time.After(while):
	}
}

func (s *single) none(c <-chan outcome) { s.Helper(); s.never(c, 0) }

// waiting waits until n calls are in the queue.
func (s *single) waiting(n int) {
	s.Helper()
	s.eventually(fmt.Sprint(n, " wait"), func() bool { return s.rc.ZCard(s.Context(), intents).Val() == int64(n) })
}

// reads reports whether l is among the readers on the server.
func (s *single) reads(l *redismutex.Lock) bool {
	s.Helper()
	is, err := s.rc.SIsMember(s.Context(), key, l.ID()).Result()
	if err != nil {
		s.Fatal(err)
	}
	return is
}

// empty checks that nobody holds the lock of that name or waits for it.
func (s *single) empty(name string) {
	s.Helper()
	for _, k := range []string{name, "{" + name + "}:lock-intent"} {
		if is := s.rc.Type(s.Context(), k).Val(); is != "none" {
			s.Errorf("want nobody to hold or wait, but %q is left, a %s", k, is)
		}
	}
	for _, id := range s.rc.ZRange(s.Context(), "{"+name+"}:lease", 0, -1).Val() {
		if !strings.HasPrefix(id, "-") { // a tombstone
			s.Errorf("want no lease, but %q has one on %q", id, name)
		}
	}
}

// subscriptions returns the number of connections that subscribe.
func (s *single) subscriptions() int {
	s.Helper()
	list, err := s.rc.Do(s.Context(), "CLIENT", "LIST", "TYPE", "pubsub").Text()
	if err != nil {
		s.Fatal(err)
	}
	return strings.Count(list, "\n")
}

// kinds returns the names of the errors that err matches. There should be one.
func kinds(err error) string {
	var is []string
	for name, kind := range map[string]error{
		"ErrLock": redismutex.ErrLock, "ErrLockLost": redismutex.ErrLockLost, "ErrUnlocked": redismutex.ErrUnlocked,
		"ErrRedis": redismutex.ErrRedis, "ErrNotLock": redismutex.ErrNotLock, "ErrInvalid": redismutex.ErrInvalid,
		"Canceled": context.Canceled, "DeadlineExceeded": context.DeadlineExceeded,
	} {
		if errors.Is(err, kind) {
			is = append(is, name)
		}
	}
	slices.Sort(is)
	return strings.Join(is, " and ")
}
