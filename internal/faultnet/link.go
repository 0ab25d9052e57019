// Package faultnet answers: how does the network fail?
//
// A Link stands between a client and its server and fails on demand: it delays, swallows, cuts, refuses, and
// loses or keeps back the one packet a test is about. Its Effects say which of that has come to anything. Its Dial fits go-redis' Options.Dialer. It works with TCP in
// real time and, inside a testing/synctest bubble, with an in-memory server in virtual time; there it must be made
// inside the bubble.
//
// What a request is: the rules (LoseReply, HoldRequest, HoldReply) look for their match in the raw bytes of one
// Write of the client. go-redis flushes a command, or a whole pipeline, in one Write, as long as it is smaller
// than its write buffer (32 KiB). One request uses up one rule, the oldest that matches. A reply is told by its
// connection alone: what the server sends after the request has been delivered is taken for its reply. That holds
// wherever requests are not in flight side by side on one connection, as an AutoPipeliner's are. Those for what the
// server sends of itself (LoseMessage, HoldMessage) look for their match in one Write of the server.
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

// DialFunc is the shape of net.Dialer.DialContext and of go-redis' Options.Dialer.
type DialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

// Link is a network that fails on demand. Every method may be called at any time from any goroutine, and bears on
// the connections that live as well as on those to come.
type Link struct {
	dial  DialFunc
	dials atomic.Int64
	held  atomic.Int64

	mu      sync.Mutex
	live    map[*conn]struct{}
	delay   time.Duration
	hole    [2]bool       // by direction
	lifted  chan struct{} // closed and replaced when the hole changes: wakes the dials that hang in it
	refuses bool
	rules   []*rule // oldest first
	effects Effects
}

// Effects count what a link has done to its traffic. A fault that met none has had no effect.
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

// Effects are those until now.
func (l *Link) Effects() Effects {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.effects
}

// New makes a link in front of dial; nil stands for a plain net.Dialer.
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

// admit waits as long as a hole is there, for a handshake needs both directions; into a hole not even a refusal
// is answered.
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

// SetDelay delays, in each direction, whatever is sent from now on. Order is kept and throughput is not limited.
func (l *Link) SetDelay(each time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delay = each
}

// Hole makes what is sent from now on vanish, up to the server or down from it, while connections stay open. A
// connection that has lost bytes has a gap in its stream: that direction of it stays silent for good, also when
// the hole is lifted. Dials hang until then, or until their context ends. A client's close passes.
func (l *Link) Hole(up, down bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hole = [2]bool{toServer: up, toClient: down}
	close(l.lifted)
	l.lifted = make(chan struct{})
}

// Cut closes every connection under its client, at once. Replies under way are lost. Requests under way still
// arrive, the held ones too: their packets had left.
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

// Refuse makes new dials fail, as a host does on which nothing listens. Live connections stay.
func (l *Link) Refuse(refuses bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refuses = refuses
}

// LoseReply has the next requests that contain match, as many as times says, delivered and their replies
// swallowed. The connection is closed when the reply comes, not before: the reply proves that the server ran it.
func (l *Link) LoseReply(match string, times int) {
	for range times {
		l.add(&rule{match: []byte(match), fault: loseReply})
	}
}

// HoldRequest keeps the next request that contains match back until release is called, and what its connection
// sends later behind it. It is a packet on its way: it arrives on release even if its client has closed by then.
// Released before it matched, the rule is gone.
func (l *Link) HoldRequest(match string) (release func()) {
	return l.hold(match, holdRequest)
}

// HoldReply has the next request that contains match delivered, and from then on keeps back what the server says
// on that connection, until release is called. Released before it matched, the rule is gone.
func (l *Link) HoldReply(match string) (release func()) {
	return l.hold(match, holdReply)
}

// LoseMessage has the next thing that the server sends and that contains match vanish, and nothing else: a message
// to a subscriber that got lost, as Redis may lose it.
func (l *Link) LoseMessage(match string) { l.add(&rule{match: []byte(match), fault: loseMessage}) }

// HoldMessage keeps the next thing that the server sends and that contains match back until release is called, and
// what the server says later on that connection behind it. Released before it matched, the rule is gone.
func (l *Link) HoldMessage(match string) (release func()) {
	return l.hold(match, holdMessage)
}

// Dials counts the calls of Dial, also those that failed.
func (l *Link) Dials() int { return int(l.dials.Load()) }

// Live counts the connections that neither the client nor the link has closed.
func (l *Link) Live() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.live)
}

// Held counts the connections' directions that are stopped by HoldRequest, HoldReply or HoldMessage at this moment. A test in
// real time waits for it to rise.
func (l *Link) Held() int { return int(l.held.Load()) }

// rule is a fault that waits for its request.
type rule struct {
	match []byte
	fault fault
	gate  chan struct{} // of the holding faults: closed on release
}

type fault int

const (
	loseReply fault = iota
	holdRequest
	holdReply
	loseMessage
	holdMessage
)

// of is the count of a fault's effects.
func (e *Effects) of(f fault) *int {
	return [...]*int{&e.LostReplies, &e.HeldRequests, &e.HeldReplies, &e.LostMessages, &e.HeldMessages}[f]
}

// direction is that of the bytes that the fault is looked for in.
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

// take uses up the rule for these bytes, if there is one. l.mu is held.
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
