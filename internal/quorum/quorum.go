// Package quorum answers: when do N answers mean yes, no, or not yet?
package quorum

// A Decision is what the answers of a group of nodes amount to.
type Decision int

const (
	Undecided Decision = iota // it depends on those that have not answered
	Yes                       // a majority says yes
	No                        // no majority can say yes any more
)

// Majority is how many of n nodes decide. Any two majorities share a node. An
// even n gains nothing over n-1: it survives the loss of no more nodes.
func Majority(n int) int { return n/2 + 1 }

// Decide says what it means that of n nodes so many have said yes, and so many
// no. A node that has failed has said no.
func Decide(n, yes, no int) Decision {
	switch {
	case yes >= Majority(n):
		return Yes
	case n-no < Majority(n):
		return No
	}
	return Undecided
}
