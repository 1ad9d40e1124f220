//! `backward/naive`: gradients in plain fp32 CUDA on tiles in shared memory, the oracle on the GPU and the exact path
//! for f32.
//!
//! Its schedule is fixed on purpose: an oracle should not change under tuning.

use crate::abi::ArgsLayout;
use crate::family::fields::schedule;
use crate::family::program_length::{self, MostOperations};
use crate::family::{KernelFamily, Purpose};
use crate::launch::{LaunchPlan, Stage, StageEntry};
use crate::traffic::Walk;
use crate::{Arch, Constraint, Error, Op, Problem, Resources, Result, Shape, ShapeBucket, SmArch};

/// Operations of a score program above which a kernel compiles for over a minute: a third of `forward/naive`'s, as the
/// derivative is computed beside the value.
const LONGEST_PROGRAM: usize = 1600;

/// Threads that share a row of a tile.
const ACROSS: u32 = 16;

schedule! {
    /// Tile of the plain CUDA kernel.
    pub struct BackwardNaiveSchedule {
        /// Query rows that a block looks at together.
        pub block_q: u32 => code, number("q");
        /// Keys that a block looks at together.
        pub block_kv: u32 => code, number("kv");
        /// Threads of one block.
        pub threads: u32 => code, number("t");
    }
}

impl BackwardNaiveSchedule {
    /// The only choice: the larger of two tiles where that fits the arch's shared memory. The smaller takes 52 KiB at
    /// head dim 256, and sm_75 has 64.
    pub fn default_for(problem: &Problem, sm: SmArch) -> Self {
        let tile = |rows| Self { block_q: rows, block_kv: rows, threads: 256 };
        let large = tile(32);
        if large.smem_bytes(problem) <= sm.limits().smem_per_block { large } else { tile(16) }
    }

    /// Dynamic shared memory: two tiles that stay, one that changes, P and dS, and what each query has; in fp32 with
    /// odd pitches.
    pub fn smem_bytes(&self, problem: &Problem) -> u32 {
        let rows = self.block_q.max(self.block_kv);
        let numbers = if problem.reaches_far() { 3 } else { 2 };
        let pitch = problem.head_dim_qk.max(problem.head_dim_v) | 1;
        4 * (3 * rows * pitch + 2 * self.block_q * (self.block_kv | 1) + numbers * self.block_q)
    }
}

impl KernelFamily for BackwardNaiveSchedule {
    const NAME: &'static str = "backward/naive";
    const TEMPLATE: &'static str = "backward/naive.cu";
    const OP: Op = Op::Backward;
    const PURPOSE: Purpose = Purpose::Plain;
    const ARGS: ArgsLayout = ArgsLayout::BACKWARD;
    const PACKED: bool = true;

    fn notes(_: &Problem) -> Option<&'static str> {
        Some("backward/naive is the plain fp32 kernel: exact, the same bytes in every run, and slow")
    }

    fn runs_on(arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        match arch {
            Arch::Cpu(_) => no("runs on CUDA devices only", "use backward/cpu"),
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

    /// One stage: thread blocks of keys for dK and dV, which have more to do, and behind them those of queries for dQ.
    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let keys = u64::from(shape.kv_len.div_ceil(self.block_kv)) * u64::from(shape.kv_heads);
        let queries = u64::from(shape.q_len.div_ceil(self.block_q)) * u64::from(shape.heads);
        let blocks = (keys + queries) * u64::from(shape.batch);
        let grid = i32::try_from(blocks).map_err(|_| {
            let limit = format!("at most 2^31 - 1 blocks of {} rows in one launch", self.block_q);
            Error::unsupported("batch * (heads * q_len + kv_heads * kv_len)", blocks, limit, "split the batch")
        })?;
        let stage = Stage::of(StageEntry::MAIN, grid as u32, self.threads, self.smem_bytes(problem));
        Ok(LaunchPlan::new([stage], [], None))
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(self.block_q, self.block_kv, shape)
    }
}
