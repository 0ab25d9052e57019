// Inventory sells one stock from several operating-system processes, under one lock.
//
//	go run ./examples/inventory            every item is sold once
//	go run ./examples/inventory -nolock    without the lock: items are sold again and again
//
// Four sellers take turns under the write lock: each reads the stock, serves a customer and writes back what is left. Two
// readers count stock and sales under the read lock; while they hold it, the two must add up. One seller is killed in the
// middle of a sale while it holds the lock, and the lock expires. At the end the sales are read back and checked; the exit
// status is 0 if they are right.
//
// Redis is embedded in the program, or it is the server at REDIS_URL (redis://host:port), where all keys have a random
// prefix and are removed at the end.
//
// To read how the lock is used, begin with worker.go.
package main

import (
	"context"
	"crypto/rand"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"github.com/alicebob/miniredis/v2"
)

const (
	items   = 60
	sellers = 4
	readers = 2

	// lease is how long the lock outlives a holder that dies.
	lease = time.Second
	// stall is how long one seller stops before it is killed: longer than the lease, to show that a live process keeps
	// the lock.
	stall = 1500 * time.Millisecond
	// limit ends a run that hangs, and workers whose parent has died.
	limit = 30 * time.Second
)

func main() {
	var err error
	if t, ok := os.LookupEnv(taskVariable); ok {
		err = work(t, os.Stdout)
	} else {
		nolock := flag.Bool("nolock", false, "sell without the lock, to see what goes wrong")
		flag.Parse()
		err = run(os.Stdout, *nolock)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "inventory:", err)
		os.Exit(1)
	}
}

// run opens the shop, lets the workers sell everything, and checks the sales.
func run(out io.Writer, nolock bool) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()

	url := os.Getenv("REDIS_URL")
	if url == "" {
		server, err := miniredis.Run()
		if err != nil {
			return err
		}
		defer server.Close()
		server.ClockTTL(true) // otherwise its time stands still, and no lease ends
		url = "redis://" + server.Addr()
	}
	shop, err := openShop(url, rand.Text())
	if err != nil {
		return err
	}
	defer shop.close()
	tasks := crew(url, shop.id, nolock)
	if err := shop.fill(ctx, items); err != nil {
		return err
	}
	defer shop.clear(tasks)

	how := "under one lock"
	if nolock {
		how = "without a lock"
	}
	fmt.Fprintf(out, "%d items, %d sellers and %d readers, each a process of its own, %s.\nRedis: %s\n\n",
		items, sellers, readers, how, shop.rc.Options().Addr)
	seen, err := watch(ctx, tasks, newBoard(out, tasks))
	if err != nil {
		return err
	}
	left, sales, err := shop.books(ctx)
	if err != nil {
		return err
	}
	return prove(out, left, sales, seen)
}

// crew returns the tasks of the workers.
func crew(url, shop string, nolock bool) []task {
	var tasks []task
	for i := range sellers {
		tasks = append(tasks, task{Name: fmt.Sprintf("seller %d", i+1), Sells: true})
	}
	for i := range readers {
		tasks = append(tasks, task{Name: fmt.Sprintf("reader %d", i+1)})
	}
	for i := range tasks {
		tasks[i].Redis, tasks[i].Shop, tasks[i].NoLock = url, shop, nolock
	}
	if !nolock {
		tasks[sellers-1].StallsAt = 4
	}
	return tasks
}
