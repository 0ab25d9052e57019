package redismutex

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/clock"
)

// A Trace is a set of functions that are called on the events of a mutex's locks: see [WithTrace]. Any of them may be nil,
// and costs nothing then. Set them before the first mutex gets the Trace, and do not copy it afterwards.
//
// The functions are called one after the other, in the order of the events, by a goroutine of the Trace, and never under a
// mutex of the library. So they may use the library, and one that is slow delays no lock and no renewal. If they are more than
// 4,096 events behind, further events are dropped, and Dropped is told how many. A panic is recovered and logged.
//
// A lock that is nested in another one is part of that one, and is not traced. Mutexes that differ in their Trace alone share
// the turns of [WithTurn]; renewals are then told to the Trace of the mutex whose call went to Redis.
type Trace struct {
	// Waiting tells that a call waits, and where: in this process, or in the queue of Redis.
	Waiting func(TraceWaiting)

	// Granted tells that a call has returned a lock.
	Granted func(TraceGranted)

	// Failed tells that a call has returned an error.
	Failed func(TraceFailed)

	// Renewed tells that a lease of a held lock was renewed: with several nodes, on one of them.
	Renewed func(TraceRenewed)

	// RenewFailed tells that a renewal failed. It is tried again.
	RenewFailed func(TraceRenewFailed)

	// Ended tells that a lock that was granted has ended.
	Ended func(TraceEnded)

	// NodeDown and NodeUp tell that one of several nodes is down, or up again, to the Trace of the mutex whose call has
	// noticed it.
	NodeDown, NodeUp func(TraceNode)

	// Dropped tells how many events were dropped since the last one that was told.
	Dropped func(n int)

	queue traceQueue
}

// A TraceCall is a call that locks.
type TraceCall struct {
	Number  uint64          // of the call, among all calls of this process
	Context context.Context // the caller's
	Mutex   string          // the name of the mutex
	Key     string          // what is locked: the name, or "name:key" with WithKey
	Write   bool
	Try     bool
	Began   time.Time
}

// TraceWaiting is told when a call begins to wait.
type TraceWaiting struct {
	TraceCall
	Time  time.Time
	Local bool // it waits in this process, for others of the process, and not by itself in the queue of Redis
}

// TraceGranted is told when a call has returned a lock.
type TraceGranted struct {
	TraceCall
	Time  time.Time
	ID    string // as Lock.ID
	Token uint64 // as Lock.Token
	Rank  int64  // the place in the queue with several nodes, µs of Unix time; 0 with one, which chooses it
	By    TraceBy
}

// TraceBy is how a lock was granted.
type TraceBy int

const (
	ByReply   TraceBy = iota // in reply to the call's own request or to a renewal of it
	ByMessage                // another one has handed it on: by message, or in the reply to an unlock of this process
	ByTurn                   // another goroutine of this process has passed it on: see WithTurn
)

// String returns "reply", "message" or "turn".
func (b TraceBy) String() string { return [...]string{"reply", "message", "turn"}[b] }

// TraceFailed is told when a call has returned an error.
type TraceFailed struct {
	TraceCall
	Time time.Time
	Err  error
}

// TraceRenewed is told when a lease was renewed.
type TraceRenewed struct {
	Mutex, Key, ID string
	Time           time.Time
	Margin         time.Duration // for how long the lock would have been trusted without this renewal
}

// TraceRenewFailed is told when a renewal failed.
type TraceRenewFailed struct {
	Mutex, Key, ID string
	Time           time.Time
	Margin         time.Duration // for how long the lock is still trusted
	Err            error
}

// TraceEnded is told when a lock has ended.
type TraceEnded struct {
	TraceCall
	Time    time.Time
	Granted time.Time
	ID      string
	Token   uint64
	Cause   error // ErrUnlocked, or why else it ended: ErrLockLost, ErrRevoked, ErrMaxHold
}

// TraceNode is told when one of several nodes is down or up.
type TraceNode struct {
	Node string // its place among the nodes, and its address if it is known
	Time time.Time
	Err  error // why it is down; nil: it is up
}

// WithTrace makes the mutex call the functions of t on the events of its locks. Mutexes may share a Trace.
func WithTrace(t *Trace) MutexOption {
	return func(m *RWMutex) error {
		if t == nil {
			return fmt.Errorf("%w: nil trace", ErrInvalid)
		}
		if t.tells() {
			m.trace = t
			m.config.Trace = &engineTrace{t, m}
		}
		return nil
	}
}

// tells reports whether t has any function.
func (t *Trace) tells() bool {
	return t.Waiting != nil || t.Granted != nil || t.Failed != nil || t.Renewed != nil || t.RenewFailed != nil || t.Ended != nil ||
		t.NodeDown != nil || t.NodeUp != nil
}

// maxTraceEvents is how many events wait for the functions of a Trace at most.
const maxTraceEvents = 4096

// A traceQueue has the events of a Trace that were not told yet.
type traceQueue struct {
	mu      sync.Mutex
	events  []func()
	dropped int
	told    bool // a goroutine tells them
}

// tell has f called, after all that came before.
func tell[E any](t *Trace, m *RWMutex, f func(E), e E) {
	if f == nil {
		return
	}
	t.queue.mu.Lock()
	defer t.queue.mu.Unlock()
	t.push(m, func() { f(e) })
}

// push has f called. The mutex is held.
func (t *Trace) push(m *RWMutex, f func()) {
	q := &t.queue
	if len(q.events) >= maxTraceEvents {
		q.dropped++
		return
	}
	if n := q.dropped; n > 0 {
		q.dropped = 0
		if t.Dropped != nil {
			q.events = append(q.events, func() { t.Dropped(n) })
		}
	}
	q.events = append(q.events, f)
	if !q.told {
		q.told = true
		go t.run(m)
	}
}

// run tells the events, until there are none.
func (t *Trace) run(m *RWMutex) {
	q, returned := &t.queue, false
	defer func() {
		if !returned { // a function has ended the goroutine
			go t.run(m)
		}
	}()
	for {
		q.mu.Lock()
		if len(q.events) == 0 {
			q.events, q.told = nil, false
			if n := q.dropped; n > 0 && t.Dropped != nil {
				q.dropped = 0
				q.told = true
				q.events = append(q.events, func() { t.Dropped(n) })
			}
		}
		if !q.told {
			q.mu.Unlock()
			returned = true
			return
		}
		f := q.events[0]
		q.events[0] = nil
		q.events = q.events[1:]
		q.mu.Unlock()
		m.protect(f)
	}
}

// protect calls f, and logs a panic.
func (m *RWMutex) protect(f func()) {
	defer func() {
		if why := recover(); why != nil {
			m.config.Log.Error("", "a function of the trace panicked, and is called again for the next event", fmt.Errorf("%v", why))
		}
	}()
	f()
}

// A tracedCall is a call of a mutex with a Trace, and the lock that it returns. The fields below are guarded by the mutex of
// the Trace's queue.
type tracedCall struct {
	TraceCall
	m *RWMutex

	tried   bool
	nested  bool // it is not traced
	waits   bool
	granted *TraceEnded // what will be told when it ends; nil: it has not been granted
	over    bool
	cause   error // why it was over before it was told that it was granted
}

// tracedCalls counts them.
var tracedCalls atomic.Uint64

// callKey is the key under which a traced call is a value of the context of its request.
type callKey struct{}

// traced returns the call of r, or nil if its mutex has no Trace.
func (r request) traced() *tracedCall {
	m := r.m
	if m.trace == nil {
		return nil
	}
	return &tracedCall{m: m, TraceCall: TraceCall{tracedCalls.Add(1), r.ctx, m.name, r.keys.Name(), r.write, r.try, time.Now()}}
}

// onAttempt notes that the call tries to acquire the lock, for the first time or again. One that begins nested in another lock
// is not traced.
func (c *tracedCall) onAttempt(nested bool) {
	if c == nil {
		return
	}
	c.nested = nested && (c.nested || !c.tried)
	c.tried, c.over = true, false
}

// onWaiting notes that the call waits.
func (c *tracedCall) onWaiting(local bool) {
	t := c.m.trace
	t.queue.mu.Lock()
	defer t.queue.mu.Unlock()
	if c.waits || t.Waiting == nil {
		return
	}
	c.waits = true
	e := TraceWaiting{c.TraceCall, time.Now(), local}
	t.push(c.m, func() { t.Waiting(e) })
}

// onReturn notes what the call returns. If the lock has ended meanwhile, that is told afterwards.
func (c *tracedCall) onReturn(l *Lock, err error) {
	if c == nil || c.nested {
		return
	}
	t := c.m.trace
	if err != nil {
		tell(t, c.m, t.Failed, TraceFailed{c.TraceCall, time.Now(), err})
		return
	}
	acq := l.acquisition()
	e := TraceGranted{TraceCall: c.TraceCall, Time: l.held.Since().Time(), ID: l.ID(), Token: l.Token(), Rank: acq.Rank()}
	switch {
	case l.held.Local():
		e.By = ByTurn
	case acq.Pushed():
		e.By = ByMessage
	}
	t.queue.mu.Lock()
	defer t.queue.mu.Unlock()
	if t.Granted != nil {
		t.push(c.m, func() { t.Granted(e) })
	}
	c.granted = &TraceEnded{TraceCall: c.TraceCall, Granted: e.Time, ID: e.ID, Token: e.Token}
	if c.over {
		c.tellEnd()
	}
}

// endOnCancel returns cancel, which also notes that the lock has ended.
func (c *tracedCall) endOnCancel(cancel context.CancelCauseFunc) context.CancelCauseFunc {
	return func(cause error) {
		cancel(cause)
		q := &c.m.trace.queue
		q.mu.Lock()
		defer q.mu.Unlock()
		if c.over {
			return
		}
		c.over, c.cause = true, cause
		if c.granted != nil {
			c.tellEnd()
		}
	}
}

// tellEnd tells that the lock has ended. The mutex of the Trace's queue is held.
func (c *tracedCall) tellEnd() {
	t, e := c.m.trace, c.granted
	if t.Ended == nil {
		return
	}
	e.Time, e.Cause = time.Now(), c.cause
	t.push(c.m, func() { t.Ended(*e) })
}

// An engineTrace is what the engine tells.
type engineTrace struct {
	t *Trace
	m *RWMutex
}

// Waiting implements [acquisition.Tracer].
func (e *engineTrace) Waiting(ctx context.Context, local bool) {
	if c, ok := ctx.Value(callKey{}).(*tracedCall); ok {
		c.onWaiting(local)
	}
}

// Renewed implements [acquisition.Tracer].
func (e *engineTrace) Renewed(key string, id func() string, until clock.Instant) {
	if e.t.Renewed != nil {
		margin := time.Duration(until - clock.Now())
		tell(e.t, e.m, e.t.Renewed, TraceRenewed{e.m.name, key, id(), time.Now(), margin})
	}
}

// RenewFailed implements [acquisition.Tracer].
func (e *engineTrace) RenewFailed(key string, id func() string, until clock.Instant, err error) {
	if e.t.RenewFailed != nil {
		margin := time.Duration(until - clock.Now())
		tell(e.t, e.m, e.t.RenewFailed, TraceRenewFailed{e.m.name, key, id(), time.Now(), margin, err})
	}
}

// NodeDown implements [acquisition.Tracer].
func (e *engineTrace) NodeDown(name string, why error) {
	tell(e.t, e.m, e.t.NodeDown, TraceNode{name, time.Now(), why})
}

// NodeUp implements [acquisition.Tracer].
func (e *engineTrace) NodeUp(name string) {
	tell(e.t, e.m, e.t.NodeUp, TraceNode{name, time.Now(), nil})
}

var _ acquisition.Tracer = (*engineTrace)(nil)
