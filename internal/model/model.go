// Package model answers: what should a script do?
//
// It is the lock of one Redis as a pure state machine, written from the promises
// (see the package redismutex) and not from the Lua, to compare the scripts with.
// It forgets at once whose lease has ended, where a server may have an entry of it
// for some time yet: that entry must make no difference.
package model

import (
	"maps"
	"slices"
	"strings"
)

// Time is a server's clock, in µs since 1970. Leases are in ms, as on the server.
type Time int64

func (t Time) ms() int64 { return int64(t) / 1000 }

// Retention is how long a counter of tokens lives, in ms. Floor is below all of them.
const (
	Retention = 24 * 60 * 60 * 1000
	Floor     = 1e14
)

// A Kind is what a participant wants: to write or to read.
type Kind byte

const (
	Writer Kind = 'w'
	Reader Kind = 'r'
)

// A Participant holds or waits. Either way it has one lease, its own.
type Participant struct {
	ID   string // "<mailbox>:<n>"
	Kind Kind
	Ends int64 // of the lease

	// Only of who waits: class 1 comes before all of class 0, and within a class
	// whoever has the lower rank. Equals, of a quorum, are in the order of their names.
	Class int
	Rank  int64
}

// Mailbox is where the participant hears of its grant.
func (p Participant) Mailbox() string { return p.ID[:strings.LastIndexByte(p.ID, ':')] }

func (p Participant) before(q Participant) bool {
	if p.Class != q.Class {
		return p.Class > q.Class
	}
	if p.Rank != q.Rank {
		return p.Rank < q.Rank
	}
	return string(p.Kind)+p.ID < string(q.Kind)+q.ID
}

// A State is all that there is to know of a lock.
type State struct {
	Holders   []Participant    // one writer, or readers, or nobody
	Queue     []Participant    // who waits, in order
	Graves    map[string]int64 // the end of an id's tombstone
	Token     int64            // the last one
	TokenEnds int64            // when the counter is forgotten
}

// A Verb is what an Op does.
type Verb int

const (
	Enter  Verb = iota // wait for the lock, or with Try have it now or not at all
	Keep               // go on with a lease
	Leave              // hold no more, wait no more
	Settle             // nothing, but see to it that nobody waits for what is free
)

// An Op is one call of a script.
type Op struct {
	Verb  Verb
	ID    string
	Kind  Kind  // a writer that holds and is kept as a reader becomes one
	TTL   int64 // of Enter and Keep
	Try   bool  // of Enter
	Class int   // of Enter, and of all of a quorum
	Alone bool  // of Keep: as a writer that holds, of which only the holder key is looked at
	Bury  int64 // of Leave: for how long an enter of the id is refused, or 0

	// Only of a quorum. A rank is the same on all nodes, and is what a writer
	// proposes as its token, so that they agree on both.
	Rank  int64
	Raise int64 // of Keep: a token that the writer's is raised to, or 0
}

// A Status is what a script says of the caller, by its number on the wire.
type Status int

const (
	Granted Status = 1 + iota
	Waiting
	Busy
	Left
	Gone
	Buried
)

func (s Status) String() string {
	return [...]string{"?", "granted", "waiting", "busy", "left", "gone", "buried"}[s]
}

// A Reply is what a script answers, and whom it grants besides.
type Reply struct {
	Status Status
	Value  int64   // a writer's token; of Waiting, ms until the lease in front ends
	Grants []Grant // in the order of the queue

	// Only of a quorum.
	Preceded bool  // the caller holds, and somebody waits who comes before it
	Last     int64 // the highest rank that waits
}

// A Grant is news for one who has waited.
type Grant struct {
	ID    string
	Token int64 // 0 for a reader
}

// Step is what an op does to a lock at a time. It leaves s as it is.
func (s State) Step(now Time, op Op) (State, Reply) {
	m := &machine{State: s.At(now), now: now, quorum: op.Rank != 0}
	var r Reply
	switch op.Verb {
	case Enter:
		r.Status, r.Value = m.enter(op)
	case Keep:
		r.Status, r.Value = m.keep(op)
	case Leave:
		r.Status = m.leave(op)
	case Settle:
		m.settle()
	}
	r.Grants = m.grants
	if m.quorum && !op.Alone {
		me := Participant{ID: op.ID, Kind: op.Kind, Class: op.Class, Rank: op.Rank}
		again := op.Verb == Keep || m.again
		r.Preceded = again && r.Status == Granted && len(m.Queue) > 0 && m.Queue[0].before(me)
		if n := len(m.Queue); n > 0 {
			r.Last = m.Queue[n-1].Rank
		}
	}
	return m.State, r
}

// At is what is left of s when time has passed: nothing stays (promise 8).
func (s State) At(now Time) State {
	alive := func(ps []Participant) (left []Participant) {
		for _, p := range ps {
			if p.Ends > now.ms() {
				left = append(left, p)
			}
		}
		return left
	}
	s.Holders, s.Queue, s.Graves = alive(s.Holders), alive(s.Queue), maps.Clone(s.Graves)
	maps.DeleteFunc(s.Graves, func(_ string, ends int64) bool { return ends <= now.ms() })
	if s.TokenEnds <= now.ms() {
		s.Token, s.TokenEnds = 0, 0
	}
	return s
}

// A machine is a state that is being changed, in which all are alive.
type machine struct {
	State
	now    Time
	quorum bool
	again  bool // the id had entered before
	grants []Grant
}

// enter joins the queue behind its class, but is granted what is free if nobody is
// before it (promises 5 and 6). An id enters once (promise 4).
func (m *machine) enter(op Op) (Status, int64) {
	m.settle()
	p := Participant{ID: op.ID, Kind: op.Kind, Ends: m.now.ms() + op.TTL, Class: op.Class, Rank: op.Rank}
	if _, buried := m.Graves[p.ID]; buried {
		return Buried, 0
	}
	if m.find(p.ID) != nil {
		m.again = true
		return m.standing(p.ID, op.Rank)
	}
	if !m.quorum {
		p.Rank = int64(m.now)
		for _, q := range m.Queue {
			if q.Class == p.Class { // a tie or a clock that steps back reorders nobody
				p.Rank = max(p.Rank, q.Rank+1)
			}
		}
	}
	place := slices.IndexFunc(m.Queue, p.before)
	if place < 0 {
		place = len(m.Queue)
	}
	if place == 0 && m.fits(p) {
		m.admit(p)
		return m.standing(p.ID, 0)
	}
	if op.Try {
		return Busy, 0
	}
	m.Queue = slices.Insert(m.Queue, place, p)
	return m.standing(p.ID, 0)
}

// keep extends the lease of the caller, and no other (promise 3). It enters nobody,
// but it may find that the caller's turn has come.
func (m *machine) keep(op Op) (Status, int64) {
	p := m.find(op.ID)
	if op.Alone {
		// There is nothing to settle while a writer holds. If it does not, the
		// caller has yet to ask how it stands.
		if p == nil || !m.holds(p.ID) || p.Kind != Writer {
			return Gone, 0
		}
		p.Ends = m.now.ms() + op.TTL
		return Granted, 0
	}
	if p != nil {
		p.Ends = m.now.ms() + op.TTL
		if m.holds(p.ID) && op.Kind == Reader {
			p.Kind = Reader // no other writer comes in between
		}
	}
	m.settle()
	return m.standing(op.ID, op.Raise)
}

// leave takes the caller out of wherever it is. An enter that arrives later is
// refused where that was asked for.
func (m *machine) leave(op Op) Status {
	status := Gone
	if m.find(op.ID) != nil {
		status = Left
	}
	is := func(p Participant) bool { return p.ID == op.ID }
	m.Holders, m.Queue = slices.DeleteFunc(m.Holders, is), slices.DeleteFunc(m.Queue, is)
	if op.Bury > 0 {
		if m.Graves == nil {
			m.Graves = map[string]int64{}
		}
		m.Graves[op.ID] = m.now.ms() + op.Bury
	}
	m.settle()
	return status
}

// settle grants the head of the queue what is free, and the next, until one has to
// wait (promise 5).
func (m *machine) settle() {
	for len(m.Queue) > 0 && m.fits(m.Queue[0]) {
		p := m.Queue[0]
		m.Queue = m.Queue[1:]
		m.admit(p)
		m.grants = append(m.grants, Grant{p.ID, m.token(p, 0)})
	}
}

// fits says whether p may join the holders: one writer, or readers (promise 1).
func (m *machine) fits(p Participant) bool {
	return len(m.Holders) == 0 || p.Kind == Reader && m.Holders[0].Kind == Reader
}

// admit makes p a holder, with the lease that it has.
func (m *machine) admit(p Participant) {
	if p.Kind == Writer && m.quorum {
		m.count(m.Token+1, p.Rank)
	} else if p.Kind == Writer {
		m.count(max(m.Token+1, int64(m.now)), 0)
	}
	p.Class, p.Rank = 0, 0
	m.Holders = append(m.Holders, p)
}

// count makes n the last token, unless there has been none, or it has been
// forgotten: then the clock is, which is above all before it (promise 9). Of a quorum
// it is what was proposed, if that is more, and it lives on from then.
func (m *machine) count(n, proposal int64) {
	if m.TokenEnds == 0 {
		n = max(int64(m.now), Floor)
	}
	if m.TokenEnds == 0 || proposal != 0 {
		m.TokenEnds = m.now.ms() + Retention
	}
	m.Token = max(n, proposal)
}

// token is the token of p, who holds. It is there as long as p holds: if the counter
// has been forgotten meanwhile, there is a new one.
func (m *machine) token(p Participant, proposal int64) int64 {
	if p.Kind == Reader {
		return 0
	}
	m.count(m.Token, proposal)
	return m.Token
}

// standing is how an id stands.
func (m *machine) standing(id string, proposal int64) (Status, int64) {
	if p := m.find(id); p != nil && m.holds(id) {
		return Granted, m.token(*p, proposal)
	} else if p != nil {
		return Waiting, m.front(id) - m.now.ms()
	}
	return Gone, 0
}

// front is the end of the lease in front of who waits: when it is worth a look.
func (m *machine) front(id string) int64 {
	i := slices.IndexFunc(m.Queue, func(p Participant) bool { return p.ID == id })
	if i > 0 {
		return m.Queue[i-1].Ends
	}
	if m.Holders[0].Kind == Writer {
		return m.Holders[0].Ends
	}
	// Readers are looked at among all who have a lease and all tombstones. So the
	// look may be too early, which costs a command.
	first := slices.MinFunc(m.Leases(), func(p, q Participant) int { return int(p.Ends - q.Ends) })
	return first.Ends
}

func (m *machine) holds(id string) bool {
	return slices.ContainsFunc(m.Holders, func(p Participant) bool { return p.ID == id })
}

func (m *machine) find(id string) *Participant {
	for _, ps := range [][]Participant{m.Holders, m.Queue} {
		for i := range ps {
			if ps[i].ID == id {
				return &ps[i]
			}
		}
	}
	return nil
}

// Leases is whoever has a lease that is not the writer's, which is the holder key's
// own, and the tombstones, as "-" and the id.
func (s State) Leases() (leases []Participant) {
	for _, p := range s.Holders {
		if p.Kind == Reader {
			leases = append(leases, p)
		}
	}
	leases = append(leases, s.Queue...)
	for id, ends := range s.Graves {
		leases = append(leases, Participant{ID: "-" + id, Ends: ends})
	}
	return leases
}
