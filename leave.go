package redismutex

// This file answers: how does a lock leave its nodes, and what do they say?

import (
	"context"
	"fmt"
	"time"
)

// partAll has l leave in the background wherever it stands.
func (l *Lock) partAll() {
	for _, s := range l.stakes {
		switch {
		case s.asking: // it leaves when that is answered, or has taken too long
		case s.in:
			s.in = false
			l.release(s)
			s.node().keeper.leave(s)
		default:
			l.release(s)
			s.node().keeper.unwatch(s)
		}
	}
}

// leave has l leave wherever it stands, and waits for the answers: with several
// nodes no longer than the node time-out, and not for one that is known to be
// ill. The rest goes on in the background.
func (l *Lock) leave(ctx context.Context) (t tally) {
	if l.ballot == nil {
		s := l.stakes[0]
		r, err := s.leave(ctx)
		t.add(parting{s, r, err})
		return t
	}
	l.mu.Lock()
	open := map[*stake]bool{}
	l.ballot.parting = make(chan parting, len(l.stakes))
	for _, s := range l.stakes {
		switch ill := s.node().illness(); {
		case s.asking && ill == nil:
			open[s] = true
		case s.asking: // it leaves when that is answered, or has taken too long
		case s.in && ill != nil:
			l.release(s)
			s.node().keeper.leave(s)
			t.add(parting{s, reply{}, ill.why})
		case s.in:
			open[s] = true
			l.part(s)
		default:
			l.release(s)
			s.node().keeper.unwatch(s)
		}
	}
	l.mu.Unlock()
	timeout := time.NewTimer(l.m.patience)
	defer timeout.Stop()
	for len(open) > 0 {
		select {
		case p := <-l.ballot.parting:
			delete(open, p.stake)
			l.hear(p.stake, p.reply, now(), p.err)
			t.add(p)
			continue
		case <-ctx.Done():
			for s := range open {
				t.add(parting{s, reply{}, errInterrupted})
			}
		case <-timeout.C:
			for s := range open {
				err := redisError(fmt.Errorf("no answer within %v", l.m.patience))
				l.hear(s, reply{}, now(), err)
				t.add(parting{s, reply{}, err})
			}
		}
		break
	}
	return t
}

// part has s leave, and tells leave of that if it waits.
func (l *Lock) part(s *stake) {
	l.release(s)
	if l.ballot == nil || l.ballot.parting == nil {
		s.node().keeper.leave(s)
		return
	}
	s.node().workers.run(func() {
		r, err := s.leave(context.Background())
		l.ballot.parting <- parting{s, r, err}
	})
}

// parted tells leave that s has left, or need not.
func (l *Lock) parted(s *stake, r reply, err error) {
	l.release(s)
	if l.ballot != nil && l.ballot.parting != nil {
		l.ballot.parting <- parting{s, r, err}
	}
}

// A parting is the answer of one node to a leave.
type parting struct {
	stake *stake
	reply reply
	err   error
}

// A tally is what all of them amount to.
type tally struct {
	left int // so many nodes held the lock, and have let go of it
	errs []parting
}

func (t *tally) add(p parting) {
	switch {
	case p.err != nil:
		t.errs = append(t.errs, p)
	case p.reply.status == left && p.stake.granted:
		t.left++
	}
}

// err is the error of an unlock that has not been confirmed.
func (t *tally) err(ctx context.Context, l *Lock) error {
	format, args := "redismutex: unlock %q: %d of %d nodes have let go of it", []any{l.Key(), t.left, len(l.stakes)}
	for _, p := range t.errs {
		switch {
		case p.err == errInterrupted:
			return ended(ctx, l.Key())
		case l.ballot == nil:
			return doing("unlock", l.Key(), p.err)
		}
		format += "; %s: %w"
		args = append(args, p.stake.named(), p.err)
	}
	return fmt.Errorf(format, args...)
}
