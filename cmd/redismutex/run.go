package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/spf13/pflag"
)

func runFlags(flags *pflag.FlagSet, o *options) {
	flags.BoolVarP(&o.shared, "shared", "s", false, "lock for reading: with other readers, and no writer")
	flags.BoolVarP(&o.try, "nonblock", "n", false, "do not wait if the lock is held")
	flags.DurationVarP(&o.wait, "wait", "w", 0, "wait at most so long, and as long as it takes by default")
	flags.IntVarP(&o.heldCode, "conflict-exit-code", "E", exitHeld, "exit `code` if the lock is held with -n, or still held after -w")
	flags.DurationVar(&o.ttl, "ttl", 10*time.Second, "lease: how long the lock outlives this host")
	flags.DurationVar(&o.grace, "grace", 3*time.Second, "time from SIGTERM to SIGKILL if the lock is lost")
	flags.DurationVar(&o.maxHold, "max-hold", 0, "end the command when it has run so long")
	flags.BoolVarP(&o.quiet, "quiet", "q", false, "print nothing but what the command prints")
	flags.BoolVarP(&o.verbose, "verbose", "v", false, "print when the wait begins, which process holds the lock, and when it is granted")
}

// margin is how long before the end of trust the command has been killed.
const margin = 100 * time.Millisecond

// check checks the flags.
func (o *options) check(flags *pflag.FlagSet) error {
	waits := flags.Changed("wait")
	switch least := (o.grace + margin) * 8 / 3; {
	case flags.NArg() < 2:
		return usage("run: want the name of the lock, and a command; see redismutex run --help")
	case o.try && waits:
		return usage("run: -n and -w exclude each other")
	case o.quiet && o.verbose:
		return usage("run: -q and -v exclude each other")
	case o.wait < 0, o.grace < 0, o.maxHold < 0, flags.Changed("max-hold") && o.maxHold == 0:
		return usage("run: a time is negative, or --max-hold is 0")
	case o.heldCode < 0 || o.heldCode > 255:
		return usage("run: exit code %d, want 0 to 255", o.heldCode)
	case o.grace > o.ttl, o.ttl < least:
		// A lock is renewed at half its TTL. SIGTERM is sent if it has not been renewed for 5/8 of it.
		return usage("run: a TTL of %v leaves no room for a grace of %v: want a TTL of %v at least", o.ttl, o.grace, least.Round(time.Millisecond))
	}
	if waits && o.wait == 0 {
		o.try = true
	}
	return nil
}

// A runner runs one command under a lock.
type runner struct {
	*options
	name    string
	argv    []string
	mutex   *redismutex.RWMutex
	signals chan os.Signal
	log     io.Writer
	lost    error // why the command was ended
}

// runCommand acquires the lock, runs the command, and releases the lock when the command has ended.
func runCommand(ctx context.Context, flags *pflag.FlagSet, o *options, _, log io.Writer) error {
	if err := o.check(flags); err != nil {
		return err
	}
	clients, err := o.connect()
	if err != nil {
		return err
	}
	argv := flags.Args()[1:]
	if argv[0] == "--" {
		argv = argv[1:]
	}
	if len(argv) == 0 {
		return usage("run: want a command behind --")
	}
	if o.quiet {
		log = io.Discard
	}
	p := newPrinter(log)
	defer p.flush()
	log = p
	redismutex.SetLog(func(format string, v ...any) { fmt.Fprintf(log, format+"\n", v...) })
	opt := []redismutex.MutexOption{redismutex.WithTTL(o.ttl), redismutex.WithTurn(0)}
	if o.maxHold > 0 {
		opt = append(opt, redismutex.WithMaxHold(o.maxHold))
	}
	r := &runner{options: o, name: flags.Arg(0), argv: argv, log: log, signals: make(chan os.Signal, 16)}
	r.mutex = mutex(clients, r.name, opt...)
	for _, s := range forwarded {
		if !signal.Ignored(s) { // what nohup ignores stays ignored, by the command as well
			signal.Notify(r.signals, s)
		}
	}
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // a line that nobody reads must not end the program while the command runs
	err = r.run(ctx)
	var e exitError
	if o.quiet && errors.As(err, &e) && e.code != exitUsage {
		e.err = nil
		return e
	}
	return err
}

func (r *runner) run(ctx context.Context) error {
	path, err := exec.LookPath(r.argv[0])
	if err != nil {
		return cannotStart(r.argv[0], err)
	}
	ctx, cancel := context.WithCancel(ctx) // the context of the lock descends from it
	defer cancel()
	lock, err := r.acquire(ctx, cancel)
	if err != nil {
		return err
	}
	r.say("granted, id %s, token %d", lock.ID(), lock.Token())
	c, err := start(path, r.argv, append(os.Environ(), "REDISMUTEX_KEY="+lock.Key(), "REDISMUTEX_ID="+lock.ID(),
		fmt.Sprint("REDISMUTEX_TOKEN=", lock.Token())))
	if err == nil {
		err = r.supervise(lock, c)
	} else {
		err = cannotStart(r.argv[0], err)
	}
	r.release(lock)
	return err
}

// acquire acquires the lock, and ends the wait with the first signal.
func (r *runner) acquire(ctx context.Context, cancel func()) (*redismutex.Lock, error) {
	var lock *redismutex.Lock
	var err error
	acquired := make(chan struct{})
	go func() {
		defer close(acquired)
		lock, err = r.lock(ctx)
	}()
	var caught os.Signal
	select {
	case <-acquired:
	case caught = <-r.signals:
		cancel()
		<-acquired
	}
	var held *redismutex.HeldError
	switch {
	case caught != nil:
		if err == nil {
			r.release(lock)
		}
		r.awaitGone()
		return nil, exitError{exitSignal + number(caught), fmt.Errorf("%v while waiting for %q", caught, r.name)}
	case err == nil:
		return lock, nil
	}
	if !r.try && !errors.Is(err, redismutex.ErrRedis) {
		r.awaitGone()
	}
	switch {
	case errors.As(err, &held):
		return nil, exitError{r.heldCode, err}
	case errors.Is(err, redismutex.ErrRevoked):
		return nil, exitError{exitLost, err}
	}
	return nil, failed(err)
}

func (r *runner) lock(ctx context.Context) (*redismutex.Lock, error) {
	lock := r.mutex.LockContext
	if r.shared {
		lock = r.mutex.RLockContext
	}
	if r.try {
		return lock(ctx, redismutex.WithWait(0))
	}
	if r.verbose { // a try learns which process holds the lock
		l, err := lock(ctx, redismutex.WithWait(0))
		if err == nil || !errors.Is(err, redismutex.ErrLock) {
			return l, err
		}
		r.say("waiting: %s", text(err))
	}
	if r.wait > 0 {
		return lock(ctx, redismutex.WithWait(r.wait))
	}
	return lock(ctx)
}

// awaitGone waits until Redis has forgotten that this process waited: it is told in the background, and the program is about
// to end.
func (r *runner) awaitGone() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for ctx.Err() == nil {
		s, err := r.mutex.Inspect(ctx)
		if err != nil || !has(s, node.ProcessName()) {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func has(s *redismutex.State, process string) bool {
	for _, all := range [][]redismutex.Participant{s.Holders, s.Waiters} {
		for _, p := range all {
			if p.Process == process {
				return true
			}
		}
	}
	return false
}

// supervise waits for the command to end, passes signals on, and ends the command before the lock is another's.
func (r *runner) supervise(lock *redismutex.Lock, c *child) error {
	var kill <-chan time.Time
	end := func(why error) {
		if r.lost != nil {
			return
		}
		r.lost = why
		at := time.Until(lock.Until()) - margin
		kill = time.After(min(r.grace, at))
		c.terminate()
		fmt.Fprintf(r.log, "redismutex: %s; ending the command\n", text(why))
	}
	done := lock.Done()
	for {
		renewed := time.After(time.Until(lock.Until()) - r.grace - margin)
		if r.lost != nil {
			renewed, done = nil, nil
		}
		select {
		case <-c.ended:
			c.killRest(min(r.grace, time.Until(lock.Until())-margin))
			if r.lost != nil {
				return exitError{exitLost, fmt.Errorf("%q: the lock ended before the command, which was ended, too", r.name)}
			}
			return c.exit()
		case s := <-r.signals:
			c.signal(s)
		case <-done:
			end(context.Cause(lock))
		case <-renewed:
			if time.Until(lock.Until()) <= r.grace+margin {
				end(fmt.Errorf("%q was not renewed for %v: Redis does not answer, or this program was stopped", r.name,
					(r.ttl - time.Until(lock.Until())).Round(time.Second/10)))
			}
		case <-kill:
			c.kill()
			kill = nil
		}
	}
}

// release unlocks the lock. If Redis does not answer, the lock is free when its lease ends.
func (r *runner) release(lock *redismutex.Lock) {
	ctx, cancel := context.WithTimeout(context.Background(), min(r.ttl/2, 5*time.Second))
	defer cancel()
	err := lock.UnlockContext(ctx)
	switch {
	case err == nil:
	case errors.Is(err, redismutex.ErrLockLost), errors.Is(err, redismutex.ErrRevoked), errors.Is(err, redismutex.ErrMaxHold):
		if r.lost == nil { // the command has ended before anybody knew
			fmt.Fprintf(r.log, "redismutex: %s; the command has ended, and others may have held the lock while it ran\n", text(err))
		}
	case time.Until(lock.Until()) > 0:
		fmt.Fprintf(r.log, "redismutex: %s; the lock is free when its lease ends, in %v\n", text(err), time.Until(lock.Until()).Round(time.Second/10))
	}
}

// say prints a line with -v.
func (r *runner) say(format string, v ...any) {
	if r.verbose {
		fmt.Fprintf(r.log, "redismutex: %q: "+format+"\n", append([]any{r.name}, v...)...)
	}
}

func cannotStart(name string, err error) error {
	code := exitNotExecutable
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		code = exitNotFound
	}
	return exitError{code, fmt.Errorf("cannot run %q: %w", name, err)}
}
