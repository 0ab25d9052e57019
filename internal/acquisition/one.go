package acquisition

import (
	"context"
	"errors"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/script"
)

// oneNode is an acquisition over one node, which decides alone. The caller waits for it for as long as its context lasts.
type oneNode struct{ *Acquisition }

func (n oneNode) acquire(ctx context.Context) error {
	n.one[0].acquire(ctx)
	return n.Wait(ctx)
}

func (n oneNode) decide() {
	p := n.one[0]
	n.queued = n.queued || p.in && !n.try
	switch {
	case p.in && p.granted && p.Until() < n.soon():
		p.RenewNow()
	case p.in && p.granted:
		n.grant(p.token)
	case p.in, p.why == nil, isRetried(p.why) && !n.try:
	case !n.queued && !n.outlives, isFinal(p.why):
		n.abandon()
	}
}

func (n oneNode) heldSince(clock.Instant) bool { return n.one[0].counts() }

func (n oneNode) release(ctx context.Context, next *Acquisition) (t tally) {
	// Nothing changes p.in any more: the lock has ended.
	p := n.one[0]
	front := next.partOn(p.Node)
	if p.in {
		t.add(p.release(ctx, front))
	} else {
		front.start()
	}
	return t
}

func (n oneNode) collect(ctx context.Context, t *tally, open map[*part]bool, votes <-chan vote) {
	for p := range open {
		select {
		case v := <-votes:
			t.add(v)
		case <-ctx.Done():
			t.add(vote{part: p, err: node.ErrInterrupted})
		}
	}
}

func (n oneNode) onAnswer(*part, clock.Instant, int64, error) {}
func (n oneNode) onGranted(*part, clock.Instant)              {}
func (n oneNode) onAcknowledged(*part, clock.Instant)         {}

func (n oneNode) onLate(p *part, r script.Reply, _ error) {
	p.leaveMailbox()
	if p.Tombstone || r.Status == script.Granted || r.Status == script.Waiting {
		p.Node.Renewer.Release(&p.Lease)
	}
}

// onTimeout asks again: an acquire has failed a moment ago.
func (n oneNode) onTimeout(p *part) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if p.active() && !p.in && !n.try {
		p.start()
	}
}

// down is always nil: nobody else can grant the lock.
func (n oneNode) down(*part) error { return nil }

func (n oneNode) id() string { return n.one[0].ID() }
func (n oneNode) score() any { return nil }

func (n oneNode) explainRefusal() error {
	key, why := n.Keys.Name(), n.one[0].why
	if isRefusal(why) {
		return why
	}
	return lockerr.Doing("lock", key, why)
}

func (n oneNode) explainLoss(why error) error { return n.one[0].withCause(why) }

func (n oneNode) explainTally(ctx context.Context, t tally, call, _ string) error {
	key, why := n.Keys.Name(), lockerr.Redis(errors.New("unexpected reply"))
	if len(t.errs) > 0 {
		why = t.errs[0].err
	}
	if why == node.ErrInterrupted {
		return lockerr.Interrupted(ctx, key)
	}
	return lockerr.Doing(call, key, why)
}
