package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/script"
	"github.com/spf13/pflag"
)

func jsonFlag(flags *pflag.FlagSet, o *options) {
	flags.BoolVar(&o.json, "json", false, "print JSON; times are in seconds")
}

// show prints the holders and the waiters of locks, also if no majority of the nodes has answered.
func show(ctx context.Context, flags *pflag.FlagSet, o *options, out, _ io.Writer) error {
	if flags.NArg() == 0 {
		return usage("show: which lock? See redismutex show --help")
	}
	clients, err := o.connect()
	if err != nil {
		return err
	}
	var states []*redismutex.State
	for _, name := range flags.Args() {
		s, failure := mutex(clients, name).Inspect(ctx)
		if s == nil {
			return failed(failure)
		}
		states, err = append(states, s), errors.Join(err, failure)
	}
	if o.json {
		return errors.Join(printJSON(out, states), failed(err))
	}
	for i, s := range states {
		if i > 0 {
			fmt.Fprintln(out)
		}
		fmt.Fprint(out, s)
	}
	return failed(err)
}

// revoke ends one acquisition.
func revoke(ctx context.Context, flags *pflag.FlagSet, o *options, _, _ io.Writer) error {
	if flags.NArg() != 2 {
		return usage("revoke: want the name of the lock, and an id as redismutex show prints it")
	}
	clients, err := o.connect()
	if err != nil {
		return err
	}
	err = mutex(clients, flags.Arg(0)).Revoke(ctx, flags.Arg(1))
	if errors.Is(err, redismutex.ErrNoSuchID) {
		return exitError{1, err}
	}
	return failed(err)
}

// list prints the locks that are held.
func list(ctx context.Context, flags *pflag.FlagSet, o *options, out, _ io.Writer) error {
	pattern := "*"
	switch flags.NArg() {
	case 0:
	case 1:
		pattern = flags.Arg(0)
	default:
		return usage("ls: want one pattern")
	}
	clients, err := o.connect()
	if err != nil {
		return err
	}
	names, err := findLocks(ctx, clients, pattern)
	if err != nil {
		return exitError{exitRedis, fmt.Errorf("redis failed: ls: %w", err)}
	}
	var states []*redismutex.State
	for _, name := range names {
		s, err := mutex(clients, name).Inspect(ctx)
		switch {
		case errors.Is(err, redismutex.ErrNotLock), err == nil && s.Mode == redismutex.Free && s.Waiting == 0:
		case err != nil:
			return failed(err)
		default:
			states = append(states, s)
		}
	}
	if o.json {
		return printJSON(out, states)
	}
	if len(states) == 0 {
		return nil
	}
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "name\tstate\tby\twaiting")
	for _, s := range states {
		by := ""
		if len(s.Holders) > 0 { // of many readers none may be known by name
			by = s.Holders[0].Process
		}
		if s.Holding > 1 {
			by += fmt.Sprintf(" and %d more", s.Holding-1)
		}
		fmt.Fprintf(t, "%s\t%v\t%s\t%d\n", printable(s.Key), s.Mode, printable(by), s.Waiting)
	}
	return t.Flush()
}

// printable quotes a text that would not stay in its cell, or would control the terminal.
func printable(s string) string {
	if q := strconv.Quote(s); strings.TrimSpace(s) != s || q != `"`+s+`"` {
		return q
	}
	return s
}

// findLocks returns the names that match a pattern and may be those of locks, in order. The key of a held lock has its name,
// and is a string or a set; another key beside it has the leases or the token.
func findLocks(ctx context.Context, clients []redis.UniversalClient, pattern string) ([]string, error) {
	var mu sync.Mutex
	found := map[string]bool{}
	for _, c := range clients {
		for _, kind := range []string{"string", "set"} {
			err := onMasters(ctx, c, func(ctx context.Context, master *redis.Client) error {
				for cursor, more := uint64(0), true; more; {
					var page []string
					var err error
					if page, cursor, err = master.ScanType(ctx, cursor, pattern, 1000, kind).Result(); err != nil {
						return err
					}
					names, err := likelyLocks(ctx, master, page)
					if err != nil {
						return err
					}
					mu.Lock()
					for _, name := range names {
						found[name] = true
					}
					mu.Unlock()
					more = cursor != 0
				}
				return nil
			})
			if err != nil {
				return nil, err
			}
		}
	}
	names := make([]string, 0, len(found))
	for name := range found {
		names = append(names, name)
	}
	slices.Sort(names)
	return names, nil
}

// onMasters calls f for a client's server, or for each master of a Cluster.
func onMasters(ctx context.Context, c redis.UniversalClient, f func(context.Context, *redis.Client) error) error {
	if cluster, ok := c.(*redis.ClusterClient); ok {
		return cluster.ForEachMaster(ctx, f)
	}
	return f(ctx, c.(*redis.Client))
}

// likelyLocks returns those of the names beside which there is another key of a lock.
func likelyLocks(ctx context.Context, c *redis.Client, names []string) (likely []string, err error) {
	p := c.Pipeline()
	for _, name := range names {
		if keys, err := script.NewKeys(name); err == nil {
			p.Exists(ctx, keys.Token(), keys.Leases())
			likely = append(likely, name)
		}
	}
	if len(likely) == 0 {
		return nil, nil
	}
	answers, err := p.Exec(ctx)
	if err != nil {
		return nil, err
	}
	i := -1
	return slices.DeleteFunc(likely, func(string) bool {
		i++
		return answers[i].(*redis.IntCmd).Val() == 0
	}), nil
}

// A lockJSON is a State for programs.
type lockJSON struct {
	Name    string            `json:"name"`
	Mode    string            `json:"mode"`
	Token   string            `json:"token"` // a string, since it does not fit a double
	Holding int               `json:"holding"`
	Holders []participantJSON `json:"holders"`
	Waiting int               `json:"waiting"`
	Waiters []participantJSON `json:"waiters"`
	Errors  []string          `json:"errors,omitempty"` // of nodes
}

type participantJSON struct {
	ID      string  `json:"id"`
	Process string  `json:"process"`
	Write   bool    `json:"write"`
	Lease   float64 `json:"lease"`
	Waited  float64 `json:"waited,omitempty"`
}

func printJSON(out io.Writer, states []*redismutex.State) error {
	all := make([]lockJSON, 0, len(states))
	for _, s := range states {
		l := lockJSON{Name: s.Key, Mode: s.Mode.String(), Token: fmt.Sprint(s.Token), Holding: s.Holding, Waiting: s.Waiting,
			Holders: participants(s.Holders), Waiters: participants(s.Waiters)}
		for _, n := range s.Nodes {
			if n.Err != nil {
				l.Errors = append(l.Errors, n.Node+": "+text(n.Err))
			}
		}
		all = append(all, l)
	}
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(all)
}

func participants(all []redismutex.Participant) []participantJSON {
	out := make([]participantJSON, 0, len(all))
	for _, p := range all {
		out = append(out, participantJSON{p.ID, p.Process, p.Write, p.Lease.Seconds(), p.Waited.Seconds()})
	}
	return out
}
