//! Two runs of a benchmark beside each other: which cases became slower, and how sure that is.
//!
//! Cases are paired by problem, sizes and contender. Of each, the ratio of the medians counts, with an interval of 99 %
//! from the samples of both runs: the medians of repeats where both runs have five of them, else the times of the
//! rounds. The interval of each median is by order statistics, without an assumption on the distribution; samples of
//! one run that resemble those before them count for fewer.

use crate::model::{Case, Latency, Report};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The version of the form of a [`Comparison`].
pub const COMPARISON_FORMAT: u32 = 1;
/// The confidence of intervals, and the standard deviations of a normal variable that it is.
const CONFIDENCE: f64 = 0.99;
pub(crate) const DEVIATIONS: f64 = 2.576;
/// The same of the order statistics that the deviation of a median is taken from: five samples have them.
const MEDIAN_DEVIATIONS: f64 = 1.96;
/// Fewer samples say nothing about how far their median may be off.
const FEWEST: usize = 5;

/// What is known of the ratio of two times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Slower by more than the limit, with confidence.
    Slower,
    /// Faster by more than the limit, with confidence.
    Faster,
    /// Within the limit, with confidence.
    Same,
    /// The samples do not tell.
    NotConclusive,
}

/// The times of one case in one of the runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Times {
    /// The median, in microseconds.
    pub median_us: f64,
    /// The samples, in microseconds and in the order in which they were taken.
    pub samples: Vec<f64>,
    /// The schedule or kernel.
    pub schedule: Option<String>,
}

/// One case of both runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// Problem and sizes, in words.
    pub case: String,
    /// Who computed it.
    pub contender: String,
    /// Whether it is what the runs are about, and no yardstick beside it.
    pub is_first: bool,
    /// The median before, in microseconds.
    pub before_us: f64,
    /// The median after, in microseconds.
    pub after_us: f64,
    /// After over before: above 1 is slower.
    pub ratio: f64,
    /// Between these the true ratio lies; absent where there are too few samples.
    pub interval: Option<[f64; 2]>,
    /// Samples before and after.
    pub samples: [usize; 2],
    /// What is known.
    pub verdict: Verdict,
    /// The schedules, where they differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedules: Option<[String; 2]>,
}

/// Two runs beside each other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// [`COMPARISON_FORMAT`].
    pub format: u32,
    /// What the runs are, before and after, in a line.
    pub runs: [String; 2],
    /// Ratios within `1 / (1 + limit)` and `1 + limit` count as the same.
    pub limit: f64,
    /// The confidence of the intervals.
    pub confidence: f64,
    /// Cases that both have.
    pub cases: Vec<Compared>,
    /// The geometric mean of the ratios of the first contenders.
    pub mean_ratio: Option<f64>,
    /// Between these the median of these ratios lies, over such cases; from five cases on.
    pub interval: Option<[f64; 2]>,
    /// Cases of one run alone, before and after.
    pub unpaired: [Vec<String>; 2],
    /// What else differs between the runs.
    pub notes: Vec<String>,
}

/// The cases of one run: by case and contender, with whether it is the first one.
pub type Cases = BTreeMap<(String, String), (bool, Times)>;

impl Comparison {
    /// Compares two runs.
    pub fn new(runs: [String; 2], [before, after]: [Cases; 2], limit: f64, notes: Vec<String>) -> Self {
        let only = |of: &Cases, not: &Cases| {
            let firsts = of.iter().filter(|(key, (is_first, _))| *is_first && !not.contains_key(*key));
            firsts.map(|((case, contender), _)| format!("{case} ({contender})")).collect()
        };
        let unpaired = [only(&before, &after), only(&after, &before)];
        let both = before.into_iter().filter_map(|(key, a)| after.get(&key).map(|b| (key, a, b.clone())));
        let cases: Vec<Compared> = both
            .map(|((case, contender), (is_first, a), (_, b))| Compared::new(case, contender, is_first, a, b, limit))
            .collect();
        let logs: Vec<f64> = cases.iter().filter(|c| c.is_first).map(|c| c.ratio.ln()).collect();
        let mean_ratio = (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp());
        let interval = median_bounds(&logs, DEVIATIONS).map(|bounds| bounds.map(f64::exp));
        let (format, confidence) = (COMPARISON_FORMAT, CONFIDENCE);
        Self { format, runs, limit, confidence, cases, mean_ratio, interval, unpaired, notes }
    }

    /// Compares two reports.
    pub fn of_reports(before: &Report, after: &Report, limit: f64) -> Self {
        let mut notes = Vec::new();
        let mut differs = |what: &str, a: &str, b: &str| {
            if a != b {
                notes.push(format!("{what}: {a} before, {b} after"));
            }
        };
        differs("device", &before.device.name, &after.device.name);
        differs("arch", &before.device.arch, &after.device.arch);
        differs("driver", &before.device.driver, &after.device.driver);
        differs("units", &before.device.units.to_string(), &after.device.units.to_string());
        for (name, version) in &before.made.software {
            differs(name, version, after.made.software.get(name).map_or("none", String::as_str));
        }
        let run = |r: &Report| format!("{}, {}: {}", r.title, r.made.date, r.made.command);
        Self::new([run(before), run(after)], [cases(before, after), cases(after, before)], limit, notes)
    }

    /// The first contenders' cases that are slower by more than the limit, with confidence.
    pub fn slower(&self) -> impl Iterator<Item = &Compared> {
        self.cases.iter().filter(|c| c.is_first && c.verdict == Verdict::Slower)
    }
}

impl Compared {
    fn new(case: String, contender: String, is_first: bool, before: Times, after: Times, limit: f64) -> Self {
        let ratio = after.median_us / before.median_us;
        let interval = interval(&before.samples, &after.samples, ratio);
        let verdict = match interval {
            Some([low, _]) if low > 1.0 + limit => Verdict::Slower,
            Some([_, high]) if high < 1.0 / (1.0 + limit) => Verdict::Faster,
            Some([low, high]) if low >= 1.0 / (1.0 + limit) && high <= 1.0 + limit => Verdict::Same,
            _ => Verdict::NotConclusive,
        };
        let samples = [before.samples.len(), after.samples.len()];
        let (before_us, after_us) = (before.median_us, after.median_us);
        let schedules = before.schedule.zip(after.schedule).filter(|(a, b)| a != b).map(|(a, b)| [a, b]);
        Self { case, contender, is_first, before_us, after_us, ratio, interval, samples, verdict, schedules }
    }
}

/// The cases of a report, with the samples that the other one has as well.
fn cases(report: &Report, other: &Report) -> Cases {
    let mut found = Cases::new();
    for point in &report.points {
        for (i, result) in point.results.iter().enumerate() {
            let Some(latency) = &result.latency_us else { continue };
            let same = |p: &&crate::Point| p.suite == point.suite && p.case == point.case;
            let theirs = other.points.iter().find(same).and_then(|p| p.result(&result.contender)?.latency_us.as_ref());
            let times = Times {
                median_us: latency.median,
                samples: samples(latency, theirs).to_vec(),
                schedule: result.schedule.clone(),
            };
            let name = format!("{}: {}", point.suite, words(&point.case));
            found.entry((name, result.contender.clone())).or_insert((i == 0, times));
        }
    }
    found
}

/// The medians of repeats where both runs have enough of them, else the times of the rounds.
fn samples<'a>(latency: &'a Latency, other: Option<&Latency>) -> &'a [f64] {
    let repeated = |l: &Latency| l.repeats.len() >= FEWEST;
    if repeated(latency) && other.is_some_and(repeated) { &latency.repeats } else { &latency.times }
}

/// A case in words.
fn words(case: &Case) -> String {
    let Case { name, store, dtype, head_dim_qk, head_dim_v, mask, batch, heads, kv_heads, q_len, kv_len } = case;
    let dims = if head_dim_qk == head_dim_v { head_dim_qk.to_string() } else { format!("{head_dim_qk}/{head_dim_v}") };
    let mut words = format!("{dtype} d{dims} {mask} b{batch} h{heads}/{kv_heads} {q_len}x{kv_len}");
    for more in [name, store].into_iter().flatten() {
        words.push_str(&format!(" {more}"));
    }
    words
}

/// Between these the ratio of two medians lies.
fn interval(before: &[f64], after: &[f64], ratio: f64) -> Option<[f64; 2]> {
    let deviation = |samples: &[f64]| {
        let logs: Vec<f64> = samples.iter().map(|us| us.ln()).collect();
        let [low, high] = median_bounds(&logs, MEDIAN_DEVIATIONS)?;
        let variance = ((high - low) / (2.0 * MEDIAN_DEVIATIONS)).powi(2);
        // So many times fewer samples, if each is like the one before it.
        let alike = resemblance(&logs).clamp(0.0, 0.9);
        Some(variance * (1.0 + alike) / (1.0 - alike))
    };
    let width = DEVIATIONS * (deviation(before)? + deviation(after)?).sqrt();
    Some([ratio * (-width).exp(), ratio * width.exp()])
}

/// Two values that the true median lies between.
pub(crate) fn median_bounds(samples: &[f64], deviations: f64) -> Option<[f64; 2]> {
    let n = samples.len();
    // Normal approximation of the binomial quantile; exact enough from five samples on.
    let rank = ((n as f64 + deviations * (n as f64).sqrt()) / 2.0).ceil() as usize;
    if n < FEWEST {
        return None;
    }
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = rank.min(n);
    Some([sorted[n - rank], sorted[rank - 1]])
}

/// How much samples resemble the ones before them: the correlation of their ranks, 0 where they are independent.
fn resemblance(samples: &[f64]) -> f64 {
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by(|&a, &b| samples[a].total_cmp(&samples[b]));
    let mut ranks = vec![0.0; samples.len()];
    let mean = (samples.len() as f64 - 1.0) / 2.0;
    let mut rank = 0;
    while rank < order.len() {
        // Equals share the middle of their ranks.
        let equal = order[rank..].iter().take_while(|&&i| samples[i] == samples[order[rank]]).count();
        for &i in &order[rank..rank + equal] {
            ranks[i] = rank as f64 + (equal as f64 - 1.0) / 2.0 - mean;
        }
        rank += equal;
    }
    let all: f64 = ranks.iter().map(|r| r * r).sum();
    if all == 0.0 { 0.0 } else { ranks.windows(2).map(|w| w[0] * w[1]).sum::<f64>() / all }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::tests::{sample, sample_json};

    /// Samples around `us` with a deviation of a share of it, by a small generator of random numbers.
    fn noisy(us: f64, share: f64, seed: u64, n: usize) -> Vec<f64> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut uniform = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let mut normal = || (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
        (0..n).map(|_| us * (1.0 + share * normal())).collect()
    }

    fn times(samples: Vec<f64>) -> Times {
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        Times { median_us: sorted[sorted.len() / 2], samples, schedule: None }
    }

    fn verdict(before: Vec<f64>, after: Vec<f64>, limit: f64) -> Verdict {
        let [before, after] = [before, after].map(times);
        Compared::new(String::new(), String::new(), true, before, after, limit).verdict
    }

    #[test]
    fn what_is_slower_is_told_and_noise_is_not() {
        assert_eq!(verdict(noisy(100.0, 0.01, 1, 30), noisy(108.0, 0.01, 2, 30), 0.03), Verdict::Slower);
        assert_eq!(verdict(noisy(108.0, 0.01, 1, 30), noisy(100.0, 0.01, 2, 30), 0.03), Verdict::Faster);
        assert_eq!(verdict(noisy(100.0, 0.01, 3, 30), noisy(100.5, 0.01, 4, 30), 0.03), Verdict::Same);
        assert_eq!(verdict(noisy(100.0, 0.3, 5, 30), noisy(104.0, 0.3, 6, 30), 0.03), Verdict::NotConclusive);
        // Four samples say nothing, however alike they are.
        assert_eq!(verdict(vec![100.0; 4], vec![200.0; 4], 0.03), Verdict::NotConclusive);
        assert_eq!(verdict(vec![100.0; 5], vec![200.0; 5], 0.03), Verdict::Slower);
    }

    #[test]
    fn unchanged_cases_at_the_limit_fail_seldom() {
        let failed = |ratio: f64, share: f64, seed: u64| {
            let (before, after) = (noisy(100.0, share, 2 * seed, 30), noisy(100.0 * ratio, share, 2 * seed + 1, 30));
            verdict(before, after, 0.03) == Verdict::Slower
        };
        let of_thousand = |ratio: f64, share: f64| (1..=1000).filter(|&seed| failed(ratio, share, seed)).count();
        // Half a percent by the confidence, at the limit itself.
        assert!(of_thousand(1.03, 0.02) <= 15, "{}", of_thousand(1.03, 0.02));
        assert_eq!(of_thousand(1.0, 0.02), 0);
        assert!(of_thousand(1.08, 0.02) >= 990, "{}", of_thousand(1.08, 0.02));
    }

    #[test]
    fn samples_that_drift_count_for_fewer() {
        let calm = noisy(100.0, 0.02, 7, 40);
        let mut drifting = calm.clone();
        drifting.sort_by(f64::total_cmp);
        let width = |samples: &[f64]| interval(samples, samples, 1.0).map(|[low, high]| high - low).unwrap();
        assert!(resemblance(&calm).abs() < 0.4 && resemblance(&drifting) > 0.8);
        assert!(width(&drifting) > 2.0 * width(&calm), "{} {}", width(&drifting), width(&calm));
        assert_eq!(resemblance(&[1.0; 9]), 0.0);
    }

    #[test]
    fn reports_are_paired_by_case_and_contender() {
        let (before, mut after) = (sample(), sample());
        after.points.remove(1);
        after.made.software.insert("flashtune".to_owned(), "0.2.0".to_owned());
        let same = Comparison::of_reports(&before, &after, 0.03);
        assert_eq!(same.cases.len(), 6);
        assert!(same.cases.iter().all(|c| c.ratio == 1.0 && c.verdict == Verdict::NotConclusive));
        assert_eq!((same.unpaired[0].len(), same.unpaired[1].len(), same.mean_ratio), (1, 0, Some(1.0)));
        assert!(same.unpaired[0][0].contains("2048x2048 (flashtune)"), "{:?}", same.unpaired);
        assert_eq!(same.notes, ["flashtune: 0.1.0 before, 0.2.0 after"]);

        // The rounds of the first contender, and the repeats of the other.
        let with = |first: f64, second: f64| {
            let mut report = sample_json();
            report["points"][0]["results"][0]["latency_us"]["times"] = noisy(10.0 * first, 0.005, 3, 30).into();
            report["points"][0]["results"][1]["latency_us"]["repeats"] = noisy(5.0 * second, 0.005, 4, 6).into();
            let medians = [10.0 * first, 5.0 * second];
            for (i, median) in medians.into_iter().enumerate() {
                let latency = &mut report["points"][0]["results"][i]["latency_us"];
                (latency["median"], latency["p90"]) = (median.into(), (2.0 * median).into());
            }
            Report::from_json(&report.to_string()).unwrap()
        };
        let found = Comparison::of_reports(&with(1.0, 1.0), &with(1.1, 1.2), 0.03);
        let case = |contender: &str| {
            found.cases.iter().find(|c| c.contender == contender && c.case.contains("1024x1024")).unwrap()
        };
        assert_eq!((case("flashtune").verdict, case("flashtune").samples), (Verdict::Slower, [30, 30]));
        assert_eq!((case("fa3").verdict, case("fa3").samples), (Verdict::Slower, [6, 6]));
        // A yardstick that became slower is no failure.
        assert_eq!(found.slower().map(|c| c.contender.as_str()).collect::<Vec<_>>(), ["flashtune"]);
        let value = serde_json::to_value(&found).unwrap();
        assert_eq!((&value["format"], &value["cases"][0]["verdict"]), (&1.into(), &"not_conclusive".into()));
    }
}
