package redistest

import (
	"runtime"
	"testing"
	"time"
)

// Timeout is how long anything may take on a machine that is busy with other tests.
const Timeout = 30 * time.Second

// Eventually waits in real time, for Timeout at most, until holds returns true. What describes that in a failure.
func Eventually(tb testing.TB, what string, holds func() bool) {
	tb.Helper()
	Within(tb, Timeout, what, holds)
}

// Within is Eventually with a limit of its own.
func Within(tb testing.TB, limit time.Duration, what string, holds func() bool) {
	tb.Helper()
	start := time.Now()
	for pause := time.Duration(0); !holds(); {
		if time.Since(start) > limit {
			tb.Fatalf("want this within %v, it is not so: %s", limit, what)
		}
		// Most waits are short, so it checks often at first.
		time.Sleep(pause)
		pause = min(pause+100*time.Microsecond, 10*time.Millisecond)
	}
}

// Spin passes a time that is too short for a timer. Use it to vary a moment, not to wait for an event.
func Spin(d time.Duration) {
	for start := time.Now(); time.Since(start) < d; {
		runtime.Gosched()
	}
}
