package script_test

// The list of everything that a participant can do in every state of a lock. foreign_test.go and full_test.go go through
// it.

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/script"
)

// A move is what one participant does in one state of the lock.
type move struct {
	name  string
	verb  string // acquire, renew or release
	begin func(c *setup) *participant
	do    func(p *participant) (script.Reply, error)

	// The right replies while a key holds foreign data, by key. Without an entry the reply has to be script.Foreign.
	besides map[string][]script.Status
}

// A setup makes the participants of a state, all with a score or all without.
type setup struct {
	*server
	quorum bool
}

func (c *setup) participant(write bool) *participant {
	if c.quorum {
		return c.at(ahead+int64(c.ids), write, firstCome)
	}
	return c.server.participant(write, time.Minute, firstCome)
}

func (c *setup) w() *participant { return c.participant(true) }
func (c *setup) r() *participant { return c.participant(false) }

// have has participants acquire, one after the other, and returns the first.
func (c *setup) have(ps ...*participant) *participant {
	c.Helper()
	for _, p := range ps {
		if r := p.acquire(); r.Status != script.Granted && r.Status != script.Waiting {
			c.Fatalf("status %d, want granted or waiting", r.Status)
		}
	}
	return ps[0]
}

// states are those that an acquire may find.
var states = map[string]func(c *setup){
	"nothing is there":                      func(*setup) {},
	"a writer has released":                 func(c *setup) { c.is(c.have(c.w()).release(), script.Released) },
	"a tombstone is there":                  func(c *setup) { c.tombstone(c.w()) },
	"a writer holds":                        func(c *setup) { c.have(c.w()) },
	"a writer holds, writers wait":          func(c *setup) { c.have(c.w(), c.w(), c.w()) },
	"a writer holds, a reader waits":        func(c *setup) { c.have(c.w(), c.r()) },
	"readers hold":                          func(c *setup) { c.have(c.r(), c.r()) },
	"a reader holds, a writer waits":        func(c *setup) { c.have(c.r(), c.w()) },
	"a reader holds, many wait":             func(c *setup) { c.have(c.r(), c.w(), c.r(), c.w()) },
	"a reader has expired":                  func(c *setup) { c.have(c.r(), c.r()).expire() },
	"a reader has expired, both kinds wait": func(c *setup) { c.have(c.r(), c.w(), c.r()).expire() },
	"a writer has expired, both kinds wait": func(c *setup) { c.have(c.w(), c.w(), c.r()).expire() },
	"a writer has expired, readers wait": func(c *setup) {
		c.have(c.w(), c.r(), c.r()).expire()
	},
	"a waiter has expired": func(c *setup) {
		w, waits := c.w(), c.w()
		c.have(w, waits)
		waits.expire()
	},
}

func (c *setup) tombstone(p *participant) {
	p.tombstone = true
	p.release()
}

func acquires(p *participant) (script.Reply, error)    { return p.calls(p.Acquire(false, p.first, p.age)) }
func tries(p *participant) (script.Reply, error)       { return p.calls(p.Acquire(true, p.first, p.age)) }
func renews(p *participant) (script.Reply, error)      { return p.calls(p.Renew(0)) }
func renewsAlone(p *participant) (script.Reply, error) { return p.calls(p.RenewWriter()) }
func downgrades(p *participant) (script.Reply, error)  { return p.calls(p.asReader().Renew(0)) }
func raises(p *participant) (script.Reply, error)      { return p.calls(p.Renew(uint64(ahead + 1e6))) }
func releases(p *participant) (script.Reply, error)    { return p.calls(p.Release(p.tombstone)) }
func releasesWithTombstone(p *participant) (script.Reply, error) {
	p.tombstone = true
	return releases(p)
}

// moves returns all of them.
func moves() (all []move) {
	add := func(verb, name string, begin func(c *setup) *participant, do func(p *participant) (script.Reply, error), besides map[string][]script.Status) {
		all = append(all, move{verb + ": " + name, verb, begin, do, besides})
	}
	any := []script.Status{script.Granted, script.Waiting, script.Busy, script.Released, script.Gone, script.Foreign}
	noToken := map[string][]script.Status{"token": any}

	// Acquires.
	for _, name := range slices.Sorted(maps.Keys(states)) {
		for _, write := range []bool{true, false} {
			begin, besides, kind := func(c *setup) *participant { states[name](c); return c.participant(write) }, noToken, "reader"
			if write {
				besides, kind = nil, "writer"
			}
			add("acquire", name+", a "+kind+" acquires", begin, acquires, besides)
			add("acquire", name+", a "+kind+" tries", begin, tries, besides)
		}
	}
	for name, begin := range map[string]func(c *setup) *participant{
		"a writer that holds":   func(c *setup) *participant { return c.have(c.w()) },
		"a writer that waits":   func(c *setup) *participant { p := c.w(); c.have(c.w(), p); return p },
		"a writer that gave up": func(c *setup) *participant { p := c.w(); c.tombstone(p); return p },
	} {
		add("acquire", name+" acquires again", begin, acquires, nil)
	}
	for name, begin := range map[string]func(c *setup) *participant{
		"a reader that holds": func(c *setup) *participant { return c.have(c.r()) },
		"a reader that waits": func(c *setup) *participant { p := c.r(); c.have(c.w(), p); return p },
	} {
		add("acquire", name+" acquires again", begin, acquires, noToken)
	}

	// The holders and the waiters.
	writers := map[string]func(c *setup) *participant{
		"a writer":                       func(c *setup) *participant { return c.have(c.w()) },
		"a writer, beside a tombstone":   func(c *setup) *participant { c.tombstone(c.w()); return c.have(c.w()) },
		"a writer, writers wait":         func(c *setup) *participant { return c.have(c.w(), c.w(), c.w()) },
		"a writer, a writer waits":       func(c *setup) *participant { return c.have(c.w(), c.w()) },
		"a writer, readers wait":         func(c *setup) *participant { return c.have(c.w(), c.r(), c.r(), c.w()) },
		"a writer, a waiter has expired": func(c *setup) *participant { p, d := c.w(), c.w(); c.have(p, d, c.r()); d.expire(); return p },
		"a writer that was downgraded":   func(c *setup) *participant { p := c.have(c.w(), c.w()); c.is(p.downgrade(), script.Granted); return p },
	}
	readers := map[string]func(c *setup) *participant{
		"a reader":                               func(c *setup) *participant { return c.have(c.r()) },
		"a reader among others":                  func(c *setup) *participant { return c.have(c.r(), c.r(), c.r()) },
		"a reader, a writer waits":               func(c *setup) *participant { return c.have(c.r(), c.w()) },
		"a reader, writers wait":                 func(c *setup) *participant { return c.have(c.r(), c.w(), c.w()) },
		"a reader among others, both kinds wait": func(c *setup) *participant { return c.have(c.r(), c.r(), c.w(), c.r()) },
		"a reader, another has expired":          func(c *setup) *participant { p, d := c.r(), c.r(); c.have(p, d, c.w()); d.expire(); return p },
		"a reader that has expired":              func(c *setup) *participant { p := c.have(c.r(), c.w()); p.expire(); return p },
	}
	waits := func(write bool, before ...bool) func(c *setup) *participant {
		return func(c *setup) *participant {
			var ps []*participant
			for _, w := range before {
				ps = append(ps, c.participant(w))
			}
			p := c.participant(write)
			c.have(append(ps, p)...)
			return p
		}
	}
	const w, r = true, false
	waiters := map[string]func(c *setup) *participant{
		"a writer behind a writer":                  waits(w, w),
		"a writer behind a waiter":                  waits(w, w, w),
		"a writer behind a reader":                  waits(w, r),
		"a reader behind a writer":                  waits(r, w),
		"a reader behind a reader's writer":         waits(r, r, w),
		"a writer, the writer in front has expired": func(c *setup) *participant { h, p := c.w(), c.w(); c.have(h, p, c.r()); h.expire(); return p },
		"a writer, the reader in front has expired": func(c *setup) *participant { h, p := c.r(), c.w(); c.have(h, p, c.r()); h.expire(); return p },
		"a reader, the writer in front has expired": func(c *setup) *participant { h, p := c.w(), c.r(); c.have(h, p, c.w()); h.expire(); return p },
		"a waiter that has expired":                 func(c *setup) *participant { p := c.w(); c.have(c.w(), p, c.w()); p.expire(); return p },
		"one that never acquired":                   func(c *setup) *participant { p := c.w(); c.have(c.w(), c.r()); return p },
	}
	for name, begin := range writers {
		add("renew", name, begin, renews, map[string][]script.Status{"token": {script.Granted, script.Foreign}})
		add("renew", name+", by the holder key alone", begin, renewsAlone, map[string][]script.Status{
			"holder": {script.Gone}, "intents": any, "leases": any, "token": any})
		add("renew", name+", with a raise", begin, raises, map[string][]script.Status{"token": {script.Granted, script.Foreign}})
		add("renew", name+", downgraded", begin, downgrades, noToken)
		add("release", name, begin, releases, map[string][]script.Status{"leases": {script.Released, script.Foreign}, "token": {script.Released, script.Foreign}})
		add("release", name+", with a tombstone", begin, releasesWithTombstone, map[string][]script.Status{"token": {script.Released, script.Foreign}})
	}
	for name, begin := range readers {
		add("renew", name, begin, renews, noToken)
		add("release", name, begin, releases, map[string][]script.Status{"token": {script.Released, script.Gone, script.Foreign}})
		add("release", name+", with a tombstone", begin, releasesWithTombstone, map[string][]script.Status{"token": {script.Released, script.Gone, script.Foreign}})
	}
	for name, begin := range waiters {
		add("renew", name+" (waits)", begin, renews, map[string][]script.Status{"token": {script.Waiting, script.Granted, script.Gone, script.Foreign}})
		add("release", name+" (waits)", begin, releases, map[string][]script.Status{"token": {script.Released, script.Gone, script.Foreign}})
		add("release", name+" (waits), with a tombstone", begin, releasesWithTombstone, map[string][]script.Status{"token": {script.Released, script.Gone, script.Foreign}})
	}
	slices.SortFunc(all, func(a, b move) int { return strings.Compare(a.name, b.name) })
	return all
}

// everyMove makes the state of each wanted move, without a score and with one, and calls f.
func everyMove(t *testing.T, s *server, wanted func(m move) bool, f func(m move, p *participant)) {
	for _, quorum := range []bool{false, true} {
		for _, m := range moves() {
			if !wanted(m) {
				continue
			}
			if err := s.rc.FlushDB(context.Background()).Err(); err != nil {
				t.Fatal(err)
			}
			s.ids = 0
			if quorum {
				m.name += ", of a quorum"
			}
			f(m, m.begin(&setup{s, quorum}))
		}
	}
}

// A line is the content of a key, and when it expires.
type line struct {
	kind, words string
	ends        int64 // in ms of the server's clock; -1: never
}

// lines returns everything on the server, by key.
func (s *server) lines() map[string]line {
	s.Helper()
	lines, err := linesOf(s.rc.Eval(context.Background(), snapshotSource, nil))
	if err != nil {
		s.Fatal(err)
	}
	return lines
}

// linesOf returns the result of snapshotSource by key.
func linesOf(look *redis.Cmd) (map[string]line, error) {
	all, err := look.Slice()
	lines := map[string]line{}
	for _, of := range all {
		of := of.([]any)
		words := of[3].([]any)
		if of[1] == "set" {
			slices.SortFunc(words, func(a, b any) int { return strings.Compare(a.(string), b.(string)) })
		}
		ends, _ := strconv.ParseInt(of[2].(string), 10, 64)
		lines[of[0].(string)] = line{of[1].(string), fmt.Sprintf("%q", words), ends}
	}
	return lines, err
}

// same reports whether a key has not changed. Where the clock does not stand still, the end of a key is known to a
// millisecond or so.
func (l line) same(as line) bool {
	return l.kind == as.kind && l.words == as.words && max(l.ends-as.ends, as.ends-l.ends) <= 2
}
