package main

// This file answers: how does one sleep half a millisecond, and not a whole one?

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// precise has the kernel wake this goroutine's thread in time: by default it may be 50 µs late.
func precise() {
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		panic(err) // Linux has had it since 2.6.28
	}
}

// sleep may end early, by a signal: the round trip that comes of it is measured, not assumed.
func sleep(d time.Duration) {
	t := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.Nanosleep(&t, nil)
}
