package redismutex

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/redistest"
)

// F4 in a crowd: mutexes that name the same nodes in different orders.
func TestAttackNodeOrderCrowd(t *testing.T) {
	for _, shuffled := range []bool{false, true} {
		onNodes(t, 3, func(ns *nodes) {
			var inside redistest.Witness
			var all sync.WaitGroup
			var mu sync.Mutex
			var longest time.Duration
			bad := map[string]int{}
			for p := range 2 {
				clients := ns.process()
				for o := range 3 {
					c := slices.Clone(clients)
					if shuffled { c = []redis.Scripter{clients[o], clients[(o+1)%3], clients[(o+2)%3]} }
					m := NewRedlock(c, "x", WithLogger((&redistest.Log{}).Logger()))
					for g := range 4 {
						r := rand.New(rand.NewPCG(uint64(p*100+o*10), uint64(g)))
						all.Go(func() {
							for range 60 {
								write := r.IntN(2) == 0
								ask := m.RLockContext
								if write { ask = m.LockContext }
								start := time.Now()
								l, err := ask(context.Background())
								if err != nil { t.Error(err); return }
								mu.Lock(); longest = max(longest, time.Since(start)); mu.Unlock()
								inside.Visit(write, func() { time.Sleep(time.Duration(r.IntN(3)) * time.Millisecond) })
								if err := l.UnlockContext(context.Background()); err != nil {
									mu.Lock()
									switch { case errors.Is(err, ErrLockLost): bad["lost"]++; default: bad[err.Error()]++ }
									mu.Unlock()
								}
							}
						})
					}
				}
			}
			all.Wait()
			t.Logf("shuffled %v: overlaps %d, longest wait %v, unlock errors %v", shuffled, len(inside.Overlaps), longest, bad)
		})
	}
}
