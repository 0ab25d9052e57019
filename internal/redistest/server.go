// Package redistest provides the environments of the tests, one of each kind:
//
//   - InVirtualTime: a World, which is one miniredis in a testing/synctest bubble, and processes whose networks fail on
//     demand. Mini is the server alone.
//   - Start: one real server. A client reaches it Through a faultnet.Link, or directly.
//   - StartQuorum: several independent real servers.
//   - Cluster: a Redis Cluster, whose slots migrate and whose masters may have replicas.
//   - Sentinel: a master, its replica and the sentinel that fails over.
//
// It also has what these tests share: Eventually and Later to wait, Witness to detect locks that overlap, Counter and
// ScriptsRun to count commands, Log to collect lines. It does not import redismutex, so that the tests inside that package
// can use it.
//
// The real servers are child processes, which die with the test even if it is killed. A test uses only servers that it has
// started itself. The environment chooses the server: REDISTEST_SERVER names the binary (the default is redis-server in
// PATH; valkey-server works, too) and REDISTEST_CPU the CPUs to pin it to. Without a server a test is skipped, or fails if
// CI is set.
package redistest

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Server is a redis-server process. Its methods are not safe for concurrent use.
type Server struct {
	command []string
	log     string
	port    int
	process *process // nil when killed
	version string
}

// Start starts an empty redis-server without persistence. args are added to its command line. It is killed when the test
// ends.
func Start(tb testing.TB, args ...string) *Server {
	tb.Helper()
	return start(tb, nil, args)
}

// start is Start with a configuration file, which must come first on the command line.
func start(tb testing.TB, conf, args []string) *Server {
	tb.Helper()
	s, err := open(findBinary(tb), tb.TempDir(), conf, args)
	if err != nil {
		tb.Fatalf("redistest: no server: %v", err)
	}
	tb.Cleanup(s.Kill)
	return s
}

// Open is Start for a program that is not a test: the server's log is in dir, and the caller kills the server. If the
// program dies first, the kernel kills it.
func Open(dir string, args ...string) (*Server, error) {
	binary, err := lookBinary()
	if err != nil {
		return nil, err
	}
	return open(binary, dir, nil, args)
}

func open(binary, dir string, conf, args []string) (s *Server, err error) {
	var command []string
	if cpus := os.Getenv("REDISTEST_CPU"); cpus != "" {
		command = append(command, "taskset", "-c", cpus) // taskset becomes the server, with the same pid
	}
	command = append(command, binary)
	command = append(command, conf...)
	command = append(command, "--bind", "127.0.0.1", "--dir", dir, "--save", "", "--appendonly", "no")
	s = &Server{command: append(command, args...), log: filepath.Join(dir, "log")}
	for range 5 {
		if s.port, err = freePort(); err != nil {
			continue
		}
		if err = s.launch(); err == nil {
			return s, nil
		}
	}
	return nil, err
}

func findBinary(tb testing.TB) string {
	tb.Helper()
	binary, err := lookBinary()
	if err == nil {
		return binary
	}
	if ci := os.Getenv("CI"); ci != "" && ci != "false" {
		tb.Fatalf("redistest: this test must run in CI, and needs a redis-server: %v", err)
	}
	tb.Skipf("redistest: needs a redis-server in PATH or in REDISTEST_SERVER: %v", err)
	return ""
}

func lookBinary() (string, error) {
	return exec.LookPath(cmp.Or(os.Getenv("REDISTEST_SERVER"), "redis-server"))
}

// freePort returns a port below those of outgoing connections, so that no connection takes the port of a killed server
// before its restart. The port of the cluster bus, 10000 above, must be free, too.
func freePort() (int, error) {
	port := 15000 + rand.IntN(10000)
	for _, p := range []int{port, port + 10000} {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", p))
		if err != nil {
			return 0, err
		}
		l.Close()
	}
	return port, nil
}

// launch starts the process and returns when this process, and no other one, answers on the port.
func (s *Server) launch() error {
	log, err := os.Create(s.log)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(s.command[0], slices.Concat(s.command[1:], []string{"--port", strconv.Itoa(s.port)})...)
	cmd.Stdout, cmd.Stderr = log, log
	if s.process, err = spawn(cmd); err != nil {
		return err
	}
	err = s.awaitAnswer()
	if err != nil {
		s.Kill()
		text, _ := os.ReadFile(s.log)
		return fmt.Errorf("%s on port %d: %w\n%s", s.command, s.port, err, text)
	}
	return nil
}

func (s *Server) awaitAnswer() error {
	for start := time.Now(); ; {
		pid, version, err := identify(s.Addr())
		switch {
		case err == nil && pid == s.process.pid:
			s.version = version
			return nil
		case err == nil:
			return fmt.Errorf("another server, pid %d, answers there", pid)
		case time.Since(start) > Timeout:
			return err
		}
		select {
		case <-s.process.exited:
			return errors.New("the server exited")
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// identify returns the pid and version of the server on the port. It sends nothing but INFO, since the server may be a
// foreign one; the handshake of a client library would change its state.
func identify(addr string) (pid int, version string, err error) {
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return 0, "", err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(time.Second))
	if _, err := io.WriteString(conn, "INFO server\r\n"); err != nil {
		return 0, "", err
	}
	r := bufio.NewReader(conn)
	head, err := r.ReadString('\n')
	if err != nil {
		return 0, "", err
	}
	size, isBulk := strings.CutPrefix(strings.TrimSpace(head), "$")
	n, err := strconv.Atoi(size)
	if !isBulk || err != nil {
		return 0, "", fmt.Errorf("INFO answered %q", head)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return 0, "", err
	}
	info := fields(string(body))
	pid, err = strconv.Atoi(info["process_id"])
	return pid, info["redis_version"], err
}

// fields reads the "name:value" lines of INFO and CLUSTER INFO.
func fields(info string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(info) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			m[name] = value
		}
	}
	return m
}

// Addr returns the server's host:port, which Restart does not change.
func (s *Server) Addr() string { return fmt.Sprintf("127.0.0.1:%d", s.port) }

// Version returns the version of Redis that the server is, or is compatible with.
func (s *Server) Version(tb testing.TB) (major, minor int) {
	tb.Helper()
	if _, err := fmt.Sscanf(s.version, "%d.%d", &major, &minor); err != nil {
		tb.Fatalf("redistest: version %q: %v", s.version, err)
	}
	return major, minor
}

// Client returns a client of the server, which is closed when the test ends.
func (s *Server) Client(tb testing.TB, mutate ...func(*redis.Options)) *redis.Client {
	opt := &redis.Options{Addr: s.Addr()}
	for _, m := range mutate {
		m(opt)
	}
	rc := redis.NewClient(opt)
	tb.Cleanup(func() { rc.Close() })
	return rc
}

// Kill ends the server as a power failure does, and returns when it has exited.
func (s *Server) Kill() {
	if s.process != nil {
		s.process.kill()
		s.process = nil
	}
}

// Restart kills the server if it runs, and starts it again on its port, without its data.
func (s *Server) Restart(tb testing.TB) {
	tb.Helper()
	s.Kill()
	if err := s.launch(); err != nil {
		tb.Fatalf("redistest: restart: %v", err)
	}
}

// RestartAsReplicaOf is Restart, and the server is a replica of another one from the first moment.
func (s *Server) RestartAsReplicaOf(tb testing.TB, addr string) {
	tb.Helper()
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		tb.Fatalf("redistest: restart: %v", err)
	}
	was := s.command
	defer func() { s.command = was }()
	s.command = append(slices.Clip(was), "--replicaof", host, port)
	s.Restart(tb)
}

// Freeze stops the server's process: connections stay open, and nothing is answered until Thaw. The server must be
// running.
func (s *Server) Freeze() { s.process.signal(sigStop) }

// Thaw lets a frozen server continue, with the requests that have arrived meanwhile.
func (s *Server) Thaw() { s.process.signal(sigCont) }
