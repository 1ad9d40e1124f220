//! What a bundle says about itself.

use crate::Validity;
use flashtune_codegen::Arch;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// The manifest, kept as JSON so that any tool can read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of flashtune that wrote the bundle.
    pub flashtune: String,
    /// When, in seconds since the Unix epoch.
    pub created: u64,
    /// What is inside, by validity fields, in their order.
    pub sets: Vec<BundleSet>,
}

/// The part of a bundle that is made for one arch, template set and ABI.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BundleSet {
    /// Code-generation target, by name.
    #[serde(serialize_with = "arch_name", deserialize_with = "arch_of_name")]
    pub arch: Arch,
    /// Hash of the template set.
    pub templates: String,
    /// Version of the kernels' argument struct and entry points.
    pub abi: u32,
    /// Number of records.
    pub records: u64,
    /// Number of artifacts.
    pub artifacts: u64,
}

impl BundleSet {
    /// Its validity fields.
    pub fn validity(&self) -> Validity {
        Validity { arch: self.arch, templates: self.templates.clone(), abi: self.abi }
    }
}

fn arch_name<S: Serializer>(arch: &Arch, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(arch)
}

fn arch_of_name<'de, D: Deserializer<'de>>(d: D) -> Result<Arch, D::Error> {
    String::deserialize(d)?.parse().map_err(D::Error::custom)
}
