package redismutex

// This file answers: when is a lease kept, and when does trust in it end?

import (
	"container/heap"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A stake is one id on one endpoint: what is waited for, or held, under it.
type stake struct {
	m     *RWMutex
	keys  *keys
	id    string
	idArg any    // the same, as scripts take it
	n     uint64 // the id is the mailbox's name and n
	write bool
	bury  bool // an enter may still be under way: refuse it when the id leaves

	// until is how long the lease on the server can be trusted: the start of
	// the last call that Redis acknowledged, and the TTL, less a margin for
	// clocks that do not run alike.
	until atomic.Int64

	// The rest is the keeper's, under its mutex.
	role  role
	owner owner
	due   instant       // when to call next
	exact bool          // not a moment earlier
	pause time.Duration // between looks, while no message can come
	limit instant       // when it is over: until, or when to give up leaving
	next  instant       // the earlier of due and limit
	place int           // in the heap, and 1 more: 0 is outside
}

// A role is what the keeper does for a stake.
type role uint8

const (
	standing role = iota // in the queue: keep it
	holding              // keep it
	leaving              // have it leave
)

// An owner is told what becomes of its stake.
type owner interface {
	// kept says that Redis has acknowledged the lease.
	kept(reply)
	// unsure says that a call failed; it is made again.
	unsure(error)
	// over says that the stake is out of the keeper's hands: the id is not
	// known to the server, or trust has ended.
	over(error)
}

var (
	errGone    = errors.New("unknown to Redis: its data was lost, or the lease ran out there")
	errExpired = errors.New("not renewed within its lease")
)

// trusted is how long a lease can be trusted that was acknowledged by a call
// begun at start.
func (m *RWMutex) trusted(start instant) instant {
	drift := m.ttl/100 + 2*time.Millisecond
	return start.add(m.ttl - drift)
}

// retry is how soon a call that failed is made again, and how far calls are
// brought forward to share a round trip.
func (m *RWMutex) retry() time.Duration { return min(m.ttl/16, time.Second) }

// trust notes that a call begun at start has been acknowledged.
func (s *stake) trust(start instant) {
	s.limit = s.m.trusted(start)
	if s.place != 0 { // an earlier call may be answered after a later one
		s.limit = max(s.limit, instant(s.until.Load()))
	}
	s.until.Store(int64(s.limit))
}

// A keeper calls for the stakes of one endpoint when they fall due, those that
// fall due together in one round trip, and ends the trust in those that were
// not heard of. One heap and one timer serve them all: a lock that is held
// costs neither a goroutine nor a timer. The timer never waits for Redis, so
// trust ends on time whatever a call is doing.
type keeper struct {
	ep *endpoint

	mu    sync.Mutex
	heap  stakes
	timer *time.Timer
	armed instant // when the timer fires; 0: it does not
}

// add takes charge of a stake that a call begun at start has acknowledged.
func (k *keeper) add(s *stake, role role, o owner, start instant, r reply) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s.role, s.owner = role, o
	s.trust(start)
	s.schedule(start, r)
	k.push(s)
}

// leave has an id leave in the background. After a TTL its lease has ended
// without that.
func (k *keeper) leave(s *stake) {
	k.mu.Lock()
	defer k.mu.Unlock()
	start := now()
	s.role, s.owner = leaving, nobody{}
	s.limit = start.add(s.m.ttl)
	s.due, s.exact = start, true
	k.push(s)
}

// look has a stake kept at once.
func (k *keeper) look(s *stake) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s.place == 0 {
		return
	}
	s.due, s.exact = now(), true
	k.push(s)
}

// handOver makes a stake in the queue one that holds, unless it is over.
func (k *keeper) handOver(s *stake, o owner) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s.place == 0 {
		return false
	}
	s.role, s.owner = holding, o
	return true
}

// remove ends the keeper's charge, and says whether it had any.
func (k *keeper) remove(s *stake) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.drop(s)
}

func (k *keeper) drop(s *stake) bool {
	if s.place == 0 {
		return false
	}
	heap.Remove(&k.heap, s.place-1)
	return true
}

// push puts s where its due time belongs.
func (k *keeper) push(s *stake) {
	s.next = min(s.due, s.limit)
	if s.place == 0 {
		heap.Push(&k.heap, s)
	} else {
		heap.Fix(&k.heap, s.place-1)
	}
	k.arm()
}

// arm sets the timer if it would come too late. That it may come too early
// keeps the fast path from touching it: a lock seldom lives half its TTL.
func (k *keeper) arm() {
	if len(k.heap) == 0 || k.armed != 0 && k.armed <= k.heap[0].next {
		return
	}
	k.armed = k.heap[0].next
	wait := time.Duration(k.armed - now())
	if k.timer == nil {
		k.timer = time.AfterFunc(wait, k.wake)
	} else {
		k.timer.Reset(wait)
	}
}

// wake ends what has ended, and calls for what is due.
func (k *keeper) wake() {
	var due []*stake
	var over []owner
	k.mu.Lock()
	start := now()
	for len(k.heap) > 0 {
		s := k.heap[0]
		if s.limit <= start {
			k.drop(s)
			over = append(over, s.owner)
			continue
		}
		// What falls due soon shares the round trip.
		soon := start
		if !s.exact {
			soon = start.add(s.m.retry())
		}
		if s.next > soon {
			break
		}
		// Should the call hang, another one is made, on another connection.
		s.due, s.exact = start.add(2*s.m.retry()), true
		s.next = min(s.due, s.limit)
		heap.Fix(&k.heap, 0)
		due = append(due, s)
	}
	k.armed = 0
	k.arm()
	k.mu.Unlock()

	for together := range slices.Chunk(due, chunk) {
		go k.call(together)
	}
	for _, o := range over {
		o.over(errExpired)
	}
}

// chunk is the most calls that go in one pipeline. Chunks go side by side: none
// waits for another's replies, and trust, which counts from before a pipeline
// is sent, is not spent in a long one.
const chunk = 1000

// call calls for stakes, each of them to be kept or to leave.
func (k *keeper) call(due []*stake) {
	start := now()
	calls, limit := k.calls(due)
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(limit-start))
	defer cancel()
	k.ep.runAll(ctx, calls)

	// A writer that does not hold after all settles, like everyone.
	var again []*call
	for _, c := range calls {
		if c.script == refreshScript && c.err == nil && c.reply.status == gone && len(c.cmd.keys()) == 1 {
			c.cmd = c.stake.keepCmd()
			again = append(again, c)
		}
	}
	k.ep.runAll(ctx, again)

	lost := map[string]bool{}
	for _, c := range calls {
		k.answer(c, start)
		if c.mayHaveHandedOn() {
			lost[c.stake.keys.holder] = true
		}
	}
	for key := range lost {
		k.ep.box.Look(key)
	}
}

// mayHaveHandedOn says whether c is a leave of somebody who stood in the queue,
// or held, whose reply is lost, and with it perhaps a grant.
func (c *call) mayHaveHandedOn() bool {
	return c.script == unlockScript && c.stake.until.Load() != 0 && (c.err != nil || c.reply.status != left)
}

// calls is the call for each of due, and when the last of them is of no use.
func (k *keeper) calls(due []*stake) (calls []*call, limit instant) {
	k.mu.Lock()
	defer k.mu.Unlock()
	calls = make([]*call, len(due))
	limit = due[0].limit
	for i, s := range due {
		c := &call{stake: s, script: refreshScript}
		switch {
		case s.role == leaving:
			c.script, c.cmd = unlockScript, s.leaveCmd()
		case s.role == holding && s.write:
			c.cmd = s.keepHoldCmd()
		default:
			c.cmd = s.keepCmd()
		}
		calls[i], limit = c, max(limit, s.limit)
	}
	return calls, limit
}

// answer takes the answer to a call that was begun at start.
func (k *keeper) answer(c *call, start instant) {
	s, r, err := c.stake, c.reply, c.err
	k.ep.note(r, s.m.log())
	k.ep.box.Deliver(r.grants)
	k.mu.Lock()
	if s.place == 0 || (s.role == leaving) != (c.script == unlockScript) {
		k.mu.Unlock()
		return // it has ended, or been unlocked, meanwhile
	}
	o := s.owner
	switch {
	case err != nil:
		s.due, s.exact = now().add(s.m.retry()), true
		k.push(s)
		k.mu.Unlock()
		o.unsure(err)
	case s.role == leaving && r.more:
		s.due, s.exact = now(), true
		k.push(s)
		k.mu.Unlock()
	case s.role == leaving || r.status != granted && r.status != waiting:
		k.drop(s)
		k.mu.Unlock()
		o.over(errGone)
	default:
		s.trust(start)
		s.schedule(start, r)
		if r.more {
			s.due, s.exact = now(), true
		}
		k.push(s)
		k.mu.Unlock()
		o.kept(r)
	}
}

const (
	minPause = 5 * time.Millisecond
	maxPause = 250 * time.Millisecond
)

// schedule sets when the next call for s is due, after an acknowledged one: at
// half the TTL; for a waiter also when the lease in front of it ends, since
// then nobody may be there to hand on; and often if no message can reach it.
func (s *stake) schedule(start instant, r reply) {
	s.due, s.exact = start.add(s.m.ttl/2), false
	if s.role != standing || r.status != waiting {
		return
	}
	t := now()
	if front := t.add(time.Duration(r.value+1) * time.Millisecond); front < s.due {
		s.due, s.exact = front, true
	}
	if s.m.ep.pushed() {
		s.pause = 0
	} else {
		s.pause = min(max(2*s.pause, minPause), maxPause)
		if look := t.add(s.pause); look < s.due {
			s.due, s.exact = look, true
		}
	}
}

// nobody owns a stake that leaves.
type nobody struct{}

func (nobody) kept(reply)   {}
func (nobody) unsure(error) {}
func (nobody) over(error)   {}

// stakes is a heap, by next.
type stakes []*stake

func (h stakes) Len() int           { return len(h) }
func (h stakes) Less(i, j int) bool { return h[i].next < h[j].next }
func (h stakes) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i+1, j+1
}
func (h *stakes) Push(x any) {
	s := x.(*stake)
	*h = append(*h, s)
	s.place = len(*h)
}
func (h *stakes) Pop() any {
	last := len(*h) - 1
	s := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	s.place = 0
	return s
}
