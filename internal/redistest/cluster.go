package redistest

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
)

const slots = 16384

// ClusterServers is a Redis Cluster of masters, without replicas unless AddReplica starts one.
type ClusterServers struct {
	nodes []*node
	owner [slots]*node

	// A master that becomes the owner of one slot claims all that it has, with a greater epoch than the others: also one that is
	// about to have another owner. So one migration ends after the other.
	ending sync.Mutex
}

type node struct {
	*Server
	admin *redis.Client
	id    string
}

// Cluster starts a cluster of that many masters. Each serves an equal range of slots, in the order of Nodes.
func Cluster(tb testing.TB, masters int) *ClusterServers {
	tb.Helper()
	ctx := context.Background()
	c := &ClusterServers{}
	for i := range masters {
		s := Start(tb, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
		n := &node{Server: s, admin: s.Client(tb)}
		n.id = n.ask(tb, "CLUSTER", "MYID").(string)
		// With different epochs the nodes need not agree on them first.
		n.do(tb, "CLUSTER", "SET-CONFIG-EPOCH", i+1)
		c.nodes = append(c.nodes, n)

		// ADDSLOTSRANGE would be shorter, but needs Redis 7.
		add := []any{"CLUSTER", "ADDSLOTS"}
		for slot := i * slots / masters; slot < (i+1)*slots/masters; slot++ {
			c.owner[slot] = n
			add = append(add, slot)
		}
		n.do(tb, add...)
	}
	for _, n := range c.nodes {
		for _, other := range c.nodes {
			if n != other {
				n.do(tb, "CLUSTER", "MEET", "127.0.0.1", other.port)
			}
		}
	}
	for _, n := range c.nodes {
		Eventually(tb, "the cluster is whole", func() bool {
			info := fields(n.admin.ClusterInfo(ctx).Val())
			//lint:ignore SA1019 Redis 6.2 has no CLUSTER SHARDS
			shards, err := n.admin.ClusterSlots(ctx).Result()
			return info["cluster_state"] == "ok" && err == nil && len(shards) == masters
		})
	}
	return c
}

// Client returns a client of the cluster, which is closed when the test ends.
func (c *ClusterServers) Client(tb testing.TB, mutate ...func(*redis.ClusterOptions)) *redis.ClusterClient {
	opt := &redis.ClusterOptions{}
	for _, n := range c.nodes {
		opt.Addrs = append(opt.Addrs, n.Addr())
	}
	for _, m := range mutate {
		m(opt)
	}
	rc := redis.NewClusterClient(opt)
	tb.Cleanup(func() { rc.Close() })
	return rc
}

// AddReplica starts a replica of the master with that index, which replaces the master when that dies. Owner and the
// migrations ignore replicas.
func (c *ClusterServers) AddReplica(tb testing.TB, of int) *Server {
	tb.Helper()
	ctx, master := context.Background(), c.nodes[of]
	s := Start(tb, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--repl-diskless-sync-delay", "0")
	n := &node{Server: s, admin: s.Client(tb)}
	n.id = n.ask(tb, "CLUSTER", "MYID").(string)
	master.do(tb, "CONFIG", "SET", "repl-diskless-sync-delay", 0)
	n.do(tb, "CLUSTER", "MEET", "127.0.0.1", master.port)
	Eventually(tb, "the replica knows its master", func() bool {
		return n.admin.ClusterReplicate(ctx, master.id).Err() == nil
	})
	// A replica needs the votes of the other masters when its own dies, so it must know them.
	Eventually(tb, "it follows, and the masters and it know each other", func() bool {
		known := n.admin.ClusterNodes(ctx).Val()
		for _, m := range c.nodes {
			if !strings.Contains(known, m.id) || !strings.Contains(m.admin.ClusterNodes(ctx).Val(), n.id) {
				return false
			}
		}
		return fields(n.admin.Info(ctx, "replication").Val())["master_link_status"] == "up" &&
			fields(n.admin.ClusterInfo(ctx).Val())["cluster_state"] == "ok" && !strings.Contains(known, "handshake")
	})
	return s
}

// Nodes returns the masters.
func (c *ClusterServers) Nodes() []*Server {
	var servers []*Server
	for _, n := range c.nodes {
		servers = append(servers, n.Server)
	}
	return servers
}

// Owner returns the index in Nodes of the master that serves the slot.
func (c *ClusterServers) Owner(slot int) int {
	for i, n := range c.nodes {
		if n == c.owner[slot] {
			return i
		}
	}
	panic("redistest: a slot without owner")
}

// MigrateSlot moves a slot with its keys to the master with that index.
func (c *ClusterServers) MigrateSlot(tb testing.TB, slot, to int) {
	tb.Helper()
	c.BeginMigration(tb, slot, to)
	c.MoveKeys(tb, slot, to)
	c.EndMigration(tb, slot, to)
}

// BeginMigration opens the slot on both sides: from now on its owner answers ASK for keys that it does not have, and
// TRYAGAIN for several keys of which it has only some. Before Redis 7 it answers ASK to these, too, and the other side
// TRYAGAIN.
func (c *ClusterServers) BeginMigration(tb testing.TB, slot, to int) {
	tb.Helper()
	from, dest := c.owner[slot], c.nodes[to]
	dest.do(tb, "CLUSTER", "SETSLOT", slot, "IMPORTING", from.id)
	from.do(tb, "CLUSTER", "SETSLOT", slot, "MIGRATING", dest.id)
}

// MoveKeys moves keys of an open slot: the given ones, or all.
func (c *ClusterServers) MoveKeys(tb testing.TB, slot, to int, keys ...string) {
	tb.Helper()
	from, dest := c.owner[slot], c.nodes[to]
	all := len(keys) == 0
	for {
		if all {
			var err error
			if keys, err = from.admin.ClusterGetKeysInSlot(context.Background(), slot, 100).Result(); err != nil {
				tb.Fatalf("redistest: slot %d: %v", slot, err)
			}
		}
		if len(keys) == 0 {
			return
		}
		migrate := []any{"MIGRATE", "127.0.0.1", dest.port, "", 0, 5000, "KEYS"}
		for _, k := range keys {
			migrate = append(migrate, k)
		}
		from.do(tb, migrate...)
		if !all {
			return
		}
	}
}

// EndMigration makes the other master the owner of the slot. The old owner must have no keys of the slot.
func (c *ClusterServers) EndMigration(tb testing.TB, slot, to int) {
	tb.Helper()
	c.ending.Lock()
	defer c.ending.Unlock()
	from, dest := c.owner[slot], c.nodes[to]
	// The new owner first: otherwise no master would serve the slot for a moment.
	dest.do(tb, "CLUSTER", "SETSLOT", slot, "NODE", dest.id)
	from.do(tb, "CLUSTER", "SETSLOT", slot, "NODE", dest.id)
	c.owner[slot] = dest
	// A node that hears of the old owner once more, by gossip that was under way, may believe that for seconds. So the nodes are
	// asked until they have agreed for a while, and told again.
	agreed := 0
	Eventually(tb, "the nodes agree on the new owner of the slot", func() bool {
		agreed++
		for _, n := range c.nodes {
			if n.ownerOf(slot) == from.id { // a dead node, or a replica, need not be told
				agreed = 0
				n.admin.Do(context.Background(), "CLUSTER", "SETSLOT", slot, "NODE", dest.id)
			}
		}
		return agreed == 20
	})
}

// ownerOf returns the id of the master that serves the slot, as n knows it.
func (n *node) ownerOf(slot int) string {
	//lint:ignore SA1019 Redis 6.2 has no CLUSTER SHARDS
	ranges, _ := n.admin.ClusterSlots(context.Background()).Result()
	for _, r := range ranges {
		if r.Start <= slot && slot <= r.End {
			return r.Nodes[0].ID
		}
	}
	return ""
}

func (n *node) do(tb testing.TB, args ...any) {
	tb.Helper()
	n.ask(tb, args...)
}

func (n *node) ask(tb testing.TB, args ...any) any {
	tb.Helper()
	reply, err := n.admin.Do(context.Background(), args...).Result()
	if err != nil {
		tb.Fatalf("redistest: %.80s: %v", args, err)
	}
	return reply
}
