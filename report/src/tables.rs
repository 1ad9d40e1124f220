//! A report as tables, and as Markdown.

use crate::group::{Group, Kind, groups};
use crate::lengths;
use crate::model::{Case, Conditions, Measured, Point, Report};
use crate::served;
use crate::table::{NONE, Table};
use crate::text;
use std::fmt::Write;

pub(crate) fn or_none(text: Option<String>) -> String {
    text.unwrap_or_else(|| NONE.to_owned())
}

/// Device, software and ceilings, as lines.
pub(crate) fn facts(report: &Report) -> Vec<(String, String)> {
    let d = &report.device;
    let mut device = format!("{} ({}, {} units", d.name, d.arch, d.units);
    for (n, what) in [(d.memory_bytes, "memory"), (d.cache_bytes, "last-level cache")] {
        if n > 0 {
            let _ = write!(device, ", {} {what}", text::bytes(n as f64));
        }
    }
    let software = report.made.software.iter().map(|(name, version)| format!("{name} {version}"));
    let mut facts = vec![
        ("Device".to_owned(), device + ")"),
        ("Driver".to_owned(), d.driver.clone()),
        ("Software".to_owned(), software.collect::<Vec<_>>().join(", ")),
        ("Date".to_owned(), report.made.date.clone()),
        ("Command".to_owned(), report.made.command.clone()),
    ];
    for c in &report.ceilings.matmul {
        let rate = text::rate(c.tflops);
        facts.push((format!("Ceiling, {} matmul", c.dtype), format!("{rate} ({})", c.how)));
    }
    if let Some(c) = &report.ceilings.copy {
        let rate = text::number(c.gbytes_per_s);
        facts.push(("Ceiling, copy".to_owned(), format!("{rate} GB/s, bytes read plus bytes written ({})", c.how)));
    }
    if let Some(c) = &report.ceilings.read {
        facts.push(("Ceiling, read".to_owned(), format!("{} GB/s ({})", text::number(c.gbytes_per_s), c.how)));
    }
    facts.extend(report.ceilings.absent.iter().map(|why| ("No ceiling".to_owned(), why.clone())));
    facts.extend(exceeded(report).map(|told| ("Beware".to_owned(), told)));
    facts
}

/// A ceiling that something exceeds was measured too low, and a reader must know.
fn exceeded(report: &Report) -> Option<String> {
    let results = report.points.iter().flat_map(|p| &p.results);
    let share = results.filter_map(|r| r.derived.roofline_share).fold(0.0, f64::max);
    (share > 1.02).then(|| {
        format!(
            "the best result is {} of what the measured ceilings allow; something held them down",
            text::percent(share)
        )
    })
}

/// All tables of a report.
pub(crate) fn tables(report: &Report) -> Vec<Table> {
    let groups = groups(report);
    let contenders = report.contenders();
    let mut tables = side_by_side(report, &groups, &contenders);
    tables.extend(served::by_name(&groups, &contenders));
    tables.extend(report.served.as_ref().map(served::steps));
    tables.extend(details(&groups));
    tables.extend(report.lengths.as_ref().map(lengths::table));
    tables.extend(checks(report));
    tables
}

fn sizes(c: &Case) -> [String; 4] {
    if let (Some(name), Some(store)) = (&c.name, &c.store) {
        return [name.clone(), c.head_counts(), store.clone(), format!("{} {} {}", c.dtype, c.head_dim(), c.mask)];
    }
    [c.batch.to_string(), c.head_counts(), c.lengths(), format!("{} {} {}", c.dtype, c.head_dim(), c.mask)]
}

/// One line per point, one column per contender; a table per suite and kind.
fn side_by_side(report: &Report, groups: &[Group], contenders: &[&str]) -> Vec<Table> {
    let rates = report.points.iter().flat_map(|p| &p.results).filter_map(|r| r.derived.tflops);
    let (rate_unit, factor) = text::rate_unit(rates.fold(0.0, f64::max));
    let mut tables: Vec<Table> = Vec::new();
    for group in groups {
        let (unit, note) = match group.kind {
            Kind::Named => continue,
            Kind::Prefill => (rate_unit, "By medians, on live (query, key) pairs."),
            Kind::Decode => ("GB/s", "By medians, counting Q, K, V read and O written once."),
        };
        let title = format!("{}, {unit}", group.suite);
        let table = match tables.iter().position(|t| t.title == title) {
            Some(at) => &mut tables[at],
            None => {
                let mut table = Table::new(&title, note, &["batch", "heads", "length", "problem"]);
                table.header.extend(contenders.iter().map(|c| (*c).to_owned()));
                let of_first = format!("{} / best other", contenders.first().unwrap_or(&NONE));
                table.header.extend(["best".to_owned(), of_first, "roofline share of best".to_owned()]);
                table.header.push("conditions".to_owned());
                tables.push(table);
                tables.last_mut().expect("just pushed")
            }
        };
        for point in &group.points {
            let mut row = sizes(&point.case).to_vec();
            row.extend(contenders.iter().map(|c| {
                let derived = point.result(c).map(|r| &r.derived);
                or_none(derived.and_then(|d| match group.kind {
                    Kind::Prefill => d.tflops.map(|t| text::number(t * factor)),
                    Kind::Decode | Kind::Named => d.gbytes_per_s.map(text::number),
                }))
            }));
            let best = point.best();
            row.push(or_none(best.map(|b| b.contender.clone())));
            row.push(or_none(contenders.first().and_then(|first| against_others(point, first))));
            row.push(or_none(best.and_then(|b| b.derived.roofline_share).map(text::percent)));
            row.push(or_none(point.conditions.as_ref().map(conditions)));
            table.rows.push(row);
        }
    }
    tables.iter_mut().for_each(|t| t.drop_empty_columns(4));
    tables
}

/// Speed of a contender over that of the fastest other one.
fn against_others(point: &Point, contender: &str) -> Option<String> {
    let speed = |r: &Measured| r.derived.tflops;
    let own = point.result(contender).and_then(speed)?;
    let others = point.results.iter().filter(|r| r.contender != contender).filter_map(speed);
    let best = others.fold(None, |best: Option<f64>, s| Some(best.map_or(s, |b| b.max(s))))?;
    Some(format!("{:.2}x", own / best))
}

fn conditions(c: &Conditions) -> String {
    let mut parts = Vec::new();
    for (n, unit) in [(c.sm_clock_mhz, "MHz"), (c.power_w, "W"), (c.temperature_c, "C")] {
        parts.extend(n.map(|n| format!("{n:.0} {unit}")));
    }
    parts.extend(c.throttle.iter().cloned());
    if parts.is_empty() { NONE.to_owned() } else { parts.join(", ") }
}

/// One line per result, with everything that is known of it; a table per group.
fn details(groups: &[Group]) -> Vec<Table> {
    let header = [
        "batch",
        "heads",
        "length",
        "contender",
        "time (us)",
        "p10..p90 (us)",
        "spread",
        "rate",
        "of matmul",
        "of copy",
        "tiles load",
        "from memory",
        "scores not stored",
        "schedule",
        "of read",
        "alone (us)",
    ];
    let note = "Shares are of the ceilings measured in the same run, the copy's counted on ideal bytes (Q, K, V read \
                and O written once). What tiles load, and what of it comes from memory, follows from the schedule and \
                is given in multiples of the ideal bytes.";
    groups
        .iter()
        .map(|group| {
            let mut table = Table::new(format!("Details: {}, {}", group.suite, group.title), note, &header);
            if group.kind == Kind::Named {
                table.header.splice(0..3, ["case", "heads", "keys"].map(str::to_owned));
            }
            for point in &group.points {
                table.rows.extend(point.results.iter().filter(|r| r.latency_us.is_some()).map(|r| detail(point, r)));
            }
            table.note += &absences(group);
            table.drop_empty_columns(4);
            table
        })
        .collect()
}

/// Who did not run, why, and how often; in sentences.
fn absences(group: &Group) -> String {
    let mut absent: Vec<(&str, &str, usize)> = Vec::new();
    for r in group.points.iter().flat_map(|p| &p.results).filter(|r| r.latency_us.is_none()) {
        let why = r.absent.as_deref().unwrap_or("no reason is given");
        match absent.iter_mut().find(|(name, known, _)| (*name, *known) == (r.contender.as_str(), why)) {
            Some((_, _, times)) => *times += 1,
            None => absent.push((&r.contender, why, 1)),
        }
    }
    let of = group.points.len();
    absent.iter().map(|(name, why, times)| format!(" Without {name} at {times} of {of} points: {why}.")).collect()
}

fn detail(point: &Point, r: &Measured) -> Vec<String> {
    let [batch, heads, length, _] = sizes(&point.case);
    let d = &r.derived;
    let multiple = |bytes: Option<f64>| or_none(bytes.map(|b| format!("{:.2}x", b / point.ideal_bytes)));
    let contender = match &r.note {
        Some(note) => format!("{} ({note})", r.contender),
        None => r.contender.clone(),
    };
    let us = r.latency_us.as_ref();
    // What stores no scores is what has a schedule: unfused attention does store them.
    let saved = r.tile_bytes.map(|_| text::bytes(point.scores_bytes));
    vec![
        batch,
        heads,
        length,
        contender,
        or_none(us.map(|l| text::number(l.median))),
        or_none(us.map(|l| format!("{}..{}", text::number(l.p10), text::number(l.p90)))),
        or_none(d.spread.map(text::percent)),
        or_none(d.tflops.map(text::rate)),
        or_none(d.matmul_share.map(text::percent)),
        or_none(d.copy_share.map(text::percent)),
        multiple(r.tile_bytes),
        multiple(r.memory_bytes),
        or_none(saved),
        or_none(r.schedule.clone()),
        or_none(d.read_share.map(text::percent)),
        or_none(r.single_us.as_ref().map(|l| text::number(l.median))),
    ]
}

fn checks(report: &Report) -> Option<Table> {
    if report.checks.is_empty() {
        return None;
    }
    let note = "Largest error of O; it must be at most twice that of unfused attention in the same dtype.";
    let header = ["contender", "problem", "batch", "heads", "length", "error", "unfused", "passed", "note"];
    let mut table = Table::new("Answers", note, &header);
    for c in &report.checks {
        let [batch, heads, length, problem] = sizes(&c.case);
        let error = |e: Option<f64>| or_none(e.map(|e| format!("{e:.1e}")));
        let passed = if c.passed { "yes" } else { "NO" }.to_owned();
        let note = or_none(c.note.clone());
        let row = [c.contender.clone(), problem, batch, heads, length, error(c.max_error), error(c.unfused_error)];
        table.rows.push(row.into_iter().chain([passed, note]).collect());
    }
    Some(table)
}

/// The report as Markdown.
pub fn markdown(report: &Report) -> String {
    let mut out = format!("# {}\n\n", report.title);
    for (name, value) in facts(report) {
        let _ = writeln!(out, "- {name}: {}", plain(&value));
    }
    if !report.method.is_empty() {
        let _ = write!(out, "\n{}\n", report.method.join(" "));
    }
    for table in tables(report) {
        let _ = write!(out, "\n## {}\n\n{}\n\n", table.title, plain(&table.note));
        line(&mut out, &table.header);
        line(&mut out, &vec!["---".to_owned(); table.header.len()]);
        for row in &table.rows {
            line(&mut out, row);
        }
    }
    out
}

fn line(out: &mut String, cells: &[String]) {
    for cell in cells {
        let _ = write!(out, "| {} ", plain(cell));
    }
    out.push_str("|\n");
}

/// Text that Markdown takes as text: in one line, and with no table or tag in it.
fn plain(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '|' => out.push_str("\\|"),
            '<' => out.push_str("&lt;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::tests::sample;

    #[test]
    fn every_number_of_the_sample_is_in_its_markdown() {
        let text = markdown(&sample());
        for words in [
            "# Peers side by side",
            "NVIDIA H200 (sm_90a, 132 units)",
            "800.0 TFLOP/s (cuBLAS)",
            "4000 GB/s",
            "## forward, TFLOP/s",
            "| batch | heads | length | problem | flashtune | fa3 | best | flashtune / best other | \
             roofline share of best |",
            "| 4 | 16 | 1k | bf16 128 causal | 100.0 | 200.0 | fa3 | 0.50x | 40.0 % | 1755 MHz, 651 W, power cap |",
            "## decode, GB/s",
            "| 4 | 16 | 1 x 8k | bf16 128 causal | 800.0 | 1600 | fa3 |",
            "| 4 | 16 | 1k | flashtune | 10.0 | 9.00..11.0 | 20.0 % | 100.0 TFLOP/s | 12.5 % | 20.0 % | 4.00x | \
             1.00x | 61.0 MiB | w4x32-kv64 |",
            "Without fa4 at 2 of 2 points: ImportError: no module &lt;b>cute&lt;/b> \\| here.",
            "| flashtune | bf16 128 causal | 4 | 16 | 100 | 1.0e-3 | 2.0e-3 | yes | - |",
        ] {
            assert!(text.contains(words), "`{words}` is not in:\n{text}");
        }
    }

    #[test]
    fn all_rows_of_a_table_have_its_columns() {
        for table in tables(&sample()) {
            assert!(table.rows.iter().all(|r| r.len() == table.header.len()), "{}", table.title);
        }
    }
}
