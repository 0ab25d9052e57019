// Package script calls the Lua scripts of package lua. It is the one place that knows the order of their arguments and
// the form of their replies.
package script

import (
	"crypto/sha1"
	"encoding/hex"

	"github.com/redismutex/redismutex/lua"
)

// The verbs that change something.
var (
	Lock    = load("lock", Granted)
	RLock   = load("rlock", Granted)
	Refresh = load("refresh", Granted)
	Unlock  = load("unlock", Released)
	Revoke  = load("revoke", Released)
)

// A Script is one verb. Its source and digest are boxed once, for the arguments of every call.
type Script struct {
	source any
	digest any
	short  Status // what a short reply means
}

func load(verb string, short Status) *Script { return newScript(lua.Source(verb), short) }

func newScript(source string, short Status) *Script {
	digest := sha1.Sum([]byte(source))
	return &Script{source, hex.EncodeToString(digest[:]), short}
}

// Variant returns the same verb with another text, for tests.
func (s *Script) Variant(source string) *Script { return newScript(source, s.short) }

// Source returns the Lua text.
func (s *Script) Source() string { return s.source.(string) }

// Digest returns the SHA-1 of the text, by which a server knows it.
func (s *Script) Digest() string { return s.digest.(string) }
