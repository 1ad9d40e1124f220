//! The search: candidates on their way to the race.
//!
//! ```text
//! guide -- batch --> compilers (threads) -- as they come --> load, check, glance -- batch by batch, in order --> guide
//! ```
//!
//! On the cpu a compiler and a measurement disturb each other, so they take turns, batch by batch. Elsewhere the device
//! measures while the host compiles: batches are proposed ahead of the results, so that compilers do not idle. How far
//! ahead is fixed, and results are reported batch by batch in the order of the proposals, so that what is tried depends
//! on what was measured and not on who was ready first.

use super::Tuning;
use crate::build::{Builder, Built, Compilation, Order};
use crate::candidate::Candidate;
use crate::cost::cost;
use crate::prune::Compiled;
use crate::race::{Rules, Standings};
use crate::runner::Size;
use crate::search::{self, Hint, Map, Past, Portfolio};
use crate::space::Space;
use crate::{Event, Phase, Result, Search};
use flashtune_cache::{Activity, Lesson, Stage};
use flashtune_codegen::Schedule;
use flashtune_runtime::Compiler;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

/// Shares of the budget after which no other batch begins, no compilation starts, and no candidate is checked at full
/// size any more.
const LAST_BATCH: f64 = 0.55;
const LAST_COMPILATION: f64 = 0.5;
const LAST_CHECK: f64 = 0.75;
/// The largest batch of a search, and of one that goes ahead of the results.
const MOST_AT_ONCE: usize = 16;
const MOST_AHEAD_AT_ONCE: usize = 8;
/// Batches that are proposed ahead of the results at most: what is proposed so goes by the cost model alone.
const MOST_AHEAD: usize = 2;
/// A batch that is smaller than this is not worth its inputs.
const SMALLEST_ROOM: usize = 2;
/// Samples that a candidate has in its first race, and at most while the device would wait for compilers otherwise.
const GLANCE: usize = 2;
const PASTIME: usize = 8;
/// Candidates that are checked before those who came meanwhile are looked at.
const FEW: usize = 4;

/// How compiling and measuring share the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    /// Cores that all compilations of the process share.
    pub cores: usize,
    /// Compilations at the same time.
    pub compilers: usize,
    /// Schedules proposed at a time.
    pub batch: usize,
    /// Batches that may be under way while one is still unreported; with none, compiling and measuring take turns.
    pub ahead: usize,
}

impl Pace {
    /// For a host with so many cores, whose device is measured beside compilers or not.
    pub(crate) fn of(cores: usize, beside: bool) -> Self {
        if !beside {
            return Self { cores, compilers: cores, batch: cores.min(MOST_AT_ONCE), ahead: 0 };
        }
        // One is left to those who launch and compare.
        let compilers = cores.saturating_sub((cores / 16).clamp(1, 2)).max(1);
        let batch = compilers.div_ceil(2).clamp(search::SMALLEST_BATCH, MOST_AHEAD_AT_ONCE);
        Self { cores, compilers, batch, ahead: compilers.div_ceil(batch).min(MOST_AHEAD) }
    }
}

/// All that has been tried, and how it stands.
#[derive(Default)]
pub(super) struct Field {
    pub candidates: Vec<Candidate>,
    pub standings: Standings,
    compiled: Compiled,
    /// Sizes whose inputs are made.
    prepared: Vec<Size>,
    /// Whether somebody passed the check at full size.
    some_passed: bool,
    /// Candidates that nothing is awaited for any more, until they are reported.
    settled: Vec<bool>,
    /// What the compilers are done with and nobody has looked at yet.
    ready: Vec<Built>,
    /// When the first kernel was there.
    pub first_kernel: Option<Instant>,
}

/// What comes next.
enum Guide {
    Portfolio(Box<Portfolio>),
    List(Vec<usize>),
}

impl Guide {
    fn next(&mut self, room: usize) -> Vec<usize> {
        match self {
            Guide::Portfolio(search) => search.next(room),
            Guide::List(all) => std::mem::take(all),
        }
    }

    fn report(&mut self, schedule: usize, time: Option<f64>) {
        if let Guide::Portfolio(search) = self {
            search.report(schedule, time);
        }
    }

    fn is_over(&self) -> bool {
        match self {
            Guide::Portfolio(search) => search.is_over(),
            Guide::List(all) => all.is_empty(),
        }
    }

    /// Whether a neighbour leads: its kernels are there, and the first new ones that bring nothing end the search, so
    /// there is nothing to be had by going ahead.
    fn is_led(&self) -> bool {
        matches!(self, Guide::Portfolio(search) if search.is_led())
    }
}

impl Tuning<'_> {
    /// Tries schedules until the guide has no more or the time is up.
    pub(crate) fn search(&mut self, space: &Space, past: &Past, compiler: &dyn Compiler) -> Result<Field> {
        let pace = Pace::of(self.runner.cores(), self.runner.is_measured_beside_compilers());
        let mut guide = self.guide(space, past, &pace);
        let most = match &guide {
            Guide::Portfolio(_) => self.job.max_trials.clamp(1, space.kernels.len()),
            Guide::List(all) => all.len(),
        };
        self.observer.event(&Event::Space { total: space.total, legal: space.legal, chosen: most });
        let builder = Builder::new(compiler, self.templates, self.artifacts.clone(), self.observer, pace.cores);
        std::thread::scope(|scope| {
            let mut compilation = builder.start(scope, pace.compilers.min(most));
            self.try_all(space, &mut guide, &pace, &mut compilation)
        })
    }

    fn try_all(
        &mut self,
        space: &Space,
        guide: &mut Guide,
        pace: &Pace,
        compilation: &mut Compilation<'_>,
    ) -> Result<Field> {
        let mut field = Field::default();
        // Those that are not reported yet.
        let mut batches: VecDeque<Range<usize>> = VecDeque::new();
        let mut is_late = false;
        loop {
            let ahead = if guide.is_led() { 0 } else { pace.ahead };
            while batches.len() <= ahead {
                let room = self.room(&field, compilation.outstanding() + field.ready.len());
                is_late |= room < SMALLEST_ROOM;
                let batch = if is_late { Vec::new() } else { guide.next(room) };
                if batch.is_empty() {
                    break;
                }
                batches.push_back(self.propose(&mut field, space, &batch, compilation));
            }
            let Some(oldest) = batches.front().cloned() else { break };
            if pace.ahead > 0 {
                // The first compilations take their time; the inputs are wanted anyhow.
                self.prepare(&mut field, Size::Small)?;
                self.prepare(&mut field, Size::Full)?;
            }
            let new = self.next_compiled(&mut field, pace, oldest, compilation)?;
            field.compiled.prune(&mut field.candidates, &new, self.observer);
            self.load(&mut field.candidates, &new)?;
            self.check(&mut field, &new)?;
            for &i in new.iter().filter(|i| field.candidates[**i].is_live()) {
                field.standings.enter(i);
            }
            // What is left then is the race.
            if guide.is_over() && compilation.outstanding() == 0 && field.ready.is_empty() {
                break;
            }
            self.glance(&mut field, GLANCE)?;
            while let Some(batch) = batches.front().filter(|b| field.settled[(*b).clone()].iter().all(|s| *s)) {
                for i in batch.clone() {
                    let candidate = &field.candidates[i];
                    match (&candidate.failure, candidate.twin) {
                        (_, Some(twin)) => guide.report(candidate.rank, field.standings.median(twin)),
                        // That is said of the time, not of the schedule.
                        (Some((Stage::Budget, _)), _) => {}
                        (Some(_), _) => guide.report(candidate.rank, None),
                        (None, _) => guide.report(candidate.rank, field.standings.median(i)),
                    }
                }
                batches.pop_front();
            }
        }
        field.standings.grow(field.candidates.len());
        Ok(field)
    }

    /// As many more as the time allows, going by those before.
    fn room(&self, field: &Field, outstanding: usize) -> usize {
        let settled = field.settled.iter().filter(|s| **s).count();
        if settled == 0 {
            return usize::MAX;
        }
        let elapsed = self.started.elapsed();
        let left = self.job.budget.mul_f64(LAST_BATCH).saturating_sub(elapsed);
        let room = left.as_secs_f64() / (elapsed.as_secs_f64() / settled as f64);
        (room as usize).saturating_sub(outstanding)
    }

    /// New candidates: those that no process before this one gave up are ordered from the compilers.
    fn propose(
        &self,
        field: &mut Field,
        space: &Space,
        batch: &[usize],
        compilation: &mut Compilation<'_>,
    ) -> Range<usize> {
        let from = field.candidates.len();
        if from == 0 {
            self.phase(Phase::Compile, Some(batch.len()));
        }
        let share = if from == 0 { LAST_COMPILATION } else { LAST_BATCH };
        let deadline = self.started + self.job.budget.mul_f64(share);
        for &i in batch {
            let mut candidate = Candidate::new(space.kernels[i], i, i == space.default);
            if let Some((stage, reason)) = self.progress.failed(&candidate.kernel.schedule) {
                candidate.fail(*stage, reason.clone(), self.observer);
            }
            field.settled.push(!candidate.is_live());
            if candidate.is_live() {
                compilation.order(Order {
                    candidate: field.candidates.len(),
                    kernel: candidate.kernel,
                    deadline: (!candidate.is_default).then_some(deadline),
                });
            }
            field.candidates.push(candidate);
        }
        from..field.candidates.len()
    }

    /// Candidates that came from the compilers. Where these take turns with the device, the rest of the oldest batch;
    /// otherwise a few of those that are there, the oldest first, so that its batch is soon reported, and nobody before
    /// the first of all, which is the default.
    fn next_compiled(
        &mut self,
        field: &mut Field,
        pace: &Pace,
        oldest: Range<usize>,
        compilation: &mut Compilation<'_>,
    ) -> Result<Vec<usize>> {
        loop {
            field.ready.extend(std::iter::from_fn(|| compilation.poll()));
            field.ready.sort_by_key(|built| built.candidate);
            let is_first_there = field.settled[0] || field.ready.first().is_some_and(|built| built.candidate == 0);
            let count = match pace.ahead {
                0 if compilation.outstanding() > 0 => 0,
                0 => field.ready.len(),
                _ if is_first_there => field.ready.len().min(FEW),
                _ => 0,
            };
            if count > 0 {
                let new: Vec<Built> = field.ready.drain(..count).collect();
                let new = new.into_iter().map(|built| self.take_in(field, built)).collect();
                if field.candidates.iter().any(|c| c.artifact.is_some()) {
                    field.first_kernel.get_or_insert_with(Instant::now);
                }
                return Ok(new);
            }
            if field.settled[oldest.clone()].iter().all(|s| *s) {
                return Ok(Vec::new());
            }
            if pace.ahead > 0 && self.pastime(field)? {
                continue;
            }
            let waiting = Instant::now();
            let Some(built) = compilation.wait() else { return Ok(Vec::new()) };
            if field.first_kernel.is_some() {
                self.log.until_now(Activity::Wait, None, waiting, 0);
            }
            field.ready.push(built);
        }
    }

    /// What became of an order.
    fn take_in(&mut self, field: &mut Field, built: Built) -> usize {
        // What came too late was not begun.
        if !matches!(built.outcome, Err((Stage::Budget, _))) {
            self.log.add(Activity::Compile, Some(built.candidate), built.lane + 1, (built.began, built.ended), 0);
        }
        field.settled[built.candidate] = true;
        let candidate = &mut field.candidates[built.candidate];
        match built.outcome {
            Ok(artifact) => candidate.artifact = Some(artifact),
            Err((stage @ (Stage::Render | Stage::Compile), reason)) => self.give_up(candidate, stage, reason),
            Err((stage, reason)) => candidate.fail(stage, reason, self.observer),
        }
        built.candidate
    }

    /// A first look at those who have fewer samples than that.
    fn glance(&mut self, field: &mut Field, samples: usize) -> Result<()> {
        let rules = Rules::until(self.job.budget.mul_f64(LAST_CHECK)).for_a_glance(samples);
        self.race(field, &rules)
    }

    /// A round that the race would have later, while the device would wait otherwise. Gives whether there was one.
    fn pastime(&mut self, field: &mut Field) -> Result<bool> {
        let Some(fewest) = field.standings.fewest_samples().filter(|n| *n < PASTIME) else { return Ok(false) };
        if self.started.elapsed() >= self.job.budget.mul_f64(LAST_CHECK) {
            return Ok(false);
        }
        self.glance(field, fewest + 1)?;
        Ok(true)
    }

    fn guide(&self, space: &Space, past: &Past, pace: &Pace) -> Guide {
        match &self.job.search {
            Search::Even => Guide::List(space.sample(self.job.max_trials)),
            Search::Only(schedules) => {
                let mut all = vec![space.default];
                for i in schedules.iter().filter_map(|s| space.position(s)) {
                    if !all.contains(&i) {
                        all.push(i);
                    }
                }
                Guide::List(all)
            }
            Search::Guided => {
                let map = Map::new(space.kernels.iter().map(|k| k.schedule));
                let seeds: Vec<usize> = past.seeds.iter().filter_map(|s| space.position(s)).collect();
                let (max, seed) = (self.job.max_trials, self.job.seed);
                let search = Portfolio::new(&space.costs, map, space.default, &seeds, max, seed);
                let mut search = search.in_batches_of(pace.batch).led_by(self.hints(space, past));
                search = search.after_trying(self.job.rivals.iter().filter_map(|s| space.position(s)));
                // Who forces a job may have repaired what failed.
                if !self.job.force {
                    past.failed.keys().filter_map(|s| space.position(s)).for_each(|i| search.fails(i));
                }
                Guide::Portfolio(Box::new(search))
            }
        }
    }

    /// What a neighbour measured, of the schedules that may be tried here. Who forces a job wants it searched anew.
    fn hints(&self, space: &Space, past: &Past) -> Vec<Hint> {
        let Some(neighbour) = past.neighbour.as_ref().filter(|_| !self.job.force) else { return Vec::new() };
        let hint = |(s, us): &(Schedule, f64)| {
            let schedule = space.position(s)?;
            Some(Hint { schedule, us: *us, cost: cost(&space.kernels[schedule], &neighbour.shape, &self.key.device) })
        };
        neighbour.times.iter().filter_map(hint).collect()
    }

    fn load(&mut self, candidates: &mut [Candidate], new: &[usize]) -> Result<()> {
        for &i in new {
            let candidate = &mut candidates[i];
            let Some(artifact) = candidate.artifact.as_ref().filter(|_| candidate.failure.is_none()) else { continue };
            let began = Instant::now();
            let loaded = self.runner.load(i as u32, artifact)?;
            self.log.until_now(Activity::Load, Some(i), began, 0);
            if let Err(reason) = loaded {
                self.give_up(candidate, Stage::Load, reason);
            }
        }
        Ok(())
    }

    /// Makes the inputs of a size, once.
    fn prepare(&mut self, field: &mut Field, size: Size) -> Result<()> {
        if !field.prepared.contains(&size) {
            let began = Instant::now();
            self.runner.prepare(size)?;
            self.log.until_now(Activity::Prepare, None, began, 0);
            field.prepared.push(size);
        }
        Ok(())
    }

    /// Two checks of each: on small ragged inputs, and at the job's own size.
    fn check(&mut self, field: &mut Field, new: &[usize]) -> Result<()> {
        let mut total = 2 * new.iter().filter(|i| field.candidates[**i].is_live()).count();
        if new.contains(&0) {
            self.phase(Phase::Check, Some(total));
        }
        let deadline = self.started + self.job.budget.mul_f64(LAST_CHECK);
        let mut done = 0;
        for (code, size, activity) in [(0, Size::Small, Activity::CheckSmall), (1, Size::Full, Activity::CheckFull)] {
            if !new.iter().any(|i| field.candidates[*i].is_live()) {
                break;
            }
            self.prepare(field, size)?;
            for &i in new {
                let candidate = &mut field.candidates[i];
                if !candidate.is_live() {
                    continue;
                }
                // One must get through, whatever the time.
                if size == Size::Full && field.some_passed && Instant::now() >= deadline {
                    let reason = "the time ran out before its check at full size";
                    candidate.fail(Stage::Budget, reason.into(), self.observer);
                    continue;
                }
                let schedule = candidate.kernel.schedule;
                let checked = match self.progress.checked(&schedule, code) {
                    Some(max_error) => Ok(max_error),
                    None => {
                        let began = Instant::now();
                        let checked = self.runner.check(i as u32, size)?;
                        self.log.until_now(activity, Some(i), began, 0);
                        if let Ok(max_error) = checked {
                            self.progress.add(&schedule, &Lesson::Checked { size: code, max_error });
                            self.observer.event(&Event::Learnt { lessons: self.progress.kept() });
                        }
                        checked
                    }
                };
                match checked {
                    Ok(max_error) => {
                        candidate.max_error = candidate.max_error.max(max_error);
                        field.some_passed |= size == Size::Full;
                        done += 1;
                        self.observer.event(&Event::Checked { schedule: &schedule, done, total });
                    }
                    Err(reason) => {
                        // Who fails on small inputs is not asked again.
                        total -= if size == Size::Small { 2 } else { 1 };
                        self.give_up(candidate, Stage::Check, reason);
                    }
                }
            }
        }
        Ok(())
    }
}
