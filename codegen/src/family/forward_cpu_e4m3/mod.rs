//! `forward/cpu_e4m3`: e4m3 on the host processor, for tests and not for speed: the numbers that a GPU computes can be
//! had where there is none.
//!
//! A family of its own, so that `forward/cpu` has one type of operands and of O.

use crate::family::fields::schedule;
use crate::family::{Dtypes, KernelFamily, Purpose};
use crate::launch::LaunchPlan;
use crate::traffic::Walk;
use crate::{Arch, Constraint, Error, Op, Problem, Resources, Result, Shape, ShapeBucket};

schedule! {
    /// How rows are shared out.
    pub struct CpuE4m3Schedule {
        /// Query rows of one work item.
        pub block_q: u32 => code, number("q");
    }
}

impl KernelFamily for CpuE4m3Schedule {
    const NAME: &'static str = "forward/cpu_e4m3";
    const TEMPLATE: &'static str = "forward/cpu_e4m3.c";
    const OP: Op = Op::Forward;
    const PURPOSE: Purpose = Purpose::Plain;
    const QUERIES: Dtypes = Dtypes::E4m3;

    fn notes(_: &Problem) -> Option<&'static str> {
        Some("forward/cpu_e4m3 is for tests: it converts each element where it is read, and is slow")
    }

    fn runs_on(arch: Arch) -> Result<()> {
        match arch {
            Arch::Cpu(_) => Ok(()),
            Arch::Sm(_) => {
                Err(Error::unsupported("family", Self::NAME, "runs on cpu only", "use forward/sm90_fp8 on sm_90a"))
            }
        }
    }

    fn supports(_: &Problem, _: Arch) -> Result<()> {
        Ok(())
    }

    fn unmet(_: Constraint) -> Option<&'static str> {
        None
    }

    fn default_for(_: &Problem, _: Arch, _: &ShapeBucket) -> Self {
        Self { block_q: 16 }
    }

    fn space(_: &Problem, _: Arch) -> Vec<Self> {
        vec![Self { block_q: 16 }]
    }

    fn validate(&self, _: &Problem, _: Arch) -> Result<()> {
        if !(1..=256).contains(&self.block_q) {
            return Err(Error::unsupported("block_q", self.block_q, "1 to 256 rows of a work item", "use 16"));
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
        Walk::plain(self.block_q, 1, shape)
    }
}
