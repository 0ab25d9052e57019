package node

import (
	"context"
	"time"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
)

// A Limiter bounds how many calls to a node are under way at a time, so that a crowd of goroutines waits here and not in
// the client's pool: there renewals would wait behind it, and a node that answers at once would seem not to answer in
// time.
//
// Acquires take a place among the acquires and then, as releases do, one among all calls. So a release waits behind
// other releases, but never behind a crowd of acquires. Renewals do not pass the limiter.
type Limiter struct {
	Acquires, Releases Place
}

// A Place is what a call takes in the limiter, in this order, and frees when it has ended.
type Place []slots

// Slots are a semaphore: they hold a value for each call that has taken one, and calls wait for one in order. In a crowd
// almost all calls wait, so waiting allocates nothing.
type slots chan struct{}

func newLimiter(connections int) Limiter {
	calls := make(slots, connections)
	acquires := connections
	if connections > 2 {
		acquires-- // one connection is left to releases and renewals
	}
	return Limiter{Place{make(slots, acquires), calls}, Place{calls}}
}

// Free frees the place.
func (p Place) Free() {
	for _, part := range p {
		<-part
	}
}

// Admit waits until a call may take p. It returns an error when ctx ends, when the calls in front are not answered, since
// this one would not be either, and, with a node time-out, when the node is marked down: other nodes go on.
func (n *Node) Admit(ctx context.Context, p Place, timeout time.Duration) error {
	taken := 0
	defer func() {
		if taken < len(p) { // also if ctx panics
			p[:taken].Free()
		}
	}()
	for _, part := range p {
		select {
		case part <- struct{}{}:
		default:
			if err := n.wait(ctx, part, timeout); err != nil {
				return err
			}
		}
		taken++
	}
	return nil
}

func (n *Node) wait(ctx context.Context, part slots, timeout time.Duration) error {
	asked, wait := clock.Now(), ctx
	if timeout > 0 {
		wait = n.Health.whileUp()
	}
	select {
	case part <- struct{}{}:
	case <-wait.Done():
		if ctx.Err() != nil {
			return ErrInterrupted
		}
		return context.Cause(wait)
	}
	if err := n.Health.silentSince(asked); err != nil && !n.sharded {
		<-part
		return lockerr.Redis(err)
	}
	return nil
}
