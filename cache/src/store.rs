//! The tuner's journal: every trial and every record, on sled.
//!
//! One process at a time has it; readers map the snapshot that [`Store::publish`] writes and never come here. The
//! journal is a cache of work, so no damage to it may stop a tuner: a journal that cannot be opened is set aside,
//! values that cannot be decoded are skipped, and whatever was published comes back from the snapshot.

mod journal;
mod lock;
mod value;

use crate::evict::{Evicted, evict, limit_from_env};
use crate::folder::Folder;
use crate::layout::{ARTIFACTS, SNAPSHOT, TEMPORARY, is_kernel, is_part};
use crate::stale::reap_in;
use crate::{
    ArtifactFiles, Bundle, BundleContents, CacheDir, Claims, Error, Key, Record, RecordKey, Result, Timeline, Trial,
};
use journal::open_or_replace;
pub(crate) use lock::StoreLock;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
#[cfg(test)]
pub(crate) use value::SCHEMA;
use value::{open_value, seal_value};

/// The tuner's journal. Safe to share between threads; exclusive between processes.
pub struct Store {
    /// Held until the store is dropped, and let go before the lock.
    journal: Option<Journal>,
    base: Arc<Folder>,
    path: PathBuf,
    snapshot: PathBuf,
    /// Kinds of entries that were skipped, with the reason: one warning each.
    skipped: Mutex<HashSet<(&'static str, String)>>,
    /// Whether the journal has what the snapshot has.
    took_in: AtomicBool,
    _lock: StoreLock,
}

/// What sled has open.
struct Journal {
    db: sled::Db,
    records: sled::Tree,
    trials: sled::Tree,
    timelines: sled::Tree,
}

impl Drop for Store {
    fn drop(&mut self) {
        // sled writes once more when it is closed, and panics when it cannot. What was published is safe by then.
        let journal = self.journal.take();
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(journal))).is_err() {
            tracing::warn!(
                store = %self.path.display(),
                "the journal could not be closed in order; what was published is kept"
            );
        }
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("path", &self.path).finish()
    }
}

impl Store {
    /// Opens the journal of a cache folder, making both if need be.
    ///
    /// A journal that cannot be read is renamed to `store.corrupt-<time>` with a warning, and a new one is started.
    /// Records of the published snapshot that the journal lacks are taken in, so that nothing published is ever lost.
    ///
    /// # Errors
    /// [`Error::Locked`] while another process (or another store of this one) has it, [`Error::Io`] when the folder
    /// cannot be written, [`Error::Link`] when a link lies where a folder or file of the cache belongs.
    pub fn open(dir: &CacheDir) -> Result<Self> {
        let base = dir.created()?;
        // sled ends the process where the clock is before the epoch.
        if SystemTime::now() < UNIX_EPOCH {
            let message = "the clock of this machine is before 1970; set it".to_owned();
            return Err(Error::Store { path: dir.store_path(), message });
        }
        let lock = StoreLock::take(&base)?;
        reap_unfinished(&base)?;
        Claims::new(dir).clear();
        let path = dir.store_path();
        let db = open_or_replace(&base)?;
        let tree = |name: &str| db.open_tree(name).map_err(|e| store_error(&path, &e));
        let (records, trials, timelines) = (tree("records")?, tree("trials")?, tree("timelines")?);
        let store = Self {
            journal: Some(Journal { db, records, trials, timelines }),
            snapshot: dir.snapshot_path(),
            base,
            path: path.clone(),
            skipped: Mutex::default(),
            took_in: AtomicBool::new(false),
            _lock: lock,
        };
        store.take_in_snapshot()?;
        Ok(store)
    }

    /// [`Store::open`], waiting at most `patience` while another tuner has the journal.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn open_within(dir: &CacheDir, patience: Duration) -> Result<Self> {
        let start = Instant::now();
        loop {
            match Self::open(dir) {
                Err(Error::Locked { .. }) if start.elapsed() < patience => {
                    std::thread::sleep(Duration::from_millis(50).min(patience));
                }
                other => return other,
            }
        }
    }

    /// Journals a trial. It reaches the disk within about half a second.
    ///
    /// # Errors
    /// [`Error::Store`] when the journal cannot be written.
    pub fn put_trial(&self, key: &RecordKey, trial: &Trial) -> Result<()> {
        self.journal().trials.insert(trial.key(key), seal_value(trial)).map_err(|e| self.error(&e))?;
        Ok(())
    }

    /// The trials of a record key, of all templates and compilers, oldest first.
    ///
    /// # Errors
    /// [`Error::Store`] when the journal cannot be read.
    pub fn trials(&self, key: &RecordKey) -> Result<Vec<Trial>> {
        let mut trials: Vec<Trial> = Vec::new();
        for item in self.journal().trials.scan_prefix(key.key().0) {
            let (_, value) = item.map_err(|e| self.error(&e))?;
            trials.extend(self.readable("trial", &value));
        }
        trials.sort_by_key(|t| t.unix_time);
        Ok(trials)
    }

    /// Journals what ran when in the last tuning of a record.
    ///
    /// # Errors
    /// [`Error::Store`] when the journal cannot be written.
    pub fn put_timeline(&self, key: &RecordKey, timeline: &Timeline) -> Result<()> {
        self.journal().timelines.insert(key.key().0, seal_value(timeline)).map_err(|e| self.error(&e))?;
        Ok(())
    }

    /// What ran when in the last tuning of a record.
    ///
    /// # Errors
    /// [`Error::Store`] when the journal cannot be read.
    pub fn timeline(&self, key: &RecordKey) -> Result<Option<Timeline>> {
        let value = self.journal().timelines.get(key.key().0).map_err(|e| self.error(&e))?;
        Ok(value.and_then(|v| self.readable("timeline", &v)))
    }

    /// Stores a record; it is on disk when this returns. One of the same key is replaced.
    ///
    /// # Errors
    /// [`Error::Store`] when the journal cannot be written.
    pub fn put_record(&self, record: &Record) -> Result<()> {
        let key = record.key.key().0;
        self.journal().records.insert(key, seal_value(record)).map_err(|e| self.error(&e))?;
        self.flush()
    }

    /// The record of a key.
    ///
    /// # Errors
    /// [`Error::Store`] when the journal cannot be read.
    pub fn record(&self, key: &RecordKey) -> Result<Option<Record>> {
        let value = self.journal().records.get(key.key().0).map_err(|e| self.error(&e))?;
        Ok(value.and_then(|v| self.readable::<Record>("record", &v)).filter(|r| r.key == *key))
    }

    /// All records.
    ///
    /// # Errors
    /// [`Error::Store`] when the journal cannot be read.
    pub fn records(&self) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        for item in &self.journal().records {
            let (key, value) = item.map_err(|e| self.error(&e))?;
            let record: Option<Record> = self.readable("record", &value);
            records.extend(record.filter(|r| r.key.key().0 == *key));
        }
        Ok(records)
    }

    /// Writes the snapshot that readers map: all records and the artifacts that they name. Returns its path.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be written; the old snapshot stays as it was.
    pub fn publish(&self, files: &ArtifactFiles) -> Result<PathBuf> {
        // What the old snapshot has must not be lost because someone tidied the artifact files away, or because the
        // file system would not show it when the journal was opened.
        let old = self.published()?;
        if let Some(old) = old.as_ref().filter(|_| !self.took_in.load(Ordering::Relaxed)) {
            self.take_in(old)?;
        }
        let published = |key: &Key| old.as_ref().and_then(|b| b.artifact(key).ok().flatten());
        let mut load = |key: &Key| files.get(key).or_else(|| published(key));
        let records = self.records()?;
        let pinned: HashSet<Key> = records.iter().map(|r| r.artifact).collect();
        let contents = BundleContents { records, artifacts: Vec::new(), load: &mut load, created: unix_time() };
        contents.write_in(&self.base, SNAPSHOT)?;
        self.flush()?;
        self.keep_to_the_cap(files, &pinned);
        Ok(self.snapshot.clone())
    }

    /// Removes artifact files that nothing needs when there are too many.
    fn keep_to_the_cap(&self, files: &ArtifactFiles, pinned: &HashSet<Key>) {
        let evicted = evict(files, pinned, limit_from_env());
        if evicted.files > 0 {
            let Evicted { files, bytes } = evicted;
            tracing::info!(files, mib = bytes >> 20, "kernels that were not used for the longest time were removed");
        }
    }

    /// Where [`Store::publish`] writes the snapshot; there may be none yet.
    pub fn snapshot_path(&self) -> &Path {
        &self.snapshot
    }

    /// The published snapshot; none when there is none or it is damaged, which the next publication mends. What is in
    /// its place and is no file is set aside.
    ///
    /// # Errors
    /// [`Error::Io`] when there may be one that cannot be read at the moment: nobody must replace it. [`Error::Link`].
    fn published(&self) -> Result<Option<Bundle>> {
        let file = self.base.read(SNAPSHOT);
        match file.and_then(|file| Bundle::map_file(&file, &self.snapshot)) {
            Ok(bundle) => Ok(Some(bundle)),
            Err(e) if e.is_missing() => Ok(None),
            Err(e) if e.is_no_file() => {
                if let Some(aside) = self.base.set_aside(SNAPSHOT, |seen| !seen.is_link() && !seen.is_file())? {
                    let aside = self.base.path().join(aside);
                    tracing::warn!(error = e.cause(), aside = %aside.display(), "it was set aside");
                }
                Ok(None)
            }
            Err(e @ (Error::Io { .. } | Error::Link { .. })) => Err(e),
            Err(e) => {
                tracing::warn!(
                    error = e.cause(),
                    "the published snapshot cannot be read; the next publication replaces it"
                );
                Ok(None)
            }
        }
    }

    /// Takes in what the snapshot has and the journal lacks: after a crash sled may come up short without a word. What
    /// cannot be read now is taken in before the next publication.
    fn take_in_snapshot(&self) -> Result<()> {
        match self.published() {
            Ok(Some(bundle)) => self.take_in(&bundle),
            Ok(None) => {
                self.took_in.store(true, Ordering::Relaxed);
                Ok(())
            }
            Err(e @ Error::Link { .. }) => Err(e),
            Err(e) => {
                tracing::warn!(error = e.cause(), "the published snapshot cannot be read at the moment");
                Ok(())
            }
        }
    }

    fn take_in(&self, bundle: &Bundle) -> Result<()> {
        let mut taken = 0;
        for item in bundle.records() {
            let record = match item {
                Ok((record, _)) => record,
                Err(e) => {
                    tracing::warn!(error = %e, "a record of the snapshot is lost");
                    continue;
                }
            };
            let key = record.key.key().0;
            if self.record(&record.key)?.is_none() {
                self.journal().records.insert(key, seal_value(&record)).map_err(|e| self.error(&e))?;
                taken += 1;
            }
        }
        if taken > 0 {
            tracing::warn!(
                records = taken,
                "the journal lacked published records; they were taken back from the snapshot"
            );
            self.flush()?;
        }
        self.took_in.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Decodes a value; what cannot be decoded is skipped, with one warning for all that are alike.
    fn readable<T: serde::de::DeserializeOwned>(&self, what: &'static str, value: &[u8]) -> Option<T> {
        match open_value(value) {
            Ok(value) => Some(value),
            Err(e) => {
                let reason = e.to_string();
                if self.skipped.lock().unwrap_or_else(PoisonError::into_inner).insert((what, reason.clone())) {
                    tracing::warn!(
                        store = %self.path.display(), what, reason, "entries of the journal like this one are skipped"
                    );
                }
                None
            }
        }
    }

    fn journal(&self) -> &Journal {
        self.journal.as_ref().expect("it is taken when the store is dropped")
    }

    fn flush(&self) -> Result<()> {
        self.journal().db.flush().map_err(|e| self.error(&e))?;
        Ok(())
    }

    fn error(&self, e: &sled::Error) -> Error {
        store_error(&self.path, e)
    }
}

/// Seconds since the Unix epoch; 0 when the clock stands before it.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map(|d| d.as_secs()).unwrap_or(0)
}

/// Removes what writers that were killed left half-written. The caller holds the lock. A link among what this program
/// keeps there is refused.
pub(crate) fn reap_unfinished(base: &Folder) -> Result<()> {
    reap_in(base, TEMPORARY, None);
    let artifacts = match base.open(ARTIFACTS) {
        Ok(artifacts) => artifacts,
        Err(e @ Error::Link { .. }) => return Err(e),
        // There is none, or it is no folder: who puts a kernel there hears of it.
        Err(_) => return Ok(()),
    };
    for part in artifacts.own_names(is_part)? {
        if let Ok(folder) = artifacts.open(&part) {
            folder.own_names(|name| is_kernel(name, &part))?;
            reap_in(&folder, TEMPORARY, None);
        }
    }
    Ok(())
}

fn store_error(path: &Path, e: &sled::Error) -> Error {
    Error::Store { path: path.to_path_buf(), message: e.to_string() }
}

#[cfg(test)]
mod tests;
