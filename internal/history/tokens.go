package history

// This file answers: do the fencing tokens rise in the order of the locks?

import (
	"cmp"
	"fmt"
	"slices"
)

// Tokens reports a lock to write without a token, a token that was given twice on its key, and one that did not
// rise. The token of B must be greater than that of A if one of these is certain:
//
//   - the hold of A had ended when B was got, and A was got first;
//   - A had been got when B was asked for, whether the holds overlap or not.
//
// If nobody overlaps this puts all locks to write in one order, except for those that begin at the same instant.
func Tokens(ops []Op) error { return tokens(ops, false) }

// TokensAfterLoss is Tokens where a server may have lost its data, as in a failover: of the two rules it asks for the
// second alone. A lock that was granted before the loss may be heard of after locks that were granted behind it; it has
// the lower token, and is refused where tokens are checked.
func TokensAfterLoss(ops []Op) error { return tokens(ops, true) }

func tokens(ops []Op, lossy bool) error {
	for _, group := range groups(ops, key) {
		writes := slices.DeleteFunc(holds(group), func(h hold) bool { return !h.writes() })
		seen := map[uint64]hold{}
		for _, h := range writes {
			if h.Token == 0 {
				return fmt.Errorf("history: a lock to write without a token:%s", lines(h.Op))
			}
			if twin, ok := seen[h.Token]; ok {
				return fmt.Errorf("history: token %d was given twice:%s", h.Token, lines(twin.Op, h.Op))
			}
			seen[h.Token] = h
		}

		// Of those that end together the one without length comes last: it may be the one that begins then.
		ended := slices.Clone(writes)
		slices.SortStableFunc(ended, func(a, b hold) int {
			return cmp.Or(cmp.Compare(a.to, b.to), cmp.Compare(a.from, b.from))
		})
		if err := rise(ended, writes, func(a, b hold) bool { return a.to <= b.from && a.from < b.from }); err != nil && !lossy {
			return err
		}

		asked := slices.Clone(writes)
		slices.SortStableFunc(asked, func(a, b hold) int { return cmp.Compare(a.Asked, b.Asked) })
		if err := rise(writes, asked, func(a, b hold) bool { return a.from < b.Asked }); err != nil {
			return err
		}
	}
	return nil
}

// rise reports a token in later that is lower than one in earlier that came before. Both are in such an order that
// what comes before one in later also comes before all that follow it there, and stands first in earlier.
func rise(earlier, later []hold, before func(a, b hold) bool) error {
	var top hold
	for _, b := range later {
		for len(earlier) > 0 && before(earlier[0], b) {
			if top.Op == nil || earlier[0].Token > top.Token {
				top = earlier[0]
			}
			earlier = earlier[1:]
		}
		if top.Op != nil && top.Token >= b.Token {
			return fmt.Errorf("history: the token fell from %d to %d:%s", top.Token, b.Token, lines(top.Op, b.Op))
		}
	}
	return nil
}
