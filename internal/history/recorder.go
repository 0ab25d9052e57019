package history

// This file answers: how is a history written down, and read back?

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// A Recorder writes down what clients do. It is safe for concurrent use.
//
// No two events of a Recorder bear the same time: where its clock stands still, as it does in virtual time, it
// counts on by a nanosecond for each event. So what happened in order has times in order, and two holds that
// overlap within one instant are seen. It also keeps 0 for "never".
type Recorder struct {
	clock func() int64
	w     io.Writer

	mu   sync.Mutex
	last int64
	ops  []*Op
	err  error
}

// New makes a Recorder that reads the clock, in nanoseconds. Processes whose histories are read together need the
// same clock: on one host its monotonic one, for example.
//
// If w is not nil, each event is written to it at once, as a line of JSON in a single Write. A process that is
// killed leaves all that it has recorded, if w does not buffer: a file does not.
func New(clock func() int64, w io.Writer) *Recorder {
	return &Recorder{clock: clock, w: w}
}

// Begin records that op is about to be asked for. The caller fills in who asks for what: Client, Key, Kind, Try,
// Class.
func (r *Recorder) Begin(op Op) *Span {
	s := &Span{r, &op}
	r.mu.Lock()
	r.ops = append(r.ops, &op)
	op.ID = len(r.ops)
	r.mu.Unlock()
	s.record(func(now int64) { op.Asked = now })
	return s
}

// Ops is a copy of all that was recorded so far, in the order of Begin.
func (r *Recorder) Ops() []Op {
	r.mu.Lock()
	defer r.mu.Unlock()
	ops := make([]Op, len(r.ops))
	for i, o := range r.ops {
		ops[i] = *o
	}
	return ops
}

// Err is the first error of the writer. Nothing is written after it.
func (r *Recorder) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// A Span records what becomes of one operation. Only the first call of each method counts, except for Until.
type Span struct {
	r  *Recorder
	op *Op
}

// record lets f change the operation and writes the whole of it down again: the last line about it is what counts.
func (s *Span) record(f func(now int64)) {
	r := s.r
	r.mu.Lock()
	defer r.mu.Unlock()
	// The clock is read under the mutex: the order of the times is the order of the events.
	r.last = max(r.last+1, r.clock())
	f(r.last)
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

// Got records that the call has returned a lock, with its token (0 for one to read), and until when it can be
// trusted if it is not renewed, on the Recorder's clock (0 if nobody knows).
func (s *Span) Got(token uint64, until int64) {
	s.once(&s.op.Got, func() { s.op.Token, s.op.Until = token, until })
}

// Until records that the trust in the lock has moved on.
func (s *Span) Until(until int64) { s.record(func(int64) { s.op.Until = until }) }

// Unlocking records that Unlock is about to be called.
func (s *Span) Unlocking() { s.once(&s.op.Unlocking, nil) }

// Ended records that Done was observed. It fits context.AfterFunc.
func (s *Span) Ended() { s.once(&s.op.Ended, nil) }

// Freed records that nothing is left of it: Unlock was confirmed.
func (s *Span) Freed() { s.once(&s.op.Freed, nil) }

// Failed records that the call has returned without a lock. It may still have an effect, until Freed. A lock that
// was got has not failed: record Ended.
func (s *Span) Failed(err error) {
	s.once(&s.op.Ended, func() { s.op.Err = fmt.Sprint(err) })
}

// Refused records that a try found the lock held by others. Linearizable takes it at its word. Where two tries can
// foil each other, as they can with several nodes, record Failed and Freed.
func (s *Span) Refused() {
	s.once(&s.op.Ended, func() { s.op.Refused, s.op.Freed = true, s.op.Ended })
}

// Paused records that the process stood still.
func (s *Span) Paused() { s.record(func(int64) { s.op.Paused = true }) }

// Load reads what one Recorder has written. The last line may be cut off, as a process that is killed leaves it;
// an error in any other is returned with the operations before it.
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
