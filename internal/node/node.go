// Package node is one Redis client and what this process keeps for it: its calls, its limiter, its mailbox, its renewer and
// its health.
//
// A node tells the changes of a lease to the lease's [Owner]; it calls nothing else of the packages above it.
package node

import (
	"context"
	"errors"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/logger"
	"github.com/redismutex/redismutex/internal/mailbox"
	"github.com/redismutex/redismutex/internal/script"
	"golang.org/x/sync/semaphore"
)

// A Node is one Redis client and what this process keeps for it. All mutexes on that client share it.
type Node struct {
	Mailbox  *mailbox.Box
	Renewer  Renewer
	Health   Health
	Limiter  Limiter
	Requests *semaphore.Weighted // bounds the requests to several nodes that are under way and have this one as their first

	client
	rc             redis.Scripter
	process        func(context.Context, redis.Cmder) error // nil: the client can only evaluate scripts
	pipeline       func() redis.Pipeliner                   // nil: the client has none
	refusesPublish atomic.Bool                              // PUBLISH is refused
	configSeen     atomic.Bool                              // the server's settings have been looked at
	workers        workers
}

// nodes holds the node of each client for as long as a mutex uses it.
var nodes struct {
	sync.Mutex
	m map[redis.Scripter]weak.Pointer[Node]
}

// Of returns the node of a client.
func Of(rc redis.Scripter) *Node {
	if !reflect.TypeOf(rc).Comparable() {
		return newNode(rc)
	}
	if n := shared(rc, nil); n != nil {
		return n
	}
	return shared(rc, newNode(rc)) // made outside of the mutex: it calls methods of rc
}

// shared returns the node of rc. If there is none yet, it becomes made.
func shared(rc redis.Scripter, made *Node) *Node {
	nodes.Lock()
	defer nodes.Unlock()
	if n := nodes.m[rc].Value(); n != nil || made == nil {
		return n
	}
	if nodes.m == nil {
		nodes.m = map[redis.Scripter]weak.Pointer[Node]{}
	}
	self := weak.Make(made)
	nodes.m[rc] = self
	runtime.AddCleanup(made, func(rc redis.Scripter) {
		nodes.Lock()
		defer nodes.Unlock()
		if nodes.m[rc] == self {
			delete(nodes.m, rc)
		}
	}, rc)
	return made
}

func newNode(rc redis.Scripter) *Node {
	n := &Node{rc: rc, client: describe(rc), workers: make(workers)}
	if p, ok := rc.(interface {
		Process(context.Context, redis.Cmder) error
	}); ok {
		n.process = p.Process
	}
	if p, ok := rc.(interface{ Pipeline() redis.Pipeliner }); ok {
		n.pipeline = p.Pipeline
	}
	// A Ring publishes on the shard of the lock and subscribes on that of the channel, so it would never hear a message.
	sub, _ := rc.(mailbox.Subscriber)
	if _, ring := rc.(*redis.Ring); ring {
		sub = nil
	}
	n.Mailbox = mailbox.New(sub, ChannelPrefix+process.get()+"."+strconv.FormatUint(mailboxes.Add(1), 10), n.Renewer.onRevoked)
	n.Renewer.node = n
	n.Limiter = newLimiter(n.connections)
	n.Requests = semaphore.NewWeighted(int64(n.connections))
	n.Health.init()
	return n
}

// MaySendTwice reports whether a call that was sent at that instant and ended now may have been sent twice.
func (n *Node) MaySendTwice(sent clock.Instant) bool {
	return time.Duration(clock.Now()-sent) >= n.resend
}

// deliversGrants reports whether grants reach this process by message.
func (n *Node) deliversGrants() bool { return n.Mailbox.Listens() && !n.refusesPublish.Load() }

// CheckPublish logs, once, that the server refuses to publish the grants, if a reply tells so.
func (n *Node) CheckPublish(r script.Reply, log logger.Logger) {
	if r.Unpublished && !n.refusesPublish.Swap(true) {
		log.Error("", "PUBLISH is refused; waiters are not woken, and poll every 250 ms at most",
			errors.New("allow the command PUBLISH and the channels "+ChannelPrefix+"* in the ACL"))
	}
}

// CheckEviction logs, once, if the server may evict keys, since a lock may then vanish. It asks the server beside the
// first lock, not before it, and does without an answer.
func (n *Node) CheckEviction(log logger.Logger) {
	if n.configSeen.Load() || n.configSeen.Swap(true) {
		return
	}
	rc, ok := n.rc.(interface {
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
			log.Error("", "Redis may evict a lock that is held", errors.New("maxmemory-policy is "+policy+"; set it to noeviction"))
		}
	}()
}

// LookForLostGrants renews the waiters of a key if a release may have granted the lock to one of them in a reply that was
// lost: the reply carries the grants to its own process. Sent is when the release was sent, and again tells that an earlier
// one was not confirmed; r and err are its outcome.
func (n *Node) LookForLostGrants(key string, sent clock.Instant, again bool, r script.Reply, err error) {
	if err != nil || r.Status != script.Released && r.Status != script.Foreign && (again || n.MaySendTwice(sent)) {
		n.Mailbox.RenewWaiters(key)
	}
}

// HasGivenUp reports whether id is one that this client has asked with, and that neither waits nor holds for this process: its
// release is on its way, or its acquire, which nobody waits for any more.
func (n *Node) HasGivenUp(id string) bool {
	mailbox, of := cut(id, ':')
	number, err := strconv.ParseUint(of, 10, 64)
	return err == nil && mailbox == n.Mailbox.Name() && !n.Renewer.keeps(number)
}

// Go runs f on a worker: an idle one, if there is one.
func (n *Node) Go(f func()) {
	select {
	case n.workers <- f:
	default:
		go n.workers.work(f)
	}
}

// workers run calls side by side, on goroutines that have run others before if any of those are idle. A call needs a
// deep stack, and growing a new one for each took a fifth of the client's time.
type workers chan func()

// linger is how long a worker is idle before it ends.
const linger = time.Second

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
