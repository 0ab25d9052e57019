//go:build linux

package chaos

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

	"github.com/redis/go-redis/v9"

	"github.com/redismutex/redismutex/internal/history"
	"github.com/redismutex/redismutex/internal/redistest"
)

const (
	// late is how much later than the end of its lease a client on a busy machine may see the end.
	late = 300 * time.Millisecond
	// answer is how long the reply to a renewal may take.
	answer = 500 * time.Millisecond
	// doubt is how long after its last event an operation of unknown outcome may still hold a lock: a request may wait in
	// a frozen server, and is then given a lease.
	doubt = 10 * time.Second
)

// check checks what the clients have recorded.
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

	var sure, frail, informed []history.Op
	for _, o := range ops {
		if !slices.Contains(w.config.Frail, o.Key) {
			sure = append(sure, o)
			continue
		}
		// After a failover there may be a second holder. The first learns of it at its next renewal, or when its lease ends
		// if a fault of its own keeps the reply from it.
		if _, to, ok := o.Held(); ok {
			o.Unlocking, o.Paused = 0, false
			unaware := ttlOf(o)
			if !w.disturbed(o.Client, to-int64(unaware), to) {
				unaware = min(unaware, unaware/2+answer)
			}
			o.Ended = max(o.Got, to-int64(unaware))
		}
		frail = append(frail, o)
		if o.Got == 0 || o.Ended > o.Got { // of the others it is unknown whether they held the lock alone
			informed = append(informed, o)
		}
	}
	w.must(history.Exclusion(sure))
	w.must(history.Exclusion(informed))
	w.must(history.Tokens(sure))
	w.must(history.TokensAfterLoss(frail))
	if w.kind == standalone {
		all := history.WithGivenUp(ops, func(i int) time.Duration { return ttlOf(ops[i]) })
		w.must(history.Linearizable(all, 20*time.Second)) // returns an error if it is undecided, too
	}

	// All leases end. Tombstones last longest.
	left := w.keys()
	redistest.Within(w, time.Duration(finished-mono())+2*longest+time.Second, "nothing but token counters is left", func() bool {
		return len(left()) == 0
	})
}

// keys returns a function that returns the keys on all servers, but for token counters.
func (w *world) keys() func() []string {
	var clients []*redis.Client
	for _, s := range w.all() {
		clients = append(clients, s.Client(w))
	}
	return func() (found []string) {
		for _, rc := range clients {
			keys, err := rc.Keys(w.Context(), "*").Result()
			w.must(err)
			for _, k := range keys {
				if !strings.HasSuffix(k, ":token") {
					found = append(found, k)
				}
			}
		}
		return found
	}
}

// disturbed reports whether a fault of a client or of its links lasted at some time between from and to.
func (w *world) disturbed(client string, from, to int64) bool {
	name, _, _ := strings.Cut(client, "@")
	return slices.ContainsFunc(w.marks, func(m mark) bool {
		return m.hurt != nil && m.hurt.name == name && m.from <= to && m.to >= from
	})
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

// load reads the records of a client, and reduces its history to what is certain.
func (w *world) load(p *process) []history.Op {
	read := func(what string) []byte {
		b, err := os.ReadFile(filepath.Join(w.dir, p.name+"."+what))
		w.must(err)
		return b
	}
	for line := range strings.Lines(string(read("log"))) {
		if strings.HasPrefix(line, violation) || strings.Contains(line, "DATA RACE") || strings.HasPrefix(line, "panic: ") {
			w.Errorf("client %s reports: %s", p.name, line)
		}
	}
	if p.died == 0 && p.cmd.ProcessState.ExitCode() != 0 {
		w.Errorf("want client %s to exit with 0, got %v", p.name, p.cmd.ProcessState)
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
		w.complete(&ops[i], p, pauses)
	}
	return ops
}

// complete fills in the unknown times of an operation. It reports a lock that was trusted for too long; if the client saw
// the end only a little late, since it was stopped or the machine was busy, the lock counts as held until its trust ended.
func (w *world) complete(o *history.Op, p *process, pauses []pause) {
	over := end(o)
	if over == 0 && slices.Contains(w.config.Frail, o.Key) {
		o.Ended = p.died // a client that has died does not learn of a failover
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
		w.Errorf("want a lock trusted no longer than its lease, it was for %v longer: %v", d, o)
		return
	}
	o.Paused = true
	if o.Got >= o.Until { // the lease had ended before the client knew of the grant
		o.Got, o.Ended = 0, over
	}
}

// end returns when the client stopped relying on the lock; 0: unknown.
func end(o *history.Op) int64 {
	if o.Unlocking == 0 || o.Ended == 0 {
		return max(o.Unlocking, o.Ended)
	}
	return min(o.Unlocking, o.Ended)
}

// progress checks that each worker was granted a lock after the last fault, and that there were enough grants in all.
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
				w.Errorf("want every worker granted a lock in the %v after the last fault, %s was not", calm, name)
			}
		}
	}
	w.Logf("%d asked, %d granted, %d ended before they were unlocked, %d stale writes refused", len(ops), granted, lost, w.refused())
	if least := int(5 * lasting.Seconds()); granted < least {
		w.Errorf("want %d locks granted at least, got %d", least, granted)
	}
	if w.refused() == 0 && *lasting >= 30*time.Second { // it takes a later holder
		w.Error("want stale writes tried and refused, there were none: the run proves little")
	}
}

// effects checks that each fault affected an operation.
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
			active := o.Asked < m.to && (over == 0 || over > m.from)
			holds := active && o.Got != 0 && o.Got < m.from
			switch m.kind {
			case killed:
				seen["holder killed"] = seen["holder killed"] || holds
				seen["waiter killed"] = seen["waiter killed"] || active && o.Got == 0
			case stopped:
				seen[m.kind] = seen[m.kind] || holds && o.Until < m.to
			case briefly:
				seen[m.kind] = seen[m.kind] || holds
			default:
				seen[m.kind] = seen[m.kind] || active
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
				w.Errorf("want every fault to affect an operation, %q never did: the run proves little", kind)
			}
		}
	}
}

// writes checks that no write was accepted after a later holder had written.
func (w *world) writes(ops []history.Op) {
	latest := map[string]history.Op{}
	for _, write := range w.accepted {
		var o history.Op // the last operation with this token, which a failover may give again
		for _, other := range ops {
			if other.Client == write.Client && other.Key == write.Key && other.Token == write.Token &&
				o.Asked < other.Asked && other.Asked < write.at {
				o = other
			}
		}
		before := latest[write.Key]
		if o.Got != 0 && o.Got < before.Asked {
			w.Errorf("want the stale write of the second refused after a write of the first, it was accepted:\n\t%v\n\t%v", &before, &o)
			return
		}
		if o.Asked > before.Asked {
			latest[write.Key] = o
		}
	}
}
