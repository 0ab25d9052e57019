package redismutex

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// FromContext returns the lock that ctx descends from, the innermost if there are several. Code far down can look at
// [Lock.Until] and [Lock.Token] before it commits something. The lock may have ended; its Err tells.
func FromContext(ctx context.Context) (*Lock, bool) {
	if ctx == nil {
		return nil, false
	}
	l, ok := ctx.Value(lockKey{}).(*Lock)
	return l, ok
}

// Held returns nil if ctx descends from a lock on that key, for reading or writing, that has not ended. The key is that of
// [Lock.Key]. A function that must only be called under a lock can check this first. It asks this process and not Redis.
//
// Otherwise the error matches [ErrUnlocked], [ErrLockLost], [ErrRevoked] or [ErrMaxHold] if the lock has ended, [ErrNotHeld] if
// ctx descends from no lock on the key, or [ErrInvalid] if ctx is nil. If several locks on the key have ended, it tells of the
// innermost. Whether ctx itself has ended does not matter: a lock outlives its parent context, so that code that cleans up
// is protected. Held does not tell apart locks on the same key of different Redis servers.
func Held(ctx context.Context, key string) error {
	if ctx == nil {
		return fmt.Errorf("%w: nil context", ErrInvalid)
	}
	var ended error
	for l, ok := FromContext(ctx); ok; l, ok = FromContext(l.ctx) {
		if l.Key() != key {
			continue
		}
		err := l.usable()
		if err == nil {
			return nil
		}
		if ended == nil {
			ended = err
		}
	}
	if ended != nil {
		return ended
	}
	return fmt.Errorf("%w: the context descends from no lock on %q", ErrNotHeld, key)
}

// lockKey is the key under which a Lock is its own value.
type lockKey struct{}

// outer returns the innermost lock on the key of r that its context descends from and that admits nested locks. If there is
// none it returns nil, and an error if one of them is overdue.
func (r request) outer() (outer *core, overdue error) {
	l, ok := FromContext(r.ctx)
	for ; ok; l, ok = FromContext(l.ctx) {
		switch err := l.admits(r); {
		case err == nil:
			return l.core, nil
		case errors.Is(err, ErrMaxHold):
			overdue = err
		}
	}
	return nil, overdue
}

// admits returns nil if r can be nested in c, or an error that matches ErrMaxHold if it would wait for c, which is overdue.
func (c *core) admits(r request) error {
	acq := c.acquisition()
	if acq.Keys.Name() != r.keys.Name() || !acq.Config.SameNodes(&r.m.config) {
		return errOtherLock
	}
	return c.held.Admits()
}

var errOtherLock = errors.New("a lock on another key, or on other nodes")

// An owner has the locks on one key that this process holds or waits for under one name of [WithOwner].
type owner struct {
	name  ownerName
	locks map[*core]struct{} // guarded by the mutex of owners
}

type ownerName struct{ key, owner string }

// owners are those that have a lock or wait for one. The mutex comes before that of a queue.
var owners struct {
	sync.Mutex
	m map[ownerName]*owner
}

// newOwnedLock is newLock for an owner, whose other locks may also be the outer lock or the overdue one. The new lock is one of
// the owner's from here on: if another call of the owner is granted first, it is withdrawn, because the owner would wait for
// itself.
func (r request) newOwnedLock(outer *core, overdue error) (l *Lock, in *core, o *owner, err error) {
	owners.Lock()
	defer owners.Unlock()
	name := ownerName{r.keys.Name(), r.owner}
	o = owners.m[name]
	if o == nil {
		o = &owner{name, map[*core]struct{}{}}
	}
	for other := range o.locks {
		if outer != nil {
			break
		}
		switch err := other.admits(r); {
		case err == nil:
			outer = other
		case errors.Is(err, ErrMaxHold):
			overdue = err
		}
	}
	if outer == nil && overdue != nil {
		return nil, nil, nil, overdue
	}
	l = r.newLockIn(outer)
	o.locks[l.core] = struct{}{}
	if owners.m == nil {
		owners.m = map[ownerName]*owner{}
	}
	owners.m[name] = o
	return l, outer, o, nil
}

// granted ends the other requests of o for the key that it has now with l: they would wait for l. They are made again, in l.
func (o *owner) granted(l *Lock) {
	if o == nil {
		return
	}
	owners.Lock()
	defer owners.Unlock()
	for other := range o.locks {
		if other != l.core && other.acquisition().Config.SameNodes(l.acquisition().Config) {
			other.acquisition().Withdraw()
		}
	}
}

// dropOnCancel returns cancel for c, which also removes c from the locks of o. An overdue lock is still held, and stays.
func (o *owner) dropOnCancel(c *core, cancel context.CancelCauseFunc) context.CancelCauseFunc {
	return func(cause error) {
		if cause != ErrMaxHold {
			defer o.drop(c) // also if the parent context panics
		}
		cancel(cause)
	}
}

// drop removes c from the locks of o. A later call must not remove an owner of the same name that was made since.
func (o *owner) drop(c *core) {
	owners.Lock()
	defer owners.Unlock()
	delete(o.locks, c)
	if len(o.locks) == 0 && owners.m[o.name] == o {
		delete(owners.m, o.name)
	}
}
