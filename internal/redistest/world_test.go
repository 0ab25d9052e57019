package redistest

import (
	"runtime"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestProcessesOfAWorldShareRedisAndNotTheirNetwork(t *testing.T) {
	InVirtualTime(t, func(w *World) {
		cut, network := w.Process(func(o *redis.Options) { o.MaxRetries = -1; o.ReadTimeout = time.Second })
		other, _ := w.Process()
		messages := w.Messages("n*")
		if err := cut.Set(w.Context(), "k", "v", 0).Err(); err != nil {
			w.Fatal(err)
		}
		network.Hole(true, true)
		start := time.Now()
		if err := cut.Get(w.Context(), "k").Err(); err == nil || time.Since(start) != time.Second {
			w.Errorf("want a time-out after 1s behind a hole, got %v after %v", err, time.Since(start))
		}
		if v, err := other.Get(w.Context(), "k").Result(); v != "v" {
			w.Errorf("want %q from the process whose network works, got %q, %v", "v", v, err)
		}
		other.Publish(w.Context(), "news", "hello")
		if got := messages(); len(got) != 1 || got[0].Payload != "hello" {
			w.Errorf("want one message, got %v", got)
		}
	})
}

func TestServersOfAQuorumKnowNothingOfEachOther(t *testing.T) {
	t.Parallel()
	q := StartQuorum(t, 3)
	q.BehindLinks()
	clients := q.Process()
	if err := clients[0].(*redis.Client).Set(t.Context(), "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	for i, rc := range q.Admin {
		if n := rc.Exists(t.Context(), "k").Val(); (n == 1) != (i == 0) {
			t.Errorf("server %d: want the key on the first server alone, it is there %d times", i+1, n)
		}
	}
	Crash(q.Links[1])
	if err := clients[1].(*redis.Client).Ping(t.Context()).Err(); err == nil {
		t.Error("want an error behind a link that is cut and refuses, got none")
	}
}

func TestWitnessSeesWhoOverlaps(t *testing.T) {
	// This lock excludes nobody.
	var w Witness
	start := time.Now()
	w.Crowd(12, func() bool { return w.Seen() > 0 || time.Since(start) > Timeout },
		func(i int) (bool, func()) { return i%3 == 0, runtime.Gosched })
	if w.Seen() == 0 {
		t.Errorf("want an overlap of writers and readers, saw none in %v", Timeout)
	}

	var readers Witness
	readers.Visit(false, func() { readers.Visit(false, nil) })
	readers.Visit(true, nil)
	if readers.Seen() != 0 || readers.Together != 2 || readers.Read != 2 || readers.Wrote != 1 {
		t.Errorf("want 2 readers together, then a writer, and no overlap, saw %+v", readers.Overlaps)
	}
}
