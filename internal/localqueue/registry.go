package localqueue

import (
	"sync"
	"unique"

	"github.com/redismutex/redismutex/internal/acquisition"
	"github.com/redismutex/redismutex/internal/script"
)

// queues has the queue of every key that somebody of this process holds or waits for, except those of strict requests.
var queues struct {
	sync.Mutex
	m map[queueKey]*queue
}

// A queueKey is what the requests of one queue have in common.
type queueKey struct {
	kind unique.Handle[acquisition.Kind]
	key  string
}

// A memory has what a request needs that has a queue to itself, as most have.
type memory struct {
	queue queue
	grant grant
	turn  turn
}

// enter adds a request to the queue of a key and returns that queue. If the request is the first, enter makes the queue, as a
// part of own.
func enter(c *acquisition.Config, keys *script.Keys) (q *queue, own *memory) {
	queues.Lock()
	defer queues.Unlock()
	n := queueKey{c.Kind, keys.Name()}
	if q = queues.m[n]; q == nil {
		if queues.m == nil {
			queues.m = map[queueKey]*queue{}
		}
		own = new(memory)
		q = &own.queue
		queues.m[n] = q
	}
	q.requests++
	return q, own
}

// leave removes that many requests from the queue of a key, and forgets a queue without requests.
func (q *queue) leave(c *acquisition.Config, keys *script.Keys, requests int32) {
	if q.alone {
		return
	}
	queues.Lock()
	defer queues.Unlock()
	q.requests -= requests
	if q.requests == 0 {
		delete(queues.m, queueKey{c.Kind, keys.Name()})
	}
}

// A Crowd is the waiters of one queue of this process.
type Crowd struct {
	Requests int    // how many wait
	Asks     string // the id of the acquisition that is made for the first; "": none, as they wait for a lock of this process
}

// Crowds returns the waiters of this process for a key on the node with that mailbox: for redismutextest.
func Crowds(mailbox, key string) (crowds []Crowd) {
	for _, q := range queuesOf(mailbox, key) {
		q.mu.Lock()
		c := Crowd{Requests: q.first.len() + q.rest.len()}
		if q.pending != nil {
			c.Asks = q.pending.acq.CurrentID()
		}
		q.mu.Unlock()
		if c.Requests > 0 {
			crowds = append(crowds, c)
		}
	}
	return crowds
}

// queuesOf returns the queues of a key on the node with that mailbox. The mutex of a queue comes before that of queues.
func queuesOf(mailbox, key string) (of []*queue) {
	queues.Lock()
	defer queues.Unlock()
	for n, q := range queues.m {
		if n.key == key && n.kind.Value().IsOn(mailbox) {
			of = append(of, q)
		}
	}
	return of
}

// Len returns how many keys have a queue.
func Len() int {
	queues.Lock()
	defer queues.Unlock()
	return len(queues.m)
}
