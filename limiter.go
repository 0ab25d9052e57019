package redismutex

import (
	"context"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/semaphore"
)

// A limiter bounds how many calls to a node are under way at a time, so that a crowd of goroutines waits here and not
// in the client's pool: there renewals would wait behind it, and a node that answers at once would seem not to answer
// in time. Acquires take a place among the acquires, and then, as releases do, one among all calls: so a release waits
// behind other releases, but never behind a crowd of acquires. Renewals do not pass here.
type limiter struct {
	calls            int // how many there may be
	acquire, release place
}

// A place is what a call takes in the limiter, in this order, and frees when it has ended. It may be nil.
type place []*semaphore.Weighted

func newLimiter(rc redis.Scripter) limiter {
	n := connections(rc)
	calls := semaphore.NewWeighted(int64(n))
	acquires := n
	if n > 2 {
		acquires-- // one connection is left to releases and renewals
	}
	return limiter{n, place{semaphore.NewWeighted(int64(acquires)), calls}, place{calls}}
}

// connections is how many calls rc has under way at a time before further ones wait.
func connections(rc redis.Scripter) int {
	const unbounded = 1024 // an AutoPipeliner shares connections among all calls
	switch rc := rc.(type) {
	case interface{ Options() *redis.Options }:
		return poolSize(rc.Options().PoolSize, rc.Options().MaxActiveConns)
	// These two have a pool for each of their shards. A bound that suits one of them would let callers of a shard that
	// does not answer keep out those of the others.
	case interface{ Options() *redis.ClusterOptions }:
		return min(8*poolSize(rc.Options().PoolSize, rc.Options().MaxActiveConns), unbounded)
	case interface{ Options() *redis.RingOptions }:
		return min(8*poolSize(rc.Options().PoolSize, rc.Options().MaxActiveConns), unbounded)
	}
	return unbounded
}

// isSharded reports whether the calls of rc go to several servers, of which one may not answer while the others do.
func isSharded(rc redis.Scripter) bool {
	switch rc.(type) {
	case interface{ Options() *redis.ClusterOptions }, interface{ Options() *redis.RingOptions }:
		return true
	}
	return false
}

func poolSize(size, maxActive int) int {
	if maxActive > 0 {
		size = min(size, maxActive)
	}
	return max(size, 1)
}

func (p place) free() {
	for _, part := range p {
		part.Release(1)
	}
}

// admit waits until a call may take p. It returns an error when ctx ends, and where the calls in front are not
// answered: this one would not be either.
func (ep *endpoint) admit(ctx context.Context, p place, several bool) error {
	for i, part := range p {
		if part.TryAcquire(1) {
			continue
		}
		if err := ep.await(ctx, part, several); err != nil {
			p[:i].free()
			return err
		}
	}
	return nil
}

func (ep *endpoint) await(ctx context.Context, part *semaphore.Weighted, several bool) error {
	asked := now()
	wait := ctx
	if several { // there are other nodes to go on with
		wait = ep.health.whileUp()
	}
	if part.Acquire(wait, 1) != nil {
		if ctx.Err() != nil {
			return errInterrupted
		}
		return context.Cause(wait)
	}
	if err := ep.health.silentSince(asked); err != nil && !ep.sharded {
		part.Release(1)
		return redisError(err)
	}
	return nil
}

// An unsent error is that of a call that was not made.
type unsent struct{ error }

func (e unsent) Unwrap() error { return e.error }
