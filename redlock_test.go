package redismutex

// This file answers: does a lock over several nodes keep the promises, whatever
// becomes of a minority of them? Time is virtual.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
)

// Nodes are servers in virtual time that know nothing of each other.
type nodes struct {
	*world // what it can do with locks; its own server is not used
	minis  []*miniredis.Miniredis
	links  []*faultnet.Link // the ways of all processes to each node
}

func onNodes(t *testing.T, n int, f func(*nodes)) {
	t.Helper()
	inBubble(t, func(w *world) {
		ns := &nodes{world: w}
		for range n {
			m, rc := redistest.Mini(w)
			for _, s := range []*script{lockScript, rlockScript, refreshScript, unlockScript} {
				if err := rc.ScriptLoad(w.Context(), s.source.(string)).Err(); err != nil {
					w.Fatal(err)
				}
			}
			ns.minis = append(ns.minis, m)
			ns.links = append(ns.links, faultnet.New(redistest.MiniDial(m)))
		}
		f(ns)
		for _, l := range ns.links {
			heal(l)
			l.Cut()
		}
	})
}

func heal(l *faultnet.Link) {
	l.Hole(false, false)
	l.Refuse(false)
	l.SetDelay(0)
}

// process makes the clients of a process: another one with each call.
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

// holders is how many nodes hold the lock, and how many have somebody waiting.
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

// empty checks that no node knows anything of the lock but its tokens.
func (ns *nodes) empty() {
	ns.Helper()
	synctest.Wait()
	for i, m := range ns.minis {
		if keys := m.Keys(); !slices.Equal(keys, []string{}) && !slices.Equal(keys, []string{"{x}:token"}) {
			ns.Errorf("node %d: %q is left", i+1, keys)
		}
	}
}

// Promises 1, 7 and 8, and the price: a command for each node and verb.
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
					t.Errorf("n=%d: held on %d nodes, waited for on %d", n, held, waiting)
				}
				if _, err := ns.mutex().TryLockContext(ns.Context()); !errors.Is(err, ErrLock) {
					t.Error(err)
				}
				ns.unlock(l)
				ns.empty()
				for i, c := range sent {
					if commands, _ := c.reset(); commands != 2 {
						t.Errorf("n=%d: %d commands to node %d", n, commands, i+1)
					}
				}
			})
		}
	}
}

// Promise 5 and 6: waiters get it at once, in order, writer by writer and all
// readers together.
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
				t.Errorf("tokens %d %d %d", holder.Token(), l.Token(), last.Token())
			}
			ns.unlock(last)
			if took := time.Since(start); took != 0 {
				t.Errorf("n=%d: it took %v", n, took)
			}
			ns.empty()
		})
	}
}

var _ = rand.IntN
var _ = strings.Contains
var _ sync.Mutex
var _ = context.Background
