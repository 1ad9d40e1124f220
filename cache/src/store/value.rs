//! Values of the journal: `schema version u8 | BLAKE3 of the payload | postcard payload`.

use serde::{Serialize, de::DeserializeOwned};

pub const SCHEMA: u8 = 10;
const HEADER: usize = 33;

/// The bytes of a value.
pub fn seal_value<T: Serialize>(value: &T) -> Vec<u8> {
    let payload = postcard::to_stdvec(value).expect("stored values are plain structs, which always encode");
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    bytes.push(SCHEMA);
    bytes.extend_from_slice(blake3::hash(&payload).as_bytes());
    bytes.extend_from_slice(&payload);
    bytes
}

/// The value of bytes that pass every check; otherwise the check that failed.
pub fn open_value<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, &'static str> {
    let (header, payload) = bytes.split_at_checked(HEADER).ok_or("it is shorter than its header")?;
    if header[0] != SCHEMA {
        return Err("its schema version is another one");
    }
    if header[1..] != *blake3::hash(payload).as_bytes() {
        return Err("its content does not match its hash");
    }
    let (value, rest) = postcard::take_from_bytes(payload).map_err(|_| "its content cannot be decoded")?;
    if !rest.is_empty() {
        return Err("its content has bytes to spare");
    }
    Ok(value)
}
