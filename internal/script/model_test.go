package script_test

// Random sequences of scripts do what the model says (internal/model, which is written from the promises and not from
// the scripts). After every step the reply, the messages and everything on the server are compared, on miniredis in
// virtual time and on a real Redis. -rapid.checks draws more sequences, and -rapid.steps longer ones.

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/model"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
	"pgregory.net/rapid"
)

// Promises 1, 3, 4, 5, 6, 7, 8 and 9.
func TestScriptsDoWhatTheModelSays(t *testing.T) { compare(t, false) }

// The same for one node of several, with ranks and tokens on which all nodes agree.
func TestScriptsOfAQuorumDoWhatTheModelSays(t *testing.T) { compare(t, true) }

func compare(t *testing.T, quorum bool) {
	t.Run("miniredis", func(t *testing.T) {
		redistest.MiniLocks(t)
		checks(t, 100)
		rapid.Check(t, func(t *rapid.T) {
			rapid.SyncTest(t, func(t *rapid.T) {
				_, rc := redistest.Mini(t)
				g := newRig(rc, quorum)
				g.pass = func(d int64) { redistest.Elapse(time.Duration(d) * time.Millisecond) }
				t.Cleanup(g.listen())
				t.Repeat(map[string]func(*rapid.T){"step": g.step})
			})
		})
	})
	t.Run("redis", func(t *testing.T) {
		checks(t, 300)
		rc := redistest.Start(t).Client(t)
		first := newRig(rc, quorum)
		t.Cleanup(first.listen())
		rapid.Check(t, func(t *rapid.T) {
			if err := rc.FlushDB(context.Background()).Err(); err != nil {
				t.Fatal(err)
			}
			g := newRig(rc, quorum)
			g.inbox, g.blur, g.pass = first.inbox, 3, g.shift
			t.Repeat(map[string]func(*rapid.T){"step": g.step})
		})
	})
}

// checks sets the number of sequences, unless the command line does: with -short, a tenth.
func checks(t *testing.T, n int) {
	said := false
	flag.Visit(func(f *flag.Flag) { said = said || f.Name == "rapid.checks" })
	if said {
		return
	}
	if testing.Short() {
		n /= 10
	}
	f := flag.Lookup("rapid.checks")
	was := f.Value.String()
	t.Cleanup(func() { f.Value.Set(was) })
	f.Value.Set(strconv.Itoa(n))
}

const box = "redismutex:" // the mailboxes begin with it

// span is the distance between the two classes of ranks, as the scripts have it.
const span = int64(4e15)

// A rig is a server with a lock, and the model of that lock.
type rig struct {
	t      *rapid.T
	rc     *redis.Client
	keys   *script.Keys
	inbox  <-chan *redis.Message
	pass   func(ms int64) // has time pass
	quorum bool
	anchor int64 // when a clock that does not stand still was made to, in ms
	blur   int64 // ms that a time on the server may be off; 0: its clock stands still in a step

	actors [8]actor
	last   int // which one of them has acted, which is apt to act again
	ids    int
	state  model.State
	found  snapshot // what was on the server after the last step
	log    []string
	over   bool // the sequence is given up

	foreign string // the key that holds foreign data, or ""
	data    line   // what that is
}

// An actor acquires under one id after the other. An id that it gives up has crashed.
type actor struct {
	script.Participant
	id, name  string
	first     bool // it ranks before all waiters of the other kind
	tombstone bool
	model.Op  // how it acquires
}

func newRig(rc *redis.Client, quorum bool) *rig {
	keys, err := script.NewKeys("lock")
	if err != nil {
		panic(err)
	}
	return &rig{rc: rc, keys: keys, quorum: quorum}
}

// listen loads the scripts and subscribes to the mailboxes. It returns a function that closes the subscription.
func (g *rig) listen() func() {
	for _, s := range []*script.Script{script.Lock, script.RLock, script.Refresh, script.Unlock, script.Inspect, script.Revoke} {
		if err := g.rc.ScriptLoad(context.Background(), s.Source()).Err(); err != nil {
			panic(err)
		}
	}
	sub, inbox := g.rc.PSubscribe(context.Background(), box+"*"), make(chan *redis.Message, 100)
	if _, err := sub.Receive(context.Background()); err != nil {
		panic(err)
	}
	go func() { // miniredis drops a message unless the subscriber is reading
		defer close(inbox)
		for {
			m, err := sub.ReceiveMessage(context.Background())
			if err != nil {
				return
			}
			inbox <- m
		}
	}()
	g.inbox = inbox
	return func() { sub.Close() }
}

// The verbs, as often as they are drawn, the simplest first.
var verbs = []string{
	"acquire", "acquire", "acquire", "acquire", "acquire again", "acquire again",
	"release", "release", "release", "renew", "renew", "renew", "renew alone", "downgrade", "inspect", "revoke", "pass", "pass", "pass", "foreign",
}

// step runs one verb on the server and in the model.
func (g *rig) step(t *rapid.T) {
	if g.t = t; g.over {
		return
	}
	g.standStill()
	verb := rapid.SampledFrom(verbs).Draw(t, "verb")
	switch verb {
	case "pass":
		g.wait()
		return
	case "foreign":
		g.plant()
		return
	case "inspect":
		g.inspect()
		return
	}
	i := rapid.IntRange(0, len(g.actors)+2).Draw(t, "actor")
	if i >= len(g.actors) {
		i = g.last
	}
	g.last = i
	a := &g.actors[i]
	if a.id == "" || verb == "acquire" {
		*a = g.actor(string(rune('a' + i%3)))
	}
	op := model.Op{ID: a.id, Kind: a.Kind, TTL: a.TTL, Class: a.Class, Rank: a.Rank}
	holder := g.holder(a.id)
	if holder != 0 {
		op.Kind = holder // a writer that has become a reader knows it
	}
	switch verb {
	case "acquire", "acquire again":
		op = a.Op
		what := "acquires"
		if op.Try {
			what = "tries"
		}
		if g.quorum {
			what += fmt.Sprintf(", rank %d", op.Rank)
		} else if op.Age = g.age(); op.Age > 0 { // the same id may be sent again with another age
			what += fmt.Sprintf(", %d µs ago", op.Age)
		}
		g.call(a, op, a.Acquire(op.Try, a.first, time.Duration(op.Age)*time.Microsecond), fmt.Sprintf("%s, class %d, ttl %d", what, op.Class, op.TTL))
	case "renew":
		op.Verb = model.Renew
		what := "renews as " + string(op.Kind)
		if g.quorum && op.Kind == model.Writer && rapid.Bool().Draw(t, "raise") {
			op.Raise = g.rank()
			what += fmt.Sprintf(", token raised to %d", op.Raise)
		}
		g.call(a, op, a.as(op.Kind).Renew(uint64(op.Raise)), what)
	case "renew alone":
		if a.Kind != model.Writer {
			t.Skip("only a writer knows that it holds alone")
		}
		op.Verb, op.Alone = model.Renew, true
		g.call(a, op, a.RenewWriter(), "renews with the holder key alone")
	case "downgrade":
		if a.Kind != model.Writer || g.waits(a.id) {
			t.Skip("only a holder is downgraded")
		}
		op.Verb, op.Kind = model.Renew, model.Reader
		g.call(a, op, a.as(model.Reader).Renew(0), "becomes a reader")
	case "revoke":
		op.Verb, op.Tombstone = model.Revoke, 2*a.TTL
		g.call(a, op, a.Keys.Revoke(a.id, a.Durations, g.quorum), "is revoked")
	case "release":
		op.Verb = model.Release
		what := "releases"
		if a.tombstone = rapid.Bool().Draw(t, "tombstone"); a.tombstone {
			op.Tombstone, what = 2*a.TTL, "releases with a tombstone"
		}
		op.Kind = a.Kind // also when it has become a reader, since that may not be known
		g.call(a, op, a.Release(a.tombstone), what)
	}
}

func (g *rig) actor(mailbox string) actor {
	g.ids++
	op := model.Op{
		ID:   fmt.Sprintf("%s%s:%d", box, mailbox, g.ids),
		Kind: rapid.SampledFrom([]model.Kind{model.Writer, model.Reader}).Draw(g.t, "kind"),
		TTL:  rapid.SampledFrom([]int64{3000, 1000, 10_000, 60_000}).Draw(g.t, "ttl"),
		Try:  rapid.IntRange(0, 4).Draw(g.t, "try") == 4,
	}
	op.Class = max(0, rapid.IntRange(-2, 1).Draw(g.t, "class"))
	a := actor{id: op.ID, name: fmt.Sprintf("%c%d of %s", op.Kind, g.ids, mailbox), first: op.Class == 1}
	a.Participant = script.Participant{
		Keys: g.keys, Durations: script.NewDurations(time.Duration(op.TTL) * time.Millisecond),
		ID: op.ID, Write: op.Kind == model.Writer,
	}
	if g.quorum {
		op.Rank = g.rank()
		a.Score = script.Score(op.Rank, a.first)
	}
	a.Op = op
	return a
}

// as returns a as a participant that renews as that kind.
func (a *actor) as(kind model.Kind) script.Participant {
	p := a.Participant
	p.Write = kind == model.Writer
	return p
}

// rank returns the rank of a request, or a token: behind any clock, or ahead of it.
func (g *rig) rank() int64 {
	return rapid.SampledFrom([]int64{500_000_000_000_000, ahead}).Draw(g.t, "base") + rapid.Int64Range(1, 9).Draw(g.t, "rank")
}

// age returns how long a request has waited in its process, in µs: often not at all; about as long as steps take on a
// real server, or in virtual time; for hours; for longer than there have been clocks.
func (g *rig) age() int64 {
	return rapid.SampledFrom([]int64{0, 0, 0, 0, 1, 700, 5000, 700_000, 1_600_000, 6_000_000, 3_600_000_000, math.MaxInt64 / 1000}).Draw(g.t, "age")
}

// holder returns the kind of the holder id, 0 if it does not hold.
func (g *rig) holder(id string) model.Kind {
	for _, p := range g.state.Holders {
		if p.ID == id {
			return p.Kind
		}
	}
	return 0
}

func (g *rig) waits(id string) bool {
	return slices.ContainsFunc(g.state.Queue, func(p model.Participant) bool { return p.ID == id })
}

// ends returns when leases, tombstones and the counter end, in ms and in order.
func (g *rig) ends(now model.Time) (ends []int64) {
	s := g.state.At(now)
	for _, p := range append(s.Leases(), s.Holders...) {
		ends = append(ends, p.Ends)
	}
	if s.TokenEnds != 0 {
		ends = append(ends, s.TokenEnds)
	}
	slices.Sort(ends)
	return slices.Compact(ends)
}

// wait lets some time pass: a little, until something ends, or until all has ended.
func (g *rig) wait() {
	now := g.time()
	d := rapid.SampledFrom([]int64{500, 1, 9, 1500, 5000, 0, -1, -2, -3, -4, model.Retention + 1}).Draw(g.t, "ms")
	if ends := g.ends(now); d <= 0 && len(ends) > 0 {
		d = ends[min(int(-d), len(ends)-1)] - int64(now)/1000
		if g.blur == 0 {
			d += rapid.Int64Range(-1, 1).Draw(g.t, "off")
		}
	}
	if g.blur > 0 {
		d = (d + tick/2) / tick * tick
	}
	if d <= 0 {
		return
	}
	g.note("%d ms pass", d)
	g.pass(d)
	for g.blur > 0 && g.near() {
		g.note("%d ms pass", tick)
		g.pass(tick)
	}
}

// standStill takes back the time that has passed by itself on a real server, so that a sequence can be repeated
// exactly.
func (g *rig) standStill() {
	if g.blur == 0 {
		return
	}
	now := int64(g.time()) / 1000
	if g.anchor != 0 {
		g.shift(g.anchor - now)
	}
	g.anchor = now
}

// tick is what times are multiples of on a real server, in ms: nothing ends within half a tick of a step.
const tick = 100

// near reports whether something ends about now.
func (g *rig) near() bool {
	now := g.time()
	ends := g.ends(now - tick/2*1000)
	return len(ends) > 0 && ends[0] < int64(now)/1000+tick/2
}

// shift lets time pass on a server whose clock cannot be set, by bringing all ends nearer.
func (g *rig) shift(d int64) {
	if err := shiftScript.Run(context.Background(), g.rc, []string{g.keys.Leases()}, d).Err(); err != nil {
		g.t.Fatal(err)
	}
	s := &g.state
	for _, ps := range [][]model.Participant{s.Holders, s.Queue} {
		for i := range ps {
			ps[i].Ends -= d
		}
	}
	for id := range s.Tombstones {
		s.Tombstones[id] -= d
	}
	s.TokenEnds -= d
	g.found.shift(d)
}

var shiftScript = redis.NewScript(endSource + `
	for _, key in ipairs(redis.call('KEYS', '*')) do
		if ends(key) >= 0 then -- the rest is foreign
			redis.call('PEXPIREAT', key, string.format('%d', ends(key) - ARGV[1]))
		end
	end
	if redis.call('PTTL', KEYS[1]) >= 0 then
		for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
			redis.call('ZINCRBY', KEYS[1], -ARGV[1], id)
		end
	end
	return 1`)

// endSource returns when a key ends, -1 if never. PEXPIRETIME came with Redis 7, and before 7.2 the clock moves within
// a script.
const endSource = `
	local function clock()
		local time = redis.call('TIME')
		return time[1] * 1000 + math.floor(time[2] / 1000)
	end
	local function ends(key)
		local now, left
		repeat
			now, left = clock(), redis.call('PTTL', key)
		until now == clock()
		return left < 0 and left or now + left
	end`

func (g *rig) time() model.Time {
	now, err := g.rc.Time(context.Background()).Result()
	if err != nil {
		g.t.Fatal(err)
	}
	return model.Time(now.UnixMicro())
}

func (g *rig) note(format string, arg ...any) { g.log = append(g.log, fmt.Sprintf(format, arg...)) }

func (g *rig) fail(format string, arg ...any) {
	g.t.Helper()
	steps := 0
	for _, line := range g.log {
		if line[0] != '\t' {
			steps++
		}
	}
	g.note(format, arg...)
	g.t.Fatalf("after %d steps\n\t%s\n", steps, strings.Join(g.log, "\n\t"))
}

// call sends a command to the server and the model, and compares the results.
func (g *rig) call(a *actor, op model.Op, c script.Command, what string) {
	ctx := context.Background()
	pipeline := g.rc.Pipeline()
	begun := pipeline.Time(ctx)
	sent := c.Redis(ctx)
	_ = pipeline.Process(ctx, sent)
	ended := pipeline.Time(ctx)
	look := pipeline.Eval(ctx, snapshotSource, nil)
	pipeline.Publish(ctx, box, "end of step")
	_, _ = pipeline.Exec(ctx) // each command has its error
	messages := g.receive()

	got, err := c.Script.Parse(sent)
	if g.foreign != "" {
		g.note("%s %s -> %v %d, %v", a.name, what, model.Status(got.Status), got.Value, err)
		g.checkForeign(op, got, err, append(messages, got.Grants), look)
		return
	}
	if err != nil {
		g.fail("%s %s: %v", a.name, what, err)
	}
	g.note("%s %s -> %v %d", a.name, what, model.Status(got.Status), got.Value)
	now := model.Time(begun.Val().UnixMicro())
	b := blur{ticks: model.Time(ended.Val().UnixMicro()) - now, ms: g.blur}
	b.ms += int64(b.ticks) / 1000
	if b.ms > tick/4 {
		g.over = true // the step took too long for the times to be compared
		return
	}

	before, rests := g.state.At(now), g.found.rests(now)
	if op.Age > 0 && b.ticks > 0 && slices.ContainsFunc(before.Queue, func(p model.Participant) bool { return b.sameRank(p.Rank, int64(now)-op.Age) }) {
		g.over = true // a waiter may rank before it or behind it
		return
	}
	if set := before.TokenEnds - model.Retention; b.ms > 0 && before.TokenEnds != 0 && b.sameMs(int64(now)/1000-set, model.Window) {
		g.over = true // the token may be counted or read from the clock
		return
	}
	var want model.Reply
	if op.Verb == model.Acquire && rests.refuse(op, got.Status) {
		// Its lease or its tombstone has ended, but what is left of it may still
		// refuse the id, which is used once.
		g.state, want = g.state.Step(now, model.Op{Verb: model.HandOn, Rank: op.Rank})
		want.Status = model.Status(got.Status)
	} else {
		g.state, want = g.state.Step(now, op)
	}
	b.read = g.state.Token != before.Token || g.state.TokenEnds != before.TokenEnds
	g.checkReply(op, got, want, b, rests)
	g.checkMessages(op, messages, got.Grants, want.Grants, op.Verb == model.Revoke && want.Status == model.Released, b)
	g.found = g.parse(look)
	if differs := g.found.differs(g.keys, &g.state, now, b); differs != "" {
		g.fail("%s\n\tfound %+v\n\twant  %+v", differs, g.found, g.state)
	}
}

// inspect looks at the lock: that tells what the model says, and changes nothing, not even what ended participants have left.
func (g *rig) inspect() {
	ctx := context.Background()
	pipeline := g.rc.Pipeline()
	begun := pipeline.Time(ctx)
	before := pipeline.Eval(ctx, snapshotSource, nil)
	sent := g.keys.Inspect().Redis(ctx)
	_ = pipeline.Process(ctx, sent)
	after := pipeline.Eval(ctx, snapshotSource, nil)
	ended := pipeline.Time(ctx)
	pipeline.Publish(ctx, box, "end of step")
	_, _ = pipeline.Exec(ctx)
	messages := g.receive()

	now := model.Time(begun.Val().UnixMicro())
	b := blur{ticks: model.Time(ended.Val().UnixMicro()) - now, ms: g.blur}
	if b.ms += int64(b.ticks) / 1000; b.ms > tick/4 {
		g.over = true
		return
	}
	got, err := script.ParseInspection(sent)
	g.note("somebody inspects -> %+v, %v", got, err)
	was, is := g.lines(before), g.lines(after)
	same := len(was) == len(is) && len(messages) == 0
	for key, line := range was {
		same = same && is[key].kind == line.kind && is[key].words == line.words && b.sameMs(is[key].ends, line.ends)
	}
	if !same {
		g.fail("inspecting has changed %+v into %+v, and published %q", was, is, messages)
	}
	if g.foreign != "" {
		if !errors.Is(err, ErrNotLock) {
			g.fail("foreign data was not reported: %v", err)
		}
		return
	}
	if err != nil {
		g.fail("%v", err)
	}

	want := g.state.At(now)
	agrees := func(got []script.Seen, want []model.Participant) bool {
		return slices.EqualFunc(got, want, func(s script.Seen, p model.Participant) bool {
			waits := p.Rank == 0 || b.sameRank(s.Rank, p.Rank) &&
				b.sameMs(s.Waited.Milliseconds(), max(0, int64(now)-p.Rank)/1000)
			return s.ID == p.ID && s.Write == (p.Kind == model.Writer) && waits && b.sameMs(s.Lease.Milliseconds(), p.Ends-int64(now)/1000)
		})
	}
	slices.SortFunc(got.Holders, func(p, q script.Seen) int { return strings.Compare(p.ID, q.ID) })
	slices.SortFunc(want.Holders, func(p, q model.Participant) int { return strings.Compare(p.ID, q.ID) })
	if !agrees(got.Holders, want.Holders) || !agrees(got.Waiters, want.Queue) || got.Holding != len(want.Holders) ||
		got.Waiting != len(want.Queue) || !b.sameToken(got.Token, want.Token) {
		g.fail("want %+v", want)
	}
}

// plant puts foreign data under a key. From then on the model does not know the replies, but the data must stay as it
// is.
func (g *rig) plant() {
	if g.foreign != "" || rapid.IntRange(0, 3).Draw(g.t, "plant") < 3 {
		g.t.Skip("seldom, and once")
	}
	ctx := context.Background()
	key := keyNames(g.keys)[rapid.IntRange(0, 3).Draw(g.t, "key")]
	all := slices.DeleteFunc(slices.Clone(data), func(d datum) bool { return d.ttl != 0 })
	if key == g.keys.Token() {
		all = append(all, slices.DeleteFunc(slices.Clone(counters), func(d datum) bool { return d.ttl != 0 })...)
	}
	d := rapid.SampledFrom(all).Draw(g.t, "data")
	if d.put != nil {
		g.rc.Del(ctx, key)
		d.put(ctx, g.rc, key)
	} else if is := g.rc.Type(ctx, key).Val(); is == "none" || is == "string" && key == g.keys.Name() || !g.rc.Persist(ctx, key).Val() {
		g.t.Skip("the holder key of a writer is its own, whatever its TTL")
	}
	g.foreign, g.data = key, g.lines(g.rc.Eval(ctx, snapshotSource, nil))[key]
	g.note("%s holds %s", key, d.what)
}

// checkForeign checks that foreign data has not changed, that an acquire is refused, and that no grant is made that the
// foreign data could contradict.
func (g *rig) checkForeign(op model.Op, got script.Reply, err error, messages []string, look *redis.Cmd) {
	after := g.lines(look)
	for key, line := range after {
		if key != g.foreign && line.ends == -1 {
			g.fail("%s has no TTL", key)
		}
	}
	token := g.foreign == g.keys.Token()
	for _, m := range messages {
		_, words, published := strings.Cut(m, " <- ")
		if !published {
			words = m
		}
		if words != "" && !(op.Verb == model.Revoke && strings.HasPrefix(words, "revoked ")) && !(token && strings.HasPrefix(words, "0 ")) { // readers need no token
			g.fail("foreign data, and a grant: %q", m)
		}
	}
	refused := errors.Is(err, ErrNotLock) || got.Status == script.Foreign
	switch {
	case after[g.foreign] != g.data:
		g.fail("foreign data is %+v, want it unchanged: %+v", after[g.foreign], g.data)
	case err != nil && !refused:
		g.fail("%v", err)
	case op.Verb == model.Acquire && !refused && (!token || op.Kind == model.Writer):
		g.fail("foreign data was not reported: %+v", got)
	}
}

// lines returns everything on the server, as scripts see it.
func (g *rig) lines(look *redis.Cmd) map[string]line {
	lines, err := linesOf(look)
	if err != nil {
		g.t.Fatal(err)
	}
	return lines
}

// checkReply allows for entries of expired participants that are still on the server: a waiter behind them renews too
// early, or a holder makes way in vain.
func (g *rig) checkReply(op model.Op, got script.Reply, want model.Reply, b blur, rests snapshot) {
	value := got.Value == want.Value
	switch want.Status {
	case model.Granted:
		value = b.sameToken(got.Value, want.Value)
	case model.Waiting:
		value = b.sameMs(got.Value, want.Value) || got.Value == 0 && len(rests.leases) > 0
	}
	preceded := got.Preceded == want.Preceded || got.Preceded && len(rests.intents) > 0
	last := got.Last == want.Last || got.Last == 0 && (op.Verb == model.Release || op.Verb == model.Revoke)
	for _, rank := range rests.intents {
		last = last || got.Last == rank || got.Last == rank+span
	}
	if model.Status(got.Status) != want.Status || !value || !preceded || !last || got.More || got.Unpublished ||
		(want.Status == model.Busy) != slices.Contains(want.InWay, got.Holder) {
		g.fail("got %+v, want %+v", got, want)
	}
}

// checkMessages compares the published messages, and the one in a reply, with the grants.
func (g *rig) checkMessages(op model.Op, published []string, carried string, grants []model.Grant, revoked bool, b blur) {
	all, own := published, mailboxOf(op.ID)+" <- "
	if carried != "" {
		all = append(all, own+carried)
	}
	if len(all) > 0 {
		g.note("\tpublished %q, in the reply %q", published, carried)
	}
	adoptToken(all, b, grants)
	want := newsOf(grants)
	if revoked {
		want = append(want, own+"revoked "+strings.TrimPrefix(op.ID, mailboxOf(op.ID)+":"))
		slices.Sort(want)
	}
	slices.Sort(all)
	toOwn := slices.ContainsFunc(want, func(m string) bool { return strings.HasPrefix(m, own) })
	if !slices.Equal(all, want) || (carried != "") != (op.Verb == model.Release && toOwn) {
		g.fail("want messages %q, and in the reply of a release the one to its own mailbox", want)
	}
}

func mailboxOf(id string) string { return model.Participant{ID: id}.Mailbox() }

// receive returns what was published in this step, as "<mailbox> <- <message>".
func (g *rig) receive() (messages []string) {
	for m := range g.inbox {
		if m.Channel == box {
			return messages
		}
		messages = append(messages, m.Channel+" <- "+m.Payload)
	}
	g.t.Fatal("the subscription has ended")
	return nil
}

// newsOf returns the messages for grants, one for each mailbox (promise 7).
func newsOf(grants []model.Grant) []string {
	news := map[string]string{}
	for _, grant := range grants {
		mailbox := mailboxOf(grant.ID)
		if news[mailbox] == "" {
			news[mailbox] = fmt.Sprintf("%s <- %d", mailbox, grant.Token)
		}
		news[mailbox] += " " + strings.TrimPrefix(grant.ID, mailbox+":")
	}
	return slices.Sorted(maps.Values(news))
}

// adoptToken takes a token over from a message if it was read from a clock that did not stand still.
func adoptToken(messages []string, b blur, grants []model.Grant) {
	for i, grant := range grants {
		for _, m := range messages {
			var said int64
			rest, ok := strings.CutPrefix(m, mailboxOf(grant.ID)+" <- ")
			if n, _ := fmt.Sscan(rest, &said); ok && n == 1 && grant.Token != 0 && b.sameToken(said, grant.Token) {
				grants[i].Token = said
			}
		}
	}
}

// A blur is how far a server's times may be off: in µs, by the ticks of the clock while a script ran, and in ms; and
// whether a token may have been read from the clock.
type blur struct {
	ticks model.Time
	ms    int64
	read  bool
}

func (b blur) sameRank(got, want int64) bool { return got >= want && got <= want+int64(b.ticks) }

func (b blur) sameToken(got, want int64) bool { return got == want || b.read && b.sameRank(got, want) }

func (b blur) sameMs(got, want int64) bool { return got >= want-b.ms && got <= want+b.ms }

// A snapshot is everything on a server.
type snapshot struct {
	writer          string
	readers         []string
	intents, leases map[string]int64
	token           string
	ends            map[string]int64 // of each key
	other           []string
}

// snapshotSource returns a line for each key: name, type, end, contents.
const snapshotSource = endSource + `
	local lines = {}
	for i, key in ipairs(redis.call('KEYS', '*')) do
		local kind, words = redis.call('TYPE', key).ok, {}
		if kind == 'string' then
			words = {redis.call('GET', key)}
		elseif kind == 'set' then
			words = redis.call('SMEMBERS', key)
		elseif kind == 'zset' then
			words = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
		elseif kind == 'list' then
			words = redis.call('LRANGE', key, 0, -1)
		elseif kind == 'hash' then
			words = redis.call('HGETALL', key)
		elseif kind == 'stream' then
			words = redis.call('XRANGE', key, '-', '+')[1][2]
		end
		lines[i] = {key, kind, string.format('%d', ends(key)), words}
	end
	return lines`

func (g *rig) parse(look *redis.Cmd) snapshot {
	lines, err := look.Slice()
	if err != nil {
		g.t.Fatal(err)
	}
	found := snapshot{ends: map[string]int64{}}
	for _, line := range lines {
		line := line.([]any)
		key, kind := line[0].(string), line[1].(string)
		var words []string
		for _, word := range line[3].([]any) {
			words = append(words, word.(string))
		}
		found.ends[key], _ = strconv.ParseInt(line[2].(string), 10, 64)
		switch {
		case key == g.keys.Name() && kind == "string":
			found.writer = words[0]
		case key == g.keys.Name() && kind == "set":
			found.readers = words
			slices.Sort(found.readers)
		case key == g.keys.Intents() && kind == "zset":
			found.intents = g.scores(words)
		case key == g.keys.Leases() && kind == "zset":
			found.leases = g.scores(words)
		case key == g.keys.Token() && kind == "string":
			found.token = words[0]
		default:
			found.other = append(found.other, kind+" "+key)
		}
	}
	return found
}

func (g *rig) scores(words []string) map[string]int64 {
	scores := map[string]int64{}
	for i := 0; i < len(words); i += 2 {
		score, err := strconv.ParseFloat(words[i+1], 64)
		if err != nil || score != math.Trunc(score) {
			g.fail("the score of %q is %q", words[i], words[i+1])
		}
		scores[words[i]] = int64(score)
	}
	return scores
}

func (s *snapshot) shift(d int64) {
	for id := range s.leases {
		s.leases[id] -= d
	}
}

// rests returns what expired participants have left on the server.
func (s snapshot) rests(now model.Time) (rests snapshot) {
	rests.leases, rests.intents = map[string]int64{}, map[string]int64{}
	for id, ends := range s.leases {
		if ends <= int64(now)/1000 {
			rests.leases[id] = ends
		}
	}
	for member, rank := range s.intents {
		if _, dead := rests.leases[member[1:]]; dead {
			rests.intents[member] = rank
		}
	}
	return rests
}

// refuse reports whether these leftovers may be why an acquire is refused.
func (s snapshot) refuse(op model.Op, got script.Status) bool {
	_, waited := s.intents[string(op.Kind)+op.ID]
	_, left := s.leases["-"+op.ID]
	return got == script.Gone && waited || got == script.Tombstoned && left
}

// differs returns where the model and a server differ, apart from the leftovers of expired participants. If they do not,
// the model takes over the times of the server, which are off by no more than the blur.
func (s snapshot) differs(keys *script.Keys, m *model.State, now model.Time, b blur) string {
	if len(s.other) > 0 {
		return fmt.Sprintf("there is %q", s.other)
	}
	longest := int64(0)
	for _, p := range m.Leases() {
		longest = max(longest, p.Ends)
	}
	dead := s.rests(now)
	s.leases, s.intents = maps.Clone(s.leases), maps.Clone(s.intents)
	for id := range dead.leases {
		delete(s.leases, id)
	}
	for member := range dead.intents {
		delete(s.intents, member)
	}
	s.readers = slices.DeleteFunc(slices.Clone(s.readers), func(id string) bool {
		_, is := dead.leases[id]
		return is
	})
	// ms takes a time over and removes the entry from what the server has.
	ms := func(what string, scores map[string]int64, id string, want *int64) string {
		got, ok := scores[id]
		if !ok || !b.sameMs(got, *want) {
			return fmt.Sprintf("%s of %s: %d, want %d", what, id, got, *want)
		}
		*want = got
		delete(scores, id)
		return ""
	}

	// The holders.
	writer, readers := "", []string(nil)
	for i := range m.Holders {
		p := &m.Holders[i]
		if p.Kind == model.Reader {
			readers = append(readers, p.ID)
			if differs := ms("lease", s.leases, p.ID, &p.Ends); differs != "" {
				return differs
			}
			continue
		}
		writer = p.ID
		if !b.sameMs(s.ends[keys.Name()], p.Ends) {
			return fmt.Sprintf("the writer's lease ends at %d, want %d", s.ends[keys.Name()], p.Ends)
		}
		p.Ends = s.ends[keys.Name()]
	}
	slices.Sort(readers)
	if s.writer != writer || !slices.Equal(s.readers, readers) {
		return fmt.Sprintf("held by %q, want %q", append(s.readers, s.writer), append(readers, writer))
	}

	// The waiters and the tombstones.
	for i := range m.Queue {
		p := &m.Queue[i]
		member := string(p.Kind) + p.ID
		rank, ok := s.intents[member]
		if rank < 0 {
			rank += span
		}
		if !ok || (s.intents[member] < 0) != (p.Class == 1) || !b.sameRank(rank, p.Rank) {
			return fmt.Sprintf("%s waits with rank %d, want %d", member, s.intents[member], p.Rank)
		}
		p.Rank = rank
		delete(s.intents, member)
		if differs := ms("lease", s.leases, p.ID, &p.Ends); differs != "" {
			return differs
		}
	}
	for id, ends := range m.Tombstones {
		if differs := ms("tombstone", s.leases, "-"+id, &ends); differs != "" {
			return differs
		}
		m.Tombstones[id] = ends
	}
	if len(s.intents)+len(s.leases) > 0 {
		return fmt.Sprintf("unexpected entries: intents %v, leases %v", s.intents, s.leases)
	}

	// The token.
	n, _ := strconv.ParseInt(s.token, 10, 64)
	if s.token != "" && s.token != strconv.FormatInt(n, 10) || !b.sameToken(n, m.Token) {
		return fmt.Sprintf("token %q, want %d", s.token, m.Token)
	}
	if n != 0 && !b.sameMs(s.ends[keys.Token()], m.TokenEnds) {
		return fmt.Sprintf("the token ends at %d, want %d", s.ends[keys.Token()], m.TokenEnds)
	}
	m.Token, m.TokenEnds = n, s.ends[keys.Token()]

	// How long the keys live: as long as the longest lease (promise 8).
	for key, ends := range s.ends {
		if key == keys.Token() || key == keys.Name() && writer != "" {
			continue
		}
		if !b.sameMs(ends, longest) {
			return fmt.Sprintf("%s lives until %d, want %d", key, ends, longest)
		}
	}
	return ""
}
