//! How long tunings take: searches of recorded tables with the times that an H200 and the 16 cores beside it took,
//! event by event on a clock of its own. Compilers take orders as they come; the device checks and samples what they
//! are done with; a batch is reported when it is whole, in order, as in `tune/field.rs`.

use super::Portfolio;
use super::replay::{LENGTHS, Replay, TRIALS, load, quantiles};
use crate::tune::Pace;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::{HashSet, VecDeque};
use std::ops::Range;

/// Seconds, as they were measured (docs/measured/log/2026-11-21-h200-service.md): a compilation, alone and while all
/// cores have one; the checks and first samples of a candidate; opening the device and making inputs; race, final and
/// publication.
const COMPILATION: Range<f64> = 1.8..2.9;
const CHECKS: f64 = 0.065;
const START: f64 = 0.5;
const END: f64 = 0.6;
const CORES: usize = 16;
const SEEDS: u64 = 20;

/// What a tuning came to.
struct Tuned {
    seconds: f64,
    tried: Vec<usize>,
    /// Seconds for which the device had work, from the first kernel until the last one was looked at, and all of them.
    busy: f64,
    measuring: f64,
}

/// One tuning; the kernels of `there` are compiled already.
fn tuned(replay: &Replay, mut search: Portfolio, pace: &Pace, there: &HashSet<usize>, seed: u64) -> Tuned {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut compilers = vec![0.0f64; pace.compilers];
    let (mut now, mut busy, mut first) = (START, 0.0, None);
    let mut batches: VecDeque<Vec<usize>> = VecDeque::new();
    // What is ordered and not looked at, with the time when it is compiled.
    let mut ordered: Vec<(f64, usize)> = Vec::new();
    let (mut settled, mut tried) = (HashSet::new(), Vec::new());
    loop {
        // Orders are given when the device has looked at what was there, which is when others are reported.
        let ordered_at = if tried.is_empty() { 0.0 } else { now };
        while batches.len() <= if search.is_led() { 0 } else { pace.ahead } {
            let batch = search.next(usize::MAX);
            if batch.is_empty() {
                break;
            }
            for &i in &batch {
                let free = compilers.iter_mut().min_by(|a, b| a.total_cmp(b)).expect("there is one");
                if there.contains(&i) {
                    ordered.push((ordered_at, i));
                } else {
                    *free = free.max(ordered_at) + rng.random_range(COMPILATION);
                    ordered.push((*free, i));
                }
            }
            tried.extend(&batch);
            batches.push_back(batch);
        }
        let Some(oldest) = batches.front() else { break };
        // In turn, a batch is compiled before any of it is looked at.
        let ready = ordered.iter().map(|o| o.0).fold(f64::INFINITY, f64::min);
        let whole = ordered.iter().map(|o| o.0).fold(0.0, f64::max);
        now = now.max(if pace.ahead > 0 { ready } else { whole });
        first.get_or_insert(now);
        let (done, rest): (Vec<_>, Vec<_>) = ordered.into_iter().partition(|o| o.0 <= now);
        ordered = rest;
        now += CHECKS * done.len() as f64;
        busy += CHECKS * done.len() as f64;
        settled.extend(done.into_iter().map(|o| o.1));
        if oldest.iter().all(|i| settled.contains(i)) {
            for i in batches.pop_front().expect("it was just looked at") {
                search.report(i, replay.times[i]);
            }
        }
    }
    Tuned { seconds: now + END, tried, busy, measuring: now - first.unwrap_or(now) }
}

/// A tuning in an empty cache.
fn cold(replay: &Replay, pace: &Pace, seed: u64) -> Tuned {
    let search = replay.search(&[], TRIALS, seed).in_batches_of(pace.batch);
    tuned(replay, search, pace, &HashSet::new(), seed)
}

#[test]
fn a_tuning_takes_ten_seconds_on_sixteen_cores_and_a_family_a_minute() {
    let pace = Pace::of(CORES, true);
    let tables = LENGTHS.map(load);
    for (name, table) in LENGTHS.iter().zip(&tables) {
        let all: Vec<Tuned> = (0..SEEDS).map(|seed| cold(table, &pace, seed)).collect();
        let seconds = quantiles(all.iter().map(|t| t.seconds));
        let busy = quantiles(all.iter().map(|t| t.busy / t.measuring));
        let tried = quantiles(all.iter().map(|t| t.tried.len() as f64));
        // As the cpu does it, and as it was done everywhere once.
        let in_turn = quantiles((0..SEEDS).map(|seed| cold(table, &Pace::of(CORES, false), seed).seconds));
        println!(
            "{name}: {seconds:.1?} s for {tried:?} trials, {in_turn:.1?} s in turn; checks take {busy:.2?} of the \
             device"
        );
        assert!(seconds.1 <= 10.0 && seconds.0 < in_turn.0 * 0.9, "{name}: {seconds:?} s, {in_turn:?} in turn");
    }
    // One length after the other, each led by the one before, whose kernels are there.
    let family = |seed| {
        let first = cold(&tables[1], &pace, seed);
        let led: f64 = [0, 2].into_iter().map(|i| warm(&tables[i], &tables[1], &first.tried, &pace, seed)).sum();
        (first.seconds + led, led / 2.0)
    };
    let all: Vec<(f64, f64)> = (0..SEEDS).map(family).collect();
    let (together, warm) = (quantiles(all.iter().map(|f| f.0)), quantiles(all.iter().map(|f| f.1)));
    println!("a family of three lengths: {together:.1?} s; one beside another {warm:.1?} s");
    assert!(together.1 <= 60.0 && warm.1 <= 10.0, "{together:?} {warm:?}");
}

/// Seconds of a tuning beside that of another size.
fn warm(replay: &Replay, other: &Replay, tried: &[usize], pace: &Pace, seed: u64) -> f64 {
    let (search, there) = replay.led_by(other, tried, seed);
    let there = there.into_iter().collect();
    tuned(replay, search.in_batches_of(pace.batch), pace, &there, seed).seconds
}
