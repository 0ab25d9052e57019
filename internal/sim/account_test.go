package sim

import (
	"errors"
	"sync"

	"github.com/redismutex/redismutex"
)

// An account is what a Trace has told of an era. It must agree with the history.
type account struct {
	mu    sync.Mutex
	calls map[*attempt]*traced
	wrong int // events that fit no call: dropped ones, and those that come twice
	trace redismutex.Trace
}

// A traced call is what was told of one attempt.
type traced struct {
	granted *redismutex.TraceGranted
	failed  *redismutex.TraceFailed
	ended   *redismutex.TraceEnded
}

// attemptKey is the key under which an attempt is a value of the context of its call.
type attemptKey struct{}

func newAccount() *account {
	acc := &account{calls: map[*attempt]*traced{}}
	acc.trace.Granted = func(e redismutex.TraceGranted) {
		note(acc, e.TraceCall, &e, func(c *traced) **redismutex.TraceGranted { return &c.granted })
	}
	acc.trace.Failed = func(e redismutex.TraceFailed) {
		note(acc, e.TraceCall, &e, func(c *traced) **redismutex.TraceFailed { return &c.failed })
	}
	acc.trace.Ended = func(e redismutex.TraceEnded) {
		note(acc, e.TraceCall, &e, func(c *traced) **redismutex.TraceEnded { return &c.ended })
	}
	acc.trace.Dropped = func(n int) {
		acc.mu.Lock()
		defer acc.mu.Unlock()
		acc.wrong += n
	}
	// A Trace that blocks for a while, or that panics, changes nothing.
	acc.trace.Renewed = func(redismutex.TraceRenewed) { panic("a trace may panic") }
	return acc
}

// note notes an event. Each kind comes at most once for a call.
func note[E any](acc *account, call redismutex.TraceCall, e *E, field func(*traced) **E) {
	acc.mu.Lock()
	defer acc.mu.Unlock()
	a, ok := call.Context.Value(attemptKey{}).(*attempt)
	if !ok {
		acc.wrong++
		return
	}
	c := acc.calls[a]
	if c == nil {
		c = &traced{}
		acc.calls[a] = c
	}
	if *field(c) != nil {
		acc.wrong++
	}
	*field(c) = e
}

// agrees checks that the account agrees with the attempts of the era.
func (acc *account) agrees(e *era) {
	acc.mu.Lock()
	defer acc.mu.Unlock()
	if acc.wrong > 0 {
		e.fail("the trace told %d events that fit no call", acc.wrong)
	}
	for _, a := range e.attempts {
		c := acc.calls[a]
		switch {
		case c == nil:
			if a.traced && a.got != 0 && a.owner == "" { // an owner's lock may be nested in another one
				e.fail("%v: it was granted, and the trace does not know", a)
			}
		case c.failed != nil:
			if c.granted != nil || c.ended != nil || a.got != 0 {
				e.fail("%v: the trace told that it failed (%v), but it was granted", a, c.failed.Err)
			}
		case c.granted == nil, c.ended == nil:
			e.fail("%v: the trace told granted %v, ended %v, want both", a, c.granted != nil, c.ended != nil)
		case a.got != 0 && (c.granted.Token != a.token || c.granted.Write != a.write || c.granted.Key != "sim:"+a.key):
			e.fail("%v with token %d: the trace told %+v", a, a.token, *c.granted)
		case a.got != 0 && int64(c.granted.Time.Sub(e.start)) > a.got, int64(c.granted.Time.Sub(e.start)) < a.asked, c.ended.Time.Before(c.granted.Time):
			e.fail("%v, asked %d, got %d: the trace told granted %v, ended %v", a, a.asked, a.got, c.granted.Time, c.ended.Time)
		case a.confirmed && !a.downgraded && !errors.Is(c.ended.Cause, redismutex.ErrUnlocked):
			e.fail("%v: it was held to the end, and the trace told %v", a, c.ended.Cause)
		case a.ended != nil && a.got != 0 && !a.orphan && !errors.Is(c.ended.Cause, a.ended):
			e.fail("%v: it ended with %v, and the trace told %v", a, a.ended, c.ended.Cause)
		case errors.Is(c.ended.Cause, redismutex.ErrUnlocked), errors.Is(c.ended.Cause, redismutex.ErrLockLost):
		case errors.Is(c.ended.Cause, redismutex.ErrMaxHold) && a.most > 0:
		case errors.Is(c.ended.Cause, redismutex.ErrRevoked) && e.mayBeRevoked(e.acquisition(c.ended.ID)):
		default:
			e.fail("%v: the trace told that it ended with %v", a, c.ended.Cause)
		}
	}
}
