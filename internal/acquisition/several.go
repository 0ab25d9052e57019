package acquisition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/script"
	"golang.org/x/sync/semaphore"
)

// severalNodes is an acquisition over several nodes, decided by a majority. Each is waited for no longer than the
// node time-out; one that is down is not waited for at all.
type severalNodes struct {
	*Acquisition

	parts  []*part // one for each node
	origin Origin
	place  any       // its place in the queue of every node: see score
	floor  uint64    // its token must be no lower; 0 unless it asked a node late, see onAcknowledged
	name   string    // its id, once it is granted
	votes  chan vote // takes the answers to releases; nil: nobody waits for them
	ticket ticket

	grantedAt clock.Instant
	since     []clock.Instant // when each node was acquired, if that was after the grant; Never: it is waited for since then
}

func newSeveralNodes(a *Acquisition, origin Origin) *severalNodes {
	if origin.Rank == 0 {
		origin = Origin{clock.Now(), a.Config.Ranks.Next()}
	}
	n := len(a.Config.Nodes)
	s := &severalNodes{
		Acquisition: a,
		parts:       make([]*part, n),
		place:       script.Score(origin.Rank, a.Config.First(a.write)),
		origin:      origin,
		since:       slices.Repeat([]clock.Instant{clock.Past}, n),
	}
	number := node.NewNumber()
	for i := range s.parts {
		s.parts[i] = new(part).init(a, i, number)
	}
	return s
}

func (s *severalNodes) id() string { return s.name }
func (s *severalNodes) score() any { return s.place }

func (s *severalNodes) acquire(ctx context.Context) error {
	waited, err := s.ticket.take(ctx, s.Config.Nodes[0].Requests, s.majority())
	if err != nil {
		return lockerr.Ended(ctx, s.Keys.Name())
	}
	defer s.ticket.giveBack()
	if err := s.askEach(waited); err != nil {
		return err
	}
	return s.Wait(ctx)
}

// askEach asks every node, side by side. It returns an error if the request is not wanted any more, or if it has waited and
// the requests in front have shown that no majority answers.
func (s *severalNodes) askEach(waited bool) error {
	up, majority := 0, s.majority()
	down := make([]error, len(s.parts))
	for i, p := range s.parts {
		if down[i] = p.Node.Health.Down(); down[i] == nil {
			up++
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state != pending {
		return ErrRetry
	}
	if waited && up < majority && !s.outlives {
		for i, p := range s.parts {
			p.why = down[i]
		}
		s.state = abandoned
		return s.explainRefusal()
	}
	for i, p := range s.parts {
		// Nodes that are down are skipped, unless nothing can be decided without them.
		if down[i] == nil || up < majority {
			p.Node.Go(func() {
				p.acquire(context.Background())
				s.ticket.answered()
			})
			continue
		}
		p.why = down[i]
		s.ping(p)
		if !s.try {
			p.acquireLater()
		}
	}
	return nil
}

// A ticket lets a request over several nodes be made. There are as many as the first node may have calls under way. A ticket
// is given back when a majority of the nodes has answered, or the request has ended.
type ticket struct {
	requests *semaphore.Weighted
	missing  atomic.Int32 // how many more answers give it back; 0 or less: it has been given back
}

// take waits for the ticket, which that many answers give back, and reports whether others were in front.
func (t *ticket) take(ctx context.Context, requests *semaphore.Weighted, answers int) (waited bool, err error) {
	if waited = !requests.TryAcquire(1); waited {
		if err := requests.Acquire(ctx, 1); err != nil {
			return true, err
		}
	}
	t.requests = requests
	t.missing.Store(int32(answers))
	return waited, nil
}

func (t *ticket) answered() {
	if t.missing.Add(-1) == 0 {
		t.requests.Release(1)
	}
}

// giveBack gives the ticket back, unless the answers have done so.
func (t *ticket) giveBack() {
	if t.missing.Swap(0) > 0 {
		t.requests.Release(1)
	}
}

func (s *severalNodes) decide() {
	// With little trust left a grant does not count yet: it is renewed first.
	soon := s.soon()
	c := s.count(soon)
	n, majority := len(s.parts), s.majority()
	if !s.queued && !s.try && c.in >= majority {
		s.queued = true
		if s.Config.Trace != nil {
			s.wake() // to tell that it waits
		}
	}
	switch {
	case c.granted >= majority:
		s.agreeOnToken(soon, c.highest)
	case n-c.failed < majority && !s.queued && !s.outlives && s.isClear(c), n-c.final < majority:
		s.abandon()
	case !c.open && c.granted > 0:
		// Others may have the other nodes, and wait for these.
		for _, p := range s.parts {
			if p.in && p.granted && p.checked == 0 {
				p.checked = 1
				p.Node.Renewer.RenewOften(&p.Lease)
			}
		}
	}
}

// A count is how the nodes stand towards a request.
type count struct {
	granted int    // how many have granted it, with trust to spare
	highest uint64 // the highest fencing token of these
	in      int    // how many have granted it or put it into the queue
	replied int    // how many of the rest have refused a try, and of in
	failed  int    // how many have refused or failed
	final   int    // how many of these will not grant it later either
	open    bool   // some have not answered
}

// count counts the answers. A grant that is not trusted for longer than until soon does not count yet: it is renewed first.
func (s *severalNodes) count(soon clock.Instant) (c count) {
	for _, p := range s.parts {
		if p.hasReplied() {
			c.replied++
		}
		switch {
		case p.in && p.granted && p.Until() < soon:
			c.in++
			p.RenewNow()
		case p.in:
			c.in++
			if p.granted {
				c.granted++
				c.highest = max(c.highest, p.token)
			}
		case p.why == nil, isRetried(p.why) && !s.try:
			c.open = true
		default:
			c.failed++
			if isFinal(p.why) {
				c.final++
			}
		}
	}
	return c
}

// isClear reports whether it is clear why a request is refused: a majority has replied to a try, or no other node may
// still answer.
func (s *severalNodes) isClear(c count) bool {
	return !s.try || !c.open || c.replied >= s.majority()
}

// agreeOnToken grants the lock if a majority of the nodes that granted it have the same fencing token, no lower than the
// floor. Else it has those with a lower one than the highest raise it: they do so only while the lock holds them, or the
// proof would fail.
//
// The proof that a token is greater than every one before it: two majorities share a node that granted both locks. That
// node granted the later lock after the earlier one had ended. By then the node's token was no lower than the earlier
// lock's, so it gave the later lock a greater one; and the later lock's token is no lower than what any node of its
// majority gave it. If that node has lost its data in between, see onAcknowledged.
func (s *severalNodes) agreeOnToken(soon clock.Instant, highest uint64) {
	for _, p := range s.parts {
		same := 0
		for _, other := range s.parts {
			if other.in && other.granted && other.Until() >= soon && other.token == p.token {
				same++
			}
		}
		if same >= s.majority() && p.token >= s.floor {
			s.grantedAt, s.name = clock.Now(), s.parts[0].ID()
			s.grant(p.token)
			return
		}
	}
	wanted := max(highest, s.floor)
	for _, p := range s.parts {
		if p.in && p.granted && p.token < wanted {
			p.Node.Renewer.Raise(&p.Lease, wanted)
		}
	}
}

// heldSince does not count a node that was acquired again in between. If several nodes lose their data at once, and the
// client learns of one after the other, each may have been acquired again by then; but another client may have held them
// all meanwhile.
func (s *severalNodes) heldSince(from clock.Instant) bool {
	n := 0
	for i, p := range s.parts {
		if p.counts() && s.since[i] <= max(from, s.grantedAt) {
			n++
		}
	}
	return n >= s.majority()
}

func (s *severalNodes) onGranted(p *part, sent clock.Instant) {
	since := &s.since[p.index()]
	again := *since == clock.Never
	if s.isAfterGrant(sent) {
		*since = clock.Now()
	}
	if again {
		s.renewAll()
	}
}

// onAcknowledged allows for nodes that have lost their data.
//
// A node that restarts empty does not know the tokens before. It has been away for the longest TTL, so a request that was
// made half a TTL at most before it asked the node is younger than the locks that the node has forgotten, and its rank is
// greater than their tokens: these come from ranks too. An older request has waited, and may rank before them: its token
// is at least what its rank would be if it were made now.
//
// A lock that is acquired again on a node is renewed on all nodes at once, as soon as that one has granted it. If the nodes
// then fail one after the other, each is known to have held the lock when the last one was acquired again. A node that grants
// the lock for the first time, but later than the others, costs no renewals: every hand-over would need them.
func (s *severalNodes) onAcknowledged(p *part, sent clock.Instant) {
	if waited := time.Duration(sent - s.origin.Asked); p.Write && waited > s.Config.TTL/2 {
		s.floor = max(s.floor, uint64(s.origin.Rank+waited.Microseconds()))
	}
	switch {
	case !s.isAfterGrant(sent):
	case p.granted:
		s.renewAll()
	case p.failed > 0:
		s.since[p.index()] = clock.Never
	}
}

func (s *severalNodes) renewAll() {
	for _, p := range s.parts {
		if p.counts() {
			p.RenewNow()
		}
	}
}

// isAfterGrant reports whether a call that was sent at that instant was sent after the lock had become a held one.
func (s *severalNodes) isAfterGrant(sent clock.Instant) bool {
	return s.state == held && sent > s.grantedAt
}

// Health.

func (s *severalNodes) onTimeout(p *part) {
	var n news
	wentDown, sent, asked := false, clock.Instant(p.sent.Load()), p.Until().Add(-s.Config.Timeout)
	if sent != clock.Past {
		asked = sent
	}
	s.mu.Lock()
	switch {
	case p.asking:
		if overdue := p.Node.Health.Overdue(asked, sent, s.Config.Timeout); overdue > clock.Now() {
			p.Node.Renewer.SetTimeout(&p.Lease, overdue)
			break
		}
		p.asking, p.Tombstone, p.MayExist = false, true, true
		// Before p fails: what takes its place must not ask the node again and be waited for.
		wentDown = s.markSilent(p, asked)
		if p.active() {
			n = p.fail(s.noAnswer())
		} else {
			s.onLate(p, script.Reply{}, s.noAnswer())
		}
	case !p.active() || p.in || s.try:
	case p.Node.Health.Down() == nil:
		p.start()
	default:
		s.ping(p)
		p.acquireLater()
	}
	s.mu.Unlock()
	if wentDown {
		s.tellDown(p, s.noAnswer())
	}
	n.tell()
}

// onAnswer takes what an answer shows of the health of the node.
func (s *severalNodes) onAnswer(p *part, sent clock.Instant, rank int64, err error) {
	c := s.Config
	c.Ranks.Saw(rank)
	switch {
	case err == nil:
		if time.Duration(clock.Now()-sent) < c.Timeout {
			if p.Node.Health.MarkUp() && c.Trace != nil {
				c.Trace.NodeUp(p.nodeName())
			}
		}
	case errors.Is(err, lockerr.ErrNotLock), lockerr.Has(err, lockerr.Full), lockerr.Has(err, lockerr.NoConnection),
		err == node.ErrInterrupted:
	case lockerr.Has(err, lockerr.Deadline) && p.Node.Health.HeardSince(sent): // the call may have waited in the client
	case p.Node.Health.MarkDown(err):
		s.tellDown(p, err)
	}
}

// markSilent notes that a call that was sent at that instant was not answered within the node time-out, and reports whether
// the node went down with that: it has answered no other call since.
func (s *severalNodes) markSilent(p *part, sent clock.Instant) bool {
	return !p.Node.Health.HeardSince(sent) && p.Node.Health.MarkDown(s.noAnswer())
}

// tellDown tells the log and the trace that the node of p went down. It is called without the mutex.
func (s *severalNodes) tellDown(p *part, why error) {
	s.Config.Log.Error(s.Keys.Name(), "a node is down; it is tried again in the background", p.onNode(why))
	if s.Config.Trace != nil {
		s.Config.Trace.NodeDown(p.nodeName(), why)
	}
}

func (s *severalNodes) down(p *part) error { return p.Node.Health.Down() }

// ping asks a node that is down, when that is due, whether it is up: it renews an id there that does not hold.
func (s *severalNodes) ping(p *part) {
	if !p.Node.Health.Retry() {
		return
	}
	c := p.Participant().RenewWriter()
	p.Node.Go(func() {
		sent := clock.Now()
		_, err := p.Node.Run(context.Background(), s.Config.TTL, c)
		s.onAnswer(p, sent, 0, err)
	})
}

// noAnswer is the error of a node that has not answered within the node time-out.
func (s *severalNodes) noAnswer() error {
	return lockerr.Redis(fmt.Errorf("no answer within %v", s.Config.Timeout))
}

// A score is the place of a part in the queue of its node, as an argument of a command. go-redis marshals it when it
// writes the command to a connection: with that the node time-out starts, not while a connection is set up. A command that
// go-redis sends again starts it again.
type score part

// MarshalBinary implements [encoding.BinaryMarshaler].
func (s *score) MarshalBinary() ([]byte, error) {
	s.sent.Store(int64(clock.Now()))
	return []byte(s.String()), nil
}

func (s *score) String() string { return s.acq.nodes().score().(string) }

// Release.

func (s *severalNodes) release(ctx context.Context, next *Acquisition) (t tally) {
	s.mu.Lock()
	up := 0
	for _, p := range s.parts {
		if p.in && p.Node.Health.Down() == nil {
			up++
		}
	}
	tooFew := up < s.majority() // to confirm the release, so that nodes that are down are asked, too: they may be back
	open := map[*part]bool{}
	s.votes = make(chan vote, 2*len(s.parts)) // also for parts that were replaced while they were asking
	for _, p := range s.parts {
		down := p.Node.Health.Down()
		switch {
		case p.in && (down == nil || tooFew):
			open[p] = true
			s.releaseAside(p, next.partOn(p.Node))
			continue
		case p.in:
			t.add(vote{part: p, err: down})
			p.discard()
		case p.asking && down == nil:
			open[p] = true
		default:
			p.discard()
		}
		next.partOn(p.Node).start()
	}
	s.mu.Unlock()
	s.collect(ctx, &t, open, s.votes)
	return t
}

// releaseAside releases p on another goroutine, behind the acquire of front unless that is nil, and votes if votes are
// counted. The mutex is held.
func (s *severalNodes) releaseAside(p, front *part) {
	p.leaveMailbox()
	votes := s.votes
	if votes == nil {
		p.Node.Renewer.Release(&p.Lease)
		return
	}
	p.sent.Store(int64(clock.Past)) // the release has not been written yet
	p.Node.Go(func() { votes <- p.release(context.Background(), front) })
}

func (s *severalNodes) onLate(p *part, r script.Reply, err error) {
	switch {
	case p.Tombstone && err != nil: // nobody waits for a node that does not answer
		p.Node.Renewer.Release(&p.Lease)
	case p.Tombstone, r.Status == script.Granted, r.Status == script.Waiting:
		s.releaseAside(p, nil)
		return
	default:
		err = nil
	}
	p.leaveMailbox()
	if s.votes != nil {
		s.votes <- p.releaseVote(r, err)
	}
}

// collect waits for each node no longer than the node time-out, counted from when its call was sent, or twice as long
// while the node answers other calls.
func (s *severalNodes) collect(ctx context.Context, t *tally, open map[*part]bool, votes <-chan vote) {
	asked := clock.Now()
	timeout := time.NewTimer(s.Config.Timeout)
	defer timeout.Stop()
	for len(open) > 0 {
		select {
		case v := <-votes:
			if !open[v.part] {
				continue // it came too late
			}
			delete(open, v.part)
			s.onAnswer(v.part, clock.Instant(v.part.sent.Load()), v.rank, v.err)
			t.add(v)
		case <-ctx.Done():
			for p := range open {
				t.add(vote{part: p, err: node.ErrInterrupted})
			}
			return
		case <-timeout.C:
			next := clock.Never
			for p := range open {
				sent := clock.Instant(p.sent.Load())
				if overdue := p.Node.Health.Overdue(asked, sent, s.Config.Timeout); overdue > clock.Now() {
					next = min(next, overdue)
					continue
				}
				delete(open, p)
				if s.markSilent(p, max(asked, sent)) {
					s.tellDown(p, s.noAnswer())
				}
				t.add(vote{part: p, err: s.noAnswer()})
			}
			timeout.Reset(time.Duration(next - clock.Now()))
		}
	}
}

// Errors.

func (s *severalNodes) explainRefusal() error {
	return fmt.Errorf("redismutex: lock %q: %w", s.Keys.Name(), s.explainNodes("have granted it"))
}

func (s *severalNodes) explainLoss(error) error {
	if s.hasMajority() {
		return s.explainNodes("hold it, not all of them without a gap")
	}
	return s.explainNodes("hold it")
}

func (s *severalNodes) explainTally(ctx context.Context, t tally, call, done string) error {
	format, args := "redismutex: %s %q: %d of %d nodes %s", []any{call, s.Keys.Name(), t.yes, len(s.parts), done}
	failed, foreign := 0, 0
	for _, v := range t.errs {
		if errors.Is(v.err, lockerr.ErrNotLock) {
			foreign++
		} else {
			failed++
		}
	}
	mostForeign := len(s.parts)-foreign < s.majority()
	for _, v := range t.errs {
		if v.err == node.ErrInterrupted {
			return lockerr.Interrupted(ctx, s.Keys.Name())
		}
		why := v.err
		if is := errors.Is(why, lockerr.ErrNotLock); is && failed > 0 && !mostForeign || !is && mostForeign {
			why = lockerr.Demote(why) // the error matches one kind
		}
		format += "; %s: %w"
		args = append(args, v.part.nodeName(), why)
	}
	err := fmt.Errorf(format, args...)
	if len(t.errs) == 0 {
		return lockerr.Redis(err) // the nodes answer, but make no sense
	}
	return err
}

// explainNodes names the nodes that do not count, and why. The mutex is held.
func (s *severalNodes) explainNodes(what string) error {
	n, replied, foreign := 0, 0, 0
	for _, p := range s.parts {
		if p.counts() {
			n++
		}
		if p.hasReplied() {
			replied++
		}
		if errors.Is(p.why, lockerr.ErrNotLock) {
			foreign++
		}
	}
	majority := s.majority()
	mostForeign := len(s.parts)-foreign < majority
	format, args := "%s", []any{fmt.Sprintf("%d of %d nodes %s, %d needed", n, len(s.parts), what, majority)}
	for _, p := range s.parts {
		if p.counts() {
			continue
		}
		why := p.why
		if p.in && !p.granted {
			why = errors.New("it is held by others, and the request waits")
		} else if why == nil {
			why = errors.New("it has not answered yet")
		}
		if mostForeign || replied >= majority {
			why = lockerr.DemoteRedis(why)
		}
		if is := errors.Is(why, lockerr.ErrNotLock); is && !mostForeign || isRefusal(why) && mostForeign {
			why = lockerr.Demote(why)
		}
		format += "; %s: %w"
		args = append(args, p.nodeName(), why)
	}
	return fmt.Errorf(format, args...)
}
