package redistest

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/redis/go-redis/v9"
)

// masterName is the name of the master in the sentinel.
const masterName = "redistest"

// SentinelServers is a master, a replica and the sentinel that fails over between them.
type SentinelServers struct {
	tb       testing.TB
	data     []*Server
	sentinel *Server
	admin    *redis.SentinelClient
}

// Sentinel starts a master with one replica and one sentinel, which considers the master down after half a second.
func Sentinel(tb testing.TB) *SentinelServers {
	tb.Helper()
	ctx := context.Background()
	must := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatalf("redistest: sentinel: %v", err)
		}
	}

	master := Start(tb, "--repl-diskless-sync-delay", "0")
	host, port, err := net.SplitHostPort(master.Addr())
	must(err)
	replica := Start(tb, "--repl-diskless-sync-delay", "0", "--replicaof", host, port) // Redis 6.2 does not accept "host port" as one argument
	rc := replica.Client(tb)
	// The sentinel starts after the replica, since it asks a master for its replicas only every ten seconds.
	Eventually(tb, "the replica follows its master", func() bool {
		return fields(rc.Info(ctx, "replication").Val())["master_link_status"] == "up"
	})

	// A sentinel needs a configuration file in which to store its state.
	conf := filepath.Join(tb.TempDir(), "sentinel.conf")
	must(os.WriteFile(conf, nil, 0o600))
	s := &SentinelServers{tb: tb, data: []*Server{master, replica}}
	s.sentinel = start(tb, []string{conf, "--sentinel"}, nil)
	tb.Cleanup(func() {
		if text, err := os.ReadFile(s.sentinel.log); tb.Failed() && err == nil {
			tb.Logf("the end of the sentinel's log:\n%s", text[max(0, len(text)-8000):])
		}
	})
	s.admin = redis.NewSentinelClient(&redis.Options{Addr: s.sentinel.Addr()})
	tb.Cleanup(func() { s.admin.Close() })
	must(s.admin.Monitor(ctx, masterName, host, port, "1").Err())
	for option, ms := range map[string]int{"down-after-milliseconds": 500, "failover-timeout": 2000} {
		must(s.admin.Set(ctx, masterName, option, strconv.Itoa(ms)).Err())
	}
	Eventually(tb, "the sentinel knows the replica", func() bool {
		replicas := s.admin.Replicas(ctx, masterName).Val()
		return len(replicas) == 1 && replicas[0]["flags"] == "slave" && replicas[0]["master-link-status"] == "ok"
	})
	return s
}

// FailOverOnlyWhenTold stops the sentinel from judging by itself whether the master is down. On a busy machine it may take
// a master that is only slow for one that is down, and then it lets two masters live for ten seconds.
func (s *SentinelServers) FailOverOnlyWhenTold(tb testing.TB) {
	tb.Helper()
	if err := s.admin.Set(context.Background(), masterName, "down-after-milliseconds", "3600000").Err(); err != nil {
		tb.Fatalf("redistest: sentinel: %v", err)
	}
}

// FailOver tells the sentinel to promote the replica now. An error says that it cannot, yet, or that it is doing so.
func (s *SentinelServers) FailOver() error {
	return s.admin.Failover(context.Background(), masterName).Err()
}

// Client returns a client that follows the master, which is closed when the test ends.
func (s *SentinelServers) Client(tb testing.TB, mutate ...func(*redis.FailoverOptions)) *redis.Client {
	opt := &redis.FailoverOptions{MasterName: masterName, SentinelAddrs: []string{s.sentinel.Addr()}}
	for _, m := range mutate {
		m(opt)
	}
	rc := redis.NewFailoverClient(opt)
	tb.Cleanup(func() { rc.Close() })
	return rc
}

// Master returns the current master according to the sentinel.
func (s *SentinelServers) Master() *Server {
	s.tb.Helper()
	addr, err := s.admin.GetMasterAddrByName(context.Background(), masterName).Result()
	if err != nil {
		s.tb.Fatalf("redistest: sentinel: %v", err)
	}
	for _, d := range s.data {
		if d.Addr() == net.JoinHostPort(addr[0], addr[1]) {
			return d
		}
	}
	s.tb.Fatalf("redistest: want the sentinel to name one of its servers, got %s", addr)
	return nil
}
