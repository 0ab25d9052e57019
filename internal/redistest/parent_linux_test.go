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
		var s *Server
		asker := onAThreadThatEnds(func() { s = Start(t) })
		Eventually(t, "the thread that started the server has ended", func() bool {
			_, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", asker))
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
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	var addr string
	var said []string
	for lines := bufio.NewScanner(out); addr == "" && lines.Scan(); {
		said = append(said, lines.Text())
		fmt.Sscanf(lines.Text(), "addr %s", &addr)
	}
	if _, _, err := identify(addr); err != nil {
		t.Fatalf("want the child's server to answer, got %v\n%s", err, strings.Join(said, "\n"))
	}
	cmd.Process.Kill()
	Eventually(t, "the server has died with the child", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err != nil
	})
}

// onAThreadThatEnds calls f on a thread that ends, and returns the thread's id.
func onAThreadThatEnds(f func()) int {
	done := make(chan int)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread ends with the goroutine
		tid := syscall.Gettid()
		if tid == os.Getpid() { // the main thread never ends, so another one is used
			tid = onAThreadThatEnds(f)
		} else {
			f()
		}
		done <- tid
	}()
	return <-done
}
