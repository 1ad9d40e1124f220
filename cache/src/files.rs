//! Compiled kernels as files, one per recipe key.
//!
//! A file is an envelope around the encoding of an [`Artifact`]:
//!
//! ```text
//! 0  magic "FTARTIF\n"   8
//! 8  format version u32  4
//! 12 zero                4
//! 16 payload length u64  8
//! 24 payload BLAKE3     32
//! 56 payload
//! ```
//!
//! Writers publish by rename, and the name is the hash of the recipe, so two writers of one key write the same thing.
//! Readers need no lock and trust nothing: what fails a check is a miss, is set aside once, and is compiled again.

use crate::dir::CacheDir;
use crate::encoding::{Undecodable, decode, encode};
use crate::folder::{Folder, Seen, id_of};
use crate::layout::ARTIFACTS;
use crate::regular;
use crate::trouble::{self, Trouble};
use crate::{Artifact, Claims, Error, Key, Result, Turn};
use std::fs::{File, Metadata};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

const MAGIC: &[u8; 8] = b"FTARTIF\n";
const FORMAT: u32 = 7;
const HEADER: usize = 56;
/// How exactly the time of the last use is kept.
const USE_STEP: Duration = Duration::from_secs(1800);

/// How long to wait for another process that makes the same kernel: longer than any compiler takes.
const PATIENCE: Duration = Duration::from_secs(60);
/// From when on a wait is told.
const LONG: Duration = Duration::from_secs(5);

/// The folder of compiled kernels.
#[derive(Debug, Clone)]
pub struct ArtifactFiles {
    dir: CacheDir,
    claims: Claims,
}

/// Where an artifact that was asked for came from.
#[derive(Debug)]
pub enum Origin {
    /// Its file, perhaps one that another process has just written.
    File,
    /// It was made now and kept.
    Made,
    /// It was made now and could not be kept.
    Unkept(Error),
}

impl ArtifactFiles {
    /// The files of a cache folder. Touches nothing.
    pub fn new(dir: &CacheDir) -> Self {
        Self { dir: dir.clone(), claims: Claims::new(dir) }
    }

    /// The folder that holds them all.
    pub(crate) fn folder(&self) -> Result<Folder> {
        self.dir.within(|base| base.open(ARTIFACTS))
    }

    /// Where an artifact is or would be.
    pub fn path(&self, key: &Key) -> PathBuf {
        let hex = key.hex();
        self.dir.artifacts_path().join(&hex[..2]).join(format!("{hex}.art"))
    }

    /// Stores an artifact under its recipe's key, which is returned.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be written, [`Error::Link`] when a link is in the place of the file or of a
    /// folder before it; nothing partial stays behind.
    pub fn put(&self, artifact: &Artifact) -> Result<Key> {
        let key = artifact.recipe.key();
        let outcome = self.write(&key, artifact);
        if outcome.is_err() {
            Trouble::Unkept.count();
        }
        outcome.map(|()| key)
    }

    fn write(&self, key: &Key, artifact: &Artifact) -> Result<()> {
        let bytes = seal(artifact);
        let (part, name) = names(key);
        let part = self.dir.within_created(|base| base.open_or_create(ARTIFACTS)?.created(&part))?;
        part.publish(&name, |w| {
            w.write_all(&bytes).map_err(|source| Error::Io {
                action: "write",
                path: self.path(key),
                source,
                remedy: "check the free space, or set FLASHTUNE_CACHE to another folder",
            })
        })
    }

    /// The artifact of a recipe key: from its file, or made now. Of many processes that ask for one key at the same
    /// time, one makes it and the others wait for it; when that one ends without a result, the next one tries.
    ///
    /// # Errors
    /// That of `make`.
    pub fn get_or_make<E>(
        &self,
        key: &Key,
        make: impl FnOnce() -> Result<Artifact, E>,
    ) -> Result<(Artifact, Origin), E> {
        if let Some(artifact) = self.get(key) {
            return Ok((artifact, Origin::File));
        }
        let _claim = match self.wait(key) {
            Turn::Done(Some(artifact)) => return Ok((artifact, Origin::File)),
            Turn::Mine(claim) => Some(claim),
            // Whoever is at it takes too long, or was stopped: better twice than never.
            Turn::Done(None) | Turn::Theirs => None,
        };
        let artifact = make()?;
        let origin = match self.put(&artifact) {
            Ok(_) => Origin::Made,
            Err(e) => Origin::Unkept(e),
        };
        Ok((artifact, origin))
    }

    /// Waits for an artifact, or for the right to make it. Done without one when the process that makes it was stopped.
    fn wait(&self, key: &Key) -> Turn<Option<Artifact>> {
        let (start, mut told) = (Instant::now(), false);
        self.claims.wait(key, PATIENCE, || {
            let found = self.get(key);
            // Most waits are short.
            if found.is_some() || start.elapsed() < LONG {
                return found.map(Some);
            }
            let holder = self.claims.holder(key).filter(|holder| !holder.is_this())?;
            let (stopped, remedy) = (holder.is_stopped(), holder.remedy());
            if stopped {
                tracing::warn!("a kernel is compiled twice, which is the work of {holder}; {remedy}");
            } else if !std::mem::replace(&mut told, true) {
                tracing::warn!("waiting for a kernel, which is the work of {holder}; {remedy}");
            }
            stopped.then_some(None)
        })
    }

    /// Whether a file of this key exists. It may still fail its checks.
    pub fn contains(&self, key: &Key) -> bool {
        self.open(key).is_ok()
    }

    fn open(&self, key: &Key) -> Result<(File, Metadata)> {
        let (part, name) = names(key);
        self.dir.folder()?.read_below(&[ARTIFACTS, &part], &name)
    }

    /// The verified artifact of a recipe key. Whatever is wrong with the file makes it a miss, with a warning; a
    /// damaged one is renamed to `*.damaged` where the folder is writable.
    pub fn get(&self, key: &Key) -> Option<Artifact> {
        let read = || -> Result<_> {
            let file = self.open(key)?;
            let bytes = regular::read_all(&file).map_err(|source| Error::Io {
                action: "read",
                path: self.path(key),
                source,
                remedy: "check its permissions",
            })?;
            Ok((file, bytes))
        };
        let (file, bytes) = match read() {
            Ok(read) => read,
            Err(e) if e.is_missing() => return None,
            Err(e) => {
                match (Trouble::Unreadable.count(), trouble::told_of_link(&e)) {
                    (_, true) => {}
                    (true, _) => tracing::warn!(error = e.cause(), "an artifact cannot be read; it counts as missing"),
                    // One that cannot be read is rarely alone, and says nothing new.
                    (false, _) => tracing::debug!(error = e.cause(), "another file cannot be read"),
                }
                return None;
            }
        };
        match open(&bytes, key) {
            Ok(artifact) => {
                note_use(&file);
                Some(artifact)
            }
            Err(e @ Undecodable::Foreign(_)) => {
                Trouble::Foreign.count();
                tracing::warn!(path = %self.path(key).display(), error = %e, "an artifact counts as missing");
                None
            }
            Err(reason) => {
                Trouble::Damaged.count();
                let path = self.path(key);
                tracing::warn!(
                    path = %path.display(), %reason,
                    "a damaged artifact was set aside; it counts as missing"
                );
                self.set_aside(key, &file.1);
                None
            }
        }
    }

    /// Renames a damaged file out of the way; on a read-only mount it stays, and stays a miss.
    fn set_aside(&self, key: &Key, damaged: &Metadata) {
        let (part, name) = names(key);
        let aside = format!("{}.damaged", key.hex());
        let Ok(part) = self.folder().and_then(|folder| folder.open(&part)) else { return };
        // Somebody may have put a good one in its place by now, and what has the other name may be none of ours.
        let is_it = matches!(part.look(&name), Ok(Some(seen)) if seen.id == id_of(damaged));
        let is_free = part.look(&aside).is_ok_and(|there| there.is_none_or(|there| there.is_file() && there.is_ours()));
        if is_it && is_free {
            let _ = part.rename(&name, &aside);
        }
    }
}

/// The folder of a key's file below that of all of them, and its name there.
fn names(key: &Key) -> (String, String) {
    let hex = key.hex();
    (hex[..2].to_owned(), format!("{hex}.art"))
}

/// Writes down that a file was used, once in an hour: what was not used for the longest time is evicted first.
fn note_use((file, metadata): &(File, Metadata)) {
    let age = metadata.modified().map(|t| SystemTime::now().duration_since(t));
    // The times of a file that has another name elsewhere are not this cache's.
    if matches!(age, Ok(Ok(age)) if age > USE_STEP) && Seen::of_file(metadata).is_own_file() {
        // On a read-only mount nothing is evicted either.
        let _ = file.set_modified(SystemTime::now());
    }
}

/// The file's bytes.
fn seal(artifact: &Artifact) -> Vec<u8> {
    let payload = encode(artifact);
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&FORMAT.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    bytes.extend_from_slice(blake3::hash(&payload).as_bytes());
    bytes.extend_from_slice(&payload);
    bytes
}

/// Checks every part of the envelope; the error is the check that failed.
pub(crate) fn open(bytes: &[u8], key: &Key) -> Result<Artifact, Undecodable> {
    let damaged = |check| Err(Undecodable::Damaged(check));
    if bytes.len() < HEADER {
        return damaged("it is shorter than its header");
    }
    let (header, payload) = bytes.split_at(HEADER);
    if &header[..8] != MAGIC {
        return damaged("it does not start with the magic bytes");
    }
    if header[8..12] != FORMAT.to_le_bytes() || header[12..16] != [0; 4] {
        return damaged("its format version is another one");
    }
    if header[16..24] != (payload.len() as u64).to_le_bytes() {
        return damaged("its length differs from the one in the header");
    }
    if header[24..56] != *blake3::hash(payload).as_bytes() {
        return damaged("its content differs from the hash in the header");
    }
    decode_artifact(payload, key)
}

/// Decodes an artifact whose bytes are already checked, and checks that it is the one asked for.
pub(crate) fn decode_artifact(payload: &[u8], key: &Key) -> Result<Artifact, Undecodable> {
    let artifact: Artifact = decode(payload)?;
    if artifact.recipe.key() != *key {
        return Err(Undecodable::Damaged("its recipe belongs to another key"));
    }
    Ok(artifact)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::artifact;
    use crate::troubles;
    use proptest::prelude::*;

    #[test]
    fn what_is_survived_is_counted() {
        let tmp = tempfile::tempdir().unwrap();
        let files = ArtifactFiles::new(&CacheDir::at(tmp.path().join("cache")));
        let key = files.put(&artifact(1)).unwrap();
        let before = troubles();
        std::fs::write(files.path(&key), b"damaged").unwrap();
        assert!(files.get(&key).is_none());
        // A folder in the place of the file cannot be read, and a file in the place of the folder not be filled.
        std::fs::create_dir(files.path(&key)).unwrap();
        assert!(files.get(&key).is_none());
        std::fs::write(tmp.path().join("file"), b"").unwrap();
        assert!(ArtifactFiles::new(&CacheDir::at(tmp.path().join("file"))).put(&artifact(1)).is_err());
        let after = troubles();
        assert!(after.damaged > before.damaged && after.unreadable > before.unreadable, "{before:?} {after:?}");
        assert!(after.unkept > before.unkept, "{before:?} {after:?}");
    }

    #[test]
    fn what_is_put_is_got() {
        let tmp = tempfile::tempdir().unwrap();
        let files = ArtifactFiles::new(&CacheDir::at(tmp.path()));
        let a = artifact(1);
        assert_eq!(files.get(&a.recipe.key()), None);
        let key = files.put(&a).unwrap();
        assert_eq!(files.get(&key), Some(a.clone()));
        // Putting again is harmless.
        assert_eq!(files.put(&a).unwrap(), key);
        assert_eq!(files.get(&key), Some(a));
    }

    #[test]
    fn a_damaged_file_is_a_miss_once_and_can_be_put_again() {
        let tmp = tempfile::tempdir().unwrap();
        let files = ArtifactFiles::new(&CacheDir::at(tmp.path()));
        let a = artifact(2);
        let key = files.put(&a).unwrap();
        let path = files.path(&key);
        let mut bytes = std::fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(files.get(&key), None);
        assert!(!files.contains(&key) && path.with_extension("damaged").exists());
        files.put(&a).unwrap();
        assert_eq!(files.get(&key), Some(a));
    }

    #[test]
    fn an_artifact_under_a_foreign_name_is_a_miss() {
        let tmp = tempfile::tempdir().unwrap();
        let files = ArtifactFiles::new(&CacheDir::at(tmp.path()));
        let (a, b) = (artifact(1), artifact(2));
        let (ka, kb) = (files.put(&a).unwrap(), b.recipe.key());
        std::fs::create_dir_all(files.path(&kb).parent().unwrap()).unwrap();
        std::fs::copy(files.path(&ka), files.path(&kb)).unwrap();
        assert_eq!(files.get(&kb), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(crate::testing::mutations(2000)))]
        #[test]
        fn no_mutation_of_a_file_yields_another_artifact(
            at in 0usize..1 << 20, byte in any::<u8>(), cut in 0usize..1 << 20,
        ) {
            let a = artifact(3);
            let key = a.recipe.key();
            let good = seal(&a);
            let mut bad = good.clone();
            let at = at % bad.len();
            bad[at] = byte;
            if bad != good {
                prop_assert!(open(&bad, &key).is_err());
            }
            prop_assert!(open(&good[..cut % good.len()], &key).is_err());
        }
    }
}
