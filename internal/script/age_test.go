package script_test

// The age of an acquire: a request that has waited in its process takes the place in the queue that it would have had.

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redismutex/redismutex/internal/script"
)

// old returns a participant that asked for the lock so long ago.
func (s *server) old(age time.Duration, write bool, order order) *participant {
	s.Helper()
	p := s.participant(write, time.Minute, order)
	p.age = age
	return p
}

func (s *server) oldWriter(age time.Duration) *participant {
	s.Helper()
	return s.old(age, true, firstCome)
}
func (s *server) oldReader(age time.Duration) *participant {
	s.Helper()
	return s.old(age, false, firstCome)
}

// Promise 6, T6: an age is a place in the queue: the head, in the middle, or the end. In its class the oldest request is
// the first, whatever the order of arrival.
func TestAgeIsAPlaceInTheQueue(t *testing.T) {
	onBothServers(t, func(s *server) {
		holder, w4, r3, w2, r1, w0 := s.writer(), s.oldWriter(4*time.Hour), s.oldReader(3*time.Hour), s.oldWriter(2*time.Hour), s.oldReader(time.Hour), s.writer()
		arrivals([]*participant{w4, r3, w2, r1, w0}, func(ps []*participant) {
			s.rc.FlushDB(context.Background())
			s.is(holder.acquire(), script.Granted)
			s.join(ps...)
			s.queued(w4, r3, w2, r1, w0)
		})
		s.inTurn([]*participant{holder}, []*participant{w4}, []*participant{r3}, []*participant{w2}, []*participant{r1}, []*participant{w0})
	})
}

// Promise 6: a request is as old as the time that it has waited: it goes behind a waiter that joined before that, and before
// one that joined since.
func TestAgeCountsFromTheServersClock(t *testing.T) {
	onBothServers(t, func(s *server) {
		s.is(s.writer().acquire(), script.Granted)
		before, since, late := s.writer(), s.reader(), s.oldWriter(30*time.Minute)
		s.join(before)
		if err := s.rc.ZIncrBy(context.Background(), s.keys.Intents(), -3.6e9, before.member()).Err(); err != nil { // an hour ago
			s.Fatal(err)
		}
		s.join(since, late)
		s.queued(before, late, since)
	})
}

// Promises 5 and 6: an acquire with an age is granted what is free if nobody ranks before it, and joins or is refused if
// somebody does. Readers hold, and a writer is the first to wait.
func TestAgeOfAReaderMayPassAWriter(t *testing.T) {
	onBothServers(t, func(s *server) {
		holder, w2, r1, r3 := s.reader(), s.oldWriter(2*time.Hour), s.oldReader(time.Hour), s.oldReader(3*time.Hour)
		s.is(holder.acquire(), script.Granted)
		s.join(w2)
		s.is(r1.try(), script.Busy)
		s.join(r1)
		s.is(r3.try(), script.Granted)
		s.held(holder, r3)
		w4, r5 := s.oldWriter(4*time.Hour), s.oldReader(5*time.Hour)
		s.join(w4) // a new head
		s.is(s.oldReader(3*time.Hour).try(), script.Busy)
		s.is(r5.acquire(), script.Granted)
		s.queued(w4, w2, r1)
		s.inTurn([]*participant{holder, r3, r5}, []*participant{w4}, []*participant{w2}, []*participant{r1})
	})
}

// A waiter watches the lease in front of it, wherever its age puts it: that of the holder if it is the new head.
func TestAgeDecidesWhichLeaseIsInFront(t *testing.T) {
	onBothServers(t, func(s *server) {
		in := func(what string, r script.Reply, want time.Duration) {
			s.Helper()
			s.is(r, script.Waiting)
			if got := time.Duration(r.Value) * time.Millisecond; got > want || got < want-10*time.Second {
				s.Errorf("%s is to look in %v, want %v", what, got, want)
			}
		}
		holder, w := s.participant(true, time.Minute, firstCome), s.participant(true, 3*time.Minute, firstCome)
		s.is(holder.acquire(), script.Granted)
		in("the first", w.acquire(), time.Minute)
		head := s.participant(true, 2*time.Minute, firstCome)
		head.age = time.Hour
		in("a new head", head.acquire(), time.Minute)
		in("one between", s.oldWriter(30*time.Minute).acquire(), 2*time.Minute)
		in("the last", s.oldReader(time.Microsecond).acquire(), 3*time.Minute)
	})
}

// Promises 4 and 6: an acquire that is sent again keeps its place, whatever its age is by then, and no waiter is
// granted twice.
func TestResentAcquireKeepsItsPlace(t *testing.T) {
	onBothServers(t, func(s *server) {
		holder, a, b, c := s.reader(), s.oldWriter(2*time.Hour), s.oldReader(time.Hour), s.writer()
		s.is(holder.acquire(), script.Granted)
		s.join(a, b, c)
		for _, age := range []time.Duration{0, time.Minute, 90 * time.Minute, 24 * time.Hour, 1 << 62} {
			for _, p := range []*participant{a, b, c} {
				p.age = age
				s.join(p)
				s.is(p.try(), script.Busy)
			}
			s.queued(a, b, c)
			s.held(holder)
		}
		s.inTurn([]*participant{holder}, []*participant{a}, []*participant{b}, []*participant{c})
	})
}

// Promise 6: writers first and readers first hold however old the others are, and no age leaves its class.
func TestAgeStaysInItsClass(t *testing.T) {
	for _, age := range []time.Duration{time.Hour, 1 << 62, 1<<63 - 1} {
		onBothServers(t, func(s *server) {
			s.is(s.writer().acquire(), script.Granted)
			first, oldest, reader, other := s.participant(true, time.Minute, writersFirst), s.old(age, true, writersFirst), s.oldReader(age), s.reader()
			s.join(other, reader, first, oldest)
			s.queued(oldest, first, reader, other)
		})
	}
}

// Promise 6: equal ranks are in the order of their names, and both wait.
func TestEqualRanksAreInTheOrderOfTheirNames(t *testing.T) {
	const ever = 1<<63 - 1
	onBothServers(t, func(s *server) {
		s.is(s.writer().acquire(), script.Granted)
		w2, r3, w4 := s.oldWriter(ever), s.oldReader(ever), s.oldWriter(ever)
		s.join(w4, w2, r3)
		s.queued(r3, w2, w4)
	})
}

// Promise 6: while the clock is behind the ranks that wait, since it has been set back, no age overtakes them: newcomers
// would until the clock had caught up.
func TestAgeDoesNotCountOnAClockThatWasSetBack(t *testing.T) {
	for _, order := range []order{firstCome, writersFirst} {
		onBothServers(t, func(s *server) {
			ctx := context.Background()
			s.is(s.writer().acquire(), script.Granted)
			a, b := s.participant(true, time.Minute, order), s.old(time.Minute, true, order)
			s.join(a)
			// As if it had joined an hour later, by a clock that was then set back.
			if err := s.rc.ZIncrBy(ctx, s.keys.Intents(), 3.6e9, "w"+a.id).Err(); err != nil {
				s.Fatal(err)
			}
			s.join(b)
			c := s.old(2*time.Hour, true, order)
			s.join(c)
			s.queued(a, b, c)
			s.is(a.release(), script.Released)
			s.is(b.release(), script.Released)
			s.is(c.release(), script.Released)
			d, e := s.old(time.Minute, true, order), s.old(time.Hour, true, order)
			s.join(d, e)
			s.queued(e, d)
		})
	}
}

// Promises 1 and 5: a waiter behind one whose lease has ended is not held up, wherever ages have put the two.
func TestExpiredHeadWithAnAgeHoldsNobodyUp(t *testing.T) {
	onBothServers(t, func(s *server) {
		holder, r, expired := s.reader(), s.oldReader(time.Hour), s.oldWriter(2*time.Hour)
		s.is(holder.acquire(), script.Granted)
		s.join(expired)
		expired.expire()
		s.is(r.acquire(), script.Granted)
		s.held(holder, r)
		s.queued()
	})
}

// An acquire without an age is the command that it was before there were ages, and with several nodes the score says all.
func TestOnlyAnAgeIsSent(t *testing.T) {
	keys, err := script.NewKeys("lock")
	if err != nil {
		t.Fatal(err)
	}
	p := script.Participant{Keys: keys, Durations: script.NewDurations(time.Second), ID: "box:1", Write: true}
	scored := p
	scored.Score = script.Score(7, false)
	for _, c := range []struct {
		p    script.Participant
		age  time.Duration
		want string
	}{
		{p, 0, "[box:1 1000 join:0]"},
		{p, -time.Hour, "[box:1 1000 join:0]"},
		{p, time.Microsecond - 1, "[box:1 1000 join:0]"},
		{p, 1500 * time.Microsecond, "[box:1 1000 join:0  1500]"},
		{scored, time.Hour, "[box:1 1000 join:0 7]"},
	} {
		cmd := c.p.Acquire(false, false, c.age).Redis(context.Background())
		if got := fmt.Sprint(cmd.Args()[7:]); got != c.want {
			t.Errorf("age %v: sent %s, want %s", c.age, got, c.want)
		}
	}
}
