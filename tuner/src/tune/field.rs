//! The search: batches of candidates on their way to the race.

use super::Tuning;
use crate::build::{Builder, Compiled};
use crate::candidate::Candidate;
use crate::model::cost;
use crate::race::{Rules, Standings};
use crate::runner::Size;
use crate::search::{Hint, Map, Past, Portfolio};
use crate::space::Space;
use crate::{Event, Phase, Result, Search};
use flashtune_cache::{Lesson, Stage};
use flashtune_codegen::Schedule;
use flashtune_runtime::Compiler;
use std::time::Instant;

/// Shares of the budget after which no other batch begins, no compilation starts, and no candidate is checked at full
/// size any more.
const LAST_BATCH: f64 = 0.55;
const LAST_COMPILATION: f64 = 0.5;
const LAST_CHECK: f64 = 0.75;
/// The largest batch of a search.
const MOST_AT_ONCE: usize = 16;
/// A batch that is smaller than this is not worth its inputs.
const SMALLEST_BATCH: usize = 2;

/// All that has been tried, and how it stands.
#[derive(Default)]
pub(super) struct Field {
    pub candidates: Vec<Candidate>,
    pub standings: Standings,
    compiled: Compiled,
    /// Sizes whose inputs are made.
    prepared: Vec<Size>,
    /// Wall time spent compiling.
    pub compile_seconds: f64,
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
}

impl Tuning<'_> {
    /// Tries schedules batch by batch, until the guide has no more or the time is up.
    pub fn search(&mut self, space: &Space, past: &Past, compiler: &dyn Compiler) -> Result<Field> {
        let mut guide = self.guide(space, past);
        let most = match &guide {
            Guide::Portfolio(_) => self.job.max_trials.clamp(1, space.kernels.len()),
            Guide::List(all) => all.len(),
        };
        self.observer.event(&Event::Space { total: space.total, legal: space.legal, chosen: most });
        let mut field = Field::default();
        let mut room = usize::MAX;
        loop {
            let batch = guide.next(room);
            if batch.is_empty() {
                break;
            }
            let from = field.candidates.len();
            let new = batch.iter().map(|&i| Candidate::new(space.kernels[i], i, i == space.default));
            field.candidates.extend(new);
            self.resume(&mut field.candidates[from..]);
            self.compile(&mut field, from, compiler);
            self.load(&mut field.candidates, from)?;
            self.check(&mut field, from)?;
            field.standings.enter(field.candidates.len(), |i| field.candidates[i].is_live());
            if guide.is_over() {
                break;
            }
            let glance = Rules::glance(self.job.budget.mul_f64(LAST_CHECK));
            self.race(&mut field, &glance)?;
            for (i, candidate) in field.candidates.iter().enumerate().skip(from) {
                match (&candidate.failure, candidate.twin) {
                    (_, Some(twin)) => guide.report(candidate.rank, field.standings.median(twin)),
                    // That is said of the time, not of the schedule.
                    (Some((Stage::Budget, _)), _) => {}
                    (Some(_), _) => guide.report(candidate.rank, None),
                    (None, _) => guide.report(candidate.rank, field.standings.median(i)),
                }
            }
            // As many as the time allows, going by those before.
            let elapsed = self.started.elapsed();
            let left = self.job.budget.mul_f64(LAST_BATCH).saturating_sub(elapsed);
            room = (left.as_secs_f64() / (elapsed.as_secs_f64() / field.candidates.len() as f64)) as usize;
            if room < SMALLEST_BATCH {
                break;
            }
        }
        Ok(field)
    }

    fn guide(&self, space: &Space, past: &Past) -> Guide {
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
                // As many as compile at the same time; beyond, results are worth more than compilers that idle.
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                let search = Portfolio::new(&space.costs, map, space.default, &seeds, max, seed);
                let mut search = search.in_batches_of(cores.min(MOST_AT_ONCE)).led_by(self.hints(space, past));
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

    /// What a process before this one gave up stays so.
    fn resume(&self, candidates: &mut [Candidate]) {
        for candidate in candidates {
            if let Some((stage, reason)) = self.progress.failed(&candidate.kernel.schedule) {
                candidate.fail(*stage, reason.clone(), self.observer);
            }
        }
    }

    fn compile(&mut self, field: &mut Field, from: usize, compiler: &dyn Compiler) {
        let candidates = &mut field.candidates[from..];
        if from == 0 {
            self.phase(Phase::Compile, Some(candidates.len()));
        }
        let start = Instant::now();
        let share = if from == 0 { LAST_COMPILATION } else { LAST_BATCH };
        let builder = Builder {
            compiler,
            templates: self.templates,
            files: &self.artifacts,
            observer: self.observer,
            deadline: self.started + self.job.budget.mul_f64(share),
        };
        builder.build(candidates);
        field.compile_seconds += start.elapsed().as_secs_f64();
        for candidate in candidates.iter() {
            if let Some((stage @ (Stage::Render | Stage::Compile), reason)) = &candidate.failure {
                let lesson = Lesson::Failed { stage: *stage, reason: reason.clone() };
                self.progress.add(&candidate.kernel.schedule, &lesson);
            }
        }
        field.compiled.prune(&mut field.candidates, from, self.observer);
    }

    fn load(&mut self, candidates: &mut [Candidate], from: usize) -> Result<()> {
        for (i, candidate) in candidates.iter_mut().enumerate().skip(from).filter(|(_, c)| c.is_live()) {
            let Some(artifact) = &candidate.artifact else { continue };
            if let Err(reason) = self.runner.load(i as u32, artifact)? {
                self.give_up(candidate, Stage::Load, reason);
            }
        }
        Ok(())
    }

    /// Two checks of each: on small ragged inputs, and at the job's own size.
    fn check(&mut self, field: &mut Field, from: usize) -> Result<()> {
        let mut total = 2 * field.candidates[from..].iter().filter(|c| c.is_live()).count();
        if from == 0 {
            self.phase(Phase::Check, Some(total));
        }
        let deadline = self.started + self.job.budget.mul_f64(LAST_CHECK);
        let mut done = 0;
        for (code, size) in [(0, Size::Small), (1, Size::Full)] {
            if !field.candidates[from..].iter().any(Candidate::is_live) {
                break;
            }
            if !field.prepared.contains(&size) {
                self.runner.prepare(size)?;
                field.prepared.push(size);
            }
            // One must get through, whatever the time.
            let mut passed = from > 0;
            let new = field.candidates.iter_mut().enumerate().skip(from);
            for (i, candidate) in new.filter(|(_, c)| c.is_live()) {
                if size == Size::Full && passed && Instant::now() >= deadline {
                    let reason = "the time ran out before its check at full size";
                    candidate.fail(Stage::Budget, reason.into(), self.observer);
                    continue;
                }
                let schedule = candidate.kernel.schedule;
                let checked = match self.progress.checked(&schedule, code) {
                    Some(max_error) => Ok(max_error),
                    None => {
                        let checked = self.runner.check(i as u32, size)?;
                        if let Ok(max_error) = checked {
                            self.progress.add(&schedule, &Lesson::Checked { size: code, max_error });
                        }
                        checked
                    }
                };
                match checked {
                    Ok(max_error) => {
                        candidate.max_error = candidate.max_error.max(max_error);
                        (passed, done) = (true, done + 1);
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
