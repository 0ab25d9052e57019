package redismutex

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/localqueue"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/logger"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/script"
)

// An RWMutex is a reader/writer mutual exclusion lock, shared by all processes that use the same name on the same Redis,
// or on the same several. It is held by one writer, or any number of readers, or nobody.
//
// It is made by [NewMutex] or [NewRedlock] and is safe for concurrent use. It holds no connection and no goroutine of its
// own, needs no closing, and is cheap enough to be made for each use.
type RWMutex struct {
	name           string
	keys           *script.Keys
	drift, timeout *float64 // factors of the TTL; nil: the default
	config         acquisition.Config
	trace          *Trace // nil: nobody is told
	err            error  // every call is refused with it
}

// NewMutex makes a mutex of that name on rc, which may be any go-redis client: a [redis.Client], also for Sentinel, a
// [redis.ClusterClient], a [redis.Ring], an [redis.AutoPipeliner]. Mutexes on the same client share one subscription and
// the round trips of their renewals.
//
// The name is the Redis key that is locked. It may be any string but the empty one; if it contains a "}" it must have a
// hash tag, since the other keys of the lock are formed from it and have to be in the same slot of a cluster.
//
// A hook of rc must not lock through rc: if all connections are in use, it would wait for the call that it belongs to.
//
// NewMutex never fails: bad arguments are reported by every call that locks, as [ErrInvalid].
func NewMutex(rc redis.Scripter, name string, opt ...MutexOption) *RWMutex {
	return newMutex([]redis.Scripter{rc}, name, opt)
}

// NewRedlock makes a mutex over several independent Redis nodes: a lock is held when a majority of the nodes has granted
// it, so it outlives the loss of the others. It is the Redlock algorithm
// (https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/) with readers, a queue, renewal and fencing
// tokens. It keeps all promises that a mutex of [NewMutex] keeps; with one node it is the same.
//
// The nodes must be masters that are independent of each other, an odd number of them, usually 3 or 5: 4 nodes survive
// the loss of no more nodes than 3 do. All processes must name the same nodes; the order does not matter.
//
// A node that is slow or out of reach is waited for no longer than a time-out (see [WithTimeoutFactor]), which starts when the
// request is sent, or twice as long while it answers other calls. A node that has answered nothing for that long is down: it is
// not waited for at all, is tried again in the background, and takes part when it is back.
//
// An error tells how many nodes granted the lock, and why the others did not. The error of the first attempt is returned
// at once only if a majority fails.
//
// A node that restarts without persistence has forgotten who held the lock, and the last fencing token. It must stay away
// for as long as the longest TTL in use, or a second holder may find a majority. If it does, later tokens are greater than
// those that it has forgotten, as long as the clocks of the processes are less than half the TTL apart; those of the nodes
// do not matter.
//
// NewRedlock never fails: bad arguments are reported by every call that locks, as [ErrInvalid].
func NewRedlock(nodes []redis.Scripter, name string, opt ...MutexOption) *RWMutex {
	return newMutex(nodes, name, opt)
}

func newMutex(nodes []redis.Scripter, name string, opt []MutexOption) *RWMutex {
	m := &RWMutex{name: name}
	m.config.TTL, m.config.Turn = DefaultTTL, DefaultTurn
	m.keys, m.err = script.NewKeys(name)
	for _, o := range opt {
		if o == nil {
			m.err = errors.Join(m.err, fmt.Errorf("%w: nil option", ErrInvalid))
			continue
		}
		m.err = errors.Join(m.err, o(m))
	}
	m.err = errors.Join(m.err, m.configure(len(nodes)), checkClients(nodes))
	if m.err != nil {
		return m
	}
	m.config.Nodes = make([]*node.Node, len(nodes))
	for i, rc := range nodes {
		m.config.Nodes[i], m.err = nodeOf(rc)
		if m.err != nil {
			return m
		}
	}
	m.config.Init()
	return m
}

// nodeOf returns the node of a client, or an error if one of its methods panics, as those of a type that embeds a nil client.
func nodeOf(rc redis.Scripter) (n *node.Node, err error) {
	defer func() {
		if why := recover(); why != nil {
			err = fmt.Errorf("%w: a client of type %T panicked: %v", ErrInvalid, rc, why)
		}
	}()
	return node.Of(rc), nil
}

func checkClients(nodes []redis.Scripter) (err error) {
	if len(nodes) == 0 {
		return fmt.Errorf("%w: no nodes", ErrInvalid)
	}
	for i, rc := range nodes {
		which := ""
		if len(nodes) > 1 {
			which = fmt.Sprintf(" of node %d", i+1)
		}
		switch v := reflect.ValueOf(rc); {
		case !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil():
			err = errors.Join(err, fmt.Errorf("%w: nil client%s", ErrInvalid, which))
		case v.Comparable() && slices.Contains(nodes[:i], rc):
			err = errors.Join(err, fmt.Errorf("%w: the client%s was passed twice", ErrInvalid, which))
		}
	}
	return err
}

// Lock locks for writing. If the lock is held by others, Lock blocks until it is granted. It returns false if it cannot be
// granted. The reason is logged, unless it is that others hold the lock (see [WithWait]). Use [RWMutex.LockContext] to get
// an error, or to bound the wait.
func (m *RWMutex) Lock(opt ...LockOption) (*Lock, bool) {
	return m.lockOrLog(request{write: true}, opt)
}

// RLock locks for reading. Otherwise it is like [RWMutex.Lock].
func (m *RWMutex) RLock(opt ...LockOption) (*Lock, bool) {
	return m.lockOrLog(request{}, opt)
}

// TryLock locks for writing if the lock can be granted at once, and reports whether it was. It waits for nobody, and
// leaves no request in Redis when it fails.
func (m *RWMutex) TryLock(opt ...LockOption) (*Lock, bool) {
	return m.lockOrLog(request{write: true, try: true}, opt)
}

// TryRLock locks for reading. Otherwise it is like [RWMutex.TryLock].
func (m *RWMutex) TryRLock(opt ...LockOption) (*Lock, bool) {
	return m.lockOrLog(request{try: true}, opt)
}

// LockContext locks for writing. If the lock is held by others, LockContext blocks until it is granted or ctx ends; it
// returns when ctx ends even if Redis does not answer. The lock's context descends from ctx.
//
// If ctx descends from a Lock on the same key that has been neither unlocked nor lost, of this mutex or of another one on
// the same clients, the new lock is nested in that one. It is granted at once, even if others wait, without a call to Redis, and
// has the ID and the token of the outer lock. It has a context and an Unlock of its own; the lock is released in Redis
// with the last Unlock. A loss ends all of them. A write lock admits nested read and write locks. A read lock admits
// nested read locks only; a nested write lock fails with [ErrUpgrade]. If ctx descends from a lock that has been held for
// too long ([WithMaxHold]) and is not unlocked yet, the call fails with [ErrMaxHold], because it would wait for that lock.
// These rules apply to every call that locks.
//
// The error matches ctx's error and its cause, or one of [ErrUpgrade], [ErrMaxHold], [ErrRevoked], [ErrRedis], [ErrNotLock] and
// [ErrInvalid]. An error of Redis at the first attempt is returned at once. Once the call is in the queue, such errors are
// logged, and it waits on until ctx ends. [WithWait] bounds the wait without bounding the lock; the error of a wait that was
// too long matches [ErrLock].
func (m *RWMutex) LockContext(ctx context.Context, opt ...LockOption) (*Lock, error) {
	return m.lock(request{ctx: ctx, given: true, write: true}, opt)
}

// RLockContext locks for reading. Otherwise it is like [RWMutex.LockContext].
func (m *RWMutex) RLockContext(ctx context.Context, opt ...LockOption) (*Lock, error) {
	return m.lock(request{ctx: ctx, given: true}, opt)
}

// TryLockContext locks for writing if the lock can be granted at once. Otherwise the error is a [HeldError], which
// matches [ErrLock] and names a holder or waiter, and no request is left in Redis; or it is one of the errors of
// [RWMutex.LockContext].
func (m *RWMutex) TryLockContext(ctx context.Context, opt ...LockOption) (*Lock, error) {
	return m.lock(request{ctx: ctx, given: true, write: true, try: true}, opt)
}

// TryRLockContext locks for reading. Otherwise it is like [RWMutex.TryLockContext].
func (m *RWMutex) TryRLockContext(ctx context.Context, opt ...LockOption) (*Lock, error) {
	return m.lock(request{ctx: ctx, given: true, try: true}, opt)
}

// Do locks for writing as [RWMutex.LockContext] does, calls f with the lock, which is a context, and unlocks, also when f
// panics. f may unlock earlier. If the lock cannot be acquired, Do returns that error. Otherwise it returns f's error,
// joined with [ErrLockLost], [ErrRevoked], [ErrMaxHold] or [ErrNotLock] if the unlock returned one of these. An unlock that
// Redis does not confirm is logged: the lock was held for as long as f ran.
func (m *RWMutex) Do(ctx context.Context, f func(*Lock) error, opt ...LockOption) error {
	l, err := m.LockContext(ctx, opt...)
	if err != nil {
		return err
	}
	return l.do(f)
}

// RDo locks for reading. Otherwise it is like [RWMutex.Do].
func (m *RWMutex) RDo(ctx context.Context, f func(*Lock) error, opt ...LockOption) error {
	l, err := m.RLockContext(ctx, opt...)
	if err != nil {
		return err
	}
	return l.do(f)
}

// A request is what one call asks for.
type request struct {
	m       *RWMutex // set by complete, as keys is
	ctx     context.Context
	given   bool            // the caller passed ctx as an argument
	waitCtx context.Context // ends the wait; ctx, or one that descends from it
	bounded bool            // the wait is bounded, by wait
	wait    time.Duration
	write   bool
	try     bool
	key     string
	keys    *script.Keys
	owner   string      // "": none
	call    *tracedCall // nil: it is not traced
}

func (m *RWMutex) lockOrLog(r request, opt []LockOption) (*Lock, bool) {
	l, err := m.lock(r, opt)
	if err != nil && (!errors.Is(err, ErrLock) || errors.Is(err, ErrRedis)) {
		var log logger.Logger
		if m != nil {
			log = m.config.Log
		}
		log.Error("", "", err)
	}
	return l, err == nil
}

// lock checks and completes a request, and acquires the lock for it.
func (m *RWMutex) lock(r request, opt []LockOption) (*Lock, error) {
	if err := m.complete(&r, opt); err != nil {
		return nil, err
	}
	if r.ctx.Err() != nil {
		return nil, lockerr.Ended(r.ctx, r.keys.Name())
	}
	r.call = r.traced()
	var l *Lock
	var err error
	if r.bounded && r.wait > 0 {
		l, err = r.acquireWithin()
	} else {
		l, err = r.acquire()
	}
	r.call.onReturn(l, err)
	return l, err
}

// complete checks a request and applies its options.
func (m *RWMutex) complete(r *request, opt []LockOption) error {
	switch {
	case m == nil || m.keys == nil && m.err == nil:
		return fmt.Errorf("%w: the mutex was not made by NewMutex or NewRedlock", ErrInvalid)
	case m.err != nil:
		return m.err
	case r.given && r.ctx == nil:
		return fmt.Errorf("%w: nil context", ErrInvalid)
	}
	r.m, r.keys = m, m.keys
	if len(opt) > 0 {
		with, err := r.with(opt)
		if err != nil {
			return err
		}
		*r = with
	}
	if r.ctx == nil {
		r.ctx = context.Background()
	}
	r.waitCtx = r.ctx
	if r.bounded {
		if r.try {
			return fmt.Errorf("%w: WithWait does not apply to a try", ErrInvalid)
		}
		r.try = r.wait == 0
	}
	if r.key != "" {
		var err error
		r.keys, err = script.NewKeys(m.name + ":" + r.key)
		return err
	}
	return nil
}

// with applies options to a copy of r. An option takes a pointer, which puts the copy on the heap; a request without options
// stays on the stack.
func (r request) with(opt []LockOption) (request, error) {
	for _, o := range opt {
		if o == nil {
			return r, fmt.Errorf("%w: nil option", ErrInvalid)
		}
		if err := o(&r); err != nil {
			return r, err
		}
	}
	return r, nil
}

// acquire acquires the lock, or nests a new one in a lock that the caller has. It tries again after ErrRetry.
func (r request) acquire() (*Lock, error) {
	for {
		l, outer, o, err := r.newLock()
		if err != nil {
			return nil, err
		}
		r.call.onAttempt(outer != nil)
		err = l.open(r, outer, o)
		if err == nil {
			return l, nil
		}
		if err != acquisition.ErrRetry {
			return nil, err
		}
	}
}

// newLock returns a lock for r that is still to be opened. It is nested in outer if the context or the owner of r has a lock on
// that key, and otherwise has an acquisition of its own. The error matches ErrMaxHold if the only lock that could admit r is
// overdue.
func (r request) newLock() (l *Lock, outer *core, o *owner, err error) {
	outer, err = r.outer()
	if r.owner != "" {
		return r.newOwnedLock(outer, err)
	}
	if err != nil {
		return nil, nil, nil, err
	}
	return r.newLockIn(outer), outer, nil, nil
}

// newLockIn returns a lock that is to be nested in outer, or is to be acquired if that is nil.
func (r request) newLockIn(outer *core) *Lock {
	c := &core{}
	switch {
	case outer != nil:
		c.held = localqueue.NestedIn(&outer.held)
	case r.isAlone():
		c.held = localqueue.Alone(&r.m.config, r.keys, r.write, r.try)
	}
	return &Lock{core: c}
}

// isAlone reports whether r stands in Redis by itself, and not in the queue of its key.
func (r request) isAlone() bool { return r.m.config.Turn == 0 || r.owner != "" }

// lastTry is how long the try after a wait that has run out may take, and a node time-out more.
const lastTry = 100 * time.Millisecond

// acquireWithin is acquire within the time for which r may wait. When that is over it tries once more, and so learns which
// process holds the lock or waits for it. It tries again while that is the request of the wait itself, which may be on its
// way still.
func (r request) acquireWithin() (*Lock, error) {
	within := func(d time.Duration) (l *Lock, over bool, err error) {
		waitCtx, cancel := context.WithTimeout(r.ctx, d)
		defer cancel()
		r.waitCtx = waitCtx
		l, err = r.acquire()
		if over = errors.Is(err, context.DeadlineExceeded); over && r.ctx.Err() != nil { // the caller's own has ended, too
			return nil, false, lockerr.Ended(r.ctx, r.keys.Name())
		}
		return l, over, err
	}
	l, over, err := within(r.wait)
	if !over {
		return l, err
	}
	r.try = true
	last := lastTry + r.m.config.Timeout
	refused := lockerr.Doing("lock", r.keys.Name(), lockerr.Redis(fmt.Errorf("no answer within %v, after a wait of %v", last, r.wait)))
	for end := time.Now().Add(last); ; {
		l, over, err := within(time.Until(end))
		switch {
		case over:
			return nil, refused
		case !r.m.isGivenUp(err) || time.Until(end) <= 0:
			return l, err
		}
		refused = err
		select {
		case <-time.After(min(lastTry/20, time.Until(end))):
		case <-r.ctx.Done():
			return nil, lockerr.Ended(r.ctx, r.keys.Name())
		}
	}
}

// isGivenUp reports whether a try was refused because of a request that this process has given up.
func (m *RWMutex) isGivenUp(err error) bool {
	var held *HeldError
	return errors.As(err, &held) && slices.ContainsFunc(m.config.Nodes, func(n *node.Node) bool { return n.HasGivenUp(held.Holder) })
}
