package sim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
)

// A crowd is a process with few connections and many goroutines that lock at once. It has keys of its own, which are not in
// the history: each event checks its own outcome.
type crowd struct {
	*era
	t       *testing.T
	random  *rand.Rand
	event   string
	name    string // of the mutex; all keys begin with it
	ttl     time.Duration
	links   []*faultnet.Link
	clients []*redis.Client
	mutex   *redismutex.RWMutex
	sent    atomic.Int64 // commands
	lines   atomic.Int64 // in the log
	line    atomic.Value // the last of them, a string
}

// All keys of crowds begin with crowdPrefix.
const crowdPrefix = "crowd"

const (
	// soon is how long a crowd may take for anything.
	soon = 20 * time.Second

	// renewed is the time, in addition to half a TTL, within which a crowd learns what its renewals find out.
	renewed = 200 * time.Millisecond

	// mostCommands is how many commands a waiter may send to a node that has restarted empty: it acquires again, releases
	// its old id, locks and unlocks, and some calls fail while the node is away.
	mostCommands = 12

	// mostLines is how many lines a crowd may log then: a few of each kind within a second.
	mostLines = 60
)

// The events of crowds.
const (
	atOnce      = "crowd that locks at once"
	restarted   = "node away, emptied, as a crowd waits"
	overwritten = "lock overwritten, as a crowd waits"
	closedDown  = "client closed, as a crowd waits"
)

var crowdEvents = []string{atOnce, restarted, overwritten, closedDown}

// crowds runs one of the events. Nothing else that would affect a crowd fails meanwhile.
func (e *era) crowds(t *testing.T) {
	random := e.draw(3)
	event := crowdEvents[random.IntN(len(crowdEvents))]
	redistest.Elapse(time.Duration(random.Int64N(int64(longest))))
	c := e.newCrowd(t, random, crowdPrefix, event)
	e.injected(event)
	e.took(event, map[string]func(*crowd) bool{
		atOnce:      (*crowd).locksAtOnce,
		restarted:   (*crowd).outlivesARestart,
		overwritten: (*crowd).isOverwritten,
		closedDown:  (*crowd).isClosed,
	}[event](c))
}

func (e *era) newCrowd(t *testing.T, random *rand.Rand, name, event string) *crowd {
	c := &crowd{
		era: e, t: t, random: random, event: event, name: name,
		ttl: []time.Duration{time.Second, 2 * time.Second, 4 * time.Second}[random.IntN(3)],
	}
	size := 2 + random.IntN(3)
	var nodes []redis.Scripter
	for i, n := range e.nodes {
		link := faultnet.New(n.link.Dial)
		link.SetDelay(time.Duration(random.Int64N(int64(distance))))
		rc := e.client(t, i, link, func(o *redis.Options) {
			o.ReadTimeout = time.Second
			o.PoolSize = room
		})
		c.limit(rc, size)
		c.links, c.clients, nodes = append(c.links, link), append(c.clients, rc), append(nodes, rc)
	}
	c.mutex = c.mutexOn(nodes)
	return c
}

// mutexOn returns a mutex of the crowd on those clients.
func (c *crowd) mutexOn(nodes []redis.Scripter) *redismutex.RWMutex {
	opts := []redismutex.MutexOption{redismutex.WithTTL(c.ttl), redismutex.WithLogger(slog.New(logged{c}))}
	if len(nodes) == 1 {
		return redismutex.NewMutex(nodes[0], c.name, opts...)
	}
	return redismutex.NewRedlock(nodes, c.name, opts...)
}

func (c *crowd) wrong(format string, args ...any) {
	c.fail("%s, ttl %v, pools of %d: %s", c.event, c.ttl, c.clients[0].Options().PoolSize, fmt.Sprintf(format, args...))
}

// many draws the size of a crowd, smaller if each call goes to five nodes.
func (c *crowd) many(least int) int { return least + c.random.IntN(2*least/len(c.nodes)+1) }

// lock acquires a write lock on each of n keys.
func (c *crowd) lock(m *redismutex.RWMutex, prefix string, n int) (locks []*redismutex.Lock) {
	for i := range n {
		l, err := m.LockContext(context.Background(), redismutex.WithKey(fmt.Sprint(prefix, i)))
		if err != nil {
			c.wrong("want the holder granted the lock, got %v", err)
			continue
		}
		locks = append(locks, l)
	}
	return locks
}

// start makes many goroutines lock, on that many keys. Returned is called with what each call returns. The function that
// start returns waits until all calls have returned, and returns how long that took.
func (c *crowd) start(many, keys int, returned func(*redismutex.Lock, error)) (wait func(limit time.Duration) time.Duration) {
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	var waiting atomic.Int64
	waiting.Store(int64(many))
	for i := range many {
		lock := c.mutex.LockContext
		if i%4 == 3 {
			lock = c.mutex.RLockContext
		}
		all.Go(func() {
			l, err := lock(ctx, redismutex.WithKey(fmt.Sprint(i%keys)))
			if ctx.Err() == nil {
				returned(l, err)
			} else if err == nil {
				l.Unlock()
			}
			waiting.Add(-1)
		})
	}
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	return func(limit time.Duration) time.Duration {
		start := time.Now()
		defer cancel()
		select {
		case <-done:
		case <-time.After(limit):
			c.wrong("want all %d calls to return within %v, %d have not", many, limit, waiting.Load())
		}
		cancel()
		<-done
		return time.Since(start)
	}
}

// served checks that a call was granted the lock, and unlocks it.
func (c *crowd) served(l *redismutex.Lock, err error) {
	if err != nil {
		c.wrong("want the lock, got %v", err)
	} else if err := l.UnlockContext(context.Background()); err != nil {
		c.wrong("want the lock unlocked, got %v", err)
	}
}

// locksAtOnce starts a crowd on a slow link. No call returns an error, and no lock that is held meanwhile is lost.
func (c *crowd) locksAtOnce() bool {
	locks := c.lock(c.mutex, "held", 10)
	// The node time-out is ttl/20, and a script that a node does not know yet takes two round trips.
	delay := c.ttl/200 + time.Duration(c.random.Int64N(int64(c.ttl/200)))
	for _, l := range c.links {
		l.SetDelay(delay)
	}
	many := c.many(60)
	keys := []int{1, many}[c.random.IntN(2)]
	took := c.start(many, keys, c.served)(3 * soon)
	for _, l := range locks {
		if l.Err() != nil {
			c.wrong("%d on %d keys, %v one way: want no lock lost, got %v", many, keys, delay, context.Cause(l))
		} else if err := l.UnlockContext(context.Background()); err != nil {
			c.wrong("%d on %d keys, %v one way: want the lock unlocked, got %v", many, keys, delay, err)
		}
	}
	if c.lines.Load() > 0 {
		c.wrong("%d on %d keys, %v one way: want nothing logged, got %v", many, keys, delay, c.line.Load())
	}
	return took > c.ttl/10
}

// outlivesARestart makes the nodes unreachable for longer than a TTL while a crowd waits, and deletes the crowd's keys. All
// calls are granted the lock soon after, with few commands and few lines in the log.
func (c *crowd) outlivesARestart() bool {
	many := c.many(60)
	keys := []int{1, 4}[c.random.IntN(2)]
	locks := c.lock(c.mutex, "", keys)
	wait := c.start(many, keys, c.served)
	redistest.Elapse(c.ttl)
	c.lines.Store(0)
	for _, l := range c.links {
		l.Refuse(true)
		l.Cut()
	}
	redistest.Elapse(c.ttl + time.Duration(c.random.Int64N(int64(c.ttl))))
	found := false
	for _, n := range c.era.nodes {
		for _, key := range n.keysOf(c.name) {
			found = n.mini.Del(key) || found
		}
	}
	for _, l := range c.links {
		l.Refuse(false)
	}
	c.sent.Store(0)
	wait(soon)
	for _, l := range locks {
		if err := l.UnlockContext(context.Background()); !errors.Is(err, redismutex.ErrLockLost) {
			c.wrong("want ErrLockLost from the unlock of a lock that Redis has forgotten, got %v", err)
		}
	}
	redistest.Elapse(2 * c.ttl)
	if n, nodes := c.sent.Load(), len(c.nodes); n > int64(mostCommands*many*nodes) {
		c.wrong("want %d commands per waiter and node at most, got %d for %d waiters on %d keys, %d nodes", mostCommands, n, many, keys, nodes)
	}
	if n := c.lines.Load(); n > mostLines*int64(len(c.nodes)) {
		c.wrong("want %d lines in the log per node at most, got %d for %d waiters; the last: %v", mostLines, n, many, c.line.Load())
	}
	return found
}

// isOverwritten replaces a lock by foreign data, on a majority of the nodes at least. Each waiter gets ErrNotLock within a
// TTL, the holder's cause names ErrNotLock, and the data is left alone.
func (c *crowd) isOverwritten() bool {
	const data = "data"
	locks := c.lock(c.mutex, "", 1)
	wait := c.start(c.many(10), 1, func(l *redismutex.Lock, err error) {
		if !errors.Is(err, redismutex.ErrNotLock) {
			c.wrong("want ErrNotLock for every waiter, got %v", err)
		}
		if err == nil {
			l.Unlock()
		}
	})
	redistest.Elapse(c.ttl + time.Duration(c.random.Int64N(int64(c.ttl))))
	key := c.name + ":0"
	nodes := c.random.Perm(len(c.nodes))[:len(c.nodes)/2+1+c.random.IntN(len(c.nodes)/2+1)]
	for _, i := range nodes {
		if err := c.nodes[i].mini.Set(key, data); err != nil {
			c.wrong("%v", err)
		}
	}
	wait(c.ttl/2 + renewed)
	redistest.Elapse(3 * c.ttl) // all leases and tombstones have ended
	for _, i := range nodes {
		if got, err := c.nodes[i].mini.Get(key); got != data || c.nodes[i].mini.TTL(key) != 0 {
			c.wrong("want the data left alone, it is %q, %v, with a TTL of %v", got, err, c.nodes[i].mini.TTL(key))
		}
		c.nodes[i].mini.Del(key)
	}
	for _, l := range locks {
		cause := context.Cause(l)
		if !errors.Is(cause, redismutex.ErrLockLost) || !strings.Contains(fmt.Sprint(cause), redismutex.ErrNotLock.Error()) {
			c.wrong("want the holder's cause to be ErrLockLost because of ErrNotLock, got %v", cause)
		}
		l.Unlock()
	}
	return true
}

// isClosed closes the client of a crowd that waits. Each waiter gets ErrRedis.
func (c *crowd) isClosed() bool {
	var others []redis.Scripter
	for i, n := range c.era.nodes {
		others = append(others, c.client(c.t, i, faultnet.New(n.link.Dial), func(*redis.Options) {}))
	}
	locks := c.lock(c.mutexOn(others), "", 1)
	wait := c.start(c.many(10), 1, func(l *redismutex.Lock, err error) {
		if !errors.Is(err, redismutex.ErrRedis) || !errors.Is(err, redis.ErrClosed) {
			c.wrong("want ErrRedis because of redis.ErrClosed for every waiter, got %v", err)
		}
		if err == nil {
			l.Unlock()
		}
	})
	redistest.Elapse(c.ttl + time.Duration(c.random.Int64N(int64(c.ttl))))
	for _, rc := range c.clients {
		rc.Close()
	}
	wait(c.ttl)
	for _, l := range locks {
		if err := l.UnlockContext(context.Background()); err != nil {
			c.wrong("want the lock of another client unlocked, got %v", err)
		}
	}
	return true
}

// keysOf returns all keys of the mutex of that name.
func (n *node) keysOf(name string) (keys []string) {
	for _, key := range n.mini.Keys() {
		if strings.HasPrefix(strings.TrimPrefix(key, "{"), name+":") {
			keys = append(keys, key)
		}
	}
	return keys
}

// A pool limits the commands of a client that run at a time. The others wait here, not in the pool of go-redis, which
// shares its timers with the clients of other bubbles.
type pool struct {
	turns   chan struct{}
	timeout time.Duration
	sent    *atomic.Int64 // commands
}

// limit makes a client appear to have size connections. The pool of go-redis has more, so that no command waits there.
func (c *crowd) limit(rc *redis.Client, size int) {
	rc.AddHook(pool{make(chan struct{}, size), rc.Options().PoolTimeout, &c.sent})
	rc.Options().PoolSize = size
}

const room = 1000

func (p pool) DialHook(next redis.DialHook) redis.DialHook { return next }

func (p pool) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if !strings.HasPrefix(cmd.Name(), "eval") { // a command of go-redis itself, for a new connection
			return next(ctx, cmd)
		}
		select {
		case p.turns <- struct{}{}:
		default:
			timer := time.NewTimer(p.timeout)
			defer timer.Stop()
			select {
			case p.turns <- struct{}{}:
			case <-ctx.Done():
				cmd.SetErr(ctx.Err())
				return ctx.Err()
			case <-timer.C:
				cmd.SetErr(redis.ErrPoolTimeout)
				return redis.ErrPoolTimeout
			}
		}
		defer func() { <-p.turns }()
		p.sent.Add(1)
		return next(ctx, cmd)
	}
}

// ProcessPipelineHook lets pipelines pass, as if they had connections of their own.
func (p pool) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		p.sent.Add(int64(len(cmds)))
		return next(ctx, cmds)
	}
}

// logged is the log handler of a crowd.
type logged struct{ c *crowd }

func (l logged) Enabled(context.Context, slog.Level) bool { return true }
func (l logged) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l logged) WithGroup(string) slog.Handler            { return l }
func (l logged) Handle(_ context.Context, r slog.Record) error {
	text := r.Message
	r.Attrs(func(a slog.Attr) bool { text += ": " + a.Value.String(); return true })
	l.c.lines.Add(1)
	l.c.line.Store(text)
	return nil
}
