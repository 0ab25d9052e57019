package node

import "container/heap"

// An agenda has the leases of a node that the renewer has to act on, in two heaps:
//
//	later ──(its call is due)──► ready ──(a sender takes it)──► later, to be called again should that call hang
type agenda struct {
	later byNext // those that are due later
	ready byEnd  // those whose call is due
}

// put puts l among those that are due later, where its due time belongs.
func (a *agenda) put(l *Lease) {
	if l.heapIndex != 0 && !l.ready {
		a.fix(l)
		return
	}
	a.drop(l)
	heap.Push(&a.later, l)
}

// makeReady puts l among those whose call is due.
func (a *agenda) makeReady(l *Lease) {
	a.drop(l)
	l.ready = true
	heap.Push(&a.ready, l)
}

// drop takes l out, if it is there.
func (a *agenda) drop(l *Lease) {
	if l.heapIndex != 0 {
		heap.Remove(a.heapOf(l), int(l.heapIndex-1))
		l.ready = false
	}
}

// fix moves l to where it belongs now.
func (a *agenda) fix(l *Lease) { heap.Fix(a.heapOf(l), int(l.heapIndex-1)) }

// active returns the lease of the id with that number if it waits or holds, or nil.
func (a *agenda) active(number uint64) *Lease {
	for _, leases := range []heapOfLeases{a.later.heapOfLeases, a.ready.heapOfLeases} {
		for _, l := range leases {
			if l.number == number && l.task != release && l.task != timeout {
				return l
			}
		}
	}
	return nil
}

func (a *agenda) heapOf(l *Lease) heap.Interface {
	if l.ready {
		return &a.ready
	}
	return &a.later
}

// heapOfLeases is what the two heaps have in common.
type heapOfLeases []*Lease

// first is the first of them, or nil.
func (h heapOfLeases) first() *Lease {
	if len(h) == 0 {
		return nil
	}
	return h[0]
}
func (h heapOfLeases) Len() int { return len(h) }
func (h heapOfLeases) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].heapIndex, h[j].heapIndex = int32(i+1), int32(j+1)
}
func (h *heapOfLeases) Push(x any) {
	l := x.(*Lease)
	*h = append(*h, l)
	l.heapIndex = int32(len(*h))
}
func (h *heapOfLeases) Pop() any {
	last := len(*h) - 1
	l := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	l.heapIndex = 0
	return l
}

// byNext puts those first that are due first.
type byNext struct{ heapOfLeases }

func (h byNext) Less(i, j int) bool { return h.heapOfLeases[i].next() < h.heapOfLeases[j].next() }

// byEnd puts those first whose lease ends first, and releases last: their leases end without that.
type byEnd struct{ heapOfLeases }

func (h byEnd) Less(i, j int) bool {
	a, b := h.heapOfLeases[i], h.heapOfLeases[j]
	if (a.task == release) != (b.task == release) {
		return b.task == release
	}
	return a.Until() < b.Until()
}
