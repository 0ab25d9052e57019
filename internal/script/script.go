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

var both = map[[2]*Script]*Script{
	{Lock, Unlock}: newScript(lua.Both("lock", "unlock"), 0), {Lock, Refresh}: newScript(lua.Both("lock", "refresh"), 0),
	{RLock, Unlock}: newScript(lua.Both("rlock", "unlock"), 0), {RLock, Refresh}: newScript(lua.Both("rlock", "refresh"), 0),
}

// Both returns the script that calls two verbs: an acquire, and behind it a release or a downgrade.
func Both(acquire, second *Script) *Script { return both[[2]*Script{acquire, second}] }

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

// Source returns the Lua text.
func (s *Script) Source() string { return s.source.(string) }

// Digest returns the SHA-1 of the text, by which a server knows it.
func (s *Script) Digest() string { return s.digest.(string) }
