package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"math"
	"os"
	"slices"
	"time"
)

// Results are the contents of docs/performance.json.
type Results struct {
	Machine   Machine
	Workloads map[string]map[string]*Rounds // by workload and library
}

// Machine describes the environment of the measurements.
type Machine struct {
	Date, Go, OS, Redis string
	CPUs                int
	Pinned              bool
	Turn                string
	Rounds              int
	Versions            map[string]string // of the modules compared
}

// Rounds are the results of one library in one workload.
type Rounds struct {
	Samples []sample
	Waits   []float64 `json:",omitempty"` // in ms: the 0th to the 100th percentile of all rounds, where they are drawn
	waits   []time.Duration
}

// A sample has the figures of one turn, by measure.
type sample map[string]float64

func load(path string) (*Results, error) {
	r := &Results{Workloads: map[string]map[string]*Rounds{}}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return nil, err
	}
	return r, json.Unmarshal(text, r)
}

func (r *Results) save(path string) error {
	text, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

// each returns a measure of every round, NaN if it was not taken.
func (r *Results) each(workload, library, measure string) (values []float64) {
	if rounds := r.Workloads[workload][library]; rounds != nil {
		for _, s := range rounds.Samples {
			v, ok := s[measure]
			if !ok {
				v = math.NaN()
			}
			values = append(values, v)
		}
	}
	return values
}

// mean returns the mean over all rounds.
func (r *Results) mean(workload, library, measure string) float64 {
	values := r.each(workload, library, measure)
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

// ratio returns the median over the rounds of the ratio of two libraries in the same round. On a noisy machine it is more stable than a
// time.
func (r *Results) ratio(workload, measure, library, other string) float64 {
	mine, theirs := r.each(workload, library, measure), r.each(workload, other, measure)
	var ratios []float64
	for i := range min(len(mine), len(theirs)) {
		ratios = append(ratios, mine[i]/theirs[i])
	}
	if len(ratios) == 0 {
		return math.NaN()
	}
	return median(ratios)
}

// bestPeer returns the peer with the greatest mean, or the least, apart from some; "" if none was measured.
func (r *Results) bestPeer(workload, measure string, less bool, apart ...string) (best string) {
	for _, p := range peers {
		if slices.Contains(apart, p) {
			continue
		}
		was, is := r.mean(workload, best, measure), r.mean(workload, p, measure)
		if !math.IsNaN(is) && (best == "" || (is < was) == less) {
			best = p
		}
	}
	return best
}

// median returns the median of at least one value.
func median[T float64 | time.Duration](values []T) T {
	s := slices.Sorted(slices.Values(values))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// percentiles returns the 0th to the 100th percentile, in ms.
func percentiles(waits []time.Duration) (p []float64) {
	if len(waits) == 0 {
		return nil
	}
	s := slices.Sorted(slices.Values(waits))
	for i := range 101 {
		p = append(p, float64(s[i*(len(s)-1)/100].Microseconds())/1000)
	}
	return p
}

// jain returns the fairness index of Jain, Chiu and Hawe: 1 if all counts are equal, 1/n if all but one of n are 0.
func jain(counts []int) float64 {
	var sum, squares float64
	for _, c := range counts {
		sum += float64(c)
		squares += float64(c) * float64(c)
	}
	return sum * sum / (float64(len(counts)) * squares)
}
