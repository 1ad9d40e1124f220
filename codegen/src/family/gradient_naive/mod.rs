//! `gradient/naive`: the gradient of what a score program reads, in plain fp32 CUDA: the oracle on the GPU, and the
//! exact path for f32.
//!
//! Its schedule is fixed on purpose: an oracle should not change under tuning.

use crate::abi::ArgsLayout;
use crate::family::fields::schedule;
use crate::family::program_length::{self, MostOperations};
use crate::family::{KernelFamily, Purpose};
use crate::launch::{LaunchPlan, Stage, StageEntry, StageRole};
use crate::traffic::Walk;
use crate::{Arch, Constraint, Error, Op, Problem, Resources, Result, Shape, ShapeBucket, SmArch};

/// Operations of a score program above which a kernel compiles for over a minute: as `backward/naive`'s, as the
/// derivatives are computed beside the value.
const LONGEST_PROGRAM: usize = 1600;

/// Threads that share a row of a tile.
const ACROSS: u32 = 16;

/// Zeros in the partial sums.
pub(super) const CLEAR: StageEntry = StageEntry { suffix: "_clear", role: StageRole::Main };
/// Partial sums over places.
pub(super) const PLACES: StageEntry = StageEntry { suffix: "_places", role: StageRole::Main };

/// Thread blocks that a stage has at most: each walks over units until there are no more, so that the tensor, which
/// a plan does not know, may ask for any number of these.
const MOST_BLOCKS: [u32; 3] = [256, 2048, 256];

schedule! {
    /// Tile of the plain CUDA kernel.
    pub struct GradientNaiveSchedule {
        /// Query rows that a block looks at together.
        pub block_q: u32 => code, number("q");
        /// Keys that a block looks at together.
        pub block_kv: u32 => code, number("kv");
        /// Threads of one block.
        pub threads: u32 => code, number("t");
    }
}

impl GradientNaiveSchedule {
    /// The only choice: the larger of two tiles where that fits the arch's shared memory.
    pub fn default_for(problem: &Problem, sm: SmArch) -> Self {
        let tile = |rows| Self { block_q: rows, block_kv: rows, threads: 256 };
        let large = tile(32);
        if large.smem_bytes(problem) <= sm.limits().smem_per_block { large } else { tile(16) }
    }

    /// Dynamic shared memory: a tile of queries, one of keys, what a tile adds with its places, and what each query
    /// has.
    pub fn smem_bytes(&self, problem: &Problem) -> u32 {
        let numbers = if problem.reaches_far() { 3 } else { 2 };
        let pitch = problem.head_dim_qk.max(problem.head_dim_v) | 1;
        4 * (2 * self.block_q * pitch + 2 * self.block_q * self.block_kv + numbers * self.block_q)
    }
}

/// The three stages, for as many thread blocks as there are tiles, up to a bound.
pub(super) fn stages(shape: &Shape, [block_q, block_kv]: [u32; 2], threads: u32, smem_bytes: u32) -> LaunchPlan {
    // With the sink, which comes behind the last keys.
    let tiles =
        [shape.batch, shape.heads, shape.q_len.div_ceil(block_q), shape.kv_len.div_ceil(block_kv).saturating_add(1)];
    let tiles = tiles.into_iter().fold(1u32, u32::saturating_mul).max(1);
    let stages = [(CLEAR, 0), (PLACES, smem_bytes), (StageEntry::MAIN, 0)].into_iter().zip(MOST_BLOCKS);
    LaunchPlan::new(stages.map(|((entry, smem), most)| Stage::of(entry, tiles.min(most), threads, smem)), [], None)
}

impl KernelFamily for GradientNaiveSchedule {
    const NAME: &'static str = "gradient/naive";
    const TEMPLATE: &'static str = "gradient/naive.cu";
    const OP: Op = Op::Gradient;
    const PURPOSE: Purpose = Purpose::Plain;
    const ARGS: ArgsLayout = ArgsLayout::GRADIENT;

    fn notes(_: &Problem) -> Option<&'static str> {
        Some("gradient/naive is the plain fp32 kernel: exact, the same bytes in every run, and slow")
    }

    fn runs_on(arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        match arch {
            Arch::Cpu(_) => no("runs on CUDA devices only", "use gradient/cpu"),
            Arch::Sm(sm) if sm.number < 75 => no("needs sm_75 or newer", "use a newer GPU"),
            Arch::Sm(_) => Ok(()),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        let remedy = "put tables into side tensors, or compute on the cpu";
        program_length::check(Self::NAME, problem, MostOperations::Together(LONGEST_PROGRAM), remedy)
    }

    fn unmet(_: Constraint) -> Option<&'static str> {
        None
    }

    fn default_for(problem: &Problem, arch: Arch, _: &ShapeBucket) -> Self {
        match arch {
            Arch::Sm(sm) => Self::default_for(problem, sm),
            Arch::Cpu(_) => Self { block_q: 16, block_kv: 16, threads: 256 },
        }
    }

    fn space(problem: &Problem, arch: Arch) -> Vec<Self> {
        match arch {
            Arch::Sm(sm) => vec![Self::default_for(problem, sm)],
            Arch::Cpu(_) => Vec::new(),
        }
    }

    fn validate(&self, _: &Problem, _: Arch) -> Result<()> {
        let down = self.threads / ACROSS;
        let fits = |rows: u32| rows > 0 && rows.is_multiple_of(down.max(1)) && rows.is_multiple_of(ACROSS);
        if self.threads != 256 || !fits(self.block_q) || self.block_q != self.block_kv {
            let limit = "square tiles of a multiple of 16 rows, and 256 threads";
            return Err(Error::unsupported("block_q", self.block_q, limit, "use the default schedule"));
        }
        Ok(())
    }

    fn resources(&self, problem: &Problem) -> Resources {
        Resources { threads: self.threads, smem_bytes: self.smem_bytes(problem), registers: 32 }
    }

    fn entries(&self, _: &Problem) -> &'static [StageEntry] {
        &[CLEAR, PLACES, StageEntry::MAIN]
    }

    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        Ok(stages(shape, [self.block_q, self.block_kv], self.threads, self.smem_bytes(problem)))
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(self.block_q, self.block_kv, shape)
    }
}
