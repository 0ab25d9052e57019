package script_test

// The commands that a script runs, counted on a real Redis: they take most of its time.

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

func TestHotScriptsRunFewCommands(t *testing.T) {
	keys, err := script.NewKeys("lock")
	if err != nil {
		t.Fatal(err)
	}
	rc := redistest.Start(t).Client(t)
	s := &server{T: t, rc: rc, ep: node.Of(rc), keys: keys}
	costs := func(what string, most int, call func()) {
		t.Helper()
		if err := rc.ConfigResetStat(context.Background()).Err(); err != nil {
			t.Fatal(err)
		}
		call()
		if n := s.commands(); n > most {
			t.Errorf("%s: %d commands, want no more than %d", what, n, most)
		}
	}
	acquire := func(p *participant, want script.Status) func() {
		return func() { t.Helper(); s.is(p.acquire(), want) }
	}
	release := func(p *participant) func() { return func() { t.Helper(); s.is(p.release(), script.Released) } }
	fresh := s.writer()
	s.is(fresh.acquire(), script.Granted) // the server learns the scripts and makes the counter
	s.is(fresh.release(), script.Released)

	// The counter of tokens is recent, or not.
	for life, most := range map[time.Duration]int{recent: 4, time.Hour: 6} {
		rc.PExpire(context.Background(), keys.Token(), life)
		w := s.writer()
		costs("a writer acquires", most, acquire(w, script.Granted))
		costs("it releases", 3, release(w))
	}

	// From writer to writer. The clock decides whether some of them do less.
	w := s.writer()
	s.is(w.acquire(), script.Granted)
	var queue []*participant
	for range 20 {
		next := s.writer()
		queue = append(queue, next)
		if len(queue) == 1 {
			s.is(next.acquire(), script.Waiting)
			continue
		}
		costs("a writer joins the queue", 15, acquire(next, script.Waiting))
		rc.ZIncrBy(context.Background(), keys.Leases(), -1000, next.id) // a second ago
		old := s.oldWriter(time.Hour)
		costs("a writer joins at the head of the queue", 18, acquire(old, script.Waiting))
		s.is(old.release(), script.Released)
		costs("it is renewed", 13, func() { s.is(next.renew(), script.Waiting) })
	}
	for _, next := range queue {
		costs("a writer hands on", 14, release(w))
		w = next
	}
	s.is(w.release(), script.Released)

	// Readers among themselves, and where a writer waits.
	first, second, third := s.reader(), s.reader(), s.reader()
	costs("the first reader acquires", 8, acquire(first, script.Granted))
	costs("another reader acquires", 11, acquire(second, script.Granted))
	s.is(third.acquire(), script.Granted)
	rc.ZIncrBy(context.Background(), keys.Leases(), -1000, third.id) // a second ago
	costs("a reader is renewed", 12, func() { s.is(third.renew(), script.Granted) })
	costs("a reader releases", 9, release(first))
	waits, behind := s.writer(), s.participant(false, 2*time.Minute, firstCome)
	s.is(waits.acquire(), script.Waiting)
	costs("a reader joins the queue behind a writer", 14, acquire(behind, script.Waiting))
	costs("a reader of several releases while a writer waits", 10, release(second))
	costs("the last reader hands on to a writer", 15, release(third))
	s.held(waits)
	costs("a reader joins the queue of a writer", 12, acquire(s.reader(), script.Waiting))
	costs("a writer is renewed", 2, func() { s.is(waits.renewAlone(), script.Granted) })
}

// commands returns how many commands scripts have run since the statistics were reset.
func (s *server) commands() (n int) {
	for line := range strings.Lines(s.rc.Info(context.Background(), "commandstats").Val()) {
		name, rest, _ := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":")
		var calls int
		if _, err := fmt.Sscanf(rest, "calls=%d", &calls); err != nil {
			continue
		}
		if name != "evalsha" && name != "eval" && !strings.HasPrefix(name, "config") && name != "info" {
			n += calls
		}
	}
	return n
}
