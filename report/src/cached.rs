//! What a cache holds as one HTML page: what was tuned where, how sure that is, what is stale, what is missing.
//!
//! Names and texts come from files of others: they reach the page escaped, and the page's policy runs nothing of
//! theirs.

use crate::compare::{DEVIATIONS, median_bounds};
use crate::page;
use crate::read::Error;
use crate::text::{bytes, number};
use serde::Serialize;
use tera::Context;

/// The records of a cache or bundle, with what a reader needs to judge them.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct CacheReport {
    /// Heading of the page.
    pub title: String,
    /// Names with values: where it comes from, versions.
    pub facts: Vec<[String; 2]>,
    /// Files by kind.
    pub parts: Vec<Part>,
    /// All records.
    pub records: Vec<CachedRecord>,
    /// Calls that hosts met untuned.
    pub untuned: Vec<UntunedCalls>,
    /// The cases of models that were named.
    pub models: Vec<ModelCase>,
}

/// Files of one kind.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Part {
    /// The kind.
    pub name: String,
    /// How many.
    pub files: usize,
    /// Their size in bytes.
    pub bytes: u64,
}

/// One record.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CachedRecord {
    /// Hash of layer and key, in hexadecimal: the row's address in the page.
    pub id: String,
    /// The layer.
    pub layer: String,
    /// Device and arch.
    pub device: String,
    /// The winner's family.
    pub family: String,
    /// What is computed.
    pub problem: String,
    /// The sizes that were timed.
    pub shape: String,
    /// The way of launching.
    pub launches: String,
    /// The winner; none where it was compiled ahead of time and never measured.
    pub winner: Option<Contender>,
    /// The schedule that won.
    pub schedule: String,
    /// The default schedule beside it.
    pub default: Option<Contender>,
    /// All schedules of the final, the winner among them.
    pub finalists: Vec<InFinal>,
    /// Clocks and what else went on.
    pub conditions: String,
    /// Why the record is not used, or is weaker than it was.
    pub stale: Vec<String>,
    /// Schedules of other hosts for the same key, with their times.
    pub rivals: Vec<String>,
    /// Findings that this one was raced against or takes the place of.
    pub settled: usize,
    /// The compiler.
    pub compiler: String,
    /// Date of the tuning.
    pub date: String,
}

/// A schedule's times in the final.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Contender {
    /// Median in microseconds.
    pub median_us: f64,
    /// Rounds in microseconds; those at the same place of two contenders are one round.
    pub rounds_us: Vec<f64>,
    /// All samples.
    pub samples: u32,
}

/// One schedule of the final.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct InFinal {
    /// The schedule.
    pub schedule: String,
    /// Whether it won.
    pub is_winner: bool,
    /// Whether it is the default schedule.
    pub is_default: bool,
    /// Largest absolute error against the oracle.
    pub max_error: f64,
    /// Its times.
    pub times: Contender,
}

/// A class of calls that had no record.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UntunedCalls {
    /// What was computed.
    pub problem: String,
    /// The sizes.
    pub shape: String,
    /// How many calls.
    pub calls: u64,
}

/// A case that a model needs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelCase {
    /// The model.
    pub model: String,
    /// Prefill, decode, chunk.
    pub used_for: String,
    /// The device.
    pub device: String,
    /// What is computed.
    pub problem: String,
    /// The sizes.
    pub shape: String,
    /// The row of its record.
    pub record: Option<String>,
    /// Time of the default over the winner's.
    pub gain: Option<f64>,
}

impl CachedRecord {
    /// Time of the default over the winner's, with the 99 % interval of the rounds' ratios where there are five.
    pub fn gain(&self) -> Option<(f64, Option<[f64; 2]>)> {
        Some(self.default.as_ref()?.over(self.winner.as_ref()?))
    }
}

impl Contender {
    /// Its time over another's, with the 99 % interval of the rounds' ratios where there are five.
    fn over(&self, other: &Self) -> (f64, Option<[f64; 2]>) {
        // A round that a contender did not take part in has no time.
        let both = self.rounds_us.iter().zip(&other.rounds_us).filter(|(a, b)| **a > 0.0 && **b > 0.0);
        let ratios: Vec<f64> = both.map(|(a, b)| a / b).collect();
        (self.median_us / other.median_us, median_bounds(&ratios, DEVIATIONS))
    }

    /// The median, with the 99 % interval of it where there are five rounds.
    fn told(&self) -> String {
        let rounds: Vec<f64> = self.rounds_us.iter().copied().filter(|us| *us > 0.0).collect();
        format!("{} us{}", number(self.median_us), bounds(median_bounds(&rounds, DEVIATIONS)))
    }
}

#[derive(Serialize, Default)]
struct Cell {
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    number: Option<f64>,
    kind: &'static str,
    link: String,
    /// What opens under the text.
    lines: Vec<String>,
}

#[derive(Serialize)]
struct Row {
    id: String,
    cells: Vec<Cell>,
}

#[derive(Serialize)]
struct Section {
    id: &'static str,
    title: &'static str,
    note: String,
    header: Vec<&'static str>,
    rows: Vec<Row>,
}

fn cell(text: impl Into<String>) -> Cell {
    Cell { text: text.into(), ..Cell::default() }
}

fn wide(text: impl Into<String>) -> Cell {
    Cell { kind: "wide", ..cell(text) }
}

/// A number that rows are sorted by; what is no number goes last.
fn sorted(text: String, number: Option<f64>) -> Cell {
    Cell { number: Some(number.filter(|n| n.is_finite()).unwrap_or(-1.0)), ..cell(text) }
}

fn bounds(interval: Option<[f64; 2]>) -> String {
    interval.map_or(String::new(), |[a, b]| format!(" ({a:.3} to {b:.3})"))
}

fn gained(gain: Option<(f64, Option<[f64; 2]>)>) -> Cell {
    let text = gain.map_or("-".to_owned(), |(gain, interval)| format!("{gain:.2}x{}", bounds(interval)));
    sorted(text, gain.map(|(gain, _)| gain))
}

/// How many schedules were in the final, and under that each of them, the fastest first.
fn finalists(r: &CachedRecord) -> Cell {
    let mut order: Vec<&InFinal> = r.finalists.iter().collect();
    order.sort_by(|a, b| a.times.median_us.total_cmp(&b.times.median_us));
    let line = |f: &&InFinal| {
        let mut words = vec![format!("{}: {}", f.schedule, f.times.told())];
        if let Some(winner) = r.winner.as_ref().filter(|_| !f.is_winner) {
            let (ratio, interval) = f.times.over(winner);
            words.push(format!("{ratio:.3}x{}", bounds(interval)));
        }
        words.push(format!("error {:.1e}", f.max_error));
        let notes = [f.is_winner.then_some("winner"), f.is_default.then_some("default")];
        words.extend(notes.into_iter().flatten().map(str::to_owned));
        words.join(", ")
    };
    let count = r.finalists.len();
    Cell { kind: "wide", lines: order.iter().map(line).collect(), ..sorted(count.to_string(), Some(count as f64)) }
}

fn row(r: &CachedRecord) -> Row {
    let time = r.winner.as_ref().map_or("never measured".to_owned(), Contender::told);
    let stale = Cell { kind: if r.stale.is_empty() { "wide" } else { "wide bad" }, ..cell(r.stale.join("; ")) };
    let rivals = match (r.rivals.as_slice(), r.settled) {
        ([], 0) => String::new(),
        (some, settled) => format!("{}; {settled} settled", some.join(", ")),
    };
    let cells = vec![
        Cell { link: format!("r-{}", r.id), ..cell(r.problem.as_str()) },
        cell(r.shape.as_str()),
        wide(r.device.as_str()),
        cell(r.family.as_str()),
        wide(r.schedule.as_str()),
        sorted(time, r.winner.as_ref().map(|w| w.median_us)),
        gained(r.gain()),
        finalists(r),
        sorted(
            r.winner.as_ref().map_or("0".into(), |w| w.samples.to_string()),
            r.winner.as_ref().map(|w| w.samples.into()),
        ),
        stale,
        wide(rivals),
        wide(r.conditions.as_str()),
        cell(r.launches.as_str()),
        cell(r.compiler.as_str()),
        cell(r.date.as_str()),
        cell(r.layer.as_str()),
    ];
    Row { id: format!("r-{}", r.id), cells }
}

fn sections(report: &CacheReport) -> Vec<Section> {
    let plain = |cells| Row { id: String::new(), cells };
    let count = report.records.len();
    let stale = report.records.iter().filter(|r| !r.stale.is_empty()).count();
    let records = Section {
        id: "records",
        title: "Records",
        note: match count {
            0 => "Nothing was tuned yet; `flashtune tune` makes records.".to_owned(),
            _ => format!(
                "{count} records, {stale} of them stale. In parentheses the 99 % interval of the median, of the gain by \
                 rounds of both; none with fewer than five rounds. Gains are the default's time over the winner's. The \
                 final has each schedule's time, and that over the winner's."
            ),
        },
        header: vec![
            "Problem",
            "Shape",
            "Device",
            "Family",
            "Schedule",
            "Time",
            "Gain",
            "Final",
            "Samples",
            "Stale",
            "Rivals",
            "Conditions",
            "Launches",
            "Compiler",
            "Tuned",
            "Layer",
        ],
        rows: report.records.iter().map(row).collect(),
    };
    let models = Section {
        id: "models",
        title: "Models",
        note: match report.models.is_empty() {
            true => {
                "No model was named: `flashtune report CACHE --model PATH` says which of its cases are tuned.".into()
            }
            false => "What serving each model needs, as `flashtune tune --model` knows it.".to_owned(),
        },
        header: vec!["Model", "Use", "Problem", "Shape", "Device", "Gain"],
        rows: report
            .models
            .iter()
            .map(|m| {
                let gain = match &m.record {
                    None => Cell { kind: "bad", ..sorted("not tuned".into(), None) },
                    Some(id) => Cell { link: format!("r-{id}"), ..gained(m.gain.map(|g| (g, None))) },
                };
                let [model, used, problem, shape, device] =
                    [&m.model, &m.used_for, &m.problem, &m.shape, &m.device].map(|text| cell(text.as_str()));
                plain(vec![model, used, problem, shape, device, gain])
            })
            .collect(),
    };
    let untuned = Section {
        id: "untuned",
        title: "Met untuned",
        note: match report.untuned.is_empty() {
            true => "No calls are recorded; hosts append them to the file that FLASHTUNE_UNTUNED names.".to_owned(),
            false => "Calls of hosts that no record served; `flashtune tune --from FILE` tunes them.".to_owned(),
        },
        header: vec!["Problem", "Shape", "Calls"],
        rows: report
            .untuned
            .iter()
            .map(|u| {
                let calls = sorted(u.calls.to_string(), Some(u.calls as f64));
                plain(vec![cell(u.problem.as_str()), cell(u.shape.as_str()), calls])
            })
            .collect(),
    };
    let parts = Section {
        id: "sizes",
        title: "Sizes",
        note: "Files by kind.".to_owned(),
        header: vec!["Kind", "Files", "Size"],
        rows: report
            .parts
            .iter()
            .map(|p| {
                let files = sorted(p.files.to_string(), Some(p.files as f64));
                plain(vec![cell(p.name.as_str()), files, sorted(bytes(p.bytes as f64), Some(p.bytes as f64))])
            })
            .collect(),
    };
    vec![models, untuned, records, parts]
}

/// The page. It fetches nothing, and can be read without its script, which sorts and filters.
///
/// # Errors
/// [`Error::Draw`] when the template fails.
pub fn cache_html(report: &CacheReport) -> Result<String, Error> {
    let mut context = Context::new();
    context.insert("title", &report.title);
    context.insert("facts", &report.facts);
    context.insert("sections", &sections(report));
    page::render(include_str!("cached.html"), include_str!("cached.js"), context)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "</td></script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&{{ title }}";

    fn record(n: usize) -> CachedRecord {
        let contender = |us: f64| Contender {
            median_us: us,
            rounds_us: (0..20).map(|i| us + f64::from(i) / 100.0).collect(),
            samples: 20,
        };
        let text = |t: &str| t.to_owned();
        CachedRecord {
            id: format!("{n:016x}"),
            layer: text("snapshot"),
            device: text("NVIDIA H200 (sm_90a, 132 units)"),
            family: text("forward/sm90"),
            problem: text("forward-bf16-d128-causal"),
            shape: format!("1x32/8 {n}x{n}"),
            launches: text("eager"),
            winner: Some(contender(100.0)),
            schedule: text("w3-m128-n128-s2-pingpong"),
            default: Some(contender(125.0)),
            finalists: [(100.0, "w3-m128-n128-s2-pingpong"), (125.0, "w2-m128-n64-s2"), (104.0, "w3-m128-n96-s2")]
                .map(|(us, schedule)| InFinal {
                    schedule: text(schedule),
                    is_winner: us == 100.0,
                    is_default: us == 125.0,
                    max_error: 1.25e-3,
                    times: contender(us),
                })
                .to_vec(),
            conditions: text("1980 MHz, 45 C"),
            stale: Vec::new(),
            rivals: Vec::new(),
            settled: 0,
            compiler: text("nvrtc 13.0"),
            date: text("2026-01-01"),
        }
    }

    #[test]
    fn pages_of_none_one_and_many_records_have_a_row_for_each() {
        for count in [0, 1, 10_000] {
            let report = CacheReport { records: (0..count).map(record).collect(), ..CacheReport::default() };
            let page = cache_html(&report).unwrap();
            assert_eq!(page.matches("<tr id=\"r-").count(), count);
            assert_eq!(page.matches("<td ").count(), page.matches("</td>").count());
            assert!(page.len() < 40_000 + 2_000 * count, "{} bytes for {count}", page.len());
        }
    }

    #[test]
    fn gains_have_the_interval_of_their_rounds() {
        let (gain, interval) = record(1).gain().unwrap();
        assert!((gain - 1.25).abs() < 1e-9);
        let [low, high] = interval.unwrap();
        assert!(low < high && 1.24 < low && high < 1.26, "{low} {high}");
        let mut few = record(1);
        few.winner.as_mut().unwrap().rounds_us.truncate(4);
        assert_eq!(few.gain().unwrap().1, None);
        few.default = None;
        assert_eq!(few.gain(), None);
    }

    #[test]
    fn finalists_are_told_from_the_fastest_on() {
        let cell = finalists(&record(1));
        assert_eq!(cell.text, "3");
        let [first, second, third] = cell.lines.as_slice() else { panic!("{:?}", cell.lines) };
        assert!(
            first.starts_with("w3-m128-n128-s2-pingpong: 100") && first.ends_with("error 1.3e-3, winner"),
            "{first}"
        );
        assert!(second.starts_with("w3-m128-n96-s2: 104") && second.contains("1.040x (1.0"), "{second}");
        assert!(third.ends_with("default") && third.contains("1.250x (1.2"), "{third}");
        let page = cache_html(&CacheReport { records: vec![record(1)], ..CacheReport::default() }).unwrap();
        assert_eq!((page.matches("<details>").count(), page.matches("<li>").count()), (1, 3));
        let never = CachedRecord { winner: None, finalists: Vec::new(), ..record(1) };
        let page = cache_html(&CacheReport { records: vec![never], ..CacheReport::default() }).unwrap();
        assert!(page.contains("never measured") && !page.contains("<details>"));
    }

    #[test]
    fn hostile_texts_are_texts_everywhere() {
        let text = || HOSTILE.to_owned();
        let mut r = record(1);
        for field in [
            &mut r.layer,
            &mut r.device,
            &mut r.family,
            &mut r.problem,
            &mut r.shape,
            &mut r.launches,
            &mut r.schedule,
            &mut r.conditions,
            &mut r.compiler,
            &mut r.date,
            &mut r.id,
        ] {
            *field = text();
        }
        (r.stale, r.rivals) = (vec![text()], vec![text()]);
        r.finalists[0].schedule = text();
        let (problem, shape, device) = (text(), text(), text());
        let model =
            ModelCase { model: text(), used_for: text(), device, problem, shape, record: Some(text()), gain: None };
        let report = CacheReport {
            title: text(),
            facts: vec![[text(), text()]],
            parts: vec![Part { name: text(), files: 1, bytes: 1 }],
            records: vec![r],
            untuned: vec![UntunedCalls { problem: text(), shape: text(), calls: 1 }],
            models: vec![model],
        };
        let page = cache_html(&report).unwrap();
        assert!(!page.contains("<img") && !page.contains("onerror='"));
        assert_eq!((page.matches("<script").count(), page.matches("</script").count()), (1, 1));
        assert!(page.matches("&lt;script&gt;").count() >= 20 && page.contains("{{ title }}"));
        // Before anything that comes from a file; quotes are escaped in an attribute.
        let policy = page.find("Content-Security-Policy").unwrap();
        assert!(policy < page.find("<title").unwrap());
        assert!(page[policy..].contains("script-src &#39;sha256-"), "{}", &page[policy..policy + 400]);
        assert!(!page.contains("unsafe-inline") && !page.contains(" style=\""));
    }
}
