package main

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
)

type modFile struct {
	Require []requirement
}

type requirement struct {
	Path     string
	Indirect bool
}

// The library requires none of the direct requirements of this module, not even indirectly: neither the peers nor the charts.
func TestLibraryRequiresNoPeer(t *testing.T) {
	library := map[string]bool{}
	for _, r := range parse(t, "../go.mod").Require {
		library[r.Path] = true
	}
	peers := 0
	for _, r := range parse(t, "go.mod").Require {
		if r.Indirect || r.Path == "github.com/redis/go-redis/v9" || strings.HasPrefix(r.Path, "github.com/redismutex/") ||
			r.Path == "golang.org/x/sys" {
			continue
		}
		peers++
		if library[r.Path] {
			t.Errorf("want ../go.mod not to require %s, it does", r.Path)
		}
	}
	if peers == 0 {
		t.Error("want peers to check, found none")
	}
}

func parse(t *testing.T, path string) (mod modFile) {
	t.Helper()
	out, err := exec.Command("go", "mod", "edit", "-json", path).Output()
	if err == nil {
		err = json.Unmarshal(out, &mod)
	}
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return mod
}
