package redistest

import (
	"os"
	"os/exec"
	"runtime"
	"testing"
)

// Process is a child process other than a server. Its methods are not safe for concurrent use.
type Process struct{ process *process }

// Spawn starts the command. It is killed when the test ends, even if the test's own process is killed.
func Spawn(tb testing.TB, cmd *exec.Cmd) *Process {
	tb.Helper()
	p, err := spawn(cmd)
	if err != nil {
		tb.Fatalf("redistest: %v", err)
	}
	tb.Cleanup(p.kill)
	return &Process{p}
}

// Kill ends the process as a power failure does, and returns when it has exited.
func (p *Process) Kill() { p.process.kill() }

// Freeze stops the process until Thaw. It must be running.
func (p *Process) Freeze() { p.process.signal(sigStop) }

// Thaw lets a frozen process continue.
func (p *Process) Thaw() { p.process.signal(sigCont) }

// Exited returns a channel that is closed when the process has exited and the command's ProcessState is set.
func (p *Process) Exited() <-chan struct{} { return p.process.exited }

type process struct {
	*os.Process
	pid    int
	exited <-chan struct{}
}

// spawn starts the command on a thread of its own that lives until the command has exited: to the kernel, the parent of a
// child is the thread that started it.
func spawn(cmd *exec.Cmd) (*process, error) {
	dieWithParent(cmd)
	started, exited := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			cmd.Wait()
			close(exited)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return &process{Process: cmd.Process, pid: cmd.Process.Pid, exited: exited}, nil
}

func (p *process) kill() {
	p.Kill()
	<-p.exited
}

func (p *process) signal(s os.Signal) {
	if err := p.Signal(s); err != nil {
		panic("redistest: signal: " + err.Error())
	}
}
