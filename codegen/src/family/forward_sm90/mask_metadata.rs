//! The stages before the main one, for masks that are not known from the rows by arithmetic: they compute the mask
//! metadata that the main stage reads, take the same arguments and no shared memory.

use super::Sm90Schedule;
use crate::launch::{Holds, MOST_MASK_BYTES, MetadataLayout, Region, Stage, StageEntry, StageRole};
use crate::score::MaskAxes;
use crate::{Error, Problem, Result, Shape, Tiling};

// How block lists and key ranges lie in memory. Kernels have these numbers as constants (`Kernel::render`), and assert
// that what they read and write is laid out so.

/// Words of a list of key blocks before its places.
pub(super) const LIST_COUNTS: u64 = 2;
/// Rows between whose ends of runs are summed up: those of a consumer.
pub(super) const ROWS_OF_ENDS: u64 = 64;
/// Bytes of the ends of the runs of as many rows, and of the run of a row.
pub(super) const ENDS_BYTES: u64 = 16;
pub(super) const RUN_BYTES: u64 = 8;

/// Threads of a block that classifies by a tensor of bools. A warp has little to do beside waiting for memory: small
/// blocks spread over all multiprocessors.
const DENSE_THREADS: u32 = 128;

/// Threads of a block of [`CLASSIFY`].
pub(super) fn classify_threads(problem: &Problem, s: &Sm90Schedule) -> u32 {
    let dense = problem.program.is_some_and(|p| p.dense_mask().is_some());
    if dense { DENSE_THREADS } else { s.threads() }
}

/// Words of the bit mask of one key block: of every row of a tile, a bit for each score of the four threads that share
/// it.
pub(super) fn mask_words(s: &Sm90Schedule) -> u64 {
    (s.block_q() * 4 * (s.block_kv / 4).div_ceil(32)) as u64
}

/// What a launch has before its main stage.
pub(super) struct MaskMetadata {
    pub stages: [Option<Stage>; 2],
    pub region: Region,
}

const fn entry(suffix: &'static str) -> StageEntry {
    StageEntry { suffix, role: StageRole::MaskMetadata }
}

/// Writes of each key block what the mask does to it (`templates/forward/sm90/lists.cuh`).
const CLASSIFY: StageEntry = entry("_classify");
/// Gathers those that the mask leaves into block lists.
const GATHER: StageEntry = entry("_gather");
/// Computes the key range of each row (`templates/forward/sm90/ranges.cuh`).
const RUNS: StageEntry = entry("_runs");

/// The entry points of a module.
pub(super) fn entries(problem: &Problem) -> &'static [StageEntry] {
    match problem.program {
        Some(p) if p.lists().is_some() => &[CLASSIFY, GATHER, StageEntry::MAIN],
        Some(p) if p.runs().is_some() => &[RUNS, StageEntry::MAIN],
        _ => &[StageEntry::MAIN],
    }
}

/// The stages and the region of a launch whose mask needs them.
pub(super) fn of(problem: &Problem, s: &Sm90Schedule, tiling: &Tiling, shape: &Shape) -> Result<Option<MaskMetadata>> {
    let Some(program) = problem.program else { return Ok(None) };
    match (program.lists(), program.runs()) {
        (Some(axes), _) => block_lists(problem, axes, s, tiling, shape).map(Some),
        (_, Some(axes)) => key_ranges(axes, s, shape).map(Some),
        _ => Ok(None),
    }
}

/// The block lists of a shape: of every unit that the mask tells apart, for every tile its counts and a place for each
/// key block, and behind all of them a byte for each place.
fn block_lists(
    problem: &Problem,
    axes: MaskAxes,
    s: &Sm90Schedule,
    tiling: &Tiling,
    shape: &Shape,
) -> Result<MaskMetadata> {
    let lists = axes.masks(shape) * tiling.blocks as u64;
    let places = shape.kv_len.div_ceil(s.block_kv) as u64;
    let before = (lists * (LIST_COUNTS + places) * 4 + lists * places).next_multiple_of(16);
    let masks = lists * places * mask_words(s) * 4;
    let (bytes, masks) = match masks {
        ..=MOST_MASK_BYTES => (before + masks, Some(before)),
        _ => (before, None),
    };
    let field = "blocks of queries by blocks of keys";
    let layout = MetadataLayout::BlockLists { block_q: s.block_q(), block_kv: s.block_kv, tiles: tiling.blocks as u32 };
    Ok(MaskMetadata {
        stages: [
            Some(stage(CLASSIFY, field, lists * places, classify_threads(problem, s))?),
            Some(stage(GATHER, field, lists, s.threads())?),
        ],
        region: Region { holds: Holds::MaskMetadata { layout, masks }, bytes },
    })
}

/// The key ranges of a shape: of every unit the ends of those of 64 rows at a time, and behind all of these the range
/// of each row.
fn key_ranges(axes: MaskAxes, s: &Sm90Schedule, shape: &Shape) -> Result<MaskMetadata> {
    let (masks, rows) = (axes.masks(shape), shape.q_len as u64);
    let parts = masks * rows.div_ceil(ROWS_OF_ENDS);
    let bytes = (parts * ENDS_BYTES + masks * rows * RUN_BYTES).next_multiple_of(16);
    let holds = Holds::MaskMetadata { layout: MetadataLayout::KeyRanges, masks: None };
    Ok(MaskMetadata {
        stages: [Some(stage(RUNS, "blocks of queries", parts, s.threads())?), None],
        region: Region { holds, bytes },
    })
}

/// A stage of a warp for each part of the work.
fn stage(entry: StageEntry, field: &'static str, parts: u64, threads: u32) -> Result<Stage> {
    let grid = parts.div_ceil((threads / 32) as u64);
    let grid = i32::try_from(grid).map_err(|_| {
        let limit = "at most 2^31 - 1 thread blocks that compute mask metadata";
        Error::unsupported(field, parts, limit, "split the batch")
    })?;
    Ok(Stage::of(entry, grid as u32, threads, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::{Program, ProgramRef};
    use crate::{DType, Kernel, Mask, MaskKind, Schedule, ShapeBucket};

    /// How a program's kernel begins, of two consumers and blocks of 128 keys, for 3 sequences and 8 KV heads: suffix
    /// and grid of the stages before the main one, and the region.
    fn before(text: &str, heads: u32, q_len: u32) -> (Vec<(&'static str, u32)>, Option<Region>) {
        let arch: crate::Arch = "sm_90a".parse().unwrap();
        let mut problem = Problem::forward(DType::Bf16, 128, MaskKind::CAUSAL).unwrap();
        let bucket = ShapeBucket { parallel: 32, group: 4, q_len: 4096, kv_len: 4096, ..Default::default() };
        let mut s = Sm90Schedule::default_for(&problem, arch.gpu(), &bucket);
        (s.consumers, s.block_kv, s.pack_group) = (2, 128, false);
        problem.program = Some(ProgramRef::new(Program::parse(text).unwrap()));
        let kernel = Kernel { problem, schedule: Schedule::Sm90(s), arch };
        let shape = Shape { batch: 3, heads, kv_heads: 8, q_len, kv_len: 4096, mask: Mask::Causal };
        let plan = kernel.plan(&shape).unwrap();
        let stages: Vec<_> = plan.stages().filter(|s| s.entry.role == StageRole::MaskMetadata).collect();
        let entries: Vec<_> = plan.stages().map(|s| s.entry).collect();
        assert_eq!(entries, kernel.entries());
        let threads = |stage: &Stage| {
            if stage.entry == CLASSIFY { classify_threads(&problem, &s) } else { s.threads() }
        };
        assert!(stages.iter().all(|stage| (stage.threads, stage.smem_bytes) == (threads(stage), 0)));
        let region = plan.regions().copied().find(|r| matches!(r.holds, Holds::MaskMetadata { .. }));
        (stages.into_iter().map(|s| (s.entry.suffix, s.grid)).collect(), region)
    }

    #[test]
    fn lists_have_a_place_for_every_block_and_masks_while_they_fit() {
        assert_eq!(before("mask = kv <= q;", 8, 4096), (vec![], None));
        // 33 blocks of 128 queries, 32 of 128 keys, for all heads and sequences: 2 counts and 32 places each, 32 kinds;
        // masks of 2 KiB.
        let masks = (33u64 * (2 + 32) * 4 + 33 * 32).next_multiple_of(16);
        let layout = MetadataLayout::BlockLists { block_q: 128, block_kv: 128, tiles: 33 };
        let shared =
            Region { holds: Holds::MaskMetadata { layout, masks: Some(masks) }, bytes: masks + 33 * 32 * 2048 };
        let stages = vec![("_classify", (33 * 32u32).div_ceil(12)), ("_gather", 33u32.div_ceil(12))];
        assert_eq!(before("mask = (q - kv) % 7 == 0;", 8, 4100), (stages, Some(shared)));
        let many = before("mask = (q - kv) % (h + b + 1) == 0;", 64, 65536).1.unwrap();
        assert!(matches!(many.holds, Holds::MaskMetadata { masks: None, .. }));
        assert_eq!(many.bytes, 3 * 64 * 512 * (34 * 4 + 32));
    }

    #[test]
    fn bools_by_query_and_key_are_read_by_small_thread_blocks() {
        let grid = |text: &str| before(text, 8, 4096).0[0];
        let blocks = 3 * 32 * 32;
        let of_batch = "seen: bool[batch, *, q_len, kv_len]; mask = seen[b, 0, q, kv];";
        assert_eq!(grid(of_batch), ("_classify", blocks / 4));
        assert_eq!(grid("seen: bool[batch, q_len, *]; mask = seen[b, q, kv // 9];"), ("_classify", blocks / 12));
    }

    #[test]
    fn ranges_have_a_place_for_every_row_that_the_mask_tells_apart() {
        let of_batch = "d: i32[batch, q_len]; e: i32[batch, kv_len] nondecreasing; mask = d[b, q] == e[b, kv];";
        // 65 times 64 rows of each of three sequences.
        let holds = Holds::MaskMetadata { layout: MetadataLayout::KeyRanges, masks: None };
        let ranges = Region { holds, bytes: (3u64 * 65 * 16 + 3 * 4100 * 8).next_multiple_of(16) };
        assert_eq!(before(of_batch, 8, 4100), (vec![("_runs", (3 * 65u32).div_ceil(12))], Some(ranges)));
        let (stages, empty) = before(of_batch, 8, 0);
        assert_eq!((stages, empty.unwrap().bytes), (vec![("_runs", 0)], 0));
        let (stages, of_heads) = before("mask = kv <= abs(q - 100 * h);", 16, 64);
        assert_eq!((stages, of_heads.unwrap().bytes), (vec![("_runs", 2)], 16 * (16 + 64 * 8)));
    }
}
