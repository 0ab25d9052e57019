package redismutex

// This file answers: what does a hold have on one node?

import (
	"context"
	"fmt"
	"runtime"
	"strconv"
	"sync/atomic"
	"time"
)

// A stake is one id on one node: what is waited for, or held, under it. An id
// that is of no use any more leaves, and the hold gets another stake there.
type stake struct {
	hold *hold
	id   any // a string, as scripts take it

	// The keeper's, under its mutex. limit is when it is over, whatever it is:
	// for a lease the start of the last call that Redis acknowledged, and the
	// TTL, less a margin for clocks that do not run alike.
	limit  atomic.Int64
	sent   atomic.Int64 // when its last acquire, release or downgrade was sent; always: it has not been
	tried  instant      // when its release was sent before in vain; always: never
	due    instant      // when to call next
	place  int32        // in its heap, and 1 more: 0 is in none
	ready  bool         // it is in the heap of those that are ready
	called bool         // a call is under way
	role   role
	exact  bool // not a moment before due
	acked  bool // the node has acknowledged it
	raises bool // its token is to be that of the ballot at the least

	// The rest is under the hold's mutex.
	queue   bool  // it is to wait: a try would be in vain
	joined  bool  // the mailbox knows it
	asking  bool  // an enter is under way
	in      bool  // it waits or holds, as far as is known
	granted bool  // it holds, unless it has waited too long to hear of it
	checked bool  // since it was granted it was asked who is before it
	bury    bool  // an enter may still be under way: refuse it when the id leaves
	failed  uint8 // how many attempts in a row have come to nothing on this node
	index   int16 // which one of the nodes that is
	write   bool  // it enters to write
	reads   bool  // the keeper's: whatever it entered as, it is kept as a reader
	pause   int32 // the keeper's: ms between looks that nothing else calls for
	token   uint64
	why     error // why it is not in; while it is, why it could not be kept
}

// init makes s the stake on a node, under a new id.
func (s *stake) init(h *hold, index int) *stake {
	s.hold, s.write, s.index = h, h.write, int16(index)
	s.sent.Store(int64(always))
	s.tried = always
	var buf [64]byte
	id := append(append(buf[:0], s.node().box.Name()...), ':')
	s.id = string(strconv.AppendUint(id, s.node().ids.Add(1), 10))
	return s
}

func (s *stake) node() *endpoint { return s.hold.m.nodes[s.index] }

// listen makes s known to the mailbox, and waits until that hears, or for so
// long that it is better to look than to listen. A message may overtake the
// reply to the enter: so this comes before it is sent.
func (s *stake) listen(ctx context.Context) {
	settled := s.hold.join(s)
	select {
	case <-settled:
		return
	default:
	}
	timeout := time.NewTimer(min(s.hold.m.ttl/4, time.Second))
	defer timeout.Stop()
	select {
	case <-settled:
	case <-timeout.C:
	case <-ctx.Done():
	}
}

// enter asks the node, and gives the place in the limiter back when that call has ended.
func (s *stake) enter(ctx context.Context, try bool, place place) (reply, error) {
	script := rlockScript
	if s.write {
		script = lockScript
	}
	return s.node().interruptibly(ctx, s.hold.m.ttl, script, s.enterCmd(try), place)
}

// leave has s leave, and goes on with that in the background if the node does
// not confirm it.
func (s *stake) leave(ctx context.Context) (reply, error) {
	ep := s.node()
	place := ep.limiter.release
	if err := ep.admit(ctx, place, s.hold.ballot != nil); err != nil {
		ep.keeper.leave(s)
		return reply{}, err
	}
	ep.keeper.remove(s) // it was renewed until its turn came
	start := now()
	s.sent.Store(int64(start))
	r, err := ep.interruptibly(ctx, s.hold.m.ttl, unlockScript, s.leaveCmd(), place)
	s.lookForLostGrants(start, always, r, err)
	s.tried = start
	if err != nil {
		ep.keeper.leave(s)
		return r, err
	}
	ep.note(r, s.hold.m.log())
	if r.grants != "" {
		runtime.Gosched() // whoever was granted goes first
	}
	return r, nil
}

// lookForLostGrants has the other waiters of the key look for themselves where a grant to one of them may be lost: the
// reply to a release carries those to its own process. r and err are what became of a release that was sent at that
// instant, and before at another, unless that is always.
func (s *stake) lookForLostGrants(sent, before instant, r reply, err error) {
	ep := s.node()
	switch {
	case err != nil:
	case r.status == left, r.status == foreign:
		return
	case time.Duration(now()-sent) >= ep.resend: // the client may have sent it twice
	case before != always: // the reply to that is lost
		sent = before
	default:
		return
	}
	ep.box.Look(s.Key(), sent.time())
}

// trusted is how long a lease can be trusted that was acknowledged by a call
// begun at start.
func (m *RWMutex) trusted(start instant) instant { return start.add(m.ttl - m.drift) }

// trust notes that a call begun at start has been acknowledged.
func (s *stake) trust(start instant) {
	limit := s.hold.m.trusted(start)
	if s.place != 0 { // an earlier call may be answered after a later one
		limit = max(limit, s.until())
	}
	s.limit.Store(int64(limit))
	s.acked = true
}

func (s *stake) until() instant { return instant(s.limit.Load()) }

// The mailbox tells.

func (s *stake) Key() string { return s.hold.keys.holder }

func (s *stake) Granted(token uint64) { s.hold.told(s, token) }

func (s *stake) Look() { s.node().keeper.look(s, now()) }

func (s *stake) Deaf(err error) {
	s.hold.m.log().error("redismutex: the subscription failed, so waiters look for themselves until it is back", err)
}

// named is the name of its node, for errors and the log.
func (s *stake) named() string {
	if s.node().addr == "" {
		return fmt.Sprintf("node %d", s.index+1)
	}
	return fmt.Sprintf("node %d (%s)", s.index+1, s.node().addr)
}
