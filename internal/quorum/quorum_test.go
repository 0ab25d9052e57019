package quorum_test

import (
	"math/bits"
	"testing"

	"github.com/redismutex/redismutex/internal/quorum"
)

// For every combination of answers of 1 to 7 nodes, Decide decides as soon as no
// further answer can change the decision, and not before.
func TestDecisionIsFinalAndMadeAtOnce(t *testing.T) {
	for n := 1; n <= 7; n++ {
		all := uint(1)<<n - 1
		for yes := uint(0); yes <= all; yes++ {
			for no := uint(0); no <= all; no++ {
				if yes&no != 0 {
					continue
				}
				// The nodes that have not answered may still say yes or no.
				open, accepted, refused := all&^yes&^no, false, false
				for more := uint(0); more <= all; more++ {
					if more&^open != 0 {
						continue
					}
					if 2*bits.OnesCount(yes|more) > n {
						accepted = true
					} else {
						refused = true
					}
				}
				want := quorum.Undecided
				if !refused {
					want = quorum.Yes
				} else if !accepted {
					want = quorum.No
				}
				if got := quorum.Decide(n, bits.OnesCount(yes), bits.OnesCount(no)); got != want {
					t.Fatalf("n=%d, yes=%b, no=%b: want decision %d, got %d", n, yes, no, want, got)
				}
			}
		}
	}
}

// Two majorities share a node. Exclusion and the order of tokens depend on it.
func TestMajoritiesIntersect(t *testing.T) {
	for n := 1; n <= 7; n++ {
		all := uint(1)<<n - 1
		for a := uint(0); a <= all; a++ {
			for b := uint(0); b <= all; b++ {
				if bits.OnesCount(a) >= quorum.Majority(n) && bits.OnesCount(b) >= quorum.Majority(n) && a&b == 0 {
					t.Fatalf("n=%d: want two majorities to share a node, %b and %b do not", n, a, b)
				}
			}
		}
	}
}
