//! `forward/naive`: plain fp32 CUDA on tiles in shared memory, the oracle on the GPU, and f32 in precision `exact`.
//!
//! Its schedule is fixed on purpose: an oracle should not change under tuning.

use super::fields::schedule;
use super::program_length::{self, MostOperations};
use super::{KernelFamily, Purpose};
use crate::launch::{LaunchPlan, Stage, StageEntry, tiles};
use crate::traffic::Walk;
use crate::{Arch, Constraint, DType, Error, Op, Problem, Resources, Result, Shape, ShapeBucket, SmArch};

/// Operations of a score program, mask and change together, above which a kernel compiles for over a minute.
const LONGEST_PROGRAM: usize = 5000;

schedule! {
    /// Tile of the plain CUDA kernel.
    pub struct NaiveSchedule {
        /// Query rows of one thread block.
        pub block_q: u32 => code, number("q");
        /// Keys that a block looks at together.
        pub block_kv: u32 => code, number("kv");
        /// Threads of one block.
        pub threads: u32 => code, number("t");
    }
}

impl NaiveSchedule {
    /// The only choice: the largest of three tiles that fits the arch's shared memory.
    pub fn default_for(problem: &Problem, sm: SmArch) -> Self {
        let tile = |block_q, block_kv| Self { block_q, block_kv, threads: 256 };
        [tile(64, 64), tile(32, 32)]
            .into_iter()
            .find(|s| s.smem_bytes(problem) <= sm.limits().smem_per_block)
            .unwrap_or(tile(16, 32))
    }

    /// Dynamic shared memory: tiles of Q, of K or V, and of P, in fp32 with odd pitches.
    pub fn smem_bytes(&self, problem: &Problem) -> u32 {
        let q = self.block_q * (problem.head_dim_qk | 1);
        let kv = self.block_kv * (problem.head_dim_qk.max(problem.head_dim_v) | 1);
        4 * (q + kv + self.block_q * (self.block_kv | 1))
    }
}

impl KernelFamily for NaiveSchedule {
    const NAME: &'static str = "forward/naive";
    const TEMPLATE: &'static str = "forward/naive.cu";
    const OP: Op = Op::Forward;
    const PURPOSE: Purpose = Purpose::Plain;

    fn notes(problem: &Problem) -> Option<&'static str> {
        Some(match problem.dtype {
            DType::F32 => {
                "f32 on CUDA runs on forward/naive: plain fp32 arithmetic, exact to f32, slower than the tensor-core \
                 families; f16 or bf16 inputs use those, and f32 in precision tf32x3 or tf32, by name"
            }
            _ => "forward/naive is the plain fp32 kernel: exact, and slower than the tensor-core families",
        })
    }

    fn runs_on(arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        match arch {
            Arch::Cpu(_) => no("runs on CUDA devices only", "use forward/cpu"),
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
            Arch::Cpu(_) => Self { block_q: 16, block_kv: 32, threads: 256 },
        }
    }

    fn space(problem: &Problem, arch: Arch) -> Vec<Self> {
        match arch {
            Arch::Sm(sm) => vec![Self::default_for(problem, sm)],
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

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(self.block_q, self.block_kv, shape)
    }
}
