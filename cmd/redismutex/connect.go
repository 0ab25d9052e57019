package main

import (
	"errors"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
)

// options are the flags of all commands.
type options struct {
	urls []string

	json bool // of show and ls

	// Of run.
	shared, try, quiet, verbose bool
	wait, ttl, grace, maxHold   time.Duration
	heldCode                    int
}

// connect returns clients for the URLs that were given. Connections are made when they are needed.
func (o *options) connect() (clients []redis.UniversalClient, err error) {
	urls := o.urls
	if len(urls) == 0 {
		urls = []string{"redis://localhost:6379"}
		if u := os.Getenv("REDIS_URL"); u != "" {
			urls[0] = u
		}
	}
	for _, u := range urls {
		c, err := client(u)
		if err != nil {
			return nil, usage("the URL of Redis%s: %w", hostOf(u), err)
		}
		clients = append(clients, c)
	}
	return clients, nil
}

// client returns a client for a URL as go-redis has them: that of a Sentinel has a master_name, and that of a Cluster an addr.
func client(text string) (redis.UniversalClient, error) {
	u, err := url.Parse(text)
	if err != nil {
		return nil, errors.New("it is no URL")
	}
	switch q := u.Query(); {
	case q.Has("master_name"):
		opt, err := redis.ParseFailoverURL(text)
		if err != nil {
			return nil, err
		}
		return redis.NewFailoverClient(opt), nil
	case q.Has("addr"):
		opt, err := redis.ParseClusterURL(text)
		if err != nil {
			return nil, err
		}
		return redis.NewClusterClient(opt), nil
	}
	opt, err := redis.ParseURL(text)
	if err != nil {
		return nil, err
	}
	return redis.NewClient(opt), nil
}

// hostOf returns the part of a URL that names its server. The others may have a password, also where they are malformed.
func hostOf(text string) string {
	if u, err := url.Parse(text); err == nil && u.Host != "" {
		return " on " + u.Host
	}
	return ""
}

// mutex returns a mutex of that name on one Redis or several.
func mutex(clients []redis.UniversalClient, name string, opt ...redismutex.MutexOption) *redismutex.RWMutex {
	if len(clients) == 1 {
		return redismutex.NewMutex(clients[0], name, opt...)
	}
	nodes := make([]redis.Scripter, len(clients))
	for i, c := range clients {
		nodes[i] = c
	}
	return redismutex.NewRedlock(nodes, name, opt...)
}

// text is an error without the prefix of the library, which is that of the program.
func text(err error) string { return strings.ReplaceAll(err.Error(), "redismutex: ", "") }

// failed is the error of a call to Redis.
func failed(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, redismutex.ErrInvalid):
		return exitError{exitUsage, err}
	}
	return exitError{exitRedis, err}
}
