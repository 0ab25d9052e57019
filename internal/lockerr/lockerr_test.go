package lockerr

import (
	"context"
	"errors"
	"testing"
)

// Promise 10: whatever an error wraps, it matches one sentinel, and no error of a context.
func TestErrorMatchesItsKindOnly(t *testing.T) {
	causes := append([]error{context.Canceled, context.DeadlineExceeded}, sentinels...)
	for _, kind := range sentinels {
		err := Of(kind, errors.Join(causes...))
		for _, other := range causes {
			if errors.Is(err, other) != (other == kind) {
				t.Errorf("of the kind %q: matches %q: %v", kind, other, other != kind)
			}
		}
	}
}
