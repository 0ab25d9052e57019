// Package integration tests the library through its public API on real servers, in real time: by what callers get and
// by the keys in Redis. Each file is one kind of world: a single server, one that is full, one that holds foreign data,
// several independent servers, a Cluster, a Sentinel, and the other clients of go-redis.
package integration
