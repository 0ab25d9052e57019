package main

import (
	"bytes"
	"io"
)

// A printer prints in the background: a pipe that is full, or a terminal that is stopped, must not keep the program from
// ending the command in time.
type printer struct {
	to   io.Writer
	jobs chan func()
}

func newPrinter(to io.Writer) *printer {
	p := &printer{to, make(chan func(), 100)}
	go func() {
		for job := range p.jobs {
			job()
		}
	}()
	return p
}

// Write never blocks. If nobody reads, lines are dropped.
func (p *printer) Write(b []byte) (int, error) {
	line := bytes.Clone(b)
	select {
	case p.jobs <- func() { _, _ = p.to.Write(line) }:
	default:
	}
	return len(b), nil
}

// flush waits until all has been printed.
func (p *printer) flush() {
	printed := make(chan struct{})
	p.jobs <- func() { close(printed) }
	<-printed
}
