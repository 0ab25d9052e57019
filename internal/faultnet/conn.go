package faultnet

// This file answers: what happens to the bytes of one connection?
//
// Each direction has a collector, which decides the fate of a chunk at the moment it is sent, and a deliverer,
// which waits for the chunk's time. The queue between them is what "under way" means.

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"time"
)

// The two directions.
const (
	toServer = iota
	toClient
)

// conn is the client's end of a connection through the link.
type conn struct {
	net.Conn          // the client's end of a pipe
	near     net.Conn // the link's end of it
	server   net.Conn
	link     *Link

	// Contexts, because they can be ended more than once and from both sides.
	clientGone, serverGone, hungUp context.Context
	endClient, endServer, endCall  context.CancelFunc

	// guarded by link.mu
	gap       [2]bool // by direction: bytes were lost, nothing after them can make sense
	loseReply bool
	replyGate <-chan struct{}
}

// chunk is what one Write sent, under way.
type chunk struct {
	bytes []byte
	due   time.Time
	gate  <-chan struct{} // nil, or closed when it may go on
	rule  *rule           // of a request: what it does to its reply, once delivered
	last  bool            // of a reply: it is lost, and its connection with it
}

func newConn(l *Link, server net.Conn) *conn {
	c := &conn{link: l, server: server}
	c.Conn, c.near = net.Pipe()
	c.clientGone, c.endClient = context.WithCancel(context.Background())
	c.serverGone, c.endServer = context.WithCancel(context.Background())
	c.hungUp, c.endCall = context.WithCancel(context.Background())
	return c
}

func (c *conn) run() {
	// As deep as a socket's buffers, roughly: a peer that does not read stops its sender in the end.
	up, down := make(chan chunk, 1024), make(chan chunk, 1024)
	var pumps sync.WaitGroup
	pumps.Go(func() { collect(c.near, c.request, up, c.serverGone.Done(), c.endClient) })
	pumps.Go(func() { c.deliver(up, c.server, c.serverGone.Done()); c.finish() })
	pumps.Go(func() { collect(c.server, c.reply, down, c.clientGone.Done(), c.endServer) })
	pumps.Go(func() { c.deliver(down, c.near, c.clientGone.Done()); c.farewell() })
	pumps.Wait()
	c.server.Close()
}

// collect takes what one end sends until that end has gone. When there is nobody to deliver to it reads on, as
// a network does.
func collect(from net.Conn, stamp func([]byte) (chunk, bool), queue chan<- chunk, toGone <-chan struct{}, gone func()) {
	defer close(queue)
	defer gone()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if ch, ok := stamp(bytes.Clone(buf[:n])); ok {
				select {
				case queue <- ch:
				case <-toGone:
				}
			}
		}
		if err != nil {
			return
		}
	}
}

// deliver hands over what is under way, each chunk in its time, until nothing is left or nobody is there.
func (c *conn) deliver(queue <-chan chunk, to net.Conn, toGone <-chan struct{}) {
	for ch := range queue {
		if !c.wait(ch, toGone) {
			return
		}
		if ch.last {
			c.cut()
			return
		}
		c.arm(ch.rule)
		to.Write(ch.bytes) // an error means that to has gone; its own collector sees that
	}
}

func (c *conn) wait(ch chunk, toGone <-chan struct{}) bool {
	if left := time.Until(ch.due); left > 0 {
		timer := time.NewTimer(left)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-toGone:
			return false
		}
	}
	if ch.gate != nil {
		c.link.held.Add(1)
		defer c.link.held.Add(-1)
		select {
		case <-ch.gate:
		case <-toGone:
			return false
		}
	}
	return true
}

// request decides what becomes of bytes that the client sends.
func (c *conn) request(b []byte) (chunk, bool) {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	if c.lost(toServer) {
		c.link.effects.Swallowed++
		return chunk{}, false
	}
	ch := chunk{bytes: b, due: time.Now().Add(c.link.delay), rule: c.link.take(b, toServer)}
	if ch.rule != nil && ch.rule.fault == holdRequest {
		ch.gate = ch.rule.gate
	}
	return ch, true
}

// arm makes a request that is about to be delivered bear on its reply.
func (c *conn) arm(r *rule) {
	if r == nil {
		return
	}
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	switch r.fault {
	case loseReply:
		c.loseReply = true
	case holdReply:
		c.replyGate = r.gate
	}
}

// reply decides what becomes of bytes that the server sends.
func (c *conn) reply(b []byte) (chunk, bool) {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	if c.lost(toClient) {
		c.link.effects.Swallowed++
		return chunk{}, false
	}
	ch := chunk{bytes: b, due: time.Now().Add(c.link.delay), gate: c.replyGate, last: c.loseReply}
	switch r := c.link.take(b, toClient); {
	case r == nil:
	case r.fault == loseMessage:
		return chunk{}, false
	default:
		ch.gate = r.gate
	}
	return ch, true
}

// lost says whether what is sent now vanishes. link.mu is held.
func (c *conn) lost(direction int) bool {
	c.gap[direction] = c.gap[direction] || c.link.hole[direction]
	return c.gap[direction]
}

// finish passes the client's end on to the server. Only half of a TCP connection is closed: closing all of it
// with a reply unread would reset it, and a reset may overtake the request before it.
func (c *conn) finish() {
	if half, ok := c.server.(interface{ CloseWrite() error }); ok {
		half.CloseWrite()
	} else {
		c.server.Close()
	}
}

// farewell passes the server's end on to the client, unless that vanishes too.
func (c *conn) farewell() {
	c.link.mu.Lock()
	lost := c.lost(toClient)
	c.link.mu.Unlock()
	if !lost {
		c.cut()
	}
}

// cut ends the connection from the link's side.
func (c *conn) cut() {
	c.forget()
	c.hangUp()
}

func (c *conn) hangUp() {
	c.endCall()
	c.near.Close()
}

func (c *conn) forget() {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	delete(c.link.live, c)
}

// Close ends the connection from the client's side.
func (c *conn) Close() error {
	c.forget()
	return c.Conn.Close()
}

// What follows reports a closed connection in TCP's words, for go-redis retries after those and not after a pipe's.

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	return n, c.inTCP("read", net.ErrClosed, err)
}

func (c *conn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	return n, c.inTCP("write", syscall.EPIPE, err)
}

func (c *conn) SetDeadline(t time.Time) error      { return c.set(c.Conn.SetDeadline(t)) }
func (c *conn) SetReadDeadline(t time.Time) error  { return c.set(c.Conn.SetReadDeadline(t)) }
func (c *conn) SetWriteDeadline(t time.Time) error { return c.set(c.Conn.SetWriteDeadline(t)) }

// set lets the far side's end pass: on a socket only the next Read or Write tells.
func (c *conn) set(err error) error {
	if c.hungUp.Err() != nil {
		return nil
	}
	return c.inTCP("set", net.ErrClosed, err)
}

func (c *conn) inTCP(op string, word, err error) error {
	if !errors.Is(err, io.ErrClosedPipe) {
		return err
	}
	return &net.OpError{Op: op, Net: "tcp", Addr: c.RemoteAddr(), Err: word}
}

// The addresses are the real ones: a failover client finds a deposed master's connections by theirs.

func (c *conn) LocalAddr() net.Addr  { return c.server.LocalAddr() }
func (c *conn) RemoteAddr() net.Addr { return c.server.RemoteAddr() }

// SyscallConn is go-redis' way of asking whether an idle connection has been closed from the far side. Without it
// a pool would hand out one dead connection after the other after a cut, until its retries are used up: no socket
// does that.
func (c *conn) SyscallConn() (syscall.RawConn, error) {
	if c.hungUp.Err() != nil {
		return nil, io.EOF
	}
	return healthy{}, nil
}

type healthy struct{ syscall.RawConn }

// Read looks at no socket, for there is none.
func (healthy) Read(func(fd uintptr) bool) error { return nil }
