package redistest

import (
	"context"
	"net"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Cleaner is the part of testing.TB that Mini needs. A *rapid.T implements it, too.
type Cleaner interface{ Cleanup(func()) }

// MiniLocks skips a test that locks on a miniredis where an int has 32 bits: miniredis reads the integers that scripts pass
// to commands, such as the time in ms, into an int.
func MiniLocks(tb testing.TB) {
	tb.Helper()
	if strconv.IntSize < 64 {
		tb.Skipf("miniredis reads integers into an int, which has %d bits here: too few for the time", strconv.IntSize)
	}
}

// A MiniRedis is a miniredis without a listener, whose clock is Go's. Once it is closed it refuses connections.
type MiniRedis struct {
	*miniredis.Miniredis

	mu     sync.Mutex // guards closed: miniredis does not expect a connection while it closes, and starts again for a later one
	closed bool
}

// Mini returns a MiniRedis and a client of it. Both are closed when the test ends. In a testing/synctest bubble they use the
// bubble's time, if Mini is called inside of it.
func Mini(tb Cleaner) (*MiniRedis, *redis.Client) {
	m := &MiniRedis{Miniredis: miniredis.NewMiniRedis()}
	m.ClockTTL(true)
	tb.Cleanup(m.Close)
	return m, MiniClient(tb, m)
}

// Dial connects to m in memory, for any address.
func (m *MiniRedis) Dial(context.Context, string, string) (net.Conn, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, net.ErrClosed
	}
	return m.Miniredis.Dial()
}

// Close closes all connections, and waits for the commands under way.
func (m *MiniRedis) Close() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.Miniredis.Close()
}

// MiniClient returns another client of m. To connect it through a Link, use faultnet.New(m.Dial).
func MiniClient(tb Cleaner, m *MiniRedis, mutate ...func(*redis.Options)) *redis.Client {
	opt := &redis.Options{
		// It is never dialled, but it must be an IP: go-redis resolves a name, in goroutines outside of the bubble.
		Addr:   "127.0.0.1:6379",
		Dialer: m.Dial,
		// By default it depends on the number of CPUs, and so would what fails: go-redis dials once a second after as many
		// failed dials.
		PoolSize: 20,
		// go-redis waits for the answer to CLIENT MAINT_NOTIFICATIONS under a mutex, and in a bubble no time passes while
		// a goroutine waits for a mutex.
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	for _, f := range mutate {
		f(opt)
	}
	rc := redis.NewClient(opt)
	tb.Cleanup(func() {
		rc.Close()
		if InBubble() {
			synctest.Wait()
			forgetTimers(rc)
		}
	})
	return rc
}

// forgetTimers empties the pool in which go-redis keeps the timers of calls that have waited for a connection. A timer of one
// bubble that is used in another one ends the process.
func forgetTimers(rc *redis.Client) {
	stats := rc.PoolStats()
	waits := stats.WaitCount + stats.Timeouts
	if pipelines := stats.PipelineStats; pipelines != nil {
		waits += pipelines.WaitCount + pipelines.Timeouts
	}
	if waits > 0 {
		runtime.GC() // a sync.Pool keeps its values for one collection more
		runtime.GC()
	}
}
