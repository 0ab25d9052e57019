package redismutex

// This file answers: where does it go what no caller is there to be told?

import (
	"context"
	"log"
	"log/slog"
	"os"
	"sync/atomic"
)

// A LogFunc prints one line, in the manner of [log.Printf].
type LogFunc func(format string, v ...any)

// NopLog is a [LogFunc] that prints nothing.
func NopLog(string, ...any) {}

var packageLog atomic.Pointer[LogFunc]

func init() { SetLog(log.New(os.Stderr, "", log.LstdFlags).Printf) }

// SetLog sets the logger of the package, for all mutexes without
// [WithLogger]. It gets lines that begin with "[ERROR]", and they go to
// standard error by default. A nil LogFunc is [NopLog]. It is safe for
// concurrent use.
func SetLog(l LogFunc) {
	if l == nil {
		l = NopLog
	}
	packageLog.Store(&l)
}

// A logger is a mutex's own, or the package's if that is nil.
type logger struct{ own *slog.Logger }

// error logs err, and what it means for whom.
func (l logger) error(what string, err error) {
	if l.own != nil {
		if what == "" {
			what = "redismutex"
		}
		l.own.LogAttrs(context.Background(), slog.LevelError, what, slog.Any("error", err))
		return
	}
	text := err.Error()
	if what != "" {
		text = what + ": " + text
	}
	(*packageLog.Load())("[ERROR] %s", text)
}
