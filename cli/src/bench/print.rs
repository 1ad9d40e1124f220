//! What `bench` prints for people: one line per result.

use super::super::context::Context;
use super::super::table::table;
use super::measure::{CHOSEN, DEFAULT};
use anyhow::Result;
use flashtune_report::{Measured, Point, Report};
use std::io::Write;

const HEADER: [&str; 12] = [
    "problem",
    "sizes",
    "contender",
    "us",
    "p10..p90",
    "GFLOP/s",
    "of matmul",
    "of copy",
    "loads/ideal",
    "scores saved",
    "vs default",
    "schedule",
];

/// Device, ceilings, results, and the latencies over a distribution.
pub(crate) fn report(cx: &mut Context, report: &Report) -> Result<()> {
    let d = &report.device;
    writeln!(cx.out, "device {} ({}, {} units)", d.name, d.arch, d.units)?;
    for c in &report.ceilings.matmul {
        writeln!(cx.out, "ceiling of {} products: {:.0} GFLOP/s ({})", c.dtype, c.tflops * 1e3, c.how)?;
    }
    if let Some(c) = &report.ceilings.copy {
        writeln!(cx.out, "ceiling of copies: {:.1} GB/s read and written ({})", c.gbytes_per_s, c.how)?;
    }
    for why in &report.ceilings.absent {
        writeln!(cx.out, "no ceiling of {why}")?;
    }
    let mut printed = table(&HEADER);
    for point in &report.points {
        // Where the choice is the default schedule, its line says so.
        let own = |r: &&Measured| r.contender != DEFAULT || r.latency_us.is_some() || is_wrong(report, r);
        for result in point.results.iter().filter(own) {
            printed.add_row(line(point, result));
        }
    }
    writeln!(cx.out, "{printed}")?;
    let Some(lengths) = &report.lengths else { return Ok(()) };
    writeln!(cx.out, "\n{} sequences of {}, {:.0} rows in the mean", lengths.count, lengths.source, lengths.mean)?;
    let shares = [0.5, 0.9, 0.95, 0.99];
    let mut printed = table(&["problem", "contender", "mean us", "P50 us", "P90 us", "P95 us", "P99 us"]);
    for curve in &lengths.curves {
        let mut row = vec![curve.problem.clone(), curve.contender.clone(), format!("{:.1}", curve.mean_us)];
        row.extend(shares.map(|p| curve.us_at(p).map_or_else(|| "-".into(), |us| format!("{us:.1}"))));
        printed.add_row(row);
    }
    writeln!(cx.out, "{printed}")?;
    Ok(())
}

/// Whether a contender did not run because its answers are wrong.
fn is_wrong(report: &Report, r: &Measured) -> bool {
    report.checks.iter().any(|c| c.contender == r.contender && !c.passed)
}

fn line(point: &Point, r: &Measured) -> Vec<String> {
    let c = &point.case;
    let d = &r.derived;
    let dims = match c.head_dim_qk == c.head_dim_v {
        true => c.head_dim_qk.to_string(),
        false => format!("{}/{}", c.head_dim_qk, c.head_dim_v),
    };
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let percent = |share: Option<f64>| or_none(share.map(|s| format!("{:.1} %", s * 100.0)));
    let us = r.latency_us.as_ref();
    // Where the choice is the default schedule, its time is the default's.
    let median = |name: &str| point.result(name)?.latency_us.as_ref().map(|l| l.median);
    let default = median(DEFAULT).or_else(|| median(CHOSEN));
    vec![
        format!("{} d{dims} {}", c.dtype, c.mask),
        format!("b{} h{}/{} {}x{}", c.batch, c.heads, c.kv_heads, c.q_len, c.kv_len),
        r.note.as_ref().map_or_else(|| r.contender.clone(), |note| format!("{} ({note})", r.contender)),
        or_none(us.map(|l| format!("{:.1}", l.median))),
        or_none(us.map(|l| format!("{:.1}..{:.1}", l.p10, l.p90))),
        or_none(d.tflops.map(|t| format!("{:.0}", t * 1e3))),
        percent(d.matmul_share),
        percent(d.copy_share),
        or_none(r.tile_bytes.map(|b| format!("{:.2}x", b / point.ideal_bytes))),
        or_none(r.tile_bytes.map(|_| format!("{:.1} MiB", point.scores_bytes / (1 << 20) as f64))),
        or_none(default.zip(us).map(|(default, l)| format!("{:.2}x", default / l.median))),
        r.schedule.clone().or_else(|| r.absent.clone()).unwrap_or_else(|| "-".to_owned()),
    ]
}
