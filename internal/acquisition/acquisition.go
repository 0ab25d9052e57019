// Package acquisition has the requests for locks on one node or several, each from its first call to its last: it waits, is
// held, and is released or lost.
//
// # States
//
//	          ┌──(granted by a majority)──► held ──(its owner closes it)──► released
//	          │                              │
//	          │                              └──(a majority forgets it, trust ends, or it is revoked)──► lost
//	pending ──┤
//	          ├──(the caller gives up, no majority will grant it, or it is revoked)──► abandoned
//	          │
//	          └──(its owner wants it no longer)──► superseded
//
// A caller whose request was superseded acquires again. A held acquisition that its owner has not used yet may also be
// abandoned or superseded.
//
// On each node an acquisition has a [part] with an id and a lease of its own. An id that is of no use any more is
// released, and another part takes its place:
//
//	          ┌──(busy)──► replaced by one that joins the queue
//	asking ───┼──(waiting)──► waits ──(granted)──► counts ──(gone, expired; waits: also yields)──► replaced
//	          ├──(granted)─────────────────────────────┘
//	          └──(an error)──► replaced by one that asks again later
//
// What one node and several do differently stands in one.go and several.go, behind one interface, [nodes]: one node is
// called by the caller itself and decides alone; several are called side by side and vote, and each is waited for no
// longer than the node time-out.
//
// # Mutexes
//
// An acquisition has one mutex, which also guards its parts. It comes before those of a node and its mailbox. No foreign
// code (contexts, loggers, the client and its hooks) runs under it, since that code may call back.
package acquisition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/script"
)

// An Acquisition is one request for a lock and what became of it. Who shares the lock in this process is its owner's
// business.
type Acquisition struct {
	Config *Config
	Keys   *script.Keys
	owner  Owner
	asked  clock.Instant // since when it has waited in this process, with one node; 0: it has not

	token uint64       // set before it is held, and not changed afterwards
	until atomic.Int64 // when trust in it ends

	mu       sync.Mutex
	state    state
	try      bool
	write    bool // not any more after a downgrade
	queued   bool // a majority of the nodes has granted it or put it into the queue
	used     bool // set by Use
	expiring bool // set by LetExpire
	// These two are set by Share.
	shared, outlives bool

	cause  *error        // why it was lost, or its wait revoked; a pointer, since few are
	signal chan struct{} // wakes the caller, and holds one signal; nil: the caller does not sleep

	// The part of one node, and its memory; or several.
	one     [1]*part
	only    part
	several *severalNodes
}

// An Owner uses an acquisition, and is told of its renewals and its loss. It is called under no mutex.
type Owner interface {
	// OnRenewed tells that the held lock was renewed.
	OnRenewed()
	// OnLost tells that the held lock was lost or revoked, and why.
	OnLost(why error)
}

// An Origin is when a request joined the queue of its process and, with several nodes, the rank that it was given then. The
// zero Origin is that of a request that has not waited there.
type Origin struct {
	Asked clock.Instant
	Rank  int64
}

// nodes is what one node and several do differently. Where nothing else is said, the mutex of the acquisition is held.
type nodes interface {
	// acquire asks the nodes and waits, as described for Acquire. Release releases the lock on each node, behind the acquire of
	// next unless that is nil. Collect adds the votes of the parts in open to t, until ctx ends. All three are called without
	// the mutex.
	acquire(ctx context.Context) error
	release(ctx context.Context, next *Acquisition) tally
	collect(ctx context.Context, t *tally, open map[*part]bool, votes <-chan vote)

	// decide decides what the answers to a pending request amount to, after one of them has changed.
	decide()
	// heldSince reports whether the lock has been held since then without a gap, by the nodes that count now.
	heldSince(from clock.Instant) bool

	// onAnswer, which is called without the mutex, notes what came of a call for p that was sent at that instant. Rank is the
	// highest one in the node's queue, or 0.
	onAnswer(p *part, sent clock.Instant, rank int64, err error)
	// onGranted notes that the node has granted p, and onAcknowledged that it has granted p, or put p into the queue, in
	// reply to an acquire. Sent is when that acquire was sent; of a grant by message or by renewal, it is now.
	onGranted(p *part, sent clock.Instant)
	onAcknowledged(p *part, sent clock.Instant)
	// onLate releases p. Its acquire was answered after the request had ended.
	onLate(p *part, r script.Reply, err error)
	// onTimeout is called when the time-out that p has set is over. It takes the mutex.
	onTimeout(p *part)
	// down returns why the node of p is not asked for now, or nil.
	down(p *part) error

	// id is the id under which the lock is known, and score its place in the queue of every node, as scripts take it; nil if
	// the node chooses it. They need no mutex.
	id() string
	score() any

	// These put into words why a request was refused, why a lock was lost, and what came of an unlock or a downgrade that
	// was not confirmed.
	explainRefusal() error
	explainLoss(why error) error
	explainTally(ctx context.Context, t tally, call, done string) error
}

type state uint8

const (
	pending state = iota
	held
	released
	lost
	abandoned
	superseded
)

// ErrRetry is returned where an acquisition came to nothing, but another one may succeed.
var ErrRetry = errors.New("acquire again")

// ErrWaiting is returned by Acquire and Wait of a shared acquisition whose caller gives up while it waits in the queue of
// Redis, or as it is granted. It goes on.
var ErrWaiting = errors.New("it goes on without the caller")

// Init sets a up as a request that has not been sent.
func (a *Acquisition) Init(c *Config, keys *script.Keys, owner Owner, write, try bool, origin Origin) {
	a.Config, a.Keys, a.owner, a.write, a.try = c, keys, owner, write, try
	if len(c.Nodes) > 1 {
		a.several = newSeveralNodes(a, origin)
		return
	}
	a.asked = origin.Asked
	a.one[0] = a.only.init(a, 0, node.NewNumber())
}

// Share makes a, which has not been sent, an acquisition that does not end with the context of the caller once it waits
// in the queue. If it outlives errors, it asks again after an error of its first attempt, too.
func (a *Acquisition) Share(outlives bool) { a.shared, a.outlives = true, outlives }

// nodes is where the choice between one node and several is made.
func (a *Acquisition) nodes() nodes {
	if a.several != nil {
		return a.several
	}
	return oneNode{a}
}

// parts has one for each node.
func (a *Acquisition) parts() []*part {
	if a.several != nil {
		return a.several.parts
	}
	return a.one[:]
}

// majority is how many of its nodes are a majority.
func (a *Acquisition) majority() int { return Majority(len(a.parts())) }

// ID returns the id under which the first node knew it, or was asked for it, when it was granted.
func (a *Acquisition) ID() string { return a.nodes().id() }

// CurrentID returns the id under which the first node knows a, or is asked for it, now.
func (a *Acquisition) CurrentID() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.parts()[0].ID()
}

// Token returns the fencing token. It is 0 for a reader.
func (a *Acquisition) Token() uint64 { return a.token }

// Rank returns its rank on several nodes, or 0 with one node, which chooses it.
func (a *Acquisition) Rank() int64 {
	if a.several == nil {
		return 0
	}
	return a.several.origin.Rank
}

// Pushed reports whether a node granted it by message.
func (a *Acquisition) Pushed() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.ContainsFunc(a.parts(), func(p *part) bool { return p.pushed })
}

// Until returns when trust in it ends unless it is renewed.
func (a *Acquisition) Until() clock.Instant { return clock.Instant(a.until.Load()) }

// Acquire asks the nodes for the lock and waits until it is granted, or will not be granted, or ctx ends. It returns
// ErrRetry if the acquisition was superseded, or lost before its owner has used it. If a hook or a logger panics, the request
// is withdrawn.
func (a *Acquisition) Acquire(ctx context.Context) error {
	returned := false
	defer func() {
		if !returned {
			a.Withdraw()
		}
	}()
	err := a.nodes().acquire(ctx)
	returned = true
	return err
}

// Wait waits until a is held, or will not be held, or ctx ends. It goes on where Acquire has returned ErrWaiting.
func (a *Acquisition) Wait(ctx context.Context) error {
	for {
		a.mu.Lock()
		state := a.state
		if state == pending && a.signal == nil {
			a.signal = make(chan struct{}, 1)
		}
		signal, queued := a.signal, a.queued
		a.mu.Unlock()
		switch state {
		case pending:
		case held:
			return nil
		case abandoned:
			return a.refused(ctx)
		default:
			return ErrRetry
		}
		if queued && a.Config.Trace != nil {
			a.Config.Trace.Waiting(ctx, false)
		}
		select {
		case <-signal:
		case <-ctx.Done():
			return a.refused(ctx)
		}
	}
}

// refused returns the error of a request that came to nothing, also if it was granted a moment ago; or ErrWaiting if it goes on
// without the caller.
func (a *Acquisition) refused(ctx context.Context) error {
	a.mu.Lock()
	if a.shared && (a.state == held || a.state == pending && a.queued) {
		a.mu.Unlock()
		return ErrWaiting
	}
	a.state = abandoned
	if ctx.Err() != nil {
		a.releaseInBackground()
		a.mu.Unlock()
		return lockerr.Ended(ctx, a.Keys.Name())
	}
	var err error
	if a.cause != nil {
		err = *a.cause // it was revoked
	} else {
		err = a.nodes().explainRefusal()
	}
	a.mu.Unlock()
	_ = a.Release(ctx, nil) // of what some nodes have granted
	return err
}

// Use notes that its owner grants a lock under a. From then on Withdraw does not end a, and Close has to. Use returns ErrRetry
// if a has ended meanwhile. It may be called again.
func (a *Acquisition) Use() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state != held {
		return ErrRetry
	}
	a.used = true
	return nil
}

// Lost returns nil, or an error that matches ErrLockLost, ErrRevoked or ErrMaxHold if a was lost.
func (a *Acquisition) Lost() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state == lost {
		return fmt.Errorf("%w: %q", lockerr.KindOf(*a.cause), a.Keys.Name())
	}
	return nil
}

// Check makes a held lock whose lease is over a lost one, although no timer may have fired: a renewal under way must not bring
// it back. Unless tell is nil, it has to be called, and tells the owner.
func (a *Acquisition) Check() (tell func()) {
	if a.Until() > clock.Now() {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state != held || a.Until() > clock.Now() {
		return nil
	}
	return a.lose(node.ErrExpired).tell
}

// Close ends a held lock. Release has to follow, unless a was lost meanwhile, which is the error.
func (a *Acquisition) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state == lost {
		return *a.cause
	}
	a.state = released
	return nil
}

// LetExpire stops the renewals of a held lock, so that it ends with its lease: it has been held for as long as it may.
func (a *Acquisition) LetExpire() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state != held || a.expiring {
		return
	}
	a.expiring = true
	for _, p := range a.parts() {
		p.Node.Renewer.LetExpire(&p.Lease)
	}
}

// Withdraw ends a request that is not wanted any more, or a held lock that its owner has not used. What has been granted is
// released in the background. It reports whether the nodes had granted it or put it into the queue.
func (a *Acquisition) Withdraw() (acknowledged bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	acknowledged = a.queued || a.state == held
	if a.state == pending || a.state == held && !a.used {
		a.state = superseded
		for _, p := range a.parts() {
			if p.asking { // its answer is not waited for: the release refuses an acquire that arrives later
				p.asking, p.in, p.Tombstone, p.MayExist = false, true, true, true
			}
		}
		a.releaseInBackground()
		a.wake()
	}
	return acknowledged
}

// Cause returns why it was lost. It must have been lost.
func (a *Acquisition) Cause() error { return *a.cause }

// decide decides what the answers of the nodes amount to, after one of them has changed. The mutex is held.
func (a *Acquisition) decide() {
	switch a.state {
	case pending:
		a.nodes().decide()
	case held:
		a.updateTrust()
	}
}

// soon returns the instant until which a grant must be trusted to count. A grant runs with the lease that the waiter had
// when it came, so with little of that left it is renewed first.
func (a *Acquisition) soon() clock.Instant { return clock.Now().Add(a.Config.TTL / 4) }

// hasMajority reports whether a majority of the nodes hold it.
func (a *Acquisition) hasMajority() bool {
	n := 0
	for _, p := range a.parts() {
		if p.counts() {
			n++
		}
	}
	return n >= a.majority()
}

// grant marks a as held. The mutex is held.
func (a *Acquisition) grant(token uint64) {
	a.state, a.token = held, token
	a.updateTrust()
	a.wake()
}

// abandon ends a request that no node, or no majority, will grant. The mutex is held.
func (a *Acquisition) abandon() {
	a.state = abandoned
	a.wake()
}

// updateTrust renews the parts that count as holders, has the others raise their token, and sets the end of trust: the instant
// at which no majority of trusted leases is left. The mutex is held.
func (a *Acquisition) updateTrust() {
	var buf [8]clock.Instant
	ends := buf[:0]
	for _, p := range a.parts() {
		switch {
		case p.counts():
			ends = append(ends, p.Until())
			p.leaveMailbox()
			p.Node.Renewer.RenewAsHolder(&p.Lease)
		case p.in && p.granted:
			p.Node.Renewer.Raise(&p.Lease, a.token)
		}
	}
	if majority := a.majority(); len(ends) >= majority {
		slices.Sort(ends)
		a.until.Store(int64(ends[len(ends)-majority]))
	}
}

// lose ends a held lock. Its owner is told when the mutex is free again. The mutex is held.
func (a *Acquisition) lose(why error) news {
	kind := lockerr.ErrLockLost
	if a.expiring {
		kind = lockerr.ErrMaxHold
	}
	return a.end(kind, fmt.Errorf("%q: %w", a.Keys.Name(), a.nodes().explainLoss(why)))
}

// end is lose for any reason: ErrLockLost, ErrMaxHold, or that the lock was revoked.
func (a *Acquisition) end(kind, why error) news {
	why = lockerr.Of(kind, why)
	a.state, a.cause = lost, &why
	// A renewal whose reply was lost may have renewed it on the server.
	a.releaseInBackground()
	return news{acquisition: a, err: why, lost: true}
}

// wake wakes the caller, if it sleeps.
func (a *Acquisition) wake() {
	select {
	case a.signal <- struct{}{}:
	default:
	}
}

// news is what is left to do when the mutex is free again: the owner of a lost lock is told, and err is logged.
type news struct {
	acquisition *Acquisition
	what        string // what the library does now
	err         error  // nil: there is no news
	lost        bool
}

func (n news) tell() {
	if n.lost {
		n.acquisition.owner.OnLost(n.err)
	}
	if n.err != nil {
		n.acquisition.Config.Log.Error(n.acquisition.Keys.Name(), n.what, n.err)
	}
}
