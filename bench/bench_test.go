package main

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redismutex/redismutex/internal/redistest"
)

// The program runs its own binary as other processes; in a test, that is the test binary.
func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		if err := childMain(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// A process that the race detector watches sleeps for a second before it exits, and a quick run starts hundreds of them.
	os.Setenv("GORACE", strings.TrimSpace(os.Getenv("GORACE")+" atexit_sleep_ms=0"))
	os.Exit(m.Run())
}

// Each library except EVALSHA pairs lets one goroutine at a time hold the lock, whatever client it uses, and grants the lock again
// after an unlock.
func TestLocksExclude(t *testing.T) {
	addr := redistest.Start(t).Addr()
	for _, library := range append([]string{ours, oursStrict, oursAuto, blpop, blpopAuto}, peers...) {
		t.Run(library, func(t *testing.T) {
			// A waiter that a peer never wakes tries again.
			acquire := func(l lock) (unlock func() error, cancel context.CancelFunc, err error) {
				for range 10 {
					ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
					if unlock, err = l(ctx); err == nil {
						return unlock, cancel, nil
					}
					cancel()
				}
				return nil, nil, err
			}
			var inside atomic.Int32
			var all sync.WaitGroup
			for range 2 {
				c, err := open(library, addr)
				if err != nil {
					t.Fatal(err)
				}
				defer c.close()
				for range 2 {
					l := c.lock(library)
					all.Go(func() {
						for range 5 {
							unlock, cancel, err := acquire(l)
							if err != nil {
								t.Error(err)
								return
							}
							if n := inside.Add(1); n != 1 {
								t.Errorf("want 1 goroutine inside, got %d", n)
							}
							time.Sleep(time.Millisecond) // the load: the work inside the lock
							inside.Add(-1)
							if err := unlock(); err != nil {
								t.Error(err)
							}
							cancel()
						}
					})
				}
			}
			all.Wait()
		})
	}
}

func TestRawLockExcludesAndDoesNotWait(t *testing.T) {
	addr := redistest.Start(t).Addr()
	for _, library := range []string{raw, rawAuto} {
		c, err := open(library, addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.close()
		first, second := c.lock(library), c.lock(library)
		unlock, err := first(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := second(t.Context()); !errors.Is(err, errHeld) {
			t.Errorf("%s: %v", library, err)
		}
		if err := unlock(); err != nil {
			t.Error(err)
		}
		if _, err := second(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// A quick run of every workload fills each row of each table, and the JSON suffices to render them again.
func TestQuickRunFillsEveryTable(t *testing.T) {
	redistest.Start(t) // skips the test without a server
	root := t.TempDir()
	write(t, filepath.Join(root, docFile), "before\n"+begin+end+"after\n")
	write(t, filepath.Join(root, readmeFile), begin+"old\n"+end)
	var told, progress strings.Builder
	if err := runCommand([]string{"-quick", "-pin=false", "-root", root}, &told, &progress); err != nil {
		t.Fatal(err)
	}
	for _, library := range append([]string{ours, oursStrict, oursAuto, raw, rawAuto, blpop, blpopAuto, pairs}, peers...) {
		if !strings.Contains(told.String(), library) {
			t.Errorf("want %s in the tables, it is not", library)
		}
	}
	if n := strings.Count(told.String(), "not measured"); n > 1 { // a quick run may end before a lease is renewed
		t.Errorf("want all targets but one measured at least, %d were not:\n%s", n, &told)
	}
	if !strings.Contains(progress.String(), "round 1 of 1") {
		t.Error("want the progress shown, it is not")
	}
	if text := read(t, filepath.Join(root, docFile)); !strings.Contains(text, told.String()) || !strings.HasSuffix(text, "after\n") {
		t.Errorf("want the printed tables in %s, it has\n%s", docFile, text)
	}
	if text := read(t, filepath.Join(root, readmeFile)); strings.Contains(text, "old") || !strings.Contains(text, "| one key, 16 clients") {
		t.Errorf("%s:\n%s", readmeFile, text)
	}
	for _, chart := range []string{throughput, waitsChart} {
		wellFormed(t, filepath.Join(root, chart))
	}
	var again strings.Builder
	if err := runCommand([]string{"-render", "-root", root}, &again, io.Discard); err != nil || again.String() != told.String() {
		t.Errorf("want the same tables from the JSON, got %v\n%s", err, &again)
	}
}

// Earlier results of workloads that -only excludes are kept.
func TestOnlySomeAreMeasured(t *testing.T) {
	redistest.Start(t) // skips the test without a server
	root := t.TempDir()
	write(t, filepath.Join(root, jsonFile), `{"Workloads": {"held/7": {"redismutex": {"Samples": [{"bytes": 1234}]}}}}`)
	var told strings.Builder
	if err := runCommand([]string{"-quick", "-pin=false", "-root", root, "-only", "^serial/background$"}, &told, io.Discard); err != nil {
		t.Fatal(err)
	}
	results, err := load(filepath.Join(root, jsonFile))
	if err != nil || len(results.Workloads) != 2 || !strings.Contains(told.String(), "1234") {
		t.Errorf("%v\n%s", err, &told)
	}
}

// Processes of a team exclude each other and hand the lock over, and the figures show that. That they can show otherwise, a lock that
// excludes nobody shows.
func TestTeamMeasuresExclusion(t *testing.T) {
	addr := redistest.Start(t).Addr()
	b := &bench{dir: t.TempDir()}
	const section = time.Millisecond
	measure := func(library string, enough func(sample) bool) (s sample) {
		t.Helper()
		turner, err := b.together(team{processes: 2, goroutines: 2, section: section}, addr)(library)
		if err != nil {
			t.Fatal(err)
		}
		for range 20 { // on a busy machine one turn may not be enough
			if s, _, err = turner.turn(300 * time.Millisecond); err != nil || enough(s) {
				break
			}
		}
		if err := errors.Join(err, turner.close()); err != nil {
			t.Fatal(err)
		}
		return s
	}
	for _, library := range []string{ours, oursStrict} {
		s := measure(library, func(s sample) bool { return s["overlaps"] > 0 || s["within/s"] > 0 && s["between/s"] > 0 })
		if s["overlaps"] != 0 {
			t.Errorf("%s: want one lock at a time, got %v", library, s)
		}
		if s["within/s"] <= 0 || s["between/s"] <= 0 || s["share"] != s["locks/s"]*section.Seconds() {
			t.Errorf("%s: want hand-overs within the processes and between them, got %v", library, s)
		}
		if s["within µs"] <= 0 || s["between µs"] <= 0 {
			t.Errorf("%s: want to know how long a hand-over takes, got %v", library, s)
		}
	}
	if s := measure(pairs, func(s sample) bool { return s["overlaps"] > 0 }); s["overlaps"] == 0 {
		t.Errorf("%s: want locks at the same time, got %v", pairs, s)
	}
}

func TestMeetingTellsHandOversApart(t *testing.T) {
	var m meeting
	for i, step := range []struct {
		process, goroutine int
		want               predecessor
	}{{1, 0, otherProcess}, {1, 0, sameGoroutine}, {1, 1, sameProcess}, {0, 1, otherProcess}, {0, 0, sameProcess}} {
		if last, beside := m.enter(step.process, step.goroutine); last != step.want || beside {
			t.Errorf("step %d: want %v and nobody beside, got %v, %v", i, step.want, last, beside)
		}
		m.inside.Add(-1)
	}
	m.enter(0, 0)
	if _, beside := m.enter(1, 0); !beside {
		t.Error("want the second reported beside the first, it is not")
	}
}

func TestMeetingTellsHowLongNobodyWasInside(t *testing.T) {
	var m meeting
	if d := m.begin(); d != 0 {
		t.Errorf("%v before the first section, want 0", d)
	}
	m.end()
	spend(time.Millisecond)
	if d := m.begin(); d < time.Millisecond/2 || d > time.Hour { // the clock may be adjusted
		t.Errorf("%v between two sections, want at least a millisecond", d)
	}
}

func TestSpendIsNeverShort(t *testing.T) {
	for _, d := range []time.Duration{50 * time.Microsecond, 200 * time.Microsecond, 2 * time.Millisecond} {
		start := time.Now()
		if spend(d); time.Since(start) < d {
			t.Errorf("want at least %v spent, it was %v", d, time.Since(start))
		}
	}
}

// Goroutines that share turns are one waiter in Redis; strict ones all wait there.
func TestWaitersInRedis(t *testing.T) {
	const n = 300 // more than the connections
	for library, want := range map[string]float64{ours: 1, oursStrict: n} {
		addr := redistest.Start(t).Addr()
		waiter, err := open(library, addr)
		if err != nil {
			t.Fatal(err)
		}
		defer waiter.close()
		rc := dial(addr)
		defer rc.Close()
		s, err := wait(rc, waiter, "key", n, 10*time.Millisecond, library == oursStrict)
		if err != nil || s["in Redis"] != want {
			t.Errorf("%s: want %v in Redis, got %v, %v", library, want, s, err)
		}
	}
}

func TestProxyDelaysAndCounts(t *testing.T) {
	const each = 2 * time.Millisecond
	p, err := startProxy("", each, redistest.Start(t).Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	rc := dial(p.addrs[0])
	defer rc.Close()
	if err := rc.Ping(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	before, err := p.commands()
	if err != nil {
		t.Fatal(err)
	}
	const pings = 10
	start := time.Now()
	for i := range pings {
		if err := rc.Set(t.Context(), "key", fmt.Sprintf("*%d\r\n$3\r\n", i), 0).Err(); err != nil { // a value that looks like a command
			t.Fatal(err)
		}
	}
	if took := time.Since(start); took < 2*each*pings {
		t.Errorf("want %d round trips delayed, they took %v", pings, took)
	}
	if after, err := p.commands(); err != nil || after-before != pings {
		t.Errorf("want every command counted once, got %d, %v", after-before, err)
	}
}

// The counter counts each command once, however the bytes are split.
func TestCounterReadsPieces(t *testing.T) {
	const text = "*2\r\n$4\r\nECHO\r\n$8\r\n*1\r\n$1\r\n\r\n*1\r\n$4\r\nPING\r\n"
	for size := 1; size <= len(text); size++ {
		var c counter
		var n int64
		for rest := []byte(text); len(rest) > 0; rest = rest[min(size, len(rest)):] {
			n += c.count(rest[:min(size, len(rest))])
		}
		if n != 2 {
			t.Errorf("want every command counted once in pieces of %d bytes, got %d", size, n)
		}
	}
}

func TestJain(t *testing.T) {
	for want, counts := range map[float64][]int{1: {7, 7, 7}, 0.25: {0, 9, 0, 0}, 0.9: {1, 2}} {
		if got := jain(counts); math.Abs(got-want) > 1e-9 {
			t.Errorf("%v: want %v, got %v", counts, want, got)
		}
	}
}

func TestRatioIsTheMedianOfTheRounds(t *testing.T) {
	samples := func(values ...float64) *Rounds {
		r := &Rounds{}
		for _, v := range values {
			r.Samples = append(r.Samples, sample{"x": v})
		}
		return r
	}
	r := &Results{Workloads: map[string]map[string]*Rounds{"w": {ours: samples(2, 40, 9), redSync: samples(1, 10, 3), goZero: samples(5)}}}
	if got := r.ratio("w", "x", ours, redSync); got != 3 {
		t.Errorf("want 3, got %v", got)
	}
	if most, least := r.bestPeer("w", "x", false), r.bestPeer("w", "x", true); most != goZero || least != redSync {
		// 5, and 14/3
		t.Errorf("want %s and %s, got %s and %s", goZero, redSync, most, least)
	}
	if !math.IsNaN(r.ratio("w", "x", ours, raw)) || !math.IsNaN(r.mean("none", ours, "x")) {
		t.Error("want NaN for what was not measured, got a value")
	}
}

func wellFormed(t *testing.T, path string) {
	t.Helper()
	text := read(t, path)
	for d := xml.NewDecoder(strings.NewReader(text)); ; {
		if _, err := d.Token(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	if !regexp.MustCompile(`>redismutex<`).MatchString(text) {
		t.Errorf("want %s to name the library, it does not", path)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
