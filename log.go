package redismutex

import (
	"log"
	"os"

	"github.com/redismutex/redismutex/internal/logger"
)

// A LogFunc prints one line, in the manner of [log.Printf].
type LogFunc func(format string, v ...any)

// NopLog is a [LogFunc] that prints nothing.
func NopLog(string, ...any) {}

func init() { SetLog(log.New(os.Stderr, "", log.LstdFlags).Printf) }

// SetLog sets the logger of the package, for all mutexes without [WithLogger]. Its lines begin with "[ERROR] redismutex:"
// and go to standard error by default. If lines of one kind repeat within a second, the first five are logged, and one more
// line gives the number of the others. A nil LogFunc is [NopLog]. SetLog is safe for concurrent use.
func SetLog(l LogFunc) {
	if l == nil {
		l = NopLog
	}
	logger.Set(logger.Func(l))
}
