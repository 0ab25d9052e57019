//go:build race

package integration

// slowdown is the factor by which the race detector slows tests down.
const slowdown = 2
