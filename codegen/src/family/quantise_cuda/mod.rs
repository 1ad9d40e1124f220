//! `quantise/cuda`: e4m3 operands with their scales from wider ones, on any GPU from sm_75 on.
//!
//! It moves memory: schedules differ in how much is under way at a time, and in how far tiles are read before they are
//! written, which L2 has to hold.

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
/// Threads of a multiprocessor, of up to 168 registers each: with 512 and 128 the widest kernels spill. Each has 64
/// bytes under way, 24 KB in all: an H200's memory at 4.8 TB/s, of which two thirds are read, brings 24 bytes a
/// nanosecond to each multiprocessor, which is 19 KB in 800 ns.
const RESIDENT_THREADS: u32 = 384;
/// Elements side by side that a thread has, as the template.
const UNIT: u32 = 8;

schedule! {
    /// How rows are converted.
    pub struct QuantiseCudaSchedule {
        /// Threads of one block.
        pub threads: u32 => code, number("t");
        /// Times that a block's threads take rows for one tile.
        pub steps: u32 => code, number("x");
        /// Tiles from where one is read to where it is written, at least. As many as run at a time and a tile may wait
        /// for the last of those; with twice as many the last one has had the time of a tile.
        pub ahead: u32 => code, number("a");
    }
}

impl QuantiseCudaSchedule {
    /// Threads of a row, each with 16 elements: with 32 a kernel needs more registers than that leaves.
    fn lanes(problem: &Problem) -> u32 {
        if problem.head_dim_qk.max(problem.head_dim_v) <= 128 { 8 } else { 16 }
    }

    /// Rows of a tile.
    fn tile_rows(&self, problem: &Problem) -> u32 {
        self.steps * self.threads / Self::lanes(problem)
    }

    /// Thread blocks on one multiprocessor.
    const fn resident(&self) -> u32 {
        if self.threads >= RESIDENT_THREADS { 1 } else { RESIDENT_THREADS / self.threads }
    }

    /// With thread blocks of so many threads, and tiles of [`quantise::BLOCK_ROWS`] rows.
    fn of_threads(problem: &Problem, threads: u32, ahead: u32) -> Self {
        Self { threads, steps: quantise::BLOCK_ROWS * Self::lanes(problem) / threads, ahead }
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

    /// Not timed yet. Small thread blocks: while one waits for a count, or its threads for each other, two others read.
    fn default_for(problem: &Problem, _: Arch, _: &ShapeBucket) -> Self {
        Self::of_threads(problem, 128, 1024)
    }

    fn space(problem: &Problem, _: Arch) -> Vec<Self> {
        let all = [32, 64, 128].into_iter().flat_map(|threads| [256, 512, 1024, 2048].map(|ahead| (threads, ahead)));
        all.map(|(threads, ahead)| Self::of_threads(problem, threads, ahead)).collect()
    }

    fn validate(&self, problem: &Problem, _: Arch) -> Result<()> {
        let no = |field: &'static str, value: u32, limit: &str, remedy: &str| {
            Err(Error::unsupported(field, value, limit, remedy))
        };
        if !(32..=512).contains(&self.threads) || !self.threads.is_power_of_two() {
            return no("threads", self.threads, "a power of two from 32 to 512", "use 128");
        }
        if !(1..=64).contains(&self.steps) || !self.tile_rows(problem).is_multiple_of(quantise::BLOCK_ROWS) {
            let limit = format!("1 to 64 steps, with which a tile is a multiple of {} rows", quantise::BLOCK_ROWS);
            return no("steps", self.steps, &limit, "use 8 of 128 threads, 16 where a head dim is above 128");
        }
        if self.ahead > 4096 {
            return no("ahead", self.ahead, "at most 4096 tiles", "use 1024");
        }
        Ok(())
    }

    fn resources(&self, problem: &Problem) -> Resources {
        let (warps, lanes) = (self.threads / 32, Self::lanes(problem));
        let padded = problem.head_dim_qk.max(problem.head_dim_v).next_multiple_of(UNIT * lanes);
        // A few words and one of each warp, of each row two, K's mean or what channels of V are multiplied by, and what
        // each warp has found of columns.
        let of_rows = 8 * self.tile_rows(problem);
        let smem_bytes = 16 + (4 * warps).next_multiple_of(16) + of_rows + 4 * padded + 4 * warps * padded;
        Resources { threads: self.threads, smem_bytes, registers: 48 }
    }

    fn blocks_per_sm(&self) -> u32 {
        self.resident()
    }

    fn constants(&self, problem: &Problem, constants: &mut Constants) {
        constants.insert("lanes", Self::lanes(problem).to_string());
        constants.insert("tile_rows", self.tile_rows(problem).to_string());
        constants.insert("blocks_per_sm", self.resident().to_string());
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
        let clear = Stage::of(CLEAR, if tiles == 0 { 0 } else { clearing }, self.threads, 0).starting_early();
        let region = Region { holds: Holds::PartialSums, bytes: scratch.bytes().next_multiple_of(16) };
        let main = Stage { resident: Some(self.resident()), ..main.starting_early() };
        Ok(LaunchPlan::new([clear, main], [region], None))
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(1, 1, shape)
    }
}
