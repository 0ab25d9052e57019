package localqueue

import (
	"slices"
	"strings"
	"time"
	"unique"

	"github.com/redismutex/redismutex/internal/acquisition"
)

// A Config is what the requests of one mutex have in common.
type Config struct {
	acquisition.Config
	Turn time.Duration // 0: strict order, no queue

	kind unique.Handle[kind]
}

// A kind is what requests have in common that share a queue, but for the key.
type kind struct {
	nodes                      string // the names of their mailboxes, in order
	ttl, drift, timeout, turn  time.Duration
	writersFirst, readersFirst bool
}

// A name is what the requests of one queue have in common.
type name struct {
	kind unique.Handle[kind]
	key  string
}

// Init has to be called when everything is set.
func (c *Config) Init() {
	names := make([]string, len(c.Nodes))
	for i, n := range c.Nodes {
		names[i] = n.Mailbox.Name()
	}
	slices.Sort(names)
	c.kind = unique.Make(kind{strings.Join(names, " "), c.TTL, c.Drift, c.Timeout, c.Turn, c.WritersFirst, c.ReadersFirst})
}
