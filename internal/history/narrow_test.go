package history

import (
	"math/rand/v2"
	"testing"

	"github.com/anishathalye/porcupine"
)

// plain is Linearizable without its shortcuts, for histories in which every outcome is known.
func plain(ops []Op) bool {
	var calls []porcupine.Operation
	for i := range ops {
		o := &ops[i]
		add := func(v verb, from, to int64) {
			calls = append(calls, porcupine.Operation{Input: call{v, o, i}, Call: from, Return: to})
		}
		if o.Refused {
			add(refuse, o.Asked, o.Ended)
			continue
		}
		add(acquire, o.Asked, o.Got)
		add(release, o.Unlocking, o.Freed)
	}
	return porcupine.CheckOperations(model(state{}), calls)
}

// Linearizable gives the same answer as a plain search, for small random histories with many events at one instant.
func TestShortCutsMakeNoDifference(t *testing.T) {
	var right, wrong, tried int
	for seed := range uint64(10_000) {
		rng := rand.New(rand.NewPCG(seed, 0))
		span := 6 + rng.Int64N(30)
		at := func(after int64) int64 { return after + rng.Int64N(span/4) }
		var ops []Op
		for range 2 + rng.IntN(5) {
			op := Op{Kind: Read, Asked: 1 + rng.Int64N(span)}
			if rng.IntN(2) == 0 {
				op.Kind = Write
			}
			if rng.IntN(3) == 0 {
				op.Try, op.Refused = true, true
				op.Ended = at(op.Asked)
				op.Freed = op.Ended
			} else {
				op.Got = at(op.Asked)
				op.Unlocking = at(op.Got)
				op.Freed = at(op.Unlocking)
				if op.writes() && rng.IntN(2) == 0 {
					op.Token = uint64(op.Got) + rng.Uint64N(3)
				}
			}
			ops = append(ops, op)
		}
		var group []*Op
		for i := range ops {
			group = append(group, &ops[i])
		}
		if len(unexplained(group, heldIntervals(group)).windows) > 0 {
			tried++
		}
		want, err := plain(ops), Linearizable(ops, 0)
		cut := true // whether all chunks are linearizable, with as many cuts as possible
		for before, chunk := range chunks(calls(group), 1) {
			cut = cut && porcupine.CheckOperations(model(before), chunk)
		}
		if want {
			right++
		} else {
			wrong++
		}
		if want != (err == nil) || want != cut {
			t.Fatalf("seed %d: want one answer, a plain search says %v, chunks say %v, Linearizable returns %v%s",
				seed, want, cut, err, lines(group...))
		}
	}
	t.Logf("%d right, %d wrong, %d with a try to explain", right, wrong, tried)
	if min(right, wrong, tried) < 1000 {
		t.Errorf("want 1000 of each at least, got %d right, %d wrong, %d with a try to explain", right, wrong, tried)
	}
}

// A violation is found behind many cuts, since the holders are carried over from chunk to chunk.
func TestCutsKeepTheHolders(t *testing.T) {
	ops := []Op{{Key: "k", Kind: Read, Asked: 1, Got: 1, Client: "old"}}
	for i := range int64(10 * enough) {
		at := 10 * (i + 1)
		ops = append(ops, Op{Key: "k", Kind: Read, Client: "young", Asked: at, Got: at + 1, Unlocking: at + 2, Freed: at + 3})
	}
	at := int64(10 * (len(ops) + 1))
	if err := Linearizable(ops, 0); err != nil {
		t.Fatal(err)
	}
	ops = append(ops, Op{Key: "k", Kind: Write, Client: "w", Asked: at, Got: at + 1, Token: 1})
	if Linearizable(ops, 0) == nil {
		t.Error("want an error for a writer that joined a reader, got none")
	}
	n := 0
	var group []*Op
	for i := range ops {
		group = append(group, &ops[i])
	}
	for range chunks(calls(group), enough) {
		n++
	}
	if n < 10 {
		t.Errorf("want 10 chunks at least of %d operations, got %d", len(ops), n)
	}
}
