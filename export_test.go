package redismutex

// Source is the text of a script: lock, rlock, refresh or unlock. A test that
// waylays its calls on the network knows them by its digest.
func Source(verb string) string {
	return map[string]*script{
		"lock": lockScript, "rlock": rlockScript, "refresh": refreshScript, "unlock": unlockScript,
	}[verb].source.(string)
}
