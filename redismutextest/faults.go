package redismutextest

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/redistest"
)

// failures is a hook that makes the next calls of a client fail.
type failures struct {
	mu   sync.Mutex // guards both
	err  error
	left int
}

func (f *failures) set(err error, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err, f.left = err, n
}

// next returns the error of a call that begins with cmd, or nil if the call should be made. INFO is not counted, which the
// library asks for once, beside its first lock; nor is what go-redis sends to set up a connection.
func (f *failures) next(cmd redis.Cmder) error {
	switch cmd.Name() {
	case "info", "hello", "auth", "select", "client":
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.left == 0 {
		return nil
	}
	f.left--
	return f.err
}

// DialHook implements [redis.Hook].
func (f *failures) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook implements [redis.Hook].
func (f *failures) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if err := f.next(cmd); err != nil {
			cmd.SetErr(err)
			return err
		}
		return next(ctx, cmd)
	}
}

// ProcessPipelineHook implements [redis.Hook].
func (f *failures) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if err := f.next(cmds[0]); err != nil {
			for _, cmd := range cmds {
				cmd.SetErr(err)
			}
			return err
		}
		return next(ctx, cmds)
	}
}

// A clock sets the clock of a server forward, from where it goes on. The clock of miniredis stands still once it has been set,
// so it is set before whatever is sent to the server.
type clock struct {
	server *redistest.MiniRedis

	mu    sync.Mutex // guards ahead, and keeps the clock of the server from going back
	ahead time.Duration
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ahead += d
}

func (c *clock) set() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ahead > 0 {
		c.server.SetTime(time.Now().Add(c.ahead))
	}
}

// dial connects to the server.
func (c *clock) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := c.server.Dial(ctx, network, addr)
	return &clocked{conn, c}, err
}

// A clocked connection sets the clock of the server.
type clocked struct {
	net.Conn
	clock *clock
}

func (c *clocked) Write(b []byte) (int, error) {
	c.clock.set()
	return c.Conn.Write(b)
}
