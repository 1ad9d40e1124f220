//! `forward/cpu`: C for the host processor.
//!
//! Queries lie along the vector lanes, K and V are broadcast from compact rows; the micro-kernels are register-tiled.

use super::KernelFamily;
use super::fields::{Constants, FieldValue, Place, schedule};
use crate::launch::LaunchPlan;
use crate::traffic::Walk;
use crate::{Arch, Constraint, CpuIsa, DType, Error, Op, Problem, Resources, Result, Shape, ShapeBucket};
use std::num::NonZeroU32;

schedule! {
    /// How the host processor computes one problem.
    ///
    /// Queries lie along the vector lanes in both products, so a register tile is `unroll_q` vectors of queries by
    /// `unroll_kv` keys (or columns of V), and a panel of `unroll_q * lanes` queries goes through the keys together.
    pub struct CpuSchedule {
        /// The instructions that the kernel is written for; at most what the arch has. Newer ones are not always
        /// faster: some processors run the bf16 dot product at half the rate of fp32 multiply-adds.
        pub isa: CpuIsa => code, with(|s: &Self| s.isa.name().to_owned());
        /// Query rows of one work item.
        pub block_q: u32 => code, number("q");
        /// Keys that are multiplied together.
        pub block_kv: u32 => code, number("kv");
        /// Vectors of queries in the register tile.
        pub unroll_q: u32 => code, with(|s: &Self| format!("r{}x{}", s.unroll_q, s.unroll_kv));
        /// Keys (or columns of V) in the register tile.
        pub unroll_kv: u32 => code, silent;
        /// Worker threads; 0 means one per core.
        pub threads: u32 => launch, number_unless(0, "t");
    }
}

impl FieldValue for CpuIsa {
    fn place(&self) -> Place {
        Place::Word(self.name())
    }
    fn render(&self, name: &'static str, constants: &mut Constants) {
        constants.insert(name, self.name().to_owned());
    }
}

/// The instructions that may pay for a dtype on an arch, best guess first.
fn instructions(dtype: DType, arch: CpuIsa) -> &'static [CpuIsa] {
    match (dtype, arch) {
        (DType::Bf16, CpuIsa::Amx) => &[CpuIsa::Amx, CpuIsa::Avx512],
        (DType::Bf16, CpuIsa::Avx512Bf16) => &[CpuIsa::Avx512Bf16, CpuIsa::Avx512],
        (_, CpuIsa::Avx512 | CpuIsa::Avx512Bf16 | CpuIsa::Amx) => &[CpuIsa::Avx512],
        (_, CpuIsa::Avx2) => &[CpuIsa::Avx2],
        (_, CpuIsa::Generic) => &[CpuIsa::Generic],
    }
}

impl CpuSchedule {
    /// The schedule that serves while nothing is tuned.
    pub fn default_for(problem: &Problem, arch: CpuIsa, bucket: &ShapeBucket) -> Self {
        let isa = instructions(problem.dtype, arch)[0];
        let large = problem.head_dim_qk.max(problem.head_dim_v) > 128;
        let (unroll_q, unroll_kv, block_q, block_kv): (u32, u32, u32, u32) = match isa {
            CpuIsa::Generic => (2, 6, 64, 126),
            CpuIsa::Avx2 => (3, 4, 96, 128),
            CpuIsa::Avx512 | CpuIsa::Avx512Bf16 if bucket.kv_len >= 2048 || problem.dtype != DType::F32 => {
                (2, 8, 256, 128)
            }
            CpuIsa::Avx512 | CpuIsa::Avx512Bf16 => (2, 8, 128, 128),
            CpuIsa::Amx => (2, 2, 256, 256),
        };
        let panel = unroll_q * isa.lanes();
        // Fewer queries per item where there are few of them: rows beyond q_len are wasted, and so are idle cores.
        let block_q = block_q.min(bucket.q_len.next_multiple_of(panel));
        let block_kv = if large { block_kv / 2 } else { block_kv };
        Self { isa, block_q, block_kv: block_kv.next_multiple_of(unroll_kv), unroll_q, unroll_kv, threads: 0 }
    }

    /// The schedules worth trying.
    pub fn space(problem: &Problem, arch: CpuIsa) -> Vec<Self> {
        let mut space = Vec::new();
        for &isa in instructions(problem.dtype, arch) {
            let (tiles, panels, keys): (&[(u32, u32)], &[u32], &[u32]) = match isa {
                CpuIsa::Generic => (&[(2, 4), (2, 6), (4, 4)], &[4, 8, 16], &[64, 128]),
                CpuIsa::Avx2 => (&[(2, 4), (2, 6), (3, 4)], &[2, 4, 8], &[64, 128]),
                CpuIsa::Amx => (&[(2, 2)], &[2, 4, 8], &[64, 128, 256, 512]),
                _ => (&[(2, 8), (3, 8), (4, 5), (4, 6)], &[1, 2, 4, 8], &[64, 128, 256]),
            };
            for &(unroll_q, unroll_kv) in tiles {
                for &panel in panels {
                    for &block_kv in keys {
                        space.push(Self {
                            isa,
                            block_q: panel * unroll_q * isa.lanes(),
                            block_kv: block_kv.next_multiple_of(unroll_kv),
                            unroll_q,
                            unroll_kv,
                            threads: 0,
                        });
                    }
                }
            }
        }
        // Waking every core for little work costs more than it brings.
        if let Some(&first) = space.first() {
            space.extend([1, 2, 4, 8].map(|threads| Self { threads, ..first }));
        }
        space.retain(|s| s.validate(problem, arch).is_ok());
        space
    }

    /// Checks the fields against what the template can generate.
    pub fn validate(&self, problem: &Problem, arch: CpuIsa) -> Result<()> {
        let bad = |field: &'static str, value: &dyn ToString, limit: String| {
            Err(Error::unsupported(field, value.to_string(), limit, "use a schedule from the searched space"))
        };
        if self.isa > arch {
            return bad("isa", &self.isa.name(), format!("at most what the arch has, {}", arch.name()));
        }
        let unrolls = 1..=16;
        if !unrolls.contains(&self.unroll_q) {
            return bad("unroll_q", &self.unroll_q, "1 to 16 vectors of queries".into());
        }
        if !unrolls.contains(&self.unroll_kv) {
            return bad("unroll_kv", &self.unroll_kv, "1 to 16 keys".into());
        }
        if self.isa == CpuIsa::Amx && (problem.dtype != DType::Bf16 || (self.unroll_q, self.unroll_kv) != (2, 2)) {
            let limit = "AMX multiplies bf16 in 2 x 2 tiles".into();
            return bad("unroll_q", &format!("{} x {}", self.unroll_q, self.unroll_kv), limit);
        }
        let panel = self.unroll_q * self.isa.lanes();
        if !(1..=4096).contains(&self.block_q) || !self.block_q.is_multiple_of(panel) {
            return bad("block_q", &self.block_q, format!("a multiple of the {panel} queries of a panel, up to 4096"));
        }
        // Pairs of keys share a register with the bf16 dot product; AMX takes 32 at a time.
        let step = match self.isa {
            CpuIsa::Amx => 32,
            CpuIsa::Avx512Bf16 if problem.dtype == DType::Bf16 && !self.unroll_kv.is_multiple_of(2) => {
                2 * self.unroll_kv
            }
            _ => self.unroll_kv,
        };
        if !(1..=4096).contains(&self.block_kv) || !self.block_kv.is_multiple_of(step) {
            return bad("block_kv", &self.block_kv, format!("a multiple of {step} keys, up to 4096"));
        }
        Ok(())
    }
}

/// The instructions of an arch that the family supports.
pub(super) fn isa_of(arch: Arch) -> CpuIsa {
    match arch {
        Arch::Cpu(isa) => isa,
        Arch::Sm(_) => CpuIsa::Generic,
    }
}

impl KernelFamily for CpuSchedule {
    const NAME: &'static str = "forward/cpu";
    const TEMPLATE: &'static str = "forward/cpu.c";
    const OP: Op = Op::Forward;

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

    fn default_for(problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Self {
        Self::default_for(problem, isa_of(arch), bucket)
    }

    fn space(problem: &Problem, arch: Arch) -> Vec<Self> {
        Self::space(problem, isa_of(arch))
    }

    fn validate(&self, problem: &Problem, arch: Arch) -> Result<()> {
        self.validate(problem, isa_of(arch))
    }

    fn resources(&self, _: &Problem) -> Resources {
        Resources::default()
    }

    fn host_threads(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(self.threads)
    }

    /// No stage: the kernel counts its own tiles, and the device's threads share them.
    fn plan(&self, _: &Problem, _: &Shape) -> Result<LaunchPlan> {
        Ok(LaunchPlan::new([], [], None))
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(self.block_q, self.block_kv, shape)
    }
}
