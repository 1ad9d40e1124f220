//! Small kernels that come before one of `forward/sm90`, on the same stream, and find what it goes by.

use crate::score::MaskAxes;
use crate::{Error, Kernel, Problem, Result, Schedule, Shape, Sm90Schedule, Tiling};

/// What comes before a kernel whose mask is not known from the rows by arithmetic: kernels that take the same arguments
/// as the kernel itself, have as many threads, and no shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prelude {
    /// Device memory that all of them share, aligned to 16 bytes; it need not outlive them.
    pub bytes: u64,
    /// From which byte of it on the masks of cut blocks lie, for a kernel that goes by lists of key blocks, unless they
    /// would take more than [`MOST_MASK_BYTES`].
    pub masks: Option<u64>,
    /// Thread blocks of each, in the order of [`Kernel::preludes`]; one without any is not launched.
    pub grids: [u32; 2],
    /// How what is found lies in the memory.
    pub layout: FoundLayout,
}

/// How what is found of a mask lies in memory. Kernels that agree in it, and in the bounded sides of the mask beside
/// the program's, can go by what was found once for the same mask, sizes and tensors, whatever else differs between
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FoundLayout {
    /// Lists of key blocks, and masks of cut ones.
    Lists {
        /// Query rows of a tile.
        block_q: u32,
        /// Keys of a block.
        block_kv: u32,
        /// Tiles of a unit.
        tiles: u32,
    },
    /// Runs of keys, row by row.
    Runs,
}

/// Bytes that the masks of cut blocks may take, of which nobody knows before how many there are: enough for 90,000
/// queries by as many keys, if all heads and sequences share them. With more the attention kernel evaluates the mask,
/// for every head.
pub const MOST_MASK_BYTES: u64 = 1 << 30;

// How lists of key blocks and runs of keys lie in memory. Kernels have these numbers as constants (`Kernel::render`),
// and assert that what they read and write is laid out so.

/// Words of a list of key blocks before its places.
pub(crate) const LIST_COUNTS: u64 = 2;
/// Rows between whose ends of runs are summed up: those of a consumer.
pub(crate) const ROWS_OF_ENDS: u64 = 64;
/// Bytes of the ends of the runs of as many rows, and of the run of a row.
pub(crate) const ENDS_BYTES: u64 = 16;
pub(crate) const RUN_BYTES: u64 = 8;

/// Words of the mask of one key block: of every row of a tile, a bit for each score of the four threads that share it.
pub(crate) fn mask_words(s: &Sm90Schedule) -> u64 {
    (s.block_q() * 4 * (s.block_kv / 4).div_ceil(32)) as u64
}

impl Kernel {
    /// What the names of the kernels that come before this one end in, after its own name: those that write lists of
    /// live key blocks (`templates/forward/sm90/lists.cuh`), or the one that finds runs of keys
    /// (`templates/forward/sm90/ranges.cuh`).
    pub fn preludes(&self) -> &'static [&'static str] {
        match (self.schedule, self.problem.program) {
            (Schedule::Sm90(_), Some(p)) if p.lists().is_some() => &["_classify", "_gather"],
            (Schedule::Sm90(_), Some(p)) if p.runs().is_some() => &["_runs"],
            _ => &[],
        }
    }
}

impl Prelude {
    pub(crate) fn of(problem: &Problem, s: &Sm90Schedule, tiling: &Tiling, shape: &Shape) -> Result<Option<Self>> {
        let Some(program) = problem.program else { return Ok(None) };
        let warps = (s.threads() / 32) as u64;
        match (program.lists(), program.runs()) {
            (Some(axes), _) => Self::of_lists(axes, s, tiling, shape, warps).map(Some),
            (_, Some(axes)) => Self::of_runs(axes, shape, warps).map(Some),
            _ => Ok(None),
        }
    }

    /// The lists of a shape: of every unit that the mask tells apart, for every tile its counts and a place for each
    /// key block, and behind all of them a byte for each place.
    fn of_lists(axes: MaskAxes, s: &Sm90Schedule, tiling: &Tiling, shape: &Shape, warps: u64) -> Result<Self> {
        let lists = axes.units(shape) * tiling.blocks as u64;
        let places = shape.kv_len.div_ceil(s.block_kv) as u64;
        let before = (lists * (LIST_COUNTS + places) * 4 + lists * places).next_multiple_of(16);
        let masks = lists * places * mask_words(s) * 4;
        let (bytes, masks) = match masks {
            ..=MOST_MASK_BYTES => (before + masks, Some(before)),
            _ => (before, None),
        };
        let field = "blocks of queries by blocks of keys";
        let layout = FoundLayout::Lists { block_q: s.block_q(), block_kv: s.block_kv, tiles: tiling.blocks as u32 };
        Ok(Self { bytes, masks, grids: [grid(field, lists * places, warps)?, grid(field, lists, warps)?], layout })
    }

    /// The runs of a shape: of every unit the ends of those of 64 rows at a time, and behind all of these the run of
    /// each row.
    fn of_runs(axes: MaskAxes, shape: &Shape, warps: u64) -> Result<Self> {
        let (units, rows) = (axes.units(shape), shape.q_len as u64);
        let parts = units * rows.div_ceil(ROWS_OF_ENDS);
        let bytes = (parts * ENDS_BYTES + units * rows * RUN_BYTES).next_multiple_of(16);
        Ok(Self { bytes, masks: None, grids: [grid("blocks of queries", parts, warps)?, 0], layout: FoundLayout::Runs })
    }
}

/// Thread blocks of so many warps, one for each part of the work.
fn grid(field: &'static str, parts: u64, warps: u64) -> Result<u32> {
    let refused = || {
        let limit = "at most 2^31 - 1 thread blocks that find what a mask leaves of them";
        Error::unsupported(field, parts, limit, "split the batch")
    };
    i32::try_from(parts.div_ceil(warps)).map(|n| n as u32).map_err(|_| refused())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::{Program, ProgramRef};
    use crate::{DType, Mask, MaskKind, ShapeBucket};

    /// How a program's kernel begins, of two consumers and blocks of 128 keys, for 3 sequences and 8 KV heads.
    fn prelude(text: &str, heads: u32, q_len: u32) -> (Vec<&'static str>, Option<Prelude>) {
        let arch: crate::Arch = "sm_90a".parse().unwrap();
        let crate::Arch::Sm(sm) = arch else { unreachable!() };
        let mut problem = Problem::forward(DType::Bf16, 128, MaskKind::CAUSAL).unwrap();
        let bucket = ShapeBucket { parallel: 32, group: 4, q_len: 4096, kv_len: 4096, window: 0 };
        let mut s = Sm90Schedule::default_for(&problem, sm, &bucket);
        (s.consumers, s.block_kv, s.pack_group) = (2, 128, false);
        problem.program = Some(ProgramRef::new(Program::parse(text).unwrap()));
        let kernel = Kernel { problem, schedule: Schedule::Sm90(s), arch };
        let shape = Shape { batch: 3, heads, kv_heads: 8, q_len, kv_len: 4096, mask: Mask::Causal };
        (kernel.preludes().to_vec(), kernel.launch(&shape).unwrap().prelude)
    }

    #[test]
    fn lists_have_a_place_for_every_block_and_masks_while_they_fit() {
        assert_eq!(prelude("mask = kv <= q;", 8, 4096), (vec![], None));
        // 33 blocks of 128 queries, 32 of 128 keys, for all heads and sequences: 2 counts and 32 places each, 32 kinds;
        // masks of 2 KiB.
        let before = (33u64 * (2 + 32) * 4 + 33 * 32).next_multiple_of(16);
        let shared = Prelude {
            bytes: before + 33 * 32 * 2048,
            masks: Some(before),
            grids: [(33 * 32u32).div_ceil(12), 33u32.div_ceil(12)],
            layout: FoundLayout::Lists { block_q: 128, block_kv: 128, tiles: 33 },
        };
        let lists = vec!["_classify", "_gather"];
        assert_eq!(prelude("mask = (q - kv) % 7 == 0;", 8, 4100), (lists, Some(shared)));
        let many = prelude("mask = (q - kv) % (h + b + 1) == 0;", 64, 65536).1.unwrap();
        assert_eq!((many.masks, many.bytes), (None, 3 * 64 * 512 * (34 * 4 + 32)));
    }

    #[test]
    fn runs_have_a_place_for_every_row_that_the_mask_tells_apart() {
        let of_batch = "d: i32[batch, q_len]; e: i32[batch, kv_len] nondecreasing; mask = d[b, q] == e[b, kv];";
        let found = prelude(of_batch, 8, 4100);
        // 65 times 64 rows of each of three sequences.
        let runs = Prelude {
            bytes: (3u64 * 65 * 16 + 3 * 4100 * 8).next_multiple_of(16),
            masks: None,
            grids: [(3 * 65u32).div_ceil(12), 0],
            layout: FoundLayout::Runs,
        };
        assert_eq!(found, (vec!["_runs"], Some(runs)));
        let empty = prelude(of_batch, 8, 0).1.unwrap();
        assert_eq!((empty.bytes, empty.grids), (0, [0, 0]));
        let of_heads = prelude("mask = kv <= abs(q - 100 * h);", 16, 64).1.unwrap();
        assert_eq!((of_heads.bytes, of_heads.grids), (16 * (16 + 64 * 8), [2, 0]));
    }
}
