//! `quantise/cpu`: e4m3 operands with their scales from wider ones, in C.

use crate::abi::ArgsLayout;
use crate::family::fields::{Constants, schedule};
use crate::family::quantise::{self, QuantiseScratch};
use crate::family::{KernelFamily, Purpose};
use crate::launch::{Holds, LaunchPlan, Region};
use crate::traffic::Walk;
use crate::{Arch, Constraint, Error, Op, Problem, Resources, Result, Shape, ShapeBucket};

schedule! {
    /// How rows are converted.
    pub struct QuantiseCpuSchedule {
        /// Rows of one work item.
        pub rows: u32 => code, number("n");
    }
}

impl KernelFamily for QuantiseCpuSchedule {
    const NAME: &'static str = "quantise/cpu";
    const TEMPLATE: &'static str = "quantise/cpu.c";
    const OP: Op = Op::Quantise;
    const PURPOSE: Purpose = Purpose::Plain;
    const ARGS: ArgsLayout = ArgsLayout::QUANTISE;

    fn runs_on(arch: Arch) -> Result<()> {
        match arch {
            Arch::Cpu(_) => Ok(()),
            Arch::Sm(_) => Err(Error::unsupported("family", Self::NAME, "runs on cpu only", "use quantise/cuda")),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        quantise::supports(Self::NAME, problem)
    }

    fn unmet(_: Constraint) -> Option<&'static str> {
        None
    }

    fn default_for(_: &Problem, _: Arch, _: &ShapeBucket) -> Self {
        Self { rows: quantise::BLOCK_ROWS }
    }

    fn space(_: &Problem, _: Arch) -> Vec<Self> {
        vec![Self { rows: quantise::BLOCK_ROWS }]
    }

    fn validate(&self, _: &Problem, _: Arch) -> Result<()> {
        if !(1..=4096).contains(&self.rows) || !self.rows.is_multiple_of(quantise::BLOCK_ROWS) {
            let limit = format!("multiples of {} up to 4096 rows of a work item", quantise::BLOCK_ROWS);
            return Err(Error::unsupported("rows", self.rows, limit, "use 128"));
        }
        Ok(())
    }

    fn resources(&self, _: &Problem) -> Resources {
        Resources::default()
    }

    /// Whether the head dim is one that the Hadamard matrix has.
    fn constants(&self, problem: &Problem, constants: &mut Constants) {
        constants.insert("mixes", u32::from(problem.head_dim_qk.is_power_of_two()).to_string());
    }

    /// No stage: the kernel counts its own tiles, and the device's threads share them, step after step.
    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        quantise::tiles(shape, self.rows, 0)?;
        let scratch = QuantiseScratch::new(problem, shape, self.rows);
        Ok(LaunchPlan::new([], [Region { holds: Holds::PartialSums, bytes: scratch.bytes() }], None))
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(1, 1, shape)
    }
}
