package redismutex

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/redistest"
)

// F3 on a real server: the data of the server is lost while a writer unlocks and many readers wait.
func TestAttackLossWhileUnlocking(t *testing.T) {
	SetLog(func(string, ...any) {})
	s := redistest.Start(t)
	rc := redis.NewClient(&redis.Options{Addr: s.Addr()})
	defer rc.Close()
	const ttl = 400 * time.Millisecond
	const readers = 30000
	end := time.Now().Add(40 * time.Second)
	for round := 0; time.Now().Before(end); round++ {
		m := NewMutex(rc, fmt.Sprint("x", round), WithTTL(ttl), WithTurn(ttl/4))
		// a turn of ttl/4 begins with this lock; the loss has to be noticed within it: a Downgrade of nobody... a renewal
		l, err := m.LockContext(context.Background())
		if err != nil { t.Fatal(err) }
		born := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		var all sync.WaitGroup
		var mu sync.Mutex
		stuck := 0
		for range readers {
			all.Go(func() {
				r, err := m.RLockContext(ctx)
				if err != nil { mu.Lock(); stuck++; mu.Unlock(); return }
				r.Unlock()
			})
		}
		time.Sleep(ttl/4 - 30*time.Millisecond - time.Since(born))
		rc.FlushDB(context.Background())
		// the holder is renewed at once, as it is when a subscription starts; here by a downgrade that finds nothing
		go func() { time.Sleep(time.Duration(round%10) * 500*time.Microsecond); _ = l.Downgrade(context.Background()) }()
		go func(n string) {
			select { case <-time.After(6 * time.Second): case <-ctx.Done(): return }
			intents, _ := rc.ZCard(context.Background(), "{"+n+"}:lock-intent").Result()
			holds, _ := rc.Exists(context.Background(), n).Result()
			t.Logf("%s after 6 s: %d hold, %d wait in Redis", n, holds, intents)
		}(fmt.Sprint("x", round))
		err = l.UnlockContext(context.Background())
		all.Wait()
		cancel()
		if stuck > 0 {
			t.Fatalf("round %d: unlock after %v: %v; %d readers waited for 10 s in vain", round, time.Since(born), err, stuck)
		}
		t.Log(round, err, time.Since(born))
	}
}
