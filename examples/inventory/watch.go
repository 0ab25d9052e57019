package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// seen is what the parent observed of its workers.
type seen struct {
	counts, wrong int // how often the readers counted, and how often stock and sales did not add up
	crash         *crash
}

// A crash is the end of the seller that is killed in mid-sale.
type crash struct {
	seller string
	item   int
	token  uint64
	at     time.Time
	freed  time.Duration // from the kill to the next holder
	next   string        // the name of that holder
}

// watch runs the workers until the last has exited, shows what they do, and kills the one that stalls.
func watch(ctx context.Context, tasks []task, b *board) (seen, error) {
	var s seen
	workers, events, err := start(ctx, tasks)
	if err != nil {
		return s, err
	}
	var kill <-chan time.Time
	for events != nil {
		select {
		case e, ok := <-events:
			if !ok {
				events = nil
				break
			}
			switch e.Does {
			case stalls:
				s.crash = &crash{seller: e.Who, item: e.Item, token: e.Token}
				kill = time.After(stall)
				b.note("%s stops while selling item %d; it keeps the lock while it is alive", e.Who, e.Item)
			case hasCounted:
				s.counts++
				if e.Left+e.Sold != items {
					s.wrong++
				}
			case sells, counts:
				if c := s.crash; c != nil && !c.at.IsZero() && c.next == "" {
					c.freed, c.next = time.Since(c.at), e.Who
					b.note("%s has the lock, %.2f s later: the lease of %v has ended", e.Who, c.freed.Seconds(), lease)
				}
			}
			b.show(e)
		case <-kill:
			s.crash.at = time.Now()
			if err := workers[s.crash.seller].Process.Kill(); err != nil {
				return s, err
			}
			b.killed(s.crash.seller)
			b.note("%s is killed, and nobody else can unlock its lock", s.crash.seller)
		}
	}
	b.end()

	for name, w := range workers {
		if e := w.Wait(); e != nil && (s.crash == nil || name != s.crash.seller) {
			err = errors.Join(err, fmt.Errorf("%s: %w", name, e))
		}
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return s, err
}

// start runs this program once for each task. All workers write to one pipe, line by line, so the lines are in the order of
// the events. The channel is closed when the last worker has exited.
func start(ctx context.Context, tasks []task) (map[string]*exec.Cmd, <-chan event, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer w.Close()

	workers := make(map[string]*exec.Cmd)
	for _, t := range tasks {
		description, err := json.Marshal(t)
		if err != nil {
			return nil, nil, err
		}
		cmd := exec.CommandContext(ctx, self)
		cmd.Env = append(os.Environ(), taskVariable+"="+string(description))
		cmd.Stdout, cmd.Stderr = w, os.Stderr
		if err := cmd.Start(); err != nil {
			return nil, nil, err
		}
		workers[t.Name] = cmd
	}

	events := make(chan event)
	go func() {
		defer close(events)
		defer r.Close()
		for lines := json.NewDecoder(r); ; {
			var e event
			if err := lines.Decode(&e); err != nil {
				if err != io.EOF {
					fmt.Fprintln(os.Stderr, "inventory: cannot read the report of a worker:", err)
				}
				return
			}
			events <- e
		}
	}()
	return workers, events, nil
}
