package history

// This file answers: did two holders overlap?

import "fmt"

// Exclusion reports a hold to write that overlaps another hold on its key. Holds that touch do not overlap: one may
// begin at the instant at which the other ends.
func Exclusion(ops []Op) error {
	for name, group := range groups(ops, key) {
		var last, lastWrite hold // of those seen so far, the one that goes on for longest
		for _, h := range holds(group) {
			before := lastWrite
			if h.writes() {
				before = last
			}
			// Nothing is missed by a look at one of them: whoever overlaps h is still on when h begins.
			if before.to > h.from {
				return fmt.Errorf("history: two hold %q from %v to %v:%s", name,
					clock(h.from), clock(min(h.to, before.to)), lines(before.Op, h.Op))
			}
			if h.to > last.to {
				last = h
			}
			if h.writes() && h.to > lastWrite.to {
				lastWrite = h
			}
		}
	}
	return nil
}
