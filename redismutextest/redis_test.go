package redismutextest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/redistest"
)

func TestMain(m *testing.M) {
	// Injected faults would fill the log.
	redismutex.SetLog(redismutex.NopLog)
	redis.SetLogger(silence{})
	os.Exit(m.Run())
}

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

// inVirtualTime runs a test in a bubble.
func inVirtualTime(t *testing.T, test func(*testing.T, *Redis)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(t, New(t)) })
}

// inBothTimes runs a test in a bubble and outside.
func inBothTimes(t *testing.T, test func(*testing.T, *Redis)) {
	t.Run("virtual", func(t *testing.T) { inVirtualTime(t, test) })
	t.Run("real", func(t *testing.T) { test(t, New(t)) })
}

// A subject is a test that may fail. Its methods are called by one goroutine at a time.
type subject struct {
	testing.TB
	failures []string
	cleanups []func()
}

// stopped is what a fatal failure panics with.
type stopped struct{}

func (s *subject) Cleanup(f func()) { s.cleanups = append(s.cleanups, f) }
func (s *subject) Errorf(format string, v ...any) {
	s.failures = append(s.failures, fmt.Sprintf(format, v...))
}
func (s *subject) Fatalf(format string, v ...any) {
	s.Errorf(format, v...)
	panic(stopped{})
}

// try runs a part of the test, which a fatal failure ends.
func (s *subject) try(part func()) {
	defer func() {
		if end := recover(); end != nil && end != (stopped{}) {
			panic(end)
		}
	}()
	part()
}

// end ends the test as package testing does.
func (s *subject) end() {
	for len(s.cleanups) > 0 {
		last := len(s.cleanups) - 1
		f := s.cleanups[last]
		s.cleanups = s.cleanups[:last]
		f()
	}
}

// failed checks that the test has failed once for each of these, with all of its words.
func (s *subject) failed(want ...[]string) {
	s.TB.Helper()
	if len(s.failures) != len(want) {
		s.TB.Fatalf("want %d failures, got %q", len(want), s.failures)
	}
	for i, words := range want {
		for _, word := range words {
			if !strings.Contains(s.failures[i], word) {
				s.TB.Errorf("want a failure that names %q, got %q", word, s.failures[i])
			}
		}
	}
}

func lock(t testing.TB, ctx context.Context, m *redismutex.RWMutex, opt ...redismutex.LockOption) *redismutex.Lock {
	t.Helper()
	l, err := m.LockContext(ctx, opt...)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func rlock(t testing.TB, ctx context.Context, m *redismutex.RWMutex) *redismutex.Lock {
	t.Helper()
	l, err := m.RLockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// wants checks that an error matches.
func wants(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("want %v, got %v", want, err)
	}
}

// waiting makes n calls wait for the lock for writing. The function ends them, and returns when they have.
func waiting(m *redismutex.RWMutex, n int) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	for range n {
		go func() {
			if l, err := m.LockContext(ctx); err == nil {
				l.Unlock()
			}
			ended <- struct{}{}
		}()
	}
	return func() {
		cancel()
		for range n {
			<-ended
		}
	}
}

func TestEndNamesTheLocksThatAreHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &subject{TB: t}
		r := New(s)
		ctx := context.Background()
		writer := lock(t, ctx, r.Mutex("stock"), redismutex.WithKey("42"))
		reader := rlock(t, ctx, r.Mutex("{report}:monday"))
		lock(t, ctx, r.Mutex("unlocked")).Unlock()
		stop := waiting(r.Mutex("stock:42"), 3)
		defer stop()
		r.AwaitWaiters(t, "stock:42", 3)
		s.end()
		s.failed(
			[]string{`"stock:42"`, "still held for writing", writer.ID()},
			[]string{`"stock:42": 3`, "still waited for"},
			[]string{`"{report}:monday"`, "still held for reading", reader.ID()})
	})
}

// What another process holds by HoldByOther ends with the test. A call that waits for it is one of the test.
func TestEndReleasesTheOtherProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &subject{TB: t}
		r := New(s)
		r.HoldByOther("a")
		r.HoldByOther("b")
		stop := waiting(r.Mutex("b"), 1)
		defer stop()
		r.AwaitWaiters(t, "b", 1)
		s.end()
		s.failed([]string{`"b": 1`, "still waited for"})
		for _, l := range r.others {
			wants(t, context.Cause(l), redismutex.ErrUnlocked)
		}
	})
}

// A lock of the client of the other process is one of the test, unless HoldByOther holds it.
func TestEndNamesLocksOfTheOtherClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &subject{TB: t}
		r := New(s)
		lock(t, context.Background(), redismutex.NewMutex(r.OtherClient(), "x"))
		s.end()
		s.failed([]string{`"x"`, "still held for writing"})
	})
}

func TestEndIsSilentAboutForeignData(t *testing.T) {
	inBothTimes(t, func(t *testing.T, r *Redis) {
		rc, ctx := r.Client(), t.Context()
		for _, err := range []error{
			rc.Set(ctx, "text", "v", 0).Err(),
			rc.Set(ctx, "cached", "v", time.Hour).Err(),
			rc.SAdd(ctx, "set", "a", "b").Err(),
			rc.Expire(ctx, "set", time.Hour).Err(),
			rc.RPush(ctx, "list", "a").Err(),
			rc.Set(ctx, "no}name", "v", 0).Err(),
		} {
			if err != nil {
				t.Error(err)
			}
		}
	})
}

// An unlock that Redis did not hear of, as the network was cut, goes on in the background. That is no lock that was forgotten.
func TestEndWaitsForUnlocksInTheBackground(t *testing.T) {
	inBothTimes(t, func(t *testing.T, r *Redis) {
		l := lock(t, t.Context(), r.Mutex("x"))
		r.Cut()
		wants(t, l.UnlockContext(context.Background()), redismutex.ErrRedis)
		if r.bubble {
			r.AdvanceTime(time.Second) // it has failed in the background, too, and is sent again in a moment
		}
	})
}

// A test that ends with the network cut, and with calls that are to fail, gets no failure for that.
func TestEndHealsWhatTheTestHasBroken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &subject{TB: t}
		r := New(s)
		l := lock(t, context.Background(), r.Mutex("x"))
		r.Fail(errors.New("refused"), 1<<30)
		wants(t, l.UnlockContext(context.Background()), redismutex.ErrRedis)
		s.end()
		s.failed()
	})
}

func TestLoseLosesOneLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, r *Redis) {
		ctx := t.Context()
		x, y := r.Mutex("x"), r.Mutex("y", redismutex.WithTurn(0))
		writer, first, second := lock(t, ctx, x), rlock(t, ctx, y), rlock(t, ctx, y)
		start := time.Now()
		r.Lose(writer)
		r.Lose(first)
		if writer.Err() != nil || first.Err() != nil {
			t.Errorf("want the holders not to know yet, got %v, %v", writer.Err(), first.Err())
		}
		r.HoldByOther("x")() // others can be granted it
		<-writer.Done()
		<-first.Done()
		if took := time.Since(start); took > redismutex.DefaultTTL/2 {
			t.Errorf("want them to know after half the TTL, they did after %v", took)
		}
		wants(t, context.Cause(writer), redismutex.ErrLockLost)
		wants(t, context.Cause(first), redismutex.ErrLockLost)
		if n := r.OtherClient().ZCard(ctx, "{y}:lease").Val(); n != 1 {
			t.Errorf("want the lease of the second reader alone, there are %d", n)
		}
		if _, err := redismutex.NewMutex(r.OtherClient(), "y").TryLockContext(ctx); !errors.Is(err, redismutex.ErrLock) {
			t.Errorf("want the second reader in the way, got %v", err)
		}
		r.AdvanceTime(10 * time.Minute)
		if err := second.UnlockContext(ctx); err != nil {
			t.Errorf("want the second reader to hold on, got %v", err)
		}
	})
}

// Several of them are the nodes of a Redlock.
func TestRedlockIsLostWithAMajority(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, first *Redis) {
		all := []*Redis{first, New(t), New(t)}
		var nodes, others []redis.Scripter
		for _, r := range all {
			nodes, others = append(nodes, r.Client()), append(others, r.OtherClient())
		}
		m := redismutex.NewRedlock(nodes, "x")
		l := lock(t, t.Context(), m)
		all[1].Lose(l)
		first.AdvanceTime(time.Minute) // it is acquired there again
		if l.Err() != nil {
			t.Fatalf("want the lock held with two nodes of three, got %v", context.Cause(l))
		}
		stop := waiting(m, 3)
		more := waiting(redismutex.NewRedlock(others, "x"), 2)
		for _, r := range all {
			r.AwaitWaiters(t, "x", 5)
		}
		stop()
		more()
		all[0].Lose(l)
		all[2].Lose(l)
		first.AdvanceTime(redismutex.DefaultTTL)
		wants(t, context.Cause(l), redismutex.ErrLockLost)
	})
}

func TestLoseOfALockThatIsNotHeldIsAMistake(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, r *Redis) {
		l := lock(t, t.Context(), r.Mutex("x"))
		l.Unlock()
		release := r.HoldByOther("x")
		s := &subject{TB: t}
		r.t = s
		s.try(func() { r.Lose(l) })
		r.t = t
		s.failed([]string{"Lose", `"x"`, l.ID()})
		if s := r.inspect("x"); s.Mode != redismutex.Writing {
			t.Errorf("want the lock of the other process untouched, got %v", s)
		}
		release()
	})
}

func TestLoseOfNoLockIsAMistake(t *testing.T) {
	s := &subject{TB: t}
	r := New(s)
	s.try(func() { r.Lose(nil) })
	s.end()
	s.failed([]string{"nil lock"})
}

func TestRevokeEndsTheHoldersAndNotTheWaiters(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, r *Redis) {
		ctx := t.Context()
		m := r.Mutex("x", redismutex.WithTurn(0))
		first, second := rlock(t, ctx, m), rlock(t, ctx, m)
		granted := make(chan *redismutex.Lock)
		go func() { granted <- lock(t, ctx, m) }()
		r.AwaitWaiters(t, "x", 1)
		r.Revoke("x")
		for _, l := range []*redismutex.Lock{first, second} {
			<-l.Done()
			wants(t, context.Cause(l), redismutex.ErrRevoked)
		}
		next := <-granted
		if err := next.UnlockContext(ctx); err != nil {
			t.Error(err)
		}
		s := &subject{TB: t}
		r.t = s
		s.try(func() { r.Revoke("x") })
		r.t = t
		s.failed([]string{"Revoke", `"x"`})
	})
}

func TestOtherHoldsUntilItIsReleased(t *testing.T) {
	inBothTimes(t, func(t *testing.T, r *Redis) {
		m := r.Mutex("x")
		try := func() error {
			l, err := m.TryRLockContext(t.Context())
			if err == nil {
				l.Unlock()
			}
			return err
		}
		release := r.HoldByOther("x")
		wants(t, try(), redismutex.ErrLock)
		if r.bubble {
			r.AdvanceTime(10 * time.Minute)
			wants(t, try(), redismutex.ErrLock)
		}
		s := &subject{TB: t}
		r.t = s
		s.try(func() { r.HoldByOther("x") })
		r.t = t
		s.failed([]string{"HoldByOther", `"x"`})
		release()
		release() // a second call does nothing
		if err := try(); err != nil {
			t.Error(err)
		}
	})
}

func TestCutReachesTheClientAlone(t *testing.T) {
	inBothTimes(t, func(t *testing.T, r *Redis) {
		ctx, m := t.Context(), r.Mutex("x")
		held := lock(t, ctx, m)
		r.Cut()
		if err := r.Client().Ping(ctx).Err(); err == nil {
			t.Error("want an error of the client while its network is cut")
		}
		_, err := r.Mutex("y").LockContext(ctx)
		wants(t, err, redismutex.ErrRedis)
		if err := r.OtherClient().Ping(ctx).Err(); err != nil {
			t.Errorf("want the other client to reach Redis, got %v", err)
		}
		r.HoldByOther("z")()
		r.Heal()
		if err := r.Client().Ping(ctx).Err(); err != nil {
			t.Errorf("want the network healed, got %v", err)
		}
		if err := held.UnlockContext(ctx); err != nil {
			t.Errorf("want the lock held over a short cut, got %v", err)
		}
	})
}

func TestCutThatLastsLosesTheLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, r *Redis) {
		l := lock(t, t.Context(), r.Mutex("x"))
		r.Cut()
		r.AdvanceTime(redismutex.DefaultTTL)
		wants(t, redismutex.Held(l, "x"), redismutex.ErrLockLost)
		r.Heal()
		r.HoldByOther("x")()
	})
}

func TestFailFailsAsManyCalls(t *testing.T) {
	inBothTimes(t, func(t *testing.T, r *Redis) {
		ctx, m, refused := t.Context(), r.Mutex("x"), errors.New("refused")
		r.Fail(refused, 1)
		// The library asks for it in the background. It sets up the first connection, which is no call either.
		if err := r.Client().Info(ctx, "memory").Err(); errors.Is(err, refused) {
			t.Errorf("want INFO sent, got %v", err)
		}
		_, err := m.LockContext(ctx)
		wants(t, err, refused)
		wants(t, err, redismutex.ErrRedis)
		// Redis may have the request all the same: it is released in the background, which is a call, too, and leaves a tombstone.
		r.eventually(5*time.Second, func() bool { return r.OtherClient().Exists(ctx, "{x}:lease").Val() == 1 })
		l := lock(t, ctx, m)
		r.Fail(refused, 1)
		wants(t, l.UnlockContext(ctx), refused)
		r.eventually(5*time.Second, func() bool { return r.inspect("x").Mode == redismutex.Free }) // it goes on in the background

		r.Fail(refused, 3)
		get := func() error { return r.Client().Set(ctx, "k", "v", 0).Err() }
		wants(t, get(), refused)
		cmds, err := r.Client().Pipelined(ctx, func(p redis.Pipeliner) error {
			p.Ping(ctx)
			p.Ping(ctx)
			return nil
		})
		wants(t, err, refused)
		wants(t, cmds[1].Err(), refused)
		wants(t, get(), refused)
		if n, err := r.OtherClient().Exists(ctx, "k").Result(); n != 0 || err != nil {
			t.Errorf("want none of them to have reached Redis, got %d, %v", n, err)
		}
		if err := get(); err != nil {
			t.Errorf("want the fourth call made, got %v", err)
		}
		r.Fail(refused, 5)
		r.Fail(nil, 0)
		if err := get(); err != nil {
			t.Errorf("want the failures ended, got %v", err)
		}
	})
}

func TestFailWithoutAnErrorIsAMistake(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, r *Redis) {
		s := &subject{TB: t}
		r.t = s
		s.try(func() { r.Fail(nil, 1) })
		s.try(func() { r.Fail(errors.New("refused"), -1) })
		s.try(func() { r.AdvanceTime(-1) })
		r.t = t
		s.failed([]string{"Fail"}, []string{"Fail"}, []string{"AdvanceTime"})
	})
}

// However they wait: in Redis each by itself, or many for one that stands there, or behind a lock of their own process.
func TestWaitersAreCalls(t *testing.T) {
	for name, opt := range map[string][]redismutex.MutexOption{
		"turns": nil, "strict order": {redismutex.WithTurn(0)}, "writers first": {redismutex.WithLockIntent()},
	} {
		for _, own := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, behind a lock of their own process: %v", name, own), func(t *testing.T) {
				inBothTimes(t, func(t *testing.T, r *Redis) {
					m := r.Mutex("x", opt...)
					release := r.HoldByOther("x")
					if own {
						release()
						release = lock(t, t.Context(), m).Unlock
					}
					if n := r.Waiters("x"); n != 0 {
						t.Errorf("want no waiter, got %d", n)
					}
					stop := waiting(m, 5)
					r.AwaitWaiters(t, "x", 5)
					more := waiting(r.Mutex("x", redismutex.WithTTL(time.Minute)), 2) // another queue
					r.AwaitWaiters(t, "x", 7)
					others := waiting(redismutex.NewMutex(r.OtherClient(), "x"), 3)
					r.AwaitWaiters(t, "x", 10)
					if n := r.Waiters("x"); n != 10 {
						t.Errorf("want 10 waiters, got %d", n)
					}
					if n := r.Waiters("y"); n != 0 {
						t.Errorf("want no waiter of another key, got %d", n)
					}
					stop()
					more()
					others()
					r.eventually(time.Second, func() bool { return r.Waiters("x") == 0 })
					if n := r.Waiters("x"); n != 0 {
						t.Errorf("want no waiter after all have given up, got %d", n)
					}
					release()
				})
			})
		}
	}
}

// A call whose first request is under way can still fail with the first error of Redis.
func TestCallThatRedisHasNotAnsweredDoesNotWait(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, r *Redis) {
		release := r.HoldByOther("x")
		arrive := r.network.HoldRequest("lock-intent")
		stop := waiting(r.Mutex("x"), 2)
		synctest.Wait()
		if n := r.Waiters("x"); n != 0 {
			t.Errorf("want no waiter before the request has arrived, got %d", n)
		}
		arrive()
		synctest.Wait()
		if n := r.Waiters("x"); n != 2 {
			t.Errorf("want 2 waiters, got %d", n)
		}
		stop()
		release()
	})
}

func TestWaitersOfAnotherRedisAreNotCounted(t *testing.T) {
	inBothTimes(t, func(t *testing.T, r *Redis) {
		other := New(t)
		held := lock(t, t.Context(), other.Mutex("x"))
		stop := waiting(other.Mutex("x"), 2)
		other.AwaitWaiters(t, "x", 2)
		if n := r.Waiters("x"); n != 0 {
			t.Errorf("want no waiter, got %d", n)
		}
		stop()
		held.Unlock()
	})
}

func TestAwaitWaitersGivesUp(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, r *Redis) {
		release := r.HoldByOther("x")
		stop := waiting(r.Mutex("x"), 1)
		s, start := &subject{TB: t}, time.Now()
		s.try(func() { r.AwaitWaiters(s, "x", 2) })
		s.failed([]string{`"x"`, "want 2", "there are 1", "10s"})
		if took := time.Since(start); took < 10*time.Second || took > 11*time.Second {
			t.Errorf("want it to give up after 10s, it took %v", took)
		}
		start = time.Now()
		more := waiting(r.Mutex("x", redismutex.WithTurn(0)), 50)
		r.AwaitWaiters(t, "x", 51)
		if took := time.Since(start); took != 0 {
			t.Errorf("want no time to pass, %v did", took)
		}
		stop()
		more()
		release()
	})
}

func TestTimeInABubblePassesForEverybody(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, r *Redis) {
		ctx := t.Context()
		l := lock(t, ctx, r.Mutex("x"))
		if err := r.Client().Set(ctx, "k", "v", 10*time.Minute).Err(); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		r.AdvanceTime(10 * time.Minute)
		if time.Since(start) != 10*time.Minute || l.Err() != nil || r.Client().Exists(ctx, "k").Val() != 0 {
			t.Errorf("want ten minutes passed, the lock held and the key gone: %v, %v", time.Since(start), l.Err())
		}
		l.Unlock()
	})
}

// In real time the clock of Redis alone is set forward, and goes on from there.
func TestAdvanceTimeEndsLeasesInRealTime(t *testing.T) {
	r := New(t)
	ctx := t.Context()
	m := r.Mutex("x", redismutex.WithTTL(time.Hour))
	l := lock(t, ctx, m)
	r.AdvanceTime(59 * time.Minute)
	if s := r.inspect("x"); s.Mode != redismutex.Writing {
		t.Errorf("want the lock held for the rest of its TTL, got %v", s)
	}
	r.AdvanceTime(time.Minute)
	next, err := redismutex.NewMutex(r.OtherClient(), "x").TryLockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if l.Err() != nil || next.Token() <= l.Token() {
		t.Errorf("want the first holder not to know, and its token the lower one: %v, %d and %d", l.Err(), l.Token(), next.Token())
	}
	wants(t, l.UnlockContext(ctx), redismutex.ErrLockLost)
	next.Unlock()

	if err := r.Client().Set(ctx, "k", "v", 20*time.Millisecond).Err(); err != nil {
		t.Fatal(err)
	}
	redistest.Eventually(t, "the clock of Redis goes on", func() bool { return r.Client().Exists(ctx, "k").Val() == 0 })
}
