// Package lua holds the scripts that run in Redis: one file per verb, lib/ with what the verbs share, fast/ with their fast
// paths, which may be left out, and both.lua, which calls two verbs.
package lua

import (
	"embed"
	"errors"
	"io/fs"
	"regexp"
	"strings"
)

// A pattern that matched the files of fast/ alone would not allow for there being none.
//
//go:embed *.lua */*.lua
var files embed.FS

// include matches a line that includes a file, at the top level of the one that has it.
var include = regexp.MustCompile(`(?m)^-- include (\w+/\w+\.lua)$`)

// Source returns the script of a verb. A file that is included more than once stands where it is first included; one of
// fast/ that does not exist is left out.
func Source(verb string) string {
	return assemble(files, verb+".lua", map[string]bool{})
}

// comments matches lines that are nothing else.
var comments = regexp.MustCompile(`(?m)^\s*--.*\n`)

// Both returns the script that calls two verbs, one after the other. It has no comments: so a command with it fits into the
// buffers of go-redis, of 32 KiB.
func Both(first, second string) string {
	source := strings.NewReplacer("-- first verb\n", Source(first), "-- second verb\n", Source(second)).Replace(Source("both"))
	return comments.ReplaceAllString(source, "")
}

// SlowSource returns the script of a verb without its fast paths, for tests.
func SlowSource(verb string) string {
	return assemble(slow{files}, verb+".lua", map[string]bool{})
}

// slow is a file system without fast/.
type slow struct{ fs.FS }

func (s slow) Open(name string) (fs.File, error) {
	if strings.HasPrefix(name, "fast/") {
		return nil, fs.ErrNotExist
	}
	return s.FS.Open(name)
}

func assemble(from fs.FS, file string, included map[string]bool) string {
	if included[file] {
		return ""
	}
	included[file] = true
	text, err := fs.ReadFile(from, file)
	if errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(file, "fast/") {
		return ""
	} else if err != nil {
		panic(err) // go:embed has seen the file, unless a script includes what is not there
	}
	return include.ReplaceAllStringFunc(string(text), func(line string) string {
		return assemble(from, include.FindStringSubmatch(line)[1], included)
	})
}
