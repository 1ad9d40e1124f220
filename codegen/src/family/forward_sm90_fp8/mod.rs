//! `forward/sm90_fp8`: `forward/sm90` for e4m3. FP8 products want V by columns, which three warps of the producer
//! write; products of P V are summed in two levels, the second one in fp32 registers.

mod defaults;
mod resources;
mod tensor_maps;
mod tiling;
mod wgmma;

pub(super) use tensor_maps::maps;

use super::fields::{Constants, schedule};
use super::forward_sm80;
use super::forward_sm90::Sm90Schedule;
use super::program_length::{self, MostOperations};
use super::{Dtypes, KernelFamily};
use crate::abi::{self, ArgsLayout};
use crate::launch::{Holds, LaunchPlan, Region, Stage, StageEntry};
use crate::traffic::Walk;
use crate::{Arch, Constraint, DType, Error, Op, Problem, Resources, Result, Shape, ShapeBucket};

/// Head dims are multiples of this: rows of e4m3 are then whole 16-byte vectors.
const HEAD_DIM_STEP: u32 = 16;

schedule! {
    /// How a Hopper GPU computes one problem of e4m3.
    pub struct Sm90Fp8Schedule {
        /// Consumer warpgroups; each owns 64 query rows. One more warpgroup is the producer.
        pub consumers: u32 => code, number("c");
        /// Keys of one step of the main loop, and of one sum of the first level.
        pub block_kv: u32 => code, number("kv");
        /// Stages of the pipelines of K and of transposed V each.
        pub stages: u32 => code, number("s");
        /// Stages of V as it lies in memory.
        pub raw_stages: u32 => code, number_unless(1, "raw");
        /// Columns of V whose product is in registers at once, beside their sum of the second level; the last part
        /// has what is left.
        pub part: u32 => code, number("p");
        /// Inside a warpgroup, the scores of a block are computed and exponentiated while the product of the block
        /// before with V still runs.
        pub overlap: bool => code, either("overlap", "serial");
        /// Consumers take turns in issuing products (ping-pong).
        pub take_turns: bool => code, flag("turns");
        /// Thread blocks on one multiprocessor.
        pub blocks_per_sm: u32 => code, number("b");
        /// MiB of K and V whose tiles are walked together, block by block, so that they stay in L2: 0 is one KV head
        /// after the other, [`Sm90Schedule::WALK_ALL`] the same block of all heads.
        pub section_mib: u32 => launch, with(Sm90Fp8Schedule::section_name);
    }
}

impl Sm90Fp8Schedule {
    /// Query rows of one thread block.
    pub const fn block_q(&self) -> u32 {
        self.consumers * 64
    }

    /// Threads of one block.
    pub const fn threads(&self) -> u32 {
        (self.consumers + 1) * 128
    }

    fn section_name(&self) -> String {
        match self.section_mib {
            Sm90Schedule::WALK_ALL => "all".to_owned(),
            n => format!("l2x{n}"),
        }
    }
}

impl KernelFamily for Sm90Fp8Schedule {
    const NAME: &'static str = "forward/sm90_fp8";
    const TEMPLATE: &'static str = "forward/sm90_fp8.cu";
    const OP: Op = Op::Forward;
    const ARGS: ArgsLayout = ArgsLayout::MAPPED;
    const QUERIES: Dtypes = Dtypes::E4m3;

    fn runs_on(arch: Arch) -> Result<()> {
        let remedy = "convert Q, K and V to bf16 or f16, which the families of this arch compute";
        match arch {
            Arch::Sm(sm) if sm.number == 90 && sm.specific => Ok(()),
            _ => Err(Error::unsupported("family", Self::NAME, "needs sm_90a (wgmma on e4m3)", remedy)),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        problem.validate()?;
        for (field, d) in [("head_dim_qk", problem.head_dim_qk), ("head_dim_v", problem.head_dim_v)] {
            if !d.is_multiple_of(HEAD_DIM_STEP) {
                let limit = format!("{} takes multiples of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to 256", Self::NAME);
                return Err(Error::unsupported(field, d, limit, "pad the rows with zeros to the next such length"));
            }
        }
        let most = MostOperations::Together(forward_sm80::LONGEST_PROGRAM);
        program_length::check(Self::NAME, problem, most, "convert Q, K and V to bf16 or f16")
    }

    fn unmet(constraint: Constraint) -> Option<&'static str> {
        match constraint {
            Constraint::LooseBiases => None,
            other => <Sm90Schedule as KernelFamily>::unmet(other),
        }
    }

    fn default_for(problem: &Problem, _: Arch, bucket: &ShapeBucket) -> Self {
        Self::default_for(problem, bucket)
    }

    fn space(problem: &Problem, _: Arch) -> Vec<Self> {
        Self::space(problem)
    }

    fn validate(&self, problem: &Problem, _: Arch) -> Result<()> {
        self.validate(problem)
    }

    fn resources(&self, problem: &Problem) -> Resources {
        // The block starts with equal shares of the registers and its warpgroups exchange them: `validate` checks
        // those.
        Resources { threads: self.threads(), smem_bytes: self.smem_bytes(problem), registers: 24 }
    }

    fn blocks_per_sm(&self) -> u32 {
        self.blocks_per_sm
    }

    fn constants(&self, problem: &Problem, constants: &mut Constants) {
        constants.extend([
            ("tile_queues", abi::TILE_QUEUES.to_string()),
            ("producer_registers", self.producer_registers(problem).to_string()),
            ("consumer_registers", self.consumer_registers(problem).to_string()),
            ("wgmma_instructions", {
                let keys = problem.kv.store().map_or(DType::E4m3.name(), |store| store.element.name());
                wgmma::instructions(self, problem.head_dim_v.next_multiple_of(16), keys)
            }),
        ]);
    }

    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let tiling = self.tiling(problem, shape)?;
        let main = Stage {
            resident: Some(self.blocks_per_sm),
            ..Stage::of(StageEntry::MAIN, tiling.tiles as u32, self.threads(), self.smem_bytes(problem))
        };
        Ok(LaunchPlan::new([main], [Region { holds: Holds::TileCounter, bytes: 16 }], Some(tiling)))
    }

    fn walk(&self, problem: &Problem, shape: &Shape) -> Walk {
        let plain = Walk::plain(self.block_q(), self.block_kv, shape);
        let Ok(t) = self.tiling(problem, shape) else { return plain };
        Walk { together: t.section as f64 / shape.group() as f64, ..plain }
    }
}
