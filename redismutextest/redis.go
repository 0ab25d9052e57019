// Package redismutextest is for tests of code that locks with [redismutex]. It gives a test the library itself on a Redis
// of its own, which is embedded in the test's process, and faults by name.
//
//	func TestSecondCallerIsRefused(t *testing.T) {
//		rd := redismutextest.New(t)
//		release := rd.HoldByOther("report:monday")
//		if err := publish(t.Context(), rd.Client(), "monday"); !errors.Is(err, redismutex.ErrLock) {
//			t.Errorf("want ErrLock, got %v", err)
//		}
//		release()
//	}
//
// At its end, a test fails if a lock is still held or waited for.
//
// # Time
//
// A test may run in a [testing/synctest] bubble, if New is called inside of it. Leases then end in virtual time: hours pass at
// once, and [Redis.AdvanceTime] moves the clock of everybody. In real time a lock that is lost or revoked may learn of it
// only at half its TTL, which is two seconds by default. Prefer a bubble, or a short [redismutex.WithTTL].
//
// # Examples
//
// docs/testing.md has a session, and example_test.go the five tests that most users write.
//
// The Redis is a miniredis that speaks to its clients in memory. Where an int has 32 bits New skips the test, since miniredis
// cannot store the time there.
package redismutextest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/localqueue"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

// A Redis is the embedded Redis of one test, with the client of the code under test and the network between them. Its
// methods are safe for concurrent use.
type Redis struct {
	t        testing.TB
	other    *redis.Client // its network never fails
	client   *redis.Client
	network  *faultnet.Link
	failures *failures
	clock    *clock
	bubble   bool // the test is in virtual time

	mu     sync.Mutex // guards others
	others []*redismutex.Lock
}

// New starts a Redis for t. When t ends the network is healed, t fails if a lock of its code is still held or waited for, and
// Redis is stopped.
//
// In a synctest bubble t must be the one of the bubble. Ten minutes of virtual time pass after the test.
func New(t testing.TB) *Redis {
	t.Helper()
	redistest.MiniLocks(t)
	r := &Redis{t: t, failures: &failures{}, bubble: redistest.InBubble()}
	if r.bubble {
		t.Cleanup(redistest.AfterBubble) // registered first, it runs last
	}
	server, _ := redistest.Mini(t)
	r.clock = &clock{server: server}
	r.other = redistest.MiniClient(t, server, func(o *redis.Options) { o.Dialer = r.clock.dial })
	r.network = faultnet.New(r.clock.dial)
	r.client = redistest.MiniClient(t, server, redistest.Through(r.network), func(o *redis.Options) {
		o.DialerRetries = 1 // a network that is cut fails at once
	})
	r.client.AddHook(r.failures)
	t.Cleanup(r.end)
	return r
}

// Client returns the client for the code under test, the same one at each call. [Redis.Cut] and [Redis.Fail] affect it.
func (r *Redis) Client() *redis.Client { return r.client }

// OtherClient returns the client of another process, the same one at each call. Its network never fails.
func (r *Redis) OtherClient() *redis.Client { return r.other }

// Mutex makes a mutex on Client.
func (r *Redis) Mutex(name string, opt ...redismutex.MutexOption) *redismutex.RWMutex {
	return redismutex.NewMutex(r.client, name, opt...)
}

// mutexOfOther makes a mutex of the other process, which logs nothing.
func (r *Redis) mutexOfOther(key string) *redismutex.RWMutex {
	return redismutex.NewMutex(r.other, key, redismutex.WithTurn(0), redismutex.WithLogger(slog.New(slog.DiscardHandler)))
}

// HoldByOther makes another process hold the lock on a key for writing until release is called, or the test ends. Its network
// does not fail, and it renews its lock. The key is that of [redismutex.Lock.Key]. The test fails at once if the lock is held
// or waited for.
func (r *Redis) HoldByOther(key string) (release func()) {
	r.t.Helper()
	l, err := r.mutexOfOther(key).TryLockContext(context.Background())
	if err != nil {
		r.t.Fatalf("redismutextest: HoldByOther: %v", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.others = append(r.others, l)
	return func() { _ = l.UnlockContext(context.Background()) } // it may have been lost or revoked, by the test
}

// Lose makes Redis lose the data of a lock, as by a failover or an eviction: others can be granted the lock, while its holder
// learns of the loss at its next renewal, at half its TTL. In a bubble, receive from its Done to let that time pass. Locks that
// share its ID are lost with it. For a lock that the test cannot reach there is [Redis.Revoke].
func (r *Redis) Lose(lock *redismutex.Lock) {
	r.t.Helper()
	if lock == nil {
		r.t.Fatalf("redismutextest: Lose: nil lock, as of a call that was refused")
	}
	key := lock.Key()
	lost := func() bool {
		for _, p := range r.inspect(key).Holders {
			if node.AcquisitionOf(p.ID) == node.AcquisitionOf(lock.ID()) {
				r.forget(key, p)
				return true
			}
		}
		return false
	}
	// The last of several nodes may grant the lock a moment after the call that locks has returned.
	if !r.eventually(time.Second, lost) {
		r.t.Fatalf("redismutextest: Lose: Redis does not know the lock %s on %q", lock.ID(), key)
	}
}

// forget deletes what Redis knows of a holder.
func (r *Redis) forget(key string, holder redismutex.Participant) {
	r.t.Helper()
	ctx, p := context.Background(), r.other.TxPipeline()
	if holder.Write {
		p.Del(ctx, key)
	} else {
		keys, err := script.NewKeys(key)
		if err != nil {
			r.t.Fatalf("redismutextest: %v", err)
		}
		p.SRem(ctx, key, holder.ID)
		p.ZRem(ctx, keys.Leases(), holder.ID)
	}
	if _, err := p.Exec(ctx); err != nil {
		r.t.Fatalf("redismutextest: Lose %q: %v", key, err)
	}
}

// Revoke revokes the lock on a key, as an operator does with [redismutex.RWMutex.Revoke]: all its holders, and none of those
// that wait. They learn of it by a message, or at half their TTL.
func (r *Redis) Revoke(key string) {
	r.t.Helper()
	holders := r.inspect(key).Holders
	if len(holders) == 0 {
		r.t.Fatalf("redismutextest: Revoke: nobody holds %q", key)
	}
	for _, p := range holders {
		if err := r.mutexOfOther(key).Revoke(context.Background(), p.ID); err != nil {
			r.t.Fatalf("redismutextest: Revoke: %v", err)
		}
	}
}

// Cut cuts Client off from Redis: its connections are closed and new ones are refused, as if Redis were down. What Redis knows
// stays, and leases end there.
func (r *Redis) Cut() { redistest.Crash(r.network) }

// Heal ends Cut.
func (r *Redis) Heal() { r.network.Refuse(false) }

// Fail makes the next n calls of Client fail with err before they reach Redis, in place of those of an earlier Fail that are
// left. A call is a command or a pipeline, also one that the library makes in the background, as a renewal at half the TTL, or
// the release of a lock whose request has failed. INFO is not counted, which the library asks for once, beside its first lock;
// nor are the commands that set up a connection.
func (r *Redis) Fail(err error, n int) {
	r.t.Helper()
	if n < 0 || n > 0 && err == nil {
		r.t.Fatalf("redismutextest: Fail(%v, %d): want an error, and 0 calls or more", err, n)
	}
	r.failures.set(err, n)
}

// Waiters returns how many calls wait for the lock on a key, whether each stands in Redis by itself or they share a turn
// ([redismutex.WithTurn]). A call waits when it can no longer fail with the first error of Redis: it is queued
// in Redis, or behind a lock of its own process.
func (r *Redis) Waiters(key string) int {
	r.t.Helper()
	for {
		crowds := r.crowds(key)
		s := r.inspect(key)
		if slices.Equal(crowds, r.crowds(key)) { // else what stands in Redis for a crowd may have changed meanwhile
			return count(crowds, s)
		}
	}
}

// crowds returns the crowds of both processes that wait for the lock on a key.
func (r *Redis) crowds(key string) []localqueue.Crowd {
	var all []localqueue.Crowd
	for _, rc := range []*redis.Client{r.client, r.other} {
		all = append(all, localqueue.Crowds(node.Of(rc).Mailbox.Name(), key)...)
	}
	slices.SortFunc(all, func(a, b localqueue.Crowd) int {
		return cmp.Or(cmp.Compare(a.Asks, b.Asks), cmp.Compare(a.Requests, b.Requests))
	})
	return all
}

// count returns how many calls wait: those in Redis, where one may stand for a crowd.
func count(crowds []localqueue.Crowd, s *redismutex.State) int {
	n := s.Waiting
	for _, c := range crowds {
		queued := slices.ContainsFunc(s.Waiters, func(p redismutex.Participant) bool {
			return node.AcquisitionOf(p.ID) == node.AcquisitionOf(c.Asks)
		})
		if queued {
			n--
		}
		if queued || c.Asks == "" {
			n += c.Requests
		}
	}
	return n
}

// AwaitWaiters waits until n calls or more wait for the lock on a key, and fails t if that takes longer than ten seconds.
func (r *Redis) AwaitWaiters(t testing.TB, key string, n int) {
	t.Helper()
	const limit = 10 * time.Second
	seen := 0
	if !r.eventually(limit, func() bool { seen = r.Waiters(key); return seen >= n }) {
		t.Fatalf("redismutextest: want %d calls that wait for %q, there are %d after %v", n, key, seen, limit)
	}
}

// AdvanceTime lets d pass. In a synctest bubble it passes for everybody: locks are renewed meanwhile, and it returns when
// everything that was due has been done.
//
// In real time it sets the clock of Redis forward and no other. Leases that have less than d left end there, and others can
// be granted the lock, as when the holder has crashed; but the holders are alive, and learn of it at their next renewal.
func (r *Redis) AdvanceTime(d time.Duration) {
	r.t.Helper()
	if d < 0 {
		r.t.Fatalf("redismutextest: AdvanceTime(%v): time does not go back", d)
	}
	if !r.bubble {
		r.clock.advance(d)
		return
	}
	redistest.Elapse(d)
	synctest.Wait()
}

// grace is how long the end of a test waits for what is being unlocked in the background.
const grace = 2 * time.Second

// end fails the test if a lock is still held or waited for.
func (r *Redis) end() {
	r.t.Helper() // a failure names the line of New
	r.Heal()
	r.failures.set(nil, 0)
	var left []string
	r.eventually(grace, func() bool { left = r.left(); return len(left) == 0 })
	for _, l := range left {
		r.t.Errorf("redismutextest: when the test ended %s", l)
	}
	r.mu.Lock()
	others := r.others
	r.mu.Unlock()
	for _, l := range others {
		_ = l.UnlockContext(context.Background()) // it may have been released
	}
}

// left names the locks that are held or waited for, in the order of their keys.
func (r *Redis) left() (left []string) {
	keys, err := r.other.Keys(context.Background(), "*").Result()
	if err != nil {
		r.t.Errorf("redismutextest: %v", err)
		return nil
	}
	slices.Sort(keys)
	for _, key := range keys {
		// A lock that is held or waited for has a key of its own name. Other keys are no locks, or not those of a holder.
		s, err := r.mutexOfOther(key).Inspect(context.Background())
		if err != nil {
			continue
		}
		for _, p := range s.Holders {
			if strings.HasPrefix(p.ID, node.ChannelPrefix) && !r.isOther(p.ID) {
				left = append(left, fmt.Sprintf("the lock on %q was still held for %s, as %s", key, kind(p), p.ID))
			}
		}
		if n := r.Waiters(key); n > 0 {
			left = append(left, fmt.Sprintf("calls still waited for the lock on %q: %d", key, n))
		}
	}
	return left
}

func kind(p redismutex.Participant) string {
	if p.Write {
		return "writing"
	}
	return "reading"
}

// isOther reports whether an id is that of the other process.
func (r *Redis) isOther(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.others, func(l *redismutex.Lock) bool { return l.ID() == id })
}

// inspect returns the holders and the waiters of the lock on a key. Foreign data under the key is not a lock.
func (r *Redis) inspect(key string) *redismutex.State {
	r.t.Helper()
	s, err := r.mutexOfOther(key).Inspect(context.Background())
	if err != nil && !errors.Is(err, redismutex.ErrNotLock) {
		r.t.Fatalf("redismutextest: %v", err)
	}
	return s
}

// eventually waits until holds returns true, and returns false if that takes too long. In a bubble no time passes if
// everything that is due brings it about.
func (r *Redis) eventually(limit time.Duration, holds func() bool) bool {
	if r.bubble {
		synctest.Wait()
	}
	start := time.Now()
	for pause := time.Millisecond; !holds(); pause = min(2*pause, 50*time.Millisecond) {
		if time.Since(start) > limit {
			return false
		}
		time.Sleep(pause)
	}
	return true
}
