//! A real distribution of lengths: read from a file, timed at some of them, and turned into latency at its percentiles.

use super::super::exit::usage;
use super::measure::{CHOSEN, DEFAULT};
use anyhow::Result;
use flashtune_report::{LengthCurve, LengthReport, Point, Quantile};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Shares of the sequences at which lengths and latencies are reported.
const SHARES: [f64; 11] = [0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0];
/// Fields of an object that hold its length.
const FIELDS: [&str; 4] = ["length", "num_tokens", "input_length", "tokens"];
/// Rows per head that a kernel can count.
const MOST: u64 = 1 << 30;

/// The lengths of a file.
pub(crate) struct Lengths {
    source: String,
    /// Every length with the number of its sequences, ascending.
    counts: BTreeMap<u32, u64>,
    /// The lengths that are timed, ascending: quantiles of the file, its percentiles and its ends among them.
    pub timed: Vec<u32>,
}

impl Lengths {
    /// Reads a file and picks the lengths to time: `points` quantiles and those that are reported.
    ///
    /// # Errors
    /// Names the line, or for a JSON array the entry, that holds no length.
    pub(crate) fn read(path: &Path, points: usize) -> Result<Self> {
        if points < 2 {
            return Err(usage("--length-points must be at least 2: the shortest and the longest"));
        }
        let at = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|e| usage(format!("cannot read {at}: {e}; name a file with one length per line, or JSON")))?;
        let lengths = parse(&text).map_err(|why| usage(format!("{at}, {why}")))?;
        let mut counts = BTreeMap::new();
        for length in &lengths {
            *counts.entry(*length).or_insert(0) += 1;
        }
        let mut sorted = lengths;
        sorted.sort_unstable();
        let last = sorted.len() - 1;
        let quantiles = (0..points).map(|k| k as f64 / (points - 1) as f64).chain([0.5, 0.9, 0.95, 0.99]);
        let mut timed: Vec<u32> = quantiles.map(|p| sorted[(p * last as f64).round() as usize]).collect();
        timed.sort_unstable();
        timed.dedup();
        let source = path.file_name().map_or_else(|| at.to_string(), |n| n.to_string_lossy().into_owned());
        Ok(Self { source, counts, timed })
    }

    /// Latency of every problem and contender over the distribution. A contender that was not timed at all lengths has
    /// no curve; where the dispatcher's choice is the default schedule, its time is the default's too.
    pub(crate) fn report(&self, points: &[Point]) -> LengthReport {
        let mut problems: Vec<(String, Vec<&Point>)> = Vec::new();
        for point in points {
            let name = problem(point);
            match problems.iter_mut().find(|(known, _)| *known == name) {
                Some((_, of)) => of.push(point),
                None => problems.push((name, vec![point])),
            }
        }
        let mut curves = Vec::new();
        for (problem, points) in problems {
            let mut names: Vec<&str> = Vec::new();
            for result in points.iter().flat_map(|p| &p.results) {
                if !names.contains(&result.contender.as_str()) {
                    names.push(&result.contender);
                }
            }
            for contender in names {
                if let Some(latencies) = times(&points, contender) {
                    curves.push(self.curve(problem.clone(), contender, &latencies));
                }
            }
        }
        let n: u64 = self.counts.values().sum();
        let total: f64 = self.counts.iter().map(|(length, count)| *length as f64 * *count as f64).sum();
        let pairs: Vec<(f64, u64)> = self.counts.iter().map(|(length, count)| (*length as f64, *count)).collect();
        let mean = total / n as f64;
        LengthReport { source: self.source.clone(), count: n, mean, quantiles: quantiles(&pairs), curves }
    }

    /// A curve from the times (in microseconds) at the timed lengths, ascending.
    fn curve(&self, problem: String, contender: &str, timed: &[(u32, f64)]) -> LengthCurve {
        let mut latencies: Vec<(f64, u64)> =
            self.counts.iter().map(|(length, count)| (between(timed, *length), *count)).collect();
        let n: u64 = self.counts.values().sum();
        let mean_us = latencies.iter().map(|(us, count)| us * *count as f64).sum::<f64>() / n as f64;
        latencies.sort_by(|a, b| a.0.total_cmp(&b.0));
        LengthCurve { problem, contender: contender.to_owned(), mean_us, quantiles_us: quantiles(&latencies) }
    }
}

/// What was computed at a point, without the lengths.
fn problem(point: &Point) -> String {
    let c = &point.case;
    let dims = match c.head_dim_qk == c.head_dim_v {
        true => c.head_dim_qk.to_string(),
        false => format!("{}/{}", c.head_dim_qk, c.head_dim_v),
    };
    let queries = if c.q_len == c.kv_len { String::new() } else { format!(", {} queries", c.q_len) };
    format!("{}, head dim {dims}, {}, batch {}, heads {}/{}{queries}", c.dtype, c.mask, c.batch, c.heads, c.kv_heads)
}

/// Length and median time of a contender at every point; `None` when one is missing.
fn times(points: &[&Point], contender: &str) -> Option<Vec<(u32, f64)>> {
    let time = |point: &Point, name: &str| Some(point.result(name)?.latency_us.as_ref()?.median);
    let mut times = points.iter().map(|p| {
        let us = time(p, contender);
        let us = us.or_else(|| (contender == DEFAULT).then(|| time(p, CHOSEN)).flatten());
        Some((p.case.kv_len, us?))
    });
    let mut all = times.by_ref().collect::<Option<Vec<_>>>()?;
    all.sort_unstable_by_key(|t| t.0);
    // A contender that never ran by itself is not one.
    points.iter().any(|p| time(p, contender).is_some()).then_some(all)
}

/// The time at a length, on straight lines between the timed ones.
fn between(timed: &[(u32, f64)], length: u32) -> f64 {
    let after = timed.partition_point(|t| t.0 < length);
    match (timed.get(after.wrapping_sub(1)), timed.get(after)) {
        (_, Some((at, us))) if *at == length => *us,
        (Some((l0, t0)), Some((l1, t1))) => t0 + (t1 - t0) * (length - l0) as f64 / (l1 - l0) as f64,
        // Beyond the ends, which are timed: the end's own.
        (Some((_, us)), None) | (None, Some((_, us))) => *us,
        (None, None) => f64::NAN,
    }
}

/// Values at [`SHARES`], of ascending values with the number of sequences of each.
fn quantiles(values: &[(f64, u64)]) -> Vec<Quantile> {
    let n: u64 = values.iter().map(|v| v.1).sum();
    let at = |p: f64| {
        let rank = (p * n.saturating_sub(1) as f64).round() as u64;
        let mut seen = 0;
        values.iter().find(|(_, count)| {
            seen += count;
            seen > rank
        })
    };
    SHARES.iter().filter_map(|p| Some(Quantile { p: *p, value: at(*p)?.0 })).collect()
}

/// The lengths of a text: a JSON array, or one value per line. Errors begin with the line or entry.
fn parse(text: &str) -> Result<Vec<u32>, String> {
    let lengths = if text.trim_start().starts_with('[') {
        let values: Vec<Value> =
            serde_json::from_str(text).map_err(|e| format!("line {}: no JSON array: {e}", e.line()))?;
        let entry = |(i, v): (usize, &Value)| length(v).map_err(|why| format!("entry {}: {why}", i + 1));
        values.iter().enumerate().map(entry).collect::<Result<Vec<_>, _>>()?
    } else {
        let lines = text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty() && !l.trim().starts_with('#'));
        lines.map(|(i, l)| line(l.trim()).map_err(|why| format!("line {}: {why}", i + 1))).collect::<Result<_, _>>()?
    };
    if lengths.is_empty() {
        return Err("line 1: there is no length in it; write one per line".to_owned());
    }
    Ok(lengths)
}

fn line(text: &str) -> Result<u32, String> {
    let value: Value = serde_json::from_str(text)
        .map_err(|_| format!("`{}` is neither a number nor a JSON object", shortened(text)))?;
    length(&value)
}

fn length(value: &Value) -> Result<u32, String> {
    let number = match value {
        Value::Object(fields) => FIELDS
            .iter()
            .find_map(|f| fields.get(*f))
            .ok_or_else(|| format!("the object has none of the fields {}", FIELDS.join(", ")))?,
        other => other,
    };
    match number.as_u64() {
        Some(n @ 1..=MOST) => Ok(n as u32),
        _ => Err(format!("the length `{}` is no whole number from 1 to {MOST}", shortened(&number.to_string()))),
    }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_report::{Case, Latency, Measured};
    use std::io::Write;

    fn read(text: &str, points: usize) -> Result<Lengths> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        Lengths::read(file.path(), points)
    }

    #[test]
    fn the_formats_give_the_same_lengths() {
        for text in [
            "3\n1\n\n# a comment\n2\n",
            "[3, 1, 2]",
            "\n [\n3,\n1, 2]",
            "{\"length\": 3}\n{\"length\": 1, \"id\": 7}\r\n2",
            "[{\"num_tokens\": 3}, {\"tokens\": 1}, {\"input_length\": 2}]",
        ] {
            assert_eq!(parse(text), Ok(vec![3, 1, 2]), "{text}");
        }
    }

    #[test]
    fn errors_name_the_line_or_the_entry() {
        for (text, words) in [
            ("", "no length"),
            ("# only a comment", "no length"),
            ("[]", "no length"),
            ("5\n\nx7\n", "line 3: `x7`"),
            ("5\n0\n", "line 2: the length `0`"),
            ("5\n-1\n", "line 2: the length `-1`"),
            ("5\n2.5\n", "line 2: the length `2.5`"),
            ("1\n2\n99999999999\n", "line 3: the length `99999999999`"),
            ("5\n{\"len\": 4}", "line 2: the object has none of the fields length, num_tokens"),
            ("5\n[1, 2]", "line 2: the length `[1,2]`"),
            ("[1, 2, \"3\"]", "entry 3: the length"),
            ("[1,\n2,\n", "line 3: no JSON array"),
        ] {
            let why = parse(text).unwrap_err();
            assert!(why.contains(words), "{text:?}: {why}");
        }
        assert!(read("5", 1).err().unwrap().to_string().contains("--length-points"));
    }

    #[test]
    fn many_lengths_are_timed_at_quantiles_and_ends() {
        let text: String = (0..100_000u64).map(|i| format!("{}\n", 1 + i * i % 7919)).collect();
        let lengths = read(&text, 20).unwrap();
        assert!((20..=24).contains(&lengths.timed.len()), "{:?}", lengths.timed);
        let all: Vec<u32> = lengths.counts.keys().copied().collect();
        assert_eq!((lengths.timed.first(), lengths.timed.last()), (all.first(), all.last()));
        assert_eq!(read("7\n7\n7\n", 20).unwrap().timed, [7]);
    }

    fn point(kv_len: u32, times: &[(&str, f64)]) -> Point {
        let case = Case {
            name: None,
            store: None,
            dtype: "f32".into(),
            head_dim_qk: 64,
            head_dim_v: 64,
            mask: "full".into(),
            batch: 1,
            heads: 2,
            kv_heads: 2,
            q_len: kv_len,
            kv_len,
        };
        let result = |(name, us): &(&str, f64)| Measured {
            contender: (*name).into(),
            latency_us: Some(Latency { median: *us, p10: *us, p90: *us, samples: 1, times: vec![], repeats: vec![] }),
            ..Default::default()
        };
        let results = times.iter().map(result).collect();
        let (flops, ideal_bytes, scores_bytes) = (1.0, 1.0, 1.0);
        Point { suite: "lengths".into(), case, flops, ideal_bytes, scores_bytes, aim: None, conditions: None, results }
    }

    #[test]
    fn percentiles_of_latency_follow_from_the_timed_lengths() {
        // 90 short sequences, 9 of 200 (not timed: half way), one long.
        let text = "100\n".repeat(90) + &"200\n".repeat(9) + "300\n";
        let lengths = read(&text, 2).unwrap();
        assert_eq!(lengths.timed, [100, 200, 300]);
        let points =
            [point(100, &[("chosen", 10.0), ("unfused", 50.0)]), point(300, &[("chosen", 30.0), ("default", 40.0)])];
        let report = lengths.report(&points);
        assert_eq!((report.count, report.mean), (100, 111.0));
        assert_eq!(
            (report.length_at(0.5), report.length_at(0.95), report.length_at(1.0)),
            (Some(100.0), Some(200.0), Some(300.0))
        );
        let names: Vec<_> = report.curves.iter().map(|c| c.contender.as_str()).collect();
        // Unfused attention lacks a time; the default is the choice where it has none.
        assert_eq!(names, ["chosen", "default"]);
        let chosen = &report.curves[0];
        assert_eq!((chosen.us_at(0.5), chosen.us_at(0.95), chosen.us_at(1.0)), (Some(10.0), Some(20.0), Some(30.0)));
        assert!((chosen.mean_us - (900.0 + 180.0 + 30.0) / 100.0).abs() < 1e-9);
        assert_eq!(report.curves[1].us_at(0.95), Some(25.0));
    }
}
