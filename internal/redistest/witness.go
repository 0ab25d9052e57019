package redistest

import (
	"fmt"
	"runtime"
	"sync"
)

// A Witness detects holders of a reader/writer lock that overlap.
type Witness struct {
	mu               sync.Mutex
	writers, readers int // inside

	Wrote, Read int      // the visits of writers and readers so far
	Together    int      // the most readers inside at once
	Overlaps    []string // a line for each visit that the lock should have excluded
}

// Visit records a holder while stay runs. If stay is nil, the visit takes a few turns of the scheduler, since an empty
// critical section hardly ever overlaps with another.
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

// enter checks a visitor against those inside. Of two that overlap, the later one sees the earlier.
func (w *Witness) enter(write bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	who := "reader"
	if write {
		who = "writer"
	}
	if w.writers > 0 || write && w.readers > 0 {
		w.Overlaps = append(w.Overlaps, fmt.Sprintf("a %s entered while %d writers and %d readers were inside", who, w.writers, w.readers))
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

// Crowd makes that many goroutines lock, visit and unlock repeatedly until ended returns true. The function lock returns
// the function that unlocks, or nil if it has not got the lock.
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
