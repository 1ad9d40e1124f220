//! The race: who is the fastest, decided with few samples on a noisy machine.
//!
//! All live contenders are timed once per round in rotated order, so drift and neighbours hit them alike. Those who are
//! clearly behind drop out, by a threshold that tightens with the number of samples; the default never drops out. The
//! best few then meet in a final of paired rounds ([`crate::decide`]). Nothing here knows a device: a [`Track`] gives
//! the times.
//!
//! How many samples make a place sure depends on the noise, which the samples themselves show ([`Standings::noise`]):
//! where it is k times as wide as the rules are made for, k^2 samples count as one, and nobody drops out by less than
//! chance gives.

use crate::stats::{lower_mean, median};
use std::time::Duration;

/// Where contenders are timed.
pub(crate) trait Track {
    /// Time of one run of contender `i` with cold caches, in microseconds, or why it could not run.
    fn sample(&mut self, contender: usize) -> Result<f64, String>;
    /// Time since the job began.
    fn elapsed(&self) -> Duration;
}

/// What happens in a race or a final.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum RaceEvent<'a> {
    Timed { contender: usize, round: usize, us: f64 },
    Dropped { contender: usize, ratio: f64 },
    Failed { contender: usize, reason: &'a str },
}

/// How a contender left the race.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Fate {
    /// It did not.
    Live,
    /// Others are faster: its median over the best one's.
    Dropped(f64),
    /// It stopped working.
    Failed(String),
}

/// Rules of a race.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rules {
    /// (number of samples, ratio to the best): who is behind by more after so many samples drops out. After one, only
    /// who was so far behind in the cold first run too.
    pub drops: &'static [(usize, f64)],
    /// (number of samples, contenders): after so many samples no more than so many go on, the default aside. Where that
    /// drops equals, it does not matter which of them.
    pub places: &'static [(usize, usize)],
    /// Contenders that stay whatever their times, besides the default.
    pub keep: usize,
    /// Samples per contender that are enough, where it is calm.
    pub calm_samples: usize,
    /// Samples after which the race ends once only `keep` contenders and the default are left, where it is calm.
    pub enough_samples: usize,
    /// Samples per contender that are enough, however noisy it is.
    pub max_samples: usize,
    /// When noise does not make the race any longer: places go by what is known by then.
    pub patience: Duration,
    /// When the race must end. The default gets its first sample even after that.
    pub deadline: Duration,
    /// A first sample shorter than this is discarded: it pays for cold instruction caches and clocks, which matters for
    /// short runs only.
    pub warmup_below_us: f64,
}

/// Samples and fates by contender, of one race or of several that follow each other.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Standings {
    pub samples: Vec<Vec<f64>>,
    pub fates: Vec<Fate>,
    /// The cold first run, once it is over: microseconds, or nothing where it is a sample like others.
    cold: Vec<Option<Option<f64>>>,
}

/// Noise of a sample that places and numbers of samples are made for, relative to its time: a standard deviation, if it
/// is normal.
const CALM: f64 = 0.018;
/// So many samples count as one at most: what there is at 11 % of noise.
const MOST_FOR_ONE: f64 = 40.0;
/// How far chance parts two equals of a large field, in standard deviations of a sample over the root of their number:
/// the luckiest of sixty is 2.5 ahead, one who should stay is up to 2.5 behind, and [`lower_mean`] spreads 1.3 times as
/// far as a mean.
const CHANCE: f64 = 6.5;

/// See [`Rules::drops`].
const DROPS: [(usize, f64); 6] = [(1, 1.2), (2, 1.1), (4, 1.08), (6, 1.06), (8, 1.05), (12, 1.03)];

impl Rules {
    /// The same, but nobody leaves after one run, or for want of a place.
    pub(crate) fn for_a_record(self) -> Self {
        Self { drops: &DROPS[1..], places: &[], ..self }
    }

    /// Ends when each has so many samples, whatever the noise.
    pub(crate) fn for_a_glance(self, samples: usize) -> Self {
        Self { max_samples: samples, ..self }
    }

    /// The same, but noise makes the race no longer from then on.
    pub(crate) fn patient_until(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// The rules of every job; only the times differ.
    pub(crate) fn until(deadline: Duration) -> Self {
        Self {
            drops: &DROPS,
            places: &[(3, 20), (4, 14), (6, 8), (8, 5), (10, 3)],
            keep: 3,
            calm_samples: 24,
            enough_samples: 8,
            max_samples: 24 * MOST_FOR_ONE as usize,
            patience: deadline,
            deadline,
            warmup_below_us: 100_000.0,
        }
    }
}

impl Standings {
    /// Room for so many contenders; those that do not enter stay out.
    pub(crate) fn grow(&mut self, count: usize) {
        for _ in self.fates.len()..count {
            self.samples.push(Vec::new());
            self.fates.push(Fate::Failed("it did not get here".into()));
            self.cold.push(None);
        }
    }

    /// A contender comes in, in whatever order.
    pub(crate) fn enter(&mut self, contender: usize) {
        self.grow(contender + 1);
        self.fates[contender] = Fate::Live;
    }

    /// The median of a contender that still works; `None` without samples.
    pub(crate) fn median(&self, contender: usize) -> Option<f64> {
        match self.fates.get(contender)? {
            Fate::Failed(_) => None,
            _ => median(&self.samples[contender]),
        }
    }

    /// The fewest samples that one who is live has; `None` when nobody is.
    pub(crate) fn fewest_samples(&self) -> Option<usize> {
        self.live().into_iter().map(|i| self.samples[i].len()).min()
    }

    /// Contenders that still work: first those who are in the race, fastest first, then those who dropped out, whose
    /// times are of fewer rounds. Equals in their given order.
    pub(crate) fn ranking(&self) -> Vec<usize> {
        let works = |i: &usize| !matches!(self.fates[*i], Fate::Failed(_));
        let has_left = |i: usize| self.fates[i] != Fate::Live;
        let mut ranked: Vec<(usize, f64)> =
            (0..self.samples.len()).filter(works).filter_map(|i| Some((i, lower_mean(&self.samples[i])?))).collect();
        ranked.sort_by(|a, b| has_left(a.0).cmp(&has_left(b.0)).then(a.1.total_cmp(&b.1)));
        ranked.into_iter().map(|(i, _)| i).collect()
    }

    /// The noise of a sample, relative to its time, as the standard deviation of a normal one; 0 where nothing is known
    /// of it. From the steps between samples of one contender that follow each other, of all contenders: neither drift
    /// nor single disturbances count.
    pub(crate) fn noise(&self) -> f64 {
        /// The median step between two normal samples, in standard deviations.
        const STEP: f64 = 0.954;
        let steps = self.samples.iter().flat_map(|own| own.windows(2)).map(|pair| (pair[1] / pair[0]).ln().abs());
        let mut steps: Vec<f64> = steps.collect();
        let middle = steps.len() / 2;
        if steps.is_empty() { 0.0 } else { *steps.select_nth_unstable_by(middle, f64::total_cmp).1 / STEP }
    }

    fn live(&self) -> Vec<usize> {
        (0..self.fates.len()).filter(|&i| self.fates[i] == Fate::Live).collect()
    }

    fn fail(&mut self, contender: usize, reason: String) {
        self.samples[contender].clear();
        self.fates[contender] = Fate::Failed(reason);
    }

    /// Drops who is behind. `default` and the `keep` fastest stay.
    fn drop_slow(
        &mut self,
        rules: &Rules,
        default: Option<usize>,
        weather: Weather,
        on: &mut dyn FnMut(RaceEvent<'_>),
    ) {
        let mut live: Vec<(usize, f64)> =
            self.live().into_iter().filter_map(|i| Some((i, lower_mean(&self.samples[i])?))).collect();
        live.sort_by(|a, b| a.1.total_cmp(&b.1));
        let Some(&(first, best)) = live.first() else { return };
        let cold = |i: usize| self.cold[i].flatten();
        // Two runs say so, each against its like.
        let also_when_cold =
            |i: usize, limit: f64| cold(i).zip(cold(first)).is_some_and(|(own, best)| own > best * limit);
        let mut place = 0;
        let mut dropped = Vec::new();
        for (rank, &(i, own)) in live.iter().enumerate() {
            if Some(i) == default {
                continue;
            }
            place += 1;
            let samples = self.samples[i].len();
            let chance = 1.0 + CHANCE * weather.noise / (samples as f64).sqrt();
            let limit = rules.drops.iter().rev().find(|(n, _)| samples >= *n).map(|(_, r)| r.max(chance));
            let in_calm = (samples as f64 / weather.for_one) as usize;
            let places = rules.places.iter().rev().find(|(n, _)| in_calm >= *n).map(|(_, p)| *p);
            let is_behind = limit.is_some_and(|l| own > best * l && (samples > 1 || also_when_cold(i, l)));
            if rank >= rules.keep && (is_behind || places.is_some_and(|places| place > places)) {
                dropped.push((i, own / best));
            }
        }
        for (i, ratio) in dropped {
            self.fates[i] = Fate::Dropped(ratio);
            on(RaceEvent::Dropped { contender: i, ratio });
        }
    }
}

/// What noise there is after a round, and what that makes of the rules.
#[derive(Debug, Clone, Copy)]
struct Weather {
    noise: f64,
    /// How many samples count as one.
    for_one: f64,
}

impl Weather {
    fn of(standings: &Standings, rules: &Rules, now: Duration) -> Self {
        let noise = standings.noise();
        let is_patient = now < rules.patience;
        Self { noise, for_one: if is_patient { (noise / CALM).powi(2).clamp(1.0, MOST_FOR_ONE) } else { 1.0 } }
    }

    /// The samples that are enough where so many are in a calm.
    fn enough(self, calm: usize, rules: &Rules) -> usize {
        rules.max_samples.min((calm as f64 * self.for_one) as usize)
    }
}

/// Runs a race of those who are live, best guess first. Who has as many samples as the rules want, from a race before,
/// waits.
pub(crate) fn race(
    track: &mut dyn Track,
    standings: &mut Standings,
    default: Option<usize>,
    rules: &Rules,
    on: &mut dyn FnMut(RaceEvent<'_>),
) {
    let mut weather = Weather::of(standings, rules, track.elapsed());
    for round in 0.. {
        let enough = weather.enough(rules.calm_samples, rules);
        let mut order = standings.live();
        order.retain(|&i| standings.samples[i].len() < enough);
        if order.is_empty() {
            break;
        }
        let turn = round % order.len();
        order.rotate_left(turn);
        let mut late = false;
        for i in order {
            if track.elapsed() >= rules.deadline {
                late = true;
                let default_waits = Some(i) == default && standings.samples[i].is_empty();
                let nobody_ran = standings.samples.iter().all(Vec::is_empty);
                if !default_waits && !nobody_ran {
                    continue;
                }
            }
            let mut result = timed(track, i);
            if standings.cold[i].is_none() {
                let cold = result.as_ref().ok().copied().filter(|us| *us < rules.warmup_below_us);
                standings.cold[i] = Some(cold);
                // It is repeated at once, so that a race that ends early still has one good sample of all.
                if cold.is_some() {
                    result = timed(track, i);
                }
            }
            match result {
                Ok(us) => {
                    standings.samples[i].push(us);
                    on(RaceEvent::Timed { contender: i, round, us });
                }
                Err(reason) => {
                    on(RaceEvent::Failed { contender: i, reason: &reason });
                    standings.fail(i, reason);
                }
            }
        }
        weather = Weather::of(standings, rules, track.elapsed());
        standings.drop_slow(rules, default, weather, on);
        let fewest = standings.fewest_samples().unwrap_or(0);
        let few_left = standings.live().len() <= rules.keep + usize::from(default.is_some());
        let enough = weather.enough(if few_left { rules.enough_samples } else { rules.calm_samples }, rules);
        if late || fewest >= enough {
            break;
        }
    }
}

/// One sample that makes sense.
pub(crate) fn timed(track: &mut dyn Track, contender: usize) -> Result<f64, String> {
    let us = track.sample(contender)?;
    if us.is_finite() && us > 0.0 { Ok(us) } else { Err(format!("the device reported a time of {us} us")) }
}

#[cfg(test)]
mod tests;
