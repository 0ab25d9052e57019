//go:build !unix

package redistest

import "os"

// No process can be stopped here. Freeze and Thaw compile, and panic when called.
var (
	sigStop = os.Interrupt
	sigCont = os.Interrupt
)
