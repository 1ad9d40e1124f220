//! Why a plan is what it is, for people and for scripts.

use flashtune_cache::Launches;
use serde::Serialize;
use std::fmt;

/// How far a plan's schedule is backed by measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Status {
    /// Tuned on this device for this class of sizes.
    Tuned,
    /// Tuned on this device for the nearest class of sizes of the same problem.
    NearestShape,
    /// Tuned, but not on this very device, or for the other way of launching: it serves until it is tuned again here.
    Provisional,
    /// Compiled for this arch ahead of time and never measured.
    Untuned,
    /// The default schedule of the family.
    Default,
    /// A schedule that compiles quickly, while another is being compiled.
    Quick,
}

impl Status {
    /// Every status, best first.
    pub const ALL: [Status; 6] =
        [Status::Tuned, Status::NearestShape, Status::Provisional, Status::Untuned, Status::Default, Status::Quick];

    /// Its place in [`Status::ALL`].
    pub(super) const fn index(self) -> usize {
        self as usize
    }

    /// Whether it rests on a measurement, of whatever device and sizes.
    pub const fn is_measured(self) -> bool {
        matches!(self, Status::Tuned | Status::NearestShape | Status::Provisional)
    }

    /// The word used in output.
    pub const fn name(self) -> &'static str {
        match self {
            Status::Tuned => "tuned",
            Status::NearestShape => "nearest shape",
            Status::Provisional => "provisional",
            Status::Untuned => "untuned",
            Status::Default => "default",
            Status::Quick => "quick",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Something that was looked at and not used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// A record, a kernel family, or a binary.
    pub what: String,
    /// The field that spoke against it and its values.
    pub why: String,
}

impl Refusal {
    pub(crate) fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into() }
    }
}

/// The account of one plan: what runs, where it comes from, and why nothing else does.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    /// The problem, e.g. `forward-bf16-d128-causal`.
    pub problem: String,
    /// The sizes that were asked for.
    pub shape: String,
    /// The class of sizes that the answer holds for.
    pub bucket: String,
    /// The device.
    pub device: String,
    /// The code-generation target.
    pub arch: String,
    /// The policy in force.
    pub policy: String,
    /// The kernel family that runs.
    pub family: String,
    /// The schedule that runs.
    pub schedule: String,
    /// Name of the kernel: problem, family, schedule and arch.
    pub kernel: String,
    /// How far the schedule is backed by measurement.
    pub status: Status,
    /// What the status rests on, in words (whose record, which sizes were timed).
    pub because: String,
    /// The layer that the schedule comes from.
    pub layer: String,
    /// Where the binary comes from.
    pub binary: String,
    /// Hash of the template set.
    pub templates: String,
    /// The kernel's instruction path: family, dtype and, where the family has several, which instructions.
    pub path: String,
    /// How sure we are of these instructions, and by which cards.
    pub level: String,
    /// How it was launched when it was timed.
    pub launches: Option<Launches>,
    /// Median time when it was tuned, in microseconds.
    pub tuned_us: Option<f64>,
    /// Time of the default schedule over this one's, when it was tuned.
    pub gain_over_default: Option<f64>,
    /// Of a ragged batch, how its keys are shared out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    /// How results of the same rows become one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merge: Option<String>,
    /// How a key's place is found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages: Option<String>,
    /// Properties of the path that a caller should know (exactness, speed).
    pub notes: Vec<String>,
    /// What was looked at and not used, in the order of the search.
    pub refusals: Vec<Refusal>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, value: &str| writeln!(f, "{name:<10} {value}");
        row("problem", &self.problem)?;
        row("shape", &format!("{} (bucket {})", self.shape, self.bucket))?;
        row("device", &self.device)?;
        row("policy", &self.policy)?;
        row("kernel", &self.family)?;
        row("schedule", &self.schedule)?;
        row("status", &format!("{}: {}", self.status, self.because))?;
        row("layer", &self.layer)?;
        row("binary", &self.binary)?;
        row("templates", &self.templates)?;
        row("level", &self.level)?;
        if let Some(us) = self.tuned_us {
            let gain = self.gain_over_default.map_or(String::new(), |g| format!(", {g:.2}x the default schedule"));
            let launches = self.launches.map_or(String::new(), |l| format!(" ({l} launches)"));
            row("measured", &format!("{us:.1} us{gain}{launches}"))?;
        }
        for (name, how) in [("split", &self.split), ("merge", &self.merge), ("pages", &self.pages)] {
            if let Some(how) = how {
                row(name, how)?;
            }
        }
        for note in &self.notes {
            row("note", note)?;
        }
        for Refusal { what, why } in &self.refusals {
            row("not used", &format!("{what}: {why}"))?;
        }
        Ok(())
    }
}
