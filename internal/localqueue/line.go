package localqueue

import (
	"errors"

	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/script"
)

// A waiter is a request that has not been served. The mutex of its queue guards the fields that change. None changes once over
// is true.
type waiter struct {
	config *acquisition.Config
	keys   *script.Keys
	lock   *Lock
	spare  *turn // memory for the acquisition that it may need
	origin acquisition.Origin
	write  bool

	over       bool
	err        error         // why it is over; nil: it was granted
	done       chan struct{} // closed when it is over; nil: nobody waits for that yet
	prev, next *waiter       // in its line, which is a ring
}

// errGivenUp is the error of a waiter whose caller gave up.
var errGivenUp = errors.New("given up")

// turn returns an acquisition that is still to be made for w.
func (w *waiter) turn(q *queue, try bool) *turn {
	t := w.spare
	w.spare = nil
	if t == nil {
		t = new(turn)
	}
	t.init(q, w.config, w.keys, w.write, try, w.origin)
	return t
}

// A line is a list of waiters, in order.
type line struct{ last *waiter }

func (l *line) empty() bool { return l.last == nil }

func (l *line) len() (n int) {
	for w := l.head(); w != nil; w = w.next {
		n++
		if w == l.last {
			break
		}
	}
	return n
}

func (l *line) head() *waiter {
	if l.last == nil {
		return nil
	}
	return l.last.next
}

// writes reports whether a writer waits in it.
func (l *line) writes() bool {
	for w := l.head(); w != nil; w = w.next {
		if w.write || w == l.last {
			return w.write
		}
	}
	return false
}

func (l *line) push(w *waiter) {
	if l.last == nil {
		w.prev, w.next = w, w
	} else {
		w.prev, w.next = l.last, l.last.next
		w.prev.next, w.next.prev = w, w
	}
	l.last = w
}

func (l *line) remove(w *waiter) {
	if w.next == w {
		l.last = nil
	} else {
		if l.last == w {
			l.last = w.prev
		}
		w.prev.next, w.next.prev = w.next, w.prev
	}
	w.prev, w.next = nil, nil
}
