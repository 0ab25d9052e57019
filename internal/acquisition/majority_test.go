package acquisition

import (
	"math/bits"
	"testing"
)

// Two majorities share a node. Exclusion and the order of tokens depend on it.
func TestMajoritiesIntersect(t *testing.T) {
	for n := 1; n <= 7; n++ {
		all := uint(1)<<n - 1
		for a := uint(0); a <= all; a++ {
			for b := uint(0); b <= all; b++ {
				if bits.OnesCount(a) >= Majority(n) && bits.OnesCount(b) >= Majority(n) && a&b == 0 {
					t.Fatalf("n=%d: want two majorities to share a node, %b and %b do not", n, a, b)
				}
			}
		}
	}
}
