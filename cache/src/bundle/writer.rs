//! Writing a bundle in one pass, one artifact in memory at a time.

use super::format::{Entry, HEADER, Header};
use super::{BundleSet, Manifest};
use crate::encoding::encode;
use crate::folder::Folder;
use crate::publish::{Sink, publish_file};
use crate::{Artifact, Error, Key, Record, Result, Validity};
use flashtune_codegen::abi::ABI_VERSION;
use std::collections::BTreeMap;
use std::io::SeekFrom;
use std::path::Path;

/// Writes the content of a file.
type Fill<'a> = dyn FnMut(&mut dyn Sink) -> Result<()> + 'a;
/// Gives the artifact of a key, if there is one.
type Load<'a> = dyn FnMut(&Key) -> Option<Artifact> + 'a;

/// The content of a bundle to be written.
pub struct BundleContents<'a> {
    /// Records; of those with equal keys the last one counts.
    pub records: Vec<Record>,
    /// Recipe keys of the artifacts to include; those of the records are included by themselves.
    pub artifacts: Vec<Key>,
    /// Gives the artifacts. A key without an artifact is left out; its record stays.
    pub load: &'a mut Load<'a>,
    /// Seconds since the Unix epoch; part of the content.
    pub created: u64,
}

impl BundleContents<'_> {
    /// Writes the bundle to a file, by rename; makes the folder if need be. Returns the manifest.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be written; an old one stays as it was.
    pub fn write(self, path: &Path) -> Result<Manifest> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|source| Error::Io {
                action: "create the folder",
                path: folder.to_path_buf(),
                source,
                remedy: "choose another place for the bundle",
            })?;
        }
        self.publish(path, |fill| publish_file(path, fill))
    }

    /// Writes the bundle to a file of an open folder, by rename. Returns the manifest.
    pub(crate) fn write_in(self, folder: &Folder, name: &str) -> Result<Manifest> {
        let path = folder.path().join(name);
        self.publish(&path, |fill| folder.publish(name, fill))
    }

    fn publish(self, path: &Path, publish: impl FnOnce(&mut Fill) -> Result<()>) -> Result<Manifest> {
        let (mut contents, mut manifest) = (Some(self), None);
        publish(&mut |out| {
            let Some(contents) = contents.take() else { return Ok(()) };
            manifest = Some(contents.write_to(out).map_err(|source| Error::Io {
                action: "write",
                path: path.to_path_buf(),
                source,
                remedy: "check the free space, or choose another folder",
            })?);
            Ok(())
        })?;
        Ok(manifest.expect("set when the file was written"))
    }

    /// The bundle as bytes, for embedding.
    pub fn to_bytes(self) -> Vec<u8> {
        let mut out = std::io::Cursor::new(Vec::new());
        self.write_to(&mut out).expect("memory can be written");
        out.into_inner()
    }

    fn write_to(self, out: &mut dyn Sink) -> std::io::Result<Manifest> {
        let records: BTreeMap<Key, Record> = self.records.into_iter().map(|r| (r.key.key(), r)).collect();
        let mut wanted: Vec<Key> = self.artifacts;
        wanted.extend(records.values().map(|r| r.artifact));
        wanted.sort_unstable();
        wanted.dedup();

        out.write_all(&[0; HEADER])?;
        let mut blobs = Blobs { out, offset: HEADER as u64 };
        let mut artifacts = Vec::new();
        let mut abi = BTreeMap::new();
        for key in wanted {
            let Some(artifact) = (self.load)(&key) else { continue };
            let validity = Validity::of(&artifact.recipe);
            abi.insert(key, validity.abi);
            artifacts.push((blobs.put(key, &artifact)?, validity));
        }
        let mut record_entries = Vec::new();
        for (key, record) in &records {
            let validity = Validity {
                arch: record.key.device.arch,
                family: record.schedule.family(),
                templates: record.provenance.templates.clone(),
                // A record whose artifact is gone still names a schedule, which this build would compile.
                abi: abi.get(&record.artifact).copied().unwrap_or(ABI_VERSION),
            };
            record_entries.push((blobs.put(*key, record)?, validity));
        }

        let counts = counts(&record_entries, &artifacts);
        let manifest = Manifest {
            flashtune: env!("CARGO_PKG_VERSION").to_owned(),
            created: self.created,
            sets: counts.iter().map(set).collect(),
        };
        let validities: Vec<&Validity> = counts.keys().copied().collect();
        let mut index = Vec::new();
        for (entry, validity) in record_entries.iter().chain(&artifacts) {
            let set = validities.binary_search(&validity).expect("every validity is in the manifest");
            let entry = Entry { set: set as u32, ..*entry };
            index.extend_from_slice(&entry.encode());
        }
        let text = serde_json::to_vec_pretty(&manifest).expect("the manifest is plain data");
        let manifest_at = blobs.offset;
        let records_at = manifest_at + text.len() as u64;
        let artifacts_at = records_at + (record_entries.len() * super::format::ENTRY) as u64;
        let header = Header {
            total: records_at + index.len() as u64,
            manifest: (manifest_at, text.len() as u64),
            records: (records_at, record_entries.len() as u64),
            artifacts: (artifacts_at, artifacts.len() as u64),
            manifest_hash: *blake3::hash(&text).as_bytes(),
        };
        let out = blobs.out;
        out.write_all(&text)?;
        out.write_all(&index)?;
        out.seek(SeekFrom::Start(0))?;
        out.write_all(&header.encode(&index))?;
        out.flush()?;
        Ok(manifest)
    }
}

/// Records and artifacts of each validity, in its order.
fn counts<'a>(
    records: &'a [(Entry, Validity)],
    artifacts: &'a [(Entry, Validity)],
) -> BTreeMap<&'a Validity, [u64; 2]> {
    let mut counts = BTreeMap::new();
    for (kind, entries) in [records, artifacts].into_iter().enumerate() {
        for (_, validity) in entries {
            counts.entry(validity).or_insert([0; 2])[kind] += 1;
        }
    }
    counts
}

fn set((v, [records, artifacts]): (&&Validity, &[u64; 2])) -> BundleSet {
    let (arch, family, templates) = (v.arch.to_string(), v.family.to_string(), v.templates.clone());
    BundleSet { arch, family, templates, abi: v.abi, records: *records, artifacts: *artifacts }
}

/// The growing part of the file.
struct Blobs<'a> {
    out: &'a mut dyn Sink,
    offset: u64,
}

impl Blobs<'_> {
    /// Appends a value; the entry's set is filled in later.
    fn put<T: serde::Serialize>(&mut self, key: Key, value: &T) -> std::io::Result<Entry> {
        let bytes = encode(value);
        self.out.write_all(&bytes)?;
        let entry = Entry {
            key: key.0,
            offset: self.offset,
            length: bytes.len() as u64,
            hash: *blake3::hash(&bytes).as_bytes(),
            set: 0,
        };
        self.offset += entry.length;
        Ok(entry)
    }
}
