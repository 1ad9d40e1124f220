//! Which charts a report has: data and axes, nothing of drawing.

use crate::group::{Group, Kind, groups};
use crate::model::{LengthCurve, LengthReport, Point, Report};
use crate::text;

/// A chart: axes and what is drawn between them.
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) series: Vec<Series>,
    pub(crate) marks: Marks,
}

/// How values are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Marks {
    /// Points joined by lines.
    Lines,
    /// Bars side by side at every tick.
    Bars,
}

/// An axis in chart coordinates (logarithms are taken already), with ticks and their labels.
#[derive(Debug, Clone)]
pub(crate) struct Axis {
    pub(crate) label: String,
    pub(crate) range: (f64, f64),
    pub(crate) ticks: Vec<(f64, String)>,
}

/// Values of one contender, or of a ceiling.
pub(crate) struct Series {
    pub(crate) of: Of,
    pub(crate) values: Vec<Value>,
}

/// Whose values they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Of {
    /// The contender of this index in [`Report::contenders`].
    Contender(usize),
    /// What the measured ceilings allow.
    Roofline,
}

/// A value with its spread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Value {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Value {
    fn exact(x: f64, y: f64) -> Self {
        Self { x, y, low: y, high: y }
    }
}

/// The charts of a report, in the order of its points.
pub(crate) fn charts(report: &Report) -> Vec<Chart> {
    let contenders = report.contenders();
    let groups = groups(report);
    let several_suites = groups.iter().any(|g| g.suite != groups[0].suite);
    let mut charts: Vec<Chart> = groups
        .iter()
        .filter_map(|group| {
            let mut chart = match group.kind {
                Kind::Prefill => prefill(report, group, &contenders),
                Kind::Decode => decode(report, group, &contenders),
                Kind::Named => named(report, group, &contenders),
            }?;
            if several_suites {
                chart.title = format!("{}: {}", group.suite, chart.title);
            }
            Some(chart)
        })
        .collect();
    if let Some(lengths) = &report.lengths {
        charts.extend(over_lengths(lengths, &contenders));
    }
    charts
}

/// Speed over sequence length, every contender and the roofline.
fn prefill(report: &Report, group: &Group, contenders: &[&str]) -> Option<Chart> {
    let x = |i: usize| (group.points[i].case.kv_len as f64).log2();
    let mut series = Vec::new();
    for (index, name) in contenders.iter().enumerate() {
        let values = group.points.iter().enumerate().filter_map(|(i, p)| {
            let us = p.result(name)?.latency_us.as_ref()?;
            let tflops = |us: f64| p.flops / us / 1e6;
            Some(Value { x: x(i), y: tflops(us.median), low: tflops(us.p90), high: tflops(us.p10) })
        });
        series.push(Series { of: Of::Contender(index), values: values.collect() });
    }
    series.retain(|s| !s.values.is_empty());
    let most = most(&series)?;
    let roofline = group.points.iter().enumerate();
    let roofline = roofline.filter_map(|(i, p)| Some(Value::exact(x(i), p.roofline_tflops(&report.ceilings)?)));
    series.push(Series { of: Of::Roofline, values: roofline.collect() });
    series.retain(|s| !s.values.is_empty());

    let (unit, factor) = text::rate_unit(most);
    for value in series.iter_mut().flat_map(|s| &mut s.values) {
        (value.y, value.low, value.high) = (value.y * factor, value.low * factor, value.high * factor);
    }
    let lengths: Vec<u32> = group.points.iter().map(|p| p.case.kv_len).collect();
    let y = Axis::linear(unit, most_of(&series)?);
    Some(Chart { title: group.title.clone(), x: Axis::lengths(&lengths), y, series, marks: Marks::Lines })
}

/// Bandwidth as a share of the copy ceiling, or in GB/s where that is not known: bars for every size.
fn decode(report: &Report, group: &Group, contenders: &[&str]) -> Option<Chart> {
    let ceiling = report.ceilings.copy_gbytes_per_s();
    let (label, scale) = match ceiling {
        Some(c) => ("share of the measured copy bandwidth (%)", 100.0 / c),
        None => ("GB/s", 1.0),
    };
    let mut series = Vec::new();
    for (index, name) in contenders.iter().enumerate() {
        let values = group.points.iter().enumerate().filter_map(|(i, p)| {
            let us = p.result(name)?.latency_us.as_ref()?;
            let rate = |us: f64| p.ideal_bytes / us / 1e3 * scale;
            Some(Value { x: i as f64, y: rate(us.median), low: rate(us.p90), high: rate(us.p10) })
        });
        series.push(Series { of: Of::Contender(index), values: values.collect() });
    }
    series.retain(|s| !s.values.is_empty());
    let most = most(&series)?;
    let ticks = group.points.iter().enumerate().map(|(i, p)| {
        let c = &p.case;
        (i as f64, format!("{} x {}, {}", c.batch, c.head_counts(), text::length(c.kv_len)))
    });
    let range = (-0.6, group.points.len() as f64 - 0.4);
    let x = Axis { label: "batch x heads, rows of K and V".into(), range, ticks: ticks.collect() };
    if ceiling.is_some() {
        let values = [range.0, range.1].map(|x| Value::exact(x, 100.0)).to_vec();
        series.push(Series { of: Of::Roofline, values });
    }
    let top = if ceiling.is_some() { most.max(100.0) } else { most };
    Some(Chart { title: group.title.clone(), x, y: Axis::linear(label, top), series, marks: Marks::Bars })
}

/// Shares of the roofline, or GB/s where that is not known: bars for every case, by its number.
fn named(report: &Report, group: &Group, contenders: &[&str]) -> Option<Chart> {
    let ceilings = &report.ceilings;
    let known = group.points.iter().all(|p| p.roofline_tflops(ceilings).is_some());
    let rate = |p: &Point, us: f64| match p.roofline_tflops(ceilings) {
        Some(roofline) if known => p.flops / us / 1e6 / roofline * 100.0,
        _ => p.ideal_bytes / us / 1e3,
    };
    let mut series = Vec::new();
    for (index, name) in contenders.iter().enumerate() {
        let values = group.points.iter().enumerate().filter_map(|(i, p)| {
            let us = p.result(name)?.latency_us.as_ref()?;
            Some(Value { x: i as f64, y: rate(p, us.median), low: rate(p, us.p90), high: rate(p, us.p10) })
        });
        series.push(Series { of: Of::Contender(index), values: values.collect() });
    }
    series.retain(|s| !s.values.is_empty());
    let most = most(&series)?;
    let range = (-0.6, group.points.len() as f64 - 0.4);
    let ticks = (0..group.points.len()).map(|i| (i as f64, (i + 1).to_string())).collect();
    let x = Axis { label: "case, by its number in the table".into(), range, ticks };
    if known {
        series.push(Series { of: Of::Roofline, values: [range.0, range.1].map(|x| Value::exact(x, 100.0)).to_vec() });
    }
    let (label, top) = if known { ("share of the roofline (%)", most.max(100.0)) } else { ("GB/s", most) };
    Some(Chart { title: group.suite.to_owned(), x, y: Axis::linear(label, top), series, marks: Marks::Bars })
}

/// Latency at every share of the sequences, one chart per problem.
fn over_lengths(lengths: &LengthReport, contenders: &[&str]) -> Vec<Chart> {
    let mut charts: Vec<(&str, Vec<&LengthCurve>)> = Vec::new();
    for curve in &lengths.curves {
        match charts.iter_mut().find(|(problem, _)| *problem == curve.problem) {
            Some((_, curves)) => curves.push(curve),
            None => charts.push((&curve.problem, vec![curve])),
        }
    }
    let chart = |(problem, curves): (&str, Vec<&LengthCurve>)| {
        let series = curves.iter().filter_map(|curve| {
            let index = contenders.iter().position(|c| *c == curve.contender)?;
            let values = curve.quantiles_us.iter().filter(|q| q.value > 0.0);
            let values = values.map(|q| Value::exact(q.p * 100.0, q.value.log10()));
            Some(Series { of: Of::Contender(index), values: values.collect() })
        });
        let series: Vec<Series> = series.filter(|s| !s.values.is_empty()).collect();
        let ys = || series.iter().flat_map(|s| &s.values).map(|v| v.y);
        let (least, most) = (ys().fold(f64::INFINITY, f64::min), ys().fold(f64::NEG_INFINITY, f64::max));
        let ticks = [0, 25, 50, 75, 95, 100].map(|p| (p as f64, p.to_string()));
        let x = Axis { label: "share of sequences (%)".into(), range: (-2.0, 102.0), ticks: ticks.to_vec() };
        let title = format!("{problem}: time over {}", lengths.source);
        (least <= most).then(|| Chart { title, x, y: Axis::decades("time", least, most), series, marks: Marks::Lines })
    };
    charts.into_iter().filter_map(chart).collect()
}

/// The largest value of the contenders.
fn most(series: &[Series]) -> Option<f64> {
    most_of(series).filter(|m| *m > 0.0)
}

fn most_of(series: &[Series]) -> Option<f64> {
    series.iter().flat_map(|s| &s.values).map(|v| v.high).reduce(f64::max)
}

impl Axis {
    /// From 0 to a little over `most`, with round ticks.
    fn linear(label: &str, most: f64) -> Self {
        let rough = most * 1.05 / 6.0;
        let decade = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|s| s * decade).into_iter().find(|s| *s >= rough);
        let step = step.unwrap_or(10.0 * decade);
        let top = (most * 1.05 / step).ceil() * step;
        let ticks = (0..=(top / step).round() as u32).map(|i| i as f64 * step);
        let digits = usize::try_from((-step.log10().floor() as i32).max(0)).unwrap_or(0);
        let digits = digits + usize::from((step / decade - 2.5).abs() < 1e-9 && step < 10.0);
        let ticks = ticks.map(|t| (t, format!("{t:.digits$}"))).collect();
        Self { label: label.to_owned(), range: (0.0, top), ticks }
    }

    /// Base-2 logarithm of lengths; a tick at every length while they are few, else at powers of two.
    fn lengths(lengths: &[u32]) -> Self {
        let mut lengths = lengths.to_vec();
        lengths.dedup();
        let logs: Vec<f64> = lengths.iter().map(|n| (*n as f64).log2()).collect();
        let least = logs.iter().copied().fold(f64::INFINITY, f64::min);
        let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let apart = logs.windows(2).all(|w| w[1] - w[0] >= 0.45);
        let ticks = if apart && lengths.len() <= 12 {
            logs.iter().zip(&lengths).map(|(x, n)| (*x, text::length(*n))).collect()
        } else {
            (least.ceil() as u32..=most.floor() as u32).map(|e| (e as f64, text::length(1 << e.min(31)))).collect()
        };
        let margin = ((most - least) * 0.04).max(0.15);
        Self { label: "sequence length".into(), range: (least - margin, most + margin), ticks }
    }

    /// Times in microseconds, given by their base-10 logarithms.
    fn decades(label: &str, least: f64, most: f64) -> Self {
        let (low, high) = ((least - 0.1).floor() as i32, (most + 0.1).ceil() as i32);
        // Over a few decades, ticks between the powers of ten help.
        let between: &[f64] = if high - low <= 3 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let (from, to) = (least - 0.15, most + 0.15);
        let all = (low..=high).flat_map(|e| between.iter().map(move |m| m * 10f64.powi(e)));
        let ticks = all.map(|us| (us.log10(), text::tick_time(us))).filter(|(y, _)| (from..=to).contains(y));
        Self { label: label.to_owned(), range: (from, to), ticks: ticks.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{LengthCurve, Quantile};
    use crate::read::tests::sample;

    #[test]
    fn speed_is_drawn_over_length_with_the_roofline_and_without_who_did_not_run() {
        let charts = charts(&sample());
        assert_eq!(charts.len(), 3);
        let prefill = &charts[0];
        assert_eq!(prefill.title, "forward: bf16, head dim 128, causal");
        let of: Vec<_> = prefill.series.iter().map(|s| s.of.clone()).collect();
        assert_eq!(of, [Of::Contender(0), Of::Contender(1), Of::Roofline]);
        let first = prefill.series[0].values[0];
        assert_eq!((first.x, first.y), (10.0, 100.0));
        assert!((first.low - 1000.0 / 11.0).abs() < 1e-9 && (first.high - 1000.0 / 9.0).abs() < 1e-9);
        assert_eq!(prefill.series[2].values[1], Value::exact(11.0, 500.0));
        assert_eq!(prefill.x.ticks, [(10.0, "1k".to_owned()), (11.0, "2k".to_owned())]);
        assert!(prefill.y.range.1 > 500.0 && prefill.y.label == "TFLOP/s");

        let decode = &charts[1];
        assert_eq!((decode.marks, decode.series.len()), (Marks::Bars, 3));
        // 8 MB in 10 us is 800 GB/s of 4000.
        assert_eq!(decode.series[0].values[0].y, 20.0);
        assert_eq!(decode.y.range.1, 120.0);
        assert_eq!(decode.x.ticks[0].1, "4 x 16, 8k");

        // 8 MB for 1e9 operations at 4000 GB/s allow 500 TFLOP/s.
        let named = &charts[2];
        assert_eq!((named.marks, named.series.len(), named.x.ticks[0].1.as_str()), (Marks::Bars, 3, "1"));
        assert_eq!((named.series[0].values[0].y, named.series[2].values[0].y), (20.0, 100.0));
    }

    #[test]
    fn ticks_are_round_and_inside_of_the_axis() {
        for most in [0.003, 0.9, 1.0, 7.3, 99.0, 784.0, 2e4] {
            let axis = Axis::linear("x", most);
            assert!(axis.range.1 >= most && axis.range.1 < 1.6 * most, "{most}: {:?}", axis.range);
            assert!((4..=9).contains(&axis.ticks.len()), "{most}: {:?}", axis.ticks);
            for (at, label) in &axis.ticks {
                assert!((label.parse::<f64>().unwrap() - at).abs() < 1e-9 * most, "{at} {label}");
            }
        }
        let odd = Axis::lengths(&[1000, 1010, 1020, 5000]);
        assert_eq!(odd.ticks.iter().map(|t| t.1.as_str()).collect::<Vec<_>>(), ["1k", "2k", "4k"]);
        assert_eq!(Axis::lengths(&[777]).ticks[0].1, "777");
    }

    #[test]
    fn a_distribution_is_a_chart_per_problem() {
        let mut report = sample();
        let q = |p, value| Quantile { p, value };
        let curve = |contender: &str| LengthCurve {
            problem: "bf16 128".into(),
            contender: contender.into(),
            mean_us: 10.0,
            quantiles_us: vec![q(0.0, 1.0), q(0.5, 10.0), q(1.0, 1000.0)],
        };
        let curves = vec![curve("flashtune"), curve("fa3"), curve("stranger")];
        report.lengths = Some(LengthReport { source: "l.txt".into(), count: 3, mean: 1.0, quantiles: vec![], curves });
        let charts = charts(&report);
        let last = charts.last().unwrap();
        assert_eq!((last.series.len(), last.series[0].values[2]), (2, Value::exact(100.0, 3.0)));
        assert!(last.y.ticks.iter().any(|(_, label)| label == "100 us"), "{:?}", last.y.ticks);
    }
}
