package localqueue

import (
	"time"

	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/clock"
)

// MaxGrants is how many write locks are granted under one acquisition at most: it has that many tokens.
const MaxGrants = 1024

// A turn is an acquisition and what its queue knows of it. Under it, locks are granted to requests of this process until
// it ends. The fields are guarded by the mutex of the queue, except those that are set once.
type turn struct {
	acq   acquisition.Acquisition
	queue *queue // set once; nil: a request by itself, in strict order or of an owner
	next  *turn  // of those that may serve

	ends   clock.Instant // Never: it has been granted, and has served nobody
	users  int32         // how many locks for reading there are under it; -1: one for writing
	grants int16         // how many locks for writing have been granted under it
	write  bool          // it may serve writers
	woken  bool          // a timer will look whether the turn is over
}

func (t *turn) init(q *queue, w *waiter, try bool) {
	t.queue, t.write = q, w.write
	t.acq.Init(w.config, w.keys, w.write, try, w.origin)
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

// grant notes that a lock was granted under t. With the first one the turn begins.
func (t *turn) grant(write bool) {
	if t.ends == clock.Never {
		t.ends = clock.Now().Add(t.acq.Config.Turn)
	}
	if write {
		t.users, t.grants = -1, t.grants+1
	} else {
		t.users++
	}
}

// lasts reports whether the turn is not over.
func (t *turn) lasts(now clock.Instant) bool {
	return now < t.ends && t.grants < MaxGrants && t.acq.Until() >= now.Add(t.acq.Config.TTL/4)
}

// wake has the queue look when the turn may be over.
func (t *turn) wake(now clock.Instant) {
	if t.woken {
		return
	}
	t.woken = true
	over := min(t.ends, t.acq.Until().Add(1-t.acq.Config.TTL/4))
	time.AfterFunc(time.Duration(over-now), func() { t.queue.onTurnOver(t) })
}
