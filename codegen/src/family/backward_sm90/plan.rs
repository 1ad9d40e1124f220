//! The stages of `backward/sm90`, and the scratch memory of a pair of a sequence and a KV head.

use super::{BackwardSm90Schedule, block_kv, resources};
use crate::launch::{LaunchPlan, SCRATCH_LIMIT, Stage, StageEntry, StageRole, Waves};
use crate::packed_waves::PackedWaves;
use crate::{Error, Problem, Result, Shape};

const fn entry(suffix: &'static str) -> StageEntry {
    StageEntry { suffix, role: StageRole::Wave }
}

/// Of packed sequences which key blocks and row blocks a wave has; D and log-sum-exps; dK, dV and dS; dQ.
const APART: [StageEntry; 4] = [entry("_sequences"), entry("_statistics"), entry("_keys"), entry("_queries")];
/// The last two in one, of dense calls.
const JOINT: [StageEntry; 2] = [entry("_statistics"), entry("_joint")];

/// dK, dV and sums of dQ in one, and dQ from them, of dense calls.
const TURNS: [StageEntry; 3] = [entry("_statistics"), entry("_turns"), entry("_rows")];

/// The stages of a problem.
pub(super) fn entries(s: &BackwardSm90Schedule, problem: &Problem) -> &'static [StageEntry] {
    if s.turns {
        return &TURNS;
    }
    match (s.is_joint(), problem.kv.is_dense()) {
        (true, _) => &JOINT,
        (false, true) => &APART[1..],
        (false, false) => &APART,
    }
}

/// Threads of the one block of `sequences`, and what it shares, as `SequencesShared` in the template.
pub(super) const SEQUENCES_THREADS: u32 = 512;
pub(super) const SEQUENCES_SMEM_BYTES: u32 = SEQUENCES_THREADS * 52 + SEQUENCES_THREADS / 4 + 16 + 16;
/// Thread blocks of a multiprocessor over packed sequences, of the stages that multiply where they are not persistent,
/// and of `statistics`: more even out unequal lengths, fewer are started in waves that the lengths do not need.
const PACKED_BLOCKS: [u32; 2] = [8, 16];

/// Threads of a block of `keys` and of `queries`: two warpgroups that multiply, and one that copies.
pub(super) const THREADS: u32 = 384;
/// Threads of a block of `statistics`.
const STATISTICS_THREADS: u32 = 256;

/// Multiprocessors that walks are made to fill: the same on all devices, so that they sum in the same order.
const UNITS_OF_WALKS: u64 = crate::USUAL_UNITS as u64;

/// Warps that have keys of a key block, each with a counter of walks.
const WARPS_OF_KEYS: u64 = 8;

/// Counters of a stage that takes key blocks by tickets, beside those of its row blocks, tiles or walks.
const COUNTERS: u64 = 4;

/// Threads of a block of `rows`, which has 64 of them.
pub(super) const ROWS_THREADS: u32 = 128;

/// Query rows of a thread block of `statistics`: each has a thread for 8 elements of O, to a power of two from 8 on.
pub(super) fn statistics_rows(problem: &Problem) -> u32 {
    STATISTICS_THREADS / (problem.head_dim_v.div_ceil(8).next_power_of_two().max(8))
}

/// The stages in waves of pairs.
pub(super) fn plan(s: &BackwardSm90Schedule, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
    let pairs = u64::from(shape.batch) * u64::from(shape.kv_heads);
    let group = u64::from(shape.heads).checked_div(u64::from(shape.kv_heads)).unwrap_or(0);
    let rows = u64::from(shape.q_len.next_multiple_of(s.block_q)) * group;
    let stage = |entry, blocks: u64, threads, smem_bytes| -> Result<Stage> {
        // Numbers of thread blocks are added to the grid in 32 bits.
        let blocks = blocks * pairs;
        let grid = u32::try_from(blocks).ok().filter(|n| *n < 1 << 30).ok_or_else(|| {
            let limit = "at most 2^30 thread blocks in one launch";
            Error::unsupported("batch * (heads * q_len + kv_heads * kv_len)", blocks, limit, "split the batch")
        })?;
        Ok(Stage::of(entry, grid, threads, smem_bytes).starting_early())
    };
    let packed = !problem.kv.is_dense();
    let persistent = |stage| Stage {
        resident: if s.is_persistent() { Some(1) } else { packed.then_some(PACKED_BLOCKS[0]) },
        ..stage
    };
    let [sequences, statistics, keys, queries] = APART;
    let key_blocks = u64::from(shape.kv_len.div_ceil(block_kv(problem)));
    let row_blocks = u64::from(shape.q_len.div_ceil(s.row_block())) * group;
    let [keys_smem, queries_smem] = [resources::keys_smem_bytes(problem, s), resources::queries_smem_bytes(problem, s)];
    let walks = walks_of_group(s, problem, shape, group);
    // They clear the counters that key blocks are taken by, of calls without queries as well.
    let counts = s.is_joint() || s.turns || s.walks;
    let of_rows = (rows / u64::from(statistics_rows(problem))).max(counts.into());
    let of_rows = stage(statistics, of_rows, STATISTICS_THREADS, 0)?;
    let of_rows = Stage { resident: packed.then_some(PACKED_BLOCKS[1]), ..of_rows };
    let stages = if s.turns {
        let turns = Stage { resident: Some(1), ..stage(TURNS[1], key_blocks * walks, THREADS, keys_smem)? };
        let parts = u64::from(shape.q_len.div_ceil(64)) * group;
        vec![of_rows, turns, stage(TURNS[2], parts, ROWS_THREADS, 0)?]
    } else if s.is_joint() {
        let joint = stage(JOINT[1], key_blocks * walks + row_blocks, THREADS, keys_smem.max(queries_smem))?;
        vec![of_rows, Stage { resident: Some(1), ..joint }]
    } else {
        let keys = persistent(stage(keys, key_blocks * walks, THREADS, keys_smem)?);
        let keys = if s.walks { Stage { resident: Some(1), ..keys } } else { keys };
        vec![of_rows, keys, persistent(stage(queries, row_blocks, THREADS, queries_smem)?)]
    };
    let tile_bytes = u64::from(s.block_q) * u64::from(block_kv(problem)) * 2;
    let [columns_qk, columns_v] = [problem.head_dim_qk, problem.head_dim_v].map(|n| u64::from(n.next_multiple_of(16)));
    let between = match s.turns {
        true => rows * columns_qk * 4,
        false => slots(s, block_kv(problem), shape) * tile_bytes * group,
    };
    // What key blocks are summed in is of whole ones.
    let sums = if walks > 1 { key_blocks * u64::from(block_kv(problem)) * (columns_qk + columns_v) * 4 } else { 0 };
    let parts = pairs as u32;
    let sections = [group / walks, group].map(|heads| section(s, problem, shape, heads));
    // Statistics are two numbers of 4 bytes a row.
    let counted = if s.turns { rows / u64::from(s.block_q) } else { row_blocks };
    let counted = if s.turns || s.is_joint() { counted } else { 0 };
    let counted = counted + if s.walks { key_blocks * WARPS_OF_KEYS } else { 0 };
    let counters = if counts { ((COUNTERS + counted) * 4).next_multiple_of(128) } else { 0 };
    let part_bytes = rows * 8 + between + sums + counters;
    let part_blocks = if problem.mask.right || problem.mask.left { 0 } else { (key_blocks * walks) as u32 };
    let waves =
        Waves { parts, part_bytes, part_blocks, limit: SCRATCH_LIMIT, sections, walks: walks as u32, packed: None };
    if !packed {
        return Ok(LaunchPlan::in_waves(stages, waves));
    }
    let slot_bytes = tile_bytes * group;
    let part_bytes = most_slots(s, block_kv(problem), shape) * slot_bytes;
    let waves = Waves {
        part_bytes,
        part_blocks: 0,
        sections: [if problem.mask.right { rows_of_section(s, problem) } else { 0 }; 2],
        packed: Some(PackedWaves {
            batch: shape.batch,
            heads: [shape.heads, shape.kv_heads],
            longest_keys: shape.kv_len,
            rows: [shape.q_len, shape.kv_len].map(|n| u64::from(n) * u64::from(shape.batch)),
            slot: [s.block_q, block_kv(problem)],
            slot_bytes,
            row_block: s.row_block(),
        }),
        ..waves
    };
    let first = Stage::of(sequences, parts.min(1), SEQUENCES_THREADS, SEQUENCES_SMEM_BYTES).starting_early();
    Ok(LaunchPlan::in_waves([first].into_iter().chain(stages), waves))
}

/// Rows of a head whose Q and dO a part of L2 holds.
fn rows_of_section(s: &BackwardSm90Schedule, problem: &Problem) -> u32 {
    (s.section_mib << 20) / ((problem.head_dim_qk + problem.head_dim_v) * 2)
}

/// Queries that a walk over a key block has at least, where the device is full with fewer walks: what it adds to the
/// sums of others costs as much as 1024 queries. us with walks of 4 heads, 2 and 1 of 32/8 heads (H200, causal, 16,384
/// tokens): head dim 128 at 4096 queries 3210, 2816 and 2960, at 16,384 11,845, 10,927 and 10,736; head dim 64 at 4096
/// 1543, 1526 and 1570, at 16,384 6107, 5842 and 5716.
pub(super) const LEAST_QUERIES_OF_A_WALK: u64 = 8192;

/// Walks over a key block in turns, each by as many of the query heads of a group.
fn walks_of_group(s: &BackwardSm90Schedule, problem: &Problem, shape: &Shape, group: u64) -> u64 {
    if !s.walks || shape.q_len == 0 || group == 0 {
        return 1;
    }
    let key_blocks = u64::from(shape.kv_len.div_ceil(block_kv(problem)));
    // Under a causal mask the longest walk is twice the mean.
    let fill = if problem.mask.right && !problem.mask.left { 6 } else { 2 };
    let all = u64::from(shape.batch) * u64::from(shape.kv_heads) * key_blocks;
    let pays = |walks: u64| {
        group / walks * u64::from(shape.q_len) >= LEAST_QUERIES_OF_A_WALK || all * walks <= fill * UNITS_OF_WALKS
    };
    (1..=group).rev().find(|walks| group.is_multiple_of(*walks) && pays(*walks)).unwrap_or(1)
}

/// Pairs whose thread blocks take turns. Where a mask makes key blocks unequal, as many as keep Q and dO in a part of
/// L2: the longest of all of them then come first. 396 TFLOP/s with 1 and 436 with 16 at head dim 128 and 4096 queries.
///
/// By turns also of equal key blocks: those of one pair that run together wait for each other once each, which is most
/// of a short walk.
fn section(s: &BackwardSm90Schedule, problem: &Problem, shape: &Shape, heads: u64) -> u32 {
    if !problem.mask.right && !s.turns {
        return 1;
    }
    let pair = u64::from(shape.q_len) * heads * u64::from(problem.head_dim_qk + problem.head_dim_v) * 2;
    ((u64::from(s.section_mib) << 20) / pair.max(1)).clamp(1, 1 << 16) as u32
}

/// Tiles of dS of a head, as `Visible::slots` in the template: of `block_q` queries by a key block.
fn slots(s: &BackwardSm90Schedule, block_kv: u32, shape: &Shape) -> u64 {
    let (q, kv) = (i64::from(s.block_q), i64::from(block_kv));
    let tiles = i64::from(shape.q_len.div_ceil(s.block_q));
    let blocks = i64::from(shape.kv_len.div_ceil(block_kv));
    let count = match shape.mask.window() {
        (_, None) => blocks * tiles,
        (Some(left), Some(right)) => blocks * tiles.min((kv + q - 2 + i64::from(left) + i64::from(right)) / q + 1),
        (None, Some(right)) => {
            let before = i64::from(shape.kv_len) - i64::from(shape.q_len) + i64::from(right);
            (0..blocks).map(|block| tiles - (block * kv - before).div_euclid(q).clamp(0, tiles)).sum()
        }
    };
    count as u64
}

/// Slots of dS of a head at most, of sequences that may be shorter than the shape's: each tile of queries and block of
/// keys is aligned to its own sequence, and may need a slot more than one of the longest.
fn most_slots(s: &BackwardSm90Schedule, block_kv: u32, shape: &Shape) -> u64 {
    let (_, Some(right)) = shape.mask.window() else { return slots(s, block_kv, shape) };
    if shape.mask.window().0.is_some() {
        return slots(s, block_kv, shape);
    }
    let tiles = u64::from(shape.q_len.div_ceil(s.block_q));
    let seen = |block: u64| (block * u64::from(block_kv) + u64::from(right)).div_ceil(u64::from(s.block_q)) + 1;
    (1..=u64::from(shape.kv_len.div_ceil(block_kv))).map(|block| seen(block).min(tiles)).sum()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{problem, schedule};
    use super::*;
    use crate::Mask;

    fn shape(batch: u32, heads: u32, kv_heads: u32, q_len: u32, kv_len: u32, mask: Mask) -> Shape {
        Shape { batch, heads, kv_heads, q_len, kv_len, mask }
    }

    fn waves(shape: &Shape, limit: u64) -> Waves {
        let plan = plan(&schedule(128, 128), &problem(128, 128), shape).unwrap();
        plan.within(limit).waves.unwrap()
    }

    #[test]
    fn waves_fill_the_limit_and_one_pair_always_fits() {
        let full = shape(4, 16, 16, 4096, 4096, Mask::Full);
        let pair = (4096 * 4096 * 2) + 4096 * 8;
        assert_eq!((waves(&full, 1 << 30).part_bytes, waves(&full, 1 << 30).parts), (pair, 64));
        // 31 pairs fit, so that there are three waves: of 22, 22 and 20.
        assert_eq!(waves(&full, 1 << 30).iter().collect::<Vec<_>>(), [(0, 22), (22, 22), (44, 20)]);
        assert_eq!((waves(&full, 0).bytes(), waves(&full, 0).iter().count()), (pair, 64));
        // Causal: half of the tiles, and half a key block's on the diagonal.
        let causal = waves(&shape(1, 32, 8, 16384, 16384, Mask::Causal), 1 << 30);
        assert_eq!((causal.most_parts(), causal.part_bytes), (1, 128 * 129 * 128 * 128 * 4 + 16384 * 8 * 4));
    }

    #[test]
    fn grids_are_whole_for_every_pair() {
        for (shape, expected) in [
            (shape(2, 6, 3, 1000, 300, Mask::Causal), [6 * 1024 * 2 / 16, 6 * 3, 6 * 2 * 4]),
            (shape(2, 6, 3, 0, 300, Mask::Full), [0, 18, 0]),
            (shape(2, 6, 3, 300, 0, Mask::Full), [6 * 320 * 2 / 16, 0, 6 * 2 * 2]),
        ] {
            let plan = plan(&schedule(128, 128), &problem(128, 128), &shape).unwrap();
            assert_eq!(plan.stages().map(|s| s.grid).collect::<Vec<_>>(), expected, "{shape}");
            assert!(plan.stages().all(|s| s.of_parts(1, 6).grid * 6 == s.grid));
        }
        let vast = shape(1 << 14, 1 << 10, 1 << 10, 1 << 14, 1, Mask::Full);
        let e = plan(&schedule(128, 128), &problem(128, 128), &vast).unwrap_err().to_string();
        assert!(e.contains("split the batch"), "{e}");
    }

    /// The statistics, which clear the counters, have a thread block of every pair even where there are no queries.
    #[test]
    fn a_joint_stage_has_counters() {
        let s = BackwardSm90Schedule { dq_blocks: 21, ..schedule(128, 128) };
        for (q_len, kv_len, grids, bytes) in [
            (1000, 300, [6 * 1024 * 2 / 16, 6 * (3 + 2 * 4)], 128),
            (0, 300, [6, 18], 128),
            (4200, 0, [6 * 528, 6 * 34], 256),
        ] {
            let shape = shape(2, 6, 3, q_len, kv_len, Mask::Full);
            let [apart, joint] = [schedule(128, 128), s].map(|s| plan(&s, &problem(128, 128), &shape).unwrap());
            assert_eq!(joint.stages().map(|s| s.grid).collect::<Vec<_>>(), grids, "{shape}");
            assert_eq!(joint.stages().last().unwrap().resident, Some(1));
            let [apart, joint] = [apart, joint].map(|plan| plan.waves.unwrap().part_bytes);
            assert_eq!(joint - apart, bytes);
        }
    }

    /// Walks divide a group, and leave sums where there are several; what they are follows from sizes alone.
    #[test]
    fn walks_have_sums_and_counters() {
        let whole = schedule(128, 128);
        let s = BackwardSm90Schedule { walks: true, ..whole };
        let of = |s: &BackwardSm90Schedule, shape: &Shape| {
            let plan = plan(s, &problem(128, 128), shape).unwrap();
            let keys = plan.stages().nth(1).unwrap();
            let waves = plan.waves.unwrap();
            (waves.walks, keys.grid, keys.resident, waves.part_bytes)
        };
        for (shape, walks) in [
            (shape(1, 32, 8, 16384, 16384, Mask::Causal), 4),
            (shape(4, 32, 8, 4096, 4096, Mask::Causal), 2),
            (shape(4, 32, 1, 4096, 4096, Mask::Causal), 16),
            (shape(1, 48, 8, 1000, 1000, Mask::Causal), 6),
            (shape(4, 32, 32, 4096, 4096, Mask::Causal), 1),
            (shape(2, 6, 3, 0, 300, Mask::Causal), 1),
            (shape(0, 6, 3, 300, 300, Mask::Causal), 2),
        ] {
            let (whole, apart) = (of(&whole, &shape), of(&s, &shape));
            assert_eq!((whole.0, apart.0), (1, walks), "{shape}");
            assert_eq!((apart.1, apart.2), (whole.1 * walks, Some(1)), "{shape}");
            let key_blocks = u64::from(shape.kv_len.div_ceil(128));
            let sums = if walks > 1 { key_blocks * 128 * 256 * 4 } else { 0 };
            assert_eq!(apart.3 - whole.3, sums + ((4 + key_blocks * 8) * 4).next_multiple_of(128), "{shape}");
        }
    }

    /// Every tile with a live pair has a slot; without a window on both sides no key block has more than it needs.
    #[test]
    fn slots_hold_every_tile_that_a_mask_leaves() {
        let s = schedule(128, 128);
        let lengths = [(200, 333), (333, 200), (64, 700), (700, 64), (512, 512)];
        for (block_kv, (q_len, kv_len)) in [64, 128].into_iter().flat_map(|kv| lengths.map(|l| (kv, l))) {
            let (q, kv) = (u64::from(s.block_q), u64::from(block_kv));
            for mask in [
                Mask::Full,
                Mask::Causal,
                Mask::Window { left: None, right: Some(70) },
                Mask::Window { left: Some(100), right: None },
                Mask::Window { left: Some(100), right: Some(0) },
            ] {
                let shape = shape(1, 1, 1, q_len, kv_len, mask);
                let (q_len, kv_len) = (u64::from(q_len), u64::from(kv_len));
                let has = |tile: u64, block: u64| {
                    (tile * q..((tile + 1) * q).min(q_len)).any(|i| {
                        let live = mask.live(i, q_len, kv_len);
                        live.start < ((block + 1) * kv).min(kv_len) && live.end > block * kv && !live.is_empty()
                    })
                };
                let needed: u64 = (0..kv_len.div_ceil(kv))
                    .map(|b| (0..q_len.div_ceil(q)).filter(|&t| has(t, b)).count() as u64)
                    .sum();
                let slots = slots(&s, block_kv, &shape);
                assert!(slots >= needed, "{mask:?} {q_len}x{kv_len}: {slots} of {needed}");
                if matches!(mask, Mask::Full | Mask::Causal) {
                    assert_eq!(slots, needed, "{mask:?} {q_len}x{kv_len}");
                }
            }
        }
    }

    /// As the device lays sequences of some lengths into waves: the last wave, and the most bytes of one.
    fn laid_out(lengths: &[[u32; 2]], of: &Shape, slots_of: impl Fn(&Shape) -> u64, waves: &Waves) -> (u32, u64) {
        let (mut last, mut used, mut most) = (0, 0, 0);
        for [q_len, kv_len] in lengths {
            let bytes = slots_of(&Shape { batch: 1, q_len: *q_len, kv_len: *kv_len, ..*of });
            assert!(bytes <= waves.part_bytes, "{q_len}x{kv_len}: {bytes} of {}", waves.part_bytes);
            for _ in 0..of.kv_heads {
                if used + bytes > waves.shared_bytes() {
                    (last, used) = (last + 1, 0);
                }
                used += bytes;
                most = most.max(used);
            }
        }
        (last, most)
    }

    /// Whatever the lengths within the bounds, the waves that a plan has are enough, and the memory is.
    #[test]
    fn packed_sequences_of_any_lengths_find_room() {
        use rand::rngs::StdRng;
        use rand::seq::IndexedRandom;
        use rand::{Rng, SeedableRng};
        let rng = &mut StdRng::seed_from_u64(1);
        let masks = [
            Mask::Full,
            Mask::Causal,
            Mask::Window { left: None, right: Some(200) },
            Mask::Window { left: Some(100), right: None },
            Mask::Window { left: Some(100), right: Some(30) },
        ];
        for _ in 0..400 {
            let mask = *masks.choose(rng).unwrap();
            let dim = *[64, 128, 192].choose(rng).unwrap();
            let s = schedule(dim, dim);
            let problem = Problem { mask: mask.kind(), ..problem(dim, dim) }.with_kv(crate::KvKind::RAGGED);
            let longest = [0, 1].map(|_| *[1, 64, 100, 700, 2000].choose(rng).unwrap());
            let lengths: Vec<[u32; 2]> = (0..rng.random_range(1..20))
                .map(|_| longest.map(|n| if rng.random_bool(0.3) { n } else { rng.random_range(0..=n) }))
                .collect();
            let kv_heads = rng.random_range(1..=3);
            let heads = kv_heads * rng.random_range(1..=4);
            let bounds =
                Shape { batch: lengths.len() as u32, heads, kv_heads, q_len: longest[0], kv_len: longest[1], mask };
            let rows = [0, 1].map(|side| lengths.iter().map(|n| u64::from(n[side])).sum());
            let plan = plan(&s, &problem, &bounds).unwrap();
            let waves = plan.waves.unwrap();
            let limit = *[0, waves.part_bytes * 3 / 2, waves.part_bytes * 5, 1 << 30].choose(rng).unwrap();
            let waves = plan.within(limit).waves.unwrap().of_rows(rows);
            let tile = u64::from(s.block_q * block_kv(&problem)) * 2 * u64::from(heads / kv_heads);
            let (last, most) = laid_out(&lengths, &bounds, |one| slots(&s, block_kv(&problem), one) * tile, &waves);
            let count = waves.iter().count() as u32;
            assert!(last < count, "{bounds} {lengths:?}: {last} of {count}");
            assert!(most <= waves.shared_bytes() && waves.bytes() >= waves.shared_bytes());
            let front = waves.bytes() - waves.shared_bytes();
            assert!(waves.bytes() <= limit.max(front + waves.part_bytes), "{} of {limit}", waves.bytes());
        }
    }

    #[test]
    fn packed_sequences_take_what_their_rows_need() {
        let problem = problem(128, 128).with_kv(crate::KvKind::RAGGED);
        let shape = shape(8, 32, 8, 2048, 2048, Mask::Causal);
        let plan = plan(&schedule(128, 128), &problem, &shape).unwrap();
        assert_eq!(plan.stages().map(|s| s.resident).collect::<Vec<_>>(), [None, Some(16), Some(1), Some(1)]);
        let one = BackwardSm90Schedule { key_stages: 1, ..schedule(128, 128) };
        let uneven = super::plan(&one, &problem, &shape).unwrap();
        assert_eq!(uneven.stages().map(|s| s.resident).collect::<Vec<_>>(), [None, Some(16), Some(8), Some(8)]);
        let waves = plan.waves.unwrap();
        // Causal tiles of all, and one for each key block for rounding; half of the rows need half.
        let part = (2..=32).step_by(2).map(|n| (n + 1_u64).min(32)).sum::<u64>() * 128 * 64 * 2 * 4;
        assert_eq!((waves.part_bytes, waves.iter().count()), (part, 2));
        assert!(waves.bytes() <= 1 << 30);
        let half = waves.of_rows([8192, 8192]);
        assert!(half.iter().eq([(0, 64)]) && half.shared_bytes() < waves.part_bytes * 48, "{}", half.shared_bytes());
    }
}
