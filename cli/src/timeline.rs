//! What ran when in a tuning: as a chart, as data, and as a trace that browsers draw.

use super::context::Context;
use super::table::table;
use anyhow::Result;
use flashtune_cache::{Activity, Record, Span, Store, Timeline};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// How long to wait for a tuner that writes to the journal.
const PATIENCE: Duration = Duration::from_secs(3);
/// Columns of the chart.
const COLUMNS: u64 = 100;

/// The timeline of a record, or why there is none.
#[derive(Debug, Serialize)]
pub(crate) struct View {
    /// Seconds from the first span to the end of the last.
    pub seconds: f64,
    /// What each activity took, over all lanes.
    pub activities: Vec<Total>,
    pub spans: Vec<Line>,
    /// Why there are none.
    pub missing: Option<String>,
}

/// One activity in sum.
#[derive(Debug, Serialize)]
pub(crate) struct Total {
    pub activity: Activity,
    pub spans: usize,
    pub seconds: f64,
    pub samples: u32,
}

/// One span.
#[derive(Debug, Serialize)]
pub(crate) struct Line {
    pub activity: Activity,
    /// `device`, or `compiler N`.
    pub lane: String,
    pub schedule: Option<String>,
    pub start_us: u64,
    pub duration_us: u64,
    pub samples: u32,
    #[serde(skip)]
    number: u32,
}

impl View {
    /// The timeline of the tuning that found the record, from the journal of the command's cache folder.
    pub(crate) fn of(cx: &Context, record: &Record) -> Self {
        match timeline(cx, record) {
            Ok(Some(timeline)) => Self::drawn(&timeline),
            Ok(None) => Self::missing("it was tuned elsewhere, or has been tuned again since: its timeline is there"),
            Err(e) => Self::missing(e.to_string()),
        }
    }

    fn missing(why: impl Into<String>) -> Self {
        Self { seconds: 0.0, activities: Vec::new(), spans: Vec::new(), missing: Some(why.into()) }
    }

    fn drawn(timeline: &Timeline) -> Self {
        let end = timeline.spans.iter().map(|s| s.start_us.saturating_add(s.duration_us)).max().unwrap_or(0);
        let start = timeline.spans.iter().map(|s| s.start_us).min().unwrap_or(0);
        let total = |activity: Activity| {
            let own = || timeline.spans.iter().filter(move |s| s.activity == activity);
            Total {
                activity,
                spans: own().count(),
                seconds: own().map(|s| s.duration_us as f64).sum::<f64>() / 1e6,
                samples: own().map(|s| s.samples).fold(0, u32::saturating_add),
            }
        };
        let line = |s: &Span| Line {
            activity: s.activity,
            lane: lane(s.lane),
            schedule: s.schedule.and_then(|i| timeline.schedules.get(i as usize)).map(ToString::to_string),
            start_us: s.start_us,
            duration_us: s.duration_us,
            samples: s.samples,
            number: s.lane,
        };
        Self {
            seconds: end.saturating_sub(start) as f64 / 1e6,
            activities: Activity::ALL.map(total).into_iter().filter(|t| t.spans > 0).collect(),
            spans: timeline.spans.iter().map(line).collect(),
            missing: None,
        }
    }

    /// The same as events of the trace format that Chromium and Perfetto read. `process` tells traces of one file
    /// apart.
    pub(crate) fn trace(&self, process: usize, name: &str) -> Vec<Value> {
        let named = |what: &str, tid: u32, name: &str| {
            json!({
                "ph": "M", "name": what, "pid": process, "tid": tid, "args": {"name": name},
            })
        };
        let mut events = vec![named("process_name", 0, name)];
        let lanes: BTreeMap<u32, &str> = self.spans.iter().map(|s| (s.number, s.lane.as_str())).collect();
        events.extend(lanes.iter().map(|(number, name)| named("thread_name", *number, name)));
        events.extend(self.spans.iter().map(|s| {
            json!({
                "ph": "X", "name": s.activity.to_string(), "cat": "tuning", "pid": process, "tid": s.number,
                "ts": s.start_us, "dur": s.duration_us,
                "args": {"schedule": s.schedule, "samples": s.samples},
            })
        }));
        events
    }

    /// One line of characters for a lane: in each column what took the most of its time.
    fn row(&self, lane: u32, start: u64, column_us: u64) -> String {
        let letter = |column: u64| {
            let (from, to) = (start + column * column_us, start + (column + 1) * column_us);
            let within =
                |s: &&Line| s.start_us.saturating_add(s.duration_us).min(to).saturating_sub(s.start_us.max(from));
            let here = self.spans.iter().filter(|s| s.number == lane);
            let longest = here.max_by_key(within).filter(|s| within(s) > 0);
            longest.map_or(' ', |s| mark(s.activity))
        };
        (0..COLUMNS).map(letter).collect::<String>().trim_end().to_owned()
    }
}

fn lane(number: u32) -> String {
    if number == 0 { "device".to_owned() } else { format!("compiler {number}") }
}

/// The letter of an activity in the chart.
fn mark(activity: Activity) -> char {
    match activity {
        Activity::Compile => '#',
        Activity::Prepare => 'i',
        Activity::Load => 'l',
        Activity::CheckSmall => 'c',
        Activity::CheckFull => 'C',
        Activity::Race => 'r',
        Activity::Final => 'F',
        Activity::Wait => '.',
    }
}

/// What the journal has of the tuning that found the record.
fn timeline(cx: &Context, record: &Record) -> Result<Option<Timeline>> {
    let dir = cx.cache_dir()?;
    // A question must not make a journal.
    if !dir.store_path().exists() {
        return Ok(None);
    }
    let timeline = Store::open_within(&dir, PATIENCE)?.timeline(&record.key)?;
    Ok(timeline.filter(|t| t.unix_time == record.provenance.unix_time))
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(why) = &self.missing {
            return writeln!(f, "timeline   is not known here: {why}");
        }
        let start = self.spans.iter().map(|s| s.start_us).min().unwrap_or(0);
        let column_us = ((1e6 * self.seconds) as u64).div_ceil(COLUMNS).max(1);
        writeln!(f, "timeline   {:.2} s, {:.3} s a column", self.seconds, column_us as f64 / 1e6)?;
        let lanes: BTreeMap<u32, &str> = self.spans.iter().map(|s| (s.number, s.lane.as_str())).collect();
        for (number, name) in lanes {
            writeln!(f, "{name:>11} |{}", self.row(number, start, column_us))?;
        }
        let mut totals = table(&["", "activity", "times", "seconds", "samples"]);
        for t in &self.activities {
            let samples = if t.samples > 0 { t.samples.to_string() } else { String::new() };
            totals.add_row([
                mark(t.activity).to_string(),
                t.activity.to_string(),
                t.spans.to_string(),
                format!("{:.2}", t.seconds),
                samples,
            ]);
        }
        writeln!(f, "{totals}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_a_row_for_each_lane_and_what_took_the_most_in_each_column() {
        let span = |activity, lane, start_us, duration_us| Span {
            activity,
            schedule: Some(9),
            lane,
            start_us,
            duration_us,
            samples: 0,
        };
        let spans = vec![
            span(Activity::Compile, 1, 0, 500_000),
            span(Activity::Wait, 0, 0, 500_000),
            span(Activity::Load, 0, 500_000, 1_000),
            span(Activity::Race, 0, 501_000, 499_000),
            // Nonsense from a journal of who knows where.
            span(Activity::Final, 0, u64::MAX, u64::MAX),
        ];
        let view = View::drawn(&Timeline { unix_time: 1, schedules: Vec::new(), spans: spans[..4].to_vec() });
        let text = view.to_string();
        assert!(text.contains(&format!("device |{}{}\n", ".".repeat(50), "r".repeat(50))), "{text}");
        assert!(text.contains(&format!("compiler 1 |{}\n", "#".repeat(50))), "{text}");
        assert_eq!(view.trace(3, "x").len(), 1 + 2 + 4);
        assert_eq!(view.activities.len(), 4);
        let _ = View::drawn(&Timeline { unix_time: 1, schedules: Vec::new(), spans }).seconds;
        assert!(View::drawn(&Timeline::default()).to_string().contains("0.00 s"));
    }
}
