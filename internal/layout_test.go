// Package internal_test holds the direction of imports.
package internal_test

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/redismutex/redismutex"

// layers are the packages of the library from top to bottom. A package may import those below its own layer.
var layers = [][]string{
	{""},
	{"/internal/acquisition"},
	{"/internal/node"},
	{"/internal/mailbox", "/internal/script", "/internal/quorum", "/internal/logger"},
	{"/lua", "/internal/lockerr", "/internal/clock"},
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
