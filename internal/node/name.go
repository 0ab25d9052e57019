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

// An id is "<mailbox>:<n>". The ids of an acquisition have numbers from one block of a thousand: each node has one of them at
// a time, the first one or, where that was given up, a later one. So the ids that an acquisition has on several nodes are
// known to belong together, whatever their mailboxes are.
const idsEach = 1000

var acquisitions atomic.Uint64

// NewNumber returns the number for the first ids of an acquisition.
func NewNumber() uint64 { return acquisitions.Add(1) * idsEach }

// AcquisitionOf returns what identifies the acquisition of an id. It is the same for all its ids, on all nodes, and for no other.
func AcquisitionOf(id string) string {
	mailbox, n := cut(id, ':')
	process, _ := cut(mailbox, '.')
	if process == "" || len(n) <= len("000") {
		return id
	}
	return process + ":" + n[:len(n)-len("000")]
}

// HasGivenUp reports whether id is one that this client has asked with, and that neither waits nor holds for this process: its
// release is on its way, or its acquire, which nobody waits for any more.
func (n *Node) HasGivenUp(id string) bool {
	mailbox, of := cut(id, ':')
	number, err := strconv.ParseUint(of, 10, 64)
	return err == nil && mailbox == n.Mailbox.Name() && !n.Renewer.keeps(number)
}

// IsID reports whether id has the form of one. With a "-" in front it would be a tombstone: see lua/lib/keys.lua.
func IsID(id string) bool {
	mailbox, number := cut(id, ':')
	_, err := strconv.ParseUint(number, 10, 64)
	return err == nil && mailbox != "" && mailbox[0] != '-'
}

func cut(s string, last byte) (before, after string) {
	i := strings.LastIndexByte(s, last)
	if i < 0 {
		return "", s
	}
	return s[:i], s[i+1:]
}

// ProcessName returns the name of this process.
func ProcessName() string { return ProcessOf(ChannelPrefix + process.get()) }

// ProcessOf returns the name of the process to which an id belongs: what SetProcessName gave it, or "<host>/<pid>". It
// returns "" for an id without a name, as older versions use.
func ProcessOf(id string) string {
	name, ok := strings.CutPrefix(id, ChannelPrefix)
	if end := strings.LastIndexByte(name, '/'); ok && end >= 0 {
		return name[:end]
	}
	return ""
}
