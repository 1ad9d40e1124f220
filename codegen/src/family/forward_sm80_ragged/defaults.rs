//! The schedules of `forward/sm80_ragged` that serve while nothing is tuned, and those worth trying.

use super::Sm80RaggedSchedule;
use crate::{Arch, Kernel, Problem, Schedule, ShapeBucket, SmArch};

fn fits(s: Sm80RaggedSchedule, problem: &Problem, sm: SmArch) -> bool {
    Kernel { problem: *problem, schedule: Schedule::Sm80Ragged(s), arch: Arch::Sm(sm) }.check().is_ok()
}

/// Pairs of a sequence and a KV head up to which most tiles of decoding are cut into pieces; a bucket has a power of
/// two.
const MOST_PAIRS_IN_PIECES: u32 = 128;

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
    let narrow = quantised || d <= 64; // steps of 16 keys are too short
    // More thread blocks of fewer teams, where each has whole tiles: one multiplies while another merges. us of one and
    // of two (H200, 32/8 heads of 128): 128 sequences of 200, 1600 and 3000 keys 250 and 218, in e4m3 212 and 156; 256
    // of 256 102 and 82; 64 of 4096 261 and 258. Of 128 pairs they are equal, and fewer have twice as many pieces to
    // merge: 1 of 32,768 43.6 and 46.2. Of two and of four, where merges take a larger part: e4m3 154 and 130 for the
    // first of these, 62 and 53 for the second, 143 and 141 for the third; a window of 128 over 64 of 4096 15.8 and
    // 14.3; but bf16 214 and 219 for the first, 40 of 4096 163 and 167.
    let blocks = |key_warps, blocks_per_sm| Sm80RaggedSchedule {
        blocks_per_sm,
        ..of(16, 1, key_warps, if narrow { 32 } else { 16 }, 2)
    };
    let four = (narrow || problem.mask.left).then_some(blocks(2, 4));
    let more = four.into_iter().chain([blocks(4, 2)]).find(|s| fits(*s, problem, sm));
    if let Some(more) = more.filter(|_| packed <= 16 && bucket.parallel > MOST_PAIRS_IN_PIECES) {
        return more;
    }
    let wanted: &[Sm80RaggedSchedule] = match packed {
        // Two stages: a third only makes the memory's queue longer. 64 x 4096 took 258 us by two and 270 by three, of
        // bf16; quantised keys, which are read faster than 16 of them at a time are computed, 155 and 156 by 32, 194
        // by 16.
        0..=16 if narrow => &[of(16, 1, 8, 32, 2), of(16, 1, 8, 16, 2), of(16, 1, 4, 16, 2)],
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
                    for blocks_per_sm in [1, 2, 4] {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, KvElement, KvKind, KvScales, KvStore, MaskKind};

    #[test]
    fn many_pairs_have_several_thread_blocks_a_multiprocessor() {
        let of = |dim, element, sm: &str, parallel, q_len| {
            let store = KvStore { element, scales: KvScales::PerHead, v_columns: false };
            let mask = MaskKind { left: dim == 80, right: true };
            let problem = Problem::forward(DType::Bf16, dim, mask).unwrap().with_kv(KvKind::Ragged(store));
            let bucket = ShapeBucket { parallel, group: 1, q_len, kv_len: 8192, ..Default::default() };
            default_for(&problem, sm.parse::<Arch>().unwrap().gpu(), &bucket).to_string()
        };
        use KvElement::{E4m3, Same};
        for (dim, element, sm, parallel, q_len, name) in [
            (128, Same, "sm_90a", 128, 4, "r16x1-k8-kv16-s2-b1"),
            (128, Same, "sm_90a", 256, 4, "r16x1-k4-kv16-s2-b2"),
            (128, Same, "sm_90a", 256, 17, "r16x2-k4-kv32-s3-b1"),
            (128, E4m3, "sm_90a", 256, 4, "r16x1-k2-kv32-s2-b4"),
            (64, Same, "sm_90a", 1024, 8, "r16x1-k2-kv32-s2-b4"),
            // A window.
            (80, Same, "sm_90a", 256, 4, "r16x1-k2-kv16-s2-b4"),
            // No room for more.
            (256, Same, "sm_90a", 1024, 8, "r16x1-k4-kv16-s3-b1"),
            (128, Same, "sm_80", 1024, 4, "r16x1-k8-kv16-s2-b1"),
            (128, Same, "sm_86", 1024, 4, "r16x1-k4-kv16-s2-b1"),
        ] {
            assert_eq!(of(dim, element, sm, parallel, q_len), name, "{dim} {element:?} {sm} {parallel} {q_len}");
        }
    }
}
