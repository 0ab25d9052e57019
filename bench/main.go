// Command bench measures redismutex, its peers and the least that Redis can do, each in turn. It is a module of its own, so that the
// dependencies of the peers stay out of the go.mod that users of redismutex import.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/schollz/progressbar/v3"
)

// pinnedEnv tells a pinned process the number of CPUs, childEnv a child process its task.
const pinnedEnv, childEnv = "BENCH_PINNED", "BENCH_CHILD"

func main() {
	do := func() error { return runCommand(os.Args[1:], os.Stdout, os.Stderr) }
	if os.Getenv(childEnv) != "" {
		do = func() error { return childMain(os.Args[1:]) }
	}
	if err := do(); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// A bench is one run.
type bench struct {
	turn    time.Duration
	rounds  int
	often   int    // the factor for rounds of short turns
	cpu     string // of the servers and the proxies, or "" for any
	dir     string
	servers []*redistest.Server
	proxies []*proxy
	nets    map[string]*network
	keys    int
	bar     *progressbar.ProgressBar
}

// runCommand runs the command with these arguments.
func runCommand(args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	only := flags.String("only", "", "measure the workloads that match this `regexp`, and keep the results of the others")
	rounds := flags.Int("rounds", 3, "the number of `rounds` of a workload; ten times as many if turns are short")
	turn := flags.Duration("turn", time.Second, "the `duration` of a library's turn on loopback; other turns are multiples of it")
	quick := flags.Bool("quick", false, "run every workload for a moment: a smoke test")
	render := flags.Bool("render", false, "render the tables and charts from the JSON, and measure nothing")
	pin := flags.Bool("pin", true, "run the servers on one CPU and the clients on another (Linux only)")
	root := flags.String("root", "", "the `directory` of README.md and docs: .. by default, with -quick a new one")
	if err := flags.Parse(args); err != nil {
		return err
	}
	match, err := regexp.Compile(*only)
	if err != nil {
		return err
	}
	cpu := ""
	if *pin && !*render {
		if cpu, err = pinned(); err != nil {
			return err
		}
	}
	if *root == "" {
		*root = ".."
		if *quick {
			if *root, err = os.MkdirTemp("", "bench"); err != nil {
				return err
			}
			fmt.Fprintln(stderr, "the results of the smoke test are in", *root)
		}
	}
	if err := os.MkdirAll(filepath.Join(*root, "docs"), 0o755); err != nil {
		return err
	}
	results, err := load(filepath.Join(*root, jsonFile))
	if err != nil {
		return err
	}
	if *render {
		return results.render(*root, stdout)
	}
	b := &bench{turn: *turn, rounds: *rounds, often: 10, cpu: cpu}
	if *quick {
		b.turn, b.rounds, b.often = 20*time.Millisecond, 1, 1
		heldCounts, waitCounts = []int{20, 100}, []int{10, 50, 100}
		teamSizes, sections = []int{16}, sections[:2]
	}
	err = b.measure(match, results, stderr)
	return errors.Join(err, results.save(filepath.Join(*root, jsonFile)), results.render(*root, stdout))
}

// pinned restarts the process on CPU 0, unless it is already there, and returns the CPU for the other processes.
func pinned() (string, error) {
	taskset, err := exec.LookPath("taskset")
	if os.Getenv(pinnedEnv) != "" {
		return "1", nil
	}
	if err != nil || runtime.GOOS != "linux" || runtime.NumCPU() < 2 {
		return "", nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	env := append(os.Environ(), fmt.Sprint(pinnedEnv, "=", runtime.NumCPU()), "REDISTEST_CPU=1")
	return "", syscall.Exec(taskset, append([]string{"taskset", "-c", "0", self}, os.Args[1:]...), env)
}

// child returns a command that runs this program as another process, on the given CPU unless that is "".
func child(cpu string, args ...string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, args...)
	if cpu != "" {
		cmd = exec.Command("taskset", append([]string{"-c", cpu, self}, args...)...)
	}
	cmd.Env = append(os.Environ(), childEnv+"=1")
	return cmd, nil
}

func childMain(args []string) error {
	task := map[string]func([]string) error{"proxy": proxyMain, "held": heldMain, "waiters": waitersMain, "member": memberMain}
	return task[args[0]](args[1:])
}

// measure runs the workloads that match, and continues if one of them fails.
func (b *bench) measure(match *regexp.Regexp, results *Results, stderr io.Writer) (err error) {
	if err := b.start(); err != nil {
		return errors.Join(err, b.stop())
	}
	defer func() { err = errors.Join(err, b.stop()) }()
	if results.Machine, err = b.machine(); err != nil {
		return err
	}
	var selected []workload
	var total time.Duration
	all := b.workloads()
	for _, w := range all {
		if match.MatchString(w.name) {
			selected = append(selected, w)
			total += w.turn * time.Duration(len(w.libraries)*b.roundsOf(w))
		}
	}
	if len(selected) == len(all) {
		clear(results.Workloads) // also of workloads that an earlier program had
	}
	b.bar = progressbar.NewOptions64(total.Milliseconds(), progressbar.OptionSetWriter(stderr), progressbar.OptionSetWidth(20),
		progressbar.OptionSetPredictTime(true), progressbar.OptionSetElapsedTime(true), progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionOnCompletion(func() { fmt.Fprintln(stderr) }))
	for _, w := range selected {
		done, failed := b.all(w)
		results.Workloads[w.name], err = done, errors.Join(err, failed)
	}
	return err
}

func (b *bench) roundsOf(w workload) int {
	return cmp.Or(w.rounds, b.rounds)
}

// all runs one workload, round by round. Each round begins with another library.
func (b *bench) all(w workload) (done map[string]*Rounds, failed error) {
	done, turners := map[string]*Rounds{}, map[string]*turner{}
	fail := func(library string, err error) {
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %s: %w", w.name, library, err))
			delete(turners, library)
		}
	}
	for _, library := range w.libraries {
		t, err := w.prepare(library)
		if err != nil {
			fail(library, err)
			continue
		}
		defer func() { fail(library, t.close()) }()
		turners[library], done[library] = t, &Rounds{}
		if !w.cold {
			b.bar.Describe(w.name + ", warm-up, " + library)
			_, _, err := t.turn(b.turn / 5)
			fail(library, err)
		}
	}
	for round := range b.roundsOf(w) {
		for i := range w.libraries {
			library := w.libraries[(i+round)%len(w.libraries)]
			if turners[library] == nil {
				continue
			}
			b.bar.Describe(fmt.Sprintf("%s, round %d of %d, %s", w.name, round+1, b.roundsOf(w), library))
			runtime.GC() // garbage of the last turn
			s, waits, err := turners[library].turn(w.turn)
			fail(library, err)
			if err == nil {
				maps.DeleteFunc(s, func(_ string, v float64) bool { return math.IsNaN(v) || math.IsInf(v, 0) }) // not in JSON
				done[library].Samples = append(done[library].Samples, s)
				done[library].waits = append(done[library].waits, waits...)
			}
			fail("progress", b.bar.Add64(w.turn.Milliseconds()))
		}
	}
	for _, r := range done {
		if w.drawn {
			r.Waits = percentiles(r.waits)
		}
	}
	return done, failed
}

// start starts the servers and the proxies.
func (b *bench) start() (err error) {
	if b.dir, err = os.MkdirTemp("", "bench"); err != nil {
		return err
	}
	var addrs []string // the one server, and the nodes of the quorum
	for range 6 {
		addr, err := b.server()
		if err != nil {
			return err
		}
		addrs = append(addrs, addr)
	}
	far, err := startProxy(b.cpu, 500*time.Microsecond, addrs...)
	if err != nil {
		return err
	}
	counter, err := startProxy(b.cpu, 0, addrs[0])
	if err != nil {
		return errors.Join(err, far.close())
	}
	b.proxies = []*proxy{far, counter}
	b.nets = map[string]*network{
		loopback: {name: loopback, addr: addrs[0], nodes: addrs[1:]},
		distant:  {name: distant, addr: far.addrs[0], nodes: far.addrs[1:]},
		counted:  {name: counted, addr: counter.addrs[0], proxy: counter},
	}
	return nil
}

// server starts another server, which lives as long as the bench.
func (b *bench) server() (addr string, err error) {
	dir, err := os.MkdirTemp(b.dir, "redis")
	if err != nil {
		return "", err
	}
	s, err := redistest.Open(dir)
	if err != nil {
		return "", err
	}
	b.servers = append(b.servers, s)
	return s.Addr(), nil
}

func (b *bench) stop() (err error) {
	for _, p := range b.proxies {
		err = errors.Join(err, p.close())
	}
	for _, s := range b.servers {
		s.Kill()
	}
	return errors.Join(err, os.RemoveAll(b.dir))
}

// newKey returns a key that has not been used before.
func (b *bench) newKey() string {
	b.keys++
	return fmt.Sprint("bench-", b.keys)
}

func (b *bench) machine() (m Machine, err error) {
	rc := dial(b.nets[loopback].addr)
	defer rc.Close()
	info, err := rc.InfoMap(context.Background(), "server").Result()
	if err != nil {
		return m, err
	}
	cpus, err := strconv.Atoi(cmp.Or(os.Getenv(pinnedEnv), strconv.Itoa(runtime.NumCPU())))
	if err != nil {
		return m, err
	}
	m = Machine{Date: time.Now().UTC().Format(time.DateOnly), Go: runtime.Version(), OS: runtime.GOOS + "/" + runtime.GOARCH,
		Redis: info["Server"]["redis_version"], CPUs: cpus, Pinned: b.cpu != "", Turn: b.turn.String(), Rounds: b.rounds,
		Versions: map[string]string{}}
	if build, ok := debug.ReadBuildInfo(); ok {
		for _, dep := range build.Deps {
			if compared.MatchString(dep.Path) {
				m.Versions[dep.Path] = strings.TrimPrefix(dep.Version, "v")
			}
		}
	}
	return m, nil
}

var compared = regexp.MustCompile(`/(go-redis/v9|redsync/v4|redislock|rueidis|go-zero)$`)
