package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/redismutex/redismutex/internal/redistest"
	"golang.org/x/sys/unix"
)

// onTerminal runs a shell script in which $R is the program on a terminal of its own, and returns the terminal's other side.
func (h *hall) onTerminal(script string) *os.File {
	h.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		h.Skip(err)
	}
	h.Cleanup(func() { _ = master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		h.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		h.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprint("/dev/pts/", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		h.Fatal(err)
	}
	defer slave.Close()
	beginAs(h.T, h.server.Addr(), func(c *exec.Cmd) {
		c.Env = append(c.Env, "R="+os.Args[0], "D="+h.dir)
		c.Path, c.Args = "/bin/sh", []string{"sh", "-c", script}
		c.Stdin, c.Stdout, c.Stderr = slave, slave, slave
		c.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0}
	})
	return master
}

// A shell whose terminal was taken away ends, or stops.
func TestTerminalIsTheShellsWhenTheProgramHasEnded(t *testing.T) {
	for name, script := range map[string]string{
		"in the foreground":        "$R run stock true",
		"in the background":        "set -m; $R run stock true & wait",
		"command does not execute": "echo '#!/no/such/file' > $D/bad; chmod +x $D/bad; $R run stock $D/bad",
	} {
		t.Run(name, func(t *testing.T) {
			h := newHall(t)
			h.onTerminal(script + "; ps -o pgid=,tpgid= -p $$ > $D/groups.new & wait; mv $D/groups.new $D/groups")
			redistest.Eventually(t, "the program has ended", func() bool { return h.file("groups") != "" })
			if f := strings.Fields(h.file("groups")); len(f) != 2 || f[0] != f[1] {
				t.Errorf("the shell's group, and that of the terminal: want the same, got %q", f)
			}
		})
	}
}

// If Ctrl-Z stopped the command, nobody would have the terminal.
func TestCtrlZDoesNotStopTheCommand(t *testing.T) {
	h := newHall(t)
	terminal := h.onTerminal(`$R run stock sh -c 'echo $$ > $D/pid; while [ ! -e $D/go ]; do sleep 0.01; done; touch $D/ended'`)
	h.pid("pid")
	if _, err := terminal.Write([]byte{'Z' - '@'}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(h.dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	redistest.Eventually(t, "the command has ended", func() bool { _, err := os.Stat(filepath.Join(h.dir, "ended")); return err == nil })
}
