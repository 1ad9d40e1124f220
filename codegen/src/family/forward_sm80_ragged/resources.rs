//! What a kernel of `forward/sm80_ragged` needs: shared memory exactly (`forward/sm80_ragged/layout.cuh` has the
//! picture), registers from below.

use super::Sm80RaggedSchedule;
use crate::{KvScales, Problem, Resources};

pub(super) fn of(s: &Sm80RaggedSchedule, problem: &Problem) -> Resources {
    Resources { threads: s.threads(), smem_bytes: smem_bytes(s, problem), registers: registers(s, problem) }
}

/// Bytes of an element of the store.
fn cache_bytes(problem: &Problem) -> u32 {
    problem.kv.store().map_or(2, |store| store.element.bytes(problem.dtype)) as u32
}

/// Bytes of a row of a store in shared memory: whole pairs of 16-byte chunks.
fn pitch(dim: u32, problem: &Problem) -> u32 {
    (dim * cache_bytes(problem)).next_multiple_of(32)
}

/// Floats that the merge has at least, and those of each warp where more than two thread blocks are to fit.
const MERGE_FLOATS: u32 = 6144;
const MERGE_FLOATS_OF_WARP: u32 = 768;

fn smem_bytes(s: &Sm80RaggedSchedule, problem: &Problem) -> u32 {
    let stage = s.block_kv * (pitch(problem.head_dim_qk, problem) + pitch(problem.head_dim_v, problem));
    let per_token = problem
        .kv
        .store()
        .is_some_and(|store| store.element.bytes(problem.dtype) == 1 && store.scales == KvScales::PerToken);
    let scales = if per_token { 8 * s.block_kv } else { 0 };
    let rings = s.key_warps * s.stages * (stage + scales + STEP) + s.key_warps * (s.stages + 1) * SHARE;
    let queries = (rings + s.key_warps * s.rows() * 8 + 16).next_multiple_of(16);
    let merge = queries + if shares_q(s, problem) { s.row_warps * m_tiles(s) * steps_qk(problem) * 512 } else { 0 };
    let warps = s.row_warps * s.key_warps;
    let least = if s.blocks_per_sm > 2 { MERGE_FLOATS_OF_WARP * warps } else { MERGE_FLOATS };
    merge + 4 * (s.key_warps * (problem.head_dim_v.next_multiple_of(16) + 8)).max(least)
}

const fn m_tiles(s: &Sm80RaggedSchedule) -> u32 {
    s.rows_per_warp / 16
}

/// Matrix steps of Q K^T.
fn steps_qk(problem: &Problem) -> u32 {
    pitch(problem.head_dim_qk, problem) / if cache_bytes(problem) == 1 { 16 } else { 32 }
}

/// 8-column tiles of O.
fn o_tiles(problem: &Problem) -> u32 {
    pitch(problem.head_dim_v, problem) / if cache_bytes(problem) == 1 { 8 } else { 16 }
}

/// Whether Q lies in shared memory: where registers have no room for it beside O. At head dim 256 up to 900 bytes of
/// them were spilled.
pub(super) fn shares_q(s: &Sm80RaggedSchedule, problem: &Problem) -> bool {
    m_tiles(s) * 4 * (steps_qk(problem) + o_tiles(problem)) > 160
}

/// Bytes of what is noted of a step and of a share.
const STEP: u32 = 16;
const SHARE: u32 = 56;

/// Bytes of the two pieces that a thread block may leave: O, references and sums of a tile's rows each, in fp32.
pub(super) fn piece_bytes(s: &Sm80RaggedSchedule, problem: &Problem) -> u32 {
    2 * 4 * s.rows() * (problem.head_dim_v.next_multiple_of(16) + 2)
}

fn registers(s: &Sm80RaggedSchedule, problem: &Problem) -> u32 {
    let m_tiles = m_tiles(s);
    let o = m_tiles * problem.head_dim_v.next_multiple_of(16) / 2;
    let q = if shares_q(s, problem) { 8 * m_tiles } else { m_tiles * problem.head_dim_qk.next_multiple_of(16) / 4 };
    o + q + m_tiles * s.block_kv / 2 + 4 * m_tiles + 14
}
