package main

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/redismutex/redismutex/internal/redistest"
)

// The program runs its own binary as the workers; in a test, that is the test binary.
func TestMain(m *testing.M) {
	if _, ok := os.LookupEnv(taskVariable); ok {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestEveryItemIsSoldOnce(t *testing.T) {
	redistest.MiniLocks(t)
	t.Parallel()
	var out strings.Builder
	err := run(&out, false)
	t.Log(out.String())
	if err != nil {
		t.Fatal(err)
	}
}

// The checks fail without the lock.
func TestWithoutTheLockTheStockIsOversold(t *testing.T) {
	redistest.MiniLocks(t)
	t.Parallel()
	var out strings.Builder
	err := run(&out, true)
	t.Log(out.String())
	if !errors.Is(err, errWrong) {
		t.Fatalf("want %v, got %v", errWrong, err)
	}
}
