package history

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Turns is Order where the requests of a Queue take turns. It reports an operation that overtook another in a way that turns
// do not explain. Of two conflicting operations in the same Class, the one that asked more than bound earlier must be
// granted the lock first, except that
//
//   - operations of one other Queue may overtake it in one turn: in no longer a time than that, and bound;
//   - a reader may overtake a writer that stands behind a reader of its own Queue, and join that one, also if that one gives
//     up as it is granted the lock. A reader of another Class of that Queue may have asked later and stand in front;
//   - anybody may overtake it within bound after the head of its Queue has given up, if the next one is of the other kind:
//     what the head has asked for is replaced, and the acquire for the next one is under way. The same holds if what the
//     Queue had in Redis, as its holder or for its head, was revoked: until the Queue knows, nothing of it waits there.
//     And a writer may overtake a writer behind a reader of its own Queue that was granted the lock within bound before,
//     and unlocked: the acquire for the one behind it was under way.
func Turns(ops []Op, bound, turn time.Duration) error {
	for _, line := range groups(ops, func(o *Op) string { return o.Key + "\x00" + o.Class }) {
		for _, o := range line {
			if o.Try || o.Asked == 0 {
				continue
			}
			first := map[string]*Op{} // of each queue, the first one that overtook o
			for _, p := range inOrderOfGrant(line) {
				switch {
				case p.Try || !o.conflicts(p) || p.Asked-o.Asked <= int64(bound) || o.waited() <= p.Got, joined(ops, o, p, bound), replaced(ops, o, p, bound):
					continue
				case first[p.Queue] == nil && p.Queue != "" && p.Queue != o.Queue:
					first[p.Queue] = p
				case first[p.Queue] == nil || time.Duration(p.Got-first[p.Queue].Got) > turn+bound:
					return fmt.Errorf("history: the second overtook the first, which had asked %v earlier, and turns of %v do not explain it:%s",
						time.Duration(p.Asked-o.Asked), turn, lines(o, p))
				}
			}
		}
	}
	return nil
}

// inOrderOfGrant returns those that were granted, the first grant first.
func inOrderOfGrant(line []*Op) []*Op {
	granted := slices.DeleteFunc(slices.Clone(line), func(o *Op) bool { return o.Got == 0 })
	slices.SortStableFunc(granted, func(a, b *Op) int { return cmp.Compare(a.Got, b.Got) })
	return granted
}

// replaced reports whether p was granted while nothing waited for o: a request in front of o in its queue had given up, or a
// reader had been granted the lock, a moment before, and the next one is of the other kind; or one of its queue was revoked.
func replaced(ops []Op, o, p *Op, bound time.Duration) bool {
	return slices.ContainsFunc(ops, func(h Op) bool {
		if !h.sharesQueue(o) {
			return false
		}
		since := p.Got - Earlier(h.Ended, h.Unlocking)
		gaveUp := h.Got == 0 && h.Ended != 0 && h.mayPrecede(o) && since >= 0 && slices.ContainsFunc(ops, func(next Op) bool {
			return next.sharesQueue(o) && next.writes() != h.writes() && next.mayPrecede(o) && next.waited() > p.Got
		})
		revoked := h.Revoked != 0 && h.Revoked <= p.Got
		served := h.Got != 0 && !h.writes() && o.writes() && p.writes() && h.mayPrecede(o) && h.Got <= p.Got && p.Got-h.Got <= int64(bound)
		return (gaveUp || revoked) && since <= int64(bound) || served
	})
}

// joined reports whether p, a reader, joined a reader of the queue of o that stood before o, a writer.
func joined(ops []Op, o, p *Op, bound time.Duration) bool {
	return !p.writes() && slices.ContainsFunc(ops, func(r Op) bool {
		over := cmp.Or(r.Got, r.Ended) // its wait
		apart := over - p.Got
		return r.sharesQueue(o) && !r.writes() && r.mayPrecede(o) && over != 0 && max(apart, -apart) <= int64(bound)
	})
}

func (h *Op) sharesQueue(o *Op) bool { return o.Queue != "" && h.Queue == o.Queue && h.Key == o.Key }

// mayPrecede reports whether h may stand in front of o in the queue that they share. An operation with a Class goes before one
// without.
func (h *Op) mayPrecede(o *Op) bool {
	if h.Class != o.Class {
		return o.Class == ""
	}
	return h.Asked <= o.Asked
}
