// Package mailbox delivers grants to the waiters of one process.
//
// A mailbox is one Pub/Sub channel with a name of its own, on which one process
// receives the grants of its waiters, and learns that an id was revoked. It is
// subscribed while a waiter has joined, or a holder renews, and for a while
// after. Redis may lose messages, so each time the subscription starts or ends
// the mailbox has every waiter renewed: the reply tells it whether it has been
// granted the lock.
package mailbox

import (
	"context"
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// linger is how long a mailbox stays open after its last waiter has left, so
	// that occasional contention does not subscribe again each time.
	linger = 5 * time.Second

	// silence is how long a subscription may be silent before it is pinged, and
	// how long the ping may take: a connection may be dead without being closed.
	silence = 3 * time.Second

	// perRenewal is more time than the renewal of one waiter takes when many are renewed at once.
	perRenewal = 50 * time.Microsecond

	minBackoff = 10 * time.Millisecond
	maxBackoff = time.Second
)

// A Subscriber is a Redis client that can subscribe.
type Subscriber interface {
	Subscribe(ctx context.Context, channels ...string) *redis.PubSub
}

// A Waiter receives the events of a mailbox. Its methods must not block.
type Waiter interface {
	// Granted is called when a message grants the lock to the waiter.
	Granted(token uint64)
	// Key returns the name of the lock.
	Key() string // must take no mutex
	// RenewNow is called when messages to the waiter may have been lost.
	RenewNow()
	// SubscriptionFailed is called on one of the waiters.
	SubscriptionFailed(err error)
}

// A Box is a mailbox. Its methods are safe for concurrent use.
type Box struct {
	name    string
	sub     Subscriber
	revoked func(n uint64)
	listens atomic.Bool
	sweeps  atomic.Uint32

	mu      sync.Mutex
	waiters map[uint64]Waiter
	pubsub  *redis.PubSub       // nil: closed
	settled chan struct{}       // closed when the subscription has been confirmed or has failed
	stop    chan struct{}       // closed to end the subscription
	open    time.Time           // until then it stays open without a waiter
	idle    *time.Timer         // runs while there is no waiter
	idles   int                 // the number of that timer
	lost    map[string]struct{} // the keys whose waiters must be renewed; nil: no sweep is running
}

// New returns a mailbox on the channel of that name. With a nil Subscriber it
// never receives a message. Revoked is called with the number of each id that a
// message revokes, of a waiter or of a holder; it must not block.
func New(sub Subscriber, name string, revoked func(n uint64)) *Box {
	return &Box{name: name, sub: sub, revoked: revoked, waiters: map[uint64]Waiter{}}
}

// Name returns the name of the channel.
func (b *Box) Name() string { return b.name }

// Listens reports whether the subscription is in place.
func (b *Box) Listens() bool { return b.listens.Load() }

// Sweeps returns how often waiters have been renewed so far because messages may have been lost. A waiter whose acquire was
// under way meanwhile could not be, and has to be renewed when that is answered.
func (b *Box) Sweeps() uint32 { return b.sweeps.Load() }

// Join delivers the messages for an id to w, and opens the mailbox if it is
// closed. The channel it returns is closed when the subscription has been
// confirmed or has failed. An id is the name of the mailbox, ":", and the number n.
func (b *Box) Join(n uint64, w Waiter) (settled <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiters[n] = w
	return b.subscribe()
}

// StayOpen opens the mailbox, if it is closed, and keeps it open for that long,
// also without a waiter: a holder that is revoked learns of it by a message.
func (b *Box) StayOpen(d time.Duration) {
	if b.sub == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if open := time.Now().Add(d); open.After(b.open) { // another one may hold for longer
		b.open = open
	}
	b.subscribe()
	b.closeLater()
}

// subscribe opens the mailbox if it is closed, and has it stay open.
func (b *Box) subscribe() (settled <-chan struct{}) {
	if b.idle != nil {
		b.idle.Stop()
		b.idle = nil
	}
	if b.settled == nil {
		b.settled = make(chan struct{})
		if b.sub == nil {
			close(b.settled)
		} else {
			b.stop = make(chan struct{})
			go b.run(b.stop, b.settled)
		}
	}
	return b.settled
}

// Leave undoes Join: later messages for the id are ignored.
func (b *Box) Leave(n uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.waiters, n)
	b.closeLater()
}

// closeLater closes the mailbox, unless it has a waiter, when it has lingered.
func (b *Box) closeLater() {
	if len(b.waiters) == 0 && b.stop != nil && b.idle == nil {
		b.idles++
		which := b.idles
		b.idle = time.AfterFunc(max(linger, time.Until(b.open)), func() { b.closeIdle(which) })
	}
}

func (b *Box) closeIdle(which int) {
	b.mu.Lock()
	if b.idle == nil || b.idles != which { // a waiter joined as the timer fired
		b.mu.Unlock()
		return
	}
	b.idle = nil
	close(b.stop)
	pubsub := b.pubsub
	b.stop, b.settled, b.pubsub = nil, nil, nil
	b.listens.Store(false)
	b.mu.Unlock()
	if pubsub != nil {
		_ = pubsub.Close() // may wait for a dial in progress
	}
}

// run subscribes, again after each failure, until stop is closed.
func (b *Box) run(stop <-chan struct{}, settled chan struct{}) {
	for failed := 0; ; failed++ {
		confirmed, err := b.listen(stop, settled)
		if isClosed(stop) {
			return
		}
		if confirmed {
			failed = 0
		}
		b.setListens(stop, false)
		if failed == 0 {
			b.tellFailure(err)
		}
		if !isClosed(settled) {
			close(settled)
		}
		backoff := time.NewTimer(min(minBackoff<<min(failed, 10), maxBackoff))
		select {
		case <-backoff.C:
		case <-stop:
			backoff.Stop()
			return
		}
	}
}

// listen subscribes once and delivers messages until the connection fails. It
// reports whether the subscription was ever confirmed.
func (b *Box) listen(stop <-chan struct{}, settled chan struct{}) (confirmed bool, err error) {
	ctx := context.Background()
	pubsub := b.sub.Subscribe(ctx, b.name)
	defer pubsub.Close()
	b.mu.Lock()
	if isClosed(stop) {
		b.mu.Unlock()
		return false, nil
	}
	b.pubsub = pubsub
	b.mu.Unlock()

	for pinged := false; ; {
		event, err := pubsub.ReceiveTimeout(ctx, silence)
		if timeout := net.Error(nil); errors.As(err, &timeout) && timeout.Timeout() && !pinged && confirmed {
			pinged = true
			err = pubsub.Ping(ctx)
			if err == nil {
				continue
			}
		}
		if err != nil {
			return confirmed, err
		}
		pinged = false
		switch event := event.(type) {
		case *redis.Subscription:
			// It also comes after the client has reconnected by itself:
			// messages published meanwhile are lost.
			confirmed = true
			b.setListens(stop, true)
			if !isClosed(settled) {
				close(settled)
			}
		case *redis.Message:
			b.Deliver(event.Payload)
		}
	}
}

// setListens records that the subscription started or ended, and renews every
// waiter: it may have missed a message, or must poll from now on.
func (b *Box) setListens(stop <-chan struct{}, listens bool) {
	b.mu.Lock()
	if isClosed(stop) {
		b.mu.Unlock()
		return
	}
	changed := b.listens.Swap(listens) != listens
	var waiters []Waiter
	if changed || listens {
		waiters = b.all()
		b.sweeps.Add(1)
	}
	b.mu.Unlock()
	for _, w := range waiters {
		w.RenewNow()
	}
}

func (b *Box) tellFailure(err error) {
	b.mu.Lock()
	waiters := b.all()
	b.mu.Unlock()
	if len(waiters) > 0 {
		waiters[0].SubscriptionFailed(err)
	}
}

func (b *Box) all() []Waiter {
	waiters := make([]Waiter, 0, len(b.waiters))
	for _, w := range b.waiters {
		waiters = append(waiters, w)
	}
	return waiters
}

// RenewWaiters renews every waiter for key, because a message to one of them may have been lost. It does nothing if the
// subscription is about to start: that renews all waiters.
func (b *Box) RenewWaiters(key string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stop != nil && !b.listens.Load() {
		return
	}
	if b.lost == nil {
		b.lost = map[string]struct{}{}
		go b.sweep()
	}
	b.lost[key] = struct{}{}
}

// sweep renews the waiters for the keys in lost, until lost is empty. One sweep runs at a time, and the next starts when
// the calls of the last may have been answered. For messages lost during a sweep, which slows Redis down, the waiters are
// renewed once, and not once for each message.
func (b *Box) sweep() {
	for {
		b.mu.Lock()
		if len(b.lost) == 0 {
			b.lost = nil
			b.mu.Unlock()
			return
		}
		var waiters []Waiter
		for _, w := range b.waiters {
			if _, lost := b.lost[w.Key()]; lost {
				waiters = append(waiters, w)
			}
		}
		clear(b.lost)
		b.sweeps.Add(1)
		b.mu.Unlock()
		for _, w := range waiters {
			w.RenewNow()
		}
		time.Sleep(time.Duration(1+len(waiters)) * perRenewal)
	}
}

// Deliver calls Granted on the waiters that a message names. A message is
// "<token> <n> <n> …"; the token of readers is 0. Or it is "revoked <n>": that
// id has been revoked. Anything else is ignored.
func (b *Box) Deliver(message string) {
	if message == "" {
		return
	}
	first, rest, _ := strings.Cut(message, " ")
	if first == "revoked" {
		if n, err := strconv.ParseUint(rest, 10, 64); err == nil {
			b.revoked(n)
		}
		return
	}
	token, err := strconv.ParseUint(first, 10, 64)
	for err == nil && rest != "" {
		first, rest, _ = strings.Cut(rest, " ")
		var n uint64
		if n, err = strconv.ParseUint(first, 10, 64); err == nil {
			b.mu.Lock()
			w := b.waiters[n]
			b.mu.Unlock()
			if w != nil {
				w.Granted(token)
			}
		}
	}
}

func isClosed[T any](c <-chan T) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
