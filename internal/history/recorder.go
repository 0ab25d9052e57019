package history

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// A Recorder records what clients do. It is safe for concurrent use.
//
// No two events of a Recorder have the same time: if its clock stands still, as it does in virtual time, the Recorder adds
// a nanosecond for each event. So the times are in the order of the events, two locks that overlap within one instant are
// detected, and no event has the time 0, which means never.
type Recorder struct {
	clock func() int64
	w     io.Writer

	mu   sync.Mutex
	last int64
	ops  []*Op
	err  error
}

// New returns a Recorder with that clock, in nanoseconds. Processes whose histories are checked together need the same
// clock, such as the monotonic clock of one host.
//
// If w is not nil, each event is written to it at once, as a line of JSON in a single Write. If w does not buffer, as a
// file does not, nothing is lost when the process is killed.
func New(clock func() int64, w io.Writer) *Recorder {
	return &Recorder{clock: clock, w: w}
}

// Begin records that a call for op is about to be made. The caller sets Client, Key, Kind, Try and Class.
func (r *Recorder) Begin(op Op) *Span {
	s := &Span{r, &op}
	r.mu.Lock()
	r.ops = append(r.ops, &op)
	op.ID = len(r.ops)
	r.mu.Unlock()
	s.record(func(now int64) { op.Asked = now })
	return s
}

// Now records an event that is no part of an operation, and returns its time.
func (r *Recorder) Now() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now()
}

// now returns the time of the next event. The mutex is held, so that the times are in the order of the events.
func (r *Recorder) now() int64 {
	r.last = max(r.last+1, r.clock())
	return r.last
}

// Ops returns a copy of all operations so far, in the order of Begin.
func (r *Recorder) Ops() []Op {
	r.mu.Lock()
	defer r.mu.Unlock()
	ops := make([]Op, len(r.ops))
	for i, o := range r.ops {
		ops[i] = *o
	}
	return ops
}

// Err returns the first error of the writer. Nothing is written after it.
func (r *Recorder) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// A Span records the events of one operation. Only the first call of each method counts, except for Until and Set.
type Span struct {
	r  *Recorder
	op *Op
}

// record applies f to the operation and writes all of it again: its last line counts.
func (s *Span) record(f func(now int64)) {
	r := s.r
	r.mu.Lock()
	defer r.mu.Unlock()
	f(r.now())
	if r.w == nil || r.err != nil {
		return
	}
	line, err := json.Marshal(s.op)
	if err == nil {
		_, err = r.w.Write(append(line, '\n'))
	}
	r.err = err
}

func (s *Span) once(at *int64, also func()) {
	s.record(func(now int64) {
		if *at == 0 {
			*at = now
			if also != nil {
				also()
			}
		}
	})
}

// Got records that the call has returned a lock, with its token (0 for a read lock) and the time until which it can be
// trusted unless it is renewed, on the Recorder's clock (0 if unknown).
func (s *Span) Got(token uint64, until int64) {
	s.once(&s.op.Got, func() { s.op.Token, s.op.Until = token, until })
}

// Until records a new time until which the lock can be trusted.
func (s *Span) Until(until int64) { s.record(func(int64) { s.op.Until = until }) }

// Unlocking records that Unlock is about to be called.
func (s *Span) Unlocking() { s.once(&s.op.Unlocking, nil) }

// Ended records that the lock's context was seen to be done. It can be passed to context.AfterFunc.
func (s *Span) Ended() { s.once(&s.op.Ended, nil) }

// Freed records that the lock is free: Unlock was confirmed.
func (s *Span) Freed() { s.once(&s.op.Freed, nil) }

// Failed records that the call has returned without a lock. It may still take effect, until Freed. For a lock that was
// granted and lost, call Ended instead.
func (s *Span) Failed(err error) {
	s.once(&s.op.Ended, func() { s.op.Err = fmt.Sprint(err) })
}

// Refused records that a try found the lock held by others, for which Linearizable then requires a holder. If two tries
// can make each other fail, as they can with several nodes, call Failed and Freed instead.
func (s *Span) Refused() {
	s.once(&s.op.Ended, func() { s.op.Refused, s.op.Freed = true, s.op.Ended })
}

// Set changes what the test notes of the operation.
func (s *Span) Set(change func(op *Op)) { s.record(func(int64) { change(s.op) }) }

// Paused records that the process was stopped for a while.
func (s *Span) Paused() { s.record(func(int64) { s.op.Paused = true }) }

// Load reads what one Recorder has written. The last line may be incomplete if the process was killed; an error in any
// other line is returned with the operations before it.
func Load(r io.Reader) ([]Op, error) {
	var ops []Op
	at := map[int]int{} // by ID, the index in ops
	in := bufio.NewReader(r)
	for n := 1; ; n++ {
		line, end := in.ReadBytes('\n')
		if end != nil && !errors.Is(end, io.EOF) {
			return ops, end
		}
		if len(line) > 0 {
			var o Op
			if err := json.Unmarshal(line, &o); err != nil {
				if end != nil {
					return ops, nil
				}
				return ops, fmt.Errorf("history: line %d: %w", n, err)
			}
			i, ok := at[o.ID]
			if !ok {
				i = len(ops)
				at[o.ID] = i
				ops = append(ops, o)
			}
			ops[i] = o
		}
		if end != nil {
			return ops, nil
		}
	}
}
