//! The job from end to end.

mod claim;
mod field;
mod log;
mod measure;

use crate::candidate::Candidate;
use crate::runner::{Inputs, Runner};
use crate::search::Past;
use crate::space::space;
use crate::stats::{median, percentile};
use crate::{Error, Event, Job, Observer, Outcome, Phase, Result, Search};
use claim::Begun;
#[cfg(test)]
pub(crate) use field::Pace;
use flashtune_cache::{
    ArtifactFiles, CacheDir, KeptLevel, Launches, Lesson, Levels, Needed, Progress, Provenance, Record, RecordKey,
    Stage, Store, Trial, TrialResult,
};
use flashtune_codegen::{Family, InstructionPath, Level, Op, Paths, Schedule, TemplateSet};
use flashtune_runtime::{Compiler, no_graphs, require_room};
use log::Log;
use measure::{Measured, finalists, nanoseconds};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The longest budget: as good as none.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
/// How long to wait for another process that writes to the journal, which takes a moment each time.
pub(crate) const STORE_PATIENCE: Duration = Duration::from_secs(120);
/// Failures that an error tells in full.
const REASONS: usize = 3;

/// Tunes one problem on one device: searches, compiles, checks, races, stores the record and publishes it.
///
/// A record that the cache already has for the same device, problem, bucket, way of launching, templates and compiler
/// is returned as it is, unless the job is forced. Of several processes that tune the same into one cache, one does and
/// the others wait for its record ([`Job::patience`]); of those that tune something else on the same device one
/// measures at a time. A job that was killed goes on where it was. Schedules that fail are part of the result
/// ([`Outcome::trials`]).
///
/// # Errors
/// [`Error::Job`] for sizes that cannot be timed; [`Error::Runtime`] for graphs on a device that has none;
/// [`Error::NothingWorks`] with the first reasons when no schedule came through; [`Error::Lost`] when the device no
/// longer runs what it ran before; [`Error::Noise`] when it cannot be told which is the fastest, and nothing is stored;
/// [`Error::Busy`] when another process is at it for too long; [`Error::Runtime`] when there is no compiler or no
/// memory; [`Error::Worker`] when worker processes end before a candidate runs in them; [`Error::Cache`] when the cache
/// folder fails.
pub fn tune(
    runner: &mut Runner,
    templates: &TemplateSet,
    dir: &CacheDir,
    job: &Job,
    observer: &dyn Observer,
) -> Result<Outcome> {
    validate(job, runner)?;
    require_room(runner.fingerprint(), &job.problem, &job.shape)?;
    // Deadlines are points in time, and those end.
    let job = &Job { budget: job.budget.min(LONGEST), ..job.clone() };
    let device = runner.fingerprint().clone();
    let bucket = job.bucket(&device);
    let key = RecordKey { device, problem: job.problem, bucket, launches: job.launches };
    let span = tracing::info_span!("flashtune.tune", problem = %job.problem, shape = %job.shape, device = %key.device);
    let _in_span = span.enter();
    dir.create()?;
    // Looked for once: each look may start a process.
    let compiler = runner.compiler();
    let mut tuning = Tuning {
        artifacts: ArtifactFiles::new(dir),
        progress: Progress::default(),
        runner,
        templates,
        dir,
        job,
        key,
        observer,
        started: Instant::now(),
        log: Log::new(),
    };
    match tuning.begin(compiler)? {
        Begun::Answered(outcome) => Ok(*outcome),
        Begun::Mine { compiler, past, claims } => {
            let outcome = tuning.run(&compiler, &past);
            // An error of the surroundings leaves what was learnt to the next process, but what a lost device said of
            // candidates is not to be believed.
            if matches!(outcome, Ok(_) | Err(Error::Noise { .. } | Error::NothingWorks { .. } | Error::Lost { .. })) {
                std::mem::take(&mut tuning.progress).finish();
            }
            drop(claims);
            outcome
        }
    }
}

/// What the steps of a job share.
struct Tuning<'a> {
    runner: &'a mut Runner,
    templates: &'a TemplateSet,
    dir: &'a CacheDir,
    artifacts: ArtifactFiles,
    job: &'a Job,
    key: RecordKey,
    observer: &'a dyn Observer,
    /// What this job has learnt, and what a process before this one had.
    progress: Progress,
    /// When the work began: waiting for others does not count.
    started: Instant,
    /// What ran when.
    log: Log,
}

impl Tuning<'_> {
    fn run(&mut self, compiler: &Arc<dyn Compiler>, past: &Past) -> Result<Outcome> {
        (self.started, self.log) = (Instant::now(), Log::new());
        self.phase(Phase::Space, None);
        let needed = Needed::new(self.key.device.arch, self.templates);
        let levels = Levels::new(self.dir);
        let paths = levels.apply(Paths::allowing(self.job.allowed.iter().copied()), &needed);
        let device = &self.key.device;
        let space = space(&self.job.problem, &self.job.sizes(), device, &paths, &self.of_interest(past))?;
        self.runner.start(&Inputs::of(self.job));
        let mut field = self.search(&space, past, &**compiler)?;
        let measured = self.measure(&mut field)?;
        let waited_seconds = self.log.waited_seconds();
        let since_first_kernel = field.first_kernel.map_or(Duration::ZERO, |first| first.elapsed());
        let found = unix_time();
        let compiler = compiler.id().to_string();
        let candidates = &field.candidates;
        let trials = self.trials(candidates, measured.as_ref(), &compiler);
        let store = Store::open_within(self.dir, STORE_PATIENCE)?;
        for trial in &trials {
            store.put_trial(&self.key, trial)?;
        }
        let schedules = candidates.iter().map(|c| c.kernel.schedule).collect();
        store.put_timeline(&self.key, &self.log.timeline(found, schedules))?;
        let Some(measured) = measured else {
            return Err(self.nothing_works(candidates));
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
            finalists: finalists(candidates, &measured),
            provenance: Provenance {
                flashtune: env!("CARGO_PKG_VERSION").to_owned(),
                templates: self.templates.hash_of(winner.kernel.schedule.family()).to_owned(),
                compiler,
                unix_time: found,
                shape: self.job.shape,
                space: space.total as u32,
                compiled: candidates.iter().filter(|c| c.artifact.is_some()).count() as u32,
                timed: measured.samples.iter().filter(|s| !s.is_empty()).count() as u32,
                unfused_us: self.runner.unfused_us(winner_us),
                seconds: self.started.elapsed().as_secs_f64(),
                compile_seconds: self.log.compile_seconds(),
                device_seconds: (since_first_kernel.as_secs_f64() - waited_seconds).max(0.0),
                waited_seconds,
                conditions: measured.conditions.clone(),
            },
            key: self.key.clone(),
            rivals: Vec::new(),
            settled: Vec::new(),
        };
        let record = record.settling(store.record(&self.key)?.as_ref());
        self.phase(Phase::Publish, None);
        store.put_record(&record)?;
        // A record whose kernel was not kept is nothing to those who may not compile.
        if self.artifacts.get(&artifact).is_none() {
            self.artifacts.put(kernel)?;
        }
        let snapshot = store.publish(&self.artifacts)?;
        for level in raised(candidates, &record, &paths, &needed) {
            match levels.raise(&level) {
                Ok(_) => tracing::info!(path = %level.path, device = %level.device, "raced on this device"),
                Err(e) => tracing::warn!(path = %level.path, error = %e, "its level could not be kept"),
            }
        }
        self.observer.event(&Event::Winner(&record));
        Ok(Outcome { record, cached: false, trials, snapshot })
    }

    /// Schedules that belong to the space whatever the cost model thinks of them.
    fn of_interest(&self, past: &Past) -> Vec<Schedule> {
        let named: &[Schedule] = if let Search::Only(named) = &self.job.search { named } else { &[] };
        past.schedules().chain(&self.job.rivals).chain(named).copied().collect()
    }

    /// What became of every candidate.
    fn trials(&self, candidates: &[Candidate], measured: Option<&Measured>, compiler: &str) -> Vec<Trial> {
        let trial = |(i, candidate): (usize, &Candidate)| {
            let samples = measured.map_or(&[][..], |m| &m.samples[i]);
            let result = match &candidate.failure {
                Some((stage, reason)) => TrialResult::Failed { stage: *stage, reason: reason.clone() },
                None => TrialResult::Timed {
                    median_us: median(samples).unwrap_or(f64::NAN),
                    p10_us: percentile(samples, 0.1).unwrap_or(f64::NAN),
                    p90_us: percentile(samples, 0.9).unwrap_or(f64::NAN),
                    samples: samples.len() as u32,
                    race_ns: measured.map_or_else(Vec::new, |m| nanoseconds(m.race(i))),
                    max_error: candidate.max_error,
                },
            };
            Trial {
                schedule: candidate.kernel.schedule,
                templates: self.templates.hash_of(candidate.kernel.schedule.family()).to_owned(),
                compiler: compiler.to_owned(),
                artifact: candidate.artifact.as_ref().map(|a| a.recipe.key()),
                result,
                unix_time: unix_time(),
            }
        };
        candidates.iter().enumerate().map(trial).collect()
    }

    /// Gives a candidate up, for good: a process that goes on with the job does not try it again.
    fn give_up(&mut self, candidate: &mut Candidate, stage: Stage, reason: String) {
        let lesson = Lesson::Failed { stage, reason: reason.clone() };
        self.progress.add(&candidate.kernel.schedule, &lesson);
        self.observer.event(&Event::Learnt { lessons: self.progress.kept() });
        candidate.fail(stage, reason, self.observer);
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

/// Levels of the instruction paths that a job has raced, and of which no candidate was wrong, where that is news.
fn raised(candidates: &[Candidate], record: &Record, paths: &Paths, needed: &Needed) -> Vec<KeptLevel> {
    let (problem, device, arch) = (&record.key.problem, &record.key.device, needed.arch());
    let families: BTreeSet<Family> = record.finalists.iter().map(|f| f.schedule.family()).collect();
    let wrong = |family: Family| {
        let of_family = candidates.iter().filter(|c| c.kernel.schedule.family() == family);
        of_family.filter_map(|c| c.failure.as_ref()).any(|(stage, _)| *stage == Stage::Check)
    };
    let mut raised = Vec::new();
    for family in families.into_iter().filter(|f| !wrong(*f)) {
        let path = InstructionPath::of(family, problem, arch);
        if paths.would_raise(&path, &family.evidence(problem, arch), arch, Level::Raced) {
            let found = record.provenance.unix_time;
            raised.push(KeptLevel::new(path, needed, Level::Raced, &device.name, "tune", found));
        }
    }
    raised
}

/// Refuses jobs that have nothing to time, contradict themselves, or ask for what the device has not.
fn validate(job: &Job, runner: &Runner) -> Result<()> {
    job.problem.validate()?;
    job.shape.validate()?;
    let bad = |field, value: String, limit, remedy| Err(Error::Job { field, value, limit, remedy });
    let kind = job.shape.mask.kind();
    if kind != job.problem.mask {
        let value = format!("{} for a {} problem", job.shape.mask, job.problem.mask);
        return bad("mask", value, "the shape's mask bounds other sides than the problem's", "make them agree");
    }
    let (limit, remedy) = match job.problem.op {
        Op::Forward => ("", ""),
        Op::Backward if job.problem.kv.is_dense() => ("", ""),
        Op::Backward => ("gradients of packed sequences are not tuned", "tune those of dense tensors"),
        _ => ("there is nothing to choose between", "tune forward and backward problems; the others have one schedule"),
    };
    if !limit.is_empty() {
        return bad("problem", job.problem.to_string(), limit, remedy);
    }
    if job.problem.dropout && job.pages.tokens().is_some() {
        let limit = "packed queries and keys drop scores: decoding over pages does not";
        return bad("dropout", job.problem.to_string(), limit, "name pages `packed`, or tune without dropout");
    }
    if job.problem.kv.is_dense() != job.pages.is_dense() && job.problem.kv.is_dense() {
        return bad(
            "pages",
            job.pages.to_string(),
            "dense tensors have no pages",
            "leave them out, or name a ragged problem",
        );
    }
    if job.shape.is_empty() || job.shape.kv_len == 0 {
        return bad("shape", job.shape.to_string(), "there is nothing to compute", "give sizes of at least 1");
    }
    if job.launches == Launches::Graph && !runner.has_graphs() {
        return Err(no_graphs().into());
    }
    Ok(())
}

fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map(|d| d.as_secs()).unwrap_or(0)
}

#[cfg(test)]
mod tests;
