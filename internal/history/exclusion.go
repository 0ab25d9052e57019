package history

import "fmt"

// Exclusion reports a write lock that was held while another lock on its key was held. One may begin at the instant at
// which the other ends.
func Exclusion(ops []Op) error {
	for name, group := range groups(ops, key) {
		var last, lastWrite interval // of those seen so far, the one that ends last
		for _, h := range heldIntervals(group) {
			before := lastWrite
			if h.writes() {
				before = last
			}
			// One comparison suffices: whatever overlaps h has not ended when h begins, nor has the one that ends last.
			if before.to > h.from {
				return fmt.Errorf("history: %q was held twice from %v to %v:%s", name,
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
