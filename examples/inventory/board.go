package main

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"
)

// A board shows holders, waiters, sales and the stock: on a terminal as a table that is redrawn with every event, elsewhere
// as an occasional line.
type board struct {
	out   io.Writer
	live  bool
	began time.Time
	rows  []*row
	left  int
	sold  int
	notes []string
	drawn int       // the number of lines on the terminal to overwrite
	shown time.Time // when the last line was printed elsewhere
}

type row struct {
	name, mark, text string
	done             int
	unit             string
}

const (
	holding = "●"
	waiting = "○"
	gone    = "✕"
	idle    = " "
)

func newBoard(out io.Writer, tasks []task) *board {
	b := &board{out: out, live: isTerminal(out), began: time.Now(), left: items}
	for _, t := range tasks {
		r := &row{name: t.Name, mark: idle, text: "starts", unit: "counts"}
		if t.Sells {
			r.unit = "sales"
		}
		b.rows = append(b.rows, r)
	}
	return b
}

func (b *board) row(name string) *row {
	for _, r := range b.rows {
		if r.name == name {
			return r
		}
	}
	panic("no worker is named " + name)
}

func (b *board) show(e event) {
	r := b.row(e.Who)
	switch e.Does {
	case waits:
		r.mark, r.text = waiting, "waits"
	case sells:
		r.mark, r.text = holding, fmt.Sprintf("sells item %d", e.Item)
	case stalls:
		r.text = fmt.Sprintf("stopped while selling item %d", e.Item)
	case hasSold:
		r.mark, r.text = idle, fmt.Sprintf("sold item %d", e.Item)
		r.done++
		b.sold++
		b.left = e.Left
	case counts:
		r.mark, r.text = holding, "counts"
	case hasCounted:
		r.mark, r.text = idle, fmt.Sprintf("counted %d + %d", e.Left, e.Sold)
		r.done++
	case leaves:
		r.mark, r.text = idle, "is done"
	}
	switch {
	case b.live:
		b.draw()
	case r.mark == holding && time.Since(b.shown) > 200*time.Millisecond:
		b.shown = time.Now()
		b.line("sold %2d, left %2d   holding: %s   waiting: %s", b.sold, b.left, b.names(holding), b.names(waiting))
	}
}

func (b *board) killed(name string) {
	r := b.row(name)
	r.mark, r.text = gone, "killed while it held the lock"
}

// note prints a line below the table.
func (b *board) note(format string, args ...any) {
	if !b.live {
		b.line(format, args...)
		return
	}
	b.notes = append(b.notes, b.stamp()+fmt.Sprintf(format, args...))
	b.draw()
}

func (b *board) end() { fmt.Fprintln(b.out) }

func (b *board) line(format string, args ...any) {
	fmt.Fprintf(b.out, b.stamp()+format+"\n", args...)
}

func (b *board) stamp() string {
	return fmt.Sprintf("%5.2f s  ", time.Since(b.began).Seconds())
}

func (b *board) names(mark string) string {
	var names []string
	for _, r := range b.rows {
		if r.mark == mark {
			names = append(names, r.name)
		}
	}
	if names == nil {
		return "nobody"
	}
	return strings.Join(names, ", ")
}

func (b *board) draw() {
	const width = 50
	var lines []string
	for _, r := range b.rows {
		lines = append(lines, fmt.Sprintf("  %s %s  %-30s %3d %s", r.mark, r.name, r.text, r.done, r.unit))
	}
	full := width * min(b.sold, items) / items
	bar := strings.Repeat("█", full) + strings.Repeat("░", width-full)
	lines = append(lines, "", fmt.Sprintf("  %s  %d sold, %d left", bar, b.sold, b.left), "")
	lines = append(lines, b.notes...)

	var s strings.Builder
	if b.drawn > 0 {
		fmt.Fprintf(&s, "\x1b[%dA", b.drawn)
	}
	for _, line := range lines {
		s.WriteString(line + "\x1b[K\n")
	}
	fmt.Fprint(b.out, s.String())
	b.drawn = len(lines)
}

// isTerminal reports whether out understands the escape codes of a terminal, which not every Windows console does.
func isTerminal(out io.Writer) bool {
	f, ok := out.(*os.File)
	if !ok || runtime.GOOS == "windows" || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
