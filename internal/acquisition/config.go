package acquisition

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/redismutex/redismutex/internal/node"
)

// A Config is what the acquisitions of one mutex have in common.
type Config struct {
	node.Terms
	Nodes        []*node.Node
	Ranks        *LamportClock // nil with one node
	WritersFirst bool
	ReadersFirst bool
}

// first reports whether a writer, or a reader, goes before all waiters of the other kind.
func (c *Config) first(write bool) bool { return c.WritersFirst && write || c.ReadersFirst && !write }

// SameNodes reports whether d has the nodes of c, in whatever order. A node is a client: two clients with the same
// address may reach different servers.
func (c *Config) SameNodes(d *Config) bool {
	if len(c.Nodes) != len(d.Nodes) {
		return false
	}
	for _, n := range d.Nodes {
		if !slices.Contains(c.Nodes, n) {
			return false
		}
	}
	return true
}

// A LamportClock gives each request over several nodes its rank, so that all nodes agree on the order: the time in µs,
// or more than any rank seen (Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System", 1978). So a
// process whose clock is slow does not always go first. No two requests of one process have the same rank.
type LamportClock struct {
	last atomic.Int64
	Now  func() time.Time
}

// Ranks is the clock of this process.
var Ranks = &LamportClock{Now: time.Now}

// Next returns the rank of a new request.
func (c *LamportClock) Next() int64 {
	for {
		last := c.last.Load()
		rank := max(c.Now().UnixMicro(), last+1)
		if c.last.CompareAndSwap(last, rank) {
			return rank
		}
	}
}

// Saw notes a rank that a node has reported: later ranks exceed it.
func (c *LamportClock) Saw(rank int64) {
	for {
		last := c.last.Load()
		if rank <= last || c.last.CompareAndSwap(last, rank) {
			return
		}
	}
}
