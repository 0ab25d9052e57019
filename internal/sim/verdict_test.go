package sim

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/redismutex/redismutex/internal/history"
)

const (
	// queueing is how long a request can take to reach the queue while nothing fails: a few round trips, to open
	// connections, load the scripts and subscribe to the mailbox.
	queueing = 100 * time.Millisecond

	// longestTurn is the longest turn of a process in use.
	longestTurn = 200 * time.Millisecond

	// renewal is the time, in addition to half a TTL, within which a holder learns that a server has lost its data.
	renewal = 2*distance + 100*time.Millisecond

	// doubt is how long after its last event an attempt may still hold a lock: the longest delay of a request, and the
	// lease that it is then given.
	doubt = 3*longest + mostBack
)

// verdict checks the history and returns what is wrong. It must be called outside of the bubble, in which Linearizable has
// no limit.
func (e *era) verdict() []string {
	ops := e.recorder.Ops()
	e.sum(ops)
	e.ends(ops)
	e.revocations(ops)
	e.sighted(ops)
	e.informed(ops)
	e.account.agrees(e)
	for i := range ops {
		if o := &ops[i]; o.Freed == 0 {
			o.Freed = max(o.Asked, o.Got, o.Unlocking, o.Ended, o.Until) + int64(doubt)
		}
	}
	e.check(history.Exclusion(ops))
	e.check(history.Tokens(ops))
	if e.mood == calm {
		e.check(history.Turns(e.triedAtLast(ops), queueing, longestTurn))
	}
	if e.mood == calm || e.mood == tardy && len(e.nodes) == 1 {
		e.check(e.idle(ops))
	}
	if e.mood != lossy && len(e.nodes) == 1 {
		all := ops
		if e.mood != calm {
			all = history.WithGivenUp(ops, func(i int) time.Duration { return e.attempts[i].ttl })
		}
		e.check(history.Linearizable(all, time.Second))
	}
	return e.wrong
}

func (e *era) check(err error) {
	switch {
	case errors.Is(err, history.ErrUndecided):
		e.summary.mu.Lock()
		e.undecided++
		e.summary.mu.Unlock()
	case err != nil:
		e.wrong = append(e.wrong, err.Error())
	}
}

func (e *era) sum(ops []history.Op) {
	e.summary.mu.Lock()
	defer e.summary.mu.Unlock()
	e.eras++
	e.ops += len(ops)
	for i, o := range ops {
		if o.Got != 0 {
			e.granted++
			if !e.attempts[i].confirmed {
				e.lost++
			}
		}
	}
}

// informed checks that each lost lock was lost for a reason, and that its holder learned of it in time. It removes the time
// after the loss from the operation, since the holder could not know of the loss.
func (e *era) informed(ops []history.Op) {
	if e.mood != calm && e.mood != lossy {
		return
	}
	acquired := map[string]int64{} // when an acquisition was asked for, which may serve others of its process later
	for _, a := range e.attempts {
		if first, ok := acquired[a.id]; !ok || a.asked < first {
			acquired[a.id] = a.asked
		}
	}
	for i := range ops {
		o, a := &ops[i], e.attempts[i]
		_, end, ok := o.Held()
		if !ok {
			continue
		}
		explained := a.orphan || e.mayBeRevoked(a.id) // its context had ended with its parent, so the loss was not observed
		for _, loss := range e.losses {
			if acquired[a.id] > loss.at || end < loss.at {
				explained = explained || end < loss.at && loss.at <= a.unlocked // the unlock was under way
				continue
			}
			inTime := end <= loss.at+int64(a.ttl/2+renewal)
			explained = explained || inTime
			// Redis was not asked if the unlock took no time: others of the process hold the lock, or took it over.
			confirmed := a.confirmed && o.Freed-o.Unlocking >= int64(time.Microsecond)
			switch certain := len(e.nodes) == 1 && loss.emptied && a.got < loss.at; {
			case certain && (confirmed || !inTime):
				e.check(fmt.Errorf("want the holder to learn in time that the server lost the lock at %v, it did not:\n\t%v", time.Duration(loss.at), o))
			case confirmed:
			case o.Got > loss.at:
				o.Got = 0 // it may have been granted before
			default:
				o.Ended = loss.at
			}
		}
		if a.lost && !explained {
			e.check(fmt.Errorf("want a lock lost only for a reason, and the holder to learn of it in time:\n\t%v", o))
		}
	}
}

// idle reports a waiter that waited while the lock was free, unless its own process was the reason.
func (e *era) idle(ops []history.Op) error {
	for i := range ops {
		o := &ops[i]
		if o.Got == 0 || e.mood == tardy && e.attempts[i].by.name == late {
			continue
		}
		free := o.Asked
		for j := range ops {
			p := &ops[j]
			if p.Got != 0 && p.Key == o.Key && p.Got < o.Got && i != j {
				free = max(free, e.occupies(j, p, o))
				if e.mood == tardy && e.attempts[j].by.name == late { // its release travels behind an acquire, which may be late
					free = max(free, p.Freed)
				}
			}
		}
		free = max(free, e.unaware(ops, o))
		if waited := time.Duration(o.Got - free); waited > queueing {
			return fmt.Errorf("want a free lock granted within %v, it was free for %v while one waited:\n\t%v", queueing, waited, o)
		}
	}
	return nil
}

// unaware returns until when the late process held the lock, before o was granted it, without knowing that; 0 if it did
// not. A copy of an acquire may arrive after its connection was closed, so that the reply is lost. The process cannot know
// that it holds the lock until another copy is answered. This does not excuse an acquire that was given up.
func (e *era) unaware(ops []history.Op, o *history.Op) (until int64) {
	if e.mood != tardy {
		return 0
	}
	looks := e.nodes[0].looks
	for i, look := range looks {
		at := int64(look.at.Sub(e.start))
		if at >= o.Got {
			break
		}
		for _, l := range look.holds {
			if l.key != o.Key {
				continue
			}
			end := at
			if i+1 < len(looks) { // until the next script ran, unless the lease ended before
				end = min(int64(l.until.Sub(e.start)), int64(looks[i+1].at.Sub(e.start)))
			}
			for j, a := range e.attempts {
				if a.by.name != late || a.key != l.key || a.write != l.write || e.processOf(l.id) != a.by {
					continue
				}
				answered := cmp.Or(ops[j].Got, ops[j].Ended)
				if a.asked <= at && (answered == 0 || at <= answered) {
					until = max(until, min(end, cmp.Or(answered, end)))
				}
			}
		}
	}
	return until
}
