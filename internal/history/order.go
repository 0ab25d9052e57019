package history

// This file answers: was it first come, first served?

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// Order reports one that overtook another. Of two that wait for the same key, in the same Class, and cannot both
// hold, the one that asked more than bound earlier must be got first, unless it gave up before the other was got.
// The bound is how long a request can take to reach the server.
//
// Tries do not wait, and are left out. One that was paused, or of which nobody knows how it ended, may be overtaken:
// it may have lost its place in the line. Where writers come first, or readers, let Class be the Kind.
func Order(ops []Op, bound time.Duration) error {
	bound = max(bound, 0)
	for _, line := range groups(ops, func(o *Op) string { return o.Key + "\x00" + o.Class }) {
		line = slices.DeleteFunc(line, func(o *Op) bool { return o.Try || o.Asked == 0 })
		slices.SortStableFunc(line, func(a, b *Op) int { return cmp.Compare(a.Asked, b.Asked) })
		var anyone, writer *Op // of those that asked more than bound earlier, the one that waited for longest
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

// waited is until when it is certain to have waited.
func (o *Op) waited() int64 {
	switch {
	case o == nil || o.Paused:
		return math.MinInt64
	case o.Got != 0:
		return o.Got
	}
	return o.Ended
}
