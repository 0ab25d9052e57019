package redismutex

// Hostile names and hostile servers. A name is refused, or all keys of its lock share a slot. Whatever a server
// replies, a call returns an error: nothing panics or hangs, and only a grant is taken for a grant.

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/big"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/internal/script"
)

// slot returns the hash slot of a key, as the specification of Redis Cluster defines it.
func slot(key string) uint16 {
	if open := strings.IndexByte(key, '{'); open >= 0 {
		if n := strings.IndexByte(key[open+1:], '}'); n > 0 {
			key = key[open+1 : open+1+n]
		}
	}
	crc := uint16(0) // CRC-16/XMODEM
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			crc = crc<<1 ^ crc>>15*0x1021
		}
	}
	return crc % 16384
}

// The examples of the specification, and some results of CLUSTER KEYSLOT.
func TestSlot(t *testing.T) {
	for key, want := range map[string]uint16{
		"": 0, "123456789": 0x31c3, "foo": 12182, "foo{}{bar}": 8363,
		"{user1000}.following": slot("user1000"), "foo{{bar}}zap": slot("{bar"), "foo{bar}{zap}": slot("bar"),
	} {
		if got := slot(key); got != want {
			t.Errorf("%q: slot %d, want %d", key, got, want)
		}
	}
}

// keyNames returns the four keys.
func keyNames(k *script.Keys) []string { return []string{k.Name(), k.Intents(), k.Leases(), k.Token()} }

var unused = redis.NewClient(&redis.Options{}) // it is never connected

// keysOf returns the keys of a lock, with WithKey unless key is "".
func keysOf(name, key string) (*script.Keys, error) {
	m, r := NewMutex(unused, name), request{}
	var opt []LockOption
	if key != "" {
		opt = append(opt, WithKey(key))
	}
	err := m.complete(&r, opt)
	return r.keys, err
}

// tagged matches a key with a hash tag.
var tagged = regexp.MustCompile(`^[^{]*\{[^}]+\}`)

// derived matches a name that would be another lock's key.
var derived = regexp.MustCompile(`:(its-)?(lock-intent|lease|token)$`)

// fit reports whether a lock can have that name.
func fit(name string) bool {
	if tagged.MatchString(name) {
		return !derived.MatchString(name)
	}
	return name != "" && !strings.Contains(name, "}")
}

// Promises 1 and 10: a name is refused, or its keys differ and share a slot. No two locks have a key in common.
func FuzzKeysOfALockShareItsSlot(f *testing.F) {
	for _, c := range [][3]string{
		{"x", "", "y"}, {"x", "7", "x:7"}, {"{x}", "lease", "x"}, {"a{x}b", "", "{a{x}b}"}, {"", "k", "x"},
		{"{}", "", "{}x"}, {"a}", "", "}{a}"}, {"{a", "", "{{a}"}, {"a{", "}", "{a"}, {"a", "{b}", "{a:b}"},
		{"{x}:lock-intent", "", "{x}"}, {"é\xff\x00", "\r\n", "{é\xff\x00:\r\n}"}, {"{}{x}", "", "{x"},
	} {
		f.Add(c[0], c[1], c[2])
	}
	f.Fuzz(func(t *testing.T, name, key, other string) {
		full, ok := name, fit(name)
		if key != "" {
			full += ":" + key
			ok = ok && fit(full)
		}
		k, err := keysOf(name, key)
		if !ok {
			if problem := matches(err, ErrInvalid); problem != "" {
				t.Errorf("%q, %q: %s", name, key, problem)
			}
			return
		}
		if err != nil {
			t.Fatalf("%q, %q: %v", name, key, err)
		}
		all := keyNames(k)
		if k.Name() != full {
			t.Errorf("%q is locked, want %q", k.Name(), full)
		}
		for i, one := range all {
			if slot(one) != slot(full) || slices.Contains(all[:i], one) {
				t.Errorf("%q: %q: slot %d, want %d, and no key twice", full, all, slot(one), slot(full))
			}
		}

		// Another lock, and some with a similar name.
		for _, other := range []string{other, "{" + full + "}", full + ":its", "{" + full + "}:its-", all[1] + other} {
			o, err := keysOf(other, "")
			if err != nil || other == full {
				continue
			}
			for _, one := range keyNames(o) {
				if slices.Contains(all, one) {
					t.Errorf("%q and %q share %q", full, other, one)
				}
			}
		}
	})
}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

// A tape is the bytes from which a value is made; after its end come zeros.
type tape []byte

func (t *tape) next() (b byte) {
	if len(*t) > 0 {
		b, *t = (*t)[0], (*t)[1:]
	}
	return b
}

func (t *tape) text() string {
	n := min(int(t.next()), len(*t))
	s := string((*t)[:n])
	*t = (*t)[n:]
	return s
}

// value returns what go-redis may make of a reply, errors inside of it included.
func (t *tape) value(depth int) any {
	switch t.next() % 10 {
	case 0, 1, 2:
		return int64(int8(t.next()))
	case 3:
		var n [8]byte
		for i := range n {
			n[i] = t.next()
		}
		return int64(binary.BigEndian.Uint64(n[:]))
	case 4:
		return t.text()
	case 5:
		return redis.Nil
	case 6:
		return []any{math.NaN(), true, big.NewInt(math.MinInt64), map[any]any{int64(1): "granted"}, int(1)}[t.next()%5]
	case 7:
		return errors.New(t.text())
	case 8:
		return nil
	}
	if depth == 0 {
		return []any{}
	}
	list := make([]any, t.next()%8)
	for i := range list {
		list[i] = t.value(depth - 1)
	}
	return list
}

// wire returns a value as a server sends it.
func wire(value any) []byte {
	switch v := value.(type) {
	case int64:
		return fmt.Appendf(nil, ":%d\r\n", v)
	case string:
		return fmt.Appendf(nil, "$%d\r\n%s\r\n", len(v), v)
	case error:
		return fmt.Appendf(nil, "-%s\r\n", strings.NewReplacer("\r", "", "\n", "").Replace(v.Error()))
	case nil:
		return []byte("$-1\r\n")
	case []any:
		text := fmt.Appendf(nil, "*%d\r\n", len(v))
		for _, element := range v {
			text = append(text, wire(element)...)
		}
		return text
	}
	return []byte(",nan\r\n")
}

// brief returns what lua/lib/status.lua says that an integer means: 0 that the id is unknown, 1 a plain success, more
// than that a token, and -1 - ms that the id waits. A release never replies that.
func brief(s *script.Script, n int64) script.Reply {
	short := script.Granted
	if s == script.Unlock {
		short = script.Released
	}
	switch {
	case n == 0:
		return script.Reply{Status: script.Gone}
	case n == 1:
		return script.Reply{Status: short}
	case n > 1:
		return script.Reply{Status: short, Value: n}
	case short == script.Granted:
		return script.Reply{Status: script.Waiting, Value: -1 - n}
	}
	return script.Reply{} // an error
}

// Promise 10: a reply that no script gives is an error of Redis. Any other is in the ranges that lua/lib/status.lua
// names.
func FuzzParsedRepliesAreInRange(f *testing.F) {
	for _, seed := range []string{
		"\x00\x01", "\x00\x00", "\x03\x00\x05\xaf\x31\x07\xa4\x00\x00", "\x05", "\x07\x09WRONGTYPE",
		"\x09\x03\x00\x01\x00\x05\x00\x00", "\x09\x04\x00\x04\x00\x00\x00\x07\x04\x030 1",
		"\x09\x05\x00\x02\x00\x7f\x00\x04\x04\x00\x00\xff", "\x09\x03\x00\x07\x04\x05set:k\x00\x00",
		"\x09\x03\x00\x07\x00\x01\x00\x00", "\x09\x03\x00\x08\x00\x01\x00\x00", "\x09\x03\x00\x01\x00\xff\x00\x00",
		"\x09\x05\x00\x01\x00\x01\x00\x00\x04\x00\x03\x80", "\x09\x03\x09\x00\x05\x07\x00", "\x06\x03",
		"\x09\x05\x00\x01\x00\x01\x00\x00\x04\x00\x03\x00\x0e\x35\xfa\x93\x1a\x00\x00", // span
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		rest := tape(data)
		value := rest.value(3)
		for _, s := range []*script.Script{script.Lock, script.RLock, script.Refresh, script.Unlock} {
			sent := redis.NewCmd(t.Context())
			if err, bad := value.(error); bad {
				sent.SetErr(err)
			} else {
				sent.SetVal(value)
			}
			r, err := s.Parse(sent)
			if err != nil {
				if r != (script.Reply{}) || matches(err, ErrRedis) != "" && matches(err, ErrNotLock) != "" {
					t.Errorf("%#v: %+v, %v", value, r, err)
				}
				continue
			}
			switch {
			case r.Status < script.Granted || r.Status > script.Foreign,
				r.Value < 0, r.Status == script.Foreign && r.Value != 0,
				r.Data != "" && r.Status != script.Foreign,
				r.Last < 0 || r.Last >= 4e15:
				t.Errorf("%#v: %+v", value, r)
			}
			if n, short := value.(int64); short && r != brief(s, n) {
				t.Errorf("%d: %+v, want %+v", n, r, brief(s, n))
			}
		}
	})
}

// A madServer answers script calls with the given replies in turn, and then with the last of them for ever. Each takes
// it a millisecond.
type madServer struct {
	replies [][]byte
	message string // published once somebody has subscribed
	hangsUp bool   // when it has answered
	calls   atomic.Int64
	begins  int // how many replies it has left out
}

func (s *madServer) dial(context.Context, string, string) (net.Conn, error) {
	client, server := net.Pipe()
	go s.serve(server)
	return client, nil
}

func (s *madServer) serve(conn net.Conn) {
	defer conn.Close()
	for r := bufio.NewReaderSize(conn, 1<<16); ; {
		command, err := readCommand(r)
		if err != nil {
			return
		}
		redistest.Elapse(time.Millisecond)
		answer := s.replies[len(s.replies)-1]
		switch command[0] {
		case "hello", "client":
			answer = []byte("-ERR unknown command\r\n")
		case "subscribe":
			answer = fmt.Appendf(nil, "*3\r\n$9\r\nsubscribe\r\n$%d\r\n%[2]s\r\n:1\r\n"+
				"*3\r\n$7\r\nmessage\r\n$%[1]d\r\n%[2]s\r\n$%[3]d\r\n%[4]s\r\n",
				len(command[1]), command[1], len(s.message), s.message)
		case "ping":
			answer = []byte("*2\r\n$4\r\npong\r\n$0\r\n\r\n")
		case "evalsha", "eval":
			n := int(s.calls.Add(1)) - 1 + s.begins
			answer = s.replies[min(n, len(s.replies)-1)]
		}
		_, err = conn.Write(answer)
		if err != nil || s.hangsUp && command[0] != "subscribe" {
			return
		}
	}
}

// readCommand reads one command of a client: an array of strings.
func readCommand(r *bufio.Reader) (command []string, err error) {
	length := func() (n int) {
		line, e := r.ReadString('\n')
		if err = e; err == nil {
			n, err = strconv.Atoi(strings.TrimSpace(line[1:]))
		}
		return n
	}
	for n := length(); n > 0 && err == nil; n-- {
		arg := make([]byte, length()+len("\r\n"))
		if err == nil {
			_, err = io.ReadFull(r, arg)
		}
		command = append(command, string(arg[:len(arg)-2]))
	}
	return command, err
}

// What a reply, or a message, has to contain if it grants a lock.
var (
	grantReply   = regexp.MustCompile(`:\+?0*1\r\n:\+?\d+\r\n:\+?0*[0-7]\r\n|^:\+?0*[1-9]\d*\r\n|\d \d`)
	grantMessage = regexp.MustCompile(`^\d+ \d`)
)

// outsized matches a reply that announces more than it can contain: go-redis believes it and allocates as much.
// Attributes are of RESP3, which is not in use.
var outsized = regexp.MustCompile(`[*%~>$=!]\+?\d{5}|\|`)

// Bits of how a mad server is met.
const (
	writing = 1 << iota
	trying
	onThree
	hangingUp
	inForm  // the replies are tapes, which makes RESP of any bytes
	inBrief // what is locked is unlocked at once
)

// Promise 10: whatever servers reply, a call returns in time, with an error of one kind or a lock that was granted.
// When all is over no more calls are made.
func FuzzHostileReplies(f *testing.F) {
	const token = ":1700000000000001\r\n"
	for _, c := range []struct {
		how                  byte
		first, second, third string
		message              string
	}{
		{writing | trying, token, ":1\r\n", ":1\r\n", ""},
		{writing | trying | onThree, token, token, token, ""},
		{trying, "*3\r\n:1\r\n:0\r\n:0\r\n", "*3\r\n:1\r\n:0\r\n:0\r\n", ":1\r\n", ""},
		{writing, "*3\r\n:3\r\n:0\r\n:0\r\n", "*3\r\n:2\r\n:1000\r\n:0\r\n", ":1\r\n", "1700000000000001 2"},
		{writing, "*3\r\n:3\r\n:0\r\n:0\r\n", "*3\r\n:2\r\n:9223372036854775807\r\n:0\r\n", "", "x"},
		{writing | onThree, token, "*5\r\n:2\r\n:9\r\n:4\r\n$0\r\n\r\n:1700000000000001\r\n", "*5\r\n:1\r\n:9\r\n:4\r\n$0\r\n\r\n:7\r\n", "8 1"},
		{trying, "*3\r\n:1\r\n:0\r\n:1\r\n", "*3\r\n:1\r\n:0\r\n:1\r\n", "*3\r\n:1\r\n:0\r\n:1\r\n", ""},
		{trying, "*3\r\n:7\r\n$6\r\nhash:x\r\n:0\r\n", "$-1\r\n", "_\r\n", ""},
		{writing, "-NOSCRIPT no\r\n", "-WRONGTYPE no\r\n", "-LOADING no\r\n", ""},
		{writing | hangingUp, "*3\r\n:1\r\n", "%1\r\n+a\r\n,1.5\r\n", "*1\r\n*1\r\n*1\r\n*0\r\n", ""},
		{onThree | hangingUp, "", "-MOVED 1 x:1\r\n", "*3\r\n:6\r\n:0\r\n:2\r\n", "0 1 2 3"},
		{writing | trying, "", "", "", ""},
		{writing | trying, ":0\r\n", ":0\r\n", ":0\r\n", ""},
		{writing | inForm, "\x00\x05", "\x00\x01", "\x00\x00", ""},
		{writing | inBrief, token, "*4\r\n:4\r\n:0\r\n:1\r\n$3\r\n7 1\r\n", ":1\r\n", ""},
		{writing | inBrief | onThree, token, token, ":0\r\n", ""},
		{writing | inForm, "\x09\x03\x00\x03\x00\x00\x00\x00", "\x09\x03\x00\x02\x00\x7f\x00\x00", "\x00\x01", "5 2"},
		{onThree | inForm, "\x09\x05\x00\x01\x00\x09\x00\x04\x04\x00\x00\x00", "\x09\x05\x00\x02\x00\x09\x00\x00\x04\x00\x00\x07",
			"\x09\x05\x00\x03\x00\x00\x00\x00\x04\x00\x00\x00", ""},
		{trying | onThree, "*3\r\n:3\r\n$3\r\nb:1\r\n:0\r\n", "-ERR no\r\n", "*3\r\n:3\r\n$0\r\n\r\n:0\r\n", ""},
	} {
		f.Add(c.how, []byte(c.first), []byte(c.second), []byte(c.third), c.message)
	}
	f.Fuzz(func(t *testing.T, how byte, first, second, third []byte, message string) {
		replies := [][]byte{first, second, third}
		granted := grantMessage.MatchString(message)
		for i, r := range replies {
			if how&inForm != 0 {
				rest := tape(r)
				r = wire(rest.value(2))
				replies[i] = r
			} else if outsized.Match(r) || len(r) > 4096 {
				t.Skip("go-redis allocates as much as a reply announces")
			}
			granted = granted || grantReply.Match(r)
		}
		synctest.Test(t, func(t *testing.T) { meet(t, how, replies, message, granted) })
	})
}

// meet has a client call mad servers. Time is virtual.
func meet(t *testing.T, how byte, replies [][]byte, message string, granted bool) {
	const ttl, timeout = MinTTL, time.Second
	servers := make([]*madServer, 1)
	if how&onThree != 0 {
		servers = make([]*madServer, 3)
	}
	t.Cleanup(func() { redistest.Elapse(time.Second) }) // the servers see that the clients are closed
	var clients []redis.Scripter
	for i := range servers {
		s := &madServer{replies: replies, message: message, hangsUp: how&hangingUp != 0, begins: i}
		rc := redis.NewClient(&redis.Options{
			Addr: fmt.Sprintf("10.0.0.%d:6379", i+1), Dialer: s.dial, DialerRetries: 1, Protocol: 2, MaxRetries: -1,
			MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
			// No call waits for a connection: go-redis does that with timers which it shares between all clients, and a timer
			// of one bubble must not be used in another.
			PoolSize: 1000,
		})
		t.Cleanup(func() { rc.Close() })
		servers[i], clients = s, append(clients, rc)
	}
	m := NewRedlock(clients, "x", WithTTL(ttl))
	if m.config.Ranks != nil {
		m.config.Ranks = &acquisition.LamportClock{Now: time.Now} // of its own: other tests must not see these ranks
	}
	ask := [2][2]func(context.Context, ...LockOption) (*Lock, error){
		{m.RLockContext, m.LockContext}, {m.TryRLockContext, m.TryLockContext},
	}[bit(how&trying != 0)][bit(how&writing != 0)]

	// bounded has f return in time, with an error that matches one of these, and
	// no other.
	bounded := func(what string, f func(context.Context) error, kinds ...error) error {
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		t.Cleanup(cancel)
		start := time.Now()
		err := f(ctx)
		if took := time.Since(start); took > timeout {
			t.Errorf("%s took %v", what, took)
		}
		is := func(kind error) bool { return matches(err, kind) == "" }
		if err != nil && !slices.ContainsFunc(kinds, is) {
			t.Errorf("%s: an error of no such kind, or of several: %v", what, err)
		}
		return err
	}

	var l *Lock
	kinds := []error{ErrRedis, ErrNotLock, context.DeadlineExceeded}
	if how&trying != 0 {
		kinds = append(kinds, ErrLock)
	}
	err := bounded("lock", func(ctx context.Context) (err error) {
		l, err = ask(ctx)
		if how&trying != 0 && how&onThree != 0 && errors.Is(err, ErrLock) && errors.Is(err, ErrRedis) {
			return ErrLock // the one error that may match both
		}
		return err
	}, kinds...)
	if err == nil {
		if !granted {
			t.Errorf("a lock with token %d that nobody has granted", l.Token())
		}
		if l.Token() > math.MaxInt64 && !grantMessage.MatchString(message) {
			t.Errorf("token %d, which no counter of Redis reaches", l.Token())
		}
		if how&inBrief == 0 {
			redistest.Elapse(3 * ttl)
		}
		if left := time.Until(l.Until()); left > ttl || l.Err() == nil && left <= 0 {
			t.Errorf("trusted for %v, %v", left, l.Err())
		}
		if cause := context.Cause(l); cause != nil && matches(cause, ErrLockLost) != "" {
			t.Error(cause)
		}
		bounded("unlock", l.UnlockContext, ErrLockLost, ErrRedis, context.DeadlineExceeded)
		if l.Err() == nil {
			t.Error("the context lives after the unlock")
		}
	}

	calls := func() (n int64) {
		for _, s := range servers {
			n += s.calls.Load()
		}
		return n
	}
	redistest.Elapse(10 * time.Second) // what go-redis still reads, it gives up after 3
	before := calls()
	redistest.Elapse(10 * time.Second)
	if after := calls(); after != before {
		t.Errorf("%d calls after the lock was released, want none", after-before)
	}
}
