package acquisition

import (
	"context"
	"fmt"
	"runtime"
	"slices"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/script"
)

// Release releases a on every node and waits for the answers, as described for UnlockContext. With several nodes it waits
// for each no longer than the node time-out, and for one that is down only if no majority is without it. What is not
// confirmed goes on in the background.
//
// Next, if it is not nil, is an acquisition that has not been sent. On each node its acquire goes in front of the release, in
// the same script, so that the lock is not handed on before next stands in the queue. The caller then calls next.Wait.
func (a *Acquisition) Release(ctx context.Context, next *Acquisition) error {
	t, majority := a.nodes().release(ctx, next), a.majority()
	switch {
	case t.yes >= majority:
		return nil
	case t.yes+len(t.errs) < majority:
		return fmt.Errorf("%w: %q: it was no longer held when it was unlocked", lockerr.ErrLockLost, a.Keys.Name())
	}
	return a.nodes().explainTally(ctx, t, "unlock", "have released it")
}

// release releases p, behind the acquire of front unless that is nil. It goes on with that in the background if the node does
// not confirm it.
func (p *part) release(ctx context.Context, front *part) vote {
	n, place, sent, confirmed := p.Node, p.Node.Limiter.Releases, false, false
	defer func() {
		if !confirmed { // also if a hook or a context panics
			n.Renewer.ReleaseAgain(&p.Lease, sent)
		}
	}()
	if err := n.Admit(ctx, place, p.acq.Config.Timeout); err != nil {
		front.start()
		return vote{part: p, err: err}
	}
	n.Renewer.Forget(&p.Lease) // until now it was renewed
	start := clock.Now()
	sent = true
	r, err := p.callBehind(ctx, front, p.participant().Release(p.Tombstone), place)
	n.LookForLostGrants(p.acq.Keys.Name(), start, false, r, err)
	if err != nil {
		return vote{part: p, err: err}
	}
	confirmed = true
	n.CheckPublish(r, p.acq.Config.Log)
	if r.Grants != "" { // to others of this process, who have been told
		runtime.Gosched() // a goroutine that was granted the lock goes first
	}
	return p.releaseVote(r, nil)
}

// callBehind makes a call for p, behind the acquire of front unless that is nil.
func (p *part) callBehind(ctx context.Context, front *part, c script.Command, place node.Place) (script.Reply, error) {
	a := p.acq
	if front != nil {
		front.join = true
		front.openMailbox() // what it misses until it listens, it is renewed for then
	}
	if front == nil || !front.begin() {
		return p.Node.Call(ctx, a.Config.TTL, c, place)
	}
	sent, sweeps := clock.Now(), p.Node.Mailbox.Sweeps()
	onAcquired := func(r script.Reply, err error) { front.onAcquired(sent, sweeps, r, err).start() }
	return p.Node.CallBoth(ctx, a.Config.TTL, front.acquireCommand(false), onAcquired, c, place)
}

// partOn returns the part of a on a node, or nil if a is nil. Another mutex may name the same nodes in another order.
func (a *Acquisition) partOn(n *node.Node) *part {
	if a == nil {
		return nil
	}
	return a.parts()[slices.Index(a.Config.Nodes, n)]
}

// releaseVote is the vote of a node that was asked to release p. A node with foreign data has released what it could, and
// cannot confirm the rest.
func (p *part) releaseVote(r script.Reply, err error) vote {
	if err == nil && r.Status == script.Foreign {
		err = lockerr.Foreign(r.Data)
	}
	return vote{p, r.Status == script.Released && p.granted, r.Last, err}
}

// releaseInBackground releases a wherever it waits or holds, without waiting for answers. The mutex is held.
func (a *Acquisition) releaseInBackground() {
	for _, p := range a.parts() {
		p.discard()
	}
}

// discard releases p in the background if it waits or holds. The mutex is held.
func (p *part) discard() {
	switch {
	case p.asking: // it is released when that is answered, or has taken too long
	case p.in:
		p.in = false
		p.leaveMailbox()
		p.Node.Renewer.Release(&p.Lease)
	default:
		p.leaveMailbox()
		p.Node.Renewer.Forget(&p.Lease)
	}
}

// A vote is the answer of one node to a release or a downgrade.
type vote struct {
	part *part
	yes  bool  // the node held the lock, and has done what it was asked for
	rank int64 // the highest one in the node's queue, or 0
	err  error
}

// A tally counts votes.
type tally struct {
	yes  int
	errs []vote
}

func (t *tally) add(v vote) {
	switch {
	case v.err != nil:
		t.errs = append(t.errs, v)
	case v.yes:
		t.yes++
	}
}
