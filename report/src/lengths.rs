//! Latency over a distribution of lengths, as a table.

use crate::model::LengthReport;
use crate::table::Table;
use crate::text;

/// Shares of the sequences that are shown.
const SHOWN: [f64; 5] = [0.5, 0.9, 0.95, 0.99, 1.0];

/// One line per curve; the lengths themselves come first.
pub(crate) fn table(lengths: &LengthReport) -> Table {
    let note =
        format!("{} sequences of {}, {} rows in the mean.", lengths.count, lengths.source, text::number(lengths.mean));
    let mut table = Table::new("Latency over the lengths", note, &["problem", "contender", "mean"]);
    table.header.extend(SHOWN.map(|p| format!("P{:.0}", p * 100.0)));
    let cell = |value: Option<f64>, write: fn(f64) -> String| value.map_or_else(|| "-".to_owned(), write);
    let mut first = vec!["length".to_owned(), "-".to_owned(), text::number(lengths.mean)];
    first.extend(SHOWN.map(|p| cell(lengths.length_at(p), |n| format!("{n:.0}"))));
    table.rows.push(first);
    for curve in &lengths.curves {
        let mut row = vec![curve.problem.clone(), curve.contender.clone(), text::time(curve.mean_us)];
        row.extend(SHOWN.map(|p| cell(curve.us_at(p), text::time)));
        table.rows.push(row);
    }
    table
}
