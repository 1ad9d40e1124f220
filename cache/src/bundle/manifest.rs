//! What a bundle says about itself.

use crate::Validity;
use flashtune_codegen::{Arch, Family};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use std::fmt::Display;
use std::str::FromStr;

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

/// The part of a bundle that is made for one arch, of one family's templates and one ABI.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BundleSet {
    /// Code-generation target, by name.
    #[serde(serialize_with = "name", deserialize_with = "of_name")]
    pub arch: Arch,
    /// Kernel family, by name.
    #[serde(serialize_with = "name", deserialize_with = "of_name")]
    pub family: Family,
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
    /// Its validity fields.
    pub fn validity(&self) -> Validity {
        Validity { arch: self.arch, family: self.family, templates: self.templates.clone(), abi: self.abi }
    }
}

fn name<S: Serializer>(value: &impl Display, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(value)
}

fn of_name<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(d: D) -> Result<T, D::Error> {
    String::deserialize(d)?.parse().map_err(D::Error::custom)
}
