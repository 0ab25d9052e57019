package redismutex

import (
	"context"
	"sync"

	"github.com/redismutex/redismutex/internal/localqueue"
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

// lockKey is the key under which a Lock is its own value.
type lockKey struct{}

// newLock makes a lock for r that is not open yet: nested in outer, a lock that the context or the owner of r has on that
// key, or with an acquisition of its own if there is none.
func (m *RWMutex) newLock(r request) (l, outer *Lock, o *owner) {
	outer = m.outerOf(r)
	if r.owner != "" {
		return m.newOwnedLock(r, outer)
	}
	return m.nestedLock(r, outer), outer, nil
}

// outerOf returns the innermost lock on the key of r that its context descends from and that admits nested locks, or nil.
func (m *RWMutex) outerOf(r request) *Lock {
	l, ok := FromContext(r.ctx)
	for ; ok; l, ok = FromContext(l.ctx) {
		if l.isOn(m, r) && l.grant.Admits((*user)(l)) {
			return l
		}
	}
	return nil
}

// nestedLock returns a lock that is nested in outer. If that is nil, it stands by itself: in Redis, if the order is strict
// or it has an owner, else in the queue of its key.
func (m *RWMutex) nestedLock(r request, outer *Lock) *Lock {
	switch {
	case outer != nil:
		return &Lock{grant: outer.grant}
	case m.config.Turn == 0, r.owner != "":
		return &Lock{grant: localqueue.Strict(&m.config, r.keys, r.write, r.try)}
	}
	return &Lock{}
}

// isOn reports whether l is a lock on the key of r, on the nodes of m.
func (l *Lock) isOn(m *RWMutex, r request) bool {
	return l.Key() == r.keys.Name() && l.grant.Config().SameNodes(&m.config)
}

// An owner has the locks for which this process asked in the name that [WithOwner] gave, on one key.
type owner struct {
	name ownerName
	// The locks it has and those it waits for. Guarded by the mutex of owners.
	locks map[*Lock]struct{}
}

type ownerName struct{ key, owner string }

// owners are those that have a lock or wait for one. The mutex comes before that of an acquisition.
var owners struct {
	sync.Mutex
	m map[ownerName]*owner
}

// newOwnedLock is newLock for an owner: outer may also be a lock that the owner has. The lock is one of the owner's from
// here on: if another call of the owner is granted first, that one supersedes it, since the owner would wait for itself.
func (m *RWMutex) newOwnedLock(r request, outer *Lock) (l, in *Lock, o *owner) {
	owners.Lock()
	defer owners.Unlock()
	name := ownerName{r.keys.Name(), r.owner}
	o = owners.m[name]
	if o == nil {
		o = &owner{name, map[*Lock]struct{}{}}
		if owners.m == nil {
			owners.m = map[ownerName]*owner{}
		}
		owners.m[name] = o
	}
	for other := range o.locks {
		if outer == nil && other.isOn(m, r) && other.grant.Admits((*user)(other)) {
			outer = other
		}
	}
	l = m.nestedLock(r, outer)
	o.locks[l] = struct{}{}
	return l, outer, o
}

// granted ends the other waits of o for the key that it has now with l: they would wait for l.
func (o *owner) granted(l *Lock) {
	if o == nil {
		return
	}
	owners.Lock()
	defer owners.Unlock()
	for other := range o.locks {
		if other != l && other.grant.Config().SameNodes(l.grant.Config()) {
			other.grant.Supersede()
		}
	}
}

// dropping returns cancel for l, a lock of o, which is none any more when its context is done.
func (o *owner) dropping(l *Lock, cancel context.CancelCauseFunc) context.CancelCauseFunc {
	return func(cause error) {
		defer o.drop(l) // also if the parent context panics
		cancel(cause)
	}
}

// drop removes l from the locks of o.
func (o *owner) drop(l *Lock) {
	owners.Lock()
	defer owners.Unlock()
	delete(o.locks, l)
	if len(o.locks) == 0 {
		delete(owners.m, o.name)
	}
}
