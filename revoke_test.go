package redismutex

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
)

func (w *world) revoke(m *RWMutex, id string) {
	w.Helper()
	if err := m.Revoke(w.Context(), id); err != nil {
		w.Fatal(err)
	}
}

// revoked checks that a lock has ended, and why.
func (w *world) revoked(l *Lock) {
	w.Helper()
	synctest.Wait()
	if l.Err() == nil {
		w.Error("the lock goes on")
	}
	w.matches(context.Cause(l), ErrRevoked)
	w.matches(l.Downgrade(w.Context()), ErrRevoked)
	w.matches(l.UnlockContext(w.Context()), ErrRevoked)
}

// T12, promise 5: the next waiter is granted the lock in the same script, and the message ends the lock of the victim, with every
// lock that is nested in it.
func TestRevokedLockEndsAtOnceAndIsHandedOn(t *testing.T) {
	for _, turn := range []MutexOption{WithTurn(DefaultTurn), WithTurn(0)} {
		for _, kind := range []string{"writer", "reader", "downgraded"} {
			inBubble(t, func(w *world) {
				m, other := NewMutex(w.client(nil), "x", turn), NewMutex(w.client(nil), "x", turn)
				l := w.lock(m, kind != "reader")
				if kind == "downgraded" {
					w.downgrade(l)
				}
				redistest.Elapse(DefaultTTL) // it listens since its first renewal
				inner, err := m.RLockContext(l)
				if err != nil {
					w.Fatal(err)
				}
				next := w.later(other, true)
				w.pending(next)
				start := time.Now()
				w.revoke(other, l.ID())
				w.revoked(l)
				w.revoked(inner)
				got := w.granted(next, "the next one")
				if took := time.Since(start); took != 0 {
					w.Errorf("%s: it took %v", kind, took)
				}
				// Its id is revoked, and no other holder.
				w.revoke(other, l.ID())
				if redistest.Elapse(time.Minute); got.Err() != nil {
					w.Errorf("the next holder was revoked: %v", context.Cause(got))
				}
				w.unlock(got)
				w.unlock(w.lock(m, true))
			})
		}
	}
}

// Without the message the victim learns of it, and why, when it renews: at half the TTL.
func TestRevocationIsLearnedAtTheNextRenewal(t *testing.T) {
	for _, write := range []bool{true, false} {
		inBubble(t, func(w *world) {
			m, other := NewMutex(w.client(nil), "x"), NewMutex(w.client(nil), "x")
			l := w.lock(m, write)
			start := time.Now()
			w.revoke(other, l.ID())
			next := w.lock(other, true)
			<-l.Done()
			if took := time.Since(start); took != DefaultTTL/2 {
				w.Errorf("it took %v, want half the TTL", took)
			}
			w.revoked(l)
			w.unlock(next)
		})
	}
}

// T12: the wait of one ends, and the queue of its process goes on.
func TestRevokedWaiterIsTheHeadOfItsQueue(t *testing.T) {
	for _, turn := range []MutexOption{WithTurn(DefaultTurn), WithTurn(0)} {
		inBubble(t, func(w *world) {
			m, other := NewMutex(w.client(nil), "x", turn), NewMutex(w.client(nil), "x", turn)
			l := w.lock(other, true)
			first := redistest.Later(func() (*Lock, error) { return m.LockContext(w.Context()) })
			synctest.Wait()
			second := w.later(m, true)
			w.pending(second)
			w.revoke(other, w.inspect(other).Waiters[0].ID)
			got := <-first
			w.matches(got.Err, ErrRevoked)
			w.pending(second)
			if s := w.inspect(other); s.Waiting != 1 {
				w.Errorf("the second one does not wait:\n%v", s)
			}
			w.unlock(l)
			w.unlock(w.granted(second, "the second one"))
		})
	}
}

// T12: an acquisition is one id, and all locks under it end.
func TestRevokedIDEndsEveryLockUnderIt(t *testing.T) {
	inBubble(t, func(w *world) {
		m, other := NewMutex(w.client(nil), "x", WithTurn(time.Second)), NewMutex(w.client(nil), "x")
		var readers []*Lock
		for range 3 {
			readers = append(readers, w.lock(m, false))
		}
		for _, l := range readers {
			if l.ID() != readers[0].ID() {
				w.Fatal("the readers do not share an acquisition")
			}
		}
		redistest.Elapse(DefaultTTL)
		w.revoke(other, readers[0].ID())
		for _, l := range readers {
			w.revoked(l)
		}
		w.unlock(w.lock(m, true)) // the queue goes on
	})
}

// Promise 10: an id that is not there is an error, and nobody else suffers.
func TestRevokeOfAnIDThatIsNotThereIsAnError(t *testing.T) {
	inBubble(t, func(w *world) {
		m, other := NewMutex(w.client(nil), "x"), NewMutex(w.client(w.link), "x")
		l := w.lock(m, true)
		gone := w.lock(NewMutex(w.client(nil), "y"), true)
		for id, want := range map[string]error{
			gone.ID(): ErrNoSuchID, l.ID() + "0": ErrNoSuchID, "redismutex:a/1/b.1:1000": ErrNoSuchID,
			"": ErrInvalid, "x": ErrInvalid, ":1": ErrInvalid, "x:": ErrInvalid, "x:y": ErrInvalid,
		} {
			w.matches(other.Revoke(w.Context(), id), want)
		}
		w.matches(other.Revoke(w.Context(), l.ID(), WithOwner("me")), ErrInvalid)
		w.link.Refuse(true)
		w.link.Cut()
		w.matches(other.Revoke(w.Context(), l.ID()), ErrRedis)
		if redistest.Elapse(time.Minute); l.Err() != nil {
			w.Errorf("the holder has lost its lock: %v", context.Cause(l))
		}
		w.unlock(l)
		w.unlock(gone)
		_, _ = w.Redis.Push("x", "somebody's")
		w.matches(m.Revoke(w.Context(), l.ID()), ErrNotLock)
	})
}

// One id is enough on several nodes, whatever the others are, and a node may be down. The victim is cut off, as if it were
// stopped: it has no part in that.
func TestRevokeOnSeveralNodesFindsAllIDs(t *testing.T) {
	for _, write := range []bool{true, false} {
		onNodes(t, 3, func(ns *nodes) {
			other := ns.mutex()
			var victim []redis.Scripter
			var links []*faultnet.Link
			for i, m := range ns.minis {
				link := faultnet.New(m.Dial)
				links, victim = append(links, link), append(victim, redistest.MiniClient(ns, m, redistest.Through(link), func(o *redis.Options) {
					o.Addr = fmt.Sprintf("10.1.0.%d:6379", i+1)
				}))
			}
			l := ns.lock(NewRedlock(victim, "x"), write)
			synctest.Wait() // it has the third node, too
			for _, link := range links {
				link.Hole(true, true)
			}
			if node.AcquisitionOf(ns.inspect(other).Holders[0].ID) != node.AcquisitionOf(l.ID()) {
				ns.Error("the holder is another one")
			}
			next := ns.later(other, true)
			ns.pending(next)
			ns.links[2].Refuse(true)
			ns.links[2].Cut()
			id := ns.inspect(other).Nodes[1].Holders[0].ID // not the one by which the lock is known
			ns.revoke(other, id)
			got := ns.granted(next, "the next one")
			if ns.links[2].Refuse(false); l.Err() != nil {
				ns.Error("the victim took part")
			}
			for _, link := range links {
				link.Hole(false, false)
				link.Cut()
			}
			<-l.Done()
			ns.matchesEnd(context.Cause(l))
			ns.unlock(got)
			ns.matches(other.Revoke(ns.Context(), "redismutex:a/1/b.1:1000"), ErrNoSuchID)
			redistest.Elapse(time.Second)
			for _, i := range []int{0, 1} {
				ns.links[i].Refuse(true)
				ns.links[i].Cut()
			}
			ns.matches(other.Revoke(ns.Context(), id), ErrRedis)
		})
	}
}

// A revocation races with everything that may become of a lock. Tokens rise, nobody is stuck, and nothing is left.
func TestRevokeRacesWithEverything(t *testing.T) {
	for _, turn := range []time.Duration{0, DefaultTurn} {
		inBubble(t, func(w *world) {
			const workers, rounds = 6, 25
			random := rand.New(rand.NewPCG(1, 2))
			var mu sync.Mutex
			draw := func(n int) int {
				mu.Lock()
				defer mu.Unlock()
				return random.IntN(n)
			}
			var done, revoked atomic.Int32
			var last atomic.Uint64
			var all sync.WaitGroup
			for i := range workers {
				m := NewMutex(w.client(nil), "x", WithTurn(turn), WithTTL(time.Second))
				for range 2 {
					all.Go(func() {
						defer done.Add(1)
						for range rounds {
							ask := m.LockContext
							if (i+draw(2))%2 == 0 {
								ask = m.RLockContext
							}
							l, err := ask(w.Context())
							if err != nil {
								if !errors.Is(err, ErrRevoked) {
									w.Error(err)
								}
								continue
							}
							if token := l.Token(); token != 0 && draw(2) == 0 {
								for was := last.Load(); token > was && !last.CompareAndSwap(was, token); was = last.Load() {
								}
								redistest.Elapse(time.Duration(draw(3)) * time.Millisecond)
								_ = l.Downgrade(w.Context())
							}
							redistest.Elapse(time.Duration(draw(1500)) * time.Millisecond)
							if err := l.UnlockContext(w.Context()); err != nil && !errors.Is(err, ErrRevoked) && !errors.Is(err, ErrLockLost) {
								w.Error(err)
							}
						}
					})
				}
			}
			look := NewMutex(w.client(nil), "x", WithTTL(time.Second))
			for done.Load() < 2*workers {
				redistest.Elapse(time.Duration(draw(200)) * time.Millisecond)
				s := w.inspect(look)
				ps := append(s.Holders, s.Waiters...)
				if len(ps) == 0 {
					continue
				}
				switch err := look.Revoke(w.Context(), ps[draw(len(ps))].ID); {
				case err == nil:
					revoked.Add(1)
				case !errors.Is(err, ErrNoSuchID):
					w.Error(err)
				}
			}
			all.Wait()
			if revoked.Load() < rounds {
				w.Errorf("%d were revoked, want more", revoked.Load())
			}
			l := w.lock(look, true)
			if l.Token() <= last.Load() {
				w.Errorf("token %d after %d", l.Token(), last.Load())
			}
			w.unlock(l)
			redistest.Elapse(time.Minute)
			w.empty()
		})
	}
}

// matchesEnd checks why a lock that was revoked without its knowledge has ended: it learns that from a renewal, or not in
// time.
func (ns *nodes) matchesEnd(err error) {
	ns.Helper()
	if matches(err, ErrRevoked) != "" && matches(err, ErrLockLost) != "" {
		ns.Errorf("want ErrRevoked or ErrLockLost, got %v", err)
	}
}

// A tombstone is no participant: with it a late acquire of its id is refused.
func TestRevokeTakesNoTombstone(t *testing.T) {
	onOneAndFive(t, func(ns *nodes) {
		m := ns.mutex()
		l := ns.lock(m, true)
		synctest.Wait() // on all nodes
		ns.revoke(m, l.ID())
		ns.matches(m.Revoke(ns.Context(), "-"+l.ID()), ErrInvalid)
		for _, mini := range ns.minis {
			ids, _ := mini.ZMembers("{x}:lease")
			if len(ids) != 1 || ids[0][:2] != "-r" {
				ns.Errorf("the tombstone has gone: %q", ids)
			}
		}
	})
}

// learnsAtOnce checks that a holder of "x" hears of its revocation without a renewal.
func (w *world) learnsAtOnce(l *Lock) {
	w.Helper()
	start := time.Now()
	w.revoke(NewMutex(w.client(nil), "x"), l.ID())
	<-l.Done()
	if took := time.Since(start); took != 0 {
		w.Errorf("it learned of it after %v", took)
	}
	w.revoked(l)
}

// Downgrade renews the lease, and so puts off the next renewal: the holder listens for that much longer.
func TestHolderListensAfterDowngrades(t *testing.T) {
	inBubble(t, func(w *world) {
		l := w.lock(NewMutex(w.client(nil), "x", WithTTL(time.Minute)), true)
		redistest.Elapse(31 * time.Second) // it has been renewed
		for range 3 {
			redistest.Elapse(25 * time.Second)
			w.downgrade(l)
		}
		redistest.Elapse(20 * time.Second)
		w.learnsAtOnce(l)
	})
}

// A holder listens for as long as its TTL after each renewal, whatever others do.
func TestHolderWithALongTTLListensAfterOneWithAShortOne(t *testing.T) {
	inBubble(t, func(w *world) {
		rc := w.client(nil)
		long, short := NewMutex(rc, "x", WithTTL(time.Minute)), NewMutex(rc, "y", WithTTL(MinTTL))
		l := w.lock(long, true)
		redistest.Elapse(31 * time.Second)
		s := w.lock(short, true)
		redistest.Elapse(MinTTL)
		w.unlock(s)
		redistest.Elapse(10 * time.Second)
		w.learnsAtOnce(l)
	})
}
