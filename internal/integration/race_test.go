//go:build race

package integration

// slowdown is how much longer the race detector makes what should be quick.
const slowdown = 2
