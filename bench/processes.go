package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// A team is several processes that lock one key with one library, so that a library gains nothing by what it shares within a process
// alone.
type team struct {
	processes, goroutines int // goroutines of each process
	section               time.Duration
}

// The teams for one key of one Redis, and the one for a quorum.
const processes = 4

var (
	teamSizes  = []int{1, 4, 16}
	sections   = []time.Duration{0, 200 * time.Microsecond, 5 * time.Millisecond}
	quorumTeam = team{processes: 16, goroutines: 1}
	targetTeam = teamName(loopback, 16, sections[1])
)

func teamName(net string, goroutines int, section time.Duration) string {
	return fmt.Sprintf("processes/%s/%d × %d/%v", net, processes, goroutines, section)
}

// A member is the parent's end of a process of a team. The process ends when its standard input is closed, and therefore with this one.
type member struct {
	cmd    *exec.Cmd
	ask    io.WriteCloser
	answer *json.Decoder
}

// A task says what a member does in a turn, and a result what came of it.
type task struct {
	Key         string
	Goroutines  int
	Section     time.Duration
	From, Until time.Time
}

type result struct {
	Counts          []int
	Took, Longest   time.Duration // the time of the turn, and of the longest wait
	Within, Between handOvers
	Overlaps        int64
}

// together prepares a turn of a team.
func (b *bench) together(t team, addrs ...string) func(string) (*turner, error) {
	return func(library string) (_ *turner, err error) {
		var members []*member
		shared := filepath.Join(b.dir, b.newKey())
		end := func() (err error) {
			for _, m := range members {
				err = errors.Join(err, m.ask.Close())
			}
			for _, m := range members {
				err = errors.Join(err, m.cmd.Wait())
			}
			return errors.Join(err, os.Remove(shared))
		}
		if err := os.WriteFile(shared, make([]byte, unsafe.Sizeof(meeting{})), 0o600); err != nil {
			return nil, err
		}
		for i := range t.processes {
			m, err := startMember(append([]string{shared, strconv.Itoa(i), library}, addrs...)...)
			if err != nil {
				return nil, errors.Join(err, end())
			}
			members = append(members, m)
			if err := m.answer.Decode(&struct{}{}); err != nil { // one after the other, since a start keeps the CPU busy
				return nil, errors.Join(err, end())
			}
		}
		turn := func(d time.Duration) (sample, []time.Duration, error) {
			from := time.Now().Add(50 * time.Millisecond) // when all have read their tasks
			s, err := t.turn(members, task{b.newKey(), t.goroutines, t.section, from, from.Add(d)})
			return s, nil, err
		}
		return &turner{turn, end}, nil
	}
}

func startMember(args ...string) (*member, error) {
	cmd, err := child("", append([]string{"member"}, args...)...)
	if err != nil {
		return nil, err
	}
	cmd.Stderr = os.Stderr
	ask, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	answer, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &member{cmd, ask, json.NewDecoder(answer)}, cmd.Start()
}

// turn gives all members the same task, and adds up their results.
func (t team) turn(members []*member, what task) (sample, error) {
	var failed error
	for _, m := range members {
		failed = errors.Join(failed, json.NewEncoder(m.ask).Encode(what))
	}
	var all crowd
	for _, m := range members {
		var r result
		if err := m.answer.Decode(&r); err != nil {
			failed = errors.Join(failed, fmt.Errorf("a process: %w", err))
			continue
		}
		all.took = max(all.took, r.Took)
		all.within, all.between = all.within.add(r.Within), all.between.add(r.Between)
		all.overlaps += r.Overlaps
		all.waits = append(all.waits, r.Longest)
		all.counts = append(all.counts, r.Counts...)
	}
	if failed != nil {
		return nil, failed
	}
	s := all.sample()
	delete(s, "median ms") // that is of the longest waits
	for name, h := range map[string]handOvers{"within": all.within, "between": all.between} {
		s[name+"/s"] = float64(h.N) / all.took.Seconds()
		if h.N > 0 && t.section > 0 {
			s[name+" µs"] = h.Idle.Seconds() * 1e6 / float64(h.N)
		}
	}
	s["overlaps"] = float64(all.overlaps)
	if t.section > 0 {
		s["share"] = s["locks/s"] * t.section.Seconds()
	}
	return s, nil
}

// memberMain is a process of a team: for each task that it reads it prints a result. Before, it locks another
// key, so that it has connections, and prints that it is ready.
func memberMain(args []string) error {
	at, err := meetAt(args[0])
	if err != nil {
		return err
	}
	process, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	c, err := openAt(args[2], args[3:])
	if err != nil {
		return err
	}
	for try := 1; ; try++ { // a node that answers late, while processes start, is no error yet
		unlock, err := c.lock("first:" + rand.Text())(context.Background())
		if err == nil {
			err = unlock()
		}
		if err == nil {
			break
		}
		if try == 10 {
			return err
		}
	}
	cpus := runtime.GOMAXPROCS(0)
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for err = out.Encode(struct{}{}); err == nil; {
		var t task
		if err := in.Decode(&t); err == io.EOF {
			return c.close()
		} else if err != nil {
			return err
		}
		// The thread that sleeps in a critical section must not keep the other goroutines from running, even with one CPU.
		if t.Section > 0 {
			runtime.GOMAXPROCS(cpus + 1)
		}
		locks := make([]lock, t.Goroutines)
		for i := range locks {
			locks[i] = c.lock(t.Key)
		}
		at.ended.Store(0)
		time.Sleep(time.Until(t.From))
		var done *crowd
		if done, err = crowdOf(at, process, locks, t); err == nil {
			err = out.Encode(result{done.counts, done.took, slices.Max(append(done.waits, 0)), done.within, done.between, done.overlaps})
		}
	}
	return err
}

func crowdOf(at *meeting, process int, locks []lock, t task) (*crowd, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	return run(ctx, locks, time.Until(t.Until), scene{at, process, t.Section}, func() error { cancel(); return nil })
}

// openAt opens a client of one server, or of several independent ones.
func openAt(library string, addrs []string) (*client, error) {
	if len(addrs) > 1 {
		return openQuorum(library, addrs), nil
	}
	return open(library, addrs[0])
}

// A meeting is what goroutines that lock one key share while they hold it, in memory that their processes share.
type meeting struct {
	last   atomic.Int64 // who had the lock last: the process and the goroutine
	inside atomic.Int64 // how many have it
	ended  atomic.Int64 // when the last critical section ended, in ns; 0: there has been none in this turn
}

// The one that had the lock last.
type predecessor int

const (
	sameGoroutine predecessor = iota
	sameProcess
	otherProcess
)

// enter records that a goroutine has been granted the lock, and reports who had it last, and whether another one still has it.
func (m *meeting) enter(process, goroutine int) (last predecessor, beside bool) {
	beside = m.inside.Add(1) > 1
	me := int64(process)<<32 | int64(goroutine+1)
	switch was := m.last.Swap(me); {
	case was == me:
		return sameGoroutine, beside
	case was>>32 == int64(process):
		return sameProcess, beside
	}
	return otherProcess, beside
}

// begin returns how long ago the last critical section ended, or 0 for the first one.
func (m *meeting) begin() time.Duration {
	ended := m.ended.Load()
	if ended == 0 {
		return 0
	}
	return time.Duration(time.Now().UnixNano() - ended)
}

// end records that a critical section ends.
func (m *meeting) end() { m.ended.Store(time.Now().UnixNano()) }

// meetAt maps a meeting from a file.
func meetAt(path string) (*meeting, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	memory, err := syscall.Mmap(int(f.Fd()), 0, int(unsafe.Sizeof(meeting{})), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return (*meeting)(unsafe.Pointer(&memory[0])), nil
}

// spend spends so much time. It sleeps, as a section that waits for a database, but a thread that sleeps wakes up late, so it ends by
// looking at the clock.
func spend(d time.Duration) {
	if d == 0 {
		return
	}
	const late = 100 * time.Microsecond
	end := time.Now().Add(d)
	if d > late {
		sleep(d - late)
	}
	for time.Now().Before(end) {
	}
}
