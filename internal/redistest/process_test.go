package redistest

import (
	"os/exec"
	"testing"
)

func TestSpawnedProcessIsKilled(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	p := Spawn(t, cmd)
	p.Freeze()
	select {
	case <-p.Exited():
		t.Fatal("it has ended")
	default:
	}
	p.Thaw()
	p.Kill()
	<-p.Exited()
	if cmd.ProcessState == nil || cmd.ProcessState.Success() {
		t.Error(cmd.ProcessState)
	}
}
