package acquisition

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unique"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/node"
)

// A Config is what the acquisitions of one mutex have in common.
type Config struct {
	node.Terms
	Nodes   []*node.Node
	Ranks   *LamportClock // nil with one node
	Order   Order
	Turn    time.Duration // how long requests of this process share an acquisition; 0: they do not
	MaxHold time.Duration // how long a lock is held, at most; 0: no limit
	Kind    unique.Handle[Kind]
	Trace   Tracer // nil: nobody is told
}

// An Order decides which waiter is next.
type Order uint8

const (
	FirstCome Order = iota
	WritersFirst
	ReadersFirst
)

// A Tracer is told what happens. Its functions call no foreign code and do not block.
type Tracer interface {
	// Waiting tells that the caller waits whose context this is, in this process or in the queue of Redis.
	Waiting(ctx context.Context, local bool)
	// Renewed and RenewFailed tell of the renewals of a held lock, and until when it was trusted then.
	Renewed(key string, id func() string, until clock.Instant)
	RenewFailed(key string, id func() string, until clock.Instant, err error)
	// NodeDown and NodeUp tell that one of several nodes is down, or up again.
	NodeDown(name string, why error)
	NodeUp(name string)
}

// A Kind is what requests have in common that may share an acquisition, but for the key.
type Kind struct {
	nodes                              string // the names of their mailboxes, in order
	ttl, drift, timeout, turn, maxHold time.Duration
	order                              Order
}

// IsOn reports whether the node with that mailbox is one of theirs.
func (k Kind) IsOn(mailbox string) bool { return slices.Contains(strings.Fields(k.nodes), mailbox) }

// Init sets the kind. It has to be called when everything else is set.
func (c *Config) Init() {
	names := make([]string, len(c.Nodes))
	for i, n := range c.Nodes {
		names[i] = n.Mailbox.Name()
	}
	slices.Sort(names)
	c.Kind = unique.Make(Kind{strings.Join(names, " "), c.TTL, c.Drift, c.Timeout, c.Turn, c.MaxHold, c.Order})
}

// Majority returns how many of n nodes are a majority. Any two majorities share a node. An even n gains nothing over n-1: it
// survives the loss of no more nodes.
func Majority(n int) int { return n/2 + 1 }

// First reports whether a writer, or a reader, goes before all waiters of the other kind.
func (c *Config) First(write bool) bool {
	return c.Order == WritersFirst && write || c.Order == ReadersFirst && !write
}

// NodeName is the name of a node in errors, in the log and in what Inspect returns.
func (c *Config) NodeName(i int) string {
	if addr := c.Nodes[i].Addr; addr != "" {
		return fmt.Sprintf("node %d (%s)", i+1, addr)
	}
	return fmt.Sprintf("node %d", i+1)
}

// OnNode adds the name of a node to an error of it, if there are several.
func (c *Config) OnNode(i int, err error) error {
	if len(c.Nodes) == 1 {
		return err
	}
	return fmt.Errorf("%s: %w", c.NodeName(i), err)
}

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
