package redismutex

// This file answers: when is a lease kept, and when does trust in it end?

import (
	"container/heap"
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"time"
)

// A role is what the keeper does for a stake.
type role uint8

const (
	standing role = iota // in the queue: keep it
	holding              // keep it
	leaving              // have it leave
	watching             // say when its time is over
)

// always is before anything, never is behind it.
const always, never = instant(math.MinInt64), instant(math.MaxInt64)

var (
	errGone    = errors.New("unknown to Redis: its data was lost, or the lease ran out there")
	errExpired = errors.New("not renewed within its lease")
)

// retry is how soon a call that failed is made again, and how far calls are
// brought forward to share a round trip.
func (m *RWMutex) retry() time.Duration { return min(m.ttl/16, time.Second) }

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

// add takes charge of a stake that is trusted: a call begun at start has been
// acknowledged.
func (k *keeper) add(s *stake, role role, start instant, r reply) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s.role = role
	s.schedule(start, r)
	k.push(s)
}

// leave has an id leave in the background. After a TTL its lease has ended
// without that.
func (k *keeper) leave(s *stake) {
	k.mu.Lock()
	defer k.mu.Unlock()
	start := now()
	s.role = leaving
	s.limit.Store(int64(start.add(s.hold.m.ttl)))
	s.due, s.exact = start, true
	k.push(s)
}

// watch says at limit that it is over with a stake, and does nothing else.
func (k *keeper) watch(s *stake, limit instant) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s.role, s.due, s.exact = watching, never, true
	s.limit.Store(int64(limit))
	k.push(s)
}

// unwatch ends watch, and nothing else: what leaves goes on to leave.
func (k *keeper) unwatch(s *stake) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s.role == watching {
		k.drop(s)
	}
}

// look has a stake kept at that time, if not earlier.
func (k *keeper) look(s *stake, at instant) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.lookAt(s, at)
}

func (k *keeper) lookAt(s *stake, at instant) {
	if s.place == 0 || s.role == watching || s.due < at {
		return
	}
	s.due, s.exact = at, true
	k.push(s)
}

// check has a stake kept soon, and then at growing intervals.
func (k *keeper) check(s *stake) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.lookAt(s, now().add(s.longer(minPause)))
}

// raise has a token raised, by a call that is given no more time than any other
// before the lock is granted.
func (k *keeper) raise(s *stake, token uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s.raises && s.hold.ballot.raise.Load() == token {
		return
	}
	s.raises = true
	s.hold.ballot.raise.Store(token)
	if s.place == 0 {
		return // add will see it
	}
	s.limit.Store(int64(min(s.until(), now().add(s.hold.m.patience))))
	k.lookAt(s, now())
}

// read has a stake kept as a reader from now on.
func (k *keeper) read(s *stake) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s.reads = true
}

// hold makes a stake that stands in the queue one that holds.
func (k *keeper) hold(s *stake) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s.place == 0 || s.role != standing {
		return
	}
	s.role, s.pause = holding, 0
	s.due, s.exact = s.until().add(s.hold.m.drift-s.hold.m.ttl/2), false
	k.push(s)
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
	heap.Remove(&k.heap, int(s.place-1))
	return true
}

// push puts s where its due time belongs.
func (k *keeper) push(s *stake) {
	if s.place == 0 {
		heap.Push(&k.heap, s)
	} else {
		heap.Fix(&k.heap, int(s.place-1))
	}
	k.arm()
}

// arm sets the timer if it would come too late. That it may come too early
// keeps the fast path from touching it: a lock seldom lives half its TTL.
func (k *keeper) arm() {
	if len(k.heap) == 0 || k.armed != 0 && k.armed <= k.heap[0].next() {
		return
	}
	k.armed = k.heap[0].next()
	wait := time.Duration(k.armed - now())
	if k.timer == nil {
		k.timer = time.AfterFunc(wait, k.wake)
	} else {
		k.timer.Reset(wait)
	}
}

// wake ends what has ended, and calls for what is due.
func (k *keeper) wake() {
	var due, over []*stake
	k.mu.Lock()
	start := now()
	for len(k.heap) > 0 {
		s := k.heap[0]
		if s.until() <= start {
			k.drop(s)
			if s.role != leaving {
				over = append(over, s)
			}
			continue
		}
		// What falls due soon shares the round trip.
		soon := start
		if !s.exact {
			soon = start.add(s.hold.m.retry())
		}
		if s.next() > soon {
			break
		}
		// Should the call hang, another one is made, on another connection.
		s.due, s.exact = start.add(2*s.hold.m.retry()), true
		heap.Fix(&k.heap, 0)
		due = append(due, s)
	}
	k.armed = 0
	k.arm()
	k.mu.Unlock()

	for together := range slices.Chunk(due, chunk) {
		go k.call(together)
	}
	for _, s := range over {
		go s.hold.over(s, errExpired) // it may call foreign code, which must not hold up the next
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
			c.cmd = c.stake.keepCmd(c.stake.kind(), 0)
			again = append(again, c)
		}
	}
	k.ep.runAll(ctx, again)

	lost := map[string]bool{}
	for _, c := range calls {
		k.answer(c, start)
		if c.mayHaveHandedOn() {
			lost[c.stake.Key()] = true
		}
	}
	for key := range lost {
		k.ep.box.Look(key)
	}
}

// mayHaveHandedOn says whether c is a leave of somebody who stood in the queue,
// or held, whose reply is lost, and with it perhaps a grant.
func (c *call) mayHaveHandedOn() bool {
	return c.script == unlockScript && c.stake.acked && (c.err != nil || c.reply.status != left)
}

// calls is the call for each of due, and when the last of them is of no use.
func (k *keeper) calls(due []*stake) (calls []*call, limit instant) {
	k.mu.Lock()
	defer k.mu.Unlock()
	calls = make([]*call, len(due))
	all := make([]call, len(due))
	limit = due[0].until()
	for i, s := range due {
		c := &all[i]
		c.stake, c.script = s, refreshScript
		if s.raises {
			c.raise = s.hold.ballot.raise.Load()
		}
		switch {
		case s.role == leaving:
			c.script, c.cmd = unlockScript, s.leaveCmd()
		case s.reads:
			c.cmd = s.keepCmd("r", 0)
		case s.role == holding && s.write && !s.raises:
			c.cmd = s.keepHoldCmd()
		default:
			c.cmd = s.keepCmd(s.kind(), c.raise)
		}
		calls[i], limit = c, max(limit, s.until())
	}
	return calls, limit
}

// answer takes the answer to a call that was begun at start.
func (k *keeper) answer(c *call, start instant) {
	s, r, err := c.stake, c.reply, c.err
	k.ep.note(r, s.hold.m.log())
	k.ep.box.Deliver(r.grants)
	k.mu.Lock()
	if s.place == 0 || s.role == watching || (s.role == leaving) != (c.script == unlockScript) {
		k.mu.Unlock()
		return // it has ended, or been unlocked, meanwhile
	}
	role := s.role
	if r.status == foreign && s.reads { // a downgrade cannot be done yet
		err = notLock(r)
		c.err = err
	}
	switch {
	case err != nil:
		s.due, s.exact = now().add(s.hold.m.retry()), true
		k.push(s)
		k.mu.Unlock()
		if role != leaving {
			s.hold.unsure(s, start, err)
		}
	case role == leaving && r.more:
		s.due, s.exact = now(), true
		k.push(s)
		k.mu.Unlock()
	case role == leaving:
		k.drop(s)
		k.mu.Unlock()
	case r.status != granted && r.status != waiting:
		k.drop(s)
		k.mu.Unlock()
		s.hold.over(s, errGone)
	default:
		s.trust(start)
		if s.raises && c.raise == s.hold.ballot.raise.Load() {
			s.raises = false
		}
		s.schedule(start, r)
		if r.more {
			s.due, s.exact = now(), true
		}
		k.push(s)
		k.mu.Unlock()
		s.hold.kept(s, start, r)
	}
}

const (
	minPause = 5 * time.Millisecond
	maxPause = 250 * time.Millisecond
)

// schedule sets when the next call for s is due, after an acknowledged one: at
// half the TTL; for a waiter also when the lease in front of it ends, since
// then nobody may be there to hand on; and often if no message can reach it, or
// somebody else may wait for what it has been granted in vain.
func (s *stake) schedule(start instant, r reply) {
	m := s.hold.m
	s.due, s.exact = start.add(m.ttl/2), false
	if s.role != standing && !s.raises {
		return
	}
	t := now()
	sooner := func(at instant) {
		if at < s.due {
			s.due, s.exact = at, true
		}
	}
	switch {
	case s.raises:
		sooner(t)
	case r.status != waiting:
		if s.pause != 0 {
			sooner(t.add(s.longer(m.ttl / 2)))
		}
	default:
		sooner(t.add(time.Duration(r.value+1) * time.Millisecond))
		if s.node().pushed() {
			s.pause = 0
		} else {
			sooner(t.add(s.longer(maxPause)))
		}
	}
}

// longer makes the pause between looks longer, but no longer than most.
func (s *stake) longer(most time.Duration) time.Duration {
	pause := min(max(2*time.Duration(s.pause)*time.Millisecond, minPause), most)
	s.pause = int32(pause / time.Millisecond)
	return pause
}

// next is when something is to be done for s.
func (s *stake) next() instant { return min(s.due, s.until()) }

// stakes is a heap, by next.
type stakes []*stake

func (h stakes) Len() int           { return len(h) }
func (h stakes) Less(i, j int) bool { return h[i].next() < h[j].next() }
func (h stakes) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = int32(i+1), int32(j+1)
}
func (h *stakes) Push(x any) {
	s := x.(*stake)
	*h = append(*h, s)
	s.place = int32(len(*h))
}
func (h *stakes) Pop() any {
	last := len(*h) - 1
	s := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	s.place = 0
	return s
}
