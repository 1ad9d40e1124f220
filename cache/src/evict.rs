//! The size cap of the artifact files.
//!
//! A tuning leaves a file for every schedule that it compiled. Most of them are never needed again: when they take more
//! than the cap, those go first that were used the longest ago. What a record names stays, whatever it takes, and so
//! does what was used within the hour, by a tuning that is at work for instance.

use crate::folder::{Folder, Seen};
use crate::layout::{is_kernel, is_part};
use crate::{ArtifactFiles, Key, trouble};
use std::collections::HashSet;
use std::time::{Duration, SystemTime};

/// The variable that sets the cap, in MiB.
pub const LIMIT_VARIABLE: &str = "FLASHTUNE_CACHE_LIMIT_MIB";

/// The cap when the variable is not set.
const DEFAULT_MIB: u64 = 2048;
/// What was used so recently is in use.
const IN_USE: Duration = Duration::from_secs(3600);

/// What was removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Evicted {
    /// Number of files.
    pub files: usize,
    /// Their size in bytes.
    pub bytes: u64,
}

/// One file below the artifact folder.
struct Candidate {
    part: String,
    name: String,
    seen: Seen,
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
    let mut evicted = Evicted::default();
    let folder = match files.folder() {
        Ok(folder) => folder,
        Err(e) => {
            trouble::told_of_link(&e);
            return evicted;
        }
    };
    let mut candidates = candidates(&folder);
    let mut total: u64 = candidates.iter().map(|c| c.seen.length).sum();
    if total <= limit {
        return evicted;
    }
    let pinned: HashSet<String> = pinned.iter().map(|key| format!("{}.art", key.hex())).collect();
    let now = SystemTime::now();
    // A time in the future says that the clocks differ, not that the file is old.
    candidates.retain(|c| {
        c.damaged || (!pinned.contains(&c.name) && now.duration_since(c.used).is_ok_and(|age| age > IN_USE))
    });
    candidates.sort_by(|a, b| b.damaged.cmp(&a.damaged).then(a.used.cmp(&b.used)).then(a.name.cmp(&b.name)));
    for c in candidates {
        if total <= limit {
            break;
        }
        if folder.open(&c.part).is_ok_and(|part| part.remove_seen(&c.name, &c.seen)) {
            total -= c.seen.length;
            evicted.files += 1;
            evicted.bytes += c.seen.length;
        }
    }
    if total > limit {
        tracing::debug!(bytes = total, limit, "the artifact files exceed their cap, but all of them are needed");
    }
    evicted
}

/// The kernels of this user below the folder, and no other file.
fn candidates(folder: &Folder) -> Vec<Candidate> {
    let mut found = Vec::new();
    for (part, _) in folder.names().unwrap_or_default().into_iter().filter(|(name, _)| is_part(name)) {
        let Ok(inner) = folder.open(&part) else { continue };
        for (name, _) in inner.names().unwrap_or_default() {
            let Ok(Some(seen)) = inner.look(&name) else { continue };
            if seen.is_file() && seen.is_ours() && is_kernel(&name, &part) {
                let used = seen.changed().unwrap_or(SystemTime::UNIX_EPOCH);
                let damaged = name.ends_with(".damaged");
                found.push(Candidate { part: part.clone(), name, seen, used, damaged });
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CacheDir;
    use crate::testing::artifact;
    use std::path::Path;

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
