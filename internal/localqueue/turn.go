package localqueue

import (
	"time"

	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/script"
)

// MaxGrants is how many write locks are granted under one acquisition at most: it has that many tokens.
const MaxGrants = 1024

// A turn is an acquisition and what its queue knows of it. Under it, locks are granted to requests of this process until
// it ends. The fields are guarded by the mutex of the queue, except those that are set once.
type turn struct {
	acq   acquisition.Acquisition
	queue *queue // set once
	next  *turn  // of those that may serve
	locks *Lock  // one of those that are held under it, which are a ring; nil: none

	ends     clock.Instant // Never: it has served nobody; Past: it may serve nobody else
	users    int32         // how many grants for reading there are under it; -1: one for writing
	grants   int16         // how many grants for writing there have been under it
	write    bool          // it may serve writers
	checking bool          // a timer will look whether the turn is over
}

func (t *turn) init(q *queue, c *acquisition.Config, keys *script.Keys, write, try bool, origin acquisition.Origin) {
	t.queue, t.write = q, write
	t.acq.Init(c, keys, t, write, try, origin)
}

// serves reports whether w may be granted a lock under t: t is trusted, strong enough, in its turn, and has no users that
// exclude w. What has just been granted serves its first user in any case.
func (t *turn) serves(w *waiter, now clock.Instant) bool {
	switch {
	case w.write && (!t.write || t.users > 0), t.users < 0, t.acq.Until() <= now:
		return false
	}
	return t.ends == clock.Never || t.lasts(now)
}

// begin counts a new grant under t. The first one begins the turn.
func (t *turn) begin(g *grant, now clock.Instant) {
	if t.ends == clock.Never {
		t.ends = now.Add(t.acq.Config.Turn)
	}
	if g.write {
		t.users, t.grants = -1, t.grants+1
	} else {
		t.users++
	}
}

// end takes a grant off the count.
func (t *turn) end(g *grant) {
	if g.write {
		t.users = 0
	} else {
		t.users--
	}
}

// lasts reports whether the turn is not over.
func (t *turn) lasts(now clock.Instant) bool {
	return now < t.ends && t.grants < MaxGrants && t.acq.Until() >= now.Add(t.acq.Config.TTL/4)
}

// checkLater has the queue look when the turn may be over.
func (t *turn) checkLater(now clock.Instant) {
	if t.checking {
		return
	}
	t.checking = true
	over := min(t.ends, t.acq.Until().Add(1-t.acq.Config.TTL/4))
	time.AfterFunc(time.Duration(over-now), func() { t.queue.onTurnOver(t) })
}

// add adds l to the locks that are held under t.
func (t *turn) add(l *Lock, write bool) {
	l.write, l.prev, l.next = write, l, l
	if first := t.locks; first != nil {
		l.prev, l.next = first.prev, first
		l.prev.next, l.next.prev = l, l
	} else {
		t.locks = l
	}
}

// remove removes l from them.
func (t *turn) remove(l *Lock) {
	switch {
	case l.next == l:
		t.locks = nil
	case t.locks == l:
		t.locks = l.next
	}
	l.prev.next, l.next.prev = l.next, l.prev
	l.prev, l.next = nil, nil
	t.expireIfOverdue()
}

// each is an iterator over the locks that are held under t.
func (t *turn) each(yield func(*Lock) bool) {
	for l := t.locks; l != nil && yield(l); l = l.next {
		if l.next == t.locks {
			return
		}
	}
}

// writers returns how many locks for writing are held under t.
func (t *turn) writers() (n int) {
	for l := range t.each {
		if l.write {
			n++
		}
	}
	return n
}

// expireIfOverdue stops the renewals of t if locks are held under it, and all of them are overdue.
func (t *turn) expireIfOverdue() {
	for l := range t.each {
		if !l.overdue {
			return
		}
	}
	if t.locks != nil {
		t.acq.LetExpire()
	}
}

// OnRenewed implements [acquisition.Owner]. It ends the locks that the garbage collector has taken. From the first renewal on
// the references are weak: a lock that is unlocked earlier, as most are, costs nothing for that.
func (t *turn) OnRenewed() {
	t.queue.mu.Lock()
	defer t.queue.mu.Unlock()
	for l := range t.each {
		weak, forget := l.user.Watch()
		l.user = weak
		if forget != nil {
			go forget()
		}
	}
}

// OnLost implements [acquisition.Owner]: all locks under t end, and then the queue goes on. From now on none is granted or
// unlocked under t.
func (t *turn) OnLost(why error) {
	q := t.queue
	var users []User
	q.mu.Lock()
	for l := range t.each {
		users = append(users, l.user)
	}
	q.mu.Unlock()
	// All calls are deferred, so that each is made even if the context of a user panics; the last one first.
	defer q.onLost(t)
	for _, u := range users {
		defer u.End(why)
	}
}

// scatter makes each of the locks that were lost with t a ring of its own.
func (t *turn) scatter() {
	for l := t.locks; l != nil && l.user != nil; {
		next := l.next
		l.user, l.prev, l.next = nil, l, l
		l = next
	}
	t.locks = nil
}
