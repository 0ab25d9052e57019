package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"time"

	"github.com/redismutex/redismutex"
)

// taskVariable is the environment variable that makes this program a worker.
const taskVariable = "INVENTORY_TASK"

// A task is what a worker receives from its parent process.
type task struct {
	Name     string
	Redis    string // URL
	Shop     string
	Sells    bool
	StallsAt int // the number of the sale during which this seller stops until it is killed; 0 for none
	NoLock   bool
}

// An event is what a worker reports to its parent: one line of JSON on its standard output.
type event struct {
	Who        string
	Does       deed
	Item       int    `json:",omitempty"`
	Left, Sold int    `json:",omitempty"`
	Token      uint64 `json:",omitempty"`
}

type deed string

const (
	waits      deed = "waits"
	sells      deed = "sells"
	stalls     deed = "stalls"
	hasSold    deed = "has sold"
	counts     deed = "counts"
	hasCounted deed = "has counted"
	leaves     deed = "leaves"
)

// A worker is one process of the shop, a seller or a reader.
type worker struct {
	task
	shop  *shop
	mutex *redismutex.RWMutex
	opt   []redismutex.LockOption
	out   *json.Encoder
	sales int
}

func work(description string, out io.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()

	w := &worker{out: json.NewEncoder(out)}
	err := json.Unmarshal([]byte(description), &w.task)
	if err != nil {
		return err
	}
	if w.shop, err = openShop(w.Redis, w.Shop); err != nil {
		return err
	}
	defer w.shop.close()
	w.mutex = redismutex.NewMutex(w.shop.rc, w.shop.lock, redismutex.WithTTL(lease))
	if w.NoLock {
		// A lock with a key of its own excludes nobody.
		w.opt = append(w.opt, redismutex.WithKey(w.Name))
	}

	turn := w.countOnce
	if w.Sells {
		turn = w.sellOnce
	}
	for {
		left, err := turn(ctx)
		switch {
		case errors.Is(err, redismutex.ErrLockLost):
			// This process was stopped for longer than its lease. The next turn reads the stock again.
		case err != nil:
			return err
		case left == 0:
			w.report(event{Does: leaves})
			return nil
		}
	}
}

// sellOnce waits for the write lock and sells one item under it.
func (w *worker) sellOnce(ctx context.Context) (left int, err error) {
	w.report(event{Does: waits})
	lock, err := w.mutex.LockContext(ctx, w.opt...)
	if err != nil {
		return 0, err
	}
	defer lock.Unlock()

	// The lock is the context of all calls under it, so that they end with the lock.
	stock, err := w.shop.sell(lock, w.Name, lock.Token(), func(item int) {
		w.report(event{Does: sells, Item: item})
		if w.sales++; w.sales == w.StallsAt {
			w.report(event{Does: stalls, Item: item, Token: lock.Token()})
			<-ctx.Done()
		}
		time.Sleep(rand.N(30*time.Millisecond) + 20*time.Millisecond)
	})
	if err != nil {
		return 0, errors.Join(err, context.Cause(lock))
	}
	if stock == 0 {
		return 0, nil
	}
	w.report(event{Does: hasSold, Item: stock, Left: stock - 1})
	return stock - 1, nil
}

// countOnce waits for the read lock and counts under it, together with any other reader.
func (w *worker) countOnce(ctx context.Context) (left int, err error) {
	time.Sleep(40 * time.Millisecond) // readers count from time to time

	w.report(event{Does: waits})
	lock, err := w.mutex.RLockContext(ctx, w.opt...)
	if err != nil {
		return 0, err
	}
	defer lock.Unlock()

	w.report(event{Does: counts})
	left, sold, err := w.shop.count(lock, func() { time.Sleep(10 * time.Millisecond) })
	if err != nil {
		return 0, errors.Join(err, context.Cause(lock))
	}
	w.report(event{Does: hasCounted, Left: left, Sold: sold})
	return left, nil
}

// report is called while the lock is held, so that the parent receives the events in order.
func (w *worker) report(e event) {
	e.Who = w.Name
	if err := w.out.Encode(e); err != nil {
		os.Exit(1) // the parent has exited
	}
}
