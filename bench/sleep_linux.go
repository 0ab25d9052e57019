package main

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// precise makes the kernel wake this goroutine's thread on time: by default it may be 50 µs late.
func precise() {
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		panic(err) // Linux supports it since 2.6.28
	}
}

// sleep sleeps for d, more precisely than a timer of Go. A signal may end it early, so round trips are measured, not assumed.
func sleep(d time.Duration) {
	t := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.Nanosleep(&t, nil)
}
