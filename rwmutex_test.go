package redismutex_test

// The ten promises of the package documentation, one test each, in their order. Each goes through the public API alone,
// and time is virtual: every process of a test, its network and Redis itself are in this one, and an hour passes at once.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/faultnet"
	"github.com/redismutex/redismutex/internal/redistest"
)

// The keys of the lock that the processes share.
const (
	key      = "stock"
	queueKey = "{stock}:lock-intent"
	leaseKey = "{stock}:lease"
	tokenKey = "{stock}:token"
)

// Promise 1, exclusion: at every instant of the server there is one writer, or any number of readers, or nobody. Eight
// processes lock for reading and writing for ten seconds.
func TestWriterExcludesEverybody(t *testing.T) {
	inWorld(t, func(w world) {
		const lasting = 10 * time.Second
		var inside redistest.Witness
		var all sync.WaitGroup
		start := time.Now()
		for p := range 8 {
			mutex, _ := w.process()
			random := rand.New(rand.NewPCG(1, uint64(p)))
			all.Go(func() {
				for time.Since(start) < lasting {
					write := random.IntN(3) == 0
					l, err := acquire(mutex, write)(w.Context())
					if err != nil {
						w.Errorf("process %d, after %v: want the lock, got %v", p, time.Since(start), err)
						return
					}
					inside.Visit(write, func() { redistest.Elapse(time.Duration(random.IntN(100)) * time.Millisecond) })
					w.unlock(l)
				}
			})
		}
		all.Wait()
		if len(inside.Overlaps) > 0 {
			w.Errorf("within %v %d of %d holders overlapped with others, want none; the first: %s",
				lasting, len(inside.Overlaps), inside.Wrote+inside.Read, inside.Overlaps[0])
		}
		if inside.Wrote < 50 || inside.Together < 2 {
			w.Errorf("within %v there were %d writers, and at most %d readers at once; want 50 and 2 at least",
				lasting, inside.Wrote, inside.Together)
		}
	})
}

// Promise 2, trust: a lock's context is done no later than its lease ends on the server. The network swallows all that
// the holder sends, or all that Redis answers, and the server gives the lock to the next.
func TestContextEndsNoLaterThanTheLease(t *testing.T) {
	for name, replies := range map[string]bool{"requests are lost": false, "only replies are lost": true} {
		for _, write := range []bool{true, false} {
			t.Run(name+"/"+kind(write), func(t *testing.T) {
				inWorld(t, func(w world) {
					mutex, network := w.process()
					holder := w.lock(acquire(mutex, write))
					redistest.Elapse(3 * redismutex.DefaultTTL) // it is renewed a few times
					network.Hole(!replies, true)
					failed := time.Now()
					ended := redistest.Later(func() (*redismutex.Lock, error) { <-holder.Done(); return nil, context.Cause(holder) })

					other, _ := w.process()
					next := <-later(w.Context(), other.LockContext)
					if next.Err != nil {
						w.Fatalf("the next holder: want the lock, got %v", next.Err)
					}
					after := next.At.Sub(failed)
					synctest.Wait()
					select {
					case o := <-ended:
						if !errors.Is(o.Err, redismutex.ErrLockLost) {
							w.Errorf("want the context to end with ErrLockLost, got %v", o.Err)
						}
						w.Logf("the holder ended %v after the network had failed, the next one began after %v", o.At.Sub(failed), after)
					default:
						w.Errorf("the next holder began %v after the network had failed; want the context of the first done by then, it is not", after)
					}
				})
			})
		}
	}
}

// Promise 3, own lease: nobody shortens, prolongs or clears the lease of another. A reader with a long lease holds and
// a writer waits, while readers and writers with short leases join, try, give up and crash.
func TestNobodyTouchesTheLeaseOfAnother(t *testing.T) {
	inWorld(t, func(w world) {
		const short, middle, long = time.Second, 30 * time.Second, time.Minute
		leases := map[string]time.Time{}
		unchanged := func(what string, ids ...string) {
			w.Helper()
			now := w.leases()
			for _, id := range ids {
				if now[id] != leases[id] || now[id].IsZero() {
					w.Errorf("%s: the lease of %q was to end at %v, and now at %v; want it unchanged", what, id, leases[id], now[id])
				}
			}
			for _, k := range []string{key, leaseKey} {
				if left := w.Admin.PTTL(w.Context(), k).Val(); left < long-3*short {
					w.Errorf("%s: want %q to stay as long as the longest lease, %v, it stays for %v", what, k, long, left)
				}
			}
		}
		reader, _ := w.process(redismutex.WithTTL(long))
		first := w.lock(reader.RLockContext)
		leases = w.leases()
		brief, network := w.process(redismutex.WithTTL(short))
		crashing := w.lock(brief.RLockContext)
		unchanged("a reader with a shorter lease has joined", first.ID())

		writer, _ := w.process(redismutex.WithTTL(middle))
		waiter := later(w.Context(), writer.LockContext)
		w.waiting(1)
		second := w.queue()[0]
		unchanged("a writer waits", first.ID())
		leases = w.leases()

		other, _ := w.process(redismutex.WithTTL(short), redismutex.WithTurn(0)) // a waiter in Redis for each call
		for _, try := range []call{other.TryLockContext, other.TryRLockContext} {
			if _, err := try(w.Context()); !errors.Is(err, redismutex.ErrLock) {
				w.Errorf("a try while a reader holds and a writer waits: want ErrLock, got %v", err)
			}
		}
		unchanged("two tries were refused", first.ID(), crashing.ID(), second)

		ctx, giveUp := context.WithCancel(w.Context())
		gone := []<-chan outcome{later(ctx, other.LockContext), later(ctx, other.RLockContext)}
		w.waiting(3)
		unchanged("two more wait", first.ID(), crashing.ID(), second)
		giveUp()
		for _, o := range gone {
			<-o
		}
		w.waiting(1)
		unchanged("two waiters have given up", first.ID(), crashing.ID(), second)

		redistest.Crash(network)
		redistest.Elapse(2 * short)
		if _, err := other.TryLockContext(w.Context()); !errors.Is(err, redismutex.ErrLock) {
			w.Errorf("a try %v after the reader with the short lease crashed: want ErrLock, got %v", 2*short, err)
		}
		unchanged("the reader with the short lease has crashed", first.ID())
		if ends, there := w.leases()[crashing.ID()]; there {
			w.Errorf("the lease of the reader that crashed was to end at %v; %v later it is still there, until %v",
				leases[crashing.ID()], time.Since(leases[crashing.ID()]), ends)
		}
		w.unlock(first)
		w.unlock(w.atOnce(waiter))
	})
}

// Promise 4, once: a request that is sent again after its reply was lost neither locks its caller out nor leaves a
// ghost, and an acquire that arrives after its own release is refused.
func TestRepeatedRequestCountsOnce(t *testing.T) {
	// heldOnce checks that l alone holds, and that nothing of it is left after its unlock.
	heldOnce := func(w world, l *redismutex.Lock) {
		w.Helper()
		if got := w.holders(); !slices.Equal(got, []string{l.ID()}) {
			w.Errorf("want one holder, %q, got %q", l.ID(), got)
		}
		w.waiting(0)
		w.unlock(l)
		if got := w.holders(); len(got) > 0 {
			w.Errorf("after the unlock of %q: want no holder, got %q", l.ID(), got)
		}
		other, _ := w.process()
		w.unlock(w.lock(other.TryLockContext))
	}
	for _, write := range []bool{true, false} {
		t.Run("the reply to an acquire is lost/"+kind(write), func(t *testing.T) {
			inWorld(t, func(w world) {
				mutex, network := w.process()
				network.LoseReply(key, 2)
				start := time.Now()
				o := <-later(w.Context(), acquire(mutex, write))
				if took := o.At.Sub(start); o.Err != nil || took > time.Second {
					w.Fatalf("want the lock as soon as go-redis has sent the request again, within %v, got it (%v) after %v", time.Second, o.Err, took)
				}
				heldOnce(w, o.Value)
			})
		})
		t.Run("the reply to a waiter is lost/"+kind(write), func(t *testing.T) {
			inWorld(t, func(w world) {
				first, _ := w.process()
				holder := w.lock(first.LockContext)
				mutex, network := w.process()
				network.LoseReply("join", 2)
				waiter := later(w.Context(), acquire(mutex, write))
				redistest.Elapse(time.Second) // go-redis sends it a third time
				w.waiting(1)
				w.unlock(holder)
				heldOnce(w, w.atOnce(waiter))
			})
		})
		t.Run("an acquire arrives after its release/"+kind(write), func(t *testing.T) {
			inWorld(t, func(w world) {
				mutex, network := w.process()
				arrive := network.HoldRequest(key)
				ctx, giveUp := context.WithCancel(w.Context())
				caller := later(ctx, acquire(mutex, write))
				synctest.Wait()
				giveUp()
				if o := <-caller; !errors.Is(o.Err, context.Canceled) {
					w.Errorf("the caller gave up: want context.Canceled, got %v", o.Err)
				}
				redistest.Elapse(time.Second) // the release, in the background, is done
				arrive()
				synctest.Wait()
				if got := w.holders(); len(got) > 0 {
					w.Errorf("an acquire arrived after its release: want no holder, got %q", got)
				}
			})
		})
	}
}

// Promise 5, no idle lock: whatever frees the lock hands it on, in the same script, to the next in order: a writer, or
// the whole run of readers in front. The processes that get it are cut off from Redis by then, so that they cannot have
// asked for it.
func TestWhateverFreesTheLockHandsItOn(t *testing.T) {
	long := redismutex.WithTTL(time.Minute)
	for name, free := range map[string]func(w world) (next []*participant){
		"a writer unlocks before a writer": func(w world) []*participant {
			line := w.line("w wr", long)
			cutOff(line[1:])
			w.unlock(w.granted(line[0]))
			return line[1:2]
		},
		"a writer unlocks before readers": func(w world) []*participant {
			line := w.line("w rrrwr", long)
			cutOff(line[1:])
			w.unlock(w.granted(line[0]))
			return line[1:4]
		},
		"the last reader unlocks": func(w world) []*participant {
			line := w.line("rr wr", long)
			cutOff(line[2:])
			w.unlock(w.granted(line[0]))
			w.unlock(w.granted(line[1]))
			return line[2:3]
		},
		"a writer becomes a reader": func(w world) []*participant {
			line := w.line("w rrw", long)
			cutOff(line[1:])
			if err := w.granted(line[0]).Downgrade(w.Context()); err != nil {
				w.Fatal(err)
			}
			return line[:3]
		},
		"a writer gives up that waited between readers": func(w world) []*participant {
			line := w.line("r wrr", long)
			cutOff(line[2:])
			line[1].giveUp()
			synctest.Wait()
			return []*participant{line[0], line[2], line[3]}
		},
		"the lease of a writer has ended, and somebody tries": func(w world) []*participant {
			crashed := w.line("w")
			line := w.line(" wr", long)
			w.expire(crashed, line)
			return line[:1]
		},
		"the lease of a reader has ended, and somebody tries": func(w world) []*participant {
			crashed := w.line("r")
			line := w.line(" wr", long)
			w.expire(crashed, line)
			return line[:1]
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w world) {
				var want []string
				for _, p := range free(w) {
					want = append(want, p.id)
				}
				slices.Sort(want)
				if got := w.holders(); !slices.Equal(got, want) {
					w.Errorf("want %q to hold the lock as soon as it is free; %q hold it, and %q wait", want, got, w.queue())
				}
			})
		})
	}
}

// Promise 6, order: first come, first served, readers together, so that neither side starves; by choice writers first
// or readers first. The processes of a line arrive one by one, behind the first of them, which holds.
func TestFirstComeFirstServed(t *testing.T) {
	for _, c := range []struct {
		order string
		opt   []redismutex.MutexOption
		line  string // as they arrive; the first one holds
		want  string // as they are served; those of one word hold together
	}{
		{"first come, first served", nil, "w wwrrwr", "w w w rr w r"},
		{"a reader does not pass a writer that waits", nil, "r wr", "r w r"},
		{"writers first", []redismutex.MutexOption{redismutex.WithLockIntent()}, "w rwrw", "w w w rr"},
		{"readers first", []redismutex.MutexOption{redismutex.WithReaderPriority()}, "w wrwr", "w rr w w"},
	} {
		t.Run(c.order, func(t *testing.T) {
			inWorld(t, func(w world) {
				line := w.line(c.line, c.opt...)
				var got []string
				last := map[byte]int{}
				for len(line) > 0 {
					synctest.Wait()
					var together string
					var locks []*redismutex.Lock
					line = slices.DeleteFunc(line, func(p *participant) bool {
						select {
						case l := <-p.lock:
							if p.place < last[p.mode] {
								w.Errorf("%c number %d was served after number %d of its kind", p.mode, p.place, last[p.mode])
							}
							last[p.mode] = p.place
							together += string(p.mode)
							locks = append(locks, l)
							return true
						default:
							return false
						}
					})
					if together == "" {
						w.Fatalf("served %q, and nobody holds; want %q", strings.Join(got, " "), c.want)
					}
					got = append(got, together)
					for _, l := range locks {
						w.unlock(l)
					}
				}
				if got := strings.Join(got, " "); got != c.want {
					w.Errorf("%q arrived; want them served as %q, got %q", c.line, c.want, got)
				}
			})
		})
	}
	// Ten processes of one kind come again and again, without a gap between them: one of the other kind waits for no more
	// than those that were there before it.
	for _, write := range []bool{true, false} {
		t.Run("no "+kind(write)+" starves", func(t *testing.T) {
			inWorld(t, func(w world) {
				const others, stay = 10, 100 * time.Millisecond
				var ended atomic.Bool
				var all sync.WaitGroup
				for i := range others {
					mutex, _ := w.process()
					all.Go(func() {
						redistest.Elapse(time.Duration(i) * stay / others) // so that there is never a gap
						for !ended.Load() {
							l, err := acquire(mutex, !write)(w.Context())
							if err != nil {
								w.Error(err)
								return
							}
							redistest.Elapse(stay)
							w.unlock(l)
						}
					})
				}
				redistest.Elapse(time.Second)
				most := stay // the readers before it leave together
				if !write {
					most = others * stay
				}
				mutex, _ := w.process()
				asked := time.Now()
				caller := later(w.Context(), acquire(mutex, write))
				select {
				case o := <-caller:
					if took := o.At.Sub(asked); o.Err != nil || took > most {
						w.Errorf("want the lock within %v, got it (%v) after %v", most, o.Err, took)
					}
					if o.Err == nil {
						w.unlock(o.Value)
					}
				case <-time.After(time.Minute):
					w.Errorf("want the lock within %v, have waited for %v", most, time.Since(asked))
				}
				ended.Store(true)
				all.Wait()
			})
		})
	}
}

// Promise 7, one message per grant at the most, to the one process that waits for it, and grants to the same process
// travel together. A message that is lost costs time, not safety.
func TestGrantIsOneMessageToOneProcess(t *testing.T) {
	inWorld(t, func(w world) {
		messages := w.Messages("redismutex:*")
		line := w.line("w www")
		for i, p := range line {
			w.unlock(w.granted(p))
			got := messages()
			if want := min(i+1, 3); len(got) != want {
				w.Fatalf("%d locks handed on from process to process: want %d messages, got %v", i+1, want, got)
			}
			if i < 3 && !strings.HasPrefix(line[i+1].id, got[i].Channel+":") {
				w.Errorf("hand-over %d is to %q: want the message in its mailbox, got it in %q", i+1, line[i+1].id, got[i].Channel)
			}
		}
	})
	t.Run("grants to the same process", func(t *testing.T) {
		inWorld(t, func(w world) {
			messages := w.Messages("redismutex:*")
			holder, _ := w.process(redismutex.WithTurn(0))
			one, _ := w.process(redismutex.WithTurn(0))
			another, _ := w.process(redismutex.WithTurn(0))
			l := w.lock(holder.LockContext)
			var readers []<-chan outcome
			for _, mutex := range []*redismutex.RWMutex{one, another, one, holder, another, one} {
				readers = append(readers, later(w.Context(), mutex.RLockContext))
				synctest.Wait()
			}
			w.unlock(l)
			for _, r := range readers {
				w.unlock(w.atOnce(r))
			}
			if got := messages(); len(got) != 2 {
				w.Errorf("one unlock granted the lock to 3 readers of one process, 2 of another and 1 of its own: want 2 messages, got %v", got)
			}
		})
	})
	t.Run("a message is lost", func(t *testing.T) {
		inWorld(t, func(w world) {
			line := w.line("w w")
			line[1].network.LoseMessage("redismutex:")
			w.unlock(w.granted(line[0]))
			unlocked := time.Now()
			other, _ := w.process()
			if _, err := other.TryLockContext(w.Context()); !errors.Is(err, redismutex.ErrLock) {
				w.Errorf("a try after a grant that nobody has heard of: want ErrLock, got %v", err)
			}
			select {
			case l := <-line[1].lock:
				w.unlock(l)
			case <-time.After(time.Hour):
			}
			if took, most := time.Since(unlocked), redismutex.DefaultTTL/2; took == 0 || took > most {
				w.Errorf("the message was lost: want the lock with the next renewal, within %v, got it after %v", most, took)
			}
		})
	})
}

// Promise 8, nothing stays: every key has a TTL; when the longest lease has run out, that of tombstones included, nothing
// is left but the fencing counter, and that goes after a day.
func TestNothingStaysInRedis(t *testing.T) {
	inWorld(t, func(w world) {
		const longest = 10 * time.Second
		check := func(when string) {
			w.Helper()
			for _, k := range w.Admin.Keys(w.Context(), "*").Val() {
				if w.Admin.PTTL(w.Context(), k).Val() <= 0 {
					w.Errorf("%s: want a TTL on each key, %q has none", when, k)
				}
			}
		}
		writer, network := w.process(redismutex.WithTTL(longest))
		l := w.lock(writer.LockContext)
		check("a writer holds")
		line := w.line(" rrwrw", redismutex.WithTTL(longest/5))
		check("a writer holds and others wait")
		line[2].giveUp()
		synctest.Wait()
		check("a waiter has given up")
		w.unlock(l)
		check("readers hold and a writer waits")
		if err := w.granted(line[0]).UnlockContext(w.Context()); err != nil {
			w.Fatal(err)
		}
		check("a reader has left")
		reader, _ := w.process(redismutex.WithTTL(longest))
		ctx, end := context.WithCancel(w.Context())
		late := later(ctx, reader.RLockContext)
		check("one more waits")

		// An acquire whose caller has given up, which leaves a tombstone for two leases; and then all crash.
		arrive := network.HoldRequest(key)
		brief, giveUp := context.WithCancel(w.Context())
		gone := later(brief, writer.LockContext)
		synctest.Wait()
		giveUp()
		<-gone
		redistest.Elapse(time.Second)
		check("an acquire has been given up")
		arrive()
		w.crashAll()
		for _, p := range line {
			p.giveUp()
		}
		end()
		<-late
		redistest.Elapse(2 * longest)
		if got := w.Admin.Keys(w.Context(), "*").Val(); !slices.Equal(got, []string{tokenKey}) {
			w.Errorf("%v after everybody crashed: want %q alone, got %q", 2*longest, tokenKey, got)
		}
		w.repairAll() // go-redis dials every second
		redistest.Elapse(24 * time.Hour)
		if got := w.Admin.Keys(w.Context(), "*").Val(); len(got) > 0 {
			w.Errorf("a day later: want nothing left, got %q", got)
		}
	})
}

// Promise 9, tokens rise: each write lock carries a greater one than all before it on its key, however it was granted,
// and whatever has become of the counter.
func TestEveryTokenIsGreaterThanThoseBefore(t *testing.T) {
	inWorld(t, func(w world) {
		var last uint64
		next := func(how string, l *redismutex.Lock) {
			w.Helper()
			if l.Token() <= last {
				w.Errorf("%s: want a token greater than %d, got %d", how, last, l.Token())
			}
			last = l.Token()
		}
		mutex, _ := w.process()
		for range 100 { // all at the same instant
			l := w.lock(mutex.LockContext)
			next("a lock", l)
			w.unlock(l)
			l = w.lock(mutex.TryLockContext)
			next("a try", l)
			w.unlock(l)
		}
		for i, p := range w.line("w wwwww") {
			l := w.granted(p)
			next(fmt.Sprint("hand-over ", i), l)
			w.unlock(l)
		}
		reader := w.lock(mutex.RLockContext)
		if reader.Token() != 0 {
			w.Errorf("a read lock: want the token 0, got %d", reader.Token())
		}
		w.unlock(reader)
		crashing, network := w.process()
		next("a lock whose holder will crash", w.lock(crashing.LockContext))
		redistest.Crash(network)
		o := <-later(w.Context(), mutex.LockContext)
		next("after a crash", o.Value)
		if err := o.Value.Downgrade(w.Context()); err != nil {
			w.Fatal(err)
		}
		if o.Value.Token() != last {
			w.Errorf("after Downgrade: want the token that it had, %d, got %d", last, o.Value.Token())
		}
		w.unlock(o.Value)
		w.repairAll() // go-redis dials every second
		redistest.Elapse(25 * time.Hour)
		l := w.lock(mutex.LockContext)
		next("a day later, when the counter has expired", l)
		w.unlock(l)
		w.Redis.FlushAll()
		redistest.Elapse(time.Millisecond) // no server restarts faster
		l = w.lock(mutex.LockContext)
		next("after Redis has lost its data", l)
		w.unlock(l)
	})
}

// Promise 10, why: an error says what happened, and no two of these look the same to errors.Is.
func TestErrorSaysWhatHappened(t *testing.T) {
	all := map[string]error{
		"ErrLock": redismutex.ErrLock, "ErrLockLost": redismutex.ErrLockLost, "ErrUnlocked": redismutex.ErrUnlocked,
		"ErrUpgrade": redismutex.ErrUpgrade, "ErrRedis": redismutex.ErrRedis, "ErrNotLock": redismutex.ErrNotLock,
		"ErrInvalid": redismutex.ErrInvalid, "Canceled": context.Canceled, "DeadlineExceeded": context.DeadlineExceeded,
	}
	for name, c := range map[string]struct {
		want string
		err  func(w world) error
	}{
		"others hold": {"ErrLock", func(w world) error {
			w.line("w")
			mutex, _ := w.process()
			_, err := mutex.TryLockContext(w.Context())
			return err
		}},
		"others wait": {"ErrLock", func(w world) error {
			w.line("r w")
			mutex, _ := w.process()
			_, err := mutex.TryRLockContext(w.Context())
			return err
		}},
		"the lock was lost": {"ErrLockLost", func(w world) error {
			mutex, network := w.process()
			l := w.lock(mutex.LockContext)
			redistest.Crash(network)
			<-l.Done()
			return context.Cause(l)
		}},
		"the lock that is unlocked was lost": {"ErrLockLost", func(w world) error {
			mutex, _ := w.process()
			l := w.lock(mutex.LockContext)
			w.Redis.FlushAll()
			return l.UnlockContext(w.Context())
		}},
		"the lock has been unlocked": {"ErrUnlocked", func(w world) error {
			mutex, _ := w.process()
			l := w.lock(mutex.LockContext)
			w.unlock(l)
			return context.Cause(l)
		}},
		"it is unlocked a second time": {"ErrUnlocked", func(w world) error {
			mutex, _ := w.process()
			l := w.lock(mutex.LockContext)
			w.unlock(l)
			return l.UnlockContext(w.Context())
		}},
		"a reader wants to write": {"ErrUpgrade", func(w world) error {
			mutex, _ := w.process()
			_, err := mutex.LockContext(w.lock(mutex.RLockContext))
			return err
		}},
		"the caller gave up": {"Canceled", func(w world) error {
			waiter := w.line("w w")[1]
			waiter.giveUp()
			return <-waiter.err
		}},
		"the caller's time is up": {"DeadlineExceeded", func(w world) error {
			w.line("w")
			mutex, _ := w.process()
			ctx, cancel := context.WithTimeout(w.Context(), time.Second)
			defer cancel()
			_, err := mutex.LockContext(ctx)
			return err
		}},
		"Redis does not answer, and the caller's time is up": {"DeadlineExceeded", func(w world) error {
			mutex, network := w.process()
			network.Hole(true, true)
			ctx, cancel := context.WithTimeout(w.Context(), time.Second)
			defer cancel()
			_, err := mutex.LockContext(ctx)
			return err
		}},
		"Redis refuses connections": {"ErrRedis", func(w world) error {
			mutex, network := w.process()
			redistest.Crash(network)
			_, err := mutex.LockContext(w.Context())
			return err
		}},
		"Redis does not answer a try": {"ErrRedis", func(w world) error {
			mutex, network := w.process()
			network.Hole(true, true)
			_, err := mutex.TryLockContext(w.Context())
			return err
		}},
		"the key is somebody's data": {"ErrNotLock", func(w world) error {
			w.Admin.Set(w.Context(), key, "42 bicycles", 0)
			mutex, _ := w.process()
			_, err := mutex.LockContext(w.Context())
			return err
		}},
		"the TTL is out of range": {"ErrInvalid", func(w world) error {
			mutex, _ := w.process(redismutex.WithTTL(time.Nanosecond))
			_, err := mutex.LockContext(w.Context())
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w world) {
				err := c.err(w)
				for name, kind := range all {
					if is, want := errors.Is(err, kind), name == c.want; is != want {
						w.Errorf("want an error that matches %s alone; whether this one matches %s: %v: %v", c.want, name, is, err)
					}
				}
				if err != nil && c.want != "ErrUnlocked" && c.want != "ErrInvalid" && !strings.Contains(err.Error(), key) {
					w.Errorf("want an error that names the key, got %v", err)
				}
			})
		})
	}
}

// The rest of this file is what the tests share. A helper that fails ends the test.

// A world is one Redis in virtual time, the processes that use it, and the lock that they share.
type world struct {
	*redistest.World
	networks *[]*faultnet.Link
}

func inWorld(t *testing.T, test func(w world)) {
	t.Helper()
	redistest.InVirtualTime(t, func(w *redistest.World) {
		warm := redismutex.NewMutex(w.Admin, "warm")
		for _, c := range []call{warm.LockContext, warm.RLockContext} { // Redis knows the scripts
			if l, err := c(w.Context()); err != nil || l.UnlockContext(w.Context()) != nil {
				w.Fatal("no lock to begin with: ", err)
			}
		}
		w.Redis.FlushAll()
		test(world{w, &[]*faultnet.Link{}})
	})
}

// process returns the mutex of one more process, and the network between that and Redis.
func (w world) process(opt ...redismutex.MutexOption) (*redismutex.RWMutex, *faultnet.Link) {
	rc, network := w.Process()
	*w.networks = append(*w.networks, network)
	return redismutex.NewMutex(rc, key, opt...), network
}

// crashAll ends every process.
func (w world) crashAll() {
	for _, network := range *w.networks {
		redistest.Crash(network)
	}
}

// repairAll has every network accept connections again.
func (w world) repairAll() {
	for _, network := range *w.networks {
		network.Refuse(false)
	}
}

// A call is one of the four ways to lock.
type call = func(context.Context, ...redismutex.LockOption) (*redismutex.Lock, error)

type outcome = redistest.Outcome[*redismutex.Lock]

// acquire is the call that locks for writing, or for reading.
func acquire(mutex *redismutex.RWMutex, write bool) call {
	if write {
		return mutex.LockContext
	}
	return mutex.RLockContext
}

func kind(write bool) string {
	if write {
		return "writer"
	}
	return "reader"
}

// later calls in the background.
func later(ctx context.Context, c call) <-chan outcome {
	return redistest.Later(func() (*redismutex.Lock, error) { return c(ctx) })
}

// atOnce returns a lock that is granted before any time passes.
func (w world) atOnce(c <-chan outcome) *redismutex.Lock {
	w.Helper()
	synctest.Wait()
	select {
	case o := <-c:
		if o.Err != nil {
			w.Fatalf("want the lock at once, got %v", o.Err)
		}
		return o.Value
	default:
		w.Fatalf("want the lock at once, but it is not granted: %q hold it, %q wait", w.holders(), w.queue())
		return nil
	}
}

func (w world) lock(c call) *redismutex.Lock {
	w.Helper()
	return w.atOnce(later(w.Context(), c))
}

func (w world) unlock(l *redismutex.Lock) {
	w.Helper()
	if err := l.UnlockContext(context.Background()); err != nil {
		w.Errorf("want the unlock confirmed, got %v", err)
	}
}

// A participant is a process that holds or waits.
type participant struct {
	mode    byte // w or r
	place   int
	id      string
	network *faultnet.Link
	lock    chan *redismutex.Lock // when it is granted
	err     chan error            // if it is not
	giveUp  context.CancelFunc
}

// line has processes lock one after the other, a writer for each w and a reader for each r. Those before the blank hold
// at once, the others wait in this order.
func (w world) line(modes string, opt ...redismutex.MutexOption) (line []*participant) {
	w.Helper()
	holding, waiting, _ := strings.Cut(modes, " ")
	for i, mode := range []byte(holding + waiting) {
		p := &participant{mode: mode, place: i, lock: make(chan *redismutex.Lock, 1), err: make(chan error, 1)}
		var ctx context.Context
		ctx, p.giveUp = context.WithCancel(w.Context())
		mutex, network := w.process(opt...)
		p.network = network
		known := append(w.holders(), w.queue()...)
		go func() {
			if l, err := acquire(mutex, mode == 'w')(ctx); err != nil {
				p.err <- err
			} else {
				p.lock <- l
			}
		}()
		synctest.Wait()
		for _, id := range append(w.holders(), w.queue()...) {
			if !slices.Contains(known, id) {
				p.id = id
			}
		}
		if p.id == "" {
			w.Fatalf("number %d of %q neither holds nor waits", i, modes)
		}
		line = append(line, p)
	}
	return line
}

// granted returns the lock of a participant that holds it.
func (w world) granted(p *participant) *redismutex.Lock {
	w.Helper()
	synctest.Wait()
	select {
	case l := <-p.lock:
		return l
	default:
		w.Fatalf("want %q to hold the lock; %q hold it, and %q wait", p.id, w.holders(), w.queue())
		return nil
	}
}

// cutOff cuts processes off from Redis.
func cutOff(line []*participant) {
	for _, p := range line {
		p.network.Hole(true, true)
	}
}

// expire has processes crash, and their leases end while a line waits that is cut off. Then somebody tries to lock, and
// is refused.
func (w world) expire(crashed, line []*participant) {
	w.Helper()
	for _, p := range crashed {
		redistest.Crash(p.network)
	}
	cutOff(line)
	redistest.Elapse(redismutex.DefaultTTL)
	other, _ := w.process()
	if _, err := other.TryLockContext(w.Context()); !errors.Is(err, redismutex.ErrLock) {
		w.Errorf("a try while others wait: want ErrLock, got %v", err)
	}
}

// holders returns the ids of those that hold, as Redis has them, sorted.
func (w world) holders() []string {
	if id, err := w.Admin.Get(w.Context(), key).Result(); err == nil {
		return []string{id}
	}
	ids := w.Admin.SMembers(w.Context(), key).Val()
	slices.Sort(ids)
	return ids
}

// queue returns the ids of the waiters, in order.
func (w world) queue() (ids []string) {
	for _, intent := range w.Admin.ZRange(w.Context(), queueKey, 0, -1).Val() {
		ids = append(ids, intent[1:]) // its first byte is w or r
	}
	return ids
}

// waiting checks how many wait.
func (w world) waiting(want int) {
	w.Helper()
	synctest.Wait()
	if got := w.queue(); len(got) != want {
		w.Fatalf("want %d to wait, got %q", want, got)
	}
}

// leases returns when the leases of readers and waiters end, by id.
func (w world) leases() map[string]time.Time {
	ends := map[string]time.Time{}
	for _, z := range w.Admin.ZRangeWithScores(w.Context(), leaseKey, 0, -1).Val() {
		ends[z.Member.(string)] = time.UnixMilli(int64(z.Score))
	}
	return ends
}
