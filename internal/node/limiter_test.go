package node

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
)

// limited returns the node of a client with that many connections; none is opened.
func limited(t *testing.T, connections int) *Node {
	rc := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", PoolSize: connections})
	t.Cleanup(func() { rc.Close() })
	return newNode(rc)
}

// Calls are admitted in the order in which they came, and a call whose context has ended takes no place.
func TestCallsAreAdmittedInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := limited(t, 2)
		place := n.Limiter.Acquires
		for range 2 {
			if err := n.Admit(t.Context(), place, 0); err != nil {
				t.Fatal(err)
			}
		}
		var admitted []int
		ctx, giveUp := context.WithCancel(t.Context())
		for i := range 5 {
			go func() {
				mine := t.Context()
				if i == 2 {
					mine = ctx
				}
				if err := n.Admit(mine, place, 0); i == 2 {
					if !errors.Is(err, ErrInterrupted) {
						t.Errorf("want ErrInterrupted for a context that has ended, got %v", err)
					}
					return
				}
				admitted = append(admitted, i)
			}()
			synctest.Wait()
		}
		giveUp()
		synctest.Wait()
		for _, want := range [][]int{{0}, {0, 1}, {0, 1, 3}, {0, 1, 3, 4}} {
			place.Free()
			synctest.Wait()
			if !slices.Equal(admitted, want) {
				t.Errorf("admitted %v, want %v", admitted, want)
			}
		}
	})
}

// A release is admitted although acquires wait.
func TestReleasesDoNotWaitBehindAcquires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := limited(t, 3)
		ctx, giveUp := context.WithCancel(t.Context())
		for range 10 {
			go n.Admit(ctx, n.Limiter.Acquires, 0)
		}
		synctest.Wait()
		ended, end := context.WithTimeout(t.Context(), time.Second)
		defer end()
		if err := n.Admit(ended, n.Limiter.Releases, 0); err != nil {
			t.Error(err)
		}
		giveUp()
		synctest.Wait()
	})
}

// A call that waits for its place allocates nothing for that.
func TestWaitingForAPlaceAllocatesNothing(t *testing.T) {
	n, done := limited(t, 1), make(chan error)
	place := n.Limiter.Releases
	const goroutines, times = 8, 500
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range goroutines {
		go func() {
			var err error
			for range times {
				err = errors.Join(err, n.Admit(context.Background(), place, 0))
				runtime.Gosched() // the others wait
				place.Free()
			}
			done <- err
		}()
	}
	for range goroutines {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	runtime.ReadMemStats(&after)
	if per := float64(after.Mallocs-before.Mallocs) / (goroutines * times); per > 0.2 {
		t.Errorf("%.1f allocations for each call that waits, want none", per)
	}
}
