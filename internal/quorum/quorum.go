// Package quorum counts the answers of a group of nodes.
package quorum

// A Decision is the outcome of the answers so far.
type Decision int

const (
	Undecided Decision = iota // the nodes that have not answered decide
	Yes                       // a majority says yes
	No                        // a majority can no longer say yes
)

// Majority returns how many of n nodes are a majority. Any two majorities share a
// node. An even n gains nothing over n-1: it survives the loss of no more nodes.
func Majority(n int) int { return n/2 + 1 }

// Decide returns the decision of n nodes of which yes have said yes, and no have
// said no. A node that has failed counts as no.
func Decide(n, yes, no int) Decision {
	switch {
	case yes >= Majority(n):
		return Yes
	case n-no < Majority(n):
		return No
	}
	return Undecided
}
