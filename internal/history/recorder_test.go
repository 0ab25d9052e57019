package history_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redismutex/redismutex/internal/history"
)

// since is a clock that starts now.
func since() func() int64 {
	start := time.Now()
	return func() int64 { return int64(time.Since(start)) }
}

// An rwLocker is the lock of a test.
type rwLocker interface {
	sync.Locker
	RLock()
	RUnlock()
}

// noLock excludes nobody.
type noLock struct{}

func (noLock) Lock()    {}
func (noLock) Unlock()  {}
func (noLock) RLock()   {}
func (noLock) RUnlock() {}

// use records some clients that lock and unlock repeatedly.
func use(l rwLocker, clock func() int64) []history.Op {
	r := history.New(clock, nil)
	var all sync.WaitGroup
	var mu sync.Mutex
	var token uint64
	start := make(chan struct{}) // otherwise the first could finish before the last starts
	for c := range 4 {
		all.Go(func() {
			<-start
			for i := range 50 {
				op := history.Op{Client: fmt.Sprint("client ", c), Key: "k", Kind: history.Read}
				lock, unlock := l.RLock, l.RUnlock
				if (i+c)%2 == 0 {
					op.Kind, lock, unlock = history.Write, l.Lock, l.Unlock
				}
				s := r.Begin(op)
				lock()
				var t uint64
				if op.Kind == history.Write {
					mu.Lock()
					token++
					t = token
					mu.Unlock()
				}
				s.Got(t, 0)
				runtime.Gosched() // otherwise locks would hardly ever overlap
				s.Unlocking()
				unlock()
				s.Freed()
			}
		})
	}
	close(start)
	all.Wait()
	return r.Ops()
}

// The checks catch a lock that excludes nobody, even if everything happens at one instant of virtual time.
func TestLockThatExcludesNobodyIsCaught(t *testing.T) {
	check := func(t *testing.T, clock func() int64) {
		good := use(new(sync.RWMutex), clock)
		for _, err := range []error{history.Exclusion(good), history.Tokens(good), linearizable(good)} {
			if err != nil {
				t.Errorf("want no error for a correct lock, got %v", err)
			}
		}
		// Once in some hundred runs the scheduler runs the goroutines one after the other, and no locks overlap.
		var exclusion, linear error
		for i := 0; i < 20 && (exclusion == nil || linear == nil); i++ {
			bad := use(noLock{}, clock)
			exclusion, linear = history.Exclusion(bad), linearizable(bad)
		}
		if exclusion == nil || linear == nil {
			t.Errorf("want an error of Exclusion and of Linearizable, got %v and %v", exclusion, linear)
		}
	}
	t.Run("real", func(t *testing.T) { check(t, since()) })
	t.Run("virtual", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) { check(t, since()) })
	})
	t.Run("standing still", func(t *testing.T) { check(t, func() int64 { return 0 }) })
}

// record records every kind of event.
func record(w io.Writer) *history.Recorder {
	r := history.New(func() int64 { return 0 }, w)
	a := r.Begin(history.Op{Client: "a", Key: "k", Kind: history.Write}) // 1
	b := r.Begin(history.Op{Client: "b", Key: "k", Kind: history.Read})  // 2
	c := r.Begin(history.Op{Client: "c", Key: "k", Kind: history.Write, Try: true, Class: "x"})
	a.Got(7, 100) // 4
	c.Refused()   // 5
	a.Until(200)  // 6
	a.Unlocking()
	a.Unlocking() // 8, ignored
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if ctx.Err() != nil {
		a.Ended() // 9
	}
	a.Freed()                        // 10
	b.Failed(errors.New("gave up"))  // 11
	b.Failed(errors.New("and more")) // 12, ignored
	b.Paused()                       // 13
	now := r.Now()                   // 14
	b.Set(func(o *history.Op) { o.Lock, o.Cause, o.Revoked = "m:1", "lost", now })
	return r
}

func TestRecorder(t *testing.T) {
	want := []history.Op{
		{ID: 1, Client: "a", Key: "k", Kind: history.Write, Asked: 1, Got: 4, Unlocking: 7, Ended: 9, Freed: 10, Until: 200, Token: 7},
		{ID: 2, Client: "b", Key: "k", Kind: history.Read, Asked: 2, Ended: 11, Err: "gave up", Paused: true, Revoked: 14, Lock: "m:1", Cause: "lost"},
		{ID: 3, Client: "c", Key: "k", Kind: history.Write, Asked: 3, Ended: 5, Freed: 5, Refused: true, Try: true, Class: "x"},
	}
	var file bytes.Buffer
	r := record(&file)
	if got := r.Ops(); !reflect.DeepEqual(got, want) {
		t.Errorf("want\n%+v, recorded\n%+v", want, got)
	}
	if err := r.Err(); err != nil {
		t.Error(err)
	}
	got, err := history.Load(&file)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("want\n%+v, read back\n%+v, %v", want, got, err)
	}
}

// Whenever a process is killed, every event that it has written can be read.
func TestFileThatIsCutOff(t *testing.T) {
	var file bytes.Buffer
	record(&file)
	whole := file.String()
	for n := range len(whole) + 1 {
		got, err := history.Load(strings.NewReader(whole[:n]))
		if err != nil {
			t.Fatalf("cut off after %d bytes: want no error, got %v", n, err)
		}
		lines := strings.SplitAfter(whole[:n], "\n")
		want, _ := history.Load(strings.NewReader(strings.Join(lines[:len(lines)-1], "")))
		if whole[:n] != whole && n < len(whole) && whole[n] == '\n' {
			continue // the last line is complete but for its newline
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("cut off after %d bytes: want %+v, got %+v", n, want, got)
		}
	}
	if _, err := history.Load(strings.NewReader("{\"id\":1}\n{\"id\":\n{\"id\":3}\n")); err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("want an error that names line 2, got %v", err)
	}
}

// The Recorder returns the error of its writer, so that a lost history is not taken for an empty one.
func TestWriterThatFails(t *testing.T) {
	r, w := io.Pipe()
	full := errors.New("disk full")
	_ = r.CloseWithError(full)
	if err := record(w).Err(); !errors.Is(err, full) {
		t.Errorf("want %v, got %v", full, err)
	}
}

// A Register refuses the write of a holder that was paused, after the next holder has written with a greater token.
func TestRegister(t *testing.T) {
	var r history.Register[string]
	for _, w := range []struct {
		token uint64
		value string
		ok    bool
	}{{5, "a", true}, {5, "b", true}, {7, "c", true}, {5, "stale", false}, {6, "stale", false}, {7, "d", true}} {
		if err := r.Write(w.token, w.value); (err == nil) != w.ok {
			t.Errorf("write of %+v: got %v", w, err)
		}
	}
	if value, token := r.Read(); value != "d" || token != 7 {
		t.Errorf("want value \"d\" with token 7, got %q with %d", value, token)
	}
	if n := r.Refused(); n != 2 {
		t.Errorf("want 2 writes refused, got %d", n)
	}
	var all sync.WaitGroup
	var counter history.Register[uint64]
	for c := range uint64(4) {
		all.Go(func() {
			for i := range uint64(100) {
				_ = counter.Write(4*i+c, 4*i+c)
			}
		})
	}
	all.Wait()
	if value, token := counter.Read(); value != 399 || token != 399 {
		t.Errorf("want the greatest value and token, 399, got %d and %d", value, token)
	}
}
