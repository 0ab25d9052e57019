package redismutex

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"
)

// The id of a lock, and the channel of its grants, name the process; both are covered by the ACL's redismutex:*.
func TestIDNamesTheProcess(t *testing.T) {
	inBubble(t, func(w *world) {
		m := NewMutex(w.client(nil), "x")
		l := w.lock(m, true)
		defer w.unlock(l)
		mailbox := m.config.Nodes[0].Mailbox.Name()
		if pid := "/" + strconv.Itoa(os.Getpid()) + "/"; !strings.HasPrefix(l.ID(), "redismutex:") || !strings.Contains(l.ID(), pid) ||
			!strings.HasPrefix(l.ID(), mailbox+":") {
			t.Errorf("id %q, mailbox %q: want both to begin with redismutex: and to have %s", l.ID(), mailbox, pid)
		}
		if err := SetProcessName("late"); !errors.Is(err, ErrInvalid) {
			t.Errorf("SetProcessName after the first mutex: got %v, want ErrInvalid", err)
		}
	})
}
