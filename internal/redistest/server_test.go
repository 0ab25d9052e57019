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
		t.Fatalf("moved from %s to %s", addr, s.Addr())
	}
	if err := rc.Get(t.Context(), "k").Err(); err != redis.Nil {
		t.Fatalf("the key is still there: %v", err)
	}
}

func TestKilledServerRefuses(t *testing.T) {
	s := Start(t)
	s.Kill()
	if c, err := net.Dial("tcp", s.Addr()); err == nil {
		c.Close()
		t.Fatal("somebody listens")
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
		t.Fatal("a frozen server answered")
	}
	s.Thaw()
	Eventually(t, "what was sent to the frozen server has been run", func() bool {
		return rc.Get(t.Context(), "n").Val() == "1"
	})
}

func TestArgumentsReachTheServer(t *testing.T) {
	t.Parallel()
	rc := Start(t, "--maxmemory-policy", "allkeys-lru").Client(t)
	got, err := rc.ConfigGet(t.Context(), "maxmemory-policy").Result()
	if err != nil || got["maxmemory-policy"] != "allkeys-lru" {
		t.Fatal(got, err)
	}
}

func TestVersionIsTheServers(t *testing.T) {
	t.Parallel()
	s := Start(t)
	if major, minor := s.Version(t); major < 6 || minor < 0 {
		t.Fatalf("version %d.%d", major, minor)
	}
}

// A port on which another server listens is never taken for ours, and that server is told nothing but INFO.
func TestStrangerIsNotTakenForOurs(t *testing.T) {
	t.Parallel()
	stranger := Start(t)
	rc := stranger.Client(t)
	before := commands(t, rc)

	ours := Start(t)
	ours.Kill()
	ours.port = stranger.port
	if err := ours.launch(); err == nil {
		t.Fatal("took the stranger for its own")
	}
	if after := commands(t, rc); after != before {
		t.Errorf("the stranger was told more than INFO: before%s\nafter%s", before, after)
	}
}

// commands is what a server has been told so far, INFO aside, in the server's own words.
func commands(t *testing.T, rc *redis.Client) (told string) {
	t.Helper()
	stats, err := rc.Info(t.Context(), "commandstats").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range slices.Sorted(strings.Lines(stats)) {
		if strings.HasPrefix(line, "cmdstat_") && !strings.HasPrefix(line, "cmdstat_info:") {
			told += "\n" + strings.TrimSpace(line)
		}
	}
	return told
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
			t.Errorf("CI=%q: %s, want %s", ci, r.outcome, want)
		}
	}
}

// recorder is a test that only notes how it ended.
type recorder struct {
	testing.TB
	outcome string
}

func (r *recorder) Skipf(string, ...any)  { r.outcome = "skipped"; runtime.Goexit() }
func (r *recorder) Fatalf(string, ...any) { r.outcome = "failed"; runtime.Goexit() }
