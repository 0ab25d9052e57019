package redismutex

// This file answers: how does Go call Lua? It embeds the scripts, and nothing
// else knows the order of their arguments or what their replies look like.

import (
	"context"
	"crypto/sha1"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/redis/go-redis/v9"
)

//go:embed lua/*.lua
var files embed.FS

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
	short  status // what an integer, the value if it is not 1, says in place of a whole reply
}

// include matches the line where a script puts in another one.
var include = regexp.MustCompile(`(?m)^-- include (\w+)\.lua$`)

func load(verb string, short status) *script {
	source := include.ReplaceAllStringFunc(mustRead(verb), func(line string) string {
		return mustRead(include.FindStringSubmatch(line)[1])
	})
	digest := sha1.Sum([]byte(source))
	return &script{source: source, digest: hex.EncodeToString(digest[:]), short: short}
}

func mustRead(name string) string {
	text, err := files.ReadFile("lua/" + name + ".lua")
	if err != nil {
		panic(err) // go:embed has seen the file
	}
	return string(text)
}

// A status is what a script says of the caller's id. prelude.lua explains them.
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
}

// A cmd is one call of a script: what [redis.NewCmd] takes. A string put in an
// interface is an allocation, so what many calls share has been put there once.
type cmd []any

// keysAt is where the keys begin in a cmd: EVALSHA, the digest, the number of
// keys.
const keysAt = 3

func (s *stake) enterCmd(how any) cmd {
	script := rlockScript
	if s.write {
		script = lockScript
	}
	return cmd{
		"evalsha", script.digest, "4", s.keys.args[0], s.keys.args[1], s.keys.args[2], s.keys.args[3],
		s.idArg, s.m.ttlArg, how,
	}
}

func (s *stake) keepCmd() cmd {
	return cmd{
		"evalsha", refreshScript.digest, "4", s.keys.args[0], s.keys.args[1], s.keys.args[2], s.keys.args[3],
		s.idArg, s.m.ttlArg, s.kind(),
	}
}

// keepHoldCmd is keepCmd for a writer that holds. It needs no other key.
func (s *stake) keepHoldCmd() cmd {
	return cmd{"evalsha", refreshScript.digest, "1", s.keys.args[0], s.idArg, s.m.ttlArg}
}

func (s *stake) leaveCmd() cmd {
	c := cmd{
		"evalsha", unlockScript.digest, "4", s.keys.args[0], s.keys.args[1], s.keys.args[2], s.keys.args[3],
		s.idArg, s.kind(), nil,
	}
	if s.bury {
		c[9] = s.m.buryArg
		return c
	}
	return c[:9]
}

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
	first := s.m.order == writersFirst && s.write || s.m.order == readersFirst && !s.write
	return howToEnter[b2i(try)][b2i(first)]
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
func (ep *endpoint) interruptibly(ctx context.Context, s *script, c cmd) (reply, error) {
	if ctx.Done() == nil {
		return ep.run(ctx, s, c)
	}
	type answer struct {
		reply reply
		err   error
	}
	answers := make(chan answer, 1)
	go func() {
		sent := ctx
		if s == unlockScript {
			sent = context.WithoutCancel(ctx) // it is to be sent in any case
		}
		r, err := ep.run(sent, s, c)
		answers <- answer{r, err}
	}()
	select {
	case a := <-answers:
		if a.err != nil && ctx.Err() != nil {
			return reply{}, errInterrupted
		}
		return a.reply, a.err
	case <-ctx.Done():
		return reply{}, errInterrupted
	}
}

// run calls a script, again where it says that there is more to settle: every
// script is idempotent per id, and the first reply of a leave is the one that
// says whether it found anything.
func (ep *endpoint) run(ctx context.Context, s *script, c cmd) (reply, error) {
	r, err := s.parse(ep.eval(ctx, s, c))
	ep.box.Deliver(r.grants)
	for more := r.more; more && err == nil; {
		var next reply
		next, err = s.parse(ep.eval(ctx, s, c))
		more = next.more
		ep.box.Deliver(next.grants)
		if s != unlockScript {
			r = next
		} else if err != nil {
			return r, nil // it has left; what is left to settle, the others do
		}
	}
	return r, err
}

// A call is one of many that share a round trip. Each has its own fate.
type call struct {
	stake  *stake
	script *script
	cmd    cmd
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

func (ep *endpoint) send(ctx context.Context, c cmd) *redis.Cmd {
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
		if strings.Contains(err.Error(), "WRONGTYPE") {
			return reply{}, caused{ErrNotLock, err}
		}
		return reply{}, redisError(err)
	}
	switch v := value.(type) {
	case int64:
		switch v {
		case 0:
			return reply{status: gone}, nil
		case 1:
			return reply{status: s.short}, nil
		}
		return reply{status: s.short, value: v}, nil
	case []any:
		if len(v) != 3 && len(v) != 4 {
			break
		}
		code, ok1 := v[0].(int64)
		flags, ok2 := v[2].(int64)
		r := reply{status: status(code), more: flags&1 != 0, untold: flags&2 != 0}
		if code < int64(granted) || code > int64(foreign) || flags&^3 != 0 {
			break
		}
		var ok3 bool
		if r.status == foreign {
			r.data, ok3 = v[1].(string)
		} else {
			r.value, ok3 = v[1].(int64)
		}
		if len(v) == 4 {
			r.grants, ok1 = v[3].(string)
		}
		if ok1 && ok2 && ok3 && r.value >= 0 {
			return r, nil
		}
	}
	return reply{}, redisError(fmt.Errorf("unexpected reply %.100q", fmt.Sprint(value)))
}
