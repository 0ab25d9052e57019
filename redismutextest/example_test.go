package redismutextest_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/redismutextest"
)

// This file has the five tests that most users write. The code under test comes first.

// A reporter writes the report, one writer at a time in all processes.
type reporter struct {
	mutex *redismutex.RWMutex
	store *store
}

// publish writes the report, unless somebody else is writing it.
func (r *reporter) publish(ctx context.Context, text string) error {
	lock, err := r.mutex.TryLockContext(ctx)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	return r.store.save(lock, lock.Token(), text)
}

// correct writes the report when it is its turn.
func (r *reporter) correct(ctx context.Context, text string) error {
	return r.mutex.Do(ctx, func(lock *redismutex.Lock) error {
		return r.store.save(lock, lock.Token(), text)
	})
}

// follow works on the report until ctx or the lock ends.
func (r *reporter) follow(ctx context.Context) error {
	return r.mutex.Do(ctx, func(lock *redismutex.Lock) error {
		<-lock.Done()
		return context.Cause(lock)
	})
}

// A store is where the report is. It refuses a token lower than one it has seen.
type store struct {
	mu    sync.Mutex
	token uint64
	text  string
}

var errStale = errors.New("overtaken by a later writer")

func (s *store) save(ctx context.Context, token uint64, text string) error {
	if err := redismutex.Held(ctx, "report"); err != nil {
		return err
	}
	return s.write(token, text)
}

func (s *store) write(token uint64, text string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if token < s.token {
		return errStale
	}
	s.token, s.text = token, text
	return nil
}

func (s *store) read() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text
}

// The tests.

func TestSecondCallerIsRefused(t *testing.T) {
	rd := redismutextest.New(t)
	r := &reporter{rd.Mutex("report"), &store{}}

	release := rd.HoldByOther("report")
	if err := r.publish(t.Context(), "mine"); !errors.Is(err, redismutex.ErrLock) {
		t.Errorf("want ErrLock while another process writes, got %v", err)
	}
	release()
	if err := r.publish(t.Context(), "mine"); err != nil {
		t.Error(err)
	}
}

func TestWorkStopsWhenTheLockIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the loss is noticed at half the TTL, in virtual time
		rd := redismutextest.New(t)
		r := &reporter{rd.Mutex("report"), &store{}}
		lock, err := r.mutex.LockContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer lock.Unlock()
		ended := make(chan error)
		go func() { ended <- r.follow(lock) }() // its own lock is nested in this one

		rd.Lose(lock)
		if err := <-ended; !errors.Is(err, redismutex.ErrLockLost) {
			t.Errorf("want ErrLockLost, got %v", err)
		}
	})
}

func TestCallerWaitsItsTurn(t *testing.T) {
	rd := redismutextest.New(t)
	r := &reporter{rd.Mutex("report"), &store{}}

	release := rd.HoldByOther("report")
	err := make(chan error)
	go func() { err <- r.correct(t.Context(), "mine") }()
	rd.AwaitWaiters(t, "report", 1)
	if got := r.store.read(); got != "" {
		t.Errorf("want nothing written while another process writes, got %q", got)
	}
	release()
	if err := <-err; err != nil || r.store.read() != "mine" {
		t.Errorf("want mine, got %q, %v", r.store.read(), err)
	}
}

func TestRedisIsDown(t *testing.T) {
	rd := redismutextest.New(t)
	r := &reporter{rd.Mutex("report"), &store{}}

	rd.Cut()
	if err := r.correct(t.Context(), "mine"); !errors.Is(err, redismutex.ErrRedis) || r.store.read() != "" {
		t.Errorf("want ErrRedis and nothing written, got %v and %q", err, r.store.read())
	}
	rd.Heal()
	if err := r.correct(t.Context(), "mine"); err != nil {
		t.Error(err)
	}
}

func TestStaleTokenIsRefused(t *testing.T) {
	rd := redismutextest.New(t)
	r := &reporter{rd.Mutex("report"), &store{}}

	late, err := r.mutex.LockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer late.Unlock()
	rd.Lose(late) // it does not know yet
	later := &reporter{redismutex.NewMutex(rd.OtherClient(), "report"), r.store}
	if err := later.publish(t.Context(), "later"); err != nil {
		t.Fatal(err)
	}
	if err := r.store.save(late, late.Token(), "late"); !errors.Is(err, errStale) || r.store.read() != "later" {
		t.Errorf("want the write refused, got %v and %q", err, r.store.read())
	}
}
