package redismutex

// The ACL command in docs/operations.md allows what the library needs, and no more.

import (
	"context"
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/redistest"
	"github.com/redismutex/redismutex/lua"
)

// docsACL returns the ACL SETUSER command of docs/operations.md, as words.
func docsACL(t *testing.T) []string {
	page, err := os.ReadFile("docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(page), "```\nACL ")
	command, _, found := strings.Cut(rest, "\n```")
	if !found {
		t.Fatal("docs/operations.md has no ACL command")
	}
	return append([]string{"ACL"}, strings.Fields(strings.ReplaceAll(command, "\\\n", " "))...)
}

func TestDocsACLNamesTheCommandsInUse(t *testing.T) {
	var used []string
	for _, verb := range []string{"lock", "rlock", "refresh", "unlock", "inspect", "revoke"} {
		for _, command := range regexp.MustCompile(`\bp?call\('(\w+)'`).FindAllStringSubmatch(lua.Source(verb), -1) {
			used = append(used, strings.ToLower(command[1]))
		}
	}
	// What the client itself sends.
	used = append(used, "evalsha", "eval", "subscribe", "unsubscribe", "ping", "hello", "info")
	slices.Sort(used)
	var allowed []string
	for _, word := range docsACL(t) {
		if name, ok := strings.CutPrefix(word, "+"); ok {
			allowed = append(allowed, name)
		}
	}
	slices.Sort(allowed)
	if used = slices.Compact(used); !slices.Equal(used, allowed) {
		t.Errorf("docs/operations.md allows %q, the scripts and the client use %q", allowed, used)
	}
}

func TestDocsACLIsEnough(t *testing.T) {
	t.Parallel() // it waits for renewals
	ctx := context.Background()
	server := redistest.Start(t)
	admin := server.Client(t)
	var words []any
	for _, word := range docsACL(t) {
		words = append(words, word)
	}
	if err := admin.Do(ctx, words...).Err(); err != nil {
		t.Fatal(err)
	}
	log := new(redistest.Log)
	user := func() *redis.Client {
		return server.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "secret" })
	}
	const ttl = 3 * time.Second // a machine that is busy renews a shorter lease too late
	var wg sync.WaitGroup
	for range 2 {
		m := NewMutex(user(), "lock:x", WithTTL(ttl), WithLogger(log.Logger()))
		for i := range 4 {
			wg.Go(func() {
				for n := range 10 {
					ask := m.RLockContext
					if i%2 == 0 {
						ask = m.LockContext
					}
					l, err := ask(ctx)
					if err != nil {
						t.Error(err)
						return
					}
					if i == 0 && n == 0 {
						renewed(t, l, ttl)
					}
					if err := l.UnlockContext(ctx); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	wg.Wait()
	// What an operator does is allowed, too, and a holder may listen for a revocation.
	m, operator := NewMutex(user(), "lock:x", WithTTL(ttl), WithLogger(log.Logger())), NewMutex(user(), "lock:x", WithTTL(ttl))
	l, err := m.LockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	renewed(t, l, ttl)
	if s, err := operator.Inspect(ctx); err != nil || len(s.Holders) != 1 || s.Holders[0].ID != l.ID() {
		t.Errorf("%v\n%v", err, s)
	}
	if log.Count("") > 0 { // what comes later is that it was revoked
		t.Error(log)
	}
	if err := operator.Revoke(ctx, l.ID()); err != nil {
		t.Error(err)
	}
	<-l.Done()
	several := NewRedlock([]redis.Scripter{user(), server.Client(t), server.Client(t)}, "lock:y", WithTTL(ttl))
	if err := several.Revoke(ctx, "redismutex:a/1/b.1:1000"); !errors.Is(err, ErrNoSuchID) { // it scans
		t.Error(err)
	}
	if _, err := NewMutex(user(), "other").LockContext(ctx); err == nil {
		t.Error("a key outside of the ACL was locked")
	}
}

// A client of a cluster asks which master has which slots.
func TestDocsACLIsEnoughForACluster(t *testing.T) {
	t.Parallel()
	const more = "+cluster|slots"
	page, err := os.ReadFile("docs/operations.md")
	if err != nil || !strings.Contains(string(page), "`"+more+"`") {
		t.Fatalf("docs/operations.md does not name %s, %v", more, err)
	}
	servers := redistest.Cluster(t, 3)
	for _, n := range servers.Nodes() {
		var words []any
		for _, word := range append(docsACL(t), more) {
			words = append(words, word)
		}
		if err := n.Client(t).Do(t.Context(), words...).Err(); err != nil {
			t.Fatal(err)
		}
	}
	rc := servers.Client(t, func(o *redis.ClusterOptions) { o.Username, o.Password = "app", "secret" })
	for _, name := range []string{"lock:x", "lock:y", "lock:z"} {
		m := NewMutex(rc, name)
		l, err := m.LockContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if s, err := m.Inspect(t.Context()); err != nil || len(s.Holders) != 1 {
			t.Errorf("%v\n%v", err, s)
		}
		next := redistest.Later(func() (*Lock, error) { return m.RLockContext(t.Context()) })
		l.Unlock()
		got := <-next
		if got.Err != nil {
			t.Fatal(got.Err)
		}
		got.Value.Unlock()
	}
}

// renewed waits until l has been renewed.
func renewed(t *testing.T, l *Lock, ttl time.Duration) {
	until := l.Until()
	redistest.Eventually(t, "the lock is renewed", func() bool {
		return l.Err() != nil || l.Until().After(until.Add(ttl/4))
	})
	if l.Err() != nil {
		t.Errorf("the lock was lost before it was renewed: %v", context.Cause(l))
	}
}
