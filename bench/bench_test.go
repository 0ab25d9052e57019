package main

// This file answers: does the program measure what it says?

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

// The program starts itself as other processes: here that is the test's binary.
func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		if err := childMain(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// Of each library but the one that says so, one at a time is inside, whatever client it came by; and who has unlocked stands in
// nobody's way.
func TestLocksExclude(t *testing.T) {
	addr := redistest.Start(t).Addr()
	for _, library := range append([]string{ours, oursAuto, blpop, blpopAuto}, peers...) {
		t.Run(library, func(t *testing.T) {
			// Who is not woken, as happens with a peer, asks again.
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
								t.Errorf("%d inside", n)
							}
							time.Sleep(time.Millisecond) // time enough to meet somebody
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

// A moment of everything: each row of each table is there, and the JSON is enough to tell it again.
func TestQuickRunTellsEverything(t *testing.T) {
	redistest.Start(t) // or skip
	root := t.TempDir()
	write(t, filepath.Join(root, docFile), "before\n"+begin+end+"after\n")
	write(t, filepath.Join(root, readmeFile), begin+"old\n"+end)
	var told, progress strings.Builder
	if err := bid([]string{"-quick", "-pin=false", "-root", root}, &told, &progress); err != nil {
		t.Fatal(err)
	}
	for _, library := range append([]string{ours, oursAuto, raw, rawAuto, blpop, blpopAuto, pairs}, peers...) {
		if !strings.Contains(told.String(), library) {
			t.Errorf("nothing of %s", library)
		}
	}
	if n := strings.Count(told.String(), "not measured"); n > 1 { // in a moment no lease is renewed, perhaps
		t.Errorf("%d targets were not measured:\n%s", n, &told)
	}
	if !strings.Contains(progress.String(), "round 1 of 1") {
		t.Error("no progress is shown")
	}
	if text := read(t, filepath.Join(root, docFile)); !strings.Contains(text, told.String()) || !strings.HasSuffix(text, "after\n") {
		t.Errorf("%s has not what was told:\n%s", docFile, text)
	}
	if text := read(t, filepath.Join(root, readmeFile)); strings.Contains(text, "old") || !strings.Contains(text, "| one key, 16 clients") {
		t.Errorf("%s:\n%s", readmeFile, text)
	}
	for _, chart := range []string{throughput, waitsChart} {
		wellFormed(t, filepath.Join(root, chart))
	}
	var again strings.Builder
	if err := bid([]string{"-render", "-root", root}, &again, io.Discard); err != nil || again.String() != told.String() {
		t.Errorf("told otherwise from the JSON: %v\n%s", err, &again)
	}
}

// What was measured of other workloads before stays.
func TestOnlySomeAreMeasured(t *testing.T) {
	redistest.Start(t) // or skip
	root := t.TempDir()
	write(t, filepath.Join(root, jsonFile), `{"Workloads": {"held/7": {"redismutex": {"Samples": [{"bytes": 1234}]}}}}`)
	var told strings.Builder
	if err := bid([]string{"-quick", "-pin=false", "-root", root, "-only", "^serial/background$"}, &told, io.Discard); err != nil {
		t.Fatal(err)
	}
	results, err := load(filepath.Join(root, jsonFile))
	if err != nil || len(results.Workloads) != 2 || !strings.Contains(told.String(), "1234") {
		t.Errorf("%v\n%s", err, &told)
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
		t.Errorf("%d round trips took %v", pings, took)
	}
	if after, err := p.commands(); err != nil || after-before != pings {
		t.Errorf("%d commands, %v", after-before, err)
	}
}

// However the bytes are cut up.
func TestCounterReadsPieces(t *testing.T) {
	const text = "*2\r\n$4\r\nECHO\r\n$8\r\n*1\r\n$1\r\n\r\n*1\r\n$4\r\nPING\r\n"
	for size := 1; size <= len(text); size++ {
		var c counter
		var n int64
		for rest := []byte(text); len(rest) > 0; rest = rest[min(size, len(rest)):] {
			n += c.count(rest[:min(size, len(rest))])
		}
		if n != 2 {
			t.Errorf("in pieces of %d: %d commands", size, n)
		}
	}
}

func TestJain(t *testing.T) {
	for want, counts := range map[float64][]int{1: {7, 7, 7}, 0.25: {0, 9, 0, 0}, 0.9: {1, 2}} {
		if got := jain(counts); math.Abs(got-want) > 1e-9 {
			t.Errorf("%v: %v, want %v", counts, got, want)
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
		t.Errorf("%v, want 3", got)
	}
	if most, least := r.bestPeer("w", "x", false), r.bestPeer("w", "x", true); most != goZero || least != redSync {
		// 5, and 14/3
		t.Errorf("most: %s, least: %s", most, least)
	}
	if !math.IsNaN(r.ratio("w", "x", ours, raw)) || !math.IsNaN(r.mean("none", ours, "x")) {
		t.Error("what was not measured has a value")
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
		t.Errorf("%s does not name the library", path)
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
