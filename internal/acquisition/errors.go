package acquisition

import (
	"context"
	"errors"
	"fmt"

	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/quorum"
)

// explainRefusal returns the error of a request that was not granted. The mutex is held.
func (a *Acquisition) explainRefusal() error {
	key, why := a.Keys.Name(), a.parts[0].why
	switch {
	case a.quorum != nil:
		return fmt.Errorf("redismutex: lock %q: %w", key, a.explainNodes("have granted it"))
	case why == lockerr.ErrLock:
		return fmt.Errorf("%w: %q", lockerr.ErrLock, key)
	}
	return lockerr.Doing("lock", key, why)
}

// explainLoss returns why a lock was lost. The mutex is held.
func (a *Acquisition) explainLoss(why error) error {
	if a.quorum != nil {
		return a.explainNodes("hold it")
	}
	return a.parts[0].withCause(why)
}

// explainTally returns the error of an unlock or a downgrade that has not been confirmed.
func (a *Acquisition) explainTally(ctx context.Context, t tally, call, done string) error {
	format, args := "redismutex: %s %q: %d of %d nodes %s", []any{call, a.Keys.Name(), t.yes, len(a.parts), done}
	failed, foreign := 0, 0
	for _, v := range t.errs {
		if errors.Is(v.err, lockerr.ErrNotLock) {
			foreign++
		} else {
			failed++
		}
	}
	mostForeign := quorum.Decide(len(a.parts), 0, foreign) == quorum.No
	for _, v := range t.errs {
		switch {
		case v.err == node.ErrInterrupted:
			return lockerr.Ended(ctx, a.Keys.Name())
		case a.quorum == nil:
			return lockerr.Doing(call, a.Keys.Name(), v.err)
		}
		why := v.err
		if is := errors.Is(why, lockerr.ErrNotLock); is && failed > 0 && !mostForeign || !is && mostForeign {
			why = lockerr.Demote(why) // the error matches one kind
		}
		format += "; %s: %w"
		args = append(args, v.part.nodeName(), why)
	}
	err := fmt.Errorf(format, args...)
	if len(t.errs) == 0 {
		return lockerr.Redis(err) // the nodes answer, but make no sense
	}
	return err
}

// explainNodes names the nodes that do not count, and why. The mutex is held.
func (a *Acquisition) explainNodes(what string) error {
	n, replied, foreign := 0, 0, 0
	for _, p := range a.parts {
		if p.counts() {
			n++
		}
		if p.hasReplied() {
			replied++
		}
		if errors.Is(p.why, lockerr.ErrNotLock) {
			foreign++
		}
	}
	mostForeign := quorum.Decide(len(a.parts), 0, foreign) == quorum.No
	majority := quorum.Majority(len(a.parts))
	format, args := "%s", []any{fmt.Sprintf("%d of %d nodes %s, %d needed", n, len(a.parts), what, majority)}
	for _, p := range a.parts {
		if p.counts() {
			continue
		}
		why := p.why
		if p.in && !p.granted {
			why = errors.New("it is held by others, and the request waits")
		} else if why == nil {
			why = errors.New("it has not answered yet")
		}
		if mostForeign || replied >= majority {
			why = lockerr.DemoteRedis(why)
		}
		if is := errors.Is(why, lockerr.ErrNotLock); is && !mostForeign || why == lockerr.ErrLock && mostForeign {
			why = lockerr.Demote(why)
		}
		format += "; %s: %w"
		args = append(args, p.nodeName(), why)
	}
	return fmt.Errorf(format, args...)
}

// onNode adds the name of the node to an error, if there are several.
func (p *part) onNode(err error) error {
	if p.acq.quorum == nil {
		return err
	}
	return fmt.Errorf("%s: %w", p.nodeName(), err)
}

// nodeName is the name of p's node in errors and in the log.
func (p *part) nodeName() string {
	if p.node.Addr == "" {
		return fmt.Sprintf("node %d", p.index+1)
	}
	return fmt.Sprintf("node %d (%s)", p.index+1, p.node.Addr)
}
