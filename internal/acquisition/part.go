package acquisition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/script"
)

// A part is one id of an acquisition on one node: the lease of that id, which the node's renewer keeps, and how far the
// node has granted it. The fields are guarded by the acquisition's mutex. See the package comment for its states.
type part struct {
	node.Lease
	acq  *Acquisition
	sent atomic.Int64 // when its last request was written to a connection, with several nodes; Past: it has not been

	token   uint64
	why     error // why it is not in; while it is, why it could not be renewed
	failed  uint8 // how many attempts on this node have failed in a row
	join    bool  // it joins the queue: a try would be refused
	listens bool  // it is in the mailbox
	asking  bool  // an acquire is under way
	in      bool  // it waits or holds, as far as this process knows
	granted bool  // the node has granted it; with little trust left it is renewed before it counts
	pushed  bool  // it was granted by a message, or in the reply to another call
	checked uint8 // how often RenewOften has been called since the grant, twice at most
}

// init makes p the part on a node, under the id of that number.
func (p *part) init(a *Acquisition, index int, number uint64) *part {
	p.acq = a
	p.sent.Store(int64(clock.Past))
	p.Lease.Init(p, a.Config.Nodes[index], number, a.write)
	return p
}

// Request implements [node.Owner].
func (p *part) Request() node.Request {
	a := p.acq
	return node.Request{Terms: &a.Config.Terms, Keys: a.Keys, Score: a.nodes().score()}
}

// participant returns p as scripts know it, for a call that is waited for.
func (p *part) participant() script.Participant {
	known := p.Participant()
	if known.Score != nil {
		known.Score = (*score)(p)
	}
	return known
}

// Acquire.

// acquire asks the node, and again under a new id where a try was refused and the caller waits.
func (p *part) acquire(ctx context.Context) {
	a := p.acq
	for p != nil {
		// While the mailbox listens, others wait or did a moment ago, or a lock is held for longer. Joining the queue at once then
		// saves a call, or costs none.
		try := a.try || !p.join && !p.Node.Mailbox.Listens()
		if !try {
			p.listen(ctx)
		}
		if ctx.Err() != nil {
			return
		}
		place := p.Node.Limiter.Acquires
		err := p.Node.Admit(ctx, place, a.Config.Timeout)
		if err == node.ErrInterrupted || !p.begin() {
			if err == nil {
				place.Free()
			}
			return
		}
		if err != nil {
			p = p.onAcquired(clock.Now(), 0, script.Reply{}, notSent{err})
			continue
		}
		sent, sweeps := clock.Now(), p.Node.Mailbox.Sweeps()
		c := p.acquireCommand(try)
		r, err := p.Node.Call(ctx, a.Config.TTL, c, place)
		p = p.onAcquired(sent, sweeps, r, err)
	}
}

// start has p ask its node in the background. P may be nil.
func (p *part) start() {
	if p == nil {
		return
	}
	go func() {
		returned := false
		defer func() {
			if !returned && len(p.acq.parts()) == 1 { // a hook has ended the goroutine; with several nodes there is a time-out
				p.acq.Withdraw()
			}
		}()
		p.acquire(context.Background())
		returned = true
	}()
}

// listen opens the mailbox for messages to p, and waits until it listens, or until it is better to poll. A message may
// overtake the reply to the acquire, so this comes before the acquire is sent.
func (p *part) listen(ctx context.Context) {
	settled := p.openMailbox()
	select {
	case <-settled:
		return
	default:
	}
	timeout := time.NewTimer(min(p.acq.Config.TTL/4, time.Second))
	defer timeout.Stop()
	select {
	case <-settled:
	case <-timeout.C:
	case <-ctx.Done():
	}
}

// openMailbox opens the mailbox for messages to p. The channel is closed when it listens, or cannot.
func (p *part) openMailbox() (settled <-chan struct{}) {
	p.acq.mu.Lock()
	defer p.acq.mu.Unlock()
	if !p.active() {
		return closed
	}
	p.listens = true
	return p.Listen()
}

var closed = func() <-chan struct{} { c := make(chan struct{}); close(c); return c }()

// acquireCommand is the command that acquires p. Its place in the queue of one node is that of a request made when the process
// began to wait; with several nodes it has a score.
func (p *part) acquireCommand(try bool) script.Command {
	var age time.Duration
	if asked := p.acq.asked; asked != 0 {
		age = time.Duration(clock.Now() - asked)
	}
	return p.participant().Acquire(try, p.acq.Config.First(p.Write), age)
}

// begin notes that p asks its node, and reports whether it may: it may have been given up. With a node time-out, the renewer
// calls OnTimeout when that is over.
func (p *part) begin() bool {
	a := p.acq
	a.mu.Lock()
	defer a.mu.Unlock()
	if p.asking = p.active(); p.asking && a.Config.Timeout > 0 {
		p.Node.Renewer.SetTimeout(&p.Lease, clock.Now().Add(a.Config.Timeout))
	}
	return p.asking
}

// index is the place of its node among the nodes of the acquisition.
func (p *part) index() int { return slices.Index(p.acq.Config.Nodes, p.Node) }

// nodeName is the name of p's node.
func (p *part) nodeName() string { return p.acq.Config.NodeName(p.index()) }

// onNode adds the name of p's node to an error, if there are several.
func (p *part) onNode(err error) error { return p.acq.Config.OnNode(p.index(), err) }

// active reports whether p is, or may become, a part of the lock.
func (p *part) active() bool {
	return p.acq.parts()[p.index()] == p && (p.acq.state == pending || p.acq.state == held)
}

// A notSent error is that of a call that was not made.
type notSent struct{ error }

func (e notSent) Unwrap() error { return e.error }

// onAcquired handles the answer to an acquire that was sent at that instant. Sweeps is what Mailbox.Sweeps returned then. It
// returns the part that asks next, or nil.
func (p *part) onAcquired(sent clock.Instant, sweeps uint32, r script.Reply, err error) (next *part) {
	a := p.acq
	p.Node.CheckPublish(r, a.Config.Log)
	a.nodes().onAnswer(p, sent, r.Last, err)
	var n news
	a.mu.Lock()
	if p.asking {
		next, n = p.acquired(sent, sweeps, r, err)
	} else if r.Status == script.Granted || r.Status == script.Waiting {
		// The id has been released already, but the node may have restarted since and lost the tombstone.
		p.Node.Renewer.Release(&p.Lease)
	}
	a.mu.Unlock()
	n.tell()
	return next
}

func (p *part) acquired(sent clock.Instant, sweeps uint32, r script.Reply, err error) (next *part, _ news) {
	a := p.acq
	p.asking = false
	if a.Config.Timeout > 0 {
		p.Node.Renewer.Forget(&p.Lease)
	}
	if e, ok := err.(notSent); ok {
		err = e.error
	} else {
		p.Tombstone = err != nil && !lockerr.Has(err, lockerr.Full) || p.Node.MaySendTwice(sent)
		p.MayExist = err != nil || r.Status == script.Granted || r.Status == script.Waiting
	}
	switch {
	case !p.active():
		a.nodes().onLate(p, r, err)
	case errors.Is(err, lockerr.ErrNotLock):
		p.Tombstone = false
		return nil, p.fail(err)
	case err != nil:
		return nil, p.fail(err)
	case r.Status == script.Foreign:
		return nil, p.fail(lockerr.Foreign(r.Data))
	case r.Status == script.Busy && a.try:
		return nil, p.fail(Held(a.Keys.Name(), r.Holder))
	case r.Status == script.Busy:
		if p.Tombstone {
			p.Node.Renewer.Release(&p.Lease)
		}
		next = p.replace()
		next.join, next.failed = true, p.failed
	case r.Status != script.Granted && r.Status != script.Waiting:
		return nil, p.fail(retried{lockerr.Redis(fmt.Errorf("unexpected status %d", r.Status))})
	case r.Status == script.Granted && p.Write && r.Value == 0:
		p.Tombstone = true
		return nil, p.fail(retried{lockerr.Redis(errors.New("a grant without a fencing token"))})
	case a.Config.Trusted(sent) <= clock.Now():
		p.Tombstone = true
		return nil, p.fail(retried{lockerr.Redis(fmt.Errorf("the reply took longer than the TTL of %v", a.Config.TTL))})
	default:
		p.in, p.why = true, nil
		if r.Status == script.Granted {
			p.grant(sent, uint64(r.Value))
		}
		a.nodes().onAcknowledged(p, sent)
		p.failed = 0
		p.Acknowledge(sent)
		a.decide()
		if p.granted { // a message may have overtaken the reply
			r.Status = script.Granted
		}
		p.Node.Renewer.Renew(&p.Lease, p.granted && a.state == held, sent, r)
		if !p.granted && p.Node.Mailbox.Sweeps() != sweeps { // the others have been renewed while p could not be
			p.RenewNow()
		}
	}
	return next, news{}
}

// A retried error ends an id and not the wait: the part is replaced by one that asks again.
type retried struct{ error }

func (e retried) Unwrap() error { return e.error }

func isRetried(err error) bool {
	_, is := err.(retried)
	return is
}

// isFinal reports whether a node that failed with err will not grant anything later either.
func isFinal(err error) bool {
	return errors.Is(err, lockerr.ErrNotLock) || lockerr.Has(err, lockerr.ClientClosed)
}

// Held returns the error of a try for which an id is in the way; "": it is not known which.
func Held(key, id string) error {
	return &lockerr.HeldError{Key: key, Holder: id, Process: node.ProcessOf(id)}
}

// isRefusal reports whether a try failed with err because others are in the way.
func isRefusal(err error) bool {
	_, is := err.(*lockerr.HeldError)
	return is
}

// OnGranted implements [node.Owner]: a message says that the node has granted p. One that overtakes the reply to the acquire
// counts when that has come.
func (p *part) OnGranted(token uint64) {
	a := p.acq
	a.mu.Lock()
	defer a.mu.Unlock()
	if p.active() && !p.granted {
		p.pushed = true
		p.grant(clock.Now(), token)
		if p.in {
			a.decide()
		}
	}
}

// grant notes that the node has granted p, in reply to a call that was sent at that instant.
func (p *part) grant(sent clock.Instant, token uint64) {
	if !p.granted {
		p.acq.nodes().onGranted(p, sent)
		p.Node.CheckEviction(p.acq.Config.Log)
	}
	p.granted, p.token = true, token
}

// counts reports whether p's node is one of those that make the lock.
func (p *part) counts() bool {
	return p.in && p.granted && (p.token >= p.acq.token || !p.acq.write)
}

// hasReplied reports whether the node has granted p, put it into the queue, or refused a try since others hold the lock.
func (p *part) hasReplied() bool { return p.in || isRefusal(p.why) }

// leaveMailbox ends the delivery of messages to p.
func (p *part) leaveMailbox() {
	if p.listens {
		p.listens = false
		p.StopListening()
	}
}

// Renew.

// OnRenewed implements [node.Owner].
func (p *part) OnRenewed(sent clock.Instant, r script.Reply) {
	a := p.acq
	a.nodes().onAnswer(p, sent, r.Last, nil)
	until := a.Until()
	if !p.renewed(r) {
		return
	}
	a.owner.OnRenewed()
	if a.Config.Trace != nil {
		a.Config.Trace.Renewed(a.Keys.Name(), a.ID, until)
	}
}

// renewed takes the reply to a renewal, and reports whether it was that of a held lock.
func (p *part) renewed(r script.Reply) bool {
	a := p.acq
	a.mu.Lock()
	defer a.mu.Unlock()
	if !p.active() || !p.in {
		return false
	}
	was := a.state
	p.why = nil
	if r.Status == script.Granted {
		p.grant(clock.Now(), max(p.token, uint64(r.Value))) // the reply to RenewWriter has no token
		if r.Preceded && a.state == pending && !a.hasMajority() {
			p.yield()
		}
	} else if p.checked == 1 { // it is older than the grant, and has put off the renewals; or the node has lost the grant
		p.checked++
		p.Node.Renewer.RenewOften(&p.Lease)
	}
	a.decide()
	return was == held && r.Status == script.Granted
}

// OnRenewFailed implements [node.Owner].
func (p *part) OnRenewFailed(sent clock.Instant, err error) {
	a := p.acq
	a.nodes().onAnswer(p, sent, 0, err)
	var n news
	a.mu.Lock()
	holds := a.state == held && p.in && p.active()
	switch {
	case !p.in || !p.active():
	case a.state == pending && isFinal(err):
		n = p.fail(err)
	default:
		if a.state == pending && p.why == nil {
			n = news{acquisition: a, what: "a renewal failed; the waiter keeps its place and tries again", err: p.onNode(err)}
		}
		p.why = err
	}
	a.mu.Unlock()
	n.tell()
	if holds && a.Config.Trace != nil {
		a.Config.Trace.RenewFailed(a.Keys.Name(), a.ID, a.Until(), err)
	}
}

// yield releases a node on which another request stands before a, and acquires it again with the same rank: so requests
// that have a node each do not wait for each other for ever. The id is a new one, since a message to the old one may be under
// way.
func (p *part) yield() {
	p.Node.Renewer.Release(&p.Lease)
	next := p.replace()
	next.join = true
	next.start()
}

// Fail.

// OnExpired implements [node.Owner].
func (p *part) OnExpired(why error) {
	a := p.acq
	var n news
	a.mu.Lock()
	switch {
	case !p.active() || !p.in:
	case why == lockerr.ErrRevoked:
		n = p.revoked()
	default:
		p.Tombstone = p.Tombstone || a.state == pending
		n = p.fail(why)
	}
	a.mu.Unlock()
	n.tell()
}

// OnTimeout implements [node.Owner]: the node time-out of an acquire is over, or an acquire that was put off is due.
func (p *part) OnTimeout() { p.acq.nodes().onTimeout(p) }

// revoked ends the whole acquisition, or the wait for it: somebody has revoked p. Every node is released, that of p too: it may
// have lost what was done there. The mutex is held.
func (p *part) revoked() news {
	a := p.acq
	if a.state == held {
		return a.end(lockerr.ErrRevoked, fmt.Errorf("%q", a.Keys.Name()))
	}
	why := lockerr.Of(lockerr.ErrRevoked, fmt.Errorf("%q: while it waited", a.Keys.Name()))
	a.cause = &why
	a.releaseInBackground()
	a.abandon()
	return news{}
}

// fail handles that the node does not hold p, or no longer holds it. Either the request or the lock ends, or a new part takes the
// place of p. The mutex is held.
func (p *part) fail(why error) news {
	a := p.acq
	from := p.Until() // since when the lock may have been granted to others on this node
	if why == node.ErrGone || errors.Is(why, lockerr.ErrNotLock) {
		from = from.Add(a.Config.Drift - a.Config.TTL) // since it was last renewed
	}
	if p.in || p.Tombstone {
		p.Node.Renewer.Release(&p.Lease)
	}
	why = p.withCause(why)
	wasIn, counted := p.in, p.counts()
	p.in, p.granted, p.why = false, false, why
	switch {
	case a.state == held && counted && (a.expiring || !a.nodes().heldSince(from)):
		return a.lose(why)
	case a.try && a.state == pending:
		if wasIn { // a grant that was renewed first, and is lost: Redis has failed
			p.why = lockerr.Redis(why)
		}
		p.leaveMailbox()
		a.decide()
		return news{}
	}
	next := p.replace()
	next.failed, next.why = min(p.failed+1, 10), why
	if wasIn && !isRetried(why) && !isFinal(why) {
		next.why = retried{why}
	}
	a.decide()
	if !next.active() {
		return news{}
	}
	next.acquireSoon()
	if p.failed > 0 || !wasIn && !isRetried(why) && !a.outlives {
		return news{} // it has been logged, or is returned
	}
	n := news{acquisition: a, what: "the waiter joins the queue again", err: p.onNode(why)}
	if a.state == held {
		n.what = "a node does not hold the lock any more; the other nodes do, and it is acquired again"
	}
	return n
}

// withCause adds to the end of a lease why it could not be renewed.
func (p *part) withCause(why error) error {
	if p.in && p.why != nil && why == node.ErrExpired {
		return fmt.Errorf("%w: %w", why, p.why)
	}
	return why
}

// replace puts a new part in the place of p.
func (p *part) replace() *part {
	p.leaveMailbox()
	i := p.index()
	next := new(part).init(p.acq, i, p.NextID())
	next.join = p.join
	p.acq.parts()[i] = next
	return next
}

// acquireSoon has p ask the node in the background: later if it has failed before, or its node is down.
func (p *part) acquireSoon() {
	const minBackoff, maxBackoff = 10 * time.Millisecond, time.Second
	switch {
	case p.acq.nodes().down(p) != nil:
		p.acquireLater()
	case p.failed > 1:
		p.Node.Renewer.SetTimeout(&p.Lease, clock.Now().Add(min(minBackoff<<(p.failed-1), maxBackoff)))
	default:
		p.start()
	}
}

// acquireLater has p ask a node that is down when that is tried again.
func (p *part) acquireLater() {
	p.Node.Renewer.SetTimeout(&p.Lease, clock.Now().Add(node.RetryAfter))
}
