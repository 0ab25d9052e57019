package node

import (
	"math"
	"time"

	"github.com/redis/go-redis/v9"
)

// A client is what go-redis' options tell of a Redis client.
type client struct {
	Addr        string        // "": it has several, or does not tell
	connections int           // how many calls it has under way at a time before further ones wait
	pipelines   int           // how many pipelines have a connection at a time
	sharded     bool          // its calls go to several servers, one of which may hang while the others answer
	resend      time.Duration // a call that took as long may have been sent twice
}

// unbounded is for clients without a pool of their own: an AutoPipeliner shares connections among all calls.
const unbounded = 1024

func describe(rc redis.Scripter) client {
	switch rc := rc.(type) {
	case interface{ Options() *redis.Options }:
		o := rc.Options()
		c := client{
			Addr:        o.Addr,
			connections: poolSize(o.PoolSize, o.MaxActiveConns),
			pipelines:   o.PipelinePoolSize, // they have a pool of their own
			resend:      min(o.MinRetryBackoff, o.MaxRetryBackoff),
		}
		switch {
		case o.PipelinePoolSize == 0:
			c.pipelines = redis.DefaultPipelinePoolSize
		case o.PipelinePoolSize < 0: // unless it was told to have none
			c.pipelines = c.connections
		}
		if o.MaxRetries <= 0 {
			c.resend = math.MaxInt64
		}
		return c
	case interface{ Options() *redis.ClusterOptions }:
		o := rc.Options()
		return shards(poolSize(o.PoolSize, o.MaxActiveConns), min(o.MinRetryBackoff, o.MaxRetryBackoff))
	case interface{ Options() *redis.RingOptions }:
		o := rc.Options()
		return shards(poolSize(o.PoolSize, o.MaxActiveConns), min(o.MinRetryBackoff, o.MaxRetryBackoff))
	}
	return client{connections: unbounded, pipelines: unbounded, resend: 8 * time.Millisecond} // no longer than go-redis' default
}

// shards describes a client that has pools for each of its servers. With a bound that suits one of them, callers of a server
// that does not answer would keep out those of the others.
func shards(poolSize int, resend time.Duration) client {
	return client{connections: min(8*poolSize, unbounded), pipelines: unbounded, sharded: true, resend: resend}
}

func poolSize(size, maxActive int) int {
	if maxActive > 0 {
		size = min(size, maxActive)
	}
	return max(size, 1)
}
