// Redismutex runs a command under a lock that all hosts share, and shows, lists and ends such locks. See docs/cli.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/spf13/pflag"
)

// The exit codes of the program itself; others are those of the command that it runs. Those below 126 are from sysexits.h, and
// the last two are the shell's.
const (
	exitUsage         = 64
	exitRedis         = 69 // Redis cannot be reached, or has refused
	exitLost          = 70 // the lock ended while the command ran, and the command was ended because of it
	exitHeld          = 75 // others hold the lock
	exitNotExecutable = 126
	exitNotFound      = 127
	exitSignal        = 128 // and the number of the signal
)

// An exitError ends the program with that code. A nil err means that there is nothing to say.
type exitError struct {
	code int
	err  error
}

func (e exitError) Error() string { return e.err.Error() }
func (e exitError) Unwrap() error { return e.err }

func usage(format string, v ...any) error { return exitError{exitUsage, fmt.Errorf(format, v...)} }

const help = `Redismutex runs a command under a lock that all hosts share.

  redismutex run [flags] NAME [--] COMMAND [ARG...]   run a command while the lock is held
  redismutex show [flags] NAME...                     the holders and the waiters of locks
  redismutex ls [flags] [PATTERN]                     the locks that are held
  redismutex revoke [flags] NAME ID                   end one holder or waiter, by its id

Examples:

  redismutex run -n backup -- /usr/local/bin/backup --all
  redismutex run -w 10m --max-hold 1h deploy ./deploy.sh
  redismutex run -s catalogue -- ./report             # with other readers, and no writer
  redismutex show backup
  redismutex ls 'deploy*'

"redismutex COMMAND --help" lists the flags. Redis is $REDIS_URL, or redis://localhost:6379.
`

// A command is one of the program's.
type command struct {
	args, about string
	run         func(ctx context.Context, flags *pflag.FlagSet, o *options, out, log io.Writer) error
	flags       func(flags *pflag.FlagSet, o *options)
}

var commands = map[string]command{
	"run":    {"NAME [--] COMMAND [ARG...]", "Run a command while the lock is held.", runCommand, runFlags},
	"show":   {"NAME...", "Show the holders and the waiters of locks.", show, jsonFlag},
	"ls":     {"[PATTERN]", "List the locks that are held. The pattern is one of Redis' KEYS; the default is all.", list, jsonFlag},
	"revoke": {"NAME ID", "End one holder or waiter, by its id.", revoke, nil},
}

func main() {
	redis.SetLogger(&logging.VoidLogger{}) // what fails is reported in our own words
	err := execute(context.Background(), os.Args[1:], os.Stdout, os.Stderr)
	var e exitError
	switch {
	case err == nil:
		return
	case !errors.As(err, &e):
		e = exitError{exitRedis, err}
	}
	if e.err != nil {
		fmt.Fprintln(os.Stderr, "redismutex:", text(e.err))
	}
	os.Exit(e.code)
}

func execute(ctx context.Context, args []string, out, log io.Writer) error {
	if len(args) == 0 {
		return usage("no command; see redismutex --help")
	}
	if args[0] == "help" || args[0] == "-h" || args[0] == "--help" {
		_, err := io.WriteString(out, help)
		return err
	}
	c, ok := commands[args[0]]
	if !ok {
		return usage("unknown command %q; see redismutex --help", args[0])
	}
	var o options
	flags := pflag.NewFlagSet(args[0], pflag.ContinueOnError)
	flags.SetInterspersed(false) // what stands behind NAME is the command's
	flags.SortFlags = false
	flags.SetOutput(io.Discard)
	if c.flags != nil {
		c.flags(flags, &o)
	}
	flags.StringArrayVar(&o.urls, "redis", nil, "`URL` of a Redis; several are independent masters, of which a majority holds the lock")
	err := flags.Parse(args[1:])
	switch {
	case errors.Is(err, pflag.ErrHelp):
		_, err = fmt.Fprintf(out, "redismutex %s [flags] %s\n\n%s\n\n%s", args[0], c.args, c.about, flags.FlagUsagesWrapped(100))
		return err
	case err != nil:
		return usage("%w; see redismutex %s --help", err, args[0])
	}
	return c.run(ctx, flags, &o, out, log)
}
