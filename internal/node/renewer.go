package node

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/script"
)

// A task is what the renewer does for a lease.
type task uint8

const (
	renewWaiter task = iota // renew it: it waits in the queue
	renewHolder             // renew it: it holds
	release                 // release it
	timeout                 // tell the owner when its time has come
	expire                  // let it end: it holds, and is no longer renewed
)

// A Renewer renews the leases of one node as they fall due, those that fall due together in one round trip, ends the
// trust in those that could not be renewed, and releases those that are given up. One timer serves them all: a held lock
// costs neither a goroutine nor a timer. The timer never waits for Redis, so trust ends on time whatever a call is doing.
//
// A few senders take what is ready, the lease that ends first before the others: when there is more to renew than Redis or
// this process can, only the excess is lost.
type Renewer struct {
	node *Node

	mu      sync.Mutex
	leases  agenda
	senders senders
	took    time.Duration // how long a call takes, about
	timer   *time.Timer
	armed   clock.Instant // when the timer fires; 0: it does not
}

// Renew renews a lease from now on. It has been acknowledged with r, in reply to a call that was sent at that instant.
func (rn *Renewer) Renew(l *Lease, holds bool, sent clock.Instant, r script.Reply) {
	rn.mu.Lock()
	defer rn.mu.Unlock()
	l.task = renewWaiter
	if holds {
		l.task = renewHolder
	}
	l.schedule(sent, r)
	rn.push(l)
}

// Release releases an id in the background. It stops trying after a TTL, when the lease has ended anyway.
func (rn *Renewer) Release(l *Lease) { rn.ReleaseAgain(l, false) }

// ReleaseAgain is Release after an attempt that was not confirmed. Sent tells whether that attempt was sent.
func (rn *Renewer) ReleaseAgain(l *Lease, sent bool) {
	rn.mu.Lock()
	defer rn.mu.Unlock()
	l.released = l.released || sent
	now := clock.Now()
	l.task = release
	l.end.Store(int64(now.Add(l.terms().TTL)))
	l.due, l.exact = now, true
	rn.push(l)
}

// SetTimeout has the owner's OnTimeout called at that instant, and nothing else done for the lease.
func (rn *Renewer) SetTimeout(l *Lease, at clock.Instant) {
	rn.mu.Lock()
	defer rn.mu.Unlock()
	l.task, l.due, l.exact = timeout, clock.Never, true
	l.end.Store(int64(at))
	rn.push(l)
}

// renewAt renews a lease at that instant, if it is not renewed earlier.
func (rn *Renewer) renewAt(l *Lease, at clock.Instant) {
	switch {
	case l.heapIndex == 0 || l.task == timeout || l.task == expire:
		return
	case l.ready:
		rn.leases.fix(l) // its time may end earlier now
		rn.arm()
		return
	case l.due < at:
		return
	}
	l.due, l.exact = at, true
	rn.push(l)
}

// renewNow renews a lease at once.
func (rn *Renewer) renewNow(l *Lease) {
	rn.mu.Lock()
	defer rn.mu.Unlock()
	rn.renewAt(l, clock.Now())
}

// RenewOften renews a lease soon, and then at growing intervals.
func (rn *Renewer) RenewOften(l *Lease) {
	rn.mu.Lock()
	defer rn.mu.Unlock()
	rn.renewAt(l, clock.Now().Add(l.longerPause(minPause)))
}

// Raise has the fencing token of a node raised. The call is given two node time-outs, since it may need a connection of its
// own: renewals do not share those of other calls.
func (rn *Renewer) Raise(l *Lease, token uint64) {
	rn.mu.Lock()
	defer rn.mu.Unlock()
	if l.raise == token {
		return
	}
	l.raise = token
	if l.heapIndex == 0 {
		return // Renew will see it
	}
	l.boundRaise()
	rn.renewAt(l, clock.Now())
}

// RenewAsReader renews a lease as a reader's from now on.
func (rn *Renewer) RenewAsReader(l *Lease) {
	rn.mu.Lock()
	defer rn.mu.Unlock()
	l.readOnly = true
}

// RenewAsHolder renews a lease as a holder's, if it was a waiter's.
func (rn *Renewer) RenewAsHolder(l *Lease) {
	rn.mu.Lock()
	defer rn.mu.Unlock()
	if l.heapIndex == 0 || l.task != renewWaiter {
		return
	}
	l.task, l.pause = renewHolder, 0
	l.due, l.exact = l.Until().Add(l.terms().Drift-l.terms().TTL/2), false
	rn.push(l)
}

// LetExpire stops the renewals of a lease. The owner is told when it has ended.
func (rn *Renewer) LetExpire(l *Lease) {
	rn.mu.Lock()
	defer rn.mu.Unlock()
	if l.heapIndex == 0 || l.task == release || l.task == timeout {
		return
	}
	l.task, l.due, l.exact = expire, clock.Never, true
	rn.push(l)
}

// Forget ends what the renewer does for a lease, unless it is being released.
func (rn *Renewer) Forget(l *Lease) {
	rn.mu.Lock()
	defer rn.mu.Unlock()
	if l.task != release {
		rn.leases.drop(l)
	}
}

// push has l called when it is due.
func (rn *Renewer) push(l *Lease) {
	rn.leases.put(l)
	rn.arm()
}

// arm sets the timer if it would fire too late. A timer that fires too early is left alone: most locks end before half
// their TTL, and setting it back would cost each of them.
func (rn *Renewer) arm() {
	next := clock.Never
	if l := rn.leases.later.first(); l != nil {
		next = l.next()
	}
	if l := rn.leases.ready.first(); l != nil {
		next = min(next, l.Until(), rn.senders.nextHang())
	}
	if next == clock.Never || rn.armed != 0 && rn.armed <= next {
		return
	}
	rn.armed = next
	wait := time.Duration(rn.armed - clock.Now())
	if rn.timer == nil {
		rn.timer = time.AfterFunc(wait, rn.fire)
	} else {
		rn.timer.Reset(wait)
	}
}

// fire ends the trust in leases whose time is over, and starts senders for those that are due.
func (rn *Renewer) fire() {
	rn.mu.Lock()
	now := clock.Now()
	var over []func()
	for l := rn.leases.ready.first(); l != nil && l.Until() <= now; l = rn.leases.ready.first() {
		over = rn.end(l, over)
	}
	for l := rn.leases.later.first(); l != nil; l = rn.leases.later.first() {
		// What falls due soon shares the round trip.
		soon := now
		if !l.exact {
			soon = now.Add(l.retryAfter())
		}
		if l.next() > soon {
			break
		}
		if l.Until() <= now {
			over = rn.end(l, over)
			continue
		}
		rn.leases.makeReady(l)
	}
	more := rn.senders.start(rn.node, now, rn.leases.ready.Len())
	rn.armed = 0
	rn.arm()
	rn.mu.Unlock()

	for _, s := range more {
		go rn.send(s)
	}
	for _, o := range over {
		go o() // it may call foreign code, which must not hold up the next
	}
}

// end takes out l, whose time is over, and adds what tells its owner. An id that was to be released has ended by itself.
func (rn *Renewer) end(l *Lease, over []func()) []func() {
	rn.leases.drop(l)
	switch l.task {
	case release:
		return over
	case timeout:
		return append(over, l.owner.OnTimeout)
	}
	return append(over, func() { l.owner.OnExpired(ErrExpired) })
}

// send makes calls for what is ready, a batch at a time, until nothing is.
func (rn *Renewer) send(self *sender) {
	for {
		due, hung, behind := rn.take(self)
		if behind != nil {
			behind.log()
		}
		for _, l := range hung {
			go rn.call([]*Lease{l})
		}
		switch {
		case len(due)+len(hung) == 0:
			return
		case len(due) == 0:
			continue
		}
		start := clock.Now()
		rn.call(due)
		rn.mu.Lock()
		took := time.Duration(clock.Now() - start)
		if rn.took == 0 {
			rn.took = took
		}
		rn.took += (took - rn.took) / 4
		rn.mu.Unlock()
	}
}

// take returns the next batch of the leases that are ready, those that end first. It also returns a backlog if the first one may
// not be renewed in time.
//
// Where the client has several servers, those whose last call hangs are returned by themselves. A pipeline is as slow as
// the slowest of its servers: with a call of its own for each, those on the other servers are in time.
func (rn *Renewer) take(self *sender) (due, hung []*Lease, behind *backlog) {
	rn.mu.Lock()
	defer rn.mu.Unlock()
	now := clock.Now()
	self.hangs = clock.Past
	if rn.senders.working(now) >= rn.node.maxSenders() { // others have taken its place, because it seemed to hang
		delete(rn.senders, self)
		return nil, nil, nil
	}
	self.hangs = clock.Never
	for len(due)+len(hung) < batch {
		l, ready := rn.leases.ready.first(), rn.leases.ready.Len()
		if l == nil {
			break
		}
		if behind == nil && l.isBehind(now) {
			behind = &backlog{l, ready, time.Duration(l.Until() - now)}
		}
		rn.leases.drop(l)
		if l.task == release && l.Until() <= now {
			continue // it has ended by itself
		}
		left := time.Duration(l.Until() - now)
		if ready > batch*rn.node.maxSenders() && left < rn.expected(l) {
			// The answer would come too late, and others can still be renewed in time. Calls may become faster.
			l.due, l.exact = now.Add(max(left/2, minPause)), true
			rn.leases.put(l)
			continue
		}
		// Should the call hang, another one is made, on another connection, while there is time for it.
		again := now.Add(max(2*l.retryAfter(), min(rn.expected(l)+l.retryAfter(), left-rn.expected(l))))
		self.hangs = min(self.hangs, again)
		l.due, l.exact = again, true
		rn.leases.put(l)
		if l.called && rn.node.sharded {
			hung = append(hung, l)
			continue
		}
		l.called = true
		due = append(due, l)
	}
	if len(due)+len(hung) == 0 {
		delete(rn.senders, self)
	}
	rn.arm()
	return due, hung, behind
}

// expected is how long a call for l may take: a quarter longer than the last ones have taken, a quarter of the TTL at most.
func (rn *Renewer) expected(l *Lease) time.Duration { return min(rn.took*5/4, l.terms().TTL/4) }

// A backlog is a number of calls that are due while the first of their leases is about to end.
type backlog struct {
	first *Lease
	due   int
	left  time.Duration
}

func (b *backlog) log() {
	r := b.first.owner.Request()
	r.Terms.Log.Error(r.Keys.Name(), "renewals fall behind, and locks may be lost; the leases that end first are renewed first",
		lockerr.Redis(fmt.Errorf("%d calls are due, and the first lease ends in %v: Redis or this process is too busy "+
			"for so many locks of so short a TTL (%v)", b.due, b.left.Round(time.Millisecond), r.Terms.TTL)))
}

// onRevoked ends the id of that number, if it waits or holds: a message says that it was revoked.
func (rn *Renewer) onRevoked(number uint64) {
	rn.mu.Lock()
	defer rn.mu.Unlock()
	if l := rn.leases.active(number); l != nil {
		rn.leases.drop(l)
		go l.owner.OnExpired(lockerr.ErrRevoked) // it calls foreign code
	}
}

// keeps reports whether the id of that number waits or holds, as far as this process knows.
func (rn *Renewer) keeps(number uint64) bool {
	rn.mu.Lock()
	defer rn.mu.Unlock()
	return rn.leases.active(number) != nil
}

// call renews or releases leases.
func (rn *Renewer) call(due []*Lease) {
	start := clock.Now()
	rn.mu.Lock()
	calls, limit := callsFor(due)
	longest := time.Duration(0)
	for _, l := range due {
		if l.task == renewHolder {
			longest = max(longest, l.terms().TTL)
		}
	}
	rn.mu.Unlock()
	if longest > 0 { // a holder that is renewed can be told of its revocation
		rn.node.Mailbox.StayOpen(longest)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(limit-start))
	defer cancel()
	rn.node.runAll(ctx, calls)

	// A writer that turns out not to hold is renewed again with all keys, so that the script hands the lock on, and tells
	// whether it was revoked.
	var again []*call
	for _, c := range calls {
		if c.err == nil && c.reply.Status == script.Gone && c.command.HasOneKey() {
			c.command = c.lease.Participant().Renew(0)
			again = append(again, c)
		}
	}
	rn.node.runAll(ctx, again)

	for _, c := range calls {
		rn.onAnswer(c, start)
		if c.mayExist {
			rn.node.LookForLostGrants(c.lease.owner.Request().Keys.Name(), start, c.again, c.reply, c.err)
		}
	}
}

// callsFor returns the call for each of due, and when the last of them is of no use any more.
func callsFor(due []*Lease) (calls []*call, limit clock.Instant) {
	calls = make([]*call, len(due))
	all := make([]call, len(due))
	limit = due[0].Until()
	for i, l := range due {
		c, p := &all[i], l.Participant()
		c.lease, c.raise, c.sweeps = l, l.raise, l.Node.Mailbox.Sweeps()
		switch {
		case l.task == release:
			c.command = p.Release(l.Tombstone)
			c.mayExist, c.again = l.MayExist, l.released
			l.released = true
		case l.readOnly:
			p.Write = false
			c.command = p.Renew(0)
		case l.task == renewHolder && l.Write && l.raise == 0:
			c.command = p.RenewWriter()
		default:
			c.command = p.Renew(l.raise)
		}
		calls[i], limit = c, max(limit, l.Until())
	}
	return calls, limit
}

// OnDowngrade takes the answer to a renewal as a reader that the owner has sent at that instant.
func (rn *Renewer) OnDowngrade(l *Lease, c script.Command, sent clock.Instant, r script.Reply, err error) error {
	if rn.node.Mailbox.Listens() { // as it has since the first renewal; the next one is put off
		rn.node.Mailbox.StayOpen(l.terms().TTL)
	}
	answered := &call{lease: l, command: c, reply: r, err: err}
	rn.onAnswer(answered, sent)
	return answered.err
}

// onAnswer takes the answer to a call that was sent at that instant.
func (rn *Renewer) onAnswer(c *call, sent clock.Instant) {
	l, r := c.lease, c.reply
	rn.node.CheckPublish(r, l.terms().Log)
	rn.node.Mailbox.Deliver(r.Grants)
	rn.mu.Lock()
	tell := rn.update(c, sent)
	rn.mu.Unlock()
	if tell != nil {
		tell()
	}
}

// update schedules what is next after an answer, and returns what tells the owner.
func (rn *Renewer) update(c *call, sent clock.Instant) (tell func()) {
	l, r := c.lease, c.reply
	l.called = false
	if l.heapIndex == 0 || l.task == timeout || (l.task == release) != (c.command.Script == script.Unlock) {
		return nil // it has ended or been released meanwhile
	}
	if r.Status == script.Foreign && l.readOnly && l.task != release { // it cannot be downgraded yet
		c.err = lockerr.Foreign(r.Data)
	}
	switch err := c.err; {
	case err != nil && l.task == expire:
		return nil
	case err != nil:
		l.due, l.exact = clock.Now().Add(l.retryAfter()), true
		rn.push(l)
		if l.task == release {
			return nil
		}
		return func() { l.owner.OnRenewFailed(sent, err) }
	case l.task == release && r.More:
		l.due, l.exact = clock.Now(), true
		rn.push(l)
		return nil
	case l.task == release:
		rn.leases.drop(l)
		return nil
	case r.Status != script.Granted && r.Status != script.Waiting:
		rn.leases.drop(l)
		why := ErrGone
		switch r.Status {
		case script.Foreign:
			why = lockerr.Foreign(r.Data)
		case script.Tombstoned: // not by this process, which would not ask
			why = lockerr.ErrRevoked
		}
		return func() { l.owner.OnExpired(why) }
	}
	l.Acknowledge(sent)
	if l.raise == c.raise {
		l.raise = 0
	}
	l.schedule(sent, r)
	if r.More || r.Status == script.Waiting && c.sweeps != l.Node.Mailbox.Sweeps() { // the others have been renewed since it was sent
		l.due, l.exact = clock.Now(), true
	}
	if l.task == expire { // the call was under way
		l.due, l.exact = clock.Never, true
	}
	rn.push(l)
	return func() { l.owner.OnRenewed(sent, r) }
}
