package script_test

// A full Redis, which has reached maxmemory and may evict nothing, refuses acquires. Holders and waiters are still renewed,
// released and downgraded, and a lock that comes free is handed on.

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

// fill makes a server full, or not full again.
func fill(t *testing.T, rc *redis.Client, full bool) {
	t.Helper()
	limit := map[bool]string{true: "1", false: "0"}[full]
	if err := rc.ConfigSet(context.Background(), "maxmemory", limit).Err(); err != nil {
		t.Fatal(err)
	}
}

// numbers matches what differs from run to run: times, ranks and tokens.
var numbers = regexp.MustCompile(`\d{13,}`)

// Promise 10: a full Redis refuses every acquire, which changes nothing, in every state. Renewals and releases do what they
// do on a Redis that is not full.
func TestFullRedisKeepsTheLocksItHas(t *testing.T) {
	rc := redistest.Start(t).Client(t)
	keys, err := script.NewKeys("lock")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{T: t, rc: rc, ep: node.Of(rc), keys: keys}
	for _, verb := range []*script.Script{script.Lock, script.RLock, script.Refresh, script.Unlock, script.Revoke} {
		rc.ScriptLoad(t.Context(), verb.Source())
	}
	type outcome struct {
		status script.Status
		grants string
		lines  string
	}
	var replies [2][]outcome
	for i, full := range []bool{false, true} {
		everyMove(t, s, func(m move) bool { return full || m.verb != "acquire" }, func(m move, p *participant) {
			before := s.lines()
			fill(t, rc, full)
			r, err := m.do(p)
			fill(t, rc, false)
			after := s.lines()
			if m.verb == "acquire" {
				if !errors.Is(err, ErrRedis) || !strings.Contains(err.Error(), "redis is full") {
					t.Errorf("%s: %+v, %v", m.name, r, err)
				}
				if !maps.Equal(after, before) {
					t.Errorf("%s: %+v became %+v", m.name, before, after)
				}
				return
			}
			if err != nil {
				t.Errorf("%s, full %t: %v", m.name, full, err)
			}
			var lines []string
			for key, line := range after {
				words := strings.Fields(numbers.ReplaceAllString(strings.Trim(line.words, "[]"), "n"))
				if key == keys.Leases() {
					slices.Sort(words) // their order depends on the clock
				}
				lines = append(lines, fmt.Sprint(key, " ", line.kind, words))
				if line.ends == -1 {
					t.Errorf("%s: %s has no TTL", m.name, key)
				}
			}
			slices.Sort(lines)
			replies[i] = append(replies[i], outcome{r.Status, numbers.ReplaceAllString(r.Grants, "n"), strings.Join(lines, "\n")})
		})
	}
	i := 0
	everyMove(t, s, func(m move) bool { return m.verb != "acquire" }, func(m move, _ *participant) {
		if full, not := replies[1][i], replies[0][i]; full != not {
			t.Errorf("%s: %+v, where Redis is not full %+v", m.name, full, not)
		}
		i++
	})
}
