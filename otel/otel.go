// Package redismutexotel makes OpenTelemetry metrics and spans of what a mutex of package redismutex does.
//
//	trace, err := redismutexotel.New()
//	if err != nil {
//		return err
//	}
//	mutex := redismutex.NewMutex(client, "stock", redismutex.WithTrace(trace))
//
// Make one Trace for all mutexes. README.md has a table of the instruments. The attributes of metrics have few values: the
// name of the mutex, the mode and the outcome. The key is an attribute of spans alone.
//
// The spans redismutex.acquire and redismutex.hold are children of the span in the context of the call that locks. A call
// without such a span has none.
package redismutexotel

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redismutex/redismutex"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

const scope = "github.com/redismutex/redismutex/otel"

// An Option sets an option of New.
type Option func(*config)

type config struct {
	meters  metric.MeterProvider
	tracers trace.TracerProvider
}

// WithMeterProvider sets the provider of the metrics, in place of the global one.
func WithMeterProvider(p metric.MeterProvider) Option { return func(c *config) { c.meters = p } }

// WithTracerProvider sets the provider of the spans, in place of the global one.
func WithTracerProvider(p trace.TracerProvider) Option { return func(c *config) { c.tracers = p } }

// An observer makes measurements and spans of events. A Trace tells them one after the other; mu guards what the reader of
// the metrics looks at as well.
type observer struct {
	tracer trace.Tracer

	acquire, hold, margin           metric.Float64Histogram
	waiting, held                   metric.Int64UpDownCounter
	renewFailures, outages, dropped metric.Int64Counter

	mu    sync.Mutex
	waits map[uint64]redismutex.TraceCall // the calls that wait, by number
}

// buckets are the limits of the histograms in seconds: a lock that is free takes a round trip, and the default TTL is 4 s.
var buckets = metric.WithExplicitBucketBoundaries(
	0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

// New returns a Trace for [redismutex.WithTrace].
func New(opt ...Option) (*redismutex.Trace, error) {
	c := config{otel.GetMeterProvider(), otel.GetTracerProvider()}
	for _, o := range opt {
		o(&c)
	}
	o := &observer{tracer: c.tracers.Tracer(scope), waits: map[uint64]redismutex.TraceCall{}}
	if err := o.instruments(c.meters.Meter(scope)); err != nil {
		return nil, err
	}
	return &redismutex.Trace{
		Waiting:     o.onWaiting,
		Granted:     o.onGranted,
		Failed:      o.onFailed,
		Renewed:     o.onRenewed,
		RenewFailed: o.onRenewFailed,
		Ended:       o.onEnded,
		NodeDown:    o.onNodeDown,
		Dropped:     func(n int) { o.dropped.Add(context.Background(), int64(n)) },
	}, nil
}

func (o *observer) instruments(m metric.Meter) error {
	var err error
	histogram := func(name, what string) metric.Float64Histogram {
		h, e := m.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(what), buckets)
		err = errors.Join(err, e)
		return h
	}
	counter := func(name, unit, what string) metric.Int64Counter {
		c, e := m.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(what))
		err = errors.Join(err, e)
		return c
	}
	upDown := func(name, unit, what string) metric.Int64UpDownCounter {
		c, e := m.Int64UpDownCounter(name, metric.WithUnit(unit), metric.WithDescription(what))
		err = errors.Join(err, e)
		return c
	}
	o.acquire = histogram("redismutex.acquire.duration", "How long calls that lock took, by their outcome.")
	o.hold = histogram("redismutex.hold.duration", "How long locks were held, by how they ended.")
	o.margin = histogram("redismutex.renewal.margin", "How long a lock would still have been trusted when it was renewed.")
	o.waiting = upDown("redismutex.waiting", "{call}", "Calls that wait for a lock.")
	o.held = upDown("redismutex.held", "{lock}", "Locks that are held.")
	o.renewFailures = counter("redismutex.renewal.failures", "{failure}", "Renewals that failed and are tried again.")
	o.outages = counter("redismutex.node.outages", "{outage}", "How often one of several nodes was marked down.")
	o.dropped = counter("redismutex.trace.dropped", "{event}", "Events that are missing from these metrics.")
	_, e := m.Float64ObservableGauge("redismutex.waiting.age", metric.WithUnit("s"),
		metric.WithDescription("For how long the call has waited that has waited for longest."), metric.WithFloat64Callback(o.oldest))
	return errors.Join(err, e)
}

// of returns the attributes that all metrics of a call have.
func of(c redismutex.TraceCall, more ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributes(append(more, attribute.String("redismutex.name", c.Mutex), mode(c))...)
}

func mode(c redismutex.TraceCall) attribute.KeyValue {
	if c.Write {
		return attribute.String("redismutex.mode", "write")
	}
	return attribute.String("redismutex.mode", "read")
}

func outcome(what string) attribute.KeyValue { return attribute.String("redismutex.outcome", what) }

// in is the context of a call for a measurement, which may belong to an exemplar: that the caller has given up is no reason
// not to measure it.
func in(c redismutex.TraceCall) context.Context { return context.WithoutCancel(c.Context) }

func (o *observer) onWaiting(e redismutex.TraceWaiting) {
	o.waiting.Add(in(e.TraceCall), 1, of(e.TraceCall))
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waits[e.Number] = e.TraceCall
}

// returned measures a call that has returned at that time, and makes a span of it.
func (o *observer) returned(c redismutex.TraceCall, at time.Time, what string, err error, more ...attribute.KeyValue) {
	o.mu.Lock()
	_, waited := o.waits[c.Number]
	delete(o.waits, c.Number)
	o.mu.Unlock()
	if waited {
		o.waiting.Add(in(c), -1, of(c))
	}
	o.acquire.Record(in(c), at.Sub(c.Began).Seconds(), of(c, outcome(what)))
	o.span(c, "redismutex.acquire", c.Began, at, err, append(more, outcome(what), attribute.Bool("redismutex.waited", waited))...)
}

func (o *observer) onGranted(e redismutex.TraceGranted) {
	o.held.Add(in(e.TraceCall), 1, of(e.TraceCall))
	o.returned(e.TraceCall, e.Time, "granted", nil, attribute.String("redismutex.granted_by", e.By.String()), attribute.String("redismutex.id", e.ID))
}

func (o *observer) onFailed(e redismutex.TraceFailed) {
	what := "error"
	switch {
	case errors.Is(e.Err, redismutex.ErrRedis):
		what = "redis_error"
	case errors.Is(e.Err, redismutex.ErrLock):
		what = "refused"
	case errors.Is(e.Err, redismutex.ErrRevoked):
		what = "revoked"
	case e.Context.Err() != nil && errors.Is(e.Err, e.Context.Err()):
		what = "gave_up"
	}
	o.returned(e.TraceCall, e.Time, what, e.Err)
}

func (o *observer) onEnded(e redismutex.TraceEnded) {
	// A lock that was lost, or that ended in another way than by its Unlock, is an error of the span.
	what, err := "lost", e.Cause
	switch {
	case errors.Is(e.Cause, redismutex.ErrUnlocked):
		what, err = "unlocked", nil
	case errors.Is(e.Cause, redismutex.ErrMaxHold):
		what = "overdue"
	case errors.Is(e.Cause, redismutex.ErrRevoked):
		what = "revoked"
	}
	o.held.Add(in(e.TraceCall), -1, of(e.TraceCall))
	o.hold.Record(in(e.TraceCall), e.Time.Sub(e.Granted).Seconds(), of(e.TraceCall, outcome(what)))
	o.span(e.TraceCall, "redismutex.hold", e.Granted, e.Time, err, outcome(what), attribute.String("redismutex.id", e.ID))
}

func (o *observer) onRenewed(e redismutex.TraceRenewed) {
	o.margin.Record(context.Background(), e.Margin.Seconds(), metric.WithAttributes(attribute.String("redismutex.name", e.Mutex)))
}

func (o *observer) onRenewFailed(e redismutex.TraceRenewFailed) {
	o.renewFailures.Add(context.Background(), 1, metric.WithAttributes(attribute.String("redismutex.name", e.Mutex)))
}

func (o *observer) onNodeDown(e redismutex.TraceNode) {
	o.outages.Add(context.Background(), 1, metric.WithAttributes(attribute.String("redismutex.node", e.Node)))
}

// span makes a span of a time that is over, if the call has a span.
func (o *observer) span(c redismutex.TraceCall, name string, from, to time.Time, err error, attrs ...attribute.KeyValue) {
	if !trace.SpanContextFromContext(c.Context).IsValid() {
		return
	}
	attrs = append(attrs, attribute.String("redismutex.name", c.Mutex), attribute.String("redismutex.key", c.Key), mode(c))
	_, s := o.tracer.Start(c.Context, name, trace.WithTimestamp(from), trace.WithAttributes(attrs...))
	if err != nil {
		s.SetStatus(codes.Error, err.Error())
	}
	s.End(trace.WithTimestamp(to))
}

// oldest observes, for each mutex and mode, for how long the call has waited that has waited for longest.
func (o *observer) oldest(_ context.Context, observer metric.Float64Observer) error {
	type kind struct {
		mutex string
		write bool
	}
	o.mu.Lock()
	first := map[kind]redismutex.TraceCall{}
	for _, c := range o.waits {
		k := kind{c.Mutex, c.Write}
		if f, ok := first[k]; !ok || c.Began.Before(f.Began) {
			first[k] = c
		}
	}
	o.mu.Unlock()
	for _, c := range first {
		observer.Observe(time.Since(c.Began).Seconds(), of(c))
	}
	return nil
}
