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

// nestedOrNew makes a lock for r that is not open yet: one nested in outer, or a new
// one if outer is nil.
func (m *RWMutex) nestedOrNew(r request) (l, outer *Lock) {
	outer = m.outer(r)
	if r.owner != "" {
		return m.nestedOrNewFor(r, outer)
	}
	return m.lockIn(outer, r), outer
}

// outer is the innermost lock on the key of r that the context of r descends from
// and another one can be nested in, or nil.
func (m *RWMutex) outer(r request) *Lock {
	l, ok := FromContext(r.ctx)
	for ; ok; l, ok = FromContext(l.ctx) {
		if l.isOn(m, r.keys) && l.alive() {
			return l
		}
	}
	return nil
}

// lockIn makes a lock nested in outer, or a new one if that is nil.
func (m *RWMutex) lockIn(outer *Lock, r request) *Lock {
	if outer == nil {
		return m.newLock(r)
	}
	return &Lock{hold: outer.hold, write: r.write}
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

// nestedOrNewFor is nestedOrNew for an owner: outer may also be a lock of that. The
// lock is one of the owner's from here on, so that the owner does not wait for
// itself: if it has the key by another call before this one, has calls this one off.
func (m *RWMutex) nestedOrNewFor(r request, outer *Lock) (l, in *Lock) {
	owners.Lock()
	defer owners.Unlock()
	name := ownerName{r.keys.holder, r.owner}
	o := owners.m[name]
	if o == nil {
		o = &owner{name, map[*Lock]struct{}{}}
		if owners.m == nil {
			owners.m = map[ownerName]*owner{}
		}
		owners.m[name] = o
	}
	for other := range o.locks {
		if outer == nil && other.isOn(m, r.keys) && other.alive() {
			outer = other
		}
	}
	l = m.lockIn(outer, r)
	l.owner = o
	o.locks[l] = struct{}{}
	return l, outer
}

// has ends the other waits of o for the key that it has now with l: they would
// wait for itself.
func (o *owner) has(l *Lock) {
	if o == nil {
		return
	}
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
