//! Searches replayed on tables that were recorded on real devices (`flashtune tune --exhaustive`): how many schedules have
//! to be tried until one is within 1 % of the best, over 100 seeds; never more than picks by chance need.

use super::{Map, Portfolio};
use crate::model::cost;
use flashtune_cache::DeviceFingerprint;
use flashtune_codegen::{Kernel, Problem, Schedule, Shape, ShapeBucket};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde::Deserialize;
use std::path::Path;

/// Tables, the trials of a usual job that a search has, and the most evaluations that median and 90th percentile may
/// need.
const LIMITS: [(&str, usize, usize, usize); 4] = [
    ("h200-bf16-d128-causal-8k", 60, 2, 2),
    ("cpu-bf16-d64-causal-512", 60, 6, 8),
    ("cpu-bf16-d128-decode", 60, 16, 18),
    ("cpu-f32-d128-full-256", 60, 4, 6),
];
const SEEDS: u64 = 100;
const ENOUGH: f64 = 0.99;

#[derive(Deserialize)]
struct Table {
    device: DeviceFingerprint,
    problem: Problem,
    shape: Shape,
    /// Microseconds of every schedule; none for those that failed.
    trials: Vec<(Schedule, Option<f64>)>,
}

/// A table in the model's order.
struct Replay {
    costs: Vec<f64>,
    map: Map,
    default: usize,
    times: Vec<Option<f64>>,
    best: f64,
}

fn load(name: &str) -> Replay {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/tables").join(format!("{name}.json"));
    let table: Table = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let kernel = |schedule| Kernel { problem: table.problem, schedule, arch: table.device.arch };
    let mut rows: Vec<(f64, Schedule, Option<f64>)> =
        table.trials.iter().map(|(s, us)| (cost(&kernel(*s), &table.shape, &table.device), *s, *us)).collect();
    rows.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let family = rows[0].1.family();
    let bucket = ShapeBucket::of(&table.shape);
    let default = Schedule::default_for(family, &table.problem, table.device.arch, &bucket).unwrap();
    Replay {
        costs: rows.iter().map(|r| r.0).collect(),
        map: Map::new(rows.iter().map(|r| r.1)),
        // A table that was recorded before the default changed begins with the model's best.
        default: rows.iter().position(|r| r.1 == default).unwrap_or(0),
        times: rows.iter().map(|r| r.2).collect(),
        best: rows.iter().filter_map(|r| r.2).fold(f64::INFINITY, f64::min),
    }
}

impl Replay {
    /// Evaluations until one is good enough; none when the search ends before.
    fn evaluations(&self, max_trials: usize, seed: u64) -> Option<usize> {
        let mut search = Portfolio::new(&self.costs, self.map.clone(), self.default, &[], max_trials, seed);
        let mut count = 0;
        loop {
            let batch = search.next(usize::MAX);
            if batch.is_empty() {
                return None;
            }
            for i in batch {
                count += 1;
                if self.times[i].is_some_and(|us| us * ENOUGH <= self.best) {
                    return Some(count);
                }
                search.report(i, self.times[i]);
            }
        }
    }

    /// The same for picks by chance.
    fn by_chance(&self, seed: u64) -> usize {
        let mut order: Vec<usize> = (0..self.times.len()).collect();
        order.shuffle(&mut StdRng::seed_from_u64(seed));
        let good = |i: &usize| self.times[*i].is_some_and(|us| us * ENOUGH <= self.best);
        order.iter().position(good).expect("the best is good enough") + 1
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
        let found: Vec<usize> =
            (0..SEEDS).map(|seed| replay.evaluations(max_trials, seed).unwrap_or(usize::MAX)).collect();
        let chance: Vec<usize> = (0..SEEDS).map(|seed| replay.by_chance(seed)).collect();
        let (median, p90) = (quantile(found.clone(), 50), quantile(found.clone(), 90));
        let missed = found.iter().filter(|n| **n == usize::MAX).count();
        println!(
            "{name}: {} schedules; to 99 % of the best {median} (p90 {p90}, {missed} of {SEEDS} never), by chance {} (p90 {})",
            replay.times.len(),
            quantile(chance.clone(), 50),
            quantile(chance.clone(), 90),
        );
        let by_chance = (quantile(chance.clone(), 50), quantile(chance, 90));
        if median > median_limit || p90 > p90_limit || median > by_chance.0 || p90 >= by_chance.1 {
            failures.push(name);
        }
    }
    assert!(failures.is_empty(), "{failures:?} took longer than their limits");
}
