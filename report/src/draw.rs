//! One chart into one rectangle of a picture.

use crate::chart::{Axis, Chart, Marks, Of, Series, Value};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::prelude::*;
use plotters::style::{Color, RGBColor, ShapeStyle};

/// The font family; a browser or viewer takes its own of that kind, so none is needed here.
pub(crate) const FONT: &str = "sans-serif";
/// Ink of text and axes.
pub(crate) const INK: RGBColor = RGBColor(40, 40, 40);
const FAINT: RGBColor = RGBColor(225, 225, 225);
/// Half of the width that the bars of one tick share.
const BARS: f64 = 0.4;

/// Colours that readers with any colour vision tell apart (Okabe and Ito's set, without those too light for white).
const COLOURS: [RGBColor; 7] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(110, 110, 110),
];

/// The colour of a series.
pub(crate) fn colour(of: &Of) -> RGBColor {
    match of {
        Of::Contender(i) => COLOURS[i % COLOURS.len()],
        Of::Roofline => INK,
    }
}

/// Width of a series' line: the first contender's stands out.
fn width(of: &Of) -> u32 {
    if *of == Of::Contender(0) { 3 } else { 2 }
}

/// The mark of a contender, in pixels around a point: colour alone does not tell series apart on paper.
pub(crate) fn mark(of: &Of, at: (i32, i32)) -> Polygon<(i32, i32)> {
    let Of::Contender(i) = of else { return Polygon::new(Vec::new(), INK.filled()) };
    let (x, y) = at;
    let corners = match i % 4 {
        0 => (0..16).map(|k| k as f64 / 16.0 * std::f64::consts::TAU).map(|a| (a.cos() * 4.5, a.sin() * 4.5)).collect(),
        1 => vec![(-4.0, -4.0), (4.0, -4.0), (4.0, 4.0), (-4.0, 4.0)],
        2 => vec![(0.0, -5.0), (5.0, 4.0), (-5.0, 4.0)],
        _ => vec![(0.0, -6.0), (5.0, 0.0), (0.0, 6.0), (-5.0, 0.0)],
    };
    let corners: Vec<_> = corners.into_iter().map(|(dx, dy): (f64, f64)| (x + dx as i32, y + dy as i32)).collect();
    Polygon::new(corners, colour(of).filled())
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Failed<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;
type Plane<'a, 'b> = ChartContext<'b, SVGBackend<'a>, Cartesian2d<Axis, Axis>>;

/// Our axes as plotters' coordinates: linear, with ticks where we put them.
impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let (from, to) = self.range;
        limit.0 + ((value - from) / (to - from) * (limit.1 - limit.0) as f64).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.iter().map(|t| t.0).collect()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.range.0..self.range.1
    }
}

impl ValueFormatter<f64> for Axis {
    fn format(value: &f64) -> String {
        value.to_string()
    }

    fn format_ext(&self, value: &f64) -> String {
        let near = self.ticks.iter().min_by(|a, b| (a.0 - value).abs().total_cmp(&(b.0 - value).abs()));
        near.map_or_else(String::new, |t| t.1.clone())
    }
}

/// Draws a chart: title, axes, grid, series.
pub(crate) fn draw<'a>(area: &Area<'a>, chart: &Chart) -> Result<(), Failed<'a>> {
    let mut plane = ChartBuilder::on(area)
        .caption(&chart.title, (FONT, 15).into_font().color(&INK))
        .margin(12)
        .x_label_area_size(46)
        .y_label_area_size(64)
        .build_cartesian_2d(chart.x.clone(), chart.y.clone())?;
    let bars = chart.marks == Marks::Bars;
    let mut mesh = plane.configure_mesh();
    if bars {
        mesh.disable_x_mesh();
    }
    mesh.x_desc(&chart.x.label)
        .y_desc(&chart.y.label)
        .x_labels(chart.x.ticks.len())
        .y_labels(chart.y.ticks.len())
        .bold_line_style(FAINT)
        .light_line_style(TRANSPARENT)
        .axis_style(INK)
        .label_style((FONT, 12).into_font().color(&INK))
        .axis_desc_style((FONT, 13).into_font().color(&INK))
        .draw()?;
    // The first contender last, so that it lies on top.
    let contenders = chart.series.iter().filter(|s| s.of != Of::Roofline).count();
    for (i, series) in chart.series.iter().enumerate().rev() {
        match (chart.marks, &series.of) {
            (_, Of::Roofline) => roofline(&mut plane, &series.values, chart.x.range)?,
            (Marks::Lines, _) => line(&mut plane, series)?,
            (Marks::Bars, _) => self::bars(&mut plane, series, i, contenders)?,
        }
    }
    Ok(())
}

fn line<'a>(plane: &mut Plane<'a, '_>, series: &Series) -> Result<(), Failed<'a>> {
    let colour = colour(&series.of);
    let style = ShapeStyle { color: colour.to_rgba(), filled: true, stroke_width: width(&series.of) };
    plane.draw_series(LineSeries::new(series.values.iter().map(|v| (v.x, v.y)), style))?;
    spread(plane, &series.values, colour)?;
    let marks = series.values.iter().map(|v| EmptyElement::at((v.x, v.y)) + mark(&series.of, (0, 0)));
    plane.draw_series(marks)?;
    Ok(())
}

/// Thin lines from the tenth to the ninetieth percentile.
fn spread<'a>(plane: &mut Plane<'a, '_>, values: &[Value], colour: RGBColor) -> Result<(), Failed<'a>> {
    let wide = values.iter().filter(|v| v.high > v.low);
    plane.draw_series(wide.map(|v| PathElement::new(vec![(v.x, v.low), (v.x, v.high)], colour.stroke_width(1))))?;
    Ok(())
}

fn roofline<'a>(plane: &mut Plane<'a, '_>, values: &[Value], range: (f64, f64)) -> Result<(), Failed<'a>> {
    let mut points: Vec<_> = values.iter().map(|v| (v.x, v.y)).collect();
    // One length alone still shows a line.
    if let [(_, y)] = points[..] {
        points = vec![(range.0, y), (range.1, y)];
    }
    plane.draw_series(DashedLineSeries::new(points, 7, 4, INK.stroke_width(1)))?;
    Ok(())
}

fn bars<'a>(plane: &mut Plane<'a, '_>, series: &Series, nth: usize, of: usize) -> Result<(), Failed<'a>> {
    let width = 2.0 * BARS / of as f64;
    let left = |x: f64| x - BARS + width * nth as f64;
    let colour = colour(&series.of);
    let bar = |v: &Value| Rectangle::new([(left(v.x), 0.0), (left(v.x) + 0.9 * width, v.y)], colour.filled());
    plane.draw_series(series.values.iter().map(bar))?;
    let centred: Vec<Value> = series.values.iter().map(|v| Value { x: left(v.x) + 0.45 * width, ..*v }).collect();
    spread(plane, &centred, INK)
}
