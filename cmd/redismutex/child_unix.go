//go:build unix

package main

import (
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// forwarded are the signals that are passed on to the command.
var forwarded = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}

func init() { runtime.LockOSThread() } // the command is killed when the thread ends that has started it: see dieWith

func number(s os.Signal) int { return int(s.(syscall.Signal)) }

// deadly returns the number of the signal that has killed a process, or 0.
func deadly(s *os.ProcessState) int {
	if w := s.Sys().(syscall.WaitStatus); w.Signaled() {
		return int(w.Signal())
	}
	return 0
}

// begin starts the command. If standard input is a terminal, the command gets it, as from a shell.
func (c *child) begin() error {
	attr := &syscall.SysProcAttr{Setpgid: true}
	dieWith(attr)
	if terminal() {
		attr.Foreground, attr.Ctty = true, 0
		signal.Ignore(syscall.SIGTSTP) // also the command ignores Ctrl-Z: nobody would get the terminal while it is stopped
	}
	c.cmd.SysProcAttr = attr
	err := c.cmd.Start()
	if err != nil {
		c.takeTerminalBack() // the command may have got it before it could not be executed
	}
	return err
}

// terminal reports whether standard input is the terminal of this process, which is in its foreground.
func terminal() bool {
	group, err := unix.IoctlGetInt(0, unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// takeTerminalBack undoes what begin has done with the terminal. That of a program in the background is another's.
func (c *child) takeTerminalBack() {
	if c.cmd.SysProcAttr.Foreground {
		signal.Ignore(syscall.SIGTTOU)
		_ = unix.IoctlSetPointerInt(0, unix.TIOCSPGRP, unix.Getpgrp())
	}
}

// send sends a signal to all processes of the group, and reports whether there are any.
func (c *child) send(s syscall.Signal) bool {
	return syscall.Kill(-c.cmd.Process.Pid, s) != syscall.ESRCH
}

func (c *child) signal(s os.Signal) { c.send(s.(syscall.Signal)) }

// terminate asks the group to end. A process that is stopped goes on, so that it can.
func (c *child) terminate() {
	c.send(syscall.SIGTERM)
	c.send(syscall.SIGCONT)
}

func (c *child) kill() { c.send(syscall.SIGKILL) }

// killRest ends what the command has left behind in its group: nothing of it may run when the lock is another's.
func (c *child) killRest(grace time.Duration) {
	c.takeTerminalBack()
	if !c.send(0) {
		return
	}
	c.terminate()
	for end := time.Now().Add(grace); c.send(0) && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	c.kill()
}
