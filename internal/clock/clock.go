// Package clock reads the monotonic clock of this process. Trust in a lease is measured on it, because the clock on the
// wall may be set.
package clock

import (
	"math"
	"time"
)

// An Instant is a time on the monotonic clock: nanoseconds since the process started.
type Instant int64

// Past is before every other instant, and Never is after every other.
const Past, Never = Instant(math.MinInt64), Instant(math.MaxInt64)

var started = time.Now()

// Now returns the current instant.
func Now() Instant { return Instant(time.Since(started)) }

// Add returns the instant that is d later.
func (i Instant) Add(d time.Duration) Instant { return i + Instant(d) }

// Time returns the time of day at that instant.
func (i Instant) Time() time.Time { return time.Now().Add(time.Duration(i - Now())) }
