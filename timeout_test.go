package redismutex

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/redistest"
)

// oneByOne is a client that sends one script after the other, as if it had no more than one connection.
type oneByOne chan struct{}

func (oneByOne) DialHook(next redis.DialHook) redis.DialHook { return next }

func (oneByOne) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (c oneByOne) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if name := cmd.Name(); name != "evalsha" && name != "eval" {
			return next(ctx, cmd)
		}
		c <- struct{}{}
		defer func() { <-c }()
		return next(ctx, cmd)
	}
}

// The node time-out starts when a request is written to a connection. Requests that wait in the client until then, here
// for many times the time-out, mark no node down.
func TestNodeTimeoutStartsWhenTheRequestIsSent(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		var log redistest.Log
		clients := ns.process(func(_ int, rc *redis.Client) { rc.AddHook(make(oneByOne, 1)) })
		m := NewRedlock(clients, "x", WithTTL(time.Minute), WithLogger(log.Logger()))
		ns.unlock(ns.lock(m, true))
		synctest.Wait() // every node has a connection now
		for _, l := range ns.links {
			l.SetDelay(m.config.Timeout / 8)
		}
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				l, err := m.LockContext(ns.Context(), WithKey(fmt.Sprint(i)))
				if err != nil {
					t.Error(err)
					return
				}
				if err := l.UnlockContext(ns.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if strings.Contains(log.String(), "a node is down") {
			t.Errorf("no node was to be marked down; logged: %s", log.String())
		}
	})
}
