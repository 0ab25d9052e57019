package node

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/logger"
	"github.com/redismutex/redismutex/internal/script"
)

// Terms are what a mutex has set for all its locks.
type Terms struct {
	TTL       time.Duration
	Drift     time.Duration // a lease is trusted for that much less than its TTL
	Timeout   time.Duration // how long one node of several is waited for; 0: no limit
	Durations script.Durations
	Log       logger.Logger
}

// Trusted returns until when a lease is trusted that was acknowledged by a call sent at that instant.
func (t *Terms) Trusted(sent clock.Instant) clock.Instant { return sent.Add(t.TTL - t.Drift) }

// An Owner is the part of an acquisition to which a lease belongs. The renewer and the mailbox call it, under no mutex except
// for Request.
type Owner interface {
	// Request returns what the leases of the acquisition have in common. It must take no mutex.
	Request() Request
	// OnRenewed takes the reply to a renewal that was sent at that instant: the lease is granted or waiting.
	OnRenewed(sent clock.Instant, r script.Reply)
	// OnRenewFailed takes the error of a renewal. It is sent again.
	OnRenewFailed(sent clock.Instant, err error)
	// OnExpired tells that the lease has ended or that the node does not know it, and why. It is not renewed again.
	OnExpired(why error)
	// OnGranted tells that a message, or the reply to another call, has granted the lease.
	OnGranted(token uint64)
	// OnTimeout tells that the instant has come for which the owner asked [Renewer.SetTimeout].
	OnTimeout()
}

// A Request is what the leases of one acquisition have in common.
type Request struct {
	Terms *Terms
	Keys  *script.Keys
	Score any // as scripts take it; nil with one node
}

var (
	// ErrGone says that the node does not know the id.
	ErrGone = errors.New("unknown to Redis: its data was lost, or the lease ran out there")
	// ErrExpired says that the trust in the lease has ended.
	ErrExpired = errors.New("not renewed within its lease")
)

// A Lease is how long one id counts on one node, as its renewer keeps it. The fields are guarded by the renewer's mutex,
// except those that are set once and the atomic one. The owner sets Tombstone and MayExist and calls Acknowledge only while the
// renewer does nothing for the lease.
type Lease struct {
	Node   *Node // set once
	owner  Owner
	number uint64 // of the id, in the node's mailbox; set once

	end       atomic.Int64  // when trust in it ends; of a release or a time-out, when that is over
	due       clock.Instant // when its next call is due
	raise     uint64        // the token to which the node's has to be raised; 0: none
	heapIndex int32         // its index in its heap, plus 1; 0: it is in none
	pause     int32         // ms between renewals that nothing else calls for

	task     task
	ready    bool // it is in the heap of those that are ready
	called   bool // a call for it is under way
	exact    bool // it is not called before it is due
	released bool // a release was sent that was not confirmed
	Write    bool // it is acquired as a writer; set once
	readOnly bool // it is renewed as a reader, whatever it was acquired as
	// Tombstone says that its release refuses an acquire that arrives later. The owner sets it before the release.
	Tombstone bool
	// MayExist says that the id may have waited or held, so that its release may grant the lock to others. The owner sets it
	// before the release.
	MayExist bool
}

// Init makes l the lease of a new id on a node. The number of the id is one of NewNumber's or comes from NextID.
func (l *Lease) Init(owner Owner, n *Node, number uint64, write bool) {
	l.Node, l.owner, l.number, l.Write = n, owner, number, write
}

// NextID returns the number for the next id of the same acquisition on the same node. After a thousand of them, which few need,
// it is a number of another block, as of another acquisition.
func (l *Lease) NextID() uint64 {
	if next := l.number + 1; next%idsEach != 0 {
		return next
	}
	return NewNumber()
}

// ID returns the id: "<mailbox>:<n>".
func (l *Lease) ID() string { return string((*id)(l).append(nil)) }

// Listen delivers the messages for the id to l: see [mailbox.Box.Join].
func (l *Lease) Listen() (settled <-chan struct{}) { return l.Node.Mailbox.Join(l.number, l) }

// StopListening undoes Listen.
func (l *Lease) StopListening() { l.Node.Mailbox.Leave(l.number) }

// Granted implements [mailbox.Waiter].
func (l *Lease) Granted(token uint64) { l.owner.OnGranted(token) }

// Key implements [mailbox.Waiter].
func (l *Lease) Key() string { return l.owner.Request().Keys.Name() }

// RenewNow implements [mailbox.Waiter]: l is renewed at once, since a message to it may have been lost.
func (l *Lease) RenewNow() { l.Node.Renewer.renewNow(l) }

// SubscriptionFailed implements [mailbox.Waiter].
func (l *Lease) SubscriptionFailed(err error) {
	l.terms().Log.Error("", "the subscription failed; waiters poll until it is back", err)
}

// Until returns when trust in l ends.
func (l *Lease) Until() clock.Instant { return clock.Instant(l.end.Load()) }

// Participant returns l as scripts know it.
func (l *Lease) Participant() script.Participant {
	r := l.owner.Request()
	return script.Participant{Keys: r.Keys, Durations: r.Terms.Durations, ID: (*id)(l), Write: l.Write, Score: r.Score}
}

func (l *Lease) terms() *Terms { return l.owner.Request().Terms }

// retryAfter is how soon a call that failed is made again, and how much earlier than due a call may be made to share a
// round trip.
func (l *Lease) retryAfter() time.Duration { return min(l.terms().TTL/16, time.Second) }

// Acknowledge notes that the node has acknowledged a call that was sent at that instant. The owner may call it while the
// renewer does nothing for the lease.
func (l *Lease) Acknowledge(sent clock.Instant) {
	end := l.terms().Trusted(sent)
	if l.heapIndex != 0 { // an earlier call may be answered after a later one
		end = max(end, l.Until())
	}
	l.end.Store(int64(end))
}

// schedule sets when the next call for l is due, after one that was sent at that instant and acknowledged: at half the
// TTL; for a waiter also when the lease in front of it ends, since then nobody may be there to hand the lock on; and
// more often if no message can reach it, or if it may keep the node from others that could be granted a majority.
func (l *Lease) schedule(sent clock.Instant, r script.Reply) {
	ttl := l.terms().TTL
	l.due, l.exact = sent.Add(ttl/2), false
	if l.task != renewWaiter && l.raise == 0 {
		return
	}
	now := clock.Now()
	sooner := func(at clock.Instant) {
		if at < l.due {
			l.due, l.exact = at, true
		}
	}
	switch {
	case l.raise != 0:
		l.boundRaise()
		sooner(now)
	case r.Status != script.Waiting:
		if l.pause != 0 {
			sooner(now.Add(l.longerPause(ttl / 2)))
		}
	default:
		sooner(now.Add(time.Duration(min(r.Value, maxWait)+1) * time.Millisecond))
		if l.Node.deliversGrants() {
			l.pause = 0
		} else {
			sooner(now.Add(l.longerPause(maxPause)))
		}
	}
}

// boundRaise ends the trust in l after two node time-outs unless its token has been raised by then.
func (l *Lease) boundRaise() {
	l.end.Store(int64(min(l.Until(), clock.Now().Add(2*l.terms().Timeout))))
}

const (
	minPause = 5 * time.Millisecond
	maxPause = 250 * time.Millisecond

	// maxWait, in ms, keeps the reply of a server gone mad from overflowing a time.
	maxWait = int64(365 * 24 * time.Hour / time.Millisecond)
)

// longerPause doubles the pause between renewals that nothing else calls for, up to most.
func (l *Lease) longerPause(most time.Duration) time.Duration {
	pause := min(max(2*time.Duration(l.pause)*time.Millisecond, minPause), most)
	l.pause = int32(pause / time.Millisecond)
	return pause
}

// next is when l is due: for a call, or for the end of its trust.
func (l *Lease) next() clock.Instant { return min(l.due, l.Until()) }

// isBehind reports whether the renewal of l is so late that it may fail.
func (l *Lease) isBehind(now clock.Instant) bool {
	ttl := l.terms().TTL
	return l.task != release && l.raise == 0 && l.due.Add(ttl/8) < now && l.Until() < now.Add(ttl/4)
}
