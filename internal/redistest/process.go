package redistest

import (
	"os"
	"os/exec"
	"runtime"
	"testing"
)

// Process is a child process other than a server. Its methods are not safe for concurrent use.
type Process struct{ process *process }

// Spawn starts the command. It is killed when the test ends, also when the test's own process is killed.
func Spawn(tb testing.TB, cmd *exec.Cmd) *Process {
	tb.Helper()
	p, err := spawn(cmd)
	if err != nil {
		tb.Fatalf("redistest: %v", err)
	}
	tb.Cleanup(p.kill)
	return &Process{p}
}

// Kill ends the process as a power cut does, and returns when it is gone.
func (p *Process) Kill() { p.process.kill() }

// Freeze stops the process until Thaw. It must be running.
func (p *Process) Freeze() { p.process.signal(sigStop) }

// Thaw lets a frozen process go on.
func (p *Process) Thaw() { p.process.signal(sigCont) }

// Exited is closed when the process has ended, and the command knows how.
func (p *Process) Exited() <-chan struct{} { return p.process.exited }

type process struct {
	*os.Process
	pid    int
	exited <-chan struct{}
}

// spawn starts the command on a thread of its own that stays until the command has ended: the kernel takes the
// end of the thread that started a child for the death of the child's parent.
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
