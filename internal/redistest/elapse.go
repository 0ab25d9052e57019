package redistest

import "time"

// Elapse lets d of virtual time pass. It panics outside of a synctest bubble: a test that waits in real time is slow, or
// fails on a busy machine.
func Elapse(d time.Duration) {
	if !InBubble() {
		panic("redistest: Elapse outside of a bubble")
	}
	time.Sleep(d)
}

// InBubble reports whether the caller is in a synctest bubble. It looks at the clock, which starts in 2000 there.
func InBubble() bool { return time.Now().Year() <= 2010 }

// AfterBubble lets the ten minutes pass in which everything ends that the library has in the background. An extra second
// keeps that from ending together with a TTL. It is for the last cleanup of a bubble, which is registered first.
func AfterBubble() { Elapse(10*time.Minute + time.Second) }
