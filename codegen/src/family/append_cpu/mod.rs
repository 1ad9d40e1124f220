//! `append/cpu`: new rows of K and V into a KV store, in C.

use crate::abi::ArgsLayout;
use crate::family::fields::schedule;
use crate::family::{KernelFamily, Purpose};
use crate::launch::LaunchPlan;
use crate::traffic::Walk;
use crate::{Arch, Constraint, Error, Op, Problem, Resources, Result, Shape, ShapeBucket};

schedule! {
    /// How rows are moved.
    pub struct AppendCpuSchedule {
        /// Tokens of one work item, with all of their heads.
        pub tokens: u32 => code, number("n");
    }
}

/// What any append kernel computes.
pub(super) fn supports(family: &'static str, problem: &Problem) -> Result<()> {
    if problem.mask.any() || problem.program.is_some() {
        let limit = format!("{family} appends rows, which have no scores");
        return Err(Error::unsupported("mask", problem.mask, limit, "leave mask and score program out"));
    }
    Ok(())
}

impl KernelFamily for AppendCpuSchedule {
    const NAME: &'static str = "append/cpu";
    const TEMPLATE: &'static str = "append/cpu.c";
    const OP: Op = Op::Append;
    const PURPOSE: Purpose = Purpose::Plain;
    const ARGS: ArgsLayout = ArgsLayout::APPEND;
    const RAGGED: bool = true;

    fn runs_on(arch: Arch) -> Result<()> {
        match arch {
            Arch::Cpu(_) => Ok(()),
            Arch::Sm(_) => Err(Error::unsupported("family", Self::NAME, "runs on cpu only", "use append/cuda")),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        supports(Self::NAME, problem)
    }

    fn unmet(_: Constraint) -> Option<&'static str> {
        None
    }

    fn default_for(_: &Problem, _: Arch, _: &ShapeBucket) -> Self {
        Self { tokens: 16 }
    }

    fn space(_: &Problem, _: Arch) -> Vec<Self> {
        vec![Self { tokens: 16 }]
    }

    fn validate(&self, _: &Problem, _: Arch) -> Result<()> {
        if !(1..=4096).contains(&self.tokens) {
            return Err(Error::unsupported("tokens", self.tokens, "1 to 4096 tokens of a work item", "use 16"));
        }
        Ok(())
    }

    fn resources(&self, _: &Problem) -> Resources {
        Resources::default()
    }

    fn plan(&self, _: &Problem, _: &Shape) -> Result<LaunchPlan> {
        Ok(LaunchPlan::new([], [], None))
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(1, 1, shape)
    }
}
