package redismutex

// This file answers: what is behind a lock, and who shares it?

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
)

// A hold is one request, and what has become of it: it waits, is held, and is
// over. Locks that are nested in each other share one, so that Redis knows of the
// first of them alone.
type hold struct {
	m     *RWMutex
	keys  *keys
	token uint64
	until atomic.Int64 // when the trust in it ends

	try   bool
	write bool // it is one to write; not any more after a downgrade
	stood bool // it has stood in the queue
	phase phase
	mu    sync.Mutex // guards them, and the rest

	one  *Lock // the locks that share it: one, and more
	more map[*Lock]struct{}

	signal chan struct{} // holds one; nil: nobody sleeps on it
	stakes []*stake      // one on each node
	ballot *ballot       // nil with one node
}

// A phase is what has become of a request.
type phase uint8

const (
	wanted   phase = iota // it waits
	held                  // it is a lock
	unlocked              // it was one
	lost                  // it was one
	given                 // it was given up, and never was one
	moot                  // its owner has another one: see WithOwner
)

// Key is the Redis key that is locked.
func (h *hold) Key() string { return h.keys.holder }

func (h *hold) expired() bool { return instant(h.until.Load()) <= now() }

// open makes l a lock of h, under the mutex.
func (h *hold) open(l *Lock, ctx context.Context) {
	l.ctx, l.cancel = context.WithCancelCause(ctx)
	if h.one == nil {
		h.one = l
		return
	}
	if h.more == nil {
		h.more = map[*Lock]struct{}{}
	}
	h.more[l] = struct{}{}
}

// nest makes another lock of the hold that outer is one of, for an owner if there is
// one. It returns nil if outer has been unlocked or lost. That its parent context has
// ended is no matter: what cleans up is still protected.
func (outer *Lock) nest(r request, o *owner) (*Lock, error) {
	h := outer.hold
	if h.expired() {
		h.expire()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.phase != held || !h.shared(outer):
		return nil, nil
	case r.write && !h.write:
		return nil, fmt.Errorf("%w: %q: unlock it first, or lock to write in the first place", ErrUpgrade, h.Key())
	}
	l := &Lock{hold: h, owner: o, write: r.write}
	h.open(l, r.ctx)
	return l, nil
}

// shared says whether l is one of the locks of h.
func (h *hold) shared(l *Lock) bool {
	_, more := h.more[l]
	return more || h.one == l
}

// usable returns the error for a call on a lock that has ended, or nil.
func (h *hold) usable(l *Lock) error {
	switch {
	case l.unlocked:
		return fmt.Errorf("%w: %q", ErrUnlocked, h.Key())
	case h.phase == lost:
		return fmt.Errorf("%w: %q", ErrLockLost, h.Key())
	}
	return nil
}

// writers is how many of the locks of h were acquired to write.
func (h *hold) writers() (n int) {
	if h.one != nil && h.one.write {
		n++
	}
	for l := range h.more {
		if l.write {
			n++
		}
	}
	return n
}

// close takes l from the locks of h, and says whether it was the last.
func (h *hold) close(l *Lock) (last bool, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.usable(l); err != nil {
		return false, err
	}
	l.unlocked = true
	if h.one == l {
		h.one = nil
	}
	delete(h.more, l)
	last = h.one == nil && len(h.more) == 0
	if last {
		h.phase = unlocked
	}
	return last, nil
}

// end ends all locks of h.
func (h *hold) end(why error) {
	if h.one != nil {
		h.one.end(why)
	}
	for l := range h.more {
		l.end(why)
	}
}

func (l *Lock) end(why error) {
	l.cancel(why)
	if l.owner != nil {
		go l.owner.drop(l)
	}
}
