package redismutex

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The docs cite tests by name.
func TestDocsNameTestsThatExist(t *testing.T) {
	defined := map[string]bool{}
	err := filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, f := range regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`).FindAllStringSubmatch(string(source), -1) {
			defined[f[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	docs, err := filepath.Glob("docs/*.md")
	if err != nil || len(docs) == 0 {
		t.Fatalf("%q, %v", docs, err)
	}
	for _, file := range append(docs, "README.md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w+`).FindAllString(string(text), -1) {
			if !defined[name] {
				t.Errorf("%s names %s: there is no such test", file, name)
			}
		}
	}
}

// The session in docs/testing.md can be run: its code is that of examples/shop, but for the bug that it shows.
func TestTestingPageShowsTheShop(t *testing.T) {
	read := func(file string) string {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	shop, tests := read("examples/shop/shop.go"), read("examples/shop/shop_test.go")
	parts := regexp.MustCompile(`(?ms)^func .*?^}$`).FindAllString(read("docs/testing.md"), -1)
	if len(parts) < 5 {
		t.Errorf("docs/testing.md has %d functions, want those of examples/shop", len(parts))
	}
	for _, part := range parts {
		const late, early = "	defer lock.Unlock()\n	return s.take", "	return err\n	}\n	left, err"
		fixed := strings.Replace(strings.Replace(part, late, "	return s.take", 1), early, "	return err\n	}\n	defer lock.Unlock()\n	left, err", 1)
		if !strings.Contains(shop, fixed) && !strings.Contains(tests, fixed) {
			t.Errorf("examples/shop does not have this of docs/testing.md:\n%s", part)
		}
	}
}
