//! What to tune, and what came of it.

use flashtune_cache::{Record, Trial};
use flashtune_codegen::{Problem, Shape};
use std::path::PathBuf;
use std::time::Duration;

/// One tuning job: a problem, the sizes to time it on, and how much may be spent.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// What is computed.
    pub problem: Problem,
    /// The sizes that are timed; the result is filed under their bucket.
    pub shape: Shape,
    /// Largest number of schedules that are compiled.
    pub max_trials: usize,
    /// Wall time for the whole job. It is kept approximately: the default schedule is always compiled, checked and
    /// timed, whatever it takes.
    pub budget: Duration,
    /// Seeds the inputs and the random picks: the same seed tries the same schedules.
    pub seed: u64,
    /// Tune even if the store has a record for the same device, problem, bucket, templates and compiler.
    pub force: bool,
}

impl Job {
    /// A job with 60 trials, 60 seconds and seed 0.
    pub fn new(problem: Problem, shape: Shape) -> Self {
        Self { problem, shape, max_trials: 60, budget: Duration::from_secs(60), seed: 0, force: false }
    }
}

/// The result of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// What was found.
    pub record: Record,
    /// Whether the store already had it and nothing was run.
    pub cached: bool,
    /// Every schedule that was tried, in the order of the model's ranking; empty when `cached`.
    pub trials: Vec<Trial>,
    /// The published snapshot.
    pub snapshot: PathBuf,
}
