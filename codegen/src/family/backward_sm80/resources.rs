//! What a kernel of `backward/sm80` needs: shared memory exactly, registers from below.

use super::BackwardSm80Schedule;
use crate::{Problem, Resources};

/// Bytes that a query has beside its rows of Q and dO: log-sum-exp and D, and of rows far from zero what is taken from
/// scores first.
const STATISTICS: [u32; 2] = [8, 16];

pub(super) fn of(s: &BackwardSm80Schedule, problem: &Problem) -> Resources {
    Resources { threads: s.warps * 32, smem_bytes: smem_bytes(s, problem), registers: registers(s, problem) }
}

/// Of the larger of the two stages with products.
pub(super) fn smem_bytes(s: &BackwardSm80Schedule, problem: &Problem) -> u32 {
    let [keys, queries] = smem_of_stages(s, problem);
    keys.max(queries)
}

/// Of the stage of keys, and of that of queries: the rows that stay, and buffers of those that are walked over.
pub(super) fn smem_of_stages(s: &BackwardSm80Schedule, problem: &Problem) -> [u32; 2] {
    let row = 2 * (problem.head_dim_qk.next_multiple_of(16) + problem.head_dim_v.next_multiple_of(16));
    let keys = s.block_keys() * row + s.stages_q * s.step_q * (row + STATISTICS[usize::from(problem.reaches_far())]);
    [keys, s.block_queries() * row + s.stages_kv * s.step_kv * row]
}

/// Sums, scores and dP of the larger stage, with fragments and loop state.
fn registers(s: &BackwardSm80Schedule, problem: &Problem) -> u32 {
    let [qk, v] = [problem.head_dim_qk, problem.head_dim_v].map(|dim| dim.next_multiple_of(16));
    let part = |dim: u32| (dim / 16).div_ceil(s.parts) * 16;
    let keys = s.key_rows / 16 * ((part(qk) + part(v)) / 2 + s.step_q);
    let queries = s.query_rows / 16 * (qk / 2 + s.step_kv);
    keys.max(queries) + 24
}
