package script_test

import (
	"context"
	"os"
	"runtime/debug"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/script"
)

func TestMain(m *testing.M) {
	redismutex.SetLog(redismutex.NopLog)
	redis.SetLogger(silence{})
	debug.SetGCPercent(400) // miniredis makes much garbage
	os.Exit(m.Run())
}

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

// What the tests need of the library above the scripts.
var (
	NewMutex   = redismutex.NewMutex
	ErrLock    = redismutex.ErrLock
	ErrRedis   = redismutex.ErrRedis
	ErrNotLock = redismutex.ErrNotLock
)

const MaxTTL = redismutex.MaxTTL

// An order decides which waiter is next: WithLockIntent and WithReaderPriority set it.
type order int

const (
	firstCome order = iota
	writersFirst
	readersFirst
)

// keyNames are the four keys of a lock.
func keyNames(k *script.Keys) []string {
	return []string{k.Name(), k.Intents(), k.Leases(), k.Token()}
}
