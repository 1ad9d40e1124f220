//! What tuning found, and how it is kept and shipped.
//!
//! ```text
//! tuner -> Store (sled journal) -> publish -> snapshot Bundle -> every reader maps it
//!       -> Artifact files (content-addressed)      export / import -> Bundle file that ships
//! ```
//!
//! ```no_run
//! use flashtune_cache::{CacheDir, Layers};
//!
//! # fn main() -> flashtune_cache::Result<()> {
//! // What a reader has: the user's own results, and those of a bundle that a trusted key has signed.
//! let layers = Layers::open(&CacheDir::resolve(None)?, &["tuned.ftb".into()], None)?;
//! for (layer, record, _) in layers.records() {
//!     println!("{layer}: {} on {} by {}", record.key.problem, record.key.device, record.schedule);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Architecture invariants: this crate knows no CUDA and compiles nothing. Readers never open sled. Every byte that
//! reaches a caller was checked against its length and hash first.

mod artifact;
mod bundle;
mod claim;
mod conditions;
mod device;
mod dir;
pub mod encoding;
mod error;
mod evict;
mod exchange;
mod files;
mod folder;
mod holder;
mod key;
mod launches;
mod layers;
mod layout;
mod levels;
mod merge;
mod progress;
mod publish;
mod record;
mod regular;
mod stale;
mod store;
mod temporary;
#[cfg(test)]
mod testing;
mod timeline;
mod trial;
mod trouble;
mod trust;
mod upkeep;
mod validity;

pub use artifact::{Artifact, Facts, Recipe};
pub use bundle::{
    Bundle, BundleContents, BundleSet, FORMAT as BUNDLE_FORMAT, Manifest, PublicKey, SecretKey, sign_bundle,
};
pub use claim::{Claim, Claims, Turn};
pub use conditions::{Conditions, Reading};
pub use device::{CompilerId, DeviceFingerprint};
pub use dir::{CACHE_VARIABLE, CacheDir, SnapshotId};
pub use error::{Error, Result};
pub use evict::LIMIT_VARIABLE;
pub use exchange::{ExchangeSummary, ExportFilter, export, import, import_bundle};
pub use files::{ArtifactFiles, Origin};
pub use holder::Holder;
pub use key::Key;
pub use launches::Launches;
pub use layers::{
    BUNDLES_VARIABLE, EMBEDDED_LAYER, FILES_LAYER, Found, LayerInfo, Layers, Match, MatchQuality, RecordRefusal,
    SNAPSHOT_LAYER, bundles_from_env,
};
pub use levels::{KeptLevel, Levels};
pub use merge::{MergeSummary, merge_bundles};
pub use progress::{Lesson, Progress};
pub use record::{Finalist, Provenance, Record, RecordKey, Rival};
pub use stale::reap;
pub use store::Store;
pub use temporary::TemporaryFolder;
pub use timeline::{Activity, Span, Timeline};
pub use trial::{Stage, Trial, TrialResult};
pub use trouble::{Troubles, troubles};
pub use trust::{ALLOW_UNSIGNED_VARIABLE, TRUSTED_KEYS_VARIABLE, Trust};
pub use upkeep::{Amount, Bad, Removed, Usage, Verified};
pub use validity::{Difference, Needed, Validity};
