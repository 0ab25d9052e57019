package redismutex

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/localqueue"
)

var fenced = redis.NewScript(`local c = tonumber(redis.call('GET', KEYS[1]) or '0')
local a, b = redis.call('GET', KEYS[1]) or '0', ARGV[1]
if #a > #b or #a == #b and a > b then return 'LOW ' .. a end
if a == b then return 'SAME' end
redis.call('SET', KEYS[1], b) return 'OK'`)

func TestAttackWorker(t *testing.T) {
	addr := os.Getenv("ATTACK_ADDR")
	if addr == "" { t.Skip() }
	faults := os.Getenv("ATTACK_FAULTS") != ""
	dur, _ := time.ParseDuration(os.Getenv("ATTACK_DUR"))
	gs, _ := strconv.Atoi(os.Getenv("ATTACK_GS"))
	strictNest := os.Getenv("ATTACK_NEST") != ""
	rc := redis.NewClient(&redis.Options{Addr: addr, PoolSize: 10})
	db := redis.NewClient(&redis.Options{Addr: addr, PoolSize: 64})
	SetLog(func(string, ...any) {})
	ttl := 600 * time.Millisecond
	if s := os.Getenv("ATTACK_TTL"); s != "" { ttl, _ = time.ParseDuration(s) }
	muts := []*RWMutex{
		NewMutex(rc, "x", WithTTL(ttl)), NewMutex(rc, "x", WithTTL(ttl)), NewMutex(rc, "x", WithTTL(ttl)),
		NewMutex(rc, "x", WithTTL(ttl), WithTurn(0)), NewMutex(rc, "x", WithTTL(ttl), WithTurn(ttl/4)),
		NewMutex(rc, "x", WithTTL(2*ttl)),
	}
	bad := func(f string, a ...any) { fmt.Printf("VIOLATION pid %d: %s\n", os.Getpid(), fmt.Sprintf(f, a...)) }
	var ops, grants, lostN, cancels atomic.Int64
	var longest atomic.Int64
	var mu sync.Mutex
	waiting := map[int]time.Time{}
	go func() {
		for { time.Sleep(time.Second); mu.Lock()
			for g, s := range waiting { if time.Since(s) > 20*time.Second {
				bad("STUCK goroutine %d for %v", g, time.Since(s))
				buf := make([]byte, 1<<20); fmt.Printf("%s\n", buf[:runtime.Stack(buf, true)]); os.Exit(3) } }
			mu.Unlock() }
	}()
	end := time.Now().Add(dur)
	var all sync.WaitGroup
	for g := range gs {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(os.Getpid()), uint64(g)))
			for time.Now().Before(end) {
				ops.Add(1)
				m := muts[r.IntN(len(muts))]
				write, try := r.IntN(2) == 0, r.IntN(4) == 0
				ctx, cancel := context.Background(), context.CancelFunc(func() {})
				if r.IntN(3) == 0 { ctx, cancel = context.WithTimeout(ctx, time.Duration(r.IntN(100000))*time.Microsecond) }
				start := time.Now()
				mu.Lock(); waiting[g] = start; mu.Unlock()
				var l *Lock; var err error
				switch {
				case write && try: l, err = m.TryLockContext(ctx)
				case try: l, err = m.TryRLockContext(ctx)
				case write: l, err = m.LockContext(ctx)
				default: l, err = m.RLockContext(ctx)
				}
				mu.Lock(); delete(waiting, g); mu.Unlock()
				if d := int64(time.Since(start)); d > longest.Load() { longest.Store(d) }
				if err != nil {
					switch {
					case errors.Is(err, ErrLock) && try, errors.Is(err, context.DeadlineExceeded): cancels.Add(1)
					case errors.Is(err, ErrRedis) && faults:
					default: bad("lock: %v", err)
					}
					cancel(); continue
				}
				grants.Add(1)
				bg := context.Background()
				if write {
					tok := strconv.FormatUint(l.Token(), 10)
					res, err := fenced.Run(bg, db, []string{"fence"}, tok).Text()
					if err == nil && res != "OK" && l.Err() == nil && !(faults && res == "SAME") { bad("token %s: %s", tok, res) }
					if err == nil && res == "OK" {
						if r.IntN(3) == 0 { time.Sleep(time.Duration(r.IntN(3000)) * time.Microsecond) }
						if r.IntN(5) == 0 { if err := l.Downgrade(bg); err != nil && !faults { bad("downgrade: %v", err) } }
						v, err := db.Get(bg, "fence").Result()
						if err == nil && v != tok && (l.Err() == nil || errors.Is(l.Err(), context.DeadlineExceeded) && time.Now().Before(l.Until())) { bad("write lock %s: fence became %s", tok, v) }
					}
				} else {
					v1, e1 := db.Get(bg, "fence").Result()
					if strictNest && r.IntN(4) == 0 {
						if n, err := m.LockContext(l); err == nil { bad("upgrade granted"); n.Unlock() } else if l.Err() == nil && !errors.Is(err, ErrUpgrade) { bad("nest: %v", err) }
					}
					if r.IntN(3) == 0 { time.Sleep(time.Duration(r.IntN(5000)) * time.Microsecond) }
					v2, e2 := db.Get(bg, "fence").Result()
					if e1 == nil && e2 == nil && v1 != v2 && (l.Err() == nil || errors.Is(l.Err(), context.DeadlineExceeded) && time.Now().Before(l.Until())) { bad("read lock: %s became %s", v1, v2) }
				}
				err = l.UnlockContext(bg)
				if errors.Is(err, ErrLockLost) { lostN.Add(1) }
				if err != nil && !faults { bad("unlock: %v cause %v", err, context.Cause(l)) }
				if e := l.UnlockContext(bg); !errors.Is(e, ErrUnlocked) && !(errors.Is(e, ErrLockLost)) { bad("second unlock: %v", e) }
				cancel()
			}
		})
	}
	all.Wait()
	time.Sleep(200*time.Millisecond)
	fmt.Printf("pid %d: %d ops, %d grants, %d lost, %d refused/ended, longest %v, queues %d, goroutines %d\n", os.Getpid(), ops.Load(), grants.Load(), lostN.Load(), cancels.Load(), time.Duration(longest.Load()), localqueue.Len(), runtime.NumGoroutine())
	if localqueue.Len() != 0 { bad("queues left") }
}

func TestAttackProcesses(t *testing.T) {
	mode := os.Getenv("ATTACK_MODE")
	if mode == "" { t.Skip() }
	port := os.Getenv("ATTACK_PORT")
	dir := t.TempDir()
	var server *exec.Cmd
	launch := func() {
		server = exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", dir, "--save", "", "--appendonly", "yes", "--appendfsync", map[bool]string{true: "always", false: "no"}[strings.Contains(mode, "server")], "--logfile", dir+"/log")
		server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := server.Start(); err != nil { t.Fatal(err) }
	}
	launch()
	defer func() { server.Process.Kill() }()
	time.Sleep(500*time.Millisecond)
	dur := 20*time.Second
	if s := os.Getenv("ATTACK_DUR"); s != "" { dur, _ = time.ParseDuration(s) }
	spawn := func(d time.Duration) *exec.Cmd {
		c := exec.Command(os.Args[0], "-test.run", "^TestAttackWorker$", "-test.v")
		c.Env = append(os.Environ(), "ATTACK_ADDR=127.0.0.1:"+port, "ATTACK_DUR="+d.String())
		if mode != "calm" { c.Env = append(c.Env, "ATTACK_FAULTS=1") }
		c.Stdout, c.Stderr = os.Stdout, os.Stderr
		c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := c.Start(); err != nil { t.Fatal(err) }
		return c
	}
	end := time.Now().Add(dur)
	var procs []*exec.Cmd
	for range 4 { procs = append(procs, spawn(dur)) }
	for mode != "calm" && time.Until(end) > 2*time.Second {
		time.Sleep(time.Duration(100+rand.IntN(600))*time.Millisecond)
		i := rand.IntN(len(procs))
		switch {
		case strings.Contains(mode, "stop") && rand.IntN(2) == 0:
			procs[i].Process.Signal(syscall.SIGSTOP)
			time.Sleep(time.Duration(rand.IntN(1200))*time.Millisecond)
			procs[i].Process.Signal(syscall.SIGCONT)
		case strings.Contains(mode, "kill") && rand.IntN(4) == 0:
			procs[i].Process.Kill(); procs[i].Wait()
			procs[i] = spawn(time.Until(end))
		case strings.Contains(mode, "server") && rand.IntN(4) == 0:
			server.Process.Kill(); server.Wait()
			time.Sleep(time.Duration(rand.IntN(900))*time.Millisecond)
			launch()
		case strings.Contains(mode, "conn"):
			rc := redis.NewClient(&redis.Options{Addr: "127.0.0.1:"+port})
			rc.Do(context.Background(), "CLIENT", "KILL", "TYPE", []string{"normal","pubsub"}[rand.IntN(2)])
			rc.Close()
		}
	}
	for _, p := range procs { p.Wait() }
	rc := redis.NewClient(&redis.Options{Addr: "127.0.0.1:"+port})
	time.Sleep(3*time.Second)
	keys, _ := rc.Keys(context.Background(), "*").Result()
	fmt.Println("keys left:", keys)
}
