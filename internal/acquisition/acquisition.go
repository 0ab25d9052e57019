// Package acquisition is a request for a lock over one node or several, from the first call to the last: it waits, is
// held, and is released or lost.
//
// # States
//
//	          ┌──(granted by a majority)──► held ──(the last user unlocks)──► released
//	          │                              │
//	          │                              └──(a majority forgets it, or trust ends)──► lost
//	pending ──┤
//	          ├──(the caller gives up, or no majority will grant it)──► abandoned
//	          │
//	          └──(its owner was granted another one: WithOwner)──► superseded
//
// On each node an acquisition has a [part] with an id and a lease of its own. An id that is of no use any more is
// released, and another part takes its place:
//
//	          ┌──(busy)──► replaced by one that joins the queue
//	asking ───┼──(waiting)──► waits ──(granted)──► counts ──(gone, expired)──► replaced
//	          ├──(granted)─────────────────────────────┘
//	          └──(an error)──► replaced by one that asks again later
//
// A single Redis is a quorum of one. The choice between one node and several is made where calls are sent: to one node
// by the caller itself, to several side by side (Acquire in this file, Release in release.go), and where an error is put
// into words (errors.go). A node time-out exists only with several nodes.
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
	"time"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/quorum"
	"github.com/redismutex/redismutex/internal/script"
)

// An Acquisition is one request for a lock and what became of it. Locks that are nested in each other share one: they are
// its users.
type Acquisition struct {
	Config *Config
	Keys   *script.Keys
	Since  int64 // set before Init if it has waited in this process: with one node an instant, with several its rank

	token uint64       // set before it is held, and not changed afterwards
	until atomic.Int64 // when trust in it ends

	mu     sync.Mutex
	state  state
	try    bool
	write  bool // not any more after a downgrade
	wrote  bool // it was asked for as a write lock
	queued bool // a majority of the nodes has granted it or put it into the queue
	// These two are set by Share.
	shared, outlives bool

	users  users
	cause  *error        // why it was lost; a pointer, since few are
	signal chan struct{} // wakes the caller, and holds one signal; nil: the caller does not sleep
	parts  []*part       // one for each node
	quorum *quorumState  // nil with one node

	// The part of a single node, allocated with the acquisition.
	only  part
	array [1]*part
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

// Init makes a a request that has not been sent.
func (a *Acquisition) Init(c *Config, keys *script.Keys, write, try bool) {
	a.Config, a.Keys, a.write, a.wrote, a.try = c, keys, write, write, try
	a.parts = a.array[:]
	if len(c.Nodes) > 1 {
		a.parts = make([]*part, len(c.Nodes))
		if a.Since == 0 {
			a.Since = c.Ranks.Next()
		}
		a.quorum = newQuorumState(len(c.Nodes), script.Score(a.Since, c.first(write)))
	}
	for i := range a.parts {
		p := &a.only
		if i > 0 {
			p = new(part)
		}
		a.parts[i] = p.init(a, i)
	}
}

// age returns for how long a has been asked for. Its place in the queue of one node is that of a request made so long ago.
func (a *Acquisition) age() time.Duration {
	if a.Since == 0 || a.quorum != nil {
		return 0
	}
	return time.Duration(clock.Now()) - time.Duration(a.Since)
}

// ID returns the id under which the first node knew it, or was asked for it, when it was granted.
func (a *Acquisition) ID() string {
	if a.quorum != nil {
		return a.quorum.id
	}
	return a.parts[0].ID.(string)
}

// Token returns the fencing token. It is 0 for a reader.
func (a *Acquisition) Token() uint64 { return a.token }

// Until returns when trust in it ends unless it is renewed.
func (a *Acquisition) Until() clock.Instant { return clock.Instant(a.until.Load()) }

// Acquire asks the nodes for the lock and waits until it is granted, or will not be granted, or ctx ends. It returns
// ErrRetry if the acquisition was superseded, or lost before it had a user.
func (a *Acquisition) Acquire(ctx context.Context) error {
	if a.quorum == nil {
		a.parts[0].acquire(ctx)
		return a.wait(ctx)
	}
	if err := a.acquireFromEach(ctx); err != nil {
		return err
	}
	defer a.quorum.answeredAll(a.Config.Nodes[0].Requests)
	return a.wait(ctx)
}

// wait waits until a is held, or will not be held, or ctx ends.
func (a *Acquisition) wait(ctx context.Context) error {
	for {
		a.mu.Lock()
		state := a.state
		if state == pending && a.signal == nil {
			a.signal = make(chan struct{}, 1)
		}
		signal := a.signal
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
		select {
		case <-signal:
		case <-ctx.Done():
			if a.waitsOn() {
				return ErrWaiting
			}
			return a.refused(ctx)
		}
	}
}

// refused returns the error of a request that came to nothing, also if it was granted a moment ago.
func (a *Acquisition) refused(ctx context.Context) error {
	a.mu.Lock()
	a.state = abandoned
	if ctx.Err() != nil {
		a.releaseInBackground()
		a.mu.Unlock()
		return lockerr.Ended(ctx, a.Keys.Name())
	}
	err := a.explainRefusal()
	a.mu.Unlock()
	_ = a.Release(ctx) // of what some nodes have granted
	return err
}

// Join adds a user, a lock for reading or for writing. Unless outer is nil it is nested in that one, another user. Join
// returns ErrRetry if a, or outer, has ended meanwhile.
func (a *Acquisition) Join(u, outer User, write bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.state != held, outer != nil && !a.admits(outer):
		return ErrRetry
	case write && !a.write:
		return lockerr.Upgrade(a.Keys.Name())
	}
	a.users.add(u, write, a.wrote)
	return nil
}

// Admits reports whether another lock can be nested in u: it has been neither unlocked nor lost. Its parent context may
// have ended, since code that cleans up is still protected.
func (a *Acquisition) Admits(u User) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.admits(u)
}

func (a *Acquisition) admits(u User) bool {
	if a.state == held && a.Until() <= clock.Now() {
		// A renewal under way must not bring it back: the caller is going to wait for the lock, and it may be the
		// caller's own.
		go a.lose(node.ErrExpired).tell()
	}
	return a.state == held && a.users.has(u)
}

// Usable returns nil, or an error that matches ErrUnlocked or ErrLockLost if u has ended. If the lease is over, it is
// lost from now on, although no timer may have fired.
func (a *Acquisition) Usable(u User) error {
	a.loseIfExpired()
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.usable(u)
}

func (a *Acquisition) usable(u User) error {
	switch {
	case !a.users.has(u):
		return fmt.Errorf("%w: %q", lockerr.ErrUnlocked, a.Keys.Name())
	case a.state == lost:
		return fmt.Errorf("%w: %q", lockerr.ErrLockLost, a.Keys.Name())
	}
	return nil
}

// Leave removes a user and reports whether it was the last one. Release has to follow then. The error is that of Usable.
func (a *Acquisition) Leave(u User) (last bool, err error) {
	a.loseIfExpired()
	return a.Remove(u)
}

// Cause returns why it was lost. It must have been lost.
func (a *Acquisition) Cause() error { return *a.cause }

// Supersede ends the wait: the caller has the lock under another acquisition.
func (a *Acquisition) Supersede() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state == pending {
		a.state = superseded
		a.releaseInBackground()
		a.wake()
	}
}

// decide decides what the answers of the nodes amount to, after one of them has changed. The mutex is held.
func (a *Acquisition) decide() {
	switch a.state {
	case held:
		a.updateTrust()
		return
	case pending:
	default:
		return
	}
	// A grant runs with the lease that the waiter had when the grant came, so with little of that left it is renewed
	// first.
	soon := clock.Now().Add(a.Config.TTL / 4)
	v := a.count(soon)
	n := len(a.parts)
	a.queued = a.queued || !a.try && quorum.Decide(n, v.in, v.failed) == quorum.Yes
	switch {
	case quorum.Decide(n, v.granted, 0) == quorum.Yes:
		a.agreeOnToken(soon, v.highest)
	case quorum.Decide(n, v.in, v.failed) == quorum.No && !a.queued && !a.outlives && a.isClear(v),
		quorum.Decide(n, 0, v.final) == quorum.No:
		a.state = abandoned
		a.wake()
	case !v.open && v.granted > 0:
		// Others may have the other nodes, and wait for these.
		for _, p := range a.parts {
			if p.in && p.granted && !p.checked {
				p.checked = true
				p.node.Renewer.RenewOften(&p.Lease)
			}
		}
	}
}

// grant makes a a held lock. The mutex is held.
func (a *Acquisition) grant(token uint64) {
	a.state, a.token = held, token
	if a.quorum != nil {
		a.quorum.grantedAt, a.quorum.id = clock.Now(), a.parts[0].ID.(string)
	}
	a.updateTrust()
	a.wake()
}

// updateTrust has what a holds renewed, and sets until when a is trusted: until so many leases have ended that no
// majority is left. The mutex is held.
func (a *Acquisition) updateTrust() {
	var buf [8]clock.Instant
	ends := buf[:0]
	for _, p := range a.parts {
		switch {
		case p.counts():
			ends = append(ends, p.Until())
			p.leaveMailbox()
			p.node.Renewer.Holds(&p.Lease)
			p.node.CheckEviction(a.Config.Log)
		case p.in && p.granted:
			p.node.Renewer.Raise(&p.Lease, a.token)
		}
	}
	if majority := quorum.Majority(len(a.parts)); len(ends) >= majority {
		slices.Sort(ends)
		a.until.Store(int64(ends[len(ends)-majority]))
	}
}

// loseIfExpired loses a lock whose lease is over.
func (a *Acquisition) loseIfExpired() {
	if a.Until() > clock.Now() {
		return
	}
	var n news
	a.mu.Lock()
	if a.state == held {
		n = a.lose(node.ErrExpired)
	}
	a.mu.Unlock()
	n.tell()
}

// lose ends a held lock. Its users are told when the mutex is free again. The mutex is held.
func (a *Acquisition) lose(why error) news {
	why = lockerr.Of(lockerr.ErrLockLost, fmt.Errorf("%q: %w", a.Keys.Name(), a.explainLoss(why)))
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

// News is what is left to do when the mutex is free again: the users of a lost lock are told, and err is logged.
type news struct {
	acquisition *Acquisition
	what        string // what the library does now
	err         error  // nil: there is no news
	lost        bool
}

func (n news) tell() {
	if n.lost {
		n.acquisition.users.end(n.err)
	}
	if n.err != nil {
		n.acquisition.Config.Log.Error(n.acquisition.Keys.Name(), n.what, n.err)
	}
}
