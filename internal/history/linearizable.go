package history

// This file answers: is there an order of events at the server that explains what all clients saw?

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// ErrUndecided is returned by Linearizable when it ran out of time. The history may be right or wrong.
var ErrUndecided = errors.New("history: not decided in time")

// Linearizable asks whether each acquire can be put at one instant between Asked and Got, each release between the
// end of the hold and Freed, and each refused try between Asked and Ended, so that all fit the model: a read-write
// lock whose tokens rise, and that refuses a try only while somebody holds it. So it says more than Exclusion and
// Tokens do: each refused try must have somebody to blame.
//
// An acquire of which nobody knows how it ended may have taken effect at any time after Asked, and been released at
// any time, or never. A hold that was never freed for certain may have been released at any time after its end, or
// never. Such a one may be to blame for every try that is refused in the meantime: set Freed to bound it.
//
// It searches for no longer than the timeout, 0 being none, and then returns ErrUndecided. Inside a testing/synctest
// bubble time does not pass while it runs, and there is no limit.
func Linearizable(ops []Op, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	for name, group := range groups(ops, key) {
		for before, chunk := range chunks(calls(group), enough) {
			left := time.Duration(0) // no limit
			if timeout != 0 {
				left = max(time.Until(deadline), 1)
			}
			switch porcupine.CheckOperationsTimeout(model(before), chunk, left) {
			case porcupine.Unknown:
				return fmt.Errorf("%w: %q from %v on", ErrUndecided, name, clock(chunk[0].Call))
			case porcupine.Illegal:
				return fmt.Errorf("history: no order explains what was seen of %q%s", name, explain(before, chunk, left))
			}
		}
	}
	return nil
}

// A call is what the server is asked to do.
type call struct {
	verb verb
	op   *Op
	n    int // the number of the hold
}

type verb string

const (
	acquire verb = "acquire"
	release verb = "release"
	refuse  verb = "refuse"
)

// A state is that of the lock at the server. Nobody changes it in place.
type state struct {
	holders []call // what they acquired it with, by number
	token   uint64 // the last one
}

// step is the lock that all are compared with.
func (s state) step(c call) (bool, state) {
	switch c.verb {
	case refuse:
		return len(s.holders) > 0, s
	case release:
		i, ok := s.find(c)
		if ok {
			s.holders = slices.Delete(slices.Clone(s.holders), i, i+1)
		}
		return ok, s
	}
	// If one conflicts all do: a writer is alone.
	if len(s.holders) > 0 && c.op.conflicts(s.holders[0].op) || c.op.Token != 0 && c.op.Token <= s.token {
		return false, s
	}
	i, _ := s.find(c)
	s.holders = slices.Insert(slices.Clone(s.holders), i, c)
	s.token = max(s.token, c.op.Token)
	return true, s
}

func (s state) find(c call) (int, bool) {
	return slices.BinarySearchFunc(s.holders, c.n, func(h call, n int) int { return cmp.Compare(h.n, n) })
}

func (s state) equal(t state) bool { return s.token == t.token && slices.Equal(s.holders, t.holders) }

func model(before state) porcupine.Model {
	return porcupine.Model{
		Init:  func() any { return before },
		Step:  func(s, in, _ any) (bool, any) { return s.(state).step(in.(call)) },
		Equal: func(s, t any) bool { return s.(state).equal(t.(state)) },
	}
}

// calls are what the model has to explain of one key, by the time at which they may begin.
//
// The search is exponential in how many calls are under way at once, and under contention somebody always is. But a
// lock that is acquired later, or released earlier, is in nobody's way: only a refused try can need it. And most of
// these have a hold to blame that is certain. So all that is left out or narrowed down here is what makes no
// difference, and mostly each call shrinks to an instant.
func calls(group []*Op) []porcupine.Operation {
	hs := holds(group)
	tries := unexplained(group, hs)
	var begins, ends [2][]int64 // of all holds, and of those to write, in order
	for _, h := range hs {
		begins[0], ends[0] = append(begins[0], h.from), append(ends[0], h.to)
		if h.writes() {
			begins[1], ends[1] = append(begins[1], h.from), append(ends[1], h.to)
		}
	}
	slices.Sort(ends[0])
	slices.Sort(ends[1])

	var calls []porcupine.Operation
	add := func(c call, from, to int64) {
		calls = append(calls, porcupine.Operation{Input: c, Call: from, Return: to})
	}
	for n, h := range hs {
		conflicting := 1
		if h.writes() {
			conflicting = 0
		}

		// It was acquired after the last that conflicts had ended, and need not have been before a try begins.
		from := h.Asked
		if i, _ := slices.BinarySearch(ends[conflicting], h.from); i > 0 {
			from = max(from, ends[conflicting][i-1])
		}
		from = max(from, tries.first(from))
		add(call{acquire, h.Op, n}, min(from, h.from), h.from)
		if h.to == math.MaxInt64 {
			continue
		}

		// It was released before the next that conflicts was got, and need not have been kept once a try has ended.
		// Where nobody knows when, all the tries that need it are taken to be explained.
		to := max(h.to, h.Freed)
		if i, _ := slices.BinarySearch(begins[conflicting], h.to+1); i < len(begins[conflicting]) {
			to = min(to, begins[conflicting][i])
		}
		to = min(to, tries.last(to))
		add(call{release, h.Op, n}, h.to, max(to, h.to))
	}
	for _, try := range tries.windows {
		add(call{refuse, try.Op, -1}, try.from, try.to)
	}
	slices.SortStableFunc(calls, func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) })
	return calls
}

// unexplained are the refused tries for which no hold is to blame for certain, and none that is in doubt. One in
// doubt explains any try on its own: if nobody else holds it, it could have been acquired just before the try.
func unexplained(group []*Op, hs []hold) spans {
	blame := slices.Clone(hs)
	for _, o := range group {
		_, from, ok := o.Hold()
		if !ok {
			from = o.Asked
		}
		switch to := o.Freed; {
		case o.Refused || ok && to != 0:
			// It holds nothing more than is known.
		case to != 0:
			blame = append(blame, hold{o, from, to})
		default:
			blame = append(blame, hold{o, from, math.MaxInt64})
		}
	}
	explained := newSpans(blame)
	var tries []hold
	for _, o := range group {
		if o.Refused && explained.last(o.Ended) < o.Asked {
			tries = append(tries, hold{o, o.Asked, o.Ended})
		}
	}
	return newSpans(tries)
}

// spans are windows of time, searched by both ends.
type spans struct {
	windows []hold  // by the time at which they begin
	reach   []int64 // how far those up to this one go
}

func newSpans(windows []hold) spans {
	slices.SortStableFunc(windows, func(a, b hold) int { return cmp.Compare(a.from, b.from) })
	s := spans{windows, make([]int64, len(windows))}
	var to int64
	for i, w := range windows {
		to = max(to, w.to)
		s.reach[i] = to
	}
	return s
}

// first is when the first one begins that has not ended before t.
func (s spans) first(t int64) int64 {
	i, _ := slices.BinarySearch(s.reach, t)
	if i == len(s.windows) {
		return math.MaxInt64
	}
	return s.windows[i].from
}

// last is when the last one ends that has begun by t.
func (s spans) last(t int64) int64 {
	i := sort.Search(len(s.windows), func(i int) bool { return s.windows[i].from > t })
	if i == 0 {
		return math.MinInt64
	}
	return s.reach[i-1]
}

// enough is how many calls make a chunk: to search one takes memory in the square of its length, and some time to
// set up.
const enough = 64

// chunks cuts the calls of a key where none is under way, and says in which state the lock is there. That is
// certain: what was acquired and not released holds.
func chunks(calls []porcupine.Operation, enough int) iter.Seq2[state, []porcupine.Operation] {
	return func(yield func(state, []porcupine.Operation) bool) {
		var before state
		holders, token := map[int]call{}, uint64(0)
		begin, busy := 0, int64(0)
		for i, o := range calls {
			if o.Call > busy && i-begin >= enough {
				if !yield(before, calls[begin:i]) {
					return
				}
				begin, before = i, state{token: token}
				for _, n := range slices.Sorted(maps.Keys(holders)) {
					before.holders = append(before.holders, holders[n])
				}
			}
			busy = max(busy, o.Return)
			switch c := o.Input.(call); c.verb {
			case acquire:
				holders[c.n], token = c, max(token, c.op.Token)
			case release:
				delete(holders, c.n)
			}
		}
		if begin < len(calls) {
			yield(before, calls[begin:])
		}
	}
}

// explain says how far the longest order goes, and what does not fit then.
func explain(before state, chunk []porcupine.Operation, timeout time.Duration) string {
	_, info := porcupine.CheckOperationsVerbose(model(before), chunk, timeout)
	var longest []porcupine.Operation
	for _, order := range info.PartialLinearizationsOperations()[0] {
		if len(order) > len(longest) {
			longest = order
		}
	}
	now, done := before, map[call]bool{}
	for _, o := range longest {
		done[o.Input.(call)] = true
		_, now = now.step(o.Input.(call))
	}
	rest := slices.DeleteFunc(slices.Clone(chunk), func(o porcupine.Operation) bool { return done[o.Input.(call)] })
	due := int64(math.MaxInt64) // some call must come by then
	for _, o := range rest {
		due = min(due, o.Return)
	}

	var b strings.Builder
	fmt.Fprintf(&b, ". The best leads, by %v, to token %d and these holders:", clock(due), now.token)
	for _, h := range now.holders {
		b.WriteString(lines(h.op))
	}
	b.WriteString("\nand none of these can come next:")
	for _, o := range rest {
		if c := o.Input.(call); o.Call <= due {
			fmt.Fprintf(&b, "\n\t%s: %v", c.verb, c.op)
		}
	}
	return b.String()
}
