//go:build linux

package chaos

// This file checks what the clients wrote down when all is over.

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/redismutex/redismutex/internal/history"
)

const (
	// late is how much later than the end of its lease a client on a busy machine may see that.
	late = 150 * time.Millisecond
	// patience is how long after a renewal the answer may take.
	patience = 500 * time.Millisecond
	// doubt is how long at most something of an operation may be left of which nobody knows how it ended: a request
	// that lies with a frozen server, and the lease that it gets then.
	doubt = 10 * time.Second
)

// check looks at what the clients wrote down.
func (w *world) check(faults []fault, finished int64) {
	var ops []history.Op
	byClient := map[string][]history.Op{}
	for _, p := range slices.Concat(w.clients, w.dead) {
		byClient[p.name] = w.load(p)
		ops = append(ops, byClient[p.name]...)
	}
	w.progress(ops, finished)
	w.effects(faults, ops, byClient)
	w.writes(ops)

	var sure, frail, told []history.Op
	for _, o := range ops {
		if !slices.Contains(w.config.Frail, o.Key) {
			sure = append(sure, o)
			continue
		}
		// A failover may let a second holder in. The first is told with its next renewal.
		if _, to, ok := o.Held(); ok {
			o.Unlocking, o.Paused = 0, false
			o.Ended = max(o.Got, to-int64(ttlOf(o)/2+patience))
		}
		frail = append(frail, o)
		if o.Got == 0 || o.Ended > o.Got { // of the others there is no time that they must have had alone
			told = append(told, o)
		}
	}
	w.must(history.Exclusion(sure))
	w.must(history.Exclusion(told))
	w.must(history.Tokens(sure))
	w.must(history.TokensAfterLoss(frail))
	if w.kind == standalone {
		w.must(history.Linearizable(ops, 20*time.Second)) // an error also if it is undecided
	}

	// The point of this sleep is that all leases end. The last to go are the tombstones.
	time.Sleep(time.Duration(finished-mono()) + 2*longest + time.Second)
	for _, s := range w.all() {
		keys, err := s.Client(w).Keys(w.Context(), "*").Result()
		w.must(err)
		for _, k := range keys {
			if !strings.HasSuffix(k, ":token") {
				w.Errorf("want nothing but token counters left, %s is", k)
			}
		}
	}
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Error(err)
	}
}

func ttlOf(o history.Op) time.Duration {
	_, ttl, _ := strings.Cut(o.Client, "@")
	d, err := time.ParseDuration(ttl)
	must(err)
	return d
}

// load reads what a client has left, and brings its history to what is certain.
func (w *world) load(p *process) []history.Op {
	read := func(what string) []byte {
		b, err := os.ReadFile(filepath.Join(w.dir, p.name+"."+what))
		w.must(err)
		return b
	}
	for line := range strings.Lines(string(read("log"))) {
		if strings.HasPrefix(line, violation) || strings.Contains(line, "DATA RACE") || strings.HasPrefix(line, "panic: ") {
			w.Errorf("client %s: %s", p.name, line)
		}
	}
	if p.died == 0 && p.cmd.ProcessState.ExitCode() != 0 {
		w.Errorf("client %s: %v", p.name, p.cmd.ProcessState)
	}
	pauses := p.pauses
	for lines := bufio.NewScanner(bytes.NewReader(read("pauses"))); lines.Scan(); {
		var s pause
		if _, err := fmt.Sscan(lines.Text(), &s.from, &s.to); err == nil {
			pauses = append(pauses, s)
		}
	}
	slices.SortFunc(pauses, func(a, b pause) int { return cmp.Compare(a.from, b.from) })
	ops, err := history.Load(bytes.NewReader(read("history")))
	w.must(err)
	for i := range ops {
		w.settle(&ops[i], p, pauses)
	}
	return ops
}

// settle holds against the operation that it was trusted for too long, and else takes it for over when its trust was:
// a timer may be late, the more so in a process that stood still.
func (w *world) settle(o *history.Op, p *process, pauses []pause) {
	over := end(o)
	if over == 0 && slices.Contains(w.config.Frail, o.Key) {
		o.Ended = p.died // a failover tells the living only
	}
	if o.Freed == 0 {
		o.Freed = max(o.Asked, o.Got, over, p.died) + int64(doubt)
	}
	if o.Got == 0 || over <= o.Until {
		return
	}
	awake := o.Until
	for _, s := range pauses {
		if s.from <= over && s.to >= awake {
			awake = s.to
		}
	}
	if d := time.Duration(over - awake); d > late {
		w.Errorf("trusted for %v longer than its lease: %v", d, o)
		return
	}
	o.Paused = true
	if o.Got >= o.Until { // it never knew itself a holder
		o.Got, o.Ended = 0, over
	}
}

// end is when its client did not rely on it any more; 0: nobody knows.
func end(o *history.Op) int64 {
	if o.Unlocking == 0 || o.Ended == 0 {
		return max(o.Unlocking, o.Ended)
	}
	return min(o.Unlocking, o.Ended)
}

// progress looks for those who got nothing when all had healed, and for too little of it all.
func (w *world) progress(ops []history.Op, finished int64) {
	granted, lost, since := 0, 0, map[string]int{}
	for _, o := range ops {
		if o.Got == 0 {
			continue
		}
		granted++
		if o.Ended != 0 && o.Unlocking == 0 || o.Unlocking > o.Ended && o.Ended != 0 {
			lost++
		}
		if o.Got > w.healed && o.Got < finished {
			since[o.Client]++
		}
	}
	for _, p := range w.clients {
		for _, ttl := range ttls {
			if name := fmt.Sprintf("%s@%v", p.name, ttl); since[name] == 0 {
				w.Errorf("%s starves: it got nothing in the %v after the last fault", name, calm)
			}
		}
	}
	w.Logf("%d asked, %d granted, %d ended before they were unlocked, %d stale writes refused", len(ops), granted, lost, w.refused())
	if least := int(5 * lasting.Seconds()); granted < least {
		w.Errorf("only %d locks granted, of %d that there should be", granted, least)
	}
	if w.refused() == 0 && *lasting >= 30*time.Second { // it takes somebody who overtakes
		w.Error("vacuous: no stale write was ever tried")
	}
}

// effects looks for faults that never met anybody.
func (w *world) effects(faults []fault, ops []history.Op, byClient map[string][]history.Op) {
	met := map[string]int{}
	for _, m := range w.marks {
		concerned := ops
		if m.hurt != nil {
			concerned = byClient[m.hurt.name]
		}
		seen := map[string]bool{}
		for _, o := range concerned {
			over := end(&o)
			underWay := o.Asked < m.to && (over == 0 || over > m.from)
			holds := underWay && o.Got != 0 && o.Got < m.from
			switch m.kind {
			case killed:
				seen["holder killed"] = seen["holder killed"] || holds
				seen["waiter killed"] = seen["waiter killed"] || underWay && o.Got == 0
			case stopped:
				seen[m.kind] = seen[m.kind] || holds && o.Until < m.to
			case briefly:
				seen[m.kind] = seen[m.kind] || holds
			default:
				seen[m.kind] = seen[m.kind] || underWay
			}
		}
		for kind, yes := range seen {
			if yes {
				met[kind]++
			}
		}
	}
	w.Log(met)
	for _, f := range faults {
		kinds := []string{f.kind}
		if f.kind == killed {
			kinds = []string{"holder killed", "waiter killed"}
		}
		for _, kind := range kinds {
			if met[kind] == 0 && *lasting >= thorough {
				w.Errorf("vacuous: %s: never, or it met nobody", kind)
			}
		}
	}
}

// writes looks for one that was accepted although a later holder had written.
func (w *world) writes(ops []history.Op) {
	latest := map[string]history.Op{}
	for _, write := range w.accepted {
		var o history.Op // the last of that name: a failover may give a token once more
		for _, other := range ops {
			if other.Client == write.Client && other.Key == write.Key && other.Token == write.Token &&
				o.Asked < other.Asked && other.Asked < write.at {
				o = other
			}
		}
		before := latest[write.Key]
		if o.Got != 0 && o.Got < before.Asked {
			w.Errorf("a stale write was accepted of the second, after one of the first:\n\t%v\n\t%v", &before, &o)
			return
		}
		if o.Asked > before.Asked {
			latest[write.Key] = o
		}
	}
}
