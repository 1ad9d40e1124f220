//! `append/cuda`: new rows of K and V into a KV store, on any GPU from sm_75 on.
//!
//! It moves memory and computes next to nothing, so there is nothing to search: one schedule.

use crate::abi::ArgsLayout;
use crate::family::fields::schedule;
use crate::family::{KernelFamily, Purpose, append_cpu};
use crate::launch::{LaunchPlan, Stage, StageEntry};
use crate::traffic::Walk;
use crate::{Arch, Constraint, Error, KvElement, KvScales, Op, Problem, Resources, Result, Shape, ShapeBucket};

schedule! {
    /// How rows are moved.
    pub struct AppendCudaSchedule {
        /// Threads of one block, 16 bytes of a row each.
        pub threads: u32 => code, number("t");
    }
}

/// Thread blocks of a multiprocessor, of 256 threads with up to 64 registers: all that it holds.
const RESIDENT: u32 = 4;

impl AppendCudaSchedule {
    /// Rows of one head that a block takes at a time.
    fn rows(&self, problem: &Problem) -> u32 {
        let row = problem.head_dim_qk.max(problem.head_dim_v) * problem.dtype.bytes() as u32;
        self.threads / row.div_ceil(16)
    }
}

impl KernelFamily for AppendCudaSchedule {
    const NAME: &'static str = "append/cuda";
    const TEMPLATE: &'static str = "append/cuda.cu";
    const OP: Op = Op::Append;
    const PURPOSE: Purpose = Purpose::Plain;
    const ARGS: ArgsLayout = ArgsLayout::APPEND;
    const RAGGED: bool = true;

    fn runs_on(arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        match arch {
            Arch::Cpu(_) => no("runs on CUDA devices only", "use append/cpu"),
            Arch::Sm(sm) if sm.number < 75 => no("needs sm_75 or newer", "use a newer GPU"),
            Arch::Sm(_) => Ok(()),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        append_cpu::supports(Self::NAME, problem)
    }

    fn unmet(_: Constraint) -> Option<&'static str> {
        None
    }

    fn default_for(_: &Problem, _: Arch, _: &ShapeBucket) -> Self {
        Self { threads: 256 }
    }

    fn space(_: &Problem, _: Arch) -> Vec<Self> {
        vec![Self { threads: 256 }]
    }

    fn validate(&self, problem: &Problem, _: Arch) -> Result<()> {
        if !self.threads.is_multiple_of(32) || self.rows(problem) == 0 {
            let limit = "whole warps, and threads enough for a row";
            return Err(Error::unsupported("threads", self.threads, limit, "use 256 threads"));
        }
        Ok(())
    }

    fn resources(&self, problem: &Problem) -> Resources {
        let per_token =
            problem.kv.store().is_some_and(|s| s.scales == KvScales::PerToken && s.element != KvElement::Same);
        // What each thread found of its part of a row, where scales are those of rows.
        let smem_bytes = if per_token { 4 * self.threads } else { 0 };
        Resources { threads: self.threads, smem_bytes, registers: 24 }
    }

    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let tokens = u64::from(shape.batch) * u64::from(shape.q_len);
        let rows = tokens * (2 * u64::from(shape.kv_heads) + u64::from(shape.heads));
        // Rows are counted in 32 bits, beyond the last one by those of a step of all blocks.
        if rows > 1 << 31 {
            return Err(Error::unsupported(
                "rows",
                rows,
                "at most 2^31 rows of heads of K, V and Q in one launch",
                "append in several calls",
            ));
        }
        let grid = rows.div_ceil(u64::from(self.rows(problem))) as u32;
        let smem_bytes = self.resources(problem).smem_bytes;
        let stage = Stage::of(StageEntry::MAIN, grid, self.threads, smem_bytes).starting_early();
        Ok(LaunchPlan::new([Stage { resident: Some(RESIDENT), ..stage }], [], None))
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(1, 1, shape)
    }
}
