package acquisition

import (
	"context"
	"errors"
	"slices"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/script"
)

// What a local queue needs: its acquisitions belong to no single caller.

// ErrWaiting is returned by Acquire and Wait of a shared acquisition whose caller gives up while it waits in the queue of
// Redis. It waits on.
var ErrWaiting = errors.New("it waits on without the caller")

// Share makes a, which has not been sent, an acquisition that does not end with the context of the caller once it waits
// in the queue. If it outlives errors, it asks again after an error of its first attempt, too.
func (a *Acquisition) Share(outlives bool) { a.shared, a.outlives = true, outlives }

// Withdraw ends a request that is not wanted any more, or a lock without users. What has been granted is released in the
// background. It reports whether the nodes had granted it or put it into the queue.
func (a *Acquisition) Withdraw() (acknowledged bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	acknowledged = a.queued || a.state == held
	if a.state == pending || a.state == held && a.users.none() {
		a.state = superseded
		for _, p := range a.parts {
			if p.asking { // its answer is not waited for: the release refuses an acquire that arrives later
				p.asking, p.in, p.Tombstone = false, true, true
			}
		}
		a.releaseInBackground()
		a.wake()
	}
	return acknowledged
}

// Remove removes a user, also one that is overdue. The error is that of Usable otherwise, but Remove tells nobody of a loss:
// the caller has a mutex of its own. An acquisition without users is held until Close.
func (a *Acquisition) Remove(u User) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	err := a.ended(u)
	if err == nil {
		a.users.remove(u)
		a.expireIfOverdue()
	}
	return err
}

// Close ends a if it has no users, and reports whether it has none. Release has to follow then, unless a was lost
// meanwhile, which is the error.
func (a *Acquisition) Close() (closed bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case !a.users.none(), a.state == released: // another one, that left at the same time, has closed it
		return false, nil
	case a.state == lost:
		return true, *a.cause
	}
	a.state = released
	return true, nil
}

// partOn returns the part of a on a node, or nil if a is nil. Another mutex may name the same nodes in another order.
func (a *Acquisition) partOn(n *node.Node) *part {
	if a == nil {
		return nil
	}
	return a.parts[slices.Index(a.Config.Nodes, n)]
}

// callBehind makes a call for p, behind the acquire of front unless that is nil.
func (p *part) callBehind(ctx context.Context, front *part, c script.Command, place node.Place) (script.Reply, error) {
	a := p.acq
	if front != nil {
		front.join = true
		front.openMailbox() // what it misses until it listens, it looks for then
	}
	if front == nil || !front.begin() {
		return p.Node.Call(ctx, a.Config.TTL, c, place)
	}
	sent := clock.Now()
	onAcquired := func(r script.Reply, err error) { front.onAcquired(sent, r, err).start() }
	return p.Node.CallBoth(ctx, a.Config.TTL, front.acquireCommand(false), onAcquired, c, place)
}

// CurrentID returns the id under which the first node knows a, or is asked for it, now.
func (a *Acquisition) CurrentID() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.parts[0].ID()
}

// Trusted reports whether a is held and will be trusted for longer than that instant.
func (a *Acquisition) Trusted(until clock.Instant) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state == held && a.Until() > until
}

// BecomeReader makes a, a write lock whose users all read, a read lock in the background. What a node does not confirm,
// its renewals go on with.
func (a *Acquisition) BecomeReader() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state != held {
		return
	}
	for _, p := range a.makeReader() {
		p.Node.Go(func() { p.downgrade(context.Background(), nil) })
	}
}
