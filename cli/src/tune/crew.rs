//! Several devices that share the work: one worker process and one thread for each, a queue for each kind.

use super::watcher::{SeatWatcher, Watcher};
use crate::cases::Case;
use crate::context::own_worker;
use anyhow::Result;
use flashtune::{DeviceSpec, Error, InstructionPath};
use flashtune_cache::{CacheDir, DeviceFingerprint, Launches, Layers, Needed, RecordKey};
use flashtune_codegen::{Schedule, TemplateSet};
use flashtune_tuner::{Error as TunerError, Job, Outcome, Runner, Search, tune, tune_together};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Seconds for each contested record.
pub(crate) const CONTESTED_BUDGET: f64 = 20.0;

/// How often it is looked whether there is something to tell.
const TICK: Duration = Duration::from_millis(250);

/// The devices that the user names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Devices {
    /// Every GPU of this machine.
    All,
    /// These.
    Named(Vec<DeviceSpec>),
}

impl FromStr for Devices {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        if s == "all" {
            return Ok(Devices::All);
        }
        let names = s.split(',').map(|name| name.trim().parse::<DeviceSpec>().map_err(|e| e.to_string()));
        names.collect::<Result<_, _>>().map(Devices::Named)
    }
}

impl Devices {
    /// A worker on each. Which GPUs there are is found by opening one after the other in workers, so that this process
    /// never touches the driver.
    pub(crate) fn runners(&self) -> Result<Vec<Runner>> {
        let open = |spec| Ok::<_, anyhow::Error>(Runner::worker(own_worker()?, spec).map_err(Error::from)?);
        match self {
            Devices::Named(specs) => specs.iter().map(|spec| open(*spec)).collect(),
            Devices::All => {
                let mut runners = vec![open(DeviceSpec::Cuda(0))?];
                for n in 1.. {
                    match open(DeviceSpec::Cuda(n)) {
                        Ok(runner) => runners.push(runner),
                        Err(e) => {
                            tracing::debug!("{n} GPUs: {e}");
                            break;
                        }
                    }
                }
                Ok(runners)
            }
        }
    }
}

/// Devices of one kind share results, so they share the work; each kind has all of it to do.
pub(crate) fn by_kind(runners: Vec<Runner>) -> Vec<(DeviceFingerprint, Vec<Runner>)> {
    let mut kinds: Vec<(DeviceFingerprint, Vec<Runner>)> = Vec::new();
    for runner in runners {
        match kinds.iter_mut().find(|(kind, _)| kind == runner.fingerprint()) {
            Some((_, crew)) => crew.push(runner),
            None => kinds.push((runner.fingerprint().clone(), vec![runner])),
        }
    }
    kinds
}

/// What one device does at a time.
#[derive(Debug, Clone)]
pub(crate) enum Task {
    /// One problem with its sizes.
    Case(Case),
    /// Sizes of one problem, together.
    Together(Vec<Case>),
    /// Schedules of which hosts disagree.
    Contested(Case, Vec<Schedule>),
}

/// The records of the cache that hosts disagree about, for one device and way of launching.
pub(crate) fn contested(
    dir: &CacheDir,
    device: &DeviceFingerprint,
    launches: Launches,
    templates: &TemplateSet,
) -> Result<Vec<Task>> {
    let needed = Needed::new(device.arch, templates);
    let layers = Layers::open(dir, &[], None)?;
    let mut tasks = Vec::new();
    for (_, record, validity) in layers.records() {
        if record.key.device != *device || record.key.launches != launches || needed.difference(&validity).is_some() {
            continue;
        }
        let mut schedules: Vec<Schedule> = record.contested().map(|r| r.schedule).collect();
        if !schedules.is_empty() {
            schedules.insert(0, record.schedule);
            let case = Case::new(record.key.problem, record.sizes());
            tasks.push(Task::Contested(case, schedules));
        }
    }
    Ok(tasks)
}

/// The queue of one kind of device.
pub(crate) struct Work {
    pub tasks: Vec<Task>,
    next: AtomicUsize,
    devices: usize,
}

impl Task {
    /// How many records it is about.
    pub(crate) fn cases(&self) -> usize {
        match self {
            Task::Case(_) | Task::Contested(..) => 1,
            Task::Together(cases) => cases.len(),
        }
    }
}

impl Work {
    pub(crate) fn new(tasks: Vec<Task>, devices: usize) -> Self {
        Self { tasks, next: AtomicUsize::new(0), devices }
    }
}

/// What every job may take.
pub(crate) struct Limits {
    pub budget: Duration,
    pub trials: Option<usize>,
    pub seed: u64,
    pub force: bool,
    pub search: Search,
    pub launches: Launches,
    /// Instruction paths that are raced although no card is known to have executed them.
    pub allowed: Vec<InstructionPath>,
    pub patience: Option<Duration>,
}

/// What came of it.
#[derive(Default)]
pub(crate) struct Done {
    /// In the order of the tasks.
    pub outcomes: Vec<Outcome>,
    pub failures: Vec<String>,
}

/// What has come of it so far.
#[derive(Default)]
struct Results {
    /// With the number of their task.
    outcomes: Vec<(usize, Outcome)>,
    failures: Vec<String>,
    /// What ends the command.
    fatal: Option<TunerError>,
}

/// What the threads share.
struct Shared<'a> {
    limits: &'a Limits,
    templates: &'a TemplateSet,
    dir: &'a CacheDir,
    layers: &'a Layers,
    watcher: &'a Watcher,
    start: Instant,
    results: Mutex<Results>,
    over: AtomicBool,
}

/// Does all of it.
///
/// # Errors
/// What makes the first job fail, if nothing was tuned before: a missing compiler or a full disk stops every job.
pub(crate) fn run(
    mut works: Vec<(Work, Vec<Runner>)>,
    limits: &Limits,
    templates: &TemplateSet,
    dir: &CacheDir,
    layers: &Layers,
    watcher: &Watcher,
) -> Result<Done, TunerError> {
    let results = Mutex::default();
    let shared = Shared {
        limits,
        templates,
        dir,
        layers,
        watcher,
        start: Instant::now(),
        results,
        over: AtomicBool::new(false),
    };
    std::thread::scope(|scope| {
        let (at_work, all_done) = std::sync::mpsc::channel::<()>();
        let mut seat = 0;
        for (work, crew) in &mut works {
            for runner in crew {
                let (shared, work, at_work) = (&shared, &*work, at_work.clone());
                let watcher = watcher.seat(seat);
                seat += 1;
                scope.spawn(move || {
                    shared.serve(work, runner, &watcher);
                    drop(at_work);
                });
            }
        }
        drop(at_work);
        // Until the last one is done.
        while all_done.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
            watcher.tick();
        }
    });
    let Results { mut outcomes, mut failures, fatal } =
        shared.results.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(e) = fatal {
        return Err(e);
    }
    // A device that was lost begins nothing any more.
    let left: usize = works.iter().map(|(w, _)| w.tasks.len().saturating_sub(w.next.load(Ordering::Relaxed))).sum();
    if left > 0 {
        failures.push(format!("{left} more were not begun"));
    }
    outcomes.sort_by_key(|(task, _)| *task);
    Ok(Done { outcomes: outcomes.into_iter().map(|(_, outcome)| outcome).collect(), failures })
}

impl Shared<'_> {
    /// One device's part: takes task after task.
    fn serve(&self, work: &Work, runner: &mut Runner, watcher: &SeatWatcher<'_>) {
        loop {
            let task = work.next.fetch_add(1, Ordering::Relaxed);
            if task >= work.tasks.len() || self.over.load(Ordering::Relaxed) {
                break;
            }
            // What earlier tasks left unused belongs to the later ones; so many at a time as there are devices.
            let left = work.tasks.len() - task;
            let working = self.start.elapsed().saturating_sub(self.watcher.waited() / work.devices as u32);
            let share = self.limits.budget.saturating_sub(working) * work.devices.min(left) as u32 / left as u32;
            watcher.begin(&work.tasks[task]);
            let outcome = self.task(&work.tasks[task], share, runner, watcher);
            let is_lost = matches!(outcome, Err(TunerError::Lost { .. }));
            watcher.end(match &outcome {
                Ok(outcomes) => Ok((outcomes.len(), outcomes.iter().filter(|o| o.cached).count())),
                Err(e) => Err(e.to_string()),
            });
            self.note(task, &work.tasks[task], outcome);
            if is_lost {
                break;
            }
        }
    }

    fn task(
        &self,
        task: &Task,
        share: Duration,
        runner: &mut Runner,
        watcher: &SeatWatcher<'_>,
    ) -> Result<Vec<Outcome>, TunerError> {
        let Limits { trials, seed, force, search, launches, patience, allowed, .. } = self.limits;
        let device = runner.fingerprint().clone();
        let job = |case: &Case, parts: usize| {
            // Rows that are padded have the kernels of the padded ones.
            let problem = if case.problem.pads(device.arch) { case.problem.padded() } else { case.problem };
            let job = Job::of_call(problem, case.sizes());
            let (device, bucket) = (device.clone(), job.bucket(&device));
            let needed = Needed::new(device.arch, self.templates);
            let wanted = RecordKey { device, problem, bucket, launches: *launches };
            Job {
                max_trials: trials.unwrap_or(job.max_trials),
                budget: share / parts as u32,
                seed: *seed,
                force: *force,
                search: search.clone(),
                launches: *launches,
                allowed: allowed.clone(),
                rivals: self.layers.rivals(&needed, &wanted),
                patience: patience.unwrap_or(job.patience),
                ..job
            }
        };
        let one = |runner: &mut Runner, job: &Job| {
            tune(runner, self.templates, self.dir, job, watcher).map(|outcome| vec![outcome])
        };
        match task {
            Task::Case(case) => one(runner, &job(case, 1)),
            Task::Contested(case, schedules) => {
                one(runner, &Job { search: Search::Only(schedules.clone()), force: true, ..job(case, 1) })
            }
            Task::Together(cases) => {
                let jobs: Vec<Job> = cases.iter().map(|case| job(case, cases.len())).collect();
                tune_together(runner, self.templates, self.dir, &jobs, watcher)
            }
        }
    }

    fn note(&self, number: usize, task: &Task, outcome: Result<Vec<Outcome>, TunerError>) {
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        let Results { outcomes: done, failures, fatal } = &mut *results;
        match outcome {
            Ok(outcomes) => done.extend(outcomes.into_iter().map(|outcome| (number, outcome))),
            // Another case may be easier to measure.
            Err(e @ (TunerError::Noise { .. } | TunerError::Busy { .. })) => failures.push(e.to_string()),
            Err(e) if failures.is_empty() && done.is_empty() => {
                fatal.get_or_insert(e);
                self.over.store(true, Ordering::Relaxed);
            }
            Err(e) => {
                let (Task::Case(case) | Task::Contested(case, _)) = task else {
                    failures.push(e.to_string());
                    return;
                };
                failures.push(format!("{} {}: {e}", case.problem, case.sizes()));
            }
        }
    }
}
