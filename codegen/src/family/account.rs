//! How a kernel takes a ragged batch, in words: what `explain` tells.

use crate::{CallSizes, Problem};

/// How a kernel shares out the keys of a ragged batch, puts the results together, and finds pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RaggedAccount {
    /// Which keys meet which rows together, and who has which of them.
    pub split: String,
    /// How results of the same rows become one.
    pub merge: String,
    /// How a key's place in the store is found and read.
    pub pages: String,
}

/// What an account is of: a problem at the sizes of a usual sequence, on a device of so many multiprocessors or cores.
pub(crate) struct Usual<'a> {
    pub problem: &'a Problem,
    pub sizes: &'a CallSizes,
    pub units: u32,
}

impl Usual<'_> {
    /// Rows of a KV head of a sequence: those of all its query heads.
    pub(crate) fn packed(&self) -> u64 {
        u64::from(self.sizes.shape.q_len) * u64::from(self.sizes.shape.group())
    }

    /// (sequence, KV head) pairs.
    pub(crate) fn pairs(&self) -> u64 {
        u64::from(self.sizes.shape.batch) * u64::from(self.sizes.shape.kv_heads)
    }

    /// Keys of a sequence that a tile of so many rows attends to at most.
    pub(crate) fn seen(&self, rows: u64) -> u64 {
        let shape = &self.sizes.shape;
        let kv_len = u64::from(shape.kv_len);
        match shape.mask.window() {
            (Some(left), Some(right)) => {
                kv_len.min(u64::from(left) + u64::from(right) + rows.div_ceil(shape.group().into()))
            }
            _ => kv_len,
        }
    }

    /// What the places of keys are looked up in.
    pub(crate) fn index(&self) -> String {
        match self.sizes.pages.tokens() {
            Some(tokens) => format!("pages of {tokens} tokens, looked up in the table"),
            None => "sequences in one piece, from their first rows or slots".to_owned(),
        }
    }
}
