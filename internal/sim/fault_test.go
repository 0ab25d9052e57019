package sim

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
)

// A linkFault is a fault of the link between one process and one node. Strike applies it for about as long as lasts.
type linkFault struct {
	name   string
	strike func(p *process, l *faultnet.Link, lasts time.Duration)
	effect func(faultnet.Effects) int
}

// tardyFaults delay acquires. If the caller gives up meanwhile, the release leaves a tombstone, and the acquire is refused
// when it arrives.
var tardyFaults = []linkFault{
	{"acquire late", during((*faultnet.Link).HoldRequest, "join:"), heldRequests},
	{"try late", during((*faultnet.Link).HoldRequest, "try:"), heldRequests},
}

// late is the process that tardyFaults affect in a tardy era.
const late = "p1"

// tardyTTL is the TTL of all its locks: a tombstone lasts for two TTLs, and no request may be later than that.
const tardyTTL = 5 * time.Second

var linkFaults = []linkFault{
	{"reply lost", func(_ *process, l *faultnet.Link, lasts time.Duration) {
		l.LoseReply("evalsha", 1)
		redistest.Elapse(lasts)
	}, func(e faultnet.Effects) int { return e.LostReplies }},
	tardyFaults[0], tardyFaults[1],
	{"request late", during((*faultnet.Link).HoldRequest, "evalsha"), heldRequests},
	{"reply late", during((*faultnet.Link).HoldReply, "evalsha"), heldReplies},
	{"reply late, then nothing", func(p *process, l *faultnet.Link, lasts time.Duration) {
		during((*faultnet.Link).HoldReply, "evalsha")(p, l, lasts/4)
		l.Hole(true, true)
		redistest.Elapse(lasts)
		p.heal(l)
	}, heldReplies},
	{"message lost", func(_ *process, l *faultnet.Link, lasts time.Duration) {
		l.LoseMessage(message)
		redistest.Elapse(lasts)
	}, func(e faultnet.Effects) int { return e.LostMessages }},
	{"message late", during((*faultnet.Link).HoldMessage, message), heldMessages},
	{"message late, and nothing else", func(p *process, l *faultnet.Link, lasts time.Duration) {
		release := l.HoldMessage(message)
		for i := 0; i < 40 && l.Held() == 0; i++ {
			redistest.Elapse(lasts / 20)
		}
		l.Hole(true, true)
		redistest.Elapse(lasts / 2)
		release()
		redistest.Elapse(lasts)
		p.heal(l)
	}, heldMessages},
	{"requests vanish", hole(true, false), swallowed},
	{"replies vanish", hole(false, true), swallowed},
	{"black hole", hole(true, true), swallowed},
	{"cut, with the subscription", func(_ *process, l *faultnet.Link, _ time.Duration) { l.Cut() },
		func(e faultnet.Effects) int { return e.Cut }},
	{"refused", func(p *process, l *faultnet.Link, lasts time.Duration) {
		l.Refuse(true)
		l.Cut()
		redistest.Elapse(lasts)
		p.heal(l)
	}, func(e faultnet.Effects) int { return e.Refused }},
}

// message occurs only in what the server sends to subscribers.
const message = "message\r\n"

func heldRequests(e faultnet.Effects) int { return e.HeldRequests }
func heldReplies(e faultnet.Effects) int  { return e.HeldReplies }
func heldMessages(e faultnet.Effects) int { return e.HeldMessages }
func swallowed(e faultnet.Effects) int    { return e.Swallowed }

func during(hold func(*faultnet.Link, string) func(), match string) func(*process, *faultnet.Link, time.Duration) {
	return func(_ *process, l *faultnet.Link, lasts time.Duration) {
		release := hold(l, match)
		redistest.Elapse(lasts)
		release()
	}
}

func hole(up, down bool) func(*process, *faultnet.Link, time.Duration) {
	return func(p *process, l *faultnet.Link, lasts time.Duration) {
		l.Hole(up, down)
		redistest.Elapse(lasts)
		p.heal(l)
	}
}

// The faults of nodes and processes.
const (
	frozen    = "node frozen, less than a TTL"
	away      = "node frozen, more than a TTL"
	emptied   = "node away, emptied"
	forgets   = "node emptied in place"
	setBack   = "clock set back"
	setAhead  = "clock set forward"
	slow      = "link slow"
	twice     = "message twice"
	killed    = "process killed"
	cancelled = "canceled as another unlocked"
	family    = "lock lost, others nested in it"
)

func everyFault() []string {
	names := []string{frozen, away, emptied, forgets, setBack, setAhead, slow, twice, killed, cancelled, family}
	names = append(names, inspected, holderRevoked, waiterRevoked, goneRevoked, heldTooLong, waitedTooLong)
	names = append(names, crowdEvents...)
	for _, f := range linkFaults {
		names = append(names, f.name)
	}
	return names
}

// ambush starts a fault, with those odds, at a moment that the worker has chosen.
func (w *worker) ambush(odds float64, ttl time.Duration) {
	if w.chance(odds) {
		w.process.ambush(w.random, ttl)
	}
}

// ambush starts a fault of the links to one node or several. It lasts for a fraction or a small multiple of that TTL, so
// that a lease may outlive it or not.
func (p *process) ambush(random *rand.Rand, ttl time.Duration) {
	select {
	case <-p.stopping:
		return
	default:
	}
	faults := linkFaults
	switch {
	case p.mood == tardy && p.name == late:
		faults, ttl = tardyFaults, tardyTTL
	case p.mood != chaos:
		return
	}
	lasts := time.Duration(random.Float64() * float64(ttl) * []float64{0.02, 0.5, 1, 1.5}[random.IntN(4)])
	fault := faults[random.IntN(len(faults))]
	some := 1 + random.IntN(1+len(p.links)/2)
	for _, i := range random.Perm(len(p.links))[:some] {
		p.strike(fault, p.links[i], lasts)
	}
}

func (p *process) strike(f linkFault, l *faultnet.Link, lasts time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.healing {
		return
	}
	p.injected(f.name)
	p.faults.Go(func() {
		before := f.effect(l.Effects())
		f.strike(p, l, lasts)
		p.took(f.name, f.effect(l.Effects()) > before)
	})
}

// havoc starts faults of nodes and processes, according to the mood of the era. The last quarter of its time remains for
// them to end.
func (e *era) havoc(t *testing.T) {
	if e.mood == chaos {
		for _, n := range e.nodes {
			e.repeat(n, e.draw(2))
		}
	}
	for e.left() > 0 {
		n := e.nodes[e.random.IntN(len(e.nodes))]
		if e.mood == lossy {
			redistest.Elapse(longest + time.Duration(e.random.ExpFloat64()*float64(5*time.Second)))
			e.lose(n)
			continue
		}
		redistest.Elapse(time.Duration(e.random.ExpFloat64() * float64(6*time.Second)))
		switch e.random.IntN(7) {
		case 0:
			e.freeze(frozen, n, time.Duration(e.random.Int64N(int64(2*time.Second))), nil)
		case 1:
			e.freeze(away, n, time.Duration(e.random.Int64N(int64(longest))), nil)
		case 2:
			if len(e.nodes) > 1 {
				// No process trusts a lease on this node any more when it is back.
				e.freeze(emptied, n, longest+time.Second, func() { e.empties(n, emptied) })
				redistest.Elapse(longest + time.Second)
			}
		case 3:
			by := time.Duration(e.random.Int64N(int64(2 * time.Second)))
			if n.back+by < mostBack {
				n.back += by
				e.injected(setBack)
				e.took(setBack, len(n.keys()) > 0)
				n.step(-by)
			}
		case 4, 5:
			p := e.processes[e.random.IntN(len(e.processes))]
			l := p.links[e.random.IntN(len(p.links))]
			e.injected(slow)
			e.took(slow, l.Live() > 0)
			l.SetDelay(time.Duration(e.random.ExpFloat64() * float64(30*time.Millisecond)))
		case 6:
			e.kill(t)
		}
	}
}

// left returns for how long faults may still begin.
func (e *era) left() time.Duration { return activity*3/4 - time.Since(e.start) }

// freeze cuts a node off from all processes, and calls meanwhile unless it is nil.
func (e *era) freeze(name string, n *node, lasts time.Duration, meanwhile func()) {
	e.injected(name)
	e.faults.Go(func() {
		before := n.link.Effects().Swallowed
		n.cutOff(1)
		if meanwhile != nil {
			meanwhile()
		}
		redistest.Elapse(lasts)
		n.cutOff(-1)
		if meanwhile == nil {
			e.took(name, n.link.Effects().Swallowed > before)
		}
	})
}

// cutOff cuts the node off from all processes for one more fault, or one less. An emptied node must not come back when another
// fault ends.
func (n *node) cutOff(faults int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.faults += faults
	n.link.Hole(n.faults > 0, n.faults > 0)
	if n.faults == 0 {
		n.link.Cut()
	}
}

// empties deletes all data of a node.
func (e *era) empties(n *node, name string) {
	e.took(name, len(n.keys()) > 0)
	n.mini.FlushAll()
}

// lose makes a node lose all its data or some leases. Nothing else fails meanwhile, so holders and waiters learn of it at
// their next renewal.
func (e *era) lose(n *node) {
	redistest.Elapse(time.Duration(e.random.Int64N(int64(time.Second)))) // not at the instant of anything else
	l := loss{e.clock(), e.random.IntN(2) == 0}
	e.losses = append(e.losses, l)
	if l.emptied {
		e.injected(forgets)
		e.empties(n, forgets)
		return
	}
	e.injected(setAhead)
	before := len(n.keys())
	n.step(time.Duration(e.random.Int64N(int64(time.Minute))))
	e.took(setAhead, len(n.keys()) < before)
}

// repeat publishes some messages of a node again, later.
func (e *era) repeat(n *node, random *rand.Rand) {
	n.messages.Psubscribe("redismutex:*")
	go func() {
		for m := range n.messages.Pmessages() {
			if random.IntN(5) > 0 || !strings.HasPrefix(m.Channel, "redismutex:") {
				continue
			}
			e.injected(twice)
			time.AfterFunc(time.Duration(random.Int64N(int64(longest))), func() {
				e.took(twice, n.mini.Publish(m.Channel, m.Message) > 1)
			})
		}
	}()
}
