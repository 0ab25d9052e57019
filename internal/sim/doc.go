// Package sim simulates days of use, with faults, in virtual time, and checks that the promises are kept.
//
// It contains tests only. Several processes, each with clients and network links of its own, lock a few keys through the
// public API, on one node and on five. A day takes less than a minute. What they do and what fails is drawn from a seed.
// Package history checks the promises.
//
// Time is divided into eras, each with servers and a seed of its own, so that one that fails can be replayed by itself.
// The Go scheduler chooses which goroutine runs first at an instant, so a failure may need a few replays (-count).
package sim
