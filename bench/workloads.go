package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"
)

// A workload is measured in rounds. In each round every library has a turn.
type workload struct {
	name      string
	libraries []string
	turn      time.Duration
	rounds    int  // 0: the number given by -rounds
	cold      bool // without a warm-up
	drawn     bool // whether its waits are drawn
	prepare   func(library string) (*turner, error)
}

// A turner is a library prepared for a workload.
type turner struct {
	turn  func(time.Duration) (sample, []time.Duration, error)
	close func() error
}

// A network is a Redis at some distance.
type network struct {
	name  string
	addr  string
	nodes []string // of the quorum
	proxy *proxy   // counts commands; nil: none
}

const loopback, distant, counted = "loopback", "1 ms", "counted"

// The contenders for one key.
var contenders = []struct {
	name string
	gathering
}{
	{"16 goroutines", gathering{goroutines: 16, clients: 1, cancellable: true}},
	{"64 goroutines", gathering{goroutines: 64, clients: 1, cancellable: true}},
	{"16 clients", gathering{goroutines: 16, clients: 16, cancellable: true}},
}

// The numbers of locks held, and of waiters.
var (
	heldCounts = []int{2_000, 10_000}
	waitCounts = []int{10, 1_000, 10_000}
)

func (b *bench) workloads() (all []workload) {
	// Without contention, short turns suffice, and many rounds make the ratios more stable.
	often := func(w *workload) { w.rounds, w.turn = b.often*b.rounds, w.turn/time.Duration(b.often) }
	add := func(name string, libraries []string, turn time.Duration, prepare func(string) (*turner, error)) *workload {
		all = append(all, workload{name: name, libraries: libraries, turn: turn, prepare: prepare})
		return &all[len(all)-1]
	}
	with := func(libraries ...string) []string { return append(libraries, peers...) }
	near := b.nets[loopback]
	for _, parent := range []string{"background", "cancellable"} {
		often(add("serial/"+parent, with(ours, raw), b.turn,
			b.gather(near, gathering{goroutines: 1, clients: 1, apart: true, cancellable: parent == "cancellable"}, near.open)))
	}
	for _, name := range []string{loopback, distant} {
		net, libraries := b.nets[name], with(ours, oursAuto, raw, rawAuto)
		if name == distant {
			libraries = libraries[:5] // including rueidislock, the only peer whose commands share a connection
		}
		often(add("64 keys/"+name, libraries, b.turn, b.gather(net, gathering{goroutines: 64, clients: 1, apart: true}, net.open)))
	}
	for _, who := range contenders {
		for _, name := range []string{loopback, distant, counted} {
			net := b.nets[name]
			libraries := with(ours, oursAuto, blpop, blpopAuto)
			if who.clients > 1 {
				libraries = with(ours, oursStrict, oursAuto, blpop, blpopAuto)
			}
			w := add("one key/"+name+"/"+who.name, libraries, b.turn, b.gather(net, who.gathering, net.open))
			w.drawn = who.clients > 1
			switch name {
			case distant:
				w.turn *= 2 // so that each of 64 goroutines gets many locks
			case counted:
				w.rounds, w.turn = 1, w.turn/2 // counts hardly vary
			}
		}
	}
	add("mostly reads", with(ours, pairs), b.turn, b.gather(near, gathering{goroutines: 64, clients: 1, cancellable: true, reads: true}, near.open))
	for _, name := range []string{loopback, distant} {
		net := b.nets[name]
		add("hand-off/"+name, with(ours, oursStrict, blpop), b.turn, b.handOff(net))
		both := []string{ours, redSync}
		often(add("quorum alone/"+name, both, b.turn, b.gather(net, gathering{goroutines: 1, clients: 1, apart: true}, net.openQuorum)))
		add("quorum contended/"+name, both, 4*b.turn, b.gather(net, contenders[0].gathering, net.openQuorum))
		add("quorum processes/"+name, both, 2*b.turn, b.together(quorumTeam, net.nodes...))
	}
	b.addTeams(add)
	for _, n := range heldCounts {
		w := add(fmt.Sprint("held/", n), []string{ours, rueidisLock}, 13*b.turn, b.held(n))
		w.rounds, w.cold = 1, true
	}
	for _, n := range waitCounts {
		w := add(fmt.Sprint("waiters/", n), []string{ours, oursStrict}, 10*b.turn, b.waiters(n))
		w.rounds, w.cold = 1, true
	}
	return all
}

// addTeams adds the rows of several processes. There are many, so most have one round, and longer sections longer turns, in which each
// goroutine still gets a few locks.
func (b *bench) addTeams(add func(string, []string, time.Duration, func(string) (*turner, error)) *workload) {
	for _, name := range []string{loopback, distant} {
		for _, section := range sections {
			for _, goroutines := range teamSizes {
				libraries := append([]string{ours, oursStrict, blpop}, peers...)
				if name == distant {
					libraries = slices.DeleteFunc(libraries, func(l string) bool { return l == rueidisLoop })
				}
				t := team{processes: processes, goroutines: goroutines, section: section}
				w := add(teamName(name, goroutines, section), libraries, b.turn, b.together(t, b.nets[name].addr))
				w.cold = true // its processes have connections
				if section > time.Millisecond {
					w.turn = 3 * b.turn / 2
				}
				if w.name != targetTeam {
					w.rounds = 1
				}
			}
		}
	}
}

// A gathering describes the goroutines and clients that lock repeatedly.
type gathering struct {
	goroutines, clients int
	apart               bool // each has a key of its own
	reads               bool // mostly
	cancellable         bool // the context
}

type openFunc func(library string) (*client, error)

func (n *network) open(library string) (*client, error) { return open(library, n.addr) }

func (n *network) openQuorum(library string) (*client, error) {
	return openQuorum(library, n.nodes), nil
}

// openAll opens n clients of the library, and returns a function that closes them.
func openAll(open openFunc, library string, n int) (all []*client, closeAll func() error, err error) {
	closeAll = func() (err error) {
		for _, c := range all {
			err = errors.Join(err, c.close())
		}
		return err
	}
	for range n {
		c, err := open(library)
		if err != nil {
			return nil, nil, errors.Join(err, closeAll())
		}
		all = append(all, c)
	}
	return all, closeAll, nil
}

// gather prepares a turn of a gathering. Contended turns use a new key each, so that a lock that is lost at the end of one does not
// affect the next.
func (b *bench) gather(net *network, g gathering, open openFunc) func(string) (*turner, error) {
	return func(library string) (*turner, error) {
		clients, closeAll, err := openAll(open, library, g.clients)
		if err != nil {
			return nil, err
		}
		var locks []lock
		var writes atomic.Int64 // of those who mostly read
		turn := func(d time.Duration) (sample, []time.Duration, error) {
			writes.Store(0)
			if !g.apart {
				locks = nil
			}
			key := b.newKey()
			for i := len(locks); i < g.goroutines; i++ {
				l := clients[i%g.clients].lock(key)
				if g.reads {
					l = mostlyReads(clients[i%g.clients], key, i, &writes)
				}
				locks = append(locks, l)
				if g.apart {
					key = b.newKey()
				}
			}
			s, waits, err := b.crowd(net, locks, d, g)
			if err == nil && g.reads {
				s["writes"] = float64(writes.Load()) / float64(max(len(waits), 1))
			}
			return s, waits, err
		}
		return &turner{turn, closeAll}, nil
	}
}

func (b *bench) handOff(net *network) func(string) (*turner, error) {
	return func(library string) (*turner, error) {
		clients, closeAll, err := openAll(net.open, library, 2)
		if err != nil {
			return nil, err
		}
		key := b.newKey()
		from, to := clients[0].lock(key), clients[1].lock(key)
		turn := func(d time.Duration) (sample, []time.Duration, error) {
			rc := dial(net.addr)
			defer rc.Close()
			took, trips, lost, err := handOffs(from, to, rc, d)
			if err != nil {
				return nil, nil, err
			}
			typical, trip := median(took), median(trips)
			return sample{"µs": typical.Seconds() * 1e6, "round trips": typical.Seconds() / trip.Seconds(),
				"lost %": 100 * float64(lost) / float64(len(took))}, took, nil
		}
		return &turner{turn, closeAll}, nil
	}
}

// crowd runs a turn of a crowd, and adds the figures of the network.
func (b *bench) crowd(net *network, locks []lock, d time.Duration, g gathering) (sample, []time.Duration, error) {
	trip, err := roundTrip(net)
	if err != nil {
		return nil, nil, err
	}
	sent := 0
	if net.proxy != nil {
		if sent, err = net.proxy.commands(); err != nil {
			return nil, nil, err
		}
	}
	ctx, cancel := context.Background(), func() {}
	if g.cancellable {
		ctx, cancel = context.WithCancel(ctx)
	}
	defer cancel()
	atEnd := func() (err error) {
		if net.proxy != nil {
			before := sent
			sent, err = net.proxy.commands()
			sent -= before
		}
		if !g.apart {
			cancel()
		}
		return err
	}
	allocs := mallocs()
	c, err := run(ctx, locks, d, scene{meeting: &meeting{}}, atEnd)
	if err != nil {
		return nil, nil, err
	}
	s := c.sample()
	s["allocations"] = (mallocs() - allocs) / float64(max(len(c.waits), 1))
	s["round trips"] = s["µs/lock"] / 1e6 / trip.Seconds()
	s["PING µs"] = trip.Seconds() * 1e6
	if net.proxy != nil {
		s["commands"] = float64(sent) / (s["locks/s"] * c.took.Seconds())
	}
	return s, c.waits, nil
}

// mallocs returns how often this process has allocated memory.
func mallocs() float64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.Mallocs)
}

// roundTrip returns the median time of some PINGs.
func roundTrip(net *network) (time.Duration, error) {
	ctx := context.Background()
	rc := dial(net.addr)
	defer rc.Close()
	var trips []time.Duration
	for range 16 {
		t := time.Now()
		if err := rc.Ping(ctx).Err(); err != nil {
			return 0, err
		}
		trips = append(trips, time.Since(t))
	}
	return median(trips), nil
}
