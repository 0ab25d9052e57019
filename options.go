package redismutex

// This file answers: what can I tune, what are the defaults, what is refused?

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"
)

const (
	// DefaultTTL is the lease of a lock without [WithTTL].
	DefaultTTL = 4 * time.Second

	// MinTTL is the smallest lease that [WithTTL] takes: below it a renewal
	// at half the lease has no room for a slow reply.
	MinTTL = 100 * time.Millisecond

	// MaxTTL is the largest lease that [WithTTL] takes.
	MaxTTL = 365 * 24 * time.Hour
)

// A MutexOption tunes a mutex in [NewMutex].
type MutexOption func(*RWMutex) error

// WithTTL sets the lease: how long the lock outlives a holder that crashed,
// and how long a holder can be cut off from Redis without losing it. A lock is
// renewed at half its TTL. It is taken in whole milliseconds, rounded down,
// between [MinTTL] and [MaxTTL]. Mutexes with different TTLs may share a key.
func WithTTL(ttl time.Duration) MutexOption {
	return func(m *RWMutex) error {
		if ttl < MinTTL || ttl > MaxTTL {
			return fmt.Errorf("%w: TTL %v, want %v to %v", ErrInvalid, ttl, MinTTL, MaxTTL)
		}
		m.ttl = ttl.Truncate(time.Millisecond)
		return nil
	}
}

// WithLockIntent lets this mutex's writers go before all readers that wait,
// and before writers of mutexes without it. By default it is first come, first
// served. A stream of such writers starves the readers.
func WithLockIntent() MutexOption {
	return func(m *RWMutex) error { return m.setOrder(writersFirst) }
}

// WithReaderPriority lets this mutex's readers go before all writers that
// wait. By default it is first come, first served. A stream of such readers
// starves the writers.
func WithReaderPriority() MutexOption {
	return func(m *RWMutex) error { return m.setOrder(readersFirst) }
}

// WithLogger sends what this mutex has to say to l, instead of to the logger
// of the package (see [SetLog]).
func WithLogger(l *slog.Logger) MutexOption {
	return func(m *RWMutex) error {
		if l == nil {
			return fmt.Errorf("%w: nil logger", ErrInvalid)
		}
		m.logger = l
		return nil
	}
}

// WithDriftFactor sets how far clocks that do not run alike may have drifted
// apart when a lease ends: a lease is trusted for that part of the TTL less, and
// 2 ms. It is 0.01 by default, and at most 0.25, since a lock is renewed at half
// its TTL.
func WithDriftFactor(factor float64) MutexOption {
	return func(m *RWMutex) error {
		if !(factor >= 0 && factor <= maxFactor) {
			return fmt.Errorf("%w: drift factor %v, want 0 to %v", ErrInvalid, factor, maxFactor)
		}
		m.factors.drift = &factor
		return nil
	}
}

// WithTimeoutFactor sets how long one node of a mutex of [NewRedlock] is waited
// for, as a part of the TTL: after that time the lock goes on without it, or after
// twice that time while the node answers other calls. By
// default it is 0.05 of the TTL, but at most a second. It is never less than 50 ms,
// which is what a distant node needs, or a quarter of the TTL if that is
// shorter; and the factor is at most 0.25. A mutex on one Redis refuses it, since it has
// nothing to go on with.
func WithTimeoutFactor(factor float64) MutexOption {
	return func(m *RWMutex) error {
		if !(factor > 0 && factor <= maxFactor) {
			return fmt.Errorf("%w: timeout factor %v, want more than 0 and at most %v", ErrInvalid, factor, maxFactor)
		}
		m.factors.timeout = &factor
		return nil
	}
}

// factors are parts of the TTL, if they have been set.
type factors struct{ drift, timeout *float64 }

const (
	defaultDriftFactor   = 0.01
	defaultTimeoutFactor = 0.05
	maxFactor            = 0.25

	minDrift       = 2 * time.Millisecond
	minNodeTimeout = 50 * time.Millisecond
	maxNodeTimeout = time.Second // by default
)

// setFactors sets what the factors, or their defaults, come to with n nodes.
func (m *RWMutex) setFactors(n int) error {
	part := func(factor float64) time.Duration { return time.Duration(factor * float64(m.ttl)) }
	m.drift = part(defaultDriftFactor)
	if f := m.factors.drift; f != nil {
		m.drift = part(*f)
	}
	m.drift += minDrift
	if n == 1 {
		if m.factors.timeout != nil {
			return fmt.Errorf("%w: WithTimeoutFactor is for several nodes", ErrInvalid)
		}
		return nil
	}
	m.nodeTimeout = min(part(defaultTimeoutFactor), maxNodeTimeout)
	if f := m.factors.timeout; f != nil {
		m.nodeTimeout = part(*f)
	}
	m.nodeTimeout = max(m.nodeTimeout, min(minNodeTimeout, m.ttl/4))
	m.ranks = processRanks
	return nil
}

// An order decides who of those that wait is next. It is no more than the
// class that a participant's rank is in.
type order int

const (
	firstCome order = iota
	writersFirst
	readersFirst
)

func (m *RWMutex) setOrder(o order) error {
	if m.order != firstCome && m.order != o {
		return fmt.Errorf("%w: WithLockIntent and WithReaderPriority exclude each other", ErrInvalid)
	}
	m.order = o
	return nil
}

// A LockOption tunes one call that locks.
type LockOption func(*request) error

// WithKey locks "name:key" instead of the mutex's name: one mutex serves the
// locks of all users, orders or items.
func WithKey(key string) LockOption {
	return func(r *request) error {
		if key == "" {
			return fmt.Errorf("%w: empty key", ErrInvalid)
		}
		r.key = key
		return nil
	}
}

// WithContext gives a context to the calls that take none: it bounds the wait,
// and the lock's context descends from it. The calls that take a context
// refuse this option.
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

// WithOwner is for code that cannot pass the lock on as a context: if owner has
// the key already, in this process and by a mutex on the same nodes, the lock is
// nested in that one, by the rules of [RWMutex.LockContext]. Each of them has to be
// unlocked. If several calls of one owner wait for a key, the first that is
// granted is shared by all of them.
//
// It is a matter of this process alone, and nothing of it goes to Redis. The same
// owner in another process is another holder: were it the same, the two would
// prolong and free each other's lock, and one that was started again would take
// over what its predecessor had not finished.
func WithOwner(owner string) LockOption {
	return func(r *request) error {
		if owner == "" {
			return fmt.Errorf("%w: empty owner", ErrInvalid)
		}
		r.owner = owner
		return nil
	}
}

// keys are the names of one lock's keys. All are in the hash slot of holder.
type keys struct {
	holder string

	// As scripts take them: who holds? Who waits? Until when does each count?
	// Which was the last fencing token?
	args [4]any
}

// newKeys forms the keys of the lock named name. The slot of a key is that of
// its hash tag: what stands between its first "{" and the first "}" behind it,
// if there is anything between them.
func newKeys(name string) (*keys, error) {
	if name == "" {
		return nil, fmt.Errorf("%w: empty name", ErrInvalid)
	}
	base, tagged := name, hasHashTag(name)
	switch {
	case !tagged && strings.Contains(name, "}"):
		return nil, fmt.Errorf("%w: name %q: a \"}\" without a hash tag leaves no other key in its slot", ErrInvalid, name)
	case !tagged:
		base = "{" + name + "}:"
	case name[0] == '{' && strings.IndexByte(name, '}') == len(name)-1:
		base += ":its-" // or the keys were those of the lock that has the tag for a name
	default:
		base += ":"
	}
	for _, suffix := range []string{"lock-intent", "lease", "token"} {
		if tagged && (strings.HasSuffix(name, ":"+suffix) || strings.HasSuffix(name, ":its-"+suffix)) {
			return nil, fmt.Errorf("%w: name %q: with that ending it is a key of another lock", ErrInvalid, name)
		}
	}
	intents := base + "lock-intent"
	if !tagged {
		name = intents[1 : 1+len(name)] // one string less for each lock that is held
	}
	return &keys{name, [4]any{name, intents, base + "lease", base + "token"}}, nil
}

func hasHashTag(name string) bool {
	_, rest, open := strings.Cut(name, "{")
	tag, _, closed := strings.Cut(rest, "}")
	return open && closed && tag != ""
}
