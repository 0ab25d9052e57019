package redismutex

// This file answers: what is promised, and how do I acquire?

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// An RWMutex is a reader/writer mutual exclusion lock that all processes share
// which name it alike, on the same Redis. It is held by one writer, or any
// number of readers, or nobody.
//
// It is made by [NewMutex] and safe for concurrent use. It holds no connection
// and no goroutine of its own, needs no closing, and is cheap enough to be made
// for each use.
type RWMutex struct {
	ep     *endpoint
	name   string
	keys   *keys
	ttl    time.Duration
	order  order
	logger *slog.Logger
	err    error // what every call is refused with

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
// What is wrong with the arguments, every call that locks says.
func NewMutex(rc redis.Scripter, name string, opt ...MutexOption) *RWMutex {
	m := &RWMutex{name: name, ttl: DefaultTTL}
	m.keys, m.err = newKeys(name)
	for _, o := range opt {
		if o == nil {
			m.err = errors.Join(m.err, fmt.Errorf("%w: nil option", ErrInvalid))
			continue
		}
		m.err = errors.Join(m.err, o(m))
	}
	if v := reflect.ValueOf(rc); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		m.err = errors.Join(m.err, fmt.Errorf("%w: nil client", ErrInvalid))
	}
	if m.err == nil {
		m.ep = endpointOf(rc)
		m.ttlArg = strconv.FormatInt(m.ttl.Milliseconds(), 10)
		m.buryArg = strconv.FormatInt(2*m.ttl.Milliseconds(), 10)
	}
	return m
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
// The error matches ctx's error and its cause, or one of [ErrRedis],
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
}

func (m *RWMutex) plain(r request, opt []LockOption) (*Lock, bool) {
	l, err := m.acquire(r, opt)
	if err != nil && !errors.Is(err, ErrLock) {
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
	// While the mailbox hears, somebody waits, or did a moment ago: then it
	// saves a call to join at once.
	if !r.try && m.ep.box.Hears() {
		return m.wait(r)
	}
	l, err := m.attempt(r)
	if !r.try && (errors.Is(err, ErrLock) || isVoid(err)) {
		return m.wait(r)
	}
	return l, err
}

// complete checks a request and gives it its defaults.
func (m *RWMutex) complete(r *request, opt []LockOption) error {
	switch {
	case m == nil || m.ep == nil && m.err == nil:
		return fmt.Errorf("%w: a mutex is made by NewMutex", ErrInvalid)
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

// attempt tries once, without a wait.
func (m *RWMutex) attempt(r request) (*Lock, error) {
	l := m.newLock(r)
	start := now()
	reply, err := l.stake.enter(r.ctx, true)
	if err != nil || reply.status != granted {
		return nil, l.refused(r, start, reply, err)
	}
	l.answered(start)
	if err := l.hold(r, start, reply); err != nil {
		return nil, err
	}
	return l, nil
}

// newLock makes the lock that r may get, under an id of its own.
func (m *RWMutex) newLock(r request) *Lock {
	n := m.ep.ids.Add(1)
	var buf [64]byte
	id := append(append(buf[:0], m.ep.box.Name()...), ':')
	id = strconv.AppendUint(id, n, 10)
	l := &Lock{}
	l.stake.m, l.stake.keys, l.stake.n, l.stake.write = m, r.keys, n, r.write
	l.stake.name(string(id))
	return l
}

func (s *stake) name(id string) { s.id, s.idArg = id, id }

func (s *stake) enter(ctx context.Context, try bool) (reply, error) {
	script := rlockScript
	if s.write {
		script = lockScript
	}
	r, err := s.m.ep.interruptibly(ctx, script, s.enterCmd(s.how(try)))
	s.m.ep.note(r, s.m.log())
	return r, err
}

func (m *RWMutex) log() logger { return logger{m.logger} }
