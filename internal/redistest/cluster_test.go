package redistest

import (
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestClusterServesEverySlot(t *testing.T) {
	t.Parallel()
	c := Cluster(t, 3)
	rc := c.Client(t)
	if n := len(c.Nodes()); n != 3 {
		t.Fatalf("want 3 nodes, got %d", n)
	}
	for _, key := range []string{"a", "b", "c", "d", "e", "f"} {
		if err := rc.Set(t.Context(), key, key, 0).Err(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestClusterHoldsASlotHalfMigrated(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c := Cluster(t, 2)
	rc := c.Client(t)
	slot := int(rc.ClusterKeySlot(ctx, "{x}a").Val())
	from := c.Owner(slot)
	to := 1 - from
	if err := rc.MSet(ctx, "{x}a", "1", "{x}b", "2").Err(); err != nil {
		t.Fatal(err)
	}

	c.BeginMigration(t, slot, to)
	c.MoveKeys(t, slot, to, "{x}a")
	owner := c.Nodes()[from].Client(t, func(o *redis.Options) { o.MaxRetries = -1 })
	err := owner.MGet(ctx, "{x}a", "{x}b").Err()
	if err == nil || !strings.HasPrefix(err.Error(), "TRYAGAIN") && !strings.HasPrefix(err.Error(), "ASK") {
		t.Fatalf("want TRYAGAIN or ASK for keys on both sides, got %v", err)
	}
	if err := owner.Get(ctx, "{x}a").Err(); err == nil || !strings.HasPrefix(err.Error(), "ASK") {
		t.Fatalf("want ASK for the key that has moved, got %v", err)
	}
	if v, err := rc.Get(ctx, "{x}a").Result(); err != nil || v != "1" {
		t.Fatalf("want the value 1, got %q, %v", v, err)
	}

	c.MoveKeys(t, slot, to)
	c.EndMigration(t, slot, to)
	if got := c.Owner(slot); got != to {
		t.Fatalf("want the slot owned by %d, it is by %d", to, got)
	}
	if v, err := rc.MGet(ctx, "{x}a", "{x}b").Result(); err != nil || v[0] != "1" || v[1] != "2" {
		t.Fatalf("want the values 1 and 2, got %v, %v", v, err)
	}

	c.MigrateSlot(t, slot, from)
	if v, err := rc.MGet(ctx, "{x}a", "{x}b").Result(); err != nil || v[0] != "1" || v[1] != "2" {
		t.Fatalf("want the values 1 and 2, got %v, %v", v, err)
	}
}

func TestClusterReplicaReplacesADeadMaster(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c := Cluster(t, 3)
	replica := c.AddReplica(t, 1)
	rc := c.Client(t)
	key := "k"
	for c.Owner(int(rc.ClusterKeySlot(ctx, key).Val())) != 1 {
		key += "k"
	}
	if err := rc.Set(ctx, key, "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	look := replica.Client(t)
	Eventually(t, "the replica has it", func() bool { return look.DBSize(ctx).Val() == 1 })
	c.Nodes()[1].Kill()
	// go-redis reloads the state of the cluster only once a minute, unless it is redirected.
	eager := c.Client(t, func(o *redis.ClusterOptions) { o.ClusterStateReloadInterval = 50 * time.Millisecond })
	// On a busy machine an election may fail, and the next one comes 8 s later.
	var err error
	defer func() {
		if t.Failed() {
			t.Logf("%v\n%s", err, look.ClusterNodes(ctx).Val())
		}
	}()
	Within(t, 3*Timeout, "it takes writes", func() bool { err = eager.Set(ctx, key, "w", 0).Err(); return err == nil })
	if v := look.Get(ctx, key).Val(); v != "w" {
		t.Errorf("want the value w on the former replica, got %q", v)
	}
}
