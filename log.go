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

func (l logger) error(key, message string, err error) {
	if l.own == nil {
		if key != "" {
			message += ": " + key
		}
		if err != nil {
			message += ": " + err.Error()
		}
		(*packageLog.Load())("[ERROR] redismutex: %s", message)
		return
	}
	var attrs []slog.Attr
	if key != "" {
		attrs = append(attrs, slog.String("key", key))
	}
	if err != nil {
		attrs = append(attrs, slog.Any("error", err))
	}
	l.own.LogAttrs(context.Background(), slog.LevelError, "redismutex: "+message, attrs...)
}
