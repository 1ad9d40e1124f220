//! What a job tells while it runs.

use flashtune_cache::{Holder, Record, Stage};
use flashtune_codegen::Schedule;
use std::time::Duration;

/// Receives the events of a job, from several threads during compilation.
pub trait Observer: Sync {
    /// One event.
    fn event(&self, event: &Event<'_>);
}

/// Silent.
impl Observer for () {
    fn event(&self, _: &Event<'_>) {}
}

/// The phases of a job, in the order of their beginnings: on a GPU, compiling goes on while candidates are checked and
/// take their first rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Enumerating, pruning and ranking schedules.
    Space,
    /// Rendering and compiling.
    Compile,
    /// Checking answers against the oracle.
    Check,
    /// Timing all survivors in rounds.
    Race,
    /// Deciding between the finalists by paired measurement.
    Final,
    /// Storing and publishing.
    Publish,
}

/// One thing that happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Event<'a> {
    /// The store already has the record; nothing will run.
    Cached(&'a Record),
    /// Something else has to end first: another process tunes the same, or uses the device. Told again when it is
    /// another process, or when that one is stopped or goes on.
    Waiting {
        /// For what.
        what: &'static str,
        /// The other process, as far as it is known.
        holder: Option<&'a Holder>,
        /// Whether it was stopped, and so does nothing.
        stopped: bool,
    },
    /// The process that has the device was stopped, so that it measures nothing; the job goes on without it.
    Passed {
        /// That process.
        holder: &'a Holder,
    },
    /// The wait is over.
    Waited {
        /// How long it was.
        duration: Duration,
    },
    /// An earlier process began this job; what it learnt is not repeated.
    Resumed {
        /// Checks, failures and times.
        lessons: usize,
    },
    /// Something was learnt that a process after this one would not repeat.
    Learnt {
        /// Checks, failures and times so far.
        lessons: usize,
    },
    /// A phase starts; `total` is its number of steps where that is known.
    Phase {
        /// Which.
        phase: Phase,
        /// Steps.
        total: Option<usize>,
    },
    /// The space was searched by the cost model.
    Space {
        /// Schedules in the space, before pruning.
        total: usize,
        /// Those that fit the device.
        legal: usize,
        /// The most that will be tried.
        chosen: usize,
    },
    /// A schedule was compiled, or its binary was found in the cache.
    Compiled {
        /// The schedule.
        schedule: &'a Schedule,
        /// Schedules done so far.
        done: usize,
        /// Schedules to do.
        total: usize,
    },
    /// A schedule gave the right answer.
    Checked {
        /// The schedule.
        schedule: &'a Schedule,
        /// Schedules done so far.
        done: usize,
        /// Schedules to do.
        total: usize,
    },
    /// A schedule ran once in the race or the final.
    Timed {
        /// The schedule.
        schedule: &'a Schedule,
        /// Round, from 0.
        round: usize,
        /// Time of this launch in microseconds.
        us: f64,
    },
    /// A schedule failed.
    Failed {
        /// The schedule.
        schedule: &'a Schedule,
        /// Where.
        stage: Stage,
        /// Why.
        reason: &'a str,
    },
    /// A schedule is out of the race because others are faster.
    Dropped {
        /// The schedule.
        schedule: &'a Schedule,
        /// Its median over the best one's.
        ratio: f64,
    },
    /// The job is done.
    Winner(&'a Record),
}

impl Phase {
    /// A word for progress bars.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Space => "space",
            Phase::Compile => "compile",
            Phase::Check => "check",
            Phase::Race => "race",
            Phase::Final => "final",
            Phase::Publish => "publish",
        }
    }
}
