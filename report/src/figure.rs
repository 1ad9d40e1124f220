//! All charts of a report as one SVG: a heading, one legend for all, charts in two columns.

use crate::chart::{Chart, Of, charts};
use crate::draw::{FONT, INK, colour, draw, mark};
use crate::model::Report;
use crate::read::Error;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::Color;

/// Size of one chart in pixels.
const CHART: (u32, u32) = (620, 380);
/// Height of the heading, and of one line of the legend.
const HEADING: u32 = 52;
const LEGEND_LINE: u32 = 22;
/// Pixels that a letter of the legend takes at most.
const LETTER: u32 = 8;

/// The charts of a report as one SVG document.
///
/// # Errors
/// [`Error::Draw`] when the drawing library refuses.
pub fn svg(report: &Report) -> Result<String, Error> {
    let charts = charts(report);
    let columns = charts.len().clamp(1, 2) as u32;
    let rows = charts.len().div_ceil(2) as u32;
    let width = columns * CHART.0;
    let legend = Legend::new(report, &charts, width);
    let top = HEADING + legend.height();
    let mut out = String::new();
    {
        let root = SVGBackend::with_string(&mut out, (width, top + rows.max(1) * CHART.1)).into_drawing_area();
        let painted = paint(&root, report, &charts, &legend, top, (rows, columns));
        painted.and_then(|()| root.present()).map_err(|e| Error::Draw(e.to_string()))?;
    }
    Ok(out)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Outcome<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

fn paint<'a>(
    root: &Area<'a>,
    report: &Report,
    charts: &[Chart],
    legend: &Legend,
    top: u32,
    (rows, columns): (u32, u32),
) -> Outcome<'a> {
    root.fill(&WHITE)?;
    let title = (FONT, 19).into_font().style(FontStyle::Bold).color(&INK);
    root.draw(&Text::new(report.title.clone(), (16, 10), title))?;
    let device = format!("{}, {}, {}", report.device.name, report.device.driver, report.made.date);
    root.draw(&Text::new(device, (16, 34), (FONT, 12).into_font().color(&INK)))?;
    legend.draw(root)?;
    let (_, body) = root.split_vertically(top);
    if charts.is_empty() {
        return body.draw(&Text::new("Nothing was measured.", (16, 16), (FONT, 14).into_font().color(&INK)));
    }
    let cells = body.split_evenly((rows as usize, columns as usize));
    charts.iter().zip(&cells).try_for_each(|(chart, cell)| draw(cell, chart))
}

/// One entry per contender that is drawn, and one for the roofline.
struct Legend {
    /// With the position of each.
    entries: Vec<(Of, String, (i32, i32))>,
    lines: u32,
}

impl Legend {
    fn new(report: &Report, charts: &[Chart], width: u32) -> Self {
        let drawn = |of: &Of| charts.iter().flat_map(|c| &c.series).any(|s| s.of == *of);
        let names = report.contenders().into_iter().enumerate();
        let names = names.map(|(i, name)| (Of::Contender(i), name.to_owned()));
        let roofline = (Of::Roofline, "roofline of the measured ceilings".to_owned());
        let (mut x, mut line) = (16, 0);
        let mut entries = Vec::new();
        for (of, name) in names.chain([roofline]).filter(|(of, _)| drawn(of)) {
            let needed = 44 + name.chars().count() as u32 * LETTER;
            if x + needed > width && x > 16 {
                (x, line) = (16, line + 1);
            }
            entries.push((of, name, (x as i32, (HEADING + line * LEGEND_LINE) as i32)));
            x += needed;
        }
        Self { entries, lines: line + 1 }
    }

    fn height(&self) -> u32 {
        if self.entries.is_empty() { 0 } else { self.lines * LEGEND_LINE + 4 }
    }

    fn draw<'a>(&self, root: &Area<'a>) -> Outcome<'a> {
        for (of, name, (x, y)) in &self.entries {
            let middle = y + 9;
            let stroke = colour(of).stroke_width(2);
            if *of == Of::Roofline {
                for dash in [0, 10, 20] {
                    root.draw(&PathElement::new(vec![(x + dash, middle), (x + dash + 6, middle)], stroke))?;
                }
            } else {
                root.draw(&PathElement::new(vec![(*x, middle), (x + 26, middle)], stroke))?;
                root.draw(&mark(of, (x + 13, middle)))?;
            }
            root.draw(&Text::new(name.clone(), (x + 32, y + 2), (FONT, 13).into_font().color(&INK)))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::tests::sample;

    #[test]
    fn titles_legend_axes_and_all_lines_are_drawn() {
        let report = sample();
        let picture = svg(&report).unwrap();
        for words in [
            "Peers side by side",
            "NVIDIA H200, 580.1",
            "forward: bf16, head dim 128, causal",
            "decode: bf16, head dim 128, causal",
            "TFLOP/s",
            "sequence length",
            "share of the measured copy bandwidth (%)",
            "roofline of the measured ceilings",
            "flashtune",
            "fa3",
        ] {
            assert!(picture.contains(words), "`{words}` is not drawn");
        }
        // It did not run: a legend entry would promise a line.
        assert!(!picture.contains("fa4"));
        // Flashtune's and fa3's line of two points each.
        assert!(picture.matches("<polyline").count() >= 2);
        assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"));
        assert_eq!(svg(&report).unwrap(), picture);
    }

    #[test]
    fn an_empty_report_is_an_empty_picture_and_not_an_error() {
        let mut report = sample();
        report.points.clear();
        assert!(svg(&report).unwrap().contains("Nothing was measured."));
    }

    #[test]
    fn a_long_legend_takes_more_lines() {
        let mut report = sample();
        for point in &mut report.points {
            let template = point.results[0].clone();
            let named = |i| crate::Measured { contender: format!("contender number {i}"), ..template.clone() };
            point.results.extend((0..12).map(named));
        }
        let charts = charts(&report);
        let legend = Legend::new(&report, &charts, 800);
        assert!(legend.lines > 1);
        assert!(legend.entries.iter().all(|(_, name, (x, _))| *x as usize + 32 + name.len() * 6 < 800));
    }
}
