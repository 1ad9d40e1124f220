//! One schedule on its way through a job.

use crate::{Event, Observer};
use flashtune_cache::{Artifact, Stage};
use flashtune_codegen::Kernel;

/// A schedule and what is known about it so far.
#[derive(Clone)]
pub(crate) struct Candidate {
    /// Problem, schedule and arch.
    pub kernel: Kernel,
    /// Whether this is the default schedule.
    pub is_default: bool,
    /// Its place in the cost model's ranking.
    pub rank: usize,
    /// The earlier candidate that has the same code.
    pub twin: Option<usize>,
    /// The compiled kernel.
    pub artifact: Option<Artifact>,
    /// Largest absolute error against the oracle.
    pub max_error: f64,
    /// Where and why it was given up.
    pub failure: Option<(Stage, String)>,
}

impl Candidate {
    pub(crate) fn new(kernel: Kernel, rank: usize, is_default: bool) -> Self {
        Self { kernel, is_default, rank, twin: None, artifact: None, max_error: 0.0, failure: None }
    }

    /// Whether nothing has failed yet.
    pub(crate) fn is_live(&self) -> bool {
        self.failure.is_none()
    }

    /// Gives the candidate up.
    pub(crate) fn fail(&mut self, stage: Stage, reason: String, observer: &dyn Observer) {
        observer.event(&Event::Failed { schedule: &self.kernel.schedule, stage, reason: &reason });
        tracing::trace!(schedule = %self.kernel.schedule, %stage, reason, "candidate given up");
        self.failure = Some((stage, reason));
    }
}
