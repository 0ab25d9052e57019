// Package chaos tests the promises with real processes that are killed, stopped and cut off.
//
// A test runs its own binary as the clients. They lock, renew, nest, downgrade, cancel and unlock, and record what they
// observe. Meanwhile clients, links and servers fail. The plan of the faults is drawn from a seed, which is printed; the
// timing of the processes is not. When all faults have ended every client must make progress, and then the histories are
// checked. Each kind of Redis is a test of its own, and they run in parallel:
//
//	go test -race ./internal/chaos                                # about half a minute: this is what CI runs
//	go test -race ./internal/chaos -chaos.for 60s -chaos.seed 7   # 60 s in each world
//	go test -race ./internal/chaos -chaos.for 1h -run /redlock -timeout 2h
//
// If replication is asynchronous, a failover may lose locks: there may be a second holder, but the first must learn of the
// loss soon, and the fencing tokens must keep rising. The old master is dead by then. That two masters live at once is no
// fault of these tests: nothing on the side of a client helps against it, and docs/operations.md names the setting of
// Redis that does.
//
// A test that fails prints its seed, and the directory with the histories and logs. The tests need Linux.
package chaos
