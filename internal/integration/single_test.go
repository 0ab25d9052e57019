package integration

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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

// Promise 3: no reader shortens the lease of another. One with a short TTL joins one with a long TTL and crashes.
func TestShortReaderDoesNotTruncateLongReader(t *testing.T) {
	s := open(t)
	first := s.lock(s.mutex(nil, redismutex.WithTTL(long)).RLockContext)
	link := faultnet.New(nil)
	second := s.lock(s.mutex(link, redismutex.WithTTL(short)).RLockContext)
	redistest.Crash(link)
	<-second.Done()
	ends := int64(s.rc.ZScore(s.Context(), leases, second.ID()).Val())
	s.eventually("the short lease has ended", func() bool { return s.rc.Time(s.Context()).Val().UnixMilli() > ends })
	late := s.mutex(nil, redismutex.WithTTL(long))
	if _, err := late.TryLockContext(s.Context()); !errors.Is(err, redismutex.ErrLock) {
		t.Errorf("a try while a reader holds: want ErrLock, got %v", err)
	}
	writer := later(late.LockContext)
	s.waiting(1)
	s.eventually("the short reader is gone", func() bool { return !s.reads(second) })
	s.none(writer)
	if ttl := s.rc.PTTL(s.Context(), key).Val(); !s.reads(first) || ttl < long/2 {
		t.Errorf("want the reader with the long lease to hold for %v at least, the readers are %q, for %v", long/2, s.rc.SMembers(s.Context(), key).Val(), ttl)
	}
	s.unlock(first)
	s.unlock(s.soon(writer))
}

// Promise 2: a holder that is cut off stops trusting the lock before the server grants it to the next.
func TestBlackHoledWriterEndsBeforeNextHolderBegins(t *testing.T) { blackHole(t, true) }

// Promise 2: the same for a reader.
func TestBlackHoledReaderEndsBeforeNextHolderBegins(t *testing.T) { blackHole(t, false) }

func blackHole(t *testing.T, write bool) {
	const ttl = 2 * time.Second // the margin for drift is 22 ms of it
	s := open(t)
	var checks sync.WaitGroup
	for name, up := range map[string]bool{"both directions": true, "replies only": false} {
		link := faultnet.New(nil)
		mutex := redismutex.NewMutex(s.client(link), name, redismutex.WithTTL(ttl))
		holder := s.lock(acquire(mutex, write))
		taken := time.Now()
		s.eventually("it is renewed", func() bool { return holder.Until().After(taken.Add(ttl)) })
		var ended, trusted bool
		next := later(func(ctx context.Context, _ ...redismutex.LockOption) (*redismutex.Lock, error) {
			l, err := redismutex.NewMutex(s.client(nil), name, redismutex.WithTTL(long)).LockContext(ctx)
			// The next holder is granted the lock here. The trust of the last one must have ended.
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
			if o.Err != nil || !ended || trusted {
				t.Errorf("%s: when the next holder began (%v), want the context of the first done and no trust left; done: %v, trust left: %v", name, o.Err, ended, trusted)
			}
			if cause := context.Cause(holder); !errors.Is(cause, redismutex.ErrLockLost) {
				t.Errorf("%s: want the cause ErrLockLost, got %v", name, cause)
			}
		})
	}
	checks.Wait()
}

// Promises 5 and 7: an unlock hands the lock on and wakes the waiter that gets it.
func TestUnlockWakesWaiterAtOnce(t *testing.T) {
	t.Parallel()
	for _, write := range []bool{true, false} {
		t.Run(kind(write), func(t *testing.T) {
			s := open(t)
			holder := s.lock(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
			waiter := later(acquire(s.mutex(nil, redismutex.WithTTL(long)), write))
			s.waiting(1)
			s.unlock(holder)
			s.unlock(s.soon(waiter))
		})
	}
}

// Promise 5: the waiter is granted the lock at once, whatever the order of the subscription, the acquire, the unlock and its
// message.
func TestNoWakeUpIsLostWhenSubscribeRacesUnlock(t *testing.T) {
	s := open(t)
	mutex := s.mutex(nil, redismutex.WithTTL(long))
	for what, hold := range map[string]func(*faultnet.Link) func(){
		"subscribe":           func(l *faultnet.Link) func() { return l.HoldRequest("subscribe") },
		"its confirmation":    func(l *faultnet.Link) func() { return l.HoldReply("subscribe") },
		"the acquire":         func(l *faultnet.Link) func() { return l.HoldRequest("join:") },
		"the acquire's reply": func(l *faultnet.Link) func() { return l.HoldReply("join:") },
	} {
		t.Run("unlock overtakes "+what, func(t *testing.T) {
			s := &single{t, s.server, s.rc}
			holder := s.lock(mutex.LockContext)
			link := faultnet.New(nil)
			release := hold(link)
			waiter := later(s.mutex(link, redismutex.WithTTL(long)).LockContext)
			s.eventually("the request is held", func() bool { return link.Held() > 0 })
			s.unlock(holder)
			release()
			s.unlock(s.soon(waiter))
		})
	}
	for i := range 60 { // the unlock comes at a different moment of the join each time
		holder := s.lock(mutex.LockContext)
		waiter := later(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
		redistest.Spin(time.Duration(i) * 100 * time.Microsecond)
		s.unlock(holder)
		s.unlock(s.soon(waiter))
	}
}

// Promise 3: a reader that crashed is gone when its own lease ends, no earlier, and no later although others renew theirs.
func TestCrashedReaderGoesWhileOthersRenew(t *testing.T) {
	s := open(t)
	link := faultnet.New(nil)
	crashed := s.lock(s.mutex(link, redismutex.WithTTL(short)).RLockContext)
	var others []*redismutex.Lock
	for range 3 {
		others = append(others, s.lock(s.mutex(nil, redismutex.WithTTL(short)).RLockContext))
	}
	redistest.Crash(link)
	<-crashed.Done()
	ends := int64(s.rc.ZScore(s.Context(), leases, crashed.ID()).Val())
	s.eventually("the crashed reader is gone", func() bool { return !s.reads(crashed) })
	if now := s.rc.Time(s.Context()).Val().UnixMilli(); now < ends {
		t.Errorf("want the crashed reader to hold until its lease ends, it was gone %d ms before", ends-now)
	}
	for _, l := range others {
		if !s.reads(l) || l.Err() != nil {
			t.Error("want the other readers to hold, one is gone: ", context.Cause(l))
		}
		s.unlock(l)
	}
	s.unlock(s.lock(s.mutex(nil).TryLockContext))
}

// Promise 3: neither a try nor another waiter that gives up affects a waiter.
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
		for _, try := range []call{other.TryLockContext, other.TryRLockContext} {
			if _, err := try(s.Context()); !errors.Is(err, redismutex.ErrLock) {
				t.Errorf("want an error that matches %q, got %v", redismutex.ErrLock, err)
			}
		}
		for _, wait := range []call{other.LockContext, other.RLockContext} {
			ctx, cancel := context.WithCancel(s.Context())
			leaves := laterIn(ctx, wait)
			s.waiting(2)
			cancel()
			if o := <-leaves; !errors.Is(o.Err, context.Canceled) {
				t.Errorf("want an error that matches %q, got %v", context.Canceled, o.Err)
			}
			s.waiting(1)
		}
	}
	if now := s.rc.ZRangeWithScores(s.Context(), intents, 0, -1).Val(); len(now) != 1 || now[0] != intent {
		t.Errorf("want %v alone to wait, got %v", intent, now)
	}
	id := intent.Member.(string)[1:]
	if left, ends := s.rc.PTTL(s.Context(), intents).Val(), s.rc.ZScore(s.Context(), leases, id).Val(); left < long/4 || ends == 0 {
		t.Errorf("want the waiter's place kept for %v at least, it is for %v, and its lease ends at %v", long/4, left, ends)
	}
	s.unlock(holder)
	s.unlock(s.soon(waiter))
}

// Promises 3 and 5: a waiter that gives up leaves the queue, and those behind it move up.
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
	if o := <-writer; !errors.Is(o.Err, context.Canceled) {
		t.Errorf("want an error that matches %q, got %v", context.Canceled, o.Err)
	}
	second := s.soon(behind)
	s.waiting(0)
	if err := s.rc.ZScore(s.Context(), leases, id).Err(); err != redis.Nil {
		t.Errorf("want no lease of the waiter that gave up, got %v", err)
	}
	s.unlock(reader)
	s.unlock(second)
}

// Promise 4: an acquire that go-redis resends because its reply was lost is granted once.
func TestLostAcquireReplyIsObtainedOnce(t *testing.T) {
	t.Parallel()
	for _, write := range []bool{true, false} {
		t.Run("at once/"+kind(write), func(t *testing.T) {
			s := open(t)
			link := faultnet.New(nil)
			mutex := s.mutex(link, redismutex.WithTTL(long))
			link.LoseReply("try:", 2)
			s.heldOnce(s.soon(later(acquire(mutex, write))))
			link.LoseReply("try:", 2)
			s.heldOnce(s.soon(later(try(mutex, write))))
		})
		t.Run("after a wait/"+kind(write), func(t *testing.T) {
			s := open(t)
			holder := s.lock(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
			link := faultnet.New(nil)
			link.LoseReply("join:", 2)
			waiter := later(acquire(s.mutex(link, redismutex.WithTTL(long)), write))
			s.waiting(1)
			s.unlock(holder)
			s.heldOnce(s.soon(waiter))
		})
	}
}

// heldOnce checks that l is the only holder, and that nothing of it is left after its unlock.
func (s *single) heldOnce(l *redismutex.Lock) {
	s.Helper()
	if s.rc.Get(s.Context(), key).Val() != l.ID() && fmt.Sprint(s.rc.SMembers(s.Context(), key).Val()) != "["+l.ID()+"]" {
		s.Errorf("want %s to be the only holder, it is not", l.ID())
	}
	s.waiting(0)
	other := s.mutex(nil)
	if _, err := other.TryLockContext(s.Context()); !errors.Is(err, redismutex.ErrLock) {
		s.Errorf("a try while another holds: want ErrLock, got %v", err)
	}
	s.unlock(l)
	s.empty(key)
	s.unlock(s.lock(other.TryLockContext))
}

// Promise 4: an acquire that arrives after its own release is refused.
func TestAcquireThatArrivesAfterItsReleaseIsRefused(t *testing.T) {
	t.Parallel()
	for _, write := range []bool{true, false} {
		t.Run(kind(write), func(t *testing.T) {
			s := open(t)
			link := faultnet.New(nil)
			mutex := s.mutex(link, redismutex.WithTTL(long))
			s.unlock(s.lock(acquire(mutex, write))) // the server has the script
			// The first lock has left a tombstone if the machine was so slow that its acquire may have been sent twice.
			tombstones := s.rc.ZCard(s.Context(), leases).Val()
			release := link.HoldRequest("try:")
			ctx, cancel := context.WithCancel(s.Context())
			caller := laterIn(ctx, acquire(mutex, write))
			s.eventually("the request is held", func() bool { return link.Held() > 0 })
			cancel()
			if o := <-caller; !errors.Is(o.Err, context.Canceled) {
				t.Errorf("want an error that matches %q, got %v", context.Canceled, o.Err)
			}
			s.eventually("its release has run", func() bool { return s.rc.ZCard(s.Context(), leases).Val() > tombstones })
			before := redistest.ScriptsRun(s.rc)
			release()
			s.eventually("it has arrived", func() bool { return redistest.ScriptsRun(s.rc) > before })
			s.empty(key)
			s.unlock(s.lock(s.mutex(nil).TryLockContext))
		})
	}
}

// Promise 5: a grant to a waiter that is giving up goes to the next in the queue.
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
	for i := range 100 { // the unlock comes before, during and after the cancellation
		holder, cancel, first, second := line()
		go func() {
			redistest.Spin(time.Duration(i) * 10 * time.Microsecond)
			cancel()
		}()
		redistest.Spin(300 * time.Microsecond)
		s.unlock(holder)
		if o := <-first; o.Err == nil {
			s.unlock(o.Value)
		}
		s.unlock(s.soon(second))
	}

	// The message of the grant never arrives.
	holder, cancel, first, second := line()
	id := s.rc.ZRange(s.Context(), intents, 0, -1).Val()[0][1:]
	messages.Hole(false, true)
	s.unlock(holder)
	if got := s.rc.Get(s.Context(), key).Val(); got != id {
		t.Fatalf("granted to %q, not to the first in line, %q", got, id)
	}
	cancel()
	if o := <-first; !errors.Is(o.Err, context.Canceled) {
		t.Errorf("want an error that matches %q, got %v", context.Canceled, o.Err)
	}
	s.unlock(s.soon(second))
}

// Promise 2: the message of a grant that arrives late gives no process a lock that another holds.
func TestStaleGrantMessageGivesNobodyALock(t *testing.T) {
	t.Parallel()
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
			mailbox := id[:strings.LastIndex(id, ":")]
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
			s.unlock(s.soon(waiter)) // acquired again, under a new id
		})
	}
}

// Promise 10: an unlock during a renewal reports no loss, whatever the outcome of the renewal.
func TestUnlockRacingARenewalReportsNoLoss(t *testing.T) {
	t.Parallel()
	const ttl = 2 * slowdown * time.Second // a machine that is busy renews a shorter lease too late
	for _, write := range []bool{true, false} {
		for _, reply := range []bool{true, false} {
			name := kind(write) + map[bool]string{true: "/before its reply", false: "/before it arrives"}[reply]
			t.Run(name, func(t *testing.T) {
				s := open(t)
				log := &redistest.Log{}
				link := faultnet.New(nil)
				l := s.lock(acquire(s.mutex(link, redismutex.WithTTL(ttl), redismutex.WithLogger(log.Logger())), write))
				hold := link.HoldRequest
				if reply {
					hold = link.HoldReply
				}
				release := hold(l.ID()) // the next request with its id is its renewal
				s.eventually("the renewal is held", func() bool { return link.Held() > 0 })
				s.unlock(l)
				if cause := context.Cause(l); cause != redismutex.ErrUnlocked {
					t.Errorf("want the cause ErrUnlocked, got %v", cause)
				}
				before := redistest.ScriptsRun(s.rc)
				release()
				if !reply {
					s.eventually("the renewal has run", func() bool { return redistest.ScriptsRun(s.rc) > before })
				}
				s.eventually("it has been answered", func() bool { return link.Held() == 0 })
				s.empty(key)
				if log.Count("") != 0 {
					t.Error(log)
				}
			})
		}
	}
	t.Run("by chance", func(t *testing.T) {
		s := open(t)
		log := &redistest.Log{}
		rc := s.client(nil)
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				l, err := acquire(redismutex.NewMutex(rc, fmt.Sprint(i), redismutex.WithTTL(ttl), redismutex.WithLogger(log.Logger())), i%2 == 0)(s.Context())
				if err != nil {
					t.Error(err)
					return
				}
				<-time.After(ttl/2 - 20*time.Millisecond + time.Duration(i)*time.Millisecond/2) // while it is renewed
				if err := l.UnlockContext(s.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for i := range 100 {
			s.empty(fmt.Sprint(i))
		}
		if log.Count("") != 0 {
			t.Error(log)
		}
	})
}

// Promise 5: a lock whose parent context has ended can be unlocked, and is then free.
func TestUnlockOnCancelledParentFreesTheKey(t *testing.T) {
	t.Parallel()
	for _, write := range []bool{true, false} {
		t.Run(kind(write), func(t *testing.T) {
			s := open(t)
			mutex, other := s.mutex(nil, redismutex.WithTTL(long)), s.mutex(nil)
			for _, unlock := range []func(*redismutex.Lock){
				func(l *redismutex.Lock) { l.Unlock() },
				func(l *redismutex.Lock) { s.unlock(l) },
				func(l *redismutex.Lock) { // with a context that has ended the unlock is not confirmed, but goes on
					if err := l.UnlockContext(l); err != nil && !errors.Is(err, context.Canceled) {
						t.Errorf("want an error that matches %q, got %v", context.Canceled, err)
					}
					s.eventually("the lock is free", func() bool { return s.rc.Exists(s.Context(), key).Val() == 0 })
				},
			} {
				ctx, cancel := context.WithCancel(s.Context())
				o := <-laterIn(ctx, acquire(mutex, write))
				if o.Err != nil {
					t.Fatal(o.Err)
				}
				cancel()
				<-o.Value.Done()
				unlock(o.Value)
				s.unlock(s.lock(other.TryLockContext))
			}
		})
	}
}

// LockContext returns within 100 ms of the end of its context, although go-redis does not interrupt the read of a socket,
// and nothing of its request is left.
func TestLockContextReturnsWithItsContextAgainstABlackHole(t *testing.T) {
	const promised, enough = 100 * time.Millisecond, 150 * time.Millisecond
	for name, arrange := range map[string]func(s *single, link *faultnet.Link) (fail, repair func()){
		"on acquiring": func(s *single, link *faultnet.Link) (fail, repair func()) {
			return func() { link.Hole(true, true) }, func() { link.Hole(false, false) }
		},
		"without an answer": func(s *single, link *faultnet.Link) (fail, repair func()) {
			return func() { link.Hole(false, true) }, func() { link.Hole(false, false) }
		},
		"frozen": func(s *single, link *faultnet.Link) (fail, repair func()) {
			return s.server.Freeze, s.server.Thaw
		},
		"on subscribing": func(s *single, link *faultnet.Link) (fail, repair func()) {
			holder := s.lock(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
			release := link.HoldRequest("subscribe")
			return func() {}, func() { release(); s.unlock(holder) }
		},
		"in the queue": func(s *single, link *faultnet.Link) (fail, repair func()) {
			holder := s.lock(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
			return func() { s.waiting(1); link.Hole(true, true) }, func() { link.Hole(false, false); s.unlock(holder) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			best := redistest.Timeout
			for range 5 { // the best of them counts: the machine may be busy
				link := faultnet.New(nil)
				mutex := s.mutex(link, redismutex.WithTTL(2*time.Second))
				s.unlock(s.lock(mutex.LockContext)) // so that it has a connection, and the server has the script
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
				over := o.At.Sub(deadline)
				cancel()
				repair()
				if !errors.Is(o.Err, context.DeadlineExceeded) || errors.Is(o.Err, redismutex.ErrRedis) || over > atOnce {
					t.Fatalf("want context.DeadlineExceeded within %v of the end of the context, got %v after %v", promised, o.Err, over)
				}
				best = min(best, over)
				s.eventually("the lock is free and nobody waits", func() bool { return s.rc.Exists(s.Context(), key, intents).Val() == 0 })
			}
			if best >= promised {
				t.Errorf("want a return within %v of the end of the context, the best of five took %v", promised, best)
			}
		})
	}
}

// Promise 10: when the server has lost its data, a holder's context ends within its TTL.
func TestHolderLearnsOfAnEmptyRestart(t *testing.T) {
	t.Parallel()
	for _, write := range []bool{true, false} {
		t.Run(kind(write), func(t *testing.T) {
			const ttl = 2 * time.Second
			s := open(t)
			l := s.lock(acquire(s.mutex(nil, redismutex.WithTTL(ttl)), write))
			start := time.Now()
			s.server.Restart(t)
			select {
			case <-l.Done():
			case <-time.After(redistest.Timeout):
				t.Fatalf("want the lock lost within %v, it is still held %v after the restart", ttl, time.Since(start))
			}
			if took := time.Since(start); took > ttl {
				t.Errorf("want the lock lost within %v of the restart, it was after %v", ttl, took)
			}
			for _, err := range []error{context.Cause(l), l.UnlockContext(s.Context())} {
				if !errors.Is(err, redismutex.ErrLockLost) {
					t.Errorf("want an error that matches %q, got %v", redismutex.ErrLockLost, err)
				}
			}
		})
	}
}

// Waiters survive a restart that loses their places: they acquire again and are granted the lock.
func TestWaitersGoOnAfterAnEmptyRestart(t *testing.T) {
	s := open(t)
	s.lock(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
	var waiters []<-chan outcome
	shared := s.mutex(nil, redismutex.WithTTL(2*time.Second), inRedis)
	for i := range 6 {
		mutex := shared
		if i%2 == 0 {
			mutex = s.mutex(nil, redismutex.WithTTL(2*time.Second))
		}
		waiters = append(waiters, later(acquire(mutex, i%3 != 0)))
		s.waiting(i + 1)
	}
	s.server.Restart(t)
	var w redistest.Witness
	var wg sync.WaitGroup
	for i, c := range waiters {
		wg.Go(func() {
			o := <-c
			if o.Err != nil {
				t.Error(o.Err)
				return
			}
			w.Visit(i%3 != 0, nil)
			if err := o.Value.UnlockContext(s.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := w.Seen(); n > 0 {
		t.Errorf("want no overlap, saw %d: %v", n, w.Overlaps[0])
	}
	s.waiting(0)
}

// Promise 7: a lost message costs time, half a TTL at most.
func TestLostSubscriptionCostsHalfATTLAtMost(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		ttl, within time.Duration
		fail        func(s *single, messages *faultnet.Link)
	}{
		"away": {long, atOnce, func(s *single, messages *faultnet.Link) {
			messages.Refuse(true)
			messages.Cut()
			s.eventually("the subscription is gone", func() bool { return s.subscriptions() == 0 })
		}},
		"cut at the same moment": {long, atOnce, func(s *single, messages *faultnet.Link) { messages.Cut() }},
		"back": {long, atOnce, func(s *single, messages *faultnet.Link) {
			messages.Cut()
			s.eventually("it is back", func() bool { return messages.Dials() > 1 && s.subscriptions() == 1 })
		}},
		// The waiter renews after half a TTL; it would detect the dead connection only after 6 s.
		"silent": {4 * time.Second, 4 * time.Second, func(s *single, messages *faultnet.Link) { messages.Hole(true, true) }},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			messages := faultnet.New(nil)
			split := twoWays{s.client(nil), s.client(messages)}
			holder := s.lock(s.mutex(nil, redismutex.WithTTL(long)).LockContext)
			var waiters []<-chan outcome
			for i := range 3 {
				waiters = append(waiters, later(redismutex.NewMutex(split, key, redismutex.WithTTL(c.ttl), inRedis).RLockContext))
				s.waiting(i + 1)
			}
			c.fail(s, messages)
			start := time.Now()
			s.unlock(holder)
			for _, w := range waiters {
				s.unlock(s.soon(w))
			}
			if took := time.Since(start); took > c.within {
				t.Errorf("want all waiters granted within %v, it took %v", c.within, took)
			}
		})
	}
}

// Promise 1: mutexes with different TTLs and orders exclude each other.
func TestMixedTTLsAndOrdersExclude(t *testing.T) {
	s := open(t)
	mutexes := []*redismutex.RWMutex{
		s.mutex(nil, redismutex.WithTTL(2*time.Second)),
		s.mutex(nil, redismutex.WithTTL(long), redismutex.WithLockIntent()),
		s.mutex(nil, redismutex.WithTTL(5*time.Second), redismutex.WithReaderPriority()),
	}
	var w redistest.Witness
	var ended atomic.Bool
	time.AfterFunc(2*time.Second, func() { ended.Store(true) })
	w.Crowd(12, ended.Load, func(i int) (write bool, unlock func()) {
		write = i%3 == 0
		l, err := acquire(mutexes[i%len(mutexes)], write)(s.Context())
		if i%5 == 4 { // some tries
			if err == nil {
				l.Unlock()
			}
			l, err = try(mutexes[i%len(mutexes)], write)(s.Context())
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
	t.Logf("%d writers, %d readers granted", w.Wrote, w.Read)
	if w.Seen() > 0 || w.Wrote == 0 || w.Read == 0 {
		t.Errorf("want writers and readers and no overlap, saw %d writers, %d readers, and %d overlaps: %v", w.Wrote, w.Read, w.Seen(), w.Overlaps)
	}
	s.empty(key)
}

// Promises 7 and 10: if no message can be sent or received, waiters are granted the lock at their next renewal, and the
// reason is logged once per client.
func TestPublishRefusedByACL(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ rule, logs string }{
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
			var logs []*redistest.Log
			var mutexes []*redismutex.RWMutex
			for range 2 {
				log := &redistest.Log{}
				logs = append(logs, log)
				mutexes = append(mutexes, s.mutexOf(s.client(nil, func(o *redis.Options) {
					o.Username, o.Password = "app", "secret"
				}), redismutex.WithTTL(ttl), inRedis, redismutex.WithLogger(log.Logger())))
			}
			for i := range 6 { // each hands on to itself and to the other
				holder := s.lock(mutexes[i%2].LockContext)
				waiter := later(mutexes[i/2%2].LockContext)
				s.waiting(1)
				start := time.Now()
				s.unlock(holder)
				s.unlock(s.soon(waiter))
				if took := time.Since(start); took > ttl {
					t.Errorf("want the lock within a TTL, %v, it took %v", ttl, took)
				}
			}
			for i, log := range logs {
				if n := log.Count(c.logs); n != 1 {
					t.Errorf("client %d: want one line in the log about %s, got %d: %s", i, c.logs, n, log)
				}
			}
		})
	}
}

// An eviction policy that may evict locks is logged once, and costs no command per lock.
func TestEvictingPolicyIsLoggedOnce(t *testing.T) {
	t.Parallel()
	const policy = "allkeys-lru"
	run := func(t *testing.T, s *single, user string) (*redistest.Log, *redistest.Counter) {
		log, sent := &redistest.Log{}, &redistest.Counter{}
		rc := s.client(nil, func(o *redis.Options) { o.Username, o.Password = user, cmp.Or(user, "") })
		first := s.mutexOf(rc, redismutex.WithLogger(log.Logger()))
		s.unlock(s.lock(first.LockContext)) // the server has the scripts
		s.unlock(s.lock(first.RLockContext))
		rc.AddHook(sent)
		for i := range 20 {
			mutex := first
			if i%2 == 1 {
				mutex = s.mutexOf(rc, redismutex.WithLogger(log.Logger()))
			}
			s.unlock(s.lock(acquire(mutex, i%3 == 0)))
		}
		return log, sent
	}
	t.Run("evicting", func(t *testing.T) {
		s := open(t, "--maxmemory", "100mb", "--maxmemory-policy", policy)
		log, sent := run(t, s, "")
		s.eventually("the policy is logged", func() bool { return log.Count(policy) > 0 })
		if log.Count("") != 1 {
			t.Error(log)
		}
		if n := sent.Commands(); n != 40 && n != 41 { // the call of INFO may come a little later
			t.Errorf("want 20 locks and unlocks to take 40 commands, and one to read the policy, they took %d", n)
		}
	})
	t.Run("not evicting", func(t *testing.T) {
		s := open(t, "--maxmemory", "100mb", "--maxmemory-policy", "noeviction")
		if log, _ := run(t, s, ""); log.Count("") != 0 {
			t.Error(log)
		}
	})
	t.Run("not allowed to look", func(t *testing.T) {
		s := open(t, "--maxmemory", "100mb", "--maxmemory-policy", policy)
		if err := s.rc.Do(s.Context(), "ACL", "SETUSER", "app", "on", ">app", "~*", "&*", "+@all", "-info").Err(); err != nil {
			t.Fatal(err)
		}
		if log, _ := run(t, s, "app"); log.Count("") != 0 {
			t.Error(log)
		}
	})
}

// Promise 10: a server that is down is ErrRedis, not ErrLock.
func TestServerDownIsARedisErrorNotHeld(t *testing.T) {
	s := open(t)
	log := &redistest.Log{}
	mutex := s.mutexOf(s.client(nil, func(o *redis.Options) { o.DialerRetries = 1 }), redismutex.WithLogger(log.Logger()))
	s.unlock(s.lock(mutex.LockContext))
	s.server.Kill()
	for name, call := range calls(mutex) {
		o := <-later(call)
		if !errors.Is(o.Err, redismutex.ErrRedis) || errors.Is(o.Err, redismutex.ErrLock) {
			t.Errorf("%s: want an error that matches ErrRedis alone, got %v", name, o.Err)
		}
		var network *net.OpError
		if !errors.As(o.Err, &network) {
			t.Errorf("%s: want an error that wraps that of the network, got %v", name, o.Err)
		}
	}
	if log.Count("") != 0 {
		t.Error(log)
	}
	for i, call := range []func(...redismutex.LockOption) (*redismutex.Lock, bool){mutex.Lock, mutex.RLock, mutex.TryLock, mutex.TryRLock} {
		if _, ok := call(); ok || log.Count("") != i+1 {
			t.Error(ok, log)
		}
	}
}

// Promise 10: foreign data under the keys of a lock is left alone, and no call waits for it.
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
	sent := &redistest.Counter{}
	rc.AddHook(sent)
	warm := redismutex.NewMutex(rc, "warm")
	s.unlock(s.lock(warm.LockContext))
	s.unlock(s.lock(warm.RLockContext))
	for i, where := range []string{"%s", "{%s}:token", "{%s}:lease", "{%s}:lock-intent"} {
		for what, put := range put {
			t.Run(fmt.Sprintf(where, what), func(t *testing.T) {
				lockName := fmt.Sprint(what, i)
				data := fmt.Sprintf(where, lockName)
				if err := put(data); err != nil {
					t.Fatal(err)
				}
				before := s.rc.Dump(s.Context(), data).Val()
				mutex := redismutex.NewMutex(rc, lockName)
				for name, call := range calls(mutex) {
					n := sent.Commands()
					ctx, cancel := context.WithTimeout(s.Context(), atOnce)
					o := <-laterIn(ctx, call)
					cancel()
					switch {
					case o.Err == nil && where == "{%s}:token" && strings.Contains(name, "R"): // a reader needs no token
						if err := o.Value.UnlockContext(s.Context()); err != nil {
							t.Errorf("%s: %v", name, err)
						}
					case !errors.Is(o.Err, redismutex.ErrNotLock):
						t.Errorf("%s: want an error that matches ErrNotLock, got %v", name, o.Err)
					case sent.Commands()-n > 2:
						t.Errorf("%s: want the refusal after 2 commands at most, it took %d", name, sent.Commands()-n)
					}
					if o.Err == nil {
						o.Value.Unlock()
					}
					if after, ttl := s.rc.Dump(s.Context(), data).Val(), s.rc.TTL(s.Context(), data).Val(); after != before || ttl != -1 {
						t.Fatalf("%s: want the data left alone, %q became %q, with a TTL of %v", name, before, after, ttl)
					}
				}
			})
		}
	}
}

// Any name that NewMutex takes works.
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
				in := func(a call) call {
					return func(ctx context.Context, _ ...redismutex.LockOption) (*redismutex.Lock, error) { return a(ctx, opt...) }
				}
				a := redismutex.NewMutex(first, name, redismutex.WithTTL(long), inRedis)
				b := redismutex.NewMutex(second, name, redismutex.WithTTL(long), inRedis)
				s := &single{t, s.server, s.rc}
				holder := s.lock(in(a.LockContext))
				if holder.Key() != want || s.rc.Get(s.Context(), want).Val() != holder.ID() {
					t.Errorf("want %.50q held, it is %.50q", want, holder.Key())
				}
				if _, err := in(b.TryLockContext)(s.Context()); !errors.Is(err, redismutex.ErrLock) {
					t.Errorf("want an error that matches %q, got %v", redismutex.ErrLock, err)
				}
				waiter := later(in(b.RLockContext))
				s.eventually("it waits", func() bool { return len(s.rc.Keys(s.Context(), "*lock-intent").Val()) > 0 })
				s.unlock(holder)
				reader := s.soon(waiter)
				s.unlock(s.lock(in(a.TryRLockContext)))
				s.unlock(reader)
				for _, k := range s.rc.Keys(s.Context(), "*").Val() {
					if !strings.HasSuffix(k, ":token") && !strings.HasSuffix(k, ":lease") { // of a tombstone
						t.Errorf("want nothing left, %.50q is", k)
					}
				}
			})
		}
	}
}

// All mutexes on a client share one subscription, which exists while a call waits; afterwards neither the subscription nor
// a goroutine is left.
func TestTwoHundredMutexesShareOneConnection(t *testing.T) {
	// It counts goroutines, so it does not run in parallel.
	const mutexes = 200
	s := &single{t, redistest.Start(t), nil}
	s.rc = s.server.Client(t)
	rc := s.client(nil)
	s.unlock(s.lock(redismutex.NewMutex(rc, "warm").LockContext))
	baseline := runtime.NumGoroutine()

	var holders []*redismutex.Lock
	var waiters []<-chan outcome
	for i := range mutexes {
		mutex := redismutex.NewMutex(rc, fmt.Sprint("m", i), redismutex.WithTTL(long), inRedis)
		holders = append(holders, s.lock(mutex.LockContext))
		waiters = append(waiters, later(mutex.LockContext))
	}
	s.eventually("all wait", func() bool { return len(s.rc.Keys(s.Context(), "*:lock-intent").Val()) == mutexes })
	if n := s.subscriptions(); n != 1 {
		t.Errorf("want one connection that subscribes, got %d", n)
	}
	for i, l := range holders {
		s.unlock(l)
		s.unlock(s.soon(waiters[i]))
	}
	if n := s.subscriptions(); n != 1 {
		t.Errorf("want one connection that subscribes, got %d", n)
	}
	s.eventually("the subscription is closed", func() bool { return s.subscriptions() == 0 })
	s.eventually("no goroutine is left", func() bool { return runtime.NumGoroutine() <= baseline })
}
