package script_test

// The scripts alone, on miniredis and on a real Redis: no client with timers takes part, and a lease ends when the test
// ends it.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
	"github.com/redismutex/redismutex/lua"
)

// A server is a Redis with one lock, which participants act on.
type server struct {
	*testing.T
	rc   *redis.Client
	ep   *node.Node
	keys *script.Keys
	ids  int
}

func onBothServers(t *testing.T, f func(s *server)) {
	open := func(t *testing.T, rc *redis.Client) {
		keys, err := script.NewKeys("lock")
		if err != nil {
			t.Fatal(err)
		}
		f(&server{T: t, rc: rc, ep: node.Of(rc), keys: keys})
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

// A participant is one id on a server.
type participant struct {
	*server
	script.Participant
	id        string
	first     bool // it ranks before all waiters of the other kind
	age       time.Duration
	tombstone bool // its release leaves a tombstone
}

func (s *server) participant(write bool, ttl time.Duration, order order) *participant {
	s.Helper()
	s.ids++
	id := fmt.Sprintf("redismutex:box:%d", s.ids)
	return &participant{
		server:      s,
		Participant: script.Participant{Keys: s.keys, Durations: script.NewDurations(ttl), ID: id, Write: write},
		id:          id,
		first:       order == writersFirst && write || order == readersFirst && !write,
	}
}

func (s *server) writer() *participant { return s.participant(true, time.Minute, firstCome) }
func (s *server) reader() *participant { return s.participant(false, time.Minute, firstCome) }

func (p *participant) must(r script.Reply, err error) script.Reply {
	p.Helper()
	if err != nil {
		p.Fatal(err)
	}
	return r
}

// calls sends a command, and repeats it while the reply says "more".
func (p *participant) calls(c script.Command) (script.Reply, error) {
	return p.ep.Run(context.Background(), MaxTTL, c)
}

// once sends a command once, even if the reply says "more".
func (s *server) once(c script.Command) (script.Reply, error) {
	return c.Script.Parse(s.send(c))
}

func (s *server) send(c script.Command) *redis.Cmd {
	ctx := context.Background()
	sent := c.Redis(ctx)
	if err := s.rc.Process(ctx, sent); redis.HasErrorPrefix(err, "NOSCRIPT") {
		sent = c.WithSource().Redis(ctx)
		_ = s.rc.Process(ctx, sent)
	}
	return sent
}

// asReader returns the writer p as one that renews as a reader, which downgrades it.
func (p *participant) asReader() script.Participant {
	reader := p.Participant
	reader.Write = false
	return reader
}

func (p *participant) acquire() script.Reply {
	p.Helper()
	return p.must(p.calls(p.Acquire(false, p.first, p.age)))
}
func (p *participant) try() script.Reply {
	p.Helper()
	return p.must(p.calls(p.Acquire(true, p.first, p.age)))
}
func (p *participant) renew() script.Reply      { p.Helper(); return p.must(p.calls(p.Renew(0))) }
func (p *participant) renewAlone() script.Reply { p.Helper(); return p.must(p.calls(p.RenewWriter())) }
func (p *participant) downgrade() script.Reply {
	p.Helper()
	return p.must(p.calls(p.asReader().Renew(0)))
}
func (p *participant) release() script.Reply {
	p.Helper()
	return p.must(p.calls(p.Release(p.tombstone)))
}

// expire ends the lease of p, as time would.
func (p *participant) expire() {
	ctx := context.Background()
	if p.rc.Type(ctx, p.server.keys.Name()).Val() == "string" && p.rc.Get(ctx, p.server.keys.Name()).Val() == p.id {
		p.rc.Del(ctx, p.server.keys.Name())
		return
	}
	if n := p.rc.ZAddXX(ctx, p.server.keys.Leases(), redis.Z{Score: 1, Member: p.id}).Err(); n != nil {
		p.Fatal(n)
	}
}

// is checks the status of a reply.
func (s *server) is(r script.Reply, want script.Status) {
	s.Helper()
	if r.Status != want {
		s.Fatalf("status %d, want %d", r.Status, want)
	}
}

// holders returns the ids that hold the lock in Redis.
func (s *server) holders() []string {
	ctx := context.Background()
	switch s.rc.Type(ctx, s.keys.Name()).Val() {
	case "string":
		return []string{s.rc.Get(ctx, s.keys.Name()).Val()}
	case "set":
		ids := s.rc.SMembers(ctx, s.keys.Name()).Val()
		slices.Sort(ids)
		return ids
	}
	return nil
}

// held checks the holders, and that every key has a TTL.
func (s *server) held(by ...*participant) {
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
			s.Fatalf("%s has the TTL %v, want a positive one", key, ttl) // promise 8
		}
	}
}

// Promise 1.
func TestOneWriterOrManyReaders(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, w2, r, r2 := s.writer(), s.writer(), s.reader(), s.reader()
		s.is(w.acquire(), script.Granted)
		s.is(w2.try(), script.Busy)
		s.is(r.try(), script.Busy)
		s.is(w.release(), script.Released)
		s.is(r.acquire(), script.Granted)
		s.is(r2.acquire(), script.Granted)
		s.is(w2.try(), script.Busy)
		s.held(r, r2)
	})
}

// Promise 5: a release hands the lock on in the same script, to one writer or to the whole run of readers in front.
func TestReleaseHandsOnToTheNextInOrder(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, r1, r2, w2, r3 := s.writer(), s.reader(), s.reader(), s.writer(), s.reader()
		s.is(w.acquire(), script.Granted)
		for _, p := range []*participant{r1, r2, w2, r3} {
			s.is(p.acquire(), script.Waiting)
		}
		s.is(w.release(), script.Released)
		s.held(r1, r2)
		s.is(r1.release(), script.Released)
		s.held(r2)
		s.is(r2.release(), script.Released)
		s.held(w2)
		s.is(w2.release(), script.Released)
		s.held(r3)
	})
}

// Promise 5: a waiter whose lease has ended is not granted the lock.
func TestReleasePassesOverExpiredWaiters(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, expired, expired2, next := s.writer(), s.writer(), s.reader(), s.writer()
		s.is(w.acquire(), script.Granted)
		for _, p := range []*participant{expired, expired2, next} {
			s.is(p.acquire(), script.Waiting)
		}
		expired.expire()
		expired2.expire()
		s.is(w.release(), script.Released)
		s.held(next)
	})
}

// Promises 5 and 6: readers do not overtake a waiting writer. When it gives up they are granted at once.
func TestReadersBehindAWriterThatGivesUpAreGranted(t *testing.T) {
	onBothServers(t, func(s *server) {
		r, w, r2 := s.reader(), s.writer(), s.reader()
		s.is(r.acquire(), script.Granted)
		s.is(w.acquire(), script.Waiting)
		s.is(r2.acquire(), script.Waiting)
		s.is(w.release(), script.Released)
		s.held(r, r2)
	})
}

// Promise 6: no reader overtakes a waiting writer, nor does a try.
func TestWriterNotStarvedByReaders(t *testing.T) {
	onBothServers(t, func(s *server) {
		first, w := s.reader(), s.writer()
		s.is(first.acquire(), script.Granted)
		s.is(w.acquire(), script.Waiting)
		for range 5 {
			s.is(s.reader().acquire(), script.Waiting)
			s.is(s.reader().try(), script.Busy)
		}
		s.is(first.release(), script.Released)
		s.held(w)
	})
}

// Promise 6: first come, WithLockIntent and WithReaderPriority.
func TestOrderOfChoice(t *testing.T) {
	for _, c := range []struct {
		order order
		want  string // the order in which the waiters get the lock
	}{{firstCome, "w1 r1 w2 r2"}, {writersFirst, "w1 w2 r1+r2"}, {readersFirst, "r1+r2 w1 w2"}} {
		onBothServers(t, func(s *server) {
			names := map[string]string{}
			join := func(name string) *participant {
				p := s.participant(name[0] == 'w', time.Minute, c.order)
				names[p.id] = name
				return p
			}
			holder, waiters := s.writer(), map[string]*participant{}
			s.is(holder.acquire(), script.Granted)
			for _, name := range []string{"w1", "r1", "w2", "r2"} {
				waiters[name] = join(name)
				s.is(waiters[name].acquire(), script.Waiting)
			}
			s.is(holder.release(), script.Released)
			var got []string
			for len(s.holders()) > 0 {
				var turn []string
				for _, id := range s.holders() {
					turn = append(turn, names[id])
				}
				slices.Sort(turn)
				got = append(got, strings.Join(turn, "+"))
				for _, name := range turn {
					s.is(waiters[name].release(), script.Released)
				}
			}
			if got := strings.Join(got, " "); got != c.want {
				s.Errorf("order %d: granted in the order %q, want %q", c.order, got, c.want)
			}
		})
	}
}

// Promise 6: neither a tie nor a clock that steps back reorders the queue.
func TestClockThatStepsBackDoesNotReorder(t *testing.T) {
	for _, order := range []order{firstCome, writersFirst} {
		onBothServers(t, func(s *server) {
			ctx := context.Background()
			s.is(s.writer().acquire(), script.Granted)
			early := s.participant(true, time.Minute, order)
			s.is(early.acquire(), script.Waiting)
			// As if it had joined an hour later, by a clock that was then set back.
			if err := s.rc.ZIncrBy(ctx, s.keys.Intents(), 3.6e9, "w"+early.id).Err(); err != nil {
				s.Fatal(err)
			}
			late := s.participant(true, time.Minute, order)
			s.is(late.acquire(), script.Waiting)
			if order := s.rc.ZRange(ctx, s.keys.Intents(), 0, -1).Val(); order[1] != "w"+late.id {
				s.Errorf("queue %q, want %q second", order, "w"+late.id)
			}
		})
	}
}

// Promise 3: a writer's lease is the TTL of the holder key, so an entry of it in the leases does not end it.
func TestDropNeverTouchesAWriter(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, r := s.writer(), s.reader()
		s.is(w.acquire(), script.Granted)
		s.is(r.acquire(), script.Waiting)
		s.rc.ZAdd(context.Background(), s.keys.Leases(), redis.Z{Score: 1, Member: w.id})
		s.is(r.renew(), script.Waiting)
		s.is(w.renew(), script.Granted)
		s.held(w)
	})
}

// Promise 3: a waiter that becomes the writer loses its entry in the leases. Left there, it would end too early later.
func TestWriterHasNoEntryInTheLeases(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, w2, r := s.writer(), s.writer(), s.reader()
		s.is(w.acquire(), script.Granted)
		s.is(w2.acquire(), script.Waiting)
		s.is(r.acquire(), script.Waiting)
		s.is(w.release(), script.Released)
		s.held(w2)
		if leases := s.rc.ZRange(context.Background(), s.keys.Leases(), 0, -1).Val(); !slices.Equal(leases, []string{r.id}) {
			s.Errorf("leases of %q, want only that of the waiter", leases)
		}
	})
}

// Promise 5: the lock of an expired holder goes to the waiter, not to the try that finds it.
func TestTryHandsOnTheLockOfAnExpiredHolder(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, w2 := s.writer(), s.writer()
		s.is(w.acquire(), script.Granted)
		s.is(w2.acquire(), script.Waiting)
		w.expire()
		s.is(s.writer().try(), script.Busy)
		s.held(w2)
	})
}

// Promise 5: a try that is refused leaves no trace, so nobody waits behind it.
func TestFailedTryLeavesNoTrace(t *testing.T) {
	onBothServers(t, func(s *server) {
		ctx := context.Background()
		r := s.reader()
		s.is(r.acquire(), script.Granted)
		before := s.dump()
		s.is(s.writer().try(), script.Busy)
		if after := s.dump(); after != before {
			s.Errorf("before %s, after %s", before, after)
		}
		if s.rc.Exists(ctx, s.keys.Intents()).Val() != 0 {
			s.Error("a try is in the queue")
		}
		s.is(s.reader().try(), script.Granted)
	})
}

// Promise 5: an acquire that fits the holders, with no living waiter of a lower rank, is granted by its own script.
func TestAcquireIsGrantedWhatIsFree(t *testing.T) {
	onBothServers(t, func(s *server) {
		r, expired, late := s.reader(), s.writer(), s.reader()
		s.is(r.acquire(), script.Granted)
		s.is(expired.acquire(), script.Waiting)
		expired.expire()
		s.is(late.acquire(), script.Granted) // the lease of the writer before it has ended
		s.held(r, late)

		first := s.participant(false, time.Minute, readersFirst)
		s.is(s.writer().acquire(), script.Waiting)
		s.is(first.acquire(), script.Granted) // it ranks before the waiting writer
		s.held(r, late, first)
	})
}

// Promise 5: a renewal hands on whatever its own status is. Here the caller's lease has ended, and it blocked the writer.
func TestRenewalOfAnExpiredReaderGrantsTheWriter(t *testing.T) {
	onBothServers(t, func(s *server) {
		r, w := s.reader(), s.writer()
		s.is(r.acquire(), script.Granted)
		s.is(w.acquire(), script.Waiting)
		r.expire()
		s.is(r.renew(), script.Gone)
		s.held(w)
	})
}

// Promise 5: a renewal hands on before it replies, so a waiter may learn of its grant from its own renewal.
func TestRenewalOfTheNextInLineIsItsGrant(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, w2 := s.writer(), s.writer()
		token := s.value(w.acquire(), script.Granted)
		s.is(w2.acquire(), script.Waiting)
		w.expire()
		if next := s.value(w2.renew(), script.Granted); next <= token {
			s.Errorf("token %d after %d", next, token)
		}
	})
}

// value checks the status of a reply and returns its value.
func (s *server) value(r script.Reply, want script.Status) int64 {
	s.Helper()
	s.is(r, want)
	return r.Value
}

// Promise 3: a renewal acquires for nobody.
func TestRenewalNeverAcquires(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, r := s.writer(), s.reader()
		s.is(w.renew(), script.Gone)
		s.is(r.renew(), script.Gone)
		s.is(w.acquire(), script.Granted)
		s.is(w.release(), script.Released)
		s.is(w.renew(), script.Gone)
		if short := w.renewAlone(); short.Status != script.Gone {
			s.Errorf("renewed with the holder key alone: status %d, want %d", short.Status, script.Gone)
		}
		s.held()
	})
}

// Promise 3: a reader with a TTL of 2 s does not shorten the lease of one with 20 s.
func TestShortLeaseDoesNotShortenALongOne(t *testing.T) {
	onBothServers(t, func(s *server) {
		ctx := context.Background()
		long, short := s.participant(false, 20*time.Second, firstCome), s.participant(false, 2*time.Second, firstCome)
		s.is(long.acquire(), script.Granted)
		s.is(short.acquire(), script.Granted)
		s.is(short.renew(), script.Granted)
		if ttl := s.rc.PTTL(ctx, s.keys.Name()).Val(); ttl < 15*time.Second {
			s.Errorf("the holder key has the TTL %v, want 15s at least", ttl)
		}
		short.expire()
		s.is(s.writer().try(), script.Busy)
		s.held(long)
	})
}

// Promises 3 and 8: the lease of a crashed reader ends although other readers renew theirs.
func TestExpiredReaderIsDroppedWhileOthersRenew(t *testing.T) {
	onBothServers(t, func(s *server) {
		crashed, alive := s.reader(), s.reader()
		s.is(crashed.acquire(), script.Granted)
		s.is(alive.acquire(), script.Granted)
		crashed.expire()
		s.is(alive.renew(), script.Granted)
		s.held(alive)
	})
}

// Promise 3: neither a try nor another writer nor their releases remove the intent of a waiting writer.
func TestNobodyClearsAnothersIntent(t *testing.T) {
	onBothServers(t, func(s *server) {
		r, w, other := s.reader(), s.writer(), s.writer()
		s.is(r.acquire(), script.Granted)
		s.is(w.acquire(), script.Waiting)
		s.is(s.writer().try(), script.Busy)
		s.is(s.reader().try(), script.Busy)
		s.is(other.acquire(), script.Waiting)
		s.is(other.release(), script.Released)
		s.is(s.writer().release(), script.Gone)
		s.is(w.renew(), script.Waiting)
		s.is(r.release(), script.Released)
		s.held(w)
	})
}

// Promise 4: every script may be sent twice.
func TestScriptsAreIdempotentPerID(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, w2, r := s.writer(), s.writer(), s.reader()
		token := s.value(w.acquire(), script.Granted)
		if again := s.value(w.acquire(), script.Granted); again != token {
			s.Errorf("token %d, then %d", token, again)
		}
		s.is(w2.acquire(), script.Waiting)
		s.is(w2.acquire(), script.Waiting)
		s.is(r.acquire(), script.Waiting)
		s.is(r.acquire(), script.Waiting)
		if again := s.value(w.acquire(), script.Granted); again != token {
			s.Errorf("token %d, then %d", token, again)
		}
		if n := s.rc.ZCard(context.Background(), s.keys.Intents()).Val(); n != 2 {
			s.Errorf("%d intents, want 2", n)
		}
		s.is(w.release(), script.Released)
		s.is(w.release(), script.Gone)
		s.held(w2)
		s.is(w2.release(), script.Released)
		s.is(r.acquire(), script.Granted)
		s.held(r)
	})
}

// Promise 4: an acquire that arrives after its own release with a tombstone is refused, on every path of the script.
func TestTombstoneRefusesALateAcquire(t *testing.T) {
	onBothServers(t, func(s *server) {
		for _, p := range []*participant{s.writer(), s.reader()} {
			p.tombstone = true
			s.is(p.release(), script.Gone)
			s.is(p.acquire(), script.Tombstoned)
			s.is(p.try(), script.Tombstoned)
			s.held()
		}
		w := s.writer()
		s.is(w.acquire(), script.Granted) // nobody else is refused
		s.is(s.writer().acquire(), script.Waiting)
		for _, p := range []*participant{s.writer(), s.reader()} {
			p.tombstone = true
			s.is(p.release(), script.Gone)
			s.is(p.acquire(), script.Tombstoned)
		}
		w.tombstone = true
		s.is(w.release(), script.Released)
		s.is(w.acquire(), script.Tombstoned)
		if ttl := s.rc.PTTL(context.Background(), s.keys.Leases()).Val(); ttl <= time.Minute || ttl > 2*time.Minute {
			s.Errorf("the tombstone stays for %v, want two TTLs of a minute", ttl)
		}
	})
}

// Promise 7: a mailbox gets one message, which names all that have been granted.
func TestGrantsToOneMailboxTravelTogether(t *testing.T) {
	onBothServers(t, func(s *server) {
		ctx := context.Background()
		sub := s.rc.Subscribe(ctx, "redismutex:box")
		defer sub.Close()
		if _, err := sub.Receive(ctx); err != nil {
			s.Fatal(err)
		}
		w := s.writer()
		w.id, w.ID = "redismutex:another:1", "redismutex:another:1"
		s.is(w.acquire(), script.Granted)
		readers := []*participant{s.reader(), s.reader(), s.reader()}
		for _, r := range readers {
			s.is(r.acquire(), script.Waiting)
		}
		last := s.writer()
		s.is(last.acquire(), script.Waiting)
		s.is(w.release(), script.Released)
		if got := s.message(sub); got != "0 2 3 4" {
			s.Errorf("message %q, want the three readers in one", got)
		}
		last.expire()
		s.is(readers[0].release(), script.Released)
		late := s.writer()
		s.is(late.acquire(), script.Waiting)
		s.is(readers[1].release(), script.Released)
		readers[2].expire()
		s.is(s.reader().try(), script.Busy) // it hands on
		token := s.rc.Get(ctx, s.keys.Token()).Val()
		if got := s.message(sub); got != token+" 6" {
			s.Errorf("message %q, want token %s and the late writer", got, token)
		}
	})
}

// Promise 7: a grant to the mailbox of the caller of a release is part of the reply, and no message.
func TestGrantsToTheCallersMailboxTravelInTheReply(t *testing.T) {
	onBothServers(t, func(s *server) {
		ctx := context.Background()
		w, r, r2, w2 := s.writer(), s.reader(), s.reader(), s.writer()
		s.is(w.acquire(), script.Granted)
		for _, p := range []*participant{r, r2, w2} {
			s.is(p.acquire(), script.Waiting)
		}
		reply := w.release()
		s.is(reply, script.Released)
		if reply.Grants != "0 2 3" {
			s.Errorf("grants %q, want both readers", reply.Grants)
		}
		s.is(r.release(), script.Released)
		reply = r2.release()
		if token := s.rc.Get(ctx, s.keys.Token()).Val(); reply.Grants != token+" 4" {
			s.Errorf("grants %q, want token %s and the writer", reply.Grants, token)
		}
	})
}

// message returns the next message.
func (s *server) message(sub *redis.PubSub) string {
	s.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	m, err := sub.ReceiveMessage(ctx)
	if err != nil {
		s.Fatal(err)
	}
	return m.Payload
}

// Promise 8: every key but the token has exactly the TTL of the longest lease, also when that becomes shorter.
func TestKeysLiveAsLongAsTheLongestLease(t *testing.T) {
	onBothServers(t, func(s *server) {
		ctx := context.Background()
		long, short := s.participant(false, time.Hour, firstCome), s.participant(false, time.Minute, firstCome)
		w := s.participant(true, 10*time.Minute, firstCome)
		check := func(longest time.Duration, keys ...string) {
			s.Helper()
			for _, key := range keys {
				if ttl := s.rc.PTTL(ctx, key).Val(); ttl <= longest-10*time.Second || ttl > longest {
					s.Errorf("%s has the TTL %v, want %v", key, ttl, longest)
				}
			}
		}
		s.is(long.acquire(), script.Granted)
		s.is(short.acquire(), script.Granted)
		s.is(w.acquire(), script.Waiting)
		check(time.Hour, s.keys.Name(), s.keys.Intents(), s.keys.Leases())
		s.is(long.release(), script.Released)
		check(10*time.Minute, s.keys.Name(), s.keys.Intents(), s.keys.Leases())
		s.is(w.release(), script.Released)
		check(time.Minute, s.keys.Name(), s.keys.Leases())
		s.is(w.participant(true, time.Hour, firstCome).acquire(), script.Waiting)
		s.is(s.participant(true, time.Minute, firstCome).acquire(), script.Waiting)
		s.is(short.release(), script.Released) // the writer with the long lease holds
		check(time.Hour, s.keys.Name())
		check(time.Minute, s.keys.Intents(), s.keys.Leases())

		// The same from writer to writer, on the fast path.
		s.rc.Del(ctx, s.keys.Name(), s.keys.Intents(), s.keys.Leases())
		w, long = s.participant(true, time.Minute, firstCome), s.participant(true, time.Hour, firstCome)
		s.is(w.acquire(), script.Granted)
		s.is(s.participant(true, time.Minute, firstCome).acquire(), script.Waiting)
		check(time.Minute, s.keys.Intents(), s.keys.Leases())
		s.is(long.acquire(), script.Waiting)
		s.is(s.participant(true, time.Minute, firstCome).acquire(), script.Waiting)
		check(time.Hour, s.keys.Intents(), s.keys.Leases())
		s.is(w.release(), script.Released)
		check(time.Minute, s.keys.Name())
		check(time.Hour, s.keys.Intents(), s.keys.Leases())
		s.rc.Del(ctx, s.keys.Name())
		s.is(long.renew(), script.Granted)
		check(time.Hour, s.keys.Name())
		check(time.Minute, s.keys.Intents(), s.keys.Leases())
		long2, after := s.participant(true, 2*time.Hour, writersFirst), s.participant(true, time.Minute, firstCome)
		s.is(long2.acquire(), script.Waiting)
		s.is(after.acquire(), script.Waiting)
		s.is(long.release(), script.Released)
		s.held(long2)
		check(time.Minute, s.keys.Intents(), s.keys.Leases())
	})
}

// Promise 9: also when the counter expires.
func TestTokensRise(t *testing.T) {
	onBothServers(t, func(s *server) {
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
			rises(s.value(w.acquire(), script.Granted))
			s.is(w.release(), script.Released)
		}
		before := highest
		s.rc.Del(ctx, s.keys.Token()) // expired, or lost with all the rest
		w := s.writer()
		rises(s.value(w.acquire(), script.Granted))
		if s.rc.PTTL(ctx, s.keys.Token()).Val() <= 0 {
			s.Error("the counter has no TTL")
		}
		// A counter that expires under its holder.
		s.rc.Del(ctx, s.keys.Token())
		if again := s.value(w.acquire(), script.Granted); again < highest {
			s.Errorf("token %d after %d", again, highest)
		}
		r := s.reader()
		s.is(r.acquire(), script.Waiting)
		s.is(w.release(), script.Released)
		s.is(r.release(), script.Released)
		next, last := s.writer(), s.writer()
		rises(s.value(next.acquire(), script.Granted))
		s.is(last.acquire(), script.Waiting)
		s.rc.Del(ctx, s.keys.Token()) // and one that expires while a writer waits
		var told, n int64
		if _, err := fmt.Sscan(next.release().Grants, &told, &n); err != nil {
			s.Error(err)
		}
		rises(told)
		if again := s.value(last.acquire(), script.Granted); again != told {
			s.Errorf("token %d, then %d", told, again)
		}
		s.held(last)
		if before < 1e15 {
			s.Errorf("token %d, want one from the server's clock", before)
		}
	})
}

// Promise 10: foreign data under a key of the lock is reported as ErrNotLock and left as it is.
func TestForeignDataIsRefusedAndLeftAlone(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *server) {
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
			// On a busy machine a reply takes so long that a client that resends may have sent the request twice; the release
			// that follows in the background leaves a tombstone, beside which a set with a TTL looks like ours.
			once := redis.NewClient(&redis.Options{Addr: s.rc.Options().Addr, MaxRetries: -1})
			defer once.Close()
			for _, key := range []string{s.keys.Name(), s.keys.Intents(), s.keys.Leases(), s.keys.Token()} {
				s.rc.FlushAll(ctx)
				if err := put(key); err != nil {
					s.Fatal(err)
				}
				before := s.lines()[key]
				m := NewMutex(once, "lock")
				if _, err := m.TryLockContext(ctx); !errors.Is(err, ErrNotLock) || errors.Is(err, ErrLock) {
					s.Errorf("%s at %s: %v", name, key, err)
				}
				if _, err := m.LockContext(ctx); !errors.Is(err, ErrNotLock) {
					s.Errorf("%s at %s: %v", name, key, err)
				}
				if key != s.keys.Token() {
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

// Promise 10: waiters are refused once the holder key is overwritten by foreign data.
func TestForeignDataEndsAWait(t *testing.T) {
	onBothServers(t, func(s *server) {
		holder, w, w2 := s.writer(), s.writer(), s.writer()
		s.is(holder.acquire(), script.Granted)
		s.is(w.acquire(), script.Waiting)
		s.rc.Set(context.Background(), s.keys.Name(), "data", 0)
		s.is(w2.acquire(), script.Foreign)
		s.is(w.renew(), script.Foreign)
		s.is(s.writer().try(), script.Foreign)
		s.is(s.reader().acquire(), script.Foreign)
	})
}

// Promise 10: nobody is added to a foreign set, and a release still removes its own entries from the other keys.
func TestForeignSetIsNotJoined(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *server) {
		holder, r, w := s.writer(), s.reader(), s.writer()
		s.is(holder.acquire(), script.Granted)
		s.is(r.acquire(), script.Waiting)
		s.is(w.acquire(), script.Waiting)
		s.rc.Del(ctx, s.keys.Name())
		s.rc.SAdd(ctx, s.keys.Name(), "data", w.id)
		s.is(r.renew(), script.Foreign)
		s.is(s.reader().try(), script.Foreign)
		w.expire()
		s.is(holder.release(), script.Foreign)
		s.is(w.release(), script.Foreign)
		s.is(r.release(), script.Foreign)
		if n := s.rc.Exists(ctx, s.keys.Intents(), s.keys.Leases()).Val(); n != 0 {
			s.Errorf("%d keys are left after all have been released, want none", n)
		}
		members, ttl := s.rc.SCard(ctx, s.keys.Name()).Val(), s.rc.PTTL(ctx, s.keys.Name()).Val()
		if members != 2 || ttl != -1 {
			s.Errorf("the foreign set has %d members and the TTL %v, want 2 and none", members, ttl)
		}
	})
}

// Promise 10: the same if nobody waits but a lease of the lock is left.
func TestForeignSetIsNotJoinedBesideATombstone(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *server) {
		gaveUp := s.reader()
		gaveUp.tombstone = true
		s.is(gaveUp.release(), script.Gone)
		s.rc.SAdd(ctx, s.keys.Name(), "data")
		before := s.dump()
		s.is(s.reader().acquire(), script.Foreign)
		s.is(s.reader().try(), script.Foreign)
		if after := s.dump(); after != before {
			s.Errorf("before %s, after %s", before, after)
		}
	})
}

// Promise 10: no request joins a foreign sorted set in place of the queue, whether the lock is held or not.
func TestForeignQueueIsNotJoined(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *server) {
		for _, holder := range []*participant{s.writer(), s.reader()} {
			s.is(holder.acquire(), script.Granted)
			s.rc.ZAdd(ctx, s.keys.Intents(), redis.Z{Score: 1, Member: "data"})
			before := s.dump()
			s.is(s.writer().acquire(), script.Foreign)
			s.is(s.reader().acquire(), script.Foreign)
			if after := s.dump(); after != before {
				s.Errorf("before %s, after %s", before, after)
			}
			s.rc.FlushDB(ctx)
		}
	})
}

// dump returns all data on the server, without the TTLs.
func (s *server) dump() string {
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

// A script moves at most a batch of participants and replies "more". A long run of readers is granted all the same, and
// many expired readers are all dropped.
func TestBatchesAreMovedToTheEnd(t *testing.T) {
	onBothServers(t, func(s *server) {
		w := s.writer()
		s.is(w.acquire(), script.Granted)
		var readers []*participant
		for range 1201 {
			r := s.reader()
			s.is(r.acquire(), script.Waiting)
			readers = append(readers, r)
		}
		s.is(w.release(), script.Released)
		s.held(readers...)
		for _, r := range readers {
			r.expire()
		}
		next := s.writer()
		s.is(next.try(), script.Granted)
		s.held(next)
	})
}

// Promise 5: if the caller that moved a batch does not go on, the next script does.
func TestNextScriptMovesTheRest(t *testing.T) {
	for name, next := range map[string]func(s *server, holder, waiter *participant) script.Command{
		"acquire":             func(s *server, _, _ *participant) script.Command { return s.reader().Acquire(false, false, 0) },
		"release":             func(_ *server, holder, _ *participant) script.Command { return holder.Release(false) },
		"renewal":             func(_ *server, holder, _ *participant) script.Command { return holder.Renew(0) },
		"renewal of a waiter": func(_ *server, _, waiter *participant) script.Command { return waiter.Renew(0) },
	} {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			onBothServers(t, func(s *server) {
				w := s.writer()
				s.is(w.acquire(), script.Granted)
				first := s.reader()
				s.is(first.acquire(), script.Waiting)
				last := first
				for range 600 {
					last = s.reader()
					s.is(last.acquire(), script.Waiting)
				}
				once := func(c script.Command) {
					if r := first.must(s.once(c)); !r.More {
						s.Errorf("%+v, want more", r)
					}
				}
				once(w.Release(false))
				waited := s.rc.ZCard(ctx, s.keys.Intents()).Val()
				s.rc.ZIncrBy(ctx, s.keys.Leases(), -1000, last.id) // it has waited for a second
				once(next(s, first, last))
				if waits := s.rc.ZCard(ctx, s.keys.Intents()).Val(); waits > waited-200 {
					s.Errorf("%d of %d still wait, want 200 fewer at least", waits, waited)
				}
			})
		})
	}
}

// Promise 3: a renewal makes no lease for a waiter that has none.
func TestRenewalMakesNoLease(t *testing.T) {
	onBothServers(t, func(s *server) {
		holder, waiter := s.writer(), s.writer()
		s.is(holder.acquire(), script.Granted)
		s.is(waiter.acquire(), script.Waiting)
		s.is(s.writer().acquire(), script.Waiting)
		s.rc.ZRem(context.Background(), s.keys.Leases(), waiter.id)
		s.is(waiter.renew(), script.Gone)
	})
}

// Promises 5 and 8: the head of the queue keeps its place when a release has too many expired leases to drop before it
// can grant, and the queue does not outlive its leases.
func TestHeadIsPutBackWhenManyLeasesHaveEnded(t *testing.T) {
	onBothServers(t, func(s *server) {
		ctx := context.Background()
		holder, head := s.writer(), s.reader()
		s.is(holder.acquire(), script.Granted)
		s.is(head.acquire(), script.Waiting)
		for range 250 { // as many as one script drops
			expired := s.writer()
			s.is(expired.acquire(), script.Waiting)
			expired.expire()
		}
		if r := head.must(s.once(holder.Release(false))); r.Status != script.Released || !r.More {
			t.Errorf("%+v, want released and more", r)
		}
		s.queued(head)
		if ttl := s.rc.PTTL(ctx, s.keys.Intents()).Val(); ttl <= 0 {
			t.Errorf("the queue has the TTL %v, want a positive one", ttl)
		}
		s.is(holder.release(), script.Gone)
		s.held(head)
	})
}

// Promises 5 and 8: the last reader hands on to a writer and leaves no lease, and the keys live no longer than the
// remaining leases. The release of a reader whose lease has ended replies "gone".
func TestLastReaderHandsOnToAWriter(t *testing.T) {
	onBothServers(t, func(s *server) {
		ctx := context.Background()
		first := s.writer()
		s.is(first.acquire(), script.Granted) // the counter is made
		s.is(first.release(), script.Released)
		for _, longest := range []time.Duration{time.Second * 30, time.Hour} {
			reader, next, last := s.participant(false, longest, firstCome), s.writer(), s.participant(true, 2*time.Minute, firstCome)
			s.is(reader.acquire(), script.Granted)
			s.is(next.acquire(), script.Waiting)
			s.is(last.acquire(), script.Waiting)
			s.is(reader.release(), script.Released)
			s.held(next)
			s.queued(last)
			if ids := s.rc.ZRange(ctx, s.keys.Leases(), 0, -1).Val(); !slices.Equal(ids, []string{last.id}) {
				t.Errorf("leases of %q, want only that of the last waiter", ids)
			}
			for _, key := range []string{s.keys.Intents(), s.keys.Leases()} {
				if ttl := s.rc.PTTL(ctx, key).Val(); ttl <= 0 || ttl > 2*time.Minute {
					t.Errorf("%s has the TTL %v, want at most 2m", key, ttl)
				}
			}
			s.is(next.release(), script.Released)
			s.is(last.release(), script.Released)
		}
		expired, next := s.reader(), s.writer()
		s.is(expired.acquire(), script.Granted)
		s.is(next.acquire(), script.Waiting)
		s.is(s.participant(true, 2*time.Minute, firstCome).acquire(), script.Waiting)
		expired.expire()
		s.is(expired.release(), script.Gone)
		s.held(next)
	})
}

// While a tombstone is there, which is for two TTLs, all other ids still take the fast path: it runs no TYPE.
func TestTombstonesSlowNobodyDown(t *testing.T) {
	rc := redistest.Start(t).Client(t)
	keys, err := script.NewKeys("lock")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{T: t, rc: rc, ep: node.Of(rc), keys: keys}
	first, gaveUp := s.writer(), s.writer()
	s.is(first.acquire(), script.Granted) // the counter is made
	s.is(first.release(), script.Released)
	gaveUp.tombstone = true
	s.is(gaveUp.release(), script.Gone)
	if err := rc.ConfigResetStat(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	w := s.writer()
	s.is(w.acquire(), script.Granted)
	s.is(w.release(), script.Released)
	if stats := rc.Info(t.Context(), "commandstats").Val(); strings.Contains(stats, "cmdstat_type:") {
		t.Errorf("the slow path was taken: %s", stats)
	}
	s.is(gaveUp.acquire(), script.Tombstoned)
	s.held()
}

// Promises 1, 5 and 6: a downgrade grants to the readers in front, and to no writer.
func TestWriterBecomesReaderWithoutAnotherWriterInBetween(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, r, r2, w2, r3 := s.writer(), s.reader(), s.reader(), s.writer(), s.reader()
		token := w.acquire().Value
		for _, p := range []*participant{r, r2, w2, r3} {
			s.is(p.acquire(), script.Waiting)
		}
		s.is(w.downgrade(), script.Granted)
		s.held(w, r, r2) // the readers in front, and nobody behind the writer
		s.is(w.downgrade(), script.Granted)
		s.held(w, r, r2)
		s.is(w.renew(), script.Granted) // as a writer: a renewal that crosses the downgrade
		s.is(w.renewAlone(), script.Gone)
		s.held(w, r, r2)
		s.is(r.release(), script.Released)
		s.is(r2.release(), script.Released)
		s.is(w.release(), script.Released)
		s.held(w2)
		if next := w2.renew().Value; next <= token {
			s.Fatalf("token %d after %d", next, token) // promise 9
		}
		s.is(w.downgrade(), script.Gone) // after the release
		s.held(w2)
		s.is(w2.release(), script.Released)
		s.held(r3)
	})
}

// Promise 5: an expired writer between waiting readers does not hold up the second one when the first is granted.
func TestRunOfReadersPassesExpiredWriters(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, r, expired, r2 := s.writer(), s.reader(), s.writer(), s.reader()
		s.is(w.acquire(), script.Granted)
		for _, p := range []*participant{r, expired, r2} {
			s.is(p.acquire(), script.Waiting)
		}
		expired.expire()
		s.is(w.release(), script.Released)
		s.held(r, r2)
	})
}

// Promise 8: when the waiter with the longest lease becomes the writer, the lease key lives no longer than the tombstone
// that is left in it.
func TestLeasesLiveNoLongerThanTheLongest(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, gone, next := s.writer(), s.participant(true, 3*time.Second, firstCome), s.participant(true, time.Hour, firstCome)
		s.is(w.acquire(), script.Granted)
		s.is(gone.acquire(), script.Waiting)
		gone.tombstone = true
		s.is(gone.release(), script.Released)
		s.is(next.acquire(), script.Waiting)
		s.is(w.release(), script.Released)
		s.held(next)
		if ttl := s.rc.PTTL(context.Background(), s.keys.Leases()).Val(); ttl > 6*time.Second {
			s.Errorf("the lease key has the TTL %v, want at most the 6s of the tombstone", ttl)
		}
	})
}

// Promise 3: a downgraded writer has a lease of its own, which ends like that of a reader.
func TestLeaseOfADowngradedWriterEnds(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, w2 := s.writer(), s.writer()
		s.is(w.acquire(), script.Granted)
		s.is(w2.acquire(), script.Waiting)
		s.is(w.downgrade(), script.Granted)
		s.held(w)
		w.expire()
		s.is(w2.renew(), script.Granted)
		s.held(w2)
	})
}

// A downgrade affects only the writer that holds, not a waiter, and not one that has never acquired.
func TestDowngradeAcquiresForNobody(t *testing.T) {
	onBothServers(t, func(s *server) {
		w, w2, w3 := s.writer(), s.writer(), s.writer()
		s.is(w.acquire(), script.Granted)
		s.is(w2.acquire(), script.Waiting)
		s.is(w2.downgrade(), script.Gone)
		s.is(w3.downgrade(), script.Gone)
		s.held(w)
		s.is(w2.renew(), script.Waiting)
		s.is(w.release(), script.Released)
		s.held(w2)
	})
}

// Promise 10: a downgrade leaves foreign data under the lease or the intent key as it is, and the writer holds on.
func TestDowngradeLeavesForeignDataAlone(t *testing.T) {
	onBothServers(t, func(s *server) {
		ctx := context.Background()
		for _, key := range []string{s.keys.Leases(), s.keys.Intents()} {
			w := s.writer()
			s.is(w.acquire(), script.Granted)
			s.rc.ZAdd(ctx, key, redis.Z{Score: 1, Member: "mine"})
			if r := w.downgrade(); r.Status != script.Foreign || r.Data != "zset:"+key {
				s.Fatalf("status %d, %q, want %d, %q", r.Status, r.Data, script.Foreign, "zset:"+key)
			}
			if s.rc.ZCard(ctx, key).Val() != 1 || !slices.Equal(s.holders(), []string{w.id}) {
				s.Fatalf("foreign data at %s or the holder has changed", key)
			}
			s.rc.Del(ctx, key)
			s.is(w.release(), script.Released)
		}
	})
}

// Promise 9: a counter that falls back, as on a replica that takes over without having heard of the last grants, gives no
// token twice.
func TestTokensRiseAlthoughTheCounterFallsBack(t *testing.T) {
	onBothServers(t, func(s *server) {
		ctx := context.Background()
		for name, next := range s.waysToAToken() {
			s.writer().acquire()
			s.rc.Del(ctx, s.keys.Name())
			old := s.rc.Get(ctx, s.keys.Token()).Val()
			last := next()
			for range 3 {
				last = next()
			}
			s.rc.Set(ctx, s.keys.Token(), old, time.Hour)
			if token := next(); token <= last {
				s.Errorf("%s: token %d after %d", name, token, last)
			}
		}
	})
}

// waysToAToken are functions that acquire and release the lock, and return the token.
func (s *server) waysToAToken() map[string]func() int64 {
	return map[string]func() int64{
		"acquired": func() int64 {
			w := s.writer()
			defer w.release()
			return w.acquire().Value
		},
		"handed on by a writer": func() int64 {
			w, next := s.writer(), s.writer()
			s.is(w.acquire(), script.Granted)
			s.is(next.acquire(), script.Waiting)
			s.is(w.release(), script.Released)
			defer next.release()
			return next.renew().Value
		},
		"handed on by a reader": func() int64 {
			r, next := s.reader(), s.writer()
			s.is(r.acquire(), script.Granted)
			s.is(next.acquire(), script.Waiting)
			s.is(r.release(), script.Released)
			defer next.release()
			return next.renew().Value
		},
	}
}

// Promise 9: all that can become of the counter and of the clock, and still tokens rise. A clock that is set back shows in
// a counter that is ahead of it, and lives for longer than a day.
func TestTokensRiseWhateverBecomesOfTheCounter(t *testing.T) {
	const day, window = 24 * time.Hour, 10 * time.Millisecond
	onBothServers(t, func(s *server) {
		ctx := context.Background()
		for name, next := range s.waysToAToken() {
			for _, c := range []struct {
				what   string
				offset int64         // of the counter that is found, to the last one; 1: to the one before the last five grants
				life   time.Duration // that is left to it; 0: there is none
			}{
				{"a moment later", 0, day},
				{"when it is no longer recent", 0, day - window},
				{"just before it expires", 0, time.Minute},
				{"after it has expired, or an empty restart", 0, 0},
				{"on a replica that is behind, a failover later", 1, day - window},
				{"on a replica that is far behind", 1, time.Hour},
				{"after the clock was set back, recently", 3.6e9, day + time.Hour},
				{"after the clock was set back, when it is no longer recent", 3.6e9, day - window},
				{"after the clock was set back for less than the window", 5000, day + window/2},
			} {
				last := next()
				old := last
				for range 5 {
					last = next()
				}
				if c.offset != 1 {
					old = last + c.offset
					last = old
				}
				if err := s.rc.Set(ctx, s.keys.Token(), old, c.life).Err(); c.life == 0 {
					s.rc.Del(ctx, s.keys.Token())
				} else if err != nil {
					s.Fatal(err)
				}
				for range 3 {
					token := next()
					if token <= last {
						s.Errorf("%s, %s: token %d after %d", name, c.what, token, last)
					}
					last = token
				}
				if ttl := s.rc.PTTL(ctx, s.keys.Token()).Val(); ttl < day-time.Minute {
					s.Errorf("%s, %s: the counter lives for %v, want a day", name, c.what, ttl)
				}
				s.rc.Del(ctx, s.keys.Token())
			}
		}
	})
}

// Promise 8: the same where the server's clock moves within the script, as it does before Redis 7.2.
func TestHandOverShortensTheLifeOfTheKeysWhileTheClockMoves(t *testing.T) {
	ctx := context.Background()
	keys, err := script.NewKeys("lock")
	if err != nil {
		t.Fatal(err)
	}
	rc := redistest.Start(t).Client(t)
	s := &server{T: t, rc: rc, ep: node.Of(rc), keys: keys}
	reader, next, last := s.participant(false, time.Hour, firstCome), s.writer(), s.writer()
	s.is(reader.acquire(), script.Granted)
	s.join(next, last)
	const look = "	ttl_of_leases = call('PTTL', LEASES)\n"
	if n := strings.Count(script.Unlock.Source(), look); n != 1 && script.Unlock.Source() != lua.SlowSource("unlock") {
		t.Fatalf("the source has %q %d times, want once", look, n)
	}
	later := look + "	for i = 1, 1e5 do if call('PTTL', LEASES) < ttl_of_leases then break end end\n"
	slow := script.Unlock.Variant(strings.Replace(script.Unlock.Source(), look, later, 1))
	s.is(reader.must(s.once(reader.Release(false).With(slow))), script.Released)
	s.held(next)
	for _, key := range []string{keys.Intents(), keys.Leases()} {
		if ttl := rc.PTTL(ctx, key).Val(); ttl > time.Minute {
			t.Errorf("want %s to live for 1m at most, it lives for %v", key, ttl)
		}
	}
}

// Promise 9: the same on a real replica. It has not heard of the master's last grants, and takes over 10 ms after the counter
// that it knows was set by the clock, which no failover is fast enough for.
func TestTokensRiseOverAFailover(t *testing.T) {
	ctx := context.Background()
	keys, err := script.NewKeys("lock")
	if err != nil {
		t.Fatal(err)
	}
	servers := []*redistest.Server{redistest.Start(t, "--repl-diskless-sync-delay", "0"), redistest.Start(t)}
	var sides []*server
	for _, s := range servers {
		rc := s.Client(t)
		sides = append(sides, &server{T: t, rc: rc, ep: node.Of(rc), keys: keys})
	}
	master, replica := sides[0], sides[1]
	grant := func(s *server) int64 {
		t.Helper()
		w := s.writer()
		defer w.release()
		return s.value(w.acquire(), script.Granted)
	}
	grant(master)
	host, port, _ := strings.Cut(servers[0].Addr(), ":")
	if err := replica.rc.ReplicaOf(ctx, host, port).Err(); err != nil {
		t.Fatal(err)
	}
	known := int64(0)
	redistest.Eventually(t, "the replica follows", func() bool {
		known = grant(master)
		return master.rc.Wait(ctx, 1, time.Second).Val() == 1 && replica.counter() == known
	})
	if err := replica.rc.ReplicaOf(ctx, "NO", "ONE").Err(); err != nil {
		t.Fatal(err)
	}
	lost := known
	for range 20 {
		lost = grant(master)
	}
	redistest.Eventually(t, "the counter is not recent", func() bool {
		return replica.rc.PTTL(ctx, keys.Token()).Val() <= 24*time.Hour-10*time.Millisecond
	})
	if got := replica.counter(); got != known {
		t.Fatalf("the replica's counter is %d, want %d: it has followed for longer", got, known)
	}
	if token := grant(replica); token <= lost {
		t.Errorf("token %d on the replica, after %d on the master", token, lost)
	}
}

// Promise 10: what has the TTL of a recent counter, but is none, is as it was after every acquire.
func TestForeignDataLikeARecentCounterIsLeftAlone(t *testing.T) {
	onBothServers(t, func(s *server) {
		ctx := context.Background()
		values := []string{"41", "-1", "text", "1e15", "4000000000000000", "9223372036854775807"}
		if !strings.HasSuffix(s.Name(), "miniredis") { // it counts on from these
			values = append(values, "", "01763000000000000", " 1763000000000000")
		}
		for _, value := range values {
			s.rc.Set(ctx, s.keys.Token(), value, recent)
			before := s.lines()[s.keys.Token()]
			s.is(s.writer().acquire(), script.Foreign)
			s.is(s.writer().try(), script.Foreign)
			if after := s.lines()[s.keys.Token()]; !after.same(before) {
				s.Errorf("%q became %+v", value, after)
			}
			s.held()
		}
	})
}

// Promise 8: when the last reader hands the lock to a writer, the keys live no longer than the leases that are left, even if
// two of those end at the same time.
func TestHandOverShortensTheLifeOfTheKeys(t *testing.T) {
	onBothServers(t, func(s *server) {
		ctx := context.Background()
		reader := s.reader()
		s.is(reader.acquire(), script.Granted)
		first, second := s.participant(true, 4*time.Second, firstCome), s.participant(true, 4*time.Second, firstCome)
		s.is(first.acquire(), script.Waiting)
		s.is(second.acquire(), script.Waiting)
		ends := s.rc.ZScore(ctx, s.keys.Leases(), first.id).Val()
		s.rc.ZAddXX(ctx, s.keys.Leases(), redis.Z{Score: ends, Member: second.id})
		s.is(reader.release(), script.Released)
		for _, key := range []string{s.keys.Leases(), s.keys.Intents()} {
			if ttl := s.rc.PTTL(ctx, key).Val(); ttl <= 0 || ttl > 4*time.Second {
				s.Errorf("want %s to live for 4s at most, it lives for %v", key, ttl)
			}
		}
	})
}
