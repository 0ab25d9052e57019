package redistest

import (
	"net"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestRestartedServerIsEmptyAndKeepsItsAddress(t *testing.T) {
	t.Parallel()
	s := Start(t)
	rc := s.Client(t)
	addr := s.Addr()
	if err := rc.Set(t.Context(), "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	s.Restart(t)
	if s.Addr() != addr {
		t.Fatalf("want the address %s after a restart, got %s", addr, s.Addr())
	}
	if err := rc.Get(t.Context(), "k").Err(); err != redis.Nil {
		t.Fatalf("want no key after a restart, got %v", err)
	}
}

func TestKilledServerRefuses(t *testing.T) {
	s := Start(t)
	s.Kill()
	if c, err := net.Dial("tcp", s.Addr()); err == nil {
		c.Close()
		t.Fatal("want the connection refused after Kill, it was accepted")
	}
}

func TestFrozenServerAnswersOnlyAfterThaw(t *testing.T) {
	t.Parallel()
	s := Start(t)
	rc := s.Client(t, func(o *redis.Options) {
		o.ReadTimeout = 100 * time.Millisecond
		o.MaxRetries = -1
	})
	if err := rc.Ping(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	s.Freeze()
	if err := rc.Incr(t.Context(), "n").Err(); err == nil {
		t.Fatal("want no answer of a frozen server, got one")
	}
	s.Thaw()
	Eventually(t, "the request to the frozen server has run", func() bool {
		return rc.Get(t.Context(), "n").Val() == "1"
	})
}

func TestArgumentsReachTheServer(t *testing.T) {
	t.Parallel()
	rc := Start(t, "--maxmemory-policy", "allkeys-lru").Client(t)
	got, err := rc.ConfigGet(t.Context(), "maxmemory-policy").Result()
	if err != nil || got["maxmemory-policy"] != "allkeys-lru" {
		t.Fatalf("want allkeys-lru, got %v, %v", got, err)
	}
}

func TestVersionIsTheServers(t *testing.T) {
	t.Parallel()
	s := Start(t)
	if major, minor := s.Version(t); major < 6 || minor < 0 {
		t.Fatalf("want a version of 6.0 at least, got %d.%d", major, minor)
	}
}

// A foreign server on the port is never taken for the test's own, and receives no command but INFO.
func TestForeignServerIsNotUsed(t *testing.T) {
	t.Parallel()
	foreign := Start(t)
	rc := foreign.Client(t)
	before := commands(t, rc)

	own := Start(t)
	own.Kill()
	own.port = foreign.port
	if err := own.launch(); err == nil {
		t.Fatal("want an error for a port with a foreign server, got none")
	}
	if after := commands(t, rc); after != before {
		t.Errorf("want no command but INFO, commands before%s\nafter%s", before, after)
	}
}

// commands returns the server's statistics of the commands so far, except INFO.
func commands(t *testing.T, rc *redis.Client) (all string) {
	t.Helper()
	stats, err := rc.Info(t.Context(), "commandstats").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range slices.Sorted(strings.Lines(stats)) {
		if strings.HasPrefix(line, "cmdstat_") && !strings.HasPrefix(line, "cmdstat_info:") {
			all += "\n" + strings.TrimSpace(line)
		}
	}
	return all
}

func TestWithoutServerSkipsAndInCIFails(t *testing.T) {
	t.Setenv("REDISTEST_SERVER", "no-such-server")
	for ci, want := range map[string]string{"": "skipped", "false": "skipped", "true": "failed"} {
		t.Setenv("CI", ci)
		r := &recorder{TB: t}
		done := make(chan struct{})
		go func() {
			defer close(done)
			Start(r)
		}()
		if <-done; r.outcome != want {
			t.Errorf("CI=%q: want the test %s, it was %s", ci, want, r.outcome)
		}
	}
}

// recorder is a test that only records how it ended.
type recorder struct {
	testing.TB
	outcome string
}

func (r *recorder) Skipf(string, ...any)  { r.outcome = "skipped"; runtime.Goexit() }
func (r *recorder) Fatalf(string, ...any) { r.outcome = "failed"; runtime.Goexit() }
