package redistest

import "time"

// An Outcome is what a call returned, and when.
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
