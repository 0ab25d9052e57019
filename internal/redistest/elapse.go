package redistest

import "time"

// Elapse lets d of virtual time pass. It panics outside of a synctest bubble: a test that waits in real time is slow, or
// fails on a busy machine.
func Elapse(d time.Duration) {
	if time.Now().Year() > 2010 { // the clock of a bubble starts in 2000
		panic("redistest: Elapse outside of a bubble")
	}
	time.Sleep(d)
}
