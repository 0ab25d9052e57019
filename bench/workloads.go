package main

// This file answers: what is measured?

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// A workload is measured round by round, in which each library has a turn.
type workload struct {
	name      string
	libraries []string
	turn      time.Duration
	rounds    int  // 0: as many as are asked for
	cold      bool // it does without a warm-up
	prepare   func(library string) (*turner, error)
}

// A turner is one library that is ready for a workload.
type turner struct {
	turn  func(time.Duration) (sample, []time.Duration, error)
	close func() error
}

// A network is how far away Redis is.
type network struct {
	name  string
	addr  string
	nodes []string // of the quorum
	proxy *proxy   // of those who count commands
}

const loopback, distant, counted = "loopback", "1 ms", "counted"

// Who contends for the one key.
var contenders = []struct {
	name                string
	goroutines, clients int
}{{"16 goroutines", 16, 1}, {"64 goroutines", 64, 1}, {"16 clients", 16, 16}}

// How many locks are held, and how many wait.
var (
	heldCounts = []int{2_000, 10_000}
	waitCounts = []int{10, 100, 1_000, 10_000}
)

func (b *bench) workloads() (all []workload) {
	alone := slices.Concat([]string{ours, raw}, peers)
	sameKey := slices.Concat([]string{ours, oursAuto, blpop, blpopAuto}, peers)
	for _, parent := range []string{"background", "cancellable"} {
		all = append(all, workload{name: "serial/" + parent, libraries: alone, turn: b.turn,
			prepare: b.own(b.nets[loopback], 1, parent == "cancellable", opener(b.nets[loopback]))})
	}
	for _, net := range []string{loopback, distant} {
		libraries, turn := slices.Concat([]string{ours, oursAuto, raw, rawAuto}, peers), b.turn
		if net == distant {
			libraries = []string{ours, oursAuto, raw, rawAuto, rueidisLock}
		}
		all = append(all, workload{name: "64 keys/" + net, libraries: libraries, turn: turn,
			prepare: b.own(b.nets[net], 64, false, opener(b.nets[net]))})
	}
	for _, net := range []string{loopback, distant, counted} {
		for _, who := range contenders {
			w := workload{name: "one key/" + net + "/" + who.name, libraries: sameKey, turn: b.turn,
				prepare: b.contended(b.nets[net], who.goroutines, who.clients, opener(b.nets[net]))}
			switch net {
			case distant:
				w.turn *= 2 // so that each of 64 has many turns
			case counted:
				w.rounds, w.turn = 1, w.turn/2 // what is counted hardly varies
			}
			all = append(all, w)
		}
	}
	for _, net := range []string{loopback, distant} {
		all = append(all, workload{name: "hand-off/" + net, libraries: slices.Concat([]string{ours, blpop}, peers), turn: b.turn,
			prepare: b.handOff(b.nets[net])})
	}
	all = append(all, workload{name: "mostly reads", libraries: slices.Concat([]string{ours, pairs}, peers), turn: b.turn,
		prepare: b.mostlyReads(b.nets[loopback], 64)})
	for _, net := range []string{loopback, distant} {
		open := func(library string) (*client, error) { return openQuorum(library, b.nets[net].nodes), nil }
		both := []string{ours, redSync}
		all = append(all,
			workload{name: "quorum alone/" + net, libraries: both, turn: b.turn, prepare: b.own(b.nets[net], 1, false, open)},
			workload{name: "quorum contended/" + net, libraries: both, turn: 4 * b.turn, prepare: b.contended(b.nets[net], 16, 1, open)})
	}
	for _, n := range heldCounts {
		all = append(all, workload{name: fmt.Sprintf("held/%d", n), libraries: []string{ours, rueidisLock}, turn: 13 * b.turn, rounds: 1, cold: true,
			prepare: b.held(n)})
	}
	for _, n := range waitCounts {
		all = append(all, workload{name: fmt.Sprintf("waiters/%d", n), libraries: []string{ours}, turn: 10 * b.turn, rounds: 1, cold: true,
			prepare: b.waiters(n)})
	}
	return all
}

type openFunc func(library string) (*client, error)

func opener(net *network) openFunc {
	return func(library string) (*client, error) { return open(library, net.addr) }
}

// own has each goroutine lock a key of its own.
func (b *bench) own(net *network, goroutines int, cancellable bool, open openFunc) func(string) (*turner, error) {
	return func(library string) (*turner, error) {
		c, err := open(library)
		if err != nil {
			return nil, err
		}
		var locks []lock
		for range goroutines {
			locks = append(locks, c.lock(b.newKey()))
		}
		turn := func(d time.Duration) (sample, []time.Duration, error) {
			ctx, cancel := context.Background(), func() {}
			if cancellable {
				ctx, cancel = context.WithCancel(ctx)
			}
			defer cancel()
			return b.crowd(ctx, net, locks, d)
		}
		return &turner{turn, c.close}, nil
	}
}

// contended has all goroutines, of as many clients, lock the same key, in each turn another one: a lock that got lost at the end of a
// turn is no matter in the next.
func (b *bench) contended(net *network, goroutines, clients int, open openFunc) func(string) (*turner, error) {
	return func(library string) (*turner, error) {
		var all []*client
		closeAll := func() (err error) {
			for _, c := range all {
				err = errors.Join(err, c.close())
			}
			return err
		}
		for range clients {
			c, err := open(library)
			if err != nil {
				return nil, errors.Join(err, closeAll())
			}
			all = append(all, c)
		}
		turn := func(d time.Duration) (sample, []time.Duration, error) {
			key := b.newKey()
			var locks []lock
			for g := range goroutines {
				locks = append(locks, all[g%clients].lock(key))
			}
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			return b.crowd(ctx, net, locks, d)
		}
		return &turner{turn, closeAll}, nil
	}
}

func (b *bench) mostlyReads(net *network, goroutines int) func(string) (*turner, error) {
	return func(library string) (*turner, error) {
		c, err := open(library, net.addr)
		if err != nil {
			return nil, err
		}
		turn := func(d time.Duration) (sample, []time.Duration, error) {
			key := b.newKey()
			var locks []lock
			for g := range goroutines {
				locks = append(locks, mostlyReads(c, key, g))
			}
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			return b.crowd(ctx, net, locks, d)
		}
		return &turner{turn, c.close}, nil
	}
}

func (b *bench) handOff(net *network) func(string) (*turner, error) {
	return func(library string) (*turner, error) {
		from, err := open(library, net.addr)
		if err != nil {
			return nil, err
		}
		to, err := open(library, net.addr)
		if err != nil {
			return nil, errors.Join(err, from.close())
		}
		key := b.newKey()
		giver, taker := from.lock(key), to.lock(key)
		turn := func(d time.Duration) (sample, []time.Duration, error) {
			trip, err := roundTrip(net)
			if err != nil {
				return nil, nil, err
			}
			took, err := handOffs(giver, taker, d)
			if err != nil {
				return nil, nil, err
			}
			typical := median(took)
			return sample{"µs": typical.Seconds() * 1e6, "round trips": typical.Seconds() / trip.Seconds()}, took, nil
		}
		return &turner{turn, func() error { return errors.Join(from.close(), to.close()) }}, nil
	}
}

// crowd is a turn of a crowd, with what the network knows of it.
func (b *bench) crowd(ctx context.Context, net *network, locks []lock, d time.Duration) (sample, []time.Duration, error) {
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
	c, err := run(ctx, locks, d, func() (err error) {
		if net.proxy != nil {
			before := sent
			sent, err = net.proxy.commands()
			sent -= before
		}
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	s := c.sample()
	s["ping ms"] = trip.Seconds() * 1000
	s["round trips"] = s["µs/lock"] / 1e6 / trip.Seconds()
	if net.proxy != nil {
		s["commands"] = float64(sent) / (s["locks/s"] * c.took.Seconds())
	}
	return s, c.waits, nil
}

// roundTrip is the median of some PINGs.
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
