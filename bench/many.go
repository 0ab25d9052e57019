package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/metrics"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
)

// held runs a process of its own, to measure the memory and CPU time of one library alone.
func (b *bench) held(n int) func(string) (*turner, error) {
	return func(library string) (*turner, error) {
		turn := func(d time.Duration) (sample, []time.Duration, error) {
			s, err := sampleOf("held", library, b.nets[loopback].addr, strconv.Itoa(n), (10 * d / 13).String())
			return s, nil, err
		}
		return &turner{turn, func() error { return nil }}, nil
	}
}

// sampleOf runs a child process that prints a sample.
func sampleOf(args ...string) (s sample, err error) {
	cmd, err := child("", args...)
	if err != nil {
		return nil, err
	}
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	return s, json.Unmarshal(out, &s)
}

// heldMain is that process: it holds n locks for a while, and prints what they cost.
func heldMain(args []string) error {
	ctx := context.Background()
	library, addr := args[0], args[1]
	n, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	window, err := time.ParseDuration(args[3])
	if err != nil {
		return err
	}
	time.AfterFunc(2*window+time.Minute, func() { panic("a free lock was not granted in time") })
	c, err := open(library, addr)
	if err != nil {
		return err
	}
	if c.many == nil {
		c.many = c.lock
	}
	rc := dial(addr)
	acquire := func(prefix string, n int) ([]func() error, error) {
		unlocks, errs := make([]func() error, n), make([]error, n)
		var all sync.WaitGroup
		turns := make(chan struct{}, 16) // few at a time, so that acquiring them does not add to what is measured
		for i := range n {
			turns <- struct{}{}
			all.Go(func() {
				unlocks[i], errs[i] = c.many(fmt.Sprint(prefix, i))(ctx)
				<-turns
			})
		}
		all.Wait()
		return unlocks, errors.Join(errs...)
	}
	free := func(unlocks []func() error) (err error) {
		for _, unlock := range unlocks {
			err = errors.Join(err, unlock())
		}
		return err
	}
	first, err := acquire("first:"+library, 100)
	time.Sleep(window / 4) // until they have been renewed, so that everything that is allocated once exists
	if err := errors.Join(err, free(first)); err != nil {
		return err
	}
	goroutines, bytes := runtime.NumGoroutine(), memory()
	unlocks, err := acquire("held:"+library, n)
	if err != nil {
		return err
	}
	runtime.GC()
	start, cpu := time.Now(), cpuTime()
	before, err := serverStats(rc)
	if err != nil {
		return err
	}
	time.Sleep(window)
	lockSeconds := float64(n) * time.Since(start).Seconds()
	cpu = cpuTime() - cpu
	after, err := serverStats(rc)
	if err != nil {
		return err
	}
	s := sample{
		"CPU µs":     cpu.Seconds() * 1e6 / lockSeconds,
		"commands":   (after.scripts - before.scripts) / lockSeconds,
		"bytes":      (memory() - bytes) / float64(n),
		"goroutines": float64(runtime.NumGoroutine()-goroutines) / float64(n),
	}
	if err := free(unlocks); err != nil { // returns an error if a lock was lost
		return err
	}
	return errors.Join(json.NewEncoder(os.Stdout).Encode(s), c.close(), rc.Close())
}

// memory returns the bytes in use on the heap and the stacks.
func memory() float64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // frees what the first run has finalized
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc + m.StackInuse)
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // only wrong arguments make it fail
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// waiters makes n goroutines of one client wait for a key that another client holds, for a while, and then lets them lock it in turn.
// They are in a process of their own, whose CPU time is measured.
func (b *bench) waiters(n int) func(string) (*turner, error) {
	return func(library string) (*turner, error) {
		server, err := b.server()
		if err != nil {
			return nil, err
		}
		turn := func(d time.Duration) (sample, []time.Duration, error) {
			s, err := sampleOf("waiters", library, server, strconv.Itoa(n), (8 * d / 10).String())
			return s, nil, err
		}
		return &turner{turn, func() error { return nil }}, nil
	}
}

// waitersMain is that process.
func waitersMain(args []string) error {
	library, addr := args[0], args[1]
	n, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	window, err := time.ParseDuration(args[3])
	if err != nil {
		return err
	}
	waiter, err := open(library, addr)
	if err != nil {
		return err
	}
	s, err := wait(dial(addr), waiter, "waited for by "+library, n, window, library == oursStrict)
	return errors.Join(err, json.NewEncoder(os.Stdout).Encode(s), waiter.close())
}

// wait is what it does. Strict goroutines all wait in Redis, others mostly in the process.
func wait(rc *redis.Client, waiter *client, key string, n int, window time.Duration, strict bool) (sample, error) {
	ctx := context.Background()
	holder, err := redismutex.NewMutex(rc, key, redismutex.WithTTL(time.Hour)).LockContext(ctx) // which is not renewed meanwhile
	if err != nil {
		return nil, err
	}
	// Before and after all have joined, after a while, and after all have had the lock.
	var at [4]stats
	var cpu [4]time.Duration
	look := func(i int) {
		var failed error
		at[i], failed = serverStats(rc)
		cpu[i] = cpuTime()
		err = errors.Join(err, failed)
	}
	look(0)
	var all sync.WaitGroup
	var begun, left atomic.Int64
	began := time.Now()
	errs := make([]error, n)
	batch := n
	if strict {
		batch = connections // no more at once than connections, so that none waits for a connection
	}
	var inRedis int64
	for i := 0; i < n && err == nil; {
		for range min(batch, n-i) {
			me := i
			i++
			all.Go(func() {
				begun.Add(1)
				unlock, err := waiter.lock(key)(ctx)
				left.Add(1)
				if err == nil {
					err = unlock()
				}
				errs[me] = err
			})
		}
		for joined := 0; joined < i && err == nil; {
			switch {
			case left.Load() > 0:
				err = errors.New("a waiter has returned before the lock was unlocked")
			case time.Since(began) > time.Minute:
				err = fmt.Errorf("only %d of %d waiters joined within a minute", joined, i)
			case strict:
				inRedis, err = rc.ZCard(ctx, "{"+key+"}:lock-intent").Result()
				joined = int(inRedis)
			default:
				time.Sleep(time.Millisecond)
				if inRedis, err = rc.ZCard(ctx, "{"+key+"}:lock-intent").Result(); inRedis > 0 && allWait() {
					joined = int(begun.Load())
				}
			}
		}
	}
	look(1)
	start := time.Now()
	time.Sleep(window)
	look(2)
	took := time.Since(start)
	if err == nil {
		inRedis, err = rc.ZCard(ctx, "{"+key+"}:lock-intent").Result()
	}
	err = errors.Join(err, holder.UnlockContext(ctx))
	if !ends(&all, time.Minute) {
		return nil, errors.Join(err, errors.New("some waiters were not granted the lock within a minute of the unlock"))
	}
	look(3)
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, err
	}
	joins, keeps, handOffs := at[1].since(at[0]), at[2].since(at[1]), at[3].since(at[2])
	s := sample{
		"in Redis": float64(inRedis),
		"renewals": keeps.scripts / (took.Seconds() / (ttl / 2).Seconds()),
		"client %": 100 * (cpu[2] - cpu[1]).Seconds() / took.Seconds(),
		"pass µs":  (cpu[3] - cpu[2]).Seconds() * 1e6 / float64(n),
		"busy %":   100 * keeps.busy / 1e6 / took.Seconds(),
		"CPU %":    100 * keeps.cpu / took.Seconds(),
	}
	if strict {
		s["join script µs"], s["pass script µs"] = joins.busy/joins.scripts, handOffs.busy/handOffs.scripts
		s["renewals/read"] = keeps.scripts / keeps.reads
	} else {
		s["join µs"] = (cpu[1] - cpu[0]).Seconds() * 1e6 / float64(n) // of strict ones, that would count the questions whether all have joined
	}
	return s, nil
}

// allWait reports whether no goroutine of this process is about to run.
func allWait() bool {
	sample := []metrics.Sample{{Name: "/sched/goroutines/runnable:goroutines"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64() == 0
}

// stats are the statistics of a server.
type stats struct{ scripts, busy, reads, cpu float64 } // busy with scripts, in µs; cpu in s

func serverStats(rc *redis.Client) (s stats, err error) {
	text, err := rc.Info(context.Background(), "all").Result()
	if err != nil {
		return s, err
	}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		v, _ := strconv.ParseFloat(value, 64) // 0 if it is not a number, which is not used
		switch name {
		case "cmdstat_evalsha", "cmdstat_eval":
			var calls, µs float64
			if _, err := fmt.Sscanf(value, "calls=%f,usec=%f,", &calls, &µs); err != nil {
				return s, fmt.Errorf("%s: %w", line, err)
			}
			s.scripts, s.busy = s.scripts+calls, s.busy+µs
		case "total_reads_processed":
			s.reads = v
		case "used_cpu_user", "used_cpu_sys":
			s.cpu += v
		}
	}
	return s, nil
}

func (s stats) since(before stats) stats {
	return stats{s.scripts - before.scripts, s.busy - before.busy, s.reads - before.reads, s.cpu - before.cpu}
}
