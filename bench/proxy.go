package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// A proxy is the parent's end of a process that connects clients to Redis. It delays everything by half a round trip in each
// direction, for every library alike, and counts the commands that clients send.
type proxy struct {
	addrs  []string // one for each target
	ask    io.WriteCloser
	answer *bufio.Scanner
	cmd    *exec.Cmd
}

// startProxy starts a process that delays by each, in each direction. It ends when its standard input is closed, and therefore with
// this process.
func startProxy(cpu string, each time.Duration, targets ...string) (*proxy, error) {
	cmd, err := child(cpu, append([]string{"proxy", each.String()}, targets...)...)
	if err != nil {
		return nil, err
	}
	p := &proxy{cmd: cmd}
	if p.ask, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p.answer = bufio.NewScanner(out)
	if !p.answer.Scan() {
		return nil, errors.Join(errors.New("the proxy did not start"), p.answer.Err(), p.close())
	}
	p.addrs = strings.Fields(p.answer.Text())
	return p, nil
}

// commands returns the number of commands that clients have sent so far.
func (p *proxy) commands() (int, error) {
	if _, err := fmt.Fprintln(p.ask); err != nil {
		return 0, err
	}
	if !p.answer.Scan() {
		return 0, errors.Join(errors.New("the proxy has exited"), p.answer.Err())
	}
	return strconv.Atoi(p.answer.Text())
}

func (p *proxy) close() error {
	return errors.Join(p.ask.Close(), p.cmd.Wait())
}

// proxyMain is that process: it prints its addresses, and then, for each line that it reads, the number of commands.
func proxyMain(args []string) error {
	runtime.GOMAXPROCS(4) // so that a sleeping thread does not keep others from reading, even with one CPU
	each, err := time.ParseDuration(args[0])
	if err != nil {
		return err
	}
	l := &line{each: each, under: make(chan parcel, 1<<16)}
	go l.deliver()
	var addrs []string
	for _, target := range args[1:] {
		near, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		go l.serve(near, target)
		addrs = append(addrs, near.Addr().String())
	}
	fmt.Println(strings.Join(addrs, " "))
	asked := bufio.NewScanner(os.Stdin)
	for asked.Scan() {
		fmt.Println(l.commands.Load())
	}
	return asked.Err()
}

// A line delays all connections by the same time. So the bytes in flight are due in the order in which they were sent, and one queue
// and one sleeping thread suffice. A timer of Go may be a millisecond late.
type line struct {
	each     time.Duration
	under    chan parcel // in flight
	commands atomic.Int64
}

type parcel struct {
	to    net.Conn
	bytes []byte // nil: the end
	due   time.Time
}

func (l *line) deliver() {
	precise()
	for p := range l.under {
		if left := time.Until(p.due); left > 0 {
			sleep(left)
		}
		if p.bytes == nil {
			p.to.Close()
		} else if _, err := p.to.Write(p.bytes); err != nil {
			p.to.Close() // its reader notices that, and ends the other side
		}
	}
}

func (l *line) serve(near net.Listener, target string) {
	for {
		client, err := near.Accept()
		if err != nil {
			return // the process ends
		}
		server, err := net.Dial("tcp", target)
		if err != nil {
			client.Close() // the client reports it, as if the server had refused
			continue
		}
		go l.collect(client, server, &counter{})
		go l.collect(server, client, nil)
	}
}

// collect reads what one side sends until that is closed.
func (l *line) collect(from, to net.Conn, sent *counter) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if sent != nil {
				l.commands.Add(sent.count(buf[:n]))
			}
			l.under <- parcel{to, bytes.Clone(buf[:n]), time.Now().Add(l.each)}
		}
		if err != nil {
			l.under <- parcel{to: to, due: time.Now().Add(l.each)}
			return
		}
	}
}

// A counter reads what one client sends: each command is a RESP array of bulk strings.
type counter struct {
	head []byte // the beginning of a line, the rest of which has not arrived
	skip int    // the number of bytes of a bulk string that have not arrived
}

func (c *counter) count(b []byte) (commands int64) {
	for len(b) > 0 {
		if c.skip > 0 {
			n := min(c.skip, len(b))
			c.skip, b = c.skip-n, b[n:]
			continue
		}
		end := bytes.IndexByte(b, '\n')
		if end < 0 {
			c.head = append(c.head, b...)
			return commands
		}
		c.head, b = append(c.head, b[:end]...), b[end+1:]
		switch text := strings.TrimSuffix(string(c.head), "\r"); {
		case strings.HasPrefix(text, "*"):
			commands++
		case strings.HasPrefix(text, "$"):
			if n, err := strconv.Atoi(text[1:]); err == nil {
				c.skip = n + len("\r\n")
			}
		}
		c.head = c.head[:0]
	}
	return commands
}
