package redistest

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

func TestMiniLivesInVirtualTime(t *testing.T) {
	for range 2 { // only the second bubble of a process fails if a name is resolved
		synctest.Test(t, func(t *testing.T) {
			m, rc := Mini(t)
			if err := rc.Set(t.Context(), "k", "v", 24*time.Hour).Err(); err != nil {
				t.Fatal(err)
			}
			Elapse(24*time.Hour - time.Second)
			if !m.Exists("k") {
				t.Fatal("want the key for 24h, it expired 1s early")
			}
			Elapse(time.Second)
			if m.Exists("k") {
				t.Fatal("want the key expired after 24h, it has not")
			}
		})
	}
}

func TestMiniClientsShareAServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, rc := Mini(t)
		other := MiniClient(t, m, func(o *redis.Options) { o.Protocol = 2 })
		sub := other.Subscribe(t.Context(), "c")
		t.Cleanup(func() { sub.Close() })
		if _, err := sub.Receive(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n, err := rc.Publish(t.Context(), "c", "hello").Result(); n != 1 || err != nil {
			t.Fatalf("want 1 subscriber reached, got %d, %v", n, err)
		}
		if msg, err := sub.ReceiveMessage(t.Context()); err != nil || msg.Payload != "hello" {
			t.Fatalf("want the message hello, got %v, %v", msg, err)
		}
	})
}

// Time passes in the bubble while several connections, each with a delay of its own, are opened at once.
func TestMiniClientConnectsSlowly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := Mini(t)
		var delay atomic.Int64
		rc := MiniClient(t, m, func(o *redis.Options) {
			o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := m.Dial(ctx, network, addr)
				return &slow{c, time.Millisecond + time.Duration(delay.Add(1))*100*time.Microsecond}, err
			}
		})
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if err := rc.Ping(t.Context()).Err(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
}

// A slow connection delays every write.
type slow struct {
	net.Conn
	delay time.Duration
}

func (c *slow) Write(b []byte) (int, error) {
	Elapse(c.delay) // virtual
	return c.Conn.Write(b)
}

// What the library does in the background may connect when its test has ended.
func TestMiniRefusesConnectionsOnceItIsClosed(t *testing.T) {
	for range 300 {
		m := &MiniRedis{Miniredis: miniredis.NewMiniRedis()}
		var started, ended sync.WaitGroup
		started.Add(1)
		ended.Go(func() {
			for first := true; ; first = false {
				c, err := m.Dial(t.Context(), "", "")
				if first {
					started.Done()
				}
				if err != nil {
					if !errors.Is(err, net.ErrClosed) {
						t.Error(err)
					}
					return
				}
				c.Close()
			}
		})
		started.Wait()
		m.Close()
		ended.Wait()
	}
}
