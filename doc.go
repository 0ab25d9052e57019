// Package redismutex provides a distributed reader/writer mutual exclusion
// lock on Redis. A granted [Lock] is a [context.Context] that renews itself
// until Unlock: pass it to whatever the lock protects, and all of that stops
// when the lock is unlocked or lost.
//
//	mutex := redismutex.NewMutex(client, "stock")
//
//	lock, err := mutex.LockContext(ctx)
//	if err != nil {
//		return err
//	}
//	defer lock.Unlock()
//	return sell(lock) // a context that ends with the lock
//
// A call that locks the same key again with that context does not wait for
// itself: its lock is granted at once, nested in the outer one. A writer can
// become a reader with no other writer in between: see [Lock.Downgrade]. A
// function that must only be called under a lock can check that with [Held].
//
// Package github.com/redismutex/redismutex/redismutextest is for tests of code
// that locks: it runs this package on an embedded Redis, and injects faults by
// name.
//
// [RWMutex.Inspect] returns the holders and the waiters of a lock, and
// [RWMutex.Revoke] ends an acquisition by its id.
//
// # Promises
//
//  1. Exclusion. At every instant of the server a lock has one writer, or any
//     number of readers, or nobody.
//  2. Trust. A Lock's context is done no later than its lease ends on the
//     server. Trust counts from before the request was sent, on the monotonic
//     clock, less a margin for drift. A timer ends it, whatever a renewal in
//     flight is doing.
//  3. Own lease. Each participant, waiting or holding, has a lease of its own.
//     None shortens, prolongs or clears another's.
//  4. Once. An id acquires at most once. A request that is sent again because
//     its reply was lost neither locks the caller out nor leaves a ghost. One
//     that arrives within two TTLs after its own release is refused.
//  5. No idle lock. No waiter that could be granted the lock is left waiting:
//     whatever frees the lock hands it on in the same script, to the next in
//     order, which is one writer or the whole run of readers in front.
//  6. Order. First come, first served, readers together, to within one turn of
//     each other process, so that neither side starves. A turn is 5 ms by
//     default; with [WithTurn](0) the order is that in which requests arrive
//     at the server. By choice writers first ([WithLockIntent]) or readers
//     first ([WithReaderPriority]).
//  7. One message per grant at most, to the one process that waits for it.
//     Grants to the same process travel together. A lost message costs time,
//     not safety.
//  8. Nothing stays. Every key has a TTL. Once the longest lease has ended, and
//     two TTLs after a release that may overtake its acquire, only the token
//     counter is left, which expires after a day.
//  9. Tokens rise. Each write lock carries a fencing token greater than every
//     token before it on that key: see [Lock.Token].
//  10. Why. An error tells what happened: the lock is held by others, lost,
//     revoked, held for too long or unlocked; the caller's context has ended;
//     Redis failed; or the input is bad. No error is swallowed, and no two of
//     these look the same to [errors.Is].
//
// # Where they end
//
// Promises 1, 2, 4 and 9 hold while the server keeps its data and its clock
// does not jump. A second holder can be granted the lock before the first one
// knows that it has lost it if
//
//   - the server restarts empty;
//   - an asynchronous replica takes over without having heard of the lock, or
//     while clients still reach the old master;
//   - the server evicts a key (maxmemory-policy must be noeviction);
//   - the server's clock is set forward;
//   - the client's machine is suspended, or its virtual machine paused: the
//     monotonic clock may stand still meanwhile.
//
// The first holder learns of the loss at its next renewal, at half the TTL,
// unless an old master that lives on still renews it; docs/operations.md names
// the setting of Redis that prevents this. Nor can a process react to the end
// of its context while it is stopped, for example by a debugger. When it
// continues, [Lock.Err] reports the loss at once.
//
// Fencing tokens close this gap. Whatever must not be written twice should
// refuse a token lower than one it has seen. A holder that has been overtaken has
// the lower one, unless the server lost its data and its clock was set back as
// well.
//
// With several nodes ([NewRedlock]) the promises hold for the lock as a whole. A
// majority of the nodes grants it, renews it and agrees on its token, and "the
// server" above is any majority of them. Their tokens are based on the clock of
// the process that locks, not on that of a node.
//
// # How it works
//
// Four Lua scripts, lock, rlock, refresh and unlock, acquire a lock for writing
// or reading, renew it and release it. Two more, inspect and revoke, are for
// people who look after a service. All keys of a lock are in one hash slot.
//
// A release hands the lock to the next in the queue within the script, and
// publishes the grant to the mailbox of the process concerned, unless that is the
// process that releases. A mailbox is a Pub/Sub channel. All mutexes on a client
// share one. It is open only while somebody waits or a lock is held for longer
// than half its TTL, and for a while after: five seconds, or the TTL of that
// lock.
//
// Goroutines of one process take turns: a process that is granted the lock
// passes it on among its own goroutines, without a call, until its turn is over
// and others are served. Its waiters form a queue in the process, and one
// request waits in Redis for all of them. That request carries the time for
// which the first of them has waited, and takes the place in Redis' queue that
// this waiter would have had. See [WithTurn].
//
// Holders and waiters renew their leases at half the TTL; renewals that are due
// at about the same time share a round trip. An uncontended Lock and Unlock is
// two commands. A lock that is held has neither a goroutine nor a timer of its
// own, unless [WithMaxHold] bounds it.
//
// [WithTrace] sets functions that are called on waits, grants, renewals and
// ends. The module github.com/redismutex/redismutex/otel makes metrics and
// spans of OpenTelemetry from them.
//
// With several nodes the same scripts run on each of them at once, and each
// request has the same rank on all of them. A waiter that holds some nodes but no
// majority, and learns that a lower rank waits there, releases those nodes and
// keeps its place. One Redis is a quorum of one.
package redismutex
