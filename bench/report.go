package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/redismutex/redismutex"
)

// The files that are written, relative to the root of the repository.
var (
	jsonFile   = filepath.Join("docs", "performance.json")
	docFile    = filepath.Join("docs", "performance.md")
	readmeFile = "README.md"
	throughput = filepath.Join("docs", "throughput.svg")
	waitsChart = filepath.Join("docs", "waits.svg")
)

// render writes the tables and charts.
func (r *Results) render(root string, stdout io.Writer) error {
	all := r.machine() + "\n\n" + r.tables() + "\n### Targets\n\n" + r.targets()
	_, err := io.WriteString(stdout, all)
	return errors.Join(err,
		between(filepath.Join(root, docFile), all),
		between(filepath.Join(root, readmeFile), r.summary()),
		r.drawThroughput(filepath.Join(root, throughput)),
		r.drawWaits(filepath.Join(root, waitsChart)))
}

// The text between these marks is generated.
const begin, end = "<!-- begin performance -->\n", "<!-- end performance -->"

// between replaces the text between the marks of a file, if the file exists and has marks.
func between(path, text string) error {
	old, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	head, rest, begun := strings.Cut(string(old), begin)
	_, tail, ended := strings.Cut(rest, end)
	if !begun || !ended {
		return nil
	}
	return os.WriteFile(path, []byte(head+begin+"\n"+text+"\n"+end+tail), 0o644)
}

func (r *Results) machine() string {
	m := r.Machine
	where := "clients and servers on any CPU"
	if m.Pinned {
		where = "clients on one, servers and the 1 ms link on another"
	}
	var versions []string
	for _, path := range slices.Sorted(maps.Keys(m.Versions)) {
		versions = append(versions, path[strings.Index(path, "/")+1:]+" "+m.Versions[path])
	}
	return fmt.Sprintf("Redis %s, %s on %s, %d CPUs (%s), %s; %s. %d rounds, turns of %s and its multiples.",
		m.Redis, m.Go, m.OS, m.CPUs, where, m.Date, strings.Join(versions, ", "), m.Rounds, m.Turn)
}

// number formats v with three significant digits.
func number(v float64) string {
	switch {
	case math.IsNaN(v) || math.IsInf(v, 0):
		return "–"
	case math.Abs(v) < 0.005:
		return "0"
	case v >= 99.5:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 9.95:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}

func table(head string, rows [][]string) string {
	var t strings.Builder
	columns := strings.Split(head, "|")
	line := func(cells []string) { fmt.Fprintf(&t, "| %s |\n", strings.Join(cells, " | ")) }
	line(columns)
	fmt.Fprintf(&t, "|---|%s\n", strings.Repeat("---:|", len(columns)-1))
	for _, cells := range rows {
		if slices.Contains([]string{ours, oursStrict, oursAuto}, cells[0]) {
			cells[0] = "**" + cells[0] + "**"
		}
		line(cells)
	}
	return t.String()
}

// libraries returns the libraries measured in a workload, redismutex first, then the floors, then the peers.
func (r *Results) libraries(workload string) (names []string) {
	for _, library := range slices.Concat([]string{ours, oursStrict, oursAuto, raw, rawAuto, blpop, blpopAuto, pairs}, peers) {
		if r.Workloads[workload][library] != nil {
			names = append(names, library)
		}
	}
	return names
}

// counts returns the numbers n of the workloads named "<prefix><n>", in order.
func (r *Results) counts(prefix string) (counts []int) {
	for name := range r.Workloads {
		if text, ok := strings.CutPrefix(name, prefix); ok {
			if n, err := strconv.Atoi(text); err == nil {
				counts = append(counts, n)
			}
		}
	}
	slices.Sort(counts)
	return counts
}

// A column shows one measure of each library.
type column struct {
	title string
	of    func(library string) float64
}

// block returns a table with a row for each library of a workload.
func (r *Results) block(title, workload string, columns ...column) string {
	head, rows := "library", [][]string(nil)
	for _, c := range columns {
		head += "|" + c.title
	}
	for _, library := range r.libraries(workload) {
		row := []string{library}
		for _, c := range columns {
			row = append(row, number(c.of(library)))
		}
		rows = append(rows, row)
	}
	return "### " + title + "\n\n" + table(head, rows) + "\n"
}

func (r *Results) value(title, workload, measure string) column {
	return column{title, func(library string) float64 { return r.mean(workload, library, measure) }}
}

func (r *Results) times(title, workload, measure, other string) column {
	return column{title, func(library string) float64 { return r.ratio(workload, measure, library, other) }}
}

// tables returns the tables of all workloads.
func (r *Results) tables() string {
	bg, cancellable := "serial/background", "serial/cancellable"
	near, far := "64 keys/"+loopback, "64 keys/"+distant
	t := r.block("Nobody else there: Lock + Unlock, one after the other", bg,
		r.value("µs", bg, "µs/lock"), r.times("× "+raw, bg, "µs/lock", raw),
		r.value("µs, cancellable parent", cancellable, "µs/lock"), r.times("× "+raw, cancellable, "µs/lock", raw),
		r.value("allocations", bg, "allocations"))
	floors := func(workload string) column {
		return column{"× floor of that client", func(library string) float64 {
			floor := raw
			if library == oursAuto || library == rawAuto {
				floor = rawAuto
			}
			return r.ratio(workload, "locks/s", library, floor)
		}}
	}
	t += r.block("64 goroutines, 64 keys", near,
		r.value("locks/s", near, "locks/s"), floors(near), r.times("× rueidislock", near, "locks/s", rueidisLock),
		r.value("locks/s at 1 ms", far, "locks/s"), floors(far), r.times("× rueidislock", far, "locks/s", rueidisLock))
	for _, net := range []string{loopback, distant} {
		for _, who := range contenders {
			w, sent := "one key/"+net+"/"+who.name, "one key/"+counted+"/"+who.name
			columns := []column{r.value("locks/s", w, "locks/s"), r.times("× "+blpop, w, "locks/s", blpop),
				r.value("hand-overs/s", w, "hand-overs/s"), r.value("fairness (Jain)", w, "Jain"),
				r.value("median wait, ms", w, "median ms"), r.value("longest, ms", w, "longest ms")}
			if net == distant {
				columns = append(columns, r.value("round trips per lock", w, "round trips"))
			} else {
				columns = append(columns, r.value("commands per lock", sent, "commands"))
			}
			t += r.block(fmt.Sprintf("One key, %s, %s", who.name, net), w, columns...)
		}
	}
	t += r.teamTables()
	near, far = "hand-off/"+loopback, "hand-off/"+distant
	t += r.block("Hand-off to another client that waits: from the start of Unlock to the return of Lock", near,
		r.value("µs", near, "µs"), r.times("× "+blpop, near, "µs", blpop), r.value("µs at 1 ms", far, "µs"), r.times("× "+blpop, far, "µs", blpop),
		r.value("round trips", far, "round trips"),
		r.value("never woken, %", near, "lost %"), r.value("at 1 ms, %", far, "lost %"))
	t += r.block("Mostly reads: 64 goroutines, one key, 95 % read locks where there are any", "mostly reads",
		r.value("locks/s", "mostly reads", "locks/s"), r.times("× "+pairs, "mostly reads", "locks/s", pairs),
		r.value("of them writes", "mostly reads", "writes"), r.value("slowest ÷ fastest", "mostly reads", "slowest/fastest"),
		r.value("longest wait, ms", "mostly reads", "longest ms"))
	for _, net := range []string{loopback, distant} {
		one, many := "quorum alone/"+net, "quorum contended/"+net
		t += r.block("5 nodes, "+net+": alone, and 16 goroutines for one key", one,
			r.value("alone, µs", one, "µs/lock"), r.times("× redsync", one, "µs/lock", redSync),
			r.value("contended, locks/s", many, "locks/s"), r.times("× redsync", many, "locks/s", redSync),
			r.value("hand-overs/s", many, "hand-overs/s"), r.value("slowest ÷ fastest", many, "slowest/fastest"), r.value("longest wait, ms", many, "longest ms"))
		apart := "quorum processes/" + net
		t += r.block(fmt.Sprintf("5 nodes, %s: %d processes of one goroutine for one key", net, quorumTeam.processes), apart,
			r.value("locks/s", apart, "locks/s"), r.value("hand-overs/s", apart, "hand-overs/s"), r.times("× redsync", apart, "hand-overs/s", redSync),
			r.value("slowest ÷ fastest", apart, "slowest/fastest"), r.value("longest wait, ms", apart, "longest ms"))
	}
	for _, n := range r.counts("held/") {
		w := fmt.Sprint("held/", n)
		t += r.block(fmt.Sprintf("%d locks held", n), w, r.value("client CPU, µs per lock and second", w, "CPU µs"),
			r.value("commands per lock and second", w, "commands"), r.value("goroutines per lock", w, "goroutines"), r.value("bytes per lock", w, "bytes"))
	}
	head, rows := "waiters|", [][]string(nil)
	columns := []struct{ title, measure string }{{"in Redis", "in Redis"}, {"renewals in half a TTL", "renewals"}, {"client CPU while they wait, %", "client %"},
		{"client CPU per join, µs", "join µs"}, {"per lock passed on, µs", "pass µs"}, {"script time per join, µs", "join script µs"},
		{"per hand-off, µs", "pass script µs"}, {"Redis busy with their renewals, %", "busy %"}, {"Redis' CPU, %", "CPU %"}, {"renewals per read", "renewals/read"}}
	for _, c := range columns {
		head += "|" + c.title
	}
	for _, n := range r.counts("waiters/") {
		w := fmt.Sprint("waiters/", n)
		for _, library := range r.libraries(w) {
			row := []string{strconv.Itoa(n), library}
			for _, c := range columns {
				row = append(row, number(r.mean(w, library, c.measure)))
			}
			rows = append(rows, row)
		}
	}
	return t + "### Waiters for one key, in one process\n\n" + table(head, rows)
}

// teamTables returns the tables of several processes that lock one key.
func (r *Results) teamTables() (t string) {
	for _, net := range []string{loopback, distant} {
		for _, section := range sections {
			limit := "nothing inside"
			if section > 0 {
				limit = fmt.Sprintf("%v inside, so at most %s locks/s", section, number(1/section.Seconds()))
			}
			var rows [][]string
			for _, goroutines := range teamSizes {
				w := teamName(net, goroutines, section)
				for _, library := range r.libraries(w) {
					row := []string{library, strconv.Itoa(goroutines)}
					for _, measure := range []string{"locks/s", "share", "within/s", "within µs", "between/s", "between µs", "slowest/fastest", "longest ms", "overlaps"} {
						row = append(row, number(r.mean(w, library, measure)))
					}
					rows = append(rows, row)
				}
			}
			t += fmt.Sprintf("### One key, %d processes, %s, %s\n\n", processes, net, limit) +
				table("library|goroutines of each|locks/s|share of the limit|hand-overs/s within a process|µs for each|hand-overs/s between them|µs for each|slowest ÷ fastest|longest wait, ms|granted beside another", rows) + "\n"
		}
	}
	return t
}

// A target is a goal for one figure.
type target struct {
	what   string
	least  bool // whether the limit is a minimum; otherwise it is a maximum
	limit  float64
	of     string
	actual float64
}

func (t target) met() string {
	switch {
	case math.IsNaN(t.actual):
		return "not measured"
	case t.least && t.actual >= t.limit, !t.least && t.actual <= t.limit:
		return "met"
	}
	return "**missed**"
}

func (r *Results) targets() string {
	var all []target
	least := func(what string, limit float64, of string, actual float64) {
		all = append(all, target{what, true, limit, of, actual})
	}
	most := func(what string, limit float64, of string, actual float64) {
		all = append(all, target{what, false, limit, of, actual})
	}
	bg, cancellable, near, far := "serial/background", "serial/cancellable", "64 keys/"+loopback, "64 keys/"+distant
	for _, workload := range []string{bg, cancellable} {
		most(workload+", time", 1.1, "× "+raw, r.ratio(workload, "µs/lock", ours, raw))
		most(workload+", time", 1.03, "× "+redisLock, r.ratio(workload, "µs/lock", ours, redisLock))
		best := r.bestPeer(workload, "µs/lock", true, redisLock)
		most(workload+", time", 1, "× best other peer: "+best, r.ratio(workload, "µs/lock", ours, best))
	}
	most(bg, 20, "allocations", r.mean(bg, ours, "allocations"))
	least("64 keys", 0.92, "× "+raw, r.ratio(near, "locks/s", ours, raw))
	least("64 keys, AutoPipeliner", 1.25, "× rueidislock", r.ratio(near, "locks/s", oursAuto, rueidisLock))
	least("64 keys, AutoPipeliner, 1 ms", 1.25, "× rueidislock", r.ratio(far, "locks/s", oursAuto, rueidisLock))
	for _, who := range contenders {
		w, what, floor := "one key/"+loopback+"/"+who.name, "one key, "+who.name, 0.8
		if who.clients == 1 { // so they share turns
			floor = 20
		}
		best := r.bestPeer(w, "locks/s", false)
		least(what, floor, "× "+blpop, r.ratio(w, "locks/s", ours, blpop))
		least(what, 1.3, "× best peer: "+best, r.ratio(w, "locks/s", ours, best))
		least(what, 0.99, "fairness (Jain)", r.mean(w, ours, "Jain"))
		most(what, 2.1, "commands per lock", r.mean("one key/"+counted+"/"+who.name, ours, "commands"))
	}
	for _, who := range contenders {
		w, what := "one key/"+distant+"/"+who.name, "one key, "+who.name+", 1 ms"
		if who.clients == 1 {
			least(what, 100, "× "+blpop, r.ratio(w, "locks/s", ours, blpop))
		} else {
			least(what+", strict", 0.95, "× "+blpop, r.ratio(w, "locks/s", oursStrict, blpop))
			most(what, 1.08, "round trips per lock", r.mean(w, ours, "round trips"))
		}
	}
	share := func(measure string) float64 { return r.mean(targetTeam, ours, measure) }
	of := fmt.Sprintf("%d processes × 16 goroutines, %v inside", processes, sections[1])
	least(of, 0.9, "share of 1 ÷ section", share("share"))
	least(of, 0.8, "slowest ÷ fastest goroutine", share("slowest/fastest"))
	most(of, 3, "longest wait ÷ (processes × (turn + section))",
		share("longest ms")/(processes*(redismutex.DefaultTurn+sections[1]).Seconds()*1000))
	beside, measured := 0.0, false
	for w := range r.Workloads {
		for _, library := range []string{ours, oursStrict} {
			if n := r.mean(w, library, "overlaps"); n >= 0 {
				beside, measured = max(n, beside), true
			}
		}
	}
	if !measured {
		beside = math.NaN()
	}
	most("several processes, the worst row", 0, "locks granted beside another", beside)
	for _, net := range []string{loopback, distant} {
		most("hand-off, strict, "+net, 1.1, "× "+blpop, r.ratio("hand-off/"+net, "µs", oursStrict, blpop))
	}
	most("hand-off, 1 ms", 1.2, "round trips", r.mean("hand-off/"+distant, ours, "round trips"))
	best := r.bestPeer("mostly reads", "locks/s", false)
	least("mostly reads", 10, "× "+pairs, r.ratio("mostly reads", "locks/s", ours, pairs))
	least("mostly reads", 6, "× best plain mutex: "+best, r.ratio("mostly reads", "locks/s", ours, best))
	least("mostly reads", 0.045, "of all locks are writes, where one in 20 is asked for", r.mean("mostly reads", ours, "writes"))
	least("mostly reads", 0.5, "slowest ÷ fastest goroutine", r.mean("mostly reads", ours, "slowest/fastest"))
	for _, net := range []string{loopback, distant} {
		many, apart := "quorum contended/"+net, "quorum processes/"+net
		least("5 nodes, 16 goroutines, "+net+", locks/s", 20, "× redsync", r.ratio(many, "locks/s", ours, redSync))
		least(fmt.Sprintf("5 nodes, %d processes, %s, hand-overs/s", quorumTeam.processes, net), 20, "× redsync", r.ratio(apart, "hand-overs/s", ours, redSync))
	}
	for _, n := range r.counts("held/") {
		w, what := fmt.Sprint("held/", n), fmt.Sprintf("%d held", n)
		most(what+", client CPU", 0.33, "× rueidislock", r.ratio(w, "CPU µs", ours, rueidisLock))
		most(what+", bytes", 0.15, "× rueidislock", r.ratio(w, "bytes", ours, rueidisLock))
		most(what, 700, "bytes for each", r.mean(w, ours, "bytes"))
	}
	if waiting := r.counts("waiters/"); len(waiting) > 0 {
		few, many := waiting[min(1, len(waiting)-1)], waiting[len(waiting)-1] // so many that what they cost is not the cost of being the first
		of := func(n int, library, measure string) float64 {
			return r.mean(fmt.Sprint("waiters/", n), library, measure)
		}
		what := fmt.Sprintf("%d waiters", many)
		most(what, 1, "waiters in Redis", of(many, ours, "in Redis"))
		most(what, 1.25, "renewals in half a TTL", of(many, ours, "renewals")) // one, and a window may begin with one
		most(what+", client CPU while they wait", 1, "% of a core", of(many, ours, "client %"))
		for _, measure := range []string{"join", "pass"} {
			most(fmt.Sprintf("%s, client CPU per %s", what, measure), 2, fmt.Sprintf("× with %d", few), of(many, ours, measure+" µs")/of(few, ours, measure+" µs"))
		}
		what += ", strict"
		most(what+", Redis busy with their renewals", 5, "%", of(many, oursStrict, "busy %"))
		for _, measure := range []string{"join", "pass"} {
			most(fmt.Sprintf("%s, script time per %s", what, measure), 2, fmt.Sprintf("× with %d", waiting[0]),
				of(many, oursStrict, measure+" script µs")/of(waiting[0], oursStrict, measure+" script µs"))
		}
		least(what+", renewals", 10, "per read", of(many, oursStrict, "renewals/read"))
	}
	var rows [][]string
	for _, t := range all {
		sign := "at most "
		if t.least {
			sign = "at least "
		}
		rows = append(rows, []string{t.what + ": " + t.of, sign + strconv.FormatFloat(t.limit, 'g', -1, 64), number(t.actual), t.met()})
	}
	return table("what|target|measured|", rows)
}

// summary returns the table of the README.
func (r *Results) summary() string {
	var rows [][]string
	add := func(what, workload, measure, who, floor string, less bool) {
		cells := []string{what, number(r.mean(workload, who, measure)), "", ""}
		if floor != "" {
			cells[2] = number(r.mean(workload, floor, measure)) + " (" + floor + ")"
		}
		if best := r.bestPeer(workload, measure, less); best != "" {
			cells[3] = number(r.mean(workload, best, measure)) + " (" + best + ")"
		}
		rows = append(rows, cells)
	}
	add("Lock + Unlock alone, µs", "serial/background", "µs/lock", ours, raw, true)
	add("the same, cancellable parent, µs", "serial/cancellable", "µs/lock", ours, raw, true)
	add("64 keys, 64 goroutines, locks/s", "64 keys/"+loopback, "locks/s", ours, raw, false)
	add("the same, AutoPipeliner, locks/s", "64 keys/"+loopback, "locks/s", oursAuto, rawAuto, false)
	for _, net := range []string{loopback, distant} {
		w := "one key/" + net + "/16 clients"
		add("one key, 16 clients, "+net+", hand-overs/s", w, "hand-overs/s", ours, blpop, false)
		add("longest wait there, ms", w, "longest ms", ours, blpop, true)
	}
	add(fmt.Sprintf("%d processes × 16 goroutines, one key, %v inside, locks/s", processes, sections[1]), targetTeam, "locks/s", ours, blpop, false)
	add("longest wait there, ms", targetTeam, "longest ms", ours, blpop, true)
	add("hand-off to another client at 1 ms, round trips", "hand-off/"+distant, "round trips", ours, blpop, true)
	add("64 goroutines, 95 % read locks, locks/s", "mostly reads", "locks/s", ours, pairs, false)
	for _, n := range r.counts("held/") {
		add(fmt.Sprintf("each of %d locks held, bytes", n), fmt.Sprint("held/", n), "bytes", ours, "", true)
		add("client CPU for it, µs a second", fmt.Sprint("held/", n), "CPU µs", ours, "", true)
	}
	return table("what|redismutex|the least that Redis can do|best peer", rows) + "\n" + r.machine()
}
