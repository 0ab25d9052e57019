package node

import (
	"crypto/rand"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/redismutex/redismutex/internal/lockerr"
)

// ChannelPrefix begins the name of every mailbox, so that an ACL can allow them all.
const ChannelPrefix = "redismutex:"

const (
	// maxName is the longest name that a process may be given: it is part of every id in Redis.
	maxName = 48

	// maxHost is how much of a host's name is kept: its end, in which the hosts of one service differ.
	maxHost = 24
)

var (
	process   processName // of this process
	mailboxes atomic.Uint64
)

// A processName names a process in its mailboxes, and so in every id that it uses: "<host>/<pid>/<random>", or
// "<name>/<random>" if it was given a name. It is chosen once: ids of the same rank are ordered by name, so those of two
// processes are in the same order on every node.
type processName struct {
	mu     sync.Mutex
	given  string
	unique string // "": it has not been used
}

// SetProcessName gives this process a name. It must come before the first mailbox.
func SetProcessName(name string) error { return process.set(name) }

func (p *processName) set(name string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case name == "" || len(name) > maxName || safe(name) != name:
		return fmt.Errorf("%w: process name %.100q, want 1 to %d letters, digits and -_./", lockerr.ErrInvalid, name, maxName)
	case p.unique != "":
		return fmt.Errorf("%w: process name %q: it has to be set before the first mutex is made", lockerr.ErrInvalid, name)
	}
	p.given = name
	return nil
}

// get returns the name, with a random part that no other process has.
func (p *processName) get() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unique == "" {
		if p.given == "" {
			host, _ := os.Hostname()
			p.given = hostPart(host) + "/" + strconv.Itoa(os.Getpid())
		}
		p.unique = p.given + "/" + strings.ToLower(rand.Text()[:13])
	}
	return p.unique
}

// hostPart returns what names a host to a reader: its name without the domain, and the end of a long one.
func hostPart(host string) string {
	host, _, _ = strings.Cut(host, ".")
	if host = strings.ReplaceAll(safe(host), "/", "-"); host == "" {
		return "unknown"
	}
	return host[max(0, len(host)-maxHost):]
}

// safe replaces every byte but letters, digits and -_./ in ASCII: a name is part of keys, patterns and messages.
func safe(name string) string {
	b := []byte(name)
	for i, c := range b {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("-_./", c) >= 0) {
			b[i] = '-'
		}
	}
	return string(b)
}

// ProcessName returns the name of this process.
func ProcessName() string { return ProcessOf(ChannelPrefix + process.get()) }
