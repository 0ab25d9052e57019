//go:build linux

package chaos

import (
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/redistest"
)

// A fault lasts until it is healed. Begin starts it if it can, and returns the client that it affects; nil means all.
type fault struct {
	kind  string
	begin func(w *world) (hurt *process, lasts time.Duration, heal func(), ok bool)
}

// A mark records one fault.
type mark struct {
	kind     string
	hurt     *process
	from, to int64
}

// torment starts faults, several at a time, each kind once before any is repeated. It returns when all are healed.
func (w *world) torment(faults []fault, until time.Time) {
	type open struct {
		mark
		over time.Time
		heal func()
	}
	var opened []open
	var queue []fault
	pace := time.Tick(10 * time.Millisecond)
	for next := time.Now(); time.Now().Before(until) || len(opened) > 0; <-pace {
		opened = slices.DeleteFunc(opened, func(o open) bool {
			if time.Now().Before(o.over) {
				return false
			}
			o.heal()
			o.to = mono()
			w.marks = append(w.marks, o.mark)
			return true
		})
		if time.Now().After(until) || time.Now().Before(next) {
			continue
		}
		if len(queue) == 0 {
			queue = slices.Clone(faults)
			w.rng.Shuffle(len(queue), func(i, j int) { queue[i], queue[j] = queue[j], queue[i] })
		}
		for i, f := range queue {
			from := mono()
			if hurt, lasts, heal, ok := f.begin(w); ok {
				opened = append(opened, open{mark{f.kind, hurt, from, 0}, time.Now().Add(lasts), heal})
				queue = slices.Delete(queue, i, i+1)
				next = time.Now().Add(upTo(w.rng, 400*time.Millisecond))
				break
			}
		}
	}
}

// between returns a random time between least and most.
func (w *world) between(least, most time.Duration) time.Duration {
	return least + upTo(w.rng, most-least)
}

// holder returns a client that has held a write lock for that long, according to the registers, and is not affected by
// another fault of a process.
func (w *world) holder(since time.Duration) (*process, bool) {
	last := w.last(w.config.Keys[w.rng.IntN(len(w.config.Keys))])
	name, _, _ := strings.Cut(last.Client, "@")
	for _, p := range w.clients {
		if p.name == name {
			return p, last.First && !p.busy && mono()-last.at >= int64(since)
		}
	}
	return nil, false
}

const (
	killed  = "client killed"
	stopped = "client stopped for longer than its lease"
	briefly = "client stopped for a moment"
)

var clientFaults = []fault{
	{killed, func(w *world) (*process, time.Duration, func(), bool) {
		p, ok := w.holder(0)
		if !ok {
			return nil, 0, nil, false
		}
		p.Kill()
		w.remove(p)
		w.start()
		return p, 0, func() {}, true
	}},
	{stopped, func(w *world) (*process, time.Duration, func(), bool) {
		return w.stop(w.between(longest+300*time.Millisecond, longest+time.Second))
	}},
	{briefly, func(w *world) (*process, time.Duration, func(), bool) {
		return w.stop(w.between(20*time.Millisecond, ttls[0]/2))
	}},
}

func (w *world) stop(lasts time.Duration) (*process, time.Duration, func(), bool) {
	p, ok := w.holder(0)
	if !ok {
		return nil, 0, nil, false
	}
	p.busy = true
	from := mono()
	p.Freeze()
	return p, lasts, func() {
		p.Thaw()
		p.pauses = append(p.pauses, pause{from, mono()})
		p.busy = false
	}, true
}

// node chooses a node for a fault of the server or of a link, so that few nodes at most are affected at a time. A fault of
// a server needs a server that no other fault affects.
func (w *world) node(few int, server bool) (i int, release func(), ok bool) {
	i = w.rng.IntN(max(1, len(w.servers)))
	if len(w.troubled) >= few && w.troubled[i] == 0 || server && w.down[i] {
		return 0, nil, false
	}
	w.troubled[i]++
	w.down[i] = w.down[i] || server
	return i, func() {
		if w.down[i] = w.down[i] && !server; w.troubled[i] == 1 {
			delete(w.troubled, i)
		} else {
			w.troubled[i]--
		}
	}, true
}

// linkFaults are faults of a link between one client and a node. They affect few nodes at most at a time.
func linkFaults(few int) []fault {
	broken := func(what string, least, most time.Duration, arg func(w *world) (begin, end any)) fault {
		return fault{"link: " + what, func(w *world) (*process, time.Duration, func(), bool) {
			p, ok := w.holder(30 * time.Millisecond) // a lock that it holds for longer than a moment
			if !ok {
				p = w.clients[w.rng.IntN(len(w.clients))]
			}
			if p.broken || p.busy {
				return nil, 0, nil, false
			}
			node, release, ok := w.node(few, false)
			if !ok {
				return nil, 0, nil, false
			}
			p.broken = true
			begin, end := arg(w)
			command, _, _ := strings.Cut(what, " ")
			p.tell(command, node, begin)
			return p, w.between(least, most), func() {
				p.tell(command, node, end)
				p.broken = false
				release()
			}, true
		}}
	}
	hole := func(direction string) fault {
		return broken("hole "+direction, 300*time.Millisecond, longest+500*time.Millisecond,
			func(*world) (any, any) { return direction, "none" })
	}
	return []fault{
		hole("up"), hole("down"), hole("up+down"),
		broken("delay", 500*time.Millisecond, longest, func(w *world) (any, any) {
			return w.between(5*time.Millisecond, 100*time.Millisecond), time.Duration(0)
		}),
		broken("refuse", 20*time.Millisecond, time.Second, func(*world) (any, any) { return true, false }),
	}
}

// onServer is a fault of a server. It affects few servers at most at a time.
func onServer(kind string, least, most time.Duration, few int, begin, end func(*redistest.Server)) fault {
	return fault{kind, func(w *world) (*process, time.Duration, func(), bool) {
		i, release, ok := w.node(few, true)
		if !ok {
			return nil, 0, nil, false
		}
		s := w.servers[i]
		begin(s)
		return nil, w.between(least, most), func() { end(s); release() }, true
	}}
}

func freezes(few int) []fault {
	freeze, thaw := (*redistest.Server).Freeze, (*redistest.Server).Thaw
	return []fault{
		onServer("server frozen for a moment", 50*time.Millisecond, ttls[0]/2, few, freeze, thaw),
		onServer("server frozen for longer than all leases", longest, longest+500*time.Millisecond, few, freeze, thaw),
	}
}

// restart kills a server and starts it again after away at least.
func restart(t *world, kind string, away time.Duration, few int) fault {
	return onServer(kind, away, away+500*time.Millisecond, few,
		(*redistest.Server).Kill, func(s *redistest.Server) { s.Restart(t) })
}

// failover kills or stops a master, so that its replica takes its place, with all writes that the master had acknowledged
// or without the last of them. The servers notice by themselves, or promote tells them.
func failover(master func() *redistest.Server, promote func() error) fault {
	return fault{"failover", func(w *world) (*process, time.Duration, func(), bool) {
		if w.moving {
			return nil, 0, nil, false
		}
		old := master()
		replica, ok := replicaOf(w, old)
		if !ok {
			return nil, 0, nil, false
		}
		w.moving = true
		way := []string{"dies", "is stopped", "dies, and its replica lags behind"}[w.rng.IntN(3)]
		w.Logf("at %v the master %s", time.Duration(mono()), way)
		auth := func(user, password string) {
			replica.ConfigSet(w.Context(), "masteruser", user)
			replica.ConfigSet(w.Context(), "masterauth", password)
		}
		switch way {
		case "is stopped":
			old.Freeze()
		case "dies, and its replica lags behind":
			auth("nobody", "nothing")
			replica.Do(w.Context(), "CLIENT", "KILL", "TYPE", "master")
			time.Sleep(ttls[1]) // the fault: so far it lags behind
			fallthrough
		default:
			old.Kill()
		}
		err := promote()
		return nil, time.Second, func() {
			old.Kill()
			// The old master must not come back, empty, before it has been replaced. A sentinel that was held up by a busy
			// machine does nothing for 30 s (TILT), and again if it is held up then.
			redistest.Within(w, 5*time.Minute, "the replica takes over", func() bool {
				if err != nil {
					err = promote()
				}
				return master() != old
			})
			auth("", "")
			if w.kind == sentinel { // which would otherwise let it be a second master for some seconds
				old.RestartAsReplicaOf(w, replica.Options().Addr)
			} else {
				old.Restart(w)
			}
			w.moving = false
		}, true
	}}
}

// replicaOf returns a client of the replica of s, if that is online.
func replicaOf(w *world, s *redistest.Server) (*redis.Client, bool) {
	rc := s.Client(w)
	defer rc.Close()
	info := rc.Info(w.Context(), "replication").Val()
	_, line, ok := strings.Cut(info, "slave0:")
	var ip, state string
	for _, field := range strings.Split(strings.TrimSpace(strings.SplitN(line, "\n", 2)[0]), ",") {
		switch name, value, _ := strings.Cut(field, "="); name {
		case "ip":
			ip = value
		case "port":
			ip = net.JoinHostPort(ip, value)
		case "state":
			state = value
		}
	}
	if !ok || state != "online" {
		return nil, false
	}
	replica := redis.NewClient(&redis.Options{Addr: ip})
	w.Cleanup(func() { replica.Close() })
	return replica, true
}

// reshard moves a slot from one master to the other, sometimes with one key before the rest.
func reshard(c *redistest.ClusterServers, slots map[string]int) fault {
	return fault{"slot moved", func(w *world) (*process, time.Duration, func(), bool) {
		if w.moving {
			return nil, 0, nil, false
		}
		for _, s := range c.Nodes()[:2] {
			rc := s.Client(w)
			defer rc.Close()
			if !strings.Contains(rc.ClusterInfo(w.Context()).Val(), "cluster_state:ok") {
				return nil, 0, nil, false
			}
		}
		w.moving = true
		keys := slices.Sorted(maps.Keys(slots))
		key := keys[w.rng.IntN(len(keys))]
		slot := slots[key]
		to := 1 - c.Owner(slot)
		c.BeginMigration(w, slot, to)
		if first := []string{key, "{" + key + "}:token", ""}[w.rng.IntN(3)]; first != "" {
			c.MoveKeys(w, slot, to, first)
		}
		return nil, upTo(w.rng, time.Second), func() {
			c.MoveKeys(w, slot, to)
			c.EndMigration(w, slot, to)
			w.moving = false
		}, true
	}}
}
