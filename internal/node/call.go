package node

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/script"
)

// ErrInterrupted is returned by a call whose context has ended. The call itself goes on.
var ErrInterrupted = errors.New("interrupted")

// ErrPanicked is the error of a call that may have been sent: a hook of the client has panicked, or has ended the goroutine.
var ErrPanicked = lockerr.Redis(errors.New("a hook of the client has panicked"))

// Call is Run, but returns ErrInterrupted as soon as ctx ends, while the call goes on by itself: a context does not
// interrupt go-redis in a read. When the call has ended it frees its place in the limiter.
func (n *Node) Call(ctx context.Context, ttl time.Duration, c script.Command, place Place) (script.Reply, error) {
	inBackground := false
	defer func() {
		if !inBackground { // also if ctx panics
			place.Free()
		}
	}()
	if ctx.Done() == nil {
		return n.Run(ctx, ttl, c)
	}
	inBackground = true
	return await(ctx, n, func() (script.Reply, error) {
		defer place.Free()
		sent := ctx
		if c.Releases() {
			sent = context.WithoutCancel(ctx) // a release is sent in any case
		}
		return n.Run(sent, ttl, c)
	})
}

// CallBoth makes two calls in one script: an acquire, and then a release or a downgrade. The second one is as Call makes it;
// onFirst is called with the answer to the first one. If the script fails, both calls fail, and either may have been made.
func (n *Node) CallBoth(ctx context.Context, ttl time.Duration, first script.Command, onFirst func(script.Reply, error), second script.Command, place Place) (script.Reply, error) {
	inBackground := false
	defer func() {
		if !inBackground { // also if ctx panics
			place.Free()
		}
	}()
	sent := context.WithoutCancel(ctx)
	both := func() (script.Reply, error) {
		answered := false
		defer func() {
			if !answered {
				onFirst(script.Reply{}, ErrPanicked)
			}
		}()
		end := clock.Now().Add(ttl / 2)
		a, b := script.Split(n.eval(sent, second.Behind(first)))
		r, err := first.Script.Parse(a) // what it has left to hand on is the second one's
		answered = true
		onFirst(r, err)
		r, err = second.Script.Parse(b)
		return n.handOn(sent, end, second, r, err)
	}
	if ctx.Done() == nil {
		return both()
	}
	inBackground = true
	return await(ctx, n, func() (script.Reply, error) {
		defer place.Free()
		return both()
	})
}

// Inspect returns the node's answer about the lock with these keys. It waits for a place among the releases, not behind the
// crowd that it may be asked about, and returns ErrInterrupted as soon as ctx ends.
func (n *Node) Inspect(ctx context.Context, keys *script.Keys) (script.Inspection, error) {
	place := n.Limiter.Releases
	if err := n.Admit(ctx, place, 0); err != nil {
		return script.Inspection{}, err
	}
	return await(ctx, n, func() (script.Inspection, error) {
		defer place.Free()
		return script.ParseInspection(n.eval(ctx, keys.Inspect()))
	})
}

// Revoke is Call for a revocation. Like an inspection it does not wait behind a crowd of acquires.
func (n *Node) Revoke(ctx context.Context, ttl time.Duration, c script.Command) (script.Reply, error) {
	place := n.Limiter.Releases
	if err := n.Admit(ctx, place, 0); err != nil {
		return script.Reply{}, err
	}
	return n.Call(ctx, ttl, c, place)
}

// await runs a call that frees its own place, and returns ErrInterrupted as soon as ctx ends.
func await[T any](ctx context.Context, n *Node, f func() (T, error)) (none T, _ error) {
	type answer struct {
		reply T
		err   error
	}
	answers := make(chan answer, 1)
	n.Go(func() {
		a := answer{err: ErrPanicked}
		defer func() { answers <- a }()
		a.reply, a.err = f()
	})
	select {
	case a := <-answers:
		if a.err != nil && hasEnded(ctx) {
			select {
			case <-ctx.Done():
				return none, ErrInterrupted
			case <-time.After(time.Second): // its deadline is a time of day, and the clock was set
			}
		}
		return a.reply, a.err
	case <-ctx.Done():
		return none, ErrInterrupted
	}
}

// hasEnded reports whether ctx has ended. A client that hands its deadline to the socket may learn of it a moment before
// the context's own timer fires.
func hasEnded(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(deadline)
}

// maxRepeats bounds how often Run repeats a call where no time passes meanwhile, as in virtual time. A script moves 250
// participants, so no real queue needs as many.
const maxRepeats = 10000

// Run calls a script, and calls it again while it replies that more is left to hand on: every script is idempotent per id.
// For a release it returns the first reply: only that one tells whether the id was there.
//
// It repeats the call for half the TTL at most: after that a renewal is due, and an acquire that took longer would be
// acknowledged too late to be of use. Renewals of the waiters and holders hand on the rest.
func (n *Node) Run(ctx context.Context, ttl time.Duration, c script.Command) (script.Reply, error) {
	end := clock.Now().Add(ttl / 2)
	r, err := c.Script.Parse(n.eval(ctx, c))
	return n.handOn(ctx, end, c, r, err)
}

// handOn is what Run does after the first reply, until that instant.
func (n *Node) handOn(ctx context.Context, end clock.Instant, c script.Command, r script.Reply, err error) (script.Reply, error) {
	first, failed := r, err
	n.Mailbox.Deliver(r.Grants)
	for i := 0; r.More && err == nil && i < maxRepeats && clock.Now() < end; i++ {
		sent := clock.Now()
		r, err = c.Script.Parse(n.eval(ctx, c))
		n.Mailbox.Deliver(r.Grants)
		if c.Releases() {
			n.LookForLostGrants(c.Key(), sent, false, r, err)
		}
	}
	if c.Releases() || err != nil && first.Status == script.Granted {
		return first, failed // it has been released, if that succeeded, or it holds; renewals hand on what is left
	}
	return r, err
}

// eval sends c, and again with its source where the server does not know the script.
func (n *Node) eval(ctx context.Context, c script.Command) *redis.Cmd {
	sent := n.send(ctx, c)
	if err := sent.Err(); err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") {
		return n.send(ctx, c.WithSource())
	}
	return sent
}

// send sends c and records what that shows of the node's health.
func (n *Node) send(ctx context.Context, c script.Command) (sent *redis.Cmd) {
	start := clock.Now()
	if n.process == nil {
		sent = c.Eval(ctx, n.rc)
	} else {
		sent = c.Redis(ctx)
		if err := n.process(ctx, sent); err != nil && sent.Err() == nil {
			sent.SetErr(err)
		}
	}
	if err := sent.Err(); err == nil || !hasEnded(ctx) {
		n.Health.record(start, err)
	}
	return sent
}

// A call is one of many that share a round trip. Each has its own fate.
type call struct {
	lease    *Lease
	command  script.Command
	raise    uint64 // the token that it raises to, or 0
	mayExist bool   // of a release: its id may have waited or held
	again    bool   // of a release: an earlier one was not confirmed
	sweeps   uint32 // those of the mailbox when it was made
	reply    script.Reply
	err      error
}

// runAll runs calls in one round trip, or one by one where the client has no pipelines. It repeats no call.
func (n *Node) runAll(ctx context.Context, calls []*call) {
	// Pipelines have connections of their own, which a single call can do without.
	if n.pipeline == nil || len(calls) == 1 {
		for _, c := range calls {
			c.reply, c.err = c.command.Script.Parse(n.eval(ctx, c.command))
		}
		return
	}
	unknown := n.runPipeline(ctx, calls)
	for _, c := range unknown {
		c.command = c.command.WithSource()
	}
	n.runPipeline(ctx, unknown)
}

// runPipeline returns the calls whose script the server does not know.
func (n *Node) runPipeline(ctx context.Context, calls []*call) (unknown []*call) {
	if len(calls) == 0 {
		return nil
	}
	start := clock.Now()
	pipeline, sent := n.pipeline(), make([]*redis.Cmd, len(calls))
	for i, c := range calls {
		sent[i] = c.command.Redis(ctx)
		_ = pipeline.Process(ctx, sent[i])
	}
	_, err := pipeline.Exec(ctx)
	for i, c := range calls {
		if err != nil && sent[i].Err() == nil && sent[i].Val() == nil {
			sent[i].SetErr(err)
		}
		if err := sent[i].Err(); err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") {
			unknown = append(unknown, c)
		}
		c.reply, c.err = c.command.Script.Parse(sent[i])
	}
	if last := sent[len(sent)-1].Err(); last == nil || !hasEnded(ctx) {
		n.Health.record(start, last)
	}
	return unknown
}
