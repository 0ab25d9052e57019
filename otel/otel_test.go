package redismutexotel_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/internal/redistest"
	redismutexotel "github.com/redismutex/redismutex/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	exporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

func TestMain(m *testing.M) {
	redismutex.SetLog(redismutex.NopLog)
	os.Exit(m.Run())
}

// A world is a Redis in virtual time, a mutex that is observed, and one of another process that is not.
type world struct {
	*redistest.World
	reader *metric.ManualReader
	spans  *tracetest.SpanRecorder
	tracer *sdktrace.TracerProvider
	trace  *redismutex.Trace
	mutex  *redismutex.RWMutex
	other  *redismutex.RWMutex
}

func observed(t *testing.T, readers []metric.Reader, test func(w *world)) {
	redistest.InVirtualTime(t, func(rw *redistest.World) {
		w := &world{World: rw, reader: metric.NewManualReader(), spans: tracetest.NewSpanRecorder()}
		w.tracer = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(w.spans))
		opts := []metric.Option{metric.WithReader(w.reader)}
		for _, r := range readers {
			opts = append(opts, metric.WithReader(r))
		}
		trace, err := redismutexotel.New(redismutexotel.WithTracerProvider(w.tracer),
			redismutexotel.WithMeterProvider(metric.NewMeterProvider(opts...)))
		if err != nil {
			t.Fatal(err)
		}
		w.trace = trace
		mine, _ := rw.Process()
		others, _ := rw.Process()
		w.mutex = redismutex.NewMutex(mine, "stock", redismutex.WithTrace(trace))
		w.other = redismutex.NewMutex(others, "stock")
		test(w)
	})
}

// work has every kind of event: a wait, a grant, renewals, a refusal, a wait that is given up, a loss.
func (w *world) work(ctx context.Context) {
	w.Helper()
	lock := func(m *redismutex.RWMutex) *redismutex.Lock {
		l, err := m.LockContext(ctx, redismutex.WithKey("42"))
		if err != nil {
			w.Fatal(err)
		}
		return l
	}
	holder := lock(w.other)
	if _, err := w.mutex.TryRLockContext(ctx, redismutex.WithKey("42")); err == nil {
		w.Fatal("want it refused")
	}
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if _, err := w.mutex.LockContext(short, redismutex.WithKey("42")); err == nil {
		w.Fatal("want it to give up")
	}
	time.AfterFunc(1700*time.Millisecond, holder.Unlock)
	l := lock(w.mutex)                        // after 1.7 s
	redistest.Elapse(1800 * time.Millisecond) // it is renewed once
	l.Unlock()
	l = lock(w.mutex)
	w.Redis.FlushAll()
	<-l.Done() // after 2 s
	synctest.Wait()
}

// points returns what was measured: "name{attributes}" and the count or the value, and the sum of a histogram.
func (w *world) points() map[string]string {
	w.Helper()
	var rm metricdata.ResourceMetrics
	if err := w.reader.Collect(w.Context(), &rm); err != nil {
		w.Fatal(err)
	}
	points := map[string]string{}
	add := func(name string, set attribute.Set, value string) {
		var attrs []string
		for _, kv := range set.ToSlice() {
			attrs = append(attrs, strings.TrimPrefix(string(kv.Key), "redismutex.")+"="+kv.Value.String())
		}
		points[strings.TrimPrefix(name, "redismutex.")+"{"+strings.Join(attrs, ",")+"}"] = value
	}
	for _, sm := range rm.ScopeMetrics {
		for _, m := range sm.Metrics {
			switch data := m.Data.(type) {
			case metricdata.Histogram[float64]:
				for _, p := range data.DataPoints {
					add(m.Name, p.Attributes, fmt.Sprintf("%d in %.3g s", p.Count, p.Sum))
				}
			case metricdata.Sum[int64]:
				for _, p := range data.DataPoints {
					add(m.Name, p.Attributes, fmt.Sprint(p.Value))
				}
			case metricdata.Gauge[float64]:
				for _, p := range data.DataPoints {
					add(m.Name, p.Attributes, fmt.Sprintf("%.3g s", p.Value))
				}
			default:
				w.Errorf("%s is a %T", m.Name, data)
			}
		}
	}
	return points
}

func TestMetricsTellWhatHappened(t *testing.T) {
	observed(t, nil, func(w *world) {
		w.work(w.Context())
		want := map[string]string{
			"acquire.duration{mode=read,name=stock,outcome=refused}":  "1 in 0 s",
			"acquire.duration{mode=write,name=stock,outcome=gave_up}": "1 in 1 s",
			"acquire.duration{mode=write,name=stock,outcome=granted}": "2 in 1.7 s",
			"hold.duration{mode=write,name=stock,outcome=unlocked}":   "1 in 1.8 s",
			"hold.duration{mode=write,name=stock,outcome=lost}":       "1 in 2 s",
			"renewal.margin{name=stock}":                              "1 in 1.96 s",
			"waiting{mode=write,name=stock}":                          "0",
			"held{mode=write,name=stock}":                             "0",
		}
		if got := w.points(); !maps.Equal(got, want) {
			t.Errorf("got:\n%v\nwant:\n%v", lines(got), lines(want))
		}
	})
}

func lines(m map[string]string) string {
	var s []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		s = append(s, k+" "+m[k])
	}
	return strings.Join(s, "\n")
}

// The age of the oldest wait is seen while it lasts.
func TestOldestWaitIsSeenWhileItLasts(t *testing.T) {
	observed(t, nil, func(w *world) {
		holder, ok := w.other.Lock()
		if !ok {
			t.Fatal("not locked")
		}
		for range 3 {
			go func() {
				if l, ok := w.mutex.Lock(); ok {
					l.Unlock()
				}
			}()
			redistest.Elapse(time.Second)
		}
		points := w.points()
		if age, n := points["waiting.age{mode=write,name=stock}"], points["waiting{mode=write,name=stock}"]; age != "3 s" || n != "3" {
			t.Errorf("%s calls wait, for %s; want 3 for 3 s", n, age)
		}
		holder.Unlock()
		synctest.Wait()
		if age, there := w.points()["waiting.age{mode=write,name=stock}"]; there {
			t.Errorf("nobody waits, and the oldest wait is %s", age)
		}
	})
}

// The key is in spans, which are children of the caller's, and never in metrics.
func TestSpansBelongToTheCaller(t *testing.T) {
	observed(t, nil, func(w *world) {
		w.work(w.Context()) // without a span
		if n := len(w.spans.Ended()); n != 0 {
			t.Fatalf("%d spans of a caller that has none", n)
		}
		ctx, caller := w.tracer.Tracer("test").Start(w.Context(), "caller")
		w.work(ctx)
		var got []string
		for _, s := range w.spans.Ended() {
			attrs := attribute.NewSet(s.Attributes()...)
			key, _ := attrs.Value("redismutex.key")
			outcome, _ := attrs.Value("redismutex.outcome")
			if s.Parent().SpanID() != caller.SpanContext().SpanID() || key.AsString() != "stock:42" {
				t.Errorf("%s of key %q is no child of the caller", s.Name(), key.AsString())
			}
			got = append(got, fmt.Sprintf("%s %s %v %v", s.Name(), outcome.AsString(), s.EndTime().Sub(s.StartTime()).Round(time.Millisecond), s.Status().Code == codes.Error))
		}
		want := []string{
			"redismutex.acquire refused 0s true", "redismutex.acquire gave_up 1s true", "redismutex.acquire granted 1.7s false",
			"redismutex.hold unlocked 1.8s false", "redismutex.acquire granted 0s false", "redismutex.hold lost 2s true",
		}
		if !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
		for point := range w.points() {
			if strings.Contains(point, "42") {
				t.Errorf("%s names the key", point)
			}
		}
	})
}

// The table in README.md has the names under which Prometheus sees the instruments, and no others.
func TestPrometheusSeesWhatTheReadmeSays(t *testing.T) {
	page, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	reader, err := exporter.New(exporter.WithRegisterer(registry))
	if err != nil {
		t.Fatal(err)
	}
	observed(t, []metric.Reader{reader}, func(w *world) {
		w.work(w.Context())
		call := redismutex.TraceCall{Context: w.Context(), Mutex: "stock", Key: "stock", Began: time.Now()}
		w.trace.Waiting(redismutex.TraceWaiting{TraceCall: call})
		w.trace.RenewFailed(redismutex.TraceRenewFailed{Mutex: "stock"})
		w.trace.NodeDown(redismutex.TraceNode{Node: "node 2"})
		w.trace.Dropped(1)
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		var seen, said []string
		labels := map[string]bool{}
		for _, f := range families {
			if strings.HasPrefix(f.GetName(), "redismutex_") {
				seen = append(seen, f.GetName())
			}
			for _, l := range f.GetMetric()[0].GetLabel() {
				labels[l.GetName()] = true
			}
		}
		for _, row := range regexp.MustCompile("(?m)^\\| `redismutex[^|]*\\|.*`(redismutex_[a-z_]+)` \\|$").FindAllSubmatch(page, -1) {
			said = append(said, string(row[1]))
		}
		for _, l := range []string{"redismutex_name", "redismutex_mode", "redismutex_outcome", "redismutex_node"} {
			if !labels[l] {
				t.Errorf("Prometheus sees no label %s", l)
			}
		}
		slices.Sort(seen)
		slices.Sort(said)
		if !slices.Equal(seen, said) {
			t.Errorf("Prometheus sees %q, README.md says %q", seen, said)
		}
	})
}
