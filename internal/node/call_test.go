package node

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/mailbox"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

// A call ends, whatever the server answers: when half the TTL is over or, where no time passes, after more repetitions
// than any queue needs.
func TestCallIsRepeatedForHalfATTLAtMost(t *testing.T) {
	keys, err := script.NewKeys("x")
	if err != nil {
		t.Fatal(err)
	}
	const ttl = 10 * time.Second
	p := script.Participant{Keys: keys, Durations: script.NewDurations(ttl), ID: "box:1", Write: true}
	for _, took := range []time.Duration{0, time.Millisecond, time.Second} {
		for name, c := range map[string]script.Command{"acquire": p.Acquire(false, false, 0), "renew": p.Renew(0), "release": p.Release(false)} {
			t.Run(fmt.Sprintf("%s, %v each", name, took), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					defer redistest.Elapse(time.Second) // in which everything in the background ends
					calls := 0
					n := &Node{Mailbox: mailbox.New(nil, "box", nil), process: func(_ context.Context, c redis.Cmder) error {
						calls++
						redistest.Elapse(took)
						c.(*redis.Cmd).SetVal([]any{int64(script.Waiting), int64(0), int64(1)}) // and more
						return nil
					}}
					start := time.Now()
					r, err := n.Run(t.Context(), ttl, c)
					if err != nil || r.Status != script.Waiting || !r.More {
						t.Errorf("%+v, %v", r, err)
					}
					if lasted := time.Since(start); lasted > ttl/2 || calls > maxRepeats+1 || calls < 5 {
						t.Errorf("it lasted %v, %d calls; want %v and %d at most", lasted, calls, ttl/2, maxRepeats+1)
					}
				})
			})
		}
	}
}

// Promise 4: a client may send a command again as soon as the shorter of its two back-offs is over.
func TestCallMayHaveBeenSentTwiceAfterTheShorterBackoff(t *testing.T) {
	for _, of := range []struct{ min, max, want time.Duration }{
		{10 * time.Millisecond, time.Millisecond, time.Millisecond}, {-1, 0, 0}, {time.Millisecond, -1, 0},
	} {
		rc := redis.NewClient(&redis.Options{MinRetryBackoff: of.min, MaxRetryBackoff: of.max})
		if got := describe(rc).resend; got != of.want {
			t.Errorf("%+v: %v", of, got)
		}
		rc.Close()
	}
}
