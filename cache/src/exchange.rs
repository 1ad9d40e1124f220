//! Export and import: results as one file that ships.

use crate::store::unix_time;
use crate::{
    ArtifactFiles, Bundle, BundleContents, CacheDir, Error, Key, Layers, Needed, Record, RecordKey, Result, Store,
    Trust, Validity,
};
use flashtune_codegen::{Arch, Problem, TemplateSet};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long an import waits for a tuner to finish its writing.
const PATIENCE: Duration = Duration::from_secs(5);

/// What to export; `None` means everything.
#[derive(Debug, Clone, Default)]
pub struct ExportFilter {
    /// Only this arch.
    pub arch: Option<Arch>,
    /// Only results of these templates.
    pub templates: Option<Arc<TemplateSet>>,
    /// Only this problem.
    pub problem: Option<Problem>,
}

/// What an export or an import did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExchangeSummary {
    /// Records written.
    pub records: usize,
    /// Artifacts written.
    pub artifacts: usize,
    /// What was left out, each with its reason.
    pub skipped: Vec<String>,
}

impl ExportFilter {
    fn admits(&self, record: &Record, validity: &Validity) -> bool {
        self.arch.is_none_or(|a| a == validity.arch)
            && self.templates.as_ref().is_none_or(|t| t.hash_of(validity.family) == validity.templates)
            && self.problem.is_none_or(|p| p == record.key.problem)
    }
}

/// Writes records of the layers, with the artifacts that they name, to a bundle file. Of several records of one key the
/// earliest layer's is taken. `created` is the time to write into it, in seconds since the Unix epoch: the same content
/// and time give the same bytes.
///
/// A record whose artifact is nowhere to be found is left out and listed: a bundle is for hosts that may not compile.
///
/// # Errors
/// [`Error::Empty`] when nothing is left to export, [`Error::Io`] when the file cannot be written.
pub fn export(layers: &Layers, filter: &ExportFilter, path: &Path, created: u64) -> Result<ExchangeSummary> {
    let mut chosen: BTreeMap<RecordKey, Arc<Record>> = BTreeMap::new();
    for (_, record, validity) in layers.records() {
        if filter.admits(&record, &validity) {
            chosen.entry(record.key.clone()).or_insert(record);
        }
    }
    let mut summary = ExchangeSummary::default();
    let mut records = Vec::new();
    for (key, record) in chosen {
        if layers.artifact(&record.artifact).is_some() {
            records.push(Record::clone(&record));
        } else {
            summary.skipped.push(format!("{}: its kernel is lost; tune it again", name(&key)));
        }
    }
    if records.is_empty() {
        return Err(Error::Empty { path: path.to_path_buf(), skipped: summary.skipped.len() });
    }
    summary.records = records.len();
    let mut load = |key: &Key| layers.artifact(key).map(|(a, _)| a);
    let manifest = BundleContents { records, artifacts: Vec::new(), load: &mut load, created }.write(path)?;
    summary.artifacts = manifest.sets.iter().map(|s| s.artifacts as usize).sum();
    Ok(summary)
}

/// Takes a bundle into the cache folder: its records into the journal, its artifacts into the artifact files; then
/// publishes. Only the part that may be used under `needed` is taken. A local record of the same key and template set
/// wins over the imported one, unless `replace`.
///
/// # Errors
/// [`Error::Untrusted`] when nobody trusted signed it, [`Error::Mismatch`] when no part of the bundle may be used,
/// naming the field; [`Error::Damaged`], [`Error::Locked`] and [`Error::Io`] as elsewhere. Nothing is taken from a
/// bundle of which any needed entry is damaged.
pub fn import(path: &Path, dir: &CacheDir, needed: &Needed, replace: bool, trust: &Trust) -> Result<ExchangeSummary> {
    import_bundle(&Bundle::map(path)?, dir, needed, replace, trust)
}

/// The same of an open bundle.
///
/// # Errors
/// As [`import`].
pub fn import_bundle(
    bundle: &Bundle,
    dir: &CacheDir,
    needed: &Needed,
    replace: bool,
    trust: &Trust,
) -> Result<ExchangeSummary> {
    trust.check(bundle)?;
    bundle.check(needed)?;
    let mut summary = ExchangeSummary::default();
    let mut records = Vec::new();
    let mut foreign = BTreeMap::<String, usize>::new();
    for item in bundle.records() {
        let (record, validity) = match item {
            Err(e @ Error::Foreign { .. }) => {
                summary.skipped.push(e.to_string());
                continue;
            }
            item => item?,
        };
        match needed.difference(validity) {
            None => records.push(record),
            Some(difference) => *foreign.entry(difference.to_string()).or_default() += 1,
        }
    }
    summary.skipped.extend(foreign.into_iter().map(|(why, n)| format!("{n} records: {why}")));
    // Read before anything is written.
    let mut artifacts = BTreeMap::new();
    for record in &records {
        if let Some(artifact) = bundle.artifact(&record.artifact)? {
            artifacts.insert(record.artifact, artifact);
        }
    }

    let store = Store::open_within(dir, PATIENCE)?;
    let files = ArtifactFiles::new(dir);
    for record in records {
        let usable = |r: &Record| r.provenance.templates == needed.templates(r.schedule.family());
        let local = store.record(&record.key)?.filter(usable);
        if local.is_some_and(|l| !replace && l != record) {
            summary
                .skipped
                .push(format!("{}: tuned here already; --replace takes the imported one", name(&record.key)));
            continue;
        }
        // Several records may share a kernel.
        if let Some(artifact) = artifacts.remove(&record.artifact) {
            files.put(&artifact)?;
            summary.artifacts += 1;
        }
        store.put_record(&record)?;
        summary.records += 1;
    }
    store.publish(&files)?;
    tracing::info!(
        bundle = bundle.name(),
        records = summary.records,
        skipped = summary.skipped.len(),
        seconds_old = unix_time().saturating_sub(bundle.manifest().created),
        "imported"
    );
    Ok(summary)
}

/// A record's key in one line.
fn name(key: &RecordKey) -> String {
    format!("{} {} on {}", key.problem, key.bucket, key.device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{artifact, record, validity};
    use flashtune_codegen::CpuIsa;
    use tempfile::TempDir;

    /// A cache folder with these records, published.
    fn tuned(records: &[Record]) -> (TempDir, CacheDir) {
        let tmp = tempfile::tempdir().unwrap();
        let dir = CacheDir::at(tmp.path());
        let (store, files) = (Store::open(&dir).unwrap(), ArtifactFiles::new(&dir));
        for r in records {
            store.put_record(r).unwrap();
        }
        for n in 1..=3 {
            files.put(&artifact(n)).unwrap();
        }
        store.publish(&files).unwrap();
        (tmp, dir)
    }

    fn trusting() -> Trust {
        Trust::default().allow_unsigned(true)
    }

    fn layers(dir: &CacheDir) -> Layers {
        Layers::open(dir, &[], None).unwrap()
    }

    #[test]
    fn what_is_exported_is_imported_on_an_empty_cache() {
        let (tmp, dir) = tuned(&[record(128, 1), record(512, 2)]);
        let path = tmp.path().join("out/set.ftb");
        let summary = export(&layers(&dir), &ExportFilter::default(), &path, 9).unwrap();
        assert_eq!(summary, ExchangeSummary { records: 2, artifacts: 2, skipped: vec![] });
        let there = CacheDir::at(tmp.path().join("another"));
        assert_eq!(import(&path, &there, &validity().into(), false, &trusting()).unwrap(), summary);
        let found = layers(&there);
        assert_eq!(found.records().len(), 2);
        assert_eq!(found.artifact(&artifact(2).recipe.key()).unwrap().0, artifact(2));
        assert!(ArtifactFiles::new(&there).contains(&artifact(1).recipe.key()));
        // Importing again changes nothing and complains about nothing.
        assert!(import(&path, &there, &validity().into(), false, &trusting()).unwrap().skipped.is_empty());
    }

    #[test]
    fn exports_are_filtered_and_their_bytes_repeat() {
        let (tmp, dir) = tuned(&[record(128, 1)]);
        let (a, b) = (tmp.path().join("a.ftb"), tmp.path().join("b.ftb"));
        export(&layers(&dir), &ExportFilter { arch: Some(validity().arch), ..Default::default() }, &a, 9).unwrap();
        export(&layers(&dir), &ExportFilter::default(), &b, 9).unwrap();
        assert_eq!(std::fs::read(&a).unwrap(), std::fs::read(&b).unwrap());
        let amx = ExportFilter { arch: Some(Arch::Cpu(CpuIsa::Amx)), ..Default::default() };
        assert!(matches!(export(&layers(&dir), &amx, &a, 9), Err(Error::Empty { .. })));
    }

    #[test]
    fn a_record_without_its_kernel_is_left_out_and_listed() {
        let (tmp, dir) = tuned(&[record(128, 1), record(512, 7)]);
        let summary = export(&layers(&dir), &ExportFilter::default(), &tmp.path().join("a.ftb"), 9).unwrap();
        assert_eq!((summary.records, summary.skipped.len()), (1, 1));
        assert!(summary.skipped[0].contains("tune it again"), "{:?}", summary.skipped);
    }

    #[test]
    fn a_bundle_for_another_arch_is_refused_and_leaves_no_trace() {
        let (tmp, dir) = tuned(&[record(128, 1)]);
        let path = tmp.path().join("a.ftb");
        export(&layers(&dir), &ExportFilter::default(), &path, 9).unwrap();
        let there = CacheDir::at(tmp.path().join("there"));
        let needed = Validity { arch: Arch::Cpu(CpuIsa::Amx), ..validity() }.into();
        let e = import(&path, &there, &needed, false, &trusting()).unwrap_err();
        assert!(matches!(e, Error::Mismatch { field: "arch", .. }), "{e}");
        assert!(!there.root().exists());
    }

    #[test]
    fn local_results_win_unless_told_otherwise() {
        let (tmp, dir) = tuned(&[record(128, 1), record(512, 1)]);
        let path = tmp.path().join("a.ftb");
        export(&layers(&dir), &ExportFilter::default(), &path, 9).unwrap();
        let (_there, there) = tuned(&[record(128, 2)]);
        let summary = import(&path, &there, &validity().into(), false, &trusting()).unwrap();
        assert_eq!((summary.records, summary.skipped.len()), (1, 1));
        let winner = |dir: &CacheDir| Store::open(dir).unwrap().record(&record(128, 1).key).unwrap().unwrap();
        assert_eq!(winner(&there), record(128, 2));
        assert_eq!(import(&path, &there, &validity().into(), true, &trusting()).unwrap().records, 2);
        assert_eq!(winner(&there), record(128, 1));
        // A local record of other templates is no use here, so the imported one takes its place.
        let mut stale = record(128, 2);
        stale.provenance.templates = "old".into();
        let (_third, third) = tuned(&[stale]);
        assert_eq!(import(&path, &third, &validity().into(), false, &trusting()).unwrap().records, 2);
        assert_eq!(winner(&third), record(128, 1));
    }

    #[test]
    fn nothing_is_taken_from_a_damaged_bundle() {
        let (tmp, dir) = tuned(&[record(128, 1), record(512, 2)]);
        let path = tmp.path().join("a.ftb");
        export(&layers(&dir), &ExportFilter::default(), &path, 9).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[300] ^= 0x10;
        std::fs::write(&path, bytes).unwrap();
        let there = CacheDir::at(tmp.path().join("there"));
        assert!(matches!(import(&path, &there, &validity().into(), false, &trusting()), Err(Error::Damaged { .. })));
        assert!(!there.root().exists());
    }
}
