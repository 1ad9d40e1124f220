//! The schedules of `forward/sm80_ragged` that serve while nothing is tuned, and those worth trying.

use super::Sm80RaggedSchedule;
use crate::{Arch, Kernel, Problem, Schedule, ShapeBucket, SmArch};

fn fits(s: Sm80RaggedSchedule, problem: &Problem, sm: SmArch) -> bool {
    Kernel { problem: *problem, schedule: Schedule::Sm80Ragged(s), arch: Arch::Sm(sm) }.check().is_ok()
}

/// The first that fits of the default and smaller ones.
pub(super) fn default_for(problem: &Problem, sm: SmArch, bucket: &ShapeBucket) -> Sm80RaggedSchedule {
    let packed = u64::from(bucket.q_len) * u64::from(bucket.group);
    let d = problem.head_dim_qk.max(problem.head_dim_v);
    let of = |rows_per_warp, row_warps, key_warps, block_kv, stages| Sm80RaggedSchedule {
        rows_per_warp,
        row_warps,
        key_warps,
        block_kv,
        stages,
        blocks_per_sm: 1,
    };
    let quantised = problem.kv.store().is_some_and(|store| store.element.bytes(problem.dtype) == 1);
    let wanted: &[Sm80RaggedSchedule] = match packed {
        // Two stages: a third only makes the memory's queue longer. 64 x 4096 took 258 us by two and 270 by three, of
        // bf16; quantised keys, which are read faster than 16 of them at a time are computed, 155 and 156 by 32, 194
        // by 16.
        0..=16 if quantised => &[of(16, 1, 8, 32, 2), of(16, 1, 8, 16, 2), of(16, 1, 4, 16, 2)],
        0..=16 if d <= 64 => &[of(16, 1, 8, 32, 2), of(16, 1, 8, 16, 2), of(16, 1, 4, 16, 2)],
        0..=16 => &[of(16, 1, 8, 16, 2), of(16, 1, 4, 16, 3), of(16, 1, 4, 16, 2)],
        17..=32 => &[of(16, 2, 4, 32, 3), of(16, 2, 4, 16, 3), of(16, 2, 4, 16, 2), of(16, 2, 2, 16, 2)],
        33..=64 => &[of(16, 4, 2, 32, 3), of(16, 4, 2, 32, 2), of(16, 4, 2, 16, 2), of(16, 4, 1, 16, 2)],
        _ if d <= 128 => &[of(16, 8, 1, 64, 3), of(16, 8, 1, 64, 2), of(16, 4, 1, 64, 2), of(16, 4, 1, 32, 2)],
        _ => &[of(16, 8, 1, 64, 2), of(16, 8, 1, 32, 2), of(16, 4, 1, 32, 2), of(16, 4, 1, 16, 2)],
    };
    let fit = wanted.iter().copied().find(|s| fits(*s, problem, sm));
    fit.unwrap_or(of(16, 1, 1, 16, 2))
}

/// Every combination that fits.
pub(super) fn space(problem: &Problem, sm: SmArch) -> Vec<Sm80RaggedSchedule> {
    let mut space = Vec::new();
    for (rows_per_warp, row_warps) in [(16, 1), (16, 2), (32, 1), (16, 4), (32, 2), (16, 8), (32, 4)] {
        for key_warps in [1, 2, 4, 8] {
            for block_kv in [16, 32, 64] {
                for stages in [2, 3, 4, 6] {
                    for blocks_per_sm in [1, 2] {
                        let s =
                            Sm80RaggedSchedule { rows_per_warp, row_warps, key_warps, block_kv, stages, blocks_per_sm };
                        if (4..=16).contains(&(row_warps * key_warps * blocks_per_sm)) {
                            space.push(s);
                        }
                    }
                }
            }
        }
    }
    space.retain(|s| fits(*s, problem, sm));
    space
}
