//! `forward/sm90`: wgmma and TMA, FlashAttention-3 (section 3): a producer warpgroup, consumer warpgroups, and what
//! overlaps with what.

mod defaults;
mod mask_metadata;
mod registers;
mod resources;
mod softmax;
mod space;
mod tensor_maps;
mod tiling;
mod validate;
pub(super) mod wgmma;

pub use softmax::{Sm90LookAhead, Sm90Rescale, Sm90RowOrder};
pub(super) use tensor_maps::{STRIDE_LIMIT, Tensor, spec, why_unaddressable};
pub use tensor_maps::{TensorMapSpec, has_loose_biases, is_addressable, unaddressable};

use super::KernelFamily;
use super::fields::{Constants, FieldValue, Place, Retired, RetiredField, schedule};
use super::forward_sm80;
use super::program_length::{self, MostOperations};
use crate::abi::{self, ArgsLayout};
use crate::launch::{Holds, LaunchPlan, Region, Stage, StageEntry};
use crate::score::Bias;
use crate::traffic::Walk;
use crate::{Arch, Constraint, Constraints, DType, Error, Op, Problem, Resources, Result, Shape, ShapeBucket};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Operations of a program's change of the score above which a kernel compiles for over half a minute: the compiler
/// sees them once for each score that a thread holds.
const LONGEST_CHANGE: usize = 256;

/// Thread blocks of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Cluster;

impl RetiredField for Cluster {
    const NAME: &'static str = "cluster";
    const KEPT: u32 = 1;
}

schedule! {
    /// How a Hopper GPU computes one problem.
    pub struct Sm90Schedule {
        /// Consumer warpgroups; each owns 64 query rows. One more warpgroup is the producer.
        pub consumers: u32 => code, number("c");
        /// Keys of one step of the main loop.
        pub block_kv: u32 => code, number("kv");
        /// Stages of the K and V pipelines each.
        pub stages: u32 => code, number("s");
        /// Inside a warpgroup, the scores of a block are computed and exponentiated while the product of the block
        /// before with V still runs.
        pub overlap: bool => code, either("overlap", "serial");
        /// Consumers take turns in issuing matrix work (ping-pong), so that the softmax of one hides behind the
        /// products of another.
        pub take_turns: bool => code, flag("turns");
        /// O is rescaled only when a row maximum has grown by more than 2^8: faster, and less exact where one score
        /// dominates its row.
        pub lazy_rescale: bool => code, flag("lazy");
        /// The query heads of a KV head share a tile, side by side: short queries then fill it. Used where their number
        /// is a power of two up to 64.
        pub pack_group: bool => code, flag("pack");
        /// Each consumer leaves out the key blocks that only the rows of others visit, at the ends of what a mask
        /// leaves.
        pub trim: bool => code, flag("trim");
        /// Which thread block computes which tile.
        pub scheduler: Sm90Scheduler => code, word;
        /// Q of the next tile is loaded while this one is computed (two buffers) and, with `overlap`, its first scores
        /// are computed beside this one's last product: the matrix units do not see where a tile ends. For persistent
        /// thread blocks.
        pub chain: bool => code, flag("chain");
        /// O leaves from shared memory of its own: the next Q is loaded as soon as the last scores are there, and
        /// neither V nor the other consumers wait for O. For persistent thread blocks.
        pub output_apart: bool => code, flag("apart");
        /// What is quick for the compiler goes before what is quick on the device, and the bits stay the same
        /// ([`Sm90Schedule::quick`]). Not in the searched space.
        pub quick: bool => code, flag("quick");
        /// Stages of the biases that a score program reads by query and key, a tile for each consumer, loaded by TMA.
        /// 0: each thread reads its own elements from memory, ahead of their use.
        pub bias_stages: u32 => code, number_unless(0, "bias");
        /// Registers that a thread of the producer keeps beyond those that it needs by rule, and that consumers then
        /// lack: for masks whose blocks take more to find than the rule says.
        pub producer_spare: u32 => derived, number_unless(0, "spare");
        /// Eighths of the exponentials that run on the multiply-add units: for small head dims, whose products take no
        /// longer than the exponentials of the special-function unit. Needs `masked_loop`, since masked scores must
        /// vanish.
        pub exp2_eighths: u32 => code, number_unless(0, "fma");
        /// Warpgroups, up to 2, that draw which scores are dropped, while consumers compute them. 0: each thread draws
        /// for its own scores.
        pub drawers: u32 => code, number_unless(0, "draw");
        /// Thread blocks of a cluster, which no kernel has any more: pairs that shared what they read of K and V took
        /// 1.003 to 1.34 times as long in 24 sizes of an H200.
        pub cluster: Retired<Cluster> => derived, silent;
        /// Blocks that need a mask run in a loop of their own.
        pub masked_loop: bool => code, either("two", "one");
        /// Thread blocks on one multiprocessor.
        pub blocks_per_sm: u32 => code, number("b");
        /// MiB of K and V whose tiles are walked together, block by block, so that they stay in L2: 0 is one KV head
        /// after the other, [`Sm90Schedule::WALK_ALL`] the same block of all heads.
        pub section_mib: u32 => launch, with(Sm90Schedule::section_name);
        /// Only the end of the walk is such a section, and before it come single KV heads: tiles of all lengths run
        /// beside each other then, and the longest of the end first. For masks that make lengths differ.
        pub ending: bool => launch, silent;
        /// With `overlap`, when O is multiplied by the factors of its rows.
        pub rescale: Sm90Rescale => derived, word;
        /// In which order a thread takes the maxima and exponentials of its two rows.
        pub row_order: Sm90RowOrder => derived, word;
        /// The same in steps of masked blocks.
        pub masked_row_order: Sm90RowOrder => derived, with(Sm90Schedule::masked_row_order_name);
        /// Whether the next K and V have arrived is asked while there is other work.
        pub look_ahead: Sm90LookAhead => derived, word;
        /// Of a masked V that is looked through for non-finite elements, reads of a thread in flight; 0 is the rule.
        pub scan_together: u32 => derived, number_unless(0, "scan");
    }
}

/// Which thread block computes which tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum Sm90Scheduler {
    /// Every tile has its own thread block, which the hardware starts where there is room.
    #[default]
    Single,
    /// Thread blocks are persistent, and each takes every so many-th tile.
    Stride,
    /// Thread blocks are persistent, and each takes the next tile by an atomic counter in global memory.
    Queue,
}

impl Sm90Scheduler {
    /// Whether thread blocks are persistent.
    pub const fn is_persistent(self) -> bool {
        !matches!(self, Self::Single)
    }
}

impl fmt::Display for Sm90Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Single => "",
            Self::Stride => "stride",
            Self::Queue => "queue",
        })
    }
}

impl FieldValue for Sm90Scheduler {
    fn place(&self) -> Place {
        Place::Word(match self {
            Self::Single => "single",
            Self::Stride => "stride",
            Self::Queue => "queue",
        })
    }
    fn render(&self, _: &'static str, constants: &mut Constants) {
        constants.insert("persistent", self.is_persistent().to_string());
        constants.insert("queue", (*self == Self::Queue).to_string());
    }
}

impl Sm90Schedule {
    /// A `section_mib` that holds everything.
    pub const WALK_ALL: u32 = u32::MAX;

    /// Query rows of one thread block.
    pub const fn block_q(&self) -> u32 {
        self.consumers * 64
    }

    /// Threads of one block.
    pub const fn threads(&self) -> u32 {
        (self.consumers + 1 + self.drawers) * 128
    }

    /// The order of rows in masked steps, in the schedule's name.
    fn masked_row_order_name(&self) -> String {
        match self.masked_row_order {
            Sm90RowOrder::ByHeadDim => String::new(),
            order => format!("m{order}"),
        }
    }

    /// How tiles are walked, in the schedule's name.
    fn section_name(&self) -> String {
        match self.section_mib {
            Self::WALK_ALL => "all".to_owned(),
            n if self.ending => format!("end{n}"),
            n => format!("l2x{n}"),
        }
    }

    /// The biases that are loaded by TMA.
    pub(crate) fn biases<'a>(&self, problem: &'a Problem) -> &'a [Bias] {
        match &problem.program {
            Some(program) if self.bias_stages > 0 => program.biases(),
            _ => &[],
        }
    }

    /// Whether the scores' product starts from what a program adds to them: biases that are there before.
    pub(crate) fn seeds(&self, problem: &Problem) -> bool {
        !self.biases(problem).is_empty() && problem.program.is_some_and(|p| p.score_facts().adds)
    }
}

impl KernelFamily for Sm90Schedule {
    const NAME: &'static str = "forward/sm90";
    const TEMPLATE: &'static str = "forward/sm90.cu";
    const OP: Op = Op::Forward;
    const ARGS: ArgsLayout = ArgsLayout::MAPPED;

    const SWAYED_BY: Constraints = Constraints::NONE.with(Constraint::LooseBiases);

    fn runs_on(arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        match arch {
            Arch::Cpu(_) => no("runs on CUDA devices only", "use forward/cpu"),
            Arch::Sm(sm) if sm.number == 90 && sm.specific => Ok(()),
            Arch::Sm(_) => no("needs sm_90a: its instructions exist on Hopper alone", "use forward/sm80"),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        if problem.dtype == DType::F32 {
            return no("computes f16 and bf16 only", "forward/naive is the exact f32 path");
        }
        problem.check_vectors(Self::NAME)?;
        if problem.program.is_some_and(|p| p.score_facts().loads_by_key > 0 && problem.head_dim_v > 192) {
            return no(
                "reads side tensors along the keys for scores up to a head dim of V of 192: more leaves no registers",
                "use forward/sm80",
            );
        }
        let most = MostOperations::Apart { mask: forward_sm80::LONGEST_PROGRAM, change: LONGEST_CHANGE };
        program_length::check(Self::NAME, problem, most, "use forward/sm80 or forward/naive")
    }

    fn unmet(constraint: Constraint) -> Option<&'static str> {
        match constraint {
            Constraint::Strided => {
                Some("TMA takes strides above zero and below 2^40 bytes, and a dimension of these tensors has another")
            }
            Constraint::LooseBiases => None,
            // The rest is as for the other kernels on tensor cores.
            other => forward_sm80::Sm80Schedule::unmet(other),
        }
    }

    fn default_for(problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Self {
        Self::default_for(problem, arch.gpu(), bucket)
    }

    fn default_within(problem: &Problem, arch: Arch, bucket: &ShapeBucket, demanded: Constraints, units: u32) -> Self {
        Self::default_of(problem, arch.gpu(), bucket, !demanded.has(Constraint::LooseBiases), units)
    }

    fn unfit(&self, constraint: Constraint) -> Option<&'static str> {
        (constraint == Constraint::LooseBiases && self.bias_stages > 0).then_some(
            "it loads biases by TMA, which takes addresses and strides in multiples of 16 bytes and whole rows of queries and \
             keys; threads load this call's biases faster than they copy them",
        )
    }

    fn quick(&self) -> Option<Self> {
        self.quick()
    }

    fn is_quick(&self) -> bool {
        self.quick
    }

    fn space(problem: &Problem, _: Arch) -> Vec<Self> {
        Self::space(problem)
    }

    fn is_worth(&self, shape: &Shape) -> bool {
        self.is_worth(shape)
    }

    fn validate(&self, problem: &Problem, _: Arch) -> Result<()> {
        self.validate(problem)
    }

    fn resources(&self, problem: &Problem) -> Resources {
        // The block starts with equal shares of the registers and its warpgroups exchange them: `validate` checks
        // those.
        Resources { threads: self.threads(), smem_bytes: resources::smem_bytes(problem, self), registers: 24 }
    }

    fn blocks_per_sm(&self) -> u32 {
        self.blocks_per_sm
    }

    fn constants(&self, problem: &Problem, constants: &mut Constants) {
        self.softmax_constants(problem, constants);
        let axes = problem.program.and_then(|p| p.lists().or(p.runs()));
        constants.extend([
            ("tile_queues", abi::TILE_QUEUES.to_string()),
            ("list_counts", mask_metadata::LIST_COUNTS.to_string()),
            ("classify_threads", mask_metadata::classify_threads(problem, self).to_string()),
            ("mask_words", mask_metadata::mask_words(self).to_string()),
            ("rows_of_ends", mask_metadata::ROWS_OF_ENDS.to_string()),
            ("ends_bytes", mask_metadata::ENDS_BYTES.to_string()),
            ("run_bytes", mask_metadata::RUN_BYTES.to_string()),
            ("mask_by_batch", axes.is_some_and(|a| a.batch).to_string()),
            ("mask_by_head", axes.is_some_and(|a| a.head).to_string()),
            ("mask_by_kv_head", axes.is_some_and(|a| a.kv_head).to_string()),
            ("seeded", self.seeds(problem).to_string()),
            ("producer_registers", self.producer_registers(problem).to_string()),
            ("bit_stages", resources::BIT_STAGES.to_string()),
            ("drawer_registers", Self::DRAWER_REGISTERS.to_string()),
            ("consumer_registers", self.consumer_registers(problem).to_string()),
            ("wgmma_instructions", wgmma::instructions(problem, self)),
        ]);
    }

    fn biases<'a>(&self, problem: &'a Problem) -> &'a [Bias] {
        self.biases(problem)
    }

    fn entries(&self, problem: &Problem) -> &'static [StageEntry] {
        mask_metadata::entries(problem)
    }

    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let tiling = self.tiling(problem, shape)?;
        let main = Stage {
            resident: self.scheduler.is_persistent().then_some(self.blocks_per_sm),
            ..Stage::of(StageEntry::MAIN, tiling.tiles as u32, self.threads(), resources::smem_bytes(problem, self))
        };
        let counter =
            (self.scheduler == Sm90Scheduler::Queue).then_some(Region { holds: Holds::TileCounter, bytes: 16 });
        let (before, metadata) = match mask_metadata::of(problem, self, &tiling, shape)? {
            Some(metadata) => (metadata.stages, Some(metadata.region)),
            None => ([None; 2], None),
        };
        let stages = before.into_iter().flatten().chain([main]);
        Ok(LaunchPlan::new(stages, metadata.into_iter().chain(counter), Some(tiling)))
    }

    fn walk(&self, problem: &Problem, shape: &Shape) -> Walk {
        let plain = Walk::plain(self.block_q(), self.block_kv, shape);
        let Ok(t) = self.tiling(problem, shape) else { return plain };
        // Heads that share a tile load K and V together; the tile has as many fewer queries.
        let sharing = 1u32 << t.group_shift;
        // Most of the walk is one KV head after the other, or all of it is sections.
        let together = if t.leading > 0 { 1.0 } else { t.section as f64 * sharing as f64 / shape.group() as f64 };
        let queries = (self.block_q() / sharing).max(1);
        Walk { heads: plain.heads / sharing as f64, together, queries, ..plain }
    }
}
