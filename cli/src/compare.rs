//! Two results beside each other: `report A B`, and `bench --baseline`.

use super::context::Context;
use super::exit::{Failed, usage};
use super::table::table;
use anyhow::Result;
use flashtune_cache::{Bundle, CacheDir, Finalist, Layers, Record};
use flashtune_report::{Cases, Comparison, Report, Times, Verdict};
use std::borrow::Borrow;
use std::io::Write;
use std::path::Path;
use std::str::FromStr;

/// What counts as the same when nothing is said.
pub(crate) const LIMIT: Percent = Percent(0.03);

/// A share, written as `3%`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Percent(pub f64);

impl FromStr for Percent {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let number = s.strip_suffix('%').and_then(|n| n.trim().parse::<f64>().ok());
        match number.filter(|n| (0.0..=1000.0).contains(n)) {
            Some(n) => Ok(Self(n / 100.0)),
            None => Err(format!("`{s}` is no percentage; write it as 3% or 0.5%")),
        }
    }
}

impl std::fmt::Display for Percent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}%", (self.0 * 1e8).round() / 1e6)
    }
}

/// A report that `bench` kept.
pub(crate) fn read_report(path: &Path) -> Result<Report> {
    let at = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|e| usage(format!("cannot read {at}: {e}; name a report that `flashtune bench --report` wrote")))?;
    Report::from_json(&text).map_err(|e| usage(format!("{at}: {e}")))
}

/// Results of either kind.
enum Results {
    Report(Box<Report>),
    Records(String, Cases),
}

/// Compares two reports, or two caches or bundles.
pub(crate) fn files(before: &Path, after: &Path, limit: Percent) -> Result<Comparison> {
    match (read(before)?, read(after)?) {
        (Results::Report(a), Results::Report(b)) => paired(Comparison::of_reports(&a, &b, limit.0)),
        (Results::Records(a, before), Results::Records(b, after)) => {
            paired(Comparison::new([a, b], [before, after], limit.0, Vec::new()))
        }
        _ => Err(usage(format!(
            "one of {} and {} is a report of `bench`, the other has records of `tune`; name two of a kind",
            before.display(),
            after.display()
        ))),
    }
}

/// A comparison of something.
pub(crate) fn paired(comparison: Comparison) -> Result<Comparison> {
    if comparison.cases.is_empty() {
        let [before, after] = &comparison.unpaired;
        let one = |cases: &[String]| cases.first().cloned().unwrap_or_else(|| "none".to_owned());
        return Err(usage(format!(
            "no case is in both: before {} ({} more), after {} ({} more); measure the same cases",
            one(before),
            before.len().saturating_sub(1),
            one(after),
            after.len().saturating_sub(1)
        )));
    }
    Ok(comparison)
}

fn read(path: &Path) -> Result<Results> {
    let name = path.display().to_string();
    if path.is_dir() {
        let layers = Layers::open(&CacheDir::at(path), &[], None)?;
        let records: Vec<_> = layers.records().into_iter().map(|(_, record, _)| record).collect();
        return of_records(name, &records);
    }
    // Only numbers are read: nobody's signature is asked for.
    match Bundle::map(path) {
        Ok(bundle) => {
            let records = bundle.records().map(|r| r.map(|(record, _)| record)).collect::<Result<Vec<_>, _>>()?;
            of_records(name, &records)
        }
        Err(_) => Ok(Results::Report(Box::new(read_report(path)?))),
    }
}

/// The winners, and the defaults that were measured beside them.
fn of_records<R: Borrow<Record>>(name: String, records: &[R]) -> Result<Results> {
    let mut cases = Cases::new();
    for record in records.iter().map(Borrow::<Record>::borrow) {
        let key = &record.key;
        let case = format!("{} {} {} on {}", key.problem, record.sizes(), key.launches, key.device);
        let mut add = |contender: &str, finalist: Option<&Finalist>| {
            let Some(f) = finalist else { return };
            let samples = f.rounds_ns.iter().map(|ns| *ns as f64 / 1e3).filter(|us| *us > 0.0).collect();
            let times = Times { median_us: f.median_us, samples, schedule: Some(f.schedule.to_string()) };
            cases.entry((case.clone(), contender.to_owned())).or_insert((contender == "winner", times));
        };
        add("winner", record.winner());
        add("default", record.finalists.iter().find(|f| f.is_default));
    }
    match cases.is_empty() {
        true => Err(usage(format!("{name} has no records that were measured; run `flashtune tune` first"))),
        false => Ok(Results::Records(name, cases)),
    }
}

/// Prints a comparison for people.
pub(crate) fn print(cx: &mut Context, found: &Comparison) -> Result<()> {
    let interval = |interval: Option<[f64; 2]>| interval.map_or("-".to_owned(), |[a, b]| format!("{a:.3}..{b:.3}"));
    let mut rows =
        table(&["case", "contender", "before us", "after us", "ratio", "99 % interval", "samples", "verdict"]);
    for c in &found.cases {
        let verdict = match c.verdict {
            Verdict::Slower => "SLOWER",
            Verdict::Faster => "faster",
            Verdict::Same => "same",
            Verdict::NotConclusive => "not conclusive",
        };
        rows.add_row([
            c.case.clone(),
            c.contender.clone(),
            format!("{:.1}", c.before_us),
            format!("{:.1}", c.after_us),
            format!("{:.3}", c.ratio),
            interval(c.interval),
            format!("{}, {}", c.samples[0], c.samples[1]),
            verdict.to_owned(),
        ]);
    }
    for (when, run) in ["before", "after"].into_iter().zip(&found.runs) {
        writeln!(cx.out, "{when}: {run}")?;
    }
    writeln!(cx.out, "{rows}")?;
    for c in found.cases.iter().filter(|c| c.is_first) {
        if let Some([before, after]) = &c.schedules {
            writeln!(cx.out, "{}: {before} before, {after} after", c.case)?;
        }
    }
    if let Some(mean) = found.mean_ratio {
        let bounds = found.interval.map_or(String::new(), |b| format!(", their median within {}", interval(Some(b))));
        writeln!(cx.out, "mean ratio {mean:.3}{bounds}; above 1 is slower, within {} the same", Percent(found.limit))?;
    }
    for (when, cases) in ["before", "after"].into_iter().zip(&found.unpaired) {
        for case in cases {
            writeln!(cx.out, "{when} alone: {case}")?;
        }
    }
    for note in &found.notes {
        writeln!(cx.out, "note: {note}")?;
    }
    Ok(())
}

/// Fails when the first contender of a case is slower by more than the limit, with confidence.
pub(crate) fn fail_over(found: &Comparison) -> Result<()> {
    let slower: Vec<_> = found.slower().map(|c| format!("{} {:.3}x", c.case, c.ratio)).collect();
    match slower.as_slice() {
        [] => Ok(()),
        some => Err(Failed(format!(
            "{} of {} cases are slower by more than {}, with 99 % confidence: {}",
            some.len(),
            found.cases.iter().filter(|c| c.is_first).count(),
            Percent(found.limit),
            some.join("; ")
        ))
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentage_has_its_sign() {
        assert_eq!("3%".parse(), Ok(Percent(0.03)));
        assert_eq!("0.5 %".parse(), Ok(Percent(0.005)));
        assert_eq!((Percent(0.03).to_string(), Percent(0.005).to_string()), ("3%".to_owned(), "0.5%".to_owned()));
        for bad in ["3", "%", "-1%", "x%", "", "nan%", "1e9%"] {
            assert!(bad.parse::<Percent>().unwrap_err().contains("3%"), "{bad}");
        }
    }
}
