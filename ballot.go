package redismutex

// This file answers: when has a request become a lock, and when is it none any
// more? It depends on how many nodes grant it, and keep it. A single Redis is a
// quorum of one.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/redismutex/redismutex/internal/quorum"
)

// A ballot is what a lock over several nodes has besides.
type ballot struct {
	score  any           // where it stands in the queue of every node, as scripts take it
	id     any           // the id of the lock
	raise  atomic.Uint64 // the token that nodes with a lower one are to raise it to
	voting chan vote     // where it is told who has left; nil: nobody waits for that

	unanswered atomic.Int32 // how many nodes are to answer before the next request is made; less than 1: it may be

	at    instant   // when it became a lock
	since []instant // of each node that was had later: from when on it is held
}

// wait asks for h, and waits until it is held and l is its first lock, or until it will not be held, or ctx ends.
func (h *hold) wait(ctx context.Context, l *Lock) error {
	if err := h.ask(ctx); err != nil {
		return err
	}
	return h.await(ctx, l)
}

// ask has every node entered: one by the caller itself, since there is nobody
// to go on without, several side by side. It returns an error if ctx ends before it is the
// caller's turn, or if by then it is known that no majority answers.
func (h *hold) ask(ctx context.Context) error {
	if h.ballot == nil {
		h.enter(ctx, h.stakes[0])
		return nil
	}
	up, majority := 0, quorum.Majority(len(h.stakes))
	requests := h.m.nodes[0].requests
	waited := !requests.TryAcquire(1)
	if waited && requests.Acquire(ctx, 1) != nil {
		return ended(ctx, h.Key())
	}
	down := make([]error, len(h.stakes))
	for i, s := range h.stakes {
		if down[i] = s.node().health.down(); down[i] == nil {
			up++
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if waited && up < majority {
		// Those who went before have found it out.
		requests.Release(1)
		for i, s := range h.stakes {
			s.why = down[i]
		}
		h.phase = given
		return fmt.Errorf("redismutex: lock %q: %w", h.Key(), h.nodes("grant it", h.counts))
	}
	h.ballot.unanswered.Store(int32(majority))
	for i, s := range h.stakes {
		// A node that is down is left out, unless nothing can be decided
		// without it.
		if down[i] == nil || up < majority {
			s.node().workers.run(func() {
				h.enter(context.Background(), s)
				if h.ballot.unanswered.Add(-1) == 0 {
					requests.Release(1)
				}
			})
			continue
		}
		s.why = down[i]
		s.probe()
		if !h.try {
			s.node().keeper.watch(s, now().add(retryAfter))
		}
	}
	return nil
}

// await waits until h is held, and makes l its first lock; or until h will not be
// held, or ctx ends.
func (h *hold) await(ctx context.Context, l *Lock) error {
	if h.ballot != nil {
		defer h.asked()
	}
	for {
		h.mu.Lock()
		phase := h.phase
		if phase == wanted && h.signal == nil {
			h.signal = make(chan struct{}, 1)
		}
		signal := h.signal
		h.mu.Unlock()
		switch phase {
		case wanted:
		case held:
			return h.open(l, nil, ctx)
		case given:
			return h.refused(ctx)
		default: // moot; or lost before anybody had it
			return errAgain
		}
		select {
		case <-signal:
		case <-ctx.Done():
			return h.giveUp(ctx)
		}
	}
}

// asked lets the next request be made, if h has not done so yet.
func (h *hold) asked() {
	if h.ballot.unanswered.Swap(-int32(len(h.stakes))) > 0 {
		h.m.nodes[0].requests.Release(1)
	}
}

// errAgain ends a wait that has come to nothing, but need not have: another one may.
var errAgain = errors.New("ask again")

// giveUp ends a wait whose context has ended.
func (h *hold) giveUp(ctx context.Context) error {
	h.mu.Lock()
	h.phase = given // also if it was granted a moment ago
	h.partAll()
	h.mu.Unlock()
	return ended(ctx, h.Key())
}

// refused is the error for a request that came to nothing. What some nodes have
// granted goes back first.
func (h *hold) refused(ctx context.Context) error {
	if ctx.Err() != nil {
		return h.giveUp(ctx)
	}
	if h.ballot != nil {
		h.mu.Lock()
		err := h.nodes("grant it", h.counts)
		h.mu.Unlock()
		h.leave(ctx)
		return fmt.Errorf("redismutex: lock %q: %w", h.Key(), err)
	}
	switch why := h.stakes[0].why; {
	case why == ErrLock:
		return fmt.Errorf("%w: %q", ErrLock, h.Key())
	default:
		return doing("lock", h.Key(), why)
	}
}

// enter has s enter its node, and once more under a new id where a try was
// refused and the lock is to be waited for.
func (h *hold) enter(ctx context.Context, s *stake) {
	for s != nil {
		// While the mailbox hears, somebody waits, or did a moment ago: then it
		// saves a call to join the queue at once.
		try := h.try || !s.queue && !s.node().box.Hears()
		if !try {
			s.listen(ctx)
		}
		place := s.node().limiter.acquire
		err := s.node().admit(ctx, place, h.ballot != nil)
		if ctx.Err() != nil || !h.begin(s) {
			if err == nil {
				place.free()
			}
			return
		}
		start, r := now(), reply{}
		if err == nil {
			r, err = s.enter(ctx, try, place)
		} else {
			err = unsent{err}
		}
		s = h.entered(s, start, r, err)
	}
}

// isFinal reports whether a node that has failed with err will not grant anything later either.
func isFinal(err error) bool {
	return errors.Is(err, ErrNotLock) || has(err, closedDown)
}

// join makes s known to its mailbox, if it is still of use.
func (h *hold) join(s *stake) (settled <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.wants(s) {
		return closed
	}
	s.joined = true
	return s.node().box.Join(s.id.(string), s)
}

var closed = func() <-chan struct{} { c := make(chan struct{}); close(c); return c }()

// begin says whether s is to enter.
func (h *hold) begin(s *stake) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	s.asking = h.wants(s)
	if s.asking && h.ballot != nil {
		sent := now()
		s.sent.Store(int64(sent))
		s.node().keeper.watch(s, sent.add(h.m.nodeTimeout))
	}
	return s.asking
}

// wants says whether s may still become a part of the lock, or is one.
func (h *hold) wants(s *stake) bool {
	return h.stakes[s.index] == s && (h.phase == wanted || h.phase == held)
}

// entered takes the answer to an enter begun at start. It returns the stake that
// is to enter next.
func (h *hold) entered(s *stake, start instant, r reply, err error) (next *stake) {
	s.node().note(r, h.m.log())
	h.hear(s, r, start, err)
	h.mu.Lock()
	next, news := h.admit(s, start, r, err)
	h.mu.Unlock()
	h.say(news)
	return next
}

// admit is entered, under the mutex.
func (h *hold) admit(s *stake, start instant, r reply, err error) (next *stake, _ news) {
	if !s.asking { // it took too long, and has left meanwhile
		if r.status == granted || r.status == waiting {
			s.node().keeper.leave(s) // a node that restarted forgets its tombstones
		}
		return nil, news{}
	}
	t := now() // to look at the clock is not for nothing: once will do
	s.asking = false
	if h.ballot != nil {
		s.node().keeper.unwatch(s)
	}
	e, never := err.(unsent)
	if never {
		err = e.error
	}
	s.bury = !never && (err != nil && !has(err, full) || time.Duration(t-start) >= s.node().resend)
	switch late := h.m.trusted(start) <= t; {
	case !h.wants(s):
		switch {
		case s.bury && err != nil: // nobody waits for a node that does not answer
			s.node().keeper.leave(s)
			h.parted(s, r, err)
		case s.bury || r.status == granted || r.status == waiting:
			h.part(s)
		default:
			h.parted(s, r, nil)
		}
	case err != nil:
		if errors.Is(err, ErrNotLock) {
			s.bury = false
		}
		return nil, h.fails(s, err)
	case r.status == foreign:
		return nil, h.fails(s, notLock(r))
	case r.status == busy && h.try:
		return nil, h.fails(s, ErrLock)
	case r.status == busy:
		if s.bury {
			s.node().keeper.leave(s)
		}
		next = h.anew(s)
		next.queue = true
	case r.status != granted && r.status != waiting:
		return nil, h.fails(s, void{redisError(fmt.Errorf("unexpected status %d", r.status))})
	case r.status == granted && s.write && r.value == 0:
		s.bury = true
		return nil, h.fails(s, void{redisError(errors.New("a grant without a fencing token"))})
	case late:
		s.bury = true
		return nil, h.fails(s, void{redisError(fmt.Errorf("the reply took longer than the TTL of %v", h.m.ttl))})
	default:
		s.in, s.why, s.failed = true, nil, 0
		if r.status == granted {
			h.grant(s, start, uint64(r.value))
			if h.phase == held && start > h.ballot.at {
				h.look()
			}
		}
		s.trust(start)
		h.decide(t)
		role := standing
		if s.granted && h.phase == held {
			role = holding
		}
		s.node().keeper.add(s, role, start, r)
	}
	return next, news{}
}

// A void ends an id, not the wait: the lock enters anew under another one.
type void struct{ error }

func (v void) Unwrap() error { return v.error }

func isVoid(err error) bool {
	_, is := err.(void)
	return is
}

// told takes a message that s has been granted. One that overtakes the reply to
// the enter counts when that is there.
func (h *hold) told(s *stake, token uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.wants(s) && !s.granted {
		h.grant(s, now(), token)
		if s.in {
			h.decide(now())
		}
	}
}

// The keeper tells.

// kept takes a reply to a keep begun at start.
func (h *hold) kept(s *stake, start instant, r reply) {
	h.hear(s, r, start, nil)
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.wants(s) || !s.in {
		return
	}
	s.why = nil
	if r.status == granted { // a "waiting" that comes after the grant is old
		h.grant(s, now(), max(s.token, uint64(r.value))) // the short form says no token
		if r.preceded && h.phase == wanted && !h.majority() {
			h.yield(s)
		}
	}
	h.decide(now())
}

// unsure takes the error of a keep, which is made again.
func (h *hold) unsure(s *stake, start instant, err error) {
	h.hear(s, reply{}, start, err)
	h.mu.Lock()
	var say news
	switch {
	case !s.in:
	case h.phase == wanted && isFinal(err):
		say = h.fails(s, err)
	case h.phase == wanted && s.why == nil:
		say = news{what: "a waiter goes on", err: doing("renew", h.Key(), err)}
		fallthrough
	default:
		s.why = err
	}
	h.mu.Unlock()
	h.say(say)
}

// over takes it that the keeper has let go of s: its node does not know it, or
// the trust in it has ended, or the time that it was to be watched for.
func (h *hold) over(s *stake, why error) {
	h.mu.Lock()
	var say news
	var unanswered error
	switch {
	case s.asking:
		sent := instant(s.sent.Load())
		if overdue := s.node().health.overdue(sent, sent, h.m.nodeTimeout); overdue > now() {
			s.node().keeper.watch(s, overdue)
			break
		}
		s.asking, s.bury = false, true
		unanswered = h.m.noAnswer()
		if h.wants(s) {
			say = h.fails(s, unanswered)
		} else {
			s.node().keeper.leave(s)
			h.parted(s, reply{}, unanswered)
		}
	case !h.wants(s):
	case s.in:
		s.bury = s.bury || h.phase == wanted
		say = h.fails(s, why)
	case h.ballot == nil || s.node().health.down() == nil:
		go h.enter(context.Background(), s)
	default:
		s.probe()
		s.node().keeper.watch(s, now().add(retryAfter))
	}
	h.mu.Unlock()
	if unanswered != nil {
		h.hearNothing(s, instant(s.sent.Load()), unanswered)
	}
	h.say(say)
}

// expire ends a lock whose time is over before a timer has said so.
func (h *hold) expire() {
	h.mu.Lock()
	var say news
	if h.phase == held {
		say = h.lose(errExpired)
	}
	h.mu.Unlock()
	h.say(say)
}

// What comes of it, under the mutex.

// grant notes that a node has granted s, in answer to a call begun at start.
func (h *hold) grant(s *stake, start instant, token uint64) {
	if !s.granted && h.phase == held && start > h.ballot.at {
		h.ballot.since[s.index] = now()
	}
	s.granted, s.token = true, token
}

// look has all nodes asked at once whether h holds them: should they fail one
// after the other, it is known of each that it was there when the last came back.
func (h *hold) look() {
	for _, s := range h.stakes {
		if h.counts(s) {
			s.Look()
		}
	}
}

// fails notes that a node does not hold s, or not any more, and why. Unless that
// decides it against the lock, there will be another attempt on that node.
func (h *hold) fails(s *stake, why error) news {
	// From when on the node may have been in other hands.
	from := s.until()
	if why == errGone || errors.Is(why, ErrNotLock) {
		from = from.add(h.m.drift - h.m.ttl) // since it was last kept
	}
	if s.in || s.bury {
		s.node().keeper.leave(s)
	}
	why = s.because(why)
	wasIn, counted, failed := s.in, h.counts(s), s.failed
	s.in, s.granted, s.why = false, false, why
	if h.phase == held && counted && !h.heldSince(from) {
		return h.lose(why)
	}
	if h.try && h.phase == wanted {
		if wasIn { // a grant that was kept first, and is lost: it is Redis that failed
			s.why = redisError(why)
		}
		h.release(s)
		h.decide(now())
		return news{}
	}
	t := h.anew(s)
	t.failed = min(failed+1, 10)
	t.why = why
	if wasIn && !isVoid(why) && !isFinal(why) {
		t.why = void{why}
	}
	h.decide(now())
	if !h.wants(t) {
		return news{}
	}
	h.enterSoon(t)
	switch {
	case failed > 0 || h.ballot != nil && !wasIn: // it has been said
		return news{}
	case h.ballot != nil:
		why = fmt.Errorf("%s: %w", s.named(), why)
	}
	if h.phase == held {
		return news{what: "a lock is entered anew", err: doing("lock", h.Key(), why)}
	}
	return news{what: "a waiter enters anew", err: doing("lock", h.Key(), why)}
}

// enterSoon has s enter in the background: later if it has failed before, or its
// node is down.
func (h *hold) enterSoon(s *stake) {
	const minBackoff, maxBackoff = 10 * time.Millisecond, time.Second
	if h.ballot != nil && s.node().health.down() != nil {
		s.node().keeper.watch(s, now().add(retryAfter))
	} else if s.failed > 1 {
		s.node().keeper.watch(s, now().add(min(minBackoff<<(s.failed-1), maxBackoff)))
	} else {
		go h.enter(context.Background(), s)
	}
}

// yield leaves a node that somebody is to have who comes before h, and enters it
// again, with the place in the queue that h has had: so those who have a node
// each, and wait for the others', get on. The id is a new one, since a message
// may be under way to the old one.
func (h *hold) yield(s *stake) {
	s.node().keeper.leave(s)
	t := h.anew(s)
	t.queue = true
	go h.enter(context.Background(), t)
}

// anew puts another stake in the place of s.
func (h *hold) anew(s *stake) *stake {
	h.release(s)
	t := new(stake).init(h, int(s.index))
	t.queue = s.queue
	h.stakes[s.index] = t
	return t
}

// release has no messages for s taken any more.
func (h *hold) release(s *stake) {
	if s.joined {
		s.joined = false
		s.node().box.Leave(s.id.(string))
	}
}

// counts says whether the node of s is one of those that h holds.
func (h *hold) counts(s *stake) bool {
	return s.in && s.granted && (s.token >= h.token || !h.write)
}

func (h *hold) majority() bool {
	n := 0
	for _, s := range h.stakes {
		if h.counts(s) {
			n++
		}
	}
	return n >= quorum.Majority(len(h.stakes))
}

// heldSince says whether a majority has been held since then, without a gap. If
// several nodes lose their data at once, and it is learnt of one after the
// other, each may have been entered anew by then; but somebody else may have had
// them all in between.
func (h *hold) heldSince(from instant) bool {
	n := 0
	for i, s := range h.stakes {
		if h.counts(s) && (h.ballot == nil || h.ballot.since[i] <= max(from, h.ballot.at)) {
			n++
		}
	}
	return n >= quorum.Majority(len(h.stakes))
}

// decide looks at how things stand after something has changed, at t.
func (h *hold) decide(t instant) {
	switch h.phase {
	case held:
		h.settle()
		return
	case wanted:
	default:
		return
	}
	// A grant runs with the lease that the waiter had when it came, so with
	// little of that left it is kept first.
	soon := t.add(h.m.ttl / 4)
	in, failed, final, answered, open, sure, highest := 0, 0, 0, 0, false, 0, uint64(0)
	for _, s := range h.stakes {
		if s.answered() {
			answered++
		}
		switch {
		case s.in && s.granted && s.until() < soon:
			in++
			s.Look()
		case s.in:
			in++
			if s.granted {
				sure++
				highest = max(highest, s.token)
			}
		case s.why == nil, isVoid(s.why) && !h.try:
			open = true
		default:
			failed++
			if isFinal(s.why) {
				final++
			}
		}
	}
	n := len(h.stakes)
	h.stood = h.stood || !h.try && quorum.Decide(n, in, failed) == quorum.Yes
	switch {
	case quorum.Decide(n, sure, 0) == quorum.Yes:
		h.agree(soon, highest)
	case quorum.Decide(n, in, failed) == quorum.No && !h.stood && h.clear(answered, open),
		quorum.Decide(n, 0, final) == quorum.No:
		h.phase = given
		h.wake()
	case !open && sure > 0:
		// Others may have the other nodes, and wait for these.
		for _, s := range h.stakes {
			if s.in && s.granted && !s.checked {
				s.checked = true
				s.node().keeper.check(s)
			}
		}
	}
}

// clear says whether it is clear why a request is refused: a majority has answered
// a try, or nobody is left who might.
func (h *hold) clear(answered int, open bool) bool {
	return !h.try || !open || answered >= quorum.Majority(len(h.stakes))
}

// agree makes h a lock if a majority of the nodes that it surely holds is of one
// mind about the fencing token. Else it has those with a lower one than the
// highest raise it: they do so only while h holds them, or the proof would fail.
//
// That a token is greater than any before is proved thus: two majorities share a
// node that both held. There the later one was granted after the end of the
// earlier hold, hence after that had a token no lower than the earlier lock's,
// and so it was given a greater one; and the later lock's is no lower than what
// it was given anywhere in its majority.
func (h *hold) agree(soon instant, highest uint64) {
	for _, s := range h.stakes {
		votes := 0
		for _, t := range h.stakes {
			if t.in && t.granted && t.until() >= soon && t.token == s.token {
				votes++
			}
		}
		if votes >= quorum.Majority(len(h.stakes)) {
			h.hold(s.token)
			return
		}
	}
	for _, s := range h.stakes {
		if s.in && s.granted && s.token < highest {
			s.node().keeper.raise(s, highest)
		}
	}
}

// hold makes h a lock.
func (h *hold) hold(token uint64) {
	h.phase, h.token = held, token
	if h.ballot != nil {
		h.ballot.at = now()
	}
	h.settle()
	h.wake()
}

// settle sees to it that what h holds is kept, and counts until when.
func (h *hold) settle() {
	var buf [8]instant
	ends := buf[:0]
	for _, s := range h.stakes {
		switch {
		case h.counts(s):
			ends = append(ends, s.until())
			h.release(s)
			s.node().keeper.hold(s)
			s.node().inspect(h.m.log())
		case s.in && s.granted:
			s.node().keeper.raise(s, h.token)
		}
	}
	if majority := quorum.Majority(len(h.stakes)); len(ends) >= majority {
		slices.Sort(ends)
		h.until.Store(int64(ends[len(ends)-majority]))
	}
}

// lose ends a lock, but its contexts: that is left to say.
func (h *hold) lose(why error) news {
	if s := h.stakes[0]; h.ballot != nil {
		why = h.nodes("hold it", h.counts)
	} else {
		why = s.because(why)
	}
	why = caused{ErrLockLost, fmt.Errorf("%q: %w", h.Key(), why), 0}
	h.phase, h.cause = lost, &why
	// A renewal whose reply was lost may have kept it on the server.
	h.partAll()
	return news{err: why, lost: true}
}

// because adds to why it is over why it could not be kept.
func (s *stake) because(why error) error {
	if s.in && s.why != nil && why == errExpired {
		return fmt.Errorf("%w: %w", why, s.why)
	}
	return why
}

// wake wakes the caller, if it sleeps.
func (h *hold) wake() {
	select {
	case h.signal <- struct{}{}:
	default:
	}
}

// news is what is left to do when the mutex is free again: err is logged, and if
// it has ended a lock, the contexts of that end first.
type news struct {
	what string
	err  error
	lost bool
}

func (h *hold) say(n news) {
	if n.lost {
		h.end()
	}
	if n.err != nil {
		h.m.log().error(n.what, n.err)
	}
}
