//! What tuning found, and how it is kept and shipped.
//!
//! ```text
//! tuner -> Store (sled journal) -> publish -> snapshot Bundle -> every reader maps it
//!       -> Artifact files (content-addressed)      export / import -> Bundle file that ships
//! ```
//!
//! Architecture invariants: this crate knows no CUDA and compiles nothing. Readers never open sled. Every byte that
//! reaches a caller was checked against its length and hash first.

mod artifact;
mod device;
mod error;
mod key;
mod record;

pub use artifact::{Artifact, Facts, Recipe};
pub use device::{CompilerId, DeviceFingerprint};
pub use error::{Error, Result};
pub use key::Key;
pub use record::{Finalist, Provenance, Record, RecordKey};
