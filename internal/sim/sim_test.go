package sim

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/redistest"
)

var (
	seed  = flag.Uint64("sim.seed", 1, "seed of the eras")
	hours = flag.Float64("sim.hours", 1, "how many hours to simulate")
	only  = flag.Int("sim.era", -1, "simulate only the era of this number")
)

// eraLength is the length of an era. All calls and all leases end within it.
const eraLength = 6 * time.Minute

func TestMain(m *testing.M) {
	debug.SetGCPercent(800)              // a Lua interpreter is made for each call of a script
	redismutex.SetLog(redismutex.NopLog) // faults are injected by the thousand
	redis.SetLogger(silence{})
	os.Exit(m.Run())
}

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

// TestSimulation runs two eras at a time, one on one node and one on five. An era on five nodes takes as long as five
// others, so there are fewer of them.
func TestSimulation(t *testing.T) {
	redistest.MiniLocks(t)
	eras := int(*hours * float64(time.Hour) / float64(eraLength))
	first := 0
	if *only >= 0 {
		first, eras = *only, 1
	}
	sum := &summary{effects: map[string]*effect{}}
	start := time.Now()
	t.Run("eras", func(t *testing.T) {
		for _, nodes := range []int{1, 5} {
			t.Run(fmt.Sprintf("on %d", nodes), func(t *testing.T) {
				t.Parallel()
				for n := first; n < first+eras && !t.Failed(); n++ {
					if nodesOf(n) == nodes {
						simulate(t, n, nodes, sum)
					}
				}
			})
		}
	})
	t.Logf("seed %d: %v in %v", *seed, sum, time.Since(start).Round(time.Millisecond))
	// Half an hour is too short for every fault to have an effect.
	if !t.Failed() && *only < 0 && *hours >= 3 {
		for _, name := range sum.idle() {
			t.Errorf("want every fault to take effect, %q never did: the simulation is defective", name)
		}
	}
}

func nodesOf(era int) int {
	if era%5 == 4 {
		return 5
	}
	return 1
}

func simulate(t *testing.T, number, nodes int, sum *summary) {
	replay := fmt.Sprintf("replay: go test ./internal/sim -run TestSimulation -sim.seed=%d -sim.era=%d -v -count=5", *seed, number)
	defer func() {
		if p := recover(); p != nil { // a goroutine that does not end makes synctest panic
			fmt.Fprintln(os.Stderr, replay)
			panic(p)
		}
	}()
	// Time stands still in the bubble in a deadlock, or if a waiter sends requests without end. An era takes seconds of a
	// core, which on a busy machine may be a minute.
	const most = 5 * time.Minute
	defer time.AfterFunc(most, func() {
		debug.SetTraceback("all")
		panic(fmt.Sprintf("want era %d to end within seconds, it has not after %v; %s", number, most, replay))
	}).Stop()
	e := newEra(number, nodes, sum)
	began := time.Now()
	synctest.Test(t, e.run)
	for _, wrong := range e.verdict() {
		t.Error(wrong)
	}
	if t.Failed() {
		t.Logf("era %d, seed %d, %v on %d nodes\n%s", number, *seed, e.mood, nodes, replay)
	}
	if testing.Verbose() && *only >= 0 {
		t.Logf("era %d: %v on %d, %d operations, %v", number, e.mood, nodes, len(e.attempts), time.Since(began).Round(time.Millisecond))
	}
}

// A summary sums up all eras.
type summary struct {
	mu                                  sync.Mutex
	time                                time.Duration
	eras, ops, granted, lost, undecided int
	effects                             map[string]*effect
}

// An effect is how often a fault was injected, and how often it had an effect.
type effect struct{ injected, took int }

func (s *summary) injected(name string) {
	s.count(name, effect{injected: 1})
}

func (s *summary) took(name string, took bool) {
	if took {
		s.count(name, effect{took: 1})
	}
}

func (s *summary) count(name string, more effect) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.effects[name]
	if e == nil {
		e = &effect{}
		s.effects[name] = e
	}
	e.injected += more.injected
	e.took += more.took
}

// idle returns the faults that never had an effect.
func (s *summary) idle() (names []string) {
	for _, name := range everyFault() {
		if e := s.effects[name]; e == nil || e.took == 0 {
			names = append(names, name)
		}
	}
	return names
}

func (s *summary) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%.1f hours, %d eras, %d operations, %d locks granted, %d of them lost, %d eras not decided by Linearizable",
		s.time.Hours(), s.eras, s.ops, s.granted, s.lost, s.undecided)
	b.WriteString("; faults injected, and of these took effect:")
	for _, name := range slices.Sorted(maps.Keys(s.effects)) {
		fmt.Fprintf(&b, "\n\t%-40s %7d %7d", name, s.effects[name].injected, s.effects[name].took)
	}
	return b.String() + "\n"
}
