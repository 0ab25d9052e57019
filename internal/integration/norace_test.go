//go:build !race

package integration

const slowdown = 1
