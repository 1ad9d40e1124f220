//! `backward/cpu`: dQ, dK and dV in C for the host processor.
//!
//! Seven products and no shared sums: tiles of keys recompute the scores for dK and dV, tiles of queries for dQ. So
//! tiles need nothing of each other, and the same bytes come out whichever thread takes which.

use crate::abi::ArgsLayout;
use crate::family::fields::schedule;
use crate::family::forward_cpu::isa_of;
use crate::family::{KernelFamily, Purpose};
use crate::launch::LaunchPlan;
use crate::traffic::Walk;
use crate::{Arch, Constraint, CpuIsa, Error, Op, Problem, Resources, Result, Shape, ShapeBucket};

schedule! {
    /// How the host processor computes the gradients of one problem.
    pub struct BackwardCpuSchedule {
        /// The instructions that the kernel is written for; at most what the arch has. Products are of floats.
        pub isa: CpuIsa => code, with(|s: &Self| s.isa.name().to_owned());
        /// Query rows of a block.
        pub block_q: u32 => code, number("q");
        /// Keys of a block.
        pub block_kv: u32 => code, number("kv");
    }
}

impl BackwardCpuSchedule {
    /// Blocks of 64 rows: at head dim 128 what a thread works in is 360 KiB, which second-level caches hold.
    fn only(arch: Arch) -> Self {
        Self { isa: isa_of(arch).min(CpuIsa::Avx512), block_q: 64, block_kv: 64 }
    }
}

impl KernelFamily for BackwardCpuSchedule {
    const NAME: &'static str = "backward/cpu";
    const TEMPLATE: &'static str = "backward/cpu.c";
    const OP: Op = Op::Backward;
    const PURPOSE: Purpose = Purpose::Plain;
    const ARGS: ArgsLayout = ArgsLayout::BACKWARD;
    const PACKED: bool = true;

    fn runs_on(arch: Arch) -> Result<()> {
        match arch {
            Arch::Cpu(_) => Ok(()),
            Arch::Sm(_) => Err(Error::unsupported("family", Self::NAME, "runs on cpu only", "use a CUDA family")),
        }
    }

    fn supports(_: &Problem, _: Arch) -> Result<()> {
        Ok(())
    }

    fn unmet(_: Constraint) -> Option<&'static str> {
        None
    }

    fn default_for(_: &Problem, arch: Arch, _: &ShapeBucket) -> Self {
        Self::only(arch)
    }

    /// Blocks whose memory is from a thirtieth of the default's, for few rows or small caches, to four times that.
    fn space(_: &Problem, arch: Arch) -> Vec<Self> {
        let blocks = [16, 32, 64, 128];
        let all = blocks.into_iter().flat_map(|block_q| blocks.map(|block_kv| (block_q, block_kv)));
        all.map(|(block_q, block_kv)| Self { block_q, block_kv, ..Self::only(arch) }).collect()
    }

    fn validate(&self, _: &Problem, arch: Arch) -> Result<()> {
        let bad = |field: &'static str, value: &dyn ToString, limit: String| {
            Err(Error::unsupported(field, value.to_string(), limit, "use the default schedule"))
        };
        if self.isa > isa_of(arch).min(CpuIsa::Avx512) {
            return bad("isa", &self.isa.name(), "at most what the arch has, and at most avx512".to_owned());
        }
        let lanes = self.isa.lanes();
        if !(1..=1024).contains(&self.block_q) || !self.block_q.is_multiple_of(lanes) {
            return bad("block_q", &self.block_q, format!("a multiple of {lanes} rows, up to 1024"));
        }
        if !(1..=1024).contains(&self.block_kv) {
            return bad("block_kv", &self.block_kv, "1 to 1024 keys".to_owned());
        }
        Ok(())
    }

    fn resources(&self, _: &Problem) -> Resources {
        Resources::default()
    }

    /// No stage: the kernel counts its own tiles, and the device's threads share them.
    fn plan(&self, _: &Problem, _: &Shape) -> Result<LaunchPlan> {
        Ok(LaunchPlan::new([], [], None))
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(self.block_q, self.block_kv, shape)
    }
}
