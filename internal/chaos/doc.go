// Package chaos answers: does the lock keep its promises where real processes die, stand still and are cut off?
//
// A test runs its own binary again as the clients. They lock, renew, nest, downgrade, change their minds and unlock,
// and write down what they see. Meanwhile clients, links and servers fail, by a seed that is printed: it fixes the
// plan, while the processes run as they like. When all has healed everybody must get on, and then the histories are
// checked. There are several worlds, each a kind of Redis, side by side:
//
//	go test -race ./internal/chaos                                # about half a minute: this is what CI runs
//	go test -race ./internal/chaos -chaos.for 60s -chaos.seed 7   # 60 s in each world
//	go test -race ./internal/chaos -chaos.for 1h -run /redlock -timeout 2h
//
// Where replication is asynchronous a failover may lose locks: there a second holder may enter, but the first has to be
// told soon, and the fencing tokens rise even so.
//
// A test that fails says which seed it was, and where it left the histories and logs. It needs Linux.
package chaos
