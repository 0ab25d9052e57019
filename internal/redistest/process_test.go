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
		t.Fatal("want a frozen process not to exit, it has")
	default:
	}
	p.Thaw()
	p.Kill()
	<-p.Exited()
	if cmd.ProcessState == nil || cmd.ProcessState.Success() {
		t.Errorf("want the process killed by a signal, got %v", cmd.ProcessState)
	}
}
