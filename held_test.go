package redismutex

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/redismutex/redismutex/internal/node"
)

// heldBy checks that err is a HeldError that names that id, and matches ErrLock alone.
func (w *world) heldBy(err error, id string) {
	w.Helper()
	var held *HeldError
	w.matches(err, ErrLock)
	switch {
	case !errors.As(err, &held):
		w.Errorf("no HeldError: %v", err)
	case held.Key != "x" || held.Holder != id || held.Process != node.ProcessOf(id) || held.Process == "" || !strings.Contains(err.Error(), id):
		w.Errorf("want the holder %q of %q, got %+v: %v", id, "x", held, err)
	}
}

// Promise 10: who is refused learns who is in the way, from another process or from its own.
func TestRefusedTryNamesWhoIsInTheWay(t *testing.T) {
	for _, local := range []bool{false, true} {
		for _, turn := range []MutexOption{WithTurn(DefaultTurn), WithTurn(0)} {
			inBubble(t, func(w *world) {
				here := w.client(nil)
				m, other := NewMutex(here, "x", turn), NewMutex(w.client(nil), "x", turn)
				if local {
					other = NewMutex(here, "x", turn)
				}
				try := func(write bool) error {
					ask := other.TryRLockContext
					if write {
						ask = other.TryLockContext
					}
					_, err := ask(w.Context())
					return err
				}
				l := w.lock(m, true)
				w.heldBy(try(true), l.ID())
				w.heldBy(try(false), l.ID())
				w.unlock(l)
				r := w.lock(m, false)
				w.heldBy(try(true), r.ID())
				next := w.later(m, true)
				synctest.Wait()
				waiting, err := w.Redis.SortedSet(m.keys.Intents())
				if err != nil || len(waiting) != 1 {
					w.Fatalf("%v, waiting: %v", err, waiting)
				}
				for intent := range waiting {
					w.heldBy(try(false), intent[1:])
				}
				w.heldBy(try(true), r.ID())
				w.unlock(r)
				w.unlock(<-next)
			})
		}
	}
}

// On several nodes each one that refuses names who holds it there.
func TestRefusalOfSeveralNodesNamesTheHolder(t *testing.T) {
	onNodes(t, 3, func(ns *nodes) {
		l := ns.lock(ns.mutex(), true)
		_, err := ns.mutex().TryLockContext(ns.Context())
		var held *HeldError
		if ns.matches(err, ErrLock); !errors.As(err, &held) || node.AcquisitionOf(held.Holder) != node.AcquisitionOf(l.ID()) {
			ns.Errorf("want the holder %q, got %+v: %v", l.ID(), held, err)
		}
		ns.unlock(l)
	})
}
