package history

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// Order reports an operation that overtook another. Of two conflicting operations that wait for the same key, in the same
// Class, the one that asked more than bound earlier must be granted the lock first, unless it gives up before. The bound
// is how long a request can take to reach the server.
//
// Tries do not wait, and are ignored. An operation that was paused, or whose outcome is unknown, may be overtaken, since
// it may have lost its place in the queue. If writers or readers come first, set Class to the Kind.
func Order(ops []Op, bound time.Duration) error {
	bound = max(bound, 0)
	for _, line := range groups(ops, func(o *Op) string { return o.Key + "\x00" + o.Class }) {
		line = slices.DeleteFunc(line, func(o *Op) bool { return o.Try || o.Asked == 0 })
		slices.SortStableFunc(line, func(a, b *Op) int { return cmp.Compare(a.Asked, b.Asked) })
		var anyone, writer *Op // of those that asked more than bound earlier, the one that waited longest
		older := line
		for _, o := range line {
			for o.Asked-older[0].Asked > int64(bound) {
				if older[0].waited() > anyone.waited() {
					anyone = older[0]
				}
				if older[0].writes() && older[0].waited() > writer.waited() {
					writer = older[0]
				}
				older = older[1:]
			}
			before := writer
			if o.writes() {
				before = anyone
			}
			if o.Got != 0 && before.waited() > o.Got {
				return fmt.Errorf("history: the second overtook the first, which had asked %v earlier:%s",
					time.Duration(o.Asked-before.Asked), lines(before, o))
			}
		}
	}
	return nil
}

// waited returns until when o certainly waited.
func (o *Op) waited() int64 {
	switch {
	case o == nil || o.Paused:
		return math.MinInt64
	case o.Got != 0:
		return o.Got
	}
	return Earlier(o.Ended, o.Revoked)
}
