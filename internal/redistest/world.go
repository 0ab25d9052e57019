package redistest

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/redis/go-redis/v9"

	"github.com/redismutex/redismutex/internal/faultnet"
)

// A World is one Redis in virtual time, and the processes that use it. Hours pass at once, and a lease ends to the
// nanosecond. Each process has a network of its own, which fails on demand.
type World struct {
	*testing.T
	Redis *MiniRedis
	Admin *redis.Client // a client of Redis whose network never fails
	links []*faultnet.Link
}

// InVirtualTime runs a test in a synctest bubble, with a World of its own. After the test all networks work again, all
// clients are closed, and ten minutes pass in which everything in the background ends.
func InVirtualTime(t *testing.T, test func(w *World)) {
	t.Helper()
	MiniLocks(t)
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(AfterBubble) // registered first, it runs last
		w := &World{T: t}
		w.Redis, w.Admin = Mini(t)
		defer func() {
			for _, l := range w.links {
				heal(l)
			}
		}()
		test(w)
	})
}

// Process returns the client of another process, and its network.
func (w *World) Process(mutate ...func(*redis.Options)) (*redis.Client, *faultnet.Link) {
	link := faultnet.New(w.Redis.Dial)
	w.links = append(w.links, link)
	return MiniClient(w, w.Redis, append(mutate, Through(link))...), link
}

// Messages returns a function that returns the messages published so far on the channels that match the pattern, in
// order.
func (w *World) Messages(pattern string) func() []*redis.Message {
	w.Helper()
	sub := w.Admin.PSubscribe(w.Context(), pattern)
	w.Cleanup(func() { sub.Close() })
	if _, err := sub.Receive(w.Context()); err != nil { // the confirmation
		w.Fatal(err)
	}
	var mu sync.Mutex
	var messages []*redis.Message
	go func() {
		for {
			m, err := sub.ReceiveMessage(context.Background())
			if err != nil {
				return // closed
			}
			mu.Lock()
			messages = append(messages, m)
			mu.Unlock()
		}
	}()
	return func() []*redis.Message {
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		return messages
	}
}

// Through makes a client use a link; nil is a network that never fails.
func Through(link *faultnet.Link) func(*redis.Options) {
	return func(o *redis.Options) {
		if link != nil {
			o.Dialer = link.Dial
		}
	}
}

// Crash cuts a process off for good, so that to its server it is dead.
func Crash(link *faultnet.Link) {
	link.Refuse(true)
	link.Cut()
}

// heal makes a network work again. It closes every connection, since one may have lost bytes.
func heal(link *faultnet.Link) {
	link.Hole(false, false)
	link.Refuse(false)
	link.SetDelay(0)
	link.Cut()
}
