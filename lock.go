package redismutex

// This file answers: what do I hold, and when is it gone?

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"
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
	ctx    context.Context
	cancel context.CancelCauseFunc
	stake  stake
	token  uint64
	fate   atomic.Int32          // held, then unlocked or lost
	doubt  atomic.Pointer[error] // why the last renewal failed
}

var _ context.Context = (*Lock)(nil)

const (
	fateHeld int32 = iota
	fateUnlocked
	fateLost
)

// ID is the lock's id: unique, and what Redis knows it by.
func (l *Lock) ID() string { return l.stake.id }

// Key is the Redis key that is locked.
func (l *Lock) Key() string { return l.stake.keys.holder }

// Token is the fencing token: greater than every token granted on this key
// before. Whoever is written to under the lock can refuse a token lower than
// one it has seen, and so a holder that was paused for so long that its lease
// ended unnoticed. It is 0 for a lock to read.
func (l *Lock) Token() uint64 { return l.token }

// Until is how long the lock can be trusted if it were not renewed any more.
// It moves on with each renewal. It counts from the moment before the last
// successful renewal was sent, less a margin for clocks that do not run alike
// (a hundredth of the TTL and 2 ms).
func (l *Lock) Until() time.Time { return l.until().time() }

func (l *Lock) until() instant { return instant(l.stake.until.Load()) }

// Deadline is that of the parent context.
func (l *Lock) Deadline() (deadline time.Time, ok bool) { return l.ctx.Deadline() }

// Done is closed when the lock ends.
func (l *Lock) Done() <-chan struct{} { return l.ctx.Done() }

// Err is nil until the lock ends, then [context.Canceled], or what the parent
// context ended with. A process that was paused learns here, before any timer
// has fired, that its lease is over.
func (l *Lock) Err() error {
	err := l.ctx.Err()
	if err == nil && l.fate.Load() == fateHeld && l.until() <= now() {
		l.over(errExpired)
		err = l.ctx.Err()
	}
	return err
}

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
		l.stake.m.log().error("", err)
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
// In all these cases the lock's context is done before Redis is asked. A nil ctx
// is refused with [ErrInvalid], and the lock stays as it is.
func (l *Lock) UnlockContext(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("%w: nil context", ErrInvalid)
	}
	if l.until() <= now() {
		l.over(errExpired)
	}
	if !l.fate.CompareAndSwap(fateHeld, fateUnlocked) {
		if l.fate.Load() == fateUnlocked {
			return fmt.Errorf("%w: %q", ErrUnlocked, l.Key())
		}
		return fmt.Errorf("%w: %q", ErrLockLost, l.Key())
	}
	l.cancel(ErrUnlocked)
	s := &l.stake
	ep := s.m.ep
	ep.keeper.remove(s)
	r, err := ep.interruptibly(ctx, unlockScript, s.leaveCmd())
	if err != nil || r.status != left {
		ep.box.Look(l.Key()) // the reply that was lost may have carried a grant
	}
	switch {
	case err == errInterrupted:
		ep.keeper.leave(s)
		return ended(ctx, l.Key())
	case err != nil:
		ep.keeper.leave(s)
		return doing("unlock", l.Key(), err)
	case r.status != left:
		return fmt.Errorf("%w: %q: it was not held any more when it was unlocked", ErrLockLost, l.Key())
	}
	ep.note(r, s.m.log())
	if r.grants != "" {
		runtime.Gosched() // whoever was granted goes first
	}
	return nil
}

// The keeper says what becomes of the lease.

func (l *Lock) kept(reply) { l.doubt.Store(nil) }

func (l *Lock) unsure(err error) { l.doubt.Store(&err) }

func (l *Lock) over(why error) {
	if !l.fate.CompareAndSwap(fateHeld, fateLost) {
		return
	}
	if doubt := l.doubt.Load(); doubt != nil && why == errExpired {
		why = fmt.Errorf("%w: %w", why, *doubt)
	}
	var err error = caused{ErrLockLost, fmt.Errorf("%q: %w", l.Key(), why)}
	l.cancel(err)
	m := l.stake.m
	m.log().error("", err)
	// A renewal whose reply was lost may have kept it on the server.
	m.ep.keeper.leave(&l.stake)
}
