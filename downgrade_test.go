package redismutex

// A writer becomes a reader once, and with no other writer in between, whatever happens to the call. Time is virtual,
// on one node and on five.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

func (w *world) downgrade(l *Lock) {
	w.Helper()
	if err := l.Downgrade(w.Context()); err != nil {
		w.Fatal(err)
	}
}

// digest returns the name by which a script is called.
func digest(s *script.Script) string { return s.Digest() }

// Promises 1, 5 and 6: a downgrade grants to the readers in front, in one command for each node.
func TestDowngradeAdmitsReadersAndNoWriter(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		sent := &counter{}
		m := NewRedlock(ns.process(func(_ int, rc *redis.Client) { rc.AddHook(sent) }), "x")
		l := ns.lock(m, true)
		token, id := l.Token(), l.ID()
		var readers []<-chan *Lock
		for range 3 {
			readers = append(readers, ns.later(ns.mutex(), false))
			redistest.Elapse(10 * time.Millisecond)
		}
		writer := ns.later(ns.mutex(), true)
		redistest.Elapse(10 * time.Millisecond)
		last := ns.later(ns.mutex(), false)
		redistest.Elapse(10 * time.Millisecond)
		sent.reset()
		start := time.Now()
		ns.downgrade(l)
		if n, _ := sent.reset(); n != len(ns.minis) {
			ns.Errorf("%d commands", n)
		}
		for _, r := range readers {
			ns.unlock(<-r)
		}
		if took := time.Since(start); took != 0 {
			ns.Errorf("it took %v, want no time", took)
		}
		ns.pending(writer)
		ns.pending(last)
		if l.Err() != nil || l.Token() != token || l.ID() != id {
			ns.Errorf("%v, token %d was %d", l.Err(), l.Token(), token)
		}
		for range 100 { // it renews itself
			redistest.Elapse(DefaultTTL / 2)
			if l.Err() != nil || time.Until(l.Until()) < DefaultTTL/4 {
				ns.Fatal(l.Err(), l.Until())
			}
		}
		ns.pending(writer)
		ns.unlock(l)
		w := <-writer
		if w.Token() <= token {
			ns.Errorf("token %d after %d", w.Token(), token) // promise 9
		}
		ns.pending(last)
		ns.unlock(w)
		ns.unlock(<-last)
		ns.empty()
	})
}

// Promise 10: a downgrade that is not allowed returns why, and changes nothing.
func TestDowngradeIsForOneWriter(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m, ctx := ns.mutex(), ns.Context()
		l := ns.lock(m, true)
		ns.matches(l.Downgrade(noContext), ErrInvalid)
		over, cancel := context.WithCancel(ctx)
		cancel()
		ns.matches(l.Downgrade(over), context.Canceled)
		reads, writes := ns.nested(l, m, false), ns.nested(l, m, true)
		for _, l := range []*Lock{l, reads, writes} {
			ns.matches(l.Downgrade(ctx), ErrInvalid)
		}
		ns.unlock(ns.nested(l, m, true)) // it still writes
		if ns.try(false) {
			ns.Error("a reader was granted the lock beside a writer")
		}
		ns.unlock(writes)
		ns.matches(writes.Downgrade(ctx), ErrUnlocked)
		for range 2 {
			ns.downgrade(l)
		}
		synctest.Wait()
		if ns.try(true) || !ns.try(false) {
			ns.Error("want a read lock, it is none")
		}
		ns.matches(reads.Downgrade(ctx), ErrInvalid)
		for _, ctx := range []context.Context{l, reads} {
			_, err := m.LockContext(ctx)
			ns.matches(err, ErrUpgrade)
		}
		ns.unlock(ns.nested(reads, m, false))
		ns.unlock(reads)
		ns.unlock(l)
		ns.matches(l.Downgrade(ctx), ErrUnlocked)
		reader := ns.lock(m, false)
		ns.matches(reader.Downgrade(ctx), ErrInvalid)
		ns.unlock(reader)
		ns.empty()

		// The nested one may be what is left.
		l = ns.lock(m, true)
		writes = ns.nested(context.WithoutCancel(l), m, true)
		ns.unlock(l)
		ns.downgrade(writes)
		if ns.try(true) || !ns.try(false) {
			ns.Error("want a read lock, it is none")
		}
		ns.unlock(writes)

		l = ns.lock(m, true)
		redistest.Elapse(time.Millisecond) // all nodes have granted it, and before they forget it
		for _, m := range ns.minis {
			m.FlushAll()
		}
		err := l.Downgrade(ctx)
		ns.matches(err, ErrLockLost)
		ns.matches(l.Downgrade(ctx), ErrLockLost)
		redistest.Elapse(time.Minute)
	})
}

// Promises 2 and 4: once a downgrade has been sent the lock is a read lock. It is completed in the end, and once,
// whatever happens to the reply.
func TestDowngradeOutlivesItsReply(t *testing.T) {
	for name, fail := range map[string]func(l *faultnet.Link){
		"reply lost": func(l *faultnet.Link) { l.LoseReply(digest(script.Refresh), 1); l.Refuse(true) },
		"hole":       func(l *faultnet.Link) { l.Hole(true, false) },
		"down":       func(l *faultnet.Link) { l.Refuse(true); l.Cut() },
	} {
		onOneAndFive(t, func(ns *nodes) {
			m := ns.mutex(WithTTL(time.Minute))
			l := ns.lock(m, true)
			synctest.Wait()
			reader := make(chan *Lock, 1)
			away := ns.mutex(WithTTL(time.Minute))
			for _, link := range ns.links {
				fail(link)
			}
			ctx, cancel := context.WithTimeout(ns.Context(), 10*time.Second)
			err := l.Downgrade(ctx)
			cancel()
			if !errors.Is(err, ErrRedis) && !errors.Is(err, context.DeadlineExceeded) {
				ns.Errorf("%s: %v", name, err)
			}
			if _, err := m.TryLockContext(l); !errors.Is(err, ErrUpgrade) || l.Err() != nil {
				ns.Errorf("%s: %v, %v", name, err, l.Err())
			}
			for _, link := range ns.links {
				heal(link)
				link.Cut()
			}
			go func() { reader <- ns.lock(away, false) }()
			start := time.Now()
			r := <-reader
			if took := time.Since(start); took > 10*time.Second {
				ns.Errorf("%s: a reader was granted after %v", name, took)
			}
			if l.Err() != nil || ns.try(true) {
				ns.Errorf("%s: %v", name, l.Err())
			}
			ns.unlock(r)
			ns.downgrade(l)
			ns.unlock(l)
			redistest.Elapse(time.Second)
			ns.empty()
		})
	}
}

// Promise 2: a downgrade does not prolong the trust in a lock that is cut off.
func TestDowngradeIntoAHoleIsNoRenewal(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		l := ns.lock(ns.mutex(), true)
		for _, link := range ns.links {
			link.Hole(true, true)
		}
		until := l.Until()
		if err := l.Downgrade(l); !errors.Is(err, ErrRedis) && !errors.Is(err, ErrLockLost) {
			ns.Error(err)
		}
		<-l.Done()
		if late := time.Since(until); late > 0 {
			ns.Errorf("%v too late", late)
		}
		ns.matches(l.UnlockContext(ns.Context()), ErrLockLost)
	})
}

// A downgrade that Redis has confirmed succeeds, although the reply to the rest of what it hands on is lost: renewals go on
// with that.
func TestDowngradeSucceedsThoughTheRestIsLost(t *testing.T) {
	for name, behind := range map[string]bool{"alone": false, "behind an acquire": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				rc := w.client(w.link, func(o *redis.Options) { o.MaxRetries = -1 })
				m, strict := NewMutex(rc, "x"), NewMutex(w.client(nil), "x", WithTurn(0))
				l, readers := w.lock(m, true), make([]<-chan *Lock, 600) // Redis grants the lock to 250 at a time
				for i := range readers {
					readers[i] = w.later(strict, false)
				}
				redistest.Elapse(50 * time.Millisecond)
				var next <-chan *Lock
				what := script.Refresh.Digest()
				if behind {
					next, what = w.later(m, true), "join"
				}
				answer, done := w.link.HoldReply(what), make(chan error, 1)
				go func() { done <- l.Downgrade(context.Background()) }()
				synctest.Wait()
				w.link.LoseReply(script.Refresh.Digest(), 1)
				answer()
				if err := <-done; err != nil {
					t.Error(err)
				}
				if n := w.link.Effects().LostReplies; n != 1 {
					t.Errorf("%d replies were lost, want one", n)
				}
				redistest.Elapse(20 * time.Millisecond)
				for i, r := range readers {
					w.unlock(w.granted(r, fmt.Sprintf("reader %d", i)))
				}
				w.unlock(l)
				if behind {
					w.unlock(w.granted(next, "the next writer"))
				}
			})
		})
	}
}

// An unlock right after an unconfirmed downgrade frees the lock.
func TestUnlockAfterALostDowngrade(t *testing.T) {
	for _, lost := range []bool{true, false} {
		onOneAndFive(t, func(ns *nodes) {
			l := ns.lock(ns.mutex(WithTTL(time.Hour)), true)
			synctest.Wait()
			for _, link := range ns.links {
				if lost {
					link.Refuse(true)
					link.Cut()
				} else {
					link.LoseReply(digest(script.Refresh), 1)
				}
			}
			ctx, cancel := context.WithTimeout(ns.Context(), time.Millisecond)
			_ = l.Downgrade(ctx)
			cancel()
			for _, link := range ns.links {
				heal(link)
			}
			l.Unlock()
			redistest.Elapse(time.Minute)
			ns.empty()
		})
	}
}

// A downgraded lock acquires the nodes that it does not hold for reading.
func TestDowngradeAcquiresTheOtherNodesForReading(t *testing.T) {
	onNodes(t, 5, func(ns *nodes) {
		// Another client holds two of them, which is not enough.
		clients := ns.process()
		var minor []*Lock
		for _, i := range []int{3, 4} {
			minor = append(minor, ns.lock(NewMutex(clients[i], "x"), true))
		}
		m := ns.mutex(WithTTL(time.Minute))
		l := ns.lock(m, true)
		synctest.Wait()
		if held, waiting := ns.holders(); held != 5 || waiting != 2 {
			ns.Fatalf("held on %d nodes, waited for on %d", held, waiting)
		}
		ns.downgrade(l)
		redistest.Elapse(time.Second)
		for i, mini := range ns.minis {
			if i >= 3 {
				members, err := mini.ZMembers("{x}:lock-intent")
				if err != nil || len(members) != 1 || members[0][0] != 'r' {
					ns.Errorf("node %d: %q waits, %v", i+1, members, err)
				}
			} else if mini.Type("x") != "set" {
				ns.Errorf("node %d: no reader", i+1)
			}
		}
		for _, l := range minor {
			ns.unlock(l)
		}
		redistest.Elapse(time.Minute)
		// So it outlives the loss of the others, and a node that forgets it is
		// acquired for reading too.
		ns.minis[0].FlushAll()
		redistest.Elapse(time.Minute)
		ns.minis[1].FlushAll()
		redistest.Elapse(time.Minute)
		for i, mini := range ns.minis {
			if members, err := mini.Members("x"); err != nil || len(members) != 1 {
				ns.Errorf("node %d: %q, %v", i+1, members, err)
			}
		}
		if l.Err() != nil || ns.try(true) || !ns.try(false) {
			ns.Error(context.Cause(l))
		}
		ns.unlock(l)
		redistest.Elapse(time.Second)
		for i, mini := range ns.minis {
			if mini.Exists("x") || mini.Exists("{x}:lock-intent") {
				ns.Errorf("node %d: it is not free", i+1)
			}
		}
	})
}

// A majority has to confirm a downgrade. The other nodes follow when they can.
func TestDowngradeNeedsAMajority(t *testing.T) {
	onNodes(t, 5, func(ns *nodes) {
		m := ns.mutex(WithTTL(time.Minute))
		for down := 1; down <= 3; down++ {
			l := ns.lock(m, true)
			synctest.Wait()
			for _, link := range ns.links[:down] {
				link.Hole(true, true)
			}
			start := time.Now()
			err := l.Downgrade(ns.Context())
			if down <= 2 && err != nil || down == 3 && !errors.Is(err, ErrRedis) {
				ns.Errorf("%d down: %v", down, err)
			}
			if took := time.Since(start); took > m.config.Timeout {
				ns.Errorf("%d down: it took %v, want at most %v", down, took, m.config.Timeout)
			}
			for _, link := range ns.links {
				heal(link)
				link.Cut()
			}
			redistest.Elapse(20 * time.Second)
			for i, mini := range ns.minis {
				if mini.Type("x") != "set" {
					ns.Errorf("%d down: node %d: no reader", down, i+1)
				}
			}
			ns.unlock(l)
			redistest.Elapse(3 * time.Minute) // as long as a tombstone stays
			ns.empty()
		}
	})
}

// A node that forgets the lock in the meantime is acquired again for reading, and counts as confirmed, once.
func TestDowngradeCountsNodesAcquiredAgain(t *testing.T) {
	onNodes(t, 5, func(ns *nodes) {
		m := ns.mutex(WithTTL(time.Minute))
		l := ns.lock(m, true)
		synctest.Wait()
		down := func(from, to int) {
			for _, link := range ns.links[from:to] {
				link.Refuse(true)
				link.Cut()
			}
		}
		ns.minis[0].FlushAll()
		ns.minis[1].FlushAll()
		down(2, 5)
		for range 2 {
			ns.matches(l.Downgrade(ns.Context()), ErrRedis)
			redistest.Elapse(time.Second) // the two are acquired again
		}
		heal(ns.links[4])
		ns.downgrade(l)
		heal(ns.links[3])
		heal(ns.links[2])
		redistest.Elapse(time.Minute)
		ns.unlock(l)
		redistest.Elapse(3 * time.Minute)
		ns.empty()
	})
}

// Readers that give up while they are granted the lock pass it on.
func TestDowngradeRacesCanceledReaders(t *testing.T) {
	for _, n := range []int{1, 5} {
		onNodes(t, n, func(ns *nodes) {
			random := rand.New(rand.NewPCG(4, uint64(n)))
			m, far := ns.mutex(), NewRedlock(ns.distant(random, time.Millisecond), "x")
			for range 50 {
				l := ns.lock(m, true)
				var all sync.WaitGroup
				for range 10 {
					ctx, cancel := context.WithCancel(ns.Context())
					all.Go(func() {
						r, err := far.RLockContext(ctx)
						if err == nil {
							ns.unlock(r)
						} else if !errors.Is(err, context.Canceled) {
							ns.Error(err)
						}
					})
					time.AfterFunc(100*time.Millisecond+rand.N(6*time.Millisecond), cancel)
				}
				redistest.Elapse(100 * time.Millisecond)
				writer := ns.later(ns.mutex(), true)
				redistest.Elapse(rand.N(6 * time.Millisecond))
				ns.downgrade(l)
				all.Wait()
				ns.unlock(l)
				start := time.Now()
				ns.unlock(<-writer)
				if took := time.Since(start); took > time.Second {
					ns.Errorf("the writer was granted after %v", took)
				}
			}
			redistest.Elapse(3 * DefaultTTL)
			ns.empty()
		})
	}
}

// Foreign data under a key is reported as ErrNotLock and left as it is. If it goes in time, the downgrade is completed.
func TestDowngradeReportsForeignData(t *testing.T) {
	inBubble(t, func(w *world) {
		l := w.lock(NewMutex(w.client(nil), "x"), true)
		_, _ = w.Redis.ZAdd("{x}:lease", 1, "mine")
		w.matches(l.Downgrade(w.Context()), ErrNotLock)
		<-l.Done()
		if !errors.Is(context.Cause(l), ErrLockLost) {
			t.Error(context.Cause(l))
		}
		if members, _ := w.Redis.ZMembers("{x}:lease"); len(members) != 1 || members[0] != "mine" {
			t.Errorf("%q is left", members)
		}
		w.Redis.Del("{x}:lease")

		l = w.lock(NewMutex(w.client(nil), "x"), true)
		_, _ = w.Redis.ZAdd("{x}:lease", 1, "mine")
		w.matches(l.Downgrade(w.Context()), ErrNotLock)
		redistest.Elapse(DefaultTTL / 2)
		w.Redis.Del("{x}:lease")
		redistest.Elapse(DefaultTTL)
		if l.Err() != nil || w.Redis.Type("x") != "set" {
			t.Errorf("%v, %s", context.Cause(l), w.Redis.Type("x"))
		}
		w.unlock(l)
	})
}

// Promise 10: a lock that is the context of a call on another lock ends that call, and not the other lock.
func TestCallThatEndsWithAnotherLockLeavesItsOwn(t *testing.T) {
	for name, end := range map[string]func(other *Lock){
		"unlocked": func(other *Lock) { go other.Unlock() },
		"lost":     func(other *Lock) { <-other.Done() },
	} {
		onOneAndFive(t, func(ns *nodes) {
			nodes := ns.process()
			l := ns.lock(NewRedlock(nodes, "x", WithTTL(time.Minute)), true)
			other := ns.lock(NewRedlock(nodes, "y", WithTTL(500*time.Millisecond)), true)
			synctest.Wait()
			for _, link := range ns.links {
				link.Hole(false, true)
			}
			downgraded, unlocked := make(chan error, 1), make(chan error, 1)
			go func() { downgraded <- l.Downgrade(other) }()
			synctest.Wait()
			end(other)
			err := <-downgraded
			if !errors.Is(err, context.Canceled) || errors.Is(err, ErrLockLost) || errors.Is(err, ErrUnlocked) {
				ns.Errorf("%s: a downgrade returned %v, want an error of its context only", name, err)
			}
			if l.Err() != nil {
				ns.Errorf("%s: the lock has ended: %v", name, context.Cause(l))
			}
			go func() { unlocked <- l.UnlockContext(other) }()
			if err := <-unlocked; !errors.Is(err, context.Canceled) || errors.Is(err, ErrLockLost) || errors.Is(err, ErrUnlocked) {
				ns.Errorf("%s: an unlock returned %v, want an error of its context only", name, err)
			}
			for _, link := range ns.links {
				heal(link)
				link.Cut()
			}
			redistest.Elapse(5 * time.Minute) // until all has ended in the background
		})
	}
}
