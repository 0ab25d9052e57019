package acquisition

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

// requestSince is request with the time at which it was asked for.
func requestSince(t *testing.T, c *Config, name string, since clock.Instant) *Acquisition {
	keys, err := script.NewKeys(name)
	if err != nil {
		t.Fatal(err)
	}
	a := &Acquisition{}
	a.Init(c, keys, witness{make(chan error, 1)}, true, false, Origin{Asked: since})
	return a
}

// Promise 6, T6: a request that has waited in its process takes the place in the queue that it would have had. Its age is
// that of the moment at which the request is sent.
func TestRequestTakesThePlaceOfItsAge(t *testing.T) {
	redistest.MiniLocks(t)
	synctest.Test(t, func(t *testing.T) {
		_, rc := redistest.Mini(t)
		c := config(rc)
		defer redistest.Elapse(10 * time.Minute) // in which everything in the background ends
		ctx, giveUp := context.WithCancel(t.Context())
		defer giveUp()
		holder := script.Participant{Keys: request(t, c, "x").Keys, Durations: c.Durations, ID: "other:1", Write: true}
		if _, err := c.Nodes[0].Run(ctx, ttl, holder.Acquire(false, false, 0)); err != nil {
			t.Fatal(err)
		}
		begun := clock.Now()
		early, late := requestSince(t, c, "x", begun), requestSince(t, c, "x", begun.Add(2*time.Second))
		var ids []string
		for _, a := range []*Acquisition{request(t, c, "x"), late, early} {
			redistest.Elapse(time.Second)
			go a.Acquire(ctx)
			synctest.Wait()
			ids = append(ids, "w"+a.ID())
		}
		// The first has come at 1s.
		want := []string{ids[2], ids[0], ids[1]}
		if got := rc.ZRange(context.Background(), "{x}:lock-intent", 0, -1).Val(); !slices.Equal(got, want) {
			t.Errorf("in the queue %q, want %q", got, want)
		}
	})
}

// With several nodes a request has one rank, which it is given when it is made, and the same on every node. An age would not
// do: the ranks of a process whose clock is behind do not rise with the time.
func TestRankOverSeveralNodesIsThatOfTheRequest(t *testing.T) {
	redistest.MiniLocks(t)
	synctest.Test(t, func(t *testing.T) {
		_, rc := redistest.Mini(t)
		c := config(rc)
		c.Nodes = slices.Repeat([]*node.Node{c.Nodes[0]}, 3)
		c.Ranks = &LamportClock{Now: func() time.Time { return time.UnixMicro(5_000_000) }}
		keys, err := script.NewKeys("x")
		if err != nil {
			t.Fatal(err)
		}
		for _, of := range []struct {
			rank int64
			want string
		}{{0, "5000000"}, {0, "5000001"}, {4_000_002, "4000002"}, {0, "5000002"}} {
			a := &Acquisition{}
			a.Init(c, keys, witness{make(chan error, 1)}, true, false, Origin{Rank: of.rank})
			if got := a.nodes().score(); got != of.want {
				t.Errorf("score %v, want %s", got, of.want)
			}
		}
	})
}
