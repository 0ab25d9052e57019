package node

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/clock"
)

// Health is what calls to a node have shown of it: whether it answers and, for locks over several nodes, whether it is
// up.
//
//	up ──(a call fails, or the node answers nothing for a node time-out)──► down
//	 ▲                                                                       │
//	 └───────────────────(it answers within the time-out)────────────────────┘
type Health struct {
	heard    atomic.Int64            // when the node last answered a call
	answered atomic.Int64            // when the latest call was sent that has been answered
	failure  atomic.Pointer[failure] // the last call that ended without an answer; nil: none
	outage   atomic.Pointer[outage]  // nil: the node is up

	mu     sync.Mutex
	up     context.Context // canceled, with the cause, when the node is marked down; nil: nobody waits for that
	cancel context.CancelCauseFunc
}

// A failure is a call that ended without an answer.
type failure struct {
	sent, ended clock.Instant
	err         error
}

func (h *Health) init() {
	h.heard.Store(int64(clock.Past))
	h.answered.Store(int64(clock.Past))
}

// record notes how a call that was sent at that instant has ended. A refusal by the server is an answer, too. Only
// time-outs and failed dials show that a node does not answer: after a connection broke, the next one may work, and a
// client without a free connection has asked nobody.
func (h *Health) record(sent clock.Instant, err error) {
	if err == nil || isServerError(err) {
		h.heard.Store(int64(clock.Now()))
		latest := h.answered.Load()
		for int64(sent) > latest && !h.answered.CompareAndSwap(latest, int64(sent)) {
			latest = h.answered.Load()
		}
	} else if isSilence(err) {
		h.failure.Store(&failure{sent, clock.Now(), err})
	}
}

// isSilence reports whether err is a time-out or a failed dial.
func isSilence(err error) bool {
	var dial *net.OpError
	var timeout net.Error
	switch {
	case errors.Is(err, redis.ErrPoolTimeout):
		return false
	case errors.As(err, &dial) && dial.Op == "dial":
		return true
	}
	return errors.As(err, &timeout) && timeout.Timeout()
}

func isServerError(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply)
}

// HeardSince reports whether the node has answered any call since t.
func (h *Health) HeardSince(t clock.Instant) bool { return clock.Instant(h.heard.Load()) > t }

// silentSince returns the error of a call that has ended without an answer since t, unless a later call has been
// answered: another call would fail in the same way.
func (h *Health) silentSince(t clock.Instant) error {
	if f := h.failure.Load(); f != nil && f.ended >= t && h.answered.Load() <= int64(f.sent) {
		return f.err
	}
	return nil
}

// Overdue returns when a call has taken too long: a node time-out after it was sent or, while the node answers other
// calls, two. If sent is before asked, the call has not been sent yet: it waits behind other calls of this process, for
// as long as the node answers those.
func (h *Health) Overdue(asked, sent clock.Instant, timeout time.Duration) clock.Instant {
	heard := clock.Instant(h.heard.Load())
	if sent < asked {
		return max(asked, heard).Add(timeout)
	}
	return max(sent, min(heard, sent.Add(timeout))).Add(timeout)
}

// An outage is why a node is down.
type outage struct {
	why  error
	next atomic.Int64 // when the node is tried again
}

// RetryAfter is how long after a node was marked down it is tried again.
const RetryAfter = 500 * time.Millisecond

// Down returns why the node is down, or nil if it is up.
func (h *Health) Down() error {
	if o := h.outage.Load(); o != nil {
		return o.why
	}
	return nil
}

// MarkDown marks the node down and reports whether it was up.
func (h *Health) MarkDown(why error) bool {
	o := &outage{why: why}
	o.next.Store(int64(clock.Now().Add(RetryAfter)))
	if !h.outage.CompareAndSwap(nil, o) {
		return false
	}
	h.mu.Lock()
	cancel := h.cancel
	h.up, h.cancel = nil, nil
	h.mu.Unlock()
	if cancel != nil {
		cancel(why)
	}
	return true
}

// MarkUp marks the node up, since it has answered in time, and reports whether it was down.
func (h *Health) MarkUp() bool { return h.outage.Load() != nil && h.outage.Swap(nil) != nil }

// Retry reports whether the node is down, its next trial is due, and the caller is the one to make it.
func (h *Health) Retry() bool {
	o := h.outage.Load()
	if o == nil {
		return false
	}
	next := o.next.Load()
	return next <= int64(clock.Now()) && o.next.CompareAndSwap(next, int64(clock.Now().Add(RetryAfter)))
}

// whileUp returns a context that ends when the node is marked down.
func (h *Health) whileUp() context.Context {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.up == nil {
		h.up, h.cancel = context.WithCancelCause(context.Background())
	}
	up := h.up
	if o := h.outage.Load(); o != nil { // it was marked down before there was a context
		h.cancel(o.why)
		h.up, h.cancel = nil, nil
	}
	return up
}
