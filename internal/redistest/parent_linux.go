package redistest

import (
	"os/exec"
	"syscall"
)

// dieWithParent has the kernel kill the child when this process dies, be it by SIGKILL.
func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
