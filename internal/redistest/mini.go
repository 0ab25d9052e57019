package redistest

import (
	"context"
	"net"
	"strconv"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Cleaner is as much of a testing.TB as Mini needs. A *rapid.T is one too.
type Cleaner interface{ Cleanup(func()) }

// MiniLocks skips a test that locks on a miniredis where that cannot: it reads the integers that scripts hand to its
// commands, such as the time in ms, into an int.
func MiniLocks(tb testing.TB) {
	tb.Helper()
	if strconv.IntSize < 64 {
		tb.Skipf("miniredis reads integers into an int, which has %d bits here: too few for the time", strconv.IntSize)
	}
}

// Mini makes a miniredis without a listener, whose clock is Go's, and a client of it. Both are closed when the test
// ends. In a testing/synctest bubble, time is the bubble's: call Mini inside of it.
func Mini(tb Cleaner) (*miniredis.Miniredis, *redis.Client) {
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	tb.Cleanup(m.Close)
	return m, MiniClient(tb, m)
}

// MiniClient makes one more client of m. A Link goes between as faultnet.New(redistest.MiniDial(m)).
func MiniClient(tb Cleaner, m *miniredis.Miniredis, mutate ...func(*redis.Options)) *redis.Client {
	opt := &redis.Options{
		// Nobody dials it, but it has to be an IP: for a name go-redis asks a resolver, whose goroutines are not
		// of the bubble.
		Addr:   "127.0.0.1:6379",
		Dialer: MiniDial(m),
		// go-redis waits for the answer to CLIENT MAINT_NOTIFICATIONS under a mutex, and in a bubble no time passes
		// while anybody waits for a mutex.
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	for _, f := range mutate {
		f(opt)
	}
	rc := redis.NewClient(opt)
	tb.Cleanup(func() { rc.Close() })
	return rc
}

// MiniDial connects to m in memory, whatever the address.
func MiniDial(m *miniredis.Miniredis) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(context.Context, string, string) (net.Conn, error) { return m.Dial() }
}
