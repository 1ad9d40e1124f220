//! Values of the journal: `schema version u8 | BLAKE3 of the payload | payload`.

use crate::encoding::{Undecodable, decode, encode};
use serde::{Serialize, de::DeserializeOwned};

pub(crate) const SCHEMA: u8 = 10;
const HEADER: usize = 33;

/// The bytes of a value.
pub(crate) fn seal_value<T: Serialize>(value: &T) -> Vec<u8> {
    let payload = encode(value);
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    bytes.push(SCHEMA);
    bytes.extend_from_slice(blake3::hash(&payload).as_bytes());
    bytes.extend_from_slice(&payload);
    bytes
}

/// The value of bytes that pass every check; otherwise the check that failed.
pub(crate) fn open_value<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Undecodable> {
    let damaged = Undecodable::Damaged;
    let (header, payload) = bytes.split_at_checked(HEADER).ok_or(damaged("it is shorter than its header"))?;
    if header[0] != SCHEMA {
        return Err(damaged("its schema version is another one"));
    }
    if header[1..] != *blake3::hash(payload).as_bytes() {
        return Err(damaged("its content does not match its hash"));
    }
    decode(payload)
}
