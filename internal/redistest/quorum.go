package redistest

import (
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/redismutex/redismutex/internal/faultnet"
)

// A Quorum is several independent servers.
type Quorum struct {
	tb      testing.TB
	Servers []*Server
	Admin   []*redis.Client  // clients of each server, whose networks never fail
	Links   []*faultnet.Link // between each server and all processes; nil: these networks never fail
}

// StartQuorum starts that many servers.
func StartQuorum(tb testing.TB, n int) *Quorum {
	tb.Helper()
	q := &Quorum{tb: tb}
	for range n {
		s := Start(tb)
		q.Servers = append(q.Servers, s)
		q.Admin = append(q.Admin, s.Client(tb))
	}
	return q
}

// BehindLinks makes later processes reach the servers through Links. These are expensive, so only tests in which they fail
// use them.
func (q *Quorum) BehindLinks() {
	for range q.Servers {
		q.Links = append(q.Links, faultnet.New(nil))
	}
}

// Process returns the clients of another process.
func (q *Quorum) Process(mutate ...func(*redis.Options)) (clients []redis.Scripter) {
	for i, s := range q.Servers {
		opt := mutate
		if q.Links != nil {
			opt = append(opt[:len(opt):len(opt)], Through(q.Links[i]))
		}
		clients = append(clients, s.Client(q.tb, opt...))
	}
	return clients
}

// Eventually waits until holds returns true for every server.
func (q *Quorum) Eventually(what string, holds func(rc *redis.Client) bool) {
	q.tb.Helper()
	for _, rc := range q.Admin {
		Eventually(q.tb, what, func() bool { return holds(rc) })
	}
}
