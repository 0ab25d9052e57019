package redismutexotel_test

import (
	"context"
	"fmt"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redismutex/redismutex"
	redismutexotel "github.com/redismutex/redismutex/otel"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// A program has exporters in the place of the recorder of spans and of the reader of metrics.
func Example() {
	server, err := miniredis.Run()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer server.Close()
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()

	ctx := context.Background()
	reader, spans := metric.NewManualReader(), tracetest.NewSpanRecorder()
	tracers := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	done := make(chan struct{})
	trace, err := redismutexotel.New(
		redismutexotel.WithMeterProvider(metric.NewMeterProvider(metric.WithReader(reader))),
		redismutexotel.WithTracerProvider(tracers))
	if err != nil {
		fmt.Println(err)
		return
	}
	ended := trace.Ended
	trace.Ended = func(e redismutex.TraceEnded) { ended(e); close(done) } // events are told in the background

	mutex := redismutex.NewMutex(client, "stock", redismutex.WithTrace(trace))
	ctx, order := tracers.Tracer("shop").Start(ctx, "order")
	lock, err := mutex.LockContext(ctx, redismutex.WithKey("42"))
	if err != nil {
		fmt.Println(err)
		return
	}
	lock.Unlock()
	order.End()
	<-done

	var metrics metricdata.ResourceMetrics
	if err := reader.Collect(ctx, &metrics); err != nil {
		fmt.Println(err)
		return
	}
	for _, m := range metrics.ScopeMetrics[0].Metrics {
		if h, ok := m.Data.(metricdata.Histogram[float64]); ok {
			for _, p := range h.DataPoints {
				outcome, _ := p.Attributes.Value("redismutex.outcome")
				fmt.Println(m.Name, outcome.AsString(), p.Count)
			}
		}
	}
	names := map[string]int{}
	for _, s := range spans.Ended() {
		names[s.Name()]++
	}
	fmt.Println(names)
	// Output:
	// redismutex.acquire.duration granted 1
	// redismutex.hold.duration unlocked 1
	// map[order:1 redismutex.acquire:1 redismutex.hold:1]
}
