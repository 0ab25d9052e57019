//go:build unix && !linux

package main

import "syscall"

func dieWith(*syscall.SysProcAttr) {}
