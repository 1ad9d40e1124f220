//! The identity of a device and of a compiler, as far as results depend on them.

use flashtune_codegen::Arch;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The device that something was measured on.
///
/// `arch` is a validity field: a record of another arch is never used. The others are confidence fields: a record from
/// a device that differs in them still serves, as provisional, until it is raced again.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceFingerprint {
    /// Code-generation target.
    pub arch: Arch,
    /// Marketing name, e.g. `NVIDIA H200` or the CPU's model name.
    pub name: String,
    /// Multiprocessors, or cores that this process may use.
    pub units: u32,
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// Last-level cache in bytes.
    pub cache_bytes: u64,
    /// Driver version (CUDA) or kernel release (CPU).
    pub driver: String,
}

/// The compiler that made an artifact. Its version is part of the key, because outputs differ between versions.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompilerId {
    /// `nvrtc` or the C compiler's name.
    pub name: String,
    /// Full version.
    pub version: String,
}

impl DeviceFingerprint {
    /// How far the results of one device are from those of another of the same arch; 0 for the same device. In the
    /// scale of [`flashtune_codegen::ShapeBucket::distance`], where 1 is a doubling of the keys.
    pub fn distance(&self, other: &Self) -> f64 {
        let log = |a: u64, b: u64| ((a.max(1) as f64).log2() - (b.max(1) as f64).log2()).abs();
        let differs = |d: bool, weight: f64| if d { weight } else { 0.0 };
        differs(self.name != other.name, 2.0)
            + 2.0 * log(self.units as u64, other.units as u64)
            + log(self.cache_bytes, other.cache_bytes)
            + 0.25 * log(self.memory_bytes, other.memory_bytes)
            + differs(self.driver != other.driver, 0.1)
    }
}

impl fmt::Display for DeviceFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {} units)", self.name, self.arch, self.units)
    }
}

impl fmt::Display for CompilerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.version)
    }
}
