//! The tuner's journal: every trial and every record, on sled.
//!
//! One process at a time has it; readers map the snapshot that [`Store::publish`] writes and never come here. The
//! journal is a cache of work, so no damage to it may stop a tuner: a journal that cannot be opened is set aside, values
//! that cannot be decoded are skipped, and whatever was published comes back from the snapshot.

mod lock;
mod value;

use crate::evict::{Evicted, evict, limit_from_env};
use crate::publish::TEMPORARY;
use crate::{
    ArtifactFiles, Bundle, BundleContents, CacheDir, Claims, Error, Key, Record, RecordKey, Result, Timeline, Trial,
    dir, reap,
};
use lock::StoreLock;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
#[cfg(test)]
pub(crate) use value::SCHEMA;
use value::{open_value, seal_value};

/// How long sled may take to let go of its own lock after a store of this process was dropped.
const SLED_PATIENCE: Duration = Duration::from_secs(3);

/// The tuner's journal. Safe to share between threads; exclusive between processes.
pub struct Store {
    /// Held until the store is dropped, and let go before the lock.
    journal: Option<Journal>,
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
            tracing::warn!(store = %self.path.display(), "the journal could not be closed in order; what was published is kept");
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
    /// cannot be written.
    pub fn open(dir: &CacheDir) -> Result<Self> {
        dir.create()?;
        // sled ends the process where the clock is before the epoch.
        if SystemTime::now() < UNIX_EPOCH {
            let message = "the clock of this machine is before 1970; set it".to_owned();
            return Err(Error::Store { path: dir.store_path(), message });
        }
        let lock = StoreLock::take(&dir.lock_path(), &dir.store_path())?;
        reap_unfinished(dir);
        Claims::new(dir).clear();
        let path = dir.store_path();
        let db = open_or_replace(&path)?;
        let tree = |name: &str| db.open_tree(name).map_err(|e| store_error(&path, &e));
        let (records, trials, timelines) = (tree("records")?, tree("trials")?, tree("timelines")?);
        let store = Self {
            journal: Some(Journal { db, records, trials, timelines }),
            snapshot: dir.snapshot_path(),
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
        // What the old snapshot has must not be lost because someone tidied the artifact files away, or because the file
        // system would not show it when the journal was opened.
        let old = self.published()?;
        if let Some(old) = old.as_ref().filter(|_| !self.took_in.load(Ordering::Relaxed)) {
            self.take_in(old)?;
        }
        let published = |key: &Key| old.as_ref().and_then(|b| b.artifact(key).ok().flatten());
        let mut load = |key: &Key| files.get(key).or_else(|| published(key));
        let records = self.records()?;
        let pinned: HashSet<Key> = records.iter().map(|r| r.artifact).collect();
        let contents = BundleContents { records, artifacts: Vec::new(), load: &mut load, created: unix_time() };
        contents.write(&self.snapshot)?;
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

    /// The published snapshot; none when there is none or it is damaged, which the next publication mends.
    ///
    /// # Errors
    /// [`Error::Io`] when there may be one that cannot be read at the moment: nobody must replace it.
    fn published(&self) -> Result<Option<Bundle>> {
        match Bundle::map(&self.snapshot) {
            Ok(bundle) => Ok(Some(bundle)),
            Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e @ Error::Io { .. }) if !is_no_file(&e) => Err(e),
            Err(e) => {
                tracing::warn!(
                    error = e.cause(),
                    "the published snapshot cannot be read; the next publication replaces it"
                );
                Ok(None)
            }
        }
    }

    /// Takes in what the snapshot has and the journal lacks: after a crash sled may come up short without a word. What cannot
    /// be read now is taken in before the next publication.
    fn take_in_snapshot(&self) -> Result<()> {
        match self.published() {
            Ok(Some(bundle)) => self.take_in(&bundle),
            Ok(None) => {
                self.took_in.store(true, Ordering::Relaxed);
                Ok(())
            }
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

/// Whether something else than a file is in the place of one.
fn is_no_file(e: &Error) -> bool {
    matches!(e, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::InvalidData)
}

/// Why sled did not open.
enum Refusal {
    /// sled's own lock is held.
    Busy,
    /// The folder can be neither read nor written; the content is not at fault.
    Io(std::io::Error),
    /// The content is at fault.
    Unreadable(String),
}

/// Opens the journal, or sets it aside and starts another. The caller holds the lock.
fn open_or_replace(path: &Path) -> Result<sled::Db> {
    open_or_replace_by(path, try_open)
}

fn open_or_replace_by(
    path: &Path,
    try_open: impl Fn(&Path) -> std::result::Result<sled::Db, Refusal>,
) -> Result<sled::Db> {
    let io = |action, source| Error::Io {
        action,
        path: path.to_path_buf(),
        source,
        remedy: "make it writable and some space free, or set FLASHTUNE_CACHE to another local folder",
    };
    remove_unfinished(path);
    let start = Instant::now();
    loop {
        match try_open(path) {
            Ok(db) => return Ok(db),
            // Our own lock is held, so this is a store of this process whose threads are still ending.
            Err(Refusal::Busy) if start.elapsed() < SLED_PATIENCE => std::thread::sleep(Duration::from_millis(20)),
            Err(Refusal::Busy) => return Err(Error::Locked { path: path.to_path_buf() }),
            Err(Refusal::Io(source)) => return Err(io("open the store", source)),
            Err(Refusal::Unreadable(reason)) => {
                let aside = set_aside(path).map_err(|e| io("rename the damaged store", e))?;
                let refusal = match try_open(path) {
                    Ok(db) => {
                        tracing::warn!(
                            store = %path.display(), aside = %aside.display(), reason,
                            "the journal cannot be read; it was set aside and a new one is started"
                        );
                        return Ok(db);
                    }
                    Err(refusal) => refusal,
                };
                // An empty one cannot be opened either, for want of threads or memory perhaps: the content was not at fault.
                let _ = std::fs::remove_dir_all(path);
                let _ = std::fs::rename(&aside, path);
                return Err(match refusal {
                    Refusal::Busy => Error::Locked { path: path.to_path_buf() },
                    Refusal::Io(source) => io("open the store", source),
                    Refusal::Unreadable(message) => Error::Store {
                        path: path.to_path_buf(),
                        message: format!(
                            "{message}, and so would an empty one; see this process's limits of memory and threads"
                        ),
                    },
                });
            }
        }
    }
}

fn try_open(path: &Path) -> std::result::Result<sled::Db, Refusal> {
    if std::fs::symlink_metadata(path).is_ok() && !path.is_dir() {
        return Err(Refusal::Unreadable("it is no folder".to_owned()));
    }
    dir::create_private(path).map_err(|e| match e {
        Error::Io { source, .. } => Refusal::Io(source),
        other => Refusal::Unreadable(other.to_string()),
    })?;
    let config = sled::Config::new().path(path).cache_capacity(16 << 20).flush_every_ms(Some(500));
    // sled panics on some damaged files instead of returning an error.
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| config.open())) {
        Ok(Ok(db)) => Ok(db),
        Ok(Err(sled::Error::Io(e))) => Err(match e.kind() {
            _ if e.to_string().contains("could not acquire lock") => Refusal::Busy,
            std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::InvalidData => Refusal::Unreadable(e.to_string()),
            _ => Refusal::Io(e),
        }),
        Ok(Err(e)) => Err(Refusal::Unreadable(e.to_string())),
        Err(_) => Err(Refusal::Unreadable("sled panicked while opening it".to_owned())),
    }
}

/// Removes what writers that were killed left half-written. The caller holds the lock.
fn reap_unfinished(dir: &CacheDir) {
    reap(dir.base(), TEMPORARY);
    for part in std::fs::read_dir(dir.artifacts_path()).into_iter().flatten().flatten() {
        reap(&part.path(), TEMPORARY);
    }
}

/// Removes snapshots that sled was writing when its process ended: it refuses to open while they lie there.
fn remove_unfinished(path: &Path) {
    let Ok(entries) = std::fs::read_dir(path) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("snap.") && name.ends_with(".generating") {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Renames the journal's folder to a free name beside it.
fn set_aside(path: &Path) -> std::io::Result<PathBuf> {
    let time = unix_time();
    let aside = (0..)
        .map(|n| match n {
            0 => path.with_extension(format!("corrupt-{time}")),
            n => path.with_extension(format!("corrupt-{time}-{n}")),
        })
        .find(|p| !p.exists())
        .expect("the numbers do not end");
    std::fs::rename(path, &aside)?;
    Ok(aside)
}

fn store_error(path: &Path, e: &sled::Error) -> Error {
    Error::Store { path: path.to_path_buf(), message: e.to_string() }
}

#[cfg(test)]
mod tests;
