package history

import (
	"fmt"
	"sync"
)

// A Register is a value that is written under a lock and checks fencing tokens. The zero Register is empty and accepts any
// token. It is safe for concurrent use.
type Register[T any] struct {
	mu      sync.Mutex
	value   T
	token   uint64
	refused int
}

// Write stores the value, and fails if a greater token was used before. The same token may write more than once.
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

// Read returns the value and the token that it was written with.
func (r *Register[T]) Read() (T, uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.value, r.token
}

// Refused returns the number of writes that were refused.
func (r *Register[T]) Refused() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.refused
}
