package history

import (
	"cmp"
	"fmt"
	"slices"
)

// Tokens reports a write lock without a token, a token that was given twice on its key, and a token that did not rise. The
// token of B must be greater than that of A if one of these is certain:
//
//   - A had ended when B was granted, and A was granted first;
//   - A had been granted when B was asked for, even if the locks overlap.
//
// Unless locks overlap, this puts all write locks in one order, except for those that begin at the same instant.
func Tokens(ops []Op) error { return tokens(ops, false) }

// TokensAfterLoss is Tokens for a server that may lose its data, as in a failover: it checks the second rule only. The
// reply to a lock that was granted before the loss may arrive after later locks have ended. Such a lock has the lower
// token, and its writes are refused where tokens are checked.
func TokensAfterLoss(ops []Op) error { return tokens(ops, true) }

func tokens(ops []Op, lossy bool) error {
	for _, group := range groups(ops, key) {
		writes := slices.DeleteFunc(heldIntervals(group), func(h interval) bool { return !h.writes() })
		seen := map[uint64]interval{}
		for _, h := range writes {
			if h.Token == 0 {
				return fmt.Errorf("history: a write lock without a token:%s", lines(h.Op))
			}
			if twin, ok := seen[h.Token]; ok {
				return fmt.Errorf("history: token %d was given twice:%s", h.Token, lines(twin.Op, h.Op))
			}
			seen[h.Token] = h
		}

		// Of those that end together, one without length comes last, since it also begins then.
		ended := slices.Clone(writes)
		slices.SortStableFunc(ended, func(a, b interval) int {
			return cmp.Or(cmp.Compare(a.to, b.to), cmp.Compare(a.from, b.from))
		})
		if err := rise(ended, writes, func(a, b interval) bool { return a.to <= b.from && a.from < b.from }); err != nil && !lossy {
			return err
		}

		asked := slices.Clone(writes)
		slices.SortStableFunc(asked, func(a, b interval) int { return cmp.Compare(a.Asked, b.Asked) })
		if err := rise(writes, asked, func(a, b interval) bool { return a.from < b.Asked }); err != nil {
			return err
		}
	}
	return nil
}

// rise reports a token in later that is not greater than that of an earlier lock before it. Both slices are sorted so that
// the locks before later[i] are a prefix of earlier, and also before later[i+1].
func rise(earlier, later []interval, before func(a, b interval) bool) error {
	var top interval
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
