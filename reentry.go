package redismutex

// This file answers: who asks for a lock that it has already? A context says it,
// or an owner.

import (
	"context"
	"slices"
	"sync"
)

// FromContext returns the lock that ctx descends from, the innermost if there
// are several: code far down can look at [Lock.Until] and [Lock.Token] before it
// commits something. It may have ended by then, which its Err says.
func FromContext(ctx context.Context) (*Lock, bool) {
	if ctx == nil {
		return nil, false
	}
	l, ok := ctx.Value(lockKey{}).(*Lock)
	return l, ok
}

// lockKey is what a Lock has itself as the value of.
type lockKey struct{}

// nested makes a lock nested in the one on the key of r that the context of r
// descends from, for an owner if there is one. It returns nil if there is no such
// lock.
func (m *RWMutex) nested(r request, o *owner) (l *Lock, err error) {
	outer, ok := FromContext(r.ctx)
	for ; ok && l == nil && err == nil; outer, ok = FromContext(outer.ctx) {
		if outer.isOn(m, r.keys) {
			l, err = outer.nest(r, o)
		}
	}
	return l, err
}

// isOn says whether l is a lock on that key of those nodes, whatever mutex it is
// of. A node is a client: two that name the same address may reach different
// servers.
func (l *Lock) isOn(m *RWMutex, k *keys) bool {
	nodes := l.hold.m.nodes
	if l.hold.keys.holder != k.holder || len(nodes) != len(m.nodes) {
		return false
	}
	for _, ep := range m.nodes {
		if !slices.Contains(nodes, ep) {
			return false
		}
	}
	return true
}

// An owner is one that has asked for a key in this process, by the name that
// [WithOwner] gave it.
type owner struct {
	name ownerName
	// Those it has, and those it waits for. Guarded by the mutex of owners.
	locks map[*Lock]struct{}
}

type ownerName struct{ key, owner string }

// owners are those that have a lock, or wait for one. Its mutex comes before that
// of a hold.
var owners struct {
	sync.Mutex
	m map[ownerName]*owner
}

// acquireFor acquires a lock for the owner in r. If the owner has the key already,
// or has it before its turn comes, the lock is nested in that.
func (m *RWMutex) acquireFor(r request) (*Lock, error) {
	for {
		l, nested, err := m.nestedOrNew(r)
		if nested || err != nil {
			return l, err
		}
		_, err = l.wait(r.ctx)
		if err == nil {
			l.owner.has(l)
			return l, nil
		}
		l.owner.drop(l)
		if err != errAgain {
			return nil, err
		}
	}
}

// nestedOrNew makes a lock nested in one that the context of r or the owner in it has,
// or a new one, still to be asked for.
func (m *RWMutex) nestedOrNew(r request) (l *Lock, nested bool, err error) {
	owners.Lock()
	defer owners.Unlock()
	name := ownerName{r.keys.holder, r.owner}
	o := owners.m[name]
	if o == nil {
		o = &owner{name, map[*Lock]struct{}{}}
	}
	l, err = m.nested(r, o)
	for other := range o.locks {
		if l == nil && err == nil && other.isOn(m, r.keys) {
			l, err = other.nest(r, o)
		}
	}
	if err != nil {
		return nil, false, err
	}
	nested = l != nil
	if !nested {
		l = m.newLock(r)
		l.owner = o
	}
	if owners.m == nil {
		owners.m = map[ownerName]*owner{}
	}
	owners.m[name] = o
	o.locks[l] = struct{}{}
	return l, nested, nil
}

// has ends the other waits of o for the key that it has now with l: they would
// wait for itself.
func (o *owner) has(l *Lock) {
	owners.Lock()
	defer owners.Unlock()
	for other := range o.locks {
		if other != l && other.isOn(l.hold.m, l.hold.keys) {
			other.hold.callOff()
		}
	}
}

// callOff ends the wait for h.
func (h *hold) callOff() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.phase == wanted {
		h.phase = moot
		h.partAll()
		h.wake()
	}
}

// drop takes l from the locks of o.
func (o *owner) drop(l *Lock) {
	if o == nil {
		return
	}
	owners.Lock()
	defer owners.Unlock()
	delete(o.locks, l)
	if len(o.locks) == 0 {
		delete(owners.m, o.name)
	}
}
