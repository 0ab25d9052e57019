package redistest

import (
	"fmt"
	"runtime"
	"sync"
)

// A Witness stands inside a reader/writer lock and sees who else is there.
type Witness struct {
	mu               sync.Mutex
	writers, readers int // inside

	Wrote, Read int      // visits that have begun
	Together    int      // the most readers inside at once
	Overlaps    []string // who met whom, a line for each visit that should not have been
}

// Visit is one stay inside the lock, which stay may prolong; nil stands for a few turns of the scheduler, without which
// a section is so short that nobody is met there.
func (w *Witness) Visit(write bool, stay func()) {
	w.enter(write)
	if stay != nil {
		stay()
	} else {
		for range 3 {
			runtime.Gosched()
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if write {
		w.writers--
	} else {
		w.readers--
	}
}

// enter compares a visitor with those inside. Of two that overlap the later one sees the earlier.
func (w *Witness) enter(write bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	who := "reader"
	if write {
		who = "writer"
	}
	if w.writers > 0 || write && w.readers > 0 {
		w.Overlaps = append(w.Overlaps, fmt.Sprintf("a %s came in while %d writers and %d readers were inside", who, w.writers, w.readers))
	}
	if write {
		w.writers++
		w.Wrote++
	} else {
		w.readers++
		w.Read++
		w.Together = max(w.Together, w.readers)
	}
}

// Seen returns the number of overlaps so far.
func (w *Witness) Seen() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.Overlaps)
}

// Crowd has that many goroutines visit again and again until the end. The function lock returns what unlocks; nil
// means that it has not got the lock.
func (w *Witness) Crowd(goroutines int, ended func() bool, lock func(i int) (write bool, unlock func())) {
	var all sync.WaitGroup
	for g := range goroutines {
		all.Go(func() {
			for i := g; !ended(); i++ {
				if write, unlock := lock(i); unlock != nil {
					w.Visit(write, nil)
					unlock()
				}
			}
		})
	}
	all.Wait()
}
