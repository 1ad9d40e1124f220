//! Reading a bundle: nothing in the bytes is trusted.

use super::Manifest;
use super::format::{ENTRY, Entry, FORMAT, HEADER, Header, MAGIC, root_hash, stated_root};
use crate::files::decode_artifact;
use crate::{Artifact, Error, Key, Record, RecordKey, Result, Validity};
use serde::de::DeserializeOwned;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

/// An open bundle. Cheap to open (header and indexes are checked), safe to share between threads.
pub struct Bundle {
    name: String,
    data: Data,
    manifest: Manifest,
    /// The validity fields of each set of the manifest.
    validities: Vec<Validity>,
    records: Range<usize>,
    artifacts: Range<usize>,
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
        Self::map_file(&File::open(path).map_err(|e| unreadable(path, e))?, path)
    }

    /// Maps an open file that was found at `path`.
    pub(crate) fn map_file(file: &File, path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        if file.metadata().map_err(|e| unreadable(path, e))?.len() == 0 {
            return Err(damaged(&name, "it is empty"));
        }
        // SAFETY: the map is read-only. Writers replace bundles by rename and never write in place; should someone
        // else do so, every access is bounds-checked, and blobs are copied before they are verified and used.
        let map = unsafe { memmap2::Mmap::map(file) }.map_err(|e| unreadable(path, e))?;
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
        let header_bytes: &[u8; HEADER] =
            bytes.first_chunk().ok_or_else(|| bad("it is shorter than a bundle's header"))?;
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
        let header = Header::decode(header_bytes);
        if header.total != bytes.len() as u64 {
            return Err(bad(&format!("it has {} bytes, but its header says {}", bytes.len(), header.total)));
        }
        let index = |(offset, count): (u64, u64)| {
            let length = count.checked_mul(ENTRY as u64)?;
            range(bytes, offset, length)
        };
        let records = index(header.records).ok_or_else(|| bad("its record index lies outside of the file"))?;
        let artifacts = index(header.artifacts).ok_or_else(|| bad("its artifact index lies outside of the file"))?;
        if records.end != artifacts.start || artifacts.end != bytes.len() {
            return Err(bad("its indexes are not at its end"));
        }
        if stated_root(header_bytes) != root_hash(header_bytes, &bytes[records.start..]) {
            return Err(bad("its root hash does not match"));
        }
        let text = range(bytes, header.manifest.0, header.manifest.1)
            .ok_or_else(|| bad("its manifest lies outside of the file"))?;
        if *blake3::hash(&bytes[text.clone()]).as_bytes() != header.manifest_hash {
            return Err(bad("its manifest does not match its hash"));
        }
        let manifest: Manifest =
            serde_json::from_slice(&bytes[text]).map_err(|e| bad(&format!("its manifest cannot be read: {e}")))?;
        // The root hash says that the indexes are as written, not that the writer was sane.
        for part in [&records, &artifacts] {
            let mut last: Option<[u8; 32]> = None;
            for entry in bytes[part.clone()].chunks_exact(ENTRY).map(Entry::decode) {
                if last.is_some_and(|l| l >= entry.key) {
                    return Err(bad("its index is not sorted"));
                }
                if range(bytes, entry.offset, entry.length).is_none() {
                    return Err(bad("an index entry points outside of the file"));
                }
                if entry.set as usize >= manifest.sets.len() {
                    return Err(bad("an index entry names a set that the manifest lacks"));
                }
                last = Some(entry.key);
            }
        }
        let validities = manifest.sets.iter().map(|s| s.validity()).collect();
        Ok(Self { name, manifest, validities, records, artifacts, data })
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
        self.records.len() / ENTRY
    }

    /// Number of artifacts.
    pub fn artifact_count(&self) -> usize {
        self.artifacts.len() / ENTRY
    }

    /// The root hash: two bundles with the same root have the same content.
    pub fn root(&self) -> Key {
        self.data.bytes().first_chunk().map(|h| Key(stated_root(h))).unwrap_or(Key([0; 32]))
    }

    /// Whether anything inside may be used under these validity fields.
    ///
    /// # Errors
    /// [`Error::Mismatch`] names the first field that no part of the bundle matches.
    pub fn check(&self, needed: &Validity) -> Result<()> {
        let order = |field: &str| ["arch", "templates", "abi"].iter().position(|f| *f == field);
        let mut closest = None;
        for set in &self.validities {
            let Some(difference) = needed.difference(set) else { return Ok(()) };
            // A later field means that the earlier ones match.
            let depth = order(difference.field);
            if closest.as_ref().is_none_or(|(d, _)| depth > *d) {
                closest = Some((depth, difference));
            }
        }
        let Some((_, difference)) = closest else {
            return Err(damaged(&self.name, "it is whole, but nothing is inside"));
        };
        // Name every value that the bundle has for the field, so that the answer is complete.
        let mut found: Vec<String> = self
            .validities
            .iter()
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
    /// [`Error::Damaged`] when its bytes fail a check.
    pub fn record(&self, key: &RecordKey) -> Result<Option<Record>> {
        self.find(&self.records, &key.key()).map(|e| self.take_record(&e)).transpose()
    }

    /// All records with their validity fields, in the order of the index.
    pub fn records(&self) -> impl Iterator<Item = Result<(Record, &Validity)>> {
        self.entries(&self.records).map(|e| Ok((self.take_record(&e)?, &self.validities[e.set as usize])))
    }

    /// The keys of all artifacts.
    #[cfg(test)]
    pub(crate) fn artifact_keys(&self) -> impl Iterator<Item = Key> {
        self.entries(&self.artifacts).map(|e| Key(e.key))
    }

    /// The artifact of a recipe key, verified.
    ///
    /// # Errors
    /// [`Error::Damaged`] when its bytes fail a check.
    pub fn artifact(&self, key: &Key) -> Result<Option<Artifact>> {
        let Some(entry) = self.find(&self.artifacts, key) else { return Ok(None) };
        let bytes = self.blob(&entry)?;
        let artifact = decode_artifact(&bytes, key).map_err(|m| self.bad_blob("artifact", key, m))?;
        let recipe = &artifact.recipe;
        let own = Validity { arch: recipe.kernel.arch, templates: recipe.templates.clone(), abi: recipe.abi };
        if own != self.validities[entry.set as usize] {
            return Err(self.bad_blob("artifact", key, "it belongs to another set than the index says"));
        }
        Ok(Some(artifact))
    }

    fn take_record(&self, entry: &Entry) -> Result<Record> {
        let key = Key(entry.key);
        let record: Record =
            decode(&self.blob(entry)?).ok_or_else(|| self.bad_blob("record", &key, "its content cannot be decoded"))?;
        if record.key.key() != key {
            return Err(self.bad_blob("record", &key, "it belongs to another key"));
        }
        let set = &self.validities[entry.set as usize];
        if record.key.device.arch != set.arch || record.provenance.templates != set.templates {
            return Err(self.bad_blob("record", &key, "it belongs to another set than the index says"));
        }
        Ok(record)
    }

    fn entries(&self, part: &Range<usize>) -> impl Iterator<Item = Entry> {
        // `open` checked the sets once; if a mapped file was changed since then, such entries are dropped.
        let sets = self.validities.len();
        let bytes = self.data.bytes().get(part.clone()).unwrap_or_default();
        bytes.chunks_exact(ENTRY).map(Entry::decode).filter(move |e| (e.set as usize) < sets)
    }

    fn find(&self, part: &Range<usize>, key: &Key) -> Option<Entry> {
        let bytes = self.data.bytes().get(part.clone())?;
        let at = |i: usize| &bytes[i * ENTRY..(i + 1) * ENTRY];
        let (mut low, mut high) = (0, bytes.len() / ENTRY);
        while low < high {
            let middle = low + (high - low) / 2;
            match at(middle)[..32].cmp(&key.0[..]) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
                std::cmp::Ordering::Equal => {
                    return Some(Entry::decode(at(middle))).filter(|e| (e.set as usize) < self.validities.len());
                }
            }
        }
        None
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

    fn bad_blob(&self, what: &str, key: &Key, message: &str) -> Error {
        damaged(&self.name, &format!("{what} {}: {message}", &key.hex()[..12]))
    }
}

/// Decodes a value that must fill its bytes.
fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let (value, rest) = postcard::take_from_bytes(bytes).ok()?;
    rest.is_empty().then_some(value)
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
