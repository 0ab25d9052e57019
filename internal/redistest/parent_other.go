//go:build !linux

package redistest

import "os/exec"

// dieWithParent does nothing: only Linux can do this. Cleanup still kills the child when the test ends.
func dieWithParent(*exec.Cmd) {}
