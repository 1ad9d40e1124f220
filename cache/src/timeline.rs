//! What ran when in a tuning.

use flashtune_codegen::Schedule;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The spans of one tuning, in the order of their beginnings. The journal keeps those of the last tuning of each
/// record.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Timeline {
    /// When the record was found, in seconds since the Unix epoch: what was tuned at another time has another timeline.
    pub unix_time: u64,
    /// What the spans' numbers mean.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub schedules: Vec<Schedule>,
    /// What happened.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub spans: Vec<Span>,
}

/// One thing that took some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// What.
    pub activity: Activity,
    /// With which schedule, where it was one.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub schedule: Option<u32>,
    /// Who did it: 0 is the device with those who wait for it, the others are compilers.
    pub lane: u32,
    /// Microseconds from the beginning of the work.
    pub start_us: u64,
    /// Microseconds.
    pub duration_us: u64,
    /// Times that were taken in it.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub samples: u32,
}

/// What a span was spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// Rendering and compiling, or finding the kernel in the cache.
    Compile,
    /// Making inputs.
    Prepare,
    /// Loading a kernel.
    Load,
    /// Small ragged inputs.
    CheckSmall,
    /// A part of the job's own grid, then the whole.
    CheckFull,
    /// Rounds of the race.
    Race,
    /// The final.
    Final,
    /// Nothing, for want of compiled kernels.
    Wait,
}

impl Activity {
    /// All of them, in the order in which a schedule meets them.
    pub const ALL: [Activity; 8] = [
        Activity::Compile,
        Activity::Prepare,
        Activity::Load,
        Activity::CheckSmall,
        Activity::CheckFull,
        Activity::Race,
        Activity::Final,
        Activity::Wait,
    ];
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Activity::Compile => "compile",
            Activity::Prepare => "prepare inputs",
            Activity::Load => "load",
            Activity::CheckSmall => "check, small",
            Activity::CheckFull => "probe and check",
            Activity::Race => "race",
            Activity::Final => "final",
            Activity::Wait => "wait",
        })
    }
}
