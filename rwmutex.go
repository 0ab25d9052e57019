package redismutex

// This file answers: what is promised, and how do I acquire?

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// An RWMutex is a reader/writer mutual exclusion lock that all processes share
// which name it alike, on the same Redis, or the same several. It is held by one writer, or any
// number of readers, or nobody.
//
// It is made by [NewMutex] or [NewRedlock] and safe for concurrent use. It holds no connection
// and no goroutine of its own, needs no closing, and is cheap enough to be made
// for each use.
type RWMutex struct {
	nodes  []*endpoint
	name   string
	keys   *keys
	ttl    time.Duration
	order  order
	logger *slog.Logger
	err    error // what every call is refused with

	drift       time.Duration // how much less than a TTL a lease is trusted
	nodeTimeout time.Duration // how long one node is waited for; 0 with one node
	ranks       *ranks        // nil with one node
	factors     factors

	ttlArg  any // the TTL, and how long a tombstone stays, as scripts take them
	buryArg any
}

// NewMutex makes a mutex of that name on rc, which may be any go-redis client:
// a [redis.Client], also for Sentinel, a [redis.ClusterClient], a [redis.Ring],
// an [redis.AutoPipeliner]. Mutexes on the same client share one subscription
// and the round trips of their renewals.
//
// The name is the Redis key that is locked. It may be any string but the empty
// one, and one with a "}" must have a hash tag: other keys are formed from it,
// which have to be in the same slot of a cluster.
//
// A hook of rc must not lock by way of rc: with all connections in use it would wait for the call that it is part of.
//
// What is wrong with the arguments, every call that locks says.
func NewMutex(rc redis.Scripter, name string, opt ...MutexOption) *RWMutex {
	m := newMutex(name, opt)
	m.finish([]redis.Scripter{rc})
	return m
}

// newMutex makes a mutex that has no node yet.
func newMutex(name string, opt []MutexOption) *RWMutex {
	m := &RWMutex{name: name, ttl: DefaultTTL}
	m.keys, m.err = newKeys(name)
	for _, o := range opt {
		if o == nil {
			m.err = errors.Join(m.err, fmt.Errorf("%w: nil option", ErrInvalid))
			continue
		}
		m.err = errors.Join(m.err, o(m))
	}
	return m
}

// finish gives a mutex its nodes, and sets what follows from its options.
func (m *RWMutex) finish(nodes []redis.Scripter) {
	m.err = errors.Join(m.err, m.setFactors(len(nodes)))
	for i, rc := range nodes {
		switch v := reflect.ValueOf(rc); {
		case !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil():
			m.err = errors.Join(m.err, fmt.Errorf("%w: nil client%s", ErrInvalid, ofNode(i, len(nodes))))
		case v.Comparable() && slices.Contains(nodes[:i], rc):
			m.err = errors.Join(m.err, fmt.Errorf("%w: the client%s is there twice", ErrInvalid, ofNode(i, len(nodes))))
		}
	}
	if m.err != nil {
		return
	}
	m.nodes = make([]*endpoint, len(nodes))
	for i, rc := range nodes {
		m.nodes[i] = endpointOf(rc)
	}
	m.ttlArg = strconv.FormatInt(m.ttl.Milliseconds(), 10)
	m.buryArg = strconv.FormatInt(2*m.ttl.Milliseconds(), 10)
}

func ofNode(i, n int) string {
	if n == 1 {
		return ""
	}
	return fmt.Sprintf(" of node %d", i+1)
}

// Lock locks to write. It waits until it is granted and reports true, or
// reports false when it cannot be: the log says why. Use [RWMutex.LockContext]
// for an error, and for a wait that ends.
func (m *RWMutex) Lock(opt ...LockOption) (*Lock, bool) {
	return m.plain(request{write: true}, opt)
}

// RLock locks to read, and is like [RWMutex.Lock] otherwise.
func (m *RWMutex) RLock(opt ...LockOption) (*Lock, bool) {
	return m.plain(request{}, opt)
}

// TryLock locks to write if it can be granted at once, and reports whether it
// was. It waits for nobody and leaves no trace when it fails.
func (m *RWMutex) TryLock(opt ...LockOption) (*Lock, bool) {
	return m.plain(request{write: true, try: true}, opt)
}

// TryRLock locks to read, and is like [RWMutex.TryLock] otherwise.
func (m *RWMutex) TryRLock(opt ...LockOption) (*Lock, bool) {
	return m.plain(request{try: true}, opt)
}

// LockContext locks to write. It waits until it is granted, or ctx ends, and
// returns then, also if Redis does not answer. The lock's context descends from
// ctx.
//
// If ctx descends from a Lock on the same key, of this mutex or another one on the
// same clients, that has been neither unlocked nor lost, the new one is nested in
// it: it is granted at once, whoever waits, with the ID and the token of the outer
// one, and without a call to Redis. It has a context and an Unlock of its own, and
// Redis lets go of the lock with the last Unlock of them. What is lost is lost to
// all of them. Whoever has locked to write may lock to read or to write again; who
// has locked to read, to read; to write is refused with [ErrUpgrade]. This holds of
// all the calls that lock.
//
// The error matches ctx's error and its cause, or one of [ErrUpgrade], [ErrRedis],
// [ErrNotLock] and [ErrInvalid]. An error of Redis is returned at once if it
// meets the first attempt. Once it stands in the queue, a waiter outlives them:
// they go to the log, and it waits on until ctx ends.
func (m *RWMutex) LockContext(ctx context.Context, opt ...LockOption) (*Lock, error) {
	return m.acquire(request{ctx: ctx, given: true, write: true}, opt)
}

// RLockContext locks to read, and is like [RWMutex.LockContext] otherwise.
func (m *RWMutex) RLockContext(ctx context.Context, opt ...LockOption) (*Lock, error) {
	return m.acquire(request{ctx: ctx, given: true}, opt)
}

// TryLockContext locks to write if it can be granted at once. Otherwise the
// error matches [ErrLock], and nothing is left in Redis; or it is one of those
// of [RWMutex.LockContext].
func (m *RWMutex) TryLockContext(ctx context.Context, opt ...LockOption) (*Lock, error) {
	return m.acquire(request{ctx: ctx, given: true, write: true, try: true}, opt)
}

// TryRLockContext locks to read, and is like [RWMutex.TryLockContext]
// otherwise.
func (m *RWMutex) TryRLockContext(ctx context.Context, opt ...LockOption) (*Lock, error) {
	return m.acquire(request{ctx: ctx, given: true, try: true}, opt)
}

// A request is what one call asks for.
type request struct {
	ctx   context.Context
	given bool // the call took ctx as an argument
	write bool
	try   bool
	key   string
	keys  *keys
	owner string // "": none
}

func (m *RWMutex) plain(r request, opt []LockOption) (*Lock, bool) {
	l, err := m.acquire(r, opt)
	if err != nil && (!errors.Is(err, ErrLock) || errors.Is(err, ErrRedis)) {
		m.log().error("", err)
	}
	return l, err == nil
}

func (m *RWMutex) acquire(r request, opt []LockOption) (*Lock, error) {
	if err := m.complete(&r, opt); err != nil {
		return nil, err
	}
	if r.ctx.Err() != nil {
		return nil, ended(r.ctx, r.keys.holder)
	}
	for {
		if l, err := m.attempt(r); err != errAgain {
			return l, err
		}
	}
}

// attempt asks for a lock once: for one nested in a lock that the context or the
// owner of r has already, or for a new one.
func (m *RWMutex) attempt(r request) (*Lock, error) {
	l, outer := m.nestedOrNew(r)
	var err error
	if outer != nil {
		err = l.hold.open(l, outer, r.ctx)
	} else {
		err = l.hold.wait(r.ctx, l)
	}
	if err != nil {
		l.owner.drop(l)
		return nil, err
	}
	l.owner.has(l)
	return l, nil
}

// complete checks a request and gives it its defaults.
func (m *RWMutex) complete(r *request, opt []LockOption) error {
	switch {
	case m == nil || m.nodes == nil && m.err == nil:
		return fmt.Errorf("%w: a mutex is made by NewMutex or NewRedlock", ErrInvalid)
	case m.err != nil:
		return m.err
	case r.given && r.ctx == nil:
		return fmt.Errorf("%w: nil context", ErrInvalid)
	}
	r.keys = m.keys
	for _, o := range opt {
		if o == nil {
			return fmt.Errorf("%w: nil option", ErrInvalid)
		}
		if err := o(r); err != nil {
			return err
		}
	}
	if r.ctx == nil {
		r.ctx = context.Background()
	}
	if r.key != "" {
		var err error
		r.keys, err = newKeys(m.name + ":" + r.key)
		return err
	}
	return nil
}

// newLock makes the lock that r may get. Most are on one node, and get what they
// need in one piece.
func (m *RWMutex) newLock(r request) *Lock {
	var l *Lock
	var h *hold
	if len(m.nodes) == 1 {
		one := &struct {
			lock  Lock
			hold  hold
			stake stake
			at    [1]*stake
		}{}
		l, h = &one.lock, &one.hold
		one.at[0] = &one.stake
		h.stakes = one.at[:]
	} else {
		l = &Lock{}
		h = &hold{stakes: make([]*stake, len(m.nodes)), ballot: &ballot{since: slices.Repeat([]instant{always}, len(m.nodes))}}
		for i := range h.stakes {
			h.stakes[i] = &stake{}
		}
	}
	l.hold, l.write = h, r.write
	h.m, h.keys, h.write, h.try = m, r.keys, r.write, r.try
	for i, s := range h.stakes {
		s.init(h, i)
	}
	if h.ballot != nil {
		h.ballot.id = h.stakes[0].id
		h.ballot.score = h.score(m.ranks.next())
	}
	return l
}

func (m *RWMutex) log() logger { return logger{m.logger} }
