package redismutex

import "github.com/redismutex/redismutex/internal/script"

// Source is the text of a script: lock, rlock, refresh or unlock. A test that intercepts its calls on the network knows
// them by its digest.
func Source(verb string) string {
	return map[string]*script.Script{
		"lock": script.Lock, "rlock": script.RLock, "refresh": script.Refresh, "unlock": script.Unlock,
	}[verb].Source()
}
