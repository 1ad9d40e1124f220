//! What to tune, and what came of it.

use flashtune_cache::{DeviceFingerprint, Launches, Record, Trial};
use flashtune_codegen::{CallSizes, InstructionPath, PageClass, Problem, Schedule, Shape, ShapeBucket};
use std::path::PathBuf;
use std::time::Duration;

/// As good as for ever.
const LONG: Duration = Duration::from_secs(24 * 3600);

/// One tuning job: a problem, the sizes to time it on, and how much may be spent.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// What is computed.
    pub problem: Problem,
    /// The sizes that are timed; the result is filed under their bucket. Of a ragged batch those of a usual sequence:
    /// its sequences are of different lengths, with these as their means.
    pub shape: Shape,
    /// How keys lie, where the batch is ragged.
    pub pages: PageClass,
    /// Largest number of schedules that are compiled.
    pub max_trials: usize,
    /// Wall time for the whole job. It is kept approximately: the default schedule is always compiled, checked and
    /// timed, whatever it takes.
    pub budget: Duration,
    /// Seeds the inputs and the random picks: the same seed tries the same schedules.
    pub seed: u64,
    /// Tune even if the store has a record for the same device, problem, bucket, way of launching, templates and
    /// compiler.
    pub force: bool,
    /// What is tried of the space.
    pub search: Search,
    /// How candidates are launched when they are timed, and so whom the result is for.
    pub launches: Launches,
    /// Schedules that are tried whatever the search thinks of them, as far as they fit: what other layers serve such
    /// calls with ([`flashtune_cache::Layers::rivals`]), so that a result that goes before theirs has beaten them.
    pub rivals: Vec<Schedule>,
    /// Instruction paths that are raced although no card is known to have executed them. One that passes is raised in
    /// the cache folder ([`flashtune_cache::Levels`]).
    pub allowed: Vec<InstructionPath>,
    /// How long to wait for another process that is tuning the same.
    pub patience: Duration,
}

/// What a job tries.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Search {
    /// What looks promising, by the cost model, earlier results and what was measured so far; ends early when nothing
    /// better comes.
    #[default]
    Guided,
    /// An even sample over the whole space, all of it when `max_trials` allows: to record what the space is like.
    Even,
    /// The default and these schedules, as far as they fit.
    Only(Vec<Schedule>),
}

impl Job {
    /// A job with 60 trials, 60 seconds and seed 0, for eager launches.
    pub fn new(problem: Problem, shape: Shape) -> Self {
        Self::of_call(problem, CallSizes::from(&shape))
    }

    /// The same for what calls of these sizes are, of a ragged batch perhaps.
    pub fn of_call(problem: Problem, sizes: CallSizes) -> Self {
        let CallSizes { shape, pages } = sizes;
        Self {
            problem,
            shape,
            pages,
            max_trials: 60,
            budget: Duration::from_secs(60),
            seed: 0,
            force: false,
            search: Search::Guided,
            launches: Launches::Eager,
            rivals: Vec::new(),
            allowed: Vec::new(),
            patience: LONG,
        }
    }

    /// What a kernel is chosen by.
    pub fn sizes(&self) -> CallSizes {
        CallSizes { shape: self.shape, pages: self.pages }
    }

    /// The class of sizes that the result is filed under on a device.
    pub fn bucket(&self, device: &DeviceFingerprint) -> ShapeBucket {
        ShapeBucket::of_call(&self.problem, &self.sizes(), device.units)
    }
}

/// The result of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// What was found.
    pub record: Record,
    /// Whether the store already had it and nothing was run.
    pub cached: bool,
    /// Every schedule that was tried, in the order in which it was; empty when `cached`.
    pub trials: Vec<Trial>,
    /// The published snapshot.
    pub snapshot: PathBuf,
}
