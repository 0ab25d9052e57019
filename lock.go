package redismutex

// This file answers: what do I hold, and when is it gone?

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redismutex/redismutex/internal/quorum"
)

// A Lock is a lock that has been granted, to write or to read. It is a
// [context.Context], descended from the one it was acquired with: pass it to
// whatever the lock protects, and all of that stops when the lock ends.
//
// It renews itself until Unlock, also after the parent context has ended:
// what cleans up is still protected. It ends, and [context.Cause] says why,
//
//   - by [Lock.Unlock]: [ErrUnlocked];
//   - when it could not be renewed within its lease, or Redis does not know it
//     any more: [ErrLockLost];
//   - with its parent: the parent's cause.
//
// All methods are safe for concurrent use. A Lock must not be copied, and it
// must be unlocked: a Lock that is forgotten is renewed for as long as the
// process lives.
type Lock struct {
	ctx    context.Context // the caller's, until the lock is granted
	cancel context.CancelCauseFunc
	m      *RWMutex
	keys   *keys
	token  uint64
	until  atomic.Int64 // when the trust in it ends

	write, try bool
	stood      bool // it has stood in the queue
	phase      phase
	mu         sync.Mutex // guards it, stood, and the rest

	signal chan struct{} // holds one; nil: nobody sleeps on it
	stakes []*stake      // one on each node
	ballot *ballot       // nil with one node
}

var _ context.Context = (*Lock)(nil)

// A phase is what has become of a request.
type phase uint8

const (
	wanted   phase = iota // it waits
	held                  // it is a lock
	unlocked              // it was one
	lost                  // it was one
	given                 // it was given up, and never was one
)

// ID is the lock's id: unique, and what Redis knows it by. With several nodes
// each knows it by an id of its own; this is the one on the first of them, unless
// that has forgotten it and got another one.
func (l *Lock) ID() string {
	if l.ballot != nil {
		return l.ballot.id.(string)
	}
	return l.stakes[0].id.(string)
}

// Key is the Redis key that is locked.
func (l *Lock) Key() string { return l.keys.holder }

// Token is the fencing token: greater than every token granted on this key
// before. Whoever is written to under the lock can refuse a token lower than
// one it has seen, and so a holder that was paused for so long that its lease
// ended unnoticed. It is 0 for a lock to read.
func (l *Lock) Token() uint64 { return l.token }

// Until is how long the lock can be trusted if it were not renewed any more.
// It moves on with each renewal. It counts from the moment before the last
// successful renewal was sent, less a margin for clocks that do not run alike
// (see [WithDriftFactor]). With several nodes it is when the trust in so many of
// them has ended that no majority is left.
func (l *Lock) Until() time.Time { return instant(l.until.Load()).time() }

// Deadline is that of the parent context.
func (l *Lock) Deadline() (deadline time.Time, ok bool) { return l.ctx.Deadline() }

// Done is closed when the lock ends.
func (l *Lock) Done() <-chan struct{} { return l.ctx.Done() }

// Err is nil until the lock ends, then [context.Canceled], or what the parent
// context ended with. A process that was paused learns here, before any timer
// has fired, that its lease is over.
func (l *Lock) Err() error {
	err := l.ctx.Err()
	if err == nil && l.expired() {
		l.expire()
		err = l.ctx.Err()
	}
	return err
}

func (l *Lock) expired() bool { return instant(l.until.Load()) <= now() }

// Value is that of the parent context.
func (l *Lock) Value(key any) any {
	_ = l.Err() // context.Cause asks here first: let it find the cause
	return l.ctx.Value(key)
}

// Unlock ends the lock and hands it to the next in line. What goes wrong goes
// to the log: [Lock.UnlockContext] returns it. It works when the parent
// context has ended, and a second Unlock does no harm.
func (l *Lock) Unlock() {
	err := l.UnlockContext(context.Background())
	if err != nil && !errors.Is(err, ErrUnlocked) {
		l.m.log().error("", err)
	}
}

// UnlockContext is Unlock, and says what became of it:
//
//   - nil: the lock was held to the end, and Redis has let go of it;
//   - [ErrUnlocked]: it had been unlocked before;
//   - [ErrLockLost]: it was lost before. In doubt it says so, too: where the
//     reply to the unlock itself was lost and the client sent it again, the
//     second one finds nothing any more;
//   - [ErrRedis], or ctx's error: Redis has not confirmed it. The unlock goes on
//     in the background until the lease ends, when the lock comes free by
//     itself.
//
// With several nodes it takes a majority to confirm it, and all of them are
// waited for, but none longer than the node time-out: see [NewRedlock].
//
// In all these cases the lock's context is done before Redis is asked. A nil ctx
// is refused with [ErrInvalid], and the lock stays as it is.
func (l *Lock) UnlockContext(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("%w: nil context", ErrInvalid)
	}
	if l.expired() {
		l.expire()
	}
	l.mu.Lock()
	phase := l.phase
	if phase == held {
		l.phase = unlocked
	}
	l.mu.Unlock()
	switch phase {
	case unlocked:
		return fmt.Errorf("%w: %q", ErrUnlocked, l.Key())
	case lost:
		return fmt.Errorf("%w: %q", ErrLockLost, l.Key())
	}
	l.cancel(ErrUnlocked)
	t, n := l.leave(ctx), len(l.stakes)
	switch quorum.Decide(n, t.left, n-t.left-len(t.errs)) {
	case quorum.Yes:
		return nil
	case quorum.No:
		return fmt.Errorf("%w: %q: it was not held any more when it was unlocked", ErrLockLost, l.Key())
	}
	return t.err(ctx, l)
}
