//! The job from end to end.

use crate::build::{Builder, prune};
use crate::candidate::Candidate;
use crate::decide::{FinalRules, NOISE, Rounds, decide, run_final};
use crate::race::{RaceEvent, Rules, Track, race};
use crate::runner::{Inputs, Runner, Size};
use crate::space::choose;
use crate::stats::{median, percentile};
use crate::{Error, Event, Job, Observer, Outcome, Phase, Result};
use flashtune_cache::{
    ArtifactFiles, Bundle, Conditions, Finalist, Key, Provenance, Record, RecordKey, Stage, Store, Trial, TrialResult,
};
use flashtune_codegen::{Kernel, Schedule, ShapeBucket, TemplateSet};
use flashtune_runtime::compile::compile_with;
use flashtune_runtime::require_room;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Schedules that meet in the final, besides the default.
const FINALISTS: usize = 3;
/// The longest budget: as good as none.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
/// Rounds of a final. When noise hides the result and the time allows, four times as many.
const MAX_ROUNDS: usize = 75;
/// Failures that an error tells in full.
const REASONS: usize = 3;

/// Tunes one problem on one device: searches, compiles, checks, races, stores the record and publishes it.
///
/// A record that the store already has for the same device, problem, bucket, templates and compiler is returned as it
/// is, unless the job is forced. Schedules that fail are part of the result ([`Outcome::trials`]).
///
/// # Errors
/// [`Error::Job`] for sizes that cannot be timed; [`Error::NothingWorks`] with the first reasons when no schedule came
/// through; [`Error::Noise`] when it cannot be told which is the fastest, and nothing is stored; [`Error::Runtime`] when there is no compiler or no memory; [`Error::Worker`] when worker processes end
/// before a candidate runs in them; [`Error::Cache`] when the store fails.
pub fn tune(
    runner: &mut Runner,
    templates: &TemplateSet,
    store: &Store,
    artifacts: &ArtifactFiles,
    job: &Job,
    observer: &dyn Observer,
) -> Result<Outcome> {
    validate(job)?;
    require_room(runner.fingerprint(), &job.problem, &job.shape)?;
    // Deadlines are points in time, and those end.
    let job = &Job { budget: job.budget.min(LONGEST), ..job.clone() };
    Tuning { runner, templates, store, artifacts, job, observer, started: Instant::now() }.run()
}

/// What the steps of a job share.
struct Tuning<'a> {
    runner: &'a mut Runner,
    templates: &'a TemplateSet,
    store: &'a Store,
    artifacts: &'a ArtifactFiles,
    job: &'a Job,
    observer: &'a dyn Observer,
    started: Instant,
}

/// What the measurement gave, by candidate index.
struct Measured {
    winner: usize,
    /// What else went on.
    conditions: Conditions,
    /// Why the winner may owe it to noise.
    noise: Option<String>,
    finalists: Vec<usize>,
    /// All samples of the race and the final.
    samples: Vec<Vec<f64>>,
}

impl Tuning<'_> {
    fn run(mut self) -> Result<Outcome> {
        let key = RecordKey {
            device: self.runner.fingerprint().clone(),
            problem: self.job.problem,
            bucket: ShapeBucket::of(&self.job.shape),
        };
        if let Some(outcome) = self.cached(&key)? {
            return Ok(outcome);
        }
        let compiler = self.runner.compiler()?;
        self.phase(Phase::Space, None);
        let space = choose(&self.job.problem, &self.job.shape, &key.device, self.job.max_trials, self.job.seed)?;
        let (total, legal, chosen) = (space.total, space.legal, space.chosen.len());
        self.observer.event(&Event::Space { total, legal, chosen });
        let mut candidates: Vec<Candidate> =
            space.chosen.into_iter().enumerate().map(|(i, kernel)| Candidate::new(kernel, i == 0)).collect();

        self.phase(Phase::Compile, Some(candidates.len()));
        let compiling = Instant::now();
        let deadline = self.started + self.job.budget / 2;
        let builder = Builder {
            compiler: &*compiler,
            templates: self.templates,
            files: self.artifacts,
            observer: self.observer,
            deadline,
        };
        builder.build(&mut candidates);
        let compile_seconds = compiling.elapsed().as_secs_f64();
        prune(&mut candidates, self.observer);

        self.runner.start(&Inputs::of(self.job));
        self.load(&mut candidates)?;
        self.check(&mut candidates)?;
        let measured = self.measure(&mut candidates)?;
        let compiler = compiler.id().to_string();
        let trials = self.journal(&key, &candidates, measured.as_ref(), &compiler)?;
        let Some(measured) = measured else {
            return Err(self.nothing_works(&candidates));
        };
        if let Some(reason) = measured.noise {
            return Err(Error::Noise { problem: self.job.problem.to_string(), shape: self.job.shape, reason });
        }

        let winner = &candidates[measured.winner];
        let kernel = winner.artifact.as_ref().expect("a winner was compiled");
        let artifact = kernel.recipe.key();
        let winner_us = median(&measured.samples[measured.winner]).unwrap_or(f64::INFINITY);
        let record = Record {
            schedule: winner.kernel.schedule,
            artifact,
            finalists: finalists(&candidates, &measured),
            provenance: Provenance {
                flashtune: env!("CARGO_PKG_VERSION").to_owned(),
                templates: self.templates.hash().to_owned(),
                compiler,
                unix_time: unix_time(),
                shape: self.job.shape,
                space: total as u32,
                compiled: candidates.iter().filter(|c| c.artifact.is_some()).count() as u32,
                timed: measured.samples.iter().filter(|s| !s.is_empty()).count() as u32,
                unfused_us: self.runner.unfused_us(winner_us),
                seconds: self.started.elapsed().as_secs_f64(),
                compile_seconds,
                conditions: measured.conditions.clone(),
            },
            key,
        };
        self.phase(Phase::Publish, None);
        self.store.put_record(&record)?;
        // A record whose kernel was not kept is nothing to those who may not compile.
        if self.artifacts.get(&artifact).is_none() {
            self.artifacts.put(kernel)?;
        }
        let snapshot = self.store.publish(self.artifacts)?;
        self.observer.event(&Event::Winner(&record));
        Ok(Outcome { record, cached: false, trials, snapshot })
    }

    /// The stored answer, if it is one for these templates and this compiler, with its kernel at hand.
    fn cached(&mut self, key: &RecordKey) -> Result<Option<Outcome>> {
        if self.job.force {
            return Ok(None);
        }
        let Some(record) = self.store.record(key)? else { return Ok(None) };
        if record.provenance.templates != self.templates.hash() {
            return Ok(None);
        }
        // Without a compiler nothing could be tuned anyway, so what is stored is the answer.
        let compiler = self.runner.compiler();
        if compiler.as_ref().is_ok_and(|c| c.id().to_string() != record.provenance.compiler) {
            return Ok(None);
        }
        let snapshot = self.store.snapshot_path().to_path_buf();
        let published = Bundle::map(&snapshot).ok();
        let in_snapshot = |k: &Key| published.as_ref().is_some_and(|b| matches!(b.artifact(k), Ok(Some(_))));
        if !in_snapshot(&record.artifact) {
            // The kernel was lost on the way; its schedule was not.
            if self.artifacts.get(&record.artifact).is_none() {
                let kernel = Kernel { problem: key.problem, schedule: record.schedule, arch: key.device.arch };
                let artifact = compile_with(&*compiler?, &kernel, self.templates)?;
                if self.artifacts.put(&artifact)? != record.artifact {
                    return Ok(None);
                }
            }
            self.store.publish(self.artifacts)?;
        }
        self.observer.event(&Event::Cached(&record));
        Ok(Some(Outcome { record, cached: true, trials: Vec::new(), snapshot }))
    }

    fn load(&mut self, candidates: &mut [Candidate]) -> Result<()> {
        for (i, candidate) in candidates.iter_mut().enumerate().filter(|(_, c)| c.is_live()) {
            let Some(artifact) = &candidate.artifact else { continue };
            if let Err(reason) = self.runner.load(i as u32, artifact)? {
                candidate.fail(Stage::Load, reason, self.observer);
            }
        }
        Ok(())
    }

    /// Two checks of each: on small ragged inputs, and at the job's own size.
    fn check(&mut self, candidates: &mut [Candidate]) -> Result<()> {
        let mut total = 2 * candidates.iter().filter(|c| c.is_live()).count();
        self.phase(Phase::Check, Some(total));
        let deadline = self.started + self.job.budget * 3 / 4;
        let mut done = 0;
        for size in [Size::Small, Size::Full] {
            if !candidates.iter().any(Candidate::is_live) {
                break;
            }
            self.runner.prepare(size)?;
            // One must get through, whatever the time.
            let mut passed = false;
            for (i, candidate) in candidates.iter_mut().enumerate().filter(|(_, c)| c.is_live()) {
                if size == Size::Full && passed && Instant::now() >= deadline {
                    let reason = "the time ran out before its check at full size";
                    candidate.fail(Stage::Budget, reason.into(), self.observer);
                    continue;
                }
                match self.runner.check(i as u32, size)? {
                    Ok(max_error) => {
                        candidate.max_error = candidate.max_error.max(max_error);
                        (passed, done) = (true, done + 1);
                        let schedule = &candidate.kernel.schedule;
                        self.observer.event(&Event::Checked { schedule, done, total });
                    }
                    Err(reason) => {
                        // Who fails on small inputs is not asked again.
                        total -= if size == Size::Small { 2 } else { 1 };
                        candidate.fail(Stage::Check, reason, self.observer);
                    }
                }
            }
        }
        Ok(())
    }

    /// Race and final. `None` when nobody could be timed. Who fails or never gets a turn is given up here.
    fn measure(&mut self, candidates: &mut [Candidate]) -> Result<Option<Measured>> {
        let contenders: Vec<usize> = (0..candidates.len()).filter(|&i| candidates[i].is_live()).collect();
        let schedules: Vec<Schedule> = contenders.iter().map(|&i| candidates[i].kernel.schedule).collect();
        let default = contenders.iter().position(|&i| candidates[i].is_default);
        let mut readings = vec![self.runner.reading()];
        let mut track =
            RunnerTrack { runner: &mut *self.runner, ids: &contenders, started: self.started, broken: None };
        let mut failures: Vec<(usize, String)> = Vec::new();
        let observer = self.observer;
        let mut report = |event: RaceEvent<'_>| match event {
            RaceEvent::Timed { contender, round, us } => {
                observer.event(&Event::Timed { schedule: &schedules[contender], round, us });
            }
            RaceEvent::Dropped { contender, ratio } => {
                observer.event(&Event::Dropped { schedule: &schedules[contender], ratio });
            }
            // The observer hears of it when the candidate is given up, below.
            RaceEvent::Failed { contender, reason } => failures.push((contender, reason.to_owned())),
        };

        observer.event(&Event::Phase { phase: Phase::Race, total: None });
        let budget = self.job.budget;
        let left = budget.saturating_sub(self.started.elapsed());
        let rules = Rules::until(self.started.elapsed() + left * 3 / 4);
        let mut standings = race(&mut track, contenders.len(), default, &rules, &mut report);
        let mut ranking = standings.ranking();

        let rules = FinalRules {
            min_rounds: 7,
            max_rounds: MAX_ROUNDS,
            stubborn_rounds: 4 * MAX_ROUNDS,
            deadline: budget,
            // A winner that is sure is worth some more time than was asked for, but not without end.
            hard_deadline: budget + budget / 2,
        };
        let (alive, rounds) = loop {
            let mut finalists: Vec<usize> = ranking.iter().copied().take(FINALISTS).collect();
            finalists.extend(default.filter(|d| ranking.contains(d) && !finalists.contains(d)));
            observer.event(&Event::Phase { phase: Phase::Final, total: Some(finalists.len()) });
            let (alive, rounds) = run_final(&mut track, &finalists, default, &rules, &mut report);
            // Should all of them fail, the next best have their turn.
            if !alive.is_empty() || finalists.is_empty() {
                break (alive, rounds);
            }
            ranking.retain(|c| !finalists.contains(c));
        };
        if let Some(e) = track.broken {
            return Err(e);
        }
        readings.push(self.runner.reading());
        for (position, &contender) in alive.iter().enumerate() {
            standings.samples[contender].extend(rounds.times(position));
        }
        for (contender, reason) in failures {
            standings.samples[contender].clear();
            candidates[contenders[contender]].fail(Stage::Measure, reason, self.observer);
        }
        let mut samples = vec![Vec::new(); candidates.len()];
        for (own, &i) in standings.samples.into_iter().zip(&contenders) {
            if own.is_empty() && candidates[i].is_live() {
                candidates[i].fail(Stage::Budget, "the time ran out before it was timed".into(), self.observer);
            }
            samples[i] = own;
        }
        if alive.is_empty() {
            return Ok(None);
        }
        let default = alive.iter().position(|&c| Some(c) == default);
        // Contenders are numbered in the model's order.
        let winner = decide(&rounds, alive.len(), default, &alive);
        let conditions = Conditions::of(&readings);
        Ok(Some(Measured {
            winner: contenders[alive[winner]],
            noise: noise(&rounds, alive.len(), default.unwrap_or(0), winner, &conditions),
            conditions,
            finalists: alive.iter().map(|&c| contenders[c]).collect(),
            samples,
        }))
    }

    /// Writes what became of every candidate to the journal.
    fn journal(
        &self,
        key: &RecordKey,
        candidates: &[Candidate],
        measured: Option<&Measured>,
        compiler: &str,
    ) -> Result<Vec<Trial>> {
        let mut trials = Vec::with_capacity(candidates.len());
        for (i, candidate) in candidates.iter().enumerate() {
            let samples = measured.map_or(&[][..], |m| &m.samples[i]);
            let result = match &candidate.failure {
                Some((stage, reason)) => TrialResult::Failed { stage: *stage, reason: reason.clone() },
                None => TrialResult::Timed {
                    median_us: median(samples).unwrap_or(f64::NAN),
                    p10_us: percentile(samples, 0.1).unwrap_or(f64::NAN),
                    p90_us: percentile(samples, 0.9).unwrap_or(f64::NAN),
                    samples: samples.len() as u32,
                    max_error: candidate.max_error,
                },
            };
            let trial = Trial {
                schedule: candidate.kernel.schedule,
                templates: self.templates.hash().to_owned(),
                compiler: compiler.to_owned(),
                artifact: candidate.artifact.as_ref().map(|a| a.recipe.key()),
                result,
                unix_time: unix_time(),
            };
            self.store.put_trial(key, &trial)?;
            trials.push(trial);
        }
        Ok(trials)
    }

    fn nothing_works(&self, candidates: &[Candidate]) -> Error {
        let failures = candidates.iter().filter_map(|c| c.failure.as_ref().map(|f| (c, f)));
        let reasons = failures
            .take(REASONS)
            .map(|(c, (stage, reason))| format!("\n  {} ({stage}): {reason}", c.kernel.schedule))
            .collect();
        Error::NothingWorks {
            problem: self.job.problem.to_string(),
            device: self.runner.fingerprint().to_string(),
            tried: candidates.len(),
            reasons,
        }
    }

    fn phase(&self, phase: Phase, total: Option<usize>) {
        self.observer.event(&Event::Phase { phase, total });
    }
}

/// Candidates that race where they run.
struct RunnerTrack<'a> {
    runner: &'a mut Runner,
    /// The candidates by contender.
    ids: &'a [usize],
    started: Instant,
    /// What ended the race for everybody.
    broken: Option<Error>,
}

impl Track for RunnerTrack<'_> {
    fn sample(&mut self, contender: usize) -> Result<f64, String> {
        if let Some(e) = &self.broken {
            return Err(e.to_string());
        }
        let timed = self.runner.time(self.ids[contender] as u32);
        timed.unwrap_or_else(|e| {
            let reason = e.to_string();
            self.broken = Some(e);
            Err(reason)
        })
    }

    fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

/// The final's schedules for the record, fastest first.
fn finalists(candidates: &[Candidate], measured: &Measured) -> Vec<Finalist> {
    let mut finalists: Vec<Finalist> = measured
        .finalists
        .iter()
        .filter_map(|&i| {
            let (candidate, samples) = (&candidates[i], &measured.samples[i]);
            Some(Finalist {
                schedule: candidate.kernel.schedule,
                median_us: median(samples)?,
                p10_us: percentile(samples, 0.1)?,
                p90_us: percentile(samples, 0.9)?,
                samples: samples.len() as u32,
                max_error: candidate.max_error,
                is_default: candidate.is_default,
            })
        })
        .collect();
    finalists.sort_by(|a, b| a.median_us.total_cmp(&b.median_us));
    finalists
}

/// Why the decision of a final cannot be trusted: its ratios were hidden by noise for as long as the final may last, or
/// something disturbed the device and shows in the winner's times. A final that was cut short is not noisy: then the
/// default wins.
fn noise(rounds: &Rounds, count: usize, base: usize, winner: usize, conditions: &Conditions) -> Option<String> {
    let doubt = rounds.doubt(count, base);
    if rounds.0.len() >= MAX_ROUNDS && doubt > NOISE {
        let (rounds, percent) = (rounds.0.len(), 100.0 * doubt);
        return Some(format!(
            "after {rounds} rounds the fastest is known to within {percent:.0} % only ({conditions})"
        ));
    }
    let times: Vec<f64> = rounds.times(winner).collect();
    let spread = (percentile(&times, 0.75)? - percentile(&times, 0.25)?) / median(&times)?;
    let disturbance = conditions.disturbance().filter(|_| spread > NOISE)?;
    Some(format!("{disturbance}, and half of the winner's times are {:.0} % apart", 100.0 * spread))
}

/// Refuses jobs that have nothing to time or contradict themselves.
fn validate(job: &Job) -> Result<()> {
    job.problem.validate()?;
    job.shape.validate()?;
    let bad = |field, value: String, limit, remedy| Err(Error::Job { field, value, limit, remedy });
    if let Some(program) = job.problem.program {
        let remedy = "run them with the policy `default`: they take the model's schedule";
        return bad("program", program.name(), "kernels of score programs are not tuned yet", remedy);
    }
    let kind = job.shape.mask.kind();
    if kind != job.problem.mask {
        let value = format!("{} for a {} problem", job.shape.mask, job.problem.mask);
        return bad("mask", value, "the shape's mask bounds other sides than the problem's", "make them agree");
    }
    if job.shape.is_empty() || job.shape.kv_len == 0 {
        return bad("shape", job.shape.to_string(), "there is nothing to compute", "give sizes of at least 1");
    }
    Ok(())
}

fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map(|d| d.as_secs()).unwrap_or(0)
}

#[cfg(test)]
mod tests;
