package script_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redismutex/redismutex/internal/script"
)

// On a node of several the ids that belong to the acquisition are revoked, whatever they are, and no others.
func TestRevokeOfOneOfSeveralNodesFindsTheIDsThatBelongTogether(t *testing.T) {
	const id = "redismutex:h/1/abc.22:17003" // on another node
	onBothServers(t, func(s *server) {
		made := map[string]*participant{}
		make := func(own string, write bool) *participant {
			p := s.at(ahead+int64(len(made)), write, firstCome)
			p.id, p.ID = own, own
			made[own] = p
			return p
		}
		revoke := func(id string, want script.Status) {
			t.Helper()
			s.is(s.writer().must(s.once(s.keys.Revoke(id, script.NewDurations(time.Minute), true))), want)
		}
		var others []*participant
		for i, other := range []string{
			"redismutex:h/1/abc.1:1017000", "redismutex:h/1/abc.1:7000", "redismutex:h/1/abd.1:17000", "redismutex:h/1/abc.1.1:17000",
			"redismutex:h/1/xabc.1:17000", "redismutex:xh/1/abc.1:17000",
		} {
			others = append(others, make(other, false))
			s.is(others[i].acquire(), script.Granted)
		}
		reader, waiter, behind := make("redismutex:h/1/abc.1:17000", false), make("redismutex:h/1/abc.7:17001", true), make("redismutex:h/2/abc.7:17001", false)
		s.is(reader.acquire(), script.Granted)
		s.is(waiter.acquire(), script.Waiting)
		s.is(behind.acquire(), script.Waiting)
		revoke(id, script.Released)
		s.held(append(others, behind)...)
		for _, p := range []*participant{reader, waiter} {
			s.is(p.renew(), script.Tombstoned)
			s.is(p.acquire(), script.Tombstoned)
		}
		revoke(id, script.Gone) // this id was never here
		revoke("redismutex:h/1/abc.1:17000", script.Tombstoned)
		revoke("redismutex:h/3/abc.1:17000", script.Gone)
		for _, p := range append(others, behind) {
			s.is(p.release(), script.Released)
		}
		writer := make("redismutex:h/1/abc.1:18000", true)
		s.is(writer.acquire(), script.Granted)
		s.is(make("redismutex:h/1/abc.1:19000", true).acquire(), script.Waiting)
		revoke("redismutex:h/1/abc.3:18999", script.Released)
		s.held(made["redismutex:h/1/abc.1:19000"])
	})
}

// However many wait, it finds them.
func TestRevokeFindsAnIDAmongMany(t *testing.T) {
	onBothServers(t, func(s *server) {
		s.is(s.at(ahead, true, firstCome).acquire(), script.Granted)
		var last *participant
		for i := range 2500 {
			last = s.at(ahead+int64(i), false, firstCome)
			last.id = fmt.Sprintf("redismutex:h/1/abc.1:%d", 1000*(i+1))
			last.ID = last.id
			s.is(last.acquire(), script.Waiting)
		}
		id := strings.Replace(last.id, "abc.1:", "abc.2:", 1)
		s.is(last.must(s.once(s.keys.Revoke(id, script.NewDurations(time.Minute), true))), script.Released)
		s.is(last.renew(), script.Tombstoned)
		if n := s.rc.ZCard(context.Background(), s.keys.Intents()).Val(); n != 2499 {
			t.Errorf("%d wait, want 2499", n)
		}
	})
}
