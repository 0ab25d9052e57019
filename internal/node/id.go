package node

import (
	"strconv"
	"strings"
	"sync/atomic"
)

// The ids of an acquisition have numbers from one block of a thousand: each node has one of them at a time, the first one or,
// where that was given up, a later one. So the ids that an acquisition has on several nodes are known to belong together,
// whatever their mailboxes are.
const idsEach = 1000

var acquisitions atomic.Uint64

// NewNumber returns the number for the first ids of an acquisition.
func NewNumber() uint64 { return acquisitions.Add(1) * idsEach }

// An id is that of a lease, "<mailbox>:<n>", as an argument of a command. It is put together when go-redis marshals it: a held
// lock does not keep it.
type id Lease

// MarshalBinary implements [encoding.BinaryMarshaler].
func (i *id) MarshalBinary() ([]byte, error) {
	return i.append(make([]byte, 0, len(i.Node.Mailbox.Name())+len(":18446744073709551615"))), nil
}

func (i *id) String() string { return (*Lease)(i).ID() }

func (i *id) append(b []byte) []byte {
	return strconv.AppendUint(append(append(b, i.Node.Mailbox.Name()...), ':'), i.number, 10)
}

// AcquisitionOf returns what identifies the acquisition of an id. It is the same for all its ids, on all nodes, and for no other.
func AcquisitionOf(id string) string {
	mailbox, n := cut(id, ':')
	process, _ := cut(mailbox, '.')
	if process == "" || len(n) <= len("000") {
		return id
	}
	return process + ":" + n[:len(n)-len("000")]
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

// ProcessOf returns the name of the process to which an id belongs: what SetProcessName gave it, or "<host>/<pid>". It
// returns "" for an id without a name, as older versions use.
func ProcessOf(id string) string {
	name, ok := strings.CutPrefix(id, ChannelPrefix)
	if end := strings.LastIndexByte(name, '/'); ok && end >= 0 {
		return name[:end]
	}
	return ""
}
