package redismutex

// This file answers: what is a lock over several Redis, who comes first on all
// of them, and which of them is not worth waiting for?

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/quorum"
)

// NewRedlock makes a mutex over several Redis that know nothing of each other: a
// lock is held when a majority of the nodes has granted it, so it outlives the
// loss of the others. It is the Redlock algorithm
// (https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/), with
// readers, a queue, renewal and fencing tokens. All that a mutex of [NewMutex]
// promises it promises too, and one node is the same as NewMutex.
//
// The nodes have to be masters independent of each other, an odd number of them,
// usually 3 or 5: 4 survive the loss of no more nodes than 3. All who use the lock
// have to name the same nodes; the order does not matter.
//
// A node that is slow or out of reach is waited for no longer than a time-out (see [WithTimeoutFactor]), which begins
// when the request is sent. A node that has answered nothing for so long is down: it is not waited for at all, is
// tried again in the background, and takes part when it is back.
//
// An error says how many nodes have granted the lock, and of the others why not;
// that of the first attempt is returned at once only if a majority fails.
//
// A node that lost its data, in a restart without persistence, has forgotten who
// held it: keep it away for as long as the longest TTL in use, or a second holder
// may find a majority. Its fencing token is still the greater one.
//
// What is wrong with the arguments, every call that locks says.
func NewRedlock(nodes []redis.Scripter, name string, opt ...MutexOption) *RWMutex {
	m := newMutex(name, opt)
	if len(nodes) == 0 {
		m.err = fmt.Errorf("%w: no nodes", ErrInvalid)
		return m
	}
	m.finish(nodes)
	return m
}

// ranks gives each request over several nodes its rank, so that all of them
// agree who comes first: the time in µs, or more than any rank seen, as in a
// clock of Lamport's ("Time, Clocks, and the Ordering of Events in a Distributed
// System", 1978). So a process whose clock is slow does not go first for ever. No two
// requests of one process have the same.
type ranks struct {
	last  atomic.Int64
	clock func() time.Time
}

// processRanks are those of all the mutexes of this process.
var processRanks = &ranks{clock: time.Now}

func (r *ranks) next() int64 {
	for {
		last := r.last.Load()
		rank := max(r.clock().UnixMicro(), last+1)
		if r.last.CompareAndSwap(last, rank) {
			return rank
		}
	}
}

func (r *ranks) saw(rank int64) {
	for {
		last := r.last.Load()
		if rank <= last || r.last.CompareAndSwap(last, rank) {
			return
		}
	}
}

// probe asks a node that is down in the background, if it is time, whether it is up: it
// renews an id there that does not hold.
func (s *stake) probe() {
	ep, cmd := s.node(), s.keepHoldCmd()
	if !ep.health.retry() {
		return
	}
	ep.workers.run(func() {
		start := now()
		_, err := ep.run(context.Background(), s.hold.m.ttl, refreshScript, cmd)
		s.hold.hear(s, reply{}, start, err)
	})
}

// hear takes what an answer to a call begun at start says of its node.
func (h *hold) hear(s *stake, r reply, start instant, err error) {
	if h.ballot == nil {
		return
	}
	h.m.ranks.saw(r.last)
	switch {
	case err == nil:
		if time.Duration(now()-start) < h.m.nodeTimeout {
			s.node().health.markUp()
		}
	case errors.Is(err, ErrNotLock), has(err, full), has(err, unavailable), err == errInterrupted:
	case s.node().health.markDown(err):
		h.m.log().error("a node fails, and is tried again in the background", fmt.Errorf("redismutex: %s: %w", s.named(), err))
	}
}

// noAnswer is the error of a node that has not answered within the node time-out.
func (m *RWMutex) noAnswer() error {
	return redisError(fmt.Errorf("no answer within %v", m.nodeTimeout))
}

// hearNothing takes it that a call sent at that instant has not been answered within the node time-out. It is the
// node that is down if it has not answered any later call either.
func (h *hold) hearNothing(s *stake, sent instant, err error) {
	if instant(s.node().health.answered.Load()) <= sent {
		h.hear(s, reply{}, now(), err)
	}
}

// errNode takes the place of what a minority of the nodes says, so that the error
// matches what the majority does.
var errNode = errors.New("failed")

// nodes is the error that names the nodes that say does not hold of, and why.
func (h *hold) nodes(what string, say func(*stake) bool) error {
	n, answered, barred := 0, 0, 0
	for _, s := range h.stakes {
		if say(s) {
			n++
		}
		if s.answered() {
			answered++
		}
		if errors.Is(s.why, ErrNotLock) {
			barred++
		}
	}
	foreign := quorum.Decide(len(h.stakes), 0, barred) == quorum.No
	majority := quorum.Majority(len(h.stakes))
	format, args := "%s", []any{fmt.Sprintf("%d of %d nodes %s, %d needed", n, len(h.stakes), what, majority)}
	for _, s := range h.stakes {
		if say(s) {
			continue
		}
		why := s.why
		if s.in && !s.granted {
			why = errors.New("others hold it, and are waited for")
		} else if why == nil {
			why = errors.New("has not answered yet")
		}
		switch e := (caused{}); {
		case errors.As(why, &e) && e.kind == ErrRedis && (foreign || answered >= majority):
			why = caused{errNode, e.cause, 0}
		case errors.Is(why, ErrNotLock) && !foreign, why == ErrLock && foreign:
			why = caused{errNode, why, 0}
		}
		format += "; %s: %w"
		args = append(args, s.named(), why)
	}
	return fmt.Errorf(format, args...)
}

// answered says whether the node lets s in, or refuses it since others hold it.
func (s *stake) answered() bool { return s.in || s.why == ErrLock }
