package sim

// This file has the crowds: many goroutines of one process that lock at once.

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
)

// A crowd is a process with few connections and many goroutines. It has keys of its own, so that what it does is not in
// the history: each event has its own oracle.
type crowd struct {
	*era
	t       *testing.T
	random  *rand.Rand
	event   string
	name    string // of the mutex: it begins all keys
	ttl     time.Duration
	links   []*faultnet.Link
	clients []*redis.Client
	mutex   *redismutex.RWMutex
	sent    atomic.Int64 // commands
	lines   atomic.Int64 // in the log
	line    atomic.Value // the last of these, a string
}

// crowdPrefix begins all keys of crowds.
const crowdPrefix = "crowd"

const (
	// soon is how long a crowd may take, whatever it is.
	soon = 20 * time.Second

	// renewed is within which time a crowd learns what its own renewals learn, besides half a TTL and the ways.
	renewed = 200 * time.Millisecond

	// mostCommands is how many a waiter sends to a node at the most when that has come back empty: it enters anew, its
	// old id leaves, it has its turn, and what was tried meanwhile.
	mostCommands = 8

	// mostLines is how many a crowd may log then: a few of each kind within a second.
	mostLines = 60
)

// The events of crowds.
const (
	atOnce      = "crowd that asks at once"
	restarted   = "node away, emptied, as a crowd waits"
	overwritten = "lock overwritten, as a crowd waits"
	closedDown  = "client closed, as a crowd waits"
)

var crowdEvents = []string{atOnce, restarted, overwritten, closedDown}

// crowds has one of the events come to pass. Nothing else fails meanwhile that a crowd would notice.
func (e *era) crowds(t *testing.T) {
	random := e.draw(3)
	event := crowdEvents[random.IntN(len(crowdEvents))]
	time.Sleep(time.Duration(random.Int64N(int64(longest))))
	c := e.newCrowd(t, random, crowdPrefix, event)
	e.injected(event)
	e.took(event, map[string]func(*crowd) bool{
		atOnce:      (*crowd).asksAtOnce,
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
	c.mutex = c.of(nodes)
	return c
}

// of is the mutex of the crowd at those clients.
func (c *crowd) of(nodes []redis.Scripter) *redismutex.RWMutex {
	opts := []redismutex.MutexOption{redismutex.WithTTL(c.ttl), redismutex.WithLogger(slog.New(logged{c}))}
	if len(nodes) == 1 {
		return redismutex.NewMutex(nodes[0], c.name, opts...)
	}
	return redismutex.NewRedlock(nodes, c.name, opts...)
}

func (c *crowd) wrong(format string, args ...any) {
	c.fail("%s, ttl %v, pools of %d: %s", c.event, c.ttl, c.clients[0].Options().PoolSize, fmt.Sprintf(format, args...))
}

// many is how many a crowd is: fewer where each of them asks five nodes.
func (c *crowd) many(least int) int { return least + c.random.IntN(2*least/len(c.nodes)+1) }

// holds has a lock to write on each of some keys, by that mutex.
func (c *crowd) holds(m *redismutex.RWMutex, prefix string, n int) (locks []*redismutex.Lock) {
	for i := range n {
		l, err := m.LockContext(context.Background(), redismutex.WithKey(fmt.Sprint(prefix, i)))
		if err != nil {
			c.wrong("holder: %v", err)
			continue
		}
		locks = append(locks, l)
	}
	return locks
}

// comes has so many lock, on so many keys. Told is called with what comes of each. The function that is returned waits
// until all have been told, and says how long that has taken.
func (c *crowd) comes(many, keys int, told func(*redismutex.Lock, error)) (wait func(limit time.Duration) time.Duration) {
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
				told(l, err)
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
			c.wrong("%d of %d have not been told after %v", waiting.Load(), many, limit)
		}
		cancel()
		<-done
		return time.Since(start)
	}
}

// served is what becomes of one who is to have the lock.
func (c *crowd) served(l *redismutex.Lock, err error) {
	if err != nil {
		c.wrong("%v", err)
	} else if err := l.UnlockContext(context.Background()); err != nil {
		c.wrong("unlock: %v", err)
	}
}

// asksAtOnce has a crowd ask on a slow link. Nothing fails: nobody is told of an error, and no lock that is held
// meanwhile is lost.
func (c *crowd) asksAtOnce() bool {
	locks := c.holds(c.mutex, "held", 10)
	// A node time-out is a twentieth of a TTL, and a script that a node does not know yet costs two round trips.
	// A node time-out is ttl/20: room for five round trips, of which go-redis takes up to three for a new connection.
	delay := c.ttl/400 + time.Duration(c.random.Int64N(int64(c.ttl/400)))
	for _, l := range c.links {
		l.SetDelay(delay)
	}
	many := c.many(60)
	keys := []int{1, many}[c.random.IntN(2)]
	took := c.comes(many, keys, c.served)(3 * soon)
	for _, l := range locks {
		if l.Err() != nil {
			c.wrong("%d on %d keys, %v away: a lock is lost: %v", many, keys, delay, context.Cause(l))
		} else if err := l.UnlockContext(context.Background()); err != nil {
			c.wrong("%d on %d keys, %v away: unlock: %v", many, keys, delay, err)
		}
	}
	if c.lines.Load() > 0 {
		c.wrong("%d on %d keys, %v away: logged: %v", many, keys, delay, c.line.Load())
	}
	return took > c.ttl/10
}

// outlivesARestart has the nodes away for longer than a TTL as a crowd waits, and come back empty, as far as the crowd
// is concerned. All are served soon, without much ado.
func (c *crowd) outlivesARestart() bool {
	many := c.many(60)
	keys := []int{1, 4}[c.random.IntN(2)]
	locks := c.holds(c.mutex, "", keys)
	wait := c.comes(many, keys, c.served)
	time.Sleep(c.ttl)
	c.lines.Store(0)
	for _, l := range c.links {
		l.Refuse(true)
		l.Cut()
	}
	time.Sleep(c.ttl + time.Duration(c.random.Int64N(int64(c.ttl))))
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
			c.wrong("unlock of a lock that Redis has forgotten: %v", err)
		}
	}
	time.Sleep(2 * c.ttl)
	if n, nodes := c.sent.Load(), len(c.nodes); n > int64(mostCommands*many*nodes) {
		c.wrong("%d commands for %d waiters on %d keys, %d nodes", n, many, keys, nodes)
	}
	if n := c.lines.Load(); n > mostLines*int64(len(c.nodes)) {
		c.wrong("%d lines in the log for %d waiters; the last: %v", n, many, c.line.Load())
	}
	return found
}

// isOverwritten has other data come to stand in the place of a lock, on a majority of the nodes at the least. Who waits
// is told within a TTL, the holder is told why, and the data stays as it is.
func (c *crowd) isOverwritten() bool {
	const data = "data"
	locks := c.holds(c.mutex, "", 1)
	wait := c.comes(c.many(10), 1, func(l *redismutex.Lock, err error) {
		if !errors.Is(err, redismutex.ErrNotLock) {
			c.wrong("told %v", err)
		}
		if err == nil {
			l.Unlock()
		}
	})
	time.Sleep(c.ttl + time.Duration(c.random.Int64N(int64(c.ttl))))
	key := c.name + ":0"
	nodes := c.random.Perm(len(c.nodes))[:len(c.nodes)/2+1+c.random.IntN(len(c.nodes)/2+1)]
	for _, i := range nodes {
		if err := c.nodes[i].mini.Set(key, data); err != nil {
			c.wrong("%v", err)
		}
	}
	wait(c.ttl/2 + renewed)
	time.Sleep(3 * c.ttl) // all leases and tombstones have ended
	for _, i := range nodes {
		if got, err := c.nodes[i].mini.Get(key); got != data || c.nodes[i].mini.TTL(key) != 0 {
			c.wrong("the data is now %q, %v, and goes in %v", got, err, c.nodes[i].mini.TTL(key))
		}
		c.nodes[i].mini.Del(key)
	}
	for _, l := range locks {
		cause := context.Cause(l)
		if !errors.Is(cause, redismutex.ErrLockLost) || !strings.Contains(fmt.Sprint(cause), redismutex.ErrNotLock.Error()) {
			c.wrong("its holder is told %v", cause)
		}
		l.Unlock()
	}
	return true
}

// isClosed has the program close its client as a crowd waits. Each of them is told.
func (c *crowd) isClosed() bool {
	var others []redis.Scripter
	for i, n := range c.era.nodes {
		others = append(others, c.client(c.t, i, faultnet.New(n.link.Dial), func(*redis.Options) {}))
	}
	locks := c.holds(c.of(others), "", 1)
	wait := c.comes(c.many(10), 1, func(l *redismutex.Lock, err error) {
		if !errors.Is(err, redismutex.ErrRedis) || !errors.Is(err, redis.ErrClosed) {
			c.wrong("told %v", err)
		}
		if err == nil {
			l.Unlock()
		}
	})
	time.Sleep(c.ttl + time.Duration(c.random.Int64N(int64(c.ttl))))
	for _, rc := range c.clients {
		rc.Close()
	}
	wait(c.ttl)
	for _, l := range locks {
		if err := l.UnlockContext(context.Background()); err != nil {
			c.wrong("unlock: %v", err)
		}
	}
	return true
}

// keysOf are all keys of the mutex of that name.
func (n *node) keysOf(name string) (keys []string) {
	for _, key := range n.mini.Keys() {
		if strings.HasPrefix(strings.TrimPrefix(key, "{"), name+":") {
			keys = append(keys, key)
		}
	}
	return keys
}

// A pool is what the commands of a client go through: as many at a time as there are connections. The others wait here.
// They do not wait in the pool of go-redis, for that has timers in common with all clients, of other bubbles too.
type pool struct {
	turns   chan struct{}
	timeout time.Duration
	sent    *atomic.Int64 // commands
}

// limit has a client seem to have so many connections. There is more room than anybody takes in go-redis' own pool.
func (c *crowd) limit(rc *redis.Client, size int) {
	rc.AddHook(pool{make(chan struct{}, size), rc.Options().PoolTimeout, &c.sent})
	rc.Options().PoolSize = size
}

const room = 1000

func (p pool) DialHook(next redis.DialHook) redis.DialHook { return next }

func (p pool) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if !strings.HasPrefix(cmd.Name(), "eval") { // the greeting of a connection whose turn it is
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

// Pipelines have connections of their own.
func (p pool) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		p.sent.Add(int64(len(cmds)))
		return next(ctx, cmds)
	}
}

// logged is where a crowd logs.
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
