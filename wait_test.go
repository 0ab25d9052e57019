package redismutex

// Waiters get the lock once and in time, whatever becomes of messages, replies and connections. Time is virtual.

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

// got waits for a lock and returns how long that took.
func (w *world) got(c <-chan *Lock) (*Lock, time.Duration) {
	start := time.Now()
	l := <-c
	return l, time.Since(start)
}

// Promises 5 and 7: an unlock grants the lock to the waiter at once.
func TestUnlockWakesTheWaiter(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		next := w.later(NewMutex(w.client(nil), "x"), true)
		redistest.Elapse(100 * time.Millisecond)
		w.unlock(holder)
		l, took := w.got(next)
		if took != 0 {
			t.Errorf("it took %v, want no time", took)
		}
		if l.Token() <= holder.Token() {
			t.Errorf("token %d after %d, want a higher one", l.Token(), holder.Token())
		}
		w.unlock(l)
	})
}

// Within a process the reply to the unlock carries the grant.
func TestUnlockWakesAWaiterOfTheSameProcess(t *testing.T) {
	inBubble(t, func(w *world) {
		mutex := NewMutex(w.client(nil), "x")
		for _, write := range []bool{true, false} {
			holder := w.lock(mutex, true)
			next := w.later(mutex, write)
			w.unlock(holder)
			l, took := w.got(next)
			if took != 0 {
				t.Errorf("it took %v, want no time", took)
			}
			w.unlock(l)
		}
	})
}

// Promise 6: waiters are granted the lock one by one, in the order of their calls.
func TestWaitersAreServedInOrder(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		var waiters []<-chan *Lock
		for range 20 {
			waiters = append(waiters, w.later(NewMutex(w.client(nil), "x"), true))
		}
		w.unlock(holder)
		for i, c := range waiters {
			synctest.Wait()
			for _, other := range waiters[i+1:] {
				if len(other) != 0 {
					t.Fatal("granted before its turn")
				}
			}
			l, took := w.got(c)
			if took != 0 {
				t.Errorf("waiter %d took %v", i, took)
			}
			w.unlock(l)
		}
	})
}

// number returns that of the id under which the process of m waits for the write lock.
func (w *world) number(m *RWMutex) (n uint64) {
	w.Helper()
	for member := range w.queue() {
		if id, ok := strings.CutPrefix(member, "w"+m.config.Nodes[0].Mailbox.Name()+":"); ok {
			n, _ = strconv.ParseUint(id, 10, 64)
		}
	}
	if n == 0 {
		w.Fatalf("the process does not wait: %v", w.queue())
	}
	return n
}

// Promise 4: an acquire begins with a try. If the reply to that was so late that the client may have sent it again, the
// second copy must not be granted the lock.
func TestResentTryBeforeTheWaitIsRefused(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		w.link.SetDelay(10 * time.Millisecond)
		mutex := NewMutex(w.client(w.link), "x")
		next := w.later(mutex, true)
		redistest.Elapse(time.Second)
		late := script.Participant{
			Keys: mutex.keys, Durations: mutex.config.Durations, Write: true,
			ID: fmt.Sprint(mutex.config.Nodes[0].Mailbox.Name(), ":", w.number(mutex)-1), // the id of the try
		}
		w.unlock(holder)
		w.unlock(<-next)
		if r, err := mutex.config.Nodes[0].Run(w.Context(), DefaultTTL, late.Acquire(true, false, 0)); err != nil || r.Status != script.Tombstoned {
			t.Errorf("status %d, %v", r.Status, err)
		}
	})
}

// A waiter keeps its place for as long as it waits.
func TestWaiterKeepsItsPlace(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x", WithTTL(time.Minute)), true)
		first := w.later(NewMutex(w.client(nil), "x", WithTTL(time.Second)), true)
		second := w.later(NewMutex(w.client(nil), "x"), true)
		redistest.Elapse(10 * time.Minute)
		w.unlock(holder)
		l, took := w.got(first)
		w.pending(second)
		if took != 0 {
			t.Errorf("it took %v, want no time", took)
		}
		w.unlock(l)
		w.unlock(<-second)
	})
}

// Promise 5: a waiter with a long TTL renews when the short lease of the holder in front of it ends.
func TestWaiterRenewsWhenTheHoldersLeaseEnds(t *testing.T) {
	for _, write := range []bool{true, false} {
		inBubble(t, func(w *world) {
			w.lock(NewMutex(w.client(w.link), "x", WithTTL(time.Second)), write)
			w.link.Refuse(true)
			w.link.Cut()
			l, took := w.got(w.later(NewMutex(w.client(nil), "x", WithTTL(time.Hour)), true))
			if took > time.Second+10*time.Millisecond {
				t.Errorf("writer=%v: it took %v, want at most %v", write, took, time.Second+10*time.Millisecond)
			}
			w.unlock(l)
		})
	}
}

// Promises 3 and 5: a crashed holder or waiter blocks others for no longer than its lease, although it does not hand
// on.
func TestCrashedParticipantsBlockNoLongerThanTheirLease(t *testing.T) {
	for _, write := range []bool{true, false} {
		inBubble(t, func(w *world) {
			const short = time.Second
			// The holder crashes now.
			w.lock(NewMutex(w.client(w.link), "x", WithTTL(short)), write)
			w.link.Refuse(true)
			w.link.Cut()
			start := time.Now()
			// A waiter crashes while it waits, so it is granted the lock for the rest of its lease.
			link := faultnet.New(w.Redis.Dial)
			crashing := NewMutex(w.client(link), "x", WithTTL(short))
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan struct{})
			go func() { defer close(done); _, _ = crashing.LockContext(ctx) }()
			synctest.Wait()
			link.Refuse(true)
			link.Cut()
			next := w.later(NewMutex(w.client(nil), "x"), true)
			w.unlock(<-next)
			if took := time.Since(start); took > short+10*time.Millisecond {
				t.Errorf("writer=%v: it took %v, want at most %v", write, took, short+10*time.Millisecond)
			}
			cancel()
			<-done
			link.Refuse(false)
		})
	}
}

// Promise 7: a lost message delays a waiter by at most half a TTL.
func TestLostMessageCostsTimeOnly(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		mutex := NewMutex(w.client(nil), "x")
		next := w.later(mutex, true)
		// The message finds nobody: as if it had been lost.
		box := mutex.config.Nodes[0].Mailbox
		box.Leave(w.number(mutex))
		w.unlock(holder)
		l, took := w.got(next)
		if took > DefaultTTL/2 {
			t.Errorf("it took %v, want at most %v", took, DefaultTTL/2)
		}
		w.unlock(l)
	})
}

// The reply to an unlock may carry the grant of a waiter in the same process. If it is lost, that waiter renews at
// once.
func TestLostUnlockReplyDelaysNobody(t *testing.T) {
	inBubble(t, func(w *world) {
		mutex := NewMutex(w.client(w.link), "x", WithTurn(0))
		w.unlock(w.lock(mutex, true)) // the server learns the scripts
		holder := w.lock(mutex, true)
		next := w.later(mutex, true)
		w.link.LoseReply(script.Unlock.Digest(), 1)
		_ = holder.UnlockContext(context.Background())
		l, took := w.got(next)
		if took > 10*time.Millisecond {
			t.Errorf("it took %v, want at most %v", took, 10*time.Millisecond)
		}
		w.unlock(l)

		// The same where the unlock goes on in the background.
		holder = w.lock(mutex, true)
		next = w.later(mutex, true)
		ctx, cancel := context.WithCancel(context.Background())
		release := w.link.HoldReply(script.Unlock.Digest())
		go func() { synctest.Wait(); cancel() }()
		w.matches(holder.UnlockContext(ctx), context.Canceled)
		l, took = w.got(next)
		if took > 10*time.Millisecond {
			t.Errorf("it took %v, want at most %v", took, 10*time.Millisecond)
		}
		release()
		w.unlock(l)

		// The same where the reply is lost before the waiter knows that it waits.
		holder = w.lock(mutex, true)
		release = w.link.HoldReply(script.Lock.Digest())
		next = w.later(mutex, true)
		w.link.LoseReply(script.Unlock.Digest(), 1)
		_ = holder.UnlockContext(context.Background())
		synctest.Wait()
		release()
		l, took = w.got(next)
		if took > 10*time.Millisecond {
			t.Errorf("it took %v, want at most %v", took, 10*time.Millisecond)
		}
		w.unlock(l)
	})
}

// A grant that is published before the subscription is in place is not missed, though the subscription is confirmed before
// the waiter knows that it waits.
func TestGrantBeforeTheSubscriptionIsNotMissed(t *testing.T) {
	inBubble(t, func(w *world) {
		mutex := NewMutex(w.client(w.link), "x")
		try := func() *Lock { // no turn begins, so that a reader asks Redis
			l, err := mutex.TryLockContext(w.Context())
			if err != nil {
				t.Fatal(err)
			}
			return l
		}
		first := try()
		with := w.later(mutex, false)
		first.Downgrade(w.Context()) // the server learns the scripts
		w.unlock(first)
		w.unlock(w.granted(with, "the reader"))
		redistest.Elapse(time.Minute) // the mailbox closes
		holder := try()
		next := w.later(mutex, false)
		confirm := w.link.HoldRequest("subscribe")
		answer := w.link.HoldReply("join")
		go holder.Downgrade(w.Context()) // with the reader's acquire in front
		synctest.Wait()
		confirm()
		synctest.Wait()
		answer()
		l, took := w.got(next)
		if took > 10*time.Millisecond {
			t.Errorf("it took %v, want at most %v", took, 10*time.Millisecond)
		}
		w.unlock(l)
		w.unlock(holder)
	})
}

// A grant whose message is lost is looked for at once, whatever is under way meanwhile.
func TestLostGrantIsLookedForWhateverIsUnderWay(t *testing.T) {
	soon := func(w *world, next <-chan *Lock) {
		w.Helper()
		l, took := w.got(next)
		if took > 100*time.Millisecond {
			w.Errorf("it took %v, want at most 100ms", took)
		}
		w.unlock(l)
	}
	t.Run("a renewal", func(t *testing.T) {
		inBubble(t, func(w *world) {
			mutex := NewMutex(w.client(w.link, func(o *redis.Options) { o.PipelinePoolSize = 1 }), "x", WithTurn(0))
			w.unlock(w.lock(mutex, true)) // the server learns the scripts
			holder := w.lock(mutex, true)
			next := w.later(mutex, true)
			answer := w.link.HoldReply(script.Refresh.Digest())
			redistest.Elapse(DefaultTTL/2 + time.Millisecond)
			w.link.LoseReply(script.Unlock.Digest(), 1)
			_ = holder.UnlockContext(context.Background())
			synctest.Wait()
			answer()
			soon(w, next)
		})
	})
	t.Run("the subscription", func(t *testing.T) {
		inBubble(t, func(w *world) {
			mutex := NewMutex(w.client(w.link), "x", WithTurn(0))
			w.unlock(w.lock(mutex, true))
			holder := w.lock(mutex, true)
			w.link.SetDelay(20 * time.Millisecond)
			w.link.LoseReply(script.Unlock.Digest(), 1)
			go holder.UnlockContext(context.Background())
			synctest.Wait()
			w.link.SetDelay(0)
			redistest.Elapse(time.Millisecond)
			soon(w, w.later(mutex, true)) // the subscription is confirmed before the release arrives
		})
	})
	// Redis grants the lock to 250 readers at a time.
	for name, sends := range map[string]int{"the rest of a release": -1, "the rest of a release that is sent again": 0} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				mutex := NewMutex(w.client(w.link, func(o *redis.Options) { o.MaxRetries = sends }), "x", WithTurn(0))
				w.unlock(w.lock(mutex, true))
				holder, readers := w.lock(mutex, true), make([]<-chan *Lock, 600)
				for i := range readers {
					readers[i] = w.later(mutex, false)
				}
				answer := w.link.HoldReply(script.Unlock.Digest())
				go holder.UnlockContext(context.Background())
				synctest.Wait()
				w.link.LoseReply(script.Unlock.Digest(), 1)
				answer()
				synctest.Wait()
				for _, next := range readers {
					soon(w, next)
				}
			})
		})
	}
	// The caller makes the request itself; with readers first, another goroutine does.
	for name, order := range map[string]MutexOption{"by its caller": WithTurn(DefaultTurn), "for its caller": WithReaderPriority()} {
		t.Run("an acquire that was given up/"+name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				rc := w.client(w.link)
				mutex, other := NewMutex(rc, "x", order), NewMutex(rc, "x", order, WithTurn(0))
				w.unlock(w.lock(mutex, true))
				answer := w.link.HoldReply(script.Lock.Digest())
				ctx, cancel := context.WithCancel(context.Background())
				go mutex.LockContext(ctx) // Redis grants it, and the reply comes late
				synctest.Wait()
				next := w.later(other, true)
				w.link.LoseReply(script.Unlock.Digest(), 1)
				cancel()
				synctest.Wait()
				answer()
				soon(w, next)
			})
		})
	}
}

// When the subscription comes back every waiter renews once, at once.
func TestWaitersRenewWhenTheSubscriptionIsBack(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		mutex := NewMutex(w.client(w.link), "x")
		next := w.later(mutex, true)
		// The link goes down, the lock comes free meanwhile, and the message
		// with it is lost.
		w.link.Refuse(true)
		w.link.Cut()
		synctest.Wait()
		w.unlock(holder)
		w.pending(next)
		w.link.Refuse(false)
		l, took := w.got(next)
		if took > 100*time.Millisecond {
			t.Errorf("it took %v, want at most %v", took, 100*time.Millisecond)
		}
		w.unlock(l)
	})
}

// While a subscription is dead but not closed, the waiter learns of its grant from its own renewal, within half a TTL.
func TestBlackHoledSubscriptionDelaysByHalfATTL(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		mutex := NewMutex(w.client(w.link), "x")
		next := w.later(mutex, true)
		w.link.Hole(true, true)
		w.link.Hole(false, false) // old connections stay silent, new ones work
		w.unlock(holder)
		l, took := w.got(next)
		if took > DefaultTTL {
			t.Errorf("it took %v, want at most %v", took, DefaultTTL)
		}
		w.unlock(l)
	})
}

// A client that cannot subscribe polls, often at first and then less often.
func TestClientThatCannotSubscribePolls(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		looks := &counter{}
		rc := w.client(nil)
		rc.AddHook(looks)
		next := w.later(NewMutex(scripterOnly{rc}, "x"), true)
		redistest.Elapse(10 * time.Minute)
		if n, _ := looks.reset(); n > 5*600 || n < 600 {
			t.Errorf("%d looks in 10 minutes", n)
		}
		w.unlock(holder)
		l, took := w.got(next)
		if took > 250*time.Millisecond {
			t.Errorf("it took %v, want at most %v", took, 250*time.Millisecond)
		}
		redistest.Elapse(10 * time.Minute)
		w.unlock(l)
	})
}

// scripterOnly is no more than a Scripter.
type scripterOnly struct{ redis.Scripter }

// A grant that crosses a cancellation is passed on.
func TestGrantThatCrossesACancellationIsPassedOn(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		ctx, cancel := context.WithCancel(context.Background())
		errs := make(chan error)
		first := NewMutex(w.client(w.link), "x")
		go func() { _, err := first.LockContext(ctx); errs <- err }()
		synctest.Wait()
		second := w.later(NewMutex(w.client(nil), "x"), true)
		first.config.Nodes[0].Mailbox.Leave(w.number(first)) // the message does not get through
		w.unlock(holder)
		cancel()
		w.matches(<-errs, context.Canceled)
		l, took := w.got(second)
		if took > 10*time.Millisecond {
			t.Errorf("it took %v, want at most %v", took, 10*time.Millisecond)
		}
		w.unlock(l)
	})
}

// A canceled waiter is out of the queue after one call.
func TestCanceledWaiterBlocksNobody(t *testing.T) {
	inBubble(t, func(w *world) {
		reader := w.lock(NewMutex(w.client(nil), "x"), false)
		ctx, cancel := context.WithCancel(context.Background())
		errs := make(chan error)
		mutex := NewMutex(w.client(nil), "x")
		go func() { _, err := mutex.LockContext(ctx); errs <- err }()
		synctest.Wait()
		other := w.later(NewMutex(w.client(nil), "x"), false)
		w.pending(other)
		cancel()
		<-errs
		l, took := w.got(other)
		if took != 0 {
			t.Errorf("it took %v, want no time", took)
		}
		w.unlock(l)
		w.unlock(reader)
	})
}

// A waiter that gets no acknowledgement within a TTL gives its id up and acquires under a new one. A message for the
// old id has no effect.
func TestUnacknowledgedIDIsNotGranted(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		mutex := NewMutex(w.client(w.link), "x")
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		got := make(chan *Lock)
		go func() { l, _ := mutex.LockContext(ctx); got <- l }()
		synctest.Wait()
		first := w.number(mutex)
		w.link.Hole(true, true)
		redistest.Elapse(2 * DefaultTTL)
		mutex.config.Nodes[0].Mailbox.Leave(0) // (nobody)
		w.link.Hole(false, false)
		redistest.Elapse(2 * DefaultTTL)
		if w.number(mutex) == first {
			t.Error("no new id was used")
		}
		w.unlock(holder)
		l := <-got
		if l == nil || strings.HasSuffix(l.ID(), fmt.Sprint(":", first)) {
			t.Errorf("%v", l)
		}
		if _, err := NewMutex(w.client(nil), "x").TryLockContext(w.Context()); err == nil {
			t.Error("a try was granted beside the holder")
		}
		w.unlock(l)
	})
}

// A grant in a reply that arrives more than a TTL after the request is given up too.
func TestAcquireAnsweredTooLateGivesNoLock(t *testing.T) {
	inBubble(t, func(w *world) {
		mutex := NewMutex(w.client(w.link, func(o *redis.Options) { o.ReadTimeout = time.Hour }), "x")
		w.unlock(w.lock(mutex, true))
		for _, try := range []bool{true, false} {
			release := w.link.HoldReply(script.Lock.Digest())
			type result struct {
				l   *Lock
				err error
			}
			got := make(chan result)
			ask := mutex.LockContext
			if try {
				ask = mutex.TryLockContext
			}
			go func() { l, err := ask(context.Background()); got <- result{l, err} }()
			redistest.Elapse(2 * DefaultTTL)
			release()
			r := <-got
			if try {
				w.matches(r.err, ErrRedis)
				continue
			}
			if r.err != nil || strings.HasSuffix(r.l.ID(), "000") {
				t.Fatal(r.l, r.err)
			}
			w.unlock(r.l)
		}
	})
}

// A try never waits. If its grant arrives so late that it is renewed first, and Redis does not know it by then, the try
// is refused.
func TestTryThatLosesItsGrantIsRefused(t *testing.T) {
	inBubble(t, func(w *world) {
		mutex := NewMutex(w.client(w.link, func(o *redis.Options) { o.ReadTimeout = time.Hour }), "x")
		w.unlock(w.lock(mutex, true))
		release := w.link.HoldReply(script.Lock.Digest())
		ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
		defer cancel()
		refused := make(chan error)
		go func() { _, err := mutex.TryLockContext(ctx); refused <- err }()
		redistest.Elapse(DefaultTTL * 7 / 8)
		w.Redis.FlushAll()
		release()
		w.matches(<-refused, ErrRedis)
	})
}

// Promise 4: acquires that arrive together do not delay each other's renewals: each joins the queue once and stays in
// it.
func TestSimultaneousAcquiresAllWait(t *testing.T) {
	inBubble(t, func(w *world) {
		const many = 200
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		rc := w.client(w.link, func(o *redis.Options) { o.PoolSize, o.PoolTimeout = 2, time.Hour })
		mutex := NewMutex(rc, "x", WithTurn(0))
		w.link.SetDelay(50 * time.Millisecond) // with two connections it takes them several TTLs to join
		ctx, cancel := context.WithCancel(w.Context())
		defer cancel()
		var all sync.WaitGroup
		for range many {
			all.Go(func() {
				if l, err := mutex.LockContext(ctx); err == nil {
					w.unlock(l)
				} else if ctx.Err() == nil {
					w.Error(err)
				}
			})
		}
		redistest.Elapse(time.Minute) // 40 s, where the client makes do with one connection
		if waiting, _ := w.Redis.SortedSet(mutex.keys.Intents()); len(waiting) != many {
			t.Errorf("%d wait, want %d", len(waiting), many)
		}
		for intent := range w.queue() {
			if n := intent[strings.LastIndexByte(intent, ':')+1:]; !strings.HasSuffix(n, "000") && !strings.HasSuffix(n, "001") { // some try first
				t.Errorf("%q is the third id of its acquisition, or a later one", intent)
			}
		}
		w.link.SetDelay(0)
		w.unlock(holder)
		all.Wait()
	})
}

// Promise 10: while Redis does not answer all callers get their error soon, however many they are.
func TestSimultaneousAcquiresOfADeadRedisFailSoon(t *testing.T) {
	inBubble(t, func(w *world) {
		mutex := NewMutex(w.client(w.link, func(o *redis.Options) {
			o.PoolSize, o.MaxRetries, o.ReadTimeout, o.PoolTimeout = 1, -1, 3*time.Second, 4*time.Second
		}), "x")
		w.unlock(w.lock(mutex, true))
		w.link.SetDelay(time.Hour)
		start := time.Now()
		var all sync.WaitGroup
		for range 200 {
			all.Go(func() {
				_, err := mutex.TryLockContext(context.Background())
				w.matches(err, ErrRedis)
			})
		}
		all.Wait()
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("the last caller got its error after %v, want 10s at most", took)
		}
	})
}

// A reply "waiting" that arrives after the grant does not demote it. Only "gone" means lost.
func TestLateWaitingReplyDoesNotDemoteAGrant(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		next := w.later(NewMutex(w.client(w.link), "x"), true)
		release := w.link.HoldReply(script.Refresh.Digest())
		redistest.Elapse(DefaultTTL/2 + time.Millisecond) // the reply to its renewal is held back
		w.unlock(holder)
		l, _ := w.got(next)
		release()
		synctest.Wait()
		redistest.Elapse(time.Minute)
		if l.Err() != nil {
			t.Error(context.Cause(l))
		}
		w.unlock(l)
	})
}

// A grant message that overtakes the reply to its acquire is remembered.
func TestMessageThatOvertakesTheReplyIsRemembered(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		mutex := NewMutex(w.client(w.link), "x")
		// Open the mailbox with somebody else's wait.
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		_, _ = mutex.LockContext(ctx)
		release := w.link.HoldReply("join:")
		next := w.later(mutex, true)
		w.unlock(holder)
		w.pending(next)
		release()
		l, took := w.got(next)
		if took != 0 {
			t.Errorf("it took %v, want no time", took)
		}
		w.unlock(l)
	})
}

// Promise 2: a grant comes with the lease that the waiter had. If little of it is left, it is renewed before the lock
// is returned.
func TestGrantedLockHasTrustLeft(t *testing.T) {
	inBubble(t, func(w *world) {
		for at := time.Duration(0); at < 2*DefaultTTL; at += DefaultTTL / 16 {
			holder := w.lock(NewMutex(w.client(nil), "x", WithTTL(time.Hour)), true)
			next := w.later(NewMutex(w.client(w.link), "x"), true)
			redistest.Elapse(at)
			w.link.Cut() // the subscription comes back late, and so does the message
			w.unlock(holder)
			l, _ := w.got(next)
			if left := time.Until(l.Until()); left < DefaultTTL/4 {
				t.Errorf("after %v of waiting it is trusted for %v", at, left)
			}
			w.unlock(l)
		}
	})
}

// Only the error of the first attempt is returned. Later ones are logged, and the waiter stays.
func TestWaiterOutlivesErrors(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x", WithTTL(time.Hour)), true)
		next := w.later(NewMutex(w.client(w.link), "x"), true)
		for range 5 {
			w.link.Refuse(true)
			w.link.Cut()
			redistest.Elapse(time.Minute)
			w.link.Refuse(false)
			redistest.Elapse(time.Minute)
		}
		w.Redis.FlushAll() // it has restarted empty
		l, took := w.got(next)
		if took > 2*DefaultTTL {
			t.Errorf("it took %v, want at most %v", took, 2*DefaultTTL)
		}
		w.unlock(l)
		w.matches(holder.UnlockContext(w.Context()), ErrLockLost)
	})
}

// All mutexes on a client share one mailbox, which opens with the first wait and closes when idle.
func TestMailboxIsSharedAndClosesWhenIdle(t *testing.T) {
	inBubble(t, func(w *world) {
		rc, other := w.client(nil), w.client(nil)
		subscribed := func() int { return len(w.Redis.PubSubChannels("")) }
		w.unlock(w.lock(NewMutex(rc, "x"), true))
		if n := subscribed(); n != 0 {
			t.Errorf("%d channels without a wait", n)
		}
		var holders []*Lock
		var waiters []<-chan *Lock
		for i := range 200 {
			name := fmt.Sprint("x", i)
			holders = append(holders, w.lock(NewMutex(other, name), true))
			waiters = append(waiters, w.later(NewMutex(rc, name), true))
		}
		if n := subscribed(); n != 1 {
			t.Errorf("%d channels for 200 mutexes on a client", n)
		}
		for i, holder := range holders {
			w.unlock(holder)
			w.unlock(<-waiters[i])
		}
		redistest.Elapse(time.Minute)
		if n := subscribed(); n != 0 {
			t.Errorf("%d channels when idle", n)
		}
	})
}

// Anything else that is published to a mailbox is ignored.
func TestMessagesThatAreNoGrantsAreIgnored(t *testing.T) {
	inBubble(t, func(w *world) {
		rc := w.client(nil)
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		mutex := NewMutex(rc, "x")
		next := w.later(mutex, true)
		n := w.number(mutex)
		for _, message := range []string{
			"", " ", "x", "1", "-1 2", fmt.Sprint("x ", n), fmt.Sprint("1  ", n), fmt.Sprint("1 -", n), fmt.Sprint("1 0", n, "x"),
			fmt.Sprint("1 ", n+1), "99999999999999999999999 1", "1 99999999999999999999999",
		} {
			rc.Publish(w.Context(), mutex.config.Nodes[0].Mailbox.Name(), message)
			w.pending(next)
		}
		w.unlock(holder)
		w.unlock(<-next)
	})
}

// A counter is a hook that counts commands, but not those that open a connection, and round trips.
type counter struct {
	mu      sync.Mutex
	n       int // commands
	sources int // those that carry the source of a script, in all
	trips   int
}

func (c *counter) DialHook(next redis.DialHook) redis.DialHook { return next }
func (c *counter) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.count(cmd)
		return next(ctx, cmd)
	}
}
func (c *counter) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.count(cmds...)
		return next(ctx, cmds)
	}
}
func (c *counter) count(cmds ...redis.Cmder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, cmd := range cmds {
		if name := cmd.Name(); name != "hello" && name != "client" { // those make a connection
			c.n++
		}
		if cmd.Name() == "eval" {
			c.sources++
		}
	}
	c.trips++
}
func (c *counter) reset() (commands, trips int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	commands, trips = c.n, c.trips
	c.n, c.trips = 0, 0
	return commands, trips
}

// Promise 10: on one Redis, too, the log says why a waiter has to acquire again.
func TestWaiterThatIsAcknowledgedTooLateIsLogged(t *testing.T) {
	inBubble(t, func(w *world) {
		var log redistest.Log
		rc := w.client(w.link, func(o *redis.Options) { o.ReadTimeout = time.Hour })
		m := NewMutex(rc, "x", WithTTL(time.Second), WithLogger(log.Logger()))
		w.link.SetDelay(700 * time.Millisecond)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, err := m.LockContext(ctx)
		w.matches(err, context.DeadlineExceeded)
		if n := strings.Count(log.String(), "took longer than the TTL"); n != 1 {
			t.Errorf("want one line that tells why, got %d: %s", n, log.String())
		}
	})
}
