package acquisition

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/logger"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

const ttl, drift = 4 * time.Second, 42 * time.Millisecond

func TestMain(m *testing.M) {
	logger.Set(func(string, ...any) {})
	m.Run()
}

func config(rc *redis.Client) *Config {
	c := &Config{Nodes: []*node.Node{node.Of(rc)}}
	c.TTL, c.Drift, c.Durations = ttl, drift, script.NewDurations(ttl)
	return c
}

// request makes the acquisition of a writer that has asked for nothing yet.
func request(t *testing.T, c *Config, name string) *Acquisition {
	keys, err := script.NewKeys(name)
	if err != nil {
		t.Fatal(err)
	}
	a := &Acquisition{}
	a.Init(c, keys, witness{make(chan error, 1)}, true, false, Origin{})
	return a
}

// A witness is an owner that notes the losses.
type witness struct{ lost chan error }

func (w witness) OnRenewed()       {}
func (w witness) OnLost(why error) { w.lost <- why }

// waitingSince is an acquisition that has waited in the queue since then, as far as it knows.
func waitingSince(t *testing.T, c *Config, since clock.Instant) *Acquisition {
	a := request(t, c, "x")
	p := a.one[0]
	p.in = true
	p.Acknowledge(since)
	p.Node.Renewer.Renew(&p.Lease, false, since, script.Reply{Status: script.Waiting, Value: 1e9})
	return a
}

// Promise 2: a grant message that arrives when the waiter's lease has ended grants nothing.
func TestStaleMessageGrantsNothing(t *testing.T) {
	redistest.MiniLocks(t)
	synctest.Test(t, func(t *testing.T) {
		_, rc := redistest.Mini(t)
		a := waitingSince(t, config(rc), clock.Now())
		p := a.one[0]
		p.Node.Renewer.Forget(&p.Lease)
		redistest.Elapse(ttl)
		p.Granted(7)
		if a.state != pending {
			t.Errorf("the state is %d, want pending", a.state)
		}
	})
}

// Promise 2: with little trust left a grant message grants nothing by itself. The lease is renewed first, which shows here
// that it is gone.
func TestMessageWithLittleTrustLeftIsChecked(t *testing.T) {
	redistest.MiniLocks(t)
	synctest.Test(t, func(t *testing.T) {
		_, rc := redistest.Mini(t)
		c := config(rc)
		other := request(t, c, "x")
		if err := errors.Join(other.Acquire(t.Context()), other.Use()); err != nil {
			t.Fatal(err)
		}
		a := waitingSince(t, c, clock.Now().Add(-ttl*7/8))
		first := a.one[0]
		first.Granted(7)
		if a.state != pending {
			t.Errorf("the state is %d, want pending", a.state)
		}
		synctest.Wait()
		a.mu.Lock()
		if a.one[0] == first || a.state != pending {
			t.Error("the id is still in use, although Redis does not know it")
		}
		a.mu.Unlock()
		a.Withdraw()
		if err := errors.Join(other.Close(), other.Release(t.Context(), nil)); err != nil {
			t.Fatal(err)
		}
		redistest.Elapse(time.Minute)
	})
}

// several is the config of a lock over three nodes.
func several(t *testing.T) *Config {
	c := &Config{Ranks: Ranks}
	c.TTL, c.Timeout, c.Durations = ttl, ttl/20, script.NewDurations(ttl)
	for range 3 {
		_, rc := redistest.Mini(t)
		c.Nodes = append(c.Nodes, node.Of(rc))
	}
	return c
}

// A request over several nodes lets the next one be made when a majority has answered, although it waits.
func TestWaitingRequestLetsTheNextBeMade(t *testing.T) {
	redistest.MiniLocks(t)
	synctest.Test(t, func(t *testing.T) {
		c := several(t)
		holder := request(t, c, "x")
		if err := holder.Acquire(t.Context()); err != nil {
			t.Fatal(err)
		}
		requests := c.Nodes[0].Requests
		for requests.TryAcquire(1) {
		}
		requests.Release(1) // one request at a time
		ctx, giveUp := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); _ = request(t, c, "x").Acquire(ctx) }()
		synctest.Wait()
		if !requests.TryAcquire(1) {
			t.Error("the next request may not be made")
		}
		giveUp()
		<-done
		holder.Withdraw()
		redistest.Elapse(time.Minute)
	})
}

// A request over several nodes that is superseded while it waits to be made is no error of Redis, whatever the nodes do.
func TestSupersededRequestIsNotMade(t *testing.T) {
	redistest.MiniLocks(t)
	synctest.Test(t, func(t *testing.T) {
		c := several(t)
		requests := c.Nodes[0].Requests
		for requests.TryAcquire(1) {
		}
		a, got := request(t, c, "x"), make(chan error, 1)
		go func() { got <- a.Acquire(t.Context()) }()
		synctest.Wait()
		for _, n := range c.Nodes[1:] {
			n.Health.MarkDown(errors.New("no answer"))
		}
		a.Withdraw()
		requests.Release(1)
		if err := <-got; err != ErrRetry {
			t.Errorf("want %v, got %v", ErrRetry, err)
		}
		if !requests.TryAcquire(1) {
			t.Error("its place was not given back")
		}
		redistest.Elapse(time.Minute)
	})
}

// Promise 2: where there is more to renew than can be, only the excess is lost, and the log reports it before anything is
// lost. However long a call takes, up to a quarter of the TTL, it renews only what does not end before its answer.
func TestOverloadLosesNoMoreThanTheExcess(t *testing.T) {
	for _, trip := range []time.Duration{ttl / 10, ttl / 5} {
		t.Run(trip.String(), func(t *testing.T) {
			capacity := 500 * int((ttl-drift-trip)/trip) // one connection renews so many: 500 share a round trip
			many := 2 * capacity
			renewing(t, load{many, 1, -1, ttl / 2}, func(r *renewals) {
				r.link.SetDelay(trip / 2)
				told := false
				for range 10 {
					redistest.Elapse(ttl / 8)
					if n := r.alive(); n < many && !told {
						told = strings.Contains(r.log.String(), "fall behind")
						if !told {
							t.Errorf("%d are lost, and the log does not say that renewals fall behind", many-n)
						}
					}
				}
				redistest.Elapse(ttl)
				n := r.alive()
				t.Logf("%d of %d are left, and %d could be renewed", n, many, capacity)
				if n < capacity*3/4 {
					t.Error("more than the excess is lost")
				}
			})
		})
	}
}

// Promise 2: what would have been renewed too late while calls were slow is renewed when they are fast again.
func TestNothingIsLostThatCanStillBeRenewed(t *testing.T) {
	const many = 3000
	renewing(t, load{many, 1, -1, ttl / 2}, func(r *renewals) {
		r.link.SetDelay(ttl / 10)
		redistest.Elapse(ttl * 3 / 8)
		r.link.SetDelay(ttl / 400)
		redistest.Elapse(2 * ttl)
		if n := r.alive(); n < many {
			t.Errorf("%d of %d are left", n, many)
		}
	})
}

// Promise 2: when calls have taken long, and the next ones do not, all that is due is renewed, by several senders.
func TestStallLosesNothingThatSeveralSendersCanRenew(t *testing.T) {
	const many = 3600
	renewing(t, load{many, 4, -1, 0}, func(r *renewals) {
		redistest.Elapse(ttl / 4)
		r.link.SetDelay(ttl * 3 / 20)
		redistest.Elapse(ttl/4 + ttl*3/10 - 10*time.Millisecond) // all but what the first calls have renewed is due then
		r.link.SetDelay(ttl / 20)
		redistest.Elapse(ttl / 4)
		if n := r.alive(); n < many*99/100 {
			t.Errorf("%d of %d are left", n, many)
		}
	})
}

// Promise 2: one call that hangs does not end the locks, if calls take up to a fifth of the TTL, or if the client has one
// connection beside those of its pipelines.
func TestCallThatHangsLosesNothing(t *testing.T) {
	const many = 20
	for _, c := range []struct {
		trip                   time.Duration
		connections, pipelines int
	}{{ttl / 100, 8, -1}, {ttl / 100, 1, 0}, {ttl / 5, 8, -1}} {
		t.Run(fmt.Sprintf("%v, pools of %d and %d", c.trip, c.connections, c.pipelines), func(t *testing.T) {
			renewing(t, load{many, c.connections, c.pipelines, ttl / 2}, func(r *renewals) {
				r.link.SetDelay(c.trip / 2)
				redistest.Elapse(4 * ttl)
				release := r.link.HoldRequest("x:3")
				redistest.Elapse(2 * ttl)
				if n := r.alive(); n < many {
					t.Errorf("%d of %d are left", n, many)
				}
				release()
			})
		})
	}
}

// A renewal that takes long is not made twice, for that would make all of them take longer still.
func TestSlowRenewalIsNotMadeTwice(t *testing.T) {
	const many, leases = 100, 10
	renewing(t, load{many, 8, -1, ttl / 2}, func(r *renewals) {
		r.link.SetDelay(ttl / 10)
		redistest.Elapse(2 * ttl) // until the library knows how long a call takes
		before := r.commands.Commands()
		redistest.Elapse(leases * ttl)
		if n := r.commands.Commands() - before; n > many*2*leases*11/10 {
			t.Errorf("%d commands, want about 2 for each lock and TTL: %d", n, many*2*leases)
		}
		if n := r.alive(); n < many {
			t.Errorf("%d of %d are left", n, many)
		}
	})
}

// Renewals are those of many locks of one client.
type renewals struct {
	link     *faultnet.Link
	commands redistest.Counter
	log      buffer
	locks    []*Acquisition
}

// alive counts the locks that are trusted.
func (r *renewals) alive() (n int) {
	for _, a := range r.locks {
		if a.Until() > clock.Now() {
			n++
		}
	}
	return n
}

// A load is many locks of one client, as if they had been acquired one after the other within so long.
type load struct {
	locks, connections, pipelines int
	within                        time.Duration
}

// renewing calls f while the locks of a load are renewed.
func renewing(t *testing.T, l load, f func(*renewals)) {
	redistest.MiniLocks(t)
	synctest.Test(t, func(t *testing.T) {
		m, direct := redistest.Mini(t)
		direct.ScriptLoad(t.Context(), script.Refresh.Source())
		r := &renewals{link: faultnet.New(m.Dial)}
		rc := redistest.MiniClient(t, m, func(o *redis.Options) {
			o.Dialer, o.PoolSize, o.PipelinePoolSize, o.PoolTimeout = r.link.Dial, l.connections, l.pipelines, time.Hour
		})
		rc.AddHook(&r.commands)
		r.link.SetDelay(time.Millisecond)
		for range l.connections { // they are there before anything is due
			go rc.Ping(t.Context())
		}
		redistest.Elapse(time.Second)
		r.link.SetDelay(0)
		c := config(rc)
		c.Log.Own = slog.New(slog.NewTextHandler(&r.log, nil))
		for i := range l.locks {
			a := request(t, c, fmt.Sprint("x:", i))
			p, acquired := a.one[0], clock.Now().Add(-l.within*time.Duration(i)/time.Duration(l.locks))
			p.in, p.granted, p.token = true, true, 1
			p.Acknowledge(acquired)
			p.Node.Renewer.Renew(&p.Lease, true, acquired, script.Reply{Status: script.Granted, Value: 1})
			a.grant(1)
			if err := a.Use(); err != nil {
				t.Fatal(err)
			}
			if err := m.Set(a.Keys.Name(), p.ID()); err != nil {
				t.Fatal(err)
			}
			m.SetTTL(a.Keys.Name(), ttl)
			r.locks = append(r.locks, a)
		}
		synctest.Wait() // INFO has been answered, which the first grant asks for
		f(r)
		r.link.SetDelay(0)
		for _, a := range r.locks {
			a.mu.Lock()
			if a.state == held {
				a.state = released
				a.releaseInBackground()
			}
			a.mu.Unlock()
		}
		redistest.Elapse(time.Minute)
	})
}

// A buffer is a log that several goroutines write to.
type buffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// Nobody's lock ends because its acquisition is withdrawn late, as when a hook panics behind the grant.
func TestLockInUseIsNotWithdrawn(t *testing.T) {
	redistest.MiniLocks(t)
	synctest.Test(t, func(t *testing.T) {
		defer redistest.Elapse(time.Minute) // in which everything in the background ends
		m, rc := redistest.Mini(t)
		a, unused := request(t, config(rc), "x"), request(t, config(rc), "y")
		if err := errors.Join(a.Acquire(t.Context()), a.Use(), unused.Acquire(t.Context())); err != nil {
			t.Fatal(err)
		}
		a.Withdraw()
		unused.Withdraw()
		redistest.Elapse(ttl)
		if err := a.Lost(); err != nil || !m.Exists("x") {
			t.Errorf("%v, and Redis knows of it: %v; want it held", err, m.Exists("x"))
		}
		if err := unused.Use(); err != ErrRetry || m.Exists("y") {
			t.Errorf("%v, and Redis knows of it: %v; want what is not used withdrawn", err, m.Exists("y"))
		}
		if err := errors.Join(a.Close(), a.Release(t.Context(), nil)); err != nil {
			t.Error(err)
		}
	})
}

// A shared request that is granted as its caller gives up stays for others.
func TestGrantOutlivesTheCallerWhoShares(t *testing.T) {
	redistest.MiniLocks(t)
	synctest.Test(t, func(t *testing.T) {
		defer redistest.Elapse(time.Minute) // in which everything in the background ends
		_, rc := redistest.Mini(t)
		ctx, cancel := context.WithCancel(t.Context())
		a := request(t, config(rc), "x")
		a.Share(false)
		if err := a.Acquire(ctx); err != nil {
			t.Fatal(err)
		}
		cancel()
		if err := a.refused(ctx); err != ErrWaiting { // Wait has seen the end of ctx before the grant
			t.Errorf("got %v, want ErrWaiting", err)
		}
		if err := errors.Join(a.Wait(t.Context()), a.Use(), a.Close(), a.Release(t.Context(), nil)); err != nil {
			t.Error(err)
		}
	})
}
