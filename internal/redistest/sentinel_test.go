package redistest

import "testing"

func TestSentinelReplacesADeadMaster(t *testing.T) {
	t.Parallel()
	s := Sentinel(t)
	rc := s.Client(t)
	if err := rc.Set(t.Context(), "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	old := s.Master()
	old.Kill()
	Eventually(t, "another master takes writes", func() bool {
		return rc.Set(t.Context(), "k", "w", 0).Err() == nil
	})
	if s.Master() == old {
		t.Fatal("want another master, it is still the one that was killed")
	}
}
