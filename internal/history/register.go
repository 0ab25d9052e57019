package history

// This file answers: is a stale write refused?

import (
	"fmt"
	"sync"
)

// A Register is something that is written to under a lock, and checks the fencing token. The zero Register is empty
// and has seen none. It is safe for concurrent use.
type Register[T any] struct {
	mu      sync.Mutex
	value   T
	token   uint64
	refused int
}

// Write stores the value, unless a greater token was seen before. Whoever holds the lock may write again and again.
func (r *Register[T]) Write(token uint64, value T) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if token < r.token {
		r.refused++
		return fmt.Errorf("history: token %d is stale: %d was seen", token, r.token)
	}
	r.token, r.value = token, value
	return nil
}

// Read returns the value and the token it was written with.
func (r *Register[T]) Read() (T, uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.value, r.token
}

// Refused counts the writes that were refused.
func (r *Register[T]) Refused() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.refused
}
