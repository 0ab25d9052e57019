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

// behind has the variants of unlock and refresh that are sent behind an acquire, in one round trip. Each has a digest of its own,
// and a server gets its text only behind that of the acquire. A server that knew unlock, but not the acquire, would release
// first, and grant the lock to another process.
var behind = map[[2]*Script]*Script{}

func init() {
	for _, first := range []*Script{Lock, RLock} {
		for _, second := range []*Script{Unlock, Refresh} {
			behind[[2]*Script{first, second}] = second.Variant(second.Source() + "-- behind " + first.Digest())
		}
	}
}

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

// Variant returns the same verb with another text.
func (s *Script) Variant(source string) *Script { return newScript(source, s.short) }

// Source returns the Lua text.
func (s *Script) Source() string { return s.source.(string) }

// Digest returns the SHA-1 of the text, by which a server knows it.
func (s *Script) Digest() string { return s.digest.(string) }
