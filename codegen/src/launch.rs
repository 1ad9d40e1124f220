//! What one call launches: stages, and the scratch memory that they share. Pure arithmetic, the same for every caller.
//!
//! ```text
//! Kernel::plan(Shape) -> LaunchPlan { stages: [mask metadata.., main], regions: [mask metadata, tile counter] }
//! ```
//!
//! A device loads a kernel's entry points once ([`Kernel::entries`]) and launches the stages of a plan in their order
//! on one stream.

use crate::packed_waves::PackedWaves;
use crate::{Error, Kernel, Result, Shape, Tiling};

/// Stages that a launch has at most.
const MOST_STAGES: usize = 4;
/// Scratch regions that the stages of a launch share at most.
const MOST_REGIONS: usize = 2;

/// What a stage is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StageRole {
    /// Computes the mask metadata that the main stage reads ([`Holds::MaskMetadata`]). Left out where a launch is given
    /// it.
    MaskMetadata,
    /// The operation itself.
    Main,
    /// A step of the operation, launched for every wave ([`Waves`]).
    Wave,
}

/// An entry point of a kernel's module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StageEntry {
    /// What its name ends in, behind the kernel's own.
    pub suffix: &'static str,
    /// What it is for.
    pub role: StageRole,
}

impl StageEntry {
    /// The kernel's own entry point.
    pub const MAIN: StageEntry = StageEntry { suffix: "", role: StageRole::Main };
}

/// One kernel of a launch. All stages take the same arguments, but for the numbers of a wave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stage {
    /// Which of the kernel's entry points.
    pub entry: StageEntry,
    /// Thread blocks, one-dimensional; a stage of 0 is not launched.
    pub grid: u32,
    /// Thread blocks of one multiprocessor where they are persistent and share the grid's work; when absent every block
    /// has its own.
    pub resident: Option<u32>,
    /// Threads of one block.
    pub threads: u32,
    /// Dynamic shared memory of one block, in bytes.
    pub smem_bytes: u32,
    /// Whether its thread blocks may start before the launch before it in the stream has ended (programmatic dependent
    /// launch): the kernel waits for that by itself, before it writes memory or relies on what it read.
    pub starts_early: bool,
}

impl Stage {
    /// A stage of single thread blocks, each with its own work.
    pub const fn of(entry: StageEntry, grid: u32, threads: u32, smem_bytes: u32) -> Self {
        Self { entry, grid, resident: None, threads, smem_bytes, starts_early: false }
    }

    /// The same of a kernel that waits for the launch before it by itself.
    #[must_use]
    pub const fn starting_early(self) -> Self {
        Self { starts_early: true, ..self }
    }

    /// The same of a wave: for so many of all parts.
    #[must_use]
    pub const fn of_parts(self, parts: u32, all: u32) -> Self {
        if parts == all {
            return self;
        }
        Self { grid: self.grid / if all == 0 { 1 } else { all } * parts, ..self }
    }

    /// Thread blocks to start on a device of so many multiprocessors.
    pub fn blocks(&self, units: u32) -> u32 {
        self.resident.map_or(self.grid, |n| self.grid.min(n.saturating_mul(units).max(1)))
    }
}

/// Device memory that the stages of a launch share, beside the operands.
///
/// Outside of a capture it belongs to the stream, in whose order it is taken and given back; in a capture to that
/// graph, so that two graphs that were captured on one stream may be replayed at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// What lies in it, which says who initialises it and for how long it can be of use.
    pub holds: Holds,
    /// Its size, aligned to 16 bytes: a pure function of the sizes.
    pub bytes: u64,
}

/// What a region holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// What the mask metadata stages write, which a `BlockMask` may keep for many launches. Uninitialised before.
    MaskMetadata {
        /// How it lies there.
        layout: MetadataLayout,
        /// From which byte on the bits of cut blocks lie, for block lists, unless they take more than
        /// [`MOST_MASK_BYTES`].
        masks: Option<u64>,
    },
    /// What thread blocks that share the keys of a tile leave for each other ([`crate::abi::RaggedArgs::scratch`]):
    /// [`SPLIT_COUNTER_BYTES`] of counters, zero before the first launch and left at zero by every launch; and behind
    /// them partial results, uninitialised. The region's size is that of the results of one thread block of the main
    /// stage. One that no other launch uses at the same time.
    SplitKeys,
    /// The counter from which persistent thread blocks take their tiles: zero before the first launch, and left at zero
    /// by every launch. One that no other launch uses at the same time; without one, tiles are taken by stride. The
    /// kernel's own module has them ([`crate::abi::TILE_QUEUES`]), zeroed when it is loaded: the device takes no memory
    /// for this region, but says which of them a stream or a graph has.
    TileCounter,
    /// Partial sums of a gradient ([`crate::Summation`]), uninitialised before on a GPU and zero on the host. Their
    /// size follows from the tensor, too: who launches states it ([`LaunchPlan::with_partial_sums`]). Of
    /// [`crate::Op::Quantise`] counters, largest elements and sums ([`crate::QuantiseScratch`]).
    PartialSums,
}

/// How mask metadata lies in memory. Kernels that agree in it, and in the bounded sides of the mask beside the
/// program's, can use what was computed once for the same mask, sizes and tensors, whatever else differs between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MetadataLayout {
    /// Lists of key blocks, and bit masks of cut ones.
    BlockLists {
        /// Query rows of a tile.
        block_q: u32,
        /// Keys of a block.
        block_kv: u32,
        /// Tiles of a unit.
        tiles: u32,
    },
    /// Key ranges, row by row.
    KeyRanges,
}

/// Bytes that the bit masks of cut blocks may take, whose number is not known before: enough for 90,000 queries by as
/// many keys if all heads and sequences share them. With more the attention kernel evaluates the mask, for every head.
pub const MOST_MASK_BYTES: u64 = 1 << 30;

/// Bytes of the counters of split keys: one of 4 bytes for each thread block. The same for all kernels, so that they
/// can use the same memory one after the other; compiled kernels hold it, so another one needs a new
/// [`crate::abi::ABI_VERSION`].
pub const SPLIT_COUNTER_BYTES: u64 = 1 << 16;

/// Bytes of scratch memory that a launch in waves has at most, unless a host says otherwise.
pub const SCRATCH_LIMIT: u64 = 1 << 30;

/// Multiprocessors that waves are made to fill: the same on all devices, so that they have the same waves.
const UNITS_OF_WAVES: u64 = crate::USUAL_UNITS as u64;

/// How the stages of a launch are repeated, each time for some parts of the work, so that what they leave for each
/// other in scratch memory stays below a limit. The stages of a wave run in their order, and wave after wave: all waves
/// use the same memory, uninitialised before.
///
/// A function of the sizes and the limit alone: memory that happens to be free decides nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waves {
    /// Parts, none of which reads what another has written. Every stage has as many thread blocks for each.
    pub parts: u32,
    /// Bytes of scratch memory of a part, while its wave runs.
    pub part_bytes: u64,
    /// Thread blocks of a part in the longest stage, one for a multiprocessor at a time, where all are equally long;
    /// else 0.
    pub part_blocks: u32,
    /// Most bytes of scratch memory of the launch; a part that takes more is a wave of its own.
    pub limit: u64,
    /// Parts whose thread blocks take turns, in stages that walk them in sections.
    pub sections: [u32; 2],
    /// Walks over a key block, by a thread block each, with some query heads of a group; 1 where one has all of them.
    pub walks: u32,
    /// Of packed sequences, whose parts differ: kernels find on the device which parts a wave has.
    pub packed: Option<PackedWaves>,
}

impl Waves {
    /// Parts of a wave at most: all waves have as many, but for the last.
    pub fn most_parts(&self) -> u32 {
        let fit = u64::from(self.parts).min(self.limit / self.part_bytes.max(1)).max(1) as u32;
        // Waves of equal length, since the last one of few parts would leave multiprocessors idle.
        let equal = self.parts.div_ceil(self.parts.div_ceil(fit).max(1)).max(1);
        if self.part_blocks == 0 || fit >= self.parts {
            return equal;
        }
        // Times that the device is filled with thread blocks, and a quarter of one to begin a wave.
        let filled = |parts: u32| (u64::from(parts) * u64::from(self.part_blocks)).div_ceil(UNITS_OF_WAVES) * 4 + 1;
        let cost = |most: u32| {
            let rest = self.parts % most;
            u64::from(self.parts / most) * filled(most) + if rest > 0 { filled(rest) } else { 0 }
        };
        (1..=fit).rev().take(64).chain([equal]).min_by_key(|&most| cost(most)).expect("fit is at least 1")
    }

    /// Bytes of scratch memory of the launch.
    pub fn bytes(&self) -> u64 {
        match self.packed {
            Some(packed) => packed.front_bytes() + self.shared_bytes(),
            None => u64::from(self.most_parts()) * self.part_bytes,
        }
    }

    /// Bytes of them that the parts of a wave of packed sequences share.
    pub fn shared_bytes(&self) -> u64 {
        self.packed.map_or(0, |packed| packed.shared_bytes(self))
    }

    /// The same over packs of so many rows of Q and of K, which a plan does not know.
    #[must_use]
    pub fn of_rows(self, rows: [u64; 2]) -> Self {
        Self { packed: self.packed.map(|packed| packed.of_rows(rows)), ..self }
    }

    /// The parts of each wave: the first, and how many. Of packed sequences its number, and how many there are in all.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> + use<> {
        let parts = self.parts;
        let (end, most) = match self.packed {
            Some(packed) => (packed.count(self), 1),
            None => (parts, self.most_parts()),
        };
        let is_packed = self.packed.is_some();
        (0..end).step_by(most as usize).map(move |at| (at, if is_packed { parts } else { most.min(parts - at) }))
    }
}

/// What one call launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchPlan {
    stages: [Option<Stage>; MOST_STAGES],
    regions: [Option<Region>; MOST_REGIONS],
    /// How the query rows are divided, for families that take it beside the operation's arguments.
    pub tiling: Option<Tiling>,
    /// How the stages are repeated, where their scratch memory would exceed a limit.
    pub waves: Option<Waves>,
}

impl LaunchPlan {
    /// A plan of stages in their order, and their regions.
    ///
    /// # Panics
    /// With more than four stages or two regions: a fault of a family.
    pub fn new(
        stages: impl IntoIterator<Item = Stage>,
        regions: impl IntoIterator<Item = Region>,
        tiling: Option<Tiling>,
    ) -> Self {
        let mut plan = Self { stages: [None; MOST_STAGES], regions: [None; MOST_REGIONS], tiling, waves: None };
        stages.into_iter().enumerate().for_each(|(i, stage)| plan.stages[i] = Some(stage));
        regions.into_iter().enumerate().for_each(|(i, region)| plan.regions[i] = Some(region));
        plan
    }

    /// A plan of stages that run in waves.
    ///
    /// # Panics
    /// With more than four stages: a fault of a family.
    pub fn in_waves(stages: impl IntoIterator<Item = Stage>, waves: Waves) -> Self {
        Self { waves: Some(waves), ..Self::new(stages, [], None) }
    }

    /// The same with another limit of the scratch memory of waves, in bytes. The results are the same bytes.
    #[must_use]
    pub fn within(self, limit: u64) -> Self {
        Self { waves: self.waves.map(|waves| Waves { limit, ..waves }), ..self }
    }

    /// The same with so many bytes of [`Holds::PartialSums`]; without any where they are 0.
    #[must_use]
    pub fn with_partial_sums(self, bytes: u64) -> Self {
        let region = Region { holds: Holds::PartialSums, bytes: bytes.next_multiple_of(16) };
        let others = self.regions.into_iter().flatten().filter(|r| r.holds != Holds::PartialSums);
        let mut regions = [None; MOST_REGIONS];
        let all = others.chain((bytes > 0).then_some(region));
        all.zip(&mut regions).for_each(|(region, to)| *to = Some(region));
        Self { regions, ..self }
    }

    /// Bytes of [`Holds::PartialSums`].
    pub fn partial_sums(&self) -> Option<u64> {
        self.regions().find(|r| r.holds == Holds::PartialSums).map(|r| r.bytes)
    }

    /// The stages in the order in which they are launched.
    pub fn stages(&self) -> impl Iterator<Item = &Stage> {
        self.stages.iter().flatten()
    }

    /// The stage of the operation itself; none where that runs in waves, and on the CPU, whose kernels count their own
    /// tiles.
    pub fn main(&self) -> Option<&Stage> {
        self.stages().find(|s| s.entry.role == StageRole::Main)
    }

    /// Whether there is nothing to launch.
    pub fn is_empty(&self) -> bool {
        !self.stages().any(|s| s.entry.role != StageRole::MaskMetadata && s.grid > 0)
    }

    /// The regions of scratch memory.
    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().flatten()
    }

    /// The region of mask metadata: its size, its layout, and where the bits of cut blocks begin.
    pub fn mask_metadata(&self) -> Option<(u64, MetadataLayout, Option<u64>)> {
        self.regions().find_map(|r| match r.holds {
            Holds::MaskMetadata { layout, masks } => Some((r.bytes, layout, masks)),
            Holds::TileCounter | Holds::SplitKeys | Holds::PartialSums => None,
        })
    }

    /// Bytes of [`Holds::SplitKeys`] on a device of so many multiprocessors.
    pub fn split_keys(&self, units: u32) -> Option<u64> {
        let region = self.regions().find(|r| r.holds == Holds::SplitKeys)?;
        Some(SPLIT_COUNTER_BYTES + region.bytes * u64::from(self.main()?.blocks(units)))
    }

    /// Whether the main stage takes its tiles from a counter.
    pub fn counts_tiles(&self) -> bool {
        self.regions().any(|r| r.holds == Holds::TileCounter)
    }
}

impl Kernel {
    /// The stages of a launch for a shape, with the scratch memory that they share.
    ///
    /// # Errors
    /// Sizes that exceed what one launch can hold.
    pub fn plan(&self, shape: &Shape) -> Result<LaunchPlan> {
        self.schedule.plan(&self.problem, shape)
    }

    /// The entry points of the kernel's module: a device loads them all, plans name them.
    pub fn entries(&self) -> &'static [StageEntry] {
        self.schedule.entries(&self.problem)
    }
}

/// Thread blocks of a launch that gives each `block_q` rows of one head.
pub(crate) fn tiles(rows: u32, block_q: u32, heads: u32, batch: u32) -> Result<u32> {
    let tiles = rows.div_ceil(block_q) as u64 * heads as u64 * batch as u64;
    i32::try_from(tiles).map(|n| n as u32).map_err(|_| {
        Error::unsupported(
            "batch * heads * q_len",
            tiles,
            format!("at most 2^31 - 1 blocks of {block_q} query rows in one launch"),
            "split the batch",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waves_have_each_part_once_and_keep_the_limit() {
        for (parts, part_bytes, limit, expected) in [
            (10, 100, 1000, vec![(0, 10)]),
            (10, 100, 999, vec![(0, 5), (5, 5)]),
            (10, 100, 450, vec![(0, 4), (4, 4), (8, 2)]),
            (3, 100, 99, vec![(0, 1), (1, 1), (2, 1)]),
            (3, 100, 0, vec![(0, 1), (1, 1), (2, 1)]),
            (0, 100, 1000, vec![]),
        ] {
            let waves = Waves { parts, part_bytes, part_blocks: 0, limit, sections: [1, 1], walks: 1, packed: None };
            assert_eq!(waves.iter().collect::<Vec<_>>(), expected);
            assert!(waves.bytes() <= limit.max(part_bytes), "{waves:?}");
        }
    }

    /// 31 parts fit: three waves of 22 would fill 132 multiprocessors 18 times, these 16 times.
    #[test]
    fn waves_of_equal_thread_blocks_fill_the_device() {
        let waves = Waves {
            parts: 64,
            part_bytes: 100,
            part_blocks: 32,
            limit: 3199,
            sections: [1, 1],
            walks: 1,
            packed: None,
        };
        assert_eq!(waves.iter().collect::<Vec<_>>(), [(0, 28), (28, 28), (56, 8)]);
        for limit in [0, 100, 700, 1500, 6399, 6400] {
            let waves = Waves { limit, ..waves };
            let times = |waves: Waves| waves.iter().map(|(_, n)| (n * 32).div_ceil(132)).sum::<u32>();
            assert!(times(waves) <= times(Waves { part_blocks: 0, ..waves }), "{limit}");
            assert!(waves.bytes() <= limit.max(100));
        }
    }

    #[test]
    fn a_wave_has_its_part_of_the_thread_blocks_of_every_stage() {
        let entry = |suffix| StageEntry { suffix, role: StageRole::Wave };
        let stages = [Stage::of(entry("_a"), 60, 32, 0), Stage::of(entry("_b"), 0, 32, 0)];
        let waves =
            Waves { parts: 6, part_bytes: 10, part_blocks: 0, limit: 40, sections: [1, 1], walks: 1, packed: None };
        let plan = LaunchPlan::in_waves(stages, waves);
        assert!(!plan.is_empty() && plan.main().is_none());
        let grids = |plan: &LaunchPlan| {
            let waves = plan.waves.unwrap();
            let of = |(_, n)| plan.stages().map(|s| s.of_parts(n, waves.parts).grid).collect::<Vec<_>>();
            waves.iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(grids(&plan), [[30, 0], [30, 0]]);
        assert_eq!(grids(&plan.within(u64::MAX)), [[60, 0]]);
    }
}
