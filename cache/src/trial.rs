//! What happened to one schedule in one tuning job.

use crate::{Key, RecordKey};
use flashtune_codegen::Schedule;
use serde::{Deserialize, Serialize};
use std::fmt;

/// One schedule's fate. Failures are data: they tell the next job what not to try.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// The schedule.
    pub schedule: Schedule,
    /// Hash of the template set.
    pub templates: String,
    /// The compiler, as text.
    pub compiler: String,
    /// Recipe key of its artifact, once it compiled.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub artifact: Option<Key>,
    /// What happened.
    pub result: TrialResult,
    /// Seconds since the Unix epoch.
    pub unix_time: u64,
}

/// The end of one trial.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum TrialResult {
    /// It ran correctly and was timed.
    Timed {
        /// Median time in microseconds.
        median_us: f64,
        /// 10th percentile in microseconds.
        p10_us: f64,
        /// 90th percentile in microseconds.
        p90_us: f64,
        /// Number of samples, in the race and in the final.
        samples: u32,
        /// Its times in the race, in nanoseconds and in order. Those of the final are in the record.
        race_ns: Vec<u64>,
        /// Largest absolute error against the oracle, on the check inputs.
        max_error: f64,
    },
    /// It was given up.
    Failed {
        /// Where.
        stage: Stage,
        /// Why, in the words of whoever found it.
        reason: String,
    },
}

/// The stages that a schedule passes through, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stage {
    /// Rendering the source.
    Render,
    /// Compiling it.
    Compile,
    /// Reading the compiler's facts: spills, and binaries equal to another schedule's.
    Prune,
    /// Loading the binary on the device.
    Load,
    /// Checking the answer against the oracle.
    Check,
    /// Timing.
    Measure,
    /// The job's time ran out before its turn.
    Budget,
}

impl Trial {
    /// The key under which the journal keeps the trial: a new one of the same schedule, templates and compiler
    /// replaces the old.
    pub(crate) fn key(&self, record: &RecordKey) -> [u8; 64] {
        let mut key = [0; 64];
        key[..32].copy_from_slice(&record.key().0);
        let own = Key::of_value("flashtune trial 1", &(&self.schedule, &self.templates, &self.compiler));
        key[32..].copy_from_slice(&own.0);
        key
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Render => "render",
            Stage::Compile => "compile",
            Stage::Prune => "prune",
            Stage::Load => "load",
            Stage::Check => "check",
            Stage::Measure => "measure",
            Stage::Budget => "budget",
        })
    }
}
