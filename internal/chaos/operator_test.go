//go:build linux

package chaos

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/history"
	"github.com/redismutex/redismutex/internal/node"
)

// A revocation is a call that revoked an acquisition. A client writes it before the call and, if it lives, after it.
type revocation struct {
	By      string // the client
	Process string // that of the acquisition
	Key, ID string
	From    int64
	To      int64  // 0: before the call
	Err     string // of the call; "": it has succeeded, if To is set
}

// operate looks at the locks now and then, and revokes holders and waiters that it finds.
func (c *client) operate(ctx context.Context, m *redismutex.RWMutex, rng *rand.Rand) {
	for ctx.Err() == nil {
		time.Sleep(upTo(rng, 400*time.Millisecond)) // determines the load
		key := c.Keys[rng.IntN(len(c.Keys))]
		sub := redismutex.WithKey(strings.TrimPrefix(key, lockName+":"))
		state, err := m.Inspect(ctx, sub)
		if err != nil {
			c.explains("inspecting", ctx, err)
			continue
		}
		ps := slices.Concat(state.Holders, state.Waiters)
		if len(ps) == 0 {
			continue
		}
		p := ps[rng.IntN(len(ps))]
		r := revocation{By: c.Name, Process: p.Process, Key: key, ID: p.ID, From: mono()}
		c.note(r)
		err = m.Revoke(ctx, p.ID, sub)
		r.To = mono()
		if err != nil {
			r.Err = err.Error()
			c.explains("revoking", ctx, err)
		}
		c.note(r)
	}
}

func (c *client) note(r revocation) {
	line, err := json.Marshal(r)
	must(err)
	_, err = c.calls.Write(append(line, '\n'))
	must(err)
}

// explains reports an error of an operator that nothing explains.
func (c *client) explains(what string, ctx context.Context, err error) {
	if ctx.Err() == nil && !errors.Is(err, redismutex.ErrRedis) && !errors.Is(err, redismutex.ErrNoSuchID) {
		report("%s: want an error that the faults explain, got %v", what, err)
	}
}

// parseCalls parses what a client has noted. The last line may be incomplete if it was killed.
func parseCalls(b []byte) (calls []revocation) {
	for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan(); {
		var r revocation
		if json.Unmarshal(lines.Bytes(), &r) == nil {
			calls = append(calls, r)
		}
	}
	return calls
}

// acquisition returns what the ids of one acquisition have in common. On one node it has one at a time.
func (w *world) acquisition(id string) string {
	if w.kind == redlock {
		return node.AcquisitionOf(id)
	}
	return id
}

// revocations notes in the operations what was revoked, and when, and checks that only that has ended with ErrRevoked. A
// call that has failed may have had an effect, and may have been sent twice, so that nothing was found the second time.
func (w *world) revocations(ops []history.Op) {
	type revoked struct {
		revocation
		done int64 // when a call had succeeded, or 0
	}
	all := map[string]*revoked{}
	for _, r := range w.calls {
		name := w.acquisition(r.ID)
		if all[name] == nil {
			all[name] = &revoked{revocation: r}
		}
		a := all[name]
		a.From = min(a.From, r.From)
		if r.To != 0 && r.Err == "" {
			a.done = history.Earlier(a.done, r.To)
		}
	}
	for _, line := range w.doubtful {
		if id, text, _ := strings.Cut(line, " "); all[w.acquisition(id)] == nil {
			w.Errorf("a client reports: %s", text)
		}
	}

	granted, waits := map[string]bool{}, map[string]int{} // by acquisition; by process and key, how many waits may be revoked
	holders, waiters := 0, 0
	for i := range ops {
		o := &ops[i]
		r := all[w.acquisition(o.Lock)]
		if o.Got == 0 {
			if o.Refused && r != nil && r.From < o.Ended {
				o.Refused = false // its own process was in the way, and may not have known that it was revoked
			}
			continue
		}
		granted[w.acquisition(o.Lock)] = true
		isRevoked := strings.HasPrefix(o.Cause, redismutex.ErrRevoked.Error())
		if isRevoked {
			holders++
		}
		if r == nil || r.Key != o.Key {
			if isRevoked {
				w.Errorf("want a lock ended with ErrRevoked only if it was revoked: %v", o)
			}
			continue
		}
		o.Revoked = r.From
		if r.done == 0 || slices.Contains(w.config.Frail, o.Key) || w.kind == redlock {
			continue
		}
		// Nothing renews it any more. On several nodes a minority may not have heard of that.
		if trusted := time.Duration(o.Until - r.done); trusted > ttlOf(*o) {
			w.Errorf("want no renewal of a lock that was revoked at %v, it was trusted for %v since: %v", time.Duration(r.done), trusted, o)
		}
		if o.Freed == 0 || r.done < o.Freed {
			o.Freed = r.done
		}
	}
	for name, r := range all {
		if !granted[name] {
			waits[r.Process+" "+r.Key]++
		}
	}
	for i := range ops {
		o := &ops[i]
		if o.Got != 0 || !strings.HasPrefix(o.Err, redismutex.ErrRevoked.Error()) {
			continue
		}
		if o.Lock != "" { // a downgrade of a revoked lock
			if all[w.acquisition(o.Lock)] == nil {
				w.Errorf("want a downgrade refused with ErrRevoked only if the lock was revoked: %v", o)
			}
			continue
		}
		waiters++
		process, _, _ := strings.Cut(o.Client, "@")
		if name := process + " " + o.Key; waits[name] == 0 {
			w.Errorf("want a wait ended with ErrRevoked only if it was revoked, and one wait for each that was: %v", o)
		} else {
			waits[name]--
		}
	}
	w.Logf("%d acquisitions may have been revoked; %d holders and %d waiters got ErrRevoked", len(all), holders, waiters)
	if *lasting >= thorough && (holders == 0 || waiters == 0) {
		w.Errorf("want holders and waiters revoked, %d and %d were: the run proves little", holders, waiters)
	}
}

// report reports a violation to the parent process.
func report(format string, args ...any) {
	fmt.Fprintf(os.Stderr, violation+format+"\n", args...)
}
