package redismutex_test

// This file answers: what does a lock over five Redis survive? They are real
// servers, each a process of its own, and fail under the load of 16 processes.

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
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
)

const (
	// tolerable is the TTL here: a node that lost its data has to stay away for
	// as long, so it is what each test waits for.
	tolerable = time.Second

	// tolerant is the node time-out, as a part of that: by default it is 50 ms,
	// and a machine that is busy takes longer than that now and then.
	tolerant = 0.25

	// leniently is how long may take what is to be done within a TTL: the machine
	// may stand still for as long as that by itself.
	leniently = tolerable + 10*time.Second

	processes = 16
)

// Promises 1, 5, 8 and 9: the loss of any two of five nodes, in the middle of it
// all, lets nobody in who should not be, turns no token back and stops nobody
// for long. Neither does their return.
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
				m.behindLinks()
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
			// All leases that these nodes know of end meanwhile.
			<-time.After(time.Until(struck.Add(tolerable)))
			load.goesOn(some)
			gap := load.longestGap(struck)

			healed := time.Now()
			for _, i := range c.nodes {
				c.heal(m, i)
			}
			load.goesOn(some)
			for _, i := range c.nodes {
				calls := scriptCalls(m.looks[i])
				eventually(t, "they take part again", func() bool { return scriptCalls(m.looks[i]) > calls+processes })
			}
			load.goesOn(some)
			back := load.longestGap(healed)
			if max(gap, back) > leniently {
				t.Errorf("no writer got it for %v as they were away, for %v as they came back", gap, back)
			}
			load.end()
			ended := time.Now()
			m.empty()
			t.Logf("%s; longest without a writer: %v before, %v under it, %v after; %v until nothing was left",
				load, calm, gap, back, time.Since(ended))
		})
	}
}

// The tests of this file stand on what the register sees.
func TestRegisterSeesWhoIsInside(t *testing.T) {
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
			t.Errorf("%s: %q", name, got)
		}
	}

	t.Run("a lock that excludes nobody", func(t *testing.T) {
		r := newRegister()
		start := time.Now()
		new(witness).crowd(processes, func() bool { return len(r.faults()) > 0 || time.Since(start) > patience }, func(i int) (bool, func()) {
			l := inside()
			r.enter(l, 0, i%4 == 0, uint64(i))
			runtime.Gosched()
			return false, func() { r.leave(l) }
		})
		if len(r.faults()) == 0 {
			t.Error("it saw nothing")
		}
	})
}

// Promises 2 and 10: without a majority nobody holds, or gets, a lock, and all
// are told so. Who waits goes on waiting, and gets it when the nodes are back.
func TestMajorityLossIsTold(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]fault{"killed": killed, "frozen": frozen} {
		t.Run(name, func(t *testing.T) {
			m := openMasters(t)
			gone := []int{0, 2, 3}
			var holders []*redismutex.Lock
			var mutexes []*redismutex.RWMutex
			for range processes / 2 {
				mutex := m.mutex()
				mutexes = append(mutexes, mutex)
				holders = append(holders, lock(t, insist(mutex.RLockContext)))
			}
			var waiters []<-chan outcome
			for n := range processes - len(holders) {
				mutex := m.mutex()
				waiter := later(mutex.LockContext)
				eventually(t, "it waits on most nodes", func() bool {
					select {
					case o := <-waiter: // its first attempt failed: it does not wait yet
						if is := kinds(o.err); is != "ErrRedis" {
							t.Fatalf("it got %q: %v", is, o.err)
						}
						waiter = later(mutex.LockContext)
					default:
					}
					nodes := 0
					for _, rc := range m.looks {
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
				case <-time.After(patience):
					t.Fatal("a holder never learns it")
				}
				told = time.Since(struck)
				if until := l.Until().Sub(struck); until > tolerable {
					t.Errorf("it was trusted for %v", until)
				}
				for _, err := range []error{context.Cause(l), l.UnlockContext(t.Context())} {
					if is := kinds(err); is != "ErrLockLost" {
						t.Errorf("it matches %s: %v", is, err)
					}
				}
				m.honest(context.Cause(l), gone)
			}
			if told > leniently {
				t.Errorf("it took %v until all knew", told)
			}

			// Those who know that the nodes are ill, and those who do not.
			var calls sync.WaitGroup
			start := time.Now()
			for who, mutex := range map[string]*redismutex.RWMutex{"a known process": mutexes[0], "a new process": m.mutexOf(m.clients())} {
				for call, ask := range map[string]ask{
					"LockContext": mutex.LockContext, "RLockContext": mutex.RLockContext,
					"TryLockContext": mutex.TryLockContext, "TryRLockContext": mutex.TryRLockContext,
				} {
					calls.Go(func() {
						_, err := ask(t.Context())
						// A try may say, too, that others hold the nodes that answer.
						if is := kinds(err); is != "ErrRedis" && (is != "ErrLock and ErrRedis" || !strings.HasPrefix(call, "Try")) {
							t.Errorf("%s, %s: it matches %s: %v", who, call, is, err)
							return
						}
						m.honest(err, gone)
						for _, i := range gone {
							if !strings.Contains(err.Error(), m.servers[i].Addr()) {
								t.Errorf("%s, %s: node %d is not named: %v", who, call, i+1, err)
							}
						}
					})
				}
			}
			eventually(t, "all are refused", done(&calls))
			refused := time.Since(start)
			if refused > leniently {
				t.Errorf("it took %v to refuse all", refused)
			}

			// Not even the leases of those who wait last as long.
			<-time.After(time.Until(struck.Add(tolerable * 3 / 2)))
			for _, w := range waiters {
				select {
				case o := <-w:
					t.Fatal("a waiter did not go on", o.err)
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
						if o.err != nil {
							t.Error(o.err)
							return
						}
						r.enter(o.lock, i, true, o.lock.Token())
						runtime.Gosched()
						r.leave(o.lock)
						if err := o.lock.UnlockContext(t.Context()); err != nil && kinds(err) != "ErrRedis" { // a node is slow
							t.Error(err)
						}
					case <-time.After(patience):
						t.Error("a waiter never gets it")
					}
				})
			}
			all.Wait()
			for _, wrong := range r.faults() {
				t.Error(wrong)
			}
			t.Logf("all holders knew after %v, refused within %v, all waiters had it %v after the nodes were back",
				told, refused, time.Since(back))
			for _, mutex := range mutexes {
				lock(t, insist(mutex.LockContext)).Unlock()
			}
			m.empty()
		})
	}
}

// Section 2: a lock is not worn down by the loss of one node after the other: it
// is put back on each that comes back.
func TestRollingRestartsDoNotDrainALock(t *testing.T) {
	t.Parallel()
	const ttl = tolerable * 3 / 2 // it is all that stands between a machine that is busy and the end of the lock
	for name, down := range map[string]time.Duration{"at once": 0, "over a renewal": ttl * 6 / 10} {
		t.Run(name, func(t *testing.T) {
			m := openMasters(t)
			l := lock(t, insist(m.mutex(redismutex.WithTTL(ttl)).LockContext))
			token := l.Token()
			m.eventually("it is on every node", func(rc *redis.Client) bool { return rc.Exists(t.Context(), key).Val() == 1 })

			// Others try all the time. What one of them has on a node for a moment is
			// told from the lock by its TTL; and if it were to stay there, it would
			// keep the lock away for as long.
			other := m.mutex(redismutex.WithTTL(long), redismutex.WithTimeoutFactor(0.01))
			var ended atomic.Bool
			var tries sync.WaitGroup
			tried, first := map[string]int{}, map[string]error{}
			tries.Go(func() {
				for i := 0; !ended.Load(); i++ {
					got, err := verbTry(other, i%2 == 0)(context.Background())
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
			for i, server := range m.servers {
				server.Kill()
				<-time.After(down)
				server.Restart(t)
				start := time.Now()
				for j, rc := range m.looks {
					// The others are to have been seen since, or it were several at once
					// that may have had no lock.
					eventually(t, fmt.Sprintf("it is back on node %d, and seen on node %d", i+1, j+1), func() bool {
						if l.Err() != nil {
							t.Fatalf("lost, as node %d was gone: %v", i+1, context.Cause(l))
						}
						since := time.Since(start)
						left := rc.PTTL(t.Context(), key).Val()
						if since > leniently {
							t.Fatalf("on node %d others stand in the way: %q %q, %v", j+1,
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
				// As nodes come and go, the others may be too slow.
				if is != "ErrLock" && is != "ErrRedis" && is != "ErrLock and ErrRedis" {
					t.Errorf("%d tries match %q, as %v", tried[is], is, err)
				}
			}
			if tried["ErrLock"] == 0 {
				t.Error("nobody tried")
			}
			if l.Err() != nil || l.Token() != token {
				t.Errorf("token %d was %d: %v", l.Token(), token, context.Cause(l))
			}
			unlock(t, l)
			next := lock(t, insist(m.mutex().LockContext))
			if next.Token() <= token {
				t.Errorf("token %d after %d", next.Token(), token)
			}
			unlock(t, next)
		})
	}
}

// The docs of NewRedlock: a node that does not answer is waited for no longer than
// the node time-out, and once it is known to be ill not at all.
func TestSlowNodeDoesNotHoldUpTheOthers(t *testing.T) {
	t.Parallel()
	const (
		timeout = time.Second             // 0.05 of the TTL, as by default, so much that a busy machine does not reach it by itself
		slack   = 3 * time.Second         // go-redis alone would take many times as much
		loop    = 2500 * time.Millisecond // the node is tried again several times meanwhile
	)
	for name, c := range map[string]struct{ up, held bool }{
		"both directions, before a lock": {up: true}, "replies only, before an unlock": {held: true},
	} {
		t.Run(name, func(t *testing.T) {
			m := openMasters(t)
			m.behindLinks()
			ask := verb(m.mutex(redismutex.WithTTL(long), redismutex.WithTimeoutFactor(0.05)), c.up)
			start, l := time.Now(), lock(t, ask)
			if !c.held {
				unlock(t, l)
			}
			warm := time.Since(start)
			var held []*redismutex.Lock
			for i := range 3 {
				other, err := ask(t.Context(), redismutex.WithKey(fmt.Sprint(i)))
				if err != nil {
					t.Fatal(err)
				}
				held = append(held, other)
			}
			m.eventually("nothing is under way", func(rc *redis.Client) bool { return (rc.Exists(t.Context(), key).Val() == 1) == c.held })
			m.links[1].Hole(c.up, true)
			start = time.Now()
			if !c.held {
				l = lock(t, ask)
			}
			locked := time.Since(start)
			unlock(t, l)
			first := time.Since(start)
			if first > timeout+slack {
				t.Errorf("the first took %v, and %v with its unlock", locked, first)
			}
			var all []time.Duration
			for _, l := range held {
				start := time.Now()
				unlock(t, l)
				all = append(all, time.Since(start))
			}
			for start := time.Now(); time.Since(start) < loop; {
				start := time.Now()
				unlock(t, lock(t, ask))
				all = append(all, time.Since(start))
			}

			// Nor does somebody else hear of it instead of the holder.
			l = lock(t, ask)
			other := m.mutexOf(m.clients(), redismutex.WithTTL(long), redismutex.WithTimeoutFactor(0.05))
			for i := range 3 { // before it knows of the node, and then
				if _, err := other.TryLockContext(t.Context()); kinds(err) != "ErrLock" {
					t.Errorf("try %d matches %q: %v", i+1, kinds(err), err)
				}
			}
			unlock(t, l)

			slices.Sort(all)
			worst := all[len(all)-2:] // one may meet a moment at which the machine stands still
			if worst[0] >= timeout {
				t.Errorf("later ones took %v", worst)
			}
			t.Logf("before %v; first %v, with its unlock %v; later %d, median %v, worst %v",
				warm, locked, first, len(all), all[len(all)/2], worst)
		})
	}
}

// What follows is what these tests share.

// Masters are servers that know nothing of each other.
type masters struct {
	*testing.T
	servers []*redistest.Server
	looks   []*redis.Client  // look on
	links   []*faultnet.Link // the ways of all processes to each; nil: these do not fail
	log     logged
}

func openMasters(t *testing.T) *masters {
	t.Helper()
	t.Parallel()
	m := &masters{T: t}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the log: %.4000s", m.log.String())
		}
	})
	for range 5 {
		s := redistest.Start(t)
		m.servers = append(m.servers, s)
		m.looks = append(m.looks, s.Client(t))
	}
	return m
}

// behindLinks has the processes that follow go by links. They cost much, so
// they are there only where they are to fail.
func (m *masters) behindLinks() {
	for range m.servers {
		m.links = append(m.links, faultnet.New(nil))
	}
}

// mutex is one in a process of its own, that has its connections.
func (m *masters) mutex(opt ...redismutex.MutexOption) *redismutex.RWMutex {
	m.Helper()
	clients := m.clients()
	for _, rc := range clients {
		if err := rc.(*redis.Client).Ping(m.Context()).Err(); err != nil {
			m.Fatal(err)
		}
	}
	return m.mutexOf(clients, opt...)
}

// clients are a process: another one with each call.
func (m *masters) clients() (clients []redis.Scripter) {
	m.Helper()
	for i, s := range m.servers {
		clients = append(clients, s.Client(m, func(o *redis.Options) {
			if m.links != nil {
				o.Dialer = m.links[i].Dial
			}
		}))
	}
	return clients
}

func (m *masters) mutexOf(clients []redis.Scripter, opt ...redismutex.MutexOption) *redismutex.RWMutex {
	opt = append([]redismutex.MutexOption{redismutex.WithTTL(tolerable), redismutex.WithTimeoutFactor(tolerant), m.log.option()}, opt...)
	return redismutex.NewRedlock(clients, key, opt...)
}

// insist asks again where it is told that no majority has answered: now and
// then that is so on a machine that is busy.
func insist(a ask) ask {
	return func(ctx context.Context, opt ...redismutex.LockOption) (*redismutex.Lock, error) {
		for start := time.Now(); ; {
			l, err := a(ctx, opt...)
			if !errors.Is(err, redismutex.ErrRedis) || time.Since(start) > patience {
				return l, err
			}
		}
	}
}

func verbTry(m *redismutex.RWMutex, write bool) ask {
	if write {
		return m.TryLockContext
	}
	return m.TryRLockContext
}

// eventually waits until something holds on every node.
func (m *masters) eventually(what string, holds func(*redis.Client) bool) {
	m.Helper()
	for _, rc := range m.looks {
		eventually(m.T, what, func() bool { return holds(rc) })
	}
}

// honest checks that an error says nothing of nodes that they cannot have said.
func (m *masters) honest(err error, gone []int) {
	m.Helper()
	for _, i := range gone {
		if strings.Contains(err.Error(), m.servers[i].Addr()+"): "+redismutex.ErrLock.Error()) {
			m.Errorf("of node %d nobody can know: %v", i+1, err)
		}
	}
}

// done says whether all have come home, without waiting for them.
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

// kinds are the errors that err matches: one, if it says what happened.
func kinds(err error) string {
	var is []string
	for name, kind := range map[string]error{
		"ErrLock": redismutex.ErrLock, "ErrLockLost": redismutex.ErrLockLost, "ErrUnlocked": redismutex.ErrUnlocked,
		"ErrRedis": redismutex.ErrRedis, "ErrNotLock": redismutex.ErrNotLock, "ErrInvalid": redismutex.ErrInvalid,
		"Canceled": context.Canceled, "DeadlineExceeded": context.DeadlineExceeded,
	} {
		if errors.Is(err, kind) {
			is = append(is, name)
		}
	}
	slices.Sort(is)
	return strings.Join(is, " and ")
}

// empty waits until the longest lease has run out, that of the tombstones, and
// checks that no node has anything left but the token.
func (m *masters) empty() {
	m.Helper()
	start := time.Now()
	m.eventually("nothing is left", func(rc *redis.Client) bool {
		keys, err := rc.Keys(m.Context(), "*").Result()
		if time.Since(start) > 2*tolerable+atOnce {
			m.Fatalf("%q is left, %v", keys, err)
		}
		return err == nil && !slices.ContainsFunc(keys, func(k string) bool { return k != "{"+key+"}:token" })
	})
}

// A fault is what becomes of a node, and how that ends.
type fault struct {
	strike, heal func(m *masters, node int)
	ofLinks      bool
}

var (
	// A node comes back empty. It has to stay away for a TTL.
	killed = fault{
		strike: func(m *masters, node int) { m.servers[node].Kill() },
		heal:   func(m *masters, node int) { m.servers[node].Restart(m) },
	}
	frozen = fault{
		strike: func(m *masters, node int) { m.servers[node].Freeze() },
		heal:   func(m *masters, node int) { m.servers[node].Thaw() },
	}
	blackHoled = fault{
		strike:  func(m *masters, node int) { m.links[node].Hole(true, true) },
		heal:    func(m *masters, node int) { m.links[node].Hole(false, false) },
		ofLinks: true,
	}
)

// A register knows who is inside a lock that may be lost at any time: a hold is
// over when its context is done.
type register struct {
	mu      sync.Mutex
	inside  map[context.Context]bool // whether it writes
	token   uint64                   // the last one
	wrote   []time.Time              // when writers came in
	entered [processes]int
	lost    int
	wrong   []string
}

func newRegister() *register { return &register{inside: map[context.Context]bool{}} }

// enter is called by who has been granted l, and has not begun to unlock it.
//
// Who is seen here not to be done holds at this moment, and all who are inside
// have held since before. So two of them overlap if the other is not done either;
// and writers come in with the tokens in the order of their grants.
func (r *register) enter(l context.Context, process int, write bool, token uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l.Err() != nil {
		r.lost++
		return
	}
	for other, writes := range r.inside {
		if (write || writes) && other.Err() == nil {
			r.wrong = append(r.wrong, fmt.Sprintf("overlap: process %d (writes: %v) with another (writes: %v)", process, write, writes))
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

// leave comes before the unlock begins.
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

// longestGap is the longest time without a new writer, from a moment on.
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

// A crowd is 16 processes that read and write in turn, until it ends.
type crowd struct {
	*register
	t         *testing.T
	all       sync.WaitGroup
	ended     atomic.Bool
	unlocks   atomic.Int64
	uncertain atomic.Int64 // unlocks that have not been confirmed
	refused   atomic.Int64 // told that no majority answers in time
}

func (m *masters) load() *crowd {
	m.Helper()
	c := &crowd{register: newRegister(), t: m.T}
	ctx, cancel := context.WithCancel(context.Background())
	m.Cleanup(func() { // if the test fails, nobody is to be left behind
		c.ended.Store(true)
		cancel()
		c.all.Wait()
	})
	for p := range processes {
		mutex := m.mutex()
		c.all.Go(func() {
			for i := p; !c.ended.Load(); i++ {
				write := i%4 == 0
				l, err := verb(mutex, write)(ctx)
				switch {
				case ctx.Err() != nil:
					return
				case errors.Is(err, redismutex.ErrRedis):
					c.refused.Add(1) // a third node was too slow, since the machine is busy
					continue
				case err != nil:
					m.Errorf("process %d: %v", p, err)
					return
				}
				c.enter(l, p, write, l.Token())
				for range 3 {
					runtime.Gosched() // a critical section that is empty overlaps with nothing
				}
				c.leave(l)
				// That a node did not answer is no fault of the lock.
				err = l.UnlockContext(ctx)
				c.unlocks.Add(1)
				if errors.Is(err, redismutex.ErrRedis) || errors.Is(err, redismutex.ErrLockLost) {
					c.uncertain.Add(1)
				} else if err != nil && ctx.Err() == nil {
					m.Errorf("process %d unlocks: %v", p, err)
				}
			}
		})
	}
	return c
}

// goesOn waits until every process has got the lock so often from now on, and
// somebody to write.
func (c *crowd) goesOn(often int) {
	c.t.Helper()
	c.mu.Lock()
	entered, wrote := c.entered, len(c.wrote)
	c.mu.Unlock()
	eventually(c.t, "every process gets the lock again", func() bool {
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

// end lets all go home.
func (c *crowd) end() {
	c.t.Helper()
	c.ended.Store(true)
	c.all.Wait()
	for _, wrong := range c.faults() {
		c.t.Error(wrong)
	}
	if c.refused.Load() > c.unlocks.Load() {
		c.t.Errorf("more were refused than let in: %s", c)
	}
}

func (c *crowd) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, e := range c.entered {
		n += e
	}
	return fmt.Sprintf("%d entered, %d of them to write; %d lost, %d refused, %d of %d unlocks not confirmed",
		n, len(c.wrote), c.lost, c.refused.Load(), c.uncertain.Load(), c.unlocks.Load())
}
