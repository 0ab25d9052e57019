package redismutex

// What a Trace is told, and that it harms no lock. Time is virtual.

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redismutex/redismutex/internal/redistest"
)

// A story is what a Trace was told, in words.
type story struct {
	mu     sync.Mutex
	events []string
	Trace
}

func newStory() *story {
	s := new(story)
	s.Waiting = func(e TraceWaiting) { s.add("%s waits, local %v", e.TraceCall, e.Local) }
	s.Granted = func(e TraceGranted) {
		s.add("%s granted by %v after %v", e.TraceCall, e.By, e.Time.Sub(e.Began).Round(time.Millisecond))
	}
	s.Failed = func(e TraceFailed) { s.add("%s failed: %v", e.TraceCall, e.Err) }
	s.Renewed = func(e TraceRenewed) { s.add("%s renewed, %v left", e.Key, e.Margin.Round(time.Millisecond)) }
	s.RenewFailed = func(e TraceRenewFailed) { s.add("%s renewal failed, %v left", e.Key, e.Margin.Round(time.Millisecond)) }
	s.Ended = func(e TraceEnded) {
		s.add("%s ended after %v: %v", e.TraceCall, e.Time.Sub(e.Granted).Round(time.Millisecond), e.Cause)
	}
	s.NodeDown = func(e TraceNode) { s.add("%s down: %v", e.Node, e.Err != nil) }
	s.NodeUp = func(e TraceNode) { s.add("%s up: %v", e.Node, e.Err == nil) }
	s.Dropped = func(n int) { s.add("%d dropped", n) }
	return s
}

func (c TraceCall) String() string {
	how := map[bool]string{true: "writer", false: "reader"}[c.Write]
	if c.Try {
		how = "trying " + how
	}
	return c.Key + ": " + how
}

func (s *story) add(format string, v ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events = append(s.events, fmt.Sprintf(format, v...))
}

// told checks that these events, and no others, were told since the last call.
func (s *story) told(t testing.TB, want ...string) {
	t.Helper()
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if got := strings.Join(s.events, "\n"); got != strings.Join(want, "\n") {
		t.Errorf("got:\n%s\nwant:\n%s", got, strings.Join(want, "\n"))
	}
	s.events = nil
}

func TestTraceTellsWhatBecomesOfALock(t *testing.T) {
	inBubble(t, func(w *world) {
		ctx, s := w.Context(), newStory()
		rc := w.client(nil)
		m := NewMutex(rc, "x", WithTrace(&s.Trace))
		strict := NewMutex(rc, "x", WithTrace(&s.Trace), WithTurn(0))
		other := NewMutex(w.client(nil), "x")

		l := w.lock(m, true)
		s.told(t, "x: writer granted by reply after 0s")
		w.unlock(w.nested(l, m, false))
		s.told(t)
		next := w.later(m, false)
		s.told(t, "x: reader waits, local true")
		redistest.Elapse(time.Millisecond)
		w.unlock(l)
		s.told(t, "x: writer ended after 1ms: "+ErrUnlocked.Error(), "x: reader granted by turn after 1ms")
		redistest.Elapse(DefaultTTL)
		s.told(t, "x renewed, 3.953s left", // as a reader, when the turn is over
			"x renewed, 1.963s left", "x renewed, 1.958s left")
		w.unlock(<-next)
		s.told(t, "x: reader ended after 4s: "+ErrUnlocked.Error())

		for _, m := range []*RWMutex{m, strict} {
			holder := w.lock(other, true)
			next = w.later(m, true)
			s.told(t, "x: writer waits, local false")
			redistest.Elapse(100 * time.Millisecond)
			w.unlock(holder)
			l = <-next
			s.told(t, "x: writer granted by message after 100ms")
			w.unlock(l)
			s.told(t, "x: writer ended after 0s: "+ErrUnlocked.Error())
		}

		holder := w.lock(other, true)
		_, err := m.TryLockContext(ctx)
		s.told(t, "x: trying writer failed: "+err.Error())
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err = m.RLockContext(short)
		s.told(t, "x: reader waits, local false", "x: reader failed: "+err.Error())
		w.unlock(holder)

		l = w.lock(m, true)
		s.told(t, "x: writer granted by reply after 0s")
		w.Redis.FlushAll()
		w.lost(l)
		s.told(t, "x: writer ended after 2s: "+context.Cause(l).Error())
	})
}

func TestTraceTellsOfRenewalsThatFail(t *testing.T) {
	inBubble(t, func(w *world) {
		s := newStory()
		l := w.lock(NewMutex(w.client(w.link), "x", WithTrace(&s.Trace)), true)
		w.link.Refuse(true)
		w.link.Cut()
		<-l.Done()
		synctest.Wait()
		s.mu.Lock()
		defer s.mu.Unlock()
		last := len(s.events) - 1
		if last < 2 || !strings.HasPrefix(s.events[1], "x renewal failed, ") || !strings.HasPrefix(s.events[last], "x: writer ended after 3.958s: "+ErrLockLost.Error()) {
			t.Errorf("got %q", s.events)
		}
	})
}

func TestTraceTellsOfNodesAndRanks(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		s, rank := newStory(), int64(0)
		granted := s.Granted
		s.Granted = func(e TraceGranted) { rank = e.Rank; granted(e) }
		m := ns.mutex(WithTrace(&s.Trace))
		before := time.Now().UnixMicro()
		holder := ns.lock(m, true)
		s.told(t, "x: writer granted by reply after 0s")
		if rank < before {
			t.Errorf("rank %d, want %d or more", rank, before)
		}
		next := ns.later(ns.mutex(WithTrace(&s.Trace)), true)
		s.told(t, "x: writer waits, local false")
		ns.unlock(holder)
		l := <-next
		s.told(t, "x: writer ended after 0s: "+ErrUnlocked.Error(), "x: writer granted by message after 0s")
		ns.unlock(l)
		s.told(t, "x: writer ended after 0s: "+ErrUnlocked.Error())
	})
}

func TestTraceTellsOfNodesThatAreDownAndUp(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		s := &Trace{}
		var events []string
		s.NodeDown = func(e TraceNode) { events = append(events, fmt.Sprintf("%s is down: %v", e.Node, e.Err != nil)) }
		s.NodeUp = func(e TraceNode) { events = append(events, fmt.Sprintf("%s is up: %v", e.Node, e.Err == nil)) }
		m := ns.mutex(WithTrace(s))
		l := ns.lock(m, true)
		ns.links[1].Hole(true, true)
		redistest.Elapse(2 * DefaultTTL)
		heal(ns.links[1])
		redistest.Elapse(2 * DefaultTTL)
		ns.unlock(l)
		synctest.Wait()
		if len(events) != 2 || !strings.HasPrefix(events[0], "node 2") || !strings.HasSuffix(events[0], " is down: true") ||
			!strings.HasPrefix(events[1], "node 2") || !strings.HasSuffix(events[1], " is up: true") {
			t.Errorf("got %q, want node 2 down and up", events)
		}
	})
}

// A call with WithWait is one call, although it tries again when its time is over. A lock that is revoked has ended.
func TestTraceTellsOfBoundedWaitsAndOfRevocations(t *testing.T) {
	inBubble(t, func(w *world) {
		s := newStory()
		m, other := NewMutex(w.client(nil), "x", WithTrace(&s.Trace)), NewMutex(w.client(nil), "x")
		holder := w.lock(other, true)
		_, err := m.LockContext(w.Context(), WithWait(time.Second))
		s.told(t, "x: writer waits, local false", "x: writer failed: "+err.Error())
		w.unlock(holder)
		l := w.lock(m, true)
		if err := other.Revoke(w.Context(), l.ID()); err != nil {
			t.Fatal(err)
		}
		<-l.Done()
		s.told(t, "x: writer granted by reply after 0s", "x: writer ended after 0s: "+context.Cause(l).Error())
		if !errors.Is(context.Cause(l), ErrRevoked) {
			t.Errorf("it ended with %v, want ErrRevoked", context.Cause(l))
		}
	})
}

// A Trace hears of every lock once, in order, though the lock is lost before the call has returned it.
func TestTraceTellsTheGrantBeforeTheEnd(t *testing.T) {
	s := newStory()
	m := NewMutex(redistest.Start(t).Client(t), "x", WithTrace(&s.Trace))
	l, err := m.LockContext(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Unlock()
	call := request{m: m, ctx: l, keys: l.acquisition().Keys}.traced()
	call.endOnCancel(func(error) {})(ErrLockLost)
	call.onReturn(l, nil)
	redistest.Eventually(t, "the end is told after the grant", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.events) == 3 && strings.Contains(s.events[1], "granted") && strings.Contains(s.events[2], "ended")
	})
}

// A function that blocks delays no lock. What it misses is counted.
func TestTraceThatBlocksHarmsNoLock(t *testing.T) {
	inBubble(t, func(w *world) {
		s, block := newStory(), make(chan struct{})
		trace := &Trace{Granted: func(TraceGranted) { <-block }, Ended: func(TraceEnded) {}, Renewed: func(TraceRenewed) {}}
		dropped := 0
		trace.Dropped = func(n int) { dropped += n }
		m := NewMutex(w.client(nil), "x", WithTrace(trace))
		l := w.lock(m, true)
		redistest.Elapse(10*DefaultTTL - time.Second) // 19 renewals
		if l.Err() != nil {
			t.Errorf("it was lost: %v", context.Cause(l))
		}
		start := time.Now()
		w.unlock(l)
		for range maxTraceEvents {
			w.unlock(w.lock(m, true))
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("locks took %v while the trace was blocked, want no time", took)
		}
		close(block)
		synctest.Wait()
		// The renewals, the end of the first lock, a grant and an end of each other one; the grant that blocks is under way.
		if want := 19 + 1 + 2*maxTraceEvents - maxTraceEvents; dropped != want {
			t.Errorf("%d events dropped, want %d", dropped, want)
		}
		s.told(t)
	})
}

// A function that panics, or that locks, harms no lock, and hears of the next event.
func TestTraceMayPanicAndLock(t *testing.T) {
	inBubble(t, func(w *world) {
		log, n := new(redistest.Log), 0
		var inner *RWMutex
		trace := &Trace{Granted: func(TraceGranted) {
			w.unlock(w.lock(inner, true))
			n++
			panic("at the disco")
		}}
		m := NewMutex(w.client(nil), "x", WithTrace(trace), WithLogger(log.Logger()))
		inner = NewMutex(w.client(nil), "y")
		for range 3 {
			w.unlock(w.lock(m, true))
		}
		synctest.Wait()
		if n != 3 || log.Count("at the disco") != 3 {
			t.Errorf("%d calls, want 3, and as many lines in the log:\n%v", n, log)
		}
	})
}

func TestTraceOfAForgottenLockEnds(t *testing.T) {
	noCollector(t)
	inBubble(t, func(w *world) {
		s := newStory()
		s.Renewed = nil
		w.lock(NewMutex(w.client(nil), "x", WithTrace(&s.Trace)), true)
		collect(1)
		s.told(t, "x: writer granted by reply after 0s", "x: writer ended after 6s: "+ErrUnlocked.Error())
	})
}

func TestNilTraceIsRefused(t *testing.T) {
	_, err := NewMutex(redistest.Start(t).Client(t), "x", WithTrace(nil)).TryLockContext(context.Background())
	if !errors.Is(err, ErrInvalid) {
		t.Errorf("got %v, want ErrInvalid", err)
	}
}

func TestTraceGoesOnAfterAFunctionThatEndsItsGoroutine(t *testing.T) {
	inBubble(t, func(w *world) {
		n := 0
		m := NewMutex(w.client(nil), "x", WithTrace(&Trace{Granted: func(TraceGranted) {
			n++
			runtime.Goexit()
		}}))
		for range 3 {
			w.unlock(w.lock(m, true))
			synctest.Wait()
		}
		if n != 3 {
			w.Errorf("told of %d grants, want 3", n)
		}
	})
}
