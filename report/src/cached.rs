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
    pub parts: Vec<CachePart>,
    /// All records.
    pub records: Vec<CachedRecord>,
    /// Calls that hosts met untuned.
    pub untuned: Vec<UntunedCalls>,
    /// The cases of models that were named.
    pub models: Vec<ModelCase>,
}

/// Files of one kind.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CachePart {
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
    /// Time of the default over the winner's: the median of the rounds' ratios with its 99 % interval where there are
    /// five, else that of the medians.
    pub fn gain(&self) -> Option<Estimate> {
        Some(self.default.as_ref()?.over(self.winner.as_ref()?))
    }
}

impl Contender {
    /// Its time over another's, with the 99 % interval of the rounds' ratios where there are five.
    fn over(&self, other: &Self) -> Estimate {
        // A round that a contender did not take part in has no time.
        let both = self.rounds_us.iter().zip(&other.rounds_us).filter(|(a, b)| **a > 0.0 && **b > 0.0);
        estimate(both.map(|(a, b)| a / b).collect(), self.median_us / other.median_us)
    }

    /// The median in microseconds, with the 99 % interval of it where there are five rounds.
    fn time(&self) -> Estimate {
        let rounds = self.rounds_us.iter().copied().filter(|us| *us > 0.0).collect();
        estimate(rounds, self.median_us)
    }
}

/// A median, and its 99 % interval.
type Estimate = (f64, Option<[f64; 2]>);

/// Of rounds where there are five, else what all samples gave. Those of the search are among them: noise that passed
/// before the final would put their median outside of the final's interval.
fn estimate(mut rounds: Vec<f64>, of_samples: f64) -> Estimate {
    let Some(interval) = median_bounds(&rounds, DEVIATIONS) else { return (of_samples, None) };
    rounds.sort_by(f64::total_cmp);
    let middle = rounds.len() / 2;
    let median = if rounds.len() % 2 == 1 { rounds[middle] } else { f64::midpoint(rounds[middle - 1], rounds[middle]) };
    (median, Some(interval))
}

#[derive(Serialize, Default)]
struct Cell {
    text: String,
    /// A second line.
    below: String,
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
    /// Text and, at odd places, commands.
    note: Vec<String>,
    /// What the rows come to.
    sums: Vec<String>,
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

/// `3 records`, `1 record`.
fn counted(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// What stands between backticks goes to odd places.
fn note(text: impl AsRef<str>) -> Vec<String> {
    text.as_ref().split('`').map(str::to_owned).collect()
}

fn interval(bounds: Option<[f64; 2]>, written: impl Fn(f64) -> String) -> String {
    bounds.map_or(String::new(), |[a, b]| format!("{} to {}", written(a), written(b)))
}

fn times(factor: f64) -> String {
    format!("{factor:.2}x")
}

/// Leaves out a column that says the same in all rows, where there are several: of devices, which the facts name.
fn without_device(mut section: Section) -> Section {
    let column = section.header.iter().position(|name| *name == "Device").unwrap_or(section.header.len());
    let mut texts = section.rows.iter().filter_map(|row| row.cells.get(column)).map(|cell| &cell.text);
    if section.rows.len() > 1 && texts.next().is_some_and(|first| texts.all(|other| other == first)) {
        section.header.remove(column);
        section.rows.iter_mut().for_each(|row| drop(row.cells.remove(column)));
    }
    section
}

fn gained(gain: Option<Estimate>) -> Cell {
    let text = gain.map_or("-".to_owned(), |(gain, _)| times(gain));
    let below = gain.map_or(String::new(), |(_, bounds)| interval(bounds, |r| format!("{r:.3}")));
    Cell { below, ..sorted(text, gain.map(|(gain, _)| gain)) }
}

/// A schedule of the final in a line.
fn finalist(f: &InFinal, winner: Option<&Contender>) -> String {
    let bracketed = |bounds, written: &dyn Fn(f64) -> String| match interval(bounds, written) {
        some if some.is_empty() => some,
        some => format!(" ({some})"),
    };
    let (us, bounds) = f.times.time();
    let mut words = vec![format!("{}: {} us{}", f.schedule, number(us), bracketed(bounds, &number))];
    if let Some(winner) = winner.filter(|_| !f.is_winner) {
        let (ratio, bounds) = f.times.over(winner);
        words.push(format!("{ratio:.3}x{}", bracketed(bounds, &|r| format!("{r:.3}"))));
    }
    words.push(format!("error {:.1e}", f.max_error));
    let notes = [f.is_winner.then_some("winner"), f.is_default.then_some("default")];
    words.extend(notes.into_iter().flatten().map(str::to_owned));
    words.join(", ")
}

/// Each schedule of the final, the fastest first, and whatever else is known.
fn details(r: &CachedRecord) -> Cell {
    let mut order: Vec<&InFinal> = r.finalists.iter().collect();
    order.sort_by(|a, b| a.times.time().0.total_cmp(&b.times.time().0));
    let mut lines: Vec<String> = order.iter().map(|f| finalist(f, r.winner.as_ref())).collect();
    let samples = r.winner.as_ref().map_or(0, |w| w.samples).to_string();
    let settled = if r.settled == 0 { String::new() } else { counted(r.settled, "finding") };
    let rest = [
        ("family", &r.family),
        ("samples of the winner", &samples),
        ("launches", &r.launches),
        ("conditions", &r.conditions),
        ("compiler", &r.compiler),
        ("layer", &r.layer),
        ("other hosts found", &r.rivals.join(", ")),
        ("settled", &settled),
    ];
    lines.extend(rest.iter().filter(|(_, value)| !value.is_empty()).map(|(name, value)| format!("{name}: {value}")));
    let count = r.finalists.len();
    let contested = if r.rivals.is_empty() { "" } else { ", contested" };
    Cell { lines, ..sorted(format!("{} raced{contested}", counted(count, "schedule")), Some(count as f64)) }
}

fn row(r: &CachedRecord) -> Row {
    let time = r.winner.as_ref().map(Contender::time);
    let us = |us| format!("{} us", number(us));
    let stale = Cell { kind: if r.stale.is_empty() { "" } else { "wide bad" }, ..cell(r.stale.join("; ")) };
    let launches = if r.launches == "eager" { String::new() } else { format!("launched by {}", r.launches) };
    let cells = vec![
        Cell { link: format!("r-{}", r.id), ..cell(r.problem.as_str()) },
        Cell { below: launches, ..cell(r.shape.as_str()) },
        wide(r.device.as_str()),
        wide(r.schedule.as_str()),
        Cell {
            below: interval(time.and_then(|(_, bounds)| bounds), number),
            ..sorted(time.map_or("never measured".to_owned(), |(t, _)| us(t)), time.map(|(t, _)| t))
        },
        match r.finalists.iter().any(|f| f.is_winner && f.is_default) {
            true => Cell { below: "the default".to_owned(), ..gained(r.gain().map(|(gain, _)| (gain, None))) },
            false => gained(r.gain()),
        },
        details(r),
        cell(r.date.as_str()),
        stale,
    ];
    Row { id: format!("r-{}", r.id), cells }
}

/// How many of a model's cases are tuned on a device, and the mean gain of those.
fn sums(models: &[ModelCase]) -> Vec<String> {
    let mut groups: Vec<((&str, &str), Vec<&ModelCase>)> = Vec::new();
    for case in models {
        let key = (case.model.as_str(), case.device.as_str());
        match groups.iter_mut().find(|(of, _)| *of == key) {
            Some((_, cases)) => cases.push(case),
            None => groups.push((key, vec![case])),
        }
    }
    let line = |((model, device), cases): &((&str, &str), Vec<&ModelCase>)| {
        let tuned = cases.iter().filter(|case| case.record.is_some()).count();
        let gains: Vec<f64> = cases.iter().filter_map(|case| case.gain).filter(|gain| *gain > 0.0).collect();
        let mean = (gains.iter().map(|gain| gain.ln()).sum::<f64>() / gains.len() as f64).exp();
        let gain = if gains.is_empty() { String::new() } else { format!(", {} on the mean", times(mean)) };
        format!("{model} on {device}: {tuned} of {} tuned{gain}", counted(cases.len(), "case"))
    };
    groups.iter().map(line).collect()
}

fn sections(report: &CacheReport) -> Vec<Section> {
    let plain = |cells| Row { id: String::new(), cells };
    let count = report.records.len();
    let stale = report.records.iter().filter(|r| !r.stale.is_empty()).count();
    let records = Section {
        id: "records",
        title: "Records",
        note: note(match count {
            0 => "Nothing was tuned yet; `flashtune tune` makes records.".to_owned(),
            _ => format!(
                "{}, {stale} of them stale. Times are medians of the final's rounds, gains the default's time over the \
                 winner's in the same round; below them the 99 % interval, where there are five rounds.",
                counted(count, "record")
            ),
        }),
        sums: Vec::new(),
        header: vec!["Problem", "Shape", "Device", "Schedule", "Time", "Gain", "Details", "Tuned", "Stale"],
        rows: report.records.iter().map(row).collect(),
    };
    let models = Section {
        id: "models",
        title: "Models",
        note: note(match report.models.is_empty() {
            true => "No model was named: `flashtune report CACHE --model PATH` says which of its cases are tuned.",
            false => "What each model needs, as `flashtune tune --model` knows it.",
        }),
        sums: sums(&report.models),
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
        note: note(match report.untuned.is_empty() {
            true => "No calls are recorded; hosts append them to the file that `FLASHTUNE_UNTUNED` names.",
            false => "Calls of hosts that no record served; `flashtune tune --from FILE` tunes them.",
        }),
        sums: Vec::new(),
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
        note: note("Files by kind."),
        sums: Vec::new(),
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
    vec![without_device(models), untuned, without_device(records), parts]
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
pub(crate) mod tests {
    use super::*;

    pub(crate) const HOSTILE: &str =
        "</td></script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&{{ title }}";

    pub(crate) fn record(n: usize) -> CachedRecord {
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
        assert!((gain - 1.25).abs() < 1e-3, "{gain}");
        let [low, high] = interval.unwrap();
        assert!(low < high && 1.24 < low && high < 1.26, "{low} {high}");
        let mut few = record(1);
        few.winner.as_mut().unwrap().rounds_us.truncate(4);
        assert_eq!(few.gain().unwrap().1, None);
        few.default = None;
        assert_eq!(few.gain(), None);
    }

    #[test]
    fn a_median_lies_in_its_interval() {
        // The search had slow samples that the final's rounds have not.
        let mut noisy = record(1);
        noisy.winner.as_mut().unwrap().median_us = 150.0;
        let (us, bounds) = noisy.winner.as_ref().unwrap().time();
        let [low, high] = bounds.unwrap();
        assert!(low <= us && us <= high, "{low} {us} {high}");
        let (gain, bounds) = noisy.gain().unwrap();
        let [low, high] = bounds.unwrap();
        assert!(low <= gain && gain <= high, "{low} {gain} {high}");
    }

    #[test]
    fn a_column_of_one_device_is_left_out() {
        let devices = |all: &[&str]| {
            let of = |(n, device): (usize, &&str)| CachedRecord { device: (*device).to_owned(), ..record(n) };
            let report = CacheReport { records: all.iter().enumerate().map(of).collect(), ..CacheReport::default() };
            cache_html(&report).unwrap().matches("data-name=\"Device\"").count()
        };
        assert_eq!([devices(&["a", "a"]), devices(&["a", "b"]), devices(&["a"])], [0, 2, 1]);
    }

    #[test]
    fn a_model_is_summed_up_by_device() {
        let case = |device: &str, gain: Option<f64>| ModelCase {
            model: "llama".into(),
            used_for: "decode".into(),
            device: device.into(),
            problem: "p".into(),
            shape: "s".into(),
            record: gain.map(|_| "r".into()),
            gain,
        };
        let cases = [case("a", Some(1.0)), case("b", None), case("a", Some(1.21)), case("a", None)];
        assert_eq!(
            sums(&cases),
            ["llama on a: 2 of 3 cases tuned, 1.10x on the mean", "llama on b: 0 of 1 case tuned"]
        );
    }

    #[test]
    fn finalists_are_told_from_the_fastest_on() {
        let cell = details(&record(1));
        assert_eq!(cell.text, "3 schedules raced");
        let [first, second, third, rest @ ..] = cell.lines.as_slice() else { panic!("{:?}", cell.lines) };
        assert!(
            first.starts_with("w3-m128-n128-s2-pingpong: 100") && first.ends_with("error 1.3e-3, winner"),
            "{first}"
        );
        assert!(second.starts_with("w3-m128-n96-s2: 104") && second.contains("1.040x (1.0"), "{second}");
        assert!(third.ends_with("default") && third.contains("1.250x (1.2"), "{third}");
        assert_eq!(rest[..2], ["family: forward/sm90", "samples of the winner: 20"]);
        let contested = CachedRecord { rivals: vec!["w2 99.0 us".into()], ..record(1) };
        let cell = details(&contested);
        assert!(
            cell.text.ends_with("raced, contested") && cell.lines.contains(&"other hosts found: w2 99.0 us".into())
        );
        let page = cache_html(&CacheReport { records: vec![record(1)], ..CacheReport::default() }).unwrap();
        assert_eq!((page.matches("<details>").count(), page.matches("<li>").count()), (1, 9));
        let never = CachedRecord { winner: None, finalists: Vec::new(), ..record(1) };
        let page = cache_html(&CacheReport { records: vec![never], ..CacheReport::default() }).unwrap();
        assert!(page.contains("never measured") && page.contains("<summary>0 schedules raced"));
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
            parts: vec![CachePart { name: text(), files: 1, bytes: 1 }],
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
