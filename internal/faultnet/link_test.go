package faultnet_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
)

// bubble runs a test in virtual time, with a link to a miniredis.
func bubble(t *testing.T, test func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link)) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := redistest.Mini(t)
		test(t, m, faultnet.New(m.Dial))
	})
}

// client returns a client that uses the link.
func client(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link, mutate ...func(*redis.Options)) *redis.Client {
	return redistest.MiniClient(t, m, append(mutate, redistest.Through(l))...)
}

// impatient makes a client never resend, and time out after a second.
func impatient(o *redis.Options) {
	o.MaxRetries = -1
	o.ReadTimeout = time.Second
	o.DialTimeout = time.Second
	o.DialerRetries = 1
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestHeldRequestArrivesAfterItsClientHasGone(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		rc := client(t, m, l, impatient)
		release := l.HoldRequest("late")
		if err := rc.Set(t.Context(), "late", "v", 0).Err(); !isTimeout(err) {
			t.Fatalf("want a timeout while the request is held, got %v", err)
		}
		rc.Close()
		if l.Live() != 0 || l.Held() != 1 {
			t.Fatalf("want 0 connections live and 1 held, got %d and %d", l.Live(), l.Held())
		}
		redistest.Elapse(time.Hour)
		if m.Exists("late") {
			t.Fatal("want the request held for an hour, it has arrived")
		}
		release()
		release() // a second call does nothing
		synctest.Wait()
		if !m.Exists("late") {
			t.Fatal("want the request to arrive on release, it has not")
		}
	})
}

func TestHeldRequestKeepsBackOnlyItsConnection(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		rc := client(t, m, l)
		release := l.HoldRequest("slow")
		done := make(chan error)
		go func() { done <- rc.Set(t.Context(), "slow", "v", 0).Err() }()
		synctest.Wait()
		must(t, rc.Set(t.Context(), "fast", "v", 0).Err())
		if m.Exists("slow") {
			t.Fatal("want the request held, it has arrived")
		}
		release()
		must(t, <-done)
	})
}

func TestRequestQueuesBehindAHeldOneOfItsConnection(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		c := dial(t, l)
		release := l.HoldRequest("first")
		send(t, c, "APPEND", "k", "first")
		send(t, c, "APPEND", "k", "second")
		synctest.Wait()
		if m.Exists("k") {
			t.Fatal("want the request held, it has arrived")
		}
		release()
		synctest.Wait()
		if v, _ := m.Get("k"); v != "firstsecond" {
			t.Fatalf("want \"first\" before \"second\", they ran as %q", v)
		}
	})
}

func TestRuleReleasedBeforeItMatchedIsGone(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		l.HoldRequest("k")()
		l.HoldReply("k")()
		rc := client(t, m, l, impatient)
		must(t, rc.Set(t.Context(), "k", "v", 0).Err())
		l.HoldRequest("k")()
		l.LoseReply("k", 1)
		if rc.Set(t.Context(), "k", "v", 0).Err() == nil {
			t.Fatal("want the reply lost by the second rule, the request succeeded")
		}
	})
}

func TestHeldReplyIsOfARequestThatHasRun(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		rc := client(t, m, l)
		release := l.HoldReply("k")
		done := make(chan error, 1)
		go func() { done <- rc.Set(t.Context(), "k", "v", 0).Err() }()
		synctest.Wait()
		if !m.Exists("k") || l.Held() != 1 {
			t.Fatalf("want the request run and 1 reply held, run: %v, held: %d", m.Exists("k"), l.Held())
		}
		select {
		case err := <-done:
			t.Fatalf("want no answer while the reply is held, got %v", err)
		default:
		}
		release()
		must(t, <-done)
	})
}

func TestLostReplyIsOfARequestThatHasRun(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		l.LoseReply("counter", 2)
		n, err := client(t, m, l).Incr(t.Context(), "counter").Result()
		if err != nil || n != 3 {
			t.Fatalf("want a request that is resent twice to run 3 times, it ran %d times: %v", n, err)
		}
		if l.Live() != 1 || l.Dials() != 3 {
			t.Fatalf("want 1 connection live of 3 dialled, got %d of %d", l.Live(), l.Dials())
		}
	})
}

func TestDelayKeepsOrderAndDoesNotLimitThroughput(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		c := dial(t, l)
		l.SetDelay(time.Minute)
		start := time.Now()
		want := ""
		for i := range 500 {
			send(t, c, "ECHO", strconv.Itoa(1000+i))
			want += "$4\r\n" + strconv.Itoa(1000+i) + "\r\n"
		}
		if took := time.Since(start); took != 0 {
			t.Fatalf("want sending to take no time, it took %v", took)
		}
		got := make([]byte, len(want))
		if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
			t.Fatalf("want the replies in order, got %.80q, %v", got, err)
		}
		if took := time.Since(start); took != 2*time.Minute {
			t.Fatalf("want 500 requests sent together answered after 2m, it took %v", took)
		}
	})
}

func TestHoleSwallowsWhatIsSentIntoIt(t *testing.T) {
	for _, up := range []bool{true, false} {
		bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
			rc := client(t, m, l, impatient)
			must(t, rc.Ping(t.Context()).Err())
			l.Hole(up, !up)
			start := time.Now()
			if err := rc.Set(t.Context(), "k", "v", 0).Err(); !isTimeout(err) || time.Since(start) != time.Second {
				t.Fatalf("want a timeout after 1s, got %v after %v", err, time.Since(start))
			}
			if ran := m.Exists("k"); ran != !up {
				t.Fatalf("hole up: %v; want the request run: %v, it was: %v", up, !up, ran)
			}
			l.Hole(false, false)
			must(t, rc.Ping(t.Context()).Err())
		})
	}
}

func TestConnectionThatLostBytesStaysSilent(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		c := dial(t, l)
		l.Hole(true, false)
		send(t, c, "SET", "k", "lost")
		synctest.Wait()
		l.Hole(false, false)
		send(t, c, "SET", "k", "late")
		synctest.Wait()
		if m.Exists("k") {
			t.Fatal("want nothing delivered after a gap, a later request has run")
		}
		c.SetReadDeadline(time.Now().Add(time.Hour))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("want silence for 1h, got %v", err)
		}
	})
}

func TestServersEndIsLostInAHole(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		c := dial(t, l)
		l.Hole(false, true)
		m.Close()
		c.SetReadDeadline(time.Now().Add(time.Hour))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("want silence for 1h, got %v", err)
		}
	})
}

func TestDialHangsInAHole(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		l.Hole(true, false)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		start := time.Now()
		if _, err := l.Dial(ctx, "tcp", "x"); !isTimeout(err) || time.Since(start) != time.Minute {
			t.Fatalf("want a timeout after 1m, got %v after %v", err, time.Since(start))
		}
		time.AfterFunc(time.Hour, func() { l.Hole(false, false) })
		start = time.Now()
		dial(t, l)
		if time.Since(start) != time.Hour {
			t.Fatalf("want the dial to end with the hole, after 1h, it did after %v", time.Since(start))
		}
	})
}

func TestRefuseBearsOnNewDialsOnly(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		rc := client(t, m, l)
		must(t, rc.Ping(t.Context()).Err())
		l.Refuse(true)
		must(t, rc.Ping(t.Context()).Err())
		var op *net.OpError
		if _, err := l.Dial(t.Context(), "tcp", "x"); !errors.Is(err, syscall.ECONNREFUSED) || !errors.As(err, &op) {
			t.Fatalf("want a *net.OpError with ECONNREFUSED, got %v", err)
		}
		l.Refuse(false)
		dial(t, l)
	})
}

func TestCutClosesEveryConnection(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		a, b := dial(t, l), dial(t, l)
		l.Cut()
		for _, c := range []net.Conn{a, b} {
			must(t, c.SetDeadline(time.Now().Add(time.Hour))) // as on a socket, only Read and Write fail
			if _, err := c.Read(make([]byte, 1)); err != io.EOF {
				t.Fatalf("want io.EOF from a read after a cut, got %v", err)
			}
			if _, err := c.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
				t.Fatalf("want EPIPE from a write after a cut, got %v", err)
			}
		}
		synctest.Wait()
		if l.Live() != 0 || m.CurrentConnectionCount() != 0 {
			t.Fatalf("want no connection after a cut, the link has %d and the server %d", l.Live(), m.CurrentConnectionCount())
		}
	})
}

// A client has more idle connections than retries: it must see that they are dead without trying each of them.
func TestPoolSeesACut(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		rc := client(t, m, l, impatient)
		var all sync.WaitGroup
		l.SetDelay(time.Millisecond) // so that each command needs a connection of its own
		for range 8 {
			all.Go(func() { rc.Ping(t.Context()) })
		}
		all.Wait()
		if l.Live() < 5 {
			t.Fatalf("want at least 5 connections, got %d", l.Live())
		}
		l.Cut()
		must(t, rc.Ping(t.Context()).Err())
	})
}

func TestServersEndReachesTheClientAfterItsReplies(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		c := dial(t, l)
		l.SetDelay(time.Second)
		send(t, c, "PING")
		redistest.Elapse(time.Second) // the request has arrived, the reply is in flight
		synctest.Wait()
		m.Close()
		if got, err := io.ReadAll(c); err != nil || string(got) != "+PONG\r\n" {
			t.Fatalf("want +PONG and then the end, got %q, %v", got, err)
		}
		if l.Live() != 0 {
			t.Fatalf("want no live connection after the server's end, got %d", l.Live())
		}
	})
}

func TestMessageIsLostOrLateByItself(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		sub := client(t, m, l).Subscribe(t.Context(), "news")
		defer sub.Close()
		_, err := sub.Receive(t.Context())
		must(t, err)
		l.LoseMessage("first")
		release := l.HoldMessage("second")
		for _, word := range []string{"first", "second", "third"} {
			m.Publish("news", word)
			synctest.Wait()
		}
		if got, err := sub.ReceiveTimeout(t.Context(), time.Second); !isTimeout(err) {
			t.Fatalf("want no message for 1s, got %v, %v", got, err)
		}
		release()
		for _, word := range []string{"second", "third"} {
			got, err := sub.ReceiveMessage(t.Context())
			if must(t, err); got.Payload != word {
				t.Fatalf("want the message %q, got %q", word, got.Payload)
			}
		}
		if e := l.Effects(); e.LostMessages != 1 || e.HeldMessages != 1 {
			t.Fatalf("want 1 lost and 1 held message, got %+v", e)
		}
	})
}

func TestEffectsCountWhatMetTraffic(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		rc := client(t, m, l, impatient)
		send := func() { rc.Incr(t.Context(), "k") }
		send()
		l.LoseReply("never sent", 1)
		if e := l.Effects(); e != (faultnet.Effects{}) {
			t.Fatalf("want no effect of a rule that matched nothing, got %+v", e)
		}
		l.LoseReply("incr", 1)
		send()
		for _, hold := range []func(string) func(){l.HoldRequest, l.HoldReply} {
			release := hold("incr")
			send()
			release()
		}
		send()
		l.Hole(true, false)
		send()
		l.Hole(false, false)
		send()
		l.Cut()
		l.Refuse(true)
		send()
		e := l.Effects()
		if e.LostReplies != 1 || e.HeldRequests != 1 || e.HeldReplies != 1 || e.Swallowed == 0 || e.Cut != 1 || e.Refused == 0 {
			t.Fatalf("want 1 reply lost, 1 request and 1 reply held, 1 cut, and some swallowed and refused, got %+v", e)
		}
	})
}

// The faults work over TCP in real time, too.
func TestFaultsOverTCP(t *testing.T) {
	s := redistest.Start(t)
	l := faultnet.New(nil)
	through := func(o *redis.Options) { o.Dialer = l.Dial }
	direct := s.Client(t)
	rc := s.Client(t, through)
	ctx := t.Context()

	l.LoseReply("counter", 2)
	if n, err := rc.Incr(ctx, "counter").Result(); n != 3 || err != nil {
		t.Fatalf("want a request that is resent twice to run 3 times, it ran %d times: %v", n, err)
	}

	// A request is held, its connection is cut and its resend is answered; then it arrives.
	release := l.HoldRequest("late")
	done := make(chan error)
	go func() { done <- rc.Incr(ctx, "late").Err() }()
	redistest.Eventually(t, "the request is held", func() bool { return l.Held() == 1 })
	l.Cut()
	must(t, <-done)
	release()
	redistest.Eventually(t, "the held request has arrived", func() bool { return direct.Get(ctx, "late").Val() == "2" })

	release = l.HoldReply("heard")
	go func() { done <- rc.Set(ctx, "heard", "v", 0).Err() }()
	redistest.Eventually(t, "the reply is held", func() bool { return l.Held() == 1 })
	must(t, direct.Get(ctx, "heard").Err())
	release()
	must(t, <-done)

	l.Hole(true, true)
	brief, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if _, err := l.Dial(brief, "tcp", s.Addr()); !isTimeout(err) {
		t.Fatalf("want a timeout of a dial into a hole, got %v", err)
	}
	l.Hole(false, false)

	if addr := dial(t, l, s.Addr()).RemoteAddr().String(); addr != s.Addr() {
		t.Fatalf("want the server's address %s, got %s", s.Addr(), addr)
	}
	s.Kill()
	redistest.Eventually(t, "no connection is left", func() bool { return l.Live() == 0 })
	s.Restart(t)
	must(t, rc.Ping(ctx).Err())
}

// It calls every method concurrently, for the race detector.
func TestControlsAreSafeForConcurrentUse(t *testing.T) {
	bubble(t, func(t *testing.T, m *redistest.MiniRedis, l *faultnet.Link) {
		rc := client(t, m, l, impatient)
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				for range 50 {
					rc.Incr(t.Context(), "k")
				}
			})
		}
		for _, control := range []func(){
			func() { l.SetDelay(time.Millisecond); l.SetDelay(0) },
			func() { l.Hole(true, true); l.Hole(false, false) },
			func() { l.Refuse(true); l.Refuse(false) },
			func() { l.LoseReply("incr", 1) },
			func() { release := l.HoldRequest("incr"); redistest.Elapse(time.Millisecond); release() },
			func() { release := l.HoldReply("incr"); redistest.Elapse(time.Millisecond); release() },
			l.Cut,
			func() { l.LoseMessage("never sent"); l.HoldMessage("PONG")() },
			func() { l.Live(); l.Dials(); l.Held(); l.Effects() },
		} {
			all.Go(func() {
				for range 50 {
					control()
					redistest.Elapse(time.Millisecond)
				}
			})
		}
		all.Wait()
		must(t, rc.Ping(t.Context()).Err())
	})
}

// dial opens a bare connection, closed when the test ends.
func dial(t *testing.T, l *faultnet.Link, addr ...string) net.Conn {
	t.Helper()
	c, err := l.Dial(t.Context(), "tcp", append(addr, "in memory")[0])
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// send writes one command, in one Write.
func send(t *testing.T, c net.Conn, args ...string) {
	t.Helper()
	b := fmt.Appendf(nil, "*%d\r\n", len(args))
	for _, a := range args {
		b = fmt.Appendf(b, "$%d\r\n%s\r\n", len(a), a)
	}
	_, err := c.Write(b)
	must(t, err)
}
