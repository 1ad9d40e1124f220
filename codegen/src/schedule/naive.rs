//! Schedule of `forward/naive`: fixed on purpose, because an oracle should not change under tuning.

use crate::{Problem, SmArch};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Tile of the plain CUDA kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NaiveSchedule {
    /// Query rows of one thread block.
    pub block_q: u32,
    /// Keys that a block looks at together.
    pub block_kv: u32,
    /// Threads of one block.
    pub threads: u32,
}

impl NaiveSchedule {
    /// The only choice: the largest of three tiles that fits the arch's shared memory.
    pub fn default_for(problem: &Problem, sm: SmArch) -> Self {
        let tile = |block_q, block_kv| Self { block_q, block_kv, threads: 256 };
        [tile(64, 64), tile(32, 32)]
            .into_iter()
            .find(|s| s.smem_bytes(problem) <= sm.limits().smem_per_block)
            .unwrap_or(tile(16, 32))
    }

    /// Dynamic shared memory: tiles of Q, of K or V, and of P, in fp32 with odd pitches.
    pub fn smem_bytes(&self, problem: &Problem) -> u32 {
        let q = self.block_q * (problem.head_dim_qk | 1);
        let kv = self.block_kv * (problem.head_dim_qk.max(problem.head_dim_v) | 1);
        4 * (q + kv + self.block_q * (self.block_kv | 1))
    }
}

impl fmt::Display for NaiveSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "q{}-kv{}-t{}", self.block_q, self.block_kv, self.threads)
    }
}
