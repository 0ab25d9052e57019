// Package faultnet simulates a network that fails on demand.
//
// A Link connects a client to its server. It can delay, swallow, cut and refuse connections, and lose or hold one packet
// that a test names. Effects counts the faults that affected traffic. Dial fits go-redis' Options.Dialer. A Link works
// with TCP in real time and, inside a testing/synctest bubble, with an in-memory server in virtual time; such a Link must
// be made inside the bubble.
//
// The rules for requests (LoseReply, HoldRequest, HoldReply) match the raw bytes of one Write of the client. go-redis
// sends a command, or a whole pipeline, in one Write, as long as it is smaller than its write buffer (32 KiB). One request
// uses up one rule, the oldest that matches. What the server sends on a connection after the request has been delivered
// counts as its reply. That is right unless a connection has several requests in flight, as those of an AutoPipeliner do.
// The rules for messages (LoseMessage, HoldMessage) match the bytes of one Write of the server.
package faultnet

import (
	"bytes"
	"context"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// DialFunc is the type of net.Dialer.DialContext and of go-redis' Options.Dialer.
type DialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

// Link is a network that fails on demand. Its methods are safe for concurrent use, and affect open connections as well as
// future ones.
type Link struct {
	dial  DialFunc
	dials atomic.Int64
	held  atomic.Int64

	mu      sync.Mutex
	live    map[*conn]struct{}
	delay   time.Duration
	hole    [2]bool       // by direction
	lifted  chan struct{} // closed and replaced when the hole changes, to wake the dials that hang in it
	refuses bool
	rules   []*rule // oldest first
	effects Effects
}

// Effects counts what a link has done to its traffic. A fault that met no traffic had no effect.
type Effects struct {
	Swallowed    int // writes lost in a hole
	Refused      int // dials
	Cut          int // connections closed by Cut
	LostReplies  int // requests whose reply is lost
	HeldRequests int
	HeldReplies  int
	LostMessages int
	HeldMessages int
}

// Effects returns the effects so far.
func (l *Link) Effects() Effects {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.effects
}

// New returns a link whose connections are opened by dial, or by a net.Dialer if dial is nil.
func New(dial DialFunc) *Link {
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	return &Link{dial: dial, live: map[*conn]struct{}{}, lifted: make(chan struct{})}
}

// Dial opens a connection through the link. It is not delayed.
func (l *Link) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	l.dials.Add(1)
	if err := l.admit(ctx); err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	server, err := l.dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	c := newConn(l, server)
	l.mu.Lock()
	l.live[c] = struct{}{}
	l.mu.Unlock()
	go c.run()
	return c, nil
}

// admit waits while either direction is a hole, since a handshake needs both, and then returns an error if the link
// refuses connections.
func (l *Link) admit(ctx context.Context) error {
	for {
		l.mu.Lock()
		holed, refuses, lifted := l.hole != [2]bool{}, l.refuses, l.lifted
		if refuses && !holed {
			l.effects.Refused++
		}
		l.mu.Unlock()
		switch {
		case holed:
			select {
			case <-lifted:
			case <-ctx.Done():
				return ctx.Err()
			}
		case refuses:
			return os.NewSyscallError("connect", syscall.ECONNREFUSED)
		default:
			return nil
		}
	}
}

// SetDelay delays what is sent from now on, in each direction. It keeps the order and does not limit the throughput.
func (l *Link) SetDelay(each time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delay = each
}

// Hole loses what is sent from now on, up to the server or down from it, while connections stay open. A connection that
// has lost bytes stays silent in that direction, even after the hole is lifted, since its stream has a gap. Dials hang
// until the hole is lifted or their context ends. The server learns when a client closes a connection.
func (l *Link) Hole(up, down bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hole = [2]bool{toServer: up, toClient: down}
	close(l.lifted)
	l.lifted = make(chan struct{})
}

// Cut closes every connection at once. Replies in flight are lost. Requests in flight still arrive, held ones too, as
// packets do that have been sent.
func (l *Link) Cut() {
	l.mu.Lock()
	live := l.live
	l.live = map[*conn]struct{}{}
	l.effects.Cut += len(live)
	l.mu.Unlock()
	for c := range live {
		c.hangUp()
	}
}

// Refuse makes new dials fail, as if the server did not listen. Open connections stay open.
func (l *Link) Refuse(refuses bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refuses = refuses
}

// LoseReply delivers the next requests that contain match, as many as times, and loses their replies. It closes the
// connection when the reply comes and not before, since the reply proves that the server ran the request.
func (l *Link) LoseReply(match string, times int) {
	for range times {
		l.add(&rule{match: []byte(match), fault: loseReply})
	}
}

// HoldRequest holds the next request that contains match until release is called, and with it what the connection sends
// later. The request arrives on release even if its client has closed the connection. If nothing has matched, release
// removes the rule.
func (l *Link) HoldRequest(match string) (release func()) {
	return l.hold(match, holdRequest)
}

// HoldReply delivers the next request that contains match, and then holds what the server sends on that connection until
// release is called. If nothing has matched, release removes the rule.
func (l *Link) HoldReply(match string) (release func()) {
	return l.hold(match, holdReply)
}

// LoseMessage loses the next message of the server that contains match, and nothing else, as Redis may lose a message to
// a subscriber.
func (l *Link) LoseMessage(match string) { l.add(&rule{match: []byte(match), fault: loseMessage}) }

// HoldMessage holds the next message of the server that contains match until release is called, and with it what the
// server sends later on that connection. If nothing has matched, release removes the rule.
func (l *Link) HoldMessage(match string) (release func()) {
	return l.hold(match, holdMessage)
}

// Dials returns the number of calls of Dial, including those that failed.
func (l *Link) Dials() int { return int(l.dials.Load()) }

// Live returns the number of connections that neither the client nor the link has closed.
func (l *Link) Live() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.live)
}

// Held returns the number of directions of connections that HoldRequest, HoldReply or HoldMessage stops at this moment. A
// test in real time waits for it to rise.
func (l *Link) Held() int { return int(l.held.Load()) }

// rule is a fault for the next bytes that match.
type rule struct {
	match []byte
	fault fault
	gate  chan struct{} // of the faults that hold: closed on release
}

type fault int

const (
	loseReply fault = iota
	holdRequest
	holdReply
	loseMessage
	holdMessage
)

// of returns the counter of a fault.
func (e *Effects) of(f fault) *int {
	return [...]*int{&e.LostReplies, &e.HeldRequests, &e.HeldReplies, &e.LostMessages, &e.HeldMessages}[f]
}

// direction returns the direction of the bytes that the fault's rule matches.
func (f fault) direction() int {
	if f == loseMessage || f == holdMessage {
		return toClient
	}
	return toServer
}

func (l *Link) add(r *rule) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rules = append(l.rules, r)
}

func (l *Link) hold(match string, f fault) (release func()) {
	r := &rule{match: []byte(match), fault: f, gate: make(chan struct{})}
	l.add(r)
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.rules = slices.DeleteFunc(l.rules, func(other *rule) bool { return other == r })
		close(r.gate)
	})
}

// take removes and returns the oldest rule that matches these bytes, or returns nil. l.mu is held.
func (l *Link) take(sent []byte, direction int) *rule {
	i := slices.IndexFunc(l.rules, func(r *rule) bool {
		return r.fault.direction() == direction && bytes.Contains(sent, r.match)
	})
	if i < 0 {
		return nil
	}
	r := l.rules[i]
	l.rules = slices.Delete(l.rules, i, i+1)
	*l.effects.of(r.fault)++
	return r
}
