package redismutex

// This file answers: how does a hold leave its nodes, and what do they say?

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redismutex/redismutex/internal/quorum"
)

// partAll has h leave in the background wherever it stands.
func (h *hold) partAll() {
	for _, s := range h.stakes {
		switch {
		case s.asking: // it leaves when that is answered, or has taken too long
		case s.in:
			s.in = false
			h.release(s)
			s.node().keeper.leave(s)
		default:
			h.release(s)
			s.node().keeper.unwatch(s)
		}
	}
}

// leave has h leave wherever it stands, and waits for the answers: with several
// nodes no longer than the node time-out, and not for one that is down, unless
// it takes that one to confirm it. The rest goes on in the background.
func (h *hold) leave(ctx context.Context) (t tally) {
	if h.ballot == nil {
		s := h.stakes[0]
		r, err := s.leave(ctx)
		t.add(s.gone(r, err))
		return t
	}
	h.mu.Lock()
	up := 0
	for _, s := range h.stakes {
		if s.in && s.node().health.down() == nil {
			up++
		}
	}
	few := up < quorum.Majority(len(h.stakes)) // too few to confirm it: the others may be back
	open := map[*stake]bool{}
	h.ballot.voting = make(chan vote, len(h.stakes))
	for _, s := range h.stakes {
		down := s.node().health.down()
		switch {
		case s.asking && down == nil:
			open[s] = true
		case s.asking: // it leaves when that is answered, or has taken too long
		case s.in && down != nil && !few:
			h.release(s)
			s.node().keeper.leave(s)
			t.add(vote{stake: s, err: down})
		case s.in:
			open[s] = true
			h.part(s)
		default:
			h.release(s)
			s.node().keeper.unwatch(s)
		}
	}
	h.mu.Unlock()
	t.collect(ctx, h, open, h.ballot.voting)
	return t
}

// part has s leave, and tells leave of that if it waits.
func (h *hold) part(s *stake) {
	h.release(s)
	if h.ballot == nil || h.ballot.voting == nil {
		s.node().keeper.leave(s)
		return
	}
	s.sent.Store(int64(always)) // that was its acquire
	s.node().workers.run(func() {
		r, err := s.leave(context.Background())
		h.ballot.voting <- s.gone(r, err)
	})
}

// parted tells leave that s has left, or need not.
func (h *hold) parted(s *stake, r reply, err error) {
	h.release(s)
	if h.ballot != nil && h.ballot.voting != nil {
		h.ballot.voting <- s.gone(r, err)
	}
}

// gone is the vote of a node that was asked to release s. A node with foreign data has
// released what it could, and cannot confirm the rest.
func (s *stake) gone(r reply, err error) vote {
	if err == nil && r.status == foreign {
		err = notLock(r)
	}
	return vote{s, r.status == left && s.granted, r, err}
}

// A vote is what one node answers to a leave or a downgrade.
type vote struct {
	stake *stake
	yes   bool
	reply reply
	err   error
}

// A tally is what all of them amount to.
type tally struct {
	yes  int // so many nodes held the lock, and have done what they were asked for
	errs []vote
}

func (t *tally) add(v vote) {
	switch {
	case v.err != nil:
		t.errs = append(t.errs, v)
	case v.yes:
		t.yes++
	}
}

// collect counts the votes of those that are open. It waits for each of them no longer
// than the node time-out, which begins when its call has been sent.
func (t *tally) collect(ctx context.Context, h *hold, open map[*stake]bool, votes <-chan vote) {
	asked := now()
	timeout := time.NewTimer(h.m.nodeTimeout)
	defer timeout.Stop()
	for len(open) > 0 {
		select {
		case v := <-votes:
			if !open[v.stake] {
				continue // it came too late
			}
			delete(open, v.stake)
			h.hear(v.stake, v.reply, now(), v.err)
			t.add(v)
		case <-ctx.Done():
			for s := range open {
				t.add(vote{stake: s, err: errInterrupted})
			}
			return
		case <-timeout.C:
			next := never
			for s := range open {
				sent := instant(s.sent.Load())
				overdue := s.node().health.overdue(asked, sent, h.m.nodeTimeout)
				if overdue > now() {
					next = min(next, overdue)
					continue
				}
				delete(open, s)
				h.hearNothing(s, max(asked, sent), h.m.noAnswer())
				t.add(vote{stake: s, err: h.m.noAnswer()})
			}
			timeout.Reset(time.Duration(next - now()))
		}
	}
}

// err is the error of an unlock or a downgrade that has not been confirmed.
func (t *tally) err(ctx context.Context, h *hold, call, done string) error {
	format, args := "redismutex: %s %q: %d of %d nodes %s", []any{call, h.Key(), t.yes, len(h.stakes), done}
	failed, barred := 0, 0
	for _, v := range t.errs {
		if errors.Is(v.err, ErrNotLock) {
			barred++
		} else {
			failed++
		}
	}
	mostBar := quorum.Decide(len(h.stakes), 0, barred) == quorum.No
	for _, v := range t.errs {
		switch {
		case v.err == errInterrupted:
			return ended(ctx, h.Key())
		case h.ballot == nil:
			return doing(call, h.Key(), v.err)
		}
		why := v.err
		if bars := errors.Is(why, ErrNotLock); bars && failed > 0 && !mostBar || !bars && mostBar {
			why = caused{errNode, why, 0} // the error matches one kind
		}
		format += "; %s: %w"
		args = append(args, v.stake.named(), why)
	}
	err := fmt.Errorf(format, args...)
	if len(t.errs) == 0 {
		return redisError(err) // it answers, but makes no sense
	}
	return err
}
