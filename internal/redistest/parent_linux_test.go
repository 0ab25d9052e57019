package redistest

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

// The test runs itself as a child that starts a server and is killed before it can clean up.
func TestServerDiesWithItsTestProcess(t *testing.T) {
	const inChild = "REDISTEST_CHILD"
	if os.Getenv(inChild) != "" {
		// A goroutine that ends locked takes its thread along: the server must not go with the thread that asked.
		var s *Server
		asked := make(chan string)
		go func() {
			runtime.LockOSThread()
			s = Start(t)
			asked <- fmt.Sprintf("/proc/self/task/%d", syscall.Gettid())
		}()
		thread := <-asked
		eventually(t, "the thread has ended", func() bool {
			_, err := os.Stat(thread)
			return err != nil
		})
		if _, _, err := identify(s.Addr()); err != nil {
			t.Fatal(err)
		}
		fmt.Println("addr", s.Addr())
		select {}
	}

	findBinary(t)
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), inChild+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var addr string
	for lines := bufio.NewScanner(out); addr == "" && lines.Scan(); {
		addr, _ = strings.CutPrefix(lines.Text(), "addr ")
	}
	if _, _, err := identify(addr); err != nil {
		t.Fatalf("the child's server does not live: %v", err)
	}
	cmd.Process.Kill()
	cmd.Wait()
	eventually(t, "the orphan has gone", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err != nil
	})
}
