// Package lockerr defines the errors of package redismutex. The root package exports the sentinels; the packages of the
// engine build errors that match exactly one of them.
package lockerr

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

// The sentinels. The root package documents them.
var (
	ErrLock     = errors.New("redismutex: held by others")
	ErrLockLost = errors.New("redismutex: lock lost")
	ErrRevoked  = errors.New("redismutex: lock revoked")
	ErrMaxHold  = errors.New("redismutex: lock held for too long")
	ErrUnlocked = errors.New("redismutex: unlocked")
	ErrNoSuchID = errors.New("redismutex: no holder or waiter has this id")
	ErrNotHeld  = errors.New("redismutex: not held")
	ErrUpgrade  = errors.New("redismutex: a read lock cannot become a write lock")
	ErrRedis    = errors.New("redismutex: redis failed")
	ErrNotLock  = errors.New("redismutex: key holds data that is not a lock")
	ErrInvalid  = errors.New("redismutex: invalid argument")
)

var sentinels = []error{ErrLock, ErrLockLost, ErrRevoked, ErrMaxHold, ErrUnlocked, ErrNoSuchID, ErrNotHeld, ErrUpgrade, ErrRedis, ErrNotLock, ErrInvalid}

// Sentinel returns the sentinel that err matches, or nil.
func Sentinel(err error) error {
	for _, e := range sentinels {
		if errors.Is(err, e) {
			return e
		}
	}
	return nil
}

// A caused error matches one sentinel, its kind, and keeps the cause. It matches no other sentinel and no error of a
// context, whatever its cause does.
type caused struct {
	kind, cause error
	trait       Trait
}

// A Trait is a property of an error of Redis on which the library acts. It is read once, outside of every mutex: asking
// an error of a client what it wraps is a call of foreign code.
type Trait uint8

const (
	Full         Trait = 1 + iota // Redis has reached maxmemory: the script was refused and has changed nothing
	ClientClosed                  // the client has been closed
	NoConnection                  // the client had no free connection
	Deadline                      // the time that the library gives a call was over
)

// Redis returns the error of a call that failed with cause. It matches ErrRedis.
func Redis(cause error) error {
	c := caused{ErrRedis, readOnce(cause), 0}
	switch {
	case errors.Is(cause, redis.ErrClosed):
		c.trait = ClientClosed
	case errors.Is(cause, redis.ErrPoolTimeout), errors.Is(cause, redis.ErrPoolExhausted):
		c.trait = NoConnection
	case errors.Is(cause, context.DeadlineExceeded):
		c.trait = Deadline
	}
	return c
}

// Script returns the error of a script that failed with cause. Redis 6.2 wraps the error of a command in a text of its
// own, so the text is searched.
func Script(cause error) error {
	switch text := cause.Error(); {
	case strings.Contains(text, "WRONGTYPE"):
		return caused{ErrNotLock, readOnce(cause), 0}
	case strings.Contains(text, "OOM command not allowed"):
		return caused{ErrRedis, fmt.Errorf("redis is full: it has reached maxmemory and evicts nothing: %w", readOnce(cause)), Full}
	}
	return Redis(cause)
}

// Foreign returns the error for a key that holds foreign data. Data is "<type>:<key>".
func Foreign(data string) error {
	kind, key, _ := strings.Cut(data, ":")
	return fmt.Errorf("%w: %q, a %s", ErrNotLock, key, kind)
}

// A HeldError is returned by a try, or by a wait that has run out, when others are in the way. It matches ErrLock.
type HeldError struct {
	Key string // the lock

	// Holder is the id in the way: that of the writer, of one of the readers, or of the first waiter. It is "" if it is not
	// known. Process is the name of its process: "<host>/<pid>", or what SetProcessName was given there.
	Holder, Process string
}

func (e *HeldError) Error() string {
	if e.Holder == "" {
		return fmt.Sprintf("%v: %q", ErrLock, e.Key)
	}
	return fmt.Sprintf("%v: %q by %s", ErrLock, e.Key, e.Holder)
}

// Is reports whether target is ErrLock.
func (e *HeldError) Is(target error) bool { return target == ErrLock }

// Of returns an error of that kind with that cause.
func Of(kind, cause error) error { return caused{kind, cause, 0} }

// KindOf returns the kind of an error that Of, Redis or Script has returned, or nil. It calls no foreign code.
func KindOf(err error) error {
	if e, ok := err.(caused); ok {
		return e.kind
	}
	return nil
}

// Has reports whether err is an error of Redis with that trait.
func Has(err error, t Trait) bool {
	var c caused
	return errors.As(err, &c) && c.trait == t
}

// Doing adds the call and the key to an error of Redis.
func Doing(call, key string, err error) error {
	if e, ok := err.(caused); ok {
		return caused{e.kind, fmt.Errorf("%s %q: %w", call, key, e.cause), e.trait}
	}
	return fmt.Errorf("redismutex: %s %q: %w", call, key, err)
}

// Ended returns the error of a call whose context has ended. It matches both the context's error and its cause.
func Ended(ctx context.Context, key string) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(cause, err) {
		return fmt.Errorf("redismutex: %q: %w", key, cause)
	}
	return fmt.Errorf("redismutex: %q: %w: %w", key, err, cause)
}

// Interrupted is Ended for a call on a lock: a cause that is an error of another lock is named and not matched.
func Interrupted(ctx context.Context, key string) error {
	if cause := context.Cause(ctx); Sentinel(cause) != nil {
		return fmt.Errorf("redismutex: %q: %w: %v", key, ctx.Err(), cause)
	}
	return Ended(ctx, key)
}

// errNode stands for the kind of error that a minority of the nodes returned.
var errNode = errors.New("failed")

// Demote returns err without its kind: an error that joins those of several nodes matches the kind of the majority only.
func Demote(err error) error { return caused{errNode, err, 0} }

// DemoteRedis demotes err if it is of kind ErrRedis.
func DemoteRedis(err error) error {
	if e := (caused{}); errors.As(err, &e) && e.kind == ErrRedis {
		return caused{errNode, e.cause, 0}
	}
	return err
}

func (e caused) Error() string { return e.kind.Error() + ": " + e.cause.Error() }

func (e caused) Is(target error) bool {
	switch {
	case target == e.kind:
		return true
	case target == context.Canceled, target == context.DeadlineExceeded, slices.Contains(sentinels, target):
		return false
	}
	return errors.Is(e.cause, target)
}

func (e caused) As(target any) bool { return errors.As(e.cause, target) }

// A read error is a foreign error whose text has been read, which is a call of foreign code: the text may become part of
// another one under a mutex.
type read struct {
	error
	text string
}

func readOnce(err error) error { return read{err, err.Error()} }

func (r read) Error() string { return r.text }
func (r read) Unwrap() error { return r.error }
