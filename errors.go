package redismutex

import "github.com/redismutex/redismutex/internal/lockerr"

// The errors of this package, to be matched with [errors.Is]. An error of a call wraps one of them, or the error of the
// caller's own context, and names the key. No error matches two of them, with one exception: a try on several nodes of
// which no majority answers, and some refuse, matches ErrRedis and ErrLock. If a majority answers, the error is ErrLock
// alone, and still wraps the network errors of the other nodes.
var (
	// ErrLock is returned by a try, or when the time of [WithWait] is over, if others hold the lock or wait for it. The
	// error is a [HeldError], which names one of them.
	ErrLock = lockerr.ErrLock

	// ErrLockLost is returned when a lock ended before its Unlock: it could not be renewed within its lease, or the server
	// does not know it any more. Others may hold the lock.
	ErrLockLost = lockerr.ErrLockLost

	// ErrRevoked is returned when a lock, or the wait for one, was ended by [RWMutex.Revoke]. Others may hold the lock.
	ErrRevoked = lockerr.ErrRevoked

	// ErrMaxHold is returned when a lock was held for longer than [WithMaxHold] allows. It is no longer renewed, and others
	// may hold it once its lease has ended. A call that locks within it is refused with the same error.
	ErrMaxHold = lockerr.ErrMaxHold

	// ErrNoSuchID is returned by [RWMutex.Revoke] when the id neither holds the lock nor waits for it.
	ErrNoSuchID = lockerr.ErrNoSuchID

	// ErrUnlocked is returned when a lock has been unlocked.
	ErrUnlocked = lockerr.ErrUnlocked

	// ErrNotHeld is returned by [Held] when the context descends from no lock on the key.
	ErrNotHeld = lockerr.ErrNotHeld

	// ErrUpgrade is returned when a reader asks for the write lock: it would wait for itself. The read lock stays as it
	// was.
	ErrUpgrade = lockerr.ErrUpgrade

	// ErrRedis is returned when Redis failed or could not be reached. It wraps the client's error, except that it does not
	// match [context.Canceled] or [context.DeadlineExceeded], as some time-outs of the network do: those two always mean
	// the caller's context. If Redis is full (maxmemory), the message reports it: no lock is acquired then, but held locks are
	// renewed, downgraded, released and handed on.
	ErrRedis = lockerr.ErrRedis

	// ErrNotLock is returned when a key of the lock holds foreign data: another type, or a value without TTL. The data is
	// left as it is.
	ErrNotLock = lockerr.ErrNotLock

	// ErrInvalid is returned for a bad argument: a nil client, a name from which no key can be formed, a TTL out of range.
	ErrInvalid = lockerr.ErrInvalid
)

// A HeldError is returned by a try, and by a wait that has run out ([WithWait]), if others hold the lock or wait for it. It
// names one of them. It matches [ErrLock]. With several nodes it is one of the errors that the error wraps, one for each
// node that refused: [errors.As] finds the first.
type HeldError = lockerr.HeldError
