package main

import (
	"errors"
	"image/color"
	"math"
	"os"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

const chartWidth, chartHeight, legendWidth, margin = 32 * vg.Centimeter, 10 * vg.Centimeter, 6 * vg.Centimeter, 2 * vg.Millimeter

// charted are the libraries of the charts with their colours, from the palette of Okabe and Ito for colour-blind readers.
var charted = []struct {
	library string
	colour  color.RGBA
}{
	{blpop, color.RGBA{0x99, 0x99, 0x99, 0xff}},
	{ours, color.RGBA{0xd5, 0x5e, 0x00, 0xff}},
	{oursStrict, color.RGBA{0x00, 0x00, 0x00, 0xff}},
	{rueidisLock, color.RGBA{0x00, 0x72, 0xb2, 0xff}},
	{rueidisLoop, color.RGBA{0x56, 0xb4, 0xe9, 0xff}},
	{redisLock, color.RGBA{0x00, 0x9e, 0x73, 0xff}},
	{redSync, color.RGBA{0xcc, 0x79, 0xa7, 0xff}},
	{goZero, color.RGBA{0xe6, 0x9f, 0x00, 0xff}},
}

// drawThroughput draws the throughput of a contended lock relative to that of BLPOP. Locks that returned to the goroutine that had
// just unlocked are pale.
func (r *Results) drawThroughput(path string) error {
	return panels(path, func(net string, p *plot.Plot) error {
		p.Title.Text = "One key, " + net + " (pale: the same goroutine again)"
		p.Y.Label.Text = "locks/s ÷ " + blpop
		var names []string
		for _, who := range contenders {
			names = append(names, who.name)
		}
		p.NominalX(names...)
		width := 0.42 * vg.Centimeter
		for i, c := range charted {
			for _, part := range []struct {
				measure string
				colour  color.Color
			}{{"locks/s", pale(c.colour)}, {"hand-overs/s", c.colour}} {
				var values plotter.Values
				for _, who := range contenders {
					v := r.ratio("one key/"+net+"/"+who.name, part.measure, c.library, blpop)
					if math.IsNaN(v) {
						v = 0
					}
					values = append(values, v)
				}
				bars, err := plotter.NewBarChart(values, width)
				if err != nil {
					return err
				}
				bars.Color, bars.LineStyle.Width = part.colour, 0
				bars.Offset = (vg.Length(i) - vg.Length(len(charted)-1)/2) * width
				p.Add(bars)
				if part.measure == "hand-overs/s" {
					p.Legend.Add(c.library, bars)
				}
			}
		}
		p.Y.Scale, p.Y.Tick.Marker = barScale{}, plot.LogTicks{Prec: -1}
		p.Y.Min, p.Y.Max = 0.001, max(p.Y.Max, 1)*1.02
		return nil
	})
}

// A barScale is logarithmic, and bars begin at its end.
type barScale struct{ plot.LogScale }

func (s barScale) Normalize(least, most, x float64) float64 {
	return s.LogScale.Normalize(least, most, max(x, least))
}

func pale(c color.RGBA) color.RGBA {
	mix := func(v uint8) uint8 { return uint8(255 - (255-int(v))*2/5) }
	return color.RGBA{mix(c.R), mix(c.G), mix(c.B), 0xff}
}

// drawWaits draws the distribution of the waits.
func (r *Results) drawWaits(path string) error {
	return panels(path, func(net string, p *plot.Plot) error {
		p.Title.Text = "One key, 16 clients, " + net
		p.X.Label.Text, p.Y.Label.Text = "waited at most, ms", "part of the waits"
		p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0.01, 10_000, 0, 1
		p.Add(plotter.NewGrid())
		for _, c := range charted {
			rounds := r.Workloads["one key/"+net+"/16 clients"][c.library]
			if rounds == nil || len(rounds.Waits) == 0 {
				continue
			}
			var points plotter.XYs
			for i, ms := range rounds.Waits {
				points = append(points, plotter.XY{X: max(ms, p.X.Min), Y: float64(i) / 100})
			}
			line, err := plotter.NewLine(points)
			if err != nil {
				return err
			}
			line.Color, line.Width = c.colour, vg.Points(2)
			p.Add(line)
			p.Legend.Add(c.library, line)
		}
		p.X.Min, p.X.Max, p.Y.Max = 0.01, 10_000, 1 // Add may have widened the axes
		return nil
	})
}

// panels draws two plots side by side, on loopback and at 1 ms, and one legend beside them.
func panels(path string, fill func(net string, p *plot.Plot) error) error {
	plots := [][]*plot.Plot{nil}
	var legend plot.Legend
	for _, net := range []string{loopback, distant} {
		p := plot.New()
		for _, text := range []*font.Font{&p.Title.TextStyle.Font, &p.X.Label.TextStyle.Font, &p.Y.Label.TextStyle.Font,
			&p.X.Tick.Label.Font, &p.Y.Tick.Label.Font, &p.Legend.TextStyle.Font} {
			text.Variant = "Sans"
		}
		if err := fill(net, p); err != nil {
			return err
		}
		legend, p.Legend = p.Legend, plot.NewLegend()
		plots[0] = append(plots[0], p)
	}
	legend.Top, legend.Padding = true, vg.Millimeter
	canvas := vgsvg.New(chartWidth, chartHeight)
	whole := draw.New(canvas)
	tiles := draw.Tiles{Rows: 1, Cols: 2, PadX: vg.Centimeter, PadTop: margin, PadBottom: margin, PadLeft: margin, PadRight: margin}
	whole.SetColor(color.White)
	whole.Fill(whole.Rectangle.Path())
	for i, at := range plot.Align(plots, tiles, draw.Crop(whole, 0, -legendWidth, 0, 0))[0] {
		plots[0][i].Draw(at)
	}
	legend.Draw(draw.Crop(whole, chartWidth-legendWidth, -margin, margin, -vg.Centimeter))
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = canvas.WriteTo(file)
	return errors.Join(err, file.Close())
}
