package redismutex

import (
	"context"
	"fmt"

	"github.com/redismutex/redismutex/internal/lockerr"
	"github.com/redismutex/redismutex/internal/node"
	"github.com/redismutex/redismutex/internal/script"
)

// Revoke ends the acquisition with that id, which holds the lock or waits for it, in whatever process. The script that ends it
// hands the lock on, and a message tells its process: the locks that are held under it end at once with [ErrRevoked], and a
// wait returns ErrRevoked. Ids are those of [RWMutex.Inspect], [HeldError] and [Lock.ID]; with several nodes the id on any of
// them will do. Revoke never ends another acquisition: a lock that somebody else holds by now stays as it is.
//
// A process that does not get the message learns of it when it renews, at half its TTL at the latest. A process listens for
// messages from the first renewal of its lock on, at half the TTL, or if it has waited a moment ago; before that it gets
// none. Its locks may be in use until then: as after a loss, the fencing token of the next holder is the greater one. A
// process that is stopped learns of it when it goes on. A process gets [ErrLockLost] in place of ErrRevoked if its lease
// has ended by then, if it asks later than two TTLs of m after the call, or if it unlocks before it knows: Redis remembers
// why for no longer, and an unlock does not ask. If goroutines of one process share an acquisition (see [WithTurn]), the
// locks of all of them end, or, if it waits, the wait of the one that it was made for.
//
// The error is nil if a majority of the nodes has answered, and one of them knew the id. If none did, it matches
// [ErrNoSuchID]. It also matches [ErrRedis], [ErrNotLock], or ctx's error; then the id may have been revoked on some nodes, and
// Revoke may be called again. The only option that it takes is [WithKey].
func (m *RWMutex) Revoke(ctx context.Context, id string, opt ...LockOption) error {
	r, err := m.aside(ctx, opt)
	if err != nil {
		return err
	}
	if !node.IsID(id) {
		return fmt.Errorf("%w: %q is not the id of a lock", ErrInvalid, id)
	}
	known := make([]bool, len(m.config.Nodes))
	c := r.keys.Revoke(id, m.config.Durations, len(m.config.Nodes) > 1)
	errs := r.onEachNode(func(ctx context.Context, i int, n *node.Node) error {
		reply, err := n.Revoke(ctx, m.config.TTL, c)
		switch {
		case err != nil:
			return err
		case reply.Status == script.Foreign:
			return lockerr.Foreign(reply.Data)
		}
		n.CheckPublish(reply, m.config.Log)
		known[i] = reply.Status != script.Gone
		return nil
	})
	err = r.explainErrors("revoke", errs)
	for _, is := range known {
		if is || err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: %q: %q", ErrNoSuchID, r.keys.Name(), id)
}
