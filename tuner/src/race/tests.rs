//! Races on a device that exists on paper: true times, noise, failures and a clock, all from a seed.

use super::*;
use crate::decide::{FinalRules, decide, run_final};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, StandardNormal};

/// How samples spread.
#[derive(Debug, Clone, Copy)]
enum Noise {
    /// Up to so much above the true time.
    Above(f64),
    /// Normal, with that deviation, relative to the true time.
    Normal(f64),
    /// The logarithm is normal.
    LogNormal(f64),
    /// A factor for all samples of a round, and a tenth of it for each.
    Common(f64),
}

/// A device whose true times are known.
struct Paper {
    true_us: Vec<f64>,
    noise: Noise,
    /// That of the round: its factor, and who had a sample in it.
    round: (f64, Vec<usize>),
    /// Chance that a sample is disturbed and takes several times as long.
    spikes: f64,
    /// Contenders that fail from their n-th sample on.
    breaks: Vec<(usize, usize)>,
    /// Single runs (contender, which of its runs) that take four times as long.
    slow_runs: Vec<(usize, usize)>,
    counts: Vec<usize>,
    rng: StdRng,
    clock_us: f64,
}

impl Paper {
    fn new(true_us: &[f64], noise: f64, spikes: f64, seed: u64) -> Self {
        Self::with(true_us, Noise::Above(noise), spikes, seed)
    }

    fn with(true_us: &[f64], noise: Noise, spikes: f64, seed: u64) -> Self {
        Self {
            true_us: true_us.to_vec(),
            noise,
            round: (1.0, Vec::new()),
            spikes,
            breaks: Vec::new(),
            slow_runs: Vec::new(),
            counts: vec![0; true_us.len()],
            rng: StdRng::seed_from_u64(seed),
            clock_us: 0.0,
        }
    }

    /// What noise makes of a sample.
    fn factor(&mut self, contender: usize) -> f64 {
        let mut normal = || -> f64 { StandardNormal.sample(&mut self.rng) };
        match self.noise {
            Noise::Above(most) => 1.0 + most * self.rng.random::<f64>(),
            Noise::Normal(deviation) => (1.0 + deviation * normal()).max(0.05),
            Noise::LogNormal(deviation) => (deviation * normal()).exp(),
            Noise::Common(deviation) => {
                let (of_all, own) = ((deviation * normal()).exp(), (0.1 * deviation * normal()).exp());
                // Who has a second one is in the next round; the cold first run is nobody's.
                if self.counts[contender] > 1 {
                    if self.round.1.is_empty() || self.round.1.contains(&contender) {
                        self.round = (of_all, Vec::new());
                    }
                    self.round.1.push(contender);
                }
                self.round.0 * own
            }
        }
    }

    fn total_samples(&self) -> usize {
        self.counts.iter().sum()
    }
}

impl Track for Paper {
    fn sample(&mut self, i: usize) -> Result<f64, String> {
        self.counts[i] += 1;
        if self.breaks.iter().any(|&(who, from)| who == i && self.counts[i] >= from) {
            return Err("launch failed".into());
        }
        let mut us = self.true_us[i] * self.factor(i);
        // The first run is cold, and the machine slows down as it warms up.
        if self.counts[i] == 1 {
            us *= 2.5;
        }
        if self.slow_runs.contains(&(i, self.counts[i])) {
            us *= 4.0;
        }
        us *= 1.0 + 0.05 * (self.clock_us / 1e6).min(1.0);
        if self.rng.random::<f64>() < self.spikes {
            us *= self.rng.random_range(1.5..5.0);
        }
        self.clock_us += us;
        Ok(us)
    }

    fn elapsed(&self) -> Duration {
        Duration::from_micros(self.clock_us as u64)
    }
}

fn rules() -> Rules {
    Rules::until(Duration::from_secs(60))
}

/// Those of a job with so many seconds.
fn final_rules(seconds: u64) -> FinalRules {
    let deadline = Duration::from_secs(seconds);
    FinalRules {
        min_rounds: 7,
        sure_rounds: 20,
        max_rounds: 75,
        stubborn_rounds: 300,
        most_rounds: 1500,
        patience: deadline,
        deadline,
        hard_deadline: deadline,
    }
}

fn quiet(_: RaceEvent<'_>) {}

/// A race of `count` contenders from its beginning.
fn race(
    track: &mut dyn Track,
    count: usize,
    default: Option<usize>,
    rules: &Rules,
    on: &mut dyn FnMut(RaceEvent<'_>),
) -> Standings {
    let mut standings = Standings::default();
    (0..count).for_each(|i| standings.enter(i));
    super::race(track, &mut standings, default, rules, on);
    standings
}

/// A whole job's decision: race, then final. Contender 0 is the default.
fn winner(paper: &mut Paper) -> usize {
    let count = paper.true_us.len();
    let standings = race(paper, count, Some(0), &rules(), &mut quiet);
    finish(paper, &standings).0
}

/// The final after a race: who wins, and after how many rounds.
fn finish(paper: &mut Paper, standings: &Standings) -> (usize, usize) {
    let mut finalists: Vec<usize> = standings.ranking().into_iter().take(3).collect();
    if !finalists.contains(&0) {
        finalists.push(0);
    }
    let (alive, rounds) = run_final(paper, &finalists, Some(0), &final_rules(120), &mut quiet);
    let default = alive.iter().position(|&i| i == 0);
    (alive[decide(&rounds, alive.len(), default, &alive)], rounds.0.len())
}

#[test]
fn the_fastest_wins_under_noise_and_spikes() {
    let times = [130.0, 300.0, 104.0, 100.0, 110.0, 180.0, 105.0, 500.0, 125.0, 140.0];
    for seed in 0..40 {
        let mut paper = Paper::new(&times, 0.04, 0.05, seed);
        assert_eq!(winner(&mut paper), 3, "seed {seed}");
    }
}

#[test]
fn winners_repeat_although_the_noise_does_not() {
    // Two challengers within 0.2 %: the cost model's first of them, always.
    let times = [120.0, 100.0, 99.8, 140.0];
    let winners: Vec<usize> = (0..40).map(|seed| winner(&mut Paper::new(&times, 0.01, 0.02, seed))).collect();
    assert!(winners.iter().all(|&w| w == 1), "{winners:?}");
}

#[test]
fn repeated_winners_are_within_one_percent_of_each_other() {
    // A default and challengers that are hardly better, at all distances around a tie.
    for step in 0..20 {
        let gain = step as f64 * 0.1;
        let times = [100.0, 100.0 - gain, 100.0 - gain / 2.0, 100.0 - gain * 0.9, 130.0];
        let won: Vec<f64> = (0..20).map(|seed| times[winner(&mut Paper::new(&times, 0.01, 0.02, seed))]).collect();
        let (low, high) = won.iter().fold((f64::MAX, 0f64), |(low, high), t| (low.min(*t), high.max(*t)));
        assert!(high / low < 1.01, "{gain} %: {low} to {high}");
    }
}

#[test]
fn a_default_that_is_as_good_stays() {
    let times = [100.0, 99.8, 100.4, 150.0, 220.0];
    for seed in 0..40 {
        assert_eq!(winner(&mut Paper::new(&times, 0.01, 0.05, seed)), 0, "seed {seed}");
    }
}

#[test]
fn over_many_fields_little_is_sampled_and_less_is_lost() {
    const FIELDS: u64 = 50;
    const FIELD: usize = 60;
    // Fields out of recorded spaces; noise of 5 %, a drift, a slow first sample.
    let mut losses = Vec::new();
    let mut costs: Vec<(f64, f64)> = Vec::new();
    for space in crate::search::recorded_times() {
        let best = space.iter().copied().fold(f64::INFINITY, f64::min);
        let as_good = space.iter().filter(|us| **us <= best * 1.05).count();
        let (mut sampled, mut most) = (0, 0);
        let mut contenders = 0;
        for seed in 0..FIELDS {
            let mut rng = StdRng::seed_from_u64(seed);
            let times: Vec<f64> = space.choose_multiple(&mut rng, FIELD).copied().collect();
            let mut paper = Paper::new(&times, 0.05, 0.02, seed);
            let won = times[winner(&mut paper)];
            assert!(won <= times[0] * 1.005, "seed {seed}: {won} is slower than the default's {}", times[0]);
            losses.push(won / times.iter().copied().fold(f64::INFINITY, f64::min) - 1.0);
            contenders += times.len();
            sampled += paper.total_samples();
            // A count that is the same for all of a field and as certain: that of whoever was sampled the most.
            most += times.len() * paper.counts.iter().copied().max().unwrap_or(0);
        }
        let (each, most) = (sampled as f64 / contenders as f64, most as f64 / contenders as f64);
        println!(
            "{as_good} of {} within 5 %: {each:.1} samples each, {most:.1} of the most: {:.1} %",
            space.len(),
            100.0 * each / most
        );
        assert!(each < most * 0.15, "{each} of {most}");
        costs.push((each, most));
    }
    // Who samples all alike does not know beforehand what kind of space it is.
    let each = costs.iter().map(|c| c.0).sum::<f64>() / costs.len() as f64;
    let most = costs.iter().map(|c| c.1).fold(0.0, f64::max);
    losses.sort_by(f64::total_cmp);
    let p95 = losses[losses.len() * 95 / 100];
    println!("{:.1} % of the samples, {:.2} % lost at p95", 100.0 * each / most, 100.0 * p95);
    assert!(each < most * 0.1, "{each} of {most} samples");
    assert!(p95 < 0.01, "{p95} lost");
}

/// What races of fields out of one space came to.
struct Races {
    /// What is lost beside the best of each field, by true times.
    losses: Vec<f64>,
    /// The samples of a race for each contender, and the rounds of a final, on average.
    each: f64,
    rounds: f64,
}

impl Races {
    fn run(space: &[f64], noise: Noise, spikes: f64, races: u64) -> Self {
        let mut all = Self { losses: Vec::new(), each: 0.0, rounds: 0.0 };
        for seed in 0..races {
            let mut rng = StdRng::seed_from_u64(seed);
            let times: Vec<f64> = space.choose_multiple(&mut rng, 60).copied().collect();
            let mut paper = Paper::with(&times, noise, spikes, 77 + seed);
            let standings = race(&mut paper, times.len(), Some(0), &rules(), &mut quiet);
            all.each += paper.total_samples() as f64 / (times.len() as u64 * races) as f64;
            let (won, rounds) = finish(&mut paper, &standings);
            all.rounds += rounds as f64 / races as f64;
            all.losses.push(times[won] / times.iter().copied().fold(f64::INFINITY, f64::min) - 1.0);
        }
        all
    }
}

/// What is lost in the worst of twenty.
fn p95(losses: &[f64]) -> f64 {
    crate::stats::percentile(losses, 0.95).expect("races")
}

#[test]
fn noise_makes_races_longer_and_one_percent_is_lost_at_most() {
    /// Races of one space that say something of that space alone.
    const MANY: u64 = 400;
    // CI has time for a share.
    let races = std::env::var("FLASHTUNE_RACES").map_or(12, |n| n.parse().expect("a number"));
    let mut kinds = vec![
        (Noise::Normal(0.05), 0.0, 0.01),
        (Noise::Normal(0.05), 0.02, 0.01),
        (Noise::LogNormal(0.05), 0.0, 0.01),
        (Noise::Common(0.05), 0.0, 0.01),
        (Noise::Above(0.05), 0.02, 0.01),
    ];
    if races >= MANY {
        // The last is more than anything is promised for.
        kinds.extend([0.01, 0.02, 0.1].map(|d| (Noise::Normal(d), 0.0, if d > 0.05 { 0.02 } else { 0.01 })));
    }
    for (noise, spikes, limit) in kinds {
        let mut losses = Vec::new();
        for (n, space) in crate::search::recorded_times().iter().enumerate() {
            let all = Races::run(space, noise, spikes, races);
            let (lost, each, rounds) = (p95(&all.losses), all.each, all.rounds);
            println!(
                "space {n}, {noise:?}, spikes {spikes}: {:.2} % lost, {each:.1} samples each, {rounds:.0} rounds",
                100.0 * lost
            );
            assert!(lost < limit || races < MANY, "space {n}, {noise:?}, spikes {spikes}: {lost} lost");
            // What 10 % of noise leads to at most.
            assert!(each < 120.0 && rounds < 1500.0, "space {n}, {noise:?}: {each} samples each, {rounds} rounds");
            losses.extend(all.losses);
        }
        assert!(p95(&losses) < limit, "{noise:?}, spikes {spikes}: {} lost", p95(&losses));
    }
}

#[test]
fn where_it_is_calm_races_and_finals_are_short() {
    for space in crate::search::recorded_times() {
        for deviation in [0.001, 0.01] {
            let Races { each, rounds, .. } = Races::run(&space, Noise::Normal(deviation), 0.0, 20);
            assert!(each < 6.0 && rounds < 65.0, "{deviation}: {each} samples each, {rounds} rounds");
        }
    }
}

#[test]
fn noise_is_seen_and_neither_drift_nor_disturbances_are_noise() {
    let mut paper = Paper::with(&[100.0; 30], Noise::Normal(0.05), 0.1, 1);
    let standings = race(&mut paper, 30, Some(0), &rules().for_a_glance(4), &mut quiet);
    assert!((0.04..0.07).contains(&standings.noise()), "{}", standings.noise());
    let mut standings = Standings::default();
    standings.enter(0);
    assert_eq!(standings.noise(), 0.0);
    standings.samples[0] = (0..20).map(|i| if i == 7 { 900.0 } else { 100.0 * (1.0 + 0.001 * i as f64) }).collect();
    assert!(standings.noise() < 0.002, "{}", standings.noise());
}

#[test]
fn when_patience_ends_noise_makes_nothing_longer() {
    let times = [100.0, 101.0, 100.5, 100.2, 101.5, 100.8];
    let seconds = |ends: u64| {
        let mut paper = Paper::with(&times, Noise::Normal(0.05), 0.0, 3);
        let patience = Duration::from_millis(ends);
        let rules = Rules { patience, ..rules() };
        let standings = race(&mut paper, times.len(), Some(0), &rules, &mut quiet);
        let raced = paper.total_samples();
        let finalists: Vec<usize> = standings.ranking().into_iter().take(3).collect();
        let rules = FinalRules { patience, ..final_rules(60) };
        let (_, rounds) = run_final(&mut paper, &finalists, None, &rules, &mut quiet);
        (raced / times.len(), rounds.0.len())
    };
    let (short, long) = (seconds(0), seconds(60_000));
    assert!(short.0 <= 24 && short.1 <= 75, "{short:?}");
    assert!(long.0 > 2 * short.0 && long.1 > 2 * short.1, "{long:?} after {short:?}");
}

/// The same candidates, noise of its own in each tuning.
#[test]
fn sixty_tunings_of_a_recorded_space_agree() {
    const TUNINGS: u64 = 60;
    for (n, space) in crate::search::recorded_times().into_iter().enumerate() {
        let mut rng = StdRng::seed_from_u64(n as u64);
        let times: Vec<f64> = space.choose_multiple(&mut rng, 60).copied().collect();
        // A card by itself, and one that is disturbed as much as may be.
        for noise in [Noise::Above(0.01), Noise::Above(0.05)] {
            let won: Vec<usize> =
                (0..TUNINGS).map(|seed| winner(&mut Paper::with(&times, noise, 0.02, seed))).collect();
            let often = |w: &usize| won.iter().filter(|o| o == &w).count();
            let favourite = *won.iter().max_by_key(|w| often(w)).expect("sixty winners");
            let near = won.iter().filter(|w| (times[**w] / times[favourite] - 1.0).abs() <= 0.01).count();
            let same = often(&favourite);
            println!("space {n}, {noise:?}: {same} of {TUNINGS} the same, {near} within 1 %");
            assert!(near >= 58, "space {n}, {noise:?}: {near}");
        }
    }
}

#[test]
fn who_is_far_behind_cold_and_warm_is_out_after_two_runs() {
    let mut times = vec![100.0];
    times.extend((0..20).map(|i| 250.0 + 10.0 * i as f64));
    let mut paper = Paper::new(&times, 0.03, 0.0, 5);
    race(&mut paper, times.len(), Some(0), &rules(), &mut quiet);
    // Whoever is among the three fastest stays for the final.
    assert!(paper.counts[3..].iter().all(|n| *n == 2), "{:?}", paper.counts);
    // One slow run may be anything's.
    let mut once = Paper::new(&[100.0, 100.0, 100.0, 100.0, 101.0], 0.01, 0.0, 5);
    once.slow_runs = vec![(4, 2)];
    let standings = race(&mut once, 5, Some(0), &rules(), &mut quiet);
    assert!(once.counts[4] > 4, "{:?} {:?}", once.counts, standings.fates);
}

#[test]
fn among_many_equals_few_go_on() {
    let times = vec![100.0; 60];
    let mut paper = Paper::new(&times, 0.05, 0.02, 2);
    let standings = race(&mut paper, times.len(), Some(0), &rules(), &mut quiet);
    assert!(standings.live().len() <= 4 && standings.live().contains(&0));
    assert!(paper.total_samples() < 60 * 10, "{}", paper.total_samples());
}

#[test]
fn slow_contenders_cost_few_samples_and_the_default_is_never_dropped() {
    let mut times = vec![900.0];
    times.extend((0..50).map(|i| 200.0 + 10.0 * i as f64));
    times.push(100.0);
    let mut paper = Paper::new(&times, 0.03, 0.02, 1);
    let mut dropped = Vec::new();
    let standings = race(&mut paper, times.len(), Some(0), &rules(), &mut |e| {
        if let RaceEvent::Dropped { contender, .. } = e {
            dropped.push(contender);
        }
    });
    assert!(!dropped.contains(&0) && standings.fates[0] == Fate::Live);
    // Keeping everyone for all rounds would take 52 * 24 samples.
    assert!(paper.total_samples() < 52 * 5, "{}", paper.total_samples());
    assert_eq!(standings.ranking()[0], 51);
    assert!(matches!(standings.fates[50], Fate::Dropped(r) if r > 1.5));
}

#[test]
fn one_that_breaks_in_the_middle_is_out_and_says_why() {
    let mut paper = Paper::new(&[120.0, 50.0, 100.0], 0.02, 0.0, 3);
    // The fastest works for a while: it must not win on the strength of its early samples.
    paper.breaks.push((1, 5));
    let mut reasons = Vec::new();
    let standings = race(&mut paper, 3, Some(0), &rules(), &mut |e| {
        if let RaceEvent::Failed { contender, reason } = e {
            reasons.push((contender, reason.to_owned()));
        }
    });
    assert_eq!(reasons, [(1, "launch failed".to_owned())]);
    assert_eq!(standings.median(1), None);
    assert_eq!(standings.ranking(), [2, 0]);
}

#[test]
fn one_that_breaks_in_the_final_loses_it() {
    let mut paper = Paper::new(&[120.0, 50.0, 100.0], 0.02, 0.0, 3);
    paper.breaks.push((1, 4));
    let (alive, rounds) = run_final(&mut paper, &[1, 2, 0], Some(0), &final_rules(9), &mut quiet);
    assert_eq!(alive, [2, 0]);
    assert!(rounds.0.len() >= 7 && rounds.0.iter().all(|r| r.len() == 2));
    assert_eq!(alive[decide(&rounds, 2, Some(1), &alive)], 2);
}

#[test]
fn nonsense_times_are_failures() {
    struct Nonsense(f64);
    impl Track for Nonsense {
        fn sample(&mut self, i: usize) -> Result<f64, String> {
            Ok(if i == 0 { 10.0 } else { self.0 })
        }
        fn elapsed(&self) -> Duration {
            Duration::ZERO
        }
    }
    for us in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let standings = race(&mut Nonsense(us), 2, Some(0), &rules(), &mut quiet);
        assert!(matches!(standings.fates[1], Fate::Failed(_)), "{us}");
        assert_eq!(standings.ranking(), [0]);
    }
}

#[test]
fn when_the_time_is_up_the_default_has_been_timed_all_the_same() {
    let mut paper = Paper::new(&[5e6, 4e6, 6e6], 0.0, 0.0, 0);
    let rules = Rules::until(Duration::ZERO);
    let standings = race(&mut paper, 3, Some(0), &rules, &mut quiet);
    assert_eq!(standings.ranking(), [0]);
    assert_eq!(standings.fates, [Fate::Live, Fate::Live, Fate::Live]);
    // Long runs need no warm-up: one run, one sample.
    assert_eq!(paper.total_samples(), 1);
    // Without a default one contender runs, so that there is a result at all.
    let mut paper = Paper::new(&[5.0, 4.0], 0.0, 0.0, 0);
    assert_eq!(race(&mut paper, 2, None, &rules, &mut quiet).ranking(), [0]);
}

#[test]
fn a_race_of_failures_ends_with_nobody() {
    let mut paper = Paper::new(&[1.0, 2.0], 0.0, 0.0, 0);
    paper.breaks.extend([(0, 1), (1, 1)]);
    assert!(race(&mut paper, 2, Some(0), &rules(), &mut quiet).ranking().is_empty());
    assert!(race(&mut paper, 0, None, &rules(), &mut quiet).ranking().is_empty());
}
