package script

import (
	"context"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Command is one call of a script. A string put into an interface is an allocation, so arguments that many calls share
// are boxed once.
type Command struct {
	Script *Script
	args   []any // what redis.NewCmd takes: EVALSHA, the digest, the number of keys, the keys, the arguments
}

// Where the keys begin in the arguments of a command, and the arguments of its script, if it has all keys.
const keysAt, argsAt = 3, 7

// Durations are the TTL and the life of a tombstone, two TTLs, in ms, as scripts take them.
type Durations struct{ ttl, tombstone any }

// NewDurations returns the durations for a TTL.
func NewDurations(ttl time.Duration) Durations {
	ms := func(d time.Duration) any { return strconv.FormatInt(d.Milliseconds(), 10) }
	return Durations{ms(ttl), ms(2 * ttl)}
}

// A Participant is one id on one node, as scripts know it.
type Participant struct {
	Keys      *Keys
	Durations Durations
	ID        any // a string, or what marshals itself as one
	Write     bool
	Score     any // the place in the queue of every node, with several nodes; see Score
}

// Acquire is the command that grants the lock to p, or puts p in the queue unless it is a try. First puts p before all
// waiters of the other kind. A request that has waited in its process carries its age, in whole µs, and takes the place
// that it would have had; with several nodes it has a score.
func (p Participant) Acquire(try, first bool, age time.Duration) Command {
	s := RLock
	if p.Write {
		s = Lock
	}
	c := p.Keys.call(s, p.ID, p.Durations.ttl, way(try, first)).scored(p.Score)
	if p.Score == nil && age >= time.Microsecond {
		c.args = append(c.args, "", strconv.FormatInt(age.Microseconds(), 10))
	}
	return c
}

// way is the third argument of lock and rlock.
func way(try, first bool) any {
	switch {
	case try && first:
		return "try:1"
	case try:
		return "try:0"
	case first:
		return "join:1"
	}
	return "join:0"
}

// Renew is the command that renews the lease of a waiter or holder. A holder that acquired as a writer and renews as a
// reader is downgraded. A raise other than 0 is a fencing token: a writer that holds has its token raised to that.
func (p Participant) Renew(raise uint64) Command {
	c := p.Keys.call(Refresh, p.ID, p.Durations.ttl, p.kind()).scored(p.Score)
	if raise != 0 {
		c.args = append(c.args, strconv.FormatUint(raise, 10))
	}
	return c
}

// RenewWriter is Renew for a writer that holds. It needs only one key, so it works while a slot migrates.
func (p Participant) RenewWriter() Command {
	return Command{Refresh, []any{"evalsha", Refresh.digest, "1", p.Keys.holder, p.ID, p.Durations.ttl}}
}

// Release is the command that ends whatever p has. With a tombstone it also refuses an acquire of p that arrives later.
func (p Participant) Release(tombstone bool) Command {
	c := p.Keys.call(Unlock, p.ID, p.kind())
	switch {
	case tombstone:
		c.args = append(c.args, p.Durations.tombstone)
	case p.Score != nil:
		c.args = append(c.args, "")
	}
	return c.scored(p.Score)
}

// Revoke is the command that ends the acquisition of that id, which belongs to somebody else: with several nodes, whatever id
// it has on the one that is asked.
func (k *Keys) Revoke(id string, d Durations, several bool) Command {
	c := k.call(Revoke, id, d.tombstone)
	if several {
		c.args = append(c.args, "0")
	}
	return c
}

// Releases reports whether c releases an id, so that only the first reply tells whether the id was there.
func (c Command) Releases() bool { return c.Script.short == Released }

// Behind returns the command that makes two calls in one script: acquire, and then c, a release or a downgrade.
func (c Command) Behind(acquire Command) Command {
	s, first := Both(acquire.Script, c.Script), acquire.args[argsAt:]
	all := append(make([]any, 0, len(c.args)+1+len(first)), c.args[:argsAt]...)
	all[1] = s.digest
	all = append(append(all, strconv.Itoa(len(first))), first...)
	return Command{s, append(all, c.args[argsAt:]...)}
}

// call is a call of s with all keys and these arguments.
func (k *Keys) call(s *Script, args ...any) Command {
	all := make([]any, 0, argsAt+3) // most calls have three arguments
	all = append(all, "evalsha", s.digest, "4", k.holder, &k.intents, &k.leases, &k.token)
	return Command{s, append(all, args...)}
}

func (c Command) scored(score any) Command {
	if score != nil {
		c.args = append(c.args, score)
	}
	return c
}

// kind is how scripts name what p asks for.
func (p Participant) kind() any {
	if p.Write {
		return "w"
	}
	return "r"
}

// span is the distance between the ranks of the two classes, as the scripts have it.
const span = 4e15

// Score returns where a rank stands in the queue. First puts it before all ranks that are not first.
func Score(rank int64, first bool) string {
	if first {
		rank -= span
	}
	return strconv.FormatInt(rank, 10)
}

// Key is the key that is locked.
func (c Command) Key() string { return c.args[keysAt].(string) }

// HasOneKey reports whether c is the command of RenewWriter.
func (c Command) HasOneKey() bool { return c.args[2] == "1" }

// WithSource returns c with the source in place of the digest, for a server that does not know the script.
func (c Command) WithSource() Command {
	full := append([]any(nil), c.args...)
	full[0], full[1] = "eval", c.Script.source
	return Command{c.Script, full}
}

// Redis returns c as a command of go-redis.
func (c Command) Redis(ctx context.Context) *redis.Cmd {
	sent := redis.NewCmd(ctx, c.args...)
	sent.SetFirstKeyPos(keysAt)
	return sent
}

// Eval sends c through a client that can only evaluate scripts.
func (c Command) Eval(ctx context.Context, rc redis.Scripter) *redis.Cmd {
	end := argsAt
	if c.HasOneKey() {
		end = keysAt + 1
	}
	names := []string{c.Key()}
	for _, key := range c.args[keysAt+1 : end] {
		names = append(names, *key.(*string))
	}
	if c.args[0] == "eval" {
		return rc.Eval(ctx, c.args[1].(string), names, c.args[end:]...)
	}
	return rc.EvalSha(ctx, c.args[1].(string), names, c.args[end:]...)
}
