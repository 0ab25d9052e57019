package redismutex

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/redismutex/redismutex/internal/clock"
)

// longestHold returns for how long a lock is held at most, counted from the grant of the outermost lock that it is nested
// in; 0: there is no bound. Own is the bound of its mutex, and outer the lock that it is nested in, or nil.
func longestHold(own time.Duration, outer *core) time.Duration {
	switch {
	case outer == nil || outer.maxHold == 0:
		return own
	case own == 0:
		return outer.maxHold
	}
	return min(own, outer.maxHold)
}

// A bound ends a lock that has been held for as long as [WithMaxHold] allows.
type bound struct {
	mu    sync.Mutex
	lock  *core       // nil: it has ended; a timer that was stopped may be kept until its time, with all that it refers to
	timer *time.Timer // nil: it has not started
}

// start starts the bound of a lock that was granted, unless that has ended already. B may be nil.
func (b *bound) start() {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if c := b.lock; c != nil {
		b.timer = time.AfterFunc(c.maxHold-time.Duration(clock.Now()-c.held.Since()), b.end)
	}
}

// stopOnCancel returns cancel, which also stops the bound.
func (b *bound) stopOnCancel(cancel context.CancelCauseFunc) context.CancelCauseFunc {
	return func(cause error) {
		b.stop()
		cancel(cause)
	}
}

func (b *bound) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lock = nil
	if b.timer != nil {
		b.timer.Stop()
	}
}

// end ends the lock. Its context may have ended earlier, with its parent.
func (b *bound) end() {
	b.mu.Lock()
	c := b.lock
	b.mu.Unlock()
	if c == nil || !c.held.MarkOverdue() {
		return
	}
	c.cancel(ErrMaxHold)
	acq := c.acquisition()
	acq.Config.Log.Error(acq.Keys.Name(), "the lock has ended; it becomes free when it is unlocked, or with its lease, unless other locks share it",
		fmt.Errorf("%w: it was not unlocked in %v", ErrMaxHold, c.maxHold))
}
