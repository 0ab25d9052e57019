//go:build unix

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/redistest"
)

// asProgram is set where the test binary runs as the program.
const asProgram = "REDISMUTEX_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Unsetenv(asProgram) // the command that it runs may be this binary, too
		main()
		os.Exit(0)
	}
	flag.Parse()
	if err := flag.Set("test.parallel", "12"); err != nil { // the tests wait most of the time
		panic(err)
	}
	os.Exit(m.Run())
}

// A program is a run of the program.
type program struct {
	*testing.T
	cmd      *exec.Cmd
	out, log bytes.Buffer
	ended    chan struct{}
}

// begin runs the program against a Redis.
func begin(t *testing.T, redis string, args ...string) *program {
	t.Helper()
	return beginAs(t, redis, func(*exec.Cmd) {}, args...)
}

// beginAs is begin for a program that as has prepared.
func beginAs(t *testing.T, redis string, as func(*exec.Cmd), args ...string) *program {
	t.Helper()
	p := &program{T: t, cmd: exec.Command(os.Args[0], args...), ended: make(chan struct{})}
	// The race detector would make it sleep for a second before it exits.
	p.cmd.Env = append(os.Environ(), asProgram+"=1", "REDIS_URL=redis://"+redis, "GORACE=atexit_sleep_ms=0")
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.log
	p.cmd.WaitDelay = time.Second // if a process that should have ended has its output
	as(p.cmd)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = p.cmd.Wait(); close(p.ended) }()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Process.Signal(syscall.SIGCONT)
		<-p.ended
	})
	return p
}

// code waits for the program to end, and returns its exit code.
func (p *program) code() int {
	p.Helper()
	select {
	case <-p.ended:
	case <-time.After(redistest.Timeout):
		p.Fatalf("%v has not ended:\n%s", p.cmd.Args[1:], &p.log)
	}
	return p.cmd.ProcessState.ExitCode()
}

// exits checks the exit code and what the log has.
func (p *program) exits(code int, log string) {
	p.Helper()
	if got := p.code(); got != code || !strings.Contains(p.log.String(), log) {
		p.Errorf("%v: want code %d and %q, got %d and\n%s", p.cmd.Args[1:], code, log, got, &p.log)
	}
}

// A hall is a Redis and a directory in which commands leave traces.
type hall struct {
	*testing.T
	server *redistest.Server
	dir    string
}

func newHall(t *testing.T) *hall {
	t.Parallel()
	return &hall{t, redistest.Start(t), t.TempDir()}
}

func (h *hall) begin(args ...string) *program {
	h.Helper()
	return begin(h.T, h.server.Addr(), args...)
}

// file is what a command has written there, or "".
func (h *hall) file(name string) string {
	text, _ := os.ReadFile(filepath.Join(h.dir, name))
	return strings.TrimSpace(string(text))
}

// pid returns the process number that a command has written to a file.
func (h *hall) pid(name string) int {
	h.Helper()
	redistest.Eventually(h, "a command has written "+name, func() bool { return h.file(name) != "" })
	pid, err := strconv.Atoi(h.file(name))
	if err != nil {
		h.Fatal(err)
	}
	return pid
}

// runs reports whether a process runs. A zombie does not.
func runs(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil { // on Linux; a ps for each look would keep the machine busy
		_, state, _ := strings.Cut(string(stat), ") ")
		return !strings.HasPrefix(state, "Z")
	}
	out, err := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
	return err == nil && !strings.HasPrefix(strings.TrimSpace(string(out)), "Z")
}

// sh is a shell command in which $D is the directory.
func (h *hall) sh(script string) []string {
	return []string{"sh", "-c", "D=" + h.dir + "; " + script}
}

func (h *hall) mutex() *redismutex.RWMutex { return redismutex.NewMutex(h.server.Client(h), "stock") }

// state returns what Redis knows of the lock.
func (h *hall) state() *redismutex.State {
	h.Helper()
	s, err := h.mutex().Inspect(h.Context())
	if err != nil {
		h.Fatal(err)
	}
	return s
}

// holds acquires the lock for the test.
func (h *hall) holds() *redismutex.Lock {
	h.Helper()
	l, err := h.mutex().LockContext(h.Context())
	if err != nil {
		h.Fatal(err)
	}
	h.Cleanup(l.Unlock)
	return l
}

// eventually checks what becomes of the lock.
func (h *hall) eventually(what string, holds func(s *redismutex.State) bool) {
	h.Helper()
	redistest.Eventually(h, what, func() bool { return holds(h.state()) })
}

func TestExitCodeIsTheCommands(t *testing.T) {
	h := newHall(t)
	h.begin("run", "stock", "true").exits(0, "")
	h.begin("run", "stock", "--", "sh", "-c", "exit 7").exits(7, "")
	h.begin("run", "stock", "sh", "-c", "kill -9 $$").exits(128+9, "")
	h.begin("run", "stock", "no-such-command").exits(exitNotFound, "cannot run")
	h.begin("run", "stock", "/").exits(exitNotExecutable, "cannot run")
	if s := h.state(); s.Mode != redismutex.Free {
		t.Errorf("the lock was not released:\n%v", s)
	}
}

func TestCommandHasItsFlagsItsInputAndTheLock(t *testing.T) {
	h := newHall(t)
	p := h.begin("run", "stock", "echo", "-n", "-s", "--ttl")
	if p.exits(0, ""); p.out.String() != "-s --ttl" {
		t.Errorf("got %q", &p.out)
	}
	p = h.begin("run", "stock", "sh", "-c", `echo "$REDISMUTEX_KEY $REDISMUTEX_ID $REDISMUTEX_TOKEN"`)
	p.exits(0, "")
	s := h.state()
	got := strings.Fields(p.out.String())
	if len(got) != 3 || got[0] != "stock" || !strings.HasPrefix(got[1], "redismutex:") || got[2] != fmt.Sprint(s.Token) {
		t.Errorf("got %q, the last token is %d", got, s.Token)
	}
}

func TestHeldLockIsRefusedWithACodeOfItsOwn(t *testing.T) {
	h := newHall(t)
	l := h.holds()
	h.begin("run", "-n", "stock", "true").exits(exitHeld, l.ID())
	h.begin("run", "-n", "-E", "3", "stock", "true").exits(3, l.ID())
	h.begin("run", "-w", "1s", "stock", "true").exits(exitHeld, l.ID())
	if s := h.state(); s.Waiting != 0 {
		t.Errorf("it still waits:\n%v", s)
	}
	h.begin("run", "-w", "0s", "stock", "true").exits(exitHeld, l.ID())
	p := h.begin("run", "-qn", "stock", "true")
	if p.exits(exitHeld, ""); p.log.Len() > 0 {
		t.Errorf("-q: got %q", &p.log)
	}
	p = h.begin("run", "-v", "stock", "true")
	h.eventually("it waits", func(s *redismutex.State) bool { return s.Waiting == 1 })
	l.Unlock()
	if p.exits(0, "waiting: held by others"); !strings.Contains(p.log.String(), "granted") {
		t.Errorf("-v: got %q", &p.log)
	}
}

func TestReadersShareTheLock(t *testing.T) {
	h := newHall(t)
	h.begin(append([]string{"run", "-s", "stock"}, h.sh("touch $D/in; while [ ! -e $D/out ]; do sleep 0.01; done")...)...)
	h.eventually("a reader holds", func(s *redismutex.State) bool { return s.Mode == redismutex.Reading })
	h.begin("run", "-n", "stock", "true").exits(exitHeld, "")
	h.begin(append([]string{"run", "-sn", "stock"}, h.sh("touch $D/out")...)...).exits(0, "")
}

func TestBadUsageAndAnUnreachableRedisHaveCodesOfTheirOwn(t *testing.T) {
	h := newHall(t)
	for _, args := range []string{"", "x", "run", "run stock", "run stock --", "run --nope stock true", "run -n -w 1s stock true", "run -w -1s stock true",
		"run --ttl 5s --grace 3s stock true", "run --grace 2562047h stock true", "run --ttl 1ms --grace 0s stock true", "run --max-hold 0s stock true", "run -E 256 stock true",
		"run --redis http://x stock true", "run bad}name true", "show", "revoke stock", "revoke stock x", "ls a b"} {
		h.begin(strings.Fields(args)...).exits(exitUsage, "redismutex: ")
	}
	h.server.Kill()
	var unreachable []*program
	for _, args := range []string{"run stock true", "run -n stock true", "show stock", "ls", "revoke stock redismutex:a/1/b.1:1000"} {
		unreachable = append(unreachable, h.begin(strings.Fields(args)...))
	}
	for _, p := range unreachable {
		p.exits(exitRedis, "redis failed")
	}
	for _, args := range []string{"--help", "run --help", "show --help"} {
		if p := h.begin(strings.Fields(args)...); p.code() != 0 || !strings.Contains(p.out.String(), "redismutex") {
			t.Errorf("%s: %s", args, &p.out)
		}
	}
}

// Whatever the command does, nothing of its group runs when the lease ends.
func TestNothingRunsWhenTheLeaseEnds(t *testing.T) {
	const ttl, grace = 4 * time.Second, 500 * time.Millisecond
	for name, script := range map[string]string{
		"ends with SIGTERM":     "echo $$ > $D/pid; exec sleep 1000",
		"ignores SIGTERM":       "trap '' TERM; echo $$ > $D/pid; while :; do sleep 0.05; done",
		"is stopped":            "trap '' TERM; echo $$ > $D/pid; kill -STOP $$; while :; do sleep 0.05; done",
		"leaves a grandchild":   "trap '' TERM; (while :; do sleep 0.05; done) & echo $! > $D/pid; trap - TERM; sleep 1000",
		"ends as Redis freezes": "trap '' TERM; (while :; do sleep 0.05; done) & echo $! > $D/pid; while [ ! -e $D/frozen ]; do sleep 0.05; done",
	} {
		for _, killed := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", killed=", killed), func(t *testing.T) {
				h := newHall(t)
				p := h.begin(append([]string{"run", "--ttl", ttl.String(), "--grace", grace.String(), "stock"}, h.sh(script)...)...)
				pid := h.pid("pid")
				if killed {
					h.server.Kill()
				} else {
					h.server.Freeze()
					defer h.server.Thaw()
				}
				frozen := time.Now()
				if err := os.WriteFile(filepath.Join(h.dir, "frozen"), nil, 0o600); err != nil {
					t.Fatal(err)
				}
				redistest.Eventually(t, "the command has ended", func() bool { return !runs(pid) })
				if took := time.Since(frozen); took > ttl {
					t.Errorf("it ran for %v after Redis was gone, want %v at most", took, ttl)
				}
				if name != "ends as Redis freezes" {
					p.exits(exitLost, "stock")
				}
			})
		}
	}
}

// SIGTERM comes a grace before SIGKILL.
func TestCommandCleansUpBeforeTheLeaseEnds(t *testing.T) {
	h := newHall(t)
	p := h.begin(append([]string{"run", "--ttl", "6s", "--grace", "2s", "stock"},
		h.sh("trap 'sleep 1; touch $D/clean; exit' TERM; echo $$ > $D/pid; while :; do sleep 0.05; done")...)...)
	h.pid("pid")
	h.server.Freeze()
	defer h.server.Thaw()
	p.exits(exitLost, "stock")
	if _, err := os.Stat(filepath.Join(h.dir, "clean")); err != nil {
		t.Error("it was killed before it has cleaned up")
	}
}

func TestSignalEndsTheWaitAndLeavesNothing(t *testing.T) {
	h := newHall(t)
	h.holds()
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		if signal.Ignored(s) {
			continue // as under nohup: the program ignores it, too
		}
		p := h.begin("run", "stock", "true")
		h.eventually("it waits", func(s *redismutex.State) bool { return s.Waiting == 1 })
		_ = p.cmd.Process.Signal(s)
		p.exits(128+int(s), "while waiting")
		if s := h.state(); s.Waiting != 0 {
			t.Errorf("it still waits:\n%v", s)
		}
	}
}

func TestSignalIsPassedOnAndTheLockIsReleasedWhenTheCommandHasEnded(t *testing.T) {
	h := newHall(t)
	p := h.begin(append([]string{"run", "stock"},
		h.sh("trap 'touch $D/trapped; while [ ! -e $D/go ]; do sleep 0.01; done; exit 9' TERM; echo $$ > $D/pid; while :; do sleep 0.01; done")...)...)
	h.pid("pid")
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	redistest.Eventually(t, "it has the signal", func() bool { _, err := os.Stat(filepath.Join(h.dir, "trapped")); return err == nil })
	if s := h.state(); s.Mode != redismutex.Writing {
		t.Errorf("the lock was released too early:\n%v", s)
	}
	if err := os.WriteFile(filepath.Join(h.dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p.exits(9, "")
	if s := h.state(); s.Mode != redismutex.Free {
		t.Errorf("the lock was not released:\n%v", s)
	}
}

func TestWhatTheCommandLeavesBehindIsEnded(t *testing.T) {
	h := newHall(t)
	p := h.begin(append([]string{"run", "--grace", "100ms", "stock"}, h.sh("trap '' TERM; (while :; do sleep 0.05; done) & echo $! > $D/pid")...)...)
	p.exits(0, "")
	if pid := h.pid("pid"); runs(pid) {
		t.Error("it runs after the lock was released")
	}
}

func TestCommandEndsWithAProgramThatIsKilled(t *testing.T) {
	if _, err := os.Stat("/proc/self"); err != nil {
		t.Skip("only Linux tells a process that its parent was killed")
	}
	h := newHall(t)
	p := h.begin(append([]string{"run", "stock"}, h.sh("echo $$ > $D/pid; exec sleep 1000")...)...)
	pid := h.pid("pid")
	_ = p.cmd.Process.Kill()
	redistest.Eventually(t, "the command has ended", func() bool { return !runs(pid) })
}

func TestRevokedLockEndsTheCommand(t *testing.T) {
	h := newHall(t)
	p := h.begin(append([]string{"run", "--ttl", "4s", "--grace", "100ms", "stock"}, h.sh("echo $$ > $D/pid; exec sleep 1000")...)...)
	pid := h.pid("pid")
	shown := h.begin("show", "--json", "stock")
	shown.exits(0, "")
	var locks []lockJSON
	if err := json.Unmarshal(shown.out.Bytes(), &locks); err != nil {
		t.Fatalf("%v:\n%s", err, &shown.out)
	}
	id := locks[0].Holders[0].ID
	h.begin("revoke", "stock", id+"0").exits(1, "no holder or waiter has this id")
	h.begin("revoke", "stock", id).exits(0, "")
	if p.exits(exitLost, `lock revoked: "stock"; ending the command`); runs(pid) {
		t.Error("the command still runs")
	}
}

func TestMaxHoldEndsTheCommand(t *testing.T) {
	h := newHall(t)
	h.begin("run", "--max-hold", "200ms", "--grace", "100ms", "stock", "sleep", "1000").exits(exitLost, "lock held for too long; ending the command")
	if s := h.state(); s.Mode != redismutex.Free {
		t.Errorf("the lock was not released:\n%v", s)
	}
}

func TestListHasTheLocksThatAreHeldAndNothingElse(t *testing.T) {
	h := newHall(t)
	rc := h.server.Client(t)
	rc.Set(t.Context(), "foreign", "x", 0)
	rc.SAdd(t.Context(), "set", "x")
	rc.Set(t.Context(), "{seat}:token", "x", 0)
	rc.Set(t.Context(), "seat", "x", 0)
	for name, lock := range map[string]func(*redismutex.RWMutex) (*redismutex.Lock, bool){
		"deploy:a": func(m *redismutex.RWMutex) (*redismutex.Lock, bool) { return m.TryLock() },
		"deploy:b": func(m *redismutex.RWMutex) (*redismutex.Lock, bool) { return m.TryRLock() },
		"{x}":      func(m *redismutex.RWMutex) (*redismutex.Lock, bool) { return m.TryLock() },
		"{x}y":     func(m *redismutex.RWMutex) (*redismutex.Lock, bool) { return m.TryRLock() },
		"free":     func(m *redismutex.RWMutex) (*redismutex.Lock, bool) { l, ok := m.TryLock(); l.Unlock(); return l, ok },
	} {
		l, ok := lock(redismutex.NewMutex(rc, name))
		if !ok {
			t.Fatal(name)
		}
		defer l.Unlock()
	}
	for pattern, want := range map[string]string{"*": "deploy:a deploy:b {x} {x}y", "deploy:*": "deploy:a deploy:b", "nothing*": ""} {
		p := h.begin("ls", "--json", pattern)
		p.exits(0, "")
		var locks []lockJSON
		if err := json.Unmarshal(p.out.Bytes(), &locks); err != nil {
			t.Fatalf("%v:\n%s", err, &p.out)
		}
		var names []string
		for _, l := range locks {
			names = append(names, l.Name)
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("%s: want %q, got %q", pattern, want, got)
		}
	}
	p := h.begin("ls", "deploy*")
	if p.exits(0, ""); !strings.Contains(p.out.String(), "held for reading") {
		t.Errorf("got\n%s", &p.out)
	}
}

// A crowd of readers that has crashed is counted, and none of it is known by its id.
func TestListOfACrowdThatHasCrashed(t *testing.T) {
	h := newHall(t)
	rc := h.server.Client(t)
	// With a TTL of an hour nobody renews, and finds out, before the list has been printed.
	reader, err := redismutex.NewMutex(rc, "stock", redismutex.WithTTL(time.Hour)).RLockContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Unlock()
	waiter := h.begin("run", "--ttl", "1h", "-w", "1h", "stock", "true")
	h.eventually("it waits", func(s *redismutex.State) bool { return s.Waiting == 1 })
	var ids []any
	var leases []redis.Z
	for i := range 5000 {
		id := fmt.Sprint("redismutex:crashed/1/x.1:", i)
		ids, leases = append(ids, id), append(leases, redis.Z{Score: 1, Member: id})
	}
	p := rc.TxPipeline()
	p.SAdd(t.Context(), "stock", ids...)
	p.ZAdd(t.Context(), "{stock}:lease", leases...)
	p.SRem(t.Context(), "stock", reader.ID())
	if _, err := p.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := h.begin("ls")
	l.exits(0, "")
	if !strings.Contains(l.out.String(), "stock") {
		t.Errorf("got %q", &l.out)
	}
	_ = waiter.cmd.Process.Signal(syscall.SIGTERM)
	waiter.code()
}

func TestNamesDoNotControlTheTerminal(t *testing.T) {
	h := newHall(t)
	l, ok := redismutex.NewMutex(h.server.Client(t), "a\tb\n\x1b[31m").TryLock()
	if !ok {
		t.Fatal("not granted")
	}
	defer l.Unlock()
	p := h.begin("ls")
	if p.exits(0, ""); !strings.Contains(p.out.String(), `"a\tb\n\x1b[31m"  held for writing`) {
		t.Errorf("got %q", &p.out)
	}
}

// A command may end before anybody knows that its lock was lost. Its exit code stays, and the loss is reported.
func TestLossThatIsKnownAtTheEndIsReported(t *testing.T) {
	h := newHall(t)
	p := h.begin(append([]string{"run", "--ttl", "1h", "stock"}, h.sh("echo $$ > $D/pid; while [ ! -e $D/go ]; do sleep 0.01; done; exit 7")...)...)
	h.pid("pid")
	h.server.Client(t).FlushAll(t.Context())
	if err := os.WriteFile(filepath.Join(h.dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p.exits(7, "others may have held the lock")
}

func TestSeveralMastersAreOneLock(t *testing.T) {
	t.Parallel()
	var urls []string
	var servers []*redistest.Server
	for range 3 {
		s := redistest.Start(t)
		servers, urls = append(servers, s), append(urls, "--redis", "redis://"+s.Addr())
	}
	do := func(verb string, rest ...string) *program {
		return begin(t, "127.0.0.1:1", append(append([]string{verb}, urls...), rest...)...)
	}
	do("run", "stock", "true").exits(0, "")
	servers[0].Kill()
	do("run", "-n", "stock", "sh", "-c", "exit 4").exits(4, "")
	p := do("run", "stock", "sleep", "1000")
	redistest.Eventually(t, "a majority is held", func() bool {
		shown := do("show", "stock")
		shown.exits(0, "")
		return strings.Contains(shown.out.String(), "held for writing")
	})
	do("ls").exits(exitRedis, "") // there may be locks on the one that cannot be asked
	servers[1].Kill()
	p.exits(exitLost, "stock")
}

func TestEveryMasterOfAClusterIsAsked(t *testing.T) {
	t.Parallel()
	c := redistest.Cluster(t, 3)
	nodes := c.Nodes()
	url := "redis://" + nodes[0].Addr() + "?addr=" + nodes[1].Addr()
	rc := c.Client(t)
	want := ""
	for i := range 9 {
		name := fmt.Sprint("job-", i)
		l, ok := redismutex.NewMutex(rc, name).TryLock()
		if !ok {
			t.Fatal(name)
		}
		defer l.Unlock()
		want += name + " "
	}
	p := begin(t, "127.0.0.1:1", "ls", "--redis", url, "--json")
	p.exits(0, "")
	var locks []lockJSON
	if err := json.Unmarshal(p.out.Bytes(), &locks); err != nil {
		t.Fatal(err)
	}
	got := ""
	for _, l := range locks {
		got += l.Name + " "
	}
	if got != want {
		t.Errorf("want %q, got %q", want, got)
	}
	begin(t, "127.0.0.1:1", "run", "--redis", url, "-n", "other", "true").exits(0, "")
}

func TestPasswordIsNotPrinted(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"redis://user:hidden@host:99999999/x", "redis://user:hid%zzden@host", "redis://:hid/den@host", "redis://:hid#den@host",
		"user:hidden@host:1", "redis://host?master_name=x&password=hidden&nope=1"} {
		p := begin(t, "127.0.0.1:1", "show", "--redis", url, "stock")
		if p.exits(exitUsage, ""); strings.Contains(p.log.String(), "hid") {
			t.Errorf("%s: got %q", url, &p.log)
		}
	}
}

// The command is ended in time if what the program prints is read by nobody: a pager that waits, or a pipe that was closed.
func TestNothingRunsWhenTheLeaseEndsThoughNobodyReadsWhatIsPrinted(t *testing.T) {
	const ttl = 4 * time.Second
	for name, prepare := range map[string]func(read, write *os.File) error{
		"full": func(_, write *os.File) error {
			_ = write.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
			_, err := write.Write(make([]byte, 1<<21))
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return nil
			}
			return fmt.Errorf("the pipe is not full: %v", err)
		},
		"closed": func(read, _ *os.File) error { return read.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHall(t)
			read, write, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer read.Close()
			defer write.Close()
			if err := prepare(read, write); err != nil {
				t.Fatal(err)
			}
			// The command has a grandchild, which does not end by itself if the program does.
			p := beginAs(t, h.server.Addr(), func(c *exec.Cmd) { c.Stderr = write },
				append([]string{"run", "--ttl", ttl.String(), "--grace", "500ms", "stock"},
					h.sh("exec 2>$D/log; trap '' TERM; (while :; do sleep 0.05; done) & echo $! > $D/pid; while :; do sleep 0.05; done")...)...)
			pid := h.pid("pid")
			defer func() { _ = syscall.Kill(pid, syscall.SIGKILL) }()
			h.server.Freeze()
			defer h.server.Thaw()
			frozen := time.Now()
			redistest.Eventually(t, "the command has ended", func() bool { return !runs(pid) })
			if took := time.Since(frozen); took > ttl {
				t.Errorf("it ran for %v after Redis was gone, want %v at most", took, ttl)
			}
			read.Close()
			p.code()
		})
	}
}

// A signal that the program was started to ignore, as nohup does with SIGHUP, is ignored by it and by the command.
func TestNohupHoldsForTheCommand(t *testing.T) {
	h := newHall(t)
	p := beginAs(t, h.server.Addr(), func(c *exec.Cmd) {
		c.Args = append([]string{"sh", "-c", `trap "" HUP; exec "$@"`, "sh"}, c.Args...)
		c.Path = "/bin/sh"
	}, append([]string{"run", "stock"}, h.sh("echo $$ > $D/pid; kill -HUP $$; while [ ! -e $D/go ]; do sleep 0.01; done; exit 7")...)...)
	h.pid("pid")
	_ = p.cmd.Process.Signal(syscall.SIGHUP)
	if err := os.WriteFile(filepath.Join(h.dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p.exits(7, "")
}

func TestUsageErrorsNameTheirCode(t *testing.T) {
	var e exitError
	if err := execute(t.Context(), nil, nil, nil); !errors.As(err, &e) || e.code != exitUsage {
		t.Errorf("got %v", err)
	}
}
