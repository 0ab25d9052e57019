package script_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex/internal/script"
)

func (s *server) inspect() script.Inspection {
	s.Helper()
	i, err := s.ep.Inspect(context.Background(), s.keys)
	if err != nil {
		s.Fatal(err)
	}
	return i
}

// However many hold or wait, the reply has a hundred of them, and their number.
func TestInspectIsBounded(t *testing.T) {
	const many = 10_000
	onBothServers(t, func(s *server) {
		ctx := context.Background()
		s.is(s.reader().acquire(), script.Granted)
		s.is(s.writer().acquire(), script.Waiting)
		ends, rank := float64(time.Now().Add(time.Minute).UnixMilli()), float64(time.Now().Add(time.Hour).UnixMicro())
		var readers, leases, waiters = []any{}, []redis.Z{}, []redis.Z{}
		for i := range many {
			holder, waiter := fmt.Sprint("redismutex:h:", i), fmt.Sprint("redismutex:w:", i)
			readers = append(readers, holder)
			leases = append(leases, redis.Z{Score: ends, Member: holder}, redis.Z{Score: ends, Member: waiter})
			waiters = append(waiters, redis.Z{Score: rank + float64(i), Member: "w" + waiter})
		}
		s.rc.SAdd(ctx, s.keys.Name(), readers...)
		s.rc.ZAdd(ctx, s.keys.Intents(), waiters...)
		s.rc.ZAdd(ctx, s.keys.Leases(), leases...)
		i := s.inspect()
		if i.Holding != many+1 || len(i.Holders) != 100 || i.Waiting != many+1 || len(i.Waiters) != 100 {
			t.Errorf("%d hold, %d of them are there; %d wait, %d of them are there", i.Holding, len(i.Holders), i.Waiting, len(i.Waiters))
		}
		for n, p := range i.Waiters[1:] {
			if p.ID != fmt.Sprint("redismutex:w:", n) {
				t.Fatalf("waiter %d is %q", n+1, p.ID)
			}
		}
	})
}

// A reply that the script does not give is an error of Redis, and nothing else happens.
func TestInspectionOfAServerGoneMadIsAnError(t *testing.T) {
	onBothServers(t, func(s *server) {
		for _, reply := range []string{
			"1", "'x'", "{}", "{'foreign'}", "{'foreign', 1}", "{'none', {}, {}, 0, 0, 0}", "{'none', {}, {}, 0, 0, 0, 'x'}",
			"{1, {}, {}, 0, 0, 0, 0}", "{'none', 1, {}, 0, 0, 0, 0}", "{'set', {'x'}, {}, 0, 0, 0, 0}", "{'set', {1, 1}, {}, 0, 0, 0, 0}",
			"{'set', {'x', 'y'}, {}, 0, 0, 0, 0}", "{'none', {}, {'rx', 1}, 0, 0, 0, 0}", "{'none', {}, {'rx', -1, 1}, 0, 0, 0, 0}",
			"{'none', {}, {1, 1, 1}, 0, 0, 0, 0}", "{'none', {}, {}, -1, 0, 0, 0}", "{'none', {}, {}, 0, {}, 0, 0}", "{'none', {}, {}, 9007199254740992, 0, 0, 0}",
		} {
			sent := redis.NewCmd(context.Background(), "eval", "return "+reply, 0)
			_ = s.rc.Process(context.Background(), sent)
			if i, err := script.ParseInspection(sent); !errors.Is(err, ErrRedis) {
				t.Errorf("%s: %+v, %v", reply, i, err)
			}
		}
		sent := redis.NewCmd(context.Background(), "eval", "return {'none', {}, {'', 1, 9007199254740991, 'w', 1, 1}, 0, 0, 0, 0}", 0)
		_ = s.rc.Process(context.Background(), sent)
		if i, err := script.ParseInspection(sent); err == nil && (i.Waiters[0].ID != "" || i.Waiters[1].Lease < 0) {
			t.Errorf("%+v", i)
		}
	})
}
