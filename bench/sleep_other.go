//go:build !linux

package main

import "time"

func precise() {}

func sleep(d time.Duration) { time.Sleep(d) }
