// Package history answers: did the lock keep its promises, as its clients saw it?
//
// A [Recorder] writes down what the clients of a lock do and when, and the checks read that: [Exclusion],
// [Tokens], [Order], [Linearizable]. Nothing here knows how the lock works. A check returns the first violation
// it finds, as an error that names the operations and reads as a counterexample. It takes the operations in any
// order, those of several processes together, if their clocks are the same.
//
// Nobody is accused in doubt: where it is not known when a lock was got or freed, whatever speaks for the lock is
// taken to have happened.
package history

// This file answers: what did one client see of one lock?

import (
	"cmp"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"time"
)

// A Kind is what a lock is for.
type Kind string

const (
	Read  Kind = "read"  // shared with others that read
	Write Kind = "write" // shared with nobody
)

// An Op is one lock, from the call that asks for it until nothing is left of it. Times are nanoseconds on one
// clock for all operations; 0 stands for "never, or nobody knows".
type Op struct {
	ID     int    `json:"id"` // counts from 1 in each Recorder
	Client string `json:"client"`
	Key    string `json:"key"`
	Kind   Kind   `json:"kind"`

	// Try says that it asked for the lock now or never, and did not wait in line.
	Try bool `json:"try,omitempty"`

	// Class is the line it waits in, where a key has several: see Order.
	Class string `json:"class,omitempty"`

	Asked     int64 `json:"asked,omitempty"`     // before the call that asks for it
	Got       int64 `json:"got,omitempty"`       // after the call had returned a lock
	Unlocking int64 `json:"unlocking,omitempty"` // before Unlock was called
	Ended     int64 `json:"ended,omitempty"`     // when Done was observed or, without a lock, when the call had failed

	// Freed is when it held nothing any more for certain, and nobody waited for it: after Unlock had been
	// confirmed. Whoever knows how long a lease can last may fill it in for an operation in doubt (a process was
	// killed, a call was given up): this ends the doubt.
	Freed int64 `json:"freed,omitempty"`

	// Until is how long the lock could be trusted without another renewal, as last observed.
	Until int64 `json:"until,omitempty"`

	Token uint64 `json:"token,omitempty"` // that of a lock to write

	// Paused says that its process stood still for a while (SIGSTOP, a debugger), and may have seen the end of the
	// lock too late. The hold then ends at Until at the latest. Whoever pauses a process marks its operations.
	Paused bool `json:"paused,omitempty"`

	// Refused says that a try found the lock held by others, and left no trace.
	Refused bool `json:"refused,omitempty"`

	Err string `json:"err,omitempty"` // why it failed
}

// Hold is the time during which the client relied on the lock: from Got to the earlier of Unlocking and Ended, at
// which only one that holds at the very same instant does not overlap it. Until ends it as well if it was paused,
// or if nobody saw its end, as when its process was killed. With no end at all it goes on forever. If the lock was
// never got, ok is false.
func (o *Op) Hold() (from, to int64, ok bool) {
	if o.Got == 0 {
		return 0, 0, false
	}
	to = earlier(o.Unlocking, o.Ended)
	if o.Paused || to == 0 {
		to = earlier(to, o.Until)
	}
	if to == 0 {
		to = math.MaxInt64
	}
	return o.Got, max(o.Got, to), true
}

// earlier is the earlier of two times that may be unknown.
func earlier(a, b int64) int64 {
	if a == 0 || b == 0 {
		return a + b
	}
	return min(a, b)
}

// writes is true of everything but a reader: an operation of no kind is taken for the stricter one.
func (o *Op) writes() bool { return o.Kind != Read }

// conflicts says that the two cannot both hold.
func (o *Op) conflicts(p *Op) bool { return o.writes() || p.writes() }

// String is all that is known of it, in one line.
func (o *Op) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %q by %s (op %d)", o.Kind, o.Key, o.Client, o.ID)
	if o.Try {
		b.WriteString(", a try")
	}
	if o.Class != "" {
		b.WriteString(", class " + o.Class)
	}
	at := func(what string, t int64) {
		if t != 0 {
			fmt.Fprintf(&b, ", %s %v", what, clock(t))
		}
	}
	at("asked", o.Asked)
	at("got", o.Got)
	if o.Token != 0 {
		fmt.Fprintf(&b, ", token %d", o.Token)
	}
	at("unlocking", o.Unlocking)
	at("ended", o.Ended)
	at("freed", o.Freed)
	at("until", o.Until)
	if o.Paused {
		b.WriteString(", paused")
	}
	if o.Refused {
		b.WriteString(", refused")
	}
	if o.Err != "" {
		b.WriteString(": " + o.Err)
	}
	return b.String()
}

// clock makes a time readable.
func clock(t int64) string {
	if t == math.MaxInt64 {
		return "forever"
	}
	return time.Duration(t).String()
}

// lines puts each operation on a line of its own, below a message.
func lines(ops ...*Op) string {
	var b strings.Builder
	for _, o := range ops {
		b.WriteString("\n\t" + o.String())
	}
	return b.String()
}

// groups yields the operations that share a name, name by name, so that a check says the same each time.
func groups(ops []Op, name func(*Op) string) iter.Seq2[string, []*Op] {
	byName := map[string][]*Op{}
	var names []string
	for i := range ops {
		n := name(&ops[i])
		if byName[n] == nil {
			names = append(names, n)
		}
		byName[n] = append(byName[n], &ops[i])
	}
	slices.Sort(names)
	return func(yield func(string, []*Op) bool) {
		for _, n := range names {
			if !yield(n, byName[n]) {
				return
			}
		}
	}
}

// key is the name of the group in which operations can be in each other's way.
func key(o *Op) string { return o.Key }

// A hold is an operation that got its lock.
type hold struct {
	*Op
	from, to int64
}

// holds finds them, by the time at which they begin. Of those that begin together the shortest comes first: one
// without length is over before the others begin.
func holds(ops []*Op) []hold {
	var hs []hold
	for _, o := range ops {
		if from, to, ok := o.Hold(); ok {
			hs = append(hs, hold{o, from, to})
		}
	}
	slices.SortStableFunc(hs, func(a, b hold) int {
		return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to))
	})
	return hs
}
