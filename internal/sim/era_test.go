package sim

// This file has the eras: the nodes and processes of each, and its course.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/history"
	"github.com/redismutex/redismutex/internal/redistest"
)

// A mood is what may fail in an era, and so what is promised there.
type mood string

const (
	calm  mood = "calm"  // nothing fails: it is first come, first served, and the lock is never idle
	chaos mood = "chaos" // all but what the promises except: exclusion holds at every instant
	tardy mood = "tardy" // acquires of one process arrive late; once it has given them up no others suffer
	lossy mood = "lossy" // servers lose data, and nothing else fails: holders are told in time
)

const (
	activity = 4 * time.Minute
	longest  = 20 * time.Second // TTL

	// distance is how far the nodes are at the most, one way, while nothing fails.
	distance = 2 * time.Millisecond

	// mostBack is how far a clock is set back at the most, all steps of an era together.
	mostBack = 5 * time.Second
)

var (
	ttls = []time.Duration{time.Second, time.Second, 2 * time.Second, 5 * time.Second, longest}
	keys = []string{"a", "a", "b", "c"}
)

// An era is some minutes of a world of its own.
type era struct {
	*summary
	number int
	mood   mood
	start  time.Time
	random *rand.Rand // of the one goroutine that runs the era
	nodes  []*node

	stopping chan struct{}  // closed when the workers are to come to an end
	faults   sync.WaitGroup // those under way
	healing  bool           // no more of them begin; guarded by mu
	workers  sync.WaitGroup // those of living processes

	mu        sync.Mutex
	processes []*process // those that live
	names     int
	clients   []*redis.Client // of all processes
	recorder  *history.Recorder
	attempts  []*attempt // in the order of the recorder's operations
	waiters   map[string]map[*attempt]context.CancelFunc
	registers map[string]*history.Register[int64]
	losses    []loss
	wrong     []string
}

// A loss is a server that forgets what it knew: all of it, or whatever a step of its clock ends.
type loss struct {
	at      int64
	emptied bool
}

func newEra(number, nodes int, sum *summary) *era {
	e := &era{
		summary:   sum,
		number:    number,
		mood:      []mood{chaos, tardy, lossy, chaos, calm}[number/5%5],
		nodes:     make([]*node, nodes),
		waiters:   map[string]map[*attempt]context.CancelFunc{},
		registers: map[string]*history.Register[int64]{},
	}
	e.random = e.draw(0)
	for _, key := range keys {
		e.waiters[key], e.registers[key] = map[*attempt]context.CancelFunc{}, &history.Register[int64]{}
	}
	return e
}

// draw makes the random numbers of one goroutine.
func (e *era) draw(who int) *rand.Rand {
	return rand.New(rand.NewPCG(*seed, uint64(e.number)<<20+uint64(who)))
}

// fails says whether Redis may fail.
func (e *era) fails() bool { return e.mood == chaos || e.mood == tardy }

func (e *era) clock() int64 { return int64(time.Since(e.start)) }

// fail notes what is wrong. The first few are enough.
func (e *era) fail(format string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.wrong) < 5 {
		e.wrong = append(e.wrong, fmt.Sprintf("at %v: ", time.Since(e.start))+fmt.Sprintf(format, args...))
	}
}

// run is the era, in a bubble.
func (e *era) run(t *testing.T) {
	// Every bubble begins in the year 2000, but the clock of the ranks is that of this test's process: it would stand
	// still in all eras but the first.
	time.Sleep(time.Duration(e.number) * eraLength)
	e.start = time.Now()
	e.stopping = make(chan struct{}) // in the bubble, so that a wait for it lets time pass
	e.recorder = history.New(e.clock, nil)
	for i := range e.nodes {
		e.nodes[i] = newNode(t, e.random, e.mood == tardy && len(e.nodes) == 1)
	}
	for range 3 {
		e.spawn(t)
	}
	if e.mood == calm || e.mood == tardy {
		e.workers.Go(func() { e.crowds(t) })
	}
	if e.mood == chaos || e.mood == lossy {
		e.havoc(t)
	}
	time.Sleep(activity - time.Since(e.start))
	e.mu.Lock()
	e.healing = true
	e.mu.Unlock()
	e.faults.Wait()
	if e.mood == chaos && e.random.IntN(2) == 0 {
		e.kill(nil) // whoever waits for it now has only its own renewals to be woken by
	}
	close(e.stopping)
	e.served()
	e.empty()
	e.end()
	time.Sleep(eraLength - time.Since(e.start))
	e.summary.mu.Lock()
	e.summary.time += time.Since(e.start)
	e.summary.mu.Unlock()
}

// served sees to it that everybody who waits gets it soon, now that nothing fails any more.
func (e *era) served() {
	done := make(chan struct{})
	go func() { e.workers.Wait(); close(done) }()
	select {
	case <-done:
		return
	case <-time.After(3*longest + mostBack):
	}
	e.mu.Lock()
	var waiting []*attempt
	for _, a := range e.attempts {
		if !a.over && a.by.ctx.Err() == nil {
			waiting = append(waiting, a)
		}
	}
	e.mu.Unlock()
	for _, a := range waiting {
		e.fail("nothing fails any more, and one still waits, or works: %v, asked at %v", a, time.Duration(a.asked))
	}
	for _, p := range e.processes {
		p.cancel()
	}
}

// empty sees to it that nothing is left when the longest lease, and the longest tombstone, has run out.
func (e *era) empty() {
	time.Sleep(3*longest + mostBack)
	for i, n := range e.nodes {
		if left := n.keys(); len(left) > 0 {
			e.fail("node %d: %q is left", i+1, left)
		}
	}
}

// end has everything in the background come to its end: synctest fails if it does not.
func (e *era) end() {
	for _, p := range e.processes {
		p.cancel()
	}
	for _, n := range e.nodes {
		n.link.Cut()
		n.messages.Punsubscribe("redismutex:*")
		n.messages.Close()
	}
	for _, rc := range e.clients {
		rc.Close()
	}
	time.Sleep(2 * longest)
}

// A node is a server.
type node struct {
	mini     *miniredis.Miniredis
	link     *faultnet.Link // the way of all processes
	messages *miniredis.Subscriber
	mu       sync.Mutex
	ahead    time.Duration // of its clock
	back     time.Duration // how far it was set back
	looks    []look
}

// A look is who holds what at a server, right before a script runs there: that changes by scripts, and by time.
type look struct {
	at    time.Time
	holds []lease
}

type lease struct {
	key, id string
	write   bool
	until   time.Time
}

func newNode(t *testing.T, random *rand.Rand, observed bool) *node {
	m, rc := redistest.Mini(t)
	n := &node{mini: m, link: faultnet.New(redistest.MiniDial(m)), messages: m.NewSubscriber()}
	n.ahead = time.Duration(random.Int64N(int64(time.Hour)))
	rc.Ping(t.Context()) // there is no server before the first connection
	m.Server().SetPreHook(func(_ *server.Peer, command string, args ...string) bool {
		if command == "EVALSHA" || command == "EVAL" { // of a script's own commands it would wait for itself
			n.tick()
			if observed && !strings.HasPrefix(args[2], crowdPrefix) {
				n.look()
			}
		}
		return false
	})
	return n
}

func (n *node) look() {
	l := look{at: time.Now()}
	for _, key := range slices.Compact(slices.Clone(keys)) {
		name := "sim:" + key
		var ids []string
		switch n.mini.Type(name) {
		case "string":
			id, _ := n.mini.Get(name)
			ids = []string{id}
		case "set":
			ids, _ = n.mini.Members(name)
		}
		for _, id := range ids {
			write := n.mini.Type(name) == "string"
			l.holds = append(l.holds, lease{key, id, write, l.at.Add(n.lease(name, id))})
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.looks = append(n.looks, l)
}

// tick sets the clock: it goes as time does, so much ahead.
func (n *node) tick() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mini.SetTime(time.Now().Add(n.ahead))
}

// step sets the clock forward or back.
func (n *node) step(by time.Duration) {
	n.mu.Lock()
	n.ahead += by
	n.mu.Unlock()
	n.tick()
}

// keys are those there, but the fencing counters.
func (n *node) keys() (keys []string) {
	n.tick()
	for _, k := range n.mini.Keys() {
		if len(k) < 6 || k[len(k)-6:] != ":token" {
			keys = append(keys, k)
		}
	}
	return keys
}

// lease is how long the lock of that id is held at the server.
func (n *node) lease(key, id string) time.Duration {
	n.tick()
	if n.mini.Type(key) == "string" {
		if holder, _ := n.mini.Get(key); holder == id {
			return n.mini.TTL(key)
		}
		return 0
	}
	if in, _ := n.mini.SIsMember(key, id); !in {
		return 0
	}
	ends, _ := n.mini.ZScore("{"+key+"}:lease", id)
	n.mu.Lock()
	defer n.mu.Unlock()
	return time.UnixMilli(int64(ends)).Sub(time.Now().Add(n.ahead))
}

// A process has clients and links of its own, and can be killed.
type process struct {
	*era
	name   string
	ctx    context.Context // ends with it
	cancel context.CancelFunc
	nodes  []redis.Scripter
	links  []*faultnet.Link

	alive sync.Mutex // guards what follows, and what is recorded: a dead process says nothing
	dead  bool
	held  map[*attempt]*redismutex.Lock
	ids   string // how its ids on one node begin; "" until it has had a lock
}

// spawn starts a process.
func (e *era) spawn(t *testing.T) {
	e.mu.Lock()
	e.names++
	p := &process{era: e, name: fmt.Sprintf("p%d", e.names), held: map[*attempt]*redismutex.Lock{}}
	e.processes = append(e.processes, p)
	random := e.draw(10 * e.names)
	e.mu.Unlock()
	p.ctx, p.cancel = context.WithCancel(context.Background())
	timeout := time.Duration(1+random.IntN(3)) * time.Second
	retries := random.IntN(4) - 1
	for i, n := range e.nodes {
		link := faultnet.New(n.link.Dial)
		link.SetDelay(time.Duration(random.Int64N(int64(distance))))
		p.links = append(p.links, link)
		rc := e.client(t, i, link, func(o *redis.Options) {
			o.ReadTimeout = timeout
			o.MaxRetries = retries
		})
		p.nodes = append(p.nodes, rc)
	}
	for i := range 2 {
		w := &worker{process: p, name: fmt.Sprintf("%s.%d", p.name, i+1), random: e.draw(10*e.names + i + 1)}
		e.workers.Go(w.run)
	}
}

// client makes a client of a node on that link.
func (e *era) client(t *testing.T, i int, link *faultnet.Link, mutate func(*redis.Options)) *redis.Client {
	rc := redistest.MiniClient(t, e.nodes[i].mini, func(o *redis.Options) {
		o.Addr = fmt.Sprintf("10.0.0.%d:6379", i+1)
		// Into a hole a dial fails at once, and a greeting takes no time. go-redis does both under a mutex that the end
		// of a subscription waits for, and in a bubble no time passes while anybody waits for a mutex.
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, 0)
			defer cancel()
			c, err := link.Dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &prompt{socket: c.(socket)}, nil
		}
		o.DisableIdentity = true
		o.DialerRetries = 1
	}, mutate)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.clients = append(e.clients, rc)
	return rc
}

// A prompt connection answers HELLO by itself: such a command is not known.
type prompt struct {
	socket
	answer []byte
}

type socket interface {
	net.Conn
	syscall.Conn
}

func (c *prompt) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte("\r\nhello\r\n")) {
		c.answer = []byte("-ERR unknown command\r\n")
		return len(b), nil
	}
	return c.socket.Write(b)
}

func (c *prompt) Read(b []byte) (int, error) {
	if len(c.answer) > 0 {
		n := copy(b, c.answer)
		c.answer = c.answer[n:]
		return n, nil
	}
	return c.socket.Read(b)
}

func (p *process) mutex(ttl time.Duration, order redismutex.MutexOption) *redismutex.RWMutex {
	opts := []redismutex.MutexOption{redismutex.WithTTL(ttl)}
	if order != nil {
		opts = append(opts, order)
	}
	if len(p.nodes) == 1 {
		return redismutex.NewMutex(p.nodes[0], "sim", opts...)
	}
	return redismutex.NewRedlock(p.nodes, "sim", opts...)
}

// owns says whether an id is one of p's.
func (p *process) owns(id string) bool { return p.ids != "" && strings.HasPrefix(id, p.ids) }

// lives calls f, which records something, unless p is dead.
func (p *process) lives(f func()) bool {
	p.alive.Lock()
	defer p.alive.Unlock()
	if !p.dead {
		f()
	}
	return !p.dead
}

// kill ends a process as a power cut does. What it holds it holds until its trust would have ended: nobody has seen
// another end. A new one takes its place, unless t is nil.
func (e *era) kill(t *testing.T) {
	e.mu.Lock()
	i := e.random.IntN(len(e.processes))
	p := e.processes[i]
	e.processes = append(e.processes[:i:i], e.processes[i+1:]...)
	busy := false
	for _, a := range e.attempts {
		busy = busy || a.by == p && !a.over
	}
	e.mu.Unlock()
	p.alive.Lock()
	p.dead = true
	for a, l := range p.held {
		a.span.Until(int64(l.Until().Sub(e.start)))
	}
	p.alive.Unlock()
	for _, l := range p.links {
		l.Hole(true, true)
	}
	p.cancel()
	e.injected(killed)
	e.took(killed, busy)
	if t != nil {
		e.spawn(t)
	}
}

// heal makes a link of p as it was, if p lives.
func (p *process) heal(l *faultnet.Link) {
	if p.lives(func() { l.Hole(false, false) }) {
		l.Refuse(false)
		l.Cut() // a connection that has lost something is mute for good
	}
}

// sentinel says whether err is one that the documentation names for a call that locks.
func sentinel(err error, ctx context.Context) bool {
	return errors.Is(err, redismutex.ErrRedis) || errors.Is(err, redismutex.ErrLock) || ctx.Err() != nil && errors.Is(err, ctx.Err())
}
