package redistest

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
)

// A Counter is a hook that counts the commands of a client, those of a pipeline one by one.
type Counter struct{ n atomic.Int64 }

// Commands returns the number of commands so far.
func (c *Counter) Commands() int { return int(c.n.Load()) }

// DialHook implements [redis.Hook].
func (c *Counter) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook implements [redis.Hook].
func (c *Counter) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.n.Add(1)
		return next(ctx, cmd)
	}
}

// ProcessPipelineHook implements [redis.Hook].
func (c *Counter) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.n.Add(int64(len(cmds)))
		return next(ctx, cmds)
	}
}

// ScriptsRun returns the number of scripts that the servers of these clients have run, for all clients together.
func ScriptsRun(clients ...*redis.Client) (n int) {
	for _, rc := range clients {
		for line := range strings.Lines(rc.Info(context.Background(), "commandstats").Val()) {
			for _, format := range []string{"cmdstat_evalsha:calls=%d", "cmdstat_eval:calls=%d"} {
				var calls int
				if _, err := fmt.Sscanf(line, format, &calls); err == nil {
					n += calls
				}
			}
		}
	}
	return n
}

// A Log collects lines. The zero value is ready for use.
type Log struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// Logger returns a logger that writes to l.
func (l *Log) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// Write appends to the log.
func (l *Log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

// String returns the whole log.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// Count returns the number of lines that contain a word; "" counts all.
func (l *Log) Count(word string) (n int) {
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, word) {
			n++
		}
	}
	return n
}
