package redistest

import "time"

// An Outcome is the result of a call, and the time at which it returned.
type Outcome[T any] struct {
	Value T
	Err   error
	At    time.Time
}

// Later calls f in the background. The channel has room for the outcome, so that it need not be received.
func Later[T any](f func() (T, error)) <-chan Outcome[T] {
	c := make(chan Outcome[T], 1)
	go func() {
		v, err := f()
		c <- Outcome[T]{v, err, time.Now()}
	}()
	return c
}
