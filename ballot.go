package redismutex

// This file answers: when has a request become a lock, and when is it none any
// more? It depends on how many nodes grant it, and keep it. A single Redis is a
// quorum of one.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redismutex/redismutex/internal/quorum"
)

// A ballot is what a lock over several nodes has besides.
type ballot struct {
	score   any           // where it stands in the queue of every node, as scripts take it
	id      any           // the id of the lock
	raise   atomic.Uint64 // the token that nodes with a lower one are to raise it to
	parting chan parting  // where it is told who has left; nil: nobody waits for that

	at    instant   // when it became a lock
	since []instant // of each node that was had later: from when on it is held
}

// ask has every node entered: one by the caller itself, since there is nobody
// to go on without, several side by side.
func (l *Lock) ask(ctx context.Context) {
	if l.ballot == nil {
		l.enter(ctx, l.stakes[0])
		return
	}
	well := 0
	for _, s := range l.stakes {
		if s.node().illness() == nil {
			well++
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.stakes {
		// A node known to be ill is left out, unless nothing can be decided
		// without it.
		ill := s.node().illness()
		if ill == nil || well < quorum.Majority(len(l.stakes)) {
			s.node().workers.run(func() { l.enter(context.Background(), s) })
			continue
		}
		s.why = ill.why
		s.probe()
		if !l.try {
			s.node().keeper.watch(s, now().add(probation))
		}
	}
}

// await waits until l is a lock, or will not be one, or ctx ends.
func (l *Lock) await(ctx context.Context) (*Lock, error) {
	for {
		l.mu.Lock()
		phase := l.phase
		if phase == wanted && l.signal == nil {
			l.signal = make(chan struct{}, 1)
		}
		signal := l.signal
		l.mu.Unlock()
		switch phase {
		case wanted:
		case given:
			return nil, l.refused(ctx)
		default:
			return l, nil
		}
		select {
		case <-signal:
		case <-ctx.Done():
			return nil, l.giveUp(ctx)
		}
	}
}

// giveUp ends a wait whose context has ended.
func (l *Lock) giveUp(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.phase == held { // a moment ago
		l.cancel(context.Cause(ctx))
	}
	l.phase = given
	l.partAll()
	return ended(ctx, l.Key())
}

// refused is the error for a request that came to nothing. What some nodes have
// granted goes back first.
func (l *Lock) refused(ctx context.Context) error {
	if ctx.Err() != nil {
		return l.giveUp(ctx)
	}
	if l.ballot != nil {
		l.mu.Lock()
		err := l.nodes("grant it", l.counts)
		l.mu.Unlock()
		l.leave(ctx)
		return fmt.Errorf("redismutex: lock %q: %w", l.Key(), err)
	}
	switch why := l.stakes[0].why; {
	case why == ErrLock:
		return fmt.Errorf("%w: %q", ErrLock, l.Key())
	default:
		return doing("lock", l.Key(), why)
	}
}

// enter has s enter its node, and once more under a new id where a try was
// refused and the lock is to be waited for.
func (l *Lock) enter(ctx context.Context, s *stake) {
	for s != nil {
		// While the mailbox hears, somebody waits, or did a moment ago: then it
		// saves a call to join the queue at once.
		try := l.try || !s.queue && !s.node().box.Hears()
		if !try {
			s.listen(ctx)
		}
		if ctx.Err() != nil || !l.begin(s) {
			return
		}
		start := now()
		r, err := s.enter(ctx, try)
		s = l.entered(s, start, r, err)
	}
}

// join makes s known to its mailbox, if it is still of use.
func (l *Lock) join(s *stake) (settled <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.wants(s) {
		return closed
	}
	s.joined = true
	return s.node().box.Join(s.id.(string), s)
}

var closed = func() <-chan struct{} { c := make(chan struct{}); close(c); return c }()

// begin says whether s is to enter.
func (l *Lock) begin(s *stake) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.asking = l.wants(s)
	if s.asking && l.ballot != nil {
		s.node().keeper.watch(s, now().add(l.m.patience))
	}
	return s.asking
}

// wants says whether s may still become a part of the lock, or is one.
func (l *Lock) wants(s *stake) bool {
	return l.stakes[s.index] == s && (l.phase == wanted || l.phase == held)
}

// entered takes the answer to an enter begun at start. It returns the stake that
// is to enter next.
func (l *Lock) entered(s *stake, start instant, r reply, err error) (next *stake) {
	s.node().note(r, l.m.log())
	l.hear(s, r, start, err)
	l.mu.Lock()
	next, news := l.admit(s, start, r, err)
	l.mu.Unlock()
	l.say(news)
	return next
}

// admit is entered, under the mutex.
func (l *Lock) admit(s *stake, start instant, r reply, err error) (next *stake, _ news) {
	if !s.asking { // it took too long, and has left meanwhile
		if r.status == granted || r.status == waiting {
			s.node().keeper.leave(s) // a node that restarted forgets its tombstones
		}
		return nil, news{}
	}
	t := now() // to look at the clock is not for nothing: once will do
	s.asking = false
	if l.ballot != nil {
		s.node().keeper.unwatch(s)
	}
	s.bury = err != nil || time.Duration(t-start) >= s.node().resend
	switch late := l.m.trusted(start) <= t; {
	case !l.wants(s):
		if s.bury || r.status == granted || r.status == waiting {
			l.part(s)
		} else {
			l.parted(s, r, nil)
		}
	case err != nil:
		if errors.Is(err, ErrNotLock) {
			s.bury = false
		}
		return nil, l.fails(s, err)
	case r.status == foreign:
		kind, data, _ := strings.Cut(r.data, ":")
		return nil, l.fails(s, fmt.Errorf("%w: %q, a %s", ErrNotLock, data, kind))
	case r.status == busy && l.try:
		return nil, l.fails(s, ErrLock)
	case r.status == busy:
		if s.bury {
			s.node().keeper.leave(s)
		}
		next = l.anew(s)
		next.queue = true
	case r.status != granted && r.status != waiting:
		return nil, l.fails(s, void{redisError(fmt.Errorf("unexpected status %d", r.status))})
	case late:
		s.bury = true
		return nil, l.fails(s, void{redisError(fmt.Errorf("the reply took longer than the TTL of %v", l.m.ttl))})
	default:
		s.in, s.why, s.failed = true, nil, 0
		if r.status == granted {
			l.grant(s, start, uint64(r.value))
			if l.phase == held && start > l.ballot.at {
				l.look()
			}
		}
		s.trust(start)
		l.decide(t)
		role := standing
		if s.granted && l.phase == held {
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
func (l *Lock) told(s *stake, token uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wants(s) && !s.granted {
		l.grant(s, now(), token)
		if s.in {
			l.decide(now())
		}
	}
}

// The keeper tells.

// kept takes a reply to a keep begun at start.
func (l *Lock) kept(s *stake, start instant, r reply) {
	l.hear(s, r, start, nil)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.wants(s) || !s.in {
		return
	}
	s.why = nil
	if r.status == granted { // a "waiting" that comes after the grant is old
		l.grant(s, now(), max(s.token, uint64(r.value))) // the short form says no token
		if r.preceded && l.phase == wanted && !l.majority() {
			l.yield(s)
		}
	}
	l.decide(now())
}

// unsure takes the error of a keep, which is made again.
func (l *Lock) unsure(s *stake, start instant, err error) {
	l.hear(s, reply{}, start, err)
	l.mu.Lock()
	first := l.phase == wanted && s.in && s.why == nil
	if s.in {
		s.why = err
	}
	l.mu.Unlock()
	if first {
		l.say(news{"a waiter goes on", doing("keep", l.Key(), err)})
	}
}

// over takes it that the keeper has let go of s: its node does not know it, or
// the trust in it has ended, or the time that it was to be watched for.
func (l *Lock) over(s *stake, why error) {
	l.mu.Lock()
	timedOut := s.asking
	var say news
	switch {
	case s.asking:
		s.asking, s.bury = false, true
		why = redisError(fmt.Errorf("no answer within %v", l.m.patience))
		if l.wants(s) {
			say = l.fails(s, why)
		} else {
			s.node().keeper.leave(s)
			l.parted(s, reply{}, why)
		}
	case !l.wants(s):
	case s.in:
		s.bury = s.bury || l.phase == wanted
		say = l.fails(s, why)
	case l.ballot == nil || s.node().illness() == nil:
		go l.enter(context.Background(), s)
	default:
		s.probe()
		s.node().keeper.watch(s, now().add(probation))
	}
	l.mu.Unlock()
	if timedOut {
		l.hear(s, reply{}, now(), why)
	}
	l.say(say)
}

// expire ends a lock whose time is over before a timer has said so.
func (l *Lock) expire() {
	l.mu.Lock()
	var say news
	if l.phase == held {
		say = l.lose(errExpired)
	}
	l.mu.Unlock()
	l.say(say)
}

// What comes of it, under the mutex.

// grant notes that a node has granted s, in answer to a call begun at start.
func (l *Lock) grant(s *stake, start instant, token uint64) {
	if !s.granted && l.phase == held && start > l.ballot.at {
		l.ballot.since[s.index] = now()
	}
	s.granted, s.token = true, token
}

// look has all nodes asked at once whether l holds them: should they fail one
// after the other, it is known of each that it was there when the last came back.
func (l *Lock) look() {
	for _, s := range l.stakes {
		if l.counts(s) {
			s.Look()
		}
	}
}

// fails notes that a node does not hold s, or not any more, and why. Unless that
// decides it against the lock, there will be another attempt on that node.
func (l *Lock) fails(s *stake, why error) news {
	// From when on the node may have been in other hands.
	from := s.until()
	if why == errGone {
		from = from.add(l.m.drift - l.m.ttl) // since it was last kept
	}
	if s.in || s.bury {
		s.node().keeper.leave(s)
	}
	why = s.because(why)
	wasIn, counted, failed := s.in, l.counts(s), s.failed
	s.in, s.granted, s.why = false, false, why
	if l.phase == held && counted && !l.heldSince(from) {
		return l.lose(why)
	}
	if l.try && l.phase == wanted {
		l.release(s)
		l.decide(now())
		return news{}
	}
	t := l.anew(s)
	t.failed = min(failed+1, 10)
	t.why = why
	if wasIn && !isVoid(why) {
		t.why = void{why}
	}
	l.decide(now())
	if !l.wants(t) {
		return news{}
	}
	const minBackoff, maxBackoff = 10 * time.Millisecond, time.Second
	if l.ballot != nil && s.node().illness() != nil {
		s.node().keeper.watch(t, now().add(probation))
	} else if failed > 0 {
		s.node().keeper.watch(t, now().add(min(minBackoff<<failed, maxBackoff)))
	} else {
		go l.enter(context.Background(), t)
	}
	switch {
	case failed > 0 || l.ballot != nil && !wasIn: // it has been said
		return news{}
	case l.ballot != nil:
		why = fmt.Errorf("%s: %w", s.named(), why)
	}
	if l.phase == held {
		return news{"a lock is entered anew", doing("lock", l.Key(), why)}
	}
	return news{"a waiter enters anew", doing("lock", l.Key(), why)}
}

// yield leaves a node that somebody is to have who comes before l, and enters it
// again, with the place in the queue that l has had: so those who have a node
// each, and wait for the others', get on. The id is a new one, since a message
// may be under way to the old one.
func (l *Lock) yield(s *stake) {
	s.node().keeper.leave(s)
	t := l.anew(s)
	t.queue = true
	go l.enter(context.Background(), t)
}

// anew puts another stake in the place of s.
func (l *Lock) anew(s *stake) *stake {
	l.release(s)
	t := new(stake).init(l, int(s.index))
	t.queue = s.queue
	l.stakes[s.index] = t
	return t
}

// release has no messages for s taken any more.
func (l *Lock) release(s *stake) {
	if s.joined {
		s.joined = false
		s.node().box.Leave(s.id.(string))
	}
}

// counts says whether the node of s is one of those that l holds.
func (l *Lock) counts(s *stake) bool { return s.in && s.granted && s.token >= l.token }

func (l *Lock) majority() bool {
	n := 0
	for _, s := range l.stakes {
		if l.counts(s) {
			n++
		}
	}
	return n >= quorum.Majority(len(l.stakes))
}

// heldSince says whether a majority has been held since then, without a gap. If
// several nodes lose their data at once, and it is learnt of one after the
// other, each may have been entered anew by then; but somebody else may have had
// them all in between.
func (l *Lock) heldSince(from instant) bool {
	n := 0
	for i, s := range l.stakes {
		if l.counts(s) && (l.ballot == nil || l.ballot.since[i] <= max(from, l.ballot.at)) {
			n++
		}
	}
	return n >= quorum.Majority(len(l.stakes))
}

// decide looks at how things stand after something has changed, at t.
func (l *Lock) decide(t instant) {
	switch l.phase {
	case held:
		l.settle()
		return
	case wanted:
	default:
		return
	}
	// A grant runs with the lease that the waiter had when it came, so with
	// little of that left it is kept first.
	soon := t.add(l.m.ttl / 4)
	in, failed, barred, answered, open, sure, highest := 0, 0, 0, 0, false, 0, uint64(0)
	for _, s := range l.stakes {
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
		case s.why == nil, isVoid(s.why) && !l.try:
			open = true
		default:
			failed++
			if errors.Is(s.why, ErrNotLock) {
				barred++
			}
		}
	}
	n := len(l.stakes)
	l.stood = l.stood || quorum.Decide(n, in, failed) == quorum.Yes
	switch {
	case quorum.Decide(n, sure, 0) == quorum.Yes:
		l.agree(soon, highest)
	case quorum.Decide(n, in, failed) == quorum.No && !l.stood && l.clear(answered, open),
		quorum.Decide(n, 0, barred) == quorum.No:
		l.phase = given
		l.wake()
	case !open && sure > 0:
		// Others may have the other nodes, and wait for these.
		for _, s := range l.stakes {
			if s.in && s.granted && !s.checked {
				s.checked = true
				s.node().keeper.check(s)
			}
		}
	}
}

// clear says whether it is clear why a request is refused: a majority has answered
// a try, or nobody is left who might.
func (l *Lock) clear(answered int, open bool) bool {
	return !l.try || !open || answered >= quorum.Majority(len(l.stakes))
}

// agree makes l a lock if a majority of the nodes that it surely holds is of one
// mind about the fencing token. Else it has those with a lower one than the
// highest raise it: they do so only while l holds them, or the proof would fail.
//
// That a token is greater than any before is proved thus: two majorities share a
// node that both held. There the later one was granted after the end of the
// earlier hold, hence after that had a token no lower than the earlier lock's,
// and so it was given a greater one; and the later lock's is no lower than what
// it was given anywhere in its majority.
func (l *Lock) agree(soon instant, highest uint64) {
	for _, s := range l.stakes {
		votes := 0
		for _, t := range l.stakes {
			if t.in && t.granted && t.until() >= soon && t.token == s.token {
				votes++
			}
		}
		if votes >= quorum.Majority(len(l.stakes)) {
			l.hold(s.token)
			return
		}
	}
	for _, s := range l.stakes {
		if s.in && s.granted && s.token < highest {
			s.node().keeper.raise(s, highest)
		}
	}
}

// hold makes l a lock.
func (l *Lock) hold(token uint64) {
	l.phase, l.token = held, token
	if l.ballot != nil {
		l.ballot.at = now()
	}
	l.ctx, l.cancel = context.WithCancelCause(l.ctx)
	l.settle()
	l.wake()
}

// settle sees to it that what l holds is kept, and counts until when.
func (l *Lock) settle() {
	var buf [8]instant
	ends := buf[:0]
	for _, s := range l.stakes {
		switch {
		case l.counts(s):
			ends = append(ends, s.until())
			l.release(s)
			s.node().keeper.hold(s)
			s.node().inspect(l.m.log())
		case s.in && s.granted:
			s.node().keeper.raise(s, l.token)
		}
	}
	if majority := quorum.Majority(len(l.stakes)); len(ends) >= majority {
		slices.Sort(ends)
		l.until.Store(int64(ends[len(ends)-majority]))
	}
}

// lose ends a lock.
func (l *Lock) lose(why error) news {
	l.phase = lost
	if s := l.stakes[0]; l.ballot != nil {
		why = l.nodes("hold it", l.counts)
	} else {
		why = s.because(why)
	}
	var err error = caused{ErrLockLost, fmt.Errorf("%q: %w", l.Key(), why)}
	l.cancel(err)
	// A renewal whose reply was lost may have kept it on the server.
	l.partAll()
	return news{"", err}
}

// because adds to why it is over why it could not be kept.
func (s *stake) because(why error) error {
	if s.in && s.why != nil && why == errExpired {
		return fmt.Errorf("%w: %w", why, s.why)
	}
	return why
}

// wake wakes the caller, if it sleeps.
func (l *Lock) wake() {
	select {
	case l.signal <- struct{}{}:
	default:
	}
}

// news is what is logged when the mutex is free again.
type news struct {
	what string
	err  error
}

func (l *Lock) say(n news) {
	if n.err != nil {
		l.m.log().error(n.what, n.err)
	}
}
