package lua

import (
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var verbs = []string{"lock", "rlock", "refresh", "unlock", "inspect", "revoke"}

func TestEveryFileIsPartOfAScript(t *testing.T) {
	included := map[string]bool{}
	for _, verb := range append(verbs, "both") {
		assemble(files, verb+".lua", included)
	}
	err := fs.WalkDir(files, ".", func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && !included[path] {
			t.Errorf("no script includes %s", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func TestFilesAreIncludedOnce(t *testing.T) {
	for _, verb := range verbs {
		for name, source := range map[string]string{"": Source(verb), " without fast paths": SlowSource(verb)} {
			for _, clock := range []string{"call('TIME')", "local HOLDER, INTENTS, LEASES, TOKEN ="} {
				if n := strings.Count(source, clock); n != 1 {
					t.Errorf("%s%s: %d times %q, want once", verb, name, n, clock)
				}
			}
		}
	}
}

// What counts the commands that a script runs, and what compares the fast paths with the slow ones.
const costs = "^Test(HotScriptsRunFewCommands|TombstonesSlowNobodyDown|FastPathsAgreeWithTheSlow)$"

// The ten promises, as rwmutex_test.go shows them.
const promises = "^Test(WriterExcludesEverybody|ContextEndsNoLaterThanTheLease|NobodyTouchesTheLeaseOfAnother|" +
	"RepeatedRequestCountsOnce|WhateverFreesTheLockHandsItOn|FirstComeFirstServed|GrantIsOneMessageToOneProcess|" +
	"NothingStaysInRedis|EveryTokenIsGreaterThanThoseBefore|ErrorSaysWhatHappened)$"

// declared matches what declares names: locals, functions with their parameters, and the variables of loops.
var (
	declared   = regexp.MustCompile(`\blocal function (\w+)|\blocal ([\w, ]+)|\bfor ([\w, ]+) (?:in|=) `)
	parameters = regexp.MustCompile(`\bfunction ?\w*\(([\w, ]*)\)`)
)

// A name at the top level of a file is declared once in a script, and no block or function declares it for itself.
func TestNameHasOneMeaningInAScript(t *testing.T) {
	for _, verb := range verbs {
		for which, source := range map[string]string{"": Source(verb), " without fast paths": SlowSource(verb)} {
			times, inner := map[string]int{}, map[string]bool{}
			for line := range strings.Lines(source) {
				code, _, _ := strings.Cut(line, "--")
				for _, d := range declared.FindAllStringSubmatch(code, -1) {
					for _, name := range strings.FieldsFunc(d[1]+" "+d[2]+" "+d[3], func(r rune) bool { return r == ',' || r == ' ' }) {
						if strings.HasPrefix(code, "local") {
							times[name]++
						} else {
							inner[name] = true
						}
					}
				}
				for _, d := range parameters.FindAllStringSubmatch(code, -1) {
					for _, name := range strings.Split(d[1], ", ") {
						inner[name] = true
					}
				}
			}
			for name, n := range times {
				if n > 1 || inner[name] {
					t.Errorf("%s%s: %s is declared %d times at the top level, within a block: %v", verb, which, name, n, inner[name])
				}
			}
			if times["HOLDER"] != 1 || !inner["index"] && !inner["id"] {
				t.Errorf("%s%s: the test sees no declarations: %v, %v", verb, which, times, inner)
			}
		}
	}
}

// The law of fast/: without it every promise is kept, and every test of the scripts passes but those that count costs.
func TestFastPathsMayBeDeleted(t *testing.T) {
	if testing.Short() {
		t.Skip("it builds and runs the tests of the scripts")
	}
	list := map[string]map[string]string{"Replace": {}}
	fast, err := filepath.Glob("fast/*.lua")
	if err != nil || len(fast) == 0 {
		t.Fatalf("fast paths: %q, %v", fast, err)
	}
	for _, file := range fast {
		path, err := filepath.Abs(file)
		if err != nil {
			t.Fatal(err)
		}
		list["Replace"][path] = "" // it is as if there were no such file
	}
	text, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	overlay := filepath.Join(t.TempDir(), "overlay.json")
	if err := os.WriteFile(overlay, text, 0o600); err != nil {
		t.Fatal(err)
	}
	for what, args := range map[string][]string{"scripts": {"../internal/script", "-skip=" + costs}, "promises": {"..", "-run=" + promises}} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			run := exec.CommandContext(t.Context(), "go", append([]string{"test", "-count=1", "-short", "-vet=off", "-timeout=2m", "-overlay=" + overlay}, args...)...)
			if out, err := run.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
