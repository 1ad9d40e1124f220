//! The race: who is the fastest, decided with few samples on a noisy machine.
//!
//! All live contenders are timed once per round in rotated order, so drift and neighbours hit them alike. Those who are
//! clearly behind drop out, by a threshold that tightens with the number of samples; the default never drops out. The
//! best few then meet in a final of paired rounds ([`crate::decide`]). Nothing here knows a device: a [`Track`] gives
//! the times.

use crate::stats::median;
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
    /// (number of samples, ratio to the best): who is behind by more after so many samples drops out. After one, only who was
    /// so far behind in the cold first run too.
    pub drops: &'static [(usize, f64)],
    /// (number of samples, contenders): after so many samples no more than so many go on, the default aside. Where that drops
    /// equals, it does not matter which of them.
    pub places: &'static [(usize, usize)],
    /// Contenders that stay whatever their times, besides the default.
    pub keep: usize,
    /// Samples per contender that are enough.
    pub max_samples: usize,
    /// Samples after which the race ends once only `keep` contenders and the default are left.
    pub enough_samples: usize,
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

/// See [`Rules::drops`].
const DROPS: [(usize, f64); 6] = [(1, 1.2), (2, 1.1), (4, 1.08), (6, 1.06), (8, 1.05), (12, 1.03)];

impl Rules {
    /// The same, but nobody leaves after one run, or for want of a place.
    pub fn for_a_record(self) -> Self {
        Self { drops: &DROPS[1..], places: &[], ..self }
    }

    /// The rules of every job; only the deadline differs.
    pub fn until(deadline: Duration) -> Self {
        Self {
            drops: &DROPS,
            places: &[(3, 20), (4, 14), (6, 8), (8, 5), (10, 3)],
            keep: 3,
            max_samples: 24,
            enough_samples: 8,
            deadline,
            warmup_below_us: 100_000.0,
        }
    }
}

impl Standings {
    /// Room for so many contenders; those that do not enter stay out.
    pub fn grow(&mut self, count: usize) {
        for _ in self.fates.len()..count {
            self.samples.push(Vec::new());
            self.fates.push(Fate::Failed("it did not get here".into()));
            self.cold.push(None);
        }
    }

    /// A contender comes in, in whatever order.
    pub fn enter(&mut self, contender: usize) {
        self.grow(contender + 1);
        self.fates[contender] = Fate::Live;
    }

    /// The median of a contender that still works; `None` without samples.
    pub fn median(&self, contender: usize) -> Option<f64> {
        match self.fates.get(contender)? {
            Fate::Failed(_) => None,
            _ => median(&self.samples[contender]),
        }
    }

    /// The fewest samples that one who is live has; `None` when nobody is.
    pub fn fewest_samples(&self) -> Option<usize> {
        self.live().into_iter().map(|i| self.samples[i].len()).min()
    }

    /// Contenders that still work, fastest first; equals in their given order.
    pub fn ranking(&self) -> Vec<usize> {
        let mut ranked: Vec<(usize, f64)> =
            (0..self.samples.len()).filter_map(|i| Some((i, self.median(i)?))).collect();
        ranked.sort_by(|a, b| a.1.total_cmp(&b.1));
        ranked.into_iter().map(|(i, _)| i).collect()
    }

    fn live(&self) -> Vec<usize> {
        (0..self.fates.len()).filter(|&i| self.fates[i] == Fate::Live).collect()
    }

    fn fail(&mut self, contender: usize, reason: String) {
        self.samples[contender].clear();
        self.fates[contender] = Fate::Failed(reason);
    }

    /// Drops who is behind. `default` and the `keep` fastest stay.
    fn drop_slow(&mut self, rules: &Rules, default: Option<usize>, on: &mut dyn FnMut(RaceEvent<'_>)) {
        let mut live: Vec<(usize, f64)> =
            self.live().into_iter().filter_map(|i| Some((i, fair_time(&self.samples[i])?))).collect();
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
            let limit = rules.drops.iter().rev().find(|(n, _)| samples >= *n).map(|(_, r)| *r);
            let places = rules.places.iter().rev().find(|(n, _)| samples >= *n).map(|(_, p)| *p);
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

/// What a contender is dropped by: the sample at the end of the lower third. Disturbances make runs longer, never
/// shorter, and among two samples the median would be as disturbed as the worse one.
fn fair_time(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 3).copied()
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
    for round in 0.. {
        let mut order = standings.live();
        order.retain(|&i| standings.samples[i].len() < rules.max_samples);
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
        standings.drop_slow(rules, default, on);
        let fewest = standings.fewest_samples().unwrap_or(0);
        let few_left = standings.live().len() <= rules.keep + usize::from(default.is_some());
        if late || fewest >= rules.max_samples || few_left && fewest >= rules.enough_samples {
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
