package redismutex_test

// This file answers: does the lock survive what was seen to break others? It
// runs on real servers and in real time, and looks at the lock from outside:
// by what callers get, and by the keys in Redis.

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
)

const (
	// patience is how long anything may take on a machine that is busy.
	patience = 30 * time.Second

	// long is a TTL of which not even a quarter passes within atOnce: whoever
	// gets the lock at once has not got it by looking, at half a TTL.
	long   = 20 * time.Second
	atOnce = 5 * time.Second

	// short is a TTL that a test waits out.
	short = 500 * time.Millisecond
)

// Promise 3: no reader shortens the lease of another. A reader with a short TTL
// joins one with a long TTL and crashes.
func TestShortReaderDoesNotTruncateLongReader(t *testing.T) {
	s := open(t)
	first := s.lock(s.mutex(nil, redismutex.WithTTL(long)).RLockContext)
	link := faultnet.New(nil)
	second := s.lock(s.mutex(link, redismutex.WithTTL(short)).RLockContext)
	crash(link)
	<-second.Done()
	ends := int64(s.rc.ZScore(s.Context(), leases, second.ID()).Val())
	s.eventually("the short lease has ended", func() bool { return s.rc.Time(s.Context()).Val().UnixMilli() > ends })
	late := s.mutex(nil, redismutex.WithTTL(long))
	if _, err := late.TryLockContext(s.Context()); !errors.Is(err, redismutex.ErrLock) {
		t.Errorf("a writer tries: %v", err)
	}
	writer := later(late.LockContext)
	s.waiting(1)
	s.eventually("the short reader is gone", func() bool { return !s.reads(second) })
	s.none(writer)
	if ttl := s.rc.PTTL(s.Context(), key).Val(); !s.reads(first) || ttl < long/2 {
		t.Errorf("the long reader is among %q for %v more", s.rc.SMembers(s.Context(), key).Val(), ttl)
	}
	s.unlock(first)
	s.unlock(s.soon(writer))
}

// Promise 2: trust of a holder that is cut off ends before the server gives the
// lock to somebody else.
func TestBlackHoledWriterEndsBeforeNextHolderBegins(t *testing.T) { blackHole(t, true) }

// Promise 2.
func TestBlackHoledReaderEndsBeforeNextHolderBegins(t *testing.T) { blackHole(t, false) }

func blackHole(t *testing.T, write bool) {
	const ttl = 2 * time.Second // the margin for drift is 22 ms of it
	s := open(t)
	var checks sync.WaitGroup
	for name, up := range map[string]bool{"both directions": true, "replies only": false} {
		link := faultnet.New(nil)
		mutex := redismutex.NewMutex(s.client(link), name, redismutex.WithTTL(ttl))
		holder := s.lock(verb(mutex, write))
		taken := time.Now()
		s.eventually("it is renewed", func() bool { return holder.Until().After(taken.Add(ttl)) })
		var ended, trusted bool
		next := later(func(ctx context.Context, _ ...redismutex.LockOption) (*redismutex.Lock, error) {
			l, err := redismutex.NewMutex(s.client(nil), name, redismutex.WithTTL(long)).LockContext(ctx)
			// Here the next holder begins: has the one before it ended?
			trusted = time.Now().Before(holder.Until())
			select {
			case <-holder.Done():
				ended = true
			default:
			}
			return l, err
		})
		s.eventually("the next waits", func() bool { return s.rc.Exists(s.Context(), "{"+name+"}:lock-intent").Val() == 1 })
		link.Hole(up, true)
		checks.Go(func() {
			o := <-next
			if o.err != nil || !ended || trusted {
				t.Errorf("%s: as the next holder began (%v), the holder had ended: %v, and was trusted: %v", name, o.err, ended, trusted)
			}
			if cause := context.Cause(holder); !errors.Is(cause, redismutex.ErrLockLost) {
				t.Errorf("%s: %v", name, cause)
			}
		})
	}
	checks.Wait()
}

// Promises 5 and 7: an unlock hands the lock on and wakes who gets it.
func TestUnlockWakesWaiterAtOnce(t *testing.T) {
	for _, write := range []bool{true, false} {
		t.Run(kind(write), func(t *testing.T) {
			s := open(t)
			holder := s.lock(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
			waiter := later(verb(s.mutex(nil, redismutex.WithTTL(long)), write))
			s.waiting(1)
			s.unlock(holder)
			s.unlock(s.soon(waiter))
		})
	}
}

// Promise 5: whatever comes first of subscribing, entering, the unlock and its
// message, the waiter has the lock at once.
func TestNoWakeUpIsLostWhenSubscribeRacesUnlock(t *testing.T) {
	s := open(t)
	mutex := s.mutex(nil, redismutex.WithTTL(long))
	for what, hold := range map[string]func(*faultnet.Link) func(){
		"subscribe":         func(l *faultnet.Link) func() { return l.HoldRequest("subscribe") },
		"its confirmation":  func(l *faultnet.Link) func() { return l.HoldReply("subscribe") },
		"the enter":         func(l *faultnet.Link) func() { return l.HoldRequest("join:") },
		"the enter's reply": func(l *faultnet.Link) func() { return l.HoldReply("join:") },
	} {
		t.Run("unlock overtakes "+what, func(t *testing.T) {
			s := &scene{t, s.server, s.rc}
			holder := s.lock(mutex.LockContext)
			link := faultnet.New(nil)
			release := hold(link)
			waiter := later(s.mutex(link, redismutex.WithTTL(long)).LockContext)
			s.eventually("it is under way", func() bool { return link.Held() > 0 })
			s.unlock(holder)
			release()
			s.unlock(s.soon(waiter))
		})
	}
	for i := range 60 { // the unlock at any moment, swept over the time that it takes to join
		holder := s.lock(mutex.LockContext)
		waiter := later(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
		spin(time.Duration(i) * 100 * time.Microsecond)
		s.unlock(holder)
		s.unlock(s.soon(waiter))
	}
}

// Promise 3: a reader that crashed leaves with its own lease, not later, although
// others keep theirs for ever, and not earlier.
func TestCrashedReaderGoesWhileOthersRenew(t *testing.T) {
	s := open(t)
	link := faultnet.New(nil)
	crashed := s.lock(s.mutex(link, redismutex.WithTTL(short)).RLockContext)
	var others []*redismutex.Lock
	for range 3 {
		others = append(others, s.lock(s.mutex(nil, redismutex.WithTTL(short)).RLockContext))
	}
	crash(link)
	<-crashed.Done()
	ends := int64(s.rc.ZScore(s.Context(), leases, crashed.ID()).Val())
	s.eventually("the crashed reader is gone", func() bool { return !s.reads(crashed) })
	if now := s.rc.Time(s.Context()).Val().UnixMilli(); now < ends {
		t.Errorf("it went %d ms before its lease ended", ends-now)
	}
	for _, l := range others {
		if !s.reads(l) || l.Err() != nil {
			t.Error("another reader is gone", context.Cause(l))
		}
		s.unlock(l)
	}
	s.unlock(s.lock(s.mutex(nil).TryLockContext))
}

// Promise 3: neither a try nor another waiter that comes and goes takes anything
// from who waits already.
func TestTryDoesNotClearAWaitersIntent(t *testing.T) {
	s := open(t)
	holder := s.lock(s.mutex(nil, redismutex.WithTTL(long)).RLockContext)
	waiter := later(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
	s.waiting(1)
	intent := s.rc.ZRangeWithScores(s.Context(), intents, 0, -1).Val()[0]

	for _, opt := range [][]redismutex.MutexOption{
		nil, {redismutex.WithLockIntent()}, {redismutex.WithTTL(redismutex.MinTTL)},
	} {
		other := s.mutex(nil, opt...)
		for _, try := range []ask{other.TryLockContext, other.TryRLockContext} {
			if _, err := try(s.Context()); !errors.Is(err, redismutex.ErrLock) {
				t.Error(err)
			}
		}
		for _, wait := range []ask{other.LockContext, other.RLockContext} {
			ctx, cancel := context.WithCancel(s.Context())
			leaves := laterIn(ctx, wait)
			s.waiting(2)
			cancel()
			if o := <-leaves; !errors.Is(o.err, context.Canceled) {
				t.Error(o.err)
			}
			s.waiting(1)
		}
	}
	if now := s.rc.ZRangeWithScores(s.Context(), intents, 0, -1).Val(); len(now) != 1 || now[0] != intent {
		t.Errorf("%v waited, %v is there now", intent, now)
	}
	id := intent.Member.(string)[1:]
	if left, ends := s.rc.PTTL(s.Context(), intents).Val(), s.rc.ZScore(s.Context(), leases, id).Val(); left < long/4 || ends == 0 {
		t.Errorf("the intent stays for %v, and its lease to %v", left, ends)
	}
	s.unlock(holder)
	s.unlock(s.soon(waiter))
}

// Promises 3 and 5: a waiter that is cancelled stands in nobody's way.
func TestCancelledWaiterClearsItsIntent(t *testing.T) {
	s := open(t)
	reader := s.lock(s.mutex(nil, redismutex.WithTTL(long)).RLockContext)
	ctx, cancel := context.WithCancel(s.Context())
	writer := laterIn(ctx, s.mutex(nil, redismutex.WithTTL(long)).LockContext)
	s.waiting(1)
	id := s.rc.ZRange(s.Context(), intents, 0, -1).Val()[0][1:]
	behind := later(s.mutex(nil, redismutex.WithTTL(long)).RLockContext)
	s.waiting(2)

	cancel()
	if o := <-writer; !errors.Is(o.err, context.Canceled) {
		t.Error(o.err)
	}
	second := s.soon(behind)
	s.waiting(0)
	if err := s.rc.ZScore(s.Context(), leases, id).Err(); err != redis.Nil {
		t.Errorf("the lease of a waiter that left: %v", err)
	}
	s.unlock(reader)
	s.unlock(second)
}

// Promise 4: go-redis sends an acquire again whose reply was lost.
func TestLostAcquireReplyIsObtainedOnce(t *testing.T) {
	for _, write := range []bool{true, false} {
		t.Run("at once/"+kind(write), func(t *testing.T) {
			s := open(t)
			link := faultnet.New(nil)
			mutex := s.mutex(link, redismutex.WithTTL(long))
			link.LoseReply("try:", 2)
			s.heldOnce(s.soon(later(verb(mutex, write))))
			try := ask(mutex.TryRLockContext)
			if write {
				try = mutex.TryLockContext
			}
			link.LoseReply("try:", 2)
			s.heldOnce(s.soon(later(try)))
		})
		t.Run("after a wait/"+kind(write), func(t *testing.T) {
			s := open(t)
			holder := s.lock(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
			link := faultnet.New(nil)
			link.LoseReply("join:", 2)
			waiter := later(verb(s.mutex(link, redismutex.WithTTL(long)), write))
			s.waiting(1)
			s.unlock(holder)
			s.heldOnce(s.soon(waiter))
		})
	}
}

// heldOnce checks that a lock is held, by l alone, and that nothing is left of
// it behind its unlock.
func (s *scene) heldOnce(l *redismutex.Lock) {
	s.Helper()
	if s.rc.Get(s.Context(), key).Val() != l.ID() && fmt.Sprint(s.rc.SMembers(s.Context(), key).Val()) != "["+l.ID()+"]" {
		s.Errorf("%s is not the one that holds", l.ID())
	}
	s.waiting(0)
	other := s.mutex(nil)
	if _, err := other.TryLockContext(s.Context()); !errors.Is(err, redismutex.ErrLock) {
		s.Errorf("a second holder: %v", err)
	}
	s.unlock(l)
	s.empty(key)
	s.unlock(s.lock(other.TryLockContext))
}

// Promise 4: an enter that lands after its own leave is refused.
func TestEnterThatLandsAfterItsLeaveIsRefused(t *testing.T) {
	for _, write := range []bool{true, false} {
		t.Run(kind(write), func(t *testing.T) {
			s := open(t)
			link := faultnet.New(nil)
			mutex := s.mutex(link, redismutex.WithTTL(long))
			s.unlock(s.lock(verb(mutex, write))) // the server has the script
			release := link.HoldRequest("try:")
			ctx, cancel := context.WithCancel(s.Context())
			caller := laterIn(ctx, verb(mutex, write))
			s.eventually("it is under way", func() bool { return link.Held() > 0 })
			cancel()
			if o := <-caller; !errors.Is(o.err, context.Canceled) {
				t.Error(o.err)
			}
			s.eventually("it has left", func() bool { return s.rc.ZCard(s.Context(), leases).Val() > 0 })
			before := scriptCalls(s.rc)
			release()
			s.eventually("it has landed", func() bool { return scriptCalls(s.rc) > before })
			s.empty(key)
			s.unlock(s.lock(s.mutex(nil).TryLockContext))
		})
	}
}

// Promise 5: a grant whose waiter is leaving goes to the next in line.
func TestGrantCrossingACancellationIsPassedOn(t *testing.T) {
	s := open(t)
	holding, staying := s.mutex(nil, redismutex.WithTTL(long)), s.mutex(nil, redismutex.WithTTL(long))
	messages := faultnet.New(nil)
	leaving := s.mutexOf(twoWays{s.client(nil), s.client(messages)}, redismutex.WithTTL(long))
	line := func() (holder *redismutex.Lock, cancel func(), first, second <-chan outcome) {
		holder = s.lock(holding.LockContext)
		ctx, cancel := context.WithCancel(s.Context())
		first = laterIn(ctx, leaving.LockContext)
		s.waiting(1)
		second = later(staying.LockContext)
		s.waiting(2)
		return holder, cancel, first, second
	}
	for i := range 100 { // the unlock comes before, with and after the cancellation
		holder, cancel, first, second := line()
		go func() {
			spin(time.Duration(i) * 10 * time.Microsecond)
			cancel()
		}()
		spin(300 * time.Microsecond)
		s.unlock(holder)
		if o := <-first; o.err == nil {
			s.unlock(o.lock)
		}
		s.unlock(s.soon(second))
	}

	// The message of the grant is on its way for good.
	holder, cancel, first, second := line()
	id := s.rc.ZRange(s.Context(), intents, 0, -1).Val()[0][1:]
	messages.Hole(false, true)
	s.unlock(holder)
	if got := s.rc.Get(s.Context(), key).Val(); got != id {
		t.Fatalf("granted to %q, not to the first in line, %q", got, id)
	}
	cancel()
	if o := <-first; !errors.Is(o.err, context.Canceled) {
		t.Error(o.err)
	}
	s.unlock(s.soon(second))
}

// Promise 2: the message of a grant is worth what is left of the lease it was
// granted with.
func TestStaleGrantMessageGivesNobodyALock(t *testing.T) {
	const ttl = 600 * time.Millisecond
	for name, delay := range map[string]time.Duration{
		"in the last quarter":     ttl * 8 / 10,
		"as the lease has ended":  ttl + ttl/10,
		"when it is another's":    2 * ttl,
		"when it has long passed": 3 * ttl,
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			commands, messages := faultnet.New(nil), faultnet.New(nil)
			split := twoWays{s.client(commands, impatient), s.client(messages)}
			holder := s.lock(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
			waiter := later(redismutex.NewMutex(split, key, redismutex.WithTTL(ttl)).LockContext)
			s.waiting(1)
			id := s.rc.ZRange(s.Context(), intents, 0, -1).Val()[0][1:]
			mailbox, _, _ := cutLast(id, ":")
			echo := split.messages.Subscribe(s.Context(), mailbox)
			defer echo.Close()
			if _, err := echo.Receive(s.Context()); err != nil { // the confirmation
				t.Fatal(err)
			}
			next := later(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
			s.waiting(2)

			messages.SetDelay(delay)
			commands.Hole(true, true)
			s.unlock(holder)
			if got := s.rc.Get(s.Context(), key).Val(); got != id && got != "" {
				t.Fatalf("granted to %q, not to the first in line, %q", got, id)
			}
			second := s.soon(next)
			if msg, err := echo.ReceiveMessage(s.Context()); err != nil {
				t.Fatal(err)
			} else {
				t.Logf("the message %q has come", msg.Payload)
			}
			s.never(waiter, 300*time.Millisecond)
			s.unlock(second)
			commands.Hole(false, false)
			s.unlock(s.soon(waiter)) // it has entered anew
		})
	}
}

// Promise 10: the lock was held to the end, whatever becomes of a renewal.
func TestUnlockRacingARenewalReportsNoLoss(t *testing.T) {
	for _, write := range []bool{true, false} {
		for _, reply := range []bool{true, false} {
			name := kind(write) + map[bool]string{true: "/before its reply", false: "/before it arrives"}[reply]
			t.Run(name, func(t *testing.T) {
				s := open(t)
				refresh := s.rc.ScriptLoad(s.Context(), redismutex.Source("refresh")).Val()
				log := &logged{}
				link := faultnet.New(nil)
				l := s.lock(verb(s.mutex(link, redismutex.WithTTL(time.Second), log.option()), write))
				hold := link.HoldRequest
				if reply {
					hold = link.HoldReply
				}
				release := hold(refresh)
				s.eventually("a renewal is under way", func() bool { return link.Held() > 0 })
				s.unlock(l)
				if cause := context.Cause(l); cause != redismutex.ErrUnlocked {
					t.Error(cause)
				}
				before := scriptCalls(s.rc)
				release()
				if !reply {
					s.eventually("the renewal has run", func() bool { return scriptCalls(s.rc) > before })
				}
				s.eventually("it has been answered", func() bool { return link.Held() == 0 })
				s.empty(key)
				if log.count("") != 0 {
					t.Error(log)
				}
			})
		}
	}
	t.Run("by chance", func(t *testing.T) {
		const ttl = time.Second
		s := open(t)
		log := &logged{}
		rc := s.client(nil)
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				l, err := verb(redismutex.NewMutex(rc, fmt.Sprint(i), redismutex.WithTTL(ttl), log.option()), i%2 == 0)(s.Context())
				if err != nil {
					t.Error(err)
					return
				}
				<-time.After(ttl/2 - 20*time.Millisecond + time.Duration(i)*time.Millisecond/2) // as it is renewed
				if err := l.UnlockContext(s.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for i := range 100 {
			s.empty(fmt.Sprint(i))
		}
		if log.count("") != 0 {
			t.Error(log)
		}
	})
}

// Promise 5: the parent's end is no reason to keep the lock.
func TestUnlockOnCancelledParentFreesTheKey(t *testing.T) {
	for _, write := range []bool{true, false} {
		t.Run(kind(write), func(t *testing.T) {
			s := open(t)
			mutex, other := s.mutex(nil, redismutex.WithTTL(long)), s.mutex(nil)
			for _, unlock := range []func(*redismutex.Lock){
				func(l *redismutex.Lock) { l.Unlock() },
				func(l *redismutex.Lock) { s.unlock(l) },
				func(l *redismutex.Lock) { // not confirmed, but it goes on
					if err := l.UnlockContext(l); err != nil && !errors.Is(err, context.Canceled) {
						t.Error(err)
					}
					s.eventually("it has gone on", func() bool { return s.rc.Exists(s.Context(), key).Val() == 0 })
				},
			} {
				ctx, cancel := context.WithCancel(s.Context())
				o := <-laterIn(ctx, verb(mutex, write))
				if o.err != nil {
					t.Fatal(o.err)
				}
				cancel()
				<-o.lock.Done()
				unlock(o.lock)
				s.unlock(s.lock(other.TryLockContext))
			}
		})
	}
}

// Section 4, calls and contexts: within 100 ms of its context's end LockContext
// returns, although go-redis does not interrupt the read of a socket. What it
// asked for comes to nothing.
func TestLockContextReturnsWithItsContextAgainstABlackHole(t *testing.T) {
	const promised, enough = 100 * time.Millisecond, 150 * time.Millisecond
	for name, arrange := range map[string]func(s *scene, link *faultnet.Link) (fail, repair func()){
		"on entering": func(s *scene, link *faultnet.Link) (fail, repair func()) {
			return func() { link.Hole(true, true) }, func() { link.Hole(false, false) }
		},
		"without an answer": func(s *scene, link *faultnet.Link) (fail, repair func()) {
			return func() { link.Hole(false, true) }, func() { link.Hole(false, false) }
		},
		"frozen": func(s *scene, link *faultnet.Link) (fail, repair func()) {
			return s.server.Freeze, s.server.Thaw
		},
		"on subscribing": func(s *scene, link *faultnet.Link) (fail, repair func()) {
			holder := s.lock(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
			release := link.HoldRequest("subscribe")
			return func() {}, func() { release(); s.unlock(holder) }
		},
		"in the queue": func(s *scene, link *faultnet.Link) (fail, repair func()) {
			holder := s.lock(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
			return func() { s.waiting(1); link.Hole(true, true) }, func() { link.Hole(false, false); s.unlock(holder) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			best := patience
			for range 5 { // the best of them: the machine has other things to do as well
				link := faultnet.New(nil)
				mutex := s.mutex(link, redismutex.WithTTL(2*time.Second))
				s.unlock(s.lock(mutex.LockContext)) // it has a connection, and the server the script
				fail, repair := arrange(s, link)
				queued := name == "in the queue"
				if !queued {
					fail()
				}
				ctx, cancel := context.WithTimeout(s.Context(), enough)
				called := laterIn(ctx, mutex.LockContext)
				if queued {
					fail()
				}
				o := <-called
				deadline, _ := ctx.Deadline()
				over := o.at.Sub(deadline)
				cancel()
				repair()
				if !errors.Is(o.err, context.DeadlineExceeded) || errors.Is(o.err, redismutex.ErrRedis) || over > atOnce {
					t.Fatalf("%v after its context: %v", over, o.err)
				}
				best = min(best, over)
				s.eventually("the server is as it was", func() bool { return s.rc.Exists(s.Context(), key, intents).Val() == 0 })
			}
			if best >= promised {
				t.Errorf("it returned %v after its context", best)
			}
		})
	}
}

// Promise 10, and section 2: where the server has lost its data, a holder learns
// it within its TTL.
func TestHolderLearnsOfAnEmptyRestart(t *testing.T) {
	for _, write := range []bool{true, false} {
		t.Run(kind(write), func(t *testing.T) {
			const ttl = 2 * time.Second
			s := open(t)
			l := s.lock(verb(s.mutex(nil, redismutex.WithTTL(ttl)), write))
			start := time.Now()
			s.server.Restart(t)
			select {
			case <-l.Done():
			case <-time.After(patience):
				t.Fatal("it never learns")
			}
			if took := time.Since(start); took > ttl {
				t.Errorf("it learned after %v", took)
			}
			for _, err := range []error{context.Cause(l), l.UnlockContext(s.Context())} {
				if !errors.Is(err, redismutex.ErrLockLost) {
					t.Error(err)
				}
			}
		})
	}
}

// Section 4, errors while waiting: who stands in the queue outlives a restart,
// enters anew, and gets the lock.
func TestWaitersGoOnAfterAnEmptyRestart(t *testing.T) {
	s := open(t)
	s.lock(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
	var waiters []<-chan outcome
	shared := s.mutex(nil, redismutex.WithTTL(2*time.Second))
	for i := range 6 {
		mutex := shared
		if i%2 == 0 {
			mutex = s.mutex(nil, redismutex.WithTTL(2*time.Second))
		}
		waiters = append(waiters, later(verb(mutex, i%3 != 0)))
		s.waiting(i + 1)
	}
	s.server.Restart(t)
	var w witness
	var wg sync.WaitGroup
	for i, c := range waiters {
		wg.Go(func() {
			o := <-c
			if o.err != nil {
				t.Error(o.err)
				return
			}
			w.enter(i%3 != 0)
			if err := o.lock.UnlockContext(s.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := w.overlaps.Load(); n > 0 {
		t.Errorf("%d overlaps", n)
	}
	s.waiting(0)
}

// Promise 7: a lost message costs time, and half a TTL of it at most.
func TestCutSubscriptionDelaysNoWaiter(t *testing.T) {
	for name, c := range map[string]struct {
		ttl, within time.Duration
		fail        func(s *scene, messages *faultnet.Link)
	}{
		"away": {long, atOnce, func(s *scene, messages *faultnet.Link) {
			messages.Refuse(true)
			messages.Cut()
			s.eventually("nobody hears", func() bool { return s.subscriptions() == 0 })
		}},
		"cut at the same moment": {long, atOnce, func(s *scene, messages *faultnet.Link) { messages.Cut() }},
		"back": {long, atOnce, func(s *scene, messages *faultnet.Link) {
			messages.Cut()
			s.eventually("it is back", func() bool { return messages.Dials() > 1 && s.subscriptions() == 1 })
		}},
		// It looks after half a TTL, and would find out after 6 s that the link is dead.
		"silent": {4 * time.Second, 4 * time.Second, func(s *scene, messages *faultnet.Link) { messages.Hole(true, true) }},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			messages := faultnet.New(nil)
			split := twoWays{s.client(nil), s.client(messages)}
			holder := s.lock(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
			var waiters []<-chan outcome
			for i := range 3 {
				waiters = append(waiters, later(redismutex.NewMutex(split, key, redismutex.WithTTL(c.ttl)).RLockContext))
				s.waiting(i + 1)
			}
			c.fail(s, messages)
			start := time.Now()
			s.unlock(holder)
			for _, w := range waiters {
				s.unlock(s.soon(w))
			}
			if took := time.Since(start); took > c.within {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// Promise 1: TTLs and orders are each mutex's own choice.
func TestMixedTTLsAndOrdersExclude(t *testing.T) {
	s := open(t)
	mutexes := []*redismutex.RWMutex{
		s.mutex(nil, redismutex.WithTTL(2*time.Second)),
		s.mutex(nil, redismutex.WithTTL(long), redismutex.WithLockIntent()),
		s.mutex(nil, redismutex.WithTTL(5*time.Second), redismutex.WithReaderPriority()),
	}
	var w witness
	var ended atomic.Bool
	time.AfterFunc(2*time.Second, func() { ended.Store(true) })
	w.crowd(12, ended.Load, func(i int) (write bool, unlock func()) {
		write = i%3 == 0
		l, err := verb(mutexes[i%len(mutexes)], write)(s.Context())
		if i%5 == 4 { // some come and go by a try
			if err == nil {
				l.Unlock()
			}
			ask := mutexes[i%len(mutexes)].TryRLockContext
			if write {
				ask = mutexes[i%len(mutexes)].TryLockContext
			}
			l, err = ask(s.Context())
			if errors.Is(err, redismutex.ErrLock) {
				return false, nil
			}
		}
		if err != nil {
			t.Error(err)
			return false, nil
		}
		return write, func() {
			if err := l.UnlockContext(s.Context()); err != nil {
				t.Error(err)
			}
		}
	})
	t.Logf("%d writers, %d readers entered", w.wrote.Load(), w.read.Load())
	if w.overlaps.Load() > 0 || w.wrote.Load() == 0 || w.read.Load() == 0 {
		t.Errorf("%d overlaps", w.overlaps.Load())
	}
	s.empty(key)

	t.Run("the witness sees a lock that excludes nobody", func(t *testing.T) {
		var w witness
		start := time.Now()
		w.crowd(12, func() bool { return w.overlaps.Load() > 0 || time.Since(start) > patience },
			func(i int) (bool, func()) { return i%3 == 0, func() {} })
		if w.overlaps.Load() == 0 {
			t.Error("it did not")
		}
	})
}

// Promises 7 and 10: where no message can be sent or heard, waiters look, and the
// log says why, once per client.
func TestPublishRefusedByACL(t *testing.T) {
	for name, c := range map[string]struct{ rule, says string }{
		"no publish":   {"-publish", "PUBLISH"},
		"no channels":  {"resetchannels", "PUBLISH"},
		"no subscribe": {"-subscribe", "subscription"},
	} {
		t.Run(name, func(t *testing.T) {
			const ttl = 4 * time.Second
			s := open(t)
			rules := []any{"ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", c.rule}
			if err := s.rc.Do(s.Context(), rules...).Err(); err != nil {
				t.Fatal(err)
			}
			var logs []*logged
			var mutexes []*redismutex.RWMutex
			for range 2 {
				log := &logged{}
				logs = append(logs, log)
				mutexes = append(mutexes, s.mutexOf(s.client(nil, func(o *redis.Options) {
					o.Username, o.Password = "app", "secret"
				}), redismutex.WithTTL(ttl), log.option()))
			}
			for i := range 6 { // either hands on to itself and to the other
				holder := s.lock(mutexes[i%2].LockContext)
				waiter := later(mutexes[i/2%2].LockContext)
				s.waiting(1)
				start := time.Now()
				s.unlock(holder)
				s.unlock(s.soon(waiter))
				if took := time.Since(start); took > ttl {
					t.Errorf("it took %v", took)
				}
			}
			for i, log := range logs {
				if n := log.count(c.says); n != 1 {
					t.Errorf("client %d: %d lines speak of %s: %s", i, n, c.says, log)
				}
			}
		})
	}
}

// Where Redis may evict a lock the log says so, once, and no lock pays for it.
func TestEvictingPolicyIsLoggedOnce(t *testing.T) {
	const policy = "allkeys-lru"
	run := func(t *testing.T, s *scene, user string) (*logged, *counted) {
		log, sent := &logged{}, &counted{}
		rc := s.client(nil, func(o *redis.Options) { o.Username, o.Password = user, cmp.Or(user, "") })
		first := s.mutexOf(rc, log.option())
		s.unlock(s.lock(first.LockContext)) // the server has the scripts
		s.unlock(s.lock(first.RLockContext))
		rc.AddHook(sent)
		for i := range 20 {
			mutex := first
			if i%2 == 1 {
				mutex = s.mutexOf(rc, log.option())
			}
			s.unlock(s.lock(verb(mutex, i%3 == 0)))
		}
		return log, sent
	}
	t.Run("evicting", func(t *testing.T) {
		s := open(t, "--maxmemory", "100mb", "--maxmemory-policy", policy)
		log, sent := run(t, s, "")
		s.eventually("the log says so", func() bool { return log.count(policy) > 0 })
		if log.count("") != 1 {
			t.Error(log)
		}
		if n := sent.number(); n != 40 && n != 41 { // the look may come a little later
			t.Errorf("20 locks took %d commands", n)
		}
	})
	t.Run("not evicting", func(t *testing.T) {
		s := open(t, "--maxmemory", "100mb", "--maxmemory-policy", "noeviction")
		if log, _ := run(t, s, ""); log.count("") != 0 {
			t.Error(log)
		}
	})
	t.Run("not allowed to look", func(t *testing.T) {
		s := open(t, "--maxmemory", "100mb", "--maxmemory-policy", policy)
		if err := s.rc.Do(s.Context(), "ACL", "SETUSER", "app", "on", ">app", "~*", "&*", "+@all", "-info").Err(); err != nil {
			t.Fatal(err)
		}
		if log, _ := run(t, s, "app"); log.count("") != 0 {
			t.Error(log)
		}
	})
}

// Promise 10: a server that is down holds no lock.
func TestServerDownIsARedisErrorNotHeld(t *testing.T) {
	s := open(t)
	log := &logged{}
	mutex := s.mutexOf(s.client(nil, func(o *redis.Options) { o.DialerRetries = 1 }), log.option())
	s.unlock(s.lock(mutex.LockContext))
	s.server.Kill()
	for name, call := range map[string]ask{
		"LockContext": mutex.LockContext, "RLockContext": mutex.RLockContext,
		"TryLockContext": mutex.TryLockContext, "TryRLockContext": mutex.TryRLockContext,
	} {
		o := <-later(call)
		if !errors.Is(o.err, redismutex.ErrRedis) || errors.Is(o.err, redismutex.ErrLock) {
			t.Errorf("%s: %v", name, o.err)
		}
		var network *net.OpError
		if !errors.As(o.err, &network) {
			t.Errorf("%s: no error of the network: %v", name, o.err)
		}
	}
	if log.count("") != 0 {
		t.Error(log)
	}
	for i, call := range []func(...redismutex.LockOption) (*redismutex.Lock, bool){mutex.Lock, mutex.RLock, mutex.TryLock, mutex.TryRLock} {
		if _, ok := call(); ok || log.count("") != i+1 {
			t.Error(ok, log)
		}
	}
}

// Section 3: what is no lock is left as it is, and nobody waits for it.
func TestForeignDataIsLeftAlone(t *testing.T) {
	s := open(t)
	put := map[string]func(k string) error{
		"string": func(k string) error { return s.rc.Set(s.Context(), k, "data", 0).Err() },
		"number": func(k string) error { return s.rc.Set(s.Context(), k, 7, 0).Err() },
		"hash":   func(k string) error { return s.rc.HSet(s.Context(), k, "field", "data").Err() },
		"list":   func(k string) error { return s.rc.RPush(s.Context(), k, "data", "more").Err() },
		"set":    func(k string) error { return s.rc.SAdd(s.Context(), k, "data", "more").Err() },
		"zset":   func(k string) error { return s.rc.ZAdd(s.Context(), k, redis.Z{Score: 1, Member: "data"}).Err() },
		"stream": func(k string) error {
			return s.rc.XAdd(s.Context(), &redis.XAddArgs{Stream: k, Values: []string{"field", "data"}}).Err()
		},
	}
	rc := s.client(nil)
	sent := &counted{}
	rc.AddHook(sent)
	warm := redismutex.NewMutex(rc, "warm")
	s.unlock(s.lock(warm.LockContext))
	s.unlock(s.lock(warm.RLockContext))
	for i, where := range []string{"%s", "{%s}:token", "{%s}:lease", "{%s}:lock-intent"} {
		for what, put := range put {
			t.Run(fmt.Sprintf(where, what), func(t *testing.T) {
				name := fmt.Sprint(what, i)
				data := fmt.Sprintf(where, name)
				if err := put(data); err != nil {
					t.Fatal(err)
				}
				before := s.rc.Dump(s.Context(), data).Val()
				mutex := redismutex.NewMutex(rc, name)
				for call, ask := range map[string]ask{
					"LockContext": mutex.LockContext, "RLockContext": mutex.RLockContext,
					"TryLockContext": mutex.TryLockContext, "TryRLockContext": mutex.TryRLockContext,
				} {
					n := sent.number()
					ctx, cancel := context.WithTimeout(s.Context(), atOnce)
					o := <-laterIn(ctx, ask)
					cancel()
					switch {
					case o.err == nil && where == "{%s}:token" && strings.Contains(call, "R"): // a reader needs no token
						if err := o.lock.UnlockContext(s.Context()); err != nil {
							t.Errorf("%s: %v", call, err)
						}
					case !errors.Is(o.err, redismutex.ErrNotLock):
						t.Errorf("%s: %v", call, o.err)
					case sent.number()-n > 2:
						t.Errorf("%s: %d commands", call, sent.number()-n)
					}
					if o.err == nil {
						o.lock.Unlock()
					}
					if after, ttl := s.rc.Dump(s.Context(), data).Val(), s.rc.TTL(s.Context(), data).Val(); after != before || ttl != -1 {
						t.Fatalf("%s: %q became %q, with a TTL of %v", call, before, after, ttl)
					}
				}
			})
		}
	}
}

// Section 3: every other name works.
func TestOddNamesWork(t *testing.T) {
	s := open(t)
	names := map[string]string{
		"spaces": " a b  c ", "Cyrillic": "замок", "NUL": "a\x00b\x00", "10 kB": strings.Repeat("long ", 2048),
		"tagged": "{tag}x", "tag inside": "a{tag}b", "brace": "{", "two braces": "{{", "newline": "a\r\nb", "glob": "*?[a]",
		"not UTF-8": "\xff\xfe", "verbs": "%s%d", "colons": "a:b:lock-intent",
	}
	first, second := s.client(nil), s.client(nil)
	for what, name := range names {
		for _, sub := range []string{"", "user 7", "{x", name} {
			if sub != "" && strings.Contains(sub, "}") && !strings.Contains(name, "{tag}") {
				continue
			}
			t.Run(what+"/"+fmt.Sprintf("%.10q", sub), func(t *testing.T) {
				var opt []redismutex.LockOption
				want := name
				if sub != "" {
					opt, want = append(opt, redismutex.WithKey(sub)), name+":"+sub
				}
				in := func(a ask) ask {
					return func(ctx context.Context, _ ...redismutex.LockOption) (*redismutex.Lock, error) { return a(ctx, opt...) }
				}
				a := redismutex.NewMutex(first, name, redismutex.WithTTL(long))
				b := redismutex.NewMutex(second, name, redismutex.WithTTL(long))
				s := &scene{t, s.server, s.rc}
				holder := s.lock(in(a.LockContext))
				if holder.Key() != want || s.rc.Get(s.Context(), want).Val() != holder.ID() {
					t.Errorf("%.50q is held, not %.50q", holder.Key(), want)
				}
				if _, err := in(b.TryLockContext)(s.Context()); !errors.Is(err, redismutex.ErrLock) {
					t.Error(err)
				}
				waiter := later(in(b.RLockContext))
				s.eventually("it waits", func() bool { return len(s.rc.Keys(s.Context(), "*lock-intent").Val()) > 0 })
				s.unlock(holder)
				reader := s.soon(waiter)
				s.unlock(s.lock(in(a.TryRLockContext)))
				s.unlock(reader)
				for _, k := range s.rc.Keys(s.Context(), "*").Val() {
					if !strings.HasSuffix(k, ":token") && !strings.HasSuffix(k, ":lease") { // of a tombstone
						t.Errorf("%.50q is left", k)
					}
				}
			})
		}
	}
}

// Section 4: all mutexes on a client share one subscription, which is there while
// somebody waits, and nothing stays when nobody does.
func TestTwoHundredMutexesShareOneConnection(t *testing.T) {
	// It counts goroutines, so it does not run beside others.
	const mutexes = 200
	s := &scene{t, redistest.Start(t), nil}
	s.rc = s.server.Client(t)
	rc := s.client(nil)
	s.unlock(s.lock(redismutex.NewMutex(rc, "warm").LockContext))
	baseline := runtime.NumGoroutine()

	var holders []*redismutex.Lock
	var waiters []<-chan outcome
	for i := range mutexes {
		mutex := redismutex.NewMutex(rc, fmt.Sprint("m", i), redismutex.WithTTL(long))
		holders = append(holders, s.lock(mutex.LockContext))
		waiters = append(waiters, later(mutex.LockContext))
	}
	s.eventually("all wait", func() bool { return len(s.rc.Keys(s.Context(), "*:lock-intent").Val()) == mutexes })
	if n := s.subscriptions(); n != 1 {
		t.Errorf("%d connections subscribe", n)
	}
	for i, l := range holders {
		s.unlock(l)
		s.unlock(s.soon(waiters[i]))
	}
	if n := s.subscriptions(); n != 1 {
		t.Errorf("%d connections subscribe", n)
	}
	s.eventually("the subscription is closed", func() bool { return s.subscriptions() == 0 })
	s.eventually("no goroutine is left", func() bool { return runtime.NumGoroutine() <= baseline })
}

// What follows is what the tests share.

const (
	key     = "lock"
	intents = "{lock}:lock-intent"
	leases  = "{lock}:lease"
)

// A scene is a server that a test has for itself, and a client that looks on.
type scene struct {
	*testing.T
	server *redistest.Server
	rc     *redis.Client
}

func open(t *testing.T, args ...string) *scene {
	t.Helper()
	t.Parallel()
	server := redistest.Start(t, args...)
	return &scene{t, server, server.Client(t)}
}

// client is a process: another one with each call. The link is the way to it, or
// nil for one that does not fail.
func (s *scene) client(link *faultnet.Link, mutate ...func(*redis.Options)) *redis.Client {
	return s.server.Client(s, append(mutate, func(o *redis.Options) {
		if link != nil {
			o.Dialer = link.Dial
		}
	})...)
}

// impatient gives up early on what is not answered.
func impatient(o *redis.Options) {
	o.ReadTimeout = 200 * time.Millisecond
	o.DialTimeout = 200 * time.Millisecond
}

// twoWays sends commands by one client, and hears messages by another.
type twoWays struct {
	*redis.Client
	messages *redis.Client
}

func (c twoWays) Subscribe(ctx context.Context, channels ...string) *redis.PubSub {
	return c.messages.Subscribe(ctx, channels...)
}

// crash cuts a process off for good: it is as good as dead.
func crash(link *faultnet.Link) {
	link.Refuse(true)
	link.Cut()
}

func (s *scene) mutexOf(rc redis.Scripter, opt ...redismutex.MutexOption) *redismutex.RWMutex {
	return redismutex.NewMutex(rc, key, opt...)
}

// mutex is one in a process of its own.
func (s *scene) mutex(link *faultnet.Link, opt ...redismutex.MutexOption) *redismutex.RWMutex {
	return s.mutexOf(s.client(link), opt...)
}

// ask is one of the four ways to lock.
type ask func(context.Context, ...redismutex.LockOption) (*redismutex.Lock, error)

func verb(m *redismutex.RWMutex, write bool) ask {
	if write {
		return m.LockContext
	}
	return m.RLockContext
}

func kind(write bool) string { return map[bool]string{true: "writer", false: "reader"}[write] }

// outcome is what came of an ask, and when.
type outcome struct {
	lock *redismutex.Lock
	err  error
	at   time.Time
}

// later asks in the background.
func later(a ask) <-chan outcome { return laterIn(context.Background(), a) }

func laterIn(ctx context.Context, a ask) <-chan outcome {
	c := make(chan outcome, 1)
	go func() {
		l, err := a(ctx)
		c <- outcome{l, err, time.Now()}
	}()
	return c
}

func (s *scene) lock(a ask) *redismutex.Lock            { s.Helper(); return lock(s.T, a) }
func (s *scene) unlock(l *redismutex.Lock)              { s.Helper(); unlock(s.T, l) }
func (s *scene) soon(c <-chan outcome) *redismutex.Lock { s.Helper(); return soon(s.T, c) }
func (s *scene) eventually(what string, holds func() bool) {
	s.Helper()
	eventually(s.T, what, holds)
}

func lock(t *testing.T, a ask) *redismutex.Lock {
	t.Helper()
	l, err := a(context.Background())
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

// soon is a lock that comes at once.
func soon(t *testing.T, c <-chan outcome) *redismutex.Lock {
	t.Helper()
	select {
	case o := <-c:
		if o.err != nil {
			t.Fatal(o.err)
		}
		return o.lock
	case <-time.After(atOnce):
		t.Fatalf("no lock within %v", atOnce)
		return nil
	}
}

// never watches for a while that somebody gets no lock.
func (s *scene) never(c <-chan outcome, while time.Duration) {
	s.Helper()
	select {
	case o := <-c:
		s.Fatal("it has the lock", o.err)
	case <-time.After(while):
	}
}

func (s *scene) none(c <-chan outcome) { s.Helper(); s.never(c, 0) }

// eventually waits for what only others can bring about.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for start := time.Now(); !holds(); time.Sleep(time.Millisecond) {
		if time.Since(start) > patience {
			t.Fatalf("in vain waited %v until %s", patience, what)
		}
	}
}

// spin lets a time pass that is too little for a timer: to aim at a moment, not
// to wait for anything.
func spin(d time.Duration) {
	for start := time.Now(); time.Since(start) < d; {
		runtime.Gosched()
	}
}

// waiting waits until that many wait.
func (s *scene) waiting(n int) {
	s.Helper()
	s.eventually(fmt.Sprint(n, " wait"), func() bool { return s.rc.ZCard(s.Context(), intents).Val() == int64(n) })
}

// reads says whether l is among the readers that the server knows.
func (s *scene) reads(l *redismutex.Lock) bool {
	s.Helper()
	is, err := s.rc.SIsMember(s.Context(), key, l.ID()).Result()
	if err != nil {
		s.Fatal(err)
	}
	return is
}

// empty checks that nobody holds the lock of that name, or waits.
func (s *scene) empty(name string) {
	s.Helper()
	for _, k := range []string{name, "{" + name + "}:lock-intent"} {
		if is := s.rc.Type(s.Context(), k).Val(); is != "none" {
			s.Errorf("%q is left, a %s", k, is)
		}
	}
	for _, id := range s.rc.ZRange(s.Context(), "{"+name+"}:lease", 0, -1).Val() {
		if !strings.HasPrefix(id, "-") { // a tombstone
			s.Errorf("%q of %q has a lease", id, name)
		}
	}
}

// subscriptions is how many connections subscribe.
func (s *scene) subscriptions() int {
	s.Helper()
	list, err := s.rc.Do(s.Context(), "CLIENT", "LIST", "TYPE", "pubsub").Text()
	if err != nil {
		s.Fatal(err)
	}
	return strings.Count(list, "\n")
}

// scriptCalls is how many scripts have run.
func scriptCalls(rc *redis.Client) int {
	_, calls, _ := strings.Cut(rc.Info(context.Background(), "commandstats").Val(), "cmdstat_evalsha:calls=")
	n := 0
	fmt.Sscanf(calls, "%d", &n)
	return n
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// A witness stands within the lock and sees who else is there.
type witness struct {
	writers, readers      atomic.Int64 // inside
	wrote, read, overlaps atomic.Int64
}

func (w *witness) enter(write bool) {
	mine, others, entered := &w.readers, &w.writers, &w.read
	if write {
		mine, others, entered = &w.writers, &w.readers, &w.wrote
	}
	entered.Add(1)
	n := mine.Add(1)
	for range 3 {
		if write && n != 1 || others.Load() != 0 {
			w.overlaps.Add(1)
		}
		runtime.Gosched() // a critical section that is empty overlaps with nothing
		if write {
			n = mine.Load()
		}
	}
	mine.Add(-1)
}

// crowd has many go in and out until it ends. Where lock gives no unlock, it
// gave no lock.
func (w *witness) crowd(many int, ended func() bool, lock func(i int) (write bool, unlock func())) {
	var wg sync.WaitGroup
	for g := range many {
		wg.Go(func() {
			for i := g; !ended(); i++ {
				if write, unlock := lock(i); unlock != nil {
					w.enter(write)
					unlock()
				}
			}
		})
	}
	wg.Wait()
}

// logged is what a mutex has logged.
type logged struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logged) option() redismutex.MutexOption {
	return redismutex.WithLogger(slog.New(slog.NewTextHandler(l, nil)))
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// count is the number of lines that contain a word.
func (l *logged) count(word string) (n int) {
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, word) {
			n++
		}
	}
	return n
}

// counted is a hook that counts what a client is asked to send.
type counted struct{ n atomic.Int64 }

func (c *counted) number() int { return int(c.n.Load()) }

func (c *counted) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *counted) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.n.Add(1)
		return next(ctx, cmd)
	}
}

func (c *counted) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.n.Add(int64(len(cmds)))
		return next(ctx, cmds)
	}
}
