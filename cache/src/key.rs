//! 32-byte content hashes.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A BLAKE3 hash, used as a name: equal keys mean equal content.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Key(pub [u8; 32]);

impl Key {
    /// The hash of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The hash of a value's postcard encoding, separated from other kinds of values by `domain`.
    pub fn of_value<T: Serialize>(domain: &str, value: &T) -> Self {
        let bytes = postcard::to_stdvec(value).expect("keys are made of plain structs, which always encode");
        let mut h = blake3::Hasher::new_derive_key(domain);
        h.update(&bytes);
        Self(*h.finalize().as_bytes())
    }

    /// Lower-case hexadecimal, 64 digits.
    pub fn hex(&self) -> String {
        blake3::Hash::from(self.0).to_hex().to_string()
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hex())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({}..)", &self.hex()[..12])
    }
}
