//! What people do with a cache folder: see what it holds, check it, keep it small, empty it.
//!
//! Everything goes by the names of [`crate::layout`]: what has another name, another kind or another owner is counted
//! and never touched. Emptying needs the tuner's lock; readers go on, since what they have mapped or opened stays
//! theirs.

use crate::encoding::Undecodable;
use crate::evict::{Evicted, evict, limit_from_env};
use crate::folder::{Folder, Seen};
use crate::layout::{
    ARTIFACTS, CLAIMS, FILES, FOLDERS, JOBS, LEVELS, SNAPSHOT, STORE, is_blob, is_claim, is_job, is_kernel, is_level,
    is_part, of_sled,
};
use crate::store::{StoreLock, reap_unfinished};
use crate::{ArtifactFiles, CacheDir, Claims, Error, Key, Result, Store, files, regular};
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::time::Duration;

/// Where sled keeps large values, in its own folder.
const BLOBS: &str = "blobs";

/// Files, and their size in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Amount {
    /// How many.
    pub files: usize,
    /// Their size in bytes.
    pub bytes: u64,
}

impl Amount {
    fn add(&mut self, bytes: u64) {
        self.files += 1;
        self.bytes += bytes;
    }
}

/// What a cache folder holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Compiled kernels, one file each.
    pub kernels: Amount,
    /// Those of them that a record of the snapshot names: they stay, whatever the limit.
    pub named: Amount,
    /// Kernels that were found damaged and set aside.
    pub damaged: Amount,
    /// The bundle that readers map.
    pub snapshot: Amount,
    /// Records in it.
    pub records: usize,
    /// The tuner's journal: records, trials and timelines.
    pub journal: Amount,
    /// What tunings that were cut short had done.
    pub jobs: Amount,
    /// Levels that cards have raised.
    pub levels: Amount,
    /// Claims on work that is under way, or was when its process was killed.
    pub claims: Amount,
    /// Files, folders and links of other names, kinds or owners, directly in the folders of the layout: nothing touches
    /// them.
    pub foreign: usize,
    /// What kernels may take, in bytes.
    pub limit_bytes: u64,
}

/// What was checked, and what failed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Kernels that are whole, as files and in the snapshot.
    pub kernels: usize,
    /// Records that are whole.
    pub records: usize,
    /// Kernels and records that are whole and of another build of flashtune.
    pub other_builds: usize,
    /// What is damaged or cannot be read: it counts as missing wherever it is asked for.
    pub bad: Vec<Bad>,
}

/// A file, or an entry of the snapshot, that failed a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Bad {
    /// The file.
    pub path: PathBuf,
    /// Which check, or what the system said.
    pub reason: String,
}

/// What was removed, and what could not be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// Files that are gone.
    pub removed: Amount,
    /// Files of this program that are still there: somebody works with them, or the folder cannot be written.
    pub kept: Amount,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Kernel,
    Damaged,
    Snapshot,
    Journal,
    Job,
    Level,
    Claim,
    Lock,
}

/// A file of this program's, by the folders before it.
struct Own {
    folders: Vec<String>,
    name: String,
    kind: Kind,
    seen: Seen,
}

impl CacheDir {
    /// What the folder holds. One that is not there holds nothing.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be listed, [`Error::Exposed`], [`Error::Link`].
    pub fn usage(&self) -> Result<Usage> {
        let mut usage = Usage { limit_bytes: limit_from_env(), ..Usage::default() };
        let Some((own, foreign)) = self.contents()? else { return Ok(usage) };
        let snapshot = self.snapshot().ok().flatten();
        let records = snapshot.iter().flat_map(|bundle| bundle.records().flatten());
        let mut named = HashSet::new();
        for (record, _) in records {
            usage.records += 1;
            named.insert(format!("{}.art", record.artifact.hex()));
        }
        for file in own {
            match file.kind {
                Kind::Kernel => {
                    usage.kernels.add(file.seen.length);
                    if named.contains(&file.name) {
                        usage.named.add(file.seen.length);
                    }
                }
                Kind::Damaged => usage.damaged.add(file.seen.length),
                Kind::Snapshot => usage.snapshot.add(file.seen.length),
                Kind::Journal => usage.journal.add(file.seen.length),
                Kind::Job => usage.jobs.add(file.seen.length),
                Kind::Level => usage.levels.add(file.seen.length),
                Kind::Claim => usage.claims.add(file.seen.length),
                Kind::Lock => {}
            }
        }
        usage.foreign = foreign;
        Ok(usage)
    }

    /// Reads every kernel and every entry of the snapshot, and checks it as a use would. Changes nothing; the tuner's
    /// journal is not opened, which checks itself when a tuner does.
    ///
    /// # Errors
    /// As [`CacheDir::usage`].
    pub fn verify(&self) -> Result<Verified> {
        let mut verified = Verified::default();
        let Some((own, _)) = self.contents()? else { return Ok(verified) };
        let base = self.folder()?;
        let bad = |path: PathBuf, reason: String| Bad { path, reason };
        for file in own.iter().filter(|file| file.kind == Kind::Kernel) {
            let folders: Vec<&str> = file.folders.iter().map(String::as_str).collect();
            let path = file.folders.iter().fold(self.base().to_owned(), |path, f| path.join(f)).join(&file.name);
            let read = base.read_below(&folders, &file.name);
            let bytes = read.map_err(|e| e.cause()).and_then(|f| regular::read_all(&f).map_err(|e| e.to_string()));
            let checked = match (&bytes, key_of(&file.name)) {
                (Ok(bytes), Some(key)) => files::open(bytes, &key).map(drop),
                (Err(reason), _) => {
                    verified.bad.push(bad(path, reason.clone()));
                    continue;
                }
                (_, None) => continue,
            };
            match checked {
                Ok(()) => verified.kernels += 1,
                Err(Undecodable::Foreign(_)) => verified.other_builds += 1,
                Err(Undecodable::Damaged(check)) => verified.bad.push(bad(path, check.to_owned())),
            }
        }
        let snapshot = match self.snapshot() {
            Ok(Some(snapshot)) => snapshot,
            Ok(None) => return Ok(verified),
            Err(e) => {
                verified.bad.push(bad(self.snapshot_path(), e.to_string()));
                return Ok(verified);
            }
        };
        let entries = snapshot.records().map(|r| r.map(|_| true));
        let kernels = snapshot.artifact_keys().map(|key| snapshot.artifact(&key).map(|_| false));
        for entry in entries.chain(kernels) {
            match entry {
                Ok(is_record) => *if is_record { &mut verified.records } else { &mut verified.kernels } += 1,
                Err(Error::Foreign { .. }) => verified.other_builds += 1,
                Err(e) => verified.bad.push(bad(self.snapshot_path(), e.to_string())),
            }
        }
        Ok(verified)
    }

    /// Removes kernels that were found damaged, then of the others those that were used the longest ago, until at most
    /// `limit` bytes are left (`FLASHTUNE_CACHE_LIMIT_MIB` when not said). Kernels that a record names stay, and so do
    /// those that were used within the hour.
    ///
    /// # Errors
    /// [`Error::Locked`] when a tuner has the folder for longer than `patience`, and those of [`Store::open`].
    pub fn collect(&self, limit: Option<u64>, patience: Duration) -> Result<Removed> {
        if self.contents()?.is_none() {
            return Ok(Removed::default());
        }
        // Opening it removes what processes that were killed left behind.
        let store = Store::open_within(self, patience)?;
        let pinned: HashSet<Key> = store.records()?.iter().map(|record| record.artifact).collect();
        let mut done = Removed::default();
        let is_damaged = |file: &Own| file.kind == Kind::Damaged;
        self.remove(self.contents()?.unwrap_or_default().0.into_iter().filter(is_damaged), &mut done)?;
        let Evicted { files, bytes } = evict(&ArtifactFiles::new(self), &pinned, limit.unwrap_or_else(limit_from_env));
        done.removed.files += files;
        done.removed.bytes += bytes;
        let is_kernel = |file: &&Own| matches!(file.kind, Kind::Kernel | Kind::Damaged);
        done.kept = Amount::default();
        for file in self.contents()?.unwrap_or_default().0.iter().filter(is_kernel) {
            done.kept.add(file.seen.length);
        }
        Ok(done)
    }

    /// Removes all results: kernels, snapshot, journal, progress, levels, and the folders that are empty then. The
    /// lock's file stays, since another process may be waiting for it, and so do claims that somebody holds.
    ///
    /// # Errors
    /// [`Error::Locked`] while a tuner has the folder; [`Error::Link`] when a link lies where something of this
    /// program's belongs, [`Error::Exposed`], [`Error::Io`]: then nothing was removed.
    pub fn clear(&self) -> Result<Removed> {
        if self.contents()?.is_none() {
            return Ok(Removed::default());
        }
        let base = self.created()?;
        let _lock = StoreLock::take(&base)?;
        reap_unfinished(&base)?;
        Claims::new(self).clear();
        let mut own = self.contents()?.unwrap_or_default().0;
        own.retain(|file| !matches!(file.kind, Kind::Lock | Kind::Claim));
        // First what names kernels, then the kernels: whoever looks in between misses a record, and not its kernel.
        own.sort_by_key(|file| !matches!(file.kind, Kind::Snapshot | Kind::Journal));
        let mut done = Removed::default();
        let within: BTreeMap<Vec<String>, ()> = own.iter().map(|file| (file.folders.clone(), ())).collect();
        self.remove(own.into_iter(), &mut done)?;
        // Folders in them first. What is not empty stays.
        let folders = within.into_keys().rev().chain(FOLDERS.map(|name| vec![name.to_owned()]));
        for mut path in folders {
            if let Some(name) = path.pop()
                && let Ok(parent) = within_base(&base, &path)
            {
                parent.as_ref().unwrap_or(&base).remove_empty(&name);
            }
        }
        Ok(done)
    }

    fn remove(&self, files: impl Iterator<Item = Own>, done: &mut Removed) -> Result<()> {
        let base = self.folder()?;
        for file in files {
            let parent = within_base(&base, &file.folders)?;
            match parent.as_ref().unwrap_or(&base).remove_seen(&file.name, &file.seen) {
                true => done.removed.add(file.seen.length),
                false => done.kept.add(file.seen.length),
            }
        }
        Ok(())
    }

    /// The files of this program's, and how many other names there are; `None` where there is no folder.
    fn contents(&self) -> Result<Option<(Vec<Own>, usize)>> {
        let base = match self.folder() {
            Ok(base) => base,
            Err(e) if e.is_missing() => return Ok(None),
            Err(e) => return Err(e),
        };
        let mut found = Contents::default();
        let kind_of_file = |name: &str| match name {
            SNAPSHOT => Some(Kind::Snapshot),
            _ => FILES.contains(&name).then_some(Kind::Lock),
        };
        found.look(&base, &[], kind_of_file, |name| FOLDERS.contains(&name))?;
        found.below(&base, &[CLAIMS], |name| is_claim(name).then_some(Kind::Claim), |_| false)?;
        found.below(&base, &[JOBS], |name| is_job(name).then_some(Kind::Job), |_| false)?;
        found.below(&base, &[LEVELS], |name| is_level(name).then_some(Kind::Level), |_| false)?;
        let of_journal = |name: &str| (of_sled(name) == Some(false)).then_some(Kind::Journal);
        found.below(&base, &[STORE], of_journal, |name| name == BLOBS)?;
        found.below(&base, &[STORE, BLOBS], |name| is_blob(name).then_some(Kind::Journal), |_| false)?;
        for part in found.below(&base, &[ARTIFACTS], |_| None, is_part)? {
            let of_part = |name: &str| {
                let kind = if name.ends_with(".damaged") { Kind::Damaged } else { Kind::Kernel };
                is_kernel(name, &part).then_some(kind)
            };
            found.below(&base, &[ARTIFACTS, &part], of_part, |_| false)?;
        }
        Ok(Some((found.own, found.foreign)))
    }
}

#[derive(Default)]
struct Contents {
    own: Vec<Own>,
    foreign: usize,
}

impl Contents {
    /// [`Contents::look`] in a folder that need not be there.
    fn below(
        &mut self,
        base: &Folder,
        folders: &[&str],
        kind: impl Fn(&str) -> Option<Kind>,
        is_folder: impl Fn(&str) -> bool,
    ) -> Result<Vec<String>> {
        let folders: Vec<String> = folders.iter().map(|&name| name.to_owned()).collect();
        match within_base(base, &folders) {
            Ok(Some(folder)) => self.look(&folder, &folders, kind, is_folder),
            Ok(None) => Ok(Vec::new()),
            // What is in its place is no folder, and was counted.
            Err(e) if e.is_missing() || e.is_no_folder() => Ok(Vec::new()),
            Err(e) => Err(e),
        }
    }

    /// Sorts the entries of a folder; gives the names of the folders of this program's in it.
    fn look(
        &mut self,
        folder: &Folder,
        folders: &[String],
        kind: impl Fn(&str) -> Option<Kind>,
        is_folder: impl Fn(&str) -> bool,
    ) -> Result<Vec<String>> {
        let mut below = Vec::new();
        for (name, _) in folder.names()? {
            let Some(seen) = folder.look(&name)? else { continue };
            match kind(&name) {
                Some(kind) if seen.is_file() && seen.is_ours() => {
                    self.own.push(Own { folders: folders.to_vec(), name, kind, seen });
                }
                None if is_folder(&name) && seen.is_folder() && seen.is_ours() => below.push(name),
                _ => self.foreign += 1,
            }
        }
        Ok(below)
    }
}

/// The folder below the base; `None` is the base itself.
fn within_base(base: &Folder, folders: &[String]) -> Result<Option<Folder>> {
    let mut found: Option<Folder> = None;
    for name in folders {
        found = Some(found.as_ref().unwrap_or(base).open(name)?);
    }
    Ok(found)
}

/// The key in the name of a kernel's file.
fn key_of(name: &str) -> Option<Key> {
    let hash = blake3::Hash::from_hex(name.strip_suffix(".art")?).ok()?;
    Some(Key(*hash.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{artifact, record};
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::time::SystemTime;

    const NO_WAIT: Duration = Duration::ZERO;

    /// A record with its kernel, published, and two kernels that nothing names, used nine and five hours ago.
    fn filled() -> (tempfile::TempDir, CacheDir, [Key; 3]) {
        let tmp = tempfile::tempdir().unwrap();
        let dir = CacheDir::at(tmp.path().join("cache"));
        dir.create().unwrap();
        let kernels = ArtifactFiles::new(&dir);
        let [named, old, older] = [1, 2, 3].map(|n| kernels.put(&artifact(n)).unwrap());
        let store = Store::open(&dir).unwrap();
        store.put_record(&crate::Record { artifact: named, ..record(128, 1) }).unwrap();
        store.publish(&kernels).unwrap();
        for (key, hours) in [(named, 20), (old, 5), (older, 9)] {
            let then = SystemTime::now() - Duration::from_secs(hours * 3600);
            std::fs::File::open(kernels.path(&key)).unwrap().set_modified(then).unwrap();
        }
        (tmp, dir, [named, old, older])
    }

    fn size(path: &Path) -> u64 {
        path.metadata().unwrap().len()
    }

    #[test]
    fn usage_counts_what_is_there_by_kind() {
        let (_tmp, dir, keys) = filled();
        let files = ArtifactFiles::new(&dir);
        std::fs::write(dir.base().join("notes.txt"), "mine").unwrap();
        symlink("notes.txt", dir.base().join("jobs")).unwrap();
        let usage = dir.usage().unwrap_err();
        assert!(matches!(usage, Error::Link { .. }), "{usage}");
        std::fs::remove_file(dir.base().join("jobs")).unwrap();
        let usage = dir.usage().unwrap();
        let total = keys.iter().map(|key| size(&files.path(key))).sum();
        assert_eq!(usage.kernels, Amount { files: 3, bytes: total });
        assert_eq!(usage.named, Amount { files: 1, bytes: size(&files.path(&keys[0])) });
        assert_eq!((usage.snapshot.bytes, usage.records), (size(&dir.snapshot_path()), 1));
        assert!(usage.journal.files >= 2 && usage.foreign == 1, "{usage:?}");
        let nowhere = CacheDir::at(dir.root().join("absent"));
        assert_eq!(nowhere.usage().unwrap(), Usage { limit_bytes: usage.limit_bytes, ..Usage::default() });
        assert!(!nowhere.base().exists());
    }

    #[test]
    fn verify_finds_every_damaged_file_and_changes_none() {
        let (_tmp, dir, keys) = filled();
        let whole = dir.verify().unwrap();
        assert_eq!((whole.kernels, whole.records, whole.bad.len()), (4, 1, 0));
        let path = ArtifactFiles::new(&dir).path(&keys[1]);
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let mut snapshot = std::fs::read(dir.snapshot_path()).unwrap();
        *snapshot.last_mut().unwrap() ^= 1;
        std::fs::write(dir.snapshot_path(), &snapshot).unwrap();
        let found = dir.verify().unwrap();
        let bad: Vec<_> = found.bad.iter().map(|bad| bad.path.clone()).collect();
        assert_eq!(bad, [path.clone(), dir.snapshot_path()], "{found:?}");
        assert!(found.bad[0].reason.contains("hash") && found.kernels < 4, "{found:?}");
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "it is as it was");
    }

    #[test]
    fn collect_removes_damaged_kernels_and_old_ones_that_nothing_names() {
        let (_tmp, dir, keys) = filled();
        let files = ArtifactFiles::new(&dir);
        let there = || keys.map(|key| files.contains(&key));
        let [named, old, older] = keys.map(|key| size(&files.path(&key)));
        let damaged = files.path(&keys[1]).with_extension("damaged");
        std::fs::write(&damaged, "x").unwrap();
        let done = dir.collect(None, NO_WAIT).unwrap();
        assert_eq!((done.removed, done.kept.files), (Amount { files: 1, bytes: 1 }, 3));
        assert!(!damaged.exists() && there() == [true; 3]);
        let done = dir.collect(Some(named + old), NO_WAIT).unwrap();
        assert_eq!((done.removed, there()), (Amount { files: 1, bytes: older }, [true, true, false]));
        assert_eq!((dir.collect(Some(0), NO_WAIT).unwrap().removed.files, there()), (1, [true, false, false]));
        let _tuner = Store::open(&dir).unwrap();
        assert!(matches!(dir.collect(Some(0), NO_WAIT), Err(Error::Locked { .. })));
    }

    #[test]
    fn clear_leaves_decoys_and_refuses_links_and_running_tuners() {
        let (tmp, dir, keys) = filled();
        let part = dir.artifacts_path().join(&keys[0].hex()[..2]);
        let decoys = [
            dir.base().join("notes.txt"),
            dir.store_path().join("thesis.tex"),
            part.join("Makefile"),
            dir.artifacts_path().join("zz/notes.txt"),
            dir.root().join("v0/snapshot.ftb"),
        ];
        for decoy in &decoys {
            std::fs::create_dir_all(decoy.parent().unwrap()).unwrap();
            std::fs::write(decoy, "years of work").unwrap();
        }
        let outside = tmp.path().join("outside");
        std::fs::write(&outside, "years of work").unwrap();
        std::fs::hard_link(&outside, part.join(format!("{}.damaged", keys[0].hex()))).unwrap();
        {
            let _tuner = Store::open(&dir).unwrap();
            assert!(matches!(dir.clear(), Err(Error::Locked { .. })));
        }
        let link = part.join(format!("{}{}.art", &keys[0].hex()[..2], "0".repeat(62)));
        symlink(&outside, &link).unwrap();
        assert!(matches!(dir.clear(), Err(Error::Link { path }) if path == link));
        assert_eq!(dir.usage().unwrap().kernels.files, 3, "nothing was removed");
        std::fs::remove_file(&link).unwrap();

        let before = dir.usage().unwrap();
        let done = dir.clear().unwrap();
        assert!(done.kept.files == 0 && done.removed.files >= 3 + 1 + before.journal.files, "{done:?}");
        for file in decoys.iter().chain([&outside]) {
            assert_eq!(std::fs::read_to_string(file).unwrap(), "years of work", "{}", file.display());
        }
        let after = dir.usage().unwrap();
        let empty = Amount::default();
        assert_eq!((after.kernels, after.snapshot, after.journal, after.records), (empty, empty, empty, 0));
        // It can be filled again.
        ArtifactFiles::new(&dir).put(&artifact(1)).unwrap();
        assert_eq!(Store::open(&dir).unwrap().records().unwrap(), []);
        assert_eq!(CacheDir::at(tmp.path().join("absent")).clear().unwrap(), Removed::default());
    }
}
