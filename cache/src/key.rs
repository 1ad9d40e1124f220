//! 32-byte content hashes.

use crate::encoding::encode;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// A BLAKE3 hash, used as a name: equal keys mean equal content.
///
/// Stored as 32 bytes in one piece; in JSON it is a list of numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(pub [u8; 32]);

impl Serialize for Key {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match s.is_human_readable() {
            true => self.0.serialize(s),
            false => s.serialize_bytes(&self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        match d.is_human_readable() {
            true => Deserialize::deserialize(d).map(Self),
            false => serde_bytes::ByteArray::deserialize(d).map(|bytes| Self(bytes.into_array())),
        }
    }
}

impl Key {
    /// The hash of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The hash of a value's encoding, separated from other kinds of values by `domain`.
    pub fn of_value<T: Serialize>(domain: &str, value: &T) -> Self {
        let mut h = blake3::Hasher::new_derive_key(domain);
        h.update(&encode(value));
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
