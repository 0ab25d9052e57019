package main

import (
	"errors"
	"fmt"
	"io"
)

var errWrong = errors.New("the count is wrong")

// prove checks everything that the lock promises, and prints the results.
func prove(out io.Writer, left int, sales []sale, s seen) error {
	var err error
	claim := func(ok bool, format string, args ...any) {
		verdict := "ok   "
		if !ok {
			verdict, err = "WRONG", errWrong
		}
		fmt.Fprintf(out, "  %s  %s\n", verdict, fmt.Sprintf(format, args...))
	}
	fmt.Fprintln(out, "The proof, read back from Redis:")

	times := make(map[int]int) // how often each item was sold
	twice, rising := 0, true
	for i, sale := range sales {
		if times[sale.Item]++; times[sale.Item] == 2 {
			twice++
		}
		rising = rising && (i == 0 || sale.Token > sales[i-1].Token)
	}
	claim(len(sales)+left == items && left == 0, "%d items sold of a stock of %d, %d left", len(sales), items, left)
	claim(len(times) == items && twice == 0, "%d items sold once, %d more than once", len(times)-twice, twice)
	claim(rising, "each sale carries a greater fencing token than the sale before")
	claim(s.counts > 0 && s.wrong == 0, "%d counts by the readers, %d of them with stock + sold other than %d", s.counts, s.wrong, items)

	if c := s.crash; c != nil {
		var unfinished bool
		var by string
		for _, sale := range sales {
			unfinished = unfinished || sale.Token == c.token
			if sale.Item == c.item {
				by = sale.Seller
			}
		}
		claim(c.next != "", "the lock of %s, which was killed, expired by itself, after %.2f s", c.seller, c.freed.Seconds())
		claim(!unfinished && by != c.seller, "the unfinished sale does not count: item %d was sold by %s", c.item, by)
	}
	return err
}
