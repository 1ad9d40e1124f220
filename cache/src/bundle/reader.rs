//! Reading a bundle: nothing in the bytes is trusted.

use super::format::{Entry, FORMAT, HEADER, Header, MAGIC, root_hash, stated_root, widths};
use super::signature::{TRAILER, verify};
use super::{BundleSet, Manifest, PublicKey, SecretKey};
use crate::encoding::{Undecodable, decode};
use crate::files::decode_artifact;
use crate::publish::publish_file;
use crate::regular;
use crate::{Artifact, Error, Key, Needed, Record, RecordKey, Result, Validity};
use std::fs::{File, Metadata};
use std::ops::Range;
use std::path::Path;

/// An open bundle. Cheap to open (header and indexes are checked), safe to share between threads.
pub struct Bundle {
    name: String,
    data: Data,
    manifest: Manifest,
    /// The validity fields of each set of the manifest, or what of them only another build knows.
    validities: Vec<Result<Validity, String>>,
    root: [u8; 32],
    signer: Option<PublicKey>,
    /// The indexes, sorted by key. Copies: what lies in the file may change after it was checked.
    records: Vec<Entry>,
    artifacts: Vec<Entry>,
}

/// Where the bytes live.
enum Data {
    Mapped(memmap2::Mmap),
    Static(&'static [u8]),
    Owned(Vec<u8>),
}

impl Data {
    fn bytes(&self) -> &[u8] {
        match self {
            Data::Mapped(map) => map,
            Data::Static(bytes) => bytes,
            Data::Owned(bytes) => bytes,
        }
    }
}

impl std::fmt::Debug for Bundle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bundle").field("name", &self.name).field("manifest", &self.manifest).finish()
    }
}

impl Bundle {
    /// Maps a file.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be opened, [`Error::Damaged`] when it is not a whole bundle, [`Error::Mismatch`]
    /// when its format is of another version.
    pub fn map(path: &Path) -> Result<Self> {
        Self::map_file(&regular::open(path).map_err(|e| unreadable(path, e))?, path)
    }

    /// Maps an open file that was found at `path`.
    pub(crate) fn map_file((file, metadata): &(File, Metadata), path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let length = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
        if length == 0 {
            return Err(damaged(&name, "it is empty"));
        }
        // SAFETY: the map is read-only. Writers replace bundles by rename and never write in place; should someone
        // else do so, every access is bounds-checked, and blobs are copied before they are verified and used.
        let map = unsafe { memmap2::MmapOptions::new().len(length).map(file) }.map_err(|e| unreadable(path, e))?;
        Self::open(name, Data::Mapped(map))
    }

    /// Opens a bundle that is compiled into the program.
    ///
    /// # Errors
    /// As [`Bundle::map`], without I/O.
    pub fn from_static(name: impl Into<String>, bytes: &'static [u8]) -> Result<Self> {
        Self::open(name.into(), Data::Static(bytes))
    }

    /// Opens a bundle in memory.
    ///
    /// # Errors
    /// As [`Bundle::map`], without I/O.
    pub fn from_bytes(name: impl Into<String>, bytes: Vec<u8>) -> Result<Self> {
        Self::open(name.into(), Data::Owned(bytes))
    }

    fn open(name: String, data: Data) -> Result<Self> {
        let bad = |message: &str| damaged(&name, message);
        let bytes = data.bytes();
        let header_bytes: [u8; HEADER] =
            *bytes.first_chunk().ok_or_else(|| bad("it is shorter than a bundle's header"))?;
        if &header_bytes[..8] != MAGIC {
            return Err(bad("it does not start with a bundle's magic bytes"));
        }
        let format = u32::from_le_bytes([header_bytes[8], header_bytes[9], header_bytes[10], header_bytes[11]]);
        if format != FORMAT {
            return Err(Error::Mismatch {
                name,
                field: "format version",
                found: format.to_string(),
                expected: FORMAT.to_string(),
                remedy: "export it with this version of flashtune",
            });
        }
        let header = Header::decode(&header_bytes);
        let (header_width, entry_width) = widths(&header_bytes).ok_or_else(|| bad("its header has no such length"))?;
        let whole_header = bytes.get(..header_width).ok_or_else(|| bad("it is shorter than its header says"))?.to_vec();
        let end = usize::try_from(header.total).ok().filter(|end| *end <= bytes.len());
        let Some((content, trailer)) = end.and_then(|end| bytes.split_at_checked(end)) else {
            return Err(bad(&format!("it has {} bytes, but its header says {}", bytes.len(), header.total)));
        };
        let trailer: Option<&[u8; TRAILER]> = match trailer.len() {
            0 => None,
            TRAILER => trailer.first_chunk(),
            more => return Err(bad(&format!("it has {more} bytes more than its header says"))),
        };
        let index = |(offset, count): (u64, u64)| {
            let length = count.checked_mul(entry_width as u64)?;
            range(content, offset, length)
        };
        let records = index(header.records).ok_or_else(|| bad("its record index lies outside of the file"))?;
        let artifacts = index(header.artifacts).ok_or_else(|| bad("its artifact index lies outside of the file"))?;
        if records.end != artifacts.start || artifacts.end != content.len() {
            return Err(bad("its indexes are not at its end"));
        }
        let indexes = content[records.start..].to_vec();
        let root = root_hash(&whole_header, &indexes);
        if stated_root(&header_bytes) != root {
            return Err(bad("its root hash does not match"));
        }
        let signer = trailer.copied().map(|t| verify(&t, &root)).transpose().map_err(bad)?;
        let text = range(content, header.manifest.0, header.manifest.1)
            .ok_or_else(|| bad("its manifest lies outside of the file"))?;
        let text = content[text].to_vec();
        if *blake3::hash(&text).as_bytes() != header.manifest_hash {
            return Err(bad("its manifest does not match its hash"));
        }
        let manifest: Manifest =
            serde_json::from_slice(&text).map_err(|e| bad(&format!("its manifest cannot be read: {e}")))?;
        // The root hash says that the indexes are as written, not that the writer was sane.
        let (records, artifacts) = indexes.split_at(records.len());
        let check = |part: &[u8]| {
            let entries: Vec<Entry> = part.chunks_exact(entry_width).map(Entry::decode).collect();
            if !entries.is_sorted_by(|a, b| a.key < b.key) {
                return Err(bad("its index is not sorted"));
            }
            if entries.iter().any(|e| range(content, e.offset, e.length).is_none()) {
                return Err(bad("an index entry points outside of the file"));
            }
            if entries.iter().any(|e| e.set as usize >= manifest.sets.len()) {
                return Err(bad("an index entry names a set that the manifest lacks"));
            }
            Ok(entries)
        };
        let (records, artifacts) = (check(records)?, check(artifacts)?);
        let validities = manifest.sets.iter().map(BundleSet::validity).collect();
        Ok(Self { name, manifest, validities, root, signer, records, artifacts, data })
    }

    /// Path or other origin.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the bundle says about itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Number of records.
    pub fn record_count(&self) -> usize {
        self.records.len()
    }

    /// Number of artifacts.
    pub fn artifact_count(&self) -> usize {
        self.artifacts.len()
    }

    /// The root hash: two bundles with the same root have the same content.
    pub fn root(&self) -> Key {
        Key(self.root)
    }

    /// The key whose signature the bundle carries; the signature is right. Whether the key is trusted is for
    /// [`crate::Trust`] to say.
    pub fn signer(&self) -> Option<PublicKey> {
        self.signer
    }

    /// Whether anything inside may be used under these validity fields.
    ///
    /// # Errors
    /// [`Error::Mismatch`] names the first field that no part of the bundle matches.
    pub fn check(&self, needed: &Needed) -> Result<()> {
        let order = |field: &str| ["arch", "templates", "abi"].iter().position(|f| *f == field);
        let mut closest = None;
        for set in self.validities.iter().flatten() {
            let Some(difference) = needed.difference(set) else { return Ok(()) };
            // A later field means that the earlier ones match.
            let depth = order(difference.field);
            if closest.as_ref().is_none_or(|(d, _)| depth > *d) {
                closest = Some((depth, difference));
            }
        }
        let Some((_, difference)) = closest else {
            return Err(match self.validities.iter().find_map(|set| set.as_ref().err()) {
                Some(unknown) => Error::Foreign { name: self.name.clone(), message: unknown.clone() },
                None => damaged(&self.name, "it is whole, but nothing is inside"),
            });
        };
        // Name every value that the bundle has for the field, so that the answer is complete.
        let mut found: Vec<String> = self
            .validities
            .iter()
            .flatten()
            .filter_map(|s| needed.difference(s))
            .filter(|d| d.field == difference.field)
            .map(|d| d.found)
            .collect();
        found.dedup();
        Err(Error::Mismatch {
            name: self.name.clone(),
            field: difference.field,
            found: found.join(", "),
            remedy: difference.remedy(),
            expected: difference.expected,
        })
    }

    /// The record of a key.
    ///
    /// # Errors
    /// [`Error::Damaged`] when its bytes fail a check, [`Error::Foreign`] when only another build understands it.
    pub fn record(&self, key: &RecordKey) -> Result<Option<Record>> {
        find(&self.records, &key.key()).map(|e| self.take_record(e)).transpose()
    }

    /// All records with their validity fields, in the order of the index; each that fails a check with its own error,
    /// as [`Bundle::record`] gives it.
    pub fn records(&self) -> impl Iterator<Item = Result<(Record, &Validity)>> {
        self.records.iter().map(|e| Ok((self.take_record(e)?, self.set(e, "record")?)))
    }

    /// The keys of all artifacts.
    pub(crate) fn artifact_keys(&self) -> impl Iterator<Item = Key> {
        self.artifacts.iter().map(|e| Key(e.key))
    }

    /// The artifact of a recipe key, verified.
    ///
    /// # Errors
    /// As [`Bundle::record`].
    pub fn artifact(&self, key: &Key) -> Result<Option<Artifact>> {
        let Some(entry) = find(&self.artifacts, key) else { return Ok(None) };
        let set = self.set(entry, "artifact")?;
        let bytes = self.blob(entry)?;
        let artifact = decode_artifact(&bytes, key).map_err(|e| self.undecodable("artifact", key, e))?;
        if Validity::of(&artifact.recipe) != *set {
            return Err(self.bad_blob("artifact", key, "it belongs to another set than the index says"));
        }
        Ok(Some(artifact))
    }

    /// Looks at every entry: whether it is what its hash says, and makes sense. What only another build understands
    /// is as it should be where its hash fits.
    ///
    /// # Errors
    /// [`Error::Damaged`] names the first entry that fails a check.
    pub fn verify(&self) -> Result<()> {
        let whole = |found: Result<()>| match found {
            Err(Error::Foreign { .. }) => Ok(()),
            found => found,
        };
        for entry in &self.records {
            self.blob(entry)?;
            whole(self.take_record(entry).map(drop))?;
        }
        for entry in &self.artifacts {
            self.blob(entry)?;
            whole(self.artifact(&Key(entry.key)).map(drop))?;
        }
        Ok(())
    }

    fn take_record(&self, entry: &Entry) -> Result<Record> {
        let key = Key(entry.key);
        let set = self.set(entry, "record")?;
        let record: Record = decode(&self.blob(entry)?).map_err(|e| self.undecodable("record", &key, e))?;
        if record.key.key() != key {
            return Err(self.bad_blob("record", &key, "it belongs to another key"));
        }
        let own = (record.key.device.arch, record.schedule.family(), &record.provenance.templates);
        if own != (set.arch, set.family, &set.templates) {
            return Err(self.bad_blob("record", &key, "it belongs to another set than the index says"));
        }
        Ok(record)
    }

    /// A verified copy of a blob.
    fn blob(&self, entry: &Entry) -> Result<Vec<u8>> {
        let bytes = self.data.bytes();
        let place = range(bytes, entry.offset, entry.length);
        let copy = place.map(|r| bytes[r].to_vec()).ok_or_else(|| damaged(&self.name, "an entry lies outside"))?;
        if *blake3::hash(&copy).as_bytes() != entry.hash {
            return Err(self.bad_blob("entry", &Key(entry.key), "its content does not match its hash"));
        }
        Ok(copy)
    }

    /// The validity fields of an entry's set.
    fn set(&self, entry: &Entry, what: &str) -> Result<&Validity> {
        let set = self.validities[entry.set as usize].as_ref();
        set.map_err(|unknown| self.undecodable(what, &Key(entry.key), Undecodable::Foreign(unknown.clone())))
    }

    fn undecodable(&self, what: &str, key: &Key, e: Undecodable) -> Error {
        match e {
            Undecodable::Damaged(check) => self.bad_blob(what, key, check),
            Undecodable::Foreign(_) => {
                Error::Foreign { name: self.name.clone(), message: format!("{what} {}: {e}", &key.hex()[..12]) }
            }
        }
    }

    fn bad_blob(&self, what: &str, key: &Key, message: &str) -> Error {
        damaged(&self.name, &format!("{what} {}: {message}", &key.hex()[..12]))
    }
}

/// Signs a bundle file; a signature that it has already is replaced. Gives the bundle's root hash.
///
/// # Errors
/// As [`Bundle::map`]; [`Error::Io`] when it cannot be written, the old file stays then.
pub fn sign_bundle(path: &Path, key: &SecretKey) -> Result<Key> {
    let bytes = regular::read(path).map_err(|e| unreadable(path, e))?;
    let bundle = Bundle::from_bytes(path.display().to_string(), bytes)?;
    let bytes = bundle.data.bytes();
    let content = &bytes[..bytes.len() - if bundle.signer.is_some() { TRAILER } else { 0 }];
    let trailer = key.trailer(&bundle.root);
    publish_file(path, |out| {
        let written = out.write_all(content).and_then(|()| out.write_all(&trailer));
        written.map_err(|source| Error::Io {
            action: "write",
            path: path.to_path_buf(),
            source,
            remedy: "check the free space and the permissions of its folder",
        })
    })?;
    Ok(bundle.root())
}

/// The entry of a key in a sorted index.
fn find<'a>(index: &'a [Entry], key: &Key) -> Option<&'a Entry> {
    index.binary_search_by(|e| e.key.cmp(&key.0)).ok().map(|i| &index[i])
}

/// A range inside the file, or nothing.
fn range(bytes: &[u8], offset: u64, length: u64) -> Option<Range<usize>> {
    let start = usize::try_from(offset).ok()?;
    let end = start.checked_add(usize::try_from(length).ok()?)?;
    (end <= bytes.len()).then_some(start..end)
}

fn unreadable(path: &Path, source: std::io::Error) -> Error {
    Error::Io {
        action: "open the bundle",
        path: path.to_path_buf(),
        source,
        remedy: "check the path and its permissions",
    }
}

fn damaged(name: &str, message: &str) -> Error {
    Error::Damaged { name: name.to_owned(), message: message.to_owned() }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
