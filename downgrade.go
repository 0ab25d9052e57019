package redismutex

// This file answers: how does a writer become a reader?

import (
	"context"
	"fmt"

	"github.com/redismutex/redismutex/internal/quorum"
)

// Downgrade makes a lock to write one to read, without another writer in between,
// and readers who wait in front join at once. What was written is still as it was
// when it is read again, while others read it too. The token stays.
//
// A lock that has been downgraded already may be so again: that asks Redis once
// more. From when the first call asks on the lock counts as one to read, whatever
// comes of it, and to lock its key to write within it is refused with
// [ErrUpgrade]. The error says
//
//   - [ErrRedis], or ctx's error: Redis has not confirmed it, and until it has lets
//     no other reader in. It is asked again with each renewal;
//   - [ErrUnlocked], [ErrLockLost]: the lock has ended;
//   - [ErrNotLock]: a key of the lock holds somebody's data, so that it cannot be
//     done, and the lock will be lost;
//   - [ErrInvalid]: it was acquired to read; or a lock nested with it writes, which
//     has to be unlocked first; or ctx is nil. The lock stays as it is.
func (l *Lock) Downgrade(ctx context.Context) error {
	if ctx == nil {
		return fmt.Errorf("%w: nil context", ErrInvalid)
	}
	h := l.hold
	if err := l.usable(); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return ended(ctx, h.Key())
	}
	asked, err := h.toRead(l)
	if err != nil {
		l.finish(err)
		return err
	}
	t, n := h.askToRead(ctx, asked), len(h.stakes)
	h.mu.Lock()
	err = h.usable(l)
	for _, s := range h.stakes {
		if !s.write && h.counts(s) { // entered since, as a reader
			t.yes++
		}
	}
	h.mu.Unlock()
	l.finish(err)
	if err != nil || quorum.Decide(n, t.yes, 0) == quorum.Yes {
		return err
	}
	return t.err(ctx, h, "downgrade", "have made the writer a reader")
}

// toRead makes h one to read, and returns the stakes that hold as writers. In place
// of those that do not hold there come readers.
//
// Each node goes over by itself. One that has not yet lets nobody in, one that has
// no writer: so there is none from the first to the last.
func (h *hold) toRead(l *Lock) (asked []*stake, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.usable(l); err != nil {
		return nil, err
	}
	if !l.write {
		return nil, fmt.Errorf("%w: downgrade %q: it was locked to read", ErrInvalid, h.Key())
	}
	if h.writers() > 1 {
		return nil, fmt.Errorf("%w: downgrade %q: unlock the locks to write first that are nested with it", ErrInvalid, h.Key())
	}
	h.write = false
	for _, s := range h.stakes {
		switch {
		case !s.write: // an earlier call has seen to it
		case s.in && s.granted:
			s.node().keeper.read(s)
			asked = append(asked, s)
		default:
			h.enterToRead(s)
		}
	}
	return asked, nil
}

// enterToRead has a reader enter in place of s, which does not hold.
func (h *hold) enterToRead(s *stake) {
	t := h.anew(s)
	switch {
	case s.asking: // it leaves when that is answered, or has taken too long
	case s.in:
		s.node().keeper.leave(s)
	default:
		s.node().keeper.unwatch(s)
	}
	h.enterSoon(t)
}

// askToRead has stakes that hold to write kept as readers.
func (h *hold) askToRead(ctx context.Context, asked []*stake) (t tally) {
	if h.ballot == nil {
		for _, s := range asked {
			t.add(s.toRead(ctx))
		}
		return t
	}
	open, votes := map[*stake]bool{}, make(chan vote, len(asked))
	for _, s := range asked {
		open[s] = true
		s.sent.Store(int64(always)) // that was its acquire
		s.node().workers.run(func() { votes <- s.toRead(context.Background()) })
	}
	t.collect(ctx, h, open, votes)
	return t
}

func (s *stake) toRead(ctx context.Context) vote {
	ep, c := s.node(), &call{stake: s, script: refreshScript, cmd: s.keepCmd("r", 0)}
	place := ep.limiter.release
	if err := ep.admit(ctx, place, s.hold.ballot != nil); err != nil {
		ep.keeper.look(s, now()) // on with it in the background
		return vote{stake: s, err: err}
	}
	start := now()
	s.sent.Store(int64(start))
	c.reply, c.err = ep.interruptibly(ctx, s.hold.m.ttl, c.script, c.cmd, place)
	if c.err == errInterrupted {
		ep.keeper.look(s, now()) // on with it in the background
	} else {
		ep.keeper.answer(c, start)
	}
	return vote{s, c.reply.status == granted, c.reply, c.err}
}
