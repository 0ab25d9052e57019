package model

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
)

const start = Time(1_700_000_000_000_000)

func join(id string, k Kind, ttl int64) Op { return Op{Verb: Acquire, ID: id, Kind: k, TTL: ttl} }

func step(t *testing.T, s State, now Time, op Op, want Status, value int64, grants ...Grant) State {
	t.Helper()
	s, r := s.Step(now, op)
	if r.Status != want || r.Value != value || !slices.Equal(r.Grants, grants) {
		t.Fatalf("%+v: want %v %d with grants %v, got %v %d with grants %v", op, want, value, grants, r.Status, r.Value, r.Grants)
	}
	return s
}

// Promises 1, 5, 6 and 9, by example.
func TestLockIsHandedOnInOrder(t *testing.T) {
	token := int64(start)
	s := step(t, State{}, start, join("a:1", Writer, 1000), Granted, token)
	s = step(t, s, start, join("a:2", Reader, 3000), Waiting, 1000)
	s = step(t, s, start, join("b:3", Reader, 2000), Waiting, 3000)
	s = step(t, s, start, join("b:4", Writer, 9000), Waiting, 2000)
	s = step(t, s, start, join("b:4", Writer, 9000), Waiting, 2000)
	s = step(t, s, start, Op{Verb: Release, ID: "a:1"}, Released, 0, Grant{"a:2", 0}, Grant{"b:3", 0})
	s = step(t, s, start+2e6, Op{Verb: Renew, ID: "b:4", Kind: Writer, TTL: 1500}, Waiting, 1000)
	s = step(t, s, start+3e6, Op{Verb: Renew, ID: "b:4", Kind: Writer, TTL: 1500}, Granted, int64(start+3e6), Grant{"b:4", int64(start + 3e6)})
	s = step(t, s, start+3e6, Op{Verb: Renew, ID: "b:4", Kind: Reader, TTL: 1500}, Granted, 0)
	s = step(t, s, start+3e6, join("a:5", Reader, 1), Granted, 0)
	step(t, s, start+3e6+Retention*1000, join("a:6", Writer, 1), Granted, int64(start+3e6+Retention*1000))
}

// Promise 4: an acquire of a tombstoned id is refused until the tombstone ends.
func TestTombstonedIDIsRefused(t *testing.T) {
	s := step(t, State{}, start, Op{Verb: Release, ID: "a:1", Tombstone: 10}, Gone, 0)
	s = step(t, s, start+9999, join("a:1", Reader, 5), Tombstoned, 0)
	step(t, s, start+10000, join("a:1", Reader, 5), Granted, 0)
}

// The model keeps the promises in any sequence of steps.
func TestModelKeepsThePromises(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	kinds, ids := []Kind{Writer, Reader}, []string{"a:1", "a:2", "b:3", "b:4", "c:5"}
	var s State
	now, tokens, granted, revoked := start, int64(0), 0, 0
	for range 100_000 {
		if rnd.IntN(3) == 0 {
			now += Time(rnd.Int64N(3000_000))
		}
		op := Op{
			Verb: Verb(rnd.IntN(5)), ID: ids[rnd.IntN(len(ids))], Kind: kinds[rnd.IntN(2)],
			TTL: 1 + rnd.Int64N(5000), Try: rnd.IntN(3) == 0, Class: rnd.IntN(2), Alone: rnd.IntN(3) == 0,
		}
		if rnd.IntN(9) == 0 || op.Verb == Revoke {
			op.Tombstone = 2 * op.TTL
		}
		before := s.At(now)
		old := s
		var r Reply
		s, r = s.Step(now, op)

		if !reflect.DeepEqual(before, old.At(now)) {
			t.Fatalf("%+v: want the state before the step unchanged, it was %+v and is %+v", op, before, old.At(now))
		}
		for i, p := range s.Holders { // promise 1
			if p.Kind == Writer && len(s.Holders) > 1 {
				t.Fatalf("%+v: want a writer to hold alone, the holders are %+v", op, s.Holders)
			}
			if slices.ContainsFunc(s.Holders[:i], func(q Participant) bool { return p.ID == q.ID }) {
				t.Fatalf("%+v: want each id to hold once, %+v holds twice", op, p)
			}
		}
		if op.Verb == Revoke { // T12: what the owner's release would do, or nothing but to hand on
			like := op
			if like.Verb = HandOn; (&machine{State: before}).find(op.ID) != nil {
				like.Verb = Release
				revoked++
			}
			if want, likewise := old.Step(now, like); !reflect.DeepEqual(s, want) || !slices.Equal(r.Grants, likewise.Grants) {
				t.Fatalf("%+v: want the state %+v and the grants %v of a %v, got %+v and %v", op, want, likewise.Grants, like.Verb, s, r.Grants)
			}
		}
		m := machine{State: s, now: now}
		for _, p := range before.Leases() { // promise 3
			if q := m.find(p.ID); q != nil && q.Ends != p.Ends && p.ID != op.ID {
				t.Fatalf("%+v: want the lease of %+v unchanged, it is %+v", op, p, q)
			}
			if m.find(p.ID) == nil && p.ID[0] != '-' && p.ID != op.ID {
				t.Fatalf("%+v: want %+v kept, it is gone", op, p)
			}
		}
		if !(op.Verb == Renew && op.Alone) && len(s.Queue) > 0 && m.fits(s.Queue[0]) { // promise 5
			t.Fatalf("%+v: want the lock handed on, %+v wait while %+v hold it", op, s.Queue, s.Holders)
		}
		for i := 1; i < len(s.Queue); i++ { // promise 6
			if !s.Queue[i-1].before(s.Queue[i]) {
				t.Fatalf("%+v: want the queue in order, it is %+v", op, s.Queue)
			}
		}
		for _, g := range r.Grants { // promise 9
			if g.Token != 0 && g.Token <= tokens {
				t.Fatalf("%+v: want a token greater than %d, got %d", op, tokens, g.Token)
			}
			granted++
		}
		tokens = max(tokens, s.Token)
		if r.Status == Waiting && r.Value <= 0 {
			t.Fatalf("%+v: want the lease in front to end in the future, it ends in %d ms", op, r.Value)
		}
		if rest := s.At(now + 11_000_000); rest.Leases() != nil || rest.Holders != nil { // promise 8
			t.Fatalf("%+v: want nothing left 11 s later, got %+v", op, rest)
		}
	}
	if granted < 1000 || revoked < 1000 {
		t.Fatalf("want at least 1000 grants and 1000 revocations, got %d and %d", granted, revoked)
	}
}
