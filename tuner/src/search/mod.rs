//! Which schedules to try next, given what the ones before have shown.
//!
//! A portfolio over one pool of results: the cost model's ranking first, with schedules that differ, and with what
//! neighbouring shapes and other devices found good as seeds; then, batch by batch, steps around the best so far, the
//! ranking corrected by what was measured near each schedule, and a share that neither of them chooses. Failures are
//! results: they speak against their neighbourhood. Nothing here knows a device, so searches are replayed on recorded
//! tables (`replay.rs`).

mod correction;
mod map;
mod past;
#[cfg(test)]
mod replay;
#[cfg(test)]
mod simulated;

pub(crate) use map::Map;
pub(crate) use past::Past;
#[cfg(test)]
pub(crate) use replay::{recorded_times, tables};

use crate::stats::median;
use correction::Correction;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// Share of all trials in the first batch.
const FIRST_SHARE: f64 = 0.25;
/// Of the first batch, at most this share are seeds.
const SEED_SHARE: f64 = 0.25;
/// What a schedule must be better by, as the logarithm of the time, to be tried beside one just like it, and after how
/// many steps that is a third.
const REPETITION: f64 = 0.2;
const LIKE: f64 = 3.0;
/// Of the first batch, one in so many is picked at random.
const EXPLORE_EVERY: usize = 5;
/// The smallest batch: with as many cores a larger one compiles in the same time.
pub(crate) const SMALLEST_BATCH: usize = 6;
/// Shares of a later batch: steps around the best, and picks against the cost model's blind spots.
const LOCAL: f64 = 1.0 / 3.0;
const EXPLORE: f64 = 1.0 / 6.0;
/// Who is so many steps from one of the best is a neighbour.
const NEAR: u32 = 2;
/// Results in a row without an improvement of [`IMPROVEMENT`] after which a search ends.
const PATIENCE: usize = 4 * SMALLEST_BATCH;
const IMPROVEMENT: f64 = 0.01;
/// The share of all trials before which a search does not end for want of improvement, and the same with a neighbour's
/// measurements to lead it, which ends at the first batch without one.
const LEAST: f64 = 0.5;
const LEAST_LED: f64 = 0.25;
/// How far the logarithms of times may be from those of a neighbour, in the median and apart from what they have in
/// common, before it leads no more.
const DISAGREEMENT: f64 = 0.08;
/// Of a neighbour's schedules, those within this of its best are tried before anything has to be compiled.
const PROMISING: f64 = 1.25;
/// A failure counts as if the schedule took this many times as long as the cost model says.
const FAILURE: f64 = 2.0;

/// What is known of a schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Known {
    Nothing,
    /// It was proposed and not reported yet.
    Proposed,
    Time(f64),
    Failed,
}

/// What a neighbouring size says of a schedule: the time there, and the cost model's cost there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Hint {
    pub schedule: usize,
    pub us: f64,
    pub cost: f64,
}

/// A search over the schedules of a space, which are numbered by the cost model's ranking.
pub(crate) struct Portfolio {
    /// Logarithm of the cost model's cost.
    costs: Vec<f64>,
    map: Map,
    known: Vec<Known>,
    /// From every schedule to the nearest of which something is known.
    steps_to_known: Vec<u32>,
    /// What is to be tried before anything else.
    first: Vec<usize>,
    seeds: Vec<usize>,
    /// A neighbour's measurements, the fastest first.
    hints: Vec<Hint>,
    max_trials: usize,
    batch: usize,
    proposed: usize,
    best: f64,
    /// Results since the last improvement, and those that the last batch did not know.
    idle: usize,
    news: usize,
    rng: StdRng,
}

impl Portfolio {
    /// A search of at most `max_trials` schedules (at least the default). `costs` are the cost model's, by schedule.
    pub(crate) fn new(costs: &[f64], map: Map, default: usize, seeds: &[usize], max_trials: usize, seed: u64) -> Self {
        let batch = SMALLEST_BATCH;
        let known = vec![Known::Nothing; costs.len()];
        Self {
            costs: costs.iter().map(|c| c.max(f64::MIN_POSITIVE).ln()).collect(),
            map,
            known,
            steps_to_known: vec![u32::MAX; costs.len()],
            first: vec![default],
            seeds: seeds.iter().copied().filter(|s| *s != default).collect(),
            hints: Vec::new(),
            max_trials: max_trials.max(1),
            batch,
            proposed: 0,
            best: f64::INFINITY,
            idle: 0,
            news: 0,
            rng: StdRng::seed_from_u64(seed ^ 0x5c4e_d01e),
        }
    }

    /// The same search in batches of another size, no smaller than [`SMALLEST_BATCH`].
    pub(crate) fn in_batches_of(self, batch: usize) -> Self {
        Self { batch: batch.max(SMALLEST_BATCH), ..self }
    }

    /// The same search, which tries these right after the default.
    pub(crate) fn after_trying(mut self, schedules: impl IntoIterator<Item = usize>) -> Self {
        self.first.extend(schedules);
        self
    }

    /// The same search, led by a neighbour's measurements, of which the fastest comes first. Where the cost model
    /// misjudges schedules there it is taken to misjudge them here, and what was good there is tried first: its kernels
    /// are compiled already. Then new ones, until a batch of them brings no improvement.
    pub(crate) fn led_by(self, hints: Vec<Hint>) -> Self {
        Self { hints, ..self }
    }

    /// Whether a neighbour's measurements lead it, as they do until they prove wrong.
    pub(crate) fn is_led(&self) -> bool {
        !self.hints.is_empty()
    }

    /// A schedule that is known to fail: it is not tried, and speaks against its neighbours.
    pub(crate) fn fails(&mut self, schedule: usize) {
        if !self.first.contains(&schedule) {
            self.note(schedule, Known::Failed);
        }
    }

    /// What came of a proposed schedule: its time, or nothing when it failed.
    pub(crate) fn report(&mut self, schedule: usize, time: Option<f64>) {
        self.news += 1;
        self.note(schedule, time.map_or(Known::Failed, Known::Time));
    }

    /// The next schedules to try, at most `room` unless it is the first time. None when the search is over, or may be
    /// once what is under way is reported: not all that was proposed need be, by then.
    pub(crate) fn next(&mut self, room: usize) -> Vec<usize> {
        let left = (self.max_trials - self.proposed).min(self.open().count());
        if self.proposed == 0 {
            return self.first_batch(left);
        }
        if self.disagreement().is_some_and(|apart| apart > DISAGREEMENT) {
            self.hints.clear();
        }
        let best = self.times().map(|(_, us)| us).fold(f64::INFINITY, f64::min);
        let news = std::mem::take(&mut self.news);
        self.idle = if best < self.best * (1.0 - IMPROVEMENT) { 0 } else { self.idle + news };
        self.best = self.best.min(best);
        let under_way = self.known.iter().filter(|k| **k == Known::Proposed).count();
        // Too few results prove nothing.
        let (patience, least) = if self.hints.is_empty() { (PATIENCE, LEAST) } else { (1, LEAST_LED) };
        if self.idle + under_way >= patience && self.proposed as f64 >= least * self.max_trials as f64 {
            return Vec::new();
        }
        let room = room.min(left).min(self.batch);
        let part = |share: f64| (self.batch as f64 * share) as usize;
        let (local_part, explored_part) = (part(LOCAL), part(EXPLORE));
        let predicted = self.predictions();
        let mut batch = Vec::new();
        // The seeds that the first batch had no room for.
        let seed = if self.seeds.is_empty() { None } else { Some(self.seeds.remove(0)) };
        self.take(&mut batch, seed, room);
        let local = self.around_the_best(&predicted, room.min(local_part));
        let until = (batch.len() + local_part).min(room);
        self.take(&mut batch, local, until);
        let explored = room.saturating_sub(batch.len()).min(explored_part);
        let exploit = self.cheapest(&predicted);
        self.take(&mut batch, exploit, room - explored);
        for _ in 0..explored {
            let stranger = self.stranger(&predicted);
            self.take(&mut batch, stranger, room);
        }
        batch
    }

    /// Whether nothing is left to propose.
    pub(crate) fn is_over(&self) -> bool {
        self.proposed >= self.max_trials || self.open().next().is_none()
    }

    /// The default, seeds, what the cost model likes best and is not alike, and some that it would not choose. Mixed,
    /// so that whoever has no time for all has some of each. With a neighbour to lead, what was good there instead.
    fn first_batch(&mut self, left: usize) -> Vec<usize> {
        if let Some(best) = self.hints.first().map(|h| h.us) {
            let mut batch = Vec::new();
            let size = self.batch.min(left);
            let good = self.hints.iter().take_while(|h| h.us <= PROMISING * best).map(|h| h.schedule);
            let first = std::mem::take(&mut self.first).into_iter().chain(self.seeds.clone()).chain(good);
            let first: Vec<usize> = first.collect();
            self.take(&mut batch, first, size);
            return batch;
        }
        // What fits altogether needs no search.
        let whole = self.open().count() <= self.max_trials;
        let first = (self.max_trials as f64 * FIRST_SHARE) as usize;
        let size = if whole { left } else { first.max(self.batch).min(left) };
        let share = (size as f64 * SEED_SHARE).ceil() as usize;
        let mut batch = Vec::new();
        let first = std::mem::take(&mut self.first);
        self.take(&mut batch, first, size);
        let seeds: Vec<usize> = self.seeds.drain(..share.min(self.seeds.len())).collect();
        self.take(&mut batch, seeds, size);
        let costs = self.costs.clone();
        while batch.len() < size {
            let until = (batch.len() + EXPLORE_EVERY - 1).min(size);
            while batch.len() < until {
                let Some(next) = self.unlike_the_others() else { return batch };
                self.take(&mut batch, [next], until);
            }
            let stranger = self.stranger(&costs);
            self.take(&mut batch, stranger, size);
        }
        batch
    }

    /// The open schedule with the lowest cost, if likeness to one that was proposed counts as so much more: what the
    /// cost model misjudges, it misjudges in all that are alike.
    fn unlike_the_others(&self) -> Option<usize> {
        let score = |i: usize| self.costs[i] + REPETITION * (-f64::from(self.steps_to_known[i]) / LIKE).exp();
        let scored = self.open().map(|i| (score(i), i));
        scored.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, i)| i)
    }

    /// Something is known of a schedule.
    fn note(&mut self, schedule: usize, what: Known) {
        if self.known[schedule] == Known::Nothing {
            for (i, steps) in self.steps_to_known.iter_mut().enumerate() {
                *steps = self.map.steps(schedule, i).min(*steps);
            }
        }
        self.known[schedule] = what;
    }

    /// Adds those of `from` that are still open, until the batch has `size`.
    fn take(&mut self, batch: &mut Vec<usize>, from: impl IntoIterator<Item = usize>, size: usize) {
        for schedule in from {
            if batch.len() >= size {
                break;
            }
            if self.known[schedule] == Known::Nothing {
                self.note(schedule, Known::Proposed);
                self.proposed += 1;
                batch.push(schedule);
            }
        }
    }

    fn open(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.known.len()).filter(|&i| self.known[i] == Known::Nothing)
    }

    fn times(&self) -> impl Iterator<Item = (usize, f64)> + '_ {
        self.known.iter().enumerate().filter_map(|(i, k)| match k {
            Known::Time(us) => Some((i, *us)),
            _ => None,
        })
    }

    /// How far apart measurements and hints are: the median of what is left of their ratios without the median ratio.
    fn disagreement(&self) -> Option<f64> {
        let ratio = |h: &Hint| match self.known[h.schedule] {
            Known::Time(us) => Some(us.ln() - h.us.ln()),
            _ => None,
        };
        let ratios: Vec<f64> = self.hints.iter().filter_map(ratio).collect();
        let usual = median(&ratios)?;
        median(&ratios.iter().map(|r| (r - usual).abs()).collect::<Vec<_>>())
    }

    /// Logarithm of the expected time of every open schedule: the cost model's cost, corrected by what was measured.
    fn predictions(&self) -> Vec<f64> {
        let mut errors: Vec<(usize, f64)> = self.times().map(|(i, us)| (i, us.ln() - self.costs[i])).collect();
        let overall = errors.iter().map(|e| e.1).sum::<f64>() / errors.len().max(1) as f64;
        // By how much more than on average the cost model was off at the neighbour.
        let off = |h: &Hint| h.us.ln() - h.cost.max(f64::MIN_POSITIVE).ln();
        let usual = self.hints.iter().map(off).sum::<f64>() / self.hints.len().max(1) as f64;
        let unknown = self.hints.iter().filter(|h| !matches!(self.known[h.schedule], Known::Time(_) | Known::Failed));
        errors.extend(unknown.map(|h| (h.schedule, overall + off(h) - usual)));
        let failed = (0..self.known.len()).filter(|&i| self.known[i] == Known::Failed);
        errors.extend(failed.map(|i| (i, overall + FAILURE.ln())));
        let correction = Correction::fit(&self.map, &errors);
        let mut predicted = vec![f64::INFINITY; self.known.len()];
        for i in self.open() {
            predicted[i] = self.costs[i] + correction.at(i);
        }
        predicted
    }

    /// Open schedules near the three best, the most promising first; the nearest of all when there is none so near.
    fn around_the_best(&self, predicted: &[f64], count: usize) -> Vec<usize> {
        let mut best: Vec<(usize, f64)> = self.times().collect();
        best.sort_by(|a, b| a.1.total_cmp(&b.1));
        best.truncate(3);
        let mut near: Vec<(u32, f64, usize)> = self
            .open()
            .filter_map(|i| {
                let steps = best.iter().map(|(b, _)| self.map.steps(*b, i)).min()?;
                Some((steps.max(NEAR), predicted[i], i))
            })
            .collect();
        near.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        near.into_iter().map(|(_, _, i)| i).take(count).collect()
    }

    /// Open schedules by expected time.
    fn cheapest(&self, predicted: &[f64]) -> Vec<usize> {
        let mut open: Vec<usize> = self.open().collect();
        open.sort_by(|&a, &b| predicted[a].total_cmp(&predicted[b]));
        open.truncate(self.batch);
        open
    }

    /// A schedule that the cost model would not choose: of some random ones, as often as not from the better half, the
    /// one that is the furthest from all that is known.
    fn stranger(&mut self, predicted: &[f64]) -> Option<usize> {
        let mut open: Vec<usize> = self.open().collect();
        if self.rng.random::<bool>() {
            open.sort_by(|&a, &b| predicted[a].total_cmp(&predicted[b]));
            open.truncate(open.len().div_ceil(2));
        }
        let some: Vec<usize> = open.choose_multiple(&mut self.rng, 8).copied().collect();
        some.into_iter().max_by_key(|&i| self.steps_to_known[i])
    }
}

#[cfg(test)]
mod tests;
