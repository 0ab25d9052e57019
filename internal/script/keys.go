package script

import (
	"fmt"
	"strings"

	"github.com/redismutex/redismutex/internal/lockerr"
)

// Keys are the names of one lock's keys in Redis. All are in the hash slot of the first, which is boxed, since go-redis
// looks for a string there; of the others calls have the address.
type Keys struct {
	holder                 any
	intents, leases, token string
}

// Name is the key that is locked.
func (k *Keys) Name() string { return k.holder.(string) }

// NewKeys forms the keys of the lock with that name. The slot of a key is that of its hash tag: what stands between its
// first "{" and the first "}" behind it, if there is anything between them.
func NewKeys(name string) (*Keys, error) {
	if name == "" {
		return nil, fmt.Errorf("%w: empty name", lockerr.ErrInvalid)
	}
	base, tagged := name, hasHashTag(name)
	switch {
	case !tagged && strings.Contains(name, "}"):
		return nil, fmt.Errorf("%w: name %q: it has a \"}\" but no hash tag, so the lock's other keys could not be in its slot", lockerr.ErrInvalid, name)
	case !tagged:
		base = "{" + name + "}:"
	case name[0] == '{' && strings.IndexByte(name, '}') == len(name)-1:
		base += ":its-" // otherwise the keys would be those of the lock whose name is the tag
	default:
		base += ":"
	}
	for _, suffix := range []string{"lock-intent", "lease", "token"} {
		if tagged && (strings.HasSuffix(name, ":"+suffix) || strings.HasSuffix(name, ":its-"+suffix)) {
			return nil, fmt.Errorf("%w: name %q: it is the name of a key of another lock", lockerr.ErrInvalid, name)
		}
	}
	// One string for all of them: a held lock keeps it.
	all := base + "lock-intent" + base + "lease" + base + "token"
	intents, rest := all[:len(base)+len("lock-intent")], all[len(base)+len("lock-intent"):]
	if !tagged {
		name = all[1 : 1+len(name)]
	}
	return &Keys{name, intents, rest[:len(base)+len("lease")], rest[len(base)+len("lease"):]}, nil
}

func hasHashTag(name string) bool {
	_, rest, open := strings.Cut(name, "{")
	tag, _, closed := strings.Cut(rest, "}")
	return open && closed && tag != ""
}

// Intents is the key of the queue.
func (k *Keys) Intents() string { return k.intents }

// Leases is the key of the leases.
func (k *Keys) Leases() string { return k.leases }

// Token is the key of the fencing token.
func (k *Keys) Token() string { return k.token }
