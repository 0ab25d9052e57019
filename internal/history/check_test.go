package history_test

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/redismutex/redismutex/internal/history"
)

// held returns a lock that was asked for and granted at got, and unlocked and freed at unlocking.
func held(client string, kind history.Kind, got, unlocking int64, token uint64) history.Op {
	return history.Op{
		Client: client, Key: "k", Kind: kind, Token: token,
		Asked: got, Got: got, Unlocking: unlocking, Freed: unlocking,
	}
}

func write(client string, got, unlocking int64, token uint64) history.Op {
	return held(client, history.Write, got, unlocking, token)
}

func read(client string, got, unlocking int64) history.Op {
	return held(client, history.Read, got, unlocking, 0)
}

// refused returns a try that was refused.
func refused(client string, kind history.Kind, asked, ended int64) history.Op {
	return history.Op{
		Client: client, Key: "k", Kind: kind, Try: true,
		Asked: asked, Ended: ended, Freed: ended, Refused: true,
	}
}

// with returns op as f has changed it.
func with(op history.Op, f func(*history.Op)) history.Op {
	f(&op)
	return op
}

// killed returns a lock whose holder was killed, and that could be trusted until that time.
func killed(op history.Op, until int64) history.Op {
	op.Unlocking, op.Freed, op.Until = 0, 0, until
	return op
}

func asked(op history.Op, at int64) history.Op {
	op.Asked = at
	return op
}

func freed(op history.Op, at int64) history.Op {
	op.Freed = at
	return op
}

type cases []struct {
	name string
	ops  []history.Op
	bad  string // part of the error; empty: no error
}

func (cs cases) run(t *testing.T, check func([]history.Op) error) {
	for _, c := range cs {
		t.Run(c.name, func(t *testing.T) {
			for range 5 {
				err := check(c.ops)
				if c.bad == "" && err != nil {
					t.Fatalf("want no error, got %v", err)
				}
				if c.bad != "" && (err == nil || !strings.Contains(err.Error(), c.bad)) {
					t.Fatalf("want an error with %q, got %v", c.bad, err)
				}
				if c.bad != "" && !strings.Contains(err.Error(), `"k" by `) {
					t.Fatalf("want an error that names the client, got %v", err)
				}
				// The order of the operations must make no difference.
				rand.Shuffle(len(c.ops), func(i, j int) { c.ops[i], c.ops[j] = c.ops[j], c.ops[i] })
			}
		})
	}
}

// Linearizable must find whatever Exclusion finds.
var exclusion = cases{
	{"nothing", nil, ""},
	{"one after the other", []history.Op{write("a", 10, 20, 1), write("b", 30, 40, 2)}, ""},
	{"back to back", []history.Op{write("a", 10, 20, 1), write("b", 20, 30, 2), read("c", 30, 40), write("d", 40, 50, 3)}, ""},
	{"many at one instant", []history.Op{write("a", 10, 10, 1), write("b", 10, 10, 2), read("c", 10, 20), read("d", 10, 10)}, ""},
	{"readers together", []history.Op{read("a", 10, 30), read("b", 20, 40), read("c", 25, 26), write("d", 40, 50, 1)}, ""},
	{"writers of two keys", []history.Op{write("a", 10, 30, 1), with(write("b", 20, 40, 1), func(o *history.Op) { o.Key = "l" })}, ""},
	{"two writers", []history.Op{write("a", 10, 20, 1), write("b", 19, 30, 2)}, "19ns"},
	{"one writer within another", []history.Op{write("a", 10, 40, 1), write("b", 20, 30, 2)}, "20ns"},
	{"without length, within another", []history.Op{write("a", 10, 40, 1), write("b", 20, 20, 2)}, "20ns"},
	{"reader joins writer", []history.Op{write("a", 10, 40, 1), read("b", 20, 50)}, "20ns"},
	{"writer joins reader", []history.Op{read("a", 10, 40), write("b", 20, 50, 1)}, "20ns"},
	{"writer joins the older of two readers", []history.Op{read("a", 10, 90), read("b", 20, 30), write("c", 40, 50, 1)}, "by c"},
	{"never unlocked", []history.Op{killed(write("a", 10, 0, 1), 0), write("b", 5000, 6000, 2)}, "by b"},
	{"killed, and its lease respected", []history.Op{killed(write("a", 10, 0, 1), 50), write("b", 50, 60, 2)}, ""},
	{"killed, and its lease not respected", []history.Op{killed(write("a", 10, 0, 1), 50), write("b", 49, 60, 2)}, "by b"},
	{"lost", []history.Op{with(write("a", 10, 90, 1), func(o *history.Op) { o.Ended = 30 }), write("b", 30, 60, 2)}, ""},
	{"lost, seen too late", []history.Op{with(write("a", 10, 90, 1), func(o *history.Op) { o.Ended, o.Until = 40, 30 }), write("b", 30, 60, 2)}, "by b"},
	{"revoked", []history.Op{with(write("a", 10, 90, 1), func(o *history.Op) { o.Revoked = 30 }), write("b", 30, 60, 2)}, ""},
	{"before it is revoked", []history.Op{with(write("a", 10, 90, 1), func(o *history.Op) { o.Revoked = 31 }), write("b", 30, 60, 2)}, "by b"},
	{"unlocked before it is revoked", []history.Op{with(write("a", 10, 40, 1), func(o *history.Op) { o.Revoked = 60 }), write("b", 39, 60, 2)}, "by b"},
	{"revoked before its holder knew of the grant", []history.Op{with(write("a", 40, 90, 1), func(o *history.Op) { o.Revoked = 30 }), write("b", 35, 60, 2)}, ""},
	{"paused", []history.Op{with(write("a", 10, 90, 1), func(o *history.Op) { o.Ended, o.Until, o.Paused = 80, 30, true }), write("b", 30, 60, 2)}, ""},
	{"paused, and its lease not respected", []history.Op{with(write("a", 10, 90, 1), func(o *history.Op) { o.Ended, o.Until, o.Paused = 80, 31, true }), write("b", 30, 60, 2)}, "by b"},
}

func TestExclusion(t *testing.T) { exclusion.run(t, history.Exclusion) }

func TestLinearizableFindsWhatExclusionFinds(t *testing.T) { exclusion.run(t, linearizable) }

func linearizable(ops []history.Op) error { return history.Linearizable(ops, 10*time.Second) }

// A waiter that was granted the lock, did not hear of it, and gave its id up explains a try that was refused meanwhile.
func TestIDThatWasGivenUpExplainsARefusal(t *testing.T) {
	ops := []history.Op{refused("a", history.Write, 40, 50), asked(write("b", 90, 95, 3), 10), write("c", 60, 70, 2)}
	with := func(ttl time.Duration) error {
		return linearizable(history.WithGivenUp(ops, func(int) time.Duration { return ttl }))
	}
	if err := with(100); err != nil {
		t.Errorf("waited for almost a TTL: want no error, got %v", err)
	}
	if err := with(200); err == nil {
		t.Error("waited for less than half a TTL: want an error, got none")
	}
}

func TestTokens(t *testing.T) {
	cases{
		{"rising", []history.Op{write("a", 10, 20, 3), read("b", 20, 30), write("a", 30, 40, 7)}, ""},
		{"falling", []history.Op{write("a", 10, 20, 7), write("b", 20, 30, 6)}, "fell from 7 to 6"},
		{"falling back to back, both had asked before", []history.Op{asked(write("a", 10, 20, 7), 1), asked(write("b", 20, 30, 6), 1)}, "fell from 7 to 6"},
		{"falling after one that was revoked", []history.Op{with(write("a", 10, 90, 7), func(o *history.Op) { o.Revoked = 20 }), asked(write("b", 30, 40, 6), 5)}, "fell from 7 to 6"},
		{"falling behind one that rises", []history.Op{write("a", 10, 20, 7), write("b", 20, 30, 9), write("c", 30, 40, 8)}, "fell from 9 to 8"},
		{"twice", []history.Op{write("a", 10, 20, 7), write("b", 20, 30, 7)}, "twice"},
		{"twice by two who overlap", []history.Op{write("a", 10, 20, 7), write("b", 15, 30, 7)}, "twice"},
		{"two keys", []history.Op{write("a", 10, 20, 7), with(write("b", 20, 30, 7), func(o *history.Op) { o.Key = "l" })}, ""},
		{"none", []history.Op{write("a", 10, 20, 0)}, "without a token"},
		{"in any order at one instant", []history.Op{write("a", 10, 10, 7), write("b", 10, 10, 6), write("c", 10, 20, 8)}, ""},
		{"overlapping, in unknown order", []history.Op{asked(write("a", 20, 40, 7), 10), asked(write("b", 30, 50, 6), 20)}, ""},
		{"overlapping, got before the other asked", []history.Op{asked(write("a", 20, 40, 7), 10), asked(write("b", 30, 50, 6), 21)}, "fell from 7 to 6"},
		{"after one that was killed", []history.Op{killed(write("a", 10, 0, 7), 50), asked(write("b", 60, 70, 6), 5)}, "fell from 7 to 6"},
	}.run(t, history.Tokens)
}

func TestTokensAfterLoss(t *testing.T) {
	cases{
		{"granted before the loss, heard of after it", []history.Op{asked(write("a", 20, 30, 7), 10), asked(write("b", 40, 50, 6), 11)}, ""},
		{"falling", []history.Op{write("a", 10, 20, 7), asked(write("b", 30, 40, 6), 21)}, "fell from 7 to 6"},
		{"twice", []history.Op{asked(write("a", 10, 20, 7), 1), asked(write("b", 20, 30, 7), 1)}, "twice"},
	}.run(t, history.TokensAfterLoss)
}

func TestOrder(t *testing.T) {
	cases{
		{"served in order", []history.Op{asked(write("a", 30, 40, 1), 10), asked(write("b", 40, 50, 2), 20)}, ""},
		{"overtaking", []history.Op{asked(write("a", 40, 50, 2), 10), asked(write("b", 30, 40, 1), 20)}, "10ns"},
		{"overtaking within the bound", []history.Op{asked(write("a", 40, 50, 2), 10), asked(write("b", 30, 40, 1), 15)}, ""},
		{"a reader overtakes a writer", []history.Op{asked(write("a", 40, 50, 2), 10), asked(read("b", 30, 40), 20)}, "overtook"},
		{"a writer overtakes a reader", []history.Op{asked(read("a", 40, 50), 10), asked(write("b", 30, 40, 2), 20)}, "overtook"},
		{"a reader overtakes a reader", []history.Op{asked(read("a", 40, 50), 10), asked(read("b", 30, 40), 20)}, ""},
		{"a reader overtakes a writer behind a reader", []history.Op{asked(read("a", 90, 95), 5), asked(write("b", 40, 50, 2), 10), asked(read("c", 30, 40), 20)}, "by b"},
		{"a try overtakes", []history.Op{asked(write("a", 40, 50, 2), 10), with(asked(write("b", 30, 40, 1), 20), func(o *history.Op) { o.Try = true })}, ""},
		{"two queues", []history.Op{asked(write("a", 40, 50, 2), 10), with(asked(write("b", 30, 40, 1), 20), func(o *history.Op) { o.Class = "first" })}, ""},
		{"two keys", []history.Op{asked(write("a", 40, 50, 2), 10), with(asked(write("b", 30, 40, 1), 20), func(o *history.Op) { o.Key = "l" })}, ""},
		{"the first had given up", []history.Op{{Client: "a", Key: "k", Kind: history.Write, Asked: 10, Ended: 30}, asked(write("b", 30, 40, 1), 20)}, ""},
		{"the first had not yet given up", []history.Op{{Client: "a", Key: "k", Kind: history.Write, Asked: 10, Ended: 31}, asked(write("b", 30, 40, 1), 20)}, "overtook"},
		{"the first was revoked, and does not know yet", []history.Op{{Client: "a", Key: "k", Kind: history.Write, Asked: 10, Revoked: 29, Ended: 40}, asked(write("b", 30, 40, 1), 20)}, ""},
		{"the first is revoked later", []history.Op{{Client: "a", Key: "k", Kind: history.Write, Asked: 10, Revoked: 31, Ended: 40}, asked(write("b", 30, 40, 1), 20)}, "overtook"},
		{"the first was killed, at an unknown time", []history.Op{{Client: "a", Key: "k", Kind: history.Write, Asked: 10}, asked(write("b", 30, 40, 1), 20)}, ""},
		{"the first was paused", []history.Op{with(asked(write("a", 40, 50, 2), 10), func(o *history.Op) { o.Paused = true }), asked(write("b", 30, 40, 1), 20)}, ""},
	}.run(t, func(ops []history.Op) error { return history.Order(ops, 5) })
}

func TestTurns(t *testing.T) {
	in := func(queue string, o history.Op) history.Op { o.Queue = queue; return o }
	first := func(o *history.Op) { o.Class = "first" }
	cases{
		{"served in order", []history.Op{in("p", asked(write("a", 30, 40, 1), 10)), in("q", asked(write("b", 40, 50, 2), 20))}, ""},
		{"overtaking in the same queue", []history.Op{in("p", asked(write("a", 40, 50, 2), 10)), in("p", asked(write("b", 30, 40, 1), 20))}, "10ns"},
		{"overtaking without a queue", []history.Op{in("p", asked(write("a", 40, 50, 2), 10)), asked(write("b", 30, 40, 1), 20)}, "10ns"},
		{"overtaking for a turn", []history.Op{in("p", asked(write("a", 70, 80, 3), 10)), in("q", asked(write("b", 30, 40, 1), 20)), in("q", asked(write("c", 45, 50, 2), 20))}, ""},
		{"overtaking for longer than a turn", []history.Op{in("p", asked(write("a", 70, 80, 3), 10)), in("q", asked(write("b", 30, 40, 1), 20)), in("q", asked(write("c", 56, 60, 2), 20))}, "by c"},
		{"overtaking by two, for a turn each", []history.Op{in("p", asked(write("a", 90, 95, 3), 10)), in("q", asked(write("b", 30, 40, 1), 20)), in("r", asked(write("c", 66, 70, 2), 20))}, ""},
		{"a reader joins the readers of the process in front", []history.Op{in("p", asked(read("a", 30, 40), 5)), in("p", asked(write("b", 90, 95, 3), 10)), asked(read("c", 31, 60), 20)}, ""},
		{"a reader joins a reader that came later and went first", []history.Op{in("p", asked(write("b", 90, 95, 3), 10)), in("p", with(asked(read("a", 30, 40), 25), first)), asked(read("c", 31, 60), 20)}, ""},
		{"a reader joins a reader that goes last", []history.Op{in("p", with(asked(write("b", 90, 95, 3), 10), first)), in("p", asked(read("a", 30, 40), 5)), with(asked(read("c", 31, 60), 20), first)}, "overtook"},
		{"a reader joins a reader that came later", []history.Op{in("p", asked(write("b", 90, 95, 3), 10)), in("p", asked(read("a", 30, 40), 25)), asked(read("c", 31, 60), 20)}, "overtook"},
		{"a reader joins them late", []history.Op{in("p", asked(read("a", 30, 40), 5)), in("p", asked(write("b", 90, 95, 3), 10)), asked(read("c", 36, 60), 20)}, "by c"},
		{"a reader joins a reader that gives up as it is granted the lock", []history.Op{in("p", history.Op{Client: "a", Key: "k", Kind: history.Read, Asked: 5, Ended: 32}), in("p", asked(write("b", 90, 95, 3), 10)), asked(read("c", 31, 60), 20)}, ""},
		{"a reader passes one that gives up later", []history.Op{in("p", history.Op{Client: "a", Key: "k", Kind: history.Read, Asked: 5, Ended: 37}), in("p", asked(write("b", 90, 95, 3), 10)), asked(read("c", 31, 60), 20)}, "by c"},
		{"the head, of the other kind, gave up a moment before", []history.Op{in("p", history.Op{Client: "h", Key: "k", Kind: history.Write, Asked: 5, Ended: 28}), in("p", asked(read("a", 40, 50), 10)), asked(write("b", 30, 40, 1), 20)}, ""},
		{"the head gave up a moment before, and the next one is of the other kind", []history.Op{in("p", history.Op{Client: "h", Key: "k", Kind: history.Write, Asked: 5, Ended: 28}), in("p", asked(read("r", 60, 65), 7)), in("p", asked(write("a", 70, 80, 2), 10)), asked(write("b", 30, 40, 1), 20)}, ""},
		{"the head gave up a moment before, and one that came later is of the other kind", []history.Op{in("p", history.Op{Client: "h", Key: "k", Kind: history.Write, Asked: 5, Ended: 28}), in("p", asked(write("a", 60, 65, 2), 7)), in("p", asked(read("r", 70, 80), 10)), asked(write("b", 30, 40, 1), 20)}, "by b"},
		{"the head, of the other kind, gave up before that", []history.Op{in("p", history.Op{Client: "h", Key: "k", Kind: history.Write, Asked: 5, Ended: 24}), in("p", asked(read("a", 40, 50), 10)), asked(write("b", 30, 40, 1), 20)}, "by b"},
		{"the head was revoked a moment before", []history.Op{in("p", history.Op{Client: "h", Key: "k", Kind: history.Read, Asked: 5, Revoked: 27, Ended: 28}), in("p", asked(read("a", 40, 50), 10)), asked(write("b", 30, 40, 1), 20)}, ""},
		{"the holder was revoked, and does not know yet", []history.Op{in("p", with(asked(write("h", 20, 35, 1), 5), func(o *history.Op) { o.Revoked = 25 })), in("p", asked(write("a", 60, 70, 3), 10)), asked(write("b", 30, 40, 2), 20)}, ""},
		{"the holder was revoked, and knew before", []history.Op{in("p", with(asked(write("h", 20, 24, 1), 5), func(o *history.Op) { o.Revoked = 22 })), in("p", asked(write("a", 60, 70, 3), 10)), asked(write("b", 30, 40, 2), 20)}, "by b"},
		{"the holder is revoked later", []history.Op{in("p", with(asked(write("h", 10, 29, 1), 5), func(o *history.Op) { o.Revoked = 31 })), in("p", asked(write("a", 60, 70, 3), 10)), asked(write("b", 30, 40, 2), 20)}, "by b"},
		{"a reader in front was granted the lock a moment before", []history.Op{in("p", asked(read("r", 27, 29), 5)), in("p", asked(write("a", 60, 70, 3), 10)), asked(write("b", 30, 40, 2), 20)}, ""},
		{"a reader in front was granted the lock before that", []history.Op{in("p", asked(read("r", 24, 29), 5)), in("p", asked(write("a", 60, 70, 3), 10)), asked(write("b", 30, 40, 2), 20)}, "by b"},
		{"a writer in front was granted the lock a moment before", []history.Op{in("p", asked(write("r", 27, 29, 1), 5)), in("p", asked(write("a", 60, 70, 3), 10)), asked(write("b", 30, 40, 2), 20)}, "by b"},
		{"the head, of the same kind, gave up a moment before", []history.Op{in("p", history.Op{Client: "h", Key: "k", Kind: history.Read, Asked: 5, Ended: 28}), in("p", asked(read("a", 40, 50), 10)), asked(write("b", 30, 40, 1), 20)}, "by b"},
	}.run(t, func(ops []history.Op) error { return history.Turns(ops, 5, 20) })
}

func TestLinearizable(t *testing.T) {
	// The client of this write was killed in the call.
	ghost := history.Op{Client: "g", Key: "k", Kind: history.Write, Asked: 20}
	cases{
		{"a try is refused while it is held", []history.Op{write("a", 10, 50, 1), refused("b", history.Read, 20, 30)}, ""},
		{"a try is refused while it is free", []history.Op{write("a", 10, 20, 1), refused("a", history.Write, 30, 40), write("c", 50, 60, 2)}, "refuse: write"},
		{"a try is refused just before the holder's call returns", []history.Op{asked(write("a", 50, 60, 1), 35), refused("b", history.Write, 30, 40)}, ""},
		{"a try is refused before the holder has asked", []history.Op{asked(write("a", 50, 60, 1), 41), refused("a", history.Write, 30, 40)}, "refuse: write"},
		{"a try is refused while it is freed", []history.Op{freed(write("a", 10, 20, 1), 31), refused("b", history.Write, 30, 40)}, ""},
		{"a try is refused after it was freed", []history.Op{freed(write("a", 10, 20, 1), 29), refused("a", history.Write, 30, 40)}, "refuse: write"},
		{"the only possible holder comes after another lock", []history.Op{
			asked(write("a", 50, 60, 2), 5), refused("b", history.Write, 6, 7), write("c", 10, 20, 1),
		}, "refuse: write"},
		{"two tries in two gaps, one possible holder for each", []history.Op{
			freed(write("a", 10, 20, 1), 26), refused("b", history.Write, 25, 30),
			asked(write("c", 50, 60, 2), 30), refused("d", history.Read, 40, 45),
		}, ""},
		{"a token falls", []history.Op{write("a", 10, 20, 7), write("b", 30, 40, 6)}, "acquire: write"},
		{"a token comes twice", []history.Op{write("a", 10, 20, 7), write("b", 30, 40, 7)}, "acquire: write"},
		{"a call of unknown outcome refuses it", []history.Op{ghost, refused("b", history.Write, 30, 40)}, ""},
		{"a call of unknown outcome comes too late", []history.Op{ghost, refused("a", history.Write, 10, 19)}, "refuse: write"},
		{"a call of unknown outcome has no effect", []history.Op{ghost, write("b", 30, 40, 1), read("c", 50, 60)}, ""},
		{"a call of unknown outcome is over", []history.Op{freed(ghost, 29), refused("a", history.Write, 30, 40)}, "refuse: write"},
		{"an unlock of unknown outcome has not come", []history.Op{freed(write("a", 10, 20, 1), 0), refused("b", history.Write, 30, 40)}, ""},
		{"an unlock of unknown outcome has come", []history.Op{freed(write("a", 10, 20, 1), 0), write("b", 20, 30, 2), read("c", 30, 40)}, ""},
		{"a lock outlives its holder, which was killed", []history.Op{killed(write("a", 10, 0, 1), 40), refused("b", history.Write, 50, 60), write("c", 70, 80, 2)}, ""},
	}.run(t, linearizable)
}

// Linearizable returns ErrUndecided when it runs out of time. 30 write locks at one instant, half of them with the same
// token, have more orders than it can try.
func TestLinearizableRunsOutOfTime(t *testing.T) {
	var ops []history.Op
	for i := range 30 {
		ops = append(ops, write("a", 100, 100, uint64(max(15, i))))
	}
	start := time.Now()
	err := history.Linearizable(ops, 10*time.Millisecond)
	if !errors.Is(err, history.ErrUndecided) {
		t.Errorf("want %v, got %v", history.ErrUndecided, err)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("want an answer within 5s with a timeout of 10ms, it took %v", took)
	}
}

// The checks are fast enough for a long history under contention, with tries, on several keys: it takes a second or two.
func TestLong(t *testing.T) {
	const n, keys = 200_000, 4
	rng := rand.New(rand.NewPCG(1, 2))
	var ops []history.Op
	for key := range keys {
		var now int64 = 1
		for i := 0; i < n/keys; {
			// Some readers or one writer, who have waited for a while, and a try that is refused in a gap.
			run, kind := 1, history.Write
			if rng.IntN(2) == 0 {
				run, kind = 1+rng.IntN(8), history.Read
			}
			from := now + 10
			for range run {
				i++
				op := held("a", kind, from+rng.Int64N(10), from+10+rng.Int64N(50), 0)
				op.Key, op.Asked, op.Freed = string(rune('a'+key)), max(1, from-rng.Int64N(500)), op.Unlocking+rng.Int64N(10)
				if kind == history.Write {
					op.Token = uint64(i)
				}
				now = max(now, op.Unlocking)
				ops = append(ops, op)
			}
			if rng.IntN(5) == 0 {
				i++
				try := refused("b", history.Write, from-1, from)
				try.Key = string(rune('a' + key))
				ops = append(ops, try)
				ops[len(ops)-2].Asked = from - 5
				ops[len(ops)-2].Freed = max(ops[len(ops)-2].Freed, now)
			}
		}
	}
	for name, check := range map[string]func([]history.Op) error{
		"Exclusion": history.Exclusion, "Tokens": history.Tokens, "Linearizable": linearizable,
		"Order": func(ops []history.Op) error { return history.Order(ops, time.Microsecond) },
		"Turns": func(ops []history.Op) error { return history.Turns(ops[:min(1000, len(ops))], time.Microsecond, 0) },
	} {
		start := time.Now()
		if err := check(ops); err != nil {
			t.Errorf("%s: want no error, got %.2000v", name, err)
		}
		t.Logf("%s: %d operations in %v", name, len(ops), time.Since(start))
	}
}
