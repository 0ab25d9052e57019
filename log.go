package redismutex

// This file answers: where does it go what no caller is there to be told?

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// A LogFunc prints one line, in the manner of [log.Printf].
type LogFunc func(format string, v ...any)

// NopLog is a [LogFunc] that prints nothing.
func NopLog(string, ...any) {}

var packageLog atomic.Pointer[LogFunc]

func init() { SetLog(log.New(os.Stderr, "", log.LstdFlags).Printf) }

// SetLog sets the logger of the package, for all mutexes without
// [WithLogger]. It gets lines that begin with "[ERROR]", and they go to
// standard error by default. Of more than a few lines of one kind within a second, one line gives the number. A nil LogFunc is [NopLog]. It is safe for
// concurrent use.
func SetLog(l LogFunc) {
	if l == nil {
		l = NopLog
	}
	packageLog.Store(&l)
}

// A logger is a mutex's own, or the package's if that is nil.
type logger struct{ own *slog.Logger }

// error logs err, and what it means for whom. Of many lines of one kind in a short time it logs the first few, and then
// how many more there were: an outage concerns thousands of waiters alike.
func (l logger) error(what string, err error) {
	k := lineKind{l.own, what, nil}
	if what == "" {
		k.err = sentinel(err)
	}
	if recentLines.count(k, err, func(more int, last error) {
		l.print(what, fmt.Errorf("%w (the last of %d more lines like this within %v)", last, more, lineWindow))
	}) {
		l.print(what, err)
	}
}

func (l logger) print(what string, err error) {
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

const (
	// maxLines is how many lines of one kind are logged within lineWindow. The rest is counted.
	maxLines   = 5
	lineWindow = time.Second
)

// A lineKind is what lines in the log have in common that are counted together: the logger, and what they say.
type lineKind struct {
	logger *slog.Logger
	what   string
	err    error // the sentinel, where what says nothing
}

// lines counts the lines of each kind within the current window.
type lines struct {
	mu sync.Mutex
	m  map[lineKind]*lineCount
}

type lineCount struct {
	since time.Time
	n     int
	last  error
}

var recentLines lines

// count counts a line, and reports whether it is to be logged. When the window ends, more is told how many were not,
// and the last of them.
func (l *lines) count(k lineKind, err error, more func(int, error)) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.m[k]
	if c == nil || time.Since(c.since).Abs() > 2*lineWindow { // the timer of another test's clock never fires
		if l.m == nil {
			l.m = map[lineKind]*lineCount{}
		}
		c = &lineCount{since: time.Now()}
		l.m[k] = c
		time.AfterFunc(lineWindow, func() {
			l.mu.Lock()
			n, last := c.n, c.last
			if l.m[k] == c {
				delete(l.m, k)
			}
			l.mu.Unlock()
			if n > maxLines {
				more(n-maxLines, last)
			}
		})
	}
	c.n++
	c.last = err
	return c.n <= maxLines
}
