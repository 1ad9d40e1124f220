//! `backward/sm80`: gradients by mma.sync and cp.async, for f16 and bf16 and every score program.

mod resources;

use super::forward_sm80::TileOrder;
use crate::abi::ArgsLayout;
use crate::family::KernelFamily;
use crate::family::fields::schedule;
use crate::family::program_length::{self, MostOperations};
use crate::launch::{LaunchPlan, Stage, StageEntry, StageRole, tiles};
use crate::traffic::Walk;
use crate::{Arch, Constraint, DType, Error, Op, Problem, Resources, Result, Shape, ShapeBucket, SmArch};

/// Operations of a score program above which a kernel compiles for over half a minute: its derivative stands in two
/// stages, once for every score of a thread.
const LONGEST_PROGRAM: usize = 400;

/// Lanes that share a row in the stage of statistics.
const LANES_OF_ROW: u32 = 8;

const STATISTICS: StageEntry = StageEntry { suffix: "_statistics", role: StageRole::Main };
const KEYS: StageEntry = StageEntry { suffix: "_keys", role: StageRole::Main };

schedule! {
    /// How an mma.sync GPU computes the gradients of one problem.
    pub struct BackwardSm80Schedule {
        /// Warps of one thread block, in all stages.
        pub warps: u32 => code, number("w");
        /// Keys of one warp where dK and dV are summed: 16 or 32. With 32, one fragment of Q or dO read from shared
        /// memory feeds two multiplications.
        pub key_rows: u32 => code, number("k");
        /// Queries of one step there.
        pub step_q: u32 => code, number("q");
        /// Buffers of Q and dO in shared memory there: 1 waits for each step, 2 and more load whole steps ahead.
        pub stages_q: u32 => code, number("s");
        /// Thread blocks that share the columns of dK and dV of a block of keys, and each compute its scores: where the
        /// sums of all columns do not fit the registers.
        pub parts: u32 => code, with(|s: &Self| if s.parts > 1 { format!("p{}", s.parts) } else { String::new() });
        /// Queries of one warp where dQ is summed: 16 or 32.
        pub query_rows: u32 => code, number("dq");
        /// Keys of one step there.
        pub step_kv: u32 => code, number("kv");
        /// Buffers of K and V in shared memory there.
        pub stages_kv: u32 => code, number("s");
        /// Thread blocks that must fit one multiprocessor: caps the registers of a thread.
        pub blocks_per_sm: u32 => code, number("b");
        /// Order of the blocks of keys, and of queries.
        pub order: TileOrder => code, word;
    }
}

impl BackwardSm80Schedule {
    /// Keys of one thread block of the second stage.
    pub const fn block_keys(&self) -> u32 {
        self.warps * self.key_rows
    }

    /// Queries of one thread block of the last stage.
    pub const fn block_queries(&self) -> u32 {
        self.warps * self.query_rows
    }

    /// The schedule that serves: the largest tiles that compile without spills and fit the arch's shared memory.
    pub fn default_for(problem: &Problem, sm: SmArch) -> Self {
        let order = if problem.mask.right { TileOrder::BlockMajor } else { TileOrder::HeadMajor };
        let of = |[warps, key_rows, step_q, stages_q, parts, query_rows, step_kv, stages_kv]: [u32; 8]| Self {
            warps,
            key_rows,
            step_q,
            stages_q,
            parts,
            query_rows,
            step_kv,
            stages_kv,
            blocks_per_sm: 1,
            order,
        };
        let sums = (problem.head_dim_qk.next_multiple_of(16) + problem.head_dim_v.next_multiple_of(16)) / 2;
        let parts = if sums > 128 { 2 } else { 1 };
        const SHORT: [u32; 8] = [8, 16, 32, 1, 1, 16, 64, 1];
        const SMALL: [u32; 8] = [4, 16, 32, 1, 1, 16, 32, 1];
        let program = problem.program.is_some();
        let tiles: &[[u32; 8]] = match problem.head_dim_qk.max(problem.head_dim_v) {
            // A program's own registers leave room for fewer pairs, as do those that the compiler takes elsewhere.
            0..=64 if program => &[[4, 32, 32, 2, 1, 32, 32, 2], [4, 16, 32, 2, 1, 16, 32, 2]],
            0..=64 => &[[4, 32, 32, 2, 1, 32, 64, 2], [4, 16, 32, 2, 1, 16, 32, 2]],
            97..=128 if program || sm.number < 90 => &[[8, 16, 32, 2, 1, 16, 64, 2], SHORT, SMALL],
            65..=128 => &[[8, 16, 64, 2, 1, 16, 64, 2], SHORT, SMALL],
            _ => {
                &[[8, 16, 32, 2, parts, 16, 32, 2], [8, 16, 32, 1, parts, 16, 32, 1], [4, 16, 32, 1, parts, 16, 32, 1]]
            }
        };
        let fits = |s: &Self| resources::smem_bytes(s, problem) <= sm.limits().smem_per_block;
        let all = || tiles.iter().copied().map(of);
        all().find(fits).or(all().next_back()).expect("there is a tile")
    }
}

impl KernelFamily for BackwardSm80Schedule {
    const NAME: &'static str = "backward/sm80";
    const TEMPLATE: &'static str = "backward/sm80.cu";
    const OP: Op = Op::Backward;
    const ARGS: ArgsLayout = ArgsLayout::BACKWARD;
    const PACKED: bool = true;

    fn runs_on(arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        match arch {
            Arch::Cpu(_) => no("runs on CUDA devices only", "use backward/cpu"),
            Arch::Sm(sm) if sm.number < 80 => {
                no("needs sm_80 or newer (cp.async, bf16 mma.sync)", "use backward/naive")
            }
            Arch::Sm(_) => Ok(()),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        if problem.dtype == DType::F32 {
            let (limit, remedy) = ("computes f16 and bf16 only", "backward/naive is the exact f32 path");
            return Err(Error::unsupported("family", Self::NAME, limit, remedy));
        }
        problem.check_vectors(Self::NAME)?;
        program_length::check(Self::NAME, problem, MostOperations::Together(LONGEST_PROGRAM), "use backward/naive")
    }

    fn unmet(constraint: Constraint) -> Option<&'static str> {
        match constraint {
            Constraint::Unaligned => Some(
                "it reads 16 bytes at once, and a row of these tensors starts elsewhere: align addresses and strides to \
                 16 bytes",
            ),
            Constraint::Weights => Some("it does not write the attention weights"),
            Constraint::Strided | Constraint::LooseBiases => None,
        }
    }

    fn default_for(problem: &Problem, arch: Arch, _: &ShapeBucket) -> Self {
        Self::default_for(problem, arch.gpu())
    }

    fn space(problem: &Problem, arch: Arch) -> Vec<Self> {
        let default = Self::default_for(problem, arch.gpu());
        let mut space = Vec::new();
        for warps in [4, 8] {
            for (key_rows, step_q) in [(16, 32), (16, 64), (32, 32), (32, 64)] {
                for (query_rows, step_kv) in [(16, 32), (16, 64), (32, 32), (32, 64)] {
                    for (stages, blocks_per_sm) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
                        let [stages_q, stages_kv] = [stages; 2];
                        space.push(Self {
                            warps,
                            key_rows,
                            step_q,
                            stages_q,
                            query_rows,
                            step_kv,
                            stages_kv,
                            blocks_per_sm,
                            ..default
                        });
                    }
                }
            }
        }
        space
    }

    fn validate(&self, _: &Problem, _: Arch) -> Result<()> {
        let bad = |field: &'static str, value: u32, limit: &str| {
            Err(Error::unsupported(field, value, limit, "use a schedule from the searched space"))
        };
        if !(1..=16).contains(&self.warps) {
            return bad("warps", self.warps, "1 to 16 warps");
        }
        for (field, rows) in [("key_rows", self.key_rows), ("query_rows", self.query_rows)] {
            if ![16, 32].contains(&rows) {
                return bad(field, rows, "16 or 32 rows");
            }
        }
        for (field, step) in [("step_q", self.step_q), ("step_kv", self.step_kv)] {
            if step == 0 || !step.is_multiple_of(16) || step > 128 {
                return bad(field, step, "a multiple of 16 up to 128");
            }
        }
        for (field, stages) in [("stages_q", self.stages_q), ("stages_kv", self.stages_kv)] {
            if !(1..=2).contains(&stages) {
                return bad(field, stages, "1 or 2 stages");
            }
        }
        if !(1..=4).contains(&self.parts) {
            return bad("parts", self.parts, "1 to 4 parts");
        }
        if !(1..=8).contains(&self.blocks_per_sm) {
            return bad("blocks_per_sm", self.blocks_per_sm, "1 to 8 blocks");
        }
        Ok(())
    }

    fn resources(&self, problem: &Problem) -> Resources {
        resources::of(self, problem)
    }

    fn blocks_per_sm(&self) -> u32 {
        self.blocks_per_sm
    }

    fn entries(&self, _: &Problem) -> &'static [StageEntry] {
        &[STATISTICS, KEYS, StageEntry::MAIN]
    }

    /// Statistics of all queries, then dK and dV, then dQ, in whose memory the statistics are.
    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let threads = self.warps * 32;
        let rows = |of: u32| tiles(shape.q_len, of, shape.heads, shape.batch);
        let keys = tiles(shape.kv_len, self.block_keys(), shape.kv_heads * self.parts, shape.batch)?;
        let [smem_keys, smem_queries] = resources::smem_of_stages(self, problem);
        let stages = [
            Stage::of(STATISTICS, rows(threads / LANES_OF_ROW)?, threads, 0),
            Stage::of(KEYS, keys, threads, smem_keys),
            Stage::of(StageEntry::MAIN, rows(self.block_queries())?, threads, smem_queries),
        ];
        Ok(LaunchPlan::new(stages, [], None))
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(self.block_queries(), self.step_kv, shape)
    }
}
