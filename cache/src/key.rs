//! 32-byte content hashes.

use crate::encoding::encode;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;

/// A BLAKE3 hash, used as a name: equal keys mean equal content.
///
/// Stored as 32 bytes in one piece; in JSON it is 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(pub [u8; 32]);

impl Serialize for Key {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match s.is_human_readable() {
            true => s.serialize_str(&self.hex()),
            false => s.serialize_bytes(&self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        match d.is_human_readable() {
            true => {
                let hex = <Cow<'de, str>>::deserialize(d)?;
                let hash = blake3::Hash::from_hex(hex.as_bytes());
                hash.map(|hash| Self(*hash.as_bytes())).map_err(serde::de::Error::custom)
            }
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

#[cfg(test)]
mod tests {
    use super::Key;

    #[test]
    fn a_key_is_hexadecimal_in_json_and_bytes_where_it_is_stored() {
        let key = Key::of(b"text");
        let json = serde_json::to_string(&key).unwrap();
        assert_eq!(json, format!("\"{}\"", key.hex()));
        assert_eq!(serde_json::from_str::<Key>(&json).unwrap(), key);
        assert!(serde_json::from_str::<Key>("\"12\"").is_err() && serde_json::from_str::<Key>("[1]").is_err());
        assert_eq!(crate::encoding::decode::<Key>(&crate::encoding::encode(&key)).ok(), Some(key));
    }
}
