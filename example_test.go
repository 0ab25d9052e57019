package redismutex_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/redismutex/redismutex"
)

// A lock is the context of the work that it protects: the work ends with the lock, also when the lock is lost.
func Example() {
	rc, stop := startRedis() // any client of go-redis
	defer stop()
	mutex := redismutex.NewMutex(rc, "report")

	publish := func(ctx context.Context) error {
		lock, err := mutex.LockContext(ctx)
		if err != nil {
			return err
		}
		defer lock.Unlock()

		return rc.Set(lock, "published", "Monday's report", 0).Err()
	}

	ctx := context.Background()
	if err := publish(ctx); err != nil {
		fmt.Println(err)
	}
	fmt.Println(rc.Get(ctx, "published").Val())
	// Output: Monday's report
}

// Three masters that know nothing of each other keep the lock together, and one of them may be lost.
func ExampleNewRedlock() {
	a, stopA := startRedis()
	b, stopB := startRedis()
	c, stopC := startRedis()
	defer stopA()
	defer stopB()
	mutex := redismutex.NewRedlock([]redis.Scripter{a, b, c}, "report")

	stopC()
	lock, err := mutex.LockContext(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Unlock()
	fmt.Println("held:", lock.Key(), lock.Err())
	// Output: held: report <nil>
}

// The error of a refused call names the process that holds the lock.
func ExampleHeldError() {
	rc, stop := startRedis()
	defer stop()
	mutex := redismutex.NewMutex(rc, "report")
	ctx := context.Background()
	lock, err := mutex.LockContext(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Unlock()

	_, err = mutex.TryLockContext(ctx)
	var held *redismutex.HeldError
	if errors.As(err, &held) { // held.Process is "<host>/<pid>"
		fmt.Println(held.Key, "is held by", held.Holder == lock.ID())
	}
	// Output: report is held by true
}

// The cause of a lock's context is the reason for its end.
func ExampleLock() {
	rc, stop := startRedis()
	defer stop()
	mutex := redismutex.NewMutex(rc, "report")

	lock, err := mutex.LockContext(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("held:", lock.Key(), context.Cause(lock))
	lock.Unlock()

	<-lock.Done()
	fmt.Println("unlocked:", errors.Is(context.Cause(lock), redismutex.ErrUnlocked))
	fmt.Println("lost:", errors.Is(context.Cause(lock), redismutex.ErrLockLost))
	// Output:
	// held: report <nil>
	// unlocked: true
	// lost: false
}

// An order is placed once per user, however often the button is pushed. Each user has a lock of their own, so that
// nobody waits for anybody else.
func ExampleRWMutex_LockContext() {
	rc, stop := startRedis()
	defer stop()
	mutex := redismutex.NewMutex(rc, "order")

	placeOrder := func(ctx context.Context, userID string) error {
		lock, err := mutex.LockContext(ctx, redismutex.WithKey(userID))
		if err != nil {
			return err
		}
		defer lock.Unlock()

		placed, err := rc.Exists(lock, "orders:"+userID).Result()
		if err != nil || placed > 0 {
			return err
		}
		return rc.RPush(lock, "orders:"+userID, "one bicycle").Err()
	}

	ctx := context.Background()
	users := []string{"ann", "ben"}
	var pushes sync.WaitGroup
	for _, userID := range users {
		for range 5 {
			pushes.Go(func() {
				if err := placeOrder(ctx, userID); err != nil {
					fmt.Println(err)
				}
			})
		}
	}
	pushes.Wait()

	for _, userID := range users {
		fmt.Println(userID, rc.LRange(ctx, "orders:"+userID, 0, -1).Val())
	}
	// Output:
	// ann [one bicycle]
	// ben [one bicycle]
}

// A transfer holds the locks of both accounts, so that transfers between other accounts go on meanwhile. It acquires them
// in the order of their names: otherwise two transfers in opposite directions would wait for each other for ever. The
// second lock has the first as its parent, and so ends with either.
func ExampleRWMutex_LockContext_balance() {
	rc, stop := startRedis()
	defer stop()
	mutex := redismutex.NewMutex(rc, "account")

	transfer := func(ctx context.Context, from, to string, amount int) error {
		if from == to {
			return nil
		}
		first, err := mutex.LockContext(ctx, redismutex.WithKey(min(from, to)))
		if err != nil {
			return err
		}
		defer first.Unlock()
		both, err := mutex.LockContext(first, redismutex.WithKey(max(from, to)))
		if err != nil {
			return err
		}
		defer both.Unlock()

		giver, err := rc.Get(both, from).Int()
		if err != nil {
			return err
		}
		if giver < amount {
			return errors.New("not enough money")
		}
		taker, err := rc.Get(both, to).Int()
		if err != nil {
			return err
		}
		return rc.MSet(both, from, giver-amount, to, taker+amount).Err()
	}

	ctx := context.Background()
	rc.MSet(ctx, "ann", 100, "ben", 100)
	var transfers sync.WaitGroup
	for range 5 {
		transfers.Go(func() {
			if err := transfer(ctx, "ann", "ben", 10); err != nil {
				fmt.Println(err)
			}
		})
		transfers.Go(func() {
			if err := transfer(ctx, "ben", "ann", 4); err != nil {
				fmt.Println(err)
			}
		})
	}
	transfers.Wait()

	fmt.Println("ann", rc.Get(ctx, "ann").Val(), "ben", rc.Get(ctx, "ben").Val())
	// Output: ann 70 ben 130
}

// Readers hold the lock together, and keep writers out.
func ExampleRWMutex_RLockContext() {
	rc, stop := startRedis()
	defer stop()
	ctx := context.Background()
	rc.Set(ctx, "price", 42, 0)
	mutex := redismutex.NewMutex(rc, "prices")

	ann, err := mutex.RLockContext(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer ann.Unlock()
	ben, err := mutex.RLockContext(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer ben.Unlock()
	fmt.Println("both read", rc.Get(ann, "price").Val(), rc.Get(ben, "price").Val())

	_, err = mutex.TryLockContext(ctx)
	fmt.Println("a writer is kept out:", errors.Is(err, redismutex.ErrLock))
	// Output:
	// both read 42 42
	// a writer is kept out: true
}

// A job falls due on many machines: one does it, and the others do not wait.
func ExampleRWMutex_TryLockContext() {
	rc, stop := startRedis()
	defer stop()
	mutex := redismutex.NewMutex(rc, "nightly-job")

	ctx := context.Background()
	lock, err := mutex.TryLockContext(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Unlock()
	fmt.Println("the first machine does the job")

	_, err = mutex.TryLockContext(ctx)
	switch {
	case errors.Is(err, redismutex.ErrLock):
		fmt.Println("the second leaves it to the first")
	case err != nil:
		fmt.Println("whether it is being done is not known:", err)
	}
	// Output:
	// the first machine does the job
	// the second leaves it to the first
}

// A holder that was paused does not know that its lease has ended, and a write of its own may still be under way. The
// document remembers the greatest fencing token it has seen and refuses a lower one. Numbers in Lua are doubles, which do not
// hold a token, so tokens are compared as text: the longer one is the greater, or the later one in the alphabet.
func ExampleLock_Token() {
	rc, stop := startRedis()
	defer stop()
	mutex := redismutex.NewMutex(rc, "document")

	write := redis.NewScript(`
		local token, seen = ARGV[1], redis.call('HGET', KEYS[1], 'token') or ''
		if #token < #seen or #token == #seen and token < seen then
			return 'refused'
		end
		redis.call('HSET', KEYS[1], 'token', ARGV[1], 'text', ARGV[2])
		return 'written'`)

	ctx := context.Background()
	paused, err := mutex.LockContext(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	paused.Unlock() // stands in for a lease that ends while its holder is paused

	next, err := mutex.LockContext(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer next.Unlock()

	doc := []string{"document:1"}
	fmt.Println("new:", write.Run(next, rc, doc, next.Token(), "new").Val())
	fmt.Println("old:", write.Run(ctx, rc, doc, paused.Token(), "old").Val())
	fmt.Println("the document says", rc.HGet(ctx, "document:1", "text").Val())
	// Output:
	// new: written
	// old: refused
	// the document says new
}

// startRedis starts a Redis inside this process. An example has no testing.TB, which the fixtures of redistest need.
func startRedis() (rc *redis.Client, stop func()) {
	server, err := miniredis.Run()
	if err != nil {
		panic(err)
	}
	server.ClockTTL(true) // else its keys would never expire
	rc = redis.NewClient(&redis.Options{Addr: server.Addr()})
	return rc, func() {
		rc.Close()
		server.Close()
	}
}

// A function that locks can be called by one that holds the lock already: given that lock as its context, its own is
// nested in it.
func ExampleRWMutex_LockContext_nested() {
	rc, stop := startRedis()
	defer stop()
	account := redismutex.NewMutex(rc, "account")

	deposit := func(ctx context.Context, amount int64) error {
		lock, err := account.LockContext(ctx)
		if err != nil {
			return err
		}
		defer lock.Unlock()
		return rc.IncrBy(lock, "balance", amount).Err()
	}

	ctx := context.Background()
	lock, err := account.LockContext(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 3 {
		if err := deposit(lock, 10); err != nil {
			fmt.Println(err)
		}
	}
	lock.Unlock()
	fmt.Println(rc.Get(ctx, "balance").Val())
	// Output: 30
}

// A writer becomes a reader: others read what it has written before anybody else can write.
func ExampleLock_Downgrade() {
	rc, stop := startRedis()
	defer stop()
	report := redismutex.NewMutex(rc, "report")

	ctx := context.Background()
	lock, err := report.LockContext(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Unlock()
	rc.Set(lock, "published", "Monday's", 0)

	if err := lock.Downgrade(ctx); err != nil {
		fmt.Println(err)
		return
	}
	if reader, err := report.TryRLockContext(ctx); err == nil {
		fmt.Println("another one reads:", rc.Get(reader, "published").Val())
		reader.Unlock()
	}
	_, err = report.TryLockContext(ctx)
	fmt.Println("another one may write:", err == nil)
	// Output:
	// another one reads: Monday's
	// another one may write: false
}

// Code further down checks, before it commits, how long the lock can still be trusted.
func ExampleFromContext() {
	rc, stop := startRedis()
	defer stop()
	report := redismutex.NewMutex(rc, "report")

	commit := func(ctx context.Context) error {
		if lock, ok := redismutex.FromContext(ctx); !ok || time.Until(lock.Until()) < time.Second {
			return errors.New("there is no lock that lasts long enough")
		}
		return rc.Set(ctx, "published", "Monday's", 0).Err()
	}

	lock, err := report.LockContext(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lock.Unlock()
	fmt.Println("with a lock:", commit(lock))
	fmt.Println("without:", commit(context.Background()))
	// Output:
	// with a lock: <nil>
	// without: there is no lock that lasts long enough
}

// Where the context cannot be passed on, calls of the same owner are nested.
func ExampleWithOwner() {
	rc, stop := startRedis()
	defer stop()
	stock := redismutex.NewMutex(rc, "stock")

	for _, owner := range []string{"order-17", "order-17", "order-18"} {
		_, err := stock.TryLockContext(context.Background(), redismutex.WithOwner(owner))
		fmt.Println(owner, err == nil)
	}
	// Output:
	// order-17 true
	// order-17 true
	// order-18 false
}
