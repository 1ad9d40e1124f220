//! `quantise/cuda`: e4m3 operands with their scales from wider ones, on any GPU from sm_75 on.
//!
//! It moves memory: one schedule, whose tiles are few enough for L2 to hold those between reading and writing.

use crate::abi::ArgsLayout;
use crate::family::fields::{Constants, schedule};
use crate::family::quantise::{self, QuantiseScratch};
use crate::family::{KernelFamily, Purpose};
use crate::launch::{Holds, LaunchPlan, Region, Stage, StageEntry, StageRole};
use crate::traffic::Walk;
use crate::{Arch, Constraint, Error, Op, Problem, Resources, Result, Shape, ShapeBucket};

/// Zeros in the counters.
const CLEAR: StageEntry = StageEntry { suffix: "_clear", role: StageRole::Main };
/// Thread blocks that clear them at most.
const MOST_CLEARING: u32 = 64;
/// Thread blocks of a multiprocessor, of 256 threads with up to 128 registers.
const RESIDENT: u32 = 2;
/// Elements side by side that a thread has, as the template.
const UNIT: u32 = 8;

schedule! {
    /// How rows are converted.
    pub struct QuantiseCudaSchedule {
        /// Threads of one block.
        pub threads: u32 => code, number("t");
        /// Times that a block's threads take rows for one tile.
        pub steps: u32 => code, number("x");
        /// Tiles from where one is read to where it is written, at least: as many as thread blocks run at a time, so
        /// that none waits for what another has just begun.
        pub ahead: u32 => code, number("a");
    }
}

impl QuantiseCudaSchedule {
    /// Threads of a row, each with 16 elements: with 32 a kernel needs more than the 128 registers that two thread
    /// blocks of a multiprocessor have, and spills up to 140 bytes; with 16 it takes 100 to 114.
    fn lanes(problem: &Problem) -> u32 {
        if problem.head_dim_qk.max(problem.head_dim_v) <= 128 { 8 } else { 16 }
    }

    /// Rows of a tile.
    fn tile_rows(&self, problem: &Problem) -> u32 {
        self.steps * self.threads / Self::lanes(problem)
    }
}

impl KernelFamily for QuantiseCudaSchedule {
    const NAME: &'static str = "quantise/cuda";
    const TEMPLATE: &'static str = "quantise/cuda.cu";
    const OP: Op = Op::Quantise;
    const PURPOSE: Purpose = Purpose::Plain;
    const ARGS: ArgsLayout = ArgsLayout::QUANTISE;

    fn runs_on(arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        match arch {
            Arch::Cpu(_) => no("runs on CUDA devices only", "use quantise/cpu"),
            Arch::Sm(sm) if sm.number < 75 => no("needs sm_75 or newer", "use a newer GPU"),
            Arch::Sm(_) => Ok(()),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        quantise::supports(Self::NAME, problem)
    }

    fn unmet(_: Constraint) -> Option<&'static str> {
        None
    }

    fn default_for(_: &Problem, _: Arch, _: &ShapeBucket) -> Self {
        Self { threads: 256, steps: 4, ahead: 256 }
    }

    fn space(_: &Problem, _: Arch) -> Vec<Self> {
        vec![Self { threads: 256, steps: 4, ahead: 256 }]
    }

    fn validate(&self, _: &Problem, _: Arch) -> Result<()> {
        if self.threads == 0 || !self.threads.is_multiple_of(32) || !(1..=64).contains(&self.steps) || self.ahead > 4096
        {
            let limit = "whole warps, 1 to 64 steps of a tile, and at most 4096 tiles ahead";
            return Err(Error::unsupported(
                "threads",
                self.threads,
                limit,
                "use 256 threads, 4 steps and 256 tiles ahead",
            ));
        }
        Ok(())
    }

    fn resources(&self, problem: &Problem) -> Resources {
        let (warps, lanes) = (self.threads / 32, Self::lanes(problem));
        let padded = problem.head_dim_qk.next_multiple_of(UNIT * lanes);
        // A few words and one of each warp, K's mean, and what each warp has summed.
        let smem_bytes = 16 + (4 * warps).next_multiple_of(16) + 4 * padded + 4 * warps * padded;
        Resources { threads: self.threads, smem_bytes, registers: 48 }
    }

    fn constants(&self, problem: &Problem, constants: &mut Constants) {
        constants.insert("lanes", Self::lanes(problem).to_string());
        constants.insert("tile_rows", self.tile_rows(problem).to_string());
    }

    fn entries(&self, _: &Problem) -> &'static [StageEntry] {
        &[CLEAR, StageEntry::MAIN]
    }

    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let rows = self.tile_rows(problem);
        let tiles = quantise::tiles(shape, rows, self.ahead)?;
        let scratch = QuantiseScratch::new(problem, shape, rows);
        let clearing = scratch.counters.div_ceil(self.threads.into()).min(MOST_CLEARING.into()) as u32;
        let main = Stage::of(StageEntry::MAIN, tiles as u32, self.threads, self.resources(problem).smem_bytes);
        let clear = Stage::of(CLEAR, if tiles == 0 { 0 } else { clearing }, self.threads, 0);
        let region = Region { holds: Holds::PartialSums, bytes: scratch.bytes().next_multiple_of(16) };
        Ok(LaunchPlan::new([clear, Stage { resident: Some(RESIDENT), ..main }], [region], None))
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(1, 1, shape)
    }
}
