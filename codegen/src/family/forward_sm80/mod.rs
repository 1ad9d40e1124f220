//! `forward/sm80`: mma.sync and cp.async, FlashAttention-2 (sections 3.2 and 3.3: query rows split over warps). On
//! sm_75 f16 alone, by products of half the depth and copies through registers.

mod instructions;
mod resources;

pub use instructions::Sm80Instructions;

use super::KernelFamily;
use super::fields::{Constants, FieldValue, Place, schedule};
use super::program_length::{self, MostOperations};
use crate::launch::{LaunchPlan, Stage, StageEntry, tiles};
use crate::level::Evidence;
use crate::traffic::Walk;
use crate::{Arch, Constraint, DType, Error, Op, Problem, Resources, Result, Shape, ShapeBucket, SmArch};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Operations of a score program, mask and change together, above which a kernel compiles for over half a minute.
pub(super) const LONGEST_PROGRAM: usize = 1500;

/// How rows of K, V and Q are placed in shared memory so that ldmatrix meets no bank conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum Swizzle {
    /// XOR of the 16-byte chunk with low row bits: no space lost, address arithmetic per chunk.
    #[default]
    Xor,
    /// Rows padded by one 16-byte chunk: some space lost, addresses are immediates.
    Pad,
}

impl fmt::Display for Swizzle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Swizzle::Xor => "xor",
            Swizzle::Pad => "pad",
        })
    }
}

impl FieldValue for Swizzle {
    fn place(&self) -> Place {
        Place::Word(match self {
            Swizzle::Xor => "xor",
            Swizzle::Pad => "pad",
        })
    }
    fn render(&self, _: &'static str, constants: &mut Constants) {
        constants.insert("pad_rows", (*self == Swizzle::Pad).to_string());
    }
}

/// In which order thread blocks take the tiles of O.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum TileOrder {
    /// All query blocks of a head, then the next head: K and V stay in L2.
    #[default]
    HeadMajor,
    /// The same query block of all heads, then the next: with a causal mask, longest rows first over the whole grid.
    BlockMajor,
}

impl fmt::Display for TileOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TileOrder::HeadMajor => "head",
            TileOrder::BlockMajor => "block",
        })
    }
}

impl FieldValue for TileOrder {
    fn place(&self) -> Place {
        Place::Word(match self {
            TileOrder::HeadMajor => "head",
            TileOrder::BlockMajor => "block",
        })
    }
    fn render(&self, _: &'static str, constants: &mut Constants) {
        constants.insert("block_major", (*self == TileOrder::BlockMajor).to_string());
    }
}

schedule! {
    /// How an mma.sync GPU computes one problem.
    pub struct Sm80Schedule {
        /// Warps of one thread block; each owns `rows_per_warp` query rows.
        pub warps: u32 => code, with(|s: &Self| format!("w{}x{}", s.warps, s.rows_per_warp));
        /// Query rows of one warp: 16 or 32. With 32, one K or V fragment read from shared memory feeds two
        /// multiplications.
        pub rows_per_warp: u32 => code, silent;
        /// Keys of one step of the main loop.
        pub block_kv: u32 => code, number("kv");
        /// Buffers of K and V each in shared memory: 1 loads K of the next step while V of this one is used, 2 and more
        /// load whole steps ahead.
        pub stages: u32 => code, number("s");
        /// Q fragments stay in registers for the whole loop (the shared memory that Q arrives in is reused for K and
        /// V).
        pub q_in_registers: bool => code, either("qreg", "qsmem");
        /// Placement of rows in shared memory.
        pub swizzle: Swizzle => code, word;
        /// Thread blocks that must fit one multiprocessor: caps the registers of a thread.
        pub blocks_per_sm: u32 => code, number("b");
        /// Skip rescaling O while the row maximum has grown by less than 2^8: the sums stay exact because the stale
        /// maximum is used consistently.
        pub lazy_rescale: bool => code, either("lazy", "eager");
        /// Blocks that need a mask run in a loop of their own, so that the main loop holds no mask code: more code,
        /// compiled twice, and a little faster where registers are short.
        pub masked_loop: bool => code, either("two", "one");
        /// Order of the tiles.
        pub order: TileOrder => code, word;
        /// What the kernel is made of on its arch.
        pub instructions: Sm80Instructions => code, word;
    }
}

impl Sm80Schedule {
    /// Query rows of one thread block.
    pub const fn block_q(&self) -> u32 {
        self.warps * self.rows_per_warp
    }

    /// Threads of one block.
    pub const fn threads(&self) -> u32 {
        self.warps * 32
    }

    /// The schedule that serves while nothing is tuned: the largest tile that compiles without spills and fast, as
    /// measured on an H200 (`docs/measured/`), and a smaller one where shared memory is short.
    pub fn default_for(problem: &Problem, sm: SmArch, bucket: &ShapeBucket) -> Self {
        if Sm80Instructions::of(sm) == Sm80Instructions::Turing {
            return Self::default_on_turing(problem);
        }
        let d = problem.head_dim_qk.max(problem.head_dim_v);
        let smem = sm.limits().smem_per_block / 1024;
        // What cuts the left side, changes every score or reads data needs registers.
        let changes = problem.program.is_some_and(|p| p.score().is_some());
        let reads = problem.program.is_some_and(|p| !p.declarations().is_empty());
        let busy = problem.mask.left || changes || reads;
        let (warps, rows_per_warp, block_kv, stages, q_in_registers) = match d {
            0..=64 => (4, 32, if changes && reads { 48 } else { 64 }, 2, true),
            65..=96 if smem >= 160 => (4, 32, if changes || reads { 48 } else { 64 }, 2, false),
            65..=128 if smem >= 160 => (4, 32, if busy { 32 } else { 48 }, 2, false),
            65..=128 => (4, 16, 64, 1, false),
            _ if smem >= 224 && bucket.q_len > 64 => (
                8,
                16,
                if d > 208 && reads {
                    64
                } else if d > 208 || busy {
                    96
                } else {
                    128
                },
                1,
                false,
            ),
            _ if smem >= 160 => (4, 16, 64, 1, false),
            _ => (4, 16, 32, 1, false),
        };
        // Short query sequences: rows beyond q_len are wasted work.
        let rows_per_warp = if bucket.q_len <= 64 { 16 } else { rows_per_warp };
        let order = if problem.mask.right { TileOrder::BlockMajor } else { TileOrder::HeadMajor };
        Self {
            warps,
            rows_per_warp,
            block_kv,
            stages,
            q_in_registers,
            swizzle: Swizzle::Xor,
            blocks_per_sm: 1,
            // P is rounded: where O is to have more digits, its largest must be 1.
            lazy_rescale: !problem.residual,
            masked_loop: false,
            order,
            instructions: Sm80Instructions::Ampere,
        }
    }

    /// The schedules worth trying. `blocks_per_sm` varies only where it changes the register cap of a thread, and eager
    /// rescaling is left out: it never won where both were measured.
    pub fn space(problem: &Problem, sm: SmArch) -> Vec<Self> {
        let instructions = Sm80Instructions::of(sm);
        let stages: &[u32] = if instructions == Sm80Instructions::Turing { &[1] } else { &[1, 2, 3] };
        let orders: &[TileOrder] =
            if problem.mask.any() { &[TileOrder::BlockMajor, TileOrder::HeadMajor] } else { &[TileOrder::HeadMajor] };
        let warp_splits =
            [(2, 16, 1), (2, 32, 1), (4, 16, 1), (4, 16, 3), (4, 32, 1), (8, 16, 1), (8, 16, 2), (8, 32, 1)];
        let placements = [(Swizzle::Xor, false), (Swizzle::Xor, true), (Swizzle::Pad, false)];
        let mut space = Vec::new();
        for (warps, rows_per_warp, blocks_per_sm) in warp_splits {
            for block_kv in [32, 48, 64, 80, 96, 128] {
                for &stages in stages {
                    for q_in_registers in [false, true] {
                        for (swizzle, masked_loop) in placements {
                            for &order in orders {
                                space.push(Self {
                                    warps,
                                    rows_per_warp,
                                    block_kv,
                                    stages,
                                    q_in_registers,
                                    swizzle,
                                    blocks_per_sm,
                                    lazy_rescale: !problem.residual,
                                    masked_loop,
                                    order,
                                    instructions,
                                });
                            }
                        }
                    }
                }
            }
        }
        space
    }

    /// Checks the fields against what the template can generate.
    pub fn validate(&self, problem: &Problem, sm: SmArch) -> Result<()> {
        let bad = |field: &'static str, value: u32, limit: &str| {
            Err(Error::unsupported(field, value, limit, "use a schedule from the searched space"))
        };
        if !(1..=16).contains(&self.warps) {
            return bad("warps", self.warps, "1 to 16 warps");
        }
        if ![16, 32, 48, 64].contains(&self.rows_per_warp) {
            return bad("rows_per_warp", self.rows_per_warp, "16, 32, 48 or 64 rows");
        }
        if self.block_kv == 0 || !self.block_kv.is_multiple_of(16) || self.block_kv > 256 {
            return bad("block_kv", self.block_kv, "a multiple of 16 up to 256");
        }
        if !(1..=4).contains(&self.stages) {
            return bad("stages", self.stages, "1 to 4 stages");
        }
        self.instructions.check(sm, self.stages)?;
        if !(1..=8).contains(&self.blocks_per_sm) {
            return bad("blocks_per_sm", self.blocks_per_sm, "1 to 8 blocks");
        }
        if self.lazy_rescale && problem.residual {
            return bad("lazy_rescale", 1, "eager where a residual is written: the largest probability is then exact");
        }
        Ok(())
    }
}

impl KernelFamily for Sm80Schedule {
    const NAME: &'static str = "forward/sm80";
    const TEMPLATE: &'static str = "forward/sm80.cu";
    const OP: Op = Op::Forward;

    fn runs_on(arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        match arch {
            Arch::Cpu(_) => no("runs on CUDA devices only", "use forward/cpu"),
            Arch::Sm(sm) if sm.number < 75 => no("needs sm_75 or newer (mma.sync.m16n8k8)", "use forward/naive"),
            Arch::Sm(_) => Ok(()),
        }
    }

    const VARIANTS: &'static [&'static str] = &[Sm80Instructions::M16N8K8];

    fn evidence(_: &Problem, arch: Arch) -> Evidence {
        match arch {
            Arch::Sm(sm) if Sm80Instructions::of(sm) == Sm80Instructions::Turing => {
                Evidence::emulated(Sm80Instructions::M16N8K8)
            }
            _ => Evidence::of_hopper(Self::PURPOSE),
        }
    }

    fn supports(problem: &Problem, arch: Arch) -> Result<()> {
        let is_turing = Sm80Instructions::of(arch.gpu()) == Sm80Instructions::Turing;
        if is_turing && problem.dtype == DType::Bf16 {
            let limit = "computes f16 alone before sm_80, whose mma.sync is the first on bf16";
            return Err(Error::unsupported("family", Self::NAME, limit, "use forward/naive, or f16"));
        }
        if problem.dtype == DType::F32 {
            let (limit, remedy) = ("computes f16 and bf16 only", "forward/naive is the exact f32 path");
            return Err(Error::unsupported("family", Self::NAME, limit, remedy));
        }
        problem.check_vectors(Self::NAME)?;
        let most = MostOperations::Together(LONGEST_PROGRAM);
        program_length::check(Self::NAME, problem, most, "use forward/naive")
    }

    fn unmet(constraint: Constraint) -> Option<&'static str> {
        match constraint {
            Constraint::Weights => Some("it does not write the attention weights"),
            Constraint::Unaligned => Some(
                "it reads 16 bytes at once, and a row of these tensors starts elsewhere: align addresses and strides to \
                 16 bytes",
            ),
            Constraint::Strided | Constraint::LooseBiases => None,
        }
    }

    fn default_for(problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Self {
        Self::default_for(problem, arch.gpu(), bucket)
    }

    fn space(problem: &Problem, arch: Arch) -> Vec<Self> {
        Self::space(problem, arch.gpu())
    }

    fn validate(&self, problem: &Problem, arch: Arch) -> Result<()> {
        self.validate(problem, arch.gpu())
    }

    fn resources(&self, problem: &Problem) -> Resources {
        resources::of(self, problem)
    }

    fn blocks_per_sm(&self) -> u32 {
        self.blocks_per_sm
    }

    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let grid = tiles(shape.q_len, self.block_q(), shape.heads, shape.batch)?;
        let Resources { threads, smem_bytes, .. } = resources::of(self, problem);
        Ok(LaunchPlan::new([Stage::of(StageEntry::MAIN, grid, threads, smem_bytes)], [], None))
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        let plain = Walk::plain(self.block_q(), self.block_kv, shape);
        match self.order {
            TileOrder::HeadMajor => plain,
            TileOrder::BlockMajor => Walk { together: shape.batch as f64 * shape.kv_heads as f64, ..plain },
        }
    }
}
