// Package sim answers: do whole clients keep the promises, for days, whatever fails?
//
// It is a test and nothing else. Several processes, each with clients and network links of its own, lock a few keys
// by the public API, on one node and on five, in virtual time. A day takes less than a minute. What they do and what
// fails is drawn from a seed. Package history says whether the promises were kept.
//
// Time is cut into eras, each with servers and a seed of its own, so that one that fails can be replayed by itself.
// Which goroutine runs first at an instant is up to the Go scheduler, so it may take a few replays (-count).
package sim
