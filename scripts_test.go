package redismutex

// This file answers: do the scripts keep the promises, each on miniredis and on
// a real Redis? Participants act here by the scripts alone, without a client's
// timers, and a lease ends when the test says so.

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/mailbox"
	"github.com/redismutex/redismutex/internal/redistest"
)

// A stage is a server, and a lock on it that participants act on.
type stage struct {
	*testing.T
	rc   *redis.Client
	ep   *endpoint
	keys *keys
	ids  int
}

func onBothServers(t *testing.T, f func(s *stage)) {
	open := func(t *testing.T, rc *redis.Client) {
		keys, err := newKeys("lock")
		if err != nil {
			t.Fatal(err)
		}
		f(&stage{T: t, rc: rc, ep: endpointOf(rc), keys: keys})
	}
	t.Run("miniredis", func(t *testing.T) {
		redistest.MiniLocks(t)
		m := miniredis.RunT(t)
		m.ClockTTL(true)
		rc := redis.NewClient(&redis.Options{Addr: m.Addr()})
		t.Cleanup(func() { rc.Close() })
		open(t, rc)
	})
	t.Run("redis", func(t *testing.T) { open(t, redistest.Start(t).Client(t)) })
}

// A party is one participant.
type party struct {
	*stage
	*stake
	id string
}

func (s *stage) party(write bool, ttl time.Duration, order order) *party {
	s.Helper()
	s.ids++
	m := &RWMutex{nodes: []*endpoint{s.ep}, ttl: ttl, order: order,
		ttlArg: fmt.Sprint(ttl.Milliseconds()), buryArg: fmt.Sprint(2 * ttl.Milliseconds())}
	id := fmt.Sprintf("redismutex:box:%d", s.ids)
	h := &hold{m: m, keys: s.keys, write: write}
	return &party{s, &stake{hold: h, write: write, id: id}, id}
}

func (k *keys) intents() string { return k.args[1].(string) }
func (k *keys) leases() string  { return k.args[2].(string) }
func (k *keys) token() string   { return k.args[3].(string) }

func (s *stage) writer() *party { return s.party(true, time.Minute, firstCome) }
func (s *stage) reader() *party { return s.party(false, time.Minute, firstCome) }

func (p *party) must(r reply, err error) reply {
	p.Helper()
	if err != nil {
		p.Fatal(err)
	}
	return r
}

func (p *party) enter() reply { return p.must(p.stake.enter(context.Background(), false, nil)) }
func (p *party) try() reply   { return p.must(p.stake.enter(context.Background(), true, nil)) }
func (p *party) keep() reply {
	return p.must(p.ep.run(context.Background(), MaxTTL, refreshScript, p.keepCmd(p.kind(), 0)))
}
func (p *party) keepHold() reply {
	return p.must(p.ep.run(context.Background(), MaxTTL, refreshScript, p.keepHoldCmd()))
}

// downgrade is a keep that says "r".
func (p *party) downgrade() reply {
	return p.must(p.ep.run(context.Background(), MaxTTL, refreshScript, p.keepCmd("r", 0)))
}
func (p *party) leave() reply {
	return p.must(p.ep.run(context.Background(), MaxTTL, unlockScript, p.leaveCmd()))
}

// die ends the lease of p, as time would.
func (p *party) die() {
	ctx := context.Background()
	if p.rc.Type(ctx, p.stage.keys.holder).Val() == "string" && p.rc.Get(ctx, p.stage.keys.holder).Val() == p.id {
		p.rc.Del(ctx, p.stage.keys.holder)
		return
	}
	if n := p.rc.ZAddXX(ctx, p.stage.keys.leases(), redis.Z{Score: 1, Member: p.id}).Err(); n != nil {
		p.Fatal(n)
	}
}

func (s *stage) is(r reply, want status) {
	s.Helper()
	if r.status != want {
		s.Fatalf("status %d, want %d", r.status, want)
	}
}

// holders is who holds, as Redis has it.
func (s *stage) holders() []string {
	ctx := context.Background()
	switch s.rc.Type(ctx, s.keys.holder).Val() {
	case "string":
		return []string{s.rc.Get(ctx, s.keys.holder).Val()}
	case "set":
		ids := s.rc.SMembers(ctx, s.keys.holder).Val()
		slices.Sort(ids)
		return ids
	}
	return nil
}

func (s *stage) held(by ...*party) {
	s.Helper()
	var want []string
	for _, p := range by {
		want = append(want, p.id)
	}
	slices.Sort(want)
	if got := s.holders(); !slices.Equal(got, want) {
		s.Fatalf("held by %q, want %q", got, want)
	}
	ctx := context.Background()
	for _, key := range s.rc.Keys(ctx, "*").Val() {
		if ttl := s.rc.PTTL(ctx, key).Val(); ttl <= 0 {
			s.Fatalf("%s lives for %v", key, ttl) // promise 8
		}
	}
}

// Promise 1.
func TestOneWriterOrManyReaders(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, w2, r, r2 := s.writer(), s.writer(), s.reader(), s.reader()
		s.is(w.enter(), granted)
		s.is(w2.try(), busy)
		s.is(r.try(), busy)
		s.is(w.leave(), left)
		s.is(r.enter(), granted)
		s.is(r2.enter(), granted)
		s.is(w2.try(), busy)
		s.held(r, r2)
	})
}

// Promise 5: whoever leaves hands on, in the same script, to one writer or to
// the whole run of readers in front.
func TestLeaveHandsOnToTheNextInOrder(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, r1, r2, w2, r3 := s.writer(), s.reader(), s.reader(), s.writer(), s.reader()
		s.is(w.enter(), granted)
		for _, p := range []*party{r1, r2, w2, r3} {
			s.is(p.enter(), waiting)
		}
		s.is(w.leave(), left)
		s.held(r1, r2)
		s.is(r1.leave(), left)
		s.held(r2)
		s.is(r2.leave(), left)
		s.held(w2)
		s.is(w2.leave(), left)
		s.held(r3)
	})
}

// Promise 5: nor does it hand on to the dead.
func TestLeavePassesOverTheDead(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, dead, dead2, next := s.writer(), s.writer(), s.reader(), s.writer()
		s.is(w.enter(), granted)
		for _, p := range []*party{dead, dead2, next} {
			s.is(p.enter(), waiting)
		}
		dead.die()
		dead2.die()
		s.is(w.leave(), left)
		s.held(next)
	})
}

// Promises 5 and 6: readers do not pass a writer that waits, and when it gives
// up they go in at once.
func TestReadersBehindACancelledWriterGoIn(t *testing.T) {
	onBothServers(t, func(s *stage) {
		r, w, r2 := s.reader(), s.writer(), s.reader()
		s.is(r.enter(), granted)
		s.is(w.enter(), waiting)
		s.is(r2.enter(), waiting)
		s.is(w.leave(), left)
		s.held(r, r2)
	})
}

// Promise 6.
func TestWriterNotStarvedByReaders(t *testing.T) {
	onBothServers(t, func(s *stage) {
		first, w := s.reader(), s.writer()
		s.is(first.enter(), granted)
		s.is(w.enter(), waiting)
		for range 5 {
			s.is(s.reader().enter(), waiting)
			s.is(s.reader().try(), busy)
		}
		s.is(first.leave(), left)
		s.held(w)
	})
}

// Promise 6: WithLockIntent and WithReaderPriority, one algorithm with three
// ranks.
func TestOrderOfChoice(t *testing.T) {
	for _, c := range []struct {
		order order
		want  string // the order in which the waiters get the lock
	}{{firstCome, "w1 r1 w2 r2"}, {writersFirst, "w1 w2 r1+r2"}, {readersFirst, "r1+r2 w1 w2"}} {
		onBothServers(t, func(s *stage) {
			names := map[string]string{}
			join := func(name string) *party {
				p := s.party(name[0] == 'w', time.Minute, c.order)
				names[p.id] = name
				return p
			}
			holder, waiters := s.writer(), map[string]*party{}
			s.is(holder.enter(), granted)
			for _, name := range []string{"w1", "r1", "w2", "r2"} {
				waiters[name] = join(name)
				s.is(waiters[name].enter(), waiting)
			}
			s.is(holder.leave(), left)
			var got []string
			for len(s.holders()) > 0 {
				var turn []string
				for _, id := range s.holders() {
					turn = append(turn, names[id])
				}
				slices.Sort(turn)
				got = append(got, strings.Join(turn, "+"))
				for _, name := range turn {
					s.is(waiters[name].leave(), left)
				}
			}
			if got := strings.Join(got, " "); got != c.want {
				s.Errorf("order %d: %q, want %q", c.order, got, c.want)
			}
		})
	}
}

// Promise 6, and the rule: ties, and a clock that steps back, never reorder.
func TestClockThatStepsBackDoesNotReorder(t *testing.T) {
	for _, order := range []order{firstCome, writersFirst} {
		onBothServers(t, func(s *stage) {
			ctx := context.Background()
			s.is(s.writer().enter(), granted)
			early := s.party(true, time.Minute, order)
			s.is(early.enter(), waiting)
			// As if it had come an hour later, by a clock that was then set back.
			if err := s.rc.ZIncrBy(ctx, s.keys.intents(), 3.6e9, "w"+early.id).Err(); err != nil {
				s.Fatal(err)
			}
			late := s.party(true, time.Minute, order)
			s.is(late.enter(), waiting)
			if order := s.rc.ZRange(ctx, s.keys.intents(), 0, -1).Val(); order[1] != "w"+late.id {
				s.Errorf("order %q", order)
			}
		})
	}
}

// Promise 3, and the rule of settle: never touch a string. Whatever the leases
// say of it, a writer's lease is the key's own TTL.
func TestDropNeverTouchesAWriter(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, r := s.writer(), s.reader()
		s.is(w.enter(), granted)
		s.is(r.enter(), waiting)
		s.rc.ZAdd(context.Background(), s.keys.leases(), redis.Z{Score: 1, Member: w.id})
		s.is(r.keep(), waiting)
		s.is(w.keep(), granted)
		s.held(w)
	})
}

// Promise 3, and the rule: a waiter that becomes the writer loses its entry in
// the leases, or one day it ends a writer that lives.
func TestWriterHasNoEntryInTheLeases(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, w2, r := s.writer(), s.writer(), s.reader()
		s.is(w.enter(), granted)
		s.is(w2.enter(), waiting)
		s.is(r.enter(), waiting)
		s.is(w.leave(), left)
		s.held(w2)
		if leases := s.rc.ZRange(context.Background(), s.keys.leases(), 0, -1).Val(); !slices.Equal(leases, []string{r.id}) {
			s.Errorf("leases %q, want those of the waiter alone", leases)
		}
	})
}

// Promise 5, and the rule of enter: what a dead holder frees goes to who waits,
// not to who tries.
func TestTryFindsADeadHolderAndHandsOn(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, w2 := s.writer(), s.writer()
		s.is(w.enter(), granted)
		s.is(w2.enter(), waiting)
		w.die()
		s.is(s.writer().try(), busy)
		s.held(w2)
	})
}

// Promise 5, and the rule of enter: a try that fails leaves no trace, so that
// nobody waits behind it.
func TestFailedTryLeavesNoTrace(t *testing.T) {
	onBothServers(t, func(s *stage) {
		ctx := context.Background()
		r := s.reader()
		s.is(r.enter(), granted)
		before := s.dump()
		s.is(s.writer().try(), busy)
		if after := s.dump(); after != before {
			s.Errorf("before %s, after %s", before, after)
		}
		if s.rc.Exists(ctx, s.keys.intents()).Val() != 0 {
			s.Error("a try stands in the queue")
		}
		s.is(s.reader().try(), granted)
	})
}

// Promise 5, and the rule of enter: whoever fits and has nobody before it is
// granted in the very script, a writer before the waiting readers included.
func TestEnterIsGrantedWhatIsFree(t *testing.T) {
	onBothServers(t, func(s *stage) {
		r, dead, late := s.reader(), s.writer(), s.reader()
		s.is(r.enter(), granted)
		s.is(dead.enter(), waiting)
		dead.die()
		s.is(late.enter(), granted) // the writer before it is dead
		s.held(r, late)

		first := s.party(false, time.Minute, readersFirst)
		s.is(s.writer().enter(), waiting)
		s.is(first.enter(), granted) // it ranks before the writer that waits
		s.held(r, late, first)
	})
}

// Promise 5, and the rule of keep: it settles whatever the answer. Here the
// caller itself is gone, and it stood in the way.
func TestKeepOfADeadReaderLetsTheWriterIn(t *testing.T) {
	onBothServers(t, func(s *stage) {
		r, w := s.reader(), s.writer()
		s.is(r.enter(), granted)
		s.is(w.enter(), waiting)
		r.die()
		s.is(r.keep(), gone)
		s.held(w)
	})
}

// Promise 5, and the rule of keep: it settles first and answers then, so a
// waiter whose turn has come learns it from its own keep.
func TestKeepOfTheNextInLineIsItsGrant(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, w2 := s.writer(), s.writer()
		token := s.is2(w.enter(), granted)
		s.is(w2.enter(), waiting)
		w.die()
		if next := s.is2(w2.keep(), granted); next <= token {
			s.Errorf("token %d after %d", next, token)
		}
	})
}

func (s *stage) is2(r reply, want status) int64 {
	s.Helper()
	s.is(r, want)
	return r.value
}

// Promise 3: a keep never enters anyone again.
func TestKeepNeverReenters(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, r := s.writer(), s.reader()
		s.is(w.keep(), gone)
		s.is(r.keep(), gone)
		s.is(w.enter(), granted)
		s.is(w.leave(), left)
		s.is(w.keep(), gone)
		if short := w.must(s.ep.run(context.Background(), MaxTTL, refreshScript, w.keepHoldCmd())); short.status != gone {
			s.Errorf("status %d", short.status)
		}
		s.held()
	})
}

// Promise 3: a 20 s reader is not cut short by a 2 s reader.
func TestShortReaderDoesNotTruncateALongOne(t *testing.T) {
	onBothServers(t, func(s *stage) {
		ctx := context.Background()
		long, short := s.party(false, 20*time.Second, firstCome), s.party(false, 2*time.Second, firstCome)
		s.is(long.enter(), granted)
		s.is(short.enter(), granted)
		s.is(short.keep(), granted)
		if ttl := s.rc.PTTL(ctx, s.keys.holder).Val(); ttl < 15*time.Second {
			s.Errorf("the holders' key lives %v", ttl)
		}
		short.die()
		s.is(s.writer().try(), busy)
		s.held(long)
	})
}

// Promises 3 and 8: a crashed reader leaves alone while others renew.
func TestDeadReaderGoesWhileOthersRenew(t *testing.T) {
	onBothServers(t, func(s *stage) {
		dead, alive := s.reader(), s.reader()
		s.is(dead.enter(), granted)
		s.is(alive.enter(), granted)
		dead.die()
		s.is(alive.keep(), granted)
		s.held(alive)
	})
}

// Promise 3: neither a try, nor another writer, nor their leaves clear the
// intent of a writer that waits.
func TestNobodyClearsAnothersIntent(t *testing.T) {
	onBothServers(t, func(s *stage) {
		r, w, other := s.reader(), s.writer(), s.writer()
		s.is(r.enter(), granted)
		s.is(w.enter(), waiting)
		s.is(s.writer().try(), busy)
		s.is(s.reader().try(), busy)
		s.is(other.enter(), waiting)
		s.is(other.leave(), left)
		s.is(s.writer().leave(), gone)
		s.is(w.keep(), waiting)
		s.is(r.leave(), left)
		s.held(w)
	})
}

// Promise 4: every script may be sent twice.
func TestScriptsAreIdempotentPerID(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, w2, r := s.writer(), s.writer(), s.reader()
		token := s.is2(w.enter(), granted)
		if again := s.is2(w.enter(), granted); again != token {
			s.Errorf("token %d, then %d", token, again)
		}
		s.is(w2.enter(), waiting)
		s.is(w2.enter(), waiting)
		s.is(r.enter(), waiting)
		s.is(r.enter(), waiting)
		if again := s.is2(w.enter(), granted); again != token {
			s.Errorf("token %d, then %d", token, again)
		}
		if n := s.rc.ZCard(context.Background(), s.keys.intents()).Val(); n != 2 {
			s.Errorf("%d intents", n)
		}
		s.is(w.leave(), left)
		s.is(w.leave(), gone)
		s.held(w2)
		s.is(w2.leave(), left)
		s.is(r.enter(), granted)
		s.held(r)
	})
}

// Promise 4, and the rule of leave: an enter that lands after its own leave is
// refused, by whichever way it comes in.
func TestTombstoneRefusesALateEnter(t *testing.T) {
	onBothServers(t, func(s *stage) {
		for _, p := range []*party{s.writer(), s.reader()} {
			p.bury = true
			s.is(p.leave(), gone)
			s.is(p.enter(), buried)
			s.is(p.try(), buried)
			s.held()
		}
		w := s.writer()
		s.is(w.enter(), granted) // nobody else is refused
		s.is(s.writer().enter(), waiting)
		for _, p := range []*party{s.writer(), s.reader()} {
			p.bury = true
			s.is(p.leave(), gone)
			s.is(p.enter(), buried)
		}
		w.bury = true
		s.is(w.leave(), left)
		s.is(w.enter(), buried)
		if ttl := s.rc.PTTL(context.Background(), s.keys.leases()).Val(); ttl <= time.Minute || ttl > 2*time.Minute {
			s.Errorf("the tombstone stays %v, want two TTLs of a minute", ttl)
		}
	})
}

// Promise 7: one message per mailbox, and it names all that have been granted.
func TestGrantsToOneMailboxTravelTogether(t *testing.T) {
	onBothServers(t, func(s *stage) {
		ctx := context.Background()
		sub := s.rc.Subscribe(ctx, "redismutex:box")
		defer sub.Close()
		if _, err := sub.Receive(ctx); err != nil {
			s.Fatal(err)
		}
		w := s.writer()
		w.id, w.stake.id = "redismutex:another:1", "redismutex:another:1"
		s.is(w.enter(), granted)
		readers := []*party{s.reader(), s.reader(), s.reader()}
		for _, r := range readers {
			s.is(r.enter(), waiting)
		}
		last := s.writer()
		s.is(last.enter(), waiting)
		s.is(w.leave(), left)
		if got := s.message(sub); got != "0 2 3 4" {
			s.Errorf("message %q", got)
		}
		last.die()
		s.is(readers[0].leave(), left)
		late := s.writer()
		s.is(late.enter(), waiting)
		s.is(readers[1].leave(), left)
		readers[2].die()
		s.is(s.reader().try(), busy) // which hands on
		token := s.rc.Get(ctx, s.keys.token()).Val()
		if got := s.message(sub); got != token+" 6" {
			s.Errorf("message %q, token %s", got, token)
		}
	})
}

// Promise 7: what the leave of one frees for another of the same mailbox is no
// message at all, but part of the reply.
func TestGrantsToTheCallersMailboxTravelInTheReply(t *testing.T) {
	onBothServers(t, func(s *stage) {
		ctx := context.Background()
		w, r, r2, w2 := s.writer(), s.reader(), s.reader(), s.writer()
		s.is(w.enter(), granted)
		for _, p := range []*party{r, r2, w2} {
			s.is(p.enter(), waiting)
		}
		reply := w.leave()
		s.is(reply, left)
		if reply.grants != "0 2 3" {
			s.Errorf("grants %q", reply.grants)
		}
		s.is(r.leave(), left)
		reply = r2.leave()
		if token := s.rc.Get(ctx, s.keys.token()).Val(); reply.grants != token+" 4" {
			s.Errorf("grants %q, token %s", reply.grants, token)
		}
	})
}

func (s *stage) message(sub *redis.PubSub) string {
	s.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	m, err := sub.ReceiveMessage(ctx)
	if err != nil {
		s.Fatal(err)
	}
	return m.Payload
}

// Promise 8: no key is without a TTL, and none outlives the longest lease but
// the token. Also where that shrinks: the TTL is the longest lease's, exactly.
func TestKeysLiveAsLongAsTheLongestLease(t *testing.T) {
	onBothServers(t, func(s *stage) {
		ctx := context.Background()
		long, short := s.party(false, time.Hour, firstCome), s.party(false, time.Minute, firstCome)
		w := s.party(true, 10*time.Minute, firstCome)
		check := func(longest time.Duration, keys ...string) {
			s.Helper()
			for _, key := range keys {
				if ttl := s.rc.PTTL(ctx, key).Val(); ttl <= longest-10*time.Second || ttl > longest {
					s.Errorf("%s lives %v, want %v", key, ttl, longest)
				}
			}
		}
		s.is(long.enter(), granted)
		s.is(short.enter(), granted)
		s.is(w.enter(), waiting)
		check(time.Hour, s.keys.holder, s.keys.intents(), s.keys.leases())
		s.is(long.leave(), left)
		check(10*time.Minute, s.keys.holder, s.keys.intents(), s.keys.leases())
		s.is(w.leave(), left)
		check(time.Minute, s.keys.holder, s.keys.leases())
		s.is(w.party(true, time.Hour, firstCome).enter(), waiting)
		s.is(s.party(true, time.Minute, firstCome).enter(), waiting)
		s.is(short.leave(), left) // the writer with the long lease is in
		check(time.Hour, s.keys.holder)
		check(time.Minute, s.keys.intents(), s.keys.leases())

		// The same from writer to writer, which is quicker.
		s.rc.Del(ctx, s.keys.holder, s.keys.intents(), s.keys.leases())
		w, long = s.party(true, time.Minute, firstCome), s.party(true, time.Hour, firstCome)
		s.is(w.enter(), granted)
		s.is(s.party(true, time.Minute, firstCome).enter(), waiting)
		check(time.Minute, s.keys.intents(), s.keys.leases())
		s.is(long.enter(), waiting)
		s.is(s.party(true, time.Minute, firstCome).enter(), waiting)
		check(time.Hour, s.keys.intents(), s.keys.leases())
		s.is(w.leave(), left)
		check(time.Minute, s.keys.holder)
		check(time.Hour, s.keys.intents(), s.keys.leases())
		s.rc.Del(ctx, s.keys.holder)
		s.is(long.keep(), granted)
		check(time.Hour, s.keys.holder)
		check(time.Minute, s.keys.intents(), s.keys.leases())
		long2, after := s.party(true, 2*time.Hour, writersFirst), s.party(true, time.Minute, firstCome)
		s.is(long2.enter(), waiting)
		s.is(after.enter(), waiting)
		s.is(long.leave(), left)
		s.held(long2)
		check(time.Minute, s.keys.intents(), s.keys.leases())
	})
}

// Promise 9.
func TestTokensRise(t *testing.T) {
	onBothServers(t, func(s *stage) {
		ctx := context.Background()
		var highest int64
		rises := func(token int64) {
			s.Helper()
			if token <= highest {
				s.Errorf("token %d after %d", token, highest)
			}
			highest = token
		}
		for range 3 {
			w := s.writer()
			rises(s.is2(w.enter(), granted))
			s.is(w.leave(), left)
		}
		before := highest
		s.rc.Del(ctx, s.keys.token()) // expired, or lost with all the rest
		w := s.writer()
		rises(s.is2(w.enter(), granted))
		if s.rc.PTTL(ctx, s.keys.token()).Val() <= 0 {
			s.Error("the counter has no TTL")
		}
		// A counter that expires under its holder.
		s.rc.Del(ctx, s.keys.token())
		if again := s.is2(w.enter(), granted); again < highest {
			s.Errorf("token %d after %d", again, highest)
		}
		r := s.reader()
		s.is(r.enter(), waiting)
		s.is(w.leave(), left)
		s.is(r.leave(), left)
		next, last := s.writer(), s.writer()
		rises(s.is2(next.enter(), granted))
		s.is(last.enter(), waiting)
		s.rc.Del(ctx, s.keys.token()) // and one that expires while somebody waits
		var told, n int64
		if _, err := fmt.Sscan(next.leave().grants, &told, &n); err != nil {
			s.Error(err)
		}
		rises(told)
		if again := s.is2(last.enter(), granted); again != told {
			s.Errorf("token %d, then %d", told, again)
		}
		s.held(last)
		if before < 1e15 {
			s.Errorf("token %d does not begin at the server's clock", before)
		}
	})
}

// Promise 10: what is no lock is said so, and left alone.
func TestForeignDataIsRefusedAndLeftAlone(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *stage) {
		for name, put := range map[string]func(key string) error{
			"string": func(k string) error { return s.rc.Set(ctx, k, "data", 0).Err() },
			"hash":   func(k string) error { return s.rc.HSet(ctx, k, "f", "v").Err() },
			"list":   func(k string) error { return s.rc.RPush(ctx, k, "v").Err() },
			"set":    func(k string) error { return s.rc.SAdd(ctx, k, "v").Err() },
			"zset":   func(k string) error { return s.rc.ZAdd(ctx, k, redis.Z{Member: "v"}).Err() },
			"stream": func(k string) error {
				return s.rc.XAdd(ctx, &redis.XAddArgs{Stream: k, Values: []string{"a", "b"}}).Err()
			},
			"set with TTL": func(k string) error {
				return errors.Join(s.rc.SAdd(ctx, k, "v").Err(), s.rc.Expire(ctx, k, time.Hour).Err())
			},
			"counter": func(k string) error { return s.rc.Set(ctx, k, "41", 0).Err() },
		} {
			for _, key := range []string{s.keys.holder, s.keys.intents(), s.keys.leases(), s.keys.token()} {
				s.rc.FlushAll(ctx)
				if err := put(key); err != nil {
					s.Fatal(err)
				}
				before := s.lines()[key]
				// On a busy machine a reply takes so long that the request may have been sent twice; the release that
				// follows in the background leaves a tombstone, beside which a set with a TTL looks like ours.
				s.ep.resend = math.MaxInt64
				m := NewMutex(s.rc, "lock")
				if _, err := m.TryLockContext(ctx); !errors.Is(err, ErrNotLock) || errors.Is(err, ErrLock) {
					s.Errorf("%s at %s: %v", name, key, err)
				}
				if _, err := m.LockContext(ctx); !errors.Is(err, ErrNotLock) {
					s.Errorf("%s at %s: %v", name, key, err)
				}
				if key != s.keys.token() {
					if _, err := m.RLockContext(ctx); !errors.Is(err, ErrNotLock) {
						s.Errorf("%s at %s: %v", name, key, err)
					}
				}
				if after := s.lines()[key]; !after.same(before) {
					s.Errorf("%s at %s: before %v, after %v", name, key, before, after)
				}
			}
		}
	})
}

// Promise 10: also where it comes to stand there while somebody waits.
func TestForeignDataEndsAWait(t *testing.T) {
	onBothServers(t, func(s *stage) {
		holder, w, w2 := s.writer(), s.writer(), s.writer()
		s.is(holder.enter(), granted)
		s.is(w.enter(), waiting)
		s.rc.Set(context.Background(), s.keys.holder, "data", 0)
		s.is(w2.enter(), foreign)
		s.is(w.keep(), foreign)
		s.is(s.writer().try(), foreign)
		s.is(s.reader().enter(), foreign)
	})
}

// Nor does anyone join a set that has come to stand there.
func TestForeignSetIsNotJoined(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *stage) {
		holder, r, w := s.writer(), s.reader(), s.writer()
		s.is(holder.enter(), granted)
		s.is(r.enter(), waiting)
		s.is(w.enter(), waiting)
		s.rc.Del(ctx, s.keys.holder)
		s.rc.SAdd(ctx, s.keys.holder, "data", w.id)
		s.is(r.keep(), foreign)
		s.is(s.reader().try(), foreign)
		w.die()
		s.is(holder.leave(), foreign)
		s.is(w.leave(), foreign)
		s.is(r.leave(), foreign)
		if n := s.rc.Exists(ctx, s.keys.intents(), s.keys.leases()).Val(); n != 0 {
			s.Errorf("who has left stands in %d keys", n)
		}
		members, ttl := s.rc.SCard(ctx, s.keys.holder).Val(), s.rc.PTTL(ctx, s.keys.holder).Val()
		if members != 2 || ttl != -1 {
			s.Errorf("%d members, of 2, live for %v", members, ttl)
		}
	})
}

// Nor where nobody waits, but a lease of ours is left.
func TestForeignSetIsNotJoinedBesideATombstone(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *stage) {
		gave := s.reader()
		gave.bury = true
		s.is(gave.leave(), gone)
		s.rc.SAdd(ctx, s.keys.holder, "data")
		before := s.dump()
		s.is(s.reader().enter(), foreign)
		s.is(s.reader().try(), foreign)
		if after := s.dump(); after != before {
			s.Errorf("before %s, after %s", before, after)
		}
	})
}

// Nor does anyone join a queue that is none, whoever holds.
func TestForeignQueueIsNotJoined(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *stage) {
		for _, holder := range []*party{s.writer(), s.reader()} {
			s.is(holder.enter(), granted)
			s.rc.ZAdd(ctx, s.keys.intents(), redis.Z{Score: 1, Member: "data"})
			before := s.dump()
			s.is(s.writer().enter(), foreign)
			s.is(s.reader().enter(), foreign)
			if after := s.dump(); after != before {
				s.Errorf("before %s, after %s", before, after)
			}
			s.rc.FlushDB(ctx)
		}
	})
}

// dump is all the data there is, but not how long it lives.
func (s *stage) dump() string {
	ctx := context.Background()
	var lines []string
	for _, key := range s.rc.Keys(ctx, "*").Val() {
		var v any
		switch s.rc.Type(ctx, key).Val() {
		case "string":
			v = s.rc.Get(ctx, key).Val()
		case "hash":
			v = s.rc.HGetAll(ctx, key).Val()
		case "list":
			v = s.rc.LRange(ctx, key, 0, -1).Val()
		case "set":
			v = s.rc.SMembers(ctx, key).Val()
		case "zset":
			v = s.rc.ZRangeWithScores(ctx, key, 0, -1).Val()
		case "stream":
			v = s.rc.XLen(ctx, key).Val()
		}
		lines = append(lines, fmt.Sprint(key, "=", v))
	}
	slices.Sort(lines)
	return strings.Join(lines, "; ")
}

// No script moves more than a batch at a time, and the caller is told to go on:
// the run of readers goes in nevertheless, and so goes a crowd of the dead.
func TestBatchesAreMovedToTheEnd(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w := s.writer()
		s.is(w.enter(), granted)
		var readers []*party
		for range 1201 {
			r := s.reader()
			s.is(r.enter(), waiting)
			readers = append(readers, r)
		}
		s.is(w.leave(), left)
		s.held(readers...)
		for _, r := range readers {
			r.die()
		}
		next := s.writer()
		s.is(next.try(), granted)
		s.held(next)
	})
}

// Promise 5: where the one who moved a batch does not go on, whoever comes next does.
func TestWhoeverComesNextMovesTheRest(t *testing.T) {
	for name, comes := range map[string]func(s *stage, holder, waiter *party) cmd{
		"enter":            func(s *stage, _, _ *party) cmd { return s.reader().enterCmd(false) },
		"leave":            func(_ *stage, holder, _ *party) cmd { return holder.leaveCmd() },
		"keep":             func(_ *stage, holder, _ *party) cmd { return holder.keepCmd("r", 0) },
		"keep of a waiter": func(_ *stage, _, waiter *party) cmd { return waiter.keepCmd("r", 0) },
	} {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			onBothServers(t, func(s *stage) {
				verb := map[string]*script{"enter": rlockScript, "leave": unlockScript}[name]
				if verb == nil {
					verb = refreshScript
				}
				w := s.writer()
				s.is(w.enter(), granted)
				first := s.reader()
				s.is(first.enter(), waiting)
				last := first
				for range 600 {
					last = s.reader()
					s.is(last.enter(), waiting)
				}
				once := func(verb *script, c cmd) {
					if r := first.must(verb.parse(s.ep.eval(ctx, verb, c))); !r.more {
						s.Errorf("%+v, want more", r)
					}
				}
				once(unlockScript, w.leaveCmd())
				waited := s.rc.ZCard(ctx, s.keys.intents()).Val()
				s.rc.ZIncrBy(ctx, s.keys.leases(), -1000, last.id) // it has waited for a second
				once(verb, comes(s, first, last))
				if waits := s.rc.ZCard(ctx, s.keys.intents()).Val(); waits > waited-200 {
					s.Errorf("%d wait, of %d", waits, waited)
				}
			})
		})
	}
}

// Promise 3: whose lease is gone is given no other by a keep.
func TestKeepMakesNoLease(t *testing.T) {
	onBothServers(t, func(s *stage) {
		holder, waiter := s.writer(), s.writer()
		s.is(holder.enter(), granted)
		s.is(waiter.enter(), waiting)
		s.is(s.writer().enter(), waiting)
		s.rc.ZRem(context.Background(), s.keys.leases(), waiter.id)
		s.is(waiter.keep(), gone)
	})
}

// Promises 5 and 8: the head that a leave has taken out of the queue is put back where there
// is too much to settle first, and the queue does not outlive its leases.
func TestHeadIsPutBackWhereManyAreDead(t *testing.T) {
	onBothServers(t, func(s *stage) {
		ctx := context.Background()
		holder, head := s.writer(), s.reader()
		s.is(holder.enter(), granted)
		s.is(head.enter(), waiting)
		for range 250 { // as many as one script lets go
			dead := s.writer()
			s.is(dead.enter(), waiting)
			dead.die()
		}
		if r := head.must(unlockScript.parse(s.ep.eval(ctx, unlockScript, holder.leaveCmd()))); r.status != left || !r.more {
			t.Errorf("%+v", r)
		}
		s.queued(head)
		if ttl := s.rc.PTTL(ctx, s.keys.intents()).Val(); ttl <= 0 {
			t.Errorf("the queue lives for %v", ttl)
		}
		s.is(holder.leave(), gone)
		s.held(head)
	})
}

// Promises 5 and 8: the last reader hands on to a writer, leaves no lease behind, and
// the keys live no longer than the leases that are left. One whose lease has ended is
// told so.
func TestLastReaderHandsOnToAWriter(t *testing.T) {
	onBothServers(t, func(s *stage) {
		ctx := context.Background()
		first := s.writer()
		s.is(first.enter(), granted) // the counter is made
		s.is(first.leave(), left)
		for _, longest := range []time.Duration{time.Second * 30, time.Hour} {
			reader, next, last := s.party(false, longest, firstCome), s.writer(), s.party(true, 2*time.Minute, firstCome)
			s.is(reader.enter(), granted)
			s.is(next.enter(), waiting)
			s.is(last.enter(), waiting)
			s.is(reader.leave(), left)
			s.held(next)
			s.queued(last)
			if ids := s.rc.ZRange(ctx, s.keys.leases(), 0, -1).Val(); !slices.Equal(ids, []string{last.id}) {
				t.Errorf("leases of %q", ids)
			}
			for _, key := range []string{s.keys.intents(), s.keys.leases()} {
				if ttl := s.rc.PTTL(ctx, key).Val(); ttl <= 0 || ttl > 2*time.Minute {
					t.Errorf("%s lives for %v", key, ttl)
				}
			}
			s.is(next.leave(), left)
			s.is(last.leave(), left)
		}
		dead, next := s.reader(), s.writer()
		s.is(dead.enter(), granted)
		s.is(next.enter(), waiting)
		s.is(s.party(true, 2*time.Minute, firstCome).enter(), waiting)
		dead.die()
		s.is(dead.leave(), gone)
		s.held(next)
	})
}

// A tombstone is there for two TTLs: meanwhile those whom it does not concern are
// served by the fast path, which does not ask what the holder key is.
func TestTombstonesSlowNobodyDown(t *testing.T) {
	rc := redistest.Start(t).Client(t)
	keys, err := newKeys("lock")
	if err != nil {
		t.Fatal(err)
	}
	s := &stage{T: t, rc: rc, ep: endpointOf(rc), keys: keys}
	first, dead := s.writer(), s.writer()
	s.is(first.enter(), granted) // the counter is made
	s.is(first.leave(), left)
	dead.bury = true
	s.is(dead.leave(), gone)
	if err := rc.ConfigResetStat(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	w := s.writer()
	s.is(w.enter(), granted)
	s.is(w.leave(), left)
	if stats := rc.Info(t.Context(), "commandstats").Val(); strings.Contains(stats, "cmdstat_type:") {
		t.Error(stats)
	}
	s.is(dead.enter(), buried)
	s.held()
}

// Promises 1, 5 and 6.
func TestWriterBecomesReaderWithoutAnotherWriterInBetween(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, r, r2, w2, r3 := s.writer(), s.reader(), s.reader(), s.writer(), s.reader()
		token := w.enter().value
		for _, p := range []*party{r, r2, w2, r3} {
			s.is(p.enter(), waiting)
		}
		s.is(w.downgrade(), granted)
		s.held(w, r, r2) // the readers in front, and no one behind the writer
		s.is(w.downgrade(), granted)
		s.held(w, r, r2)
		s.is(w.keep(), granted) // one that crosses it, as a writer
		s.is(w.keepHold(), gone)
		s.held(w, r, r2)
		s.is(r.leave(), left)
		s.is(r2.leave(), left)
		s.is(w.leave(), left)
		s.held(w2)
		if next := w2.keep().value; next <= token {
			s.Fatalf("token %d after %d", next, token) // promise 9
		}
		s.is(w.downgrade(), gone) // one that comes too late
		s.held(w2)
		s.is(w2.leave(), left)
		s.held(r3)
	})
}

// Promise 5: a writer that has died between readers who wait holds nobody up once
// the first of them is let in.
func TestRunOfReadersPassesDeadWriters(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, r, dead, r2 := s.writer(), s.reader(), s.writer(), s.reader()
		s.is(w.enter(), granted)
		for _, p := range []*party{r, dead, r2} {
			s.is(p.enter(), waiting)
		}
		dead.die()
		s.is(w.leave(), left)
		s.held(r, r2)
	})
}

// Promise 8: a tombstone alone does not outlive itself, when the waiter with the
// longest lease has gone from the leases by becoming the writer.
func TestLeasesLiveNoLongerThanTheLongest(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, gone, next := s.writer(), s.party(true, 3*time.Second, firstCome), s.party(true, time.Hour, firstCome)
		s.is(w.enter(), granted)
		s.is(gone.enter(), waiting)
		gone.bury = true
		s.is(gone.leave(), left)
		s.is(next.enter(), waiting)
		s.is(w.leave(), left)
		s.held(next)
		if ttl := s.rc.PTTL(context.Background(), s.keys.leases()).Val(); ttl > 6*time.Second {
			s.Errorf("the leases live for %v, a tombstone for 6s", ttl)
		}
	})
}

// Promise 3: its lease is its own from then on, and ends like a reader's.
func TestLeaseOfADowngradedWriterEnds(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, w2 := s.writer(), s.writer()
		s.is(w.enter(), granted)
		s.is(w2.enter(), waiting)
		s.is(w.downgrade(), granted)
		s.held(w)
		w.die()
		s.is(w2.keep(), granted)
		s.held(w2)
	})
}

// Only who holds to write is made a reader: neither a waiter nor one that has
// left.
func TestDowngradeEntersNobody(t *testing.T) {
	onBothServers(t, func(s *stage) {
		w, w2, w3 := s.writer(), s.writer(), s.writer()
		s.is(w.enter(), granted)
		s.is(w2.enter(), waiting)
		s.is(w2.downgrade(), gone)
		s.is(w3.downgrade(), gone)
		s.held(w)
		s.is(w2.keep(), waiting)
		s.is(w.leave(), left)
		s.held(w2)
	})
}

// Promise 10: somebody's data where the lease would go stays, and so does the
// writer.
func TestDowngradeLeavesForeignDataAlone(t *testing.T) {
	onBothServers(t, func(s *stage) {
		ctx := context.Background()
		for _, key := range []string{s.keys.leases(), s.keys.intents()} {
			w := s.writer()
			s.is(w.enter(), granted)
			s.rc.ZAdd(ctx, key, redis.Z{Score: 1, Member: "mine"})
			if r := w.downgrade(); r.status != foreign || r.data != "zset:"+key {
				s.Fatalf("status %d, %q", r.status, r.data)
			}
			if s.rc.ZCard(ctx, key).Val() != 1 || !slices.Equal(s.holders(), []string{w.id}) {
				s.Fatal("it was touched")
			}
			s.rc.Del(ctx, key)
			s.is(w.leave(), left)
		}
	})
}

// Promise 9: a counter that has gone back, as on a replica that had not heard of the
// last grants when it took over, gives no token a second time.
func TestTokensRiseAlthoughTheCounterFallsBack(t *testing.T) {
	onBothServers(t, func(s *stage) {
		ctx := context.Background()
		grant := map[string]func() int64{
			"entered": func() int64 {
				w := s.writer()
				defer w.leave()
				return w.enter().value
			},
			"handed on by a writer": func() int64 {
				w, next := s.writer(), s.writer()
				s.is(w.enter(), granted)
				s.is(next.enter(), waiting)
				s.is(w.leave(), left)
				defer next.leave()
				return next.keep().value
			},
			"handed on by a reader": func() int64 {
				r, next := s.reader(), s.writer()
				s.is(r.enter(), granted)
				s.is(next.enter(), waiting)
				s.is(r.leave(), left)
				defer next.leave()
				return next.keep().value
			},
		}
		for name, next := range grant {
			s.writer().enter()
			s.rc.Del(ctx, s.keys.holder)
			old := s.rc.Get(ctx, s.keys.token()).Val()
			last := next()
			for range 3 {
				last = next()
			}
			s.rc.Set(ctx, s.keys.token(), old, time.Hour)
			if token := next(); token <= last {
				s.Errorf("%s: token %d after %d", name, token, last)
			}
		}
	})
}

// A call ends, whatever the server answers: when half the TTL is over, or where no time
// passes, after more batches than any queue has.
func TestCallIsRepeatedForHalfATTLAtMost(t *testing.T) {
	for _, took := range []time.Duration{0, time.Millisecond, time.Second} {
		for verb, name := range map[*script]string{lockScript: "acquire", refreshScript: "renew", unlockScript: "release"} {
			t.Run(fmt.Sprintf("%s, %v each", name, took), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					calls := 0
					ep := &endpoint{box: mailbox.New(nil, "box"), process: func(_ context.Context, c redis.Cmder) error {
						calls++
						time.Sleep(took)
						c.(*redis.Cmd).SetVal([]any{int64(waiting), int64(0), int64(1)}) // and more
						return nil
					}}
					const ttl = 10 * time.Second
					start := time.Now()
					r, err := ep.run(t.Context(), ttl, verb, cmd{"evalsha", verb.digest, "4"})
					if err != nil || r.status != waiting || !r.more {
						t.Errorf("%+v, %v", r, err)
					}
					if lasted := time.Since(start); lasted > ttl/2 || calls > mostBatches+1 || calls < 5 {
						t.Errorf("it lasted %v, %d calls; want %v and %d at most", lasted, calls, ttl/2, mostBatches+1)
					}
				})
			})
		}
	}
}
