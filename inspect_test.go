package redismutex

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
)

func (w *world) inspect(m *RWMutex, opt ...LockOption) *State {
	w.Helper()
	s, err := m.Inspect(w.Context(), opt...)
	if err != nil {
		w.Fatal(err)
	}
	return s
}

// is checks a state: its mode, its holders and its waiters, as "w <id>" and "r <id>".
func (w *world) is(s *State, mode Mode, holders, waiters string) {
	w.Helper()
	list := func(ps []Participant) string {
		var all []string
		for _, p := range ps {
			kind := "r "
			if p.Write {
				kind = "w "
			}
			all = append(all, kind+p.ID)
			if p.Process != node.ProcessOf(p.ID) || p.Process == "" || p.Lease <= 0 || p.Lease > DefaultTTL {
				w.Errorf("%+v: want its process, and a lease of up to %v", p, DefaultTTL)
			}
		}
		return strings.Join(all, ", ")
	}
	if got := list(s.Holders); s.Mode != mode || got != holders || s.Holding != len(s.Holders) {
		w.Errorf("want %v by %q, got %v by %q, %d in all", mode, holders, s.Mode, got, s.Holding)
	}
	if got := list(s.Waiters); got != waiters || s.Waiting != len(s.Waiters) {
		w.Errorf("want %q waiting, got %q, %d in all", waiters, got, s.Waiting)
	}
}

// waiting returns the waiters of the queue in Redis, in order, as is takes them.
func (w *world) waiting() string {
	queue := w.queue()
	members := slices.SortedFunc(maps.Keys(queue), func(a, b string) int { return int(queue[a] - queue[b]) })
	for i, m := range members {
		members[i] = m[:1] + " " + m[1:]
	}
	return strings.Join(members, ", ")
}

// A state has the holders and the waiters, in order, each with its process and how long it has waited.
func TestInspectShowsHoldersAndWaitersInOrder(t *testing.T) {
	inBubble(t, func(w *world) {
		process := func() *RWMutex { return NewMutex(w.client(nil), "x") }
		look := process()
		w.is(w.inspect(look), Free, "", "")
		l := w.lock(process(), true)
		token := l.Token()
		var waiters []<-chan *Lock
		for i := range 3 {
			waiters = append(waiters, w.later(process(), i == 1))
			synctest.Wait()
			redistest.Elapse(time.Second)
		}
		redistest.Elapse(time.Millisecond) // some renewals were due a moment ago
		synctest.Wait()
		before := w.Redis.Dump()
		s := w.inspect(look)
		if after := w.Redis.Dump(); after != before {
			w.Errorf("inspecting has changed\n%s into\n%s", before, after)
		}
		w.is(s, Writing, "w "+l.ID(), w.waiting())
		for i, p := range s.Waiters {
			if want := time.Duration(3-i) * time.Second; p.Waited < want || p.Waited > want+10*time.Millisecond {
				w.Errorf("waiter %d has waited %v, want %v", i, p.Waited, want)
			}
		}
		if s.Key != "x" || s.Token != token {
			w.Errorf("want the token %d of %q, got %d of %q", token, "x", s.Token, s.Key)
		}
		for _, want := range []string{"x", "held for writing", "3 waiting", l.ID(), s.Waiters[2].ID, "3.001s", s.Holders[0].Process} {
			if !strings.Contains(s.String(), want) {
				w.Errorf("the table has no %q:\n%v", want, s)
			}
		}
		w.unlock(l)
		r := <-waiters[0]
		s = w.inspect(look)
		w.is(s, Reading, "r "+r.ID(), w.waiting())
		if s.Waiting != 2 || s.Token != token { // the writer, and the reader behind it
			w.Errorf("%d wait, token %d", s.Waiting, s.Token)
		}
		w.unlock(r)
		w.unlock(<-waiters[1])
		w.unlock(<-waiters[2])
		w.is(w.inspect(look), Free, "", "")
		w.is(w.inspect(look, WithKey("7")), Free, "", "")
	})
}

func TestInspectTakesNoOtherOption(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		for _, opt := range []LockOption{WithOwner("me"), WithWait(0), WithContext(w.Context()), nil} {
			s, err := m.Inspect(w.Context(), opt)
			if w.matches(err, ErrInvalid); s != nil {
				w.Error("there is a state")
			}
		}
		ctx, cancel := context.WithCancel(w.Context())
		cancel()
		_, err := m.Inspect(ctx)
		w.matches(err, context.Canceled)
	})
}

// Promise 10: foreign data and a Redis that is out of reach are parts of the state, and errors.
func TestInspectTellsWhyItSeesNothing(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(w.link), "x")
		_, _ = w.Redis.Push("x", "somebody's")
		s, err := m.Inspect(w.Context())
		w.matches(err, ErrNotLock)
		w.matches(s.Nodes[0].Err, ErrNotLock)
		if s.Mode != Unknown {
			w.Errorf("mode %v", s.Mode)
		}
		w.link.Refuse(true)
		w.link.Cut()
		s, err = m.Inspect(w.Context())
		if w.matches(err, ErrRedis); s == nil || s.Mode != Unknown {
			w.Errorf("state %v", s)
		}
		ctx, cancel := context.WithTimeout(w.Context(), 10*time.Millisecond)
		defer cancel()
		w.link.Refuse(false)
		w.link.Hole(true, true)
		_, err = m.Inspect(ctx)
		w.matches(err, context.DeadlineExceeded)
	})
}

// With several nodes a majority decides, and the state has what each node says.
func TestInspectOfSeveralNodesShowsWhatTheMajoritySays(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		look := ns.mutex()
		ns.is(ns.inspect(look), Free, "", "")
		l := ns.lock(ns.mutex(), true)
		synctest.Wait() // it has the third node, too
		next := ns.later(ns.mutex(), true)
		synctest.Wait()
		s := ns.inspect(look)
		if ns.is(s, Writing, "w "+l.ID(), "w "+s.Nodes[0].Waiters[0].ID); s.Token != l.Token() {
			ns.Errorf("token %d, want %d", s.Token, l.Token())
		}
		// A node that is out of reach, and one with foreign data, are parts of the state.
		ns.links[2].Refuse(true)
		ns.links[2].Cut()
		s = ns.inspect(look)
		ns.is(s, Writing, "w "+l.ID(), "w "+s.Nodes[0].Waiters[0].ID)
		ns.matches(s.Nodes[2].Err, ErrRedis)
		if text := s.String(); !strings.Contains(text, "node 3 (10.0.0.3:6379): redismutex: redis failed") || !strings.Contains(text, "node 1 (10.0.0.1:6379): held for writing, 1 holding, 1 waiting") {
			ns.Errorf("the table does not say what each node says:\n%s", text)
		}
		ns.links[2].Refuse(false)
		redistest.Elapse(DefaultTTL)
		ns.unlock(l)
		ns.unlock(<-next)
		redistest.Elapse(time.Second)

		// Held on one node alone, and on each by another.
		process := ns.process()
		alone := ns.lock(NewMutex(process[1], "x"), true)
		s = ns.inspect(look)
		ns.is(s, Free, "", "")
		if s.Nodes[1].Mode != Writing || s.Nodes[1].Holders[0].ID != alone.ID() {
			ns.Errorf("node 2: %+v", s.Nodes[1])
		}
		other := ns.lock(NewMutex(process[0], "x"), false)
		ns.is(ns.inspect(look), Split, "", "")
		ns.unlock(alone)
		ns.unlock(other)

		_, _ = ns.minis[0].Push("x", "somebody's")
		s = ns.inspect(look)
		ns.is(s, Free, "", "")
		ns.matches(s.Nodes[0].Err, ErrNotLock)
		_, _ = ns.minis[1].Push("x", "somebody's")
		s, err := look.Inspect(ns.Context())
		if ns.matches(err, ErrNotLock); s.Mode != Unknown {
			ns.Errorf("mode %v", s.Mode)
		}
		for i := range 2 {
			ns.minis[i].Del("x")
			ns.links[i].Hole(true, true)
		}
		start := time.Now()
		_, err = look.Inspect(ns.Context())
		if ns.matches(err, ErrRedis); time.Since(start) > 2*look.config.Timeout {
			ns.Errorf("it took %v", time.Since(start))
		}
	})
}

func ExampleState() {
	s := &State{
		Key: "stock", Mode: Writing, Holding: 1, Waiting: 1, Token: 1795313700000000000,
		Holders: []Participant{{ID: "redismutex:web-7/4711/kevfwogxp65ib.1:1000", Process: "web-7/4711", Write: true, Lease: 3100 * time.Millisecond}},
		Waiters: []Participant{{ID: "redismutex:web-9/12/ds3kmvfyqw2ae.1:8001", Process: "web-9/12", Lease: 2700 * time.Millisecond, Waited: 12345 * time.Millisecond}},
	}
	fmt.Print(strings.ReplaceAll(s.String(), "  \n", "\n"))
	// Output:
	// "stock": held for writing, 1 waiting, last token 1795313700000000000
	//        for      process     lease left  waited   id
	// holds  writing  web-7/4711  3.1s                 redismutex:web-7/4711/kevfwogxp65ib.1:1000
	// waits  reading  web-9/12    2.7s        12.345s  redismutex:web-9/12/ds3kmvfyqw2ae.1:8001
}

// An acquisition that has two ids on one node, because it gave one up a moment ago, does not hold a majority by that.
func TestTwoIDsOnOneNodeAreNoMajority(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		m := ns.mutex()
		l := ns.lock(m, false)
		synctest.Wait() // on all nodes
		for _, mini := range ns.minis[1:] {
			mini.FlushAll()
		}
		first, at := l.ID(), time.Now().Add(DefaultTTL)
		second := first[:len(first)-1] + "7"
		ns.minis[0].SAdd("x", second)
		ns.minis[0].ZAdd("{x}:lease", float64(at.UnixMilli()), second)
		if s := ns.inspect(m); s.Mode == Reading || len(s.Holders) > 0 {
			ns.Errorf("one node of three makes a holder:\n%v", s)
		}
		_ = l.UnlockContext(ns.Context())
	})
}
