package redismutex

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/redistest"
)

// Many read locks that are held for long, each of a turn of its own: every event walks through all of them.
func TestAttackManyTurns(t *testing.T) {
	SetLog(func(string, ...any) {})
	s := redistest.Start(t)
	rc := redis.NewClient(&redis.Options{Addr: s.Addr()})
	defer rc.Close()
	for name, d := range map[string]time.Duration{"turn 1 ns": 1, "strict": 0} {
		m := NewMutex(rc, "x"+name, WithTurn(d), WithTTL(time.Minute))
		var locks []*Lock
		last := time.Now()
		for i := range 8001 {
			l, err := m.RLockContext(context.Background())
			if err != nil { t.Fatal(err) }
			locks = append(locks, l)
			if i%2000 == 0 { t.Logf("%s: %d held; the last 2000 took %v", name, i, time.Since(last)); last = time.Now() }
		}
		for _, l := range locks { l.Unlock() }
		t.Logf("%s: unlock all %v", name, time.Since(last))
	}
}
