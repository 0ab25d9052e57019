package sim

// This file checks what was promised in an era.

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/redismutex/redismutex/internal/history"
)

const (
	// queueing is how long a request can take to reach the queue, while nothing fails: a few ways to the server and
	// back, as connections are opened, the scripts are loaded, and the mailbox is subscribed.
	queueing = 100 * time.Millisecond

	// renewal is how much longer than half a TTL it can take until a holder learns that a server has lost its data.
	renewal = 2*distance + 100*time.Millisecond

	// doubt is how long after its last sign of life an attempt may still hold something: the longest delay of a
	// request, and the lease that it is given then.
	doubt = 3*longest + mostBack
)

// verdict is what was wrong. It is asked for outside of the bubble, for there Linearizable would have no limit.
func (e *era) verdict() []string {
	ops := e.recorder.Ops()
	e.sum(ops)
	e.told(ops)
	for i := range ops {
		if o := &ops[i]; o.Freed == 0 {
			o.Freed = max(o.Asked, o.Got, o.Unlocking, o.Ended, o.Until) + int64(doubt)
		}
	}
	e.check(history.Exclusion(ops))
	e.check(history.Tokens(ops))
	if e.mood == calm {
		e.check(history.Order(ops, queueing))
	}
	if e.mood == calm || e.mood == tardy && len(e.nodes) == 1 {
		e.check(e.idle(ops))
	}
	if e.mood != lossy && len(e.nodes) == 1 {
		e.check(history.Linearizable(ops, time.Second))
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

// told looks whether each lock that was lost had a reason to be, and was told so in time. What it claims to have held
// since the server lost its data is left out: it could not know.
func (e *era) told(ops []history.Op) {
	if e.mood != calm && e.mood != lossy {
		return
	}
	for i := range ops {
		o, a := &ops[i], e.attempts[i]
		_, end, ok := o.Held()
		if !ok {
			continue
		}
		explained := a.orphan // its context had ended with its parent: when it was lost nobody saw
		for _, loss := range e.losses {
			if a.asked > loss.at || end < loss.at {
				continue
			}
			inTime := end <= loss.at+int64(a.ttl/2+renewal)
			explained = explained || inTime
			switch certain := len(e.nodes) == 1 && loss.emptied && a.got < loss.at; {
			case certain && (a.confirmed || !inTime):
				e.check(fmt.Errorf("not told in time that the server lost it at %v:\n\t%v", time.Duration(loss.at), o))
			case a.confirmed:
			case o.Got > loss.at:
				o.Got = 0 // it may have been granted before
			default:
				o.Ended = loss.at
			}
		}
		if a.lost && !explained {
			e.check(fmt.Errorf("lost for no reason, or told too late:\n\t%v", o))
		}
	}
}

// idle reports somebody who waited while nobody held the lock, through no fault of its own.
func (e *era) idle(ops []history.Op) error {
	for i := range ops {
		o := &ops[i]
		if o.Got == 0 || e.mood == tardy && e.attempts[i].by.name == late {
			continue
		}
		free := o.Asked
		for j := range ops {
			p := &ops[j]
			if _, to, ok := p.Held(); ok && p.Key == o.Key && p.Got < o.Got && i != j {
				free = max(free, to, p.Unlocking) // it is held until then, also when its parent context has ended
			}
		}
		free = max(free, e.unaware(ops, o))
		if waited := time.Duration(o.Got - free); waited > queueing {
			return fmt.Errorf("nobody held it for %v, and one waited:\n\t%v", waited, o)
		}
	}
	return nil
}

// unaware is until when, before o got its lock, the server had granted that to a request of the late process that still
// waited for an answer; 0 if it had not. A copy of its acquire had come late, and the connection on which it was answered
// was closed by then: the process wants the lock, and cannot know that it has it, until another copy is answered. For an
// acquire that was given up there is no such excuse.
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
			if i+1 < len(looks) && l.until.Before(looks[i+1].at) {
				end = int64(l.until.Sub(e.start)) // no script has ended it
			}
			for j, a := range e.attempts {
				if a.by.name != late || a.key != l.key || a.write != l.write || !a.by.owns(l.id) {
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
