package redismutex

// This file answers: how does Go call Lua? Nothing else
// knows the order of their arguments or what their replies look like.

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/lua"
)

var (
	lockScript    = load("lock", granted)
	rlockScript   = load("rlock", granted)
	refreshScript = load("refresh", granted)
	unlockScript  = load("unlock", left)
)

// A script is one verb. Source and digest are boxed once, for the arguments of
// every call.
type script struct {
	source any
	digest any
	short  status // what a short reply says: see lua/lib/reply.lua
}

func load(verb string, short status) *script {
	source := lua.Source(verb)
	digest := sha1.Sum([]byte(source))
	return &script{source: source, digest: hex.EncodeToString(digest[:]), short: short}
}

// A status is what a script says of the caller's id. lua/lib/reply.lua explains them.
type status int64

const (
	granted status = 1 + iota
	waiting
	busy
	left
	gone
	buried
	foreign
)

// A reply is what a script answers.
type reply struct {
	status status
	value  int64  // the token of a grant; for a waiter, ms until the lease in front ends
	data   string // "<type>:<key>" of somebody's data
	more   bool   // not all that is free has been handed on: call again
	untold bool   // PUBLISH was refused: nobody granted has been told
	grants string // a message for the caller's own mailbox

	// Only with several nodes:
	preceded bool  // somebody waits who comes before the caller
	last     int64 // the highest rank seen
}

// A cmd is one call of a script: what [redis.NewCmd] takes. A string put in an
// interface is an allocation, so what many calls share has been put there once.
type cmd []any

// keysAt is where the keys begin in a cmd: EVALSHA, the digest, the number of
// keys.
const keysAt = 3

func (s *stake) enterCmd(try bool) cmd {
	script := rlockScript
	if s.write {
		script = lockScript
	}
	return s.scored(cmd{
		"evalsha", script.digest, "4", s.key(0), s.key(1), s.key(2), s.key(3),
		s.id, s.hold.m.ttlArg, s.how(try),
	})
}

// keepCmd keeps s as a writer or a reader, whatever it entered as.
func (s *stake) keepCmd(kind any, raise uint64) cmd {
	c := s.scored(cmd{
		"evalsha", refreshScript.digest, "4", s.key(0), s.key(1), s.key(2), s.key(3),
		s.id, s.hold.m.ttlArg, kind,
	})
	if raise != 0 {
		c = append(c, strconv.FormatUint(raise, 10))
	}
	return c
}

// keepHoldCmd is keepCmd for a writer that holds. It needs no other key.
func (s *stake) keepHoldCmd() cmd {
	return cmd{"evalsha", refreshScript.digest, "1", s.key(0), s.id, s.hold.m.ttlArg}
}

func (s *stake) leaveCmd() cmd {
	c := cmd{
		"evalsha", unlockScript.digest, "4", s.key(0), s.key(1), s.key(2), s.key(3),
		s.id, s.kind(), nil,
	}
	switch {
	case s.bury:
		c[9] = s.hold.m.buryArg
	case s.hold.ballot != nil:
		c[9] = ""
	default:
		return c[:9]
	}
	return s.scored(c)
}

// scored is c with the place in the queues of all nodes, if there are several.
func (s *stake) scored(c cmd) cmd {
	if s.hold.ballot == nil {
		return c
	}
	return append(c, s.hold.ballot.score)
}

func (s *stake) key(i int) any { return s.hold.keys.args[i] }

// kind is what s entered as.
func (s *stake) kind() any {
	if s.write {
		return "w"
	}
	return "r"
}

// howToEnter is the third argument of the scripts that enter: indexed by
// whether it is a try, and by whether it goes before all others.
var howToEnter = [2][2]any{{"join:0", "join:1"}, {"try:0", "try:1"}}

func (s *stake) how(try bool) any {
	return howToEnter[b2i(try)][b2i(s.hold.m.first(s.write))]
}

// first says whether writers, or readers, go before all who are of the other kind.
func (m *RWMutex) first(write bool) bool {
	return m.order == writersFirst && write || m.order == readersFirst && !write
}

// span is between the ranks of the two classes, as lua/lib/token.lua has it.
const span = 4e15

// score is where a rank stands in the queue.
func (h *hold) score(rank int64) any {
	if h.m.first(h.write) {
		rank -= span
	}
	return strconv.FormatInt(rank, 10)
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

var errInterrupted = errors.New("interrupted")

// interruptibly is run, but returns errInterrupted as soon as ctx ends, while
// the call goes on by itself: a context does not interrupt go-redis in a read.
// When the call has ended it frees its place in the limiter.
func (ep *endpoint) interruptibly(ctx context.Context, ttl time.Duration, s *script, c cmd, place place) (reply, error) {
	if ctx.Done() == nil {
		defer place.free()
		return ep.run(ctx, ttl, s, c)
	}
	type answer struct {
		reply reply
		err   error
	}
	answers := make(chan answer, 1)
	ep.workers.run(func() {
		sent := ctx
		if s == unlockScript {
			sent = context.WithoutCancel(ctx) // it is to be sent in any case
		}
		r, err := ep.run(sent, ttl, s, c)
		place.free()
		answers <- answer{r, err}
	})
	select {
	case a := <-answers:
		if a.err != nil && hasEnded(ctx) {
			<-ctx.Done()
			return reply{}, errInterrupted
		}
		return a.reply, a.err
	case <-ctx.Done():
		return reply{}, errInterrupted
	}
}

// hasEnded reports whether ctx has ended. A client that gives its deadline to the socket may be told by that a moment
// before the context's own timer fires.
func hasEnded(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(deadline)
}

// run calls a script, and repeats the call while the reply says that there is more
// to hand on: every script is idempotent per id, and the first reply of a release
// is the one that says whether it found anything.
//
// It repeats the call for at most half the TTL, after which a renewal is due: an
// acquire that took longer would be acknowledged too late to be of use. What is left
// is handed on by the renewals of those who wait and hold.
func (ep *endpoint) run(ctx context.Context, ttl time.Duration, s *script, c cmd) (reply, error) {
	end := now().add(ttl / 2)
	r, err := s.parse(ep.eval(ctx, s, c))
	ep.box.Deliver(r.grants)
	for n, more := 0, r.more; more && err == nil && n < mostBatches && now() < end; n++ {
		var next reply
		next, err = s.parse(ep.eval(ctx, s, c))
		more = next.more
		ep.box.Deliver(next.grants)
		if s != unlockScript {
			r = next
		} else if err != nil {
			return r, nil // it has left; what is left to hand on, the others do
		}
	}
	return r, err
}

// mostBatches bounds how often run repeats a call where no time passes meanwhile, as
// in virtual time. A script moves 250 participants, so no queue of this world needs
// as many.
const mostBatches = 10000

// A call is one of many that share a round trip. Each has its own fate.
type call struct {
	stake  *stake
	script *script
	cmd    cmd
	raise  uint64  // the token that it raises to, or 0
	acked  bool    // of a release: its id has waited, or held
	tried  instant // of a release: when it was sent before; always: never
	reply  reply
	err    error
}

// runAll runs calls in one round trip, or one by one where the client has no
// pipelines. It does not repeat those that leave something to settle.
func (ep *endpoint) runAll(ctx context.Context, calls []*call) {
	// Pipelines have connections of their own: a single call can do without.
	if ep.pipeline == nil || len(calls) == 1 {
		for _, c := range calls {
			c.reply, c.err = c.script.parse(ep.eval(ctx, c.script, c.cmd))
		}
		return
	}
	unknown := ep.pipelined(ctx, calls)
	for _, c := range unknown {
		c.cmd = c.script.inFull(c.cmd)
	}
	ep.pipelined(ctx, unknown)
}

// pipelined returns the calls whose script the server does not know.
func (ep *endpoint) pipelined(ctx context.Context, calls []*call) (unknown []*call) {
	if len(calls) == 0 {
		return nil
	}
	start := now()
	pipeline, sent := ep.pipeline(), make([]*redis.Cmd, len(calls))
	for i, c := range calls {
		sent[i] = c.cmd.redis(ctx)
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
		c.reply, c.err = c.script.parse(sent[i])
	}
	if last := sent[len(sent)-1].Err(); last == nil || !hasEnded(ctx) {
		ep.health.record(start, last)
	}
	return unknown
}

// eval sends c, with the source where the server does not know the digest.
func (ep *endpoint) eval(ctx context.Context, s *script, c cmd) *redis.Cmd {
	sent := ep.send(ctx, c)
	if err := sent.Err(); err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") {
		return ep.send(ctx, s.inFull(c))
	}
	return sent
}

// inFull is c with the source in place of the digest.
func (s *script) inFull(c cmd) cmd {
	full := append(cmd(nil), c...)
	full[0], full[1] = "eval", s.source
	return full
}

// send sends c, and records what that shows of the node.
func (ep *endpoint) send(ctx context.Context, c cmd) *redis.Cmd {
	start := now()
	sent := ep.do(ctx, c)
	if err := sent.Err(); err == nil || !hasEnded(ctx) {
		ep.health.record(start, err)
	}
	return sent
}

func (ep *endpoint) do(ctx context.Context, c cmd) *redis.Cmd {
	if ep.process != nil {
		sent := c.redis(ctx)
		if err := ep.process(ctx, sent); err != nil && sent.Err() == nil {
			sent.SetErr(err)
		}
		return sent
	}
	var names []string
	for _, key := range c.keys() {
		names = append(names, key.(string))
	}
	args := c[keysAt+len(names):]
	if c[0] == "eval" {
		return ep.rc.Eval(ctx, c[1].(string), names, args...)
	}
	return ep.rc.EvalSha(ctx, c[1].(string), names, args...)
}

func (c cmd) redis(ctx context.Context) *redis.Cmd {
	sent := redis.NewCmd(ctx, c...)
	sent.SetFirstKeyPos(keysAt)
	return sent
}

func (c cmd) keys() []any {
	if c[2] == "1" {
		return c[keysAt : keysAt+1]
	}
	return c[keysAt : keysAt+4]
}

// parse reads a reply, which may come from a server gone mad: whatever is not
// a reply of ours is an error.
func (s *script) parse(sent *redis.Cmd) (reply, error) {
	value, err := sent.Result()
	if err != nil {
		return reply{}, scriptError(err)
	}
	switch v := value.(type) {
	case int64:
		switch v {
		case 0:
			return reply{status: gone}, nil
		case 1:
			return reply{status: s.short}, nil
		}
		switch {
		case v > 0:
			return reply{status: s.short, value: v}, nil
		case s.short == granted:
			return reply{status: waiting, value: -1 - v}, nil
		}
	case string:
		if s.short == left {
			return reply{status: left, grants: v}, nil
		}
	case []any:
		if len(v) < 3 || len(v) > 5 {
			break
		}
		code, ok1 := v[0].(int64)
		flags, ok2 := v[2].(int64)
		r := reply{status: status(code), more: flags&1 != 0, untold: flags&2 != 0, preceded: flags&4 != 0}
		if code < int64(granted) || code > int64(foreign) || flags&^7 != 0 {
			break
		}
		var ok3 bool
		if r.status == foreign {
			r.data, ok3 = v[1].(string)
		} else {
			r.value, ok3 = v[1].(int64)
		}
		ok4, ok5 := true, true
		if len(v) > 3 {
			r.grants, ok4 = v[3].(string)
		}
		if len(v) > 4 {
			r.last, ok5 = v[4].(int64)
			if r.last < 0 {
				r.last += span
			}
		}
		if ok1 && ok2 && ok3 && ok4 && ok5 && r.value >= 0 && r.last >= 0 && r.last < span {
			return r, nil
		}
	}
	return reply{}, redisError(fmt.Errorf("unexpected reply %.100q", fmt.Sprint(value)))
}
