//! Where a kernel finds K and V: as one tensor, or in a store that sequences of different lengths share.

use crate::DType;
use crate::omitted::is_default;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How a call gives K, V and the lengths of its sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum KvKind {
    /// K and V are `[batch, kv_heads, kv_len, head_dim]` tensors, all sequences of one length.
    #[default]
    Dense,
    /// Sequences of lengths that the device alone knows, K and V in a store that is indexed at run time: packed rows,
    /// pages by a table or by CSR, slots of a dense cache ([`crate::abi::RaggedArgs`]).
    Ragged(KvStore),
}

impl KvKind {
    /// A ragged batch over a store in the dtype of the queries.
    pub const RAGGED: KvKind =
        KvKind::Ragged(KvStore { element: KvElement::Same, scales: KvScales::PerHead, v_columns: false });

    /// The store of a ragged batch.
    pub const fn store(self) -> Option<KvStore> {
        match self {
            KvKind::Dense => None,
            KvKind::Ragged(store) => Some(store),
        }
    }

    /// Whether it is the kind that most problems have.
    pub const fn is_dense(self) -> bool {
        matches!(self, KvKind::Dense)
    }
}

/// What of a store changes the code of a kernel. Strides, pages, tables and lengths are run-time values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvStore {
    /// Its elements.
    #[serde(default, skip_serializing_if = "is_default")]
    pub element: KvElement,
    /// Which of its elements share a scale; of no meaning where the elements are those of the queries.
    #[serde(default, skip_serializing_if = "is_default")]
    pub scales: KvScales,
    /// Whether the tokens of V lie side by side, as in `[blocks, kv_heads, head_dim, page]`, and not its columns.
    #[serde(default, skip_serializing_if = "is_default")]
    pub v_columns: bool,
}

/// Elements of a KV store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum KvElement {
    /// Those of the queries.
    #[default]
    Same,
    /// OCP FP8 E4M3: 448 is the largest, no infinities, 0x7f and 0xff are NaN.
    E4m3,
    /// OCP FP8 E5M2: as f16 with two bits of mantissa.
    E5m2,
    /// Two's complement; -128 is a value like any other.
    Int8,
}

impl KvElement {
    /// What `same` means beside queries of a dtype: those of e4m3 have it by its own name.
    pub fn beside(self, queries: DType) -> Self {
        if self == KvElement::Same && queries == DType::E4m3 { KvElement::E4m3 } else { self }
    }

    /// Bytes of an element, beside queries of a dtype.
    pub const fn bytes(self, queries: DType) -> usize {
        match self {
            KvElement::Same => queries.bytes(),
            _ => 1,
        }
    }

    /// The word for it; empty for the queries' own.
    pub const fn name(self) -> &'static str {
        match self {
            KvElement::Same => "",
            KvElement::E4m3 => "e4m3",
            KvElement::E5m2 => "e5m2",
            KvElement::Int8 => "int8",
        }
    }
}

/// Which elements of a quantised store share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum KvScales {
    /// Those of one KV head of one sequence, or more: of a tensor, a head, or a head of a sequence, by strides of 0.
    #[default]
    PerHead,
    /// Those of one token of one KV head; scales lie in pages as the tokens do.
    PerToken,
}

impl fmt::Display for KvKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KvKind::Ragged(KvStore { element, scales, v_columns }) = self else { return f.write_str("dense") };
        f.write_str("ragged")?;
        f.write_str(element.name())?;
        f.write_str(if *scales == KvScales::PerToken { "token" } else { "" })?;
        f.write_str(if *v_columns { "vt" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_kinds_differ() {
        let mut names = vec![KvKind::Dense.to_string()];
        for element in [KvElement::Same, KvElement::E4m3, KvElement::E5m2, KvElement::Int8] {
            for scales in [KvScales::PerHead, KvScales::PerToken] {
                for v_columns in [false, true] {
                    names.push(KvKind::Ragged(KvStore { element, scales, v_columns }).to_string());
                }
            }
        }
        let distinct: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len(), "{names:?}");
        assert_eq!(KvKind::RAGGED.to_string(), "ragged");
    }
}
