package main

import (
	"errors"
	"os"
	"os/exec"
)

// A child is the command that runs under the lock.
type child struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has ended
	err   error         // set before
}

// start starts the command in a process group of its own.
func start(path string, argv, env []string) (*child, error) {
	c := &child{cmd: exec.Command(path, argv[1:]...), ended: make(chan struct{})}
	c.cmd.Args[0] = argv[0]
	c.cmd.Env = env
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := c.begin(); err != nil {
		return nil, err
	}
	go func() {
		c.err = c.cmd.Wait()
		close(c.ended)
	}()
	return c, nil
}

// exit returns nil, or an error with the exit code of the command, which has ended.
func (c *child) exit() error {
	var e *exec.ExitError
	switch {
	case c.err == nil:
		return nil
	case !errors.As(c.err, &e):
		return exitError{exitNotExecutable, c.err}
	}
	if s := deadly(e.ProcessState); s != 0 {
		return exitError{exitSignal + s, nil}
	}
	return exitError{e.ExitCode(), nil}
}
