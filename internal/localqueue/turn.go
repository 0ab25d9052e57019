package localqueue

import (
	"time"

	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/clock"
)

// MaxGrants is how many write locks are granted under one acquisition, at most: so many tokens it has.
const MaxGrants = 1024

// A turn is an acquisition and what its queue knows of it. Under it, locks are granted to requests of this process until
// it ends. The fields are guarded by the mutex of the queue, except those that are set once.
type turn struct {
	acq    acquisition.Acquisition
	queue  *queue  // set once; nil: a request by itself, in strict order
	config *Config // set once
	next   *turn   // of those that are held

	ends    clock.Instant
	users   int32 // how many locks there are under it, with each those that are nested in it
	grants  int16 // how many write locks have been granted under it
	write   bool  // it may serve writers
	writing bool  // a writer is one of its users
	fresh   bool  // it has been granted, and has served nobody
	woken   bool  // a timer will look whether the turn is over
}

func (t *turn) init(q *queue, w *waiter, try bool) {
	t.queue, t.config, t.write = q, w.config, w.write
	t.acq.Init(&w.config.Config, w.keys, w.write, try)
}

// begin begins the turn: t has been granted.
func (t *turn) begin() { t.ends, t.fresh = clock.Now().Add(t.config.Turn), true }

// serves reports whether w may be granted a lock under t: t is trusted, strong enough, in its turn, and has no users that
// exclude w. What has just been granted serves its first user in any case.
func (t *turn) serves(w *waiter, now clock.Instant) bool {
	switch {
	case w.write && (!t.write || t.users > 0), t.writing, t.acq.Until() <= now:
		return false
	}
	return t.fresh || t.lasts(now)
}

// lasts reports whether the turn is not over.
func (t *turn) lasts(now clock.Instant) bool {
	return now < t.ends && t.grants < MaxGrants && t.acq.Until() >= now.Add(t.config.TTL/4)
}

// wake has the queue look when the turn may be over.
func (t *turn) wake(now clock.Instant) {
	if t.woken {
		return
	}
	t.woken = true
	over := min(t.ends, t.acq.Until().Add(1-t.config.TTL/4))
	time.AfterFunc(time.Duration(over-now), func() { t.queue.onTurnOver(t) })
}
