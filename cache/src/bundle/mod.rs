//! One immutable file of records and artifacts: what readers map and what ships.
//!
//! ```text
//! 0    header            see `format`: says how long it and an index entry are, and the root hash
//! 136  artifact blobs    see `encoding`, in order of their recipe keys
//!      record blobs      the same, in order of the hashes of their keys
//!      manifest          JSON: version, creation time, and what is inside for which arch, family, templates and ABI
//!      record index      sorted, of one width: key hash, offset, length, blob hash, set
//!      artifact index    the same, by recipe key
//!      signature         only of signed ones: see `signature`
//! ```
//!
//! Later builds may add to all of it without another format: fields of values and of the manifest by their names,
//! fields of the header and of index entries at their ends. What of it this build does not know it leaves alone; an
//! entry that it cannot understand it refuses, and that entry alone.
//!
//! The root hash covers the header, which holds the manifest's hash, and both indexes, which hold every blob's hash: so
//! it names the whole content. Offsets are 64-bit, integers little-endian. The same content gives the same bytes; the
//! creation time is part of the content.
//!
//! A reader copies the header, the manifest and the indexes when it opens the file, checks the root hash and every
//! bound on the copies, and works with these alone. Each blob is copied when it is taken and its copy is checked
//! against the hash in the index: nobody can change the bytes between the check and the use, not even one who writes to
//! the file.

mod format;
mod manifest;
mod reader;
mod signature;
mod writer;

pub use format::FORMAT;
pub use manifest::{BundleSet, Manifest};
pub use reader::{Bundle, sign_bundle};
pub use signature::{PublicKey, SecretKey};
pub use writer::BundleContents;
