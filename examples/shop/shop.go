// Package shop sells what is in stock. It is the example of docs/testing.md: how code that locks is tested.
package shop

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
)

// ErrSoldOut is returned when nothing is left of an item.
var ErrSoldOut = errors.New("sold out")

// A Shop sells each piece once, in however many processes.
type Shop struct {
	rc    *redis.Client
	mutex *redismutex.RWMutex
}

// New returns a shop whose stock is in Redis.
func New(rc *redis.Client) *Shop { return &Shop{rc, redismutex.NewMutex(rc, "stock")} }

// Sell sells one piece of an item.
func (s *Shop) Sell(ctx context.Context, item string) error {
	lock, err := s.mutex.LockContext(ctx, redismutex.WithKey(item))
	if err != nil {
		return err
	}
	defer lock.Unlock()
	left, err := s.rc.Get(lock, "left:"+item).Int()
	if err != nil {
		return err
	}
	if left == 0 {
		return ErrSoldOut
	}
	return s.take(lock, item)
}

// take must be called under the lock of the item.
func (s *Shop) take(ctx context.Context, item string) error {
	if err := redismutex.Held(ctx, "stock:"+item); err != nil {
		return err
	}
	return s.rc.Decr(ctx, "left:"+item).Err()
}
