package faultnet

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
//
// Each direction has a collector, which decides what happens to a chunk when it is sent, and a deliverer, which delivers
// it when it is due. A chunk in the queue between them is in flight.
type conn struct {
	net.Conn          // the client's end of a pipe
	near     net.Conn // the link's end of it
	server   net.Conn
	link     *Link

	// These are contexts because both sides may end them, more than once.
	clientGone, serverGone, hungUp context.Context
	endClient, endServer, endCall  context.CancelFunc

	// Guarded by link.mu.
	gap       [2]bool // by direction: bytes were lost, so nothing is delivered after them
	loseReply bool
	replyGate <-chan struct{}
}

// chunk is the bytes of one Write, in flight.
type chunk struct {
	bytes []byte
	due   time.Time
	gate  <-chan struct{} // closed when the chunk may be delivered; nil: at once
	rule  *rule           // of a request: the rule for its reply, applied on delivery
	last  bool            // of a reply: it is lost, and the connection is closed
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
	// About as deep as a socket's buffers, so that a peer that does not read eventually blocks its sender.
	up, down := make(chan chunk, 1024), make(chan chunk, 1024)
	var pumps sync.WaitGroup
	pumps.Go(func() { collect(c.near, c.request, up, c.serverGone.Done(), c.endClient) })
	pumps.Go(func() { c.deliver(up, c.server, c.serverGone.Done()); c.finish() })
	pumps.Go(func() { collect(c.server, c.reply, down, c.clientGone.Done(), c.endServer) })
	pumps.Go(func() { c.deliver(down, c.near, c.clientGone.Done()); c.farewell() })
	pumps.Wait()
	c.server.Close()
}

// collect reads what one end sends until that end is closed. It reads on when the other end is closed, as a network
// does.
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

// deliver delivers the chunks in flight, each when it is due, until none is left or the receiver is closed.
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
		to.Write(ch.bytes) // an error means that to is closed, which its own collector notices
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

// request decides what happens to bytes that the client sends.
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

// arm applies the rule of a request that is about to be delivered to its reply.
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

// reply decides what happens to bytes that the server sends.
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

// lost reports whether bytes sent now are lost. link.mu is held.
func (c *conn) lost(direction int) bool {
	c.gap[direction] = c.gap[direction] || c.link.hole[direction]
	return c.gap[direction]
}

// finish closes the connection to the server after the client has closed its end. It closes only half of a TCP
// connection: closing all of it with an unread reply would reset it, and a reset may overtake an earlier request.
func (c *conn) finish() {
	if half, ok := c.server.(interface{ CloseWrite() error }); ok {
		half.CloseWrite()
	} else {
		c.server.Close()
	}
}

// farewell closes the connection to the client after the server has closed its end, unless the client cannot learn of
// that.
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

// The methods below return the errors of TCP for a closed connection: go-redis retries after those, but not after the
// errors of a pipe.

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

// set ignores that the far side has closed the connection: on a socket only the next Read or Write fails.
func (c *conn) set(err error) error {
	if c.hungUp.Err() != nil {
		return nil
	}
	return c.inTCP("set", net.ErrClosed, err)
}

func (c *conn) inTCP(op string, closed, err error) error {
	if !errors.Is(err, io.ErrClosedPipe) {
		return err
	}
	return &net.OpError{Op: op, Net: "tcp", Addr: c.RemoteAddr(), Err: closed}
}

// LocalAddr and RemoteAddr return the real addresses: a failover client finds the connections to a former master by them.

func (c *conn) LocalAddr() net.Addr  { return c.server.LocalAddr() }
func (c *conn) RemoteAddr() net.Addr { return c.server.RemoteAddr() }

// SyscallConn lets go-redis check whether the far side has closed an idle connection. Without it, after a cut, a pool
// would hand out dead connections until its retries are used up, which does not happen with sockets.
func (c *conn) SyscallConn() (syscall.RawConn, error) {
	if c.hungUp.Err() != nil {
		return nil, io.EOF
	}
	return healthy{}, nil
}

type healthy struct{ syscall.RawConn }

// Read does nothing, since there is no socket.
func (healthy) Read(func(fd uintptr) bool) error { return nil }
