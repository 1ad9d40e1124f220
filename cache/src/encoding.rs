//! Values as bytes: MessagePack maps with the names of fields and variants, so that a field can be added.
//!
//! The same value gives the same bytes, and keys are hashes of them. A field at its default is left out (its struct
//! says so with `serde(default, skip_serializing_if)`): a field that is added so changes neither the bytes nor the key
//! of what is at its default, and bytes of before it decode. Names, of types that are stored, are therefore part of the
//! format.
//!
//! What decides a kernel (problem, schedule, sizes, recipe) refuses fields that this build does not know, since it
//! would make or serve another kernel than was meant; of other structs unknown fields are left alone.

use rmp_serde::decode::Error as Malformed;
use rmp_serde::{Deserializer, Serializer};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fmt;

/// Levels of nesting that are followed. Records have nine.
const DEEPEST: usize = 64;

/// Why bytes are no value of a type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undecodable {
    /// They are not what somebody wrote; which check says so.
    Damaged(&'static str),
    /// They are one of something else: fields or variants that this build does not know, or others that it needs.
    Foreign(String),
}

impl fmt::Display for Undecodable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Undecodable::Damaged(what) => f.write_str(what),
            Undecodable::Foreign(what) => write!(f, "another build of flashtune wrote it, a newer one perhaps: {what}"),
        }
    }
}

/// The bytes of a value.
pub fn encode<T: Serialize + ?Sized>(value: &T) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_to(&mut bytes, value);
    bytes
}

/// Appends the bytes of a value.
pub fn encode_to<T: Serialize + ?Sized>(bytes: &mut Vec<u8>, value: &T) {
    let mut serializer = Serializer::new(bytes).with_struct_map();
    value.serialize(&mut serializer).expect("plain structs, which always encode into memory");
}

/// The value that the bytes are, all of them. They need not be trusted: memory is taken for what is there, not for what
/// a length says.
///
/// # Errors
/// Why they are no such value.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Undecodable> {
    let mut deserializer = Deserializer::from_read_ref(bytes);
    deserializer.set_max_depth(DEEPEST);
    let value = T::deserialize(&mut deserializer).map_err(|e| match e {
        Malformed::TypeMismatch(_) | Malformed::OutOfRange | Malformed::LengthMismatch(_) => {
            Undecodable::Foreign("a value is of another type".to_owned())
        }
        Malformed::Syntax(what) | Malformed::Uncategorized(what) => Undecodable::Foreign(what),
        _ => Undecodable::Damaged("its content cannot be decoded"),
    })?;
    // Reading one more number fails at its first byte where there is none.
    match u8::deserialize(&mut deserializer) {
        Err(Malformed::InvalidMarkerRead(_)) => Ok(value),
        _ => Err(Undecodable::Damaged("its content has bytes to spare")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{artifact, record, trial};
    use crate::{Artifact, Record};
    use proptest::prelude::*;

    #[test]
    fn values_are_exact_and_their_bytes_repeat() {
        let mut odd = record(512, 1);
        let times = [f64::INFINITY, f64::NEG_INFINITY, -0.0, f64::MIN_POSITIVE / 4.0, 0.1 + 0.2];
        odd.finalists = times.map(|median_us| crate::Finalist { median_us, ..odd.finalists[0].clone() }).to_vec();
        let bytes = encode(&odd);
        let back: Record = decode(&bytes).unwrap();
        for (one, other) in odd.finalists.iter().zip(&back.finalists) {
            assert_eq!(one.median_us.to_bits(), other.median_us.to_bits());
        }
        assert_eq!(encode(&back), bytes);
        assert_eq!(decode::<Artifact>(&encode(&artifact(3))).unwrap(), artifact(3));
        // As one piece, behind the few bytes of a length.
        assert!(encode(&artifact(3)).windows(203).any(|w| *w == artifact(3).bytes));
        assert_eq!(decode::<crate::Trial>(&encode(&trial(2))).unwrap(), trial(2));
    }

    #[test]
    fn no_byte_is_missing_or_to_spare() {
        let bytes = encode(&record(512, 1));
        for end in 0..bytes.len() {
            assert!(matches!(decode::<Record>(&bytes[..end]), Err(Undecodable::Damaged(_))), "{end}");
        }
        for more in [0x00, 0x91, 0xc0, 0xcc, 0xff, 0xc1] {
            let spare = decode::<Record>(&[&bytes[..], &[more]].concat());
            assert_eq!(spare, Err(Undecodable::Damaged("its content has bytes to spare")), "{more:#x}");
        }
    }

    #[test]
    fn lengths_and_depths_that_lie_cost_nothing() {
        // An array of 2^32 - 1 elements, a map, a text and bytes as long, and arrays in arrays without end.
        for lie in [0xdd, 0xdf, 0xdb, 0xc6] {
            let bytes = [lie, 0xff, 0xff, 0xff, 0xff];
            assert!(decode::<Vec<u64>>(&bytes).is_err() && decode::<Record>(&bytes).is_err(), "{lie:#x}");
            assert!(decode::<String>(&bytes).is_err() && decode::<serde_bytes::ByteBuf>(&bytes).is_err(), "{lie:#x}");
        }
        let deep = [&[0x82, 0xa1, b'x'][..], &[0x91; 100_000]].concat();
        assert!(matches!(decode::<crate::Facts>(&deep), Err(Undecodable::Damaged(_))));
        assert!(matches!(decode::<serde::de::IgnoredAny>(&deep), Err(Undecodable::Damaged(_))));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(crate::testing::mutations(2000)))]
        #[test]
        fn noise_never_panics(
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            noise in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut bytes = encode(&record(512, 1));
            for (at, byte) in edits {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Ok(record) = decode::<Record>(&bytes) {
                prop_assert_eq!(decode::<Record>(&encode(&record)).map(|r| encode(&r)), Ok(encode(&record)));
            }
            let _ = (decode::<Record>(&noise), decode::<Artifact>(&noise));
        }
    }
}
