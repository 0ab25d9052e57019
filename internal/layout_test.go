// Package internal_test holds the direction of imports, and rules for all files.
package internal_test

import (
	"io/fs"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/redismutex/redismutex"

// layers are the packages of the library from top to bottom. A package may import those below its own layer.
var layers = [][]string{
	{"/redismutextest"},
	{""},
	{"/internal/localqueue"},
	{"/internal/acquisition"},
	{"/internal/node"},
	{"/internal/mailbox", "/internal/script", "/internal/logger"},
	{"/lua", "/internal/lockerr", "/internal/clock"},
	{"/internal/redistest"},
	{"/internal/faultnet"},
}

func TestImportsGoDownward(t *testing.T) {
	layerOf := map[string]int{}
	for i, layer := range layers {
		for _, p := range layer {
			layerOf[module+p] = i
		}
	}
	seen := map[string]bool{}
	for _, p := range slices.Concat(layers...) {
		out, err := exec.Command("go", "list", "-f", `{{join .Imports "\n"}}`, module+p).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		seen[module+p] = true
		for _, imported := range strings.Fields(string(out)) {
			if !strings.HasPrefix(imported, module) {
				continue
			}
			layer, known := layerOf[imported]
			if !known {
				t.Errorf("%s imports %s, which has no layer", module+p, imported)
			} else if layer <= layerOf[module+p] {
				t.Errorf("%s imports %s, which is not below it", module+p, imported)
			}
		}
	}
	if !seen[module] || len(seen) < 10 {
		t.Errorf("%d packages were looked at", len(seen))
	}
}

// A program that imports the library builds neither a Redis nor fixtures of tests.
func TestLibraryBuildsNoFixtures(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", module).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	deps := strings.Fields(string(out))
	fixture := regexp.MustCompile(`^testing$|/miniredis/|/(redistest|faultnet|redismutextest)$`)
	for _, p := range deps {
		if fixture.MatchString(p) {
			t.Errorf("the library builds %s", p)
		}
	}
	if !slices.Contains(deps, module+"/internal/localqueue") {
		t.Errorf("want the packages of the library, got %q", deps)
	}
}

// inRealTime are the tests that may sleep in real time: the sleep is a load or a fault.
var inRealTime = []string{"bench_crowd_test.go", "internal/chaos/"}

// Other tests let virtual time pass with redistest.Elapse. A test that waits for an event must not sleep instead.
func TestSleepsPassVirtualTime(t *testing.T) {
	root := os.DirFS("..")
	checked := 0
	err := fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path == "bench": // a module of its own, which measures
			return fs.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") ||
			slices.ContainsFunc(inRealTime, func(prefix string) bool { return strings.HasPrefix(path, prefix) }) {
			return nil
		}
		text, err := fs.ReadFile(root, path)
		checked++
		if strings.Contains(string(text), "time.Sleep"+"(") {
			t.Errorf("%s sleeps in real time: let it use redistest.Elapse or wait for an event", path)
		}
		return err
	})
	if err != nil || checked < 50 {
		t.Fatalf("%d files checked, %v", checked, err)
	}
}

// docs/design.md names for each promise, and for each rule of the turns, the functions that keep it, with links to their
// files.
func TestDesignNamesWhatExists(t *testing.T) {
	page, err := os.ReadFile("../docs/design.md")
	if err != nil {
		t.Fatal(err)
	}
	for title, least := range map[string]int{"## Where each promise is kept": 20, "## Turns": 15} {
		_, table, found := strings.Cut(string(page), title+"\n")
		table, _, ended := strings.Cut(table, "\n## ")
		if !found || !ended {
			t.Fatalf("docs/design.md has no %q", title)
		}
		if n := checkTable(t, table); n < least {
			t.Errorf("%s: %d names were checked, want %d or more", title, n, least)
		}
	}
}

// checkTable checks that each name in a cell is in the files that are linked beside it, and returns how many there are.
func checkTable(t *testing.T, table string) (checked int) {
	for _, cell := range strings.FieldsFunc(table, func(r rune) bool { return r == '|' || r == '\n' }) {
		var text string
		for _, link := range regexp.MustCompile(`\]\(\.\./([^)]+)\)`).FindAllStringSubmatch(cell, -1) {
			source, err := os.ReadFile("../" + link[1])
			if err != nil {
				t.Error(err)
			}
			text += string(source)
		}
		if text == "" {
			continue
		}
		cell = regexp.MustCompile(`\[[^\]]*\]`).ReplaceAllString(cell, "")
		for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cell, -1) {
			checked++
			last := name[1][strings.LastIndexByte(name[1], '.')+1:]
			if !strings.Contains(text, last) {
				t.Errorf("%q is not in the files that are linked beside it", name[1])
			}
		}
	}
	return checked
}
