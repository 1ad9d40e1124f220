//! Where a lookup goes, in order: the user's snapshot, bundles named by the host, the bundle in the binary.
//!
//! All records are decoded and filed by problem when a layer is opened, so a lookup reads no file. Records that may not
//! be used (another arch, template set or ABI) are kept, so that the answer can say why they were not.

use crate::folder::Seen;
use crate::layout::SNAPSHOT;
use crate::trouble::Trouble;
use crate::{
    Artifact, ArtifactFiles, Bundle, CacheDir, Difference, Error, Key, Needed, PublicKey, Record, RecordKey, Result,
    Trust, Validity,
};
use flashtune_codegen::{Problem, Schedule};
use std::cmp::Ordering;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, RwLock};

/// The variable that lists bundle files, separated as in `PATH`.
pub const BUNDLES_VARIABLE: &str = "FLASHTUNE_BUNDLES";

/// Name of the layer of the user's snapshot.
pub const SNAPSHOT_LAYER: &str = "snapshot";
/// Name of the layer of the artifact files.
pub const FILES_LAYER: &str = "artifacts";
/// Name of the layer that is compiled into the program.
pub const EMBEDDED_LAYER: &str = "embedded";

/// The bundles that `FLASHTUNE_BUNDLES` lists.
pub fn bundles_from_env() -> Vec<PathBuf> {
    std::env::var_os(BUNDLES_VARIABLE)
        .map(|v| std::env::split_paths(&v).filter(|p| !p.as_os_str().is_empty()).collect())
        .unwrap_or_default()
}

/// The ordered sources of records and artifacts. Share it by reference between threads.
#[derive(Debug)]
pub struct Layers {
    /// The user's folder, if there is one.
    own: Option<CacheDir>,
    snapshot: RwLock<Snapshot>,
    fixed: Vec<Arc<Layer>>,
}

/// How well a record fits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MatchQuality {
    /// Same device, same bucket, launched the same way.
    Exact,
    /// Same device, same bucket, timed for the other way of launching: provisional.
    OtherLaunches,
    /// Same device, another bucket.
    NearestShape {
        /// [`flashtune_codegen::ShapeBucket::distance`].
        distance: f64,
    },
    /// Same arch, another device: provisional.
    OtherDevice {
        /// Distance of the buckets plus that of the devices ([`crate::DeviceFingerprint::distance`]).
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
pub struct RecordRefusal {
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
    /// Usable records, best first.
    pub matches: Vec<Match>,
    /// What could not be used.
    pub refusals: Vec<RecordRefusal>,
}

/// One layer in words, for listings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerInfo {
    /// Its name.
    pub name: String,
    /// Its file, unless it is embedded.
    pub path: Option<PathBuf>,
    /// Number of records.
    pub records: usize,
    /// Records besides that only another build of flashtune understands, a newer one perhaps: they are left out.
    pub foreign: usize,
    /// Number of artifacts.
    pub artifacts: usize,
    /// The key that signed it.
    pub signer: Option<PublicKey>,
}

/// One bundle with its records filed by problem.
#[derive(Debug)]
struct Layer {
    name: String,
    path: Option<PathBuf>,
    bundle: Bundle,
    records: HashMap<Problem, Vec<(Arc<Record>, Validity)>>,
    foreign: usize,
}

/// The snapshot as it was last seen.
#[derive(Debug, Default)]
struct Snapshot {
    seen: Look,
    layer: Option<Arc<Layer>>,
}

/// What there was at the last look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Look {
    #[default]
    Nothing,
    File(Seen),
    /// The file system would not say.
    Unknown,
}

impl Look {
    fn at(dir: &CacheDir) -> Self {
        match dir.within(|base| base.look(SNAPSHOT)) {
            Ok(Some(seen)) => Look::File(seen),
            Ok(None) => Look::Nothing,
            Err(e) if e.is_missing() => Look::Nothing,
            Err(_) => Look::Unknown,
        }
    }
}

impl Layer {
    fn new(name: String, path: Option<PathBuf>, bundle: Bundle) -> Self {
        let mut records: HashMap<_, Vec<_>> = HashMap::new();
        let mut foreign = 0;
        for item in bundle.records() {
            match item {
                Ok((record, validity)) => {
                    records.entry(record.key.problem).or_default().push((Arc::new(record), validity.clone()));
                }
                Err(e) => {
                    foreign += usize::from(skipped(&name, &e, "record"));
                }
            }
        }
        Self { name, path, bundle, records, foreign }
    }

    fn info(&self) -> LayerInfo {
        LayerInfo {
            name: self.name.clone(),
            path: self.path.clone(),
            records: self.records.values().map(Vec::len).sum(),
            foreign: self.foreign,
            artifacts: self.bundle.artifact_count(),
            signer: self.bundle.signer(),
        }
    }
}

impl Layers {
    /// [`Layers::open_with`] a folder, and named bundles only of those who are trusted by default: nobody.
    ///
    /// # Errors
    /// As [`Layers::open_with`].
    pub fn open(dir: &CacheDir, bundles: &[PathBuf], embedded: Option<&'static [u8]>) -> Result<Self> {
        Self::open_with(Some(dir), bundles, embedded, &Trust::default())
    }

    /// Opens the user's snapshot, the named bundles and the embedded one, in this order. A missing snapshot is an empty
    /// layer, and so is a damaged one, with a warning; creates nothing. Where no folder of the user's can be named, or
    /// a file lies in its place, or others may write to it and unsigned bundles are not allowed, the bundles are all
    /// there is.
    ///
    /// # Errors
    /// Those of [`Bundle::map`] and [`Trust::check`] for a bundle that was named, because its user counts on it.
    pub fn open_with(
        own: Option<&CacheDir>,
        bundles: &[PathBuf],
        embedded: Option<&'static [u8]>,
        trust: &Trust,
    ) -> Result<Self> {
        let mut fixed = Vec::new();
        for path in bundles {
            let name = path.display().to_string();
            let bundle = Bundle::map(path)?;
            trust.check(&bundle)?;
            fixed.push(Arc::new(Layer::new(name, Some(path.clone()), bundle)));
        }
        if let Some(bytes) = embedded {
            let bundle = Bundle::from_static(EMBEDDED_LAYER, bytes)?;
            fixed.push(Arc::new(Layer::new(EMBEDDED_LAYER.into(), None, bundle)));
        }
        // Unsigned code from anybody, or from a folder that anybody writes to: one is as bad as the other.
        let own = own.and_then(|dir| match dir.check_private().and_then(|()| dir.check_place()) {
            Ok(()) => Some(dir.clone()),
            Err(Error::Exposed { .. }) if trust.allows_unsigned() => Some(dir.exposed_too()),
            Err(e) => {
                tracing::warn!(error = %e, "the user's results are not used and nothing will be kept");
                None
            }
        });
        let layers = Self { own, snapshot: RwLock::default(), fixed };
        layers.refresh();
        Ok(layers)
    }

    /// Looks whether another snapshot was published, and maps it if so. Whether that happened. Costs one `stat`
    /// otherwise.
    pub fn refresh(&self) -> bool {
        let Some(own) = &self.own else { return false };
        let before = self.read().seen;
        // Where there was nothing, opening it says as much as a look.
        let now = (before != Look::Nothing).then(|| Look::at(own));
        if now == Some(before) {
            return false;
        }
        // Someone may publish again between the look and the opening: what counts is the file that was opened.
        let (seen, layer) = match open_snapshot(own) {
            Ok(Some((seen, layer))) => (Look::File(seen), Some(Arc::new(layer))),
            Ok(None) if before == Look::Nothing => return false,
            Ok(None) => (Look::Nothing, None),
            Err(e) => {
                let before = self.read().layer.clone();
                let until = match before {
                    Some(_) => "what was mapped before stays in use",
                    None => "it counts as empty",
                };
                let (trouble, remedy) = match e {
                    Error::Io { remedy, .. } => (Trouble::Unreadable, remedy),
                    Error::Link { .. } => (Trouble::Unreadable, "it is not followed"),
                    // Nobody exported it; the journal still has what it held.
                    _ => (Trouble::Damaged, "the next `flashtune tune` or `flashtune import` writes it anew"),
                };
                trouble.count();
                tracing::warn!(error = e.cause(), "the snapshot cannot be read: {until}; {remedy}");
                // Remembered, so that the same file is not tried and complained about again.
                (now.unwrap_or_else(|| Look::at(own)), before)
            }
        };
        let mut snapshot = self.snapshot.write().unwrap_or_else(|e| e.into_inner());
        *snapshot = Snapshot { seen, layer };
        true
    }

    /// The usable records of a problem, best first, and why the others are not.
    ///
    /// Exact ones come first, then those for the other way of launching, then other shapes on this device, then other
    /// devices of the arch; within each the nearest, among equals those for this way of launching, and among those the
    /// earlier layer.
    pub fn find(&self, needed: &Needed, wanted: &RecordKey) -> Found {
        let mut found = Found::default();
        for layer in self.layers() {
            for (record, validity) in layer.records.get(&wanted.problem).into_iter().flatten() {
                if let Some(difference) = needed.difference(validity) {
                    found.refuse(&layer.name, difference);
                    continue;
                }
                let quality = MatchQuality::of(&record.key, wanted);
                found.matches.push(Match { record: record.clone(), layer: layer.name.clone(), quality });
            }
        }
        // The sort is stable, so equals stay in the order of the layers.
        let differs = |m: &Match| m.record.key.launches != wanted.launches;
        found.matches.sort_by(|a, b| a.quality.order(&b.quality).then(differs(a).cmp(&differs(b))));
        found
    }

    /// The schedules that layers below the user's own would serve these calls with: what a tuning has to beat before
    /// its result goes before theirs. Those of the same device and sizes, the first layer's first.
    pub fn rivals(&self, needed: &Needed, wanted: &RecordKey) -> Vec<Schedule> {
        let mut rivals = Vec::new();
        for m in self.find(needed, wanted).matches {
            let same = matches!(m.quality, MatchQuality::Exact | MatchQuality::OtherLaunches);
            if same
                && m.layer != SNAPSHOT_LAYER
                && !m.record.finalists.is_empty()
                && !rivals.contains(&m.record.schedule)
            {
                rivals.push(m.record.schedule);
            }
        }
        rivals
    }

    /// An artifact, verified, and the name of the layer that had it: the layers in order, then the artifact files.
    /// Damaged copies are skipped with a warning.
    pub fn artifact(&self, key: &Key) -> Option<(Artifact, String)> {
        for layer in self.layers() {
            match layer.bundle.artifact(key) {
                Ok(Some(artifact)) => return Some((artifact, layer.name.clone())),
                Ok(None) => {}
                Err(e) => {
                    skipped(&layer.name, &e, "artifact");
                }
            }
        }
        let files = ArtifactFiles::new(self.own.as_ref()?);
        files.get(key).map(|a| (a, FILES_LAYER.to_owned()))
    }

    /// All records with their validity fields, by layer.
    pub fn records(&self) -> Vec<(String, Arc<Record>, Validity)> {
        let mut all = Vec::new();
        for layer in self.layers() {
            let mut own: Vec<_> =
                layer.records.values().flatten().map(|(r, v)| (layer.name.clone(), r.clone(), v.clone())).collect();
            own.sort_by(|a, b| a.1.key.cmp(&b.1.key));
            all.extend(own);
        }
        all
    }

    /// The layers in order.
    pub fn info(&self) -> Vec<LayerInfo> {
        self.layers().iter().map(|l| l.info()).collect()
    }

    /// The user's folder, unless there is none or it may not be used.
    pub fn own(&self) -> Option<&CacheDir> {
        self.own.as_ref()
    }

    fn layers(&self) -> Vec<Arc<Layer>> {
        self.read().layer.iter().chain(&self.fixed).cloned().collect()
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Snapshot> {
        // A poisoned lock still guards whole data: it is only ever replaced as one.
        self.snapshot.read().unwrap_or_else(|e| e.into_inner())
    }
}

/// Counts and reports an entry that is left out. Whether only another build understands it.
fn skipped(layer: &str, e: &crate::Error, what: &str) -> bool {
    let foreign = matches!(e, crate::Error::Foreign { .. });
    if foreign { Trouble::Foreign } else { Trouble::Damaged }.count();
    match foreign {
        true => tracing::warn!(layer, error = %e, "a {what} of another build was skipped"),
        false => tracing::warn!(layer, error = %e, "a damaged {what} was skipped"),
    }
    foreign
}

/// Maps the snapshot; `None` when there is none.
fn open_snapshot(dir: &CacheDir) -> Result<Option<(Seen, Layer)>> {
    let file = match dir.within(|base| base.read(SNAPSHOT)) {
        Ok(file) => file,
        Err(e) if e.is_missing() => return Ok(None),
        Err(e) => return Err(e),
    };
    let path = dir.snapshot_path();
    let bundle = Bundle::map_file(&file, &path)?;
    Ok(Some((Seen::of_file(&file.1), Layer::new(SNAPSHOT_LAYER.into(), Some(path), bundle))))
}

impl Found {
    fn refuse(&mut self, layer: &str, difference: Difference) {
        match self.refusals.iter_mut().find(|r| r.layer == layer && r.difference == difference) {
            Some(r) => r.records += 1,
            None => self.refusals.push(RecordRefusal { layer: layer.to_owned(), difference, records: 1 }),
        }
    }
}

impl MatchQuality {
    fn of(found: &RecordKey, wanted: &RecordKey) -> MatchQuality {
        let distance = found.bucket.distance(&wanted.bucket);
        if found.device != wanted.device {
            MatchQuality::OtherDevice { distance: distance + found.device.distance(&wanted.device) }
        } else if found.bucket != wanted.bucket {
            MatchQuality::NearestShape { distance }
        } else if found.launches != wanted.launches {
            MatchQuality::OtherLaunches
        } else {
            MatchQuality::Exact
        }
    }

    fn order(&self, other: &Self) -> Ordering {
        let rank = |q: &Self| match *q {
            MatchQuality::Exact => (0, 0.0),
            MatchQuality::OtherLaunches => (1, 0.0),
            MatchQuality::NearestShape { distance } => (2, distance),
            MatchQuality::OtherDevice { distance } => (3, distance),
        };
        let ((a, x), (b, y)) = (rank(self), rank(other));
        a.cmp(&b).then(x.total_cmp(&y))
    }
}

#[cfg(test)]
mod tests;
