//! The size cap of the artifact files.
//!
//! A tuning leaves a file for every schedule that it compiled. Most of them are never needed again: when they take more
//! than the cap, those go first that were used the longest ago. What a record names stays, whatever it takes, and so does
//! what was used within the hour, by a tuning that is at work for instance.

use crate::{ArtifactFiles, Key};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The variable that sets the cap, in MiB.
pub const LIMIT_VARIABLE: &str = "FLASHTUNE_CACHE_LIMIT_MIB";

/// The cap when the variable is not set.
const DEFAULT_MIB: u64 = 2048;
/// What was used so recently is in use.
const IN_USE: Duration = Duration::from_secs(3600);

/// What was removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Number of files.
    pub files: usize,
    /// Their size in bytes.
    pub bytes: u64,
}

/// One file below the artifact folder.
struct Candidate {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
    /// A damaged file serves nobody.
    damaged: bool,
}

/// The cap in bytes: the variable's, or 2 GiB. A value that is no number counts as absent, with a warning.
pub(crate) fn limit_from_env() -> u64 {
    let set = std::env::var(LIMIT_VARIABLE).ok().filter(|v| !v.is_empty());
    let mib = set.and_then(|text| {
        let number = text.trim().parse().ok();
        if number.is_none() {
            tracing::warn!("{LIMIT_VARIABLE} is `{text}`, which is no number of MiB; {DEFAULT_MIB} is taken");
        }
        number
    });
    mib.unwrap_or(DEFAULT_MIB).saturating_mul(1 << 20)
}

/// Removes files until at most `limit` bytes are left, or only such that are pinned or in use. Call it under the
/// store's lock, so that two do not count the same files. What cannot be removed stays.
pub(crate) fn evict(files: &ArtifactFiles, pinned: &HashSet<Key>, limit: u64) -> Evicted {
    let mut candidates = candidates(files.folder());
    let mut total: u64 = candidates.iter().map(|c| c.bytes).sum();
    let mut evicted = Evicted::default();
    if total <= limit {
        return evicted;
    }
    let pinned: HashSet<PathBuf> = pinned.iter().map(|key| files.path(key)).collect();
    let now = SystemTime::now();
    // A time in the future says that the clocks differ, not that the file is old.
    candidates.retain(|c| {
        c.damaged || (!pinned.contains(&c.path) && now.duration_since(c.used).is_ok_and(|age| age > IN_USE))
    });
    candidates.sort_by(|a, b| b.damaged.cmp(&a.damaged).then(a.used.cmp(&b.used)).then(a.path.cmp(&b.path)));
    for c in candidates {
        if total <= limit {
            break;
        }
        if std::fs::remove_file(&c.path).is_ok() {
            total -= c.bytes;
            evicted.files += 1;
            evicted.bytes += c.bytes;
        }
    }
    if total > limit {
        tracing::debug!(bytes = total, limit, "the artifact files exceed their cap, but all of them are needed");
    }
    evicted
}

fn candidates(folder: &Path) -> Vec<Candidate> {
    let read = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found = Vec::new();
    for entry in read(folder).flat_map(|part| std::fs::read_dir(part.path()).into_iter().flatten().flatten()) {
        let path = entry.path();
        let Ok(metadata) = entry.metadata() else { continue };
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        if !metadata.is_file() || !matches!(extension, "art" | "damaged") {
            continue;
        }
        let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        found.push(Candidate { damaged: extension == "damaged", bytes: metadata.len(), used, path });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CacheDir;
    use crate::testing::artifact;

    /// Files `1..=n`, each used so many hours ago.
    fn files(hours: &[u64]) -> (tempfile::TempDir, ArtifactFiles, Vec<Key>) {
        let tmp = tempfile::tempdir().unwrap();
        let files = ArtifactFiles::new(&CacheDir::at(tmp.path()));
        let mut keys = Vec::new();
        for (n, hours) in hours.iter().enumerate() {
            let key = files.put(&artifact(n as u32 + 1)).unwrap();
            used(&files.path(&key), *hours);
            keys.push(key);
        }
        (tmp, files, keys)
    }

    fn used(path: &Path, hours_ago: u64) {
        let then = SystemTime::now() - Duration::from_secs(hours_ago * 3600 + 60);
        std::fs::File::open(path).unwrap().set_modified(then).unwrap();
    }

    fn there(files: &ArtifactFiles, keys: &[Key]) -> Vec<bool> {
        keys.iter().map(|k| files.contains(k)).collect()
    }

    #[test]
    fn the_longest_unused_go_first_and_only_as_many_as_it_takes() {
        let (_tmp, files, keys) = files(&[5, 9, 2, 7]);
        let sizes: Vec<u64> = keys.iter().map(|k| files.path(k).metadata().unwrap().len()).collect();
        let total: u64 = sizes.iter().sum();
        assert_eq!(evict(&files, &HashSet::new(), total), Evicted::default());
        let one = evict(&files, &HashSet::new(), total - 1);
        assert_eq!((one, there(&files, &keys)), (Evicted { files: 1, bytes: sizes[1] }, vec![true, false, true, true]));
        evict(&files, &HashSet::new(), sizes[0] + sizes[2]);
        assert_eq!(there(&files, &keys), [true, false, true, false]);
    }

    #[test]
    fn what_is_pinned_or_in_use_stays_whatever_the_cap() {
        let (_tmp, files, keys) = files(&[5, 9, 0, 7]);
        let pinned = HashSet::from([keys[1]]);
        assert_eq!(evict(&files, &pinned, 0).files, 2);
        assert_eq!(there(&files, &keys), [false, true, true, false]);
        // A file from the future is not old.
        std::fs::File::open(files.path(&keys[2]))
            .unwrap()
            .set_modified(SystemTime::now() + Duration::from_secs(99_999))
            .unwrap();
        assert_eq!(evict(&files, &pinned, 0).files, 0);
    }

    #[test]
    fn reading_counts_as_use_and_damaged_files_go_before_all_others() {
        let (_tmp, files, keys) = files(&[9, 5, 3]);
        assert!(files.get(&keys[0]).is_some());
        std::fs::write(files.path(&keys[2]), b"damaged").unwrap();
        assert!(files.get(&keys[2]).is_none());
        let kept = files.path(&keys[0]).metadata().unwrap().len() + files.path(&keys[1]).metadata().unwrap().len();
        assert_eq!(evict(&files, &HashSet::new(), kept).bytes, 7);
        assert_eq!(evict(&files, &HashSet::new(), 0).files, 1);
        assert_eq!(there(&files, &keys), [true, false, false]);
    }
}
