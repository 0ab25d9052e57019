package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/redis/go-redis/v9"
)

// A shop is what the workers share, three names in Redis: the stock, the record of sales, and the name of the lock. Only
// the lock prevents two sellers from selling the same item.
type shop struct {
	rc                 *redis.Client
	id                 string
	stock, sales, lock string
}

// A sale is one line of the record.
type sale struct {
	Item   int
	Seller string
	Token  uint64 // the fencing token of the lock that it was made under
}

func openShop(url, id string) (*shop, error) {
	opt, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	prefix := "{inventory:" + id + "}:"
	return &shop{redis.NewClient(opt), id, prefix + "stock", prefix + "sales", prefix + "lock"}, nil
}

func (s *shop) close() { s.rc.Close() }

func (s *shop) fill(ctx context.Context, items int) error {
	return s.rc.Set(ctx, s.stock, items, 0).Err()
}

// clear removes all keys, even after an interrupt. The keys of a lock expire by themselves, but its fencing counter only
// after a day, and these names are never used again.
func (s *shop) clear(tasks []task) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	locks := []string{s.lock}
	for _, t := range tasks {
		locks = append(locks, s.lock+":"+t.Name) // with -nolock
	}
	keys := []string{s.stock, s.sales}
	for _, lock := range locks {
		keys = append(keys, lock, lock+":lock-intent", lock+":lease", lock+":token")
	}
	if err := s.rc.Del(ctx, keys...).Err(); err != nil {
		fmt.Fprintln(os.Stderr, "inventory: could not remove:", keys, err)
	}
}

// sell sells one item and returns the stock before; 0 means that there was nothing to sell. The stock must not change
// between reading and writing: another seller in between would sell the same item.
func (s *shop) sell(ctx context.Context, seller string, token uint64, serve func(item int)) (int, error) {
	stock, err := s.rc.Get(ctx, s.stock).Int()
	if err != nil || stock == 0 {
		return 0, err
	}
	serve(stock)
	record, err := json.Marshal(sale{stock, seller, token})
	if err != nil {
		return 0, err
	}
	// A transaction, in case the seller dies here: a lock excludes others, but it does not undo anything.
	_, err = s.rc.TxPipelined(ctx, func(tx redis.Pipeliner) error {
		tx.Set(ctx, s.stock, stock-1, 0)
		tx.RPush(ctx, s.sales, record)
		return nil
	})
	return stock, err
}

// count counts what is left and then what was sold: after a sale in between, they do not add up.
func (s *shop) count(ctx context.Context, pause func()) (left, sold int, err error) {
	left, err = s.rc.Get(ctx, s.stock).Int()
	if err != nil {
		return 0, 0, err
	}
	pause()
	n, err := s.rc.LLen(ctx, s.sales).Result()
	return left, int(n), err
}

// books returns the stock and all sales.
func (s *shop) books(ctx context.Context) (left int, sales []sale, err error) {
	left, err = s.rc.Get(ctx, s.stock).Int()
	if err != nil {
		return 0, nil, err
	}
	records, err := s.rc.LRange(ctx, s.sales, 0, -1).Result()
	if err != nil {
		return 0, nil, err
	}
	sales = make([]sale, len(records))
	for i, record := range records {
		if err := json.Unmarshal([]byte(record), &sales[i]); err != nil {
			return 0, nil, err
		}
	}
	return left, sales, nil
}
