package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// timeout is how long a waiter may take to return although the lock is free, or the turn is over.
const timeout = ttl + time.Second

// A crowd has the results of goroutines that lock and unlock repeatedly.
type crowd struct {
	took   time.Duration
	counts []int           // the number of locks of each goroutine
	waits  []time.Duration // how long each lock took; of goroutines that wait at the end, so far

	// The hand-overs to another goroutine than the last one: of the same process, and of another one.
	within, between handOvers

	overlaps int64 // how often a lock was granted while another goroutine had it
}

// Some hand-overs, and for how long nobody was in a critical section meanwhile, in all.
type handOvers struct {
	N    int64
	Idle time.Duration
}

func (h handOvers) add(o handOvers) handOvers { return handOvers{h.N + o.N, h.Idle + o.Idle} }

// A scene is where the goroutines of a process lock, maybe beside those of others.
type scene struct {
	*meeting
	process int
	section time.Duration // spent with the lock
}

// run starts a goroutine for each lock that locks and unlocks it until the turn is over. Then it calls atEnd. If that cancels ctx, the
// goroutines that still wait return and are not counted.
func run(ctx context.Context, locks []lock, turn time.Duration, at scene, atEnd func() error) (*crowd, error) {
	c := &crowd{counts: make([]int, len(locks))}
	var over atomic.Bool
	var overlaps atomic.Int64
	var n, idle [3]atomic.Int64 // by predecessor
	waits, errs := make([][]time.Duration, len(locks)), make([]error, len(locks))
	hold := func(g int) {
		last, beside := at.enter(at.process, g)
		defer at.inside.Add(-1)
		if over.Load() {
			return
		}
		c.counts[g]++
		n[last].Add(1)
		if beside {
			overlaps.Add(1)
		}
		if at.section > 0 {
			idle[last].Add(int64(at.begin()))
			spend(at.section)
			at.end()
		}
	}
	again := func(g int) error {
		for !over.Load() {
			start := time.Now()
			unlock, err := locks[g](ctx)
			waits[g] = append(waits[g], time.Since(start))
			switch {
			case err != nil && over.Load() && ctx.Err() != nil:
				return nil
			case err != nil:
				return err
			}
			hold(g)
			if err := unlock(); err != nil {
				return err
			}
		}
		return nil
	}
	start := time.Now()
	var all sync.WaitGroup
	for g := range locks {
		all.Go(func() { errs[g] = again(g) })
	}
	time.Sleep(turn)
	over.Store(true)
	c.took = time.Since(start)
	of := func(last predecessor) handOvers { return handOvers{n[last].Load(), time.Duration(idle[last].Load())} }
	c.within, c.between, c.overlaps = of(sameProcess), of(otherProcess), overlaps.Load()
	err := atEnd()
	if !ends(&all, timeout) {
		return nil, fmt.Errorf("some goroutines still waited %v after the turn", timeout)
	}
	c.waits = slices.Concat(waits...)
	return c, errors.Join(append(errs, err)...)
}

// ends reports whether all goroutines return within that time.
func ends(all *sync.WaitGroup, within time.Duration) bool {
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	select {
	case <-done:
		return true
	case <-time.After(within):
		return false
	}
}

func (c *crowd) sample() sample {
	locks := 0
	for _, n := range c.counts {
		locks += n
	}
	return sample{
		"locks/s":         float64(locks) / c.took.Seconds(),
		"µs/lock":         c.took.Seconds() * 1e6 / float64(max(locks, 1)),
		"hand-overs/s":    float64(c.within.N+c.between.N) / c.took.Seconds(),
		"Jain":            jain(c.counts),
		"slowest/fastest": float64(slices.Min(c.counts)) / float64(max(slices.Max(c.counts), 1)),
		"median ms":       median(c.waits).Seconds() * 1000,
		"longest ms":      slices.Max(c.waits).Seconds() * 1000,
	}
}

// handOffs hands a lock from one client to another that waits for it, until the turn is over, and measures the time from the start of
// Unlock to the return of Lock. No library reports that a client waits, so it is given some time, plus a random one, so that a library
// that polls is met at any moment of its pause. A PING before the unlock wakes the server, and another measures a round trip. A waiter
// that is never woken is lost; its wait counts as the time after which it was given up.
func handOffs(from, to lock, rc *redis.Client, turn time.Duration) (took, trips []time.Duration, lost int, err error) {
	once := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		unlock, err := from(ctx)
		if err != nil {
			return err
		}
		type grant struct {
			at     time.Time
			unlock func() error
			err    error
		}
		granted := make(chan grant, 1)
		go func() {
			unlock, err := to(ctx)
			granted <- grant{time.Now(), unlock, err}
		}()
		time.Sleep(5*time.Millisecond + rand.N(pause))
		var t time.Time
		for range 2 {
			t = time.Now()
			if err := rc.Ping(ctx).Err(); err != nil {
				return err
			}
		}
		trips = append(trips, time.Since(t))
		t = time.Now()
		if err := unlock(); err != nil {
			return err
		}
		g := <-granted
		took = append(took, g.at.Sub(t))
		switch {
		case g.err != nil && ctx.Err() != nil:
			lost++
			return nil
		case g.err != nil:
			return g.err
		}
		return g.unlock()
	}
	for start := time.Now(); time.Since(start) < turn && err == nil; {
		err = once()
	}
	return took, trips, lost, err
}

// mostlyReads takes a write lock every 20th time, and otherwise a read lock if the library has them. It counts the write locks.
func mostlyReads(c *client, key string, goroutine int, writes *atomic.Int64) lock {
	write, read := c.lock(key), c.lock(key)
	if c.rlock != nil {
		read = c.rlock(key)
	}
	n := 7 * goroutine
	return func(ctx context.Context) (func() error, error) {
		if n++; n%20 == 0 {
			unlock, err := write(ctx)
			if err == nil {
				writes.Add(1)
			}
			return unlock, err
		}
		return read(ctx)
	}
}
