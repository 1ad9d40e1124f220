//! Header and index entries as bytes.
//!
//! A header begins with magic, format version, its own length and that of an index entry. A later build may write
//! longer ones, whose first bytes mean the same.

/// First bytes of every bundle.
pub(crate) const MAGIC: &[u8; 8] = b"FTBUNDLE";
/// Version of the layout, and of the records inside.
pub const FORMAT: u32 = 10;
/// Size of the header in bytes, as this build writes it and at least.
pub(crate) const HEADER: usize = 136;
/// Size of one index entry in bytes, as this build writes it and at least.
pub(crate) const ENTRY: usize = 88;
/// More than any build will need.
const LARGEST: usize = 4096;
/// Where the root hash stands: over all bytes of the header but these.
const ROOT: std::ops::Range<usize> = 104..136;

/// Where everything is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Size of the file in bytes.
    pub total: u64,
    /// Manifest: offset and length in bytes.
    pub manifest: (u64, u64),
    /// Record index: offset in bytes and number of entries.
    pub records: (u64, u64),
    /// Artifact index: offset in bytes and number of entries.
    pub artifacts: (u64, u64),
    /// BLAKE3 of the manifest.
    pub manifest_hash: [u8; 32],
}

/// One blob: its key, place and hash, and the index of its set in the manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Hash of the record key, or recipe key.
    pub key: [u8; 32],
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// BLAKE3 of the blob.
    pub hash: [u8; 32],
    /// Index into the manifest's sets.
    pub set: u32,
}

impl Header {
    /// The bytes, with the root hash over them and the two indexes.
    pub(crate) fn encode(&self, indexes: &[u8]) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        bytes[12..14].copy_from_slice(&(HEADER as u16).to_le_bytes());
        bytes[14..16].copy_from_slice(&(ENTRY as u16).to_le_bytes());
        let numbers = [
            self.total,
            self.manifest.0,
            self.manifest.1,
            self.records.0,
            self.records.1,
            self.artifacts.0,
            self.artifacts.1,
        ];
        for (i, n) in numbers.into_iter().enumerate() {
            bytes[16 + 8 * i..24 + 8 * i].copy_from_slice(&n.to_le_bytes());
        }
        bytes[72..104].copy_from_slice(&self.manifest_hash);
        let root = root_hash(&bytes, indexes);
        bytes[ROOT].copy_from_slice(&root);
        bytes
    }

    /// Reads a header; magic and format version are already checked.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Self {
        let n = |i: usize| u64_at(bytes, 16 + 8 * i);
        Self {
            total: n(0),
            manifest: (n(1), n(2)),
            records: (n(3), n(4)),
            artifacts: (n(5), n(6)),
            manifest_hash: hash_at(bytes, 72),
        }
    }
}

/// The lengths of the header and of an index entry; nothing where no build would write such.
pub(crate) fn widths(bytes: &[u8; HEADER]) -> Option<(usize, usize)> {
    let n = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let (header, entry) = (n(12), n(14));
    ((HEADER..=LARGEST).contains(&header) && (ENTRY..=LARGEST).contains(&entry)).then_some((header, entry))
}

/// The hash over a whole header and the indexes.
pub(crate) fn root_hash(header: &[u8], indexes: &[u8]) -> [u8; 32] {
    let mut h = blake3::Hasher::new_derive_key("flashtune bundle root 2");
    h.update(&header[..ROOT.start]).update(&header[ROOT.end..]).update(indexes);
    *h.finalize().as_bytes()
}

/// The root hash that a header states.
pub(crate) fn stated_root(header: &[u8; HEADER]) -> [u8; 32] {
    hash_at(header, ROOT.start)
}

impl Entry {
    /// The bytes.
    pub(crate) fn encode(&self) -> [u8; ENTRY] {
        let mut bytes = [0; ENTRY];
        bytes[..32].copy_from_slice(&self.key);
        bytes[32..40].copy_from_slice(&self.offset.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.length.to_le_bytes());
        bytes[48..80].copy_from_slice(&self.hash);
        bytes[80..84].copy_from_slice(&self.set.to_le_bytes());
        bytes
    }

    /// Reads an entry of at least [`ENTRY`] bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        Self {
            key: hash_at(bytes, 0),
            offset: u64_at(bytes, 32),
            length: u64_at(bytes, 40),
            hash: hash_at(bytes, 48),
            set: u32::from_le_bytes(bytes[80..84].try_into().expect("four bytes")),
        }
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn hash_at(bytes: &[u8], at: usize) -> [u8; 32] {
    bytes[at..at + 32].try_into().expect("32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_entries_round_trip() {
        let header = Header {
            total: 1 << 40,
            manifest: (2, 3),
            records: (4, 5),
            artifacts: (6, u64::MAX),
            manifest_hash: [7; 32],
        };
        let bytes = header.encode(b"index");
        assert_eq!(Header::decode(&bytes), header);
        assert_eq!(widths(&bytes), Some((HEADER, ENTRY)));
        assert_eq!(stated_root(&bytes), root_hash(&bytes, b"index"));
        assert_ne!(stated_root(&bytes), root_hash(&bytes, b"other"));
        let entry = Entry { key: [1; 32], offset: 1 << 33, length: 9, hash: [2; 32], set: 3 };
        assert_eq!(Entry::decode(&entry.encode()), entry);
    }
}
