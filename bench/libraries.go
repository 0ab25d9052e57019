package main

// Each library is used as its documentation recommends. Where that leaves a choice, the choice favours the library.

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
	"github.com/redismutex/redismutex"
	"github.com/zeromicro/go-zero/core/logx"
	zero "github.com/zeromicro/go-zero/core/stores/redis"
)

const (
	ttl = redismutex.DefaultTTL // of all libraries

	connections = 128 // per client of go-redis at most

	// pause is the pause of libraries that poll and have no default: the least that redislock recommends.
	pause = 16 * time.Millisecond
)

const (
	ours, oursAuto   = "redismutex", "redismutex, AutoPipeliner"
	oursStrict       = "redismutex, strict" // WithTurn(0)
	raw, rawAuto     = "SET NX + script", "SET NX + script, AutoPipeliner"
	blpop, blpopAuto = "BLPOP + LPUSH", "BLPOP + LPUSH, AutoPipeliner"
	pairs            = "EVALSHA pairs, no exclusion"

	rueidisLock, rueidisLoop   = "rueidislock", "rueidislock, no NoLoopTracking"
	redSync, redisLock, goZero = "redsync", "redislock", "go-zero RedisLock"
)

// peers are the other libraries. What is neither redismutex nor a peer is a floor.
var peers = []string{rueidisLock, rueidisLoop, redSync, redisLock, goZero}

// A client is what one process uses of a library.
type client struct {
	lock  func(key string) lock // called once for each goroutine
	rlock func(key string) lock // nil: it has no read locks
	many  func(key string) lock // nil: lock is also used for many keys
	close func() error
}

// A lock waits for its key until ctx ends.
type lock func(ctx context.Context) (unlock func() error, err error)

// open makes a client of the library for the server at addr.
func open(library, addr string) (*client, error) {
	return map[string]func(string) (*client, error){
		ours:        onPlain(func(rc redisClient) *client { return openOurs(rc) }),
		oursStrict:  onPlain(func(rc redisClient) *client { return openOurs(rc, redismutex.WithTurn(0)) }),
		oursAuto:    onAuto(func(rc redisClient) *client { return openOurs(rc) }),
		raw:         onPlain(openRaw),
		rawAuto:     onAuto(openRaw),
		blpop:       onPlain(openBLPop),
		blpopAuto:   onAuto(openBLPop),
		pairs:       onPlain(openPairs),
		redSync:     onPlain(func(rc redisClient) *client { return openRedsync(rc.(*redis.Client)) }),
		redisLock:   onPlain(openRedislock),
		rueidisLock: openRueidislock(true),
		rueidisLoop: openRueidislock(false),
		goZero:      openGoZero,
	}[library](addr)
}

// A redisClient is a client of go-redis, plain or pipelined.
type redisClient interface {
	redis.Scripter
	redis.StringCmdable
	redis.ListCmdable
}

// dial returns a client with a connection for every goroutine, but no more than connections.
func dial(addr string) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: addr, PoolSize: connections, PoolTimeout: time.Minute})
}

func onPlain(open func(redisClient) *client) func(string) (*client, error) {
	return func(addr string) (*client, error) {
		rc := dial(addr)
		c := open(rc)
		c.close = rc.Close
		return c, nil
	}
}

func onAuto(open func(redisClient) *client) func(string) (*client, error) {
	return func(addr string) (*client, error) {
		rc := dial(addr)
		ap, err := rc.AutoPipelineWithOptions(&redis.AutoPipelineOptions{FullDuplex: true})
		if err != nil {
			return nil, errors.Join(err, rc.Close())
		}
		c := open(ap)
		c.close = func() error { return errors.Join(ap.Close(), rc.Close()) }
		return c, nil
	}
}

func openOurs(rc redisClient, opt ...redismutex.MutexOption) *client {
	c := useOurs(func(key string) *redismutex.RWMutex { return redismutex.NewMutex(rc, key, opt...) })
	m := redismutex.NewMutex(rc, "many", opt...)
	c.many = func(key string) lock {
		return func(ctx context.Context) (func() error, error) {
			l, err := m.LockContext(ctx, redismutex.WithKey(key))
			if err != nil {
				return nil, err
			}
			return func() error { return l.UnlockContext(context.Background()) }, nil
		}
	}
	return c
}

func useOurs(mutex func(key string) *redismutex.RWMutex) *client {
	use := func(verb func(*redismutex.RWMutex, context.Context, ...redismutex.LockOption) (*redismutex.Lock, error)) func(string) lock {
		return func(key string) lock {
			m := mutex(key)
			return func(ctx context.Context) (func() error, error) {
				l, err := verb(m, ctx)
				if err != nil {
					return nil, err
				}
				return func() error { return l.UnlockContext(context.Background()) }, nil
			}
		}
	}
	return &client{lock: use((*redismutex.RWMutex).LockContext), rlock: use((*redismutex.RWMutex).RLockContext)}
}

var compareAndDelete = redis.NewScript(`
	if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
	return 0`)

var errHeld = errors.New("held by another client")

// openRaw opens the simplest lock, for uncontended keys: it does not wait.
func openRaw(rc redisClient) *client {
	return &client{lock: func(key string) lock {
		n := 0
		return func(ctx context.Context) (func() error, error) {
			n++
			id := fmt.Sprint("some-random-id-of-a-lock-", n)
			if ok, err := rc.SetNX(ctx, key, id, ttl).Result(); err != nil || !ok {
				return nil, cmp.Or(err, errHeld)
			}
			return func() error {
				return compareAndDelete.Run(context.Background(), rc, []string{key}, id).Err()
			}, nil
		}
	}}
}

var putToken = redis.NewScript(`
	if redis.call('SETNX', KEYS[2], 1) == 1 then redis.call('LPUSH', KEYS[1], 'token') end
	return 1`)

// openBLPop opens the simplest lock that waits. A holder that crashes loses the token for good. It ignores ctx, since the token always
// comes back.
func openBLPop(rc redisClient) *client {
	return &client{lock: func(key string) lock {
		put := putToken.Run(context.Background(), rc, []string{key, key + ":made"}).Err()
		return func(context.Context) (func() error, error) {
			if err := cmp.Or(put, rc.BLPop(context.Background(), 0, key).Err()); err != nil {
				return nil, err
			}
			return func() error { return rc.LPush(context.Background(), key, "token").Err() }, nil
		}
	}}
}

var nothing = redis.NewScript("return 1")

// openPairs opens a lock that excludes nobody: it calls scripts that do nothing, with as many keys and arguments as those of redismutex.
func openPairs(rc redisClient) *client {
	return &client{lock: func(key string) lock {
		keys := []string{key, "{" + key + "}:lock-intent", "{" + key + "}:lease", "{" + key + "}:token"}
		return func(ctx context.Context) (func() error, error) {
			if err := nothing.Run(ctx, rc, keys, "mailbox:some-random-id:1", "4000", "join:0").Err(); err != nil {
				return nil, err
			}
			return func() error {
				return nothing.Run(context.Background(), rc, keys, "mailbox:some-random-id:1", "w").Err()
			}, nil
		}
	}}
}

// openRedsync uses the default delays, but does not give up. A redsync mutex is not safe for concurrent use.
func openRedsync(nodes ...*redis.Client) *client {
	var pools []redsyncredis.Pool
	for _, rc := range nodes {
		pools = append(pools, goredis.NewPool(rc))
	}
	rs := redsync.New(pools...)
	return &client{lock: func(key string) lock {
		m := rs.NewMutex(key, redsync.WithExpiry(ttl), redsync.WithTries(math.MaxInt))
		return func(ctx context.Context) (func() error, error) {
			if err := m.LockContext(ctx); err != nil {
				return nil, err
			}
			return func() error { _, err := m.Unlock(); return err }, nil
		}
	}}
}

func openRedislock(rc redisClient) *client {
	locker := redislock.New(rc)
	how := &redislock.Options{RetryStrategy: redislock.LinearBackoff(pause)}
	return &client{lock: func(key string) lock {
		return func(ctx context.Context) (func() error, error) {
			for {
				l, err := locker.Obtain(ctx, key, ttl, how)
				switch {
				case err == nil:
					return func() error { return l.Release(context.Background()) }, nil
				case ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded):
					return nil, err // otherwise it has waited for the time of a lease, and tries again
				}
			}
		}
	}}
}

// openRueidislock follows the README for one Redis since 7.0.5, or does without NoLoopTracking. There is no next key to try, so the
// time to wait for a reply is long: with NoLoopTracking, a waiter that gives up after the default of 20 ms is never woken.
func openRueidislock(noLoop bool) func(addr string) (*client, error) {
	return func(addr string) (*client, error) {
		locker, err := rueidislock.NewLocker(rueidislock.LockerOption{
			ClientOption:   rueidis.ClientOption{InitAddress: []string{addr}},
			KeyMajority:    1,
			KeyValidity:    ttl,
			TryNextAfter:   time.Second,
			NoLoopTracking: noLoop,
		})
		if err != nil {
			return nil, err
		}
		return &client{
			lock: func(key string) lock {
				return func(ctx context.Context) (func() error, error) {
					_, unlock, err := locker.WithContext(ctx, key)
					return func() error { unlock(); return nil }, err
				}
			},
			close: func() error { locker.Close(); return nil },
		}, nil
	}
}

// go-zero prints statistics every minute, whether it is used or not.
func init() { logx.Disable() }

// openGoZero polls, since the library does not wait. All its clients of one address share their connections, and cannot be closed.
func openGoZero(addr string) (*client, error) {
	// Its circuit breaker counts two things as failures: servers before Redis 7.2 reject the introduction of a connection, and scripts
	// are not loaded yet. Many at once would open it for seconds.
	store, err := zero.NewRedis(zero.RedisConf{Host: addr, Type: zero.NodeType, DisableIdentity: true})
	if err != nil {
		return nil, err
	}
	c := &client{
		lock: func(key string) lock {
			l := zero.NewRedisLock(store, key)
			l.SetExpire(int(ttl.Seconds()))
			return func(ctx context.Context) (func() error, error) {
				for {
					if held, err := l.AcquireCtx(ctx); err != nil {
						return nil, err
					} else if held {
						return func() error { _, err := l.Release(); return err }, nil
					}
					select {
					case <-time.After(pause):
					case <-ctx.Done():
						return nil, ctx.Err()
					}
				}
			}
		},
		close: func() error { return nil },
	}
	unlock, err := c.lock("first:" + rand.Text())(context.Background())
	if err != nil {
		return nil, err
	}
	return c, unlock()
}

// openQuorum returns a client of several independent servers.
func openQuorum(library string, addrs []string) *client {
	var nodes []*redis.Client
	var scripters []redis.Scripter
	for _, addr := range addrs {
		rc := dial(addr)
		nodes, scripters = append(nodes, rc), append(scripters, rc)
	}
	c := openRedsync(nodes...)
	if library == ours {
		c = useOurs(func(key string) *redismutex.RWMutex { return redismutex.NewRedlock(scripters, key) })
	}
	c.close = func() (err error) {
		for _, rc := range nodes {
			err = errors.Join(err, rc.Close())
		}
		return err
	}
	return c
}
