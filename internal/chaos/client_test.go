//go:build linux

package chaos

// This file is the client process: its workers, its links and its heartbeat.

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
	violation = "VIOLATION: " // begins a line of a client's log
)

// A config is what a client is told when it starts.
type config struct {
	Name   string
	World  kind
	Addrs  []string // of the servers; of the sentinel
	Master string   // what the sentinel calls it
	Keys   []string
	Frail  []string // those whose server may lose its data
	Dir    string   // where the registers are, and where it leaves its history and its pauses
	Seed   uint64
}

// A kind is that of a world.
type kind string

const (
	standalone kind = "standalone"
	redlock    kind = "redlock"
	sentinel   kind = "sentinel"
	cluster    kind = "cluster"
)

const socket = "registers" // in the config's Dir

func TestMain(m *testing.M) {
	if told := os.Getenv(inClient); told != "" {
		os.Exit(beClient(told))
	}
	flag.Parse()
	must(flag.Set("test.parallel", "4")) // the worlds wait more than they work
	os.Exit(m.Run())
}

// mono is the clock that all processes of this host share, in nanoseconds.
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

// upTo is a time less than most.
func upTo(rng *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(rng.Int64N(int64(most)))
}

type client struct {
	config
	*history.Recorder
	registers *rpc.Client
	links     []*faultnet.Link // one to each independent server
	calm      atomic.Bool      // nobody keeps a lock for long any more
}

// beClient is the life of a client process. It returns the process' exit code.
func beClient(told string) int {
	before := goleak.IgnoreCurrent()
	c := &client{}
	must(json.Unmarshal([]byte(told), &c.config))
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
	// The lock's own goroutines end a TTL after the last call, its idle workers a second after, its mailbox five.
	for start := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		if err = goleak.Find(before); err == nil {
			return 0
		}
		if time.Since(start) > longest+10*time.Second {
			fmt.Fprintln(os.Stderr, violation+"goroutines leak:", err)
			return 1
		}
	}
}

// connect makes the clients of Redis, each behind a link of its own. Their time-outs are short, for a link that has
// lost a byte is of no use until one of them ends its connections.
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
			// Not only where a server redirects it: a dead one does not.
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

// obey does, mostly to the links, what the lines say, each "<what> <link> <argument>", until there are no more.
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

// heartbeat writes down from when to when the process stood still, or got no processor.
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
		time.Sleep(upTo(rng, 10*time.Millisecond)) // the load
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

// begin notes that a lock is about to be asked for.
func (w *worker) begin(key string, k history.Kind, try bool) *history.Span {
	return w.Begin(history.Op{Client: w.name, Key: key, Kind: k, Try: try})
}

// lock is one lock, from the call that asks for it until its end.
func (w *worker) lock(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if w.oneIn(8) { // changes its mind, as a waiter or a holder
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
		// Over several nodes two tries can foil each other: then nobody is to blame.
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
	w.write(l, k, false) // without a look at the lock, as a careless client does
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

// until is until when l can be trusted, on the clock of mono.
func until(l *redismutex.Lock) int64 { return mono() + int64(time.Until(l.Until())) }

// ended notes that the end of l was seen.
func ended(op *history.Span, l *redismutex.Lock) {
	op.Until(until(l))
	op.Ended()
}

// hold works under the lock until it has finished, or l is done: mostly for a moment, now and then until l has been
// renewed a few times. Where a renewal is overdue it waits for what comes of it.
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

// nap waits, and says whether l is still there.
func (w *worker) nap(l *redismutex.Lock, d time.Duration) bool {
	select {
	case <-l.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// write writes to what the lock protects, which refuses a stale token. That must not happen to one that is held.
func (w *worker) write(l *redismutex.Lock, k history.Kind, first bool) {
	if k == history.Read {
		return
	}
	var refused bool
	must(w.registers.Call("Registers.Write", Write{Client: w.name, Key: l.Key(), Token: l.Token(), First: first}, &refused))
	if refused && l.Err() == nil && !slices.Contains(w.Frail, l.Key()) {
		w.accuse("token %d of %q is refused, and %s still trusts it until %v", l.Token(), l.Key(), w.name, until(l))
	}
}

// nest locks the same key again.
func (w *worker) nest(l *redismutex.Lock, sub redismutex.LockOption) {
	inner, err := w.m.RLockContext(l, sub)
	if err == nil {
		defer inner.Unlock()
	}
	if l.Err() == nil && (err != nil || inner.ID() != l.ID() || inner.Token() != l.Token()) {
		w.accuse("%s cannot lock %q within itself: %v", w.name, l.Key(), err)
	}
}

// downgrade makes a writer a reader, another operation in the eyes of the history.
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

func (w *worker) accuse(format string, args ...any) {
	fmt.Fprintf(os.Stderr, violation+format+"\n", args...)
}
