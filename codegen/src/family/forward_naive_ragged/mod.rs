//! `forward/naive_ragged`: plain fp32 CUDA for sequences of different lengths over a KV store, the oracle of such
//! batches on the GPU and their exact path for f32.
//!
//! Its schedule is fixed on purpose: an oracle should not change under tuning.

use super::account::{RaggedAccount, Usual};
use super::fields::schedule;
use super::program_length::{self, MostOperations};
use super::{Dtypes, KernelFamily, Purpose};
use crate::abi::ArgsLayout;
use crate::launch::{LaunchPlan, Stage, StageEntry, tiles};
use crate::traffic::Walk;
use crate::{Arch, Constraint, Error, Op, Problem, Resources, Result, Shape, ShapeBucket};

/// Operations of a score program, mask and change together: those of `forward/naive`.
const LONGEST_PROGRAM: usize = 5000;
/// Shared memory of a key: where its rows of K and V begin, and their scales.
const KEY_BYTES: u32 = 2 * 8 + 2 * 4;

schedule! {
    /// Tile of the plain CUDA kernel for ragged batches.
    pub struct NaiveRaggedSchedule {
        /// Query rows of one thread block.
        pub block_q: u32 => code, number("q");
        /// Keys that a block looks at together.
        pub block_kv: u32 => code, number("kv");
        /// Threads of one block.
        pub threads: u32 => code, number("t");
    }
}

impl NaiveRaggedSchedule {
    /// The only choice: the largest of three tiles that fits the arch's shared memory.
    fn choice(problem: &Problem, most: u32) -> Self {
        let tile = |block_q, block_kv| Self { block_q, block_kv, threads: 256 };
        let all = [tile(64, 64), tile(32, 32)];
        all.into_iter().find(|s| s.smem_bytes(problem) <= most).unwrap_or(tile(16, 32))
    }

    /// Dynamic shared memory: where the keys of a block lie, and tiles of Q, of K or V, and of P, in fp32 with odd
    /// pitches.
    fn smem_bytes(&self, problem: &Problem) -> u32 {
        let q = self.block_q * (problem.head_dim_qk | 1);
        let kv = self.block_kv * (problem.head_dim_qk.max(problem.head_dim_v) | 1);
        KEY_BYTES * self.block_kv + 4 * (q + kv + self.block_q * (self.block_kv | 1))
    }
}

impl KernelFamily for NaiveRaggedSchedule {
    const NAME: &'static str = "forward/naive_ragged";
    const TEMPLATE: &'static str = "forward/naive_ragged.cu";
    const OP: Op = Op::Forward;
    const PURPOSE: Purpose = Purpose::Plain;
    const ARGS: ArgsLayout = ArgsLayout::RAGGED;
    const RAGGED: bool = true;
    const QUERIES: Dtypes = Dtypes::Any;

    fn notes(_: &Problem) -> Option<&'static str> {
        Some("forward/naive_ragged is the plain fp32 kernel: exact, and slower than the tensor-core families")
    }

    fn runs_on(arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        match arch {
            Arch::Cpu(_) => no("runs on CUDA devices only", "use a family for the host, forward/cpu_*"),
            Arch::Sm(sm) if sm.number < 75 => no("needs sm_75 or newer", "use a newer GPU"),
            Arch::Sm(_) => Ok(()),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        let remedy = "put tables into side tensors, or compute on the cpu";
        program_length::check(Self::NAME, problem, MostOperations::Together(LONGEST_PROGRAM), remedy)
    }

    // Elements are read one by one, wherever they lie, and no call of a ragged batch asks for the weights.
    fn unmet(_: Constraint) -> Option<&'static str> {
        None
    }

    fn default_for(problem: &Problem, arch: Arch, _: &ShapeBucket) -> Self {
        match arch {
            Arch::Sm(sm) => Self::choice(problem, sm.limits().smem_per_block),
            Arch::Cpu(_) => Self { block_q: 16, block_kv: 32, threads: 256 },
        }
    }

    fn space(problem: &Problem, arch: Arch) -> Vec<Self> {
        match arch {
            Arch::Sm(sm) => vec![Self::choice(problem, sm.limits().smem_per_block)],
            Arch::Cpu(_) => Vec::new(),
        }
    }

    fn validate(&self, _: &Problem, _: Arch) -> Result<()> {
        Ok(())
    }

    fn resources(&self, problem: &Problem) -> Resources {
        Resources { threads: self.threads, smem_bytes: self.smem_bytes(problem), registers: 32 }
    }

    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let grid = tiles(shape.q_len, self.block_q, shape.heads, shape.batch)?;
        Ok(LaunchPlan::new([Stage::of(StageEntry::MAIN, grid, self.threads, self.smem_bytes(problem))], [], None))
    }

    fn ragged_account(&self, usual: &Usual<'_>) -> Option<RaggedAccount> {
        Some(RaggedAccount {
            split: format!("none: one thread block has all keys of {} query rows of a head", self.block_q),
            merge: "none: a row's keys are summed in one place".to_owned(),
            pages: format!("elements one by one, {} keys a block: {}", self.block_kv, usual.index()),
        })
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(self.block_q, self.block_kv, shape)
    }
}
