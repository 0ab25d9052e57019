package redistest

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestMiniLivesInVirtualTime(t *testing.T) {
	for range 2 { // the second bubble of a process is where a look-up by name shows
		synctest.Test(t, func(t *testing.T) {
			m, rc := Mini(t)
			if err := rc.Set(t.Context(), "k", "v", 24*time.Hour).Err(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(24*time.Hour - time.Second)
			if !m.Exists("k") {
				t.Fatal("expired early")
			}
			time.Sleep(time.Second)
			if m.Exists("k") {
				t.Fatal("expired late")
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
			t.Fatal(n, err)
		}
		if msg, err := sub.ReceiveMessage(t.Context()); err != nil || msg.Payload != "hello" {
			t.Fatal(msg, err)
		}
	})
}
