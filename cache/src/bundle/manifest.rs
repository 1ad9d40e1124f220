//! What a bundle says about itself.

use crate::Validity;
use serde::{Deserialize, Serialize};

/// The manifest, kept as JSON so that any tool can read it. What a later build adds is left alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of flashtune that wrote the bundle.
    pub flashtune: String,
    /// When, in seconds since the Unix epoch.
    pub created: u64,
    /// What is inside, by validity fields, in their order.
    pub sets: Vec<BundleSet>,
}

/// The part of a bundle that is made for one arch, of one family's templates and one ABI.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BundleSet {
    /// Code-generation target, by name: one of a later build may be among them.
    pub arch: String,
    /// Kernel family, by name: likewise.
    pub family: String,
    /// Hash of the family's templates.
    pub templates: String,
    /// Version of the kernels' argument struct and entry points.
    pub abi: u32,
    /// Number of records.
    pub records: u64,
    /// Number of artifacts.
    pub artifacts: u64,
}

impl BundleSet {
    /// Its validity fields; what this build does not know otherwise.
    pub fn validity(&self) -> Result<Validity, String> {
        let (arch, family) = (self.arch.parse(), self.family.parse());
        let arch = arch.map_err(|_| format!("unknown arch `{}`", self.arch))?;
        let family = family.map_err(|_| format!("unknown family `{}`", self.family))?;
        Ok(Validity { arch, family, templates: self.templates.clone(), abi: self.abi })
    }
}
