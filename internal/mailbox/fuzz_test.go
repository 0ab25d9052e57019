package mailbox

import (
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A grant is one call of Granted.
type grant struct{ n, token uint64 }

// A recorder is a waiter that records its grants.
type recorder struct {
	n      uint64
	grants *[]grant
}

func (r recorder) Granted(token uint64)     { *r.grants = append(*r.grants, grant{r.n, token}) }
func (r recorder) Key() string              { return "" }
func (r recorder) RenewNow()                {}
func (r recorder) SubscriptionFailed(error) {}

// wellFormed matches a message as lua/lib/message.lua writes it.
var wellFormed = regexp.MustCompile(`^\d{1,19}( \d{1,19})+$`)

// Promise 7: a message grants the lock to the waiters whose numbers follow the
// token, in that order, and to no other. A well-formed message reaches all of them.
func FuzzMailboxMessages(f *testing.F) {
	for _, seed := range []string{
		"", " ", "1700000000000001 1", "0 1 2 3", "0 3 2 1 2", "5", "5 ", "5  1", " 5 1", "-1 1", "5 -1", "+5 1", "x 1", "5 x 1",
		"5 1 x 2", "5 1\n2", "5\t1", "0x5 1", "5 1.0", "5 01", "18446744073709551615 18446744073709551615",
		"18446744073709551616 1", "5 18446744073709551617", "5 18446744073709551616 1", "٥ ١", "5 1\x00", "5 1_0 10", "5 10 0", "5 4294967298",
		"revoked 7", "revoked", "revoked ", "revoked 7 8", "revoked x", "Revoked 7", "revoked -7", "revoked 18446744073709551616",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, message string) {
		var got []grant
		var revoked []uint64
		b := New(nil, "box", func(n uint64) { revoked = append(revoked, n) })
		// The waiters: a few fixed numbers, and all that the message names.
		numbers := []uint64{0, 1, 2, 3, 10, math.MaxUint64}
		var named []grant
		words := strings.Split(message, " ")
		token, err := strconv.ParseUint(words[0], 10, 64)
		for _, word := range words[1:] {
			if n, err := strconv.ParseUint(word, 10, 64); err == nil {
				numbers = append(numbers, n)
				named = append(named, grant{n, token})
			}
		}
		if err != nil {
			named = nil // without a token it grants nothing
		}
		for _, n := range numbers {
			b.Join(n, recorder{n, &got})
		}
		b.Deliver(message)
		if len(got) > len(named) || !slices.Equal(got, named[:len(got)]) {
			t.Errorf("%q: want grants to some of %v, in that order, got %v", message, named, got)
		}
		if wellFormed.MatchString(message) && len(got) != len(named) {
			t.Errorf("%q: want grants to all of %v, got %v", message, named, got)
		}

		if n, is := strings.CutPrefix(message, "revoked "); !is && revoked != nil || is && (len(revoked) == 1) != isNumber(n) {
			t.Errorf("%q: revoked %v", message, revoked)
		}

		// A waiter that has left receives nothing.
		got = nil
		for _, n := range numbers {
			b.Leave(n)
		}
		b.Deliver(message)
		if got != nil {
			t.Errorf("%q: want no grant after all have left, got %v", message, got)
		}
	})
}

func isNumber(s string) bool {
	_, err := strconv.ParseUint(s, 10, 64)
	return err == nil
}
