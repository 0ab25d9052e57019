package script_test

// An acquire, and a release or a downgrade behind it, in one script.

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

// both makes two calls in one script. The second one does not fail.
func (s *server) both(acquire, second script.Command) (first, behind script.Reply, err error) {
	s.Helper()
	a, b := script.Split(s.send(second.Behind(acquire)))
	first, err = acquire.Script.Parse(a)
	behind, failed := second.Script.Parse(b)
	if failed != nil {
		s.Fatal(failed)
	}
	return first, behind, err
}

// T7: a process that releases a lock, or downgrades it, and acquires it for the next one keeps its place: nobody else is
// granted the lock in between.
func TestNobodyComesBetweenAnAcquireAndTheReleaseBehindIt(t *testing.T) {
	for name, c := range map[string]struct {
		held, next, downgrade bool // to write
		first, second         script.Status
		holders               func(held, next *participant) []*participant
	}{
		"a writer, for a writer":             {true, true, false, script.Waiting, script.Released, nextOnly},
		"a writer, for a reader":             {true, false, false, script.Waiting, script.Released, nextOnly},
		"a reader, for a writer":             {false, true, false, script.Waiting, script.Released, nextOnly},
		"a reader, for a reader":             {false, false, false, script.Granted, script.Released, nextOnly},
		"a writer is downgraded for another": {true, true, true, script.Waiting, script.Granted, heldOnly},
		"a writer is downgraded for a reader": {true, false, true, script.Waiting, script.Granted,
			func(held, next *participant) []*participant { return []*participant{held, next} }},
	} {
		for scored, score := range map[string]any{"": nil, ", with scores": script.Score(1_000_000, false)} {
			t.Run(name+scored, func(t *testing.T) {
				onBothServers(t, func(s *server) {
					held, other, next := s.participant(c.held, time.Minute, firstCome), s.writer(), s.old(time.Hour, c.next, firstCome)
					held.Score, next.Score = score, score
					if score != nil {
						other.Score = script.Score(2_000_000, false)
					}
					s.is(held.acquire(), script.Granted)
					s.is(other.acquire(), script.Waiting)
					second := held.Release(false)
					if c.downgrade {
						second = held.asReader().Renew(0)
					}
					first, behind, err := s.both(next.Acquire(false, false, next.age), second)
					if err != nil {
						t.Fatal(err)
					}
					s.is(first, c.first)
					s.is(behind, c.second)
					s.held(c.holders(held, next)...)
					if got := other.renew(); got.Status != script.Waiting {
						t.Errorf("the other has status %d, want that it waits", got.Status)
					}
				})
			})
		}
	}
}

func nextOnly(_, next *participant) []*participant { return []*participant{next} }
func heldOnly(held, _ *participant) []*participant { return []*participant{held} }

// In random sequences an acquire and a release or a renewal behind it reply as one after the other do, and leave the same.
func TestBothAgreeWithOneAfterTheOther(t *testing.T) {
	onBothServers(t, func(s *server) {
		keys, err := script.NewKeys("twin")
		if err != nil {
			t.Fatal(err)
		}
		twin := &server{T: s.T, rc: s.rc, ep: s.ep, keys: keys}
		s.setCounter(ahead)
		twin.setCounter(ahead)
		var acquire []script.Command // of s and of its twin, not sent yet
		pairs := 0
		walk(1000, func(step int, ps []*participant, command func(*participant) script.Command) {
			check := func(c script.Command, got, want script.Reply) {
				if why := s.differs(twin, c, got, want); why != "" {
					s.Fatalf("step %d: %s", step, why)
				}
			}
			cs := []script.Command{command(ps[0]), command(ps[1])}
			if acquires := cs[0].Script == script.Lock || cs[0].Script == script.RLock; acquires && acquire == nil {
				acquire = cs
				return
			} else if acquires {
				cs, acquire = acquire, cs
			} else if acquire != nil {
				first, second, err := s.both(acquire[0], cs[0])
				wantFirst := ps[1].must(twin.once(acquire[1]))
				want := ps[1].must(twin.once(cs[1]))
				if err != nil {
					t.Fatal(err)
				}
				check(acquire[0], first, wantFirst)
				check(cs[0], second, want)
				acquire = nil
				pairs++
				return
			}
			check(cs[0], ps[0].must(s.once(cs[0])), ps[1].must(twin.once(cs[1])))
		}, s, twin)
		if pairs < 100 {
			t.Errorf("%d pairs, want at least 100", pairs)
		}
	})
}

// Promise 4: with a tombstone a release refuses an acquire of its id that arrives later, also behind another acquire.
func TestReleaseBehindAnAcquireLeavesItsTombstone(t *testing.T) {
	onBothServers(t, func(s *server) {
		late, next := s.writer(), s.writer()
		first, behind, err := s.both(next.Acquire(false, false, 0), late.Release(true))
		if err != nil {
			t.Fatal(err)
		}
		s.is(first, script.Granted)
		s.is(behind, script.Gone)
		s.is(late.acquire(), script.Tombstoned)
		s.held(next)
	})
}

// Promises 5 and 10: a full Redis refuses the acquire, and hands on what is released behind it.
func TestFullRedisReleasesBehindAnAcquire(t *testing.T) {
	for name, warm := range map[string]bool{"the script is known": true, "it is not": false} {
		t.Run(name, func(t *testing.T) {
			rc := redistest.Start(t).Client(t)
			keys, err := script.NewKeys("lock")
			if err != nil {
				t.Fatal(err)
			}
			s := &server{T: t, rc: rc, ep: node.Of(rc), keys: keys}
			held, other, next := s.writer(), s.writer(), s.writer()
			if warm {
				if _, _, err := s.both(next.Acquire(true, false, 0), next.Release(false)); err != nil {
					t.Fatal(err)
				}
			}
			s.is(held.acquire(), script.Granted)
			s.is(other.acquire(), script.Waiting)
			fill(t, rc, true)
			first, behind, err := s.both(next.Acquire(false, false, 0), held.Release(false))
			fill(t, rc, false)
			var cause redis.Error
			if !errors.Is(err, ErrRedis) || !strings.Contains(err.Error(), "redis is full") || !errors.As(err, &cause) {
				t.Errorf("the acquire: %+v, %v", first, err)
			}
			s.is(behind, script.Released)
			s.held(other)
			s.queued()
		})
	}
}

// Promise 10: what is not a reply of the script is an error of both calls: a server may have gone mad.
func TestStrangeReplyToBothIsAnError(t *testing.T) {
	rc := redistest.Start(t).Client(t)
	for _, reply := range []string{"1", "'x'", "{}", "{1}", "{1, 1, 1}", "{'x', {}}", "redis.error_reply('ERR not now')"} {
		a, b := script.Split(rc.Eval(t.Context(), "return "+reply, nil))
		if r, err := script.Lock.Parse(a); !errors.Is(err, ErrRedis) {
			t.Errorf("%s: %+v, %v", reply, r, err)
		}
		if r, err := script.Unlock.Parse(b); !errors.Is(err, ErrRedis) {
			t.Errorf("%s: %+v, %v", reply, r, err)
		}
	}
}
