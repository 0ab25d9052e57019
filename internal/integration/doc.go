// Package integration tests the library through its public API on real servers, in real time: it checks what calls return
// and the keys in Redis. Each file has one kind of environment: a single server, one that is full, one with foreign data,
// several independent servers, a Cluster, a Sentinel, and the other clients of go-redis.
package integration
