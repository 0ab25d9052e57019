// Package quorum has the size of a majority.
package quorum

// Majority returns how many of n nodes are a majority. Any two majorities share a
// node. An even n gains nothing over n-1: it survives the loss of no more nodes.
func Majority(n int) int { return n/2 + 1 }
