package script_test

// What a lock over several nodes needs of the scripts on each: one order of waiters and tokens to agree on. As in
// scripts_test.go, but each participant has a rank.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
	"github.com/redismutex/redismutex/lua"
)

// ahead is a rank in the year 2069, which no server's clock has reached. Its last digits are lost if Lua concatenates it to
// a string.
const ahead = int64(3_141_592_653_589_793)

// at returns a participant of a quorum, with the same rank on all nodes.
func (s *server) at(rank int64, write bool, order order) *participant {
	s.Helper()
	p := s.participant(write, time.Minute, order)
	p.Score = script.Score(rank, p.first)
	return p
}

func (s *server) w(rank int64) *participant { return s.at(rank, true, firstCome) }
func (s *server) r(rank int64) *participant { return s.at(rank, false, firstCome) }

func (p *participant) raise(token int64) script.Reply {
	p.Helper()
	return p.must(p.calls(p.Renew(uint64(token))))
}

// member returns the member of the intents that stands for p.
func (p *participant) member() string {
	if p.Write {
		return "w" + p.id
	}
	return "r" + p.id
}

// join has participants acquire that have to wait.
func (s *server) join(ps ...*participant) {
	s.Helper()
	for _, p := range ps {
		s.is(p.acquire(), script.Waiting)
	}
}

// queued checks which participants wait, in that order.
func (s *server) queued(want ...*participant) {
	s.Helper()
	var members []string
	for _, p := range want {
		members = append(members, p.member())
	}
	if got := s.rc.ZRange(context.Background(), s.keys.Intents(), 0, -1).Val(); !slices.Equal(got, members) {
		s.Errorf("in the queue %q, want %q", got, members)
	}
}

// preceded checks whether the replies to holders say that a waiter precedes them.
func (s *server) preceded(want bool, holders ...*participant) {
	s.Helper()
	for _, p := range holders {
		for _, r := range []script.Reply{p.renew(), p.acquire()} {
			s.is(r, script.Granted)
			if r.Preceded != want {
				s.Errorf("the reply to %s: preceded %t, want %t", p.id, r.Preceded, want)
			}
		}
	}
}

// counter returns the last token, 0 if there is none.
func (s *server) counter() int64 {
	n, _ := s.rc.Get(context.Background(), s.keys.Token()).Int64()
	return n
}

// setCounter makes n the last token; 0 removes the counter.
func (s *server) setCounter(n int64) {
	ctx := context.Background()
	if s.rc.Set(ctx, s.keys.Token(), n, time.Hour); n == 0 {
		s.rc.Del(ctx, s.keys.Token())
	}
}

// tokenIs checks the counter and the token in the reply to its writer.
func (s *server) tokenIs(want int64, w *participant) {
	s.Helper()
	if got := s.counter(); got != want {
		s.Errorf("the counter is %d, want %d", got, want)
	}
	if got := s.value(w.renew(), script.Granted); got != want {
		s.Errorf("the writer's token is %d, want %d", got, want)
	}
}

// inTurn checks that participants hold the lock one turn after the other, the first turn now.
func (s *server) inTurn(turns ...[]*participant) {
	s.Helper()
	for _, turn := range turns {
		s.held(turn...)
		for _, p := range turn {
			s.is(p.release(), script.Released)
		}
	}
	s.held()
}

// Promise 6: the score is the place in the queue, whatever the order of arrival. A lower one goes to the head or in between.
func TestLowerScoreIsServedFirst(t *testing.T) {
	onBothServers(t, func(s *server) {
		holder, w10, r20, r25, w30, r40, w50 := s.w(60), s.w(10), s.r(20), s.r(25), s.w(30), s.r(40), s.w(50)
		s.is(holder.acquire(), script.Granted)
		s.join(w30, r20, w50, r40, w10, r25)
		s.queued(w10, r20, r25, w30, r40, w50)
		s.inTurn([]*participant{holder}, []*participant{w10}, []*participant{r20, r25}, []*participant{w30}, []*participant{r40}, []*participant{w50})
	})
}

// Equal scores are in the order of their names, so the nodes agree on the queue. The replies tell a holder at every moment
// whether a waiter precedes it, and everybody the highest score.
func TestEveryOrderOfArrivalMakesTheSameQueue(t *testing.T) {
	onBothServers(t, func(s *server) {
		w1, r2, holder, w4, r5, w6, r7 := s.w(20), s.r(20), s.w(20), s.w(10), s.r(20), s.w(20), s.r(30)
		before := []*participant{w4, r2, r5, w1}
		arrivals([]*participant{w6, w1, r2, w4, r5}, func(ps []*participant) {
			s.rc.FlushDB(context.Background())
			s.is(holder.acquire(), script.Granted)
			preceded, last := false, int64(0)
			for _, p := range ps {
				r := p.acquire()
				s.is(r, script.Waiting)
				preceded = preceded || slices.Contains(before, p)
				last = max(last, 10)
				if p != w4 {
					last = 20
				}
				if k := holder.renew(); k.Preceded != preceded || k.Last != last || r.Last != last {
					s.Fatalf("preceded %t, want %t; last %d and %d, want %d", k.Preceded, preceded, r.Last, k.Last, last)
				}
			}
			s.join(r7)
			s.queued(w4, r2, r5, w1, w6, r7)
		})
		s.inTurn([]*participant{holder}, []*participant{w4}, []*participant{r2, r5}, []*participant{w1}, []*participant{w6}, []*participant{r7})
	})
}

// arrivals calls f with every order of ps.
func arrivals(ps []*participant, f func([]*participant)) {
	var from func(int)
	from = func(i int) {
		if i == len(ps) {
			f(ps)
		}
		for j := i; j < len(ps); j++ {
			ps[i], ps[j] = ps[j], ps[i]
			from(i + 1)
			ps[i], ps[j] = ps[j], ps[i]
		}
	}
	from(0)
}

// Promise 6: no waiter ranks before one that is granted. While readers hold, a reader overtakes only writers that rank
// behind it.
func TestReaderPassesLaterWritersOnly(t *testing.T) {
	onBothServers(t, func(s *server) {
		holder, w30, r40, r20, r30 := s.r(50), s.w(30), s.r(40), s.r(20), s.r(30)
		s.is(holder.acquire(), script.Granted)
		s.join(w30)
		s.is(r40.try(), script.Busy)
		s.join(r40)
		s.is(r20.acquire(), script.Granted)
		s.is(r30.try(), script.Granted) // "r" is before "w"
		w10, r15, r5 := s.w(10), s.r(15), s.r(5)
		s.join(w10)
		s.is(r15.try(), script.Busy)
		s.join(r15)
		s.is(r5.acquire(), script.Granted)
		s.held(holder, r20, r30, r5)
		s.queued(w10, r15, w30, r40)
		s.is(w10.release(), script.Released)
		s.held(holder, r20, r30, r5, r15)
		s.queued(w30, r40)
		first := s.at(ahead, true, writersFirst)
		s.join(first)
		s.is(s.r(1).try(), script.Busy)
		s.preceded(true, r5)
		s.queued(first, w30, r40)
	})
}

// The reply to a holder says "preceded" if and only if a living waiter ranks before it: those two may be waiting for each
// other's nodes.
func TestHolderLearnsThatALowerRankWaits(t *testing.T) {
	onBothServers(t, func(s *server) {
		w20, holder, r30, w20b := s.w(ahead+20), s.w(ahead+20), s.r(ahead+21), s.w(ahead+20)
		s.is(holder.acquire(), script.Granted)
		s.preceded(false, holder)
		s.join(r30, w20b)
		s.preceded(false, holder)
		s.join(w20)
		s.preceded(true, holder)
		s.is(w20.release(), script.Released)
		s.preceded(false, holder)
		r20, expired := s.r(ahead+20), s.w(ahead+19)
		s.join(r20)
		s.preceded(true, holder)
		s.is(r20.release(), script.Released)
		s.join(expired)
		s.preceded(true, holder)
		expired.expire()
		s.preceded(false, holder)
		if r := r30.renew(); r.Status != script.Waiting || r.Preceded {
			s.Errorf("the reply to a waiter: %+v, want waiting and not preceded", r)
		}
		s.is(holder.release(), script.Released)
		s.held(w20b)
		s.is(w20b.release(), script.Released)

		r10, w5, r15 := s.r(10), s.w(5), s.r(15)
		s.is(r10.acquire(), script.Granted)
		w30, w10 := s.w(30), s.w(10)
		s.join(w30, w10)
		s.preceded(false, r10)
		s.preceded(true, r30)
		s.join(r15)
		s.preceded(false, r10)
		s.join(w5)
		s.preceded(true, r10, r30)
		s.is(w5.release(), script.Released)
		s.preceded(false, r10)
		s.held(r10, r30)
	})
}

// Promise 6: writers or readers go first by choice, and within a kind the rank decides. The highest score in a reply is of
// scores, not of ranks.
func TestScoresKeepTheOrderOfChoice(t *testing.T) {
	for _, c := range []struct {
		order order
		turns [][]int // of the waiters below
		last  []int64 // in the reply to each of them when it joins
	}{
		{firstCome, [][]int{{2}, {3}, {0}, {1}}, []int64{40, 50, 50, 50}},
		{writersFirst, [][]int{{2}, {0}, {3, 1}}, []int64{40, 50, 50, 50}},
		{readersFirst, [][]int{{3, 1}, {2}, {0}}, []int64{40, 40, 40, 40}},
	} {
		onBothServers(t, func(s *server) {
			holder := s.w(60)
			s.is(holder.acquire(), script.Granted)
			ps := []*participant{s.at(40, true, c.order), s.at(50, false, c.order), s.at(20, true, c.order), s.at(30, false, c.order)}
			for i, p := range ps {
				r := p.acquire()
				s.is(r, script.Waiting)
				if renewed := p.renew(); r.Last != c.last[i] || renewed.Last != c.last[i] {
					s.Errorf("order %d: last %d, then %d, want %d", c.order, r.Last, renewed.Last, c.last[i])
				}
			}
			queue, turns := []*participant{}, [][]*participant{{holder}}
			for _, turn := range c.turns {
				at := len(queue)
				for _, i := range turn {
					queue = append(queue, ps[i])
				}
				turns = append(turns, queue[at:])
			}
			s.queued(queue...)
			s.inTurn(turns...)
		})
	}
}

// Promise 6: a request without a score joins behind all waiters, whatever their scores are; one with a score joins at its
// place among them.
func TestRequestsWithAndWithoutScoresShareAQueue(t *testing.T) {
	onBothServers(t, func(s *server) {
		s.is(s.writer().acquire(), script.Granted)
		first, a, b := s.w(ahead), s.writer(), s.reader()
		s.join(first, a, b)
		s.queued(first, a, b)
		early, tied, late := s.w(1), s.r(ahead+1), s.w(ahead+10)
		s.join(early, late, tied) // a has got the rank of tied
		s.queued(early, first, tied, a, b, late)
		c, d := s.at(ahead, true, writersFirst), s.participant(true, time.Minute, writersFirst)
		s.join(c, d)
		s.queued(c, d, early, first, tied, a, b, late)
		s.join(a, b, late, d, first) // once more
		s.queued(c, d, early, first, tied, a, b, late)
	})
}

// Every reply has the highest score in the queue, the caller's own included, so that a process whose clock is slow learns
// what time it is.
func TestReplyHasTheHighestScoreThatWaits(t *testing.T) {
	onBothServers(t, func(s *server) {
		last := func(want int64, r script.Reply) {
			s.Helper()
			if r.Last != want {
				s.Errorf("last %d, want %d", r.Last, want)
			}
		}
		holder, w10, r20, w30, r40 := s.w(1), s.w(ahead+10), s.r(ahead+20), s.w(ahead+30), s.r(ahead+40)
		last(0, holder.try())
		last(0, holder.renew())
		last(ahead+20, r20.acquire())
		last(ahead+30, w30.acquire()) // by the fast path
		last(ahead+30, w10.acquire()) // by the slow path
		last(ahead+40, r40.acquire())
		for _, p := range []*participant{holder, w10, r40} {
			last(ahead+40, p.renew())
			last(ahead+40, p.acquire())
		}
		last(ahead+40, s.w(5).try())
		last(ahead+40, s.w(5).renew())
		last(ahead+30, r40.release())
		last(ahead+30, holder.renew())
		s.is(holder.release(), script.Released)
		last(ahead+30, w10.renew())
		holder.tombstone = true
		s.is(holder.release(), script.Gone)
		last(ahead+30, holder.acquire()) // refused
	})
}

// A waiter is told when the lease in front of it ends, by its place in the queue and not by its time of arrival.
func TestWaiterWatchesTheLeaseInFrontOfItsPlace(t *testing.T) {
	onBothServers(t, func(s *server) {
		lasting := func(p *participant, ttl time.Duration) *participant {
			p.Durations = script.NewDurations(ttl)
			return p
		}
		in := func(want time.Duration, r script.Reply) {
			s.Helper()
			s.is(r, script.Waiting)
			if got := time.Duration(r.Value) * time.Millisecond; got > want || got < want-10*time.Second {
				s.Errorf("the lease in front ends in %v, want %v", got, want)
			}
		}
		s.is(lasting(s.w(1), time.Hour).acquire(), script.Granted)
		w10, w20, w30, w40 := s.w(10), s.w(20), s.w(30), s.w(40)
		in(time.Hour, lasting(w20, 2*time.Hour).acquire())
		in(2*time.Hour, lasting(w40, 4*time.Hour).acquire())
		in(2*time.Hour, lasting(w30, 3*time.Hour).acquire())
		in(time.Hour, lasting(w10, 5*time.Hour).acquire())
		in(4*time.Hour, s.w(50).acquire())
		in(4*time.Hour, s.r(50).acquire()) // "r" is before "w"
		in(3*time.Hour, lasting(s.w(30), 6*time.Hour).acquire())
		in(6*time.Hour, lasting(s.w(30), 7*time.Hour).acquire())
		in(7*time.Hour, lasting(s.w(35), 8*time.Hour).acquire())
		for range 2 {
			in(time.Hour, w10.acquire())
			in(5*time.Hour, w20.renew())
			in(2*time.Hour, w30.acquire())
			in(8*time.Hour, w40.renew())
		}
	})
}

// A participant that releases and acquires again under another id with its old score has its old place.
func TestOldScoreIsTheOldPlace(t *testing.T) {
	onBothServers(t, func(s *server) {
		w20, w30, r40 := s.w(20), s.w(30), s.r(40)
		s.is(w20.acquire(), script.Granted)
		s.join(w30, r40)
		s.is(w30.release(), script.Released)
		again := s.w(30)
		s.join(again)
		s.queued(again, r40)

		w10 := s.w(10)
		s.join(w10)
		s.preceded(true, w20)
		w20.tombstone = true
		s.is(w20.release(), script.Released)
		s.held(w10)
		s.is(w20.acquire(), script.Tombstoned)
		w20 = s.w(20)
		s.join(w20)
		s.preceded(false, w10)
		s.queued(w20, again, r40)
		r40.tombstone = true
		s.is(r40.release(), script.Released)
		s.is(r40.acquire(), script.Tombstoned)
		s.queued(w20, again)
		s.inTurn([]*participant{w10}, []*participant{w20}, []*participant{again})
	})
}

// Promise 5: a try that is refused leaves no trace, whatever its score is and whatever refuses it.
func TestFailedTryWithAScoreLeavesNoTrace(t *testing.T) {
	onBothServers(t, func(s *server) {
		fails := func(tries ...*participant) {
			s.Helper()
			for _, p := range tries {
				before := s.dump()
				s.is(p.try(), script.Busy)
				if after := s.dump(); after != before {
					s.Errorf("before %s, after %s", before, after)
				}
			}
		}
		w, w20, r := s.w(10), s.w(20), s.r(10)
		s.is(w.acquire(), script.Granted)
		fails(s.w(5), s.w(ahead), s.r(5), s.at(5, true, writersFirst), s.at(5, false, readersFirst))
		s.join(w20)
		fails(s.w(5), s.w(ahead), s.r(5), s.at(5, true, writersFirst), s.at(5, false, readersFirst))
		s.is(w20.release(), script.Released)
		s.is(w.release(), script.Released)
		s.is(r.acquire(), script.Granted)
		fails(s.w(5), s.w(ahead), s.at(5, true, writersFirst))
		s.join(w20)
		fails(s.w(5), s.r(30), s.r(ahead))
		s.held(r)
	})
}

// A grantCase is one way in which a script that has a score makes a waiter or its caller the writer.
type grantCase struct {
	name  string
	block func(s *server) *participant                   // makes the participant that blocks it; nil if none does
	grant func(s *server, blocker, w *participant) int64 // returns the token, 0 if the reply does not have it
}

func tokenOfAcquire(s *server, _, w *participant) int64 { return s.value(w.acquire(), script.Granted) }

// tokenOfRelease releases the blocker and returns the token that the reply carries.
func tokenOfRelease(s *server, blocker, _ *participant) (token int64) {
	s.Helper()
	r, n := blocker.release(), 0
	s.is(r, script.Released)
	if _, err := fmt.Sscan(r.Grants, &token, &n); err != nil {
		s.Fatalf("grants %q: %v", r.Grants, err)
	}
	return token
}

func tokenOfReleaseWithTombstone(s *server, blocker, w *participant) int64 {
	blocker.tombstone = true
	return tokenOfRelease(s, blocker, w)
}

func blockingWriter(s *server) *participant {
	w := s.w(1)
	s.is(w.acquire(), script.Granted)
	return w
}

func blockingReader(s *server) *participant {
	r := s.r(1)
	s.is(r.acquire(), script.Granted)
	return r
}

var grantCases = []grantCase{
	{"acquire", func(*server) *participant { return nil }, tokenOfAcquire},
	{"try", func(*server) *participant { return nil }, func(s *server, _, w *participant) int64 {
		return s.value(w.try(), script.Granted)
	}},
	{"acquire, beside a tombstone", func(s *server) *participant {
		p := s.w(1)
		p.tombstone = true
		s.is(p.release(), script.Gone)
		return nil
	}, tokenOfAcquire},
	{"acquire, where a reader has expired", func(s *server) *participant {
		blockingReader(s).expire()
		return nil
	}, tokenOfAcquire},
	{"release of a writer", blockingWriter, tokenOfRelease},
	{"release of a writer, beside another waiter", func(s *server) *participant {
		w := blockingWriter(s)
		s.join(s.w(ahead + 1000))
		return w
	}, tokenOfRelease},
	{"release of a writer, past an expired waiter", func(s *server) *participant {
		w, expired := blockingWriter(s), s.at(1, true, writersFirst)
		s.join(expired)
		expired.expire()
		return w
	}, tokenOfRelease},
	{"release of a writer with a tombstone", blockingWriter, tokenOfReleaseWithTombstone},
	{"release of a reader", blockingReader, tokenOfRelease},
	{"release of a reader with a tombstone", blockingReader, tokenOfReleaseWithTombstone},
	{"renewal", blockingWriter, func(s *server, blocker, w *participant) int64 {
		blocker.expire()
		return s.value(w.renew(), script.Granted)
	}},
	{"renewal of an expired writer", blockingWriter, func(s *server, blocker, w *participant) int64 {
		blocker.expire()
		s.is(blocker.renew(), script.Gone)
		return 0
	}},
	{"renewal of an expired reader", blockingReader, func(s *server, blocker, w *participant) int64 {
		blocker.expire()
		s.is(blocker.renew(), script.Gone)
		return 0
	}},
	{"acquire of another writer", blockingWriter, func(s *server, blocker, w *participant) int64 {
		blocker.expire()
		s.join(s.w(1))
		return 0
	}},
	{"try of a reader", blockingReader, func(s *server, blocker, w *participant) int64 {
		blocker.expire()
		s.is(s.r(ahead+1000).try(), script.Busy)
		return 0
	}},
}

// Promise 9: the token is the rank, so that the nodes agree on it, or the next number if the counter is at the rank or
// above. The server's clock has no part in it, also if the counter is new. All digits are exact, and the counter lives for
// a day.
func TestTokenIsTheRankWhicheverWayItIsGranted(t *testing.T) {
	ctx := context.Background()
	const floor int64 = 1e14
	onBothServers(t, func(s *server) {
		check := func(c grantCase, order order, counter, rank, want int64) {
			s.rc.FlushDB(ctx)
			w, blocker := s.at(rank, true, order), c.block(s)
			if blocker != nil {
				s.join(w)
			}
			s.setCounter(counter)
			granted := c.grant(s, blocker, w)
			s.held(w)
			token := s.counter()
			if ttl := s.rc.PTTL(ctx, s.keys.Token()).Val(); ttl <= 23*time.Hour {
				s.Errorf("%s: the counter has the TTL %v, want a day", c.name, ttl)
			}
			if again := w.acquire().Value; token != want || again != want || granted != want && granted != 0 {
				s.Errorf("%s, rank %d, counter %d: counter then %d, token granted %d, on request %d, want %d",
					c.name, rank, counter, token, granted, again, want)
			}
		}
		for _, c := range grantCases {
			for _, order := range []order{firstCome, writersFirst} {
				check(c, order, ahead, ahead+100, ahead+100)
				check(c, order, ahead, ahead+2, ahead+2)
				check(c, order, ahead, ahead+1, ahead+1)
				check(c, order, ahead, ahead, ahead+1)
				check(c, order, ahead, ahead-100, ahead+1)
				check(c, order, ahead, 10, ahead+1)
				check(c, order, 0, ahead, ahead)
				check(c, order, 0, floor+10, floor+10)
				check(c, order, 0, 10, floor)
			}
		}
	})
}

// Without a score of its own a script gives the next token, if the clock is behind it. The counter lives for a day from when
// it was compared with the clock.
func TestWithoutAScoreTheTokenIsTheNext(t *testing.T) {
	onBothServers(t, func(s *server) {
		single, single2, w, w2 := s.writer(), s.writer(), s.w(ahead+100), s.w(ahead+200)
		s.setCounter(ahead)
		if token := s.value(single.acquire(), script.Granted); token != ahead+1 {
			s.Errorf("token %d, want %d", token, ahead+1)
		}
		s.join(w, w2, single2)
		if token := tokenOfRelease(s, single, nil); token != ahead+2 {
			s.Errorf("token %d, want %d", token, ahead+2)
		}
		if ttl := s.rc.PTTL(context.Background(), s.keys.Token()).Val(); ttl <= 23*time.Hour {
			s.Errorf("the counter has the TTL %v, want a day", ttl)
		}
		w.expire()
		s.is(single2.renew(), script.Waiting)
		s.tokenIs(ahead+3, w2)
		s.held(w2)
	})
}

// Promise 9: a new counter is not below the floor, since a lower one would be taken for foreign data.
func TestNewCounterIsNoLowerThanTheFloor(t *testing.T) {
	redistest.MiniLocks(t)
	m, rc := redistest.Mini(t)
	m.SetTime(time.Unix(1000, 0))
	keys, err := script.NewKeys("lock")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{T: t, rc: rc, ep: node.Of(rc), keys: keys}
	w, w2 := s.w(10), s.w(20)
	s.is(w.acquire(), script.Granted)
	s.tokenIs(1e14, w)
	s.join(w2)
	tokenOfRelease(s, w, w2)
	s.tokenIs(1e14+1, w2)
	s.is(w2.release(), script.Released)
	s.is(s.w(30).acquire(), script.Granted)
}

// A raise raises the token of the writer that holds and renews its lease. Nothing else changes.
func TestRaiseRaisesTheTokenOfTheHolder(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *server) {
		w, w2, r := s.w(10), s.w(20), s.r(30)
		raises := func(to, want int64) {
			s.Helper()
			s.rc.PExpire(ctx, s.keys.Name(), 5*time.Second)
			before := s.rc.ZRangeWithScores(ctx, s.keys.Intents(), 0, -1).Val()
			if token := s.value(w.raise(to), script.Granted); token != want {
				s.Errorf("token %d, want %d", token, want)
			}
			if ttl := s.rc.PTTL(ctx, s.keys.Name()).Val(); ttl < 50*time.Second || ttl > time.Minute {
				s.Errorf("its lease is %v, want about 1m", ttl)
			}
			s.tokenIs(want, w)
			s.held(w)
			if after := s.rc.ZRangeWithScores(ctx, s.keys.Intents(), 0, -1).Val(); !slices.Equal(after, before) {
				s.Errorf("the queue was %v, and is %v", before, after)
			}
		}
		s.setCounter(ahead)
		s.is(w.acquire(), script.Granted)
		raises(ahead+10, ahead+10)
		raises(ahead+10, ahead+10)
		raises(ahead+5, ahead+10)
		raises(1, ahead+10)
		s.join(w2, r)
		raises(ahead+20, ahead+20)
		s.rc.Del(ctx, s.keys.Token())
		raises(ahead+30, ahead+30)
		if token := tokenOfRelease(s, w, w2); token != ahead+31 {
			s.Errorf("token %d after %d", token, ahead+30)
		}
		s.tokenIs(ahead+31, w2)
	})
}

// Promise 9: where the counter of a writer that holds has expired, its renewal makes one that begins with its rank.
func TestRenewalMakesACounterFromTheRank(t *testing.T) {
	onBothServers(t, func(s *server) {
		for _, order := range []order{firstCome, writersFirst} {
			w := s.at(ahead, true, order)
			s.is(w.acquire(), script.Granted)
			s.rc.Del(context.Background(), s.keys.Token())
			if token := s.value(w.renew(), script.Granted); token != ahead {
				s.Errorf("token %d, want the rank %d", token, ahead)
			}
			s.tokenIs(ahead, w)
			s.is(w.release(), script.Released)
			s.rc.Del(context.Background(), s.keys.Token())
		}
	})
}

// Only a writer that holds can raise its token: otherwise the token of another writer would no longer be the last. For all
// others a raise is a renewal.
func TestOnlyTheWriterThatHoldsRaises(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *server) {
		inVain := func(want script.Status, ps ...*participant) {
			s.Helper()
			for _, p := range ps {
				before, now := s.counter(), float64(s.rc.Time(ctx).Val().UnixMilli())
				if want != script.Gone {
					s.rc.ZAddXX(ctx, s.keys.Leases(), redis.Z{Score: now + 5000, Member: p.id})
				}
				r := p.raise(before + 100)
				s.is(r, want)
				if ends := s.rc.ZScore(ctx, s.keys.Leases(), p.id).Val(); want != script.Gone && ends < now+60_000 {
					s.Errorf("%s: its lease is %v ms, want 60000 at least", p.id, ends-now)
				}
				if after := s.counter(); after != before || want == script.Granted && r.Value != 0 {
					s.Errorf("%s: the counter was %d, and is %d; %+v", p.id, before, after, r)
				}
			}
		}
		w, w2, r, r2 := s.w(10), s.w(20), s.r(30), s.r(40)
		s.setCounter(ahead)
		s.is(w.acquire(), script.Granted)
		s.join(w2, r)
		inVain(script.Waiting, w2, r)
		inVain(script.Gone, r2)
		s.is(w.release(), script.Released)
		s.held(w2)
		inVain(script.Gone, w)
		inVain(script.Waiting, r)
		w2.expire()
		s.is(r2.try(), script.Granted)
		inVain(script.Granted, r, r2)
		inVain(script.Gone, w, w2)
		s.held(r, r2)
		r.expire()
		inVain(script.Gone, r)
		s.is(r2.release(), script.Released)
		inVain(script.Gone, w, w2, r, r2)
		s.held()
	})
}

// A raise that crosses a grant: the renewal hands on before it replies. It raises the token of a caller that holds by then,
// and never that of another.
func TestRaiseThatCrossesAGrant(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, w2, w3 := s.w(10), s.w(20), s.w(30)
		s.setCounter(ahead)
		s.is(w.acquire(), script.Granted)
		s.join(w2, w3)
		w.expire()
		s.is(w.raise(ahead+100), script.Gone)
		s.tokenIs(ahead+2, w2)
		w2.expire()
		if token := s.value(w3.raise(ahead+100), script.Granted); token != ahead+100 {
			s.Errorf("token %d", token)
		}
		s.tokenIs(ahead+100, w3)
	})
}

// walk has participants do random steps, the same on each of the servers. Run sends a command of each of ps.
func walk(steps int, run func(step int, ps []*participant, command func(*participant) script.Command), servers ...*server) {
	random := rand.New(rand.NewPCG(1, 2))
	var crowd [][]*participant
	for step := range steps {
		rank := func() int64 { return ahead + int64(step/4) + random.Int64N(9) }
		i, act := random.IntN(len(crowd)+1), random.IntN(8)
		if i == len(crowd) || len(crowd) < 4 {
			write, order, score, single := random.IntN(2) == 0, order(random.IntN(3)), rank(), random.IntN(3) == 0
			var ps []*participant
			for _, s := range servers {
				p := s.at(score, write, order)
				if single {
					p.Score = nil
				}
				ps = append(ps, p)
			}
			i, act = len(crowd), 0
			crowd = append(crowd, ps)
		}
		ps := crowd[i]
		try, tombstone, raise := random.IntN(4) == 0, random.IntN(4) == 0, uint64(rank())
		age := time.Duration(max(0, random.IntN(6)-2)) * time.Hour
		switch act {
		case 0: // again, if it has acquired before
			run(step, ps, func(p *participant) script.Command { return p.Acquire(try, p.first, age) })
		case 1, 2, 3:
			run(step, ps, func(p *participant) script.Command { return p.Release(tombstone) })
			crowd = slices.Delete(crowd, i, i+1)
		case 4:
			for _, p := range ps {
				p.expire()
			}
		case 5:
			if ps[0].Score != nil {
				run(step, ps, func(p *participant) script.Command { return p.Renew(raise) })
				break
			}
			fallthrough
		default:
			run(step, ps, func(p *participant) script.Command { return p.Renew(0) })
		}
	}
}

// Promise 9: each new writer has a token above all before it, with a score or without, in random sequences. The replies
// have the right flag and the right highest score.
func TestTokensRiseWithScoresAndWithout(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *server) {
		writer, highest := "", int64(0)
		s.setCounter(ahead)
		walk(600, func(step int, ps []*participant, command func(*participant) script.Command) {
			p := ps[0]
			if s.rc.Exists(ctx, s.keys.Name()).Val() == 0 {
				writer = "" // its lease has ended
			}
			c := command(p)
			r := p.must(p.calls(c))
			holder, token := s.rc.Get(ctx, s.keys.Name()).Val(), s.counter() // "": no writer
			if token < highest || token == highest && holder != "" && holder != writer {
				s.Fatalf("step %d: token %d for %q, after %d for %q", step, token, holder, highest, writer)
			}
			if r.Status == script.Granted && p.Write && r.Value != token {
				s.Fatalf("step %d: token %d, but the counter is %d", step, r.Value, token)
			}
			writer, highest = holder, token
			var holders []*participant
			for _, id := range s.holders() {
				holders = append(holders, &participant{id: id})
			}
			s.held(holders...) // promise 8
			if preceded, last := p.others(r.Status == script.Granted); c.Script != script.Unlock && (r.Preceded != preceded || r.Last != last) {
				s.Fatalf("step %d: %+v, want preceded %t, last %d", step, r, preceded, last)
			}
		}, s)
	})
}

// others returns what the reply to p has to say of the other waiters.
func (p *participant) others(holds bool) (preceded bool, last int64) {
	if p.Score == nil {
		return false, 0
	}
	score, _ := strconv.ParseFloat(p.Score.(string), 64)
	for _, z := range p.rc.ZRangeWithScores(context.Background(), p.server.keys.Intents(), 0, -1).Val() {
		preceded = preceded || holds && (z.Score < score || z.Score == score && z.Member.(string) < p.member())
		if last = int64(z.Score); last < 0 {
			last += span
		}
	}
	return preceded, last
}

// living returns the holders whose lease has not ended.
func (s *server) living() []string {
	return slices.DeleteFunc(s.holders(), func(id string) bool {
		ends, err := s.rc.ZScore(context.Background(), s.keys.Leases(), id).Result()
		return err == nil && ends == 1 // see expire
	})
}

// slowed returns a verb without its fast paths.
func slowed(verb string, s *script.Script) *script.Script { return s.Variant(lua.SlowSource(verb)) }

// The fast paths reply the same as the slow ones and leave the same in Redis but for expired participants, with a score or
// without.
func TestFastPathsAgreeWithTheSlow(t *testing.T) {
	slow := map[*script.Script]*script.Script{
		script.Lock: slowed("lock", script.Lock), script.RLock: slowed("rlock", script.RLock),
		script.Refresh: slowed("refresh", script.Refresh), script.Unlock: slowed("unlock", script.Unlock),
	}
	onBothServers(t, func(s *server) {
		keys, err := script.NewKeys("slow")
		if err != nil {
			t.Fatal(err)
		}
		twin := &server{T: s.T, rc: s.rc, ep: s.ep, keys: keys}
		s.setCounter(ahead)
		twin.setCounter(ahead)
		walk(600, func(step int, ps []*participant, command func(*participant) script.Command) {
			fast := command(ps[0])
			got := ps[0].must(ps[0].calls(fast))
			want := ps[1].must(ps[1].calls(command(ps[1]).With(slow[fast.Script])))
			if why := s.differs(twin, fast, got, want); why != "" {
				s.Fatalf("step %d: the fast path and the slow: %s", step, why)
			}
		}, s, twin)
	})
}

// differs returns in what the replies of s and its twin to c differ, or what they leave in Redis; "" if in nothing.
func (s *server) differs(twin *server, c script.Command, got, want script.Reply) string {
	ctx := context.Background()
	if got.Status == script.Waiting && max(got.Value, want.Value)-min(got.Value, want.Value) < 10_000 {
		got.Value = want.Value // the leases did not begin together
	}
	if c.Script == script.Unlock || got.Last < ahead {
		got.Last = want.Last // a release has none; or it comes from the server's clock
	}
	if (got.Holder == "") == (want.Holder == "") {
		got.Holder = want.Holder // any of the readers
	}
	if got != want {
		return fmt.Sprintf("%+v and %+v", got, want)
	}
	for _, of := range []func(*server) string{
		func(s *server) string { return fmt.Sprint("held by ", s.living()) },
		func(s *server) string {
			return fmt.Sprint("in the queue ", s.rc.ZRange(ctx, s.keys.Intents(), 0, -1).Val())
		},
		func(s *server) string { return fmt.Sprint("last token ", s.counter()) },
	} {
		if got, want := of(s), of(twin); got != want {
			return got + " and " + want
		}
	}
	return ""
}

// Promise 4: an acquire that takes several calls, since more leases have ended than one call drops, leaves no intent
// behind. Otherwise the id would be granted the lock once more after its release.
func TestAcquireAgainAmongManyExpiredReaders(t *testing.T) {
	onBothServers(t, func(s *server) {
		var readers []*participant
		for range 500 {
			r := s.r(1)
			s.is(r.acquire(), script.Granted)
			readers = append(readers, r)
		}
		w, later := s.w(20), s.w(30)
		s.join(later)
		for _, r := range readers {
			r.expire()
		}
		s.is(w.acquire(), script.Granted) // by three calls of one batch each
		s.queued(later)
		s.inTurn([]*participant{w}, []*participant{later})
	})
}

// Promise 10: a request with a score gets ErrNotLock for foreign data too, and takes no score from a foreign sorted set.
func TestForeignDataIsRefusedToThoseWithAScore(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *server) {
		for name, put := range map[string]func(key string) error{
			"string":      func(k string) error { return s.rc.Set(ctx, k, "data", 0).Err() },
			"hash":        func(k string) error { return s.rc.HSet(ctx, k, "f", "v").Err() },
			"zset":        func(k string) error { return s.rc.ZAdd(ctx, k, redis.Z{Score: 3.9e15, Member: "v"}).Err() },
			"zset of ns":  func(k string) error { return s.rc.ZAdd(ctx, k, redis.Z{Score: 1.7e18, Member: "v"}).Err() },
			"old counter": func(k string) error { return s.rc.Set(ctx, k, "41", 0).Err() },
		} {
			for _, key := range []string{s.keys.Name(), s.keys.Intents(), s.keys.Leases(), s.keys.Token()} {
				for _, p := range []*participant{s.w(10), s.r(10), s.at(10, true, writersFirst)} {
					if !p.Write && key == s.keys.Token() {
						continue // a reader needs no token
					}
					s.rc.FlushDB(ctx)
					if err := put(key); err != nil {
						s.Fatal(err)
					}
					before := s.dump()
					r, err := p.calls(p.Acquire(false, p.first, 0))
					if r.Status != script.Foreign && !errors.Is(err, ErrNotLock) || r.Last != 0 {
						s.Errorf("%s at %s: %+v, %v", name, key, r, err)
					}
					if after := s.dump(); after != before {
						s.Errorf("%s at %s: before %s, after %s", name, key, before, after)
					}
				}
			}
		}
	})
}
