package redismutex

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/script"
)

const (
	// DefaultTTL is the lease of a lock without [WithTTL].
	DefaultTTL = 4 * time.Second

	// MinTTL is the shortest lease that [WithTTL] accepts: with a shorter one, a renewal at half the lease would have no
	// room for a slow reply.
	MinTTL = 100 * time.Millisecond

	// MaxTTL is the longest lease that [WithTTL] accepts.
	MaxTTL = 365 * 24 * time.Hour

	// DefaultTurn is the turn of a process without [WithTurn].
	DefaultTurn = 5 * time.Millisecond
)

// A MutexOption sets an option of a mutex in [NewMutex] and [NewRedlock].
type MutexOption func(*RWMutex) error

// WithTTL sets the lease: how long the lock outlives a holder that crashed, and how long a holder can be cut off from
// Redis without losing it. A lock is renewed at half its TTL. It is rounded down to whole milliseconds, between [MinTTL]
// and [MaxTTL]; the default is [DefaultTTL]. Mutexes with different TTLs may share a key.
func WithTTL(ttl time.Duration) MutexOption {
	return func(m *RWMutex) error {
		if ttl < MinTTL || ttl > MaxTTL {
			return fmt.Errorf("%w: TTL %v, want %v to %v", ErrInvalid, ttl, MinTTL, MaxTTL)
		}
		m.config.TTL = ttl.Truncate(time.Millisecond)
		return nil
	}
}

// WithLockIntent lets this mutex's writers go before all waiting readers, and before writers of mutexes without it. The
// default is first come, first served. A steady stream of such writers starves the readers.
func WithLockIntent() MutexOption {
	return func(m *RWMutex) error { return m.setOrder(acquisition.WritersFirst) }
}

// WithReaderPriority lets this mutex's readers go before all waiting writers. The default is first come, first served. A
// steady stream of such readers starves the writers.
func WithReaderPriority() MutexOption {
	return func(m *RWMutex) error { return m.setOrder(acquisition.ReadersFirst) }
}

// WithLogger sets the logger of this mutex, in place of the package's (see [SetLog]).
func WithLogger(l *slog.Logger) MutexOption {
	return func(m *RWMutex) error {
		if l == nil {
			return fmt.Errorf("%w: nil logger", ErrInvalid)
		}
		m.config.Log.Own = l
		return nil
	}
}

// WithDriftFactor sets how far clocks may drift apart during a lease, as a part of the TTL: a lease is trusted for that
// much less than its TTL, and another 2 ms less. The default is 0.01, and the maximum 0.25, because a lock is renewed at
// half its TTL.
func WithDriftFactor(factor float64) MutexOption {
	return func(m *RWMutex) error {
		if !(factor >= 0 && factor <= maxFactor) {
			return fmt.Errorf("%w: drift factor %v, want 0 to %v", ErrInvalid, factor, maxFactor)
		}
		m.drift = &factor
		return nil
	}
}

// WithTimeoutFactor sets the node time-out of a mutex of [NewRedlock], as a fraction of the TTL: how long a call waits for
// one node before it goes on without that node. It waits twice as long while the node answers other calls. The default is
// 0.05 of the TTL, but at most a second. The time-out is never less than 50 ms, which a distant node needs, or than a
// quarter of the TTL if that is shorter. The factor is at most 0.25. The time-out must leave room for the round trips, two
// or three, that setting up a connection takes. A mutex on one Redis refuses it, because it has no other node to go on
// with.
func WithTimeoutFactor(factor float64) MutexOption {
	return func(m *RWMutex) error {
		if !(factor > 0 && factor <= maxFactor) {
			return fmt.Errorf("%w: timeout factor %v, want more than 0 and at most %v", ErrInvalid, factor, maxFactor)
		}
		m.timeout = &factor
		return nil
	}
}

// WithTurn sets for how long a process that is granted the lock may pass it among its own goroutines before others are
// served. The default is [DefaultTurn]. Goroutines that share a turn wait for each other in the process and not in Redis, so
// passing the lock on costs no call. In return, a request is overtaken for at most one turn of each other process. A lock
// that is held when the turn ends stays held until its Unlock. With 0 the order is strict: every call waits in Redis by
// itself, first come, first served. A turn is at most a quarter of the TTL.
func WithTurn(d time.Duration) MutexOption {
	return func(m *RWMutex) error {
		if d < 0 {
			return fmt.Errorf("%w: turn %v, want 0 or more", ErrInvalid, d)
		}
		m.config.Turn = d
		return nil
	}
}

// WithMaxHold bounds how long a lock is held. After d, the lock's context ends with [ErrMaxHold], the end is logged, and
// the lock is no longer renewed. Others are granted the lock when it is unlocked, or a TTL later at the latest. Locks that
// are nested in it end with it: d counts from the grant of the outermost lock. Until it is unlocked, or its lease has
// ended, a call that locks within it fails with ErrMaxHold. If only a nested lock has such a bound, the lock that it is nested
// in goes on. Readers that share an acquisition (see [WithTurn]) are bounded one by one, and it is renewed while one of them is
// in time. A d that is not positive is refused with [ErrInvalid]. The default is no bound.
func WithMaxHold(d time.Duration) MutexOption {
	return func(m *RWMutex) error {
		if d <= 0 {
			return fmt.Errorf("%w: longest hold %v, want more than 0", ErrInvalid, d)
		}
		m.config.MaxHold = d
		return nil
	}
}

func (m *RWMutex) setOrder(o acquisition.Order) error {
	if m.config.Order != acquisition.FirstCome && m.config.Order != o {
		return fmt.Errorf("%w: WithLockIntent and WithReaderPriority exclude each other", ErrInvalid)
	}
	m.config.Order = o
	return nil
}

const (
	defaultDriftFactor   = 0.01
	defaultTimeoutFactor = 0.05
	maxFactor            = 0.25

	minDrift       = 2 * time.Millisecond
	minNodeTimeout = 50 * time.Millisecond
	maxNodeTimeout = time.Second // by default
)

// configure completes the config of a mutex with n nodes, when all options have been applied.
func (m *RWMutex) configure(n int) error {
	c := &m.config
	part := func(factor float64) time.Duration { return time.Duration(factor * float64(c.TTL)) }
	if c.Turn > c.TTL/4 {
		return fmt.Errorf("%w: turn %v, want at most a quarter of the TTL of %v", ErrInvalid, c.Turn, c.TTL)
	}
	c.Durations = script.NewDurations(c.TTL)
	c.Drift = part(defaultDriftFactor)
	if m.drift != nil {
		c.Drift = part(*m.drift)
	}
	c.Drift += minDrift
	if n <= 1 {
		if m.timeout != nil {
			return fmt.Errorf("%w: WithTimeoutFactor is for several nodes", ErrInvalid)
		}
		return nil
	}
	c.Ranks = acquisition.Ranks
	c.Timeout = min(part(defaultTimeoutFactor), maxNodeTimeout)
	if m.timeout != nil {
		c.Timeout = part(*m.timeout)
	}
	c.Timeout = max(c.Timeout, min(minNodeTimeout, c.TTL/4))
	return nil
}

// A LockOption sets an option of one call that locks.
type LockOption func(*request) error

// WithKey locks "name:key" in place of the mutex's name: one mutex serves the locks of all users, orders or items.
func WithKey(key string) LockOption {
	return func(r *request) error {
		if key == "" {
			return fmt.Errorf("%w: empty key", ErrInvalid)
		}
		r.key = key
		return nil
	}
}

// WithContext sets the context of a call that takes none: it bounds the wait, and the lock's context descends from it.
// Calls that take a context refuse this option.
func WithContext(ctx context.Context) LockOption {
	return func(r *request) error {
		if ctx == nil {
			return fmt.Errorf("%w: nil context", ErrInvalid)
		}
		if r.ctx != nil {
			return fmt.Errorf("%w: two contexts", ErrInvalid)
		}
		r.ctx = ctx
		return nil
	}
}

// WithWait bounds the wait for the lock, and not the lock itself: its context descends from the caller's own. After d, the
// lock is tried once more, for a tenth of a second at most, and with several nodes for a node time-out more. If others hold
// the lock or wait for it, the error is a [HeldError], which names one of them; if Redis does not answer it matches
// [ErrRedis]. If the caller's context ends first the error is that of the context. With 0 the call is a try. A negative d
// is refused with [ErrInvalid], and calls that try refuse this option.
func WithWait(d time.Duration) LockOption {
	return func(r *request) error {
		if d < 0 {
			return fmt.Errorf("%w: wait %v, want 0 or more", ErrInvalid, d)
		}
		r.bounded, r.wait = true, d
		return nil
	}
}

// WithOwner is for code that cannot pass the lock on as a context: if the owner already has a lock on the key, in this
// process and by a mutex on the same nodes, the new lock is nested in that one, by the rules of [RWMutex.LockContext]. Each
// of them must be unlocked. If several calls of one owner wait for a key, they share the lock that is granted first.
//
// The owner is known to this process alone, and nothing of it goes to Redis. The same owner in another process is another
// holder. Otherwise the two would prolong and release each other's lock, and a process that restarts would take over what
// its predecessor had not finished.
func WithOwner(owner string) LockOption {
	return func(r *request) error {
		if owner == "" {
			return fmt.Errorf("%w: empty owner", ErrInvalid)
		}
		r.owner = owner
		return nil
	}
}
