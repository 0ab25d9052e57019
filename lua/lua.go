// Package lua holds the scripts. (Placeholder until the scripts' own change is merged.)
package lua

import (
	"embed"
	"regexp"
)

//go:embed *.lua
var files embed.FS

var include = regexp.MustCompile(`(?m)^-- include (\w+)\.lua$`)

// Source returns the text of a verb.
func Source(verb string) string {
	return include.ReplaceAllStringFunc(read(verb), func(line string) string {
		return read(include.FindStringSubmatch(line)[1])
	})
}

func read(name string) string {
	text, err := files.ReadFile(name + ".lua")
	if err != nil {
		panic(err)
	}
	return string(text)
}
