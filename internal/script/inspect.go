package script

import (
	"fmt"
	"math"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/lockerr"
)

// Inspect is the verb that looks at a lock and changes nothing.
var Inspect = load("inspect", Granted)

// Inspect is the command that returns the holders and the waiters of the lock.
func (k *Keys) Inspect() Command {
	return k.call(Inspect)
}

// An Inspection is the answer of a node about a lock.
type Inspection struct {
	Holders []Seen // the writer, or some of the readers
	Waiters []Seen // the first ones, in order
	Holding int    // how many hold
	Waiting int    // how many wait
	Token   int64  // the last one of the server, or 0
}

// A Seen participant holds or waits.
type Seen struct {
	ID     string
	Write  bool
	Lease  time.Duration // what is left of it
	Rank   int64         // of a waiter
	Waited time.Duration // of a waiter: since its rank, by the clock of the server
}

// ParseInspection reads the reply to the command of Inspect. Foreign data is an error, too.
func ParseInspection(sent *redis.Cmd) (i Inspection, err error) {
	value, err := sent.Result()
	if err != nil {
		return i, lockerr.Script(err)
	}
	r := reader{value: value}
	v := r.list(value, 1)
	if len(v) == 2 && v[0] == "foreign" {
		if data := r.text(v[1]); r.err == nil {
			r.err = lockerr.Foreign(data)
		}
		return i, r.err
	}
	if len(v) != 7 {
		r.fail()
		return i, r.err
	}
	kind, clock := r.text(v[0]), r.number(v[6])
	for h := r.list(v[1], 2); len(h) > 0; h = h[2:] {
		i.Holders = append(i.Holders, Seen{ID: r.text(h[0]), Write: kind == "string", Lease: r.ms(h[1])})
	}
	for w := r.list(v[2], 3); len(w) > 0; w = w[3:] {
		member, rank := r.text(w[0]), r.number(w[1])
		kind, id := member[:min(1, len(member))], member[min(1, len(member)):]
		i.Waiters = append(i.Waiters, Seen{
			ID: id, Write: kind == "w", Lease: r.ms(w[2]), Rank: rank, Waited: time.Duration(max(0, clock-rank)) * time.Microsecond,
		})
	}
	i.Token, i.Waiting, i.Holding = r.number(v[3]), int(r.number(v[4])), int(r.number(v[5]))
	return i, r.err
}

// A reader reads the parts of a reply. The first one that is not what a script replies is an error.
type reader struct {
	value any
	err   error
}

func (r *reader) fail() {
	if r.err == nil {
		r.err = lockerr.Redis(fmt.Errorf("unexpected reply %.100q", fmt.Sprint(r.value)))
	}
}

func (r *reader) text(v any) string {
	s, ok := v.(string)
	if !ok {
		r.fail()
	}
	return s
}

// number reads a number that fits a rank, a token and a clock in µs.
func (r *reader) number(v any) int64 {
	n, ok := v.(int64)
	if !ok || n < 0 || n >= 2*span {
		r.fail()
		return 0
	}
	return n
}

func (r *reader) ms(v any) time.Duration {
	return time.Duration(min(r.number(v), math.MaxInt64/int64(time.Millisecond))) * time.Millisecond
}

// list reads a list of so many values each.
func (r *reader) list(v any, each int) []any {
	l, ok := v.([]any)
	if !ok || len(l)%each != 0 {
		r.fail()
		return nil
	}
	return l
}
