package history

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

// ErrUndecided is returned by Linearizable when it ran out of time. The history may be correct or not.
var ErrUndecided = errors.New("history: not decided in time")

// Linearizable checks that each acquire can be placed at one instant between Asked and Got, each release between the end
// of the lock and Freed, and each refused try between Asked and Ended, so that all fit the model: a read-write lock whose
// tokens rise, and that refuses a try only while it is held. This is stronger than Exclusion and Tokens: for each refused
// try there must be a holder.
//
// An acquire whose outcome is unknown may have taken effect at any time after Asked, and may have been released at any
// time or never. A lock without Freed may have been released at any time after its end or never. Either explains every
// try that is refused meanwhile, so set Freed to limit it.
//
// It searches for as long as the timeout, or without limit if that is 0, and then returns ErrUndecided. Inside a
// testing/synctest bubble no time passes while it runs, so there is no limit.
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

// WithGivenUp adds to ops, for Linearizable, an acquire of unknown outcome for each lock that was waited for so long that
// its id may have been given up: a waiter that is not answered for a TTL acquires under another id, and the first one may
// have been granted meanwhile. The argument of ttl is an index in ops.
func WithGivenUp(ops []Op, ttl func(i int) time.Duration) []Op {
	all := slices.Clone(ops)
	for i, o := range ops {
		ttl := int64(ttl(i))
		if o.Got == 0 || o.Try || o.Got-o.Asked < ttl/2 {
			continue
		}
		givenUp := Op{ID: o.ID, Client: o.Client, Key: o.Key, Kind: o.Kind, Asked: o.Asked, Ended: o.Got, Freed: o.Got, Err: "an id given up"}
		if !o.writes() {
			givenUp.Freed += ttl // both ids may be granted
		}
		all = append(all, givenUp)
	}
	return all
}

// A call is one operation of the server.
type call struct {
	verb verb
	op   *Op
	n    int // the number of the interval; -1 for a refused try
}

type verb string

const (
	acquire verb = "acquire"
	release verb = "release"
	refuse  verb = "refuse"
)

// A state is the state of the lock at the server. It is never changed in place.
type state struct {
	holders []call // the acquires of the holders, by number
	token   uint64 // the last token
}

// step is the specification of the lock: it reports whether c is possible in s, and returns the state after it.
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
	// It suffices to check one holder: a writer holds the lock alone.
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

// calls returns the calls on one key that the model has to explain, by the time at which they may begin.
//
// The search is exponential in the number of concurrent calls, and under contention there are always some. But acquiring
// a lock later or releasing it earlier conflicts with no other lock; only a refused try may need the longer interval, and
// most tries are explained by a lock that was certainly held. So calls leaves out those tries and narrows the others
// where that makes no difference, and most calls shrink to an instant.
func calls(group []*Op) []porcupine.Operation {
	hs := heldIntervals(group)
	tries := unexplained(group, hs)
	var begins, ends [2][]int64 // of all locks, and of the write locks, in order
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

		// It was acquired after the last conflicting lock had ended, and not before the next try that needs it.
		from := h.Asked
		if i, _ := slices.BinarySearch(ends[conflicting], h.from); i > 0 {
			from = max(from, ends[conflicting][i-1])
		}
		from = max(from, tries.first(from))
		add(call{acquire, h.Op, n}, min(from, h.from), h.from)
		if h.to == math.MaxInt64 {
			continue
		}

		// It was released before the next conflicting lock was got, and not after the last try that needs it. If that
		// time is unknown, unexplained has already left out the tries.
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

// unexplained returns the refused tries that no certain lock explains, and no operation of unknown outcome. Such an
// operation explains any try by itself: it could have acquired the lock just before.
func unexplained(group []*Op, hs []interval) spans {
	causes := slices.Clone(hs)
	for _, o := range group {
		_, from, ok := o.Held()
		if !ok {
			from = o.Asked
		}
		switch to := o.Freed; {
		case o.Refused || ok && to != 0:
			// It held the lock only in the known interval.
		case to != 0:
			causes = append(causes, interval{o, from, to})
		default:
			causes = append(causes, interval{o, from, math.MaxInt64})
		}
	}
	explained := newSpans(causes)
	var tries []interval
	for _, o := range group {
		if o.Refused && explained.last(o.Ended) < o.Asked {
			tries = append(tries, interval{o, o.Asked, o.Ended})
		}
	}
	return newSpans(tries)
}

// spans are intervals that can be searched by both ends.
type spans struct {
	windows []interval // by the time at which they begin
	reach   []int64    // the latest end up to this one
}

func newSpans(windows []interval) spans {
	slices.SortStableFunc(windows, func(a, b interval) int { return cmp.Compare(a.from, b.from) })
	s := spans{windows, make([]int64, len(windows))}
	var to int64
	for i, w := range windows {
		to = max(to, w.to)
		s.reach[i] = to
	}
	return s
}

// first returns when the first interval begins that ends at t or later.
func (s spans) first(t int64) int64 {
	i, _ := slices.BinarySearch(s.reach, t)
	if i == len(s.windows) {
		return math.MaxInt64
	}
	return s.windows[i].from
}

// last returns the latest end of the intervals that begin at t or before.
func (s spans) last(t int64) int64 {
	i := sort.Search(len(s.windows), func(i int) bool { return s.windows[i].from > t })
	if i == 0 {
		return math.MinInt64
	}
	return s.reach[i-1]
}

// enough is the least number of calls in a chunk. A search needs memory in the square of its length, and some time to set
// up.
const enough = 64

// chunks cuts the calls on a key at times at which none is in progress, and yields each chunk with the state before it.
// That state is certain: the locks that were acquired and not released are held.
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

// explain describes the longest order that the search has found, and the calls that do not fit after it.
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
	due := int64(math.MaxInt64) // one of the rest must take effect by then
	for _, o := range rest {
		due = min(due, o.Return)
	}

	var b strings.Builder
	fmt.Fprintf(&b, ". The longest order leads, by %v, to token %d and these holders:", clock(due), now.token)
	for _, h := range now.holders {
		b.WriteString(lines(h.op))
	}
	b.WriteString("\nand none of these calls can come next:")
	for _, o := range rest {
		if c := o.Input.(call); o.Call <= due {
			fmt.Fprintf(&b, "\n\t%s: %v", c.verb, c.op)
		}
	}
	return b.String()
}
