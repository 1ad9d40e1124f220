//! Schedule of `forward/naive`: fixed on purpose, because an oracle should not change under tuning.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Tile of the plain CUDA kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NaiveSchedule {
    /// Query rows of one thread block.
    pub block_q: u32,
    /// Keys that a block looks at together.
    pub block_kv: u32,
    /// Threads of one block.
    pub threads: u32,
}

impl Default for NaiveSchedule {
    fn default() -> Self {
        Self { block_q: 16, block_kv: 64, threads: 256 }
    }
}

impl fmt::Display for NaiveSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "q{}-kv{}-t{}", self.block_q, self.block_kv, self.threads)
    }
}
