package redistest

import (
	"runtime"
	"testing"
	"time"
)

// Patience is how long anything may take on a machine that is busy with other tests.
const Patience = 30 * time.Second

// Eventually waits, in real time, for what another process or goroutine brings about.
func Eventually(tb testing.TB, what string, holds func() bool) {
	tb.Helper()
	within(tb, Patience, what, holds)
}

func within(tb testing.TB, limit time.Duration, what string, holds func() bool) {
	tb.Helper()
	start := time.Now()
	for pause := time.Duration(0); !holds(); {
		if time.Since(start) > limit {
			tb.Fatalf("waited %v in vain: %s", limit, what)
		}
		// It looks often at first: most waits are short. Nothing depends on how long it pauses.
		time.Sleep(pause)
		pause = min(pause+100*time.Microsecond, 10*time.Millisecond)
	}
}

// Spin lets a time pass that is too short for a timer: to aim at a moment, not to wait for anything.
func Spin(d time.Duration) {
	for start := time.Now(); time.Since(start) < d; {
		runtime.Gosched()
	}
}
