//! `forward/sm89_fp8`: `forward/sm80` for e4m3, by mma.sync.m16n8k32 of sm_89 and newer. Nothing is transposed in
//! memory; products of P V are summed in two levels, the second one in fp32 registers.

mod defaults;
mod resources;

use super::fields::schedule;
use super::{Dtypes, KernelFamily, Swizzle, TileOrder};
use crate::launch::{LaunchPlan, Stage, StageEntry, tiles};
use crate::level::Evidence;
use crate::traffic::Walk;
use crate::{Arch, Constraint, Error, Op, Problem, Resources, Result, Shape, ShapeBucket};

/// Head dims are multiples of this: rows of e4m3 are then whole 16-byte vectors.
const HEAD_DIM_STEP: u32 = 16;

schedule! {
    /// How an mma.sync GPU with FP8 products computes one problem of e4m3.
    pub struct Sm89Fp8Schedule {
        /// Warps of one thread block; each owns `rows_per_warp` query rows.
        pub warps: u32 => code, with(|s: &Self| format!("w{}x{}", s.warps, s.rows_per_warp));
        /// Query rows of one warp: 16 or 32. With 32, one K or V fragment feeds two multiplications.
        pub rows_per_warp: u32 => code, silent;
        /// Keys of one step of the main loop, and of one sum of the first level.
        pub block_kv: u32 => code, number("kv");
        /// Buffers of K and V each in shared memory: 1 loads K of the next step while V of this one is used, 2 and more
        /// load whole steps ahead.
        pub stages: u32 => code, number("s");
        /// Q fragments stay in registers for the whole loop.
        pub q_in_registers: bool => code, either("qreg", "qsmem");
        /// Placement of rows in shared memory.
        pub swizzle: Swizzle => code, word;
        /// Thread blocks that must fit one multiprocessor: caps the registers of a thread.
        pub blocks_per_sm: u32 => code, number("b");
        /// Groups of 16 columns of V are multiplied one after the other, with nothing of the next begun before: fewer
        /// registers, less latency hidden.
        pub in_order: bool => code, flag("inorder");
        /// Order of the tiles.
        pub order: TileOrder => code, word;
    }
}

impl Sm89Fp8Schedule {
    /// Query rows of one thread block.
    pub const fn block_q(&self) -> u32 {
        self.warps * self.rows_per_warp
    }

    /// Threads of one block.
    pub const fn threads(&self) -> u32 {
        self.warps * 32
    }

    /// Checks the fields against what the template can generate.
    fn check(&self) -> Result<()> {
        let bad = |field: &'static str, value: u32, limit: &str| {
            Err(Error::unsupported(field, value, limit, "use a schedule from the searched space"))
        };
        if !(1..=16).contains(&self.warps) {
            return bad("warps", self.warps, "1 to 16 warps");
        }
        if ![16, 32].contains(&self.rows_per_warp) {
            return bad("rows_per_warp", self.rows_per_warp, "16 or 32 rows");
        }
        // More keys than that and their sum of the first level loses more than two levels are for.
        if self.block_kv == 0 || !self.block_kv.is_multiple_of(32) || self.block_kv > 256 {
            return bad("block_kv", self.block_kv, "a multiple of 32 up to 256");
        }
        if !(1..=4).contains(&self.stages) {
            return bad("stages", self.stages, "1 to 4 stages");
        }
        if !(1..=8).contains(&self.blocks_per_sm) {
            return bad("blocks_per_sm", self.blocks_per_sm, "1 to 8 blocks");
        }
        Ok(())
    }
}

impl KernelFamily for Sm89Fp8Schedule {
    const NAME: &'static str = "forward/sm89_fp8";
    const TEMPLATE: &'static str = "forward/sm89_fp8.cu";
    const OP: Op = Op::Forward;
    const QUERIES: Dtypes = Dtypes::E4m3;

    fn evidence(_: &Problem, _: Arch) -> Evidence {
        Evidence::checked_on_hopper()
    }

    fn runs_on(arch: Arch) -> Result<()> {
        let remedy = "convert Q, K and V to bf16 or f16, which the families of this arch compute";
        match arch {
            Arch::Sm(sm) if sm.number >= 89 => Ok(()),
            _ => Err(Error::unsupported("family", Self::NAME, "needs sm_89 or newer (mma.sync on e4m3)", remedy)),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        problem.validate()?;
        if problem.program.is_some() {
            let limit = "no score program: forward/sm90_fp8 alone computes them of e4m3";
            return Err(Error::unsupported("family", Self::NAME, limit, "convert Q, K and V to bf16 or f16"));
        }
        for (field, d) in [("head_dim_qk", problem.head_dim_qk), ("head_dim_v", problem.head_dim_v)] {
            if !d.is_multiple_of(HEAD_DIM_STEP) {
                let limit = format!("{} takes multiples of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to 256", Self::NAME);
                return Err(Error::unsupported(field, d, limit, "pad the rows with zeros to the next such length"));
            }
        }
        Ok(())
    }

    fn unmet(constraint: Constraint) -> Option<&'static str> {
        match constraint {
            Constraint::Weights => Some("it does not write the attention weights"),
            Constraint::Unaligned => Some(
                "it reads 16 bytes at once, and a row of these tensors starts elsewhere: align addresses and strides \
                 to 16 bytes",
            ),
            Constraint::Strided | Constraint::LooseBiases => None,
        }
    }

    fn default_for(problem: &Problem, _: Arch, bucket: &ShapeBucket) -> Self {
        Self::default_for(problem, bucket)
    }

    fn space(problem: &Problem, _: Arch) -> Vec<Self> {
        Self::space(problem)
    }

    fn validate(&self, _: &Problem, _: Arch) -> Result<()> {
        self.check()
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
