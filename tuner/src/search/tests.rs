//! Searches over spaces on paper.

use super::*;
use flashtune_codegen::{Arch, DType, Family, MaskKind, Problem, Schedule, SmArch};
use std::collections::BTreeSet;

/// A space of the sm80 family with a cost model that is off by a factor that changes slowly over the space.
struct Paper {
    map: Map,
    costs: Vec<f64>,
    times: Vec<f64>,
}

fn paper(off: f64) -> Paper {
    let problem = Problem::forward(DType::F16, 64, MaskKind::CAUSAL).unwrap();
    let arch = Arch::Sm(SmArch { number: 80, specific: false });
    let space: Vec<_> = Schedule::space(Family::ForwardSm80, &problem, arch).into_iter().take(900).collect();
    let map = Map::new(space.iter().copied());
    // Times rise with the distance from one schedule, the cost model's with that from another.
    let (true_best, model_best) = (space.len() / 3, space.len() / 2);
    let rise =
        |from: usize| (0..space.len()).map(|i| 100.0 * 1.06f64.powi(map.steps(from, i) as i32)).collect::<Vec<_>>();
    let (times, model) = (rise(true_best), rise(model_best));
    let costs = times.iter().zip(&model).map(|(t, m)| t.powf(1.0 - off) * m.powf(off)).collect();
    Paper { map, costs, times }
}

/// Runs a search to its end; gives the tried in order.
fn search(paper: &Paper, max_trials: usize, seeds: &[usize], seed: u64, fails: impl Fn(usize) -> bool) -> Vec<usize> {
    let mut search = Portfolio::new(&paper.costs, paper.map.clone(), 7, seeds, max_trials, seed);
    let mut tried = Vec::new();
    loop {
        let batch = search.next(usize::MAX);
        if batch.is_empty() {
            return tried;
        }
        for i in batch {
            search.report(i, (!fails(i)).then(|| paper.times[i]));
            tried.push(i);
        }
    }
}

#[test]
fn nothing_is_tried_twice_and_the_default_goes_first() {
    let paper = paper(0.8);
    for max_trials in [0, 1, 2, 9, 60, 400, 5000] {
        let tried = search(&paper, max_trials, &[3, 7, 99], 1, |i| i % 5 == 0);
        let distinct: BTreeSet<_> = tried.iter().collect();
        assert_eq!((distinct.len(), tried[0]), (tried.len(), 7));
        assert!(tried.len() <= max_trials.max(1));
        if max_trials >= paper.times.len() {
            assert_eq!(tried.len(), paper.times.len(), "what fits altogether is tried altogether");
        }
        if max_trials > 20 {
            assert!(tried[1] == 3 && tried[2] == 99, "seeds come next: {:?}", &tried[..5]);
        }
    }
}

#[test]
fn the_seed_decides_what_is_explored_and_equal_seeds_repeat() {
    let paper = paper(0.8);
    let run = |seed| search(&paper, 60, &[], seed, |_| false);
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn measurements_lead_where_the_model_does_not() {
    let paper = paper(0.9);
    let best = paper.times.iter().copied().fold(f64::INFINITY, f64::min);
    let of = |tried: &[usize]| tried.iter().map(|&i| paper.times[i]).fold(f64::INFINITY, f64::min) / best;
    let by_model: Vec<usize> = {
        let mut order: Vec<usize> = (0..paper.costs.len()).collect();
        order.sort_by(|&a, &b| paper.costs[a].total_cmp(&paper.costs[b]));
        order.truncate(60);
        order
    };
    for seed in 0..20 {
        let found = of(&search(&paper, 60, &[], seed, |_| false));
        assert!(found < 1.07 && found < of(&by_model), "seed {seed}: {found}, the cost model alone {}", of(&by_model));
    }
}

#[test]
fn failures_speak_against_their_neighbours() {
    let paper = paper(0.9);
    // A region around the cost model's favourite does not work at all.
    let favourite = paper.costs.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
    let fails = |i: usize| i != 7 && paper.map.steps(favourite, i) <= 4;
    let wasted = |known: bool| {
        let mut search = Portfolio::new(&paper.costs, paper.map.clone(), 7, &[], 60, 3);
        if known {
            (0..paper.costs.len()).filter(|&i| fails(i)).for_each(|i| search.fails(i));
        }
        let mut tried = Vec::new();
        loop {
            let batch = search.next(usize::MAX);
            if batch.is_empty() {
                break tried;
            }
            for i in batch {
                search.report(i, (!fails(i)).then(|| paper.times[i]));
                tried.push(fails(i));
            }
        }
    };
    let learning = wasted(false);
    let (first, later) = learning.split_at(21);
    let share = |part: &[bool]| part.iter().filter(|f| **f).count() as f64 / part.len() as f64;
    assert!(share(later) < share(first) / 2.0, "{} then {}", share(first), share(later));
    assert_eq!(share(&wasted(true)), 0.0, "what is known to fail is not tried");
}

#[test]
fn a_bad_seed_costs_its_trial_and_no_more() {
    let paper = paper(0.5);
    let slowest = paper.times.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
    let best = paper.times.iter().copied().fold(f64::INFINITY, f64::min);
    for seed in 0..10 {
        let tried = search(&paper, 60, &[slowest; 6], seed, |_| false);
        let found = tried.iter().map(|&i| paper.times[i]).fold(f64::INFINITY, f64::min);
        assert!(found / best < 1.07, "seed {seed}: {}", found / best);
    }
}
