package redismutex

// Turns: the goroutines of one process share an acquisition. The rules are those of internal/localqueue, T1 to T12.

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/localqueue"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

// counted returns the client of one more process, and its commands.
func (w *world) counted() (*redis.Client, *counter) {
	rc, sent := w.client(w.link), &counter{}
	rc.AddHook(sent)
	return rc, sent
}

// silent checks that a step sends no command.
func (w *world) silent(sent *counter, what string, step func()) {
	w.Helper()
	synctest.Wait()
	sent.reset()
	step()
	synctest.Wait()
	if n, _ := sent.reset(); n != 0 {
		w.Errorf("%s: %d commands, want none", what, n)
	}
}

// inRedis returns how many wait in Redis.
func (w *world) inRedis() int {
	synctest.Wait()
	return len(w.queue())
}

// queue returns the queue in Redis: the ranks of the waiters.
func (w *world) queue() map[string]float64 {
	waiting, _ := w.Redis.SortedSet("{x}:lock-intent")
	return maps.Clone(waiting)
}

// try returns the lock, or nil if a try is refused.
func (w *world) try(m *RWMutex, write bool) *Lock {
	w.Helper()
	ask := m.TryRLockContext
	if write {
		ask = m.TryLockContext
	}
	l, err := ask(w.Context())
	if err != nil {
		w.matches(err, ErrLock)
		return nil
	}
	return l
}

// granted returns a lock that has to be granted by now.
func (w *world) granted(c <-chan *Lock, what string) *Lock {
	w.Helper()
	synctest.Wait()
	select {
	case l := <-c:
		return l
	default:
		w.Fatalf("%s: the lock is pending, want it granted", what)
		return nil
	}
}

// within returns a lock that has to be granted before so much time has passed.
func (w *world) within(most time.Duration, c <-chan *Lock) *Lock {
	w.Helper()
	select {
	case l := <-c:
		return l
	case <-time.After(most):
		w.Fatalf("the lock is pending after %v, want it granted", most)
		return nil
	}
}

const turnLength = DefaultTurn

// T1.
func TestEqualRequestsShareAQueue(t *testing.T) {
	for name, c := range map[string]struct {
		opt   []MutexOption
		other bool // on another client
		share bool
	}{
		"another mutex":      {share: true},
		"another logger":     {opt: []MutexOption{WithLogger((&redistest.Log{}).Logger())}, share: true},
		"another TTL":        {opt: []MutexOption{WithTTL(2 * DefaultTTL)}},
		"another order":      {opt: []MutexOption{WithLockIntent()}},
		"another drift":      {opt: []MutexOption{WithDriftFactor(0.02)}},
		"another bound":      {opt: []MutexOption{WithMaxHold(time.Hour)}},
		"another turn":       {opt: []MutexOption{WithTurn(2 * turnLength)}},
		"strict":             {opt: []MutexOption{WithTurn(0)}},
		"on another client":  {other: true},
		"the default turn":   {opt: []MutexOption{WithTurn(DefaultTurn)}, share: true},
		"another name, same": {opt: []MutexOption{WithTTL(DefaultTTL)}, share: true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				rc := w.client(nil)
				m := NewMutex(rc, "x")
				if c.other {
					rc = w.client(nil)
				}
				holder := w.lock(m, true)
				next := w.later(NewMutex(rc, "x", c.opt...), true)
				if shared := w.inRedis() == 0; shared != c.share {
					t.Errorf("they share a queue: %v, want %v", shared, c.share)
				}
				if w.unlock(holder); c.share && w.granted(next, "the next one").ID() != holder.ID() {
					t.Error("the next lock has another acquisition")
				} else if !c.share {
					w.unlock(<-next)
				}
			})
		})
	}
}

// T1: with WithTurn(0) each request stands in Redis by itself, and nobody shares an acquisition.
func TestStrictRequestsStandInRedis(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x", WithTurn(0))
		holder := w.lock(m, true)
		first, second := w.later(m, true), w.later(m, false)
		if n := w.inRedis(); n != 2 || localqueue.Len() != 0 {
			t.Errorf("%d wait in Redis and there are %d queues, want 2 and none", n, localqueue.Len())
		}
		w.unlock(holder)
		l := w.granted(first, "the first")
		if l.ID() == holder.ID() || l.Token()%1024 != 0 || l.Token() <= holder.Token() {
			t.Errorf("id %s and token %d after id %s and token %d", l.ID(), l.Token(), holder.ID(), holder.Token())
		}
		w.unlock(l)
		w.unlock(<-second)
	})
}

// T2, T5: within its turn a process passes the lock on without a call; when that is over it is released to others.
func TestLockIsPassedOnForATurn(t *testing.T) {
	inBubble(t, func(w *world) {
		rc, sent := w.counted()
		m, other := NewMutex(rc, "x"), NewMutex(w.client(nil), "x")
		l := w.lock(m, true)
		begun := time.Now()
		remote := w.later(other, true)
		for time.Since(begun) < turnLength-time.Millisecond {
			next := w.later(m, true)
			redistest.Elapse(time.Millisecond)
			w.silent(sent, "passing the lock on", func() { w.unlock(l); l = w.granted(next, "within the turn") })
		}
		next := w.later(m, true)
		redistest.Elapse(time.Millisecond)
		w.unlock(l)
		l = w.granted(remote, "the turn is over")
		w.pending(next)
		w.unlock(l)
		w.unlock(w.granted(next, "the turn of the other one is over"))
	})
}

// T2: a write acquisition serves writers and readers, a read acquisition readers only.
func TestReadAcquisitionServesNoWriter(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		reader := w.lock(m, false)
		writer := w.later(m, true)
		w.pending(writer)
		w.unlock(reader)
		l := w.granted(writer, "a writer after a reader")
		if l.ID() == reader.ID() {
			t.Error("the writer has the acquisition of the reader")
		}
		inner := w.later(m, false)
		w.unlock(l)
		r := w.granted(inner, "a reader after a writer")
		if r.ID() != l.ID() || r.Token() != 0 {
			t.Errorf("id %s, token %d: want the acquisition of the writer, and no token", r.ID(), r.Token())
		}
		w.unlock(r)
	})
}

// T2: an acquisition that is granted late serves the head in any case, though its turn is over or little trust is left.
func TestGrantServesTheHeadInAnyCase(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(w.link), "x", WithTurn(time.Nanosecond))
		for range 3 { // each in a turn of its own
			l := w.lock(m, true)
			next := w.later(m, true)
			redistest.Elapse(time.Millisecond)
			w.unlock(l)
			w.unlock(w.granted(next, "a turn that is over at once"))
		}
		// The waiter has a lease that ends soon when it is granted.
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		next := w.later(m, true)
		redistest.Elapse(time.Minute)
		w.link.Hole(true, false) // its renewals are lost
		redistest.Elapse(DefaultTTL/2 + DefaultTTL/4 + DefaultTTL/8)
		w.link.Hole(false, false)
		w.unlock(holder)
		start := time.Now()
		w.unlock(<-next)
		if took := time.Since(start); took > DefaultTTL {
			t.Errorf("it was served after %v, want at most %v", took, DefaultTTL)
		}
	})
}

// T3: under one acquisition there is one writer, or readers, or nobody; T4: in the order in which they came.
func TestLocalLocksExcludeEachOtherInOrder(t *testing.T) {
	for _, c := range []struct {
		opt  []MutexOption
		line string
		want string
	}{
		{nil, "wrrwrw", "w rr w r w"},
		{nil, "rrwwr", "rr w w r"},
		{[]MutexOption{WithLockIntent()}, "rwrw", "w w rr"},
		{[]MutexOption{WithReaderPriority()}, "wrwr", "rr w w"},
	} {
		inBubble(t, func(w *world) {
			m := NewMutex(w.client(nil), "x", append(c.opt, WithTurn(DefaultTTL/4))...)
			l := w.lock(m, true)
			id := l.ID()
			var waiting []<-chan *Lock
			for _, kind := range c.line {
				waiting = append(waiting, w.later(m, kind == 'w'))
			}
			held := []*Lock{l}
			var got string
			for range len(c.line) {
				for _, l := range held {
					w.unlock(l)
				}
				if held = nil; got != "" {
					got += " "
				}
				synctest.Wait()
				for i, next := range waiting {
					select {
					case l := <-next:
						if held = append(held, l); l.ID() != id {
							t.Errorf("%s: %d has another acquisition", c.line, i)
						}
						got += string(c.line[i])
					default:
					}
				}
				if len(got) >= len(c.want) {
					break
				}
			}
			for _, l := range held {
				w.unlock(l)
			}
			if got != c.want {
				t.Errorf("%s: served %q, want %q", c.line, got, c.want)
			}
		})
	}
}

// T4: a newcomer does not overtake, though the turn would allow it.
func TestNewcomerDoesNotOvertake(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x", WithTurn(time.Second))
		reader := w.lock(m, false)
		writer := w.later(m, true)
		newcomer := w.later(m, false)
		w.pending(newcomer)
		w.unlock(reader)
		l := w.granted(writer, "the writer")
		w.pending(newcomer)
		w.unlock(l)
		w.unlock(w.granted(newcomer, "the reader that came last"))
	})
}

// T4: a request that is granted as its context ends returns the lock or passes it on: it is never lost.
func TestGrantAndGivingUpAtOnce(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		for i := range 200 {
			l := w.lock(m, true)
			ctx, cancel := context.WithCancel(w.Context())
			var both sync.WaitGroup
			both.Go(func() {
				if l, err := m.LockContext(ctx); err == nil {
					w.unlock(l)
				} else {
					w.matches(err, context.Canceled)
				}
			})
			next := w.later(m, i%2 == 0)
			both.Go(func() { w.unlock(l) })
			both.Go(cancel)
			both.Wait()
			w.unlock(w.granted(next, "the next one"))
		}
		if n := localqueue.Len(); n != 0 {
			t.Errorf("%d queues are left", n)
		}
	})
}

// T6: a grant that arrives as the head gives up is for the next of the same process, and not for another one.
func TestGrantOfAHeadThatGivesUpIsForTheNext(t *testing.T) {
	inBubble(t, func(w *world) {
		const delay = time.Millisecond
		w.link.SetDelay(delay)
		m, other := NewMutex(w.client(w.link), "x"), NewMutex(w.client(nil), "x")
		for i := range 200 {
			holder := w.lock(other, true)
			ctx, cancel := context.WithCancel(w.Context())
			head := redistest.Later(func() (*Lock, error) { return m.LockContext(ctx) })
			redistest.Elapse(100 * delay)
			next := w.later(m, true)
			behind := w.later(other, true)
			w.unlock(holder)
			time.AfterFunc(delay, func() { // when the message of the grant arrives
				for range i % 40 {
					runtime.Gosched()
				}
				cancel()
			})
			if first := <-head; first.Err == nil {
				w.unlock(first.Value)
			}
			w.pending(behind)
			w.unlock(w.granted(next, "the next one of the process"))
			w.unlock(w.granted(behind, "the other process"))
		}
	})
}

// T5: a turn ends when trust falls below a quarter of the TTL.
func TestTurnEndsWithLittleTrust(t *testing.T) {
	inBubble(t, func(w *world) {
		rc := w.client(w.link, func(o *redis.Options) { o.MaxRetries = -1 })
		m := NewMutex(rc, "x", WithTurn(DefaultTTL/4))
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		next := w.later(m, true)
		w.link.Hole(true, false) // its renewals are lost, and the message of the grant arrives
		redistest.Elapse(DefaultTTL*5/8 - 100*time.Millisecond)
		w.unlock(holder)
		l := w.granted(next, "the waiter")
		if left := time.Until(l.Until()); left < DefaultTTL/4 || left > DefaultTTL/2 {
			t.Fatalf("the grant is trusted for %v", left)
		}
		redistest.Elapse(time.Until(l.Until()) - DefaultTTL/4 + time.Millisecond) // the time of the turn is not over
		after := w.later(m, true)
		go l.Unlock()
		w.pending(after)
		w.link.Hole(false, false)
		w.link.Cut()
		w.unlock(<-after)
	})
}

// T5, T10: a turn ends with the 1,024th write lock, and the tokens rise throughout.
func TestTokensRiseOverTurns(t *testing.T) {
	inBubble(t, func(w *world) {
		rc, sent := w.counted()
		m := NewMutex(rc, "x")
		l := w.lock(m, true)
		first, last := l.ID(), l.Token()
		if last%1024 != 0 {
			t.Errorf("the first token is %d, want a multiple of 1024", last)
		}
		synctest.Wait()
		sent.reset()
		shared := 1
		for range 3 * 1024 {
			next := w.later(m, true)
			w.unlock(l)
			l = <-next
			if l.Token() <= last {
				t.Fatalf("token %d after %d", l.Token(), last)
			}
			if last = l.Token(); l.ID() == first {
				shared++
			}
		}
		w.unlock(l)
		if n, _ := sent.reset(); shared != 1024 || n > 3*3+1 {
			t.Errorf("%d locks shared the first acquisition and %d commands made %d, want 1024 and at most 10", shared, n, 3*1024)
		}
	})
}

// T6: however many wait in a process, one waits in Redis, and none while the process holds the write lock.
func TestOneWaiterInRedisForAProcess(t *testing.T) {
	inBubble(t, func(w *world) {
		const many = 10000
		rc, sent := w.counted()
		m, other := NewMutex(rc, "x"), NewMutex(w.client(nil), "x")
		holder := w.lock(other, true)
		var all sync.WaitGroup
		for i := range many {
			all.Go(func() { w.unlock(w.lock(m, i%3 != 0)) })
		}
		if n := w.inRedis(); n != 1 {
			t.Errorf("%d wait in Redis, want 1", n)
		}
		sent.reset()
		redistest.Elapse(10 * DefaultTTL)
		if n, _ := sent.reset(); n > 21 {
			t.Errorf("%d commands in ten TTLs, want at most 21", n)
		}
		w.unlock(holder)
		all.Wait()

		l := w.lock(m, true)
		next := w.later(m, true)
		if n := w.inRedis(); n != 0 {
			t.Errorf("%d wait in Redis while the process holds, want none", n)
		}
		w.unlock(l)
		w.unlock(<-next)
	})
}

// T6: the acquisition belongs to the queue: if the head gives up it serves the next of its mode. If the mode changes it is
// replaced; if the queue empties it is released. The place is that of the request.
func TestWaiterInRedisOutlivesItsHead(t *testing.T) {
	for _, c := range []struct {
		line string
		same bool // the waiter in Redis stays
	}{{"ww", true}, {"rr", true}, {"wr", false}, {"rw", false}, {"w", false}} {
		t.Run(c.line, func(t *testing.T) {
			inBubble(t, func(w *world) {
				m, other := NewMutex(w.client(nil), "x"), NewMutex(w.client(nil), "x")
				holder := w.lock(other, true)
				ctx, giveUp := context.WithCancel(w.Context())
				gone := make(chan error, 1)
				go func() {
					ask := m.RLockContext
					if c.line[0] == 'w' {
						ask = m.LockContext
					}
					_, err := ask(ctx)
					gone <- err
				}()
				synctest.Wait()
				before := w.queue()
				var next <-chan *Lock
				if len(c.line) > 1 {
					next = w.later(m, c.line[1] == 'w')
				}
				redistest.Elapse(time.Millisecond)
				behind := w.later(NewMutex(w.client(nil), "x"), true) // of another process, and later
				giveUp()
				w.matches(<-gone, context.Canceled)
				synctest.Wait()
				after := w.queue()
				same := false
				for id := range before {
					_, same = after[id]
				}
				if same != c.same {
					t.Errorf("%v waited and then %v: the same one stays: %v, want %v", before, after, same, c.same)
				}
				if want := len(c.line); len(after) != want {
					t.Errorf("%d wait in Redis, want %d", len(after), want)
				}
				w.unlock(holder)
				if next != nil {
					l := w.granted(next, "the next one, which came before the other process")
					w.pending(behind)
					w.unlock(l)
				}
				w.unlock(<-behind)
			})
		})
	}
}

// T6: an arrival that goes first, by order of choice, has its own mode asked for.
func TestArrivalThatGoesFirstIsAskedFor(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x", WithLockIntent())
		holder := w.lock(NewMutex(w.client(nil), "x"), false)
		writer := w.later(NewMutex(w.client(nil), "x"), true)
		reader := w.later(m, false)
		first := w.later(m, true)
		w.unlock(holder)
		l := w.granted(first, "the writer that goes first")
		w.pending(reader)
		w.unlock(l)
		r := w.granted(reader, "the reader, in the turn of the writer")
		w.unlock(r)
		w.unlock(<-writer)
	})
}

// A holdingHook holds up the first command until it is closed.
type holdingHook struct {
	held    atomic.Bool
	release chan struct{}
}

func (h *holdingHook) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h *holdingHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
func (h *holdingHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, c redis.Cmder) error {
		if h.held.CompareAndSwap(false, true) {
			<-h.release
		}
		return next(ctx, c)
	}
}

// T4: a request that others may go before is served in their turn, also while its own first call is under way.
func TestReaderIsServedWhileItsFirstCallIsUnderWay(t *testing.T) {
	inBubble(t, func(w *world) {
		rc, hook := w.client(nil), &holdingHook{release: make(chan struct{})}
		rc.AddHook(hook)
		m := NewMutex(rc, "x", WithLockIntent())
		reader := w.later(m, false)
		if !hook.held.Load() {
			t.Fatal("the reader has made no call")
		}
		w.unlock(w.granted(w.later(m, true), "the writer that goes first"))
		r := w.granted(reader, "the reader, in the turn of the writer")
		close(hook.release)
		synctest.Wait()
		w.unlock(r)
	})
}

// T6: a request keeps its place in Redis: it takes the age with it.
func TestAgeRestoresThePlace(t *testing.T) {
	inBubble(t, func(w *world) {
		m, other := NewMutex(w.client(nil), "x"), NewMutex(w.client(nil), "x")
		l := w.lock(m, true)
		next := w.later(m, true) // it waits in the process, and not in Redis
		redistest.Elapse(time.Second)
		remote := w.later(other, true)
		redistest.Elapse(time.Second)
		w.unlock(l) // the turn is over
		l = w.granted(next, "the one that came first")
		w.pending(remote)
		w.unlock(l)
		w.unlock(w.granted(remote, "the other process"))
	})
}

// T7: the head's acquire goes in front of the release: also if the server knows no script, and through a client without
// pipelines.
func TestAcquireGoesInFrontOfTheRelease(t *testing.T) {
	inBubble(t, func(w *world) {
		for _, client := range []redis.Scripter{w.client(nil), scripterOnly{w.client(nil)}} {
			m, other := NewMutex(client, "x"), NewMutex(w.client(nil), "x")
			l := w.lock(m, true)
			next := w.later(m, true)
			redistest.Elapse(time.Second)
			remote := w.later(other, true)
			redistest.Elapse(time.Second)
			w.client(nil).ScriptFlush(w.Context())
			w.unlock(l)
			l = w.granted(next, "the one that came first")
			w.pending(remote)
			w.unlock(l)
			w.unlock(w.granted(remote, "the other process"))
		}
	})
}

// T7, promise 5: the release hands the lock on to all that fit, with an acquire in front of it, too.
func TestReleaseBehindAnAcquireHandsOnToAll(t *testing.T) {
	inBubble(t, func(w *world) {
		m, strict := NewMutex(w.client(nil), "x"), NewMutex(w.client(nil), "x", WithTurn(0))
		first := w.lock(strict, true)
		waiter := w.later(m, true) // so m has subscribed: a new subscription would have next renewed, which hands on
		w.unlock(first)
		l, readers := w.granted(waiter, "the waiter"), make([]<-chan *Lock, 600) // Redis grants the lock to 250 at a time
		for i := range readers {
			readers[i] = w.later(strict, false)
		}
		redistest.Elapse(2 * turnLength)
		next := w.later(m, true)
		w.unlock(l)
		locks := make([]*Lock, len(readers))
		for i, r := range readers {
			locks[i] = w.granted(r, fmt.Sprintf("reader %d", i))
		}
		w.pending(next)
		for _, l := range locks {
			w.unlock(l)
		}
		w.unlock(w.granted(next, "the next one"))
	})
}

// T7, promise 7: the reply to a release behind an acquire is lost, with the grant of another waiter of the process in it.
func TestLostReplyToAReleaseBehindAnAcquireDelaysNobody(t *testing.T) {
	inBubble(t, func(w *world) {
		rc := w.client(w.link) // go-redis makes the call again
		m, strict := NewMutex(rc, "x"), NewMutex(rc, "x", WithTurn(0))
		l := w.lock(m, true)
		other := w.later(strict, true) // it stands in Redis by itself
		redistest.Elapse(2 * turnLength)
		next := w.later(m, true)
		w.link.LoseReply(script.Both(script.Lock, script.Unlock).Digest(), 1)
		_ = l.UnlockContext(w.Context()) // the second call finds nothing to release
		if n := w.link.Effects().LostReplies; n != 1 {
			t.Fatalf("%d replies were lost, want one", n)
		}
		w.unlock(w.within(100*time.Millisecond, other))
		w.unlock(w.within(100*time.Millisecond, next))
	})
}

// T7: mutexes of one queue may name the nodes in different orders: what is released on a node goes behind the acquire for
// that node.
func TestQueueIsSharedWhateverTheOrderOfTheNodes(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		clients := ns.process()
		m, reversed := NewRedlock(clients, "x"), NewRedlock([]redis.Scripter{clients[2], clients[1], clients[0]}, "x")
		l := ns.lock(m, true)
		next := ns.later(reversed, true)
		ns.pending(next)
		redistest.Elapse(2 * turnLength) // the turn is over
		start := time.Now()
		ns.unlock(l)
		l = ns.granted(next, "the next one")
		redistest.Elapse(3 * DefaultTTL)
		if l.Err() != nil {
			t.Errorf("the lock was lost: %v", context.Cause(l))
		}
		ns.unlock(l)
		l = ns.lock(ns.mutex(), true)
		if waited := time.Since(start) - 3*DefaultTTL; waited > 0 {
			t.Errorf("the locks were granted %v late", waited)
		}
		ns.unlock(l)
	})
}

// T7: what may not serve the head is released at once, and what nobody uses is not kept.
func TestUnusedAcquisitionIsNotKept(t *testing.T) {
	inBubble(t, func(w *world) {
		m, other := NewMutex(w.client(nil), "x"), NewMutex(w.client(nil), "x")
		w.unlock(w.lock(m, true))
		w.unlock(w.lock(other, true)) // at once, not after the turn
		reader := w.lock(m, false)
		writer := w.later(m, true)
		w.unlock(reader) // within its turn, and nobody unlocks after it
		w.unlock(w.granted(writer, "a writer behind a reader whose turn is not over"))
		if n := localqueue.Len(); n != 0 {
			t.Errorf("%d queues are left", n)
		}
		w.empty()
	})
}

// empty checks that nothing of the lock is left in Redis but its token.
func (w *world) empty() {
	w.Helper()
	synctest.Wait()
	for _, key := range w.Redis.Keys() {
		if key != "{x}:token" {
			w.Errorf("%q is left in Redis", key)
		}
	}
}

// T8: a read acquisition whose turn is over keeps its readers; the next reader waits for one of its own, which is granted
// at once if nobody waits.
func TestReaderAfterTheTurnHasAnAcquisitionOfItsOwn(t *testing.T) {
	inBubble(t, func(w *world) {
		m, other := NewMutex(w.client(nil), "x"), NewMutex(w.client(nil), "x")
		first := w.lock(m, false)
		second := w.lock(m, false)
		if second.ID() != first.ID() {
			t.Error("within the turn a reader has an acquisition of its own")
		}
		redistest.Elapse(turnLength)
		third := w.lock(m, false)
		if third.ID() == first.ID() {
			t.Error("after the turn a reader shares the acquisition")
		}
		redistest.Elapse(turnLength)
		remote := w.later(other, true)
		fourth := w.later(m, false)
		w.pending(fourth) // behind the writer
		for _, l := range []*Lock{first, third, second} {
			w.unlock(l)
		}
		l := w.granted(remote, "the writer of the other process")
		w.pending(fourth)
		w.unlock(l)
		w.unlock(<-fourth)
	})
}

// T8: a write acquisition that has only readers when its turn ends is downgraded, so that readers of others join, and so
// that a writer that waits is asked for. Nobody unlocks or arrives meanwhile.
func TestWriteAcquisitionWithReadersIsDowngraded(t *testing.T) {
	for _, waiting := range []bool{false, true} {
		inBubble(t, func(w *world) {
			m, other := NewMutex(w.client(nil), "x"), NewMutex(w.client(nil), "x")
			l := w.lock(m, true)
			inner := w.later(m, false)
			remote := w.later(other, false)
			w.unlock(l)
			r := w.granted(inner, "the reader, in the turn of the writer")
			w.pending(remote)
			var writer <-chan *Lock
			if waiting {
				writer = w.later(m, true)
			}
			redistest.Elapse(turnLength + time.Nanosecond)
			shared := w.granted(remote, "the reader of another process, when the turn is over")
			if want := map[bool]int{false: 0, true: 1}[waiting]; w.inRedis() != want {
				t.Errorf("%d wait in Redis, want %d", w.inRedis(), want)
			}
			w.unlock(shared)
			w.unlock(r)
			if waiting {
				w.unlock(w.granted(writer, "the writer"))
			}
			w.empty()
		})
	}
}

// T9.
func TestTryIsServedLocallyOrFailsWithoutACall(t *testing.T) {
	inBubble(t, func(w *world) {
		rc, sent := w.counted()
		m := NewMutex(rc, "x", WithTurn(time.Second))
		reader := w.lock(m, false)
		w.silent(sent, "a try in a turn", func() {
			if l := w.try(m, false); l == nil || l.ID() != reader.ID() {
				t.Errorf("%v: want a reader to share the acquisition", l)
			} else {
				w.unlock(l)
			}
		})
		w.silent(sent, "a try that a reader excludes", func() {
			if w.try(m, true) != nil {
				t.Error("a writer beside a reader")
			}
		})
		writer := w.later(m, true)
		w.silent(sent, "a try while a writer waits", func() {
			if w.try(m, false) != nil {
				t.Error("the try overtakes a writer")
			}
		})
		w.unlock(reader)
		l := w.granted(writer, "the writer")
		w.silent(sent, "a try that a writer excludes", func() {
			if w.try(m, false) != nil || w.try(m, true) != nil {
				t.Error("a second one beside a writer")
			}
		})
		w.unlock(l)
		// What it acquires begins no turn.
		l = w.try(m, false)
		other := w.lock(m, false)
		if l.ID() == other.ID() {
			t.Error("a reader shares the acquisition of a try")
		}
		w.unlock(other)
		w.unlock(l)
	})
}

// T9: a read acquisition under way refuses no other reader.
func TestTryIsNotRefusedForAReaderThatIsBeingAcquired(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(w.link), "x")
		w.unlock(w.lock(m, false))
		answer := w.link.HoldReply(script.RLock.Digest())
		reader := w.later(m, false)
		tried := make(chan *Lock, 1)
		go func() { tried <- w.try(m, false) }()
		synctest.Wait()
		answer()
		l := <-tried
		if l == nil {
			t.Fatal("the try was refused, want it granted")
		}
		w.unlock(l)
		w.unlock(<-reader)
	})
}

// A read lock admits no nested write lock, though its acquisition is a write lock that the process shares.
func TestReaderOfAWriteAcquisitionCannotWrite(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		l := w.lock(m, true)
		inner := w.later(m, false)
		w.unlock(l)
		r := w.granted(inner, "the reader, in the turn of the writer")
		for _, ask := range []func(context.Context, ...LockOption) (*Lock, error){m.LockContext, m.TryLockContext} {
			_, err := ask(r)
			w.matches(err, ErrUpgrade)
		}
		again, err := m.RLockContext(r)
		if err != nil || again.ID() != r.ID() {
			t.Errorf("%v: want a nested read lock", err)
		}
		owned, err := m.RLockContext(r, WithOwner("o"))
		if err != nil {
			t.Fatal(err)
		}
		_, err = m.LockContext(w.Context(), WithOwner("o"))
		w.matches(err, ErrUpgrade)
		w.unlock(owned)
		w.unlock(again)
		w.unlock(r)
		w.empty()
	})
}

// T10: a downgraded lock keeps its token, and the next writer needs another acquisition.
func TestDowngradeEndsTheWritersTurn(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		l := w.lock(m, true)
		next := w.later(m, true)
		w.unlock(l)
		l = w.granted(next, "the second writer")
		token := l.Token()
		reader, writer := w.later(m, false), w.later(m, true)
		if err := l.Downgrade(w.Context()); err != nil {
			t.Fatal(err)
		}
		r := w.granted(reader, "a reader beside the one that was a writer")
		if r.ID() != l.ID() || l.Token() != token || r.Token() != 0 {
			t.Errorf("ids %s and %s, token %d that was %d", r.ID(), l.ID(), l.Token(), token)
		}
		w.unlock(l)
		w.pending(writer)
		w.unlock(r)
		last := w.granted(writer, "the writer")
		if last.ID() == l.ID() || last.Token() <= token {
			t.Errorf("id %s and token %d after id %s and token %d", last.ID(), last.Token(), l.ID(), token)
		}
		w.unlock(last)
	})
}

// T6, T7: when a writer is downgraded, the acquire for the head goes in front, in the same script. When Downgrade returns
// the head stands in Redis, so that nobody overtakes it when the lock is unlocked at once.
func TestHeadStandsInRedisWhenDowngradeReturns(t *testing.T) {
	for _, n := range []int{1, 3} {
		onNodes(t, n, func(ns *nodes) {
			m, other := ns.mutex(), ns.mutex()
			l := ns.lock(m, true)
			next := ns.later(m, true)
			redistest.Elapse(time.Second)
			remote := ns.later(other, true)
			redistest.Elapse(time.Second)
			for _, link := range ns.links {
				link.SetDelay(time.Millisecond)
			}
			if err := l.Downgrade(ns.Context()); err != nil {
				t.Fatal(err)
			}
			for i, mini := range ns.minis {
				if waiting, _ := mini.SortedSet("{x}:lock-intent"); len(waiting) != 2 {
					t.Fatalf("%d wait on node %d of %d, want the head and the other process", len(waiting), i+1, n)
				}
			}
			ns.unlock(l)
			l = <-next
			ns.pending(remote)
			ns.unlock(l)
			ns.unlock(<-remote)
		})
	}
}

// T11: a loss ends all locks under an acquisition, and the queue goes on: nobody is served under the lost one.
func TestLossEndsAllAndTheQueueGoesOn(t *testing.T) {
	for _, write := range []bool{true, false} {
		inBubble(t, func(w *world) {
			m := NewMutex(w.client(nil), "x")
			var held []*Lock
			held = append(held, w.lock(m, write))
			if !write {
				held = append(held, w.lock(m, false), w.lock(m, false))
			}
			lost := held[0].ID()
			var all sync.WaitGroup
			ids := make(chan string, 100)
			for i := range 100 {
				all.Go(func() {
					l := w.lock(m, i%2 == 0 || i == 0)
					ids <- l.ID()
					w.unlock(l)
				})
				synctest.Wait()
			}
			w.Redis.FlushAll()
			for _, l := range held {
				<-l.Done()
				w.matches(context.Cause(l), ErrLockLost)
			}
			all.Wait()
			for range 100 {
				if id := <-ids; id == lost {
					t.Fatal("a waiter was served under the acquisition that was lost")
				}
			}
			for _, l := range held {
				w.matches(l.UnlockContext(w.Context()), ErrLockLost)
			}
			if n := localqueue.Len(); n != 0 {
				t.Errorf("%d queues are left", n)
			}
		})
	}
}

// T11: an unlock that leaves others returns nil if the lock was trusted to its end, ErrLockLost if not.
func TestUnlockThatLeavesOthersTellsALoss(t *testing.T) {
	inBubble(t, func(w *world) {
		rc, sent := w.counted()
		m := NewMutex(rc, "x")
		first, second := w.lock(m, false), w.lock(m, false)
		w.silent(sent, "an unlock that leaves others", func() { w.unlock(first) })
		third := w.later(m, true)
		endTrust(second)
		w.matches(second.UnlockContext(w.Context()), ErrLockLost)
		w.unlock(<-third)
	})
}

// T11: a first error ends all waits of the queue; they do not learn of a dead Redis one after the other.
func TestFirstErrorEndsAllWaits(t *testing.T) {
	inBubble(t, func(w *world) {
		const many = 10000
		rc := w.client(w.link, func(o *redis.Options) { o.MaxRetries, o.ReadTimeout = -1, time.Second })
		m := NewMutex(rc, "x")
		w.link.Hole(true, true)
		start := time.Now()
		_, err := m.LockContext(w.Context())
		w.matches(err, ErrRedis)
		one := time.Since(start)
		start = time.Now()
		var all sync.WaitGroup
		for range many {
			all.Go(func() {
				_, err := m.LockContext(w.Context())
				w.matches(err, ErrRedis)
			})
		}
		all.Wait()
		if took := time.Since(start); took > 2*one {
			t.Errorf("%d learned of it within %v, and one by itself within %v", many, took, one)
		}
	})
}

// T11: an error of the first attempt is returned at once also while the process holds the lock for reading, or has lost it:
// that Redis has acknowledged a holder does not count for the waiters.
func TestFirstErrorIsReturnedWhileOthersHold(t *testing.T) {
	for _, c := range []struct {
		what  string
		write bool // the holder
		lost  bool // before the next one asks
	}{{"beside a reader", false, false}, {"after the loss of a reader", false, true}, {"after the loss of a writer", true, true}} {
		inBubble(t, func(w *world) {
			rc := w.client(w.link, func(o *redis.Options) { o.MaxRetries, o.ReadTimeout, o.DialerRetries = -1, time.Second, 1 })
			m := NewMutex(rc, "x")
			held := w.lock(m, c.write)
			redistest.Elapse(time.Second)
			w.link.Refuse(true)
			w.link.Cut()
			if c.lost {
				<-held.Done()
			}
			start := time.Now()
			ctx, cancel := context.WithTimeout(w.Context(), time.Hour)
			defer cancel()
			_, err := m.LockContext(ctx)
			w.matches(err, ErrRedis)
			if took := time.Since(start); took > 2*time.Second {
				t.Errorf("%s: %v came after %v, want it at once", c.what, err, took)
			}
			w.link.Refuse(false)
			held.Unlock()
		})
	}
}

// A doneContext calls a function whenever somebody asks for Done: among others as what descends from it is canceled.
type doneContext struct {
	context.Context
	onDone func()
}

func (c doneContext) Done() <-chan struct{} { c.onDone(); return c.Context.Done() }

// T11: the same for a call that is made while the holder is told of the loss.
func TestFirstErrorIsReturnedWhileALossIsTold(t *testing.T) {
	inBubble(t, func(w *world) {
		rc := w.client(w.link, func(o *redis.Options) { o.MaxRetries, o.ReadTimeout, o.DialerRetries = -1, time.Second, 1 })
		m := NewMutex(rc, "x")
		onDone, told := func() {}, false
		held, err := m.LockContext(doneContext{w.Context(), func() { onDone() }})
		if err != nil {
			t.Fatal(err)
		}
		w.link.Refuse(true)
		w.link.Cut()
		onDone = func() {
			onDone, told = func() {}, true
			ctx, cancel := context.WithTimeout(w.Context(), time.Hour)
			defer cancel()
			_, err := m.LockContext(ctx)
			w.matches(err, ErrRedis)
		}
		<-held.Done()
		synctest.Wait()
		if !told {
			t.Error("the call was not made")
		}
		w.link.Refuse(false)
		held.Unlock()
	})
}

// panics checks that f panics.
func (w *world) panics(what string, f func()) {
	w.Helper()
	defer func() {
		if recover() == nil {
			w.Errorf("%s did not panic", what)
		}
	}()
	f()
}

// A hook that panics on the goroutine of a caller, which recovers, as a server does, stops nobody else: not when it acquires
// as the head of the queue, when it tries, or when it unlocks and the next one's acquire goes in front.
func TestQueueGoesOnAfterAPanic(t *testing.T) {
	for _, turn := range []time.Duration{DefaultTurn, 0} {
		inBubble(t, func(w *world) {
			rc, hook := w.client(nil), &panickingHook{}
			rc.AddHook(hook)
			m := NewMutex(rc, "x", WithTurn(turn))
			for what, lock := range map[string]func(...LockOption) (*Lock, bool){"a lock": m.Lock, "a try": m.TryLock} {
				hook.command.Store(true)
				w.panics(what, func() { lock() })
				w.unlock(w.within(DefaultTTL, w.later(m, true)))
			}

			l := w.lock(m, true)
			next, third := w.later(m, true), w.later(m, false)
			w.pending(next)
			redistest.Elapse(2 * DefaultTurn)
			hook.command.Store(true)
			w.panics("an unlock", func() { l.Unlock() })
			w.unlock(w.within(DefaultTTL, next))
			w.unlock(w.within(DefaultTTL, third))
			if n := localqueue.Len(); n != 0 {
				t.Errorf("%d queues are left", n)
			}
		})
	}
}

// A head whose goroutine ends in a hook, with others behind it that have asked for nothing yet.
func TestOthersAreServedWhenTheHeadPanics(t *testing.T) {
	inBubble(t, func(w *world) {
		rc := w.client(w.link)
		asked, fail := make(chan struct{}), make(chan struct{})
		rc.AddHook(endingHook{asked, fail})
		m := NewMutex(rc, "x")
		go m.LockContext(context.WithValue(context.Background(), endingHook{}, true))
		<-asked
		next, third := w.later(m, true), w.later(m, false)
		close(fail)
		w.unlock(w.within(DefaultTTL, next))
		w.unlock(w.within(DefaultTTL, third))
	})
}

// An endingHook ends the goroutine of a command, once fail is closed, if the context of the command has it as a value.
type endingHook struct{ asked, fail chan struct{} }

func (h endingHook) DialHook(next redis.DialHook) redis.DialHook { return next }
func (h endingHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
func (h endingHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, c redis.Cmder) error {
		if ctx.Value(endingHook{}) != nil {
			close(h.asked)
			<-h.fail
			runtime.Goexit()
		}
		return next(ctx, c)
	}
}

// T11: a waiter in a queue that Redis has acknowledged outlives errors.
func TestQueueOutlivesErrors(t *testing.T) {
	inBubble(t, func(w *world) {
		var log redistest.Log
		rc := w.client(w.link, func(o *redis.Options) { o.MaxRetries, o.ReadTimeout, o.DialerRetries = -1, time.Second, 1 })
		m := NewMutex(rc, "x", WithLogger(log.Logger()))
		l := w.lock(m, true)
		next := w.later(m, true)
		redistest.Elapse(turnLength)
		w.link.Refuse(true)
		w.link.Cut()
		if err := l.UnlockContext(w.Context()); err == nil {
			t.Error("the unlock succeeded without Redis")
		}
		redistest.Elapse(time.Minute)
		w.pending(next)
		if log.Count("") == 0 {
			t.Error("nothing was logged")
		}
		w.link.Refuse(false)
		w.unlock(<-next)
	})
}

// T6, T11: so does a waiter of the other mode, when the head gives up whose request Redis has acknowledged.
func TestQueueOutlivesErrorsWhenItsHeadHasGivenUp(t *testing.T) {
	inBubble(t, func(w *world) {
		holder := w.lock(NewMutex(w.client(nil), "x"), true)
		m := NewMutex(w.client(w.link, func(o *redis.Options) { o.MaxRetries, o.DialerRetries = -1, 1 }), "x")
		ctx, cancel := context.WithCancel(w.Context())
		head := make(chan error, 1)
		go func() {
			_, err := m.LockContext(ctx)
			head <- err
		}()
		synctest.Wait()
		next := w.later(m, false) // behind the head, in the same process
		w.link.Refuse(true)
		w.link.Cut()
		cancel()
		w.matches(<-head, context.Canceled)
		redistest.Elapse(time.Minute)
		w.pending(next)
		w.link.Refuse(false)
		w.unlock(holder)
		w.unlock(<-next)
	})
}

// A goroutine holds for minutes while others of its process wait and other processes come: first come, first served when
// it unlocks.
func TestLongHolderIsFollowedInOrder(t *testing.T) {
	for _, n := range []int{1, 3} {
		onNodes(t, n, func(ns *nodes) {
			mutexes := []*RWMutex{ns.mutex(), ns.mutex(), ns.mutex()}
			holder := ns.lock(mutexes[0], true)
			var mu sync.Mutex
			var order []int
			var all sync.WaitGroup
			for i := range 12 {
				all.Go(func() {
					l := ns.lock(mutexes[i%3], true)
					mu.Lock()
					order = append(order, i)
					mu.Unlock()
					redistest.Elapse(time.Second) // longer than a turn
					ns.unlock(l)
				})
				redistest.Elapse(10 * time.Second)
			}
			ns.unlock(holder)
			all.Wait()
			if !slices.IsSorted(order) {
				t.Errorf("%d nodes: served in the order %v", n, order)
			}
		})
	}
}

// A reader stream in one process and a writer in another, and the reverse: each goes on.
func TestStreamsOfTwoProcessesBothGoOn(t *testing.T) {
	for _, n := range []int{1, 3} {
		for _, stream := range []bool{true, false} {
			onNodes(t, n, func(ns *nodes) {
				var inside redistest.Witness
				var all sync.WaitGroup
				end := time.Now().Add(time.Second)
				longest := make([]time.Duration, 2)
				var mu sync.Mutex
				for p, m := range []*RWMutex{ns.mutex(), ns.mutex()} {
					for range 8 {
						all.Go(func() {
							for time.Now().Before(end) {
								start := time.Now()
								l := ns.lock(m, (p == 0) == stream)
								mu.Lock()
								longest[p] = max(longest[p], time.Since(start))
								mu.Unlock()
								inside.Visit((p == 0) == stream, func() { redistest.Elapse(time.Millisecond) })
								ns.unlock(l)
							}
						})
					}
				}
				all.Wait()
				if len(inside.Overlaps) > 0 {
					t.Fatal(inside.Overlaps[0])
				}
				if inside.Wrote < 50 || inside.Read < 50 || max(longest[0], longest[1]) > 100*time.Millisecond {
					t.Errorf("%d nodes: %d wrote and %d read, and the longest waits were %v", n, inside.Wrote, inside.Read, longest)
				}
			})
		}
	}
}

// Mixed settings on one key, over one node and three: exclusion, rising tokens, everybody served, nothing left.
func TestMixedSettingsOnOneKey(t *testing.T) {
	for _, n := range []int{1, 3} {
		onNodes(t, n, func(ns *nodes) {
			var mutexes []*RWMutex
			for range 2 {
				clients := ns.process()
				for _, opt := range [][]MutexOption{
					nil, {WithTurn(0)}, {WithTurn(time.Millisecond)}, {WithTTL(time.Second)}, {WithLockIntent()}, {WithReaderPriority()},
				} {
					mutexes = append(mutexes, NewRedlock(clients, "x", opt...))
				}
			}
			var inside redistest.Witness
			var all sync.WaitGroup
			var last uint64 // written under the lock
			for i, m := range mutexes {
				for g := range 3 {
					random := rand.New(rand.NewPCG(uint64(i), uint64(g)))
					all.Go(func() {
						for range 20 {
							write := random.IntN(3) > 0
							ctx, cancel := context.WithTimeout(ns.Context(), time.Duration(1+random.IntN(2000))*time.Millisecond)
							ask := m.RLockContext
							if write {
								ask = m.LockContext
							}
							if l, err := ask(ctx); err == nil {
								inside.Visit(write, func() {
									if write && l.Token() <= last {
										ns.Errorf("token %d after %d", l.Token(), last)
									}
									if write {
										last = l.Token()
									}
									redistest.Elapse(time.Duration(random.IntN(3)) * time.Millisecond)
								})
								ns.unlock(l)
							} else if !errors.Is(err, context.DeadlineExceeded) {
								ns.Error(err)
							}
							cancel()
						}
					})
				}
			}
			all.Wait()
			if len(inside.Overlaps) > 0 {
				t.Fatal(inside.Overlaps[0])
			}
			if inside.Wrote < 200 || localqueue.Len() != 0 {
				t.Errorf("%d wrote, %d queues are left", inside.Wrote, localqueue.Len())
			}
			redistest.Elapse(2*DefaultTTL + time.Second) // the life of a tombstone
			ns.empty()
		})
	}
}

// A queue lives only while somebody holds or waits.
func TestQueuesComeAndGo(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		var locks []*Lock
		for i := range 2000 {
			l, err := m.LockContext(w.Context(), WithKey(fmt.Sprint(i)))
			if err != nil {
				t.Fatal(err)
			}
			locks = append(locks, l)
		}
		if n := localqueue.Len(); n != len(locks) {
			t.Errorf("%d queues for %d keys", n, len(locks))
		}
		for _, l := range locks {
			w.unlock(l)
		}
		for i := range 100 { // refused, given up, failed
			ctx, cancel := context.WithCancel(w.Context())
			l, _ := m.LockContext(ctx, WithKey(fmt.Sprint(i)))
			go m.LockContext(ctx, WithKey(fmt.Sprint(i)))
			synctest.Wait()
			_, _ = m.TryLockContext(ctx, WithKey(fmt.Sprint(i)))
			cancel()
			synctest.Wait()
			w.unlock(l)
		}
		if n := localqueue.Len(); n != 0 {
			t.Errorf("%d queues are left", n)
		}
	})
}

func TestTurnIsChecked(t *testing.T) {
	rc := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rc.Close()
	for d, valid := range map[time.Duration]bool{
		-1: false, 0: true, 1: true, DefaultTTL / 4: true, DefaultTTL/4 + 1: false, time.Hour: false,
	} {
		err := NewMutex(rc, "x", WithTurn(d)).err
		if (err == nil) != valid || err != nil && !errors.Is(err, ErrInvalid) {
			t.Errorf("WithTurn(%v): %v, want it valid: %v", d, err, valid)
		}
	}
	if err := NewMutex(rc, "x", WithTTL(MinTTL)).err; err != nil {
		t.Errorf("the default turn with the shortest TTL: %v", err)
	}
}
