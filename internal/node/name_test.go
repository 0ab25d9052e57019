package node

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/mailbox"
)

// What an operator finds in Redis names a process: its host and pid, or the name that it was given.
func TestIDNamesItsProcess(t *testing.T) {
	var p, given processName
	if err := given.set("checkout/blue-7"); err != nil {
		t.Fatal(err)
	}
	host, _ := os.Hostname()
	for _, c := range []struct {
		p    *processName
		want string
	}{
		{&p, fmt.Sprintf("%s/%d", hostPart(host), os.Getpid())},
		{&given, "checkout/blue-7"},
	} {
		id := ChannelPrefix + c.p.get() + ".1:17"
		if !regexp.MustCompile(`^redismutex:[\w./-]+/[a-z2-7]{13}\.1:17$`).MatchString(id) {
			t.Errorf("id %q", id)
		}
		if got := ProcessOf(id); got != c.want {
			t.Errorf("the process of %q: got %q, want %q", id, got, c.want)
		}
		if again := c.p.get(); again != c.p.unique {
			t.Errorf("the name was %q and is %q", c.p.unique, again)
		}
	}
	if p.unique == new(processName).get() {
		t.Error("two processes have the same name")
	}
	for _, id := range []string{"", "redismutex:abcdefghijklm.1:17", "rubbish/17/x:1"} {
		if got := ProcessOf(id); got != "" {
			t.Errorf("the process of %q: got %q, want none", id, got)
		}
	}
}

func TestProcessNameIsShortAndSafe(t *testing.T) {
	for host, want := range map[string]string{
		"web-1":                                 "web-1",
		"web-1.prod.example.com":                "web-1",
		"checkout-service-7f9c6d5b8-x2k4z":      "-service-7f9c6d5b8-x2k4z",
		"":                                      "unknown",
		".":                                     "unknown",
		"a b:c*d?e[f]/g\x00h\u00e9":             "a-b-c-d-e-f--g-h--",
		strings.Repeat("x", 200) + "7.internal": strings.Repeat("x", 23) + "7",
	} {
		if got := hostPart(host); got != want {
			t.Errorf("host %q: got %q, want %q", host, got, want)
		}
	}
	for _, name := range []string{"", "a b", "a:b", "a*", "a\nb", "é", strings.Repeat("x", maxName+1)} {
		var p processName
		if err := p.set(name); !errors.Is(err, lockerr.ErrInvalid) {
			t.Errorf("name %q: got %v, want ErrInvalid", name, err)
		}
	}
}

// One process has one name: ids of the same rank are ordered by name, in the same way on every node.
func TestProcessNameDoesNotChange(t *testing.T) {
	var p processName
	for _, name := range []string{"first", strings.Repeat("x", maxName)} {
		if err := p.set(name); err != nil {
			t.Fatal(err)
		}
	}
	name := p.get()
	if err := p.set("late"); !errors.Is(err, lockerr.ErrInvalid) || p.get() != name {
		t.Errorf("a name that is in use was set: %v, and is %q", err, p.get())
	}
}

// The ids of an acquisition on several nodes belong together, and no others do.
func TestIDsOfOneAcquisitionBelongTogether(t *testing.T) {
	first, number := &Node{Mailbox: mailbox.New(nil, "redismutex:h/1/abc.1", nil)}, NewNumber()
	second := &Node{Mailbox: mailbox.New(nil, "redismutex:h/1/abc.22", nil)}
	var a, b, other Lease
	a.Init(nil, first, number, true)
	b.Init(nil, second, number, true)
	seen := map[string]bool{a.ID(): true}
	for range idsEach - 1 {
		id := b.ID()
		if AcquisitionOf(id) != AcquisitionOf(a.ID()) || seen[id] {
			t.Fatalf("%q and %q are not two ids of one acquisition", a.ID(), id)
		}
		seen[id] = true
		b.Init(nil, second, b.NextID(), true)
	}
	b.Init(nil, second, b.NextID(), true) // the thousandth
	other.Init(nil, first, NewNumber(), true)
	for _, id := range []string{b.ID(), other.ID(), strings.Replace(a.ID(), "abc", "abd", 1), strings.Replace(a.ID(), "/1/", "/2/", 1)} {
		if AcquisitionOf(id) == AcquisitionOf(a.ID()) || seen[id] {
			t.Errorf("%q is taken for an id of the acquisition that has %q", id, a.ID())
		}
	}
	for _, id := range []string{"", "x", "x:1000", "redismutex:h/1/abc.1:7"} {
		if got := AcquisitionOf(id); got != id {
			t.Errorf("%q: got %q", id, got)
		}
	}
}
