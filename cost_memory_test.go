//go:build !race

package redismutex

// This file answers: what does a lock cost in memory? The race detector
// allocates as well, so it is not asked.

import (
	"context"
	"fmt"
	"runtime"
	"testing"

	"github.com/redismutex/redismutex/internal/redistest"
)

// The 17 of Lock and Unlock to write are: the request, the Lock, its id (2), its
// context (2), the arguments of two calls (2); and in go-redis two commands (2),
// a look at the connection before each (6), and the token in the reply.
func TestAllocationsOfAnUncontendedLock(t *testing.T) {
	ctx := context.Background()
	m := NewMutex(redistest.Start(t).Client(t), "x")
	for _, write := range []bool{true, false} {
		lock := m.RLockContext
		if write {
			lock = m.LockContext
		}
		n := testing.AllocsPerRun(1000, func() {
			l, err := lock(ctx)
			if err != nil {
				t.Fatal(err)
			}
			l.Unlock()
		})
		t.Logf("writer=%v: %v allocations", write, n)
		if n > 20 {
			t.Errorf("writer=%v: %v allocations for Lock and Unlock", write, n)
		}
	}
}

// A held lock has no goroutine and no timer of its own, and is small.
func TestHeldLockIsSmall(t *testing.T) {
	const n = 2000
	m := NewMutex(redistest.Start(t).Client(t), "x")
	locks, names := make([]*Lock, n), make([]LockOption, n)
	for i := range names {
		names[i] = WithKey(fmt.Sprint(i))
	}
	hold := func() {
		for i := range locks {
			l, err := m.LockContext(context.Background(), names[i])
			if err != nil {
				t.Fatal(err)
			}
			locks[i] = l
		}
	}
	free := func() {
		for _, l := range locks {
			l.Unlock()
		}
		clear(locks)
	}
	hold() // the pool, the heap of the keeper: what is there once, is there now
	free()
	goroutines, bytes := runtime.NumGoroutine(), liveBytes()
	hold()
	perLock := (liveBytes() - bytes) / n
	if more := runtime.NumGoroutine() - goroutines; more > 0 {
		t.Errorf("%d goroutines for %d held locks", more, n)
	}
	t.Logf("%d bytes for a held lock", perLock)
	if perLock > 620 {
		t.Errorf("%d bytes for a held lock", perLock)
	}
	free()
}

func liveBytes() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
