//! Shared memory of a kernel of `forward/sm90`.

use super::Sm90Schedule;
use crate::Problem;
use crate::family::forward_sm90_ragged::TABLE_BYTES;
use crate::resources::marks_empty_rows;

/// Stages of the bits that say which scores are kept.
pub(super) const BIT_STAGES: u32 = 2;

/// Bytes of dynamic shared memory, as `Layout` in the template: Q or O of every consumer, K, V, biases, and the
/// barriers.
pub(super) fn smem_bytes(problem: &Problem, s: &Sm90Schedule) -> u32 {
    // Rows are stored in columns of 64 elements, 128 bytes.
    let (qk, v) = (problem.head_dim_qk.div_ceil(64) * 128, problem.head_dim_v.div_ceil(64) * 128);
    let q_buffers = if s.chain { 2 } else { 1 };
    let q = q_buffers * s.consumers * 64 * qk.max(v);
    let kv = s.stages * s.block_kv * (qk + v);
    // Lengths and places of a sequence, the tile table, and of the keys of a stage which are of no page.
    let (tile, table) = if problem.kv.is_dense() { (64, 0) } else { (96, TABLE_BYTES + 4 * s.stages) };
    let slot = tile + if s.trim { s.consumers * 16 } else { 0 };
    let work = match problem.kv.is_dense() {
        true if s.scheduler.is_persistent() => 2 * slot,
        true => 0,
        // The first tile, and of four what consumers read again.
        false => 3 * slot + 4 * 64,
    };
    let work = work + if marks_empty_rows(problem) { s.consumers * 32 } else { 0 };
    let o = if s.output_apart { s.consumers * 64 * v } else { 0 };
    let biases = s.biases(problem).len() as u32 * s.block_kv * 128;
    let biases = if biases > 0 { s.bias_stages * s.consumers * (biases + 16) } else { 0 };
    // Tiles that may be computed again, of schedules whose O leaves from the place of V.
    let in_v = s.scheduler.is_persistent() && !s.chain && !s.output_apart && s.consumers * 64 <= s.stages * s.block_kv;
    let again = if in_v && (problem.masks() || !problem.kv.is_dense()) && s.bias_stages == 0 { 24 } else { 0 };
    let bits = match s.drawers {
        0 => 0,
        // A word for each row and 32 keys; what 32 keys have in common, for each warp that draws.
        n => s.block_kv.div_ceil(32) * (BIT_STAGES * s.consumers * 64 * 4 + n * 4 * 64) + BIT_STAGES * 16,
    };
    q + kv + o + work + again + biases + bits + 32 + q_buffers * s.consumers * 16 + s.stages * 40 + 24 + table
}
