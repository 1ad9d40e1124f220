//! Searches replayed on tables that were recorded on real devices (`flashtune tune --exhaustive`): how many schedules
//! have to be tried until one is within 1 % of the best, over 100 seeds; never more than picks by chance need.

use super::{Hint, Map, Portfolio, SMALLEST_BATCH};
use crate::cost::cost;
use crate::tune::Pace;
use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::{Family, Kernel, Problem, Schedule, Shape, ShapeBucket};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use serde::Deserialize;
use std::collections::{HashSet, VecDeque};
use std::path::{Path, PathBuf};

/// Tables, the trials of a usual job that a search has, and the most evaluations that median and 90th percentile may
/// need.
const LIMITS: [(&str, usize, usize, usize); 7] = [
    ("h200-bf16-d128-causal-8k", 60, 2, 2),
    ("h200-bf16-d128-full-2k", 60, 2, 2),
    ("h200-bf16-d64-causal-2k", 60, 2, 2),
    ("h200-bf16-d256-causal-2k", 60, 2, 2),
    ("cpu-bf16-d64-causal-512", 60, 6, 8),
    ("cpu-bf16-d128-decode", 60, 16, 18),
    ("cpu-f32-d128-full-256", 60, 4, 6),
];
/// A space of `forward/sm80` that an H200 timed to its last schedule, three of 438 within 1 % of the best, and one of
/// `forward/sm90` with all that were legal but eleven, the last by the cost model: five of 2913, of which 1598 have
/// fields and values that there still are. The most evaluations that any search may need to meet one of those, and how
/// far behind the best it may end.
const TIMED_WHOLE: [(&str, usize, f64); 2] =
    [("h200-bf16-d256-causal-keys-2k", 20, 1.015), ("h200-bf16-d256-causal-whole-2k", 10, 1.005)];
const SEEDS: u64 = 100;
/// Searches that are followed to their ends.
const WHOLE: u64 = 5;
const ENOUGH: f64 = 0.99;

/// What a device took for many schedules of a problem.
#[derive(Deserialize)]
pub(crate) struct Table {
    pub device: DeviceFingerprint,
    pub problem: Problem,
    pub shape: Shape,
    /// Microseconds of every schedule; none for those that failed.
    #[serde(deserialize_with = "with_todays_fields")]
    pub trials: Vec<(Schedule, Option<f64>)>,
}

/// Values that a field of `forward/sm90` had when tables were recorded, and that no kernel has any more.
const RETIRED: [&str; 2] = [r#""p_in_shared":true"#, r#""cluster":2"#];

/// The trials of kernels that there still are.
fn with_todays_fields<'de, D: serde::Deserializer<'de>>(table: D) -> Result<Vec<(Schedule, Option<f64>)>, D::Error> {
    let recorded = Vec::<(serde_json::Value, Option<f64>)>::deserialize(table)?;
    let mut left = Vec::new();
    for (mut schedule, us) in recorded {
        let text = schedule.to_string();
        if RETIRED.iter().any(|value| text.contains(value)) {
            continue;
        }
        for fields in schedule.as_object_mut().into_iter().flat_map(|family| family.values_mut()) {
            // Tables are older than the rule that a default is not stored.
            fields.as_object_mut().map(|fields| fields.remove("p_in_shared"));
        }
        left.push((serde_json::from_value(schedule).map_err(serde::de::Error::custom)?, us));
    }
    Ok(left)
}

/// Every table there is, by name.
pub(crate) fn tables() -> Vec<(&'static str, Table)> {
    LIMITS.iter().map(|l| l.0).chain(LENGTHS).map(|name| (name, read(name))).collect()
}

impl Table {
    /// The trials without those of `forward/sm90` that a search may no longer propose: spaces had more dimensions
    /// when the tables were recorded. A replay takes a table as it is, since it tests the search and not the space.
    pub(crate) fn in_the_space(&self) -> Vec<(Schedule, Option<f64>)> {
        let space: HashSet<Schedule> = match Family::ForwardSm90.supports(&self.problem, self.device.arch) {
            Ok(()) => Schedule::space(Family::ForwardSm90, &self.problem, self.device.arch).into_iter().collect(),
            Err(_) => HashSet::new(),
        };
        let is_in = |s: &Schedule| s.family() != Family::ForwardSm90 || space.contains(s);
        self.trials.iter().filter(|(s, _)| is_in(s)).copied().collect()
    }
}

fn path_of(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/tables").join(format!("{name}.json"))
}

fn read(name: &str) -> Table {
    serde_json::from_slice(&std::fs::read(path_of(name)).unwrap()).unwrap()
}

/// What left the space was beaten: no recorded table has its best among that, be it a schedule or a field's value.
#[test]
fn schedules_that_left_the_space_were_the_best_of_no_table() {
    for name in LIMITS.iter().map(|l| l.0).chain(LENGTHS).chain(TIMED_WHOLE.map(|t| t.0)) {
        let table = read(name);
        let best = |trials: &[(Schedule, Option<f64>)]| trials.iter().filter_map(|t| t.1).fold(f64::INFINITY, f64::min);
        let recorded: serde_json::Value = serde_json::from_slice(&std::fs::read(path_of(name)).unwrap()).unwrap();
        let all = recorded["trials"].as_array().unwrap();
        let best_of_all = all.iter().filter_map(|trial| trial[1].as_f64()).fold(f64::INFINITY, f64::min);
        let left = table.in_the_space();
        let counts = [left.len(), table.trials.len(), all.len()];
        println!("{name}: {counts:?} are in the space, have today's fields, and were timed; the best {best_of_all} us");
        assert_eq!(best(&left), best_of_all, "{name}");
    }
}

/// A table in the cost model's order.
#[derive(Clone)]
pub(super) struct Replay {
    device: DeviceFingerprint,
    problem: Problem,
    shape: Shape,
    schedules: Vec<Schedule>,
    costs: Vec<f64>,
    map: Map,
    default: usize,
    pub times: Vec<Option<f64>>,
    best: f64,
}

pub(super) fn load(name: &str) -> Replay {
    let table = read(name);
    let kernel = |schedule| Kernel { problem: table.problem, schedule, arch: table.device.arch };
    let mut rows: Vec<(f64, Schedule, Option<f64>)> =
        table.trials.iter().map(|(s, us)| (cost(&kernel(*s), &table.shape, &table.device), *s, *us)).collect();
    rows.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let family = rows[0].1.family();
    let bucket = ShapeBucket::of(&table.shape);
    let default = Schedule::default_for(family, &table.problem, table.device.arch, &bucket).unwrap();
    Replay {
        schedules: rows.iter().map(|r| r.1).collect(),
        costs: rows.iter().map(|r| r.0).collect(),
        map: Map::new(rows.iter().map(|r| r.1)),
        // A table that was recorded before the default changed begins with the cost model's best.
        default: rows.iter().position(|r| r.1 == default).unwrap_or(0),
        times: rows.iter().map(|r| r.2).collect(),
        best: rows.iter().filter_map(|r| r.2).fold(f64::INFINITY, f64::min),
        device: table.device,
        problem: table.problem,
        shape: table.shape,
    }
}

/// The times of every recorded space that is not larger than what a search would race.
pub(crate) fn recorded_times() -> Vec<Vec<f64>> {
    LIMITS
        .iter()
        .map(|l| l.0)
        .chain([TIMED_WHOLE[0].0])
        .map(|name| load(name).times.into_iter().flatten().collect())
        .collect()
}

/// What a search came to.
struct Ended {
    /// What was tried, in order.
    tried: Vec<usize>,
    /// Time of the best of it over the best of all.
    behind: f64,
}

impl Replay {
    /// Evaluations until one is good enough, none when the search ends before. With `ahead`, so many batches are
    /// proposed before the results of one are known.
    fn evaluations(&self, search: Portfolio, ahead: usize) -> Option<usize> {
        let good = |i: usize| self.times[i].is_some_and(|us| us * ENOUGH <= self.best);
        self.follow(search, ahead, good).ok()
    }

    /// Evaluations until one of which `enough` is true, or else until the search ends.
    fn follow(&self, mut search: Portfolio, ahead: usize, enough: impl Fn(usize) -> bool) -> Result<usize, usize> {
        let mut under_way = VecDeque::new();
        let mut count = 0;
        loop {
            let batch = search.next(usize::MAX);
            let is_waiting = batch.is_empty();
            for &i in &batch {
                count += 1;
                if enough(i) {
                    return Ok(count);
                }
            }
            if !is_waiting {
                under_way.push_back(batch);
                if under_way.len() <= ahead {
                    continue;
                }
            }
            let Some(oldest): Option<Vec<usize>> = under_way.pop_front() else { return Err(count) };
            oldest.into_iter().for_each(|i| search.report(i, self.times[i]));
        }
    }

    pub(crate) fn search(&self, seeds: &[usize], max_trials: usize, seed: u64) -> Portfolio {
        Portfolio::new(&self.costs, self.map.clone(), self.default, seeds, max_trials, seed)
    }

    /// A search to its end.
    fn run(&self, mut search: Portfolio) -> Ended {
        let mut tried = Vec::new();
        loop {
            let batch = search.next(usize::MAX);
            if batch.is_empty() {
                let best = tried.iter().filter_map(|i| self.times[*i]).fold(f64::INFINITY, f64::min);
                return Ended { behind: best / self.best, tried };
            }
            batch.iter().for_each(|i| search.report(*i, self.times[*i]));
            tried.extend(batch);
        }
    }

    /// A search here that is led by what a search of another size has tried: its best are seeds, its times hints. Gives
    /// also how many of the tried were not tried there.
    fn led(&self, other: &Replay, seed: u64) -> (Ended, usize) {
        let cold = other.run(other.search(&[], TRIALS, seed)).tried;
        let (search, hints) = self.led_by(other, &cold, seed);
        let ended = self.run(search);
        let new = ended.tried.iter().filter(|i| !hints.contains(i)).count();
        (ended, new)
    }

    /// A search here that is led by those that were tried at another size, and which schedules they are here.
    pub(crate) fn led_by(&self, other: &Replay, tried: &[usize], seed: u64) -> (Portfolio, Vec<usize>) {
        let hint = |i: &usize| {
            let kernel = Kernel { problem: self.problem, schedule: other.schedules[*i], arch: self.device.arch };
            let schedule = self.schedules.iter().position(|s| *s == kernel.schedule)?;
            Some(Hint { schedule, us: other.times[*i]?, cost: cost(&kernel, &other.shape, &other.device) })
        };
        let mut hints: Vec<Hint> = tried.iter().filter_map(hint).collect();
        hints.sort_by(|a, b| a.us.total_cmp(&b.us));
        let seeds: Vec<usize> = hints.iter().take(4).map(|h| h.schedule).collect();
        let there = hints.iter().map(|h| h.schedule).collect();
        (self.search(&seeds, TRIALS, seed).led_by(hints), there)
    }

    /// As if it had been recorded at other sizes: each time is another by a factor of its own, whose logarithm spreads
    /// by so much.
    fn elsewhere(&self, spread: f64, seed: u64) -> Replay {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut other = |us: f64| {
            let normal = (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
            2.5 * us * (spread * normal).exp()
        };
        let times: Vec<Option<f64>> = self.times.iter().map(|us| us.map(&mut other)).collect();
        let best = times.iter().copied().flatten().fold(f64::INFINITY, f64::min);
        Replay { times, best, ..self.clone() }
    }

    /// Whether all of it is tried without a search.
    fn is_small(&self, max_trials: usize) -> bool {
        self.times.len() <= max_trials
    }

    /// The same for picks by chance.
    fn by_chance(&self, seed: u64) -> usize {
        let mut order: Vec<usize> = (0..self.times.len()).collect();
        order.shuffle(&mut StdRng::seed_from_u64(seed));
        let good = |i: &usize| self.times[*i].is_some_and(|us| us * ENOUGH <= self.best);
        order.iter().position(good).expect("the best is good enough") + 1
    }
}

/// The trials of a usual job.
pub(super) const TRIALS: usize = 60;

/// Median and 90th percentile.
pub(super) fn quantiles(all: impl Iterator<Item = f64>) -> (f64, f64) {
    let mut all: Vec<f64> = all.collect();
    all.sort_by(f64::total_cmp);
    (all[all.len() / 2], all[all.len() * 9 / 10])
}

/// Tables of the same schedules at three lengths, each twice the one before.
pub(super) const LENGTHS: [&str; 3] =
    ["h200-bf16-d128-causal-three-2k", "h200-bf16-d128-causal-three-4k", "h200-bf16-d128-causal-three-8k"];

#[test]
fn a_recorded_neighbour_makes_a_search_short_and_hardly_worse() {
    const SEEDS: u64 = 20;
    let tables = LENGTHS.map(load);
    for (from, to) in [(0, 1), (1, 2), (2, 1), (1, 0), (0, 2), (2, 0)] {
        let (other, here) = (&tables[from], &tables[to]);
        let cold: Vec<Ended> = (0..SEEDS).map(|seed| here.run(here.search(&[], TRIALS, seed))).collect();
        let led: Vec<(Ended, usize)> = (0..SEEDS).map(|seed| here.led(other, seed)).collect();
        let cold_tried = quantiles(cold.iter().map(|e| e.tried.len() as f64)).0;
        let tried = quantiles(led.iter().map(|(e, _)| e.tried.len() as f64));
        let new = quantiles(led.iter().map(|(_, new)| *new as f64));
        let behind = quantiles(led.iter().map(|(e, _)| e.behind));
        let (from, to) = (LENGTHS[from], LENGTHS[to]);
        println!("{from} leads {to}: {tried:?} tried, {new:?} new, {behind:.4?} of the best; {cold_tried} without");
        assert!(tried.0 * 2.0 <= cold_tried && new.0 <= 8.0, "{from} leads {to}: {tried:?} tried, {new:?} new");
        assert!(behind.1 <= 1.01, "{from} leads {to}: {behind:?} of the best");
    }
}

/// Spread of the neighbour's times around those here, and the most that may be tried in the median: all that a search
/// without one tries, where it misleads.
const NEIGHBOURS: [(f64, f64); 3] = [(0.02, 18.0), (0.05, 24.0), (0.3, 52.0)];

#[test]
fn a_neighbour_makes_a_search_short_and_one_that_misleads_is_not_followed() {
    const SEEDS: u64 = 10;
    for (name, ..) in LIMITS {
        let here = load(name);
        let cold: Vec<Ended> = (0..SEEDS).map(|seed| here.run(here.search(&[], TRIALS, seed))).collect();
        let cold_tried = quantiles(cold.iter().map(|e| e.tried.len() as f64)).0;
        for (spread, most) in NEIGHBOURS {
            let led: Vec<(Ended, usize)> =
                (0..SEEDS).map(|seed| here.led(&here.elsewhere(spread, seed), seed)).collect();
            let tried = quantiles(led.iter().map(|(e, _)| e.tried.len() as f64));
            let new = quantiles(led.iter().map(|(_, new)| *new as f64));
            let behind = quantiles(led.iter().map(|(e, _)| e.behind));
            println!(
                "{name}, {spread} apart: {tried:?} tried, {new:?} new, {behind:.4?} of the best; {cold_tried} without"
            );
            // The medians of ten searches are known to a few trials.
            assert!(tried.0 <= most.min(cold_tried * 1.1), "{name}, {spread} apart: {tried:?} were tried");
            assert!(behind.1 <= 1.01, "{name}, {spread} apart: {behind:?} of the best");
            // What was tried there is compiled: a few new ones are left.
            assert!(spread > 0.1 || new.0 <= 8.0, "{name}, {spread} apart: {new:?} were new");
        }
    }
}

#[test]
fn searches_of_recorded_tables_find_the_best_soon() {
    let mut failures = Vec::new();
    for (name, max_trials, median_limit, p90_limit) in LIMITS {
        let replay = load(name);
        let quantile = |mut counts: Vec<usize>, p: usize| {
            counts.sort_unstable();
            counts[counts.len() * p / 100]
        };
        let found = |batch: usize, ahead: usize| -> (Vec<usize>, usize) {
            let search = |seed| replay.search(&[], max_trials, seed).in_batches_of(batch);
            let whole = (0..WHOLE).map(|seed| replay.follow(search(seed), ahead, |_| false).unwrap_err());
            let whole = quantile(whole.collect(), 50);
            ((0..SEEDS).map(|seed| replay.evaluations(search(seed), ahead).unwrap_or(usize::MAX)).collect(), whole)
        };
        let at_once = found(SMALLEST_BATCH, 0);
        let pace = Pace::of(16, true);
        let ahead = found(pace.batch, pace.ahead);
        let chance: Vec<usize> = (0..SEEDS).map(|seed| replay.by_chance(seed)).collect();
        let by_chance = (quantile(chance.clone(), 50), quantile(chance, 90));
        // Ahead of the results, in batches as beside 16 cores, it may take no longer.
        for (how, (found, all)) in [("at once", at_once), ("ahead of the results", ahead)] {
            let (median, p90) = (quantile(found.clone(), 50), quantile(found.clone(), 90));
            let missed = found.iter().filter(|n| **n == usize::MAX).count();
            println!(
                "{name}, {how}: {} schedules; to 99 % of the best {median} (p90 {p90}, {missed} of {SEEDS} never), \
                 {all} in all, by chance {} (p90 {})",
                replay.times.len(),
                by_chance.0,
                by_chance.1
            );
            // Nor does going ahead make a search longer.
            let is_long = !replay.is_small(max_trials) && all > 2 * max_trials / 3;
            if is_long || median > median_limit || p90 > p90_limit || median > by_chance.0 || p90 >= by_chance.1 {
                failures.push(format!("{name}, {how}"));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:?} took longer than their limits");
}

/// Where the cost model knows little of who is best, batches as beside 16 cores still meet one of the best, and small
/// ones end close.
#[test]
fn a_search_of_a_space_that_was_timed_whole_ends_close_to_its_best() {
    let pace = Pace::of(16, true);
    for (name, most, furthest) in TIMED_WHOLE {
        let replay = load(name);
        let search = |seed| replay.search(&[], TRIALS, seed);
        let ahead: Vec<Option<usize>> =
            (0..SEEDS).map(|seed| replay.evaluations(search(seed).in_batches_of(pace.batch), pace.ahead)).collect();
        let chance = quantiles((0..SEEDS).map(|seed| replay.by_chance(seed) as f64));
        let ends: Vec<Ended> = (0..SEEDS).map(|seed| replay.run(search(seed))).collect();
        let behind = quantiles(ends.iter().map(|e| e.behind));
        let tried = quantiles(ends.iter().map(|e| e.tried.len() as f64));
        println!("{name}: {ahead:?}; by chance {chance:?}; ends {behind:.4?} of the best after {tried:?}");
        assert!(ahead.iter().all(|n| n.is_some_and(|n| n <= most)), "{name}: {ahead:?}");
        assert!(behind.1 <= furthest && tried.0 <= 45.0, "{name}: {behind:?} of the best after {tried:?}");
    }
}
