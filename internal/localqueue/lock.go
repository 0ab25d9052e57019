package localqueue

import (
	"context"
	"fmt"

	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/script"
)

// A Lock is a lock as the queue of its key knows it: granted to a request, or nested in another lock. The fields are guarded by
// the mutex of the queue, except those that are set once.
type Lock struct {
	user  User
	grant *grant
	since clock.Instant // when its grant was granted; set once

	prev, next *Lock // of those under its turn, which are a ring; nil: it has not been granted, or it was unlocked
	write      bool  // it was granted for writing, also after a downgrade
	overdue    bool  // it has been held for as long as it may
	local      bool  // it was passed on within a turn; set once
}

// A User is who a lock is granted to. At first it keeps the lock from the garbage collector, until [User.Watch] is called.
type User interface {
	// End tells that the lock was lost, and why. It is called under no mutex.
	End(cause error)
	// Watch returns a weak reference to the user and, if the garbage collector has taken it, what unlocks the lock, under no
	// mutex. It is called with each renewal, under the mutex of the queue, and must take none.
	Watch() (weak User, forget func())
}

// A grant is a lock that was granted to one request, and those that are nested in it.
type grant struct {
	turn   *turn // set once
	locks  int32 // that are held: its own, and those nested in it
	number int16 // of the write lock under its acquisition, from 0; set once
	wrote  bool  // it was granted for writing; set once
	write  bool  // it still is
}

// Alone returns a lock that is still to be acquired, by itself: it stands in Redis, and in a queue of its own.
func Alone(c *acquisition.Config, keys *script.Keys, write, try bool) Lock {
	own := new(memory)
	own.queue.alone = true
	own.turn.init(&own.queue, c, keys, write, try, acquisition.Origin{})
	own.grant.turn = &own.turn
	return Lock{grant: &own.grant}
}

// NestedIn returns a lock that is still to be nested in another one.
func NestedIn(outer *Lock) Lock { return Lock{grant: outer.grant} }

// AcquireAlone acquires l, which Alone has returned, for a user.
func (l *Lock) AcquireAlone(ctx context.Context, u User) error {
	t := l.grant.turn
	if err := t.acq.Acquire(ctx); err != nil {
		return err
	}
	q := t.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	l.user = u
	return q.grantAlone(t, l)
}

// Acquire acquires l in the queue of its key for a user, and waits until it is granted, or will not be granted, or ctx ends.
func (l *Lock) Acquire(ctx context.Context, c *acquisition.Config, keys *script.Keys, write, try bool, u User) error {
	q, own := enter(c, keys)
	w := &waiter{config: c, keys: keys, lock: l, write: write}
	l.user = u
	if own != nil {
		l.grant, w.spare = &own.grant, &own.turn
	} else {
		l.grant = new(grant)
	}
	if c.Ranks != nil {
		w.origin = acquisition.Origin{Asked: clock.Now(), Rank: c.Ranks.Next()}
	}
	err := acquisition.ErrRetry // stays if a hook, a logger or a context panics
	defer func() {
		switch {
		case err == nil:
		case w.over && w.err == nil: // it was granted meanwhile
			go l.Unlock(context.Background())
		default:
			q.leave(c, keys, 1)
		}
	}()
	if try {
		err = q.try(ctx, w)
	} else {
		err = q.acquire(ctx, w)
	}
	return err
}

// Nest nests l, which NestedIn has returned, in that lock, for a user. It returns ErrRetry if that one has ended meanwhile.
func (l *Lock) Nest(outer *Lock, u User, write bool) error {
	g := l.grant
	t, q := g.turn, g.turn.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case outer.admits() != nil:
		return acquisition.ErrRetry
	case write && !g.write: // the acquisition of a reader may be a write lock
		return fmt.Errorf("%w: %q: unlock it first, or lock for writing in the first place", lockerr.ErrUpgrade, t.acq.Keys.Name())
	}
	g.locks++
	l.user, l.since = u, outer.since
	t.add(l, write)
	return nil
}

// Admits returns nil if another lock can be nested in l: it has been neither unlocked nor lost. Its parent context may have
// ended, since code that cleans up is still protected. The error matches ErrMaxHold if l is overdue, so that another lock would
// wait until it is unlocked or its lease ends, and else it is ErrRetry.
func (l *Lock) Admits() error {
	q := l.grant.turn.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	return l.admits()
}

func (l *Lock) admits() error {
	if tell := l.Acquisition().Check(); tell != nil {
		go tell() // it calls foreign code, and the caller has a mutex
	}
	switch {
	case l.ended() != nil:
		return acquisition.ErrRetry
	case l.overdue:
		return fmt.Errorf("%w: %q: unlock it before it is locked again", lockerr.ErrMaxHold, l.Acquisition().Keys.Name())
	}
	return nil
}

// Usable returns nil, or an error that matches ErrUnlocked, ErrLockLost, ErrRevoked or ErrMaxHold if l has ended. If the lease
// is over, l is lost, although no timer may have fired.
func (l *Lock) Usable() error {
	q := l.grant.turn.queue
	if tell := l.Acquisition().Check(); tell != nil {
		tell()
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return l.usable()
}

func (l *Lock) usable() error {
	err := l.ended()
	if err == nil && l.overdue {
		err = fmt.Errorf("%w: %q", lockerr.ErrMaxHold, l.Acquisition().Keys.Name())
	}
	return err
}

// ended returns nil, or an error if l has been unlocked or lost.
func (l *Lock) ended() error {
	if l.next == nil {
		return fmt.Errorf("%w: %q", lockerr.ErrUnlocked, l.Acquisition().Keys.Name())
	}
	return l.Acquisition().Lost()
}

// Acquisition returns the acquisition. The locks of one turn share it.
func (l *Lock) Acquisition() *acquisition.Acquisition { return &l.grant.turn.acq }

// Since returns when l, or the lock that it is nested in, was granted.
func (l *Lock) Since() clock.Instant { return l.since }

// Local reports whether l was passed on within a turn.
func (l *Lock) Local() bool { return l.local }

// Token returns the fencing token: that of the server × 1024, and which of the write locks under the acquisition it is. It
// is 0 for a reader.
func (l *Lock) Token() uint64 {
	g := l.grant
	if !g.wrote {
		return 0
	}
	return g.turn.acq.Token()*MaxGrants + uint64(g.number)
}

// MarkOverdue ends the turn of l, which has been held for as long as it may be, and stops its renewals. It reports whether l was
// still held.
func (l *Lock) MarkOverdue() bool {
	t, q := l.grant.turn, l.grant.turn.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	if l.ended() != nil {
		return false
	}
	l.overdue = true
	t.expireIfOverdue()
	t.ends = clock.Past
	if t.users < 0 { // else endTurns does it
		q.putAside(t)
	}
	q.acquireInBackground(q.update())
	return true
}

// Unlock unlocks l. The last lock of its grant passes the lock on to the next of this process, or releases it.
func (l *Lock) Unlock(ctx context.Context) error {
	t := l.grant.turn
	last, next, err := l.unlock()
	switch {
	case err == nil && last && next != nil:
		return t.queue.behind(next, func() error { return t.acq.Release(ctx, &next.acq) })
	case err == nil && last:
		return t.acq.Release(ctx, nil)
	case next != nil:
		t.queue.acquireInBackground(next)
	}
	return err
}

// unlock returns whether l was the last under its acquisition, which the caller must then release unless there is an error, and
// the acquisition that it must make, also with an error.
func (l *Lock) unlock() (last bool, next *turn, err error) {
	g := l.grant
	t, q := g.turn, g.turn.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := l.ended(); err != nil { // if it was lost, OnLost is called
		return false, nil, err
	}
	t.remove(l)
	g.locks--
	if g.locks > 0 {
		return false, nil, nil
	}
	t.end(g)
	q.leave(t.acq.Config, t.acq.Keys, 1)
	now := clock.Now()
	q.serve(now)
	if last = t.users == 0; last {
		err = t.acq.Close()
		q.drop(t)
	}
	q.endTurns(now)
	return last, q.choose(now), err
}

// Downgrade makes l, the only lock of its grant that writes, a read lock.
func (l *Lock) Downgrade(ctx context.Context) error {
	d, next, err := l.becomeReader()
	switch {
	case err != nil:
		return err
	case next == nil:
		return d.Tell(ctx, nil)
	}
	return l.grant.turn.queue.behind(next, func() error { return d.Tell(ctx, &next.acq) })
}

// becomeReader makes l a reader. It returns what the caller must tell the nodes, and which acquisition it must make in
// front of that, since the process no longer holds the lock for writing. It may be called again.
func (l *Lock) becomeReader() (d acquisition.Downgrade, next *turn, err error) {
	g := l.grant
	t, q := g.turn, g.turn.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	switch err := l.usable(); {
	case err != nil:
		return d, nil, err
	case !l.write:
		return d, nil, fmt.Errorf("%w: downgrade %q: it is a read lock", lockerr.ErrInvalid, t.acq.Keys.Name())
	case t.writers() > 1:
		return d, nil, fmt.Errorf("%w: downgrade %q: unlock the nested write locks first", lockerr.ErrInvalid, t.acq.Keys.Name())
	}
	d = t.acq.BeginDowngrade()
	if g.write {
		g.write, t.users, t.write = false, 1, false
		next = q.update()
	}
	return d, next, nil
}
