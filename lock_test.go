package redismutex

// Clients on one Redis in virtual time: hours pass at once, and a lease ends to the nanosecond.

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"reflect"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

func TestMain(m *testing.M) {
	// Injected faults would fill the log; tests of the log set their own.
	SetLog(NopLog)
	redis.SetLogger(silence{})
	debug.SetGCPercent(400) // miniredis makes much garbage
	if strconv.IntSize < 64 {
		flag.Set("test.skip", "^Example") // they run on miniredis, which locks on 64 bits only: see redistest.MiniLocks
	}
	os.Exit(m.Run())
}

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

// A world is one Redis in virtual time. Link is a network that fails on demand, for as many processes as use it.
type world struct {
	*redistest.World
	link *faultnet.Link
}

func inBubble(t *testing.T, f func(w *world)) {
	t.Helper()
	redistest.InVirtualTime(t, func(rw *redistest.World) {
		loadScripts(rw, rw.Admin)
		_, link := rw.Process()
		f(&world{rw, link})
	})
}

// scripts are those that locks and unlocks call.
var scripts = []*script.Script{
	script.Lock, script.RLock, script.Refresh, script.Unlock,
	script.Both(script.Lock, script.Unlock), script.Both(script.RLock, script.Unlock),
	script.Both(script.Lock, script.Refresh), script.Both(script.RLock, script.Refresh),
}

// loadScripts makes the scripts known to a server, so that a fault can be set for the digest of one.
func loadScripts(w *redistest.World, rc *redis.Client) {
	for _, s := range scripts {
		if err := rc.ScriptLoad(w.Context(), s.Source()).Err(); err != nil {
			w.Fatal(err)
		}
	}
}

// client returns the client of one more process, which reaches Redis through link; nil is a network that never fails.
func (w *world) client(link *faultnet.Link, mutate ...func(*redis.Options)) *redis.Client {
	return redistest.MiniClient(w, w.Redis, append(mutate, redistest.Through(link))...)
}

func (w *world) lock(m *RWMutex, write bool) *Lock {
	w.Helper()
	ask := m.RLockContext
	if write {
		ask = m.LockContext
	}
	l, err := ask(context.Background())
	if err != nil {
		w.Fatal(err)
	}
	return l
}

func (w *world) unlock(l *Lock) {
	w.Helper()
	if err := l.UnlockContext(context.Background()); err != nil {
		w.Fatal(err)
	}
}

// later locks in the background, and returns when that call waits.
func (w *world) later(m *RWMutex, write bool) <-chan *Lock {
	c := make(chan *Lock, 1)
	go func() { c <- w.lock(m, write) }()
	synctest.Wait()
	return c
}

// pending checks that a lock has not been granted yet.
func (w *world) pending(c <-chan *Lock) {
	w.Helper()
	synctest.Wait()
	select {
	case <-c:
		w.Fatal("the lock was granted, want it pending")
	default:
	}
}

// matches returns what is wrong with an error that is to match one of the package's errors and no other.
func matches(err error, want error) string {
	all := map[string]error{
		"ErrLock": ErrLock, "ErrLockLost": ErrLockLost, "ErrUnlocked": ErrUnlocked, "ErrUpgrade": ErrUpgrade, "ErrRedis": ErrRedis, "ErrNotLock": ErrNotLock,
		"ErrRevoked": ErrRevoked, "ErrMaxHold": ErrMaxHold, "ErrNoSuchID": ErrNoSuchID, "ErrNotHeld": ErrNotHeld,
		"ErrInvalid": ErrInvalid, "context.Canceled": context.Canceled, "context.DeadlineExceeded": context.DeadlineExceeded,
	}
	for name, target := range all {
		if errors.Is(err, target) != (target == want) {
			return fmt.Sprintf("%q: matches %s: %v", err, name, target != want)
		}
	}
	return ""
}

func (w *world) matches(err error, want error) {
	w.Helper()
	if problem := matches(err, want); problem != "" {
		w.Error(problem)
	}
}

// Promise 2: a lock renews itself until it is unlocked.
func TestLockRenewsItselfUntilUnlock(t *testing.T) {
	for _, write := range []bool{true, false} {
		inBubble(t, func(w *world) {
			mutex, other := NewMutex(w.client(nil), "x"), NewMutex(w.client(nil), "x")
			l := w.lock(mutex, write)
			for range 60 {
				redistest.Elapse(time.Minute)
				if left := time.Until(l.Until()); left < DefaultTTL/4 || left > DefaultTTL || l.Err() != nil {
					t.Fatalf("trusted for %v, %v", left, l.Err())
				}
			}
			if _, err := other.TryLockContext(w.Context()); !errors.Is(err, ErrLock) {
				t.Fatal(err)
			}
			w.unlock(l)
			w.unlock(w.lock(other, true))
		})
	}
}

// Promise 2: a lock's context is done before the server grants the lock to another, and not long before, whatever cuts
// the holder off and when.
func TestContextIsDoneBeforeTheNextHolderBegins(t *testing.T) {
	faults := map[string]func(*faultnet.Link){
		"black hole":       func(l *faultnet.Link) { l.Hole(true, true) },
		"requests vanish":  func(l *faultnet.Link) { l.Hole(true, false) },
		"replies vanish":   func(l *faultnet.Link) { l.Hole(false, true) },
		"refused":          func(l *faultnet.Link) { l.Refuse(true); l.Cut() },
		"replies are slow": func(l *faultnet.Link) { l.SetDelay(time.Hour) },
	}
	for name, fault := range faults {
		for _, write := range []bool{true, false} {
			for _, at := range []time.Duration{0, 1900 * time.Millisecond, 1999 * time.Millisecond, 3 * time.Second} {
				t.Run(fmt.Sprintf("%s/writer=%v/%v", name, write, at), func(t *testing.T) {
					inBubble(t, func(w *world) {
						l := w.lock(NewMutex(w.client(w.link), "x"), write)
						redistest.Elapse(at)
						next := w.later(NewMutex(w.client(nil), "x"), true)
						cut := time.Now()
						fault(w.link)
						<-l.Done()
						if lasted := time.Since(cut); lasted < DefaultTTL/2-DefaultTTL/16 || lasted > DefaultTTL {
							t.Errorf("the lock lasted %v", lasted)
						}
						w.matches(context.Cause(l), ErrLockLost)
						w.pending(next)
						w.unlock(<-next)
						w.matches(l.UnlockContext(context.Background()), ErrLockLost)
					})
				})
			}
		}
	}
}

// Promise 2: after a stop of the process, Err knows that the lease has ended before any timer fires.
func TestErrKnowsTheTimeBeforeTheTimers(t *testing.T) {
	inBubble(t, func(w *world) {
		l := w.lock(NewMutex(w.client(nil), "x"), true)
		endTrust(l) // as if the time had passed in a stop
		w.matches(context.Cause(l), ErrLockLost)
		if err := l.Err(); err != context.Canceled {
			t.Error(err)
		}
		w.matches(l.UnlockContext(context.Background()), ErrLockLost)

		l = w.lock(NewMutex(w.client(nil), "y"), true)
		endTrust(l)
		w.matches(l.UnlockContext(context.Background()), ErrLockLost)
	})
}

// A lock survives a short outage: renewals are retried while it is trusted.
func TestShortOutageLosesNothing(t *testing.T) {
	inBubble(t, func(w *world) {
		rc := w.client(w.link, func(o *redis.Options) { o.MaxRetries, o.DialerRetries = -1, 1 })
		l := w.lock(NewMutex(rc, "x"), true)
		for range 10 {
			redistest.Elapse(time.Until(l.Until()) - DefaultTTL/2 - DefaultTTL/8) // just before it is renewed
			w.link.Refuse(true)
			w.link.Cut()
			redistest.Elapse(DefaultTTL / 4)
			w.link.Refuse(false)
			redistest.Elapse(DefaultTTL / 4)
		}
		w.unlock(l)
	})
}

// Promise 10: the cause of an unlocked lock, and of every context derived from it, is ErrUnlocked.
func TestUnlockEndsTheContextWithErrUnlocked(t *testing.T) {
	inBubble(t, func(w *world) {
		type key struct{}
		parent := context.WithValue(context.Background(), key{}, "v")
		l, err := NewMutex(w.client(nil), "x").LockContext(parent)
		if err != nil {
			t.Fatal(err)
		}
		child, cancel := context.WithTimeout(l, time.Hour)
		defer cancel()
		if _, ok := l.Deadline(); ok || l.Value(key{}) != "v" || l.Err() != nil || l.Key() != "x" {
			t.Error(l.Value(key{}), l.Err(), l.Key())
		}
		w.unlock(l)
		<-child.Done()
		if context.Cause(l) != ErrUnlocked || context.Cause(child) != ErrUnlocked || l.Err() != context.Canceled {
			t.Error(context.Cause(l), context.Cause(child), l.Err())
		}
		w.matches(l.UnlockContext(context.Background()), ErrUnlocked)
		l.Unlock()
	})
}

// The end of the parent ends the lock's context, but does not release the lock: it still protects the cleanup, and
// Unlock works.
func TestLockIsHeldAfterItsParentEnds(t *testing.T) {
	inBubble(t, func(w *world) {
		why := errors.New("why")
		ctx, cancel := context.WithCancelCause(context.Background())
		l, err := NewMutex(w.client(nil), "x").LockContext(ctx)
		if err != nil {
			t.Fatal(err)
		}
		cancel(why)
		if <-l.Done(); context.Cause(l) != why {
			t.Error(context.Cause(l))
		}
		redistest.Elapse(time.Hour)
		other := NewMutex(w.client(nil), "x")
		_, err = other.TryLockContext(w.Context())
		w.matches(err, ErrLock)
		w.unlock(l)
		w.unlock(w.lock(other, true))
	})
}

// Promise 10: a lock that the server has forgotten is lost with the next renewal, or with Unlock.
func TestForgottenLockIsLostWithTheNextRenewal(t *testing.T) {
	for _, write := range []bool{true, false} {
		inBubble(t, func(w *world) {
			l := w.lock(NewMutex(w.client(nil), "x"), write)
			w.Redis.FlushAll()
			start := time.Now()
			<-l.Done()
			if took := time.Since(start); took > DefaultTTL/2 {
				t.Errorf("it took %v, want at most %v", took, DefaultTTL/2)
			}
			w.matches(context.Cause(l), ErrLockLost)
			if !strings.Contains(context.Cause(l).Error(), `"x"`) {
				t.Errorf("%q does not name the key", context.Cause(l))
			}
			l2 := w.lock(NewMutex(w.client(nil), "x"), write)
			w.Redis.FlushAll()
			w.matches(l2.UnlockContext(context.Background()), ErrLockLost)
		})
	}
}

// Promise 10: a wait that ends with its context returns the error of that context, and leaves no intent.
func TestErrorsOfTheCallersContext(t *testing.T) {
	inBubble(t, func(w *world) {
		mutex := NewMutex(w.client(nil), "x")
		l := w.lock(NewMutex(w.client(nil), "x"), true)
		defer l.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		start := time.Now()
		_, err := mutex.LockContext(ctx)
		w.matches(err, context.DeadlineExceeded)
		if took := time.Since(start); took != 3*time.Second {
			t.Errorf("it took %v", took)
		}
		_, err = mutex.LockContext(ctx)
		w.matches(err, context.DeadlineExceeded)
		why := errors.New("why")
		ctx2, cancel2 := context.WithCancelCause(context.Background())
		cancel2(why)
		if _, err = mutex.RLockContext(ctx2); !errors.Is(err, why) {
			t.Error(err)
		}
		w.matches(err, context.Canceled)
		if _, ok := mutex.Lock(WithContext(ctx)); ok {
			t.Error("locked")
		}
		synctest.Wait()
		if n := w.Redis.Exists("{x}:lock-intent"); n {
			t.Error("an intent is left, want none")
		}
	})
}

// Promise 10: an error of Redis matches ErrRedis alone, even if it is a time-out.
func TestErrorsOfRedis(t *testing.T) {
	inBubble(t, func(w *world) {
		mutex := NewMutex(w.client(w.link), "x")
		w.link.Refuse(true)
		_, err := mutex.LockContext(w.Context())
		w.matches(err, ErrRedis)
		var op *net.OpError
		if !errors.As(err, &op) {
			t.Errorf("%v has no net.OpError", err)
		}
		_, err = mutex.TryRLockContext(w.Context())
		w.matches(err, ErrRedis)
		w.link.Refuse(false)
		w.link.Hole(true, true)
		_, err = mutex.LockContext(context.Background())
		w.matches(err, ErrRedis)
		w.link.Hole(false, false)
		w.Redis.SetError("LOADING Redis is loading the dataset in memory")
		_, err = mutex.LockContext(context.Background())
		w.matches(err, ErrRedis)
		w.Redis.SetError("")
		w.unlock(w.lock(mutex, true))
	})
}

// LockContext returns when its context ends, although Redis does not answer, and its acquire is granted nothing later.
func TestLockContextReturnsWithItsContext(t *testing.T) {
	for _, timeout := range []time.Duration{time.Millisecond, 200 * time.Millisecond} {
		inBubble(t, func(w *world) {
			mutex := NewMutex(w.client(w.link), "x")
			w.unlock(w.lock(mutex, true))
			release := w.link.HoldRequest(script.Lock.Digest())
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			start := time.Now()
			_, err := mutex.LockContext(ctx)
			w.matches(err, context.DeadlineExceeded)
			if took := time.Since(start); took != timeout {
				t.Errorf("it took %v", took)
			}
			synctest.Wait()
			release() // the acquire arrives after its own release
			synctest.Wait()
			if w.Redis.Exists("x") {
				t.Error("the lock is held, want it free")
			}
		})
	}
}

// An hourAgo is a context whose deadline is a time of day, and has passed since the clock was set.
type hourAgo struct{ context.Context }

func (hourAgo) Deadline() (time.Time, bool) { return time.Now().Add(-time.Hour), true }

// An error of Redis is returned soon, although by its deadline the context has ended.
func TestErrorDoesNotWaitForADeadlineThatHasPassed(t *testing.T) {
	inBubble(t, func(w *world) {
		ctx, cancel := context.WithTimeout(w.Context(), time.Hour)
		defer cancel()
		w.Redis.SetError("ERR not now")
		start := time.Now()
		_, err := NewMutex(w.client(nil), "x").LockContext(hourAgo{ctx})
		w.matches(err, ErrRedis)
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("it took %v", took)
		}
		w.Redis.SetError("")
	})
}

// Promise 4: go-redis sends an acquire again if the reply is lost.
func TestAcquireWithALostReplyHoldsOnce(t *testing.T) {
	for _, write := range []bool{true, false} {
		inBubble(t, func(w *world) {
			mutex := NewMutex(w.client(w.link), "x")
			w.unlock(w.lock(mutex, write))
			digest := script.RLock.Digest()
			if write {
				digest = script.Lock.Digest()
			}
			w.link.LoseReply(digest, 2)
			l := w.lock(mutex, write)
			_, err := NewMutex(w.client(nil), "x").TryLockContext(w.Context())
			w.matches(err, ErrLock)
			w.unlock(l)
			if w.Redis.Exists("x") {
				t.Error("the lock is held, want it free")
			}
		})
	}
}

// Promise 4: a copy of an acquire that go-redis has sent again arrives after the unlock.
func TestLateCopyOfAnAcquireIsRefused(t *testing.T) {
	inBubble(t, func(w *world) {
		mutex := NewMutex(w.client(w.link, func(o *redis.Options) { o.ReadTimeout = 100 * time.Millisecond }), "x")
		w.unlock(w.lock(mutex, true))
		release := w.link.HoldRequest(script.Lock.Digest())
		l := w.lock(mutex, true) // by the second copy
		w.unlock(l)
		release()
		synctest.Wait()
		if w.Redis.Exists("x") {
			t.Error("the lock is held, want it free")
		}
	})
}

// An unlock while a renewal is under way is no loss, and the renewal brings no key back.
func TestUnlockRacesARenewal(t *testing.T) {
	for _, write := range []bool{true, false} {
		inBubble(t, func(w *world) {
			l := w.lock(NewMutex(w.client(w.link), "x"), write)
			release := w.link.HoldRequest(script.Refresh.Digest())
			redistest.Elapse(DefaultTTL/2 + time.Millisecond)
			w.unlock(l)
			release()
			synctest.Wait()
			if context.Cause(l) != ErrUnlocked || w.Redis.Exists("x") || w.Redis.Exists("{x}:lease") {
				t.Error(context.Cause(l), w.Redis.Keys())
			}
		})
	}
}

// An unlock that Redis does not confirm goes on in the background.
func TestUnlockGoesOnAfterAnError(t *testing.T) {
	inBubble(t, func(w *world) {
		l := w.lock(NewMutex(w.client(w.link), "x"), true)
		w.link.Refuse(true)
		w.link.Cut()
		w.matches(l.UnlockContext(context.Background()), ErrRedis)
		w.link.Refuse(false)
		start := time.Now()
		w.unlock(w.lock(NewMutex(w.client(nil), "x"), true))
		if took := time.Since(start); took > DefaultTTL/8 {
			t.Errorf("the lock came free after %v", took)
		}
	})
}

// Promise 8: nothing is left of crashed participants after their leases, and nothing at all after a day.
func TestNothingStays(t *testing.T) {
	inBubble(t, func(w *world) {
		crashing := NewMutex(w.client(w.link), "x")
		w.lock(crashing, false)
		waiter := make(chan error, 1)
		ctx, cancel := context.WithCancel(context.Background())
		go func() { _, err := crashing.LockContext(ctx); waiter <- err }()
		synctest.Wait()
		w.link.Refuse(true)
		w.link.Cut()
		redistest.Elapse(DefaultTTL + time.Millisecond)
		if keys := w.Redis.Keys(); fmt.Sprint(keys) != "[]" {
			t.Errorf("%q are left in Redis", keys)
		}
		cancel()
		<-waiter
		l := w.lock(NewMutex(w.client(nil), "x"), true)
		w.unlock(l)
		if keys := w.Redis.Keys(); fmt.Sprint(keys) != "[{x}:token]" {
			t.Errorf("%q are left in Redis", keys)
		}
		redistest.Elapse(24*time.Hour + time.Second)
		if keys := w.Redis.Keys(); len(keys) != 0 {
			t.Errorf("%q are left in Redis", keys)
		}
	})
}

// Each lock is renewed at the pace of its own TTL.
func TestMixedTTLs(t *testing.T) {
	inBubble(t, func(w *world) {
		rc := w.client(nil)
		var locks []*Lock
		for _, ttl := range []time.Duration{MinTTL, time.Second, time.Minute, MaxTTL} {
			locks = append(locks, w.lock(NewMutex(rc, "x", WithTTL(ttl)), false))
		}
		redistest.Elapse(time.Minute)
		for _, l := range locks {
			w.unlock(l)
		}
	})
}

// Promise 10: bad input is refused by every call, with an error that names it.
func TestBadInputIsRefused(t *testing.T) {
	inBubble(t, func(w *world) {
		rc := w.client(nil)
		var none *redis.Client
		for want, m := range map[string]*RWMutex{
			"nil client":       NewMutex(nil, "x"),
			"nil client ":      NewMutex(none, "x"),
			"panicked":         NewMutex(struct{ *redis.Client }{}, "x"),
			"empty name":       NewMutex(rc, ""),
			`name "a}b"`:       NewMutex(rc, "a}b"),
			`name "{}a"`:       NewMutex(rc, "{}a"),
			`name "}a{b"`:      NewMutex(rc, "}a{b"),
			"TTL 99ms":         NewMutex(rc, "x", WithTTL(99*time.Millisecond)),
			"TTL -1s":          NewMutex(rc, "x", WithTTL(-time.Second)),
			"TTL 0s":           NewMutex(rc, "x", WithTTL(0)),
			"TTL 8760h0m0.001": NewMutex(rc, "x", WithTTL(MaxTTL+time.Millisecond)),
			"exclude":          NewMutex(rc, "x", WithLockIntent(), WithReaderPriority()),
			"nil logger":       NewMutex(rc, "x", WithLogger(nil)),
			"nil option":       NewMutex(rc, "x", nil),
			"NewMutex":         {},
		} {
			for _, call := range []func(context.Context, ...LockOption) (*Lock, error){
				m.LockContext, m.RLockContext, m.TryLockContext, m.TryRLockContext,
			} {
				_, err := call(w.Context())
				w.matches(err, ErrInvalid)
				if !strings.Contains(err.Error(), strings.TrimSpace(want)) {
					t.Errorf("%q does not contain %q", err, want)
				}
			}
			if _, ok := m.TryLock(); ok {
				t.Error("locked")
			}
		}
		m := NewMutex(rc, "x")
		var noContext context.Context
		for want, o := range map[string]LockOption{
			"empty key": WithKey(""), `"x:}"`: WithKey("}"), "nil context": WithContext(noContext), "two contexts": WithContext(w.Context()), "nil option": nil,
		} {
			_, err := m.LockContext(w.Context(), o)
			w.matches(err, ErrInvalid)
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q does not contain %q", err, want)
			}
		}
		_, err := m.LockContext(noContext)
		w.matches(err, ErrInvalid)
		l := w.lock(NewMutex(rc, "y"), false)
		w.matches(l.UnlockContext(noContext), ErrInvalid)
		w.unlock(l)
		rc.Del(w.Context(), "{y}:token")
		if len(w.Redis.Keys()) != 0 {
			t.Errorf("bad input wrote %q", w.Redis.Keys())
		}
	})
}

// The calls that return a bool log their errors, to the log of the package or of the mutex.
func TestPlainCallsLogTheirErrors(t *testing.T) {
	inBubble(t, func(w *world) {
		defer SetLog(NopLog)
		var mu sync.Mutex
		var lines []string
		SetLog(func(format string, v ...any) {
			mu.Lock()
			defer mu.Unlock()
			lines = append(lines, fmt.Sprintf(format, v...))
		})
		held := w.lock(NewMutex(w.client(nil), "x"), true)
		rc := w.client(w.link)
		if _, ok := NewMutex(rc, "x").TryLock(); ok {
			t.Error("locked")
		}
		if len(lines) != 0 {
			t.Errorf("a refused try was logged: %q", lines)
		}
		w.unlock(held)
		w.link.Refuse(true)
		w.link.Cut()
		if _, ok := NewMutex(rc, "x").Lock(); ok {
			t.Error("locked")
		}
		if len(lines) != 1 || !strings.HasPrefix(lines[0], "[ERROR] redismutex: ") || !strings.Contains(lines[0], `"x"`) {
			t.Errorf("%q", lines)
		}
		var own strings.Builder
		logger := slog.New(slog.NewTextHandler(&own, nil))
		if _, ok := NewMutex(rc, "x", WithLogger(logger)).RLock(); ok {
			t.Error("locked")
		}
		if len(lines) != 1 || !strings.Contains(own.String(), "level=ERROR") {
			t.Errorf("%q, %q", lines, own.String())
		}
		SetLog(nil)
		NewMutex(rc, "x").RLock()
	})
}

// A tracing hook sees commands with the key and the id in them.
func TestHooksSeeTheKeys(t *testing.T) {
	inBubble(t, func(w *world) {
		rc, spans := w.client(nil), &tracer{}
		rc.AddHook(spans)
		l := w.lock(NewMutex(rc, "some-key"), true)
		w.unlock(l)
		synctest.Wait()
		for _, command := range spans.commands {
			if strings.HasPrefix(command, "evalsha") && !(strings.Contains(command, "some-key") && strings.Contains(command, l.ID())) {
				t.Errorf("%q", command)
			}
		}
	})
}

type tracer struct {
	counter
	commands []string
}

func (c *tracer) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.mu.Lock()
		c.commands = append(c.commands, cmd.String())
		c.mu.Unlock()
		return next(ctx, cmd)
	}
}

// All keys of a lock are in the slot of its name.
func TestDerivedKeysShareTheSlot(t *testing.T) {
	for _, name := range []string{"x", "a b", "замок", "a\x00b", strings.Repeat("k", 10_000), "{tag}x", "x{tag}", "{", "a{b", "{{b}", "{a}}b{c}", "{x}"} {
		k, err := script.NewKeys(name)
		if err != nil {
			t.Errorf("%.20q: %v", name, err)
			continue
		}
		for _, key := range []string{k.Intents(), k.Leases(), k.Token()} {
			if hashed(key) != hashed(name) || key == name {
				t.Errorf("%.20q and %.20q differ in their slot", name, key)
			}
		}
	}
}

// Promise 1: two locks that shared a key would grant each other's waiters.
func TestNoTwoLocksShareAKey(t *testing.T) {
	seen := map[string]string{}
	for _, name := range []string{"x", "{x}", "{x}:", "{x}::", "{x}:its", "{x}:its-", "{{x}", "{x", "{x}x", "x{x}"} {
		k, err := script.NewKeys(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range []string{k.Name(), k.Intents(), k.Leases(), k.Token()} {
			if other, taken := seen[key]; taken {
				t.Errorf("%q and %q share %q", name, other, key)
			}
			seen[key] = name
		}
		// Nor can a lock be named like one.
		for _, key := range []string{k.Intents(), k.Leases(), k.Token()} {
			if _, err := script.NewKeys(key); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "another lock") {
				t.Errorf("%q: %v", key, err)
			}
		}
	}
	inBubble(t, func(w *world) {
		rc := w.client(nil)
		holder := w.lock(NewMutex(rc, "x"), true)
		next := w.later(NewMutex(rc, "x"), true)
		other := w.lock(NewMutex(rc, "{x}"), true)
		w.pending(next)
		w.unlock(other)
		w.pending(next)
		w.unlock(holder)
		w.unlock(<-next)
	})
}

// hashed returns the part of a key from which Redis Cluster computes the slot.
func hashed(key string) string {
	if open := strings.IndexByte(key, '{'); open >= 0 {
		if length := strings.IndexByte(key[open+1:], '}'); length > 0 {
			return key[open+1 : open+1+length]
		}
	}
	return key
}

// A try whose context ends releases in the background what it may have been granted.
func TestCanceledTryLeavesNothing(t *testing.T) {
	inBubble(t, func(w *world) {
		release := w.link.HoldReply(script.Lock.Digest())
		ctx, cancel := context.WithTimeout(w.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := NewMutex(w.client(w.link), "x").TryLockContext(ctx)
		w.matches(err, context.DeadlineExceeded)
		redistest.Elapse(time.Millisecond)
		l, err := NewMutex(w.client(nil), "x").TryLockContext(w.Context())
		if err != nil {
			w.Fatal(err)
		}
		release()
		w.unlock(l)
	})
}

// endTrust ends the trust in l as if the time had passed while the process was stopped: no timer has fired.
func endTrust(l *Lock) {
	until := reflect.ValueOf(&l.held).Elem().FieldByName("grant").Elem().FieldByName("turn").Elem().FieldByName("acq").FieldByName("until").Addr().UnsafePointer()
	(*atomic.Int64)(until).Store(int64(clock.Now()))
}

// A user of the package can call what the documentation names, and nothing of the engine.
func TestLockHasNoMethodsOfTheEngine(t *testing.T) {
	want := []string{"Deadline", "Done", "Downgrade", "Err", "ID", "Key", "Token", "Unlock", "UnlockContext", "Until", "Value"}
	var got []string
	for i, lock := 0, reflect.TypeFor[*Lock](); i < lock.NumMethod(); i++ {
		got = append(got, lock.Method(i).Name)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("a Lock has the methods %v, want %v", got, want)
	}
}
