package mailbox

// This file answers: what can a message do, whatever is written in it?

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A grant is what a waiter was told.
type grant struct{ n, token uint64 }

// An ear is a waiter that writes down what it is told.
type ear struct {
	n    uint64
	told *[]grant
}

func (e ear) Granted(token uint64) { *e.told = append(*e.told, grant{e.n, token}) }
func (e ear) Key() string          { return "" }
func (e ear) Look()                {}
func (e ear) Deaf(error)           {}

// A message of ours, as lua/lib/message.lua writes it.
var whole = regexp.MustCompile(`^\d{1,19}( \d{1,19})+$`)

// Promise 7: a message grants to those whose numbers stand in it, behind the
// token and in that order, and to nobody else. One of ours, of numbers and single
// spaces, reaches all of them.
func FuzzMailboxMessages(f *testing.F) {
	for _, seed := range []string{
		"", " ", "1700000000000001 1", "0 1 2 3", "0 3 2 1 2", "5", "5 ", "5  1", " 5 1", "-1 1", "5 -1", "+5 1", "x 1", "5 x 1",
		"5 1 x 2", "5 1\n2", "5\t1", "0x5 1", "5 1.0", "5 01", "18446744073709551615 18446744073709551615",
		"18446744073709551616 1", "5 18446744073709551617", "5 18446744073709551616 1", "٥ ١", "5 1\x00", "5 1_0 10", "5 10 0", "5 4294967298",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, message string) {
		var told []grant
		b := New(nil, "box")
		// Those who wait: some who always do, and everybody who is written of.
		numbers := []uint64{0, 1, 2, 3, 10, math.MaxUint64}
		var written []grant
		words := strings.Split(message, " ")
		token, err := strconv.ParseUint(words[0], 10, 64)
		for _, word := range words[1:] {
			if n, err := strconv.ParseUint(word, 10, 64); err == nil {
				numbers = append(numbers, n)
				written = append(written, grant{n, token})
			}
		}
		if err != nil {
			written = nil // without a token it grants nothing
		}
		for _, n := range numbers {
			b.Join(fmt.Sprint("box:", n), ear{n, &told})
		}
		b.Deliver(message)
		if len(told) > len(written) || !slices.Equal(told, written[:len(told)]) {
			t.Errorf("%q: told %v, written %v", message, told, written)
		}
		if whole.MatchString(message) && len(told) != len(written) {
			t.Errorf("%q: told %v of %v", message, told, written)
		}

		// Who has left is told nothing.
		told = nil
		for _, n := range numbers {
			b.Leave(fmt.Sprint("box:", n))
		}
		b.Deliver(message)
		if told != nil {
			t.Errorf("%q: told %v after they left", message, told)
		}
	})
}
