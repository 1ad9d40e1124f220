//! `forward/sm90_ragged`: `forward/sm90` for ragged batches, whose thread blocks find their tiles from lengths in
//! device memory.
//!
//! Its schedules are those of `forward/sm90` with persistent thread blocks, without biases by TMA.

mod tensor_maps;

pub use tensor_maps::{RaggedUnaddressable, ragged_unaddressable};

use super::KernelFamily;
use super::account::{RaggedAccount, Usual};
use super::fields::{Constants, Fields, Place};
use super::forward_sm90::{Sm90Schedule, Sm90Scheduler};
use crate::abi::ArgsLayout;
use crate::kv::{KvElement, KvStore};
use crate::launch::{Holds, LaunchPlan, Region, SPLIT_COUNTER_BYTES, Stage, StageEntry, tiles};
use crate::traffic::Walk;
use crate::{
    Arch, Constraint, Constraints, Error, Op, Problem, Resources, Result, Shape, ShapeBucket, Tiling, USUAL_UNITS,
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Entries of the tile table: sequences that each have their own, and are walked from the longest on.
pub(super) const TABLE_ENTRIES: u32 = 128;

/// Bytes of shared memory of the tile table: tiles before each entry, their sum, and each entry's sequence.
pub(super) const TABLE_BYTES: u32 = 2 * 4 * TABLE_ENTRIES + 16;

/// How a Hopper GPU computes a ragged batch: a schedule of `forward/sm90`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Sm90RaggedSchedule(pub Sm90Schedule);

impl fmt::Display for Sm90RaggedSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Fields for Sm90RaggedSchedule {
    fn places(&self) -> Vec<(&'static str, Place)> {
        self.0.places()
    }

    fn launch_places(&self) -> Vec<Place> {
        self.0.launch_places()
    }

    fn render(&self, constants: &mut Constants) {
        self.0.render(constants);
    }
}

impl Sm90RaggedSchedule {
    /// The nearest schedule of `forward/sm90` that the skeleton takes.
    fn of(s: Sm90Schedule) -> Self {
        Self(Sm90Schedule { scheduler: Sm90Scheduler::Queue, ending: false, quick: false, ..s })
    }

    fn tiling(&self, problem: &Problem, shape: &Shape) -> Result<Tiling> {
        let s = &self.0;
        let row_bytes = u64::from(problem.head_dim_qk + problem.head_dim_v) * 2;
        ragged_tiling(shape, s.pack_group, s.block_q(), s.section_mib, row_bytes)
    }
}

/// Pieces of tiles ([`Holds::SplitKeys`]), of kernels with so many consumers.
pub(super) struct Pieces {
    pub(super) consumers: u32,
}

impl Pieces {
    /// Pieces of tiles that a launch has at most, for each of its thread blocks: what their results take in memory.
    /// Tiles of one warpgroup have few rows beside many keys, and sequences that differ most.
    pub(super) fn most(&self) -> u32 {
        if self.consumers == 1 { 4 } else { 2 }
    }

    /// What a piece costs beside its keys, in keys: its first loads, and its results on their way to memory and back.
    pub(super) fn piece_keys(&self) -> u32 {
        if self.consumers == 1 { 128 } else { 256 }
    }

    /// What each piece of a tile costs whoever is last, who reads all, in keys. Tiles of one warpgroup have few rows,
    /// which its warps read beside each other: 60 of 512 keys and four of 16k to 100k, 32/8 heads on an H200, take 278
    /// us, and 314 at the cost of 64 rows.
    pub(super) fn merged_keys(&self) -> u32 {
        if self.consumers == 1 { 8 } else { 48 }
    }

    /// Bytes of what a consumer leaves of a piece: of every thread its part of O, two references and two sums, in fp32.
    pub(super) fn piece_bytes(&self, problem: &Problem) -> u32 {
        128 * 4 * (problem.head_dim_v.next_multiple_of(16) / 2 + 4)
    }

    /// What templates know of them.
    pub(super) fn constants(&self, problem: &Problem, constants: &mut Constants) {
        constants.extend([
            ("pieces_per_block", self.most().to_string()),
            ("piece_keys", self.piece_keys().to_string()),
            ("merged_keys", self.merged_keys().to_string()),
            ("counter_bytes", SPLIT_COUNTER_BYTES.to_string()),
            ("piece_bytes", self.piece_bytes(problem).to_string()),
        ]);
    }

    /// Thread blocks of a launch of so many tiles at most: no more than the bounds allow key blocks of tiles, nor than
    /// counters of their pieces.
    pub(super) fn grid(&self, tiles: u64, kv_len: u32, block_kv: u32) -> u32 {
        let blocks = u64::from(kv_len.div_ceil(block_kv)).max(1);
        let most = SPLIT_COUNTER_BYTES / 4 / u64::from(self.most() * self.consumers);
        (tiles * blocks).min(most) as u32
    }

    /// Their scratch memory, for each thread block.
    pub(super) fn region(&self, problem: &Problem) -> Region {
        let bytes = u64::from(self.most() * self.consumers * self.piece_bytes(problem));
        Region { holds: Holds::SplitKeys, bytes }
    }

    /// What a call is told of them, whose tiles have so many keys.
    pub(super) fn told(&self, problem: &Problem, seen: u64) -> [String; 2] {
        let split = format!(
            "where that leaves some idle, tiles of about {seen} keys are in up to {} pieces a thread block, at the \
             same keys for all tiles of a sequence",
            self.most()
        );
        let merge = format!(
            "by whoever is last of a tile's pieces, in the order of the keys: {} bytes of fp32 each in scratch memory",
            self.consumers * self.piece_bytes(problem)
        );
        [split, merge]
    }
}

/// How a launch numbers tiles: the most that there can be, and the rows of keys that stay in L2 together.
pub(super) fn ragged_tiling(
    shape: &Shape,
    pack_group: bool,
    block_q: u32,
    section_mib: u32,
    row_bytes: u64,
) -> Result<Tiling> {
    let group = shape.group();
    let packed =
        pack_group && group.is_power_of_two() && group <= 64 && u64::from(shape.q_len) * u64::from(group) < 1 << 30;
    let (group_shift, unit_heads) = if packed { (group.ilog2(), shape.kv_heads) } else { (0, shape.heads) };
    let most = tiles(shape.q_len << group_shift, block_q, unit_heads, shape.batch)?;
    let section = match section_mib {
        Sm90Schedule::WALK_ALL => i32::MAX as u64,
        mib => ((u64::from(mib) << 20) / row_bytes).min(i32::MAX as u64),
    };
    Ok(Tiling {
        group_shift: group_shift as i32,
        unit_heads: unit_heads as i32,
        blocks: 0,
        leading: 0,
        section: section as i32,
        tiles: most as i32,
    })
}

impl KernelFamily for Sm90RaggedSchedule {
    const NAME: &'static str = "forward/sm90_ragged";
    const TEMPLATE: &'static str = "forward/sm90_ragged.cu";
    const OP: Op = Op::Forward;
    const ARGS: ArgsLayout = ArgsLayout::RAGGED_MAPPED;
    const RAGGED: bool = true;

    fn runs_on(arch: Arch) -> Result<()> {
        Sm90Schedule::runs_on(arch)
    }

    fn supports(problem: &Problem, arch: Arch) -> Result<()> {
        let no = |limit: &str| Err(Error::unsupported("family", Self::NAME, limit, "use forward/sm80_ragged"));
        if problem
            .kv
            .store()
            .is_some_and(|s| s != (KvStore { scales: s.scales, ..KvStore::default() }) || s.element != KvElement::Same)
        {
            return no("reads stores in the dtype of the queries, whose columns of V lie side by side");
        }
        if problem.program.is_some_and(|p| p.lists().is_some() || p.runs().is_some()) {
            return no("masks by rows and lengths alone: no stage computes mask metadata of ragged batches");
        }
        Sm90Schedule::supports(&Problem { kv: crate::KvKind::Dense, ..*problem }, arch)
    }

    fn unmet(constraint: Constraint) -> Option<&'static str> {
        match constraint {
            Constraint::Strided => Some(
                "TMA takes keys of packs, of dense slots and of pages of a multiple of 16 tokens, by strides above zero \
                 and below 2^40 bytes: these lie otherwise",
            ),
            other => Sm90Schedule::unmet(other),
        }
    }

    /// Tiles have 64 rows for each warpgroup. Of 16 and fewer most of wgmma idles, and stream-K of the other family
    /// balances sequences of any lengths (60 of 512 keys and four of 16k to 100k, 32/8 heads on an H200: 256 us, here
    /// 278); of 32 and 64 rows that family is bound by its products (8 x 8k: 90 and 142 us, here 78). Where heads of a
    /// group have tiles of their own, each reads all keys.
    fn prefers(problem: &Problem, bucket: &ShapeBucket) -> bool {
        let packs = problem.program.is_none() && bucket.group.is_power_of_two();
        let few = if packs { 16 } else { 64 };
        u64::from(bucket.q_len) * u64::from(bucket.group) > few && bucket.pages.demands() == Constraints::NONE
    }

    fn default_for(problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Self {
        Self::default_of(problem, arch, bucket, USUAL_UNITS)
    }

    fn default_within(problem: &Problem, arch: Arch, bucket: &ShapeBucket, _: Constraints, units: u32) -> Self {
        Self::default_of(problem, arch, bucket, units)
    }

    fn space(problem: &Problem, _: Arch) -> Vec<Self> {
        let takes = |s: &Sm90Schedule| s.scheduler.is_persistent() && s.bias_stages == 0 && !s.ending;
        // Heads of a group together beside whole thread blocks' tiles, too, which dense tensors are not searched for.
        let packed = |s: Sm90Schedule| Sm90Schedule { pack_group: problem.program.is_none(), ..s };
        let both = |s: Sm90Schedule| [s, packed(s)];
        let mut space: Vec<Self> =
            Sm90Schedule::space(problem).into_iter().filter(takes).flat_map(both).map(Self).collect();
        space.sort();
        space.dedup();
        space
    }

    fn is_worth(&self, shape: &Shape) -> bool {
        self.0.is_worth(shape)
    }

    fn validate(&self, problem: &Problem, _: Arch) -> Result<()> {
        let s = &self.0;
        let bad = |field, value: &dyn fmt::Display, limit: &str| {
            Err(Error::unsupported(field, value.to_string(), limit, "use a schedule from the searched space"))
        };
        if !s.scheduler.is_persistent() {
            return bad(
                "scheduler",
                &"single",
                "thread blocks that stay: the number of tiles is known on the device alone",
            );
        }
        if s.ending || s.quick {
            return bad("ending, quick", &s, "sections throughout");
        }
        if s.bias_stages > 0 {
            return bad("bias_stages", &s.bias_stages, "0: no biases by query and key");
        }
        s.validate(problem)
    }

    fn resources(&self, problem: &Problem) -> Resources {
        KernelFamily::resources(&self.0, problem)
    }

    fn blocks_per_sm(&self) -> u32 {
        self.0.blocks_per_sm
    }

    fn constants(&self, problem: &Problem, constants: &mut Constants) {
        KernelFamily::constants(&self.0, problem, constants);
        constants.insert("table_entries", TABLE_ENTRIES.to_string());
        constants.insert("table_bytes", TABLE_BYTES.to_string());
        self.pieces().constants(problem, constants);
    }

    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let tiling = self.tiling(problem, shape)?;
        let smem = KernelFamily::resources(self, problem).smem_bytes;
        let pieces = self.pieces();
        let grid = pieces.grid(tiling.tiles as u64, shape.kv_len, self.0.block_kv);
        let main = Stage::of(StageEntry::MAIN, grid, self.0.threads(), smem).starting_early();
        let main = Stage { resident: Some(self.0.blocks_per_sm), ..main };
        let queue = self.0.scheduler == Sm90Scheduler::Queue;
        let counter = queue.then_some(Region { holds: Holds::TileCounter, bytes: 16 });
        Ok(LaunchPlan::new([main], std::iter::once(pieces.region(problem)).chain(counter), Some(tiling)))
    }

    fn ragged_account(&self, usual: &Usual<'_>) -> Option<RaggedAccount> {
        let s = &self.0;
        let tiling = self.tiling(usual.problem, &usual.sizes.shape).ok()?;
        let blocks = u64::from(usual.units * s.blocks_per_sm);
        let tiles = tiling.tiles;
        let [split, merge] = self.pieces().told(usual.problem, usual.seen(s.block_q().into()));
        let split = format!(
            "up to {tiles} tiles of up to {} rows over {blocks} thread blocks, the longest sequences first; {split}",
            s.block_q()
        );
        Some(RaggedAccount { split, merge, pages: format!("TMA, {} keys a block: {}", s.block_kv, usual.index()) })
    }

    fn walk(&self, problem: &Problem, shape: &Shape) -> Walk {
        KernelFamily::walk(&self.0, problem, shape)
    }
}

impl Sm90RaggedSchedule {
    fn pieces(&self) -> Pieces {
        Pieces { consumers: self.0.consumers }
    }

    /// From the default of `forward/sm90` for as many tiles whose sequences are as long as the usual one: the largest
    /// block of keys that fits beside the tile table.
    fn default_of(problem: &Problem, arch: Arch, bucket: &ShapeBucket, units: u32) -> Self {
        let pairs = u64::from(bucket.parallel.max(1));
        let keys = (u64::from(bucket.kv_len) * u64::from(units) / pairs).clamp(1, 1 << 30).next_power_of_two() as u32;
        // Small grids have schedules of their own there, of thread blocks that do not stay.
        let many = ShapeBucket { parallel: 4096, q_len: bucket.q_len.max(512), kv_len: keys, ..*bucket };
        let biased = Constraints::NONE.with(Constraint::LooseBiases);
        let of_many = Self::of(<Sm90Schedule as KernelFamily>::default_within(problem, arch, &many, biased, units)).0;
        // The rows of a KV head fill tiles together, where sequences end anywhere.
        let base = Sm90Schedule { pack_group: problem.program.is_none(), ..of_many };
        // Few tiles of long sequences, whose keys are split: what is raced there is one long walk over keys (28/4
        // heads, 512 x 8k of dense tensors on an H200: 92.2 us, 132.9 with smaller blocks; from pages of 16 111 us, 129
        // without turns).
        let few = pairs * u64::from(bucket.q_len.div_ceil(128)) <= 2 * u64::from(units) && keys > 4096;
        let d = problem.head_dim_qk.max(problem.head_dim_v);
        let base = match few && (97..=128).contains(&d) && problem.program.is_none() {
            true => Sm90Schedule {
                consumers: 2,
                block_kv: 160,
                stages: 2,
                chain: false,
                output_apart: false,
                take_turns: true,
                ..base
            },
            false => base,
        };
        // One warpgroup takes all rows of a KV head, and blocks of keys as large as those of tiles of long prompts.
        let base = match base.pack_group && u64::from(bucket.q_len) * u64::from(bucket.group) <= 64 {
            true => Sm90Schedule {
                consumers: 1,
                block_kv: 128,
                stages: 2,
                chain: false,
                output_apart: false,
                take_turns: false,
                trim: false,
                ..base
            },
            false => base,
        };
        let fits = |s: &Self| {
            let resources = KernelFamily::resources(s, problem);
            KernelFamily::validate(s, problem, arch).is_ok() && resources.check(arch, s.0.blocks_per_sm).is_ok()
        };
        let smaller = (1..=base.block_kv / 16).rev().map(|n| Self(Sm90Schedule { block_kv: n * 16, ..base }));
        let plain = Sm90Schedule { chain: false, output_apart: false, ..base };
        [Self(base), Self(Sm90Schedule { output_apart: false, ..base }), Self(plain)]
            .into_iter()
            .chain(smaller)
            .find(fits)
            .unwrap_or(Self(Sm90Schedule { block_kv: 16, ..plain }))
    }
}
