//! What tuning found for one (device, problem, shape bucket, way of launching).

use crate::{Conditions, DeviceFingerprint, Key, Launches};
use flashtune_codegen::{CallSizes, Problem, Schedule, Shape, ShapeBucket};
use serde::{Deserialize, Serialize};

/// The name of a record.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordKey {
    /// Where it was measured.
    pub device: DeviceFingerprint,
    /// What was computed.
    pub problem: Problem,
    /// The class of sizes.
    pub bucket: ShapeBucket,
    /// How it was launched when it was timed.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub launches: Launches,
}

/// The outcome of tuning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Device, problem, bucket and the way of launching.
    pub key: RecordKey,
    /// The schedule that won.
    pub schedule: Schedule,
    /// Recipe key of the winner's artifact.
    pub artifact: Key,
    /// Every schedule that reached the final, fastest first, with the default among them.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub finalists: Vec<Finalist>,
    /// How and when it was found.
    pub provenance: Provenance,
    /// What other hosts found for the same key, by hash; merging brings them here.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub rivals: Vec<Rival>,
    /// Hashes of earlier findings that this one was raced against or takes the place of.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub settled: Vec<Key>,
}

/// What one tuning found, without its key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rival {
    /// The schedule that won.
    pub schedule: Schedule,
    /// Recipe key of the winner's artifact.
    pub artifact: Key,
    /// Every schedule that reached the final, fastest first.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub finalists: Vec<Finalist>,
    /// How and when it was found.
    pub provenance: Provenance,
}

impl Rival {
    /// The hash that tells findings apart.
    pub fn hash(&self) -> Key {
        Key::of_value("flashtune finding 1", self)
    }
}

/// One schedule of the final.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finalist {
    /// The schedule.
    pub schedule: Schedule,
    /// Median time in microseconds.
    pub median_us: f64,
    /// 10th percentile in microseconds.
    pub p10_us: f64,
    /// 90th percentile in microseconds.
    pub p90_us: f64,
    /// Number of samples.
    pub samples: u32,
    /// Its times in the final, in nanoseconds and in order: those at the same place of all finalists are one round.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub rounds_ns: Vec<u64>,
    /// Largest absolute error against the oracle, on the check inputs.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub max_error: f64,
    /// Whether this is the default schedule.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub is_default: bool,
}

/// How a record came to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Version of flashtune.
    pub flashtune: String,
    /// Hash of the templates of the winner's family ([`flashtune_codegen::TemplateSet::hash_of`]).
    pub templates: String,
    /// The compiler, as text.
    pub compiler: String,
    /// Seconds since the Unix epoch.
    pub unix_time: u64,
    /// The sizes that were timed.
    pub shape: Shape,
    /// Schedules in the space before pruning.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub space: u32,
    /// Schedules that were compiled.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub compiled: u32,
    /// Schedules that were timed.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub timed: u32,
    /// Median time of unfused attention on the same inputs in microseconds, where it was measured.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub unfused_us: Option<f64>,
    /// Wall time of tuning in seconds.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub seconds: f64,
    /// Seconds of it in which something was compiled.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub compile_seconds: f64,
    /// Seconds since the first kernel was there in which the device had work: loading, checking, timing.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub device_seconds: f64,
    /// Seconds since then in which it waited for a compiler.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub waited_seconds: f64,
    /// What else went on while it was measured.
    #[serde(default, skip_serializing_if = "flashtune_codegen::omitted::is_default")]
    pub conditions: Conditions,
}

impl RecordKey {
    /// The hash that stores and bundles file the record under.
    pub fn key(&self) -> Key {
        Key::of_value("flashtune record key 2", self)
    }
}

impl Record {
    /// The sizes that were timed; of a ragged batch those of a usual sequence.
    pub fn sizes(&self) -> CallSizes {
        CallSizes { shape: self.provenance.shape, pages: self.key.bucket.pages }
    }

    /// The finalist that won.
    pub fn winner(&self) -> Option<&Finalist> {
        self.finalists.iter().find(|f| f.schedule == self.schedule)
    }

    /// Time of the default schedule over the winner's; 1 when the default won.
    pub fn gain_over_default(&self) -> Option<f64> {
        let default = self.finalists.iter().find(|f| f.is_default)?;
        Some(default.median_us / self.winner()?.median_us)
    }
}
