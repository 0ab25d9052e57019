package integration

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/redistest"
)

const (
	// tolerable is the TTL. A node that has lost its data must stay away for a TTL, so each test waits for that long.
	tolerable = slowdown * time.Second

	// tolerant is the node timeout as a part of the TTL. The default, 50 ms, is too short for a busy machine.
	tolerant = 0.25

	// leniently is how long something may take that should take a TTL: a busy machine may stall for ten seconds.
	leniently = tolerable + 10*time.Second

	processes = 16
)

// Promises 1, 5, 8 and 9: the loss of any two of five nodes under load breaks neither exclusion nor the order of tokens
// and stops no process for long. Neither does their return.
func TestMinorityLossBreaksNothing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fault
		nodes []int
	}{
		"two killed":        {killed, []int{0, 3}},
		"two frozen":        {frozen, []int{1, 2}},
		"two black-holed":   {blackHoled, []int{0, 4}},
		"one lost its data": {killed, []int{2}},
	} {
		t.Run(name, func(t *testing.T) {
			m := openMasters(t)
			if c.ofLinks {
				m.BehindLinks()
			}
			load := m.load()
			const some = 3 // grants for each process
			load.goesOn(some)
			calm := load.longestGap(time.Time{})

			struck := time.Now()
			for _, i := range c.nodes {
				c.strike(m, i)
			}
			load.goesOn(some)
			// All leases on these nodes end meanwhile.
			<-time.After(time.Until(struck.Add(tolerable)))
			load.goesOn(some)
			gap := load.longestGap(struck)

			healed := time.Now()
			for _, i := range c.nodes {
				c.heal(m, i)
			}
			load.goesOn(some)
			for _, i := range c.nodes {
				calls := redistest.ScriptsRun(m.Admin[i])
				redistest.Eventually(t, "they take part again", func() bool { return redistest.ScriptsRun(m.Admin[i]) > calls+processes })
			}
			load.goesOn(some)
			back := load.longestGap(healed)
			if max(gap, back) > leniently {
				t.Errorf("want writers granted the lock all the time, none was for %v while the nodes were away, and for %v as they came back", gap, back)
			}
			load.end()
			ended := time.Now()
			m.empty()
			t.Logf("%s; longest without a writer: %v before, %v under it, %v after; %v until nothing was left",
				load, calm, gap, back, time.Since(ended))
		})
	}
}

// The register, on which the tests of this file rely, detects overlaps and tokens that fall.
func TestRegisterDetectsOverlaps(t *testing.T) {
	lost, lose := context.WithCancel(t.Context())
	lose()
	inside := func() context.Context {
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		return ctx
	}
	for name, c := range map[string]struct {
		see  func(r *register)
		want string
	}{
		"readers":             {func(r *register) { r.enter(inside(), 0, false, 0); r.enter(inside(), 1, false, 0) }, ""},
		"one after the other": {func(r *register) { l := inside(); r.enter(l, 0, true, 1); r.leave(l); r.enter(inside(), 1, true, 2) }, ""},
		"two writers":         {func(r *register) { r.enter(inside(), 0, true, 1); r.enter(inside(), 1, true, 2) }, "overlap"},
		"a writer joins":      {func(r *register) { r.enter(inside(), 0, false, 0); r.enter(inside(), 1, true, 2) }, "overlap"},
		"a reader joins":      {func(r *register) { r.enter(inside(), 0, true, 1); r.enter(inside(), 1, false, 0) }, "overlap"},
		"the first has lost it": {func(r *register) {
			ctx, cancel := context.WithCancel(t.Context())
			r.enter(ctx, 0, true, 1)
			cancel()
			r.enter(inside(), 1, true, 2)
		}, ""},
		"the second has lost it": {func(r *register) { r.enter(inside(), 0, true, 2); r.enter(lost, 1, true, 1) }, ""},
		"a token again":          {func(r *register) { l := inside(); r.enter(l, 0, true, 1); r.leave(l); r.enter(inside(), 1, true, 1) }, "token"},
		"a token of the past":    {func(r *register) { l := inside(); r.enter(l, 0, true, 2); r.leave(l); r.enter(inside(), 1, true, 1) }, "token"},
	} {
		r := newRegister()
		c.see(r)
		if got := strings.Join(r.wrong, "; "); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: want a message with %q, got %q", name, c.want, got)
		}
	}

	t.Run("a lock that excludes nobody", func(t *testing.T) {
		r := newRegister()
		start := time.Now()
		new(redistest.Witness).Crowd(processes, func() bool { return len(r.faults()) > 0 || time.Since(start) > redistest.Timeout }, func(i int) (bool, func()) {
			l := inside()
			r.enter(l, 0, i%4 == 0, uint64(i))
			runtime.Gosched()
			return false, func() { r.leave(l) }
		})
		if len(r.faults()) == 0 {
			t.Errorf("want an overlap detected, none was in %v", redistest.Timeout)
		}
	})
}

// Promises 2 and 10: without a majority every lock is lost, and no new one is granted, with an error that gives the
// reason. Waiters keep waiting, and are granted the lock when the nodes are back.
func TestMajorityLossEndsEveryLock(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]fault{"killed": killed, "frozen": frozen} {
		t.Run(name, func(t *testing.T) {
			m := openMasters(t)
			gone := []int{0, 2, 3}
			var holders []*redismutex.Lock
			var mutexes []*redismutex.RWMutex
			for range processes / 2 {
				mutex := m.mutex(inRedis)
				mutexes = append(mutexes, mutex)
				holders = append(holders, lock(t, insist(mutex.RLockContext)))
			}
			var waiters []<-chan outcome
			for n := range processes - len(holders) {
				mutex := m.mutex()
				waiter := later(mutex.LockContext)
				redistest.Eventually(t, "it waits on most nodes", func() bool {
					select {
					case o := <-waiter: // its first call failed, so it does not wait yet
						if is := kinds(o.Err); is != "ErrRedis" {
							t.Fatalf("want it to wait or to fail with ErrRedis, the error matches %q: %v", is, o.Err)
						}
						waiter = later(mutex.LockContext)
					default:
					}
					nodes := 0
					for _, rc := range m.Admin {
						if rc.ZCard(t.Context(), intents).Val() == int64(n+1) {
							nodes++
						}
					}
					return nodes >= 4
				})
				waiters = append(waiters, waiter)
			}

			for _, i := range gone {
				f.strike(m, i)
			}
			struck := time.Now()
			var told time.Duration
			for _, l := range holders {
				select {
				case <-l.Done():
				case <-time.After(redistest.Timeout):
					t.Fatalf("want the lock lost, it is still held %v after the nodes went down", redistest.Timeout)
				}
				told = time.Since(struck)
				if until := l.Until().Sub(struck); until > tolerable {
					t.Errorf("want it trusted for at most %v after the nodes went down, it was for %v", tolerable, until)
				}
				for _, err := range []error{context.Cause(l), l.UnlockContext(t.Context())} {
					if is := kinds(err); is != "ErrLockLost" {
						t.Errorf("want an error that matches ErrLockLost, this one matches %s: %v", is, err)
					}
				}
				m.honest(context.Cause(l), gone)
			}
			if told > leniently {
				t.Errorf("want all locks lost within %v, it took %v", leniently, told)
			}

			// One process knows that the nodes are down, the other does not.
			var callers sync.WaitGroup
			start := time.Now()
			for who, mutex := range map[string]*redismutex.RWMutex{"a known process": mutexes[0], "a new process": m.mutexOf(m.Process(), inRedis)} {
				for name, call := range calls(mutex) {
					callers.Go(func() {
						_, err := call(t.Context())
						// A try may also return ErrLock for the nodes that answer, on which others hold the lock.
						if is := kinds(err); is != "ErrRedis" && (is != "ErrLock and ErrRedis" || !strings.HasPrefix(name, "Try")) {
							t.Errorf("%s, %s: want an error that matches ErrRedis, this one matches %s: %v", who, name, is, err)
							return
						}
						m.honest(err, gone)
						for _, i := range gone {
							if !strings.Contains(err.Error(), m.Servers[i].Addr()) {
								t.Errorf("%s, %s: want an error that names node %d, got %v", who, name, i+1, err)
							}
						}
					})
				}
			}
			redistest.Eventually(t, "all are refused", done(&callers))
			refused := time.Since(start)
			if refused > leniently {
				t.Errorf("want all calls refused within %v, it took %v", leniently, refused)
			}

			// The leases of the waiters also end meanwhile.
			<-time.After(time.Until(struck.Add(tolerable * 3 / 2)))
			for _, w := range waiters {
				select {
				case o := <-w:
					t.Fatal("want it to wait for the nodes, but the call has returned: ", o.Err)
				default:
				}
			}
			back := time.Now()
			for _, i := range gone {
				f.heal(m, i)
			}
			r := newRegister()
			var all sync.WaitGroup
			for i, w := range waiters {
				all.Go(func() {
					select {
					case o := <-w:
						if o.Err != nil {
							t.Error(o.Err)
							return
						}
						r.enter(o.Value, i, true, o.Value.Token())
						runtime.Gosched()
						r.leave(o.Value)
						if err := o.Value.UnlockContext(t.Context()); err != nil && kinds(err) != "ErrRedis" { // a node is slow
							t.Error(err)
						}
					case <-time.After(redistest.Timeout):
						t.Errorf("want the lock when the nodes are back, have waited for %v", redistest.Timeout)
					}
				})
			}
			all.Wait()
			for _, wrong := range r.faults() {
				t.Error(wrong)
			}
			t.Logf("all locks lost after %v, new calls refused within %v, all waiters served %v after the nodes were back",
				told, refused, time.Since(back))
			for _, mutex := range mutexes {
				lock(t, insist(mutex.LockContext)).Unlock()
			}
			m.empty()
		})
	}
}

// Promise 2 over several nodes: a lock survives the loss of one node after the other, since it is acquired again on each
// node that comes back.
func TestRollingRestartsDoNotDrainALock(t *testing.T) {
	t.Parallel()
	const ttl = tolerable * 3 / 2 // a busy machine may not take longer for a renewal
	for name, down := range map[string]time.Duration{"at once": 0, "over a renewal": ttl * 6 / 10} {
		t.Run(name, func(t *testing.T) {
			m := openMasters(t)
			l := lock(t, insist(m.mutex(redismutex.WithTTL(ttl)).LockContext))
			token := l.Token()
			m.Eventually("it is on every node", func(rc *redis.Client) bool { return rc.Exists(t.Context(), key).Val() == 1 })

			// Others try all the time. A try may hold a node for a moment, which shows in its longer TTL; if it kept the
			// node, the lock could not be acquired there again.
			other := m.mutex(redismutex.WithTTL(long), redismutex.WithTimeoutFactor(0.01))
			var ended atomic.Bool
			var tries sync.WaitGroup
			tried, first := map[string]int{}, map[string]error{}
			tries.Go(func() {
				for i := 0; !ended.Load(); i++ {
					got, err := try(other, i%2 == 0)(context.Background())
					if err == nil {
						got.Unlock()
					}
					is := kinds(err)
					if tried[is]++; tried[is] == 1 {
						first[is] = err
					}
				}
			})
			defer tries.Wait()
			defer ended.Store(true)

			var took []time.Duration
			for i, server := range m.Servers {
				server.Kill()
				<-time.After(down)
				server.Restart(t)
				start := time.Now()
				for j, rc := range m.Admin {
					// Check every node after each restart: otherwise several might have lost the lock at once.
					redistest.Eventually(t, fmt.Sprintf("it is back on node %d, and seen on node %d", i+1, j+1), func() bool {
						if l.Err() != nil {
							t.Fatalf("want the lock held while node %d is away, it is lost: %v", i+1, context.Cause(l))
						}
						since := time.Since(start)
						left := rc.PTTL(t.Context(), key).Val()
						if since > leniently {
							t.Fatalf("want the lock on node %d again, others hold it: %q %q for %v", j+1,
								rc.Get(t.Context(), key).Val(), rc.SMembers(t.Context(), key).Val(), left)
						}
						return left > ttl-since && left <= ttl
					})
				}
				took = append(took, time.Since(start))
			}
			ended.Store(true)
			tries.Wait()
			t.Logf("back on each node after %v; tries: %v", took, tried)
			for is, err := range first {
				// While nodes restart, the others may be too slow.
				if is != "ErrLock" && is != "ErrRedis" && is != "ErrLock and ErrRedis" {
					t.Errorf("want tries to match ErrLock or ErrRedis, %d match %q, such as %v", tried[is], is, err)
				}
			}
			if tried["ErrLock"] == 0 {
				t.Error("want tries refused, none was")
			}
			if l.Err() != nil || l.Token() != token {
				t.Errorf("want the lock held with token %d, it has %d: %v", token, l.Token(), context.Cause(l))
			}
			unlock(t, l)
			next := lock(t, insist(m.mutex().LockContext))
			if next.Token() <= token {
				t.Errorf("want a token greater than %d, got %d", token, next.Token())
			}
			unlock(t, next)
		})
	}
}

// The documentation of NewRedlock: a call waits for a node that does not answer for the node timeout at most, and skips a
// node known to be down.
func TestSlowNodeDoesNotHoldUpTheOthers(t *testing.T) {
	t.Parallel()
	const (
		timeout = time.Second             // 0.05 of the TTL, the default; a busy machine alone does not reach it
		slack   = 3 * time.Second         // go-redis alone would take many times as long
		loop    = 2500 * time.Millisecond // the node is tried again several times meanwhile
	)
	for name, c := range map[string]struct{ up, held bool }{
		"both directions, before a lock": {up: true}, "replies only, before an unlock": {held: true},
	} {
		t.Run(name, func(t *testing.T) {
			m := openMasters(t)
			m.BehindLinks()
			get := acquire(m.mutex(redismutex.WithTTL(long), redismutex.WithTimeoutFactor(0.05)), c.up)
			start, l := time.Now(), lock(t, get)
			if !c.held {
				unlock(t, l)
			}
			warm := time.Since(start)
			var held []*redismutex.Lock
			for i := range 3 {
				other, err := get(t.Context(), redismutex.WithKey(fmt.Sprint(i)))
				if err != nil {
					t.Fatal(err)
				}
				held = append(held, other)
			}
			m.Eventually("the lock is free, or still held where the test holds it", func(rc *redis.Client) bool { return (rc.Exists(t.Context(), key).Val() == 1) == c.held })
			m.Links[1].Hole(c.up, true)
			start = time.Now()
			if !c.held {
				l = lock(t, get)
			}
			locked := time.Since(start)
			unlock(t, l)
			first := time.Since(start)
			if first > timeout+slack {
				t.Errorf("want the first lock and unlock within %v, it took %v, and %v with its unlock", timeout+slack, locked, first)
			}
			var all []time.Duration
			for _, l := range held {
				start := time.Now()
				unlock(t, l)
				all = append(all, time.Since(start))
			}
			for start := time.Now(); time.Since(start) < loop; {
				start := time.Now()
				unlock(t, lock(t, get))
				all = append(all, time.Since(start))
			}

			// A try returns that the lock is held, not that a node is down.
			l = lock(t, get)
			other := m.mutexOf(m.Process(), redismutex.WithTTL(long), redismutex.WithTimeoutFactor(0.05))
			for i := range 3 { // first before it knows that the node is down
				if _, err := other.TryLockContext(t.Context()); kinds(err) != "ErrLock" {
					t.Errorf("try %d: want an error that matches ErrLock, this one matches %q: %v", i+1, kinds(err), err)
				}
			}
			unlock(t, l)

			slices.Sort(all)
			worst := all[len(all)-2:] // one may take long because the machine stalls
			if worst[0] >= timeout {
				t.Errorf("want later ones below the node timeout, %v, they took %v", timeout, worst)
			}
			t.Logf("before %v; first %v, with its unlock %v; later %d, median %v, worst %v",
				warm, locked, first, len(all), all[len(all)/2], worst)
		})
	}
}

// masters are five independent servers, and the log of the locks on them.
type masters struct {
	*testing.T
	*redistest.Quorum
	log redistest.Log
}

// turns limits these tests to two at a time: each loads a core with its 16 processes and five servers.
var turns = make(chan struct{}, 2)

func openMasters(t *testing.T) *masters {
	t.Helper()
	t.Parallel()
	turns <- struct{}{}
	t.Cleanup(func() { <-turns })
	m := &masters{T: t, Quorum: redistest.StartQuorum(t, 5)}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the log: %.4000s", m.log.String())
		}
	})
	return m
}

// mutex returns a mutex in a process of its own, which has connected to each server.
func (m *masters) mutex(opt ...redismutex.MutexOption) *redismutex.RWMutex {
	m.Helper()
	clients := m.Process()
	for _, rc := range clients {
		if err := rc.(*redis.Client).Ping(m.Context()).Err(); err != nil {
			m.Fatal(err)
		}
	}
	return m.mutexOf(clients, opt...)
}

func (m *masters) mutexOf(clients []redis.Scripter, opt ...redismutex.MutexOption) *redismutex.RWMutex {
	opt = append([]redismutex.MutexOption{redismutex.WithTTL(tolerable), redismutex.WithTimeoutFactor(tolerant), redismutex.WithLogger(m.log.Logger())}, opt...)
	return redismutex.NewRedlock(clients, key, opt...)
}

// insist repeats a call to which no majority has answered, as happens occasionally on a busy machine.
func insist(a call) call {
	return func(ctx context.Context, opt ...redismutex.LockOption) (*redismutex.Lock, error) {
		for start := time.Now(); ; {
			l, err := a(ctx, opt...)
			if !errors.Is(err, redismutex.ErrRedis) || time.Since(start) > redistest.Timeout {
				return l, err
			}
		}
	}
}

// honest checks that an error does not claim that others hold a node that is down.
func (m *masters) honest(err error, gone []int) {
	m.Helper()
	for _, i := range gone {
		if strings.Contains(err.Error(), m.Servers[i].Addr()+"): "+redismutex.ErrLock.Error()) {
			m.Errorf("want no holder named for node %d, which is down, got %v", i+1, err)
		}
	}
}

// done returns a function that reports whether all goroutines have returned, without waiting for them.
func done(all *sync.WaitGroup) func() bool {
	c := make(chan struct{})
	go func() { all.Wait(); close(c) }()
	return func() bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
}

// empty waits until the tombstones, which have the longest lease, have ended, and checks that only the token is left on
// each node.
func (m *masters) empty() {
	m.Helper()
	start := time.Now()
	m.Eventually("nothing is left", func(rc *redis.Client) bool {
		keys, err := rc.Keys(m.Context(), "*").Result()
		if time.Since(start) > 2*tolerable+atOnce {
			m.Fatalf("want nothing but the token left after %v, got %q, %v", time.Since(start), keys, err)
		}
		return err == nil && !slices.ContainsFunc(keys, func(k string) bool { return k != "{"+key+"}:token" })
	})
}

// A fault of a node, and its repair.
type fault struct {
	strike, heal func(m *masters, node int)
	ofLinks      bool
}

var (
	// A killed node comes back empty. It must stay away for a TTL.
	killed = fault{
		strike: func(m *masters, node int) { m.Servers[node].Kill() },
		heal:   func(m *masters, node int) { m.Servers[node].Restart(m) },
	}
	frozen = fault{
		strike: func(m *masters, node int) { m.Servers[node].Freeze() },
		heal:   func(m *masters, node int) { m.Servers[node].Thaw() },
	}
	blackHoled = fault{
		strike:  func(m *masters, node int) { m.Links[node].Hole(true, true) },
		heal:    func(m *masters, node int) { m.Links[node].Hole(false, false) },
		ofLinks: true,
	}
)

// A register detects overlaps of locks that may be lost at any time: a lock counts until its context is done.
type register struct {
	mu      sync.Mutex
	inside  map[context.Context]bool // by lock, whether it is a write lock
	token   uint64                   // the last token
	wrote   []time.Time              // when writers entered
	entered [processes]int
	lost    int
	wrong   []string
}

func newRegister() *register { return &register{inside: map[context.Context]bool{}} }

// enter is called by a holder of l that has not begun to unlock it.
//
// A lock that is not done is held at this moment, and the locks inside have been held since before. So two overlap if the
// other is not done either, and writers enter in the order of their grants.
func (r *register) enter(l context.Context, process int, write bool, token uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l.Err() != nil {
		r.lost++
		return
	}
	for other, writes := range r.inside {
		if (write || writes) && other.Err() == nil {
			r.wrong = append(r.wrong, fmt.Sprintf("overlap: process %d (writer: %v) with another (writer: %v)", process, write, writes))
		}
	}
	r.inside[l] = write
	r.entered[process]++
	if write {
		if token <= r.token {
			r.wrong = append(r.wrong, fmt.Sprintf("token %d after %d", token, r.token))
		}
		r.token = token
		r.wrote = append(r.wrote, time.Now())
	}
}

// leave is called before the unlock begins.
func (r *register) leave(l context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.inside, l)
}

func (r *register) faults() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.wrong)
}

// longestGap returns the longest time without a new writer since from.
func (r *register) longestGap(from time.Time) (longest time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, at := range r.wrote[1:] {
		if at.After(from) {
			longest = max(longest, at.Sub(r.wrote[i]))
		}
	}
	return longest
}

// A crowd is 16 processes that lock for reading or writing repeatedly until it ends.
type crowd struct {
	*register
	t         *testing.T
	all       sync.WaitGroup
	ended     atomic.Bool
	unlocks   atomic.Int64
	uncertain atomic.Int64 // unlocks that have not been confirmed
	refused   atomic.Int64 // calls to which no majority answered in time
}

func (m *masters) load() *crowd {
	m.Helper()
	c := &crowd{register: newRegister(), t: m.T}
	ctx, cancel := context.WithCancel(context.Background())
	m.Cleanup(func() { // also if the test fails
		c.ended.Store(true)
		cancel()
		c.all.Wait()
	})
	for p := range processes {
		mutex := m.mutex()
		c.all.Go(func() {
			for i := p; !c.ended.Load(); i++ {
				write := i%4 == 0
				l, err := acquire(mutex, write)(ctx)
				switch {
				case ctx.Err() != nil:
					return
				case errors.Is(err, redismutex.ErrRedis):
					c.refused.Add(1) // a third node was too slow on a busy machine
					continue
				case err != nil:
					m.Errorf("process %d: want the lock, got %v", p, err)
					return
				}
				c.enter(l, p, write, l.Token())
				for range 3 {
					runtime.Gosched() // an empty critical section hardly ever overlaps with another
				}
				c.leave(l)
				// The lock is not to blame if a node does not answer.
				err = l.UnlockContext(ctx)
				c.unlocks.Add(1)
				if errors.Is(err, redismutex.ErrRedis) || errors.Is(err, redismutex.ErrLockLost) {
					c.uncertain.Add(1)
				} else if err != nil && ctx.Err() == nil {
					m.Errorf("process %d: want the lock unlocked, got %v", p, err)
				}
			}
		})
	}
	return c
}

// goesOn waits until every process has been granted the lock that many more times, and one of them for writing.
func (c *crowd) goesOn(often int) {
	c.t.Helper()
	c.mu.Lock()
	entered, wrote := c.entered, len(c.wrote)
	c.mu.Unlock()
	redistest.Eventually(c.t, "every process is granted the lock again", func() bool {
		if c.t.Failed() {
			c.t.FailNow()
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		for p, n := range c.entered {
			if n < entered[p]+often {
				return false
			}
		}
		return len(c.wrote) > wrote
	})
	for _, wrong := range c.faults() {
		c.t.Fatal(wrong)
	}
}

// end stops the crowd.
func (c *crowd) end() {
	c.t.Helper()
	c.ended.Store(true)
	c.all.Wait()
	for _, wrong := range c.faults() {
		c.t.Error(wrong)
	}
	if c.refused.Load() > c.unlocks.Load() {
		c.t.Errorf("want more granted than refused: %s", c)
	}
}

func (c *crowd) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, e := range c.entered {
		n += e
	}
	return fmt.Sprintf("%d granted, %d of them for writing; %d lost, %d refused, %d of %d unlocks not confirmed",
		n, len(c.wrote), c.lost, c.refused.Load(), c.uncertain.Load(), c.unlocks.Load())
}
