package quorum_test

import (
	"math/bits"
	"testing"

	"github.com/redismutex/redismutex/internal/quorum"
)

// Every mask of answers of 1 to 7 nodes: a decision is one that no further
// answer can change, and it is made as soon as that is so.
func TestDecisionIsFinalAndMadeAtOnce(t *testing.T) {
	for n := 1; n <= 7; n++ {
		all := uint(1)<<n - 1
		for yes := uint(0); yes <= all; yes++ {
			for no := uint(0); no <= all; no++ {
				if yes&no != 0 {
					continue
				}
				// What may become of those that have not answered.
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
					t.Fatalf("n=%d yes=%b no=%b: %d, want %d", n, yes, no, got, want)
				}
			}
		}
	}
}

// Two majorities share a node: on this rest exclusion and the order of tokens.
func TestMajoritiesIntersect(t *testing.T) {
	for n := 1; n <= 7; n++ {
		all := uint(1)<<n - 1
		for a := uint(0); a <= all; a++ {
			for b := uint(0); b <= all; b++ {
				if bits.OnesCount(a) >= quorum.Majority(n) && bits.OnesCount(b) >= quorum.Majority(n) && a&b == 0 {
					t.Fatalf("n=%d: %b and %b are both a majority", n, a, b)
				}
			}
		}
	}
}
