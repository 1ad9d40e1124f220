//! Where a lookup goes, in order.
use crate::*;
use flashtune_codegen::{Problem, ShapeBucket};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The variable that lists bundle files, separated as in `PATH`.
pub const BUNDLES_VARIABLE: &str = "FLASHTUNE_BUNDLES";

/// The bundles that `FLASHTUNE_BUNDLES` lists.
pub fn bundles_from_env() -> Vec<PathBuf> {
    std::env::var_os(BUNDLES_VARIABLE)
        .map(|v| std::env::split_paths(&v).filter(|p| !p.as_os_str().is_empty()).collect())
        .unwrap_or_default()
}

/// The ordered sources of records and artifacts. Shared by reference between threads.
pub struct Layers {}

/// How well a record fits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MatchQuality {
    /// Same device, same bucket.
    Exact,
    /// Same device, another bucket.
    NearestShape {
        /// [`ShapeBucket::distance`].
        distance: f64,
    },
    /// Same arch, another device: provisional.
    OtherDevice {
        /// Distance of the buckets plus that of the devices.
        distance: f64,
    },
}

/// A usable record.
#[derive(Debug, Clone)]
pub struct Match {
    /// The record.
    pub record: Arc<Record>,
    /// Name of the layer.
    pub layer: String,
    /// How well it fits.
    pub quality: MatchQuality,
}

/// Records of the problem that may not be used, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// Name of the layer.
    pub layer: String,
    /// The field that differs.
    pub difference: Difference,
    /// How many records.
    pub records: usize,
}

/// The answer to a lookup.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// Best first.
    pub matches: Vec<Match>,
    /// What could not be used.
    pub refusals: Vec<Refusal>,
}

/// One layer in words, for listings.
#[derive(Debug, Clone)]
pub struct LayerInfo {
    /// Its name.
    pub name: String,
    /// Its file, unless it is embedded.
    pub path: Option<PathBuf>,
    /// Number of records.
    pub records: usize,
    /// Number of artifacts.
    pub artifacts: usize,
}

impl Layers {
    /// Opens the user's snapshot (a missing or damaged one is an empty layer), the named bundles (an unreadable one is
    /// an error) and the embedded one, in this order.
    pub fn open(_dir: &CacheDir, _bundles: &[PathBuf], _embedded: Option<&'static [u8]>) -> Result<Self> {
        todo!()
    }
    /// The usable records of a problem, best first, and why the others are not.
    pub fn find(&self, _: &Validity, _: &DeviceFingerprint, _: &Problem, _: &ShapeBucket) -> Found {
        todo!()
    }
    /// An artifact, verified, and the name of the layer that had it; the artifact files come last.
    pub fn artifact(&self, _key: &Key) -> Option<(Artifact, String)> {
        todo!()
    }
    /// Maps the snapshot again if another one was published; whether that happened.
    pub fn refresh(&self) -> bool {
        todo!()
    }
    /// All records by layer.
    pub fn records(&self) -> Vec<(String, Arc<Record>)> {
        todo!()
    }
    /// The layers in order.
    pub fn info(&self) -> Vec<LayerInfo> {
        todo!()
    }
}

/// What to export.
#[derive(Debug, Clone, Default)]
pub struct ExportFilter {
    /// Only this arch.
    pub arch: Option<flashtune_codegen::Arch>,
    /// Only this template set.
    pub templates: Option<String>,
    /// Only this problem.
    pub problem: Option<Problem>,
}

/// What an export or import did.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExchangeSummary {
    /// Records written.
    pub records: usize,
    /// Artifacts written.
    pub artifacts: usize,
    /// What was left out, with the reason.
    pub skipped: Vec<String>,
}

/// Writes the records of the layers and their artifacts to a bundle file.
pub fn export(_layers: &Layers, _filter: &ExportFilter, _path: &Path, _created: u64) -> Result<ExchangeSummary> {
    todo!()
}

/// Takes a bundle's records and artifacts into the cache folder and publishes.
pub fn import(_path: &Path, _dir: &CacheDir, _validity: &Validity, _replace: bool) -> Result<ExchangeSummary> {
    todo!()
}
