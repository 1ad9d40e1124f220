//! `forward/cpu_ragged`: C for the host processor, for ragged batches.
//!
//! Few rows are multiplied with rows of keys where these lie in the store; many are packed into panels as in
//! `forward/cpu`, whose register tiles these are.

use super::account::{RaggedAccount, Usual};
use super::fields::schedule;
use super::forward_cpu::{self, CpuSchedule};
use super::{Dtypes, KernelFamily};
use crate::abi::ArgsLayout;
use crate::launch::LaunchPlan;
use crate::traffic::Walk;
use crate::{Arch, Constraint, CpuIsa, DType, Error, KvElement, Op, Problem, Resources, Result, Shape, ShapeBucket};
use std::num::NonZeroU32;

schedule! {
    /// How the host processor computes a ragged batch.
    ///
    /// The rows of a tile are those of all query heads of a KV head, side by side. The first fields are those of
    /// [`CpuSchedule`], for tiles of many rows.
    pub struct CpuRaggedSchedule {
        /// The instructions that the kernel is written for; at most what the arch has.
        pub isa: CpuIsa => code, with(|s: &Self| s.isa.name().to_owned());
        /// Rows of a tile.
        pub block_q: u32 => code, number("q");
        /// Keys that are gathered and multiplied together.
        pub block_kv: u32 => code, number("kv");
        /// Vectors of rows in the register tile.
        pub unroll_q: u32 => code, with(|s: &Self| format!("r{}x{}", s.unroll_q, s.unroll_kv));
        /// Keys (or columns of V) in the register tile.
        pub unroll_kv: u32 => code, silent;
        /// Rows of a tile up to which columns lie along the lanes, and not rows; 0 for programs that change scores.
        pub few_rows: u32 => code, number("f");
        /// Keys of a block of such a tile, where it has the rows of one KV head; of several, that many fewer.
        pub few_block: u32 => code, number("fkv");
        /// Keys of a range at least, where the keys of a tile are split.
        pub split_kv: u32 => code, number("s");
        /// Ranges that a call is split into, about, where it has fewer tiles.
        pub split_tiles: u32 => code, number("x");
        /// Worker threads; 0 means one per core.
        pub threads: u32 => launch, number_unless(0, "t");
    }
}

/// Keys of a block of few rows, unless they are searched for.
const FEW_BLOCK: u32 = 256;

/// Whether the program changes or masks scores: then all rows go into panels, whose code knows programs.
fn changes_scores(problem: &Problem) -> bool {
    problem.dropout || problem.program.is_some_and(|p| p.mask().is_some() || p.score().is_some())
}

/// Quantised elements are multiplied as floats.
fn is_quantised(problem: &Problem) -> bool {
    problem.kv.store().is_some_and(|store| store.element != KvElement::Same)
}

/// The problem and arch that `forward/cpu` would compute tiles of many rows as.
fn dense(problem: &Problem, arch: CpuIsa) -> (Problem, CpuIsa) {
    let plain = problem.with_kv(crate::KvKind::Dense);
    match is_quantised(problem) {
        true => (Problem { dtype: DType::F16, output: None, ..plain }, arch.min(CpuIsa::Avx512)),
        false => (plain, arch),
    }
}

impl CpuRaggedSchedule {
    fn of(tile: CpuSchedule, problem: &Problem) -> Self {
        let CpuSchedule { isa, block_q, block_kv, unroll_q, unroll_kv, threads } = tile;
        // From how many rows on panels are faster: about as many as fill the lanes.
        let few = if isa >= CpuIsa::Avx512 { 16 } else { 8 };
        let few_rows = if changes_scores(problem) { 0 } else { few.min(block_q) };
        let (few_block, split_kv, split_tiles) = (FEW_BLOCK, 256, 64);
        Self { isa, block_q, block_kv, unroll_q, unroll_kv, few_rows, few_block, split_kv, split_tiles, threads }
    }

    /// Whether it has the tile that schedules stand for which differ in what few rows meet alone.
    fn is_least_tile(&self) -> bool {
        let panels = match self.isa {
            CpuIsa::Generic => 4,
            CpuIsa::Avx2 | CpuIsa::Amx => 2,
            CpuIsa::Avx512 | CpuIsa::Avx512Bf16 => 1,
        };
        let block_kv = 64u32.next_multiple_of(self.unroll_kv);
        self.unroll_q == 2 && self.block_kv == block_kv && self.block_q <= panels * 2 * self.isa.lanes()
    }

    /// What of it tiles of many rows share with `forward/cpu`.
    fn tile(&self) -> CpuSchedule {
        let Self { isa, block_q, block_kv, unroll_q, unroll_kv, threads, .. } = *self;
        CpuSchedule { isa, block_q, block_kv, unroll_q, unroll_kv, threads }
    }

    /// The schedule that serves while nothing is tuned.
    pub fn default_for(problem: &Problem, arch: CpuIsa, bucket: &ShapeBucket) -> Self {
        let (plain, isa) = dense(problem, arch);
        let rows = bucket.q_len.saturating_mul(bucket.group.max(1));
        Self::of(CpuSchedule::default_for(&plain, isa, &ShapeBucket { q_len: rows, ..*bucket }), problem)
    }

    /// The schedules worth trying.
    pub fn space(problem: &Problem, arch: CpuIsa) -> Vec<Self> {
        let (plain, isa) = dense(problem, arch);
        let tiles = CpuSchedule::space(&plain, isa);
        let mut space: Vec<Self> = tiles.into_iter().map(|tile| Self::of(tile, problem)).collect();
        // What decides about few rows does not depend on the tiles of many.
        if let Some(&first) = space.first() {
            for few_block in [64, 128, 256, 512] {
                for split_kv in [128, 256, 512] {
                    space.push(Self { few_block, split_kv, ..first });
                }
            }
            space.extend([4, 8].map(|few_rows| Self { few_rows: few_rows.min(first.few_rows), ..first }));
            space.extend([128, 256, 1024].map(|split_tiles| Self { split_tiles, ..first }));
        }
        space.sort_unstable();
        space.dedup();
        space.retain(|s| s.validate(problem, arch).is_ok());
        space
    }

    /// Checks the fields against what the template can generate.
    pub fn validate(&self, problem: &Problem, arch: CpuIsa) -> Result<()> {
        let bad = |field: &'static str, value: &dyn ToString, limit: String| {
            Err(Error::unsupported(field, value.to_string(), limit, "use a schedule from the searched space"))
        };
        let (plain, isa) = dense(problem, arch);
        self.tile().validate(&plain, isa)?;
        let few = if changes_scores(problem) { 0 } else { self.block_q.min(64) };
        if self.few_rows > few {
            return bad("few_rows", &self.few_rows, format!("at most {few} rows"));
        }
        if !(16..=1024).contains(&self.few_block) || !self.few_block.is_multiple_of(16) {
            return bad("few_block", &self.few_block, "a multiple of 16 keys, up to 1024".into());
        }
        if !(16..=1 << 20).contains(&self.split_kv) {
            return bad("split_kv", &self.split_kv, "16 to 2^20 keys".into());
        }
        if !(1..=1 << 16).contains(&self.split_tiles) {
            return bad("split_tiles", &self.split_tiles, "1 to 65536 ranges".into());
        }
        Ok(())
    }
}

impl KernelFamily for CpuRaggedSchedule {
    const NAME: &'static str = "forward/cpu_ragged";
    const TEMPLATE: &'static str = "forward/cpu_ragged.c";
    const OP: Op = Op::Forward;
    const ARGS: ArgsLayout = ArgsLayout::RAGGED;
    const RAGGED: bool = true;
    const QUERIES: Dtypes = Dtypes::Any;

    fn runs_on(arch: Arch) -> Result<()> {
        match arch {
            Arch::Cpu(_) => Ok(()),
            Arch::Sm(_) => Err(Error::unsupported("family", Self::NAME, "runs on cpu only", "use a CUDA family")),
        }
    }

    fn supports(_: &Problem, _: Arch) -> Result<()> {
        Ok(())
    }

    fn unmet(constraint: Constraint) -> Option<&'static str> {
        <CpuSchedule as KernelFamily>::unmet(constraint)
    }

    fn default_for(problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Self {
        Self::default_for(problem, forward_cpu::isa_of(arch), bucket)
    }

    fn space(problem: &Problem, arch: Arch) -> Vec<Self> {
        Self::space(problem, forward_cpu::isa_of(arch))
    }

    /// Few rows do not meet the tiles of many, of which one stands for all; nor many rows the blocks of few.
    fn is_worth(&self, shape: &Shape) -> bool {
        let rows = u64::from(shape.q_len) * u64::from(shape.group());
        match rows <= self.few_rows.into() {
            true => self.is_least_tile(),
            false => self.few_block == FEW_BLOCK,
        }
    }

    fn validate(&self, problem: &Problem, arch: Arch) -> Result<()> {
        self.validate(problem, forward_cpu::isa_of(arch))
    }

    fn resources(&self, _: &Problem) -> Resources {
        Resources::default()
    }

    fn host_threads(&self) -> Option<NonZeroU32> {
        NonZeroU32::new(self.threads)
    }

    /// No stage: the kernel finds its own tiles in the lengths, and the device's threads share them.
    fn plan(&self, _: &Problem, _: &Shape) -> Result<LaunchPlan> {
        Ok(LaunchPlan::new([], [], None))
    }

    fn ragged_account(&self, usual: &Usual<'_>) -> Option<RaggedAccount> {
        let rows = usual.packed().min(self.block_q.into());
        let tiles = usual.pairs() * usual.packed().div_ceil(self.block_q.into());
        let few = rows <= self.few_rows.into();
        let (block, keys) = (if few { self.few_block } else { self.block_kv }, usual.seen(rows));
        let fair = (tiles * keys / u64::from(self.split_tiles)).max(self.split_kv.into());
        let ranges = ((keys + fair / 2) / fair).max(1);
        let how = if few { "rows of keys where they lie" } else { "keys gathered into panels" };
        Some(RaggedAccount {
            split: format!(
                "{tiles} tiles of up to {rows} rows, of {ranges} range(s) of at least {} keys; {how}, {block} keys a \
                 block",
                self.split_kv
            ),
            merge: match ranges {
                1 => "none: a tile's keys are one range".to_owned(),
                n => format!("by the last thread of a tile, in the order of the keys: {n} states of fp32 each"),
            },
            pages: format!("pointers to the rows of each block of keys: {}", usual.index()),
        })
    }

    /// A KV head's rows meet its keys together.
    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        let group = (shape.heads / shape.kv_heads.max(1)).max(1);
        let heads = shape.batch as f64 * shape.kv_heads as f64;
        Walk { queries: (self.block_q / group).max(1), block_kv: self.block_kv, heads, together: 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KvKind, Mask, MaskKind};
    use std::collections::BTreeSet;

    #[test]
    fn a_search_tries_what_differs_for_few_rows_and_for_many() {
        let problem = Problem::forward(DType::Bf16, 128, MaskKind::CAUSAL).unwrap().with_kv(KvKind::RAGGED);
        for isa in [CpuIsa::Generic, CpuIsa::Avx2, CpuIsa::Avx512, CpuIsa::Avx512Bf16, CpuIsa::Amx] {
            let space = CpuRaggedSchedule::space(&problem, isa);
            let worth = |q_len: u32| {
                let shape = Shape { batch: 1, heads: 4, kv_heads: 1, q_len, kv_len: 4096, mask: Mask::Causal };
                space.iter().filter(|s| s.is_worth(&shape)).copied().collect::<Vec<_>>()
            };
            let (few, many) = (worth(1), worth(100));
            let blocks =
                |of: &[CpuRaggedSchedule]| of.iter().map(|s| (s.few_block, s.split_kv)).collect::<BTreeSet<_>>();
            let tiles = |of: &[CpuRaggedSchedule]| of.iter().map(|s| (s.block_q, s.block_kv)).collect::<BTreeSet<_>>();
            assert!(blocks(&few).len() >= 12 && few.len() <= 24, "{isa:?}: {} of {}", few.len(), space.len());
            assert!(blocks(&many).len() == 3 && tiles(&many) == tiles(&space), "{isa:?}: {}", many.len());
        }
    }
}
