//! The data of a report. Units are in the names; JSON has the same names.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The version of the format that this build reads and writes.
pub const FORMAT: u32 = 1;

/// One run of a benchmark on one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`FORMAT`].
    pub format: u32,
    /// What it is about, in a few words.
    pub title: String,
    /// By what and when it was made.
    pub made: Made,
    /// The device that ran the kernels.
    pub device: DeviceFacts,
    /// How it was measured, in sentences.
    #[serde(default)]
    pub method: Vec<String>,
    /// What the device reaches at best, measured in the same run.
    #[serde(default)]
    pub ceilings: Ceilings,
    /// What was measured.
    pub points: Vec<Point>,
    /// Answers compared with a reference.
    #[serde(default)]
    pub checks: Vec<Check>,
    /// Latency over a real distribution of lengths.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lengths: Option<LengthReport>,
    /// Steps of a server over a trace of requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served: Option<ServedReport>,
}

/// By what and when a report was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Made {
    /// The command line.
    pub command: String,
    /// Date and time (RFC 3339, UTC).
    pub date: String,
    /// Name and version, or commit, of everything that matters: flashtune, its templates, compilers, peers.
    #[serde(default)]
    pub software: BTreeMap<String, String>,
}

/// The device that ran the kernels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// Marketing name.
    pub name: String,
    /// Code-generation target, e.g. `sm_90a`.
    pub arch: String,
    /// Multiprocessors, or cores that the process could use.
    pub units: u32,
    /// Device memory in bytes; 0 when unknown.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Last-level cache in bytes; 0 when unknown.
    #[serde(default)]
    pub cache_bytes: u64,
    /// Driver version, or the operating system's.
    pub driver: String,
}

/// What the device reaches at best, measured in the same run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// Matrix multiplication, per dtype.
    #[serde(default)]
    pub matmul: Vec<MatmulCeiling>,
    /// Copying in device memory; bytes read plus bytes written per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<Ceiling>,
    /// Reading device memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<Ceiling>,
    /// Ceilings that could not be measured, and why, in sentences.
    #[serde(default)]
    pub absent: Vec<String>,
}

/// A measured rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ceiling {
    /// Gigabytes (1e9) per second.
    pub gbytes_per_s: f64,
    /// By what it was measured.
    pub how: String,
}

/// A measured rate of multiplying matrices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MatmulCeiling {
    /// The dtype of the attention problems that it bounds.
    pub dtype: String,
    /// 1e12 floating-point operations per second.
    pub tflops: f64,
    /// By what it was measured.
    pub how: String,
}

/// One problem and size, with what every contender made of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The part of the benchmark that it belongs to, e.g. `forward`, `decode`.
    pub suite: String,
    /// What was computed.
    pub case: Case,
    /// Floating-point operations on live (query, key) pairs.
    pub flops: f64,
    /// Bytes of Q, K and V read once and O written once: the fewest that can be moved.
    pub ideal_bytes: f64,
    /// Bytes of the matrix of scores (`batch * heads * q_len * kv_len` elements of the dtype), which a fused kernel
    /// does not store.
    pub scores_bytes: f64,
    /// What the first contender is to reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aim: Option<Aim>,
    /// State of the device around the measurement, where it can be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Conditions>,
    /// One entry per contender.
    pub results: Vec<Measured>,
}

/// What is to be reached at a point.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Aim {
    /// In words, e.g. `98 % of the read rate`.
    pub what: String,
    /// The microseconds that follow from it; absent where what they follow from was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub us: Option<f64>,
}

/// A problem and its sizes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Case {
    /// What it is called, where sizes alone do not say what it is: sequences of several lengths, a cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// How K and V are kept, where they are no dense tensors, e.g. `pages of 16, e4m3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// `f16`, `bf16`, `f32`.
    pub dtype: String,
    /// Head dim of Q and K.
    pub head_dim_qk: u32,
    /// Head dim of V and O.
    pub head_dim_v: u32,
    /// `full`, `causal` or `window:LEFT,RIGHT`.
    pub mask: String,
    /// Sequences.
    pub batch: u32,
    /// Query heads.
    pub heads: u32,
    /// Key/value heads.
    pub kv_heads: u32,
    /// Rows of Q per head; of the sequence that has most, where they differ.
    pub q_len: u32,
    /// Rows of K and V per head; of the longest sequence, where they differ.
    pub kv_len: u32,
}

/// Clocks and power around a measurement.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// Clock of the multiprocessors in MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_clock_mhz: Option<f64>,
    /// Clock of the memory in MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_clock_mhz: Option<f64>,
    /// Power in watts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_w: Option<f64>,
    /// Temperature in degrees Celsius.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<f64>,
    /// Why the clock was held down, if it was.
    #[serde(default)]
    pub throttle: Vec<String>,
}

/// What one contender did at a point: a latency, or why there is none.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Its name, the same at all points.
    pub contender: String,
    /// The schedule or kernel that ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<String>,
    /// The times; absent when it did not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<Latency>,
    /// The times of single launches, where the above are those of launches that follow each other in a graph.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub single_us: Option<Latency>,
    /// Why it did not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub absent: Option<String>,
    /// Bytes that its tiles load and store, by the model of its schedule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tile_bytes: Option<f64>,
    /// Bytes of that which reach memory past the last-level cache, by the same model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<f64>,
    /// Anything a reader should know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// What follows from the above; computed when a report is made or read, whatever the file says.
    #[serde(default, skip_deserializing)]
    pub derived: Derived,
}

/// Times of one contender at one point, in microseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Half of the samples are below it.
    pub median: f64,
    /// A tenth of the samples is below it.
    pub p10: f64,
    /// Nine tenths of the samples are below it.
    pub p90: f64,
    /// Number of samples.
    pub samples: u64,
    /// The samples in the order in which they were taken, round after round.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub times: Vec<f64>,
    /// Medians of the repeats, where the whole measurement was repeated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repeats: Vec<f64>,
}

/// What follows from a measurement, its point and the ceilings.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Derived {
    /// 1e12 operations per second.
    pub tflops: Option<f64>,
    /// Ideal bytes over time, in 1e9 bytes per second.
    pub gbytes_per_s: Option<f64>,
    /// Of the matmul ceiling of the dtype, 0 to 1.
    pub matmul_share: Option<f64>,
    /// Of the copy ceiling, 0 to 1, counted on ideal bytes.
    pub copy_share: Option<f64>,
    /// Of the read ceiling, likewise.
    pub read_share: Option<f64>,
    /// Of the roofline: the lower of the matmul ceiling and what the ceiling of memory allows for the ideal bytes.
    pub roofline_share: Option<f64>,
    /// Speed in proportion to the fastest contender of the point; 1 is the fastest.
    pub of_best: Option<f64>,
    /// `(p90 - p10) / median`; over the repeats' medians where there are several, `(max - min) / median`.
    pub spread: Option<f64>,
}

/// An answer compared with a reference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Who computed it.
    pub contender: String,
    /// What was computed.
    pub case: Case,
    /// Largest error against the reference; absent when it did not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_error: Option<f64>,
    /// Largest error of unfused attention in the same dtype: the yardstick.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfused_error: Option<f64>,
    /// Whether the numeric contract holds: at most twice the yardstick.
    pub passed: bool,
    /// The reference, or what went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Latency over a real distribution of lengths.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LengthReport {
    /// The file, or what it holds.
    pub source: String,
    /// Number of sequences.
    pub count: u64,
    /// Mean length.
    pub mean: f64,
    /// Lengths at shares of the sequences, ascending.
    pub quantiles: Vec<Quantile>,
    /// One curve per problem and contender.
    pub curves: Vec<LengthCurve>,
}

/// A value that a share of all sequences does not exceed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Quantile {
    /// The share, 0 to 1.
    pub p: f64,
    /// The value.
    pub value: f64,
}

/// Latency of one contender over the distribution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LengthCurve {
    /// What was computed, without the lengths.
    pub problem: String,
    /// Who.
    pub contender: String,
    /// Mean over all sequences, in microseconds.
    pub mean_us: f64,
    /// Latency at shares of the sequences, ascending, in microseconds.
    pub quantiles_us: Vec<Quantile>,
}

/// A trace of requests, served step by step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServedReport {
    /// The file of requests.
    pub source: String,
    /// Heads, dims, cache and limits, in words.
    pub model: String,
    /// Requests that were served.
    pub requests: u64,
    /// Hash of the schedule: equal ones are the same steps of the same sequences.
    pub schedule: String,
    /// Tokens that were computed: those of prompts and those that were generated.
    pub tokens: u64,
    /// Tokens that were generated.
    pub generated: u64,
    /// Seconds of all steps together.
    pub seconds: f64,
    /// The steps together (first), and those of each kind.
    pub steps: Vec<StepTimes>,
    /// The kernels that ran, and at how many launches.
    #[serde(default)]
    pub kernels: BTreeMap<String, u64>,
}

/// The times of steps of one kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepTimes {
    /// `all`, `prefill`, `decode`, `mixed`.
    pub kind: String,
    /// Steps.
    pub steps: u64,
    /// Tokens that they computed.
    pub tokens: u64,
    /// Mean time of a step, in microseconds.
    pub mean_us: f64,
    /// Times at shares of the steps, ascending, in microseconds.
    pub quantiles_us: Vec<Quantile>,
}

impl ServedReport {
    /// Tokens per second over all steps.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

impl StepTimes {
    /// The time at a share, in microseconds.
    pub fn us_at(&self, p: f64) -> Option<f64> {
        at(&self.quantiles_us, p)
    }
}

impl LengthReport {
    /// The length at a share.
    pub fn length_at(&self, p: f64) -> Option<f64> {
        at(&self.quantiles, p)
    }
}

impl LengthCurve {
    /// The latency at a share, in microseconds.
    pub fn us_at(&self, p: f64) -> Option<f64> {
        at(&self.quantiles_us, p)
    }
}

fn at(quantiles: &[Quantile], p: f64) -> Option<f64> {
    quantiles.iter().find(|q| (q.p - p).abs() < 1e-9).map(|q| q.value)
}
