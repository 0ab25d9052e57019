package node

import "github.com/redismutex/redismutex/internal/clock"

const (
	// batch is how many calls go in one pipeline at most. Trust, which counts from before a pipeline is sent, is not
	// spent in a long one.
	batch = 500

	// maxSenders is how many pipelines are under way at a time, where the client has as many connections.
	maxSenders = 4
)

// senders are the goroutines that call for what is ready. One whose call hangs no longer counts: another one may have a
// connection that works.
type senders map[*sender]struct{}

// A sender makes one call after the other while anything is ready.
type sender struct{ hangs clock.Instant }

func (n *Node) maxSenders() int { return min(maxSenders, n.pipelines) }

// start returns the senders to start when that many leases are ready: so that n.maxSenders work at most, and there are no more
// in all than pipelines have connections. Another one would wait for its connection with what it has taken.
func (ss *senders) start(n *Node, now clock.Instant, ready int) (more []*sender) {
	for working := ss.working(now); working < n.maxSenders() && len(*ss) < n.pipelines && ready > 0; working++ {
		if *ss == nil {
			*ss = senders{}
		}
		s := &sender{clock.Never}
		(*ss)[s] = struct{}{}
		more = append(more, s)
		ready -= batch
	}
	return more
}

// working is how many of them do not hang.
func (ss senders) working(now clock.Instant) (n int) {
	for s := range ss {
		if s.hangs > now {
			n++
		}
	}
	return n
}

// nextHang is when the next of them will be taken for one that hangs.
func (ss senders) nextHang() clock.Instant {
	next, now := clock.Never, clock.Now()
	for s := range ss {
		if s.hangs > now {
			next = min(next, s.hangs)
		}
	}
	return next
}
