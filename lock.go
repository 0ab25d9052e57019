package redismutex

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"
	"weak"

	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/localqueue"
	"github.com/redismutex/redismutex/internal/lockerr"
)

// A Lock is a lock that has been granted, for writing or for reading. It is a [context.Context] that descends from the
// one it was acquired with: pass it to whatever the lock protects, and all of that stops when the lock ends.
//
// It renews itself until Unlock, also after the parent context has ended: code that cleans up is still protected. The
// lock's context ends, and [context.Cause] returns why,
//
//   - with [Lock.Unlock]: [ErrUnlocked];
//   - when the lock could not be renewed within its lease, or Redis does not know it any more: [ErrLockLost];
//   - when somebody has revoked it ([RWMutex.Revoke]): [ErrRevoked];
//   - when it has been held for as long as [WithMaxHold] allows: [ErrMaxHold];
//   - with its parent: the parent's cause.
//
// The same key may be locked again within it: see [RWMutex.LockContext]. [FromContext] finds it further down.
//
// All methods are safe for concurrent use. A Lock must not be copied, and it must be unlocked. Keep a reference to it, or
// to a context that descends from it, for as long as you need it: a Lock that becomes unreachable without an Unlock is
// released in the background, and that is logged. This takes at least the TTL, and a garbage collection, which an idle
// program runs every two minutes. The channel that Done returns does not keep a Lock reachable.
type Lock struct {
	ctx context.Context
	*core
}

// A core is what the library keeps of a Lock. The Lock itself, and the contexts derived from it, are the caller's: so the
// garbage collector finds a Lock that was forgotten.
type core struct {
	held    localqueue.Lock
	cancel  context.CancelCauseFunc
	maxHold time.Duration      // how long it is held at most, counted from its grant; 0: there is no bound; set once
	lock    weak.Pointer[Lock] // set, under the mutex of the queue, at the first renewal after the grant
}

func (c *core) acquisition() *acquisition.Acquisition { return c.held.Acquisition() }

var _ context.Context = (*Lock)(nil)

// open acquires l: nested in outer if there is one, by itself, or in the queue of its key. O is nil unless r has an owner.
func (l *Lock) open(r request, outer *core, o *owner) error {
	// The context is made first, under no mutex: making one calls into its parent.
	l.ctx, l.cancel = context.WithCancelCause(r.ctx)
	if o != nil {
		l.cancel = o.dropOnCancel(l.core, l.cancel)
	}
	waitCtx, u := r.waitCtx, (*user)(l)
	if r.call != nil {
		l.cancel = r.call.endOnCancel(l.cancel)
		waitCtx = context.WithValue(waitCtx, callKey{}, r.call)
	}
	var b *bound
	if l.maxHold = longestHold(r.m.config.MaxHold, outer); l.maxHold > 0 {
		b = &bound{lock: l.core}
		l.cancel = b.stopOnCancel(l.cancel)
	}
	err := acquisition.ErrRetry // stays if a hook, a logger or a context panics
	defer func() {
		if err != nil {
			l.cancel(err)
		}
	}()
	switch {
	case outer != nil:
		err = l.held.Nest(&outer.held, u, r.write)
	case r.isAlone():
		err = l.held.AcquireAlone(waitCtx, u)
	default:
		err = l.held.Acquire(waitCtx, &r.m.config, r.keys, r.write, r.try, u)
	}
	if err == nil {
		b.start()
		o.granted(l)
	}
	return err
}

// ID returns the id under which Redis knows the lock. Locks that a process passes on within a turn (see [WithTurn]) share
// one id, as nested locks do. With several nodes the lock has another id on each; this is the one on the first node when
// the lock was granted.
func (l *Lock) ID() string { return l.acquisition().ID() }

// Key returns the Redis key that is locked.
func (l *Lock) Key() string { return l.acquisition().Keys.Name() }

// Token returns the fencing token: it is greater than every token granted on this key before. What is written under the
// lock can carry it, and a store that refuses a token lower than one it has seen refuses a holder that was paused for so
// long that its lease ended unnoticed. The token of a read lock is 0, unless the lock is nested in a write lock, or was
// one before [Lock.Downgrade].
//
// A token fits an int64, and a BIGINT of SQL. It does not fit a double, the number of Lua, JavaScript and many readers of
// JSON: pass it there as text. As text, tokens compare as strings do: since the year 2001 all have 19 digits.
func (l *Lock) Token() uint64 { return l.held.Token() }

// Until returns the time at which trust in the lock ends unless it is renewed. It moves on with each renewal. It counts
// from the moment before the last successful renewal was sent, less a margin for clocks that do not run alike (see
// [WithDriftFactor]). With several nodes it is the time at which no majority of trusted leases is left.
func (l *Lock) Until() time.Time { return l.acquisition().Until().Time() }

// Deadline returns the deadline of the parent context.
func (l *Lock) Deadline() (deadline time.Time, ok bool) { return l.ctx.Deadline() }

// Done returns a channel that is closed when the lock ends.
func (l *Lock) Done() <-chan struct{} { return l.ctx.Done() }

// Err returns nil until the lock ends, then [context.Canceled], or the error with which the parent context ended. A
// process that was paused learns here that its lease is over, before any timer has fired.
func (l *Lock) Err() error {
	err := l.ctx.Err()
	if err == nil && l.acquisition().Until() <= clock.Now() {
		_ = l.usable()
		err = l.ctx.Err()
	}
	return err
}

// Value returns the parent context's value for key.
func (l *Lock) Value(key any) any {
	if key == (lockKey{}) {
		return l
	}
	return l.ctx.Value(key)
}

// Unlock ends the lock and hands it to the next in line. An error is logged: use [Lock.UnlockContext] to get it. Unlock
// works after the parent context has ended, and a second Unlock does no harm.
func (l *Lock) Unlock() {
	err := l.UnlockContext(context.Background())
	if err != nil && !errors.Is(err, ErrUnlocked) {
		l.logUnlock(err)
	}
}

// do calls f with l and unlocks it. A panic goes on.
func (l *Lock) do(f func(*Lock) error) error {
	returned := false
	defer func() {
		if !returned {
			l.Unlock()
		}
	}()
	err := f(l)
	returned = true
	switch ended := l.UnlockContext(context.WithoutCancel(l.ctx)); {
	case ended == nil, errors.Is(ended, ErrUnlocked):
	case errors.Is(ended, ErrRedis):
		l.logUnlock(ended)
	default:
		err = errors.Join(err, ended)
	}
	return err
}

func (l *Lock) logUnlock(err error) { l.acquisition().Config.Log.Error(l.Key(), "unlock", err) }

// UnlockContext is Unlock and returns what became of the lock:
//
//   - nil: it was held to the end, and Redis has released it; or Redis was not asked, because a lock that it is nested with
//     is still held, or because other goroutines of this process share the lock or get it next (see [WithTurn]);
//   - [ErrUnlocked]: it had been unlocked before;
//   - [ErrRevoked]: it had been revoked, and this process knew;
//   - [ErrMaxHold]: it had been held for longer than [WithMaxHold] allows. It is unlocked all the same, as for nil, unless its
//     lease had ended, or the error wraps one that says otherwise;
//   - [ErrLockLost]: it was lost before. It is also returned if the outcome is unknown: if the reply to the unlock was lost
//     and the client sent it again, the second one finds nothing to release;
//   - [ErrNotLock]: a key of the lock holds foreign data by now;
//   - [ErrRedis], or ctx's error: Redis has not confirmed the unlock. It goes on in the background until the lease ends,
//     when the lock comes free by itself.
//
// With several nodes a majority has to confirm the unlock; all nodes are waited for, but none longer than the node
// time-out: see [NewRedlock].
//
// In all these cases the lock's context is done before Redis is asked. A nil ctx is refused with [ErrInvalid], and the
// lock stays as it is.
func (l *Lock) UnlockContext(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("%w: nil context", ErrInvalid)
	}
	_ = ctx.Err() // a context that panics, as one that embeds nil, does so before anything has changed
	ended := l.usable()
	if ended != nil && !errors.Is(ended, ErrMaxHold) {
		return ended
	}
	canceled := false
	defer func() {
		if !canceled { // the parent context has panicked
			go l.held.Unlock(context.Background())
		}
	}()
	l.cancel(ErrUnlocked)
	canceled = true
	err := l.held.Unlock(ctx)
	runtime.KeepAlive(l) // it is not forgotten
	switch {
	case ended == nil:
		return err
	case err == nil, errors.Is(err, ErrMaxHold):
		return ended
	}
	return lockerr.Of(ErrMaxHold, err)
}

// Downgrade makes a write lock a read lock without another writer in between; readers at the head of the queue join at
// once. What the writer wrote is unchanged when it reads it again, while others read it too. The token stays.
//
// Downgrade may be called again, and asks Redis again. From the first call on the lock counts as a read lock, whatever the
// call returns, and a nested write lock fails with [ErrUpgrade]. The error matches
//
//   - [ErrRedis], or ctx's error: the outcome is unknown. Until Redis has made the change no other reader comes in. Each
//     renewal asks again;
//   - [ErrUnlocked], [ErrLockLost], [ErrRevoked], [ErrMaxHold]: the lock has ended;
//   - [ErrNotLock]: a key of the lock holds foreign data, so that it cannot be downgraded and will be lost;
//   - [ErrInvalid]: it was acquired as a read lock; or a write lock nested with it has to be unlocked first; or ctx is nil.
//     The lock stays as it is.
func (l *Lock) Downgrade(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("%w: nil context", ErrInvalid)
	}
	if err := l.usable(); err != nil {
		return err
	}
	var err error
	if ctx.Err() != nil {
		err = lockerr.Interrupted(ctx, l.Key())
	} else {
		err = l.held.Downgrade(ctx)
	}
	if ended := l.usable(); ended != nil { // ctx may have ended with it
		return ended
	}
	return err
}

// usable returns nil, or an error that matches ErrUnlocked, ErrLockLost, ErrRevoked or ErrMaxHold. The lock's context is done
// then, even if the goroutine that ended the lock has not canceled it yet.
func (l *Lock) usable() error {
	err := l.held.Usable()
	switch {
	case errors.Is(err, ErrUnlocked):
		l.cancel(ErrUnlocked)
	case errors.Is(err, ErrMaxHold):
		l.cancel(ErrMaxHold)
	case errors.Is(err, ErrLockLost), errors.Is(err, ErrRevoked):
		l.cancel(l.acquisition().Cause())
	}
	return err
}

// A user is a Lock as its queue knows it at first: see [localqueue.User].
type user Lock

func (u *user) End(cause error) { u.cancel(cause) }

func (u *user) Watch() (weakly localqueue.User, forget func()) {
	u.lock = weak.Make((*Lock)(u))
	return (*weakUser)(u.core), nil
}

// A weakUser is a Lock as its queue knows it from the first renewal on. It is a type of its own because a Lock has the
// methods of its core, and users of the package would see these.
type weakUser core

func (u *weakUser) End(cause error) { u.cancel(cause) }

func (u *weakUser) Watch() (weakly localqueue.User, forget func()) {
	if u.lock.Value() == nil {
		forget = u.forget
	}
	return u, forget
}

// forget unlocks the lock, since nobody else can. It may be called again.
func (u *weakUser) forget() {
	acq := u.held.Acquisition()
	if err := u.held.Usable(); err != nil && !errors.Is(err, ErrMaxHold) {
		return
	}
	why := fmt.Errorf("nothing refers to it any more, and it was not unlocked in %v", time.Duration(clock.Now()-u.held.Since()).Round(time.Millisecond))
	u.cancel(ErrUnlocked)
	switch err := u.held.Unlock(context.Background()); {
	case errors.Is(err, ErrUnlocked): // by another call
		return
	case err != nil:
		why = fmt.Errorf("%w: %w", why, err)
	}
	acq.Config.Log.Error(acq.Keys.Name(), "a lock was forgotten, and is released", why)
}
