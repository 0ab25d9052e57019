package localqueue

import (
	"context"
	"reflect"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

// a user whose Granted comes as the acquisition is lost: the loss comes between Has and Remove of Grant.unlock.
type lossUser struct {
	caller
	holder *caller
	once   bool
}

func (l *lossUser) Granted(g *Grant) {
	l.grant = g
	if l.once { return }
	l.once = true
	until := reflect.ValueOf(&g.turn.acq).Elem().FieldByName("until").Addr().UnsafePointer()
	(*atomic.Int64)(until).Store(int64(clock.Now()))
	go g.turn.acq.Usable(l.holder) // on another goroutine, as the timer of the renewer would
	for g.turn.acq.Trusted(clock.Always) { runtime.Gosched() }
}

// F3
func TestAttackLossDuringUnlock(t *testing.T) {
	redistest.MiniLocks(t)
	synctest.Test(t, func(t *testing.T) {
		defer time.Sleep(10 * time.Minute)
		_, rc := redistest.Mini(t)
		c := newConfig(firstCome, rc)
		keys, _ := script.NewKeys("x")
		holder, next := &caller{}, &lossUser{}
		next.holder = holder
		if err := Acquire(t.Context(), c, keys, true, false, holder); err != nil { t.Fatal(err) }
		ctx, cancel := context.WithCancel(t.Context())
		res := make(chan error, 1)
		go func() { res <- Acquire(ctx, c, keys, true, false, next) }()
		synctest.Wait()
		t.Log("unlock:", holder.grant.Unlock(context.Background(), holder))
		time.Sleep(time.Minute)
		select {
		case err := <-res:
			t.Log("served", err)
			next.grant.Unlock(context.Background(), next)
		default:
			t.Error("the waiter is stuck a minute after the loss")
		}
		cancel()
	})
}
