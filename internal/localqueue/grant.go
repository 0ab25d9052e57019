package localqueue

import (
	"context"

	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/script"
)

// A Grant is a lock that was granted to one request, and those that are nested in it. The fields are guarded by the mutex
// of the queue, except those that are set once.
type Grant struct {
	turn   *turn // set once
	locks  int32 // that are not unlocked: its own, and those nested in it
	number int16 // of the write lock under its acquisition, from 0; set once
	wrote  bool  // it was granted for writing; set once
	write  bool  // it still is
}

// Strict returns a lock that is still to be acquired, by itself: it stands in Redis, and in no queue of this process.
func Strict(c *acquisition.Config, keys *script.Keys, write, try bool) *Grant {
	both := new(struct {
		Grant
		turn
	})
	both.Grant = Grant{turn: &both.turn, wrote: write}
	both.acq.Init(c, keys, write, try, acquisition.Origin{})
	return &both.Grant
}

// Acquire acquires g, which Strict has returned, for a user.
func (g *Grant) Acquire(ctx context.Context, u User) error {
	if err := g.turn.acq.Acquire(ctx); err != nil {
		return err
	}
	u.Granted(g, false)
	return g.turn.acq.Join(u, nil, g.wrote)
}

// Acquire acquires a lock in the queue of its key, and waits until it is granted, or will not be granted, or ctx ends.
func Acquire(ctx context.Context, c *acquisition.Config, keys *script.Keys, write, try bool, u User) error {
	q, g, spare := enter(c, keys)
	w := &waiter{config: c, keys: keys, user: u, grant: g, spare: spare, write: write}
	if c.Ranks != nil {
		w.origin = acquisition.Origin{Asked: clock.Now(), Rank: c.Ranks.Next()}
	}
	granted := false
	defer func() {
		if !granted { // also if a hook, a logger or a context panics
			q.leave(c, keys)
		}
	}()
	var err error
	if try {
		err = q.try(ctx, w)
	} else {
		err = q.acquire(ctx, w)
	}
	granted = err == nil
	return err
}

// Acquisition returns the acquisition. The locks of one turn share it.
func (g *Grant) Acquisition() *acquisition.Acquisition { return &g.turn.acq }

// Token returns the fencing token: that of the server × 1024, and which of the write locks under the acquisition g is. It
// is 0 for a reader.
func (g *Grant) Token() uint64 {
	if !g.wrote {
		return 0
	}
	return g.turn.acq.Token()*MaxGrants + uint64(g.number)
}

// Overdue ends the turn of u, a lock of g that has been held for as long as it may be, and stops its renewals. It reports
// whether u was still held.
func (g *Grant) Overdue(u acquisition.User) bool {
	t, q := g.turn, g.turn.queue
	if q == nil {
		return t.acq.Overdue(u)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if !t.acq.Overdue(u) {
		return false
	}
	t.ends = clock.Always
	if t.users < 0 { // else endTurns does it
		q.spend(t)
	}
	q.goOn(q.update())
	return true
}

// Nest nests u in outer, a lock of g.
func (g *Grant) Nest(u, outer acquisition.User, write bool) error {
	q := g.turn.queue
	if q == nil {
		return g.turn.acq.Join(u, outer, write)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if write && !g.write && g.locks > 0 { // the acquisition of a reader may be a write lock
		return lockerr.Upgrade(g.turn.acq.Keys.Name())
	}
	err := g.turn.acq.Join(u, outer, write)
	if err == nil {
		g.locks++
	}
	return err
}

// Unlock unlocks u, a lock of g, which is usable: see Usable. The last lock of g passes the lock on to the next of this
// process, or releases it.
func (g *Grant) Unlock(ctx context.Context, u acquisition.User) error {
	t := g.turn
	last, next, err := g.unlock(u)
	switch {
	case err == nil && last && next != nil:
		return t.queue.behind(next, func() error { return t.acq.Release(ctx, &next.acq) })
	case err == nil && last:
		return t.acq.Release(ctx, nil)
	case next != nil:
		t.queue.goOn(next)
	}
	return err
}

// unlock removes u. It returns whether the caller must release the acquisition, and which one it must make, also with an
// error.
func (g *Grant) unlock(u acquisition.User) (last bool, next *turn, err error) {
	t, q := g.turn, g.turn.queue
	if q == nil {
		if err = t.acq.Remove(u); err == nil {
			last, err = t.acq.Close()
		}
		return last, nil, err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := t.acq.Remove(u); err != nil { // if it was lost, Lost will be called
		return false, nil, err
	}
	g.locks--
	if g.locks > 0 {
		return false, nil, nil
	}
	g.end()
	q.leave(t.acq.Config, t.acq.Keys)
	now := clock.Now()
	q.serve(now)
	if last, err = t.acq.Close(); last {
		q.drop(t)
	}
	q.endTurns(now)
	return last, q.choose(now), err
}

// end takes g out of its turn.
func (g *Grant) end() {
	if g.write {
		g.turn.users = 0
	} else {
		g.turn.users--
	}
}

// Lost has to be called for each lock of g when the acquisition was lost.
func (g *Grant) Lost() {
	t, q := g.turn, g.turn.queue
	if q == nil {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.drop(t)
	g.locks--
	if g.locks == 0 {
		q.leave(t.acq.Config, t.acq.Keys)
	}
	q.goOn(q.update())
}

// Downgrade makes u, the only lock of g that writes, a read lock.
func (g *Grant) Downgrade(ctx context.Context, u acquisition.User) error {
	d, next, err := g.becomeReader(u)
	switch {
	case err != nil:
		return err
	case next == nil:
		return d.Tell(ctx, nil)
	}
	return g.turn.queue.behind(next, func() error { return d.Tell(ctx, &next.acq) })
}

// behind makes a call behind the acquire of next. If a hook, a logger or a context panics meanwhile, another one is made.
func (q *queue) behind(next *turn, call func() error) error {
	go func() { q.onAcquired(next, next.acq.Wait(context.Background())) }()
	returned := false
	defer func() {
		if !returned {
			next.acq.Withdraw()
		}
	}()
	err := call()
	returned = true
	return err
}

// becomeReader makes u a reader. It returns what the caller must tell the nodes, and which acquisition it must make in
// front of that, since the process no longer holds the lock for writing.
func (g *Grant) becomeReader(u acquisition.User) (d acquisition.Downgrade, next *turn, err error) {
	t, q := g.turn, g.turn.queue
	if q == nil {
		d, err = t.acq.BeginDowngrade(u)
		return d, nil, err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if d, err = t.acq.BeginDowngrade(u); err == nil && g.write {
		g.write, t.users, t.write = false, 1, false
		next = q.update()
	}
	return d, next, err
}
