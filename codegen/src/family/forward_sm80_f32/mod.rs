//! `forward/sm80_f32`: f32 by TF32 products of mma.sync, three to a product or one, with cp.async.

use super::fields::{Constants, schedule};
use super::forward_sm80::LONGEST_PROGRAM;
use super::program_length::{self, MostOperations};
use super::{KernelFamily, TileOrder};
use crate::launch::{LaunchPlan, Stage, StageEntry, tiles};
use crate::traffic::Walk;
use crate::{Arch, Constraint, DType, Error, Op, Precision, Problem, Resources, Result, Shape, ShapeBucket, SmArch};

schedule! {
    /// How an mma.sync GPU computes a problem of f32.
    pub struct Sm80F32Schedule {
        /// Warps of one thread block; each owns `rows_per_warp` query rows.
        pub warps: u32 => code, with(|s: &Self| format!("w{}x{}", s.warps, s.rows_per_warp));
        /// Query rows of one warp: 16 or 32. With 32, one K or V fragment that is read and split feeds two products.
        pub rows_per_warp: u32 => code, silent;
        /// Keys of one step of the main loop.
        pub block_kv: u32 => code, number("kv");
        /// Buffers of K and V each in shared memory: 1 loads K of the next step while V of this one is used, 2 and more
        /// load whole steps ahead.
        pub stages: u32 => code, number("s");
        /// Thread blocks that must fit one multiprocessor: caps the registers of a thread.
        pub blocks_per_sm: u32 => code, number("b");
        /// Blocks that need a mask run in a loop of their own.
        pub masked_loop: bool => code, either("two", "one");
        /// Order of the tiles.
        pub order: TileOrder => code, word;
    }
}

impl Sm80F32Schedule {
    /// Query rows of one thread block.
    pub const fn block_q(&self) -> u32 {
        self.warps * self.rows_per_warp
    }

    /// Threads of one block.
    pub const fn threads(&self) -> u32 {
        self.warps * 32
    }

    /// The schedule that serves while nothing is tuned: the first of a few tiles, the largest first, whose registers
    /// and shared memory suffice.
    pub fn default_for(problem: &Problem, sm: SmArch, bucket: &ShapeBucket) -> Self {
        let d = problem.head_dim_qk.max(problem.head_dim_v);
        // What changes scores or reads data needs registers.
        let busy = problem.program.is_some();
        let one = problem.precision == Precision::Tf32;
        let tiles: &[[u32; 4]] = match d {
            0..=64 if one => &[[4, 32, 64, 2], [4, 16, 64, 2]],
            0..=64 if busy => &[[4, 16, 64, 2]],
            0..=64 => &[[4, 32, 32, 2], [4, 16, 64, 2]],
            65..=96 => &[[8, 16, 64, 2], [4, 16, 64, 1], [4, 16, 32, 1]],
            97..=128 => &[[8, 16, 32, 2], [4, 16, 64, 1], [4, 16, 32, 1]],
            _ => &[[8, 16, 32, 1], [4, 16, 32, 1], [4, 16, 16, 1]],
        };
        let order = if problem.mask.right { TileOrder::BlockMajor } else { TileOrder::HeadMajor };
        let schedule = |[warps, rows_per_warp, block_kv, stages]: [u32; 4]| {
            // Short query sequences: rows beyond q_len are wasted work.
            let short = bucket.q_len <= 64;
            let (warps, rows_per_warp) = if short { (warps.min(4), 16) } else { (warps, rows_per_warp) };
            Self { warps, rows_per_warp, block_kv, stages, blocks_per_sm: 1, masked_loop: false, order }
        };
        let mut all = tiles.iter().copied().map(schedule);
        let fits = |s: &Self| s.smem_bytes(problem) <= sm.limits().smem_per_block;
        all.clone().find(fits).or(all.next_back()).unwrap_or_default()
    }

    /// Dynamic shared memory: tiles of Q, K and V in fp32, rows padded by 16 bytes.
    pub fn smem_bytes(&self, problem: &Problem) -> u32 {
        let row = |dim: u32| 4 * dim + 16;
        let (qk, v) = (row(problem.head_dim_qk), row(problem.head_dim_v));
        self.block_q() * qk + self.stages * self.block_kv * (qk + v)
    }

    fn registers(&self, problem: &Problem) -> u32 {
        let m_tiles = self.rows_per_warp / 16;
        let o = m_tiles * problem.head_dim_v / 2;
        // P and what its TF32 parts leave, and the sums of four tiles of columns.
        let products = problem.precision.products();
        let p = m_tiles * self.block_kv / 2 * if products == 3 { 2 } else { 1 };
        let sums = m_tiles * 16 * if products == 3 { 2 } else { 1 };
        o + p + sums + 4 * m_tiles + 14
    }
}

impl KernelFamily for Sm80F32Schedule {
    const NAME: &'static str = "forward/sm80_f32";
    const TEMPLATE: &'static str = "forward/sm80_f32.cu";
    const OP: Op = Op::Forward;

    fn notes(problem: &Problem) -> Option<&'static str> {
        Some(match problem.precision {
            Precision::Tf32 => {
                "f32 by single TF32 products, as asked for: operands keep 11 bits; precision tf32x3 and exact keep f32's \
                 error"
            }
            _ => {
                "f32 by three TF32 products to one, the default where a GPU has them: within twice the error of \
                 unfused f32; precision exact is by fp32 products"
            }
        })
    }

    fn runs_on(arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        match arch {
            Arch::Cpu(_) => no("runs on CUDA devices only", "use forward/cpu"),
            Arch::Sm(sm) if sm.number < 80 => no("needs sm_80 or newer (cp.async, TF32)", "use forward/naive"),
            Arch::Sm(_) => Ok(()),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        if problem.dtype != DType::F32 {
            return no("computes f32 only", "use forward/sm80");
        }
        if problem.precision == Precision::Exact {
            return no("computes the precisions tf32x3 and tf32", "forward/naive is the exact f32 path");
        }
        problem.check_vectors(Self::NAME)?;
        let most = MostOperations::Together(LONGEST_PROGRAM);
        program_length::check(Self::NAME, problem, most, "use forward/naive")
    }

    fn unmet(constraint: Constraint) -> Option<&'static str> {
        super::Sm80Schedule::unmet(constraint)
    }

    fn default_for(problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Self {
        Self::default_for(problem, arch.gpu(), bucket)
    }

    /// `blocks_per_sm` varies only where it changes the register cap of a thread.
    fn space(problem: &Problem, _: Arch) -> Vec<Self> {
        let orders: &[TileOrder] =
            if problem.mask.any() { &[TileOrder::BlockMajor, TileOrder::HeadMajor] } else { &[TileOrder::HeadMajor] };
        let warp_splits =
            [(2, 16, 1), (4, 16, 1), (4, 16, 2), (4, 16, 3), (4, 32, 1), (8, 16, 1), (8, 16, 2), (8, 32, 1)];
        let mut space = Vec::new();
        for (warps, rows_per_warp, blocks_per_sm) in warp_splits {
            for block_kv in [16, 32, 48, 64, 96, 128] {
                for stages in [1, 2, 3] {
                    for masked_loop in [false, true] {
                        let schedule = |&order: &TileOrder| Self {
                            warps,
                            rows_per_warp,
                            block_kv,
                            stages,
                            blocks_per_sm,
                            masked_loop,
                            order,
                        };
                        space.extend(orders.iter().map(schedule));
                    }
                }
            }
        }
        space
    }

    fn validate(&self, _: &Problem, _: Arch) -> Result<()> {
        let bad = |field: &'static str, value: u32, limit: &str| {
            Err(Error::unsupported(field, value, limit, "use a schedule from the searched space"))
        };
        if !(1..=16).contains(&self.warps) {
            return bad("warps", self.warps, "1 to 16 warps");
        }
        if ![16, 32].contains(&self.rows_per_warp) {
            return bad("rows_per_warp", self.rows_per_warp, "16 or 32 rows");
        }
        if self.block_kv == 0 || !self.block_kv.is_multiple_of(16) || self.block_kv > 128 {
            return bad("block_kv", self.block_kv, "a multiple of 16 up to 128");
        }
        if !(1..=4).contains(&self.stages) {
            return bad("stages", self.stages, "1 to 4 stages");
        }
        if !(1..=8).contains(&self.blocks_per_sm) {
            return bad("blocks_per_sm", self.blocks_per_sm, "1 to 8 blocks");
        }
        Ok(())
    }

    fn resources(&self, problem: &Problem) -> Resources {
        let (smem_bytes, registers) = (self.smem_bytes(problem), self.registers(problem));
        Resources { threads: self.threads(), smem_bytes, registers }
    }

    fn blocks_per_sm(&self) -> u32 {
        self.blocks_per_sm
    }

    fn constants(&self, problem: &Problem, constants: &mut Constants) {
        constants.insert("products", problem.precision.products().to_string());
    }

    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let grid = tiles(shape.q_len, self.block_q(), shape.heads, shape.batch)?;
        let stage = Stage::of(StageEntry::MAIN, grid, self.threads(), self.smem_bytes(problem));
        Ok(LaunchPlan::new([stage], [], None))
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        let plain = Walk::plain(self.block_q(), self.block_kv, shape);
        match self.order {
            TileOrder::HeadMajor => plain,
            TileOrder::BlockMajor => Walk { together: shape.batch as f64 * shape.kv_heads as f64, ..plain },
        }
    }
}
