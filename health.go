package redismutex

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// health is what the calls to a node have shown of it: whether it answers, and, for locks over several nodes, whether
// it is up.
//
//	up ──(a call fails, or the node leaves calls unanswered for a node time-out)──► down
//	 ▲                                                                               │
//	 └──────────────────────(it answers within the time-out)────────────────────────┘
type health struct {
	answered atomic.Int64            // when the latest call was sent that has been answered
	failure  atomic.Pointer[failure] // the last call that ended without an answer; nil: none
	outage   atomic.Pointer[outage]  // nil: the node is up

	mu      sync.Mutex
	up      context.Context // done, with the cause, when the node is marked down; nil: nobody waits for that
	endedUp context.CancelCauseFunc
}

// A failure is a call that ended without an answer.
type failure struct {
	sent, ended instant
	err         error
}

// record notes how a call that was sent at that instant has ended. A refusal of the server is an answer, too. That a
// node does not answer is known from a time-out and from a failed dial: a connection that broke says nothing of the next
// one, and neither does a client that had none to spare.
func (h *health) record(sent instant, err error) {
	if err == nil || isRefusal(err) {
		latest := h.answered.Load()
		for int64(sent) > latest && !h.answered.CompareAndSwap(latest, int64(sent)) {
			latest = h.answered.Load()
		}
	} else if isSilence(err) {
		h.failure.Store(&failure{sent, now(), err})
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

func isRefusal(err error) bool {
	var refusal redis.Error
	return errors.As(err, &refusal)
}

// silentSince returns the error of a call that has ended without an answer since t, unless a later call has been
// answered: another call would fail in the same way.
func (h *health) silentSince(t instant) error {
	if f := h.failure.Load(); f != nil && f.ended >= t && h.answered.Load() <= int64(f.sent) {
		return f.err
	}
	return nil
}

// overdue returns when a call has been waited for long enough: a node time-out after it was sent, or, while the node
// answers later calls, two. It has not been sent yet where sent is before asked. Then it waits behind other calls of
// this process, for as long as the node answers those.
func (h *health) overdue(asked, sent instant, timeout time.Duration) instant {
	answered := instant(h.answered.Load())
	if sent < asked {
		return max(asked, answered).add(timeout)
	}
	return max(sent, min(answered, sent.add(timeout))).add(timeout)
}

// An outage is why a node is down.
type outage struct {
	why  error
	next atomic.Int64 // when the node is to be tried again
}

// retryAfter is how long after a node was marked down it is tried again.
const retryAfter = 500 * time.Millisecond

// down returns why the node is down, or nil if it is up.
func (h *health) down() error {
	if o := h.outage.Load(); o != nil {
		return o.why
	}
	return nil
}

// markDown marks the node down, and reports whether it was up.
func (h *health) markDown(why error) bool {
	o := &outage{why: why}
	o.next.Store(int64(now().add(retryAfter)))
	if !h.outage.CompareAndSwap(nil, o) {
		return false
	}
	h.mu.Lock()
	ended := h.endedUp
	h.up, h.endedUp = nil, nil
	h.mu.Unlock()
	if ended != nil {
		ended(why)
	}
	return true
}

// markUp marks the node up: it has answered in time.
func (h *health) markUp() {
	if h.outage.Load() != nil {
		h.outage.Store(nil)
	}
}

// retry reports whether the node is down, and it is time, and the caller's turn, to try it again.
func (h *health) retry() bool {
	o := h.outage.Load()
	if o == nil {
		return false
	}
	next := o.next.Load()
	return next <= int64(now()) && o.next.CompareAndSwap(next, int64(now().add(retryAfter)))
}

// whileUp returns a context that is done when the node is marked down.
func (h *health) whileUp() context.Context {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.up == nil {
		h.up, h.endedUp = context.WithCancelCause(context.Background())
	}
	up := h.up
	if o := h.outage.Load(); o != nil { // it was marked down before there was a context
		h.endedUp(o.why)
		h.up, h.endedUp = nil, nil
	}
	return up
}
