//! Shared memory and registers of the stages of `backward/sm90`.

use super::{BackwardSm90Schedule, block_kv, is_by_gradient};
use crate::Problem;

/// Chunks of 64 columns of Q and K, and of V and dO: 128 bytes a row.
const fn chunks(problem: &Problem) -> (u32, u32) {
    (problem.head_dim_qk.div_ceil(64), problem.head_dim_v.div_ceil(64))
}

/// To begin at a multiple of 1024 bytes.
const ALIGNMENT: u32 = 1024;

/// What a loader says of a buffer where there is a score program.
const fn listed(problem: &Problem) -> u32 {
    if problem.program.is_some() { 8 } else { 0 }
}

/// So many bytes, and behind them what a loader says of packed sequences, two at a time with their barriers.
const fn with_items(problem: &Problem, bytes: u32) -> u32 {
    if problem.kv.is_dense() { bytes } else { bytes.next_multiple_of(16) + 128 }
}

/// Bytes of `keys`, as `KeysLayout` in the template: K and V, Q and dO with their statistics, two tiles of dS and of
/// dQ, weights on their way from one warpgroup to the other, barriers.
pub(super) fn keys_smem_bytes(problem: &Problem, s: &BackwardSm90Schedule) -> u32 {
    let ((qk, v), block_kv, listed) = (chunks(problem), block_kv(problem), listed(problem));
    let blocks = s.key_stages * (qk + v) * block_kv * 128;
    let queries = s.stages * ((qk + v) * s.block_q * 128 + s.block_q * 8 + listed);
    // One buffer of dS, with a barrier, where those of K and V are two in turns.
    let (slopes, read) = if s.turns && s.key_stages == 2 { (1, 8) } else { (2, 0) };
    let spilled = slopes * s.block_q * block_kv * 2 + 2 * listed;
    let hand = if is_by_gradient(problem) { 64 * s.block_q * 4 + 16 } else { 0 };
    let taken = if s.is_joint() || s.turns || s.walks { 16 } else { 0 };
    let sums = if s.turns { 2 * s.block_q * problem.head_dim_qk.next_multiple_of(16) * 4 } else { 0 };
    // Where there are two buffers of dQ there is no room for more.
    let alignment = if s.turns { 512 } else { ALIGNMENT };
    let barriers = s.key_stages * 32 + s.stages * 32 + 32 + read;
    with_items(problem, blocks + queries + spilled + sums + hand + barriers + taken) + alignment
}

/// Bytes of `queries`, as `QueriesLayout` in the template: K and tiles of dS, 64 rows of dQ of each warpgroup,
/// barriers.
pub(super) fn queries_smem_bytes(problem: &Problem, s: &BackwardSm90Schedule) -> u32 {
    let (qk, _) = chunks(problem);
    let which = if s.is_joint() { 8 } else { listed(problem) };
    let stage = (qk + 2 * s.row_tiles) * block_kv(problem) * 128 + 16 + which;
    with_items(problem, s.row_stages * stage + 2 * qk * 64 * 128) + ALIGNMENT
}

/// Registers of a thread of the stages that hold accumulators where most are live: dK, dV, S and dP, or the tiles of
/// dQ.
pub(super) fn live_registers(problem: &Problem, s: &BackwardSm90Schedule) -> u32 {
    let [qk, v] = [problem.head_dim_qk, problem.head_dim_v].map(|dim| dim.next_multiple_of(16) / 2);
    let keys = if is_by_gradient(problem) { qk.max(v) } else { qk + v };
    (keys + s.block_q).max(s.row_tiles * qk)
}

/// What the compiler keeps of them without spilling or serialising products, of the 232 registers of a thread.
pub(super) const MOST_LIVE_REGISTERS: u32 = 208;

#[cfg(test)]
mod tests {
    use super::super::tests::{problem, schedule};
    use super::*;

    #[test]
    fn shared_memory_is_that_of_the_template() {
        let bytes = |qk, v, change: &dyn Fn(&mut BackwardSm90Schedule)| {
            let mut s = schedule(qk, v);
            change(&mut s);
            (keys_smem_bytes(&problem(qk, v), &s), queries_smem_bytes(&problem(qk, v), &s))
        };
        assert_eq!(bytes(128, 128, &|_| {}), (231_584, 230_432));
        assert_eq!(bytes(128, 128, &|s| s.key_stages = 1), (166_016, 230_432));
        assert_eq!(bytes(128, 128, &|s| s.dq_blocks = 1), (231_600, 230_448));
        assert_eq!(bytes(64, 64, &|_| {}), (199_840, 181_280));
        assert_eq!(bytes(64, 64, &|s| (s.stages, s.key_stages) = (3, 1)), (200_864, 181_280));
        assert_eq!(bytes(64, 64, &|s| (s.block_q, s.stages, s.key_stages) = (64, 4, 1)), (134_336, 181_280));
        assert_eq!(bytes(80, 96, &|s| s.key_stages = 1), (166_016, 230_432));
        assert_eq!(bytes(40, 24, &|_| {}), (199_840, 181_280));
        assert_eq!(bytes(256, 256, &|_| {}), (231_568, 214_064));
        assert_eq!(bytes(192, 128, &|_| {}), (199_344, 173_104));
    }
}
