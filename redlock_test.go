package redismutex

// Locks over several nodes keep the promises whatever happens to a minority of them. Time is virtual.

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

// Nodes are servers in virtual time that know nothing of each other.
type nodes struct {
	*world // what it can do with locks; its own server is not used
	minis  []*redistest.MiniRedis
	links  []*faultnet.Link // the ways of all processes to each node
}

func onNodes(t *testing.T, n int, f func(*nodes)) {
	t.Helper()
	inBubble(t, func(w *world) {
		ns := &nodes{world: w}
		for range n {
			m, rc := redistest.Mini(w)
			loadScripts(w.World, rc)
			ns.minis = append(ns.minis, m)
			ns.links = append(ns.links, faultnet.New(m.Dial))
		}
		w.Cleanup(func() { // also if f fails: what goes on in the background ends
			for _, l := range ns.links {
				heal(l)
				l.Cut()
			}
			redistest.Elapse(time.Minute)
		})
		f(ns)
	})
}

func heal(l *faultnet.Link) {
	l.Hole(false, false)
	l.Refuse(false)
	l.SetDelay(0)
}

// process returns the clients of one more process.
func (ns *nodes) process(mutate ...func(node int, rc *redis.Client)) []redis.Scripter {
	var clients []redis.Scripter
	for i, m := range ns.minis {
		rc := redistest.MiniClient(ns, m, func(o *redis.Options) {
			o.Addr = fmt.Sprintf("10.0.0.%d:6379", i+1)
			o.Dialer = ns.links[i].Dial
			o.DialerRetries = 1
		})
		for _, f := range mutate {
			f(i, rc)
		}
		clients = append(clients, rc)
	}
	return clients
}

func (ns *nodes) mutex(opt ...MutexOption) *RWMutex { return NewRedlock(ns.process(), "x", opt...) }

// holders returns how many nodes hold the lock, and on how many somebody waits.
func (ns *nodes) holders() (held, waiting int) {
	for _, m := range ns.minis {
		if m.Exists("x") {
			held++
		}
		if m.Exists("{x}:lock-intent") {
			waiting++
		}
	}
	return held, waiting
}

// empty checks that no node knows anything of the lock but its token.
func (ns *nodes) empty() {
	ns.Helper()
	synctest.Wait()
	for i, m := range ns.minis {
		if keys := m.Keys(); !slices.Equal(keys, []string{}) && !slices.Equal(keys, []string{"{x}:token"}) {
			ns.Errorf("node %d: %q is left", i+1, keys)
		}
	}
}

// Promises 1, 7 and 8: a lock is one command for each node and verb.
func TestQuorumLockIsOneCommandPerNodeAndVerb(t *testing.T) {
	for n := 1; n <= 7; n++ {
		for _, write := range []bool{true, false} {
			onNodes(t, n, func(ns *nodes) {
				sent := make([]*counter, n)
				m := NewRedlock(ns.process(func(i int, rc *redis.Client) {
					sent[i] = &counter{}
					rc.AddHook(sent[i])
				}), "x")
				first := ns.lock(m, write) // the settings of the servers are looked at, once
				synctest.Wait()
				ns.unlock(first)
				for _, c := range sent {
					c.reset()
				}
				l := ns.lock(m, write)
				synctest.Wait()
				if held, waiting := ns.holders(); held != n || waiting != 0 {
					ns.Errorf("n=%d: held on %d nodes, waited for on %d", n, held, waiting)
				}
				if _, err := ns.mutex().TryLockContext(ns.Context()); !errors.Is(err, ErrLock) {
					ns.Error(err)
				}
				ns.unlock(l)
				ns.empty()
				for i, c := range sent {
					if commands, _ := c.reset(); commands != 2 {
						ns.Errorf("n=%d: %d commands to node %d", n, commands, i+1)
					}
				}
			})
		}
	}
}

// Promise 9: the nodes agree on the first token of a key too, whatever their clocks, so that it need not be raised.
func TestFirstLockOfAKeyRaisesNoToken(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		done := make(chan struct{})
		defer close(done)
		ns.clocks(done, time.Second, time.Minute, time.Hour)
		sent := []*counter{{}, {}, {}}
		m := NewRedlock(ns.process(func(i int, rc *redis.Client) { rc.AddHook(sent[i]) }), "y")
		first := ns.lock(m, true) // the settings of the servers are looked at, once
		synctest.Wait()
		ns.unlock(first)
		for _, c := range sent {
			c.reset()
		}
		l, err := m.LockContext(ns.Context(), WithKey("x"))
		if err != nil {
			ns.Fatal(err)
		}
		synctest.Wait()
		ns.unlock(l)
		for i, c := range sent {
			if commands, _ := c.reset(); commands != 2 {
				ns.Errorf("%d commands to node %d, want a lock and an unlock", commands, i+1)
			}
		}
	})
}

// Promises 5 and 6: waiters are granted the lock at once and in order, one writer or all readers in front.
func TestQuorumHandsOnInOrder(t *testing.T) {
	for _, n := range []int{2, 3, 4, 5} {
		onNodes(t, n, func(ns *nodes) {
			holder := ns.lock(ns.mutex(), true)
			w1, r1, r2, w2 := ns.later(ns.mutex(), true), ns.later(ns.mutex(), false), ns.later(ns.mutex(), false), ns.later(ns.mutex(), true)
			start := time.Now()
			ns.unlock(holder)
			l := <-w1
			ns.pending(r1)
			ns.unlock(l)
			a, b := <-r1, <-r2
			ns.pending(w2)
			ns.unlock(a)
			ns.pending(w2)
			ns.unlock(b)
			last := <-w2
			if last.Token() <= l.Token() || l.Token() <= holder.Token() {
				ns.Errorf("tokens %d %d %d", holder.Token(), l.Token(), last.Token())
			}
			ns.unlock(last)
			if took := time.Since(start); took != 0 {
				ns.Errorf("n=%d: it took %v, want no time", n, took)
			}
			ns.empty()
		})
	}
}

// Contenders that come at once, over links of different length, get a node each. The lowest rank then collects a
// majority, and so on until all have had the lock. The log says how long that takes.
func TestSplitVotesAreResolvedByRank(t *testing.T) {
	const rounds = 3
	for _, n := range []int{3, 5} {
		for _, contenders := range []int{2, 4, 16} {
			var first, each []time.Duration
			splits := 0
			for round := range rounds {
				onNodes(t, n, func(ns *nodes) {
					random := rand.New(rand.NewPCG(uint64(n*contenders), uint64(round)))
					var mutexes []*RWMutex
					for range contenders {
						mutexes = append(mutexes, NewRedlock(ns.distant(random, 2*time.Millisecond), "x"))
					}
					start := time.Now()
					got := make(chan *Lock)
					for _, m := range mutexes {
						go func() { got <- ns.lock(m, true) }()
					}
					redistest.Elapse(6 * time.Millisecond) // three ways there and back
					select {
					case l := <-got:
						go func() { got <- l }()
					default:
						splits++
					}
					for i := range contenders {
						l := <-got
						took := time.Since(start)
						if i == 0 {
							first = append(first, took)
						} else {
							each = append(each, took)
						}
						start = time.Now()
						ns.unlock(l)
					}
				})
			}
			slices.Sort(first)
			slices.Sort(each)
			t.Logf("%d nodes, %2d contenders: first after %v (median), %v (worst), split votes in %d of %d rounds; then %v (median), %v (worst)",
				n, contenders, first[len(first)/2].Round(time.Millisecond), first[len(first)-1].Round(time.Millisecond), splits, rounds,
				each[len(each)/2].Round(time.Millisecond), each[len(each)-1].Round(time.Millisecond))
			if worst := max(first[len(first)-1], each[len(each)-1]); worst > DefaultTTL/2 {
				t.Errorf("%d nodes, %d contenders: %v until one had the lock", n, contenders, worst)
			}
		}
	}
}

// distant returns the clients of a process with a random distance to each node, at most that far.
func (ns *nodes) distant(random *rand.Rand, most time.Duration) []redis.Scripter {
	var clients []redis.Scripter
	for i, m := range ns.minis {
		link := faultnet.New(ns.links[i].Dial)
		link.SetDelay(time.Duration(random.Int64N(int64(most))))
		clients = append(clients, redistest.MiniClient(ns, m, func(o *redis.Options) { o.Dialer = link.Dial }))
	}
	return clients
}

// Promise 2: a minority that is down or out of reach costs one node time-out and then nothing.
func TestMinorityThatFailsCostsOneTimeout(t *testing.T) {
	const timeout = DefaultTTL / 20
	for name, fail := range faults {
		for _, try := range []bool{true, false} {
			onNodes(t, 5, func(ns *nodes) {
				m := ns.mutex()
				fail(ns.links[1])
				fail(ns.links[4])
				synctest.Wait()
				for i := range 100 {
					start := time.Now()
					lock := m.LockContext
					if try {
						lock = m.TryLockContext
					}
					l, err := lock(ns.Context())
					if err != nil {
						ns.Fatal(err)
					}
					synctest.Wait() // a node that has not been asked before the unlock is not asked, and not known to be down
					ns.unlock(l)
					switch took := time.Since(start); {
					case i == 0 && took > timeout:
						ns.Errorf("%s: the first lock took %v", name, took)
					case i > 0 && took > 0:
						ns.Fatalf("%s: lock %d took %v", name, i, took)
					}
				}
				heal(ns.links[1])
				heal(ns.links[4])
				l := ns.lock(m, true)
				redistest.Elapse(DefaultTTL)
				if held, _ := ns.holders(); held != 5 {
					ns.Errorf("%s: held on %d nodes when all are back", name, held)
				}
				ns.unlock(l)
			})
		}
	}
}

// faults are the ways in which a node fails.
var faults = map[string]func(*faultnet.Link){
	"refused":     func(l *faultnet.Link) { l.Refuse(true); l.Cut() },
	"black-holed": func(l *faultnet.Link) { l.Hole(true, true) },
	"mute":        func(l *faultnet.Link) { l.Hole(false, true) },
}

// Promise 10: without a majority there is an error within the node time-out that names the nodes. What the other nodes
// granted is released.
func TestMajorityThatFailsIsAnErrorOfRedis(t *testing.T) {
	for name, fail := range faults {
		onNodes(t, 5, func(ns *nodes) {
			m := ns.mutex()
			for _, i := range []int{0, 2, 3} {
				fail(ns.links[i])
			}
			for range 3 {
				for _, lock := range []func(context.Context, ...LockOption) (*Lock, error){m.LockContext, m.TryRLockContext} {
					start := time.Now()
					_, err := lock(ns.Context())
					if took := time.Since(start); took > DefaultTTL/20 {
						ns.Errorf("%s: it took %v, want at most %v", name, took, DefaultTTL/20)
					}
					ns.matches(err, ErrRedis)
					for _, want := range []string{`"x"`, "2 of 5", "3 needed", "node 1 (10.0.0.1:6379)", "node 3 (", "node 4 ("} {
						if !strings.Contains(err.Error(), want) {
							ns.Errorf("%s: %q does not contain %q", name, err, want)
						}
					}
				}
			}
			if held, waiting := ns.holders(); held != 0 || waiting != 0 {
				ns.Errorf("%s: %d nodes are held, %d waited for, want none", name, held, waiting)
			}
			for _, l := range ns.links {
				heal(l)
			}
			redistest.Elapse(2 * time.Second) // the client's pools dial again
			ns.unlock(ns.lock(m, true))       // although they are still marked down
		})
	}
}

// Promise 10: a node that has not answered is marked down before anything else is asked of it. Else the error would wait for
// that call, too.
func TestSilentNodeIsNotAskedAgainAtOnce(t *testing.T) {
	onNodes(t, 5, func(ns *nodes) {
		asked := &counter{}
		m := NewRedlock(ns.process(func(i int, rc *redis.Client) {
			if i == 0 {
				rc.AddHook(asked)
			}
		}), "x")
		ns.links[0].Hole(true, true)
		l := ns.lock(m, true)
		redistest.Elapse(DefaultTTL / 20 * 3 / 2)
		if n, _ := asked.reset(); n != 2 {
			ns.Errorf("%d commands within a node time-out and a half, want an acquire and its release", n)
		}
		heal(ns.links[0])
		ns.unlock(l)
	})
}

// Promise 10: no error is of two kinds, except the one that errors.go names.
func TestErrorOfTheNodesIsOfOneKind(t *testing.T) {
	const ok, refuses, fails, bars = 0, 1, 2, 3
	for _, c := range []struct {
		nodes [5]int
		try   bool
		want  []error
	}{
		{[5]int{bars, fails, fails, fails, ok}, false, []error{ErrRedis}},
		{[5]int{bars, fails, fails, ok, ok}, true, []error{ErrRedis}},
		{[5]int{bars, bars, bars, fails, fails}, false, []error{ErrNotLock}},
		{[5]int{bars, bars, bars, refuses, fails}, true, []error{ErrNotLock}},
		{[5]int{bars, bars, refuses, refuses, ok}, true, []error{ErrLock}},
		{[5]int{bars, fails, refuses, refuses, refuses}, true, []error{ErrLock}},
		{[5]int{bars, bars, fails, fails, refuses}, true, []error{ErrLock, ErrRedis}},
	} {
		onNodes(t, 5, func(ns *nodes) {
			clients := ns.process()
			for i, what := range c.nodes {
				switch what {
				case refuses:
					ns.lock(NewMutex(clients[i], "x"), true)
				case fails:
					ns.links[i].Refuse(true)
					ns.links[i].Cut()
				case bars:
					_, _ = ns.minis[i].Push("x", "somebody's")
				}
			}
			m := ns.mutex()
			ask := m.LockContext
			if c.try {
				ask = m.TryLockContext
			}
			_, err := ask(ns.Context())
			for _, kind := range []error{ErrLock, ErrRedis, ErrNotLock, ErrInvalid, ErrUpgrade} {
				if errors.Is(err, kind) != slices.Contains(c.want, kind) {
					ns.Errorf("%v: %v", c.nodes, err)
				}
			}
		})
	}
}

// Promise 10: one error tells which nodes refused and which failed.
func TestErrorTellsRefusalsFromFailures(t *testing.T) {
	onNodes(t, 5, func(ns *nodes) {
		clients := ns.process()
		ns.lock(NewMutex(clients[0], "x"), true)
		ns.lock(NewMutex(clients[1], "x"), true)
		ns.links[2].Refuse(true)
		_, err := ns.mutex().TryLockContext(ns.Context())
		var failed *net.OpError
		ns.matches(err, ErrLock) // it is not the fault of one node
		if !errors.As(err, &failed) {
			ns.Error(err)
		}
		for _, want := range []string{"2 of 5", "node 1 (10.0.0.1:6379): redismutex: held by others", "node 3 (10.0.0.3:6379): failed: "} {
			if !strings.Contains(err.Error(), want) {
				ns.Errorf("%q does not contain %q", err, want)
			}
		}
		ns.links[3].Refuse(true)
		ns.links[4].Refuse(true)
		_, err = ns.mutex().TryLockContext(ns.Context())
		if !errors.Is(err, ErrLock) || !errors.Is(err, ErrRedis) || !errors.As(err, &failed) {
			ns.Error(err)
		}
	})
}

// A try that is refused leaves no trace on any node.
func TestQuorumTryLeavesNoTrace(t *testing.T) {
	for _, write := range []bool{true, false} {
		onNodes(t, 5, func(ns *nodes) {
			clients := ns.process()
			for i := range 3 {
				ns.lock(NewMutex(clients[i], "x"), true)
			}
			m := ns.mutex()
			try := m.TryRLockContext
			if write {
				try = m.TryLockContext
			}
			_, err := try(ns.Context())
			ns.matches(err, ErrLock)
			synctest.Wait() // the other nodes may answer later than those that refuse
			if held, waiting := ns.holders(); held != 3 || waiting != 0 {
				ns.Errorf("%d nodes are held, %d waited for", held, waiting)
			}
			for i, mini := range ns.minis[3:] {
				if keys := mini.Keys(); len(keys) > 1 || len(keys) == 1 && keys[0] != "{x}:token" {
					ns.Errorf("node %d: %q", i+4, keys)
				}
			}
		})
	}
}

// Nor does one whose reply was lost.
func TestQuorumTryWithALostReplyLeavesNoTrace(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		others := ns.process()
		for _, i := range []int{1, 2} {
			ns.lock(NewMutex(others[i], "x"), true)
		}
		var clients []redis.Scripter
		for i, m := range ns.minis {
			clients = append(clients, redistest.MiniClient(ns, m, func(o *redis.Options) {
				o.Dialer, o.MaxRetries = ns.links[i].Dial, -1
			}))
		}
		ns.links[0].LoseReply(script.Lock.Digest(), 1)
		_, err := NewRedlock(clients, "x").TryLockContext(ns.Context())
		if !errors.Is(err, ErrLock) {
			ns.Error(err)
		}
		redistest.Elapse(time.Second)
		if held, _ := ns.holders(); held != 2 {
			ns.Errorf("held on %d nodes", held)
		}
	})
}

// Promise 4: an acquire that arrives after it was given up is refused.
func TestAcquireThatWasGivenUpIsRefused(t *testing.T) {
	for _, write := range []bool{true, false} {
		onNodes(t, 3, func(ns *nodes) {
			verb := script.RLock
			if write {
				verb = script.Lock
			}
			release := ns.links[2].HoldRequest(verb.Digest())
			l := ns.lock(ns.mutex(), write)
			redistest.Elapse(DefaultTTL / 10)
			ns.unlock(l)
			release()
			synctest.Wait()
			if held, waiting := ns.holders(); held != 0 || waiting != 0 {
				ns.Errorf("%d nodes are held, %d waited for, want none", held, waiting)
			}
			redistest.Elapse(3 * DefaultTTL)
			ns.empty()
		})
	}
}

// An unlock before all nodes have answered releases those nodes too.
func TestUnlockReachesNodesThatAnswerLate(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		connected := func(_ int, rc *redis.Client) { rc.Ping(ns.Context()) }
		m := NewRedlock(ns.process(connected), "x") // a greeting would take it longer than the node time-out
		ns.links[1].SetDelay(40 * time.Millisecond)
		for range 3 {
			start := time.Now()
			l := ns.lock(m, true)
			if took := time.Since(start); took != 0 {
				ns.Errorf("it took %v, want no time", took)
			}
			ns.unlock(l)
			if held, waiting := ns.holders(); held != 0 || waiting != 0 {
				ns.Errorf("%d nodes are held, %d waited for, want none", held, waiting)
			}
		}
		redistest.Elapse(3 * DefaultTTL)
		ns.empty()
	})
}

// Promise 2: a lock lives with a majority of leases, and is lost with it.
func TestLockLivesAndDiesWithItsMajority(t *testing.T) {
	for name, fail := range faults {
		for _, write := range []bool{true, false} {
			onNodes(t, 5, func(ns *nodes) {
				l := ns.lock(ns.mutex(), write)
				redistest.Elapse(time.Second)
				fail(ns.links[0])
				redistest.Elapse(time.Minute)
				fail(ns.links[3])
				redistest.Elapse(time.Minute)
				if left := time.Until(l.Until()); l.Err() != nil || left < DefaultTTL/4 {
					ns.Fatalf("%s: %v, trusted for %v", name, context.Cause(l), left)
				}
				start := time.Now()
				fail(ns.links[2])
				until := l.Until()
				<-l.Done()
				if time.Now().After(until) || time.Since(start) < DefaultTTL/4 {
					ns.Errorf("%s: it ended after %v, %v after Until", name, time.Since(start), time.Since(until))
				}
				ns.matchesLost(context.Cause(l))
				for _, want := range []string{"2 of 5", "node 1 (", "node 3 (", "node 4 ("} {
					if !strings.Contains(context.Cause(l).Error(), want) {
						ns.Errorf("%s: %q does not contain %q", name, context.Cause(l), want)
					}
				}
				// The majority that is gone may have let others in; it holds nothing itself.
				for _, link := range ns.links {
					heal(link)
				}
				ns.unlock(ns.lock(ns.mutex(), true))
			})
		}
	}
}

func (ns *nodes) matchesLost(err error) {
	ns.Helper()
	ns.matches(err, ErrLockLost)
}

// Until returns when so many leases have ended that no majority is left.
func TestUntilIsTheEndOfTheMajority(t *testing.T) {
	onNodes(t, 5, func(ns *nodes) {
		l := ns.lock(ns.mutex(), true)
		redistest.Elapse(10 * time.Second)
		var ends []clock.Instant
		for _, i := range []int{4, 2, 0} { // each has been renewed for the last time at another time
			ns.links[i].Hole(true, true)
			ends = append(ends, clock.Now().Add(ns.minis[i].TTL("x")-l.acquisition().Config.Drift))
			redistest.Elapse(DefaultTTL / 8)
		}
		synctest.Wait()
		slices.Sort(ends)
		if until := l.acquisition().Until(); until != ends[2] {
			ns.Errorf("until %v, of %v", until, ends)
		}
	})
}

// A holder acquires a node again that has forgotten it, so that restarts one after the other lose no majority.
func TestRestartsOneByOneLoseNothing(t *testing.T) {
	for _, write := range []bool{true, false} {
		onNodes(t, 5, func(ns *nodes) {
			l := ns.lock(ns.mutex(), write)
			for range 3 {
				for _, m := range ns.minis {
					m.FlushAll()
					redistest.Elapse(DefaultTTL)
				}
			}
			if held, _ := ns.holders(); held != 5 || l.Err() != nil {
				ns.Fatalf("held on %d nodes, %v", held, context.Cause(l))
			}
			_, err := ns.mutex().TryLockContext(ns.Context())
			ns.matches(err, ErrLock)
			ns.unlock(l)
			redistest.Elapse(3 * DefaultTTL)
			ns.empty()
		})
	}
}

// own returns the clients of one more process, which has a link of its own to each node.
func (ns *nodes) own() (clients []redis.Scripter, links []*faultnet.Link) {
	for i, m := range ns.minis {
		link := faultnet.New(ns.links[i].Dial)
		links = append(links, link)
		clients = append(clients, redistest.MiniClient(ns, m, redistest.Through(link)))
	}
	return clients, links
}

// onTwoNodes runs a test in which a writer holds the lock, and two more processes have links of their own, to the nodes and from
// them.
func onTwoNodes(t *testing.T, test func(ns *nodes, holder *Lock, first, second []redis.Scripter, to, from []*faultnet.Link)) {
	onNodes(t, 2, func(ns *nodes) {
		holders, _ := ns.own()
		holder := ns.lock(NewRedlock(holders, "x"), true)
		synctest.Wait()
		first, to := ns.own()
		second, from := ns.own()
		test(ns, holder, first, second, to, from)
	})
}

// A split vote is resolved at once, also if the grant overtakes the reply to the acquire on the node that answers last.
func TestSplitVoteIsResolvedThoughAGrantOvertakesTheReply(t *testing.T) {
	onTwoNodes(t, func(ns *nodes, holder *Lock, first, second []redis.Scripter, to, from []*faultnet.Link) {
		request := to[0].HoldRequest("join")
		a := ns.later(NewRedlock(first, "x"), true)
		redistest.Elapse(time.Millisecond)
		reply := from[0].HoldReply("join")
		b := ns.later(NewRedlock(second, "x"), true)
		redistest.Elapse(time.Millisecond)
		go holder.UnlockContext(context.Background())
		synctest.Wait()
		request()
		synctest.Wait()
		reply()
		ns.resolved(a, b)
	})
}

// resolved unlocks two locks, each of which has to be granted at once.
func (ns *nodes) resolved(a, b <-chan *Lock) {
	ns.Helper()
	start := time.Now()
	for range 2 {
		var l *Lock
		select {
		case l = <-a:
		case l = <-b:
		}
		if took := time.Since(start); took > 100*time.Millisecond {
			ns.Errorf("it took %v, want at most 100ms", took)
		}
		ns.unlock(l)
	}
}

// The same where the grant overtakes the reply to a renewal.
func TestSplitVoteIsResolvedThoughAGrantOvertakesARenewal(t *testing.T) {
	onTwoNodes(t, func(ns *nodes, holder *Lock, first, second []redis.Scripter, to, from []*faultnet.Link) {
		b := ns.later(NewRedlock(second, "x"), false)
		redistest.Elapse(DefaultTTL/2 - 2*time.Millisecond)
		request := to[0].HoldRequest("join")
		a := ns.later(NewRedlock(first, "x", WithLockIntent()), true) // it goes first
		reply := from[0].HoldReply(script.Refresh.Digest())
		redistest.Elapse(4 * time.Millisecond)
		go holder.UnlockContext(context.Background())
		synctest.Wait()
		reply()
		synctest.Wait()
		request()
		ns.resolved(a, b)
	})
}

// A node that has lost the grant to a waiter, in a failover, is not asked again and again by it.
func TestNodeThatHasLostAGrantIsNotPolled(t *testing.T) {
	onNodes(t, 2, func(ns *nodes) {
		ctx := context.Background()
		keys, _ := script.NewKeys("x")
		clients, _ := ns.own()
		admins, sent := make([]*redis.Client, 2), &counter{}
		for i, m := range ns.minis {
			admins[i] = redistest.MiniClient(ns, m)
			admins[i].Set(ctx, "x", "other:1", time.Hour)
			clients[i].(*redis.Client).AddHook(sent)
		}
		next := ns.later(NewRedlock(clients, "x"), true)
		rc := admins[1]
		queue := func() (intents, leases []redis.Z) {
			return rc.ZRangeWithScores(ctx, keys.Intents(), 0, -1).Val(), rc.ZRangeWithScores(ctx, keys.Leases(), 0, -1).Val()
		}
		intents, leases := queue()
		release := script.Participant{Keys: keys, Durations: script.NewDurations(time.Minute), ID: "other:1", Write: true, Score: "5"}.Release(false)
		if r, err := node.Of(rc).Run(ctx, time.Minute, release); err != nil || r.Status != script.Released {
			t.Fatal(r, err)
		}
		redistest.Elapse(time.Millisecond)
		if id := rc.Get(ctx, "x").Val(); id == "other:1" || len(intents) != 1 || len(leases) != 1 {
			t.Fatalf("held by %q; %v and %v waited", id, intents, leases)
		}
		rc.Set(ctx, "x", "other:1", time.Hour)
		rc.ZAdd(ctx, keys.Intents(), intents...)
		rc.ZAdd(ctx, keys.Leases(), leases...)
		rc.PExpire(ctx, keys.Intents(), time.Hour)
		rc.PExpire(ctx, keys.Leases(), time.Hour)
		redistest.Elapse(20 * time.Millisecond)
		sent.reset()
		redistest.Elapse(10 * time.Second)
		if n, _ := sent.reset(); n == 0 || n > 20 {
			t.Errorf("%d commands in 10 s, want renewals at half the TTL", n)
		}
		rc.Del(ctx, "x")
		admins[0].Del(ctx, "x")
		redistest.Elapse(DefaultTTL)
		ns.unlock(ns.granted(next, "the waiter"))
	})
}

// A request is granted a node at once, although the reply to the release of the one in front, which had got no answer within the
// node time-out, was lost.
func TestLostReplyToTheReleaseOfAnUnansweredAcquireDelaysNobody(t *testing.T) {
	onNodes(t, 2, func(ns *nodes) {
		clients, links := ns.own()
		first, second := NewRedlock(clients, "x", WithTurn(0)), NewRedlock(clients, "x", WithTurn(0))
		answer := links[0].HoldReply(script.Lock.Digest())
		refused := make(chan error, 1)
		go func() {
			_, err := first.LockContext(ns.Context())
			refused <- err
		}()
		redistest.Elapse(time.Millisecond)
		next := ns.later(second, true) // it waits on both nodes
		links[0].LoseReply(script.Unlock.Digest(), 1)
		ns.matches(<-refused, ErrRedis)
		answer()
		l, took := ns.got(next)
		if took > 100*time.Millisecond {
			ns.Errorf("it took %v, want at most 100ms", took)
		}
		ns.unlock(l)
	})
}

// A node that grants the lock a moment late makes no renewals necessary.
func TestNodeThatIsFreedLateCostsNoRenewal(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		holder := ns.lock(ns.mutex(), true)
		synctest.Wait()
		clients, links := ns.own()
		scripts := make([]atomic.Int32, len(links))
		for i, link := range links {
			link.SetDelay(time.Duration(i+1) * 100 * time.Microsecond)
			ns.minis[i].Server().SetPreHook(func(_ *server.Peer, command string, _ ...string) bool {
				if command == "EVALSHA" || command == "EVAL" {
					scripts[i].Add(1)
				}
				return false
			})
		}
		ns.links[2].SetDelay(5 * time.Millisecond)
		go holder.UnlockContext(context.Background())
		synctest.Wait()
		ns.links[2].SetDelay(0)
		redistest.Elapse(time.Millisecond) // two nodes are free, the third one is not yet
		l := ns.lock(NewRedlock(clients, "x"), true)
		redistest.Elapse(50 * time.Millisecond)
		// The unlock and an acquire; on the third node the try was refused, and it is asked again.
		for i, want := range []int32{2, 2, 3} {
			if n := scripts[i].Load(); n != want {
				ns.Errorf("node %d has run %d scripts, want %d", i+1, n, want)
			}
		}
		ns.unlock(l)
	})
}

// A second node may fail right after the first one has been acquired again, also if another request had that one for a while.
func TestNodesThatFailSoonOneAfterTheOtherLoseNothing(t *testing.T) {
	for _, taken := range []bool{false, true} {
		onNodes(t, 3, func(ns *nodes) {
			l := ns.lock(ns.mutex(), true)
			synctest.Wait()
			ns.links[2].SetDelay(10 * time.Millisecond) // it is acquired again after the others have been renewed
			ns.minis[2].FlushAll()
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			var other chan error
			if taken {
				other = make(chan error, 1)
				go func() {
					_, err := ns.mutex().LockContext(ctx) // it has the third node, and waits for the others
					other <- err
				}()
			}
			redistest.Elapse(DefaultTTL * 3 / 4)
			if held, waits := ns.holders(); held != 3 || (waits == 3) != taken {
				ns.Fatalf("%d nodes are held, and on %d somebody waits", held, waits)
			}
			if taken {
				cancel()
				ns.matches(<-other, context.Canceled)
				redistest.Elapse(50 * time.Millisecond)
			}
			ns.minis[0].FlushAll()
			redistest.Elapse(DefaultTTL)
			if held, _ := ns.holders(); held != 3 || l.Err() != nil {
				ns.Fatalf("taken %v: held on %d nodes, %v", taken, held, context.Cause(l))
			}
			ns.unlock(l)
		})
	}
}

// A lock is lost when a majority forgets it, also if each node is acquired again before the next one's loss is noticed.
func TestLockIsLostWhenAMajorityForgetsIt(t *testing.T) {
	for _, apart := range []time.Duration{0, 20 * time.Millisecond} {
		onNodes(t, 5, func(ns *nodes) {
			l := ns.lock(ns.mutex(), true)
			redistest.Elapse(time.Millisecond) // on all nodes
			for i, m := range ns.minis[:3] {
				ns.links[i].SetDelay(time.Duration(i) * apart)
				m.FlushAll()
			}
			redistest.Elapse(DefaultTTL)
			ns.matchesLost(context.Cause(l))
			if apart > 0 && !strings.Contains(context.Cause(l).Error(), "nodes hold it, not all of them without a gap, 3 needed") {
				ns.Errorf("%v: want it told that nodes were acquired again", context.Cause(l))
			}
			ns.matches(l.UnlockContext(ns.Context()), ErrLockLost)
		})
	}
}

// A waiter outlives the loss of a majority.
func TestQuorumWaiterOutlivesErrors(t *testing.T) {
	for name, fail := range faults {
		onNodes(t, 3, func(ns *nodes) {
			holder := ns.lock(ns.mutex(), true)
			next := ns.later(ns.mutex(), true)
			redistest.Elapse(time.Second)
			fail(ns.links[0])
			fail(ns.links[1])
			redistest.Elapse(time.Minute)
			ns.pending(next)
			heal(ns.links[0])
			heal(ns.links[1])
			redistest.Elapse(time.Minute)
			ns.matchesLost(context.Cause(holder))
			select {
			case l := <-next:
				ns.unlock(l)
			default:
				ns.Fatalf("%s: it still waits, although nobody holds the lock", name)
			}
		})
	}
}

// A canceled call returns at once, whatever the nodes do, and leaves nothing.
func TestCanceledQuorumWaiterLeavesNothing(t *testing.T) {
	for _, silent := range []bool{true, false} {
		onNodes(t, 3, func(ns *nodes) {
			holder := ns.lock(ns.mutex(), true)
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			start := time.Now()
			if silent {
				for _, l := range ns.links {
					l.Hole(false, true)
				}
				ctx, cancel = context.WithTimeout(context.Background(), 100*time.Millisecond)
				defer cancel()
			}
			_, err := ns.mutex().LockContext(ctx)
			ns.matches(err, context.DeadlineExceeded)
			if _, at := ctx.Deadline(); !at || time.Since(start) > time.Second {
				ns.Errorf("it took %v", time.Since(start))
			}
			for _, l := range ns.links {
				heal(l)
			}
			ns.unlock(holder)
			redistest.Elapse(3 * DefaultTTL)
			ns.empty()
		})
	}
}

// An unlock that no majority confirms is an error, and goes on in the background.
func TestUnlockNeedsAMajority(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		m := ns.mutex()
		l := ns.lock(m, true)
		synctest.Wait()
		ns.links[0].Hole(false, true)
		ns.unlock(l) // two of three have confirmed it
		l = ns.lock(m, true)
		ns.links[1].Refuse(true)
		ns.links[1].Cut()
		err := l.UnlockContext(ns.Context())
		ns.matches(err, ErrRedis)
		if !strings.Contains(err.Error(), "node 2 (10.0.0.2:6379)") {
			ns.Error(err)
		}
		heal(ns.links[0])
		heal(ns.links[1])
		redistest.Elapse(3 * DefaultTTL)
		ns.empty()
	})
}

// Promise 9: tokens rise although each majority shares only one node with the one before. Tokens are raised on nodes
// that hold the lock: elsewhere it would not help.
func TestTokensRiseAlthoughMajoritiesDiffer(t *testing.T) {
	onNodes(t, 5, func(ns *nodes) {
		const base int64 = 3_000_000_000_000_000
		for i, counter := range []int{4, 2, 2, 1, 1} {
			ns.minis[i].Set("{x}:token", fmt.Sprint(base+int64(counter)))
			ns.minis[i].SetTTL("{x}:token", time.Hour)
		}
		last := uint64(0)
		for _, up := range [][]int{{0, 1, 2}, {1, 3, 4}, {0, 2, 3}, {1, 2, 4}, {0, 3, 4}, {0, 1, 2, 3, 4}} {
			for i, l := range ns.links {
				heal(l)
				if !slices.Contains(up, i) {
					l.Refuse(true)
					l.Cut()
				}
			}
			l := ns.lock(ns.mutex(), true)
			if l.Token() <= last {
				ns.Fatalf("nodes %v: token %d after %d", up, l.Token(), last)
			}
			last = l.Token()
			ns.unlock(l)
		}
	})
}

// Promise 9: the same for a lock that is held while its nodes come and go.
func TestNodeThatIsAcquiredAgainHasItsTokenRaised(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		const high int64 = 3_000_000_000_000_000
		for _, m := range ns.minis {
			m.Set("{x}:token", fmt.Sprint(high))
			m.SetTTL("{x}:token", time.Hour)
		}
		l := ns.lock(ns.mutex(), true)
		ns.minis[0].FlushAll()
		redistest.Elapse(DefaultTTL)
		ns.links[1].Refuse(true)
		ns.links[1].Cut()
		redistest.Elapse(DefaultTTL)
		ns.unlock(l)
		ns.minis[1].FlushAll()
		heal(ns.links[1])
		ns.links[2].Refuse(true)
		ns.links[2].Cut()
		next := ns.lock(ns.mutex(), true)
		if next.Token() <= l.Token() {
			ns.Errorf("token %d after %d, want a higher one", next.Token(), l.Token())
		}
		ns.unlock(next)
	})
}

// A node that refuses a raise, since it does not know the holder, no longer counts, and is acquired again.
func TestNodeThatRefusesToRaiseIsAcquiredAgain(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		const base int64 = 3_000_000_000_000_000
		for i, m := range ns.minis {
			m.Set("{x}:token", fmt.Sprint(base+int64(i)))
			m.SetTTL("{x}:token", time.Hour)
		}
		release := ns.links[0].HoldRequest(script.Refresh.Digest())
		release1 := ns.links[1].HoldRequest(script.Refresh.Digest())
		next := ns.later(ns.mutex(), true)
		ns.pending(next)
		ns.minis[0].Del("x")
		release()
		l := <-next
		if l.Token() < uint64(base)+2 {
			ns.Errorf("token %d", l.Token())
		}
		release1()
		ns.unlock(l)
	})
}

// Promise 10: a node that hangs while its token is being raised is waited for no longer than two node time-outs, whichever
// node answered last.
func TestNodeThatHangsInARaiseCostsTwoTimeouts(t *testing.T) {
	for last := range 2 {
		onNodes(t, 3, func(ns *nodes) {
			const base int64 = 3_000_000_000_000_000
			for i, m := range ns.minis {
				m.Set("{x}:token", fmt.Sprint(base-int64(i)))
				m.SetTTL("{x}:token", time.Hour)
			}
			ns.links[2].Refuse(true)
			ns.links[last].SetDelay(time.Millisecond)
			for range 20 { // it is asked again
				defer ns.links[1].HoldRequest(script.Refresh.Digest())()
			}
			m := ns.mutex()
			start := time.Now()
			_, err := m.TryLockContext(ns.Context())
			ns.matches(err, ErrRedis)
			if took := time.Since(start); took > 2*m.config.Timeout+10*time.Millisecond {
				ns.Errorf("node %d answered last: the error came after %v, want two node time-outs of %v", last+1, took, m.config.Timeout)
			}
		})
	}
}

// reaching returns the clients of one more process, which reaches these nodes only.
func (ns *nodes) reaching(these ...int) []redis.Scripter {
	var clients []redis.Scripter
	for i, m := range ns.minis {
		link := faultnet.New(ns.links[i].Dial)
		link.Refuse(!slices.Contains(these, i))
		clients = append(clients, redistest.MiniClient(ns, m, func(o *redis.Options) { o.Dialer, o.DialerRetries = link.Dial, 1 }))
	}
	return clients
}

// restartsEmpty has a node lose its data and stay away for as long as the longest TTL, as NewRedlock asks for.
func (ns *nodes) restartsEmpty(node int) {
	ns.links[node].Refuse(true)
	synctest.Wait() // a connection that is being made would outlive the cut
	ns.links[node].Cut()
	ns.minis[node].FlushAll()
	redistest.Elapse(DefaultTTL)
	heal(ns.links[node])
}

// Promise 9: a node that restarts empty makes no token fall, whatever the clocks of the nodes. The second majority shares
// only that node with the first, and the first has a node whose clock is ahead.
func TestTokensRiseOverAnEmptyRestartWhateverTheClocksOfTheNodes(t *testing.T) {
	onNodes(t, 5, func(ns *nodes) {
		done := make(chan struct{})
		defer close(done)
		ns.clocks(done, 0, 30*time.Minute, -time.Hour, time.Second, -time.Second)
		first := ns.lock(NewRedlock(ns.reaching(0, 1, 2), "x"), true)
		ns.unlock(first)
		ns.restartsEmpty(2)
		second := ns.lock(NewRedlock(ns.reaching(2, 3, 4), "x"), true)
		if second.Token() <= first.Token() {
			ns.Errorf("token %d after %d, want a higher one", second.Token(), first.Token())
		}
		ns.unlock(second)
	})
}

// Promise 9: the same for a waiter that has waited for longer than the lock before it, so that its rank is the lower one.
func TestTokenOfAnOldWaiterRisesOverAnEmptyRestart(t *testing.T) {
	onNodes(t, 5, func(ns *nodes) {
		holder := ns.lock(ns.mutex(), true)
		old := ns.later(NewRedlock(ns.reaching(2, 3, 4), "x"), true)
		redistest.Elapse(3 * DefaultTTL)
		next := ns.later(NewRedlock(ns.reaching(0, 1, 2), "x", WithLockIntent()), true)
		redistest.Elapse(DefaultTTL)
		ns.unlock(holder)
		first := <-next
		ns.pending(old)
		ns.restartsEmpty(2)
		second := <-old
		if second.Token() <= first.Token() {
			ns.Errorf("token %d after %d, want a higher one", second.Token(), first.Token())
		}
		ns.unlock(second)
		redistest.Elapse(3 * DefaultTTL)
	})
}

// Promises 1 and 9 with the clocks of the nodes an hour apart.
func TestClocksOfTheNodesMayDiffer(t *testing.T) {
	onNodes(t, 5, func(ns *nodes) {
		done := make(chan struct{})
		defer close(done)
		ns.clocks(done, -time.Hour, -time.Second, 0, 30*time.Minute, time.Hour)
		witness := &witness{nodes: ns}
		random := rand.New(rand.NewPCG(1, 2))
		var all sync.WaitGroup
		for range 6 {
			m := NewRedlock(ns.distant(random, time.Millisecond), "x", WithTTL(2*time.Second))
			all.Go(func() {
				for i := range 20 {
					witness.holds(ns.lock(m, i%3 != 0))
				}
			})
		}
		all.Wait()
		l := ns.lock(ns.mutex(), true)
		redistest.Elapse(time.Minute)
		if l.Err() != nil {
			ns.Error(context.Cause(l))
		}
		witness.holds(l)
		for _, overlap := range witness.Overlaps {
			ns.Error(overlap)
		}
	})
}

// clocks runs each server's clock, that much ahead.
func (ns *nodes) clocks(done <-chan struct{}, ahead ...time.Duration) {
	set := func() {
		for i, m := range ns.minis {
			m.SetTime(time.Now().Add(ahead[i]))
		}
	}
	set()
	go func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				set()
			case <-done:
				return
			}
		}
	}()
}

// A witness sees locks that overlap, and tokens that do not rise.
type witness struct {
	*nodes
	redistest.Witness
	mu    sync.Mutex
	token uint64
}

// holds holds l for a while and unlocks it.
func (w *witness) holds(l *Lock) {
	w.Helper()
	write := l.Token() != 0
	if write {
		w.mu.Lock()
		if l.Token() <= w.token {
			w.Errorf("token %d after %d, want a higher one", l.Token(), w.token)
		}
		w.token = l.Token()
		w.mu.Unlock()
	}
	w.Visit(write, func() { redistest.Elapse(3 * time.Millisecond) })
	w.unlock(l)
}

// Promise 6: a process whose clock is slow is not served first for ever. It learns the ranks of others from replies.
func TestSlowClockIsNotServedFirstForever(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		process := func(name string, ahead time.Duration) *RWMutex {
			m := ns.mutex(WithTurn(0))
			m.config.Ranks = &acquisition.LamportClock{Now: func() time.Time { return time.Now().Add(ahead) }}
			return m
		}
		var mu sync.Mutex
		var order []string
		var all sync.WaitGroup
		holder := ns.lock(ns.mutex(), true)
		for name, ahead := range map[string]time.Duration{"slow": -time.Hour, "right": 0, "fast": time.Hour} {
			m := process(name, ahead)
			for range 4 { // so that one of them waits when another comes
				all.Go(func() {
					for range 10 {
						l := ns.lock(m, true)
						mu.Lock()
						order = append(order, name)
						mu.Unlock()
						redistest.Elapse(time.Millisecond)
						ns.unlock(l)
					}
				})
			}
		}
		synctest.Wait()
		ns.unlock(holder)
		all.Wait()
		half := order[:len(order)/2]
		for _, name := range []string{"slow", "right", "fast"} {
			n := 0
			for _, other := range half {
				if other == name {
					n++
				}
			}
			ns.Logf("%s: %d of the first %d", name, n, len(half))
			if n < len(half)/5 {
				ns.Errorf("%s: %d of the first %d", name, n, len(half))
			}
		}
	})
}

// No two requests of a process have the same rank, and none has a rank below one that it has seen.
func TestRanksOfAProcessRise(t *testing.T) {
	r := &acquisition.LamportClock{Now: func() time.Time { return time.UnixMicro(1000) }}
	if a, b := r.Next(), r.Next(); a != 1000 || b != 1001 {
		t.Error(a, b)
	}
	r.Saw(5000)
	r.Saw(4000)
	if a := r.Next(); a != 5001 {
		t.Error(a)
	}
}

// Promise 10: invalid arguments are refused by every call.
func TestNewRedlockRefusesInvalidArguments(t *testing.T) {
	a, b := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}), redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer a.Close()
	defer b.Close()
	var null *redis.Client
	two := []redis.Scripter{a, b}
	for name, m := range map[string]*RWMutex{
		"no nodes":            NewRedlock(nil, "x"),
		"node 2":              NewRedlock([]redis.Scripter{a, nil}, "x"),
		"node 1":              NewRedlock([]redis.Scripter{null, a}, "x"),
		"twice":               NewRedlock([]redis.Scripter{a, b, a}, "x"),
		"empty name":          NewRedlock(two, ""),
		"nil option":          NewRedlock(two, "x", nil),
		"drift factor -1":     NewRedlock(two, "x", WithDriftFactor(-1)),
		"drift factor NaN":    NewRedlock(two, "x", WithDriftFactor(math.NaN())),
		"drift factor 0.3":    NewMutex(a, "x", WithDriftFactor(0.3)),
		"timeout factor 0":    NewRedlock(two, "x", WithTimeoutFactor(0)),
		"timeout factor +Inf": NewRedlock(two, "x", WithTimeoutFactor(math.Inf(1))),
		"timeout factor NaN":  NewRedlock(two, "x", WithTimeoutFactor(math.NaN())),
		"several nodes":       NewMutex(a, "x", WithTimeoutFactor(0.1)),
	} {
		_, err := m.TryLockContext(t.Context())
		if problem := matches(err, ErrInvalid); problem != "" || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v %s", name, err, problem)
		}
	}
}

// The factors are fractions of the TTL. The node time-out is never too short for a distant node.
func TestFactorsAndTheirDefaults(t *testing.T) {
	a, b := redis.NewClient(&redis.Options{}), redis.NewClient(&redis.Options{})
	defer a.Close()
	defer b.Close()
	for _, c := range []struct {
		opt                []MutexOption
		drift, nodeTimeout time.Duration
	}{
		{nil, 42 * time.Millisecond, 200 * time.Millisecond},
		{[]MutexOption{WithTTL(time.Second)}, 12 * time.Millisecond, 50 * time.Millisecond},
		{[]MutexOption{WithTTL(100 * time.Millisecond)}, 3 * time.Millisecond, 25 * time.Millisecond},
		{[]MutexOption{WithTTL(time.Hour)}, 36*time.Second + 2*time.Millisecond, time.Second},
		{[]MutexOption{WithTimeoutFactor(0.25), WithTTL(time.Minute)}, 602 * time.Millisecond, 15 * time.Second},
		{[]MutexOption{WithDriftFactor(0), WithTimeoutFactor(0.001)}, 2 * time.Millisecond, 50 * time.Millisecond},
		{[]MutexOption{WithDriftFactor(0.25)}, 1002 * time.Millisecond, 200 * time.Millisecond},
	} {
		m := NewRedlock([]redis.Scripter{a, b}, "x", c.opt...)
		if m.err != nil || m.config.Drift != c.drift || m.config.Timeout != c.nodeTimeout {
			t.Errorf("%v: drift %v, want %v; time-out %v, want %v", m.err, m.config.Drift, c.drift, m.config.Timeout, c.nodeTimeout)
		}
	}
}
