package node

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/clock"
	"github.com/redismutex/redismutex/internal/script"
)

// An owner of leases that nobody tells anything.
type owner struct {
	Owner
	request Request
}

func (o owner) Request() Request { return o.request }

// A lease whose trust is bounded, while it waits to be sent with others, goes before those that end later.
func TestLeaseWhoseTokenIsRaisedGoesFirst(t *testing.T) {
	rc := redis.NewClient(&redis.Options{})
	t.Cleanup(func() { rc.Close() })
	n := newNode(rc)
	keys, err := script.NewKeys("x")
	if err != nil {
		t.Fatal(err)
	}
	o := owner{request: Request{Terms: &Terms{TTL: time.Hour, Timeout: time.Minute}, Keys: keys}}
	leases := make([]Lease, 10)
	now := clock.Now()
	rn := &n.Renewer
	for i := range leases {
		l := &leases[i]
		l.Init(o, n, NewNumber(), true)
		l.end.Store(int64(now.Add(time.Duration(30+i) * time.Minute)))
		rn.leases.makeReady(l)
	}
	last := &leases[len(leases)-1]
	rn.Raise(last, 1)
	if first := rn.leases.ready.first(); first != last {
		t.Errorf("the lease that ends in %v goes first, want that which ends in %v",
			time.Duration(first.Until()-now), time.Duration(last.Until()-now))
	}
	for i := range leases {
		rn.Forget(&leases[i])
	}
}
