package redistest

import (
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/redismutex/redismutex/internal/faultnet"
)

// A Quorum is several servers that know nothing of each other.
type Quorum struct {
	tb      testing.TB
	Servers []*Server
	Admin   []*redis.Client  // look at each of them, by a way that never fails
	Links   []*faultnet.Link // between each of them and all processes; nil: these networks never fail
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

// BehindLinks has the processes to come reach the servers through Links. These cost much, so they are there only for
// tests in which they fail.
func (q *Quorum) BehindLinks() {
	for range q.Servers {
		q.Links = append(q.Links, faultnet.New(nil))
	}
}

// Process returns the clients of one more process.
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

// Eventually waits until something is true of every server.
func (q *Quorum) Eventually(what string, holds func(rc *redis.Client) bool) {
	q.tb.Helper()
	for _, rc := range q.Admin {
		Eventually(q.tb, what, func() bool { return holds(rc) })
	}
}
