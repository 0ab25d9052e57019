//go:build !linux

package redistest

import "os/exec"

// dieWithParent can do nothing here: only Linux offers it. Cleanup still kills the child of a test that ends.
func dieWithParent(*exec.Cmd) {}
