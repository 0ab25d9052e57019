package history_test

// This file answers: is what happens written down, and read back, as it was?

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

// An rwLocker is what a test takes for a lock.
type rwLocker interface {
	sync.Locker
	RLock()
	RUnlock()
}

// nobody is a lock that excludes nobody.
type nobody struct{}

func (nobody) Lock()    {}
func (nobody) Unlock()  {}
func (nobody) RLock()   {}
func (nobody) RUnlock() {}

// use lets some clients take turns at a lock, and records it.
func use(l rwLocker, clock func() int64) []history.Op {
	r := history.New(clock, nil)
	var all sync.WaitGroup
	var mu sync.Mutex
	var token uint64
	start := make(chan struct{}) // or the first could be done before the last begins
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
				runtime.Gosched() // or nobody would meet anybody
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

// A lock that excludes nobody is caught, also where all happens at one instant of virtual time.
func TestLockThatExcludesNobodyIsCaught(t *testing.T) {
	check := func(t *testing.T, clock func() int64) {
		good := use(new(sync.RWMutex), clock)
		for _, err := range []error{history.Exclusion(good), history.Tokens(good), linearizable(good)} {
			if err != nil {
				t.Errorf("a good lock: %v", err)
			}
		}
		// Once in some hundred times the scheduler lets one after the other run to the end, and there is nothing to see.
		var exclusion, linear error
		for i := 0; i < 20 && (exclusion == nil || linear == nil); i++ {
			bad := use(nobody{}, clock)
			exclusion, linear = history.Exclusion(bad), linearizable(bad)
		}
		if exclusion == nil || linear == nil {
			t.Errorf("not caught: Exclusion says %v, Linearizable says %v", exclusion, linear)
		}
	}
	t.Run("real", func(t *testing.T) { check(t, since()) })
	t.Run("virtual", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) { check(t, since()) })
	})
	t.Run("standing still", func(t *testing.T) { check(t, func() int64 { return 0 }) })
}

// record does everything that can be recorded.
func record(w io.Writer) *history.Recorder {
	r := history.New(func() int64 { return 0 }, w)
	a := r.Begin(history.Op{Client: "a", Key: "k", Kind: history.Write}) // 1
	b := r.Begin(history.Op{Client: "b", Key: "k", Kind: history.Read})  // 2
	c := r.Begin(history.Op{Client: "c", Key: "k", Kind: history.Write, Try: true, Class: "x"})
	a.Got(7, 100) // 4
	c.Refused()   // 5
	a.Until(200)  // 6
	a.Unlocking()
	a.Unlocking() // 8, and says nothing new
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if ctx.Err() != nil {
		a.Ended() // 9
	}
	a.Freed()                        // 10
	b.Failed(errors.New("gave up"))  // 11
	b.Failed(errors.New("and more")) // 12, and says nothing new
	b.Paused()
	return r
}

func TestRecorder(t *testing.T) {
	want := []history.Op{
		{ID: 1, Client: "a", Key: "k", Kind: history.Write, Asked: 1, Got: 4, Unlocking: 7, Ended: 9, Freed: 10, Until: 200, Token: 7},
		{ID: 2, Client: "b", Key: "k", Kind: history.Read, Asked: 2, Ended: 11, Err: "gave up", Paused: true},
		{ID: 3, Client: "c", Key: "k", Kind: history.Write, Asked: 3, Ended: 5, Freed: 5, Refused: true, Try: true, Class: "x"},
	}
	var file bytes.Buffer
	r := record(&file)
	if got := r.Ops(); !reflect.DeepEqual(got, want) {
		t.Errorf("recorded\n%+v, want\n%+v", got, want)
	}
	if err := r.Err(); err != nil {
		t.Error(err)
	}
	got, err := history.Load(&file)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("read back\n%+v, %v, want\n%+v", got, err, want)
	}
}

// Wherever a process is killed, what it had written can be read, and no event that was written is lost.
func TestFileThatIsCutOff(t *testing.T) {
	var file bytes.Buffer
	record(&file)
	whole := file.String()
	for n := range len(whole) + 1 {
		got, err := history.Load(strings.NewReader(whole[:n]))
		if err != nil {
			t.Fatalf("cut off after %d: %v", n, err)
		}
		lines := strings.SplitAfter(whole[:n], "\n")
		want, _ := history.Load(strings.NewReader(strings.Join(lines[:len(lines)-1], "")))
		if whole[:n] != whole && n < len(whole) && whole[n] == '\n' {
			continue // the last line is whole, but for its end
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("cut off after %d: %+v, want %+v", n, got, want)
		}
	}
	if _, err := history.Load(strings.NewReader("{\"id\":1}\n{\"id\":\n{\"id\":3}\n")); err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("a broken line in the middle: %v", err)
	}
}

// A history that could not be written must not look like one in which nothing happened.
func TestWriterThatFails(t *testing.T) {
	r, w := io.Pipe()
	full := errors.New("disk full")
	_ = r.CloseWithError(full)
	if err := record(w).Err(); !errors.Is(err, full) {
		t.Errorf("error %v, want %v", err, full)
	}
}

// A holder that was paused writes too late: whoever overtook it has the greater token.
func TestRegister(t *testing.T) {
	var r history.Register[string]
	for _, w := range []struct {
		token uint64
		value string
		ok    bool
	}{{5, "a", true}, {5, "b", true}, {7, "c", true}, {5, "stale", false}, {6, "stale", false}, {7, "d", true}} {
		if err := r.Write(w.token, w.value); (err == nil) != w.ok {
			t.Errorf("write of %+v: %v", w, err)
		}
	}
	if value, token := r.Read(); value != "d" || token != 7 {
		t.Errorf("it holds %q, token %d", value, token)
	}
	if n := r.Refused(); n != 2 {
		t.Errorf("%d refused, want 2", n)
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
		t.Errorf("it holds %d, token %d, want the greatest", value, token)
	}
}
