package sim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
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
	engine "github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
)

// A mood determines what may fail in an era, and therefore what is promised there.
type mood string

const (
	calm  mood = "calm"  // nothing fails; first come, first served, and the lock is never idle
	chaos mood = "chaos" // everything fails that the promises allow; exclusion holds at every instant
	tardy mood = "tardy" // acquires of one process arrive late; once it has given them up, they affect no other process
	lossy mood = "lossy" // servers lose data, and nothing else fails; holders learn of it in time
)

const (
	activity = 4 * time.Minute
	longest  = 20 * time.Second // TTL

	// distance is the longest delay of a node, one way, while nothing fails.
	distance = 2 * time.Millisecond

	// mostBack is how far a clock is set back at most, in all steps of an era together.
	mostBack = 5 * time.Second
)

var (
	ttls = []time.Duration{time.Second, time.Second, 2 * time.Second, 5 * time.Second, longest}
	keys = []string{"a", "a", "b", "c"}
	// Most requests of a process share queues.
	turns = []time.Duration{redismutex.DefaultTurn, redismutex.DefaultTurn, longestTurn, 0}
	mosts = []time.Duration{300 * time.Millisecond, 3 * time.Second}
)

// An era is some minutes of simulated time, with servers and processes of its own.
type era struct {
	*summary
	number int
	mood   mood
	start  time.Time
	random *rand.Rand // of the one goroutine that runs the era
	nodes  []*node

	stopping chan struct{}  // closed when the workers must stop
	faults   sync.WaitGroup // the faults that last
	healing  bool           // no more faults begin; guarded by mu
	workers  sync.WaitGroup // the workers of live processes

	mu        sync.Mutex
	processes []*process // the live ones
	names     int
	clients   []*redis.Client // of all processes
	recorder  *history.Recorder
	attempts  []*attempt // in the order of the recorder's operations
	waiters   map[string]map[*attempt]context.CancelFunc
	registers map[string]*history.Register[int64]
	account   *account // what a Trace has told
	operators *operators
	losses    []loss
	wrong     []string
}

// A loss is the loss of data on a server: all of it, or the leases that a step of its clock ends.
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
	e.random, e.account = e.draw(0), newAccount()
	e.operators = &operators{mailboxes: map[string]*process{}, calls: map[string][]*revocation{}}
	for _, key := range keys {
		e.waiters[key], e.registers[key] = map[*attempt]context.CancelFunc{}, &history.Register[int64]{}
	}
	return e
}

// draw returns the random source of one goroutine.
func (e *era) draw(who int) *rand.Rand {
	return rand.New(rand.NewPCG(*seed, uint64(e.number)<<20+uint64(who)))
}

// fails reports whether calls of Redis may fail.
func (e *era) fails() bool { return e.mood == chaos || e.mood == tardy }

func (e *era) clock() int64 { return int64(time.Since(e.start)) }

// fail records a failure of the test; only the first few are kept.
func (e *era) fail(format string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.wrong) < 5 {
		e.wrong = append(e.wrong, fmt.Sprintf("at %v: ", time.Since(e.start))+fmt.Sprintf(format, args...))
	}
}

// run runs the era in a bubble.
func (e *era) run(t *testing.T) {
	// Every bubble begins in the year 2000, but the clock of the ranks belongs to this process: without this sleep it
	// would stand still in all eras but the first.
	redistest.Elapse(time.Duration(e.number) * eraLength)
	e.start = time.Now()
	e.stopping = make(chan struct{}) // made in the bubble, so that time passes while goroutines wait for it
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
	redistest.Elapse(activity - time.Since(e.start))
	e.mu.Lock()
	e.healing = true
	e.mu.Unlock()
	e.faults.Wait()
	for _, p := range e.processes {
		for _, l := range p.links {
			l.SetDelay(distance) // a link slower than the node time-out would keep its process from a majority for ever
		}
	}
	if e.mood == chaos && e.random.IntN(2) == 0 {
		e.kill(nil) // waiters of other processes now rely on their own renewals
	}
	close(e.stopping)
	e.served()
	e.empty()
	e.end()
	redistest.Elapse(eraLength - time.Since(e.start))
	e.summary.mu.Lock()
	e.summary.time += time.Since(e.start)
	e.summary.mu.Unlock()
}

// served checks that every waiter is granted the lock soon after the last fault has ended.
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
	e.fail("node 1 has\n%s\nand the workers are at\n%s", e.nodes[0].mini.Dump(), stacks())
	for _, a := range waiting {
		e.fail("want every attempt ended soon after the last fault, %v, asked at %v, got at %v, has not", a, time.Duration(a.asked), time.Duration(a.got))
	}
	for _, p := range e.processes {
		p.cancel()
	}
}

// stacks returns where the workers are.
func stacks() string {
	all := make([]byte, 1<<22)
	all = all[:runtime.Stack(all, true)]
	var workers []string
	for _, stack := range strings.Split(string(all), "\n\n") {
		if strings.Contains(stack, "(*worker)") {
			workers = append(workers, stack)
		}
	}
	return strings.Join(workers, "\n\n")
}

// empty checks that nothing is left when the longest lease and the longest tombstone have ended.
func (e *era) empty() {
	redistest.Elapse(3*longest + mostBack)
	for i, n := range e.nodes {
		if left := n.keys(); len(left) > 0 {
			e.fail("want nothing left on node %d but token counters, got %q", i+1, left)
		}
	}
}

// end ends everything in the background: synctest fails if something goes on.
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
	redistest.Elapse(2 * longest)
}

// A node is a server.
type node struct {
	mini     *redistest.MiniRedis
	link     *faultnet.Link // between the server and all processes
	messages *miniredis.Subscriber
	mu       sync.Mutex
	ahead    time.Duration // how far its clock is ahead
	back     time.Duration // how far it was set back
	faults   int           // how many faults cut it off
	looks    []look
}

// A look is the set of leases on a server right before it runs a script. Only scripts and the passing of time change it.
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
	n := &node{mini: m, link: faultnet.New(m.Dial), messages: m.NewSubscriber()}
	n.ahead = time.Duration(random.Int64N(int64(time.Hour)))
	rc.Ping(t.Context()) // the server exists from the first connection on
	m.Server().SetPreHook(func(_ *server.Peer, command string, args ...string) bool {
		if command == "EVALSHA" || command == "EVAL" { // a look at the commands within a script would deadlock
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

// tick sets the server's clock to the time of the bubble and the time by which it is ahead.
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

// keys returns the keys on the server except token counters.
func (n *node) keys() (keys []string) {
	n.tick()
	for _, k := range n.mini.Keys() {
		if len(k) < 6 || k[len(k)-6:] != ":token" {
			keys = append(keys, k)
		}
	}
	return keys
}

// lease returns the remaining lease of an id that holds a lock on the server.
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
	ctx    context.Context // ends with the process
	cancel context.CancelFunc
	nodes  []redis.Scripter
	links  []*faultnet.Link
	turn   time.Duration
	most   time.Duration // for which some of its mutexes let a lock be held

	engines []*engine.Node // kept, so that its clients keep their ids

	alive sync.Mutex // guards the fields below, and recording: a dead process records nothing
	dead  bool
	held  map[*attempt]*redismutex.Lock
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
	p.turn = turns[random.IntN(len(turns))]
	p.most = mosts[random.IntN(len(mosts))]
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
		p.engines = append(p.engines, e.operators.meet(p, rc))
	}
	for i := range 4 {
		w := &worker{process: p, name: fmt.Sprintf("%s.%d", p.name, i+1), random: e.draw(10*e.names + i + 1), seen: map[string][]string{}}
		e.workers.Go(w.run)
	}
}

// client returns a client of node i that uses that link.
func (e *era) client(t *testing.T, i int, link *faultnet.Link, mutate func(*redis.Options)) *redis.Client {
	rc := redistest.MiniClient(t, e.nodes[i].mini, func(o *redis.Options) {
		o.Addr = fmt.Sprintf("10.0.0.%d:6379", i+1)
		// A dial into a hole fails at once, and the handshake of a connection takes no time. go-redis does both under a
		// mutex that closing a subscription waits for, and in a bubble no time passes while a goroutine waits for a mutex.
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

// A prompt connection answers HELLO itself, as an unknown command.
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

func (p *process) mutex(ttl time.Duration, more ...redismutex.MutexOption) *redismutex.RWMutex {
	opts := []redismutex.MutexOption{redismutex.WithTTL(ttl)}
	for _, o := range more {
		if o != nil {
			opts = append(opts, o)
		}
	}
	if len(p.nodes) == 1 {
		return redismutex.NewMutex(p.nodes[0], "sim", opts...)
	}
	return redismutex.NewRedlock(p.nodes, "sim", opts...)
}

// lives calls f, which records something, unless p is dead.
func (p *process) lives(f func()) bool {
	p.alive.Lock()
	defer p.alive.Unlock()
	if !p.dead {
		f()
	}
	return !p.dead
}

// kill ends a process as a power failure does. Its locks count as held until the trust in them would have ended, since no
// end was observed. Unless t is nil, a new process takes its place.
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

// heal restores a link of p if p is alive.
func (p *process) heal(l *faultnet.Link) {
	if p.lives(func() { l.Hole(false, false) }) {
		l.Refuse(false)
		l.Cut() // a connection that has lost bytes stays silent
	}
}

// sentinel reports whether err is an error that the documentation names for a call that locks.
func sentinel(err error, ctx context.Context) bool {
	return errors.Is(err, redismutex.ErrRedis) || errors.Is(err, redismutex.ErrLock) ||
		errors.Is(err, redismutex.ErrRevoked) || ctx.Err() != nil && errors.Is(err, ctx.Err())
}
