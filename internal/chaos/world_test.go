//go:build linux

package chaos

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/rpc"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/history"
	"github.com/redismutex/redismutex/internal/redistest"
)

var (
	lasting = flag.Duration("chaos.for", 10*time.Second, "how long the clients work, in each world")
	seeded  = flag.Uint64("chaos.seed", 0, "seed of the plan of faults; 0: a random one")
)

const (
	clients = 3
	// calm is how long nothing fails at the end, so that every client must make progress.
	calm = 5 * time.Second
	// thorough is how long a run lasts in which every fault must affect an operation.
	thorough = 16 * time.Second
)

// A world is a Redis of some kind, its clients and their faults.
type world struct {
	*testing.T
	kind    kind
	seed    uint64
	rng     *rand.Rand
	dir     string              // of the histories
	config  config              // of each client
	servers []*redistest.Server // the independent ones
	all     func() []*redistest.Server
	*Registers

	clients  []*process // the live ones
	dead     []*process
	marks    []mark
	troubled map[int]int  // by node, the number of faults of its server and its links
	down     map[int]bool // by node, whether its server has a fault
	moving   bool         // whether a master or a slot is being moved
	healed   int64        // when all faults had ended
}

func TestStandalone(t *testing.T) {
	w := open(t, standalone)
	s := redistest.Start(t, "--appendonly", "yes", "--appendfsync", "always")
	w.serve(s)
	w.run(append(append(linkFaults(1), freezes(1)...), restart(w, "server killed and restarted", 0, 1))...)
}

func TestRedlock(t *testing.T) {
	w := open(t, redlock)
	const nodes = 5
	for range nodes {
		w.serve(redistest.Start(t))
	}
	// A minority fails at a time. A node that restarts empty stays away until the leases that it has lost have ended.
	const few = (nodes - 1) / 2
	w.run(append(append(linkFaults(few), freezes(few)...),
		restart(w, "node killed, kept away, and restarted empty", longest+100*time.Millisecond, few))...)
}

func TestSentinel(t *testing.T) {
	w := open(t, sentinel)
	s := redistest.Sentinel(t)
	s.Client(t, func(o *redis.FailoverOptions) { w.config.Addrs, w.config.Master = o.SentinelAddrs, o.MasterName })
	s.FailOverOnlyWhenTold(t)
	w.config.Frail = w.config.Keys
	w.all = func() []*redistest.Server { return []*redistest.Server{s.Master()} }
	w.run(append(linkFaults(1), failover(s.Master, s.FailOver))...)
}

func TestCluster(t *testing.T) {
	w := open(t, cluster)
	c := redistest.Cluster(t, 3)
	replica := c.AddReplica(t, 2)
	rc := c.Client(t, func(o *redis.ClusterOptions) { w.config.Addrs = append(o.Addrs, replica.Addr()) })
	// The keys of two masters move between them, and the third master has a replica.
	w.config.Keys = nil
	slots := map[string]int{}
	for i, found := 0, map[int]bool{}; len(found) < 3; i++ {
		key := fmt.Sprintf("%s:%d", lockName, i)
		slot := int(rc.ClusterKeySlot(t.Context(), key).Val())
		owner := c.Owner(slot)
		if found[owner] {
			continue
		}
		found[owner] = true
		w.config.Keys = append(w.config.Keys, key)
		if owner == 2 {
			w.config.Frail = []string{key}
		} else {
			slots[key] = slot
		}
	}
	w.all = func() []*redistest.Server { return append(c.Nodes(), replica) }
	pair := []*redistest.Server{c.Nodes()[2], replica}
	master := func() *redistest.Server {
		for _, s := range pair {
			rc := s.Client(t, func(o *redis.Options) { o.MaxRetries = -1 })
			defer rc.Close()
			if strings.Contains(rc.Info(t.Context(), "replication").Val(), "role:master") {
				return s
			}
		}
		return pair[0]
	}
	w.run(append(linkFaults(1), failover(master, func() error { return nil }), reshard(c, slots))...)
}

func open(t *testing.T, k kind) *world {
	t.Parallel()
	w := &world{T: t, kind: k, seed: *seeded, Registers: &Registers{}, troubled: map[int]int{}, down: map[int]bool{}}
	if w.seed == 0 {
		w.seed = rand.Uint64N(1e6) + 1
	}
	w.rng = rand.New(rand.NewPCG(w.seed, uint64(len(k))))
	var err error
	w.dir, err = os.MkdirTemp("", "redismutex-chaos-"+string(k)+"-")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("seed %d", w.seed)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d, histories and logs are in %s", w.seed, w.dir)
		} else {
			os.RemoveAll(w.dir)
		}
	})
	w.all = func() []*redistest.Server { return w.servers }
	w.config = config{World: k, Dir: w.dir, Keys: []string{lockName + ":a", lockName + ":b", lockName + ":c"}}
	return w
}

func (w *world) serve(s *redistest.Server) {
	w.servers = append(w.servers, s)
	w.config.Addrs = append(w.config.Addrs, s.Addr())
}

// run runs the clients, injects the faults, and checks the outcome.
func (w *world) run(faults ...fault) {
	l, err := net.Listen("unix", filepath.Join(w.dir, socket))
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { l.Close() })
	registrar := rpc.NewServer()
	if err := registrar.Register(w.Registers); err != nil {
		w.Fatal(err)
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go registrar.ServeConn(conn)
		}
	}()

	end := time.Now().Add(*lasting)
	for range clients {
		w.start()
	}
	locks := w.keys()
	redistest.Eventually(w, "a lock is held when the faults begin", func() bool { return len(locks()) > 0 })
	w.torment(append(clientFaults, faults...), end.Add(-calm))
	for _, p := range w.clients {
		p.tell("calm", 0, true)
	}
	w.healed = mono()
	time.Sleep(calm) // the load goes on: every client must make progress now that nothing fails
	finished := mono()
	for _, p := range w.clients {
		p.stdin.Close()
	}
	deadline := time.After(30 * time.Second)
	for _, p := range w.clients {
		select {
		case <-p.Exited():
		case <-deadline:
			w.Fatalf("want all clients ended within 30s, %s is not", p.name)
		}
	}
	w.check(append(clientFaults, faults...), finished)
}

// A process is the parent's end of a client.
type process struct {
	*redistest.Process
	name   string
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	busy   bool // a fault of the process lasts
	broken bool // a fault of one of its links lasts
	died   int64
	pauses []pause
}

// A pause is a time during which a process was stopped.
type pause struct{ from, to int64 }

func (w *world) start() {
	p := &process{name: fmt.Sprintf("%s%d", w.kind, len(w.clients)+len(w.dead))}
	c := w.config
	c.Name, c.Seed = p.name, w.rng.Uint64()
	env, err := json.Marshal(c)
	if err != nil {
		w.Fatal(err)
	}
	log, err := os.Create(filepath.Join(w.dir, p.name+".log"))
	if err != nil {
		w.Fatal(err)
	}
	defer log.Close()
	p.cmd = exec.Command(os.Args[0])
	p.cmd.Env = append(os.Environ(), inClient+"="+string(env))
	p.cmd.Stdout, p.cmd.Stderr = log, log
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		w.Fatal(err)
	}
	p.Process = redistest.Spawn(w.T, p.cmd)
	w.clients = append(w.clients, p)
}

// tell sends a command to a client.
func (p *process) tell(what string, link int, arg any) { fmt.Fprintln(p.stdin, what, link, arg) }

// remove removes a client that has been killed.
func (w *world) remove(p *process) {
	p.died = mono()
	w.dead = append(w.dead, p)
	w.clients = slices.DeleteFunc(w.clients, func(other *process) bool { return other == p })
}

// A Write is a write to a register.
type Write struct {
	Client, Key string
	Token       uint64
	First       bool  // the first of two writes under the lock
	at          int64 // when it arrived
}

// Registers are the values that the locks protect, one for each key. They refuse stale tokens.
type Registers struct {
	mu       sync.Mutex
	byKey    map[string]*history.Register[Write]
	accepted []Write
}

// Write writes to a register. Clients call it over RPC.
func (r *Registers) Write(w Write, refused *bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byKey == nil {
		r.byKey = map[string]*history.Register[Write]{}
	}
	reg := r.byKey[w.Key]
	if reg == nil {
		reg = &history.Register[Write]{}
		r.byKey[w.Key] = reg
	}
	w.at = mono()
	*refused = reg.Write(w.Token, w) != nil
	if !*refused {
		r.accepted = append(r.accepted, w)
	}
	return nil
}

// last returns the last write to a key.
func (r *Registers) last(key string) Write {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byKey[key] == nil {
		return Write{}
	}
	w, _ := r.byKey[key].Read()
	return w
}

// refused returns the number of stale writes.
func (r *Registers) refused() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, reg := range r.byKey {
		n += reg.Refused()
	}
	return n
}
