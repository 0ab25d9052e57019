package redismutex

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/redistest"
)

// F6: a writer that takes over within a turn downgrades before its predecessor is out of the acquisition.
func TestAttackDowngradeRightAfterHandover(t *testing.T) {
	s := redistest.Start(t)
	rc := redis.NewClient(&redis.Options{Addr: s.Addr()})
	defer rc.Close()
	m := NewMutex(rc, "x", WithTurn(time.Second))
	var all sync.WaitGroup
	var once sync.Once
	n := 0
	end := time.Now().Add(15 * time.Second)
	failed := false
	for range 32 {
		all.Go(func() {
			for time.Now().Before(end) && !failed {
				l, err := m.LockContext(context.Background())
				if err != nil { t.Error(err); return }
				n++
				if n%5 == 0 {
				if err := l.Downgrade(context.Background()); errors.Is(err, ErrInvalid) {
					once.Do(func() { failed = true; t.Errorf("after %d locks: %v", n, err) })
				}}
				l.Unlock()
			}
		})
	}
	all.Wait()
	t.Log(n, "locks")
}
