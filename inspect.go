package redismutex

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/localqueue"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/script"
)

// A Mode is how a lock is held.
type Mode int

const (
	Unknown Mode = iota // no majority of the nodes has answered
	Free                // nobody holds it
	Reading             // readers hold it
	Writing             // a writer holds it
	Split               // some nodes are held, but nobody holds a majority: a lock is being granted, handed on or released
)

func (m Mode) String() string {
	if m < Unknown || m > Split {
		return fmt.Sprintf("Mode(%d)", int(m))
	}
	return [...]string{"unknown", "free", "held for reading", "held for writing", "split"}[m]
}

// A State has the holders and the waiters of a lock, as [RWMutex.Inspect] found them. A moment later it may differ.
type State struct {
	Key     string
	Mode    Mode
	Holders []Participant // the writer, or some of the readers, 100 at most
	Holding int           // all holders
	Waiters []Participant // in order, the first 100
	Waiting int           // all waiters

	// Token is the last fencing token that Redis has granted; with several nodes the one that a majority has, or if there is
	// none, the highest. Locks that a process passes on within its turn have the next ones, up to 1,023 more: see WithTurn.
	Token uint64

	Nodes []NodeState // the answers of the nodes, in the order of NewRedlock
}

// A Participant holds a lock or waits for it. The goroutines of a process that share a turn are one participant, and so are
// those that wait in its queue: see [WithTurn].
type Participant struct {
	ID      string        // as Lock.ID; with several nodes, the one on the first node that knows it
	Process string        // "<host>/<pid>", or what SetProcessName was given there
	Write   bool          // it holds, or waits to hold, for writing
	Lease   time.Duration // what is left of its lease; it is renewed at half the TTL
	Waited  time.Duration // how long a waiter has waited, by the server's clock

	rank int64
}

// A NodeState is the answer of one node about a lock.
type NodeState struct {
	Node    string // its number and its address
	Err     error  // why it has not answered: ErrRedis or ErrNotLock; nil: it has
	Mode    Mode
	Holders []Participant
	Holding int
	Waiters []Participant
	Waiting int
	Token   uint64
}

// Inspect returns the holders and the waiters of the lock. It runs one script on each node, once, which changes nothing and
// whose cost is bounded whatever the number of waiters. Participants whose lease has ended are left out, up to 250 of them
// on each node.
//
// With several nodes the holders are those that hold a majority of them, and the waiters are in the order of their ranks. A
// node that does not answer within the node time-out, or that has foreign data under the keys of the lock, is a part of the
// state, with its error. The error is nil if a majority has answered. Otherwise it matches [ErrRedis], [ErrNotLock] or ctx's
// error, and the state has what is known. The only option that it takes is [WithKey]; others are refused with [ErrInvalid]
// and no state.
func (m *RWMutex) Inspect(ctx context.Context, opt ...LockOption) (*State, error) {
	r, err := m.aside(ctx, opt)
	if err != nil {
		return nil, err
	}
	s := &State{Key: r.keys.Name(), Nodes: make([]NodeState, len(m.config.Nodes))}
	errs := r.onEachNode(func(ctx context.Context, i int, n *node.Node) error {
		found, err := n.Inspect(ctx, r.keys)
		s.Nodes[i] = nodeState(m.config.NodeName(i), found)
		return err
	})
	for i, err := range errs {
		if err != nil {
			s.Nodes[i].Err, s.Nodes[i].Mode = err, Unknown
		}
	}
	s.conclude()
	return s, r.explainErrors("inspect", errs)
}

// aside checks a call that asks about a lock, and takes part in none.
func (m *RWMutex) aside(ctx context.Context, opt []LockOption) (r request, err error) {
	r = request{ctx: ctx, given: true}
	switch err = m.complete(&r, opt); {
	case err != nil:
		return r, err
	case r.bounded || r.owner != "":
		return r, fmt.Errorf("%w: WithKey is the only option of this call", ErrInvalid)
	case ctx.Err() != nil:
		return r, lockerr.Ended(ctx, r.keys.Name())
	}
	return r, nil
}

// onEachNode calls f for each node, side by side, and returns what came of that. With several nodes each is waited for no
// longer than the node time-out.
func (r request) onEachNode(f func(ctx context.Context, i int, n *node.Node) error) []error {
	ctx, timeout := r.ctx, r.m.config.Timeout
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	errs := make([]error, len(r.m.config.Nodes))
	var all sync.WaitGroup
	for i, n := range r.m.config.Nodes {
		all.Go(func() {
			switch err := f(ctx, i, n); {
			case err != node.ErrInterrupted:
				errs[i] = err
			case r.ctx.Err() != nil:
				errs[i] = lockerr.Interrupted(r.ctx, r.keys.Name())
			default:
				errs[i] = lockerr.Redis(fmt.Errorf("no answer within %v", timeout))
			}
		})
	}
	all.Wait()
	return errs
}

// explainErrors returns nil if a majority of the nodes has no error, else an error of one kind that names each node.
func (r request) explainErrors(call string, errs []error) error {
	foreign, failed, all := 0, 0, []error(nil)
	for i, err := range errs {
		switch {
		case err == nil:
			continue
		case errors.Is(err, ErrNotLock):
			foreign++
		default:
			failed++
		}
		all = append(all, r.m.config.OnNode(i, err))
	}
	n := len(errs)
	switch {
	case n-foreign-failed >= acquisition.Majority(n):
		return nil
	case r.ctx.Err() != nil:
		return lockerr.Interrupted(r.ctx, r.keys.Name())
	case n == 1:
		return lockerr.Doing(call, r.keys.Name(), errs[0])
	case foreign > failed:
		return lockerr.Doing(call, r.keys.Name(), lockerr.Of(ErrNotLock, errors.Join(all...)))
	}
	return lockerr.Doing(call, r.keys.Name(), lockerr.Of(ErrRedis, errors.Join(all...)))
}

func nodeState(name string, found script.Inspection) NodeState {
	n := NodeState{Node: name, Mode: Free, Holding: found.Holding, Waiting: found.Waiting, Token: uint64(found.Token) * localqueue.MaxGrants}
	for _, p := range found.Holders {
		n.Mode = Reading
		if p.Write {
			n.Mode = Writing
		}
		n.Holders = append(n.Holders, participant(p))
	}
	for _, p := range found.Waiters {
		n.Waiters = append(n.Waiters, participant(p))
	}
	slices.SortFunc(n.Holders, func(p, q Participant) int { return cmp.Compare(p.ID, q.ID) })
	return n
}

func participant(p script.Seen) Participant {
	return Participant{p.ID, node.ProcessOf(p.ID), p.Write, p.Lease, p.Waited, p.Rank}
}

// conclude sets what the nodes together say. One node decides alone.
func (s *State) conclude() {
	if len(s.Nodes) == 1 {
		n := s.Nodes[0]
		s.Mode, s.Holders, s.Holding, s.Waiters, s.Waiting, s.Token = n.Mode, n.Holders, n.Holding, n.Waiters, n.Waiting, n.Token
		return
	}
	answered, free, crowds := 0, 0, 0
	holders, waiters, tokens := gathered{}, gathered{}, map[uint64]int{}
	for _, n := range s.Nodes {
		if n.Err == nil {
			answered++
			tokens[n.Token]++
		}
		if n.Mode == Free {
			free++
		}
		if n.Holding > len(n.Holders) {
			crowds++
		}
		holders.add(n.Holders)
		waiters.add(n.Waiters)
		s.Holding, s.Waiting, s.Token = max(s.Holding, n.Holding), max(s.Waiting, n.Waiting), max(s.Token, n.Token)
	}
	majority := acquisition.Majority(len(s.Nodes))
	for token, n := range tokens {
		if n >= majority {
			s.Token = token
		}
	}
	for acquisition, ps := range holders {
		if len(ps) < majority {
			continue
		}
		// The lease that counts is the shortest of the longest majority.
		p := ps[0]
		slices.SortFunc(ps, func(p, q Participant) int { return cmp.Compare(q.Lease, p.Lease) })
		p.Lease = ps[majority-1].Lease
		s.Holders = append(s.Holders, p)
		delete(waiters, acquisition) // it may wait for the other nodes still
	}
	for _, ps := range waiters {
		s.Waiters = append(s.Waiters, ps[0])
	}
	if crowds < majority { // else each node has told of some of its readers only
		s.Holding = len(s.Holders)
	}
	slices.SortFunc(s.Holders, func(p, q Participant) int { return cmp.Compare(p.ID, q.ID) })
	slices.SortFunc(s.Waiters, func(p, q Participant) int { return cmp.Or(cmp.Compare(p.rank, q.rank), cmp.Compare(p.ID, q.ID)) })
	s.Waiting = max(s.Waiting, len(s.Waiters))
	s.Waiters = s.Waiters[:min(len(s.Waiters), 100)]
	switch {
	case answered < majority:
		s.Mode = Unknown
	case len(s.Holders) > 0 && s.Holders[0].Write:
		s.Mode = Writing
	case len(s.Holders) > 0 || crowds >= majority:
		s.Mode = Reading
	case free >= majority:
		s.Mode = Free
	default:
		s.Mode = Split
	}
}

// gathered are the participants of all nodes, by acquisition.
type gathered map[string][]Participant

// add adds those of one node. Where an acquisition has two ids there, since it gave one up a moment ago, that with the longer
// lease counts.
func (g gathered) add(ps []Participant) {
	longest := map[string]Participant{}
	for _, p := range ps {
		if name := node.AcquisitionOf(p.ID); p.Lease >= longest[name].Lease {
			longest[name] = p
		}
	}
	for name, p := range longest {
		g[name] = append(g[name], p)
	}
}

// String returns the state as a table of several lines.
func (s *State) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%q: %v", s.Key, s.Mode)
	if s.Holding > 1 {
		fmt.Fprintf(&b, " by %d", s.Holding)
	}
	fmt.Fprintf(&b, ", %d waiting, last token %d\n", s.Waiting, s.Token)
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	if len(s.Holders)+len(s.Waiters) > 0 {
		fmt.Fprint(t, "\tfor\tprocess\tlease left\twaited\tid\n")
	}
	row := func(what string, p Participant, waited any) {
		kind := "reading"
		if p.Write {
			kind = "writing"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%v\t%v\t%s\n", what, kind, p.Process, p.Lease, waited, p.ID)
	}
	for _, p := range s.Holders {
		row("holds", p, "")
	}
	for _, p := range s.Waiters {
		row("waits", p, p.Waited.Round(time.Millisecond))
	}
	_ = t.Flush()
	if len(s.Nodes) > 1 {
		for _, n := range s.Nodes {
			if n.Err != nil {
				fmt.Fprintf(&b, "%s: %v\n", n.Node, n.Err)
			} else {
				fmt.Fprintf(&b, "%s: %v, %d holding, %d waiting, last token %d\n", n.Node, n.Mode, n.Holding, n.Waiting, n.Token)
			}
		}
	}
	return b.String()
}
