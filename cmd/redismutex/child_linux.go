package main

import "syscall"

// dieWith has the command killed if this program is: nobody would end it when the lock is another's.
func dieWith(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
