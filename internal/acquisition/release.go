package acquisition

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/quorum"
	"github.com/redismutex/redismutex/internal/script"
)

// Release releases a on every node and waits for the answers, as described for UnlockContext. With several nodes it waits
// for each no longer than the node time-out, and for one that is down only if no majority is without it. What is not
// confirmed goes on in the background.
func (a *Acquisition) Release(ctx context.Context) error {
	var t tally
	if a.quorum == nil {
		if p := a.parts[0]; p.in {
			t.add(p.release(ctx))
		}
	} else {
		t = a.releaseEach(ctx)
	}
	n := len(a.parts)
	switch quorum.Decide(n, t.yes, n-t.yes-len(t.errs)) {
	case quorum.Yes:
		return nil
	case quorum.No:
		return fmt.Errorf("%w: %q: it was not held any more when it was unlocked", lockerr.ErrLockLost, a.Keys.Name())
	}
	return a.explainTally(ctx, t, "unlock", "have released it")
}

// release releases p, and goes on with that in the background if the node does not confirm it.
func (p *part) release(ctx context.Context) vote {
	n, place := p.node, p.node.Limiter.Releases
	if err := n.Admit(ctx, place, p.acq.Config.Timeout); err != nil {
		n.Renewer.Release(&p.Lease)
		return vote{part: p, err: err}
	}
	n.Renewer.Forget(&p.Lease) // until now it was renewed
	sent := clock.Now()
	r, err := p.sendRelease(ctx, place)
	n.LookForLostGrants(p.acq.Keys.Name(), sent, clock.Always, r, err)
	if err != nil {
		n.Renewer.ReleaseAgain(&p.Lease, sent)
		return vote{part: p, err: err}
	}
	n.Note(r, p.acq.Config.Log)
	if r.Grants != "" {
		runtime.Gosched() // a goroutine that was granted the lock goes first
	}
	return p.releaseVote(r, nil)
}

// releaseVote is the vote of a node that was asked to release p. A node with foreign data has released what it could, and
// cannot confirm the rest.
func (p *part) releaseVote(r script.Reply, err error) vote {
	if err == nil && r.Status == script.Foreign {
		err = lockerr.Foreign(r.Data)
	}
	return vote{p, r.Status == script.Released && p.granted, r.Last, err}
}

// releaseEach releases a on several nodes, side by side.
func (a *Acquisition) releaseEach(ctx context.Context) (t tally) {
	a.mu.Lock()
	up := 0
	for _, p := range a.parts {
		if p.in && p.node.Health.Down() == nil {
			up++
		}
	}
	tooFew := up < quorum.Majority(len(a.parts)) // to confirm it: nodes that are down may be back
	open := map[*part]bool{}
	a.quorum.votes = make(chan vote, 2*len(a.parts)) // also for parts that were replaced while they were asking
	for _, p := range a.parts {
		down := p.node.Health.Down()
		switch {
		case p.asking && down == nil:
			open[p] = true
		case p.asking: // it is released when that is answered, or has taken too long
		case p.in && down != nil && !tooFew:
			p.leaveMailbox()
			p.node.Renewer.Release(&p.Lease)
			t.add(vote{part: p, err: down})
		case p.in:
			open[p] = true
			p.releaseAside()
		default:
			p.leaveMailbox()
			p.node.Renewer.CancelWake(&p.Lease)
		}
	}
	a.mu.Unlock()
	t.collect(ctx, a, open, a.quorum.votes)
	return t
}

// releaseInBackground releases a wherever it waits or holds, without waiting for answers. The mutex is held.
func (a *Acquisition) releaseInBackground() {
	for _, p := range a.parts {
		switch {
		case p.asking: // it is released when that is answered, or has taken too long
		case p.in:
			p.in = false
			p.leaveMailbox()
			p.node.Renewer.Release(&p.Lease)
		default:
			p.leaveMailbox()
			p.node.Renewer.CancelWake(&p.Lease)
		}
	}
}

// releaseAside releases p on another goroutine, and votes if votes are counted. The mutex is held.
func (p *part) releaseAside() {
	p.leaveMailbox()
	votes := p.votes()
	if votes == nil {
		p.node.Renewer.Release(&p.Lease)
		return
	}
	p.sent.Store(int64(clock.Always)) // the release has not been written yet
	p.node.Go(func() { votes <- p.release(context.Background()) })
}

// releaseAnswered releases p, whose acquire was answered when the lock was not wanted any more. The mutex is held.
func (p *part) releaseAnswered(r script.Reply, err error) {
	switch {
	case p.Tombstone && err != nil: // nobody waits for a node that does not answer
		p.node.Renewer.Release(&p.Lease)
	case p.Tombstone, r.Status == script.Granted, r.Status == script.Waiting:
		p.releaseAside()
		return
	default:
		err = nil
	}
	p.leaveMailbox()
	if votes := p.votes(); votes != nil {
		votes <- p.releaseVote(r, err)
	}
}

// votes is where the answer to the release of p is counted, or nil.
func (p *part) votes() chan<- vote {
	if p.acq.quorum == nil {
		return nil
	}
	return p.acq.quorum.votes
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

// collect counts the votes of the parts in open. With a node time-out it waits for each of them no longer than that,
// counted from when its call was sent.
func (t *tally) collect(ctx context.Context, a *Acquisition, open map[*part]bool, votes <-chan vote) {
	asked := clock.Now()
	var timeout <-chan time.Time
	var timer *time.Timer
	if a.Config.Timeout > 0 {
		timer = time.NewTimer(a.Config.Timeout)
		defer timer.Stop()
		timeout = timer.C
	}
	for len(open) > 0 {
		select {
		case v := <-votes:
			if !open[v.part] {
				continue // it came too late
			}
			delete(open, v.part)
			v.part.recordHealth(clock.Now(), v.rank, v.err)
			t.add(v)
		case <-ctx.Done():
			for p := range open {
				t.add(vote{part: p, err: node.ErrInterrupted})
			}
			return
		case <-timeout:
			next := clock.Never
			for p := range open {
				sent := clock.Instant(p.sent.Load())
				if overdue := p.node.Health.Overdue(asked, sent, a.Config.Timeout); overdue > clock.Now() {
					next = min(next, overdue)
					continue
				}
				delete(open, p)
				p.recordTimeout(max(asked, sent))
				t.add(vote{part: p, err: a.noAnswer()})
			}
			timer.Reset(time.Duration(next - clock.Now()))
		}
	}
}
