package main

import (
	"os"
	"time"
)

// forwarded are the signals that are passed on to the command. Windows passes Ctrl-C to it by itself.
var forwarded = []os.Signal{os.Interrupt}

func number(os.Signal) int              { return 2 }
func deadly(*os.ProcessState) int       { return 0 }
func (c *child) begin() error           { return c.cmd.Start() }
func (c *child) signal(os.Signal)       {}
func (c *child) terminate()             {} // Windows has no SIGTERM
func (c *child) kill()                  { _ = c.cmd.Process.Kill() }
func (c *child) killRest(time.Duration) {}
