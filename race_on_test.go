//go:build race

package redismutex

const raceEnabled = true
