// Package model specifies the scripts: it is the lock on one Redis as a pure state
// machine. It is written from the promises (see package redismutex) and not from the
// Lua, and the tests compare the scripts with it.
//
// The model drops a participant as soon as its lease has ended. A server may keep an
// entry for some time after; that must make no difference.
package model

import (
	"maps"
	"slices"
	"strings"
)

// Time is the time of a server in µs since 1970. Leases are in ms, as on the server.
type Time int64

func (t Time) ms() int64 { return int64(t) / 1000 }

// Retention is how long a token counter lives after it was set by the clock, and Window
// how long tokens are counted before it is set again, in ms. Floor is lower than any token.
const (
	Retention = 24 * 60 * 60 * 1000
	Window    = 10
	Floor     = 1e14
)

// A Kind is what a participant locks for: writing or reading.
type Kind byte

const (
	Writer Kind = 'w'
	Reader Kind = 'r'
)

// A Participant is a holder or a waiter. It has one lease of its own.
type Participant struct {
	ID   string // "<mailbox>:<n>"
	Kind Kind
	Ends int64 // when the lease ends

	// Of waiters only. Class 1 comes before class 0, and within a class a lower rank
	// before a higher one. Equal ranks, of a quorum, are ordered by name.
	Class int
	Rank  int64
}

// Mailbox returns the channel on which the participant receives its grant.
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

// A State is the whole state of a lock.
type State struct {
	Holders    []Participant    // one writer, or any number of readers
	Queue      []Participant    // the waiters, in order
	Tombstones map[string]int64 // the tombstones: when each ends, by id
	Token      int64            // the last token
	TokenEnds  int64            // when the counter expires
}

// A Verb is the kind of an Op.
type Verb int

const (
	Acquire Verb = iota // acquire the lock or join the queue
	Renew               // renew the lease
	Release             // release the lock or leave the queue
	HandOn              // hand the lock on and do nothing else
	Revoke              // release the lock or leave the queue, for somebody else
)

// An Op is one call of a script.
type Op struct {
	Verb      Verb
	ID        string
	Kind      Kind  // a writer that is renewed as a reader becomes a reader
	TTL       int64 // of Acquire and Renew
	Try       bool  // of Acquire: do not join the queue
	Age       int64 // of Acquire, not in a quorum: how long the request has waited, in µs
	Class     int   // of Acquire; in a quorum, of every verb
	Alone     bool  // of Renew: renew a writer, looking at the holder key only
	Tombstone int64 // of Release: the life of the tombstone, or 0 for none; of Revoke: its life

	// Of a quorum only. The rank is the same on all nodes, and a writer proposes it
	// as its token, so that the nodes agree on both.
	Rank  int64
	Raise int64 // of Renew: the token that the writer's token is raised to, or 0
}

// A Status is the state of the caller in a reply, by its number on the wire.
type Status int

const (
	Granted Status = 1 + iota
	Waiting
	Busy
	Released
	Gone
	Tombstoned
)

func (s Status) String() string {
	return [...]string{"?", "granted", "waiting", "busy", "released", "gone", "tombstoned"}[s]
}

// A Reply is the reply of a script, with the grants that it made.
type Reply struct {
	Status Status
	Value  int64    // the token of a writer; of Waiting, ms until the lease in front ends
	Grants []Grant  // in the order of the queue
	InWay  []string // of Busy: the holders that exclude the caller, or else the first waiter

	// Of a quorum only.
	Preceded bool  // the caller holds the lock, and a waiter ranks before it
	Last     int64 // the highest rank in the queue
}

// A Grant gives the lock to a waiter.
type Grant struct {
	ID    string
	Token int64 // 0 for a reader
}

// Step returns the state after op at that time, and the reply. It does not change s.
func (s State) Step(now Time, op Op) (State, Reply) {
	m := &machine{State: s.At(now), now: now, quorum: op.Rank != 0}
	var r Reply
	switch op.Verb {
	case Acquire:
		r.Status, r.Value = m.acquire(op)
	case Renew:
		r.Status, r.Value = m.renew(op)
	case Release:
		r.Status = m.release(op)
	case Revoke:
		r.Status = m.revoke(op)
	case HandOn:
		m.handOn()
	}
	if r.Status == Gone && op.Verb == Renew && !op.Alone && m.tombstoned(op.ID) {
		r.Status = Tombstoned // it was revoked, or its owner would not ask
	}
	r.Grants, r.InWay = m.grants, m.inWay
	if m.quorum && !op.Alone {
		me := Participant{ID: op.ID, Kind: op.Kind, Class: op.Class, Rank: op.Rank}
		again := op.Verb == Renew || m.again
		r.Preceded = again && r.Status == Granted && len(m.Queue) > 0 && m.Queue[0].before(me)
		if n := len(m.Queue); n > 0 {
			r.Last = m.Queue[n-1].Rank
		}
	}
	return m.State, r
}

// At returns what is left of s at that time: nothing stays (promise 8).
func (s State) At(now Time) State {
	alive := func(ps []Participant) (left []Participant) {
		for _, p := range ps {
			if p.Ends > now.ms() {
				left = append(left, p)
			}
		}
		return left
	}
	s.Holders, s.Queue, s.Tombstones = alive(s.Holders), alive(s.Queue), maps.Clone(s.Tombstones)
	maps.DeleteFunc(s.Tombstones, func(_ string, ends int64) bool { return ends <= now.ms() })
	if s.TokenEnds <= now.ms() {
		s.Token, s.TokenEnds = 0, 0
	}
	return s
}

// A machine is a state during a step. No lease in it has ended.
type machine struct {
	State
	now    Time
	quorum bool
	again  bool // the id had been acquired before
	grants []Grant
	inWay  []string
}

// acquire grants the lock if it is free and no waiter ranks before the caller, and
// else adds the caller to the queue, by its rank in its class (promises 5 and 6). An id
// acquires once (promise 4).
func (m *machine) acquire(op Op) (Status, int64) {
	m.handOn()
	p := Participant{ID: op.ID, Kind: op.Kind, Ends: m.now.ms() + op.TTL, Class: op.Class, Rank: op.Rank}
	if m.tombstoned(p.ID) {
		return Tombstoned, 0
	}
	if m.find(p.ID) != nil {
		m.again = true
		return m.status(p.ID, op.Rank)
	}
	if !m.quorum {
		p.Rank = m.rank(op)
	}
	place := slices.IndexFunc(m.Queue, p.before)
	if place < 0 {
		place = len(m.Queue)
	}
	if place == 0 && m.fits(p) {
		m.admit(p)
		return m.status(p.ID, 0)
	}
	if op.Try {
		if m.fits(p) {
			m.inWay = []string{m.Queue[0].ID}
		} else {
			for _, q := range m.Holders {
				m.inWay = append(m.inWay, q.ID)
			}
		}
		return Busy, 0
	}
	m.Queue = slices.Insert(m.Queue, place, p)
	return m.status(p.ID, 0)
}

// rank returns the rank of a new request, which is that of a request made an age ago. No
// rank is below 1. Without an age, neither a tie nor a clock that steps back changes the
// order; and an age does not count where a waiter ranks a second ahead of the clock, since
// that has been set back.
func (m *machine) rank(op Op) int64 {
	behind := int64(0)
	for _, q := range m.Queue {
		if q.Class == op.Class {
			behind = max(behind, q.Rank+1)
		}
	}
	if op.Age > 0 && behind <= int64(m.now)+second {
		return max(int64(m.now)-op.Age, 1)
	}
	return max(int64(m.now), behind)
}

const second = 1e6 // µs

// renew extends the lease of the caller, and no other (promise 3). It never acquires,
// but it may grant the lock to the caller if that waits.
func (m *machine) renew(op Op) (Status, int64) {
	p := m.find(op.ID)
	if op.Alone {
		// There is nothing to hand on while a writer holds the lock. If it does
		// not, the caller has to send a full renewal.
		if p == nil || !m.holds(p.ID) || p.Kind != Writer {
			return Gone, 0
		}
		p.Ends = m.now.ms() + op.TTL
		return Granted, 0
	}
	if p != nil {
		p.Ends = m.now.ms() + op.TTL
		if m.holds(p.ID) && op.Kind == Reader {
			p.Kind = Reader // without releasing the lock in between
		}
	}
	m.handOn()
	if m.TokenEnds == 0 && op.Raise == 0 {
		return m.status(op.ID, op.Rank)
	}
	return m.status(op.ID, op.Raise)
}

// release removes the caller from the holders or the queue. With a tombstone, an
// acquire of the id that arrives later is refused.
func (m *machine) release(op Op) Status {
	status := Gone
	if m.find(op.ID) != nil {
		status = Released
	}
	is := func(p Participant) bool { return p.ID == op.ID }
	m.Holders, m.Queue = slices.DeleteFunc(m.Holders, is), slices.DeleteFunc(m.Queue, is)
	if op.Tombstone > 0 {
		if m.Tombstones == nil {
			m.Tombstones = map[string]int64{}
		}
		m.Tombstones[op.ID] = m.now.ms() + op.Tombstone
	}
	m.handOn()
	return status
}

// revoke is a release by the owner, with a tombstone, if the id is there. The owner is told.
func (m *machine) revoke(op Op) Status {
	if m.find(op.ID) != nil {
		return m.release(op)
	}
	m.handOn()
	if m.tombstoned(op.ID) {
		return Tombstoned
	}
	return Gone
}

func (m *machine) tombstoned(id string) bool {
	_, is := m.Tombstones[id]
	return is
}

// handOn grants the lock to the head of the queue, and to the next, until one has to
// wait (promise 5).
func (m *machine) handOn() {
	for len(m.Queue) > 0 && m.fits(m.Queue[0]) {
		p := m.Queue[0]
		m.Queue = m.Queue[1:]
		m.admit(p)
		m.grants = append(m.grants, Grant{p.ID, m.token(p, 0)})
	}
}

// fits reports whether p may join the holders: one writer, or readers (promise 1).
func (m *machine) fits(p Participant) bool {
	return len(m.Holders) == 0 || p.Kind == Reader && m.Holders[0].Kind == Reader
}

// admit makes p a holder with its present lease.
func (m *machine) admit(p Participant) {
	if p.Kind == Writer && m.quorum {
		m.setToken(m.Token+1, p.Rank)
	} else if p.Kind == Writer {
		m.count()
	}
	p.Class, p.Rank = 0, 0
	m.Holders = append(m.Holders, p)
}

// Recent reports whether the counter was last set by the clock less than a window ago.
func (s State) Recent(now Time) bool {
	return s.TokenEnds != 0 && s.TokenEnds-now.ms() > Retention-Window
}

// count makes the next token, which is no lower than the time when the counter was last set
// by it: that is less than a window ago (promise 9).
func (m *machine) count() {
	if m.Recent(m.now) {
		m.Token++
		return
	}
	m.setToken(max(m.Token+1, int64(m.now)), 0)
	m.TokenEnds = m.now.ms() + Retention
}

// setToken makes n the last token. If there is no counter, the time takes the place of
// n: it is greater than every earlier token (promise 9). In a quorum the last token is
// the proposal, if that is greater, and the counter lives on; the time has no part in it.
func (m *machine) setToken(n, proposal int64) {
	switch {
	case m.TokenEnds == 0 && m.quorum:
		n = Floor
	case m.TokenEnds == 0:
		n = max(int64(m.now), Floor)
	}
	if m.TokenEnds == 0 || proposal != 0 {
		m.TokenEnds = m.now.ms() + Retention
	}
	m.Token = max(n, proposal)
}

// token returns the token of the holder p. If the counter has expired meanwhile, there
// is a new one.
func (m *machine) token(p Participant, proposal int64) int64 {
	if p.Kind == Reader {
		return 0
	}
	m.setToken(m.Token, proposal)
	return m.Token
}

// status returns the status and the value of an id.
func (m *machine) status(id string, proposal int64) (Status, int64) {
	if p := m.find(id); p != nil && m.holds(id) {
		return Granted, m.token(*p, proposal)
	} else if p != nil {
		return Waiting, m.front(id) - m.now.ms()
	}
	return Gone, 0
}

// front returns when the lease in front of a waiter ends: then it should look again.
func (m *machine) front(id string) int64 {
	i := slices.IndexFunc(m.Queue, func(p Participant) bool { return p.ID == id })
	if i > 0 {
		return m.Queue[i-1].Ends
	}
	if m.Holders[0].Kind == Writer {
		return m.Holders[0].Ends
	}
	// Behind readers, the first end of any lease or tombstone counts. So the waiter
	// may look too early, which costs a command.
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

// Leases returns the leases of readers and waiters, and the tombstones, as "-" and the
// id. The writer's lease is the TTL of the holder key.
func (s State) Leases() (leases []Participant) {
	for _, p := range s.Holders {
		if p.Kind == Reader {
			leases = append(leases, p)
		}
	}
	leases = append(leases, s.Queue...)
	for id, ends := range s.Tombstones {
		leases = append(leases, Participant{ID: "-" + id, Ends: ends})
	}
	return leases
}
