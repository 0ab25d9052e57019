//go:build linux

package chaos

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/rpc"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/history"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// Each client has a worker for each TTL.
var ttls = []time.Duration{300 * time.Millisecond, 500 * time.Millisecond, time.Second, longest}

const (
	longest  = 2 * time.Second
	lockName = "chaos"

	inClient  = "REDISMUTEX_CHAOS_CLIENT"
	violation = "VIOLATION: " // prefix of lines in a client's log
)

// A config is what a client receives when it starts.
type config struct {
	Name   string
	World  kind
	Addrs  []string // of the servers or of the sentinel
	Master string   // its name in the sentinel
	Keys   []string
	Frail  []string // the keys whose server may lose its data
	Dir    string   // for the registers, the history and the pauses
	Seed   uint64
}

// A kind is a kind of world.
type kind string

const (
	standalone kind = "standalone"
	redlock    kind = "redlock"
	sentinel   kind = "sentinel"
	cluster    kind = "cluster"
)

const socket = "registers" // in the config's Dir

func TestMain(m *testing.M) {
	if settings := os.Getenv(inClient); settings != "" {
		os.Exit(beClient(settings))
	}
	flag.Parse()
	must(flag.Set("test.parallel", "4")) // the tests wait most of the time
	os.Exit(m.Run())
}

// mono returns the time of the clock that all processes of this host share, in nanoseconds.
func mono() int64 {
	var t unix.Timespec
	must(unix.ClockGettime(unix.CLOCK_MONOTONIC, &t))
	return t.Nano()
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// upTo returns a random time less than most.
func upTo(rng *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(rng.Int64N(int64(most)))
}

type client struct {
	config
	*history.Recorder
	registers *rpc.Client
	links     []*faultnet.Link // one for each independent server
	calm      atomic.Bool      // set when locks are no longer held for long
}

// beClient runs a client process and returns its exit code.
func beClient(settings string) int {
	before := goleak.IgnoreCurrent()
	c := &client{}
	must(json.Unmarshal([]byte(settings), &c.config))
	write := func(what string) io.WriteCloser {
		f, err := os.Create(filepath.Join(c.Dir, c.Name+"."+what))
		must(err)
		return f
	}
	histories, pauses := write("history"), write("pauses")
	c.Recorder = history.New(mono, histories)
	var err error
	c.registers, err = rpc.Dial("unix", filepath.Join(c.Dir, socket))
	must(err)
	nodes := c.connect()

	ctx, finish := context.WithCancel(context.Background())
	var workers, beat sync.WaitGroup
	for i, ttl := range ttls {
		workers.Go(func() { c.work(ctx, c.mutex(nodes, ttl), ttl, rand.New(rand.NewPCG(c.Seed, uint64(i)))) })
	}
	stop := make(chan struct{})
	beat.Go(func() { heartbeat(pauses, stop) })
	c.obey(os.Stdin)

	finish()
	workers.Wait()
	for _, rc := range nodes {
		must(rc.(io.Closer).Close())
	}
	must(c.registers.Close())
	close(stop)
	beat.Wait()
	must(c.Recorder.Err())
	// The goroutines of a lock end a TTL after its last call, idle senders a second after, the mailbox five seconds after.
	for start := time.Now(); time.Since(start) < longest+10*time.Second; { // goleak itself tries for a while
		if err = goleak.Find(before); err == nil {
			return 0
		}
	}
	fmt.Fprintln(os.Stderr, violation+"want no goroutine left, got", err)
	return 1
}

// connect makes the clients of Redis, each with a link of its own. Their timeouts are short, since a connection that has
// lost a byte is unusable until a timeout closes it.
func (c *client) connect() (nodes []redis.Scripter) {
	dial := func() faultnet.DialFunc {
		link := faultnet.New(nil)
		c.links = append(c.links, link)
		return link.Dial
	}
	const timeout = time.Second
	switch c.World {
	case sentinel:
		nodes = append(nodes, redis.NewFailoverClient(&redis.FailoverOptions{MasterName: c.Master, SentinelAddrs: c.Addrs,
			Dialer: dial(), ReadTimeout: timeout, DialTimeout: timeout}))
	case cluster:
		nodes = append(nodes, redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs,
			Dialer: dial(), ReadTimeout: timeout, DialTimeout: timeout,
			// A dead server does not redirect the client.
			ClusterStateReloadInterval: timeout / 5}))
	default:
		for _, addr := range c.Addrs {
			nodes = append(nodes, redis.NewClient(&redis.Options{Addr: addr,
				Dialer: dial(), ReadTimeout: timeout, DialTimeout: timeout}))
		}
	}
	return nodes
}

func (c *client) mutex(nodes []redis.Scripter, ttl time.Duration) *redismutex.RWMutex {
	if c.World == redlock {
		return redismutex.NewRedlock(nodes, lockName, redismutex.WithTTL(ttl))
	}
	return redismutex.NewMutex(nodes[0], lockName, redismutex.WithTTL(ttl))
}

// obey executes commands until r ends, most of them on the links. A command is a line "<what> <link> <argument>".
func (c *client) obey(r io.Reader) {
	for lines := bufio.NewScanner(r); lines.Scan(); {
		var what, arg string
		var i int
		_, err := fmt.Sscan(lines.Text(), &what, &i, &arg)
		must(err)
		switch link := c.links[i]; what {
		case "hole":
			link.Hole(strings.Contains(arg, "up"), strings.Contains(arg, "down"))
		case "delay":
			d, err := time.ParseDuration(arg)
			must(err)
			link.SetDelay(d)
		case "calm":
			c.calm.Store(true)
		case "refuse":
			link.Refuse(arg == "true")
			link.Cut()
		}
	}
}

// heartbeat records the times during which the process was stopped or got no processor.
func heartbeat(w io.Writer, stop <-chan struct{}) {
	const beat = 10 * time.Millisecond
	for last := mono(); ; {
		select {
		case <-stop:
			return
		case <-time.After(beat):
		}
		now := mono()
		if now-last > int64(2*beat) {
			fmt.Fprintln(w, last, now)
		}
		last = now
	}
}

func (c *client) work(ctx context.Context, m *redismutex.RWMutex, ttl time.Duration, rng *rand.Rand) {
	w := worker{client: c, m: m, ttl: ttl, rng: rng, name: fmt.Sprintf("%s@%v", c.Name, ttl)}
	for ctx.Err() == nil {
		w.lock(ctx)
		time.Sleep(upTo(rng, 10*time.Millisecond)) // determines the load
	}
}

type worker struct {
	*client
	m    *redismutex.RWMutex
	ttl  time.Duration
	rng  *rand.Rand
	name string
}

func (w *worker) oneIn(n int) bool { return w.rng.IntN(n) == 0 }

// begin records that a call is about to lock.
func (w *worker) begin(key string, k history.Kind, try bool) *history.Span {
	return w.Begin(history.Op{Client: w.name, Key: key, Kind: k, Try: try})
}

// lock locks, works and unlocks once.
func (w *worker) lock(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if w.oneIn(8) { // cancels, as a waiter or a holder
		time.AfterFunc(upTo(w.rng, w.ttl), cancel)
	}
	key := w.Keys[w.rng.IntN(len(w.Keys))]
	k, ask := history.Write, w.m.LockContext
	try := w.oneIn(5)
	switch reads := w.oneIn(2); {
	case reads && try:
		k, ask = history.Read, w.m.TryRLockContext
	case reads:
		k, ask = history.Read, w.m.RLockContext
	case try:
		ask = w.m.TryLockContext
	}

	sub := redismutex.WithKey(strings.TrimPrefix(key, lockName+":"))
	op := w.begin(key, k, try)
	l, err := ask(ctx, sub)
	if err != nil {
		// Over several nodes two tries can make each other fail: then no one holds the lock.
		if errors.Is(err, redismutex.ErrLock) && !errors.Is(err, redismutex.ErrRedis) && w.World != redlock {
			op.Refused()
		} else {
			op.Failed(err)
		}
		return
	}
	ops := []*history.Span{op}
	op.Got(l.Token(), until(l))
	first := op
	context.AfterFunc(l, func() { ended(first, l) })

	w.write(l, k, true)
	if w.oneIn(4) {
		w.nest(l, sub)
	}
	w.hold(l, op)
	w.write(l, k, false) // without checking the lock, as a careless client does
	if k == history.Write && w.oneIn(6) {
		read, ok := w.downgrade(ctx, l, op)
		ops = append(ops, read)
		if ok {
			context.AfterFunc(l, func() { ended(read, l) })
			w.hold(l, read)
			op = read
		}
	}

	op.Until(until(l))
	op.Unlocking()
	soon, cancel := context.WithTimeout(context.Background(), w.ttl)
	defer cancel()
	if l.UnlockContext(soon) == nil {
		for _, op := range ops {
			op.Freed()
		}
	}
}

// until returns the time until which l can be trusted, on the clock of mono.
func until(l *redismutex.Lock) int64 { return mono() + int64(time.Until(l.Until())) }

// ended records that the end of l was seen.
func ended(op *history.Span, l *redismutex.Lock) {
	op.Until(until(l))
	op.Ended()
}

// hold works until it has finished or l is done: mostly for a moment, sometimes until l has been renewed a few times. If a
// renewal is overdue it waits for its outcome.
func (w *worker) hold(l *redismutex.Lock, op *history.Span) {
	work := upTo(w.rng, 20*time.Millisecond)
	if w.oneIn(25) {
		work = upTo(w.rng, 3*w.ttl)
	}
	start := time.Now()
	for w.nap(l, min(work, 20*time.Millisecond)) {
		op.Until(until(l))
		overdue := time.Until(l.Until()) < w.ttl/4 && time.Since(start) < work+2*w.ttl
		if (time.Since(start) >= work || w.calm.Load()) && !overdue {
			return
		}
	}
}

// nap waits, and reports whether l is still held.
func (w *worker) nap(l *redismutex.Lock, d time.Duration) bool {
	select {
	case <-l.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// write writes to the register that the lock protects, which refuses stale tokens. A write of a holder must be accepted.
func (w *worker) write(l *redismutex.Lock, k history.Kind, first bool) {
	if k == history.Read {
		return
	}
	var refused bool
	must(w.registers.Call("Registers.Write", Write{Client: w.name, Key: l.Key(), Token: l.Token(), First: first}, &refused))
	if refused && l.Err() == nil && !slices.Contains(w.Frail, l.Key()) {
		w.report("want token %d of %q accepted, it was refused while %s trusts the lock until %v", l.Token(), l.Key(), w.name, until(l))
	}
}

// nest locks the same key again.
func (w *worker) nest(l *redismutex.Lock, sub redismutex.LockOption) {
	inner, err := w.m.RLockContext(l, sub)
	if err == nil {
		defer inner.Unlock()
	}
	if l.Err() == nil && (err != nil || inner.ID() != l.ID() || inner.Token() != l.Token()) {
		w.report("%s: want %q nested in its own lock, got %v", w.name, l.Key(), err)
	}
}

// downgrade turns a write lock into a read lock, which is another operation in the history.
func (w *worker) downgrade(ctx context.Context, l *redismutex.Lock, op *history.Span) (read *history.Span, ok bool) {
	read = w.begin(l.Key(), history.Read, false)
	op.Until(until(l))
	op.Unlocking()
	if err := l.Downgrade(ctx); err != nil {
		read.Failed(err)
		return read, false
	}
	op.Freed()
	read.Got(0, until(l))
	return read, true
}

// report reports a violation to the parent process.
func (w *worker) report(format string, args ...any) {
	fmt.Fprintf(os.Stderr, violation+format+"\n", args...)
}
