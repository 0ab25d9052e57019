// Package redismutex is a distributed reader/writer mutual exclusion lock on
// Redis. A granted [Lock] is a [context.Context] that renews itself until
// Unlock: pass it to whatever the lock protects, and all of that stops when the
// lock is unlocked or lost.
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
// Code further down that locks the same key again with that context gets it at
// once, nested in the lock that it has: it does not wait for itself. A writer can
// become a reader without another writer in between: [Lock.Downgrade].
//
// # Promises
//
//  1. Exclusion. At every instant of the server a lock has one writer, or any
//     number of readers, or nobody.
//  2. Trust. A Lock's context is done no later than its lease ends on the
//     server. Trust counts from the moment before the request was sent, on the
//     monotonic clock, less a margin for drift, and a timer ends it, whatever a
//     renewal under way is doing.
//  3. Own lease. Each participant, waiting or holding, has a lease of its own.
//     None shortens, prolongs or clears that of another.
//  4. Once. An id enters once. A request that is sent again after its reply was
//     lost neither locks the caller out nor leaves a ghost, and one that
//     arrives after its own leave is refused.
//  5. No idle lock. Nobody who could be granted is left waiting: whatever frees
//     the lock hands it on, in the same script, to the next in order, a writer
//     or the whole run of readers in front.
//  6. Order. First come, first served, as the requests arrive at the server,
//     readers together, so that neither side starves. By choice writers first
//     ([WithLockIntent]) or readers first ([WithReaderPriority]).
//  7. One message per grant at the most, to the one process that waits for it;
//     grants to the same process travel together. A message that is lost costs
//     time, not safety.
//  8. Nothing stays. Every key has a TTL. When the longest lease has run out
//     nothing is left but the fencing counter, and that goes after a day.
//  9. Tokens rise. Each lock to write carries a fencing token, greater than
//     every token before it on that key: see [Lock.Token].
//  10. Why. An error says what happened: held by others, lost, unlocked, the
//     caller's context, Redis itself, or bad input. Nothing is swallowed, and no
//     two of these look the same to [errors.Is].
//
// # Where they end
//
// With several nodes ([NewRedlock]) they hold of the lock as a whole: a majority
// of the nodes grants it, keeps it, and agrees on its token. "The server" is
// then any majority of them.
//
// 1, 2, 4 and 9 hold while the server keeps its data and its clock does not
// jump. A server that restarts empty, a failover to an asynchronous replica
// that had not yet heard of the lock, an eviction (maxmemory-policy must be
// noeviction), or a clock set forward can let a second holder in while the
// first does not know it yet. It learns it with its next renewal, at half the
// TTL. A process that is paused, by a debugger or the stop of a virtual
// machine, cannot act on the end of its context either. For what must never be
// written twice let the thing that is written to check the fencing token: a
// holder that was overtaken has the lower one, unless the server lost its data
// and its clock was set back as well.
//
// # How it works
//
// Four Lua scripts, on keys of one hash slot: enter to write, enter to read,
// keep, leave. Whoever leaves hands the lock to the next in line within the
// script, and publishes that to the mailbox of the one process concerned, unless
// it is its own: a Pub/Sub channel that all mutexes on a client share, and that
// is open only while somebody waits. Who waits keeps its place by renewing its lease, as
// does who holds, all those due at about the same time in one round trip. An
// uncontended Lock and Unlock is two commands, and a lock that is held has
// neither a goroutine nor a timer of its own.
//
// Over several nodes the same scripts run on each of them at once, and each
// request has the same rank everywhere. Who holds some nodes, but no majority, and
// learns that somebody with a lower rank waits there makes way, and keeps its
// place. One Redis is a quorum of one.
package redismutex
