//! What a kernel of `forward/sm80` needs: shared memory exactly, registers from below.

use super::{Sm80Schedule, Swizzle};
use crate::resources::marks_empty_rows;
use crate::{Problem, Resources};

pub(super) fn of(s: &Sm80Schedule, problem: &Problem) -> Resources {
    Resources { threads: s.threads(), smem_bytes: smem_bytes(s, problem), registers: registers(s, problem) }
}

/// 16-byte chunks of one row of `head_dim` 16-bit elements in shared memory.
fn row_chunks(head_dim: u32, swizzle: Swizzle) -> u32 {
    let chunks = head_dim.next_multiple_of(16) / 8;
    match swizzle {
        Swizzle::Xor => chunks,
        // An odd number of chunks puts eight consecutive rows on eight different bank groups.
        Swizzle::Pad => chunks + 1,
    }
}

fn smem_bytes(s: &Sm80Schedule, problem: &Problem) -> u32 {
    let row_qk = row_chunks(problem.head_dim_qk, s.swizzle) * 16;
    let row_v = row_chunks(problem.head_dim_v, s.swizzle) * 16;
    let q = s.block_q() * row_qk;
    let kv = s.stages * s.block_kv * (row_qk + row_v);
    let o = s.block_q() * row_v;
    // Q shares the space of K and V when it moves on to registers; O reuses whatever is there at the end.
    let live = if s.q_in_registers { q.max(kv) } else { q + kv };
    let empty = if marks_empty_rows(problem) { s.block_q() / 2 } else { 0 };
    live.max(o + empty)
}

fn registers(s: &Sm80Schedule, problem: &Problem) -> u32 {
    let m_tiles = s.rows_per_warp / 16;
    let o = m_tiles * problem.head_dim_v.next_multiple_of(16) / 2;
    let scores = m_tiles * s.block_kv / 2;
    let q = if s.q_in_registers { m_tiles * problem.head_dim_qk.next_multiple_of(16) / 4 } else { m_tiles * 4 };
    // Row maxima and sums, addresses and loop state.
    o + scores + q + 4 * m_tiles + 14
}
