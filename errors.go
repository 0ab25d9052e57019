package redismutex

// This file answers: what can go wrong, and how does a caller tell?

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"
)

// The errors of this package, to be matched with [errors.Is]. What a call
// returns wraps one of them, or the error of the caller's own context, and
// names the key. No error matches two of them, but one: that of a try with several
// nodes, where no majority answers, and some of those that do refuse. It matches
// ErrRedis and ErrLock. If a majority answers it is ErrLock alone, in which the
// errors of the other nodes' network are found nevertheless.
var (
	// ErrLock says that a try found the lock held, or waited for, by others.
	ErrLock = errors.New("redismutex: held by others")

	// ErrLockLost says that a lock ended before its Unlock: it could not be
	// renewed within its lease, or the server does not know it any more. What
	// it protected may be in other hands.
	ErrLockLost = errors.New("redismutex: lock lost")

	// ErrUnlocked says that a lock ended by its Unlock.
	ErrUnlocked = errors.New("redismutex: unlocked")

	// ErrUpgrade says that who holds to read asked to write: that would wait for
	// its own end. The lock to read stays as it was.
	ErrUpgrade = errors.New("redismutex: a lock to read cannot become one to write")

	// ErrRedis says that Redis failed, or could not be reached. The client's
	// error is wrapped, except that it does not match [context.Canceled] or
	// [context.DeadlineExceeded], as some time-outs of the network do: those
	// two always mean the caller's context. If Redis is full (maxmemory) the message
	// says so: no lock is acquired then, but those that are held are renewed,
	// downgraded, released and handed on.
	ErrRedis = errors.New("redismutex: redis failed")

	// ErrNotLock says that a key of the lock holds somebody's data: another
	// type, or a value without TTL. The data is left as it is.
	ErrNotLock = errors.New("redismutex: key holds data that is no lock")

	// ErrInvalid says that an argument is of no use: a nil client, a name no
	// key can be formed for, a senseless TTL.
	ErrInvalid = errors.New("redismutex: invalid argument")
)

// sentinel returns the one of the errors above that err matches, or nil.
func sentinel(err error) error {
	for _, e := range []error{ErrLock, ErrLockLost, ErrUnlocked, ErrUpgrade, ErrRedis, ErrNotLock, ErrInvalid} {
		if errors.Is(err, e) {
			return e
		}
	}
	return nil
}

// A caused error is of one kind, and keeps what caused it. It matches no other
// kind, nor the errors of a context, whatever its cause does.
type caused struct {
	kind, cause error
	trait       trait
}

// A trait is what the library goes by in an error of Redis. It is looked for once, when there is no mutex: to ask an
// error of a client what it wraps is a call of foreign code.
type trait uint8

const (
	full        trait = 1 + iota // Redis has refused the script, which has changed nothing
	closedDown                   // the client has been closed
	unavailable                  // the client had no free connection
)

func redisError(cause error) error {
	c := caused{ErrRedis, said(cause), 0}
	switch {
	case errors.Is(cause, redis.ErrClosed):
		c.trait = closedDown
	case errors.Is(cause, redis.ErrPoolTimeout), errors.Is(cause, redis.ErrPoolExhausted):
		c.trait = unavailable
	}
	return c
}

// has reports whether err is an error of Redis with that trait.
func has(err error, t trait) bool {
	var c caused
	return errors.As(err, &c) && c.trait == t
}

// A saying is a foreign error whose text has been read, which is a call of foreign
// code: the text may be made part of another one's under a mutex.
type saying struct {
	error
	text string
}

func said(err error) error { return saying{err, err.Error()} }

func (s saying) Error() string { return s.text }
func (s saying) Unwrap() error { return s.error }

// scriptError is the error of a script that failed with cause. Redis 6.2 wraps the error
// of a command in a text of its own.
func scriptError(cause error) error {
	switch text := cause.Error(); {
	case strings.Contains(text, "WRONGTYPE"):
		return caused{ErrNotLock, said(cause), 0}
	case strings.Contains(text, "OOM command not allowed"):
		return caused{ErrRedis, fmt.Errorf("redis is full: it has reached maxmemory and evicts nothing: %w", said(cause)), full}
	}
	return redisError(cause)
}

// notLock is the error for a reply that says foreign.
func notLock(r reply) error {
	kind, key, _ := strings.Cut(r.data, ":")
	return fmt.Errorf("%w: %q, a %s", ErrNotLock, key, kind)
}

// doing says which call on which key failed with err, of Redis.
func doing(call, key string, err error) error {
	if e, ok := err.(caused); ok {
		return caused{e.kind, fmt.Errorf("%s %q: %w", call, key, e.cause), e.trait}
	}
	return fmt.Errorf("redismutex: %s %q: %w", call, key, err)
}

func (e caused) Error() string { return e.kind.Error() + ": " + e.cause.Error() }

func (e caused) Is(target error) bool {
	switch target {
	case e.kind:
		return true
	case context.Canceled, context.DeadlineExceeded, ErrRedis, ErrLock, ErrLockLost, ErrUnlocked, ErrUpgrade, ErrNotLock, ErrInvalid:
		return false
	}
	return errors.Is(e.cause, target)
}

func (e caused) As(target any) bool { return errors.As(e.cause, target) }

// ended is the error of a call whose context has ended. It matches both the
// context's error and its cause.
func ended(ctx context.Context, key string) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(cause, err) {
		return fmt.Errorf("redismutex: %q: %w", key, cause)
	}
	return fmt.Errorf("redismutex: %q: %w: %w", key, err, cause)
}
