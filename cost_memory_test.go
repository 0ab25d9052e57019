//go:build !race

package redismutex

// What a lock costs in memory. The race detector allocates too, so this is not built with it.

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"testing"
	"time"

	"github.com/redismutex/redismutex/internal/redistest"
)

// The 19 allocations of Lock and Unlock of a write lock are: the Lock, what the library keeps of it, its queue with the
// acquisition, its wait, its id in two calls (2), its context (2), the arguments of these calls (2); and in go-redis two
// commands (2), the check of the connection before each (6), and the token in the reply.
func TestAllocationsOfAnUncontendedLock(t *testing.T) {
	ctx := context.Background()
	rc := redistest.Start(t).Client(t)
	for _, c := range []struct {
		write bool
		m     *RWMutex
	}{
		{true, NewMutex(rc, "x")},
		{false, NewMutex(rc, "x")},
		{true, NewMutex(rc, "x", WithTrace(new(Trace)))}, // nil functions cost nothing
	} {
		m, write := c.m, c.write
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
			t.Errorf("writer=%v: %v allocations for Lock and Unlock, want at most 20", write, n)
		}
	}
}

// A held lock has no goroutine and no timer of its own, and takes at most 700 bytes, also when it has been renewed and the
// garbage collector watches it.
func TestHeldLockIsSmall(t *testing.T) {
	const n = 2000
	m := NewMutex(redistest.Start(t).Client(t), "x", WithTTL(time.Minute))
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
	hold() // makes what is made once: the pool, the heap of the renewer
	free()
	perLock := int64(math.MaxInt64)
	for range 5 { // what else is allocated meanwhile only adds to it
		goroutines, bytes := runtime.NumGoroutine(), liveBytes()
		hold()
		for _, l := range locks {
			(*user)(l).Watch() // as the first renewal does; that would open more connections
		}
		perLock = min(perLock, (liveBytes()-bytes)/n)
		if more := runtime.NumGoroutine() - goroutines; more > 0 {
			t.Errorf("%d more goroutines for %d held locks, want none", more, n)
		}
		free()
	}
	t.Logf("%d bytes for a held lock", perLock)
	if perLock > 700 {
		t.Errorf("%d bytes for a held lock, want at most 700", perLock)
	}
}

func liveBytes() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
