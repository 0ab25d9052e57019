// Package mailbox answers: who is woken, and what if the message is lost?
//
// A mailbox is one Pub/Sub channel, named at random, on which one process hears
// of the grants to its waiters. It is subscribed while anybody waits and for a
// while after. Messages may be lost, so a mailbox says when it hears, and each
// time that it begins to hear, or ceases to, it tells every waiter to look for
// itself.
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
	// linger is how long a mailbox stays open after its last waiter, so that
	// contention that comes and goes does not subscribe anew each time.
	linger = 5 * time.Second

	// silence is how long a subscription may be silent before it is pinged,
	// and then until it is given up: a link may be dead and not closed.
	silence = 3 * time.Second

	// perLook is more than it takes a waiter to look, where many do.
	perLook = 50 * time.Microsecond

	minBackoff = 10 * time.Millisecond
	maxBackoff = time.Second
)

// A Subscriber is a Redis client that can subscribe.
type Subscriber interface {
	Subscribe(ctx context.Context, channels ...string) *redis.PubSub
}

// A Waiter is told what a mailbox hears. Its methods must not block.
type Waiter interface {
	// Granted says that the waiter has been granted what it waits for.
	Granted(token uint64)
	// Key is what the waiter waits for.
	Key() string
	// Look says that messages may have been lost.
	Look()
	// Deaf says, to one of the waiters, why the mailbox does not hear.
	Deaf(err error)
}

// A Box is a mailbox. Its methods are safe for concurrent use.
type Box struct {
	name  string
	sub   Subscriber
	hears atomic.Bool

	mu      sync.Mutex
	waiters map[uint64]Waiter
	pubsub  *redis.PubSub       // nil: closed
	settled chan struct{}       // closed when it is known whether the subscription works
	stop    chan struct{}       // closed when the subscription is to end
	idle    *time.Timer         // runs while nobody waits
	idles   int                 // which of these timers that is
	swept   time.Time           // when all waiters were last told to look
	lost    map[string]struct{} // the keys whose waiters are to look; nil: no sweep is under way
}

// New makes a mailbox on the channel of that name. With a nil Subscriber it
// never hears.
func New(sub Subscriber, name string) *Box {
	return &Box{name: name, sub: sub, waiters: map[uint64]Waiter{}}
}

// Name is the name of the channel.
func (b *Box) Name() string { return b.name }

// Hears says whether the subscription is in place.
func (b *Box) Hears() bool { return b.hears.Load() }

// Join makes w the waiter that messages for an id are meant for, and opens the
// mailbox if it is closed. The channel is closed when the mailbox hears, or is
// known not to. An id is the name of the mailbox, ":", and a number.
func (b *Box) Join(id string, w Waiter) (settled <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiters[b.number(id)] = w
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

// number is that of an id.
func (b *Box) number(id string) uint64 {
	n, _ := strconv.ParseUint(id[strings.LastIndexByte(id, ':')+1:], 10, 64)
	return n
}

// Leave ends what Join began. A message for the id means nothing from here on.
func (b *Box) Leave(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.waiters, b.number(id))
	if len(b.waiters) == 0 && b.stop != nil && b.idle == nil {
		b.idles++
		which := b.idles
		b.idle = time.AfterFunc(linger, func() { b.closeIdle(which) })
	}
}

func (b *Box) closeIdle(which int) {
	b.mu.Lock()
	if b.idle == nil || b.idles != which { // somebody joined as the timer fired
		b.mu.Unlock()
		return
	}
	b.idle = nil
	close(b.stop)
	pubsub := b.pubsub
	b.stop, b.settled, b.pubsub = nil, nil, nil
	b.hears.Store(false)
	b.mu.Unlock()
	if pubsub != nil {
		_ = pubsub.Close() // may wait for a dial under way
	}
}

// run keeps the subscription up until stop is closed.
func (b *Box) run(stop <-chan struct{}, settled chan struct{}) {
	for failed := 0; ; failed++ {
		heard, err := b.listen(stop, settled)
		if isClosed(stop) {
			return
		}
		if heard {
			failed = 0
		}
		b.setHears(stop, false)
		if failed == 0 {
			b.report(err)
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

// listen subscribes once and passes messages on until the link fails. It says
// whether it ever heard.
func (b *Box) listen(stop <-chan struct{}, settled chan struct{}) (heard bool, err error) {
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
		if timeout := net.Error(nil); errors.As(err, &timeout) && timeout.Timeout() && !pinged && heard {
			pinged = true
			err = pubsub.Ping(ctx)
			if err == nil {
				continue
			}
		}
		if err != nil {
			return heard, err
		}
		pinged = false
		switch event := event.(type) {
		case *redis.Subscription:
			// Also when the client has reconnected by itself: what was
			// published meanwhile is lost.
			heard = true
			b.setHears(stop, true)
			if !isClosed(settled) {
				close(settled)
			}
		case *redis.Message:
			b.Deliver(event.Payload)
		}
	}
}

// setHears records that the subscription came or went, and has every waiter
// look: it may have missed a message, or has to look more often.
func (b *Box) setHears(stop <-chan struct{}, hears bool) {
	b.mu.Lock()
	if isClosed(stop) {
		b.mu.Unlock()
		return
	}
	changed := b.hears.Swap(hears) != hears
	var waiters []Waiter
	if changed || hears {
		waiters = b.all()
		b.swept = time.Now()
	}
	b.mu.Unlock()
	for _, w := range waiters {
		w.Look()
	}
}

func (b *Box) report(err error) {
	b.mu.Lock()
	waiters := b.all()
	b.mu.Unlock()
	if len(waiters) > 0 {
		waiters[0].Deaf(err)
	}
}

func (b *Box) all() []Waiter {
	waiters := make([]Waiter, 0, len(b.waiters))
	for _, w := range b.waiters {
		waiters = append(waiters, w)
	}
	return waiters
}

// Look has every waiter for key look: a message to one of them that was sent after since may be lost. It does nothing
// if the subscription has come or gone since then, or is still to come: all waiters look then.
func (b *Box) Look(key string, since time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.swept.After(since) || b.stop != nil && !b.hears.Load() {
		return
	}
	if b.lost == nil {
		b.lost = map[string]struct{}{}
		go b.sweep()
	}
	b.lost[key] = struct{}{}
}

// sweep has the waiters for the keys in lost look, until there are none. One sweep is under way at a time, and the
// next begins when the calls of the one before may have been answered: what is lost during a sweep, while Redis is slow
// because of it, has everybody look once more and not once for each message.
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
		b.mu.Unlock()
		for _, w := range waiters {
			w.Look()
		}
		time.Sleep(time.Duration(1+len(waiters)) * perLook)
	}
}

// Deliver passes a message on: "<token> <n> <n> …", the token 0 for readers.
// Anything else is not for us.
func (b *Box) Deliver(message string) {
	if message == "" {
		return
	}
	first, rest, _ := strings.Cut(message, " ")
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
