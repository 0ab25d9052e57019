// Package history records what the clients of a lock observe, and checks that the lock kept its promises.
//
// A [Recorder] records what each client does and when. The checks read these records: [Exclusion], [Tokens], [Order] and
// [Linearizable]. None depends on how the lock works. A check returns the first violation that it finds, as an error that
// names the operations of the counterexample. It takes the operations in any order, and those of several processes
// together if their clocks are the same.
//
// A check reports certain violations only: if it is unknown when a lock was acquired or freed, the check assumes the time
// that keeps the promise.
package history

import (
	"cmp"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"time"
)

// A Kind is the kind of a lock.
type Kind string

const (
	Read  Kind = "read"  // shared with other read locks
	Write Kind = "write" // shared with no lock
)

// An Op is one lock, from the call that acquires it until it is freed. Times are nanoseconds on one clock for all
// operations; 0 means never or unknown.
type Op struct {
	ID     int    `json:"id"` // counts from 1 in each Recorder
	Client string `json:"client"`
	Key    string `json:"key"`
	Kind   Kind   `json:"kind"`

	// Try is set if the call was a try, which does not join the queue.
	Try bool `json:"try,omitempty"`

	// Class names the queue, if a key has several: see Order.
	Class string `json:"class,omitempty"`

	// Queue names the queue of a process, whose requests take turns; "" is a request by itself: see Turns.
	Queue string `json:"queue,omitempty"`

	Asked     int64 `json:"asked,omitempty"`     // before the call that locks
	Got       int64 `json:"got,omitempty"`       // after the call had returned a lock
	Unlocking int64 `json:"unlocking,omitempty"` // before Unlock was called
	Ended     int64 `json:"ended,omitempty"`     // when Done was observed or, without a lock, when the call had failed

	// Freed is a time at which the lock was certainly neither held nor waited for: after Unlock had been confirmed. For
	// an operation of unknown outcome (a process was killed, a call was given up) it may be set to the end of the
	// longest lease that the operation can have.
	Freed int64 `json:"freed,omitempty"`

	// Revoked is before the first call that revoked the lock, or the wait for it. From then on others may be granted the lock,
	// although its holder learns of it later. The test that revokes sets it.
	Revoked int64 `json:"revoked,omitempty"`

	// Until is how long the lock could be trusted without another renewal, as last observed.
	Until int64 `json:"until,omitempty"`

	Token uint64 `json:"token,omitempty"` // of a write lock

	// Paused is set if the process was stopped for a while (SIGSTOP, a debugger), and may have seen the end of the lock
	// too late. The lock then counts as held until Until at the latest. The test that stops a process sets it.
	Paused bool `json:"paused,omitempty"`

	// Refused is set if a try found the lock held by others.
	Refused bool `json:"refused,omitempty"`

	Err string `json:"err,omitempty"` // the error of the call

	// For the test: no check depends on them.
	Lock  string `json:"lock,omitempty"`  // the id of the lock or, of a refused try, of the lock in the way
	Cause string `json:"cause,omitempty"` // why the lock ended
}

// Held returns the time during which the client relied on the lock: from Got to the earlier of Unlocking and Ended. If the
// process was paused, or the end was not seen because the process was killed, it ends at Until at the latest. A lock that was
// revoked ends at Revoked at the latest. Without any end it lasts forever. If the lock was never granted, or not before it was
// revoked, ok is false.
func (o *Op) Held() (from, to int64, ok bool) {
	if o.Got == 0 || o.Revoked != 0 && o.Revoked <= o.Got {
		return 0, 0, false
	}
	to = Earlier(o.Unlocking, o.Ended)
	if o.Paused || to == 0 {
		to = Earlier(to, o.Until)
	}
	to = Earlier(to, o.Revoked)
	if to == 0 {
		to = math.MaxInt64
	}
	return o.Got, max(o.Got, to), true
}

// Earlier returns the earlier of two times that may be unknown.
func Earlier(a, b int64) int64 {
	if a == 0 || b == 0 {
		return a + b
	}
	return min(a, b)
}

// writes reports whether o is not a read lock. An operation without a kind counts as a write lock, which is stricter.
func (o *Op) writes() bool { return o.Kind != Read }

// conflicts reports whether o and p cannot both be held.
func (o *Op) conflicts(p *Op) bool { return o.writes() || p.writes() }

// String returns everything that is known of o, in one line.
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
	at("revoked", o.Revoked)
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

// clock formats a time.
func clock(t int64) string {
	if t == math.MaxInt64 {
		return "forever"
	}
	return time.Duration(t).String()
}

// lines formats operations, each on a line of its own, to follow a message.
func lines(ops ...*Op) string {
	var b strings.Builder
	for _, o := range ops {
		b.WriteString("\n\t" + o.String())
	}
	return b.String()
}

// groups yields the operations that share a name, in the order of the names, so that a check always returns the same
// error.
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

// key returns the name of the group in which operations can conflict.
func key(o *Op) string { return o.Key }

// An interval is an operation and a time during which it may have held its lock.
type interval struct {
	*Op
	from, to int64
}

// heldIntervals returns the intervals in which ops held their locks, by the time at which they begin. Of those that begin
// together the shortest comes first: one without length ends before the others begin.
func heldIntervals(ops []*Op) []interval {
	var hs []interval
	for _, o := range ops {
		if from, to, ok := o.Held(); ok {
			hs = append(hs, interval{o, from, to})
		}
	}
	slices.SortStableFunc(hs, func(a, b interval) int {
		return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to))
	})
	return hs
}
