package redismutex

// This file answers: what do all the mutexes on one Redis client share?

import (
	"context"
	"crypto/rand"
	"errors"
	"math"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/mailbox"
	"golang.org/x/sync/semaphore"
)

// channelPrefix begins the name of every mailbox, for the sake of ACLs.
const channelPrefix = "redismutex:"

// The names of this process' mailboxes begin alike, so that ids of one process
// come before, or behind, those of another on all nodes: this decides between
// equal ranks.
var (
	mailboxes = channelPrefix + strings.ToLower(rand.Text()[:13]) + "."
	boxes     atomic.Uint64
)

// An endpoint is one Redis client: the mailbox on which this process hears of
// its grants there, the ids drawn from it, and the keeper of its leases.
type endpoint struct {
	rc       redis.Scripter
	process  func(context.Context, redis.Cmder) error // nil: rc can only evaluate scripts
	pipeline func() redis.Pipeliner                   // nil: rc has none
	box      *mailbox.Box
	keeper   keeper

	ids     atomic.Uint64
	resend  time.Duration // a call that took as long may have been sent twice
	mute    atomic.Bool   // PUBLISH is refused
	looked  atomic.Bool   // the server's settings have been looked at
	workers workers
	limiter limiter
	health  health
	sharded bool // its calls go to several servers

	// For locks over several nodes:
	addr     string              // "" if rc does not say
	requests *semaphore.Weighted // those under way of the locks that have this for their first node
}

// endpoints holds the endpoint of each client for as long as a mutex uses it.
var endpoints struct {
	sync.Mutex
	m map[redis.Scripter]weak.Pointer[endpoint]
}

func endpointOf(rc redis.Scripter) *endpoint {
	if !reflect.TypeOf(rc).Comparable() {
		return newEndpoint(rc)
	}
	if ep := sharedEndpoint(rc, nil); ep != nil {
		return ep
	}
	return sharedEndpoint(rc, newEndpoint(rc)) // made under no mutex: it calls methods of rc
}

// sharedEndpoint returns the endpoint of rc. If there is none, it is made one.
func sharedEndpoint(rc redis.Scripter, made *endpoint) *endpoint {
	endpoints.Lock()
	defer endpoints.Unlock()
	if ep := endpoints.m[rc].Value(); ep != nil || made == nil {
		return ep
	}
	if endpoints.m == nil {
		endpoints.m = map[redis.Scripter]weak.Pointer[endpoint]{}
	}
	self := weak.Make(made)
	endpoints.m[rc] = self
	runtime.AddCleanup(made, func(rc redis.Scripter) {
		endpoints.Lock()
		defer endpoints.Unlock()
		if endpoints.m[rc] == self {
			delete(endpoints.m, rc)
		}
	}, rc)
	return made
}

func newEndpoint(rc redis.Scripter) *endpoint {
	ep := &endpoint{rc: rc, resend: resendAfter(rc)}
	if rc, ok := rc.(interface{ Options() *redis.Options }); ok {
		ep.addr = rc.Options().Addr
	}
	if p, ok := rc.(interface {
		Process(context.Context, redis.Cmder) error
	}); ok {
		ep.process = p.Process
	}
	if p, ok := rc.(interface{ Pipeline() redis.Pipeliner }); ok {
		ep.pipeline = p.Pipeline
	}
	// A Ring publishes on the shard of the lock and subscribes on that of the
	// channel: it would never hear anything.
	sub, _ := rc.(mailbox.Subscriber)
	if _, ring := rc.(*redis.Ring); ring {
		sub = nil
	}
	ep.box = mailbox.New(sub, mailboxes+strconv.FormatUint(boxes.Add(1), 10))
	ep.keeper.ep = ep
	ep.workers = make(workers)
	ep.limiter = newLimiter(rc)
	ep.sharded = isSharded(rc)
	ep.requests = semaphore.NewWeighted(int64(connections(rc)))
	ep.health.answered.Store(int64(always))
	return ep
}

// resendAfter is the least time after which rc sends a command again whose
// reply was lost: the first of its back-offs.
func resendAfter(rc redis.Scripter) time.Duration {
	switch rc := rc.(type) {
	case interface{ Options() *redis.Options }:
		if rc.Options().MaxRetries <= 0 {
			return math.MaxInt64
		}
		return rc.Options().MinRetryBackoff
	case interface{ Options() *redis.ClusterOptions }:
		return rc.Options().MinRetryBackoff
	case interface{ Options() *redis.RingOptions }:
		return rc.Options().MinRetryBackoff
	}
	return 8 * time.Millisecond // no more than go-redis' default
}

// pushed says whether grants reach this process by message, as far as it
// knows.
func (ep *endpoint) pushed() bool { return ep.box.Hears() && !ep.mute.Load() }

// note takes what a reply says of the server.
func (ep *endpoint) note(r reply, log logger) {
	if r.untold && !ep.mute.Swap(true) {
		log.error("", errors.New("redismutex: PUBLISH is refused, so waiters are not woken and look for themselves: "+
			"allow the command and the channels "+channelPrefix+"* in the ACL"))
	}
}

// inspect logs, once, if the server may evict keys: a lock may then vanish. It
// does so beside the first lock, not before it, and is content not to know.
func (ep *endpoint) inspect(log logger) {
	if ep.looked.Load() || ep.looked.Swap(true) {
		return
	}
	rc, ok := ep.rc.(interface {
		Info(ctx context.Context, section ...string) *redis.StringCmd
	})
	if !ok {
		return
	}
	go func() {
		info, err := rc.Info(context.Background(), "memory").Result()
		if err != nil {
			return
		}
		_, policy, _ := strings.Cut(info, "maxmemory_policy:")
		policy, _, _ = strings.Cut(policy, "\r\n")
		if policy != "" && policy != "noeviction" && !strings.Contains(info, "\r\nmaxmemory:0\r\n") {
			log.error("", errors.New("redismutex: maxmemory-policy is "+policy+
				": Redis may evict a lock that is held; set it to noeviction"))
		}
	}()
}

// workers run calls side by side, on goroutines that have run others before if
// any of those are idle. A call needs a deep stack, and to grow one anew for each
// took a fifth of the client's time.
type workers chan func()

// linger is how long a worker is idle before it ends.
const linger = time.Second

func (w workers) run(f func()) {
	select {
	case w <- f:
	default:
		go w.work(f)
	}
}

func (w workers) work(f func()) {
	idle := time.NewTimer(linger)
	defer idle.Stop()
	for {
		f()
		idle.Reset(linger)
		select {
		case f = <-w:
		case <-idle.C:
			return
		}
	}
}

// started is the origin of this package's clock.
var started = time.Now()

// An instant is a time on the monotonic clock of this process.
type instant int64

func now() instant { return instant(time.Since(started)) }

func (i instant) add(d time.Duration) instant { return i + instant(d) }

func (i instant) time() time.Time { return time.Now().Add(time.Duration(i - now())) }
