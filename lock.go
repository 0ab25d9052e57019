package redismutex

// This file answers: what do I hold, and when is it gone?

import (
	"context"
	"errors"
	"fmt"
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
// The same key may be locked again within it: see [RWMutex.LockContext].
// [FromContext] finds it further down.
//
// All methods are safe for concurrent use. A Lock must not be copied, and it
// must be unlocked: a Lock that is forgotten is renewed for as long as the
// process lives.
type Lock struct {
	ctx      context.Context
	cancel   context.CancelCauseFunc
	hold     *hold
	owner    *owner // nil: none
	write    bool   // it was acquired to write
	unlocked bool   // guarded by the mutex of hold
}

var _ context.Context = (*Lock)(nil)

// ID is the lock's id: unique, and what Redis knows it by. With several nodes
// each knows it by an id of its own; this is the one on the first of them, unless
// that has forgotten it and got another one.
func (l *Lock) ID() string {
	if h := l.hold; h.ballot != nil {
		return h.ballot.id.(string)
	}
	return l.hold.stakes[0].id.(string)
}

// Key is the Redis key that is locked.
func (l *Lock) Key() string { return l.hold.Key() }

// Token is the fencing token: greater than every token granted on this key
// before. Whoever is written to under the lock can refuse a token lower than
// one it has seen, and so a holder that was paused for so long that its lease
// ended unnoticed. It is 0 for a lock to read, unless that is nested in one to
// write, or was one before [Lock.Downgrade].
func (l *Lock) Token() uint64 { return l.hold.token }

// Until is how long the lock can be trusted if it were not renewed any more.
// It moves on with each renewal. It counts from the moment before the last
// successful renewal was sent, less a margin for clocks that do not run alike
// (see [WithDriftFactor]). With several nodes it is when the trust in so many of
// them has ended that no majority is left.
func (l *Lock) Until() time.Time { return instant(l.hold.until.Load()).time() }

// Deadline is that of the parent context.
func (l *Lock) Deadline() (deadline time.Time, ok bool) { return l.ctx.Deadline() }

// Done is closed when the lock ends.
func (l *Lock) Done() <-chan struct{} { return l.ctx.Done() }

// Err is nil until the lock ends, then [context.Canceled], or what the parent
// context ended with. A process that was paused learns here, before any timer
// has fired, that its lease is over.
func (l *Lock) Err() error {
	err := l.ctx.Err()
	if err == nil && l.hold.expired() {
		_ = l.usable()
		err = l.ctx.Err()
	}
	return err
}

// Value is that of the parent context.
func (l *Lock) Value(key any) any {
	if key == (lockKey{}) {
		return l
	}
	return l.ctx.Value(key)
}

// Unlock ends the lock and hands it to the next in line. What goes wrong goes
// to the log: [Lock.UnlockContext] returns it. It works when the parent
// context has ended, and a second Unlock does no harm.
func (l *Lock) Unlock() {
	err := l.UnlockContext(context.Background())
	if err != nil && !errors.Is(err, ErrUnlocked) {
		l.hold.m.log().error("", err)
	}
}

// UnlockContext is Unlock, and says what became of it:
//
//   - nil: the lock was held to the end, and Redis has let go of it; or one that
//     it is nested with is still held, and Redis is not asked;
//   - [ErrUnlocked]: it had been unlocked before;
//   - [ErrLockLost]: it was lost before. In doubt it says so, too: where the
//     reply to the unlock itself was lost and the client sent it again, the
//     second one finds nothing any more;
//   - [ErrNotLock]: a key of the lock holds somebody's data by now;
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
	h := l.hold
	if h.expired() {
		h.expire()
	}
	last, err := h.close(l)
	if err != nil {
		l.finish(err)
		return err
	}
	l.cancel(ErrUnlocked)
	l.owner.drop(l)
	if !last {
		return nil
	}
	t, n := h.leave(ctx), len(h.stakes)
	switch quorum.Decide(n, t.yes, n-t.yes-len(t.errs)) {
	case quorum.Yes:
		return nil
	case quorum.No:
		return fmt.Errorf("%w: %q: it was not held any more when it was unlocked", ErrLockLost, l.Key())
	}
	return t.err(ctx, h, "unlock", "have let go of it")
}
