package redismutex

// This file answers: what does a script cost the server? Its time is nearly that of
// the commands that it runs, so those are counted, on a real Redis.

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
	enter := func(p *participant, want script.Status) func() { return func() { t.Helper(); s.is(p.acquire(), want) } }
	leave := func(p *participant) func() { return func() { t.Helper(); s.is(p.release(), script.Released) } }
	fresh := s.writer()
	s.is(fresh.acquire(), script.Granted) // the scripts are learnt, the counter is made
	s.is(fresh.release(), script.Released)

	w := s.writer()
	costs("a writer enters", 6, enter(w, script.Granted))
	costs("it leaves", 3, leave(w))

	// From writer to writer. What some of them do not do depends on the clock.
	w = s.writer()
	s.is(w.acquire(), script.Granted)
	var queue []*participant
	for range 20 {
		next := s.writer()
		queue = append(queue, next)
		if len(queue) == 1 {
			s.is(next.acquire(), script.Waiting)
			continue
		}
		costs("a writer waits", 15, enter(next, script.Waiting))
		rc.ZIncrBy(context.Background(), keys.Leases(), -1000, next.id) // a second ago
		costs("it is kept", 13, func() { s.is(next.renew(), script.Waiting) })
	}
	for _, next := range queue {
		costs("a writer hands on", 14, leave(w))
		w = next
	}
	s.is(w.release(), script.Released)

	// Readers among themselves, and where a writer waits.
	first, second, third := s.reader(), s.reader(), s.reader()
	costs("the first reader enters", 8, enter(first, script.Granted))
	costs("another reader enters", 11, enter(second, script.Granted))
	s.is(third.acquire(), script.Granted)
	rc.ZIncrBy(context.Background(), keys.Leases(), -1000, third.id) // a second ago
	costs("a reader is kept", 12, func() { s.is(third.renew(), script.Granted) })
	costs("a reader leaves", 9, leave(first))
	waits, behind := s.writer(), s.participant(false, 2*time.Minute, firstCome)
	s.is(waits.acquire(), script.Waiting)
	costs("a reader waits behind a writer", 14, enter(behind, script.Waiting))
	costs("a reader leaves others, and a writer waits", 10, leave(second))
	costs("the last reader hands on to a writer", 15, leave(third))
	s.held(waits)
	costs("a reader waits for a writer", 12, enter(s.reader(), script.Waiting))
	costs("a writer is kept", 2, func() { s.is(waits.renewAlone(), script.Granted) })
}

// commands is how many commands scripts have run since the statistics began.
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
