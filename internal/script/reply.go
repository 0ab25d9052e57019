package script

import (
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/lockerr"
)

// A Status is what has become of the caller's id.
type Status int64

// The statuses, as lua/ defines them.
const (
	Granted    Status = 1 + iota // it holds the lock
	Waiting                      // it is in the queue
	Busy                         // a try was refused: others hold or wait
	Released                     // it held or waited, and has been released
	Gone                         // it neither holds nor waits
	Tombstoned                   // it has been released for good
	Foreign                      // a key of the lock holds foreign data
)

// A Reply is the answer of a script.
type Reply struct {
	Status      Status
	Value       int64  // the fencing token of a writer that is granted; ms until the lease in front of a waiter ends
	Data        string // "<type>:<key>" of foreign data
	Holder      string // of Busy: the id in the way, a holder or the first waiter; "" if there is none left
	More        bool   // the lock has not been handed on to all that fit: call again
	Unpublished bool   // PUBLISH was refused: those granted have not been told
	Grants      string // a message for the caller's own mailbox

	// With several nodes only:
	Preceded bool  // a waiter stands before the caller
	Last     int64 // the highest rank in the queue
}

// Parse reads a reply to s. Whatever is not a reply of the script is an error: a server may have gone mad.
func (s *Script) Parse(sent *redis.Cmd) (Reply, error) {
	value, err := sent.Result()
	if err != nil {
		return Reply{}, lockerr.Script(err)
	}
	r, ok := Reply{}, false
	switch v := value.(type) {
	case int64:
		r, ok = s.parseInteger(v)
	case string:
		r, ok = Reply{Status: Released, Grants: v}, s.short == Released
	case []any:
		r, ok = parseArray(v)
	}
	if !ok {
		return Reply{}, lockerr.Redis(fmt.Errorf("unexpected reply %.100q", fmt.Sprint(value)))
	}
	return r, nil
}

// Split returns the replies to the two calls of a command that Behind has returned.
func Split(sent *redis.Cmd) (first, second *redis.Cmd) {
	first, second = new(redis.Cmd), new(redis.Cmd)
	value, err := sent.Result()
	replies, ok := value.([]any)
	if err == nil && (!ok || len(replies) != 2) {
		err = fmt.Errorf("unexpected reply %.100q", fmt.Sprint(value))
	}
	if err != nil {
		first.SetErr(err)
		second.SetErr(err)
		return first, second
	}
	first.SetVal(replies[0])
	second.SetVal(replies[1])
	// The script passes an error as a string: of an array with an error that has a type of its own, go-redis v9.23 returns the
	// error alone. Redis 6.2 leaves the end of the line in the text.
	if failed, ok := replies[0].([]any); ok && len(failed) == 1 {
		first.SetErr(scriptError(strings.TrimSpace(fmt.Sprint(failed[0]))))
	}
	return first, second
}

// A scriptError is an error of Redis that a script has caught.
type scriptError string

func (e scriptError) Error() string { return string(e) }

// RedisError makes it a [redis.Error].
func (scriptError) RedisError() {}

// parseInteger reads a short reply: 0 for gone, 1 or a fencing token for a grant or a release, −1 − ms for a waiter.
func (s *Script) parseInteger(v int64) (Reply, bool) {
	switch {
	case v == 0:
		return Reply{Status: Gone}, true
	case v == 1:
		return Reply{Status: s.short}, true
	case v > 0:
		return Reply{Status: s.short, Value: v}, true
	}
	return Reply{Status: Waiting, Value: -1 - v}, s.short == Granted
}

// parseArray reads {status, value, flags, grants, last}, of which the last two may be missing.
func parseArray(v []any) (Reply, bool) {
	if len(v) < 3 || len(v) > 5 {
		return Reply{}, false
	}
	status, ok1 := v[0].(int64)
	flags, ok2 := v[2].(int64)
	r := Reply{Status: Status(status), More: flags&1 != 0, Unpublished: flags&2 != 0, Preceded: flags&4 != 0}
	if !ok1 || !ok2 || r.Status < Granted || r.Status > Foreign || flags&^7 != 0 {
		return Reply{}, false
	}
	var ok3 bool
	switch r.Status {
	case Foreign:
		r.Data, ok3 = v[1].(string)
	case Busy:
		r.Holder, ok3 = v[1].(string)
	default:
		r.Value, ok3 = v[1].(int64)
	}
	ok4, ok5 := true, true
	if len(v) > 3 {
		r.Grants, ok4 = v[3].(string)
	}
	if len(v) > 4 {
		r.Last, ok5 = v[4].(int64)
		if r.Last < 0 {
			r.Last += span
		}
	}
	return r, ok3 && ok4 && ok5 && r.Value >= 0 && r.Last >= 0 && r.Last < span
}
