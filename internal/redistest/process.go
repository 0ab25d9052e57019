package redistest

// This file answers: how does a child process never outlive its test?

import (
	"os"
	"os/exec"
	"runtime"
)

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
