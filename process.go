package redismutex

import "github.com/redismutex/redismutex/internal/node"

// SetProcessName names this process in every id that it uses in Redis, in place of its host and process number. An id is
// then "redismutex:<name>/<random>.<client>:<n>". Operators see it in Redis, in [HeldError] and in the log. A name has 1 to
// 48 bytes, letters, digits and -_./ of ASCII; it need not be unique. Any other name fails with [ErrInvalid], as does any
// call after the first mutex was made. It is safe for concurrent use.
func SetProcessName(name string) error { return node.SetProcessName(name) }
