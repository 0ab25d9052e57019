package redismutex

// This file answers: what is behind a lock, and who shares it?

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

// A hold is one request, and what has become of it: it waits, is held, and is
// over. Locks that are nested in each other share one, so that Redis knows of the
// first of them alone.
//
// No foreign code (contexts, loggers, the client and its hooks) runs under its
// mutex, nor under any other one of this package: it may call back.
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

	cause  *error        // what ended it, once it is lost: few are, so it takes no more than a pointer
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

// open makes l a lock of h: the first one, or one nested in outer. It returns
// errAgain if h, or outer, has ended meanwhile.
func (h *hold) open(l, outer *Lock, ctx context.Context) error {
	// The context comes before the mutex: to make one calls into its parent.
	l.ctx, l.cancel = context.WithCancelCause(ctx)
	h.mu.Lock()
	err := h.add(l, outer)
	h.mu.Unlock()
	if err != nil {
		l.cancel(err)
	}
	return err
}

// add is open, under the mutex.
func (h *hold) add(l, outer *Lock) error {
	switch {
	case h.phase != held, outer != nil && !h.nests(outer):
		return errAgain
	case l.write && !h.write:
		return fmt.Errorf("%w: %q: unlock it first, or lock to write in the first place", ErrUpgrade, h.Key())
	case h.one == nil:
		h.one = l
		return nil
	case h.more == nil:
		h.more = map[*Lock]struct{}{}
	}
	h.more[l] = struct{}{}
	return nil
}

// alive says whether another lock can be nested in l.
func (l *Lock) alive() bool {
	l.hold.mu.Lock()
	defer l.hold.mu.Unlock()
	return l.hold.nests(l)
}

// nests says whether another lock can be nested in l: it has been neither unlocked
// nor lost. Its parent context may have ended: what cleans up is still protected.
func (h *hold) nests(l *Lock) bool {
	if h.phase == held && h.expired() {
		// A renewal under way must not bring it back: the caller is going to wait for
		// it, and it may be the caller's own.
		go h.say(h.lose(errExpired))
	}
	return h.phase == held && h.shared(l)
}

// shared says whether l is one of the locks of h.
func (h *hold) shared(l *Lock) bool {
	_, more := h.more[l]
	return more || h.one == l
}

// usable returns the error for a call on a lock that has ended, or nil. The context
// of the lock is done then, also if whoever ended it has not come to that yet.
func (l *Lock) usable() error {
	h := l.hold
	if h.expired() {
		h.expire()
	}
	h.mu.Lock()
	err := h.usable(l)
	h.mu.Unlock()
	l.finish(err)
	return err
}

// usable is that of a lock of h, under the mutex; finish has to follow.
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

// finish ends the context of l if err says that l has been unlocked or lost.
func (l *Lock) finish(err error) {
	switch {
	case errors.Is(err, ErrUnlocked):
		l.cancel(ErrUnlocked)
	case errors.Is(err, ErrLockLost):
		l.cancel(*l.hold.cause)
	}
}

// end ends all locks of h when it is lost. It needs no mutex: from then on no lock
// is added to them, and none is taken away.
func (h *hold) end() {
	if h.one != nil {
		h.one.end(*h.cause)
	}
	for l := range h.more {
		l.end(*h.cause)
	}
}

func (l *Lock) end(cause error) {
	l.cancel(cause)
	l.owner.drop(l)
}
