package script_test

// Foreign data stays as it is, whatever it is, under every key of a lock, in every move of states_test.go. A value of another
// type is foreign, one without a TTL, and a token that is not a counter of the library.

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/script"
)

var allData = flag.Bool("foreign.all", false, "put all foreign data under the keys in every state (minutes)")

// A datum is data that is not part of a lock.
type datum struct {
	what string
	ttl  time.Duration
	put  func(ctx context.Context, rc redis.Cmdable, key string)
}

func text(value string, ttl time.Duration) datum {
	return datum{fmt.Sprintf("string %q for %v", value, ttl), ttl, func(ctx context.Context, rc redis.Cmdable, key string) {
		rc.Set(ctx, key, value, ttl)
	}}
}

// recent is the TTL of a counter that was set less than 10 ms ago, as long as the test runs.
const recent = 25 * time.Hour

var (
	persisted = datum{"what was there, without its TTL", 0, nil}
	data      = []datum{
		persisted,
		text("data", 0),
		{"hash", 0, func(ctx context.Context, rc redis.Cmdable, key string) { rc.HSet(ctx, key, "f", "v") }},
		{"list", 0, func(ctx context.Context, rc redis.Cmdable, key string) { rc.RPush(ctx, key, "v", "w") }},
		{"stream", 0, func(ctx context.Context, rc redis.Cmdable, key string) {
			rc.XAdd(ctx, &redis.XAddArgs{Stream: key, Values: []string{"f", "v"}})
		}},
		{"set", 0, func(ctx context.Context, rc redis.Cmdable, key string) { rc.SAdd(ctx, key, "v", "w") }},
		{"sorted set", 0, func(ctx context.Context, rc redis.Cmdable, key string) {
			rc.ZAdd(ctx, key, redis.Z{Score: 1, Member: "v"}, redis.Z{Score: 2, Member: "wx"})
		}},
		{"list with a TTL", time.Hour, func(ctx context.Context, rc redis.Cmdable, key string) {
			rc.RPush(ctx, key, "v")
			rc.Expire(ctx, key, time.Hour)
		}},
	}
	counters = []datum{
		text("41", 0), text("41", time.Hour), text("1", time.Hour), text("-41", 0), text("-1763000000000000", time.Hour),
		text("text", time.Hour), text("", time.Hour), text("1763000000000000", 0), text("1e15", time.Hour),
		text("0x5AF3107A4000", time.Hour), text("01763000000000000", time.Hour), text(" 1763000000000000", time.Hour),
		text("1763000000000000.5", time.Hour), text("9999999999999999", time.Hour), text("99999999999999999999", time.Hour),
		text("inf", time.Hour), text("nan", time.Hour),
		// With a TTL like that of a counter that was set a moment ago.
		text("41", recent), text("-1763000000000000", recent), text("9999999999999999", recent), text("text", recent),
	}
)

// Promise 10: every verb leaves foreign data as it is, in every state, under each of the keys, and the reply names that key.
// A release still releases the caller's own entries under the other keys.
func TestForeignDataIsLeftAloneByEveryVerb(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *server) {
		rare := 4 // a different datum for each move
		if strings.HasSuffix(s.Name(), "miniredis") {
			rare = 32 // it takes ten times as long
		}
		if testing.Short() {
			rare *= 4
		}
		names := []string{"holder", "intents", "leases", "token"}
		keys := []string{s.keys.Name(), s.keys.Intents(), s.keys.Leases(), s.keys.Token()}
		check := func(i, nth int, d datum) {
			n := nth
			everyMove(t, s, func(m move) bool {
				n++
				return *allData || n%rare == 0 || d.put == nil && rare == 4
			}, func(m move, p *participant) {
				key := keys[i]
				was, there := s.lines()[key]
				if d.put == nil && (!there || was.words == fmt.Sprintf("[%q]", p.id)) {
					return // a writer's own holder key is never foreign to it, whatever the TTL
				}
				if _, err := s.rc.Pipelined(ctx, func(rc redis.Pipeliner) error {
					if d.put == nil {
						rc.Persist(ctx, key)
					} else {
						rc.Del(ctx, key)
						d.put(ctx, rc, key)
					}
					return nil
				}); err != nil {
					t.Fatal(err)
				}
				before := s.lines()
				r, err := m.do(p)
				after := s.lines()
				if !after[key].same(before[key]) {
					t.Errorf("%s at the %s, %s: %+v became %+v", d.what, names[i], m.name, before[key], after[key])
				}
				for other, line := range after {
					if other != key && line.ends == -1 {
						t.Errorf("%s at the %s, %s: %s has no TTL", d.what, names[i], m.name, other)
					}
				}
				want := append([]script.Status{}, m.besides[names[i]]...)
				if len(want) == 0 {
					want = append(want, script.Foreign)
				}
				switch {
				case err != nil && (m.verb != "acquire" || !errors.Is(err, ErrNotLock)),
					err == nil && !slices.Contains(want, r.Status),
					r.Status == script.Foreign && r.Data != before[key].kind+":"+key:
					t.Errorf("%s at the %s, %s: %+v, %v, want %v", d.what, names[i], m.name, r, err, want)
				}
				if m.verb == "acquire" && !slices.Contains(want, script.Granted) {
					for other := range after {
						if !after[other].same(before[other]) {
							t.Errorf("%s at the %s, %s: %s is %+v", d.what, names[i], m.name, other, after[other])
						}
					}
				}
				for other, line := range after {
					if m.verb == "release" && other != key && strings.Contains(strings.ReplaceAll(line.words, `"-`+p.id, ""), p.id+`"`) {
						t.Errorf("%s at the %s, %s: the released id is still in %s", d.what, names[i], m.name, other)
					}
				}
			})
		}
		for i := range keys {
			for nth, d := range data {
				check(i, nth, d)
			}
		}
		for nth, d := range counters {
			check(3, nth, d)
		}
	})
}

// Promise 10: a member of the intents that is no waiter is foreign data when it comes to the head of the queue. Nobody behind
// it is granted the lock, and no script loops there.
func TestForeignWaiterIsAnError(t *testing.T) {
	ctx := context.Background()
	onBothServers(t, func(s *server) {
		for _, member := range []string{"", "x", "-w1"} {
			s.rc.FlushAll(ctx)
			first, dead, last := s.writer(), s.writer(), s.reader()
			s.is(first.acquire(), script.Granted)
			s.is(dead.acquire(), script.Waiting)
			s.rc.ZAdd(ctx, s.keys.Intents(), redis.Z{Score: 3e15, Member: member})
			dead.expire()
			s.is(first.release(), script.Released) // while this hands on, it becomes the first
			before := s.lines()
			for _, call := range []func(*participant) (script.Reply, error){acquires, tries, renews, isRevoked, releases} {
				if r, err := call(last); r.Status != script.Foreign && !errors.Is(err, ErrNotLock) {
					t.Errorf("%q: %+v, %v, want foreign data", member, r, err)
				}
			}
			if _, err := s.ep.Inspect(ctx, s.keys); !errors.Is(err, ErrNotLock) {
				t.Errorf("%q: %v, want foreign data", member, err)
			}
			if after := s.lines()[s.keys.Intents()]; !after.same(before[s.keys.Intents()]) {
				t.Errorf("%q: %+v, want it as it was", member, after)
			}
		}
	})
}
