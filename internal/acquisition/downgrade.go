package acquisition

import (
	"context"
	"fmt"
	"slices"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/quorum"
	"github.com/redismutex/redismutex/internal/script"
)

// Downgrade makes a, a write lock of which u is the only user that writes, a read lock, as described for Lock.Downgrade.
//
// The nodes change one by one. One that has not changed yet admits no reader, and one that has admits no writer: so no other
// writer gets the lock between the first node and the last.
func (a *Acquisition) Downgrade(ctx context.Context, u User) error {
	tell, err := a.BeginDowngrade(u)
	if err != nil {
		return err
	}
	return tell(ctx, nil)
}

// BeginDowngrade is the first half of Downgrade: a is a read lock from now on. Tell, which has to be called, is the other
// half: it tells the nodes. Unless next is nil, that has not been sent, and its acquire goes in front on each node, in the
// same round trip; it has to be waited for with Wait.
func (a *Acquisition) BeginDowngrade(u User) (tell func(ctx context.Context, next *Acquisition) error, err error) {
	writers, err := a.becomeReader(u)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, next *Acquisition) error { return a.tellWriters(ctx, u, writers, next) }, nil
}

func (a *Acquisition) tellWriters(ctx context.Context, u User, writers []*part, next *Acquisition) error {
	var t tally
	open, votes := map[*part]bool{}, make(chan vote, len(writers))
	for _, p := range writers {
		open[p] = true
		p.sent.Store(int64(clock.Always)) // the downgrade has not been written yet
		front := next.partOn(p.node)
		p.node.Go(func() {
			v := vote{part: p, err: node.ErrPanicked} // stays if a hook ends the goroutine
			defer func() { votes <- v }()
			v = p.downgrade(context.WithoutCancel(ctx), front)
		})
	}
	for _, n := range a.Config.Nodes {
		if !slices.ContainsFunc(writers, func(p *part) bool { return p.node == n }) {
			next.partOn(n).start()
		}
	}
	a.nodes.collect(ctx, &t, open, votes)
	if ctx.Err() != nil {
		for _, p := range writers {
			p.Look() // renewals go on with it, at once
		}
	}

	a.mu.Lock()
	err := a.usable(u)
	for _, p := range a.parts {
		if !p.Write && p.counts() { // it was acquired since, as a reader
			t.yes++
		}
	}
	a.mu.Unlock()
	if err != nil || quorum.Decide(len(a.parts), t.yes, 0) == quorum.Yes {
		return err
	}
	return a.nodes.explainTally(ctx, t, "downgrade", "have made the writer a reader")
}

// becomeReader makes a a read lock, and returns the parts that hold as writers. Those that do not hold are replaced by
// readers.
func (a *Acquisition) becomeReader(u User) (writers []*part, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch err := a.usable(u); {
	case err != nil:
		return nil, err
	case !a.users.writing(u, a.wrote):
		return nil, fmt.Errorf("%w: downgrade %q: it is a read lock", lockerr.ErrInvalid, a.Keys.Name())
	case a.users.writers(a.wrote) > 1:
		return nil, fmt.Errorf("%w: downgrade %q: unlock the nested write locks first", lockerr.ErrInvalid, a.Keys.Name())
	}
	return a.makeReader(), nil
}

// makeReader is becomeReader without a user that asks for it. The mutex is held.
func (a *Acquisition) makeReader() (writers []*part) {
	a.write = false
	for _, p := range a.parts {
		switch {
		case !p.Write: // an earlier call has replaced it
		case p.in && p.granted:
			p.node.Renewer.ReadOnly(&p.Lease)
			writers = append(writers, p)
		default:
			p.replaceByReader()
		}
	}
	return writers
}

// replaceByReader puts a reader in the place of p, which does not hold.
func (p *part) replaceByReader() {
	next := p.replace()
	switch {
	case p.asking: // it is released when that is answered, or has taken too long
	case p.in:
		p.node.Renewer.Release(&p.Lease)
	default:
		p.node.Renewer.Forget(&p.Lease)
	}
	next.acquireSoon()
}

// downgrade renews p as a reader, behind the acquire of front unless that is nil. If the node does not confirm it, its
// renewals go on with it.
func (p *part) downgrade(ctx context.Context, front *part) vote {
	n, place := p.node, p.node.Limiter.Releases
	if err := n.Admit(ctx, place, p.acq.Config.Timeout); err != nil {
		p.Look()
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
