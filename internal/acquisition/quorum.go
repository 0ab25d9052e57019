package acquisition

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/quorum"
	"golang.org/x/sync/semaphore"
)

// quorumState is what an acquisition over several nodes has besides.
type quorumState struct {
	score any       // its place in the queue of every node, a string, as scripts take it
	id    string    // its id, once it is granted
	votes chan vote // takes the answers to releases; nil: nobody waits for them

	unanswered atomic.Int32 // how many nodes have to answer before the next request is made; less than 1: it has been

	grantedAt clock.Instant
	since     []clock.Instant // when each node was acquired, if that was after the grant
}

func newQuorumState(nodes int, score any) *quorumState {
	return &quorumState{score: score, since: slices.Repeat([]clock.Instant{clock.Always}, nodes)}
}

// acquireFromEach asks every node, side by side. It returns an error if ctx ends before the request may be made, or if
// the requests in front have shown that no majority answers.
//
// As many requests are under way as the first node has connections; the next is made when a majority has answered.
func (a *Acquisition) acquireFromEach(ctx context.Context) error {
	requests := a.Config.Nodes[0].Requests
	waited := !requests.TryAcquire(1)
	if waited && requests.Acquire(ctx, 1) != nil {
		return lockerr.Ended(ctx, a.Keys.Name())
	}
	up, majority := 0, quorum.Majority(len(a.parts))
	down := make([]error, len(a.parts))
	for i, p := range a.parts {
		if down[i] = p.node.Health.Down(); down[i] == nil {
			up++
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if waited && up < majority && !a.outlives {
		requests.Release(1)
		for i, p := range a.parts {
			p.why = down[i]
		}
		a.state = abandoned
		return a.explainRefusal()
	}
	a.quorum.unanswered.Store(int32(majority))
	for i, p := range a.parts {
		// Nodes that are down are skipped, unless nothing can be decided without them.
		if down[i] == nil || up < majority {
			p.node.Go(func() {
				p.acquire(context.Background())
				a.quorum.answered(requests)
			})
			continue
		}
		p.why = down[i]
		p.ping()
		if !a.try {
			p.acquireLater()
		}
	}
	return nil
}

// answered notes that a node has answered. When a majority has, the next request may be made.
func (q *quorumState) answered(requests *semaphore.Weighted) {
	if q.unanswered.Add(-1) == 0 {
		requests.Release(1)
	}
}

// answeredAll lets the next request be made, if answered has not done so.
func (q *quorumState) answeredAll(requests *semaphore.Weighted) {
	if q.unanswered.Swap(-int32(len(q.since))) > 0 {
		requests.Release(1)
	}
}

// A count is how the nodes stand towards a request.
type count struct {
	granted int    // how many have granted it, with trust to spare
	highest uint64 // the highest fencing token of these
	in      int    // how many have granted it or put it into the queue
	replied int    // how many of the rest have refused a try, and of in
	failed  int    // how many have refused or failed
	final   int    // how many of these will not grant it later either
	open    bool   // some have not answered
}

// count counts. A grant that is trusted until soon at the most does not count yet: it is renewed first.
func (a *Acquisition) count(soon clock.Instant) (c count) {
	for _, p := range a.parts {
		if p.hasReplied() {
			c.replied++
		}
		switch {
		case p.in && p.granted && p.Until() < soon:
			c.in++
			p.Look()
		case p.in:
			c.in++
			if p.granted {
				c.granted++
				c.highest = max(c.highest, p.token)
			}
		case p.why == nil, isRetried(p.why) && !a.try:
			c.open = true
		default:
			c.failed++
			if isFinal(p.why) {
				c.final++
			}
		}
	}
	return c
}

// isClear reports whether it is clear why a request is refused: a majority has replied to a try, or no other node may
// still answer.
func (a *Acquisition) isClear(c count) bool {
	return !a.try || !c.open || c.replied >= quorum.Majority(len(a.parts))
}

// agreeOnToken grants a if a majority of the nodes that granted it have the same fencing token. Else it has those with a
// lower one than the highest raise it: they do so only while a holds them, or the proof would fail.
//
// The proof that a token is greater than every one before it: two majorities share a node that granted both locks. There
// the later lock was granted after the earlier one had ended, hence after that had a token no lower than the earlier
// lock's, and so the node gave it a greater one; and the later lock's token is no lower than what any node of its majority
// gave it.
func (a *Acquisition) agreeOnToken(soon clock.Instant, highest uint64) {
	for _, p := range a.parts {
		same := 0
		for _, other := range a.parts {
			if other.in && other.granted && other.Until() >= soon && other.token == p.token {
				same++
			}
		}
		if same >= quorum.Majority(len(a.parts)) {
			a.grant(p.token)
			return
		}
	}
	for _, p := range a.parts {
		if p.in && p.granted && p.token < highest {
			p.node.Renewer.Raise(&p.Lease, highest)
		}
	}
}

// hasMajority reports whether a majority of the nodes hold it.
func (a *Acquisition) hasMajority() bool {
	n := 0
	for _, p := range a.parts {
		if p.counts() {
			n++
		}
	}
	return n >= quorum.Majority(len(a.parts))
}

// heldSince reports whether a majority has been held since then without a gap. If several nodes lose their data at once,
// and the client learns of one after the other, each may have been acquired again by then; but another client may have
// held them all in between.
func (a *Acquisition) heldSince(from clock.Instant) bool {
	n := 0
	for i, p := range a.parts {
		if p.counts() && (a.quorum == nil || a.quorum.since[i] <= max(from, a.quorum.grantedAt)) {
			n++
		}
	}
	return n >= quorum.Majority(len(a.parts))
}

// isAfterGrant reports whether a call that was sent at that instant was sent after several nodes had granted the lock.
func (a *Acquisition) isAfterGrant(sent clock.Instant) bool {
	return a.state == held && a.quorum != nil && sent > a.quorum.grantedAt
}

// ping asks a node that is down, when that is due, whether it is up: it renews an id there that does not hold.
func (p *part) ping() {
	if !p.node.Health.Retry() {
		return
	}
	c := p.Participant().RenewWriter()
	p.node.Go(func() {
		sent := clock.Now()
		_, err := p.node.Run(context.Background(), p.acq.Config.TTL, c)
		p.recordHealth(sent, 0, err)
	})
}

// noAnswer is the error of a node that has not answered within the node time-out.
func (a *Acquisition) noAnswer() error {
	return lockerr.Redis(fmt.Errorf("no answer within %v", a.Config.Timeout))
}
