package redismutex

// This file answers: when is a lease kept, and when does trust in it end?

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
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

// A keeper makes the calls for the leases of one endpoint as they fall due, those that
// fall due together in one round trip, and ends the trust in those that were
// not heard of. One timer serves them all: a lock that is held
// costs neither a goroutine nor a timer. The timer never waits for Redis, so
// trust ends on time whatever a call is doing.
//
// A stake is in one of two heaps:
//
//	later ──(its call is due)──► ready ──(a sender takes it)──► later, to be called again should that call hang
//
// Few senders take what is ready, the lease that ends first before the others: when there is more to renew
// than Redis or this process can, those are lost that are too many, and not all.
type keeper struct {
	ep *endpoint

	mu      sync.Mutex
	later   byNext
	ready   byEnd
	senders senders
	took    time.Duration // how long a call takes, about
	timer   *time.Timer
	armed   instant // when the timer fires; 0: it does not
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
	switch {
	case s.place == 0 || s.role == watching:
		return
	case s.ready:
		heap.Fix(&k.ready, int(s.place-1)) // its time may end earlier now
		k.arm()
		return
	case s.due < at:
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
	s.limit.Store(int64(min(s.until(), now().add(s.hold.m.nodeTimeout))))
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
	heap.Remove(k.heapOf(s), int(s.place-1))
	s.ready = false
	return true
}

func (k *keeper) heapOf(s *stake) heap.Interface {
	if s.ready {
		return &k.ready
	}
	return &k.later
}

// push puts s among those that are due later, where its due time belongs.
func (k *keeper) push(s *stake) {
	if s.place != 0 && !s.ready {
		heap.Fix(&k.later, int(s.place-1))
	} else {
		k.drop(s)
		heap.Push(&k.later, s)
	}
	k.arm()
}

// arm sets the timer if it would come too late. That it may come too early
// keeps the fast path from touching it: a lock seldom lives half its TTL.
func (k *keeper) arm() {
	next := never
	if len(k.later.stakes) > 0 {
		next = k.later.stakes[0].next()
	}
	if len(k.ready.stakes) > 0 {
		next = min(next, k.ready.stakes[0].until(), k.senders.free())
	}
	if next == never || k.armed != 0 && k.armed <= next {
		return
	}
	k.armed = next
	wait := time.Duration(k.armed - now())
	if k.timer == nil {
		k.timer = time.AfterFunc(wait, k.wake)
	} else {
		k.timer.Reset(wait)
	}
}

// wake ends what has ended, and has senders call for what is due.
func (k *keeper) wake() {
	k.mu.Lock()
	start := now()
	over := k.ended(start)
	for len(k.later.stakes) > 0 {
		s := k.later.stakes[0]
		// What falls due soon shares the round trip.
		soon := start
		if !s.exact {
			soon = start.add(s.hold.m.retry())
		}
		if s.next() > soon {
			break
		}
		if s.until() <= start {
			over = k.end(s, over)
			continue
		}
		k.drop(s)
		s.ready = true
		heap.Push(&k.ready, s)
	}
	more := k.senders.start(start, len(k.ready.stakes), k.maxSenders())
	k.armed = 0
	k.arm()
	k.mu.Unlock()

	for _, call := range more {
		go k.send(call)
	}
	for _, s := range over {
		go s.hold.over(s, errExpired) // it may call foreign code, which must not hold up the next
	}
}

// ended takes out those that are ready, and have ended before a sender took them.
func (k *keeper) ended(start instant) (over []*stake) {
	for len(k.ready.stakes) > 0 && k.ready.stakes[0].until() <= start {
		over = k.end(k.ready.stakes[0], over)
	}
	return over
}

// end takes out s, whose time is over. What was to leave has ended by itself.
func (k *keeper) end(s *stake, over []*stake) []*stake {
	k.drop(s)
	if s.role == leaving {
		return over
	}
	return append(over, s)
}

const (
	// batch is the most calls that go in one pipeline. Trust, which counts from before a pipeline
	// is sent, is not spent in a long one.
	batch = 500

	// maxSenders is how many pipelines are under way at a time, where the client has as many connections.
	maxSenders = 4
)

// senders are the goroutines that call for what is ready. One whose call hangs no longer counts: another one may
// have a connection that works.
type senders map[*sender]struct{}

// A sender makes one call after the other while anything is ready.
type sender struct{ hangs instant }

// start returns the senders to be started for so many that are ready.
func (ss *senders) start(t instant, ready, most int) (more []*sender) {
	for working := ss.working(t); working < most && ready > 0; working++ {
		if *ss == nil {
			*ss = senders{}
		}
		c := &sender{never}
		(*ss)[c] = struct{}{}
		more = append(more, c)
		ready -= batch
	}
	return more
}

// working is how many of them do not hang.
func (ss senders) working(t instant) (n int) {
	for c := range ss {
		if c.hangs > t {
			n++
		}
	}
	return n
}

func (k *keeper) maxSenders() int { return min(maxSenders, k.ep.limiter.calls) }

// free is when the next of them is to be taken for one that hangs.
func (ss senders) free() instant {
	next := never
	t := now()
	for c := range ss {
		if c.hangs > t {
			next = min(next, c.hangs)
		}
	}
	return next
}

// send calls for what is ready, a batch at a time, until nothing is.
func (k *keeper) send(self *sender) {
	for {
		due, hung, behind := k.take(self)
		if behind != nil {
			slices.Concat(due, hung)[0].hold.m.log().error("renewals fall behind, and locks may be lost", behind)
		}
		for _, s := range hung {
			go k.call([]*stake{s})
		}
		switch {
		case len(due)+len(hung) == 0:
			return
		case len(due) == 0:
			continue
		}
		start := now()
		k.call(due)
		k.mu.Lock()
		took := time.Duration(now() - start)
		if k.took == 0 {
			k.took = took
		}
		k.took += (took - k.took) / 4
		k.mu.Unlock()
	}
}

// take takes a batch of those that are ready, the lease that ends first before the others. It returns an error where that one
// has waited for so long that it may not be renewed in time.
//
// Where the client has several servers, those whose last call hangs are returned by themselves. A pipeline is as slow
// as the slowest of its servers: each of them gets a call of its own, so that those on the other servers are in time.
func (k *keeper) take(self *sender) (due, hung []*stake, behind error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	start := now()
	self.hangs = always
	if k.senders.working(start) >= k.maxSenders() { // others have come in its place, as it seemed to hang
		delete(k.senders, self)
		return nil, nil, nil
	}
	self.hangs = never
	for len(due)+len(hung) < batch && len(k.ready.stakes) > 0 {
		s := k.ready.stakes[0]
		ttl := s.hold.m.ttl
		if behind == nil && s.role != leaving && !s.raises && s.due.add(ttl/8) < start && s.until() < start.add(ttl/4) {
			behind = fmt.Errorf("redismutex: %d calls are due, and the first lease ends in %v: "+
				"Redis or this process is too busy for so many locks of so short a TTL (%v for %q)",
				len(k.ready.stakes), time.Duration(s.until()-start).Round(time.Millisecond), ttl, s.Key())
		}
		k.drop(s)
		if s.role == leaving && s.until() <= start {
			continue // it has ended by itself
		}
		if len(k.ready.stakes) >= batch && s.until() < start.add(min(k.took, 2*s.hold.m.retry())) {
			// The answer would come too late, and others are to be renewed that it would not.
			s.due, s.exact = never, true
			heap.Push(&k.later, s)
			continue
		}
		// Should the call hang, another one is made, on another connection.
		again := start.add(2 * s.hold.m.retry())
		self.hangs = min(self.hangs, again)
		s.due, s.exact = again, true
		heap.Push(&k.later, s)
		if s.called && k.ep.sharded {
			hung = append(hung, s)
			continue
		}
		s.called = true
		due = append(due, s)
	}
	if len(due)+len(hung) == 0 {
		delete(k.senders, self)
	}
	k.arm()
	return due, hung, behind
}

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

	for _, c := range calls {
		k.answer(c, start)
		if c.script == unlockScript && c.acked {
			c.stake.lookForLostGrants(start, c.tried, c.reply, c.err)
		}
	}
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
			c.acked, c.tried = s.acked, s.tried
			s.tried = now()
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
	s.called = false
	if s.place == 0 || s.role == watching || (s.role == leaving) != (c.script == unlockScript) {
		k.mu.Unlock()
		return // it has ended, or been unlocked, meanwhile
	}
	role := s.role
	if r.status == foreign && s.reads && s.role != leaving { // a downgrade cannot be done yet
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
		why := errGone
		if r.status == foreign {
			why = notLock(r)
		}
		s.hold.over(s, why)
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
		sooner(t.add(time.Duration(min(r.value, MaxTTL.Milliseconds())+1) * time.Millisecond))
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

// stakes is what the two heaps have in common.
type stakes []*stake

func (h stakes) Len() int { return len(h) }
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

// byNext has those first for whom something is to be done first.
type byNext struct{ stakes }

func (h byNext) Less(i, j int) bool { return h.stakes[i].next() < h.stakes[j].next() }

// byEnd has those first whose lease ends first, and those last that are to leave: their leases end without that.
type byEnd struct{ stakes }

func (h byEnd) Less(i, j int) bool {
	a, b := h.stakes[i], h.stakes[j]
	if (a.role == leaving) != (b.role == leaving) {
		return b.role == leaving
	}
	return a.until() < b.until()
}
