package redismutex

// A waiter that is granted the lock learns of it soon, although messages overtake replies, and one reply is lost. Time is
// virtual.

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
)

var (
	episodes    = flag.Int("episodes", 35, "how many `episodes` TestGrantedWaiterIsToldSoon plays on one, two and three nodes")
	episodeSeed = flag.Uint64("episodes.seed", 1, "the `seed` of the first one")
)

// An episode is a random sequence of calls of three processes for one lock.
type episode struct {
	*nodes
	random  *rand.Rand
	mutexes []*RWMutex
	links   []*faultnet.Link // of each process to each node
	results chan answer
	asked   int
	waiting map[int]context.CancelFunc
	held    map[int]*Lock
	log     []string
}

// An answer is what came of a call; the lock is nil if it was refused.
type answer struct {
	call int
	lock *Lock
}

// No waiter waits for half a TTL when everybody else has unlocked. At most one reply in each episode is lost; what is held
// back is delivered within 40 ms.
func TestGrantedWaiterIsToldSoon(t *testing.T) {
	for _, n := range []int{1, 2, 3} {
		for i := range uint64(*episodes) {
			seed := *episodeSeed + i
			onNodes(t, n, func(ns *nodes) {
				e := newEpisode(ns, rand.New(rand.NewPCG(seed, uint64(n))))
				e.play()
				if longest := e.finish(); longest > 600*time.Millisecond {
					t.Errorf("a waiter waits %v while nobody holds the lock; again: go test -run '^%s$' -episodes=1 -episodes.seed=%d\n%s",
						longest, t.Name(), seed, strings.Join(e.log, "\n"))
				}
			})
		}
	}
}

func newEpisode(ns *nodes, random *rand.Rand) *episode {
	e := &episode{nodes: ns, random: random, results: make(chan answer), waiting: map[int]context.CancelFunc{}, held: map[int]*Lock{}}
	for range 3 {
		clients, links := ns.own()
		for _, link := range links {
			link.SetDelay(time.Duration(random.IntN(4)) * 100 * time.Microsecond)
		}
		e.links = append(e.links, links...)
		for _, opt := range []MutexOption{WithTurn(DefaultTurn), WithTurn(0), WithTTL(2 * DefaultTTL), WithLockIntent(), WithReaderPriority()} {
			e.mutexes = append(e.mutexes, NewRedlock(clients, "x", opt))
		}
	}
	return e
}

func (e *episode) say(format string, args ...any) {
	e.log = append(e.log, time.Now().Format("05.000000 ")+fmt.Sprintf(format, args...))
}

// play makes calls, and has links hold back or lose what these send.
func (e *episode) play() {
	var deliver []func()
	var digests []string
	for _, s := range scripts {
		digests = append(digests, s.Digest())
	}
	requests := append(slices.Clone(digests), "join", "subscribe")
	lost := false
	for range 10 + e.random.IntN(25) {
		link := e.links[e.random.IntN(len(e.links))]
		switch x := e.random.IntN(20); {
		case x < 7 && len(e.waiting) < 8:
			e.lock(e.random.IntN(len(e.mutexes)), e.random.IntN(3) > 0)
		case x < 12:
			e.unlock()
		case x == 12 && len(e.held) > 0:
			_, l := e.first()
			e.say("downgrade, if it is a writer")
			go l.Downgrade(context.Background())
		case x == 13 && len(e.waiting) > 0:
			call := slices.Min(slices.Collect(maps.Keys(e.waiting)))
			e.say("cancel %d", call)
			e.waiting[call]()
		case x < 17:
			what, d := requests[e.random.IntN(len(requests))], time.Duration(e.random.IntN(40))*time.Millisecond
			hold := []func(string) func(){link.HoldReply, link.HoldRequest, func(string) func() { return link.HoldMessage("message") }}
			how := e.random.IntN(len(hold))
			e.say("hold %.9s for %v (%d)", what, d, how)
			release := hold[how](what)
			time.AfterFunc(d, release)
			deliver = append(deliver, release)
		case x == 17 && !lost:
			what := digests[e.random.IntN(len(digests))]
			e.say("lose the reply to %.9s", what)
			link.LoseReply(what, 1)
			lost = true
		case x == 18 && e.random.IntN(4) == 0:
			redistest.Elapse(time.Duration(e.random.IntN(2500)) * time.Millisecond)
		default:
			redistest.Elapse(time.Duration(e.random.IntN(3000)) * time.Microsecond)
		}
		if e.random.IntN(2) == 0 {
			e.collect()
		}
	}
	e.collect()
	for _, f := range deliver {
		f()
	}
}

func (e *episode) lock(mutex int, write bool) {
	e.asked++
	call := e.asked
	ctx, cancel := context.WithCancel(context.Background())
	e.waiting[call] = cancel
	e.say("call %d of mutex %d, to write: %v", call, mutex, write)
	go func() {
		lock := e.mutexes[mutex].RLockContext
		if write {
			lock = e.mutexes[mutex].LockContext
		}
		l, _ := lock(ctx) // it fails if it is canceled, or with the reply that is lost
		e.results <- answer{call, l}
	}()
}

// first returns the oldest call that has a lock.
func (e *episode) first() (call int, l *Lock) {
	call = slices.Min(slices.Collect(maps.Keys(e.held)))
	return call, e.held[call]
}

func (e *episode) unlock() {
	if len(e.held) == 0 {
		return
	}
	call, l := e.first()
	delete(e.held, call)
	e.say("unlock %d", call)
	go l.UnlockContext(context.Background())
}

func (e *episode) take(a answer) {
	e.say("call %d returns, with a lock: %v", a.call, a.lock != nil)
	delete(e.waiting, a.call)
	if a.lock != nil {
		e.held[a.call] = a.lock
	}
}

// collect takes the answers so far.
func (e *episode) collect() {
	for {
		synctest.Wait()
		select {
		case a := <-e.results:
			e.take(a)
		default:
			return
		}
	}
}

// finish unlocks everything that is granted, at once, and returns how long it took at most until somebody was granted the
// lock.
func (e *episode) finish() (longest time.Duration) {
	e.say("from now on nothing is held back")
	for len(e.waiting)+len(e.held) > 0 {
		for len(e.held) > 0 {
			e.unlock()
		}
		if len(e.waiting) > 0 {
			start := time.Now()
			e.take(<-e.results)
			longest = max(longest, time.Since(start))
		}
	}
	redistest.Elapse(time.Minute)
	return longest
}
