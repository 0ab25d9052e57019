// Package logger logs failures in the background, of which no caller learns: each with its key, and with what the library
// does about it.
package logger

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redismutex/redismutex/internal/lockerr"
)

// A Func prints one line, in the manner of [log.Printf].
type Func func(format string, v ...any)

var packageLog atomic.Pointer[Func]

// Set sets the logger of all mutexes that have none of their own.
func Set(f Func) { packageLog.Store(&f) }

// A Logger is the logger of one mutex, or of the package if Own is nil. It calls foreign code: no mutex may be held.
type Logger struct{ Own *slog.Logger }

// Error logs that err happened to the lock on key, and what the library does now. Of many lines that say the same in a
// short time it logs the first few, and then the number of the others: an outage concerns thousands of waiters alike.
func (l Logger) Error(key, what string, err error) {
	k := lineKind{l.Own, what, nil}
	if what == "" {
		k.err = lockerr.Sentinel(err)
	}
	if recent.count(k, line{key, err}, func(more int, last line) { l.print(last, what, more) }) {
		l.print(line{key, err}, what, 0)
	}
}

func (l Logger) print(ln line, what string, more int) {
	text := strings.TrimPrefix(ln.err.Error(), "redismutex: ")
	if l.Own != nil {
		message := "redismutex"
		if what != "" {
			message += ": " + what
		}
		attrs := []slog.Attr{slog.Any("error", ln.err)}
		if ln.key != "" {
			attrs = append(attrs, slog.String("key", ln.key))
		}
		if more > 0 {
			attrs = append(attrs, slog.Int("more", more), slog.Duration("within", window))
		}
		l.Own.LogAttrs(context.Background(), slog.LevelError, message, attrs...)
		return
	}
	format, args := "[ERROR] redismutex: ", []any{}
	if ln.key != "" {
		format, args = format+"%q: ", append(args, ln.key)
	}
	if what != "" {
		format, args = format+"%s: ", append(args, what)
	}
	format, args = format+"%s", append(args, text)
	if more > 0 {
		format, args = format+" (the last of %d more lines like this within %v)", append(args, more, window)
	}
	(*packageLog.Load())(format, args...)
}

const (
	// maxLines is how many lines of one kind are logged within window. The others are counted.
	maxLines = 5
	window   = time.Second
)

// A lineKind is what lines that are counted together have in common.
type lineKind struct {
	logger *slog.Logger
	what   string
	err    error // the sentinel, where what is empty
}

type line struct {
	key string
	err error
}

// lines counts the lines of each kind within the current window.
type lines struct {
	mu sync.Mutex
	m  map[lineKind]*lineCount
}

type lineCount struct {
	since time.Time
	n     int
	last  line
}

var recent lines

// count counts a line and reports whether it should be logged. When the window ends, it calls more with the number of lines
// that were not logged and the last of them.
func (l *lines) count(k lineKind, ln line, more func(int, line)) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.m[k]
	if c == nil || time.Since(c.since).Abs() > 2*window { // the timer of another test's clock never fires
		if l.m == nil {
			l.m = map[lineKind]*lineCount{}
		}
		c = &lineCount{since: time.Now()}
		l.m[k] = c
		time.AfterFunc(window, func() {
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
	c.last = ln
	return c.n <= maxLines
}
