package main

// This file answers: what happens in one turn of one library?

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

// patience is how long one may wait who has no reason to: the lock is free, or the turn is over.
const patience = ttl + time.Second

// A crowd is what goroutines that lock and unlock, again and again, came to.
type crowd struct {
	took      time.Duration
	counts    []int           // how often each got its lock
	waits     []time.Duration // how long for; of those that wait at the end, so far
	handovers int64           // how often somebody else got it than before
}

// run has each lock be locked and unlocked by a goroutine until the turn is over. Nothing is done inside. atEnd is called then; where it
// ends ctx, who still waits is told so, and is not counted.
func run(ctx context.Context, locks []lock, turn time.Duration, atEnd func() error) (*crowd, error) {
	c := &crowd{counts: make([]int, len(locks))}
	var over atomic.Bool
	var last, handovers atomic.Int64
	waits, errs := make([][]time.Duration, len(locks)), make([]error, len(locks))
	again := func(g int) (err error) {
		for !over.Load() {
			start := time.Now()
			unlock, err := locks[g](ctx)
			waits[g] = append(waits[g], time.Since(start))
			switch {
			case err != nil && over.Load() && ctx.Err() != nil:
				return nil
			case err != nil:
				return err
			case !over.Load():
				c.counts[g]++
				if last.Swap(int64(g)+1) != int64(g)+1 {
					handovers.Add(1)
				}
			}
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
	c.took, c.handovers = time.Since(start), handovers.Load()
	err := atEnd()
	if !ends(&all, patience) {
		return nil, fmt.Errorf("some still waited %v after the turn", patience)
	}
	c.waits = slices.Concat(waits...)
	return c, errors.Join(append(errs, err)...)
}

// ends says whether all do within that time.
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
		"hand-overs/s":    float64(c.handovers) / c.took.Seconds(),
		"Jain":            jain(c.counts),
		"slowest/fastest": float64(slices.Min(c.counts)) / float64(max(slices.Max(c.counts), 1)),
		"median ms":       median(c.waits).Seconds() * 1000,
		"longest ms":      slices.Max(c.waits).Seconds() * 1000,
	}
}

// handOffs has a lock go from one client to another that waits for it already, until the turn is over: how long from the start of
// Unlock to the return of Lock? Whether one waits no library tells: it is given its time, and so much more by chance that those who
// poll are met at any moment of their pause. The last before is a PING, so that nothing is asleep, and another one for its time. Who is
// not woken at all is lost, and has waited for as long as it was left to.
func handOffs(from, to lock, rc *redis.Client, turn time.Duration) (took, trips []time.Duration, lost int, err error) {
	once := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
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

// mostlyReads locks to write every 20th time, to read else, where the library can.
func mostlyReads(c *client, key string, goroutine int) lock {
	write, read := c.lock(key), c.lock(key)
	if c.rlock != nil {
		read = c.rlock(key)
	}
	n := 7 * goroutine
	return func(ctx context.Context) (func() error, error) {
		if n++; n%20 == 0 {
			return write(ctx)
		}
		return read(ctx)
	}
}
