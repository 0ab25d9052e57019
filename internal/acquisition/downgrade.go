package acquisition

import (
	"context"
	"slices"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/script"
)

// A Downgrade is a write lock that has become a read lock here. The nodes have to be told.
//
// They change one by one. One that has not changed yet admits no reader, and one that has admits no writer: so no other writer
// gets the lock between the first node and the last.
type Downgrade struct {
	acq     *Acquisition
	writers []*part // that hold as writers
}

// BeginDowngrade makes a, which was acquired as a write lock, a read lock, unless it has ended. Parts that do not hold are
// replaced by readers. Tell has to be called for the others.
func (a *Acquisition) BeginDowngrade() Downgrade {
	a.mu.Lock()
	defer a.mu.Unlock()
	d := Downgrade{acq: a}
	if a.state != held {
		return d
	}
	a.write = false
	for _, p := range a.parts() {
		switch {
		case !p.Write: // an earlier call has replaced it
		case p.in && p.granted:
			p.Node.Renewer.RenewAsReader(&p.Lease)
			d.writers = append(d.writers, p)
		default:
			next := p.replace() // a reader
			p.discard()
			next.acquireSoon()
		}
	}
	return d
}

// Tell tells the nodes. Next, if it is not nil, is an acquisition that has not been sent. On each node its acquire goes in front
// of the downgrade, in the same script. The caller then calls next.Wait.
func (d Downgrade) Tell(ctx context.Context, next *Acquisition) error {
	a, writers := d.acq, d.writers
	var t tally
	open, votes := map[*part]bool{}, make(chan vote, len(writers))
	for _, p := range writers {
		open[p] = true
		p.sent.Store(int64(clock.Past)) // the downgrade has not been written yet
		front := next.partOn(p.Node)
		p.Node.Go(func() {
			v := vote{part: p, err: node.ErrPanicked} // stays if a hook ends the goroutine
			defer func() { votes <- v }()
			v = p.downgrade(context.WithoutCancel(ctx), front)
		})
	}
	for _, n := range a.Config.Nodes {
		if !slices.ContainsFunc(writers, func(p *part) bool { return p.Node == n }) {
			next.partOn(n).start()
		}
	}
	a.nodes().collect(ctx, &t, open, votes)
	if ctx.Err() != nil {
		for _, p := range writers {
			p.RenewNow() // renewals go on with it, at once
		}
	}

	a.mu.Lock()
	for _, p := range a.parts() {
		if !p.Write && p.counts() { // it was acquired since, as a reader
			t.yes++
		}
	}
	a.mu.Unlock()
	if t.yes >= a.majority() {
		return nil
	}
	return a.nodes().explainTally(ctx, t, "downgrade", "have made the writer a reader")
}

// downgrade renews p as a reader, behind the acquire of front unless that is nil. If the node does not confirm it, its
// renewals go on with it.
func (p *part) downgrade(ctx context.Context, front *part) vote {
	n, place := p.Node, p.Node.Limiter.Releases
	if err := n.Admit(ctx, place, p.acq.Config.Timeout); err != nil {
		p.RenewNow()
		front.start()
		return vote{part: p, err: err}
	}
	sent := clock.Now()
	reader := p.participant()
	reader.Write = false
	c := reader.Renew(0)
	r, err := p.callBehind(ctx, front, c, place)
	err = n.Renewer.OnDowngrade(&p.Lease, c, sent, r, err)
	return vote{p, r.Status == script.Granted, r.Last, err}
}
