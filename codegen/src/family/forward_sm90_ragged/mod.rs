//! `forward/sm90_ragged`: `forward/sm90` for ragged batches, whose thread blocks find their tiles from lengths in device
//! memory.
//!
//! Its schedules are those of `forward/sm90` with persistent thread blocks, without clusters and biases by TMA.

mod tensor_maps;

pub use tensor_maps::ragged_unaddressable;

use super::KernelFamily;
use super::fields::{Constants, Fields, Place};
use super::forward_sm90::{Sm90Schedule, Sm90Scheduler};
use crate::abi::ArgsLayout;
use crate::kv::{KvElement, KvStore};
use crate::launch::{Holds, LaunchPlan, Region, Stage, StageEntry, tiles};
use crate::traffic::Walk;
use crate::{Arch, Constraint, Constraints, Error, Op, Problem, Resources, Result, Shape, ShapeBucket, Tiling};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Entries of the tile table: sequences that each have their own, and are walked from the longest on.
const TABLE_ENTRIES: u32 = 128;

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
        Self(Sm90Schedule { scheduler: Sm90Scheduler::Queue, cluster: 1, ending: false, quick: false, ..s })
    }

    /// How a launch numbers tiles: the most that there can be, and the rows of keys that stay in L2 together.
    fn tiling(&self, problem: &Problem, shape: &Shape) -> Result<Tiling> {
        let s = &self.0;
        let group = shape.group();
        let packed = s.pack_group
            && group.is_power_of_two()
            && group <= 64
            && u64::from(shape.q_len) * u64::from(group) < 1 << 30;
        let (group_shift, unit_heads) = if packed { (group.ilog2(), shape.kv_heads) } else { (0, shape.heads) };
        let most = tiles(shape.q_len << group_shift, s.block_q(), unit_heads, shape.batch)?;
        let row_bytes = u64::from(problem.head_dim_qk + problem.head_dim_v) * 2;
        let section = match s.section_mib {
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
                "TMA takes keys of packs and dense slots, by strides above zero and below 2^40 bytes: these lie in pages \
                 or have other strides",
            ),
            other => Sm90Schedule::unmet(other),
        }
    }

    /// Tiles have 64 rows for each warpgroup at least, and keys are not split: rows that fill no more than one leave
    /// most of wgmma and of the device idle.
    /// Never yet: its kernels have run in the emulator alone. `forward/sm80_ragged` serves; what comes first by rows is
    /// tiles of more than 64 (`q_len * group`).
    fn prefers(_: &ShapeBucket) -> bool {
        false
    }

    fn default_for(problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Self {
        Self::default_of(problem, arch, bucket)
    }

    fn default_within(problem: &Problem, arch: Arch, bucket: &ShapeBucket, _: Constraints) -> Self {
        Self::default_of(problem, arch, bucket)
    }

    fn space(problem: &Problem, _: Arch) -> Vec<Self> {
        let takes = |s: &Sm90Schedule| s.scheduler.is_persistent() && s.cluster == 1 && s.bias_stages == 0 && !s.ending;
        Sm90Schedule::space(problem).into_iter().filter(takes).map(Self).collect()
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
        if s.cluster > 1 || s.ending || s.quick {
            return bad("cluster, ending, quick", &s, "single thread blocks, sections throughout");
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
    }

    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let tiling = self.tiling(problem, shape)?;
        let smem = KernelFamily::resources(self, problem).smem_bytes;
        let main = Stage {
            resident: Some(self.0.blocks_per_sm),
            ..Stage::of(StageEntry::MAIN, tiling.tiles as u32, self.0.threads(), smem)
        };
        let queue = self.0.scheduler == Sm90Scheduler::Queue;
        let counter = queue.then_some(Region { holds: Holds::TileCounter, bytes: 16 });
        Ok(LaunchPlan::new([main], counter, Some(tiling)))
    }

    fn walk(&self, problem: &Problem, shape: &Shape) -> Walk {
        KernelFamily::walk(&self.0, problem, shape)
    }
}

impl Sm90RaggedSchedule {
    /// From the default of `forward/sm90` for a batch of many tiles whose sequences are as long as the longest: the
    /// largest block of keys that fits beside the tile table.
    fn default_of(problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Self {
        // Small grids have schedules of their own there, which the longest sequence's length would choose wrongly.
        let many = ShapeBucket { parallel: bucket.parallel.max(1024), ..*bucket };
        let biased = Constraints::NONE.with(Constraint::LooseBiases);
        let base = Self::of(<Sm90Schedule as KernelFamily>::default_within(problem, arch, &many, biased)).0;
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
