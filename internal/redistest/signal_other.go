//go:build !unix

package redistest

import "os"

// A process cannot be stopped on this system: Freeze and Thaw panic when called.
var (
	sigStop = os.Interrupt
	sigCont = os.Interrupt
)
