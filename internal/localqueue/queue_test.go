package localqueue

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/logger"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) {
	logger.Set(func(string, ...any) {})
	m.Run()
}

const (
	ttl    = 4 * time.Second
	length = 5 * time.Millisecond
)

// newConfig returns that of a process with these clients.
func newConfig(o order, clients ...*redis.Client) *acquisition.Config {
	c := &acquisition.Config{Turn: length}
	for _, rc := range clients {
		c.Nodes = append(c.Nodes, node.Of(rc))
	}
	c.TTL, c.Drift, c.Durations = ttl, 42*time.Millisecond, script.NewDurations(ttl)
	c.Order = acquisition.Order(o)
	if len(clients) > 1 {
		c.Ranks = &acquisition.LamportClock{Now: time.Now}
		c.Timeout = 200 * time.Millisecond
	}
	c.Init()
	return c
}

type order int

const (
	firstCome order = iota
	writersFirst
	readersFirst
)

// A process has one Redis, one mutex, and the callers of that.
type process struct {
	*testing.T
	rc     *redis.Client
	config *acquisition.Config
	keys   *script.Keys
	sent   redistest.Counter
}

// inProcess runs a test in virtual time.
func inProcess(t *testing.T, o order, test func(*process)) {
	redistest.MiniLocks(t)
	synctest.Test(t, func(t *testing.T) {
		defer redistest.Elapse(10 * time.Minute) // in which everything in the background ends
		p := &process{T: t}
		_, p.rc = redistest.Mini(t)
		p.rc.AddHook(&p.sent)
		p.config = newConfig(o, p.rc)
		p.keys, _ = script.NewKeys("x")
		test(p)
	})
}

func (p *process) acquire(u user, write, try bool) error {
	return u.handle().Acquire(p.Context(), p.config, p.keys, write, try, u)
}

func (p *process) lock(u user, write bool) {
	p.Helper()
	if err := p.acquire(u, write, false); err != nil {
		p.Fatal(err)
	}
}

// A user is a caller, or has one.
type user interface {
	User
	handle() *Lock
}

// T2, T7: a grant whose trust has ended when the queue learns of it, since the process was stopped, serves nobody. It is
// not kept and renewed for ever: the head asks again.
func TestGrantThatServesNobodyIsNotKept(t *testing.T) {
	inProcess(t, firstCome, func(p *process) {
		g := &caller{write: true, result: make(chan error, 1)}
		q, own := enter(p.config, p.keys)
		pending := &own.turn
		g.lock.user, g.lock.grant = g, &own.grant
		w := &waiter{config: p.config, keys: p.keys, lock: &g.lock, spare: pending, write: true}
		q.line(w).push(w)
		q.pending = w.turn(q, false)
		if err := pending.acq.Acquire(p.Context()); err != nil {
			p.Fatal(err)
		}
		endTrust(&pending.acq)
		q.onAcquired(pending, nil)
		go func() { g.result <- q.wait(p.Context(), w) }()
		redistest.Elapse(ttl)
		select {
		case err := <-g.result:
			if err != nil || g.lock.grant.turn == pending {
				p.Errorf("%v: want the head served by another acquisition", err)
			}
		default:
			p.Fatal("the head waits, want it served")
		}
		if err := g.lock.Unlock(p.Context()); err != nil {
			p.Error(err)
		}
	})
}

// A user that hears of a loss late: other goroutines run first.
type lateUser struct {
	caller
	tell chan struct{}
}

func (l *lateUser) Watch() (User, func()) { return l, nil }

func (l *lateUser) End(cause error) { <-l.tell; l.caller.End(cause) }

// T2, T9, T11: nobody is served under an acquisition that was lost, though it is in its turn and its queue has not heard of
// it. Nor is a try refused because of it.
func TestLostAcquisitionServesNobody(t *testing.T) {
	inProcess(t, firstCome, func(p *process) {
		writer, reader, try := &lateUser{tell: make(chan struct{})}, &caller{}, &caller{}
		p.lock(writer, true)
		if err := writer.lock.Downgrade(p.Context()); err != nil {
			p.Fatal(err)
		}
		p.rc.FlushAll(p.Context())
		go writer.lock.Downgrade(context.Background()) // once more: it learns of the loss
		synctest.Wait()
		if err := p.acquire(try, true, true); err != nil {
			p.Errorf("a try to write: %v", err)
		} else if err := try.lock.Unlock(p.Context()); err != nil {
			p.Error(err)
		}
		p.lock(reader, false)
		if reader.lock.grant.turn == writer.lock.grant.turn || reader.lock.Usable() != nil {
			p.Error("a reader is served under the acquisition that was lost")
		}
		close(writer.tell)
		synctest.Wait()
		if err := reader.lock.Unlock(p.Context()); err != nil || Len() != 0 {
			p.Errorf("%v, and %d queues are left", err, Len())
		}
	})
}

// T3: a writer has left the acquisition when the next one is granted it. So the next one is the only writer, and may
// downgrade at once.
func TestHolderHasLeftBeforeTheNextIsGranted(t *testing.T) {
	downgrade := func(next *caller) error { return next.lock.Downgrade(context.Background()) }
	behindAWriter(t, downgrade, func(t *testing.T, holder, next *caller, served <-chan error) {
		if err := errors.Join(holder.lock.Unlock(t.Context()), <-served, next.lock.Unlock(t.Context())); err != nil {
			t.Error(err)
		}
		if err := holder.lock.Unlock(t.Context()); !errors.Is(err, lockerr.ErrUnlocked) {
			t.Errorf("a second unlock: %v", err)
		}
	})
}

// behindAWriter runs a test in virtual time, in which a writer holds a lock and the next one waits. Once that is granted
// the lock it calls granted.
func behindAWriter(t *testing.T, granted func(next *caller) error, test func(t *testing.T, holder, next *caller, served <-chan error)) {
	inProcess(t, firstCome, func(p *process) {
		holder, next, served := &caller{}, &caller{}, make(chan error, 1)
		p.lock(holder, true)
		go func() {
			err := p.acquire(next, true, false)
			served <- errors.Join(err, granted(next))
		}()
		synctest.Wait()
		test(p.T, holder, next, served)
	})
}

// T11: the acquisition is lost while its holder unlocks and the next one is about to be served. The queue goes on.
func TestLossDuringAnUnlockIsNotTheEndOfTheQueue(t *testing.T) {
	unlock := func(next *caller) error { return next.lock.Unlock(context.Background()) }
	behindAWriter(t, unlock, func(t *testing.T, holder, _ *caller, served <-chan error) {
		queues.Lock() // the unlock waits for it, when the holder has left and nobody else is served yet
		unlocked := make(chan error, 1)
		go func() { unlocked <- holder.lock.Unlock(context.Background()) }()
		for stacks := make([]byte, 1<<16); !bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("(*queue).leave(")); {
			runtime.Gosched()
		}
		acq := holder.lock.Acquisition()
		endTrust(acq)
		go acq.Check()() // the owner waits for the mutex of its queue
		queues.Unlock()
		if err := <-unlocked; !errors.Is(err, lockerr.ErrLockLost) {
			t.Errorf("the unlock returns %v, want it lost", err)
		}
		redistest.Elapse(ttl)
		select {
		case err := <-served:
			if err != nil {
				t.Error(err)
			}
		default:
			t.Fatalf("the next one waits %v after the loss, want it served", ttl)
		}
		if Len() != 0 {
			t.Errorf("%d queues are left", Len())
		}
	})
}

// T9: a try asks Redis if the trust in the lock of its process has ended, although no timer has fired, since the process was
// stopped.
func TestTryIsNotRefusedForALockWithoutTrust(t *testing.T) {
	inProcess(t, firstCome, func(p *process) {
		holder, try := &caller{}, &caller{}
		p.lock(holder, true)
		p.rc.FlushAll(p.Context()) // the lease has ended
		endTrust(holder.lock.Acquisition())
		if err := p.acquire(try, true, true); err != nil {
			p.Error(err)
		} else if err := try.lock.Unlock(p.Context()); err != nil {
			p.Error(err)
		}
		if err := holder.lock.Usable(); !errors.Is(err, lockerr.ErrLockLost) {
			p.Errorf("%v: want the lock lost", err)
		}
	})
}

// T12: a lock that has been unlocked is not overdue. The turn, which it has been passed on in, goes on.
func TestUnlockedLockIsNotOverdue(t *testing.T) {
	behindAWriter(t, func(*caller) error { return nil }, func(t *testing.T, holder, next *caller, served <-chan error) {
		if err := errors.Join(holder.lock.Unlock(t.Context()), <-served); err != nil {
			t.Fatal(err)
		}
		if holder.lock.MarkOverdue() || !next.lock.grant.turn.lasts(clock.Now()) {
			t.Error("want the turn to go on")
		}
		if err := next.lock.Unlock(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// endTrust makes the trust in an acquisition end now. No timer knows of it.
func endTrust(a *acquisition.Acquisition) {
	until := reflect.ValueOf(a).Elem().FieldByName("until").Addr().UnsafePointer()
	(*atomic.Int64)(until).Store(int64(clock.Now()))
}

// T9: a try of the class that goes first is served in a turn without a call, although others of its process wait.
func TestTryOfTheFirstClassPassesWaiters(t *testing.T) {
	inProcess(t, readersFirst, func(p *process) {
		reader, writer, try, served := &caller{}, &caller{}, &caller{}, make(chan error, 1)
		p.lock(reader, false)
		go func() { served <- p.acquire(writer, true, false) }()
		synctest.Wait()
		calls := p.sent.Commands()
		if err := p.acquire(try, false, true); err != nil || p.sent.Commands() != calls {
			p.Errorf("%v, after %d calls; want a lock without a call", err, p.sent.Commands()-calls)
		}
		if err := errors.Join(try.lock.Unlock(p.Context()), reader.lock.Unlock(p.Context()), <-served, writer.lock.Unlock(p.Context())); err != nil {
			p.Error(err)
		}
	})
}

// Of locks that share a grant the last one releases it, in whatever order they are unlocked, and the others make no call.
func TestLastOfNestedLocksReleases(t *testing.T) {
	inProcess(t, firstCome, func(p *process) {
		locks, first := make([]caller, 10), &caller{} // from which the server learns the scripts
		if err := errors.Join(p.acquire(first, true, false), first.lock.Unlock(p.Context())); err != nil {
			p.Fatal(err)
		}
		p.lock(&locks[0], true)
		for i := range locks[1:] {
			outer, inner := &locks[i], &locks[i+1]
			inner.lock = NestedIn(&outer.lock)
			if err := inner.lock.Nest(&outer.lock, inner, i%2 == 0); err != nil {
				p.Fatal(err)
			}
		}
		synctest.Wait() // INFO has been answered, which the first grant asks for
		before := p.sent.Commands()
		unlocked := make(chan error)
		for i := range locks {
			go func() { unlocked <- locks[i].lock.Unlock(context.Background()) }()
		}
		for range locks {
			if err := <-unlocked; err != nil {
				p.Error(err)
			}
		}
		if n := p.sent.Commands() - before; n != 1 {
			p.Errorf("%d commands for %d unlocks, want 1", n, len(locks))
		}
		if err := locks[0].lock.Unlock(p.Context()); !errors.Is(err, lockerr.ErrUnlocked) {
			p.Errorf("a second unlock: %v", err)
		}
	})
}

// What an event costs does not grow with the read acquisitions that are held: those whose turn is over are put aside.
func TestEventsLookAtTheReadersOfATurnOnly(t *testing.T) {
	inProcess(t, firstCome, func(p *process) {
		var readers []*caller
		for range 100 {
			r := &caller{}
			p.lock(r, false)
			readers = append(readers, r)
			redistest.Elapse(2 * length)
		}
		q, n := readers[0].lock.grant.turn.queue, 0
		for t := q.turns; t != nil; t = t.next {
			n++
		}
		if n > 1 || len(q.aside) < len(readers)-1 {
			p.Errorf("%d acquisitions are looked at and %d are put aside, of %d", n, len(q.aside), len(readers))
		}
		writer := &caller{}
		if err := p.acquire(writer, true, true); !errors.Is(err, lockerr.ErrLock) {
			p.Errorf("a try to write beside the readers: %v", err)
		}
		for _, r := range readers {
			if err := r.lock.Unlock(p.Context()); err != nil {
				p.Error(err)
			}
		}
		if len(q.aside) != 0 || q.turns != nil || Len() != 0 {
			p.Errorf("%d acquisitions and %d queues are left", len(q.aside), Len())
		}
	})
}

// A caller asks for a lock, and has it until it unlocks.
type caller struct {
	process int
	number  int // in the order of arrival
	write   bool
	try     bool

	lock   Lock
	giveUp context.CancelFunc
	result chan error
	asked  bool  // its result is not in yet
	held   bool  // as far as it knows
	lost   error // why it was lost
	token  uint64
	reads  bool // it was downgraded
}

func (c *caller) handle() *Lock         { return &c.lock }
func (c *caller) End(cause error)       { c.lost = cause }
func (c *caller) Watch() (User, func()) { return c, nil }
func (c *caller) String() string {
	kind := map[bool]string{true: "w", false: "r"}[c.write]
	if c.try {
		kind += "!"
	}
	return fmt.Sprintf("%d%s/%d", c.number, kind, c.process)
}

// A game plays two processes with queues, and the events of their queues in any order: arrivals, unlocks, callers that give
// up, grants, losses, ends of turns, downgrades.
type game struct {
	*rapid.T
	order   order
	admins  []*redis.Client
	configs []*acquisition.Config
	links   []*faultnet.Link
	keys    *script.Keys
	callers []*caller
	lossAt  time.Time // of the last fault: until everybody has heard of it, waiters may wait
	last    uint64    // the last token
}

// T2 to T7 in any sequence of events, over one node and three: exclusion, order, one waiter in Redis, rising tokens, and
// no stuck state.
func TestQueueKeepsItsRules(t *testing.T) {
	redistest.MiniLocks(t)
	for _, nodes := range []int{1, 3} {
		t.Run(fmt.Sprint(nodes), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				rapid.SyncTest(t, func(t *rapid.T) { play(t, nodes) })
			})
		})
	}
}

func play(t *rapid.T, nodes int) {
	g := &game{T: t, order: order(rapid.IntRange(0, 2).Draw(t, "order"))}
	g.keys, _ = script.NewKeys("x")
	processes := make([][]*redis.Client, 2)
	for range nodes {
		m, admin := redistest.Mini(t)
		g.admins = append(g.admins, admin)
		for p := range processes {
			link := faultnet.New(m.Dial)
			g.links = append(g.links, link)
			processes[p] = append(processes[p], redistest.MiniClient(t, m, redistest.Through(link), func(o *redis.Options) { o.MaxRetries = -1 }))
		}
	}
	for _, clients := range processes {
		g.configs = append(g.configs, newConfig(g.order, clients...))
	}
	defer g.leave()
	t.Repeat(map[string]func(*rapid.T){
		"":          g.check,
		"arrive":    func(*rapid.T) { g.arrive(false) },
		"arrive2":   func(*rapid.T) { g.arrive(false) },
		"try":       func(*rapid.T) { g.arrive(true) },
		"unlock":    g.unlock,
		"unlock2":   g.unlock,
		"give up":   g.giveUp,
		"loss":      g.lose,
		"pass":      func(t *rapid.T) { redistest.Elapse(length * time.Duration(rapid.IntRange(1, 6).Draw(t, "part")) / 4) },
		"wait":      func(t *rapid.T) { redistest.Elapse(ttl * time.Duration(rapid.IntRange(1, 6).Draw(t, "part")) / 4) },
		"downgrade": g.downgrade,
	})
	g.finish()
}

func (g *game) arrive(try bool) {
	c := &caller{
		number: len(g.callers), process: rapid.IntRange(0, 1).Draw(g.T, "process"), write: rapid.Bool().Draw(g.T, "write"),
		try: try, result: make(chan error, 1), asked: true,
	}
	g.callers = append(g.callers, c)
	var ctx context.Context
	ctx, c.giveUp = context.WithCancel(context.Background())
	go func() { c.result <- c.lock.Acquire(ctx, g.configs[c.process], g.keys, c.write, try, c) }()
}

// one draws one of the callers of which f is true.
func (g *game) one(what string, f func(*caller) bool) *caller {
	some := slices.DeleteFunc(slices.Clone(g.callers), func(c *caller) bool { return !f(c) })
	if len(some) == 0 {
		g.Skip("nobody")
	}
	return some[rapid.IntRange(0, len(some)-1).Draw(g.T, what)]
}

func (g *game) unlock(*rapid.T) { g.end(g.one("unlock", func(c *caller) bool { return c.held })) }

func (g *game) end(c *caller) {
	err := c.lock.Usable()
	if err == nil {
		err = c.lock.Unlock(context.Background())
	}
	if c.held = false; (err != nil) != (c.lost != nil) || err != nil && !errors.Is(err, lockerr.ErrLockLost) {
		g.Errorf("the unlock of %v returns %v, and it was lost: %v", c, err, c.lost)
	}
}

func (g *game) giveUp(*rapid.T) { g.one("give up", func(c *caller) bool { return c.asked }).giveUp() }

func (g *game) lose(*rapid.T) {
	g.lossAt = time.Now()
	if len(g.admins) > 1 {
		g.last = 0 // tokens rise over the loss of several nodes only if these stay away for a TTL
	}
	for _, rc := range g.admins {
		rc.FlushAll(context.Background())
	}
	redistest.Elapse(ttl) // everybody learns of it
	synctest.Wait()
}

func (g *game) downgrade(*rapid.T) {
	c := g.one("downgrade", func(c *caller) bool { return c.held && c.write && !c.reads })
	if err := c.lock.Downgrade(context.Background()); err == nil {
		c.reads = true
	} else if c.lost == nil {
		g.Errorf("%v: %v", c, err)
	}
}

// collect takes the results so far, and returns the requests that were granted a lock.
func (g *game) collect() (granted []*caller) {
	synctest.Wait()
	for _, c := range g.callers {
		if !c.asked {
			continue
		}
		select {
		case err := <-c.result:
			c.asked = false
			switch {
			case err == nil:
				c.held = true
				granted = append(granted, c)
			case errors.Is(err, context.Canceled), c.try && (errors.Is(err, lockerr.ErrLock) || err == acquisition.ErrRetry):
			default:
				g.Errorf("%v: %v", c, err)
			}
		default:
		}
	}
	return granted
}

func (g *game) check(*rapid.T) {
	granted := g.collect()
	var writers, readers []*caller
	waiting := map[int]int{}
	for _, c := range g.callers {
		switch {
		case c.held && c.lost == nil && c.write && !c.reads:
			writers = append(writers, c)
		case c.held && c.lost == nil:
			readers = append(readers, c)
		case c.asked:
			waiting[c.process]++
		}
	}
	// T3, and exclusion between the processes.
	if len(writers) > 1 || len(writers) == 1 && len(readers) > 0 {
		g.Errorf("%v write and %v read", writers, readers)
	}
	for _, c := range granted {
		if c.write {
			if c.token = c.lock.Token(); c.token <= g.last {
				g.Errorf("%v has token %d after %d", c, c.token, g.last) // T10
			}
			g.last = c.token
		}
		for _, o := range g.callers { // T4
			before := o.process == c.process && o.asked && o.number < c.number
			if before && (g.order == firstCome || o.write == c.write) {
				g.Errorf("%v overtook %v", c, o)
			}
		}
	}
	if len(g.admins) == 1 { // T6; of several nodes, one that does not matter may have what is held in its queue
		perProcess := map[string]int{}
		for _, id := range g.admins[0].ZRange(context.Background(), g.keys.Intents(), 0, -1).Val() {
			perProcess[id[1:strings.LastIndexByte(id, ':')]]++
		}
		for p, n := range perProcess {
			if n > 1 {
				g.Errorf("%d of %s wait in Redis", n, p)
			}
		}
	}
	// No stuck state: while nothing has failed for a while, somebody holds if somebody waits.
	if len(writers)+len(readers) == 0 && len(waiting) > 0 && time.Since(g.lossAt) > 3*ttl {
		g.Errorf("%v wait, and nobody holds", waiting)
	}
	// A queue lives while somebody holds or waits.
	if len(writers)+len(readers)+len(waiting) == 0 && Len() != 0 {
		for _, c := range g.callers {
			if c.held { // it was lost, and has not been unlocked
				return
			}
		}
		g.Errorf("%d queues are left", Len())
	}
}

// finish unlocks everything, until nobody waits.
func (g *game) finish() {
	for range 10 * (len(g.callers) + 1) {
		g.check(nil)
		open := false
		for _, c := range g.callers {
			if c.held {
				g.end(c)
			}
			open = open || c.asked
		}
		if !open {
			break
		}
		redistest.Elapse(ttl)
	}
	for _, c := range g.callers {
		if c.asked {
			g.Errorf("%v waits for ever", c)
		}
	}
	synctest.Wait()
	if n := Len(); n != 0 {
		g.Errorf("%d queues are left", n)
	}
	redistest.Elapse(10*time.Minute + time.Second) // the longest lease has ended
	for _, rc := range g.admins {
		if keys := rc.Keys(context.Background(), "*").Val(); len(keys) > 1 {
			g.Errorf("%q are left", keys)
		}
	}
}

// leave ends everything, also after a failure.
func (g *game) leave() {
	for _, c := range g.callers {
		c.giveUp()
	}
	synctest.Wait()
	for _, c := range g.callers {
		if c.held && c.lock.Usable() == nil {
			_ = c.lock.Unlock(context.Background())
		} else if c.asked {
			select {
			case err := <-c.result:
				if err == nil && c.lock.Usable() == nil {
					_ = c.lock.Unlock(context.Background())
				}
			default:
			}
		}
	}
	redistest.Elapse(10*time.Minute + time.Second) // in which everything in the background ends
}
