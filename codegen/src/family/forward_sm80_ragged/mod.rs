//! `forward/sm80_ragged`: mma.sync and cp.async over ragged batches, whose keys persistent thread blocks share evenly
//! (Flash-Decoding; stream-K over key blocks, as in LeanAttention, arXiv 2405.10480), or by whole tiles or equal pieces
//! where all sequences have as many tiles, and these as many keys.
//!
//! One kernel for decode, chunks and prompts: the tile has 16 to 128 rows of all heads of a KV head. cp.async takes any
//! page size, stride and index at 16 bytes a row, and at decode's rates costs no bandwidth: a multiprocessor needs a
//! warp's copy every 27 cycles.

mod defaults;
mod resources;

use super::account::{RaggedAccount, Usual};
use super::fields::{Constants, schedule};
use super::forward_sm80::LONGEST_PROGRAM;
use super::program_length::{self, MostOperations};
use super::{Dtypes, KernelFamily};
use crate::abi::ArgsLayout;
use crate::launch::{Holds, LaunchPlan, Region, SPLIT_COUNTER_BYTES, Stage, StageEntry};
use crate::traffic::Walk;
use crate::{Arch, Constraint, DType, Error, MaskKind, Op, Problem, Resources, Result, Shape, ShapeBucket};

/// Keys that take as long as a tile takes beside its keys. On an H200, four long sequences among sixty short ones took
/// 258 us by 256 keys, 250 by 128, 277 by none.
const TILE_KEYS: u32 = 128;
/// The most that the fullest thread block may have of whole tiles or equal pieces, in percent of an even range. Reading
/// 16-bit keys takes all thread blocks: with 120 of 132 at work 15 x 8192 take 132 us on an H200, by even ranges 129.
/// Quantised keys are bound by their products, and merges cost more beside them: 14 x 8192 take 75 by 112 of 132 and
/// 78, 13 x 8192 by 104 of them as long as by even ranges.
const FULLEST: u32 = 107;
const FULLEST_QUANTISED: u32 = 120;

fn fullest(problem: &Problem) -> u32 {
    let quantised = problem.kv.store().is_some_and(|store| store.element.bytes(problem.dtype) == 1);
    if quantised { FULLEST_QUANTISED } else { FULLEST }
}

/// The pieces of every tile where all sequences have as many tiles and these as many spans, 1 of whole tiles; none
/// where thread blocks have even ranges. What the kernel does by the lengths that it finds (`range.cuh`).
fn pieces_of_each(tiles: u64, spans: u64, blocks: u64, fullest: u32) -> Option<u64> {
    if tiles > blocks {
        return (tiles.div_ceil(blocks) * blocks * 100 <= tiles * u64::from(fullest)).then_some(1);
    }
    let (pieces, all) = ((blocks / tiles).min(spans), tiles * spans);
    let most = spans.div_ceil(pieces) * blocks;
    (most < all + blocks || most * 100 <= all * u64::from(fullest)).then_some(pieces)
}

schedule! {
    /// How an mma.sync GPU computes a ragged batch.
    pub struct Sm80RaggedSchedule {
        /// Rows of one warp: 16 or 32.
        pub rows_per_warp: u32 => code, with(|s: &Self| format!("r{}x{}", s.rows_per_warp, s.row_warps));
        /// Warps of a team, which share its key blocks: together they have the rows of a tile.
        pub row_warps: u32 => code, silent;
        /// Teams of a thread block, each with key blocks of its own.
        pub key_warps: u32 => code, number("k");
        /// Keys of one step of a team.
        pub block_kv: u32 => code, number("kv");
        /// Buffers of K and V of a team.
        pub stages: u32 => code, number("s");
        /// Thread blocks of one multiprocessor.
        pub blocks_per_sm: u32 => code, number("b");
    }
}

impl Sm80RaggedSchedule {
    /// Rows of a tile.
    pub const fn rows(&self) -> u32 {
        self.rows_per_warp * self.row_warps
    }

    /// Threads of one block.
    pub const fn threads(&self) -> u32 {
        32 * self.row_warps * self.key_warps
    }
}

impl KernelFamily for Sm80RaggedSchedule {
    const NAME: &'static str = "forward/sm80_ragged";
    const TEMPLATE: &'static str = "forward/sm80_ragged.cu";
    const OP: Op = Op::Forward;
    const ARGS: ArgsLayout = ArgsLayout::RAGGED;
    const RAGGED: bool = true;
    const QUERIES: Dtypes = Dtypes::Any;

    fn runs_on(arch: Arch) -> Result<()> {
        let no = |limit: &str, remedy: &str| Err(Error::unsupported("family", Self::NAME, limit, remedy));
        match arch {
            Arch::Cpu(_) => no("runs on CUDA devices only", "use forward/cpu_ragged"),
            Arch::Sm(sm) if sm.number < 80 => no("needs sm_80 or newer (cp.async)", "use forward/naive_ragged"),
            Arch::Sm(_) => Ok(()),
        }
    }

    fn supports(problem: &Problem, _: Arch) -> Result<()> {
        let plain = "use forward/naive_ragged";
        let no = |limit: &str| Err(Error::unsupported("family", Self::NAME, limit, plain));
        let Some(store) = problem.kv.store() else { return no("computes ragged batches only") };
        if problem.dtype == DType::F32 {
            return no("computes f16 and bf16 only");
        }
        if problem.dropout {
            return no("drops no scores: it is made for decoding and serving");
        }
        problem.check_vectors(Self::NAME)?;
        if store.v_columns {
            return no("reads V whose columns lie side by side, not its tokens");
        }
        if store.element.bytes(problem.dtype) == 1 {
            // Rows are read by 16 bytes.
            for (field, dim) in [("head_dim_qk", problem.head_dim_qk), ("head_dim_v", problem.head_dim_v)] {
                if !dim.is_multiple_of(16) {
                    let limit = format!("{} takes multiples of 16 beside 8-bit stores", Self::NAME);
                    return Err(Error::unsupported(field, dim, limit, plain));
                }
            }
        }
        program_length::check(Self::NAME, problem, MostOperations::Together(LONGEST_PROGRAM), plain)
    }

    fn unmet(constraint: Constraint) -> Option<&'static str> {
        match constraint {
            Constraint::Weights => Some("it does not write the attention weights"),
            Constraint::Unaligned => Some(
                "it reads 16 bytes at once, and a row of these tensors starts elsewhere: align addresses and strides to \
                 16 bytes",
            ),
            Constraint::Strided | Constraint::LooseBiases => None,
        }
    }

    fn default_for(problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Self {
        defaults::default_for(problem, arch.gpu(), bucket)
    }

    fn space(problem: &Problem, arch: Arch) -> Vec<Self> {
        defaults::space(problem, arch.gpu())
    }

    fn validate(&self, problem: &Problem, _: Arch) -> Result<()> {
        let bad = |field: &'static str, value: u32, limit: &str| {
            Err(Error::unsupported(field, value, limit, "use a schedule from the searched space"))
        };
        if ![16, 32].contains(&self.rows_per_warp) {
            return bad("rows_per_warp", self.rows_per_warp, "16 or 32 rows");
        }
        if ![1, 2, 4, 8].contains(&self.row_warps) {
            return bad("row_warps", self.row_warps, "1, 2, 4 or 8 warps");
        }
        // Teams of several warps have a named barrier each, of which there are 16.
        if !(1..=16).contains(&self.key_warps) || self.row_warps > 1 && self.key_warps > 15 {
            return bad("key_warps", self.key_warps, "1 to 16 teams, of several warps 15");
        }
        if ![16, 32, 64].contains(&self.block_kv) {
            return bad("block_kv", self.block_kv, "16, 32 or 64 keys");
        }
        if !(2..=8).contains(&self.stages) {
            return bad("stages", self.stages, "2 to 8 stages");
        }
        if !(1..=4).contains(&self.blocks_per_sm) {
            return bad("blocks_per_sm", self.blocks_per_sm, "1 to 4 blocks");
        }
        if self.threads() > 512 {
            return bad("threads", self.threads(), "at most 512 threads");
        }
        let _ = problem;
        Ok(())
    }

    fn resources(&self, problem: &Problem) -> Resources {
        resources::of(self, problem)
    }

    fn blocks_per_sm(&self) -> u32 {
        self.blocks_per_sm
    }

    fn constants(&self, problem: &Problem, constants: &mut Constants) {
        let of_heads = problem.program.and_then(|p| p.mask_axes()).is_some_and(|axes| axes.head || axes.kv_head);
        constants.insert("mask_of_heads", of_heads.to_string());
        constants.insert("fullest", fullest(problem).to_string());
        constants.insert("tile_units", TILE_KEYS.div_ceil(self.block_kv * self.key_warps).to_string());
        constants.insert("counter_bytes", SPLIT_COUNTER_BYTES.to_string());
        constants.insert("shared_q", resources::shares_q(self, problem).to_string());
        constants.insert("piece_bytes", resources::piece_bytes(self, problem).to_string());
    }

    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let Resources { threads, smem_bytes, .. } = resources::of(self, problem);
        // No more thread blocks than the bounds allow spans of keys.
        let tiles = (u64::from(shape.q_len) * u64::from(shape.group())).div_ceil(self.rows().into());
        let blocks = u64::from(shape.kv_len).div_ceil((self.block_kv * self.key_warps).into()).max(1);
        let spans = u128::from(tiles) * u128::from(blocks) * u128::from(shape.batch) * u128::from(shape.kv_heads);
        let grid = spans.min(u128::from(SPLIT_COUNTER_BYTES / 4)) as u32;
        let main = Stage::of(StageEntry::MAIN, grid, threads, smem_bytes).starting_early();
        let main = Stage { resident: Some(self.blocks_per_sm), ..main };
        let scratch = Region { holds: Holds::SplitKeys, bytes: resources::piece_bytes(self, problem).into() };
        Ok(LaunchPlan::new([main], [scratch], None))
    }

    fn ragged_account(&self, usual: &Usual<'_>) -> Option<RaggedAccount> {
        let tiles = usual.pairs() * usual.packed().div_ceil(self.rows().into());
        let span = u64::from(self.block_kv * self.key_warps);
        let spans = tiles * usual.seen(self.rows().into()).div_ceil(span).max(1);
        let blocks = u64::from(usual.units * self.blocks_per_sm).min(spans.max(1));
        let share = spans.div_ceil(blocks.max(1));
        let each = spans / tiles.max(1);
        let rows = self.rows();
        // Of causal masks the tiles of a sequence differ, of a program's any may.
        let one_tile = usual.packed() <= rows.into() || usual.problem.mask == MaskKind::FULL;
        let alike = tiles != 0 && one_tile && usual.problem.program.is_none_or(|p| p.mask_axes().is_none());
        let alike = alike.then(|| pieces_of_each(tiles, each, blocks, fullest(usual.problem))).flatten();
        let (split, pieces) = match alike {
            Some(1) => (
                format!("{} thread blocks have whole tiles of {tiles} of up to {rows} rows", blocks.min(tiles)),
                "tiles are whole and need none".to_owned(),
            ),
            Some(n) => (
                format!("{} thread blocks have a piece each of {tiles} tiles of up to {rows} rows", n * tiles),
                format!("{n} pieces a tile"),
            ),
            None => (
                format!("stream-K: {blocks} thread blocks share {tiles} tiles of up to {rows} rows evenly"),
                match each.div_ceil(share.max(1)) {
                    0 | 1 => "most tiles are in one share and need none".to_owned(),
                    n => format!("about {n} pieces a tile"),
                },
            ),
        };
        let or = if alike.is_some() { ", or by stream-K where sequences differ in length" } else { "" };
        let piece = resources::piece_bytes(self, usual.problem) / 2;
        Some(RaggedAccount {
            split: format!(
                "{split}: {each} spans of {span} keys a tile, about {share} a block{or}; {} teams a block",
                self.key_warps
            ),
            merge: format!(
                "by the last block of a tile, in the order of the keys: {pieces} of {piece} bytes of fp32 in \
                 scratch memory"
            ),
            pages: format!("cp.async, 16 bytes at a time in {} buffers a team: {}", self.stages, usual.index()),
        })
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain((self.rows() / shape.group()).max(1), self.block_kv, shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_that_are_alike_are_dealt_out_whole_or_in_equal_pieces() {
        for (tiles, spans, blocks, quantised, pieces) in [
            (8, 32, 132, false, Some(16)),  // 1 x 4k of 8 KV heads
            (128, 64, 132, false, Some(1)), // 16 x 8k
            (64, 64, 132, false, Some(2)),
            (512, 32, 132, false, Some(1)), // four whole ones at most, 3 % more than even
            (120, 64, 132, false, None),    // 10 % more
            (120, 64, 132, true, Some(1)),
            (104, 64, 132, true, None),
            (8, 33, 132, false, None), // some pieces have three, by even ranges thread blocks have two
            (24, 11, 132, true, None),
            (140, 64, 132, true, None),  // some have two, others one
            (3, 2, 132, false, Some(2)), // pieces of one span
        ] {
            let fullest = if quantised { FULLEST_QUANTISED } else { FULLEST };
            assert_eq!(pieces_of_each(tiles, spans, blocks, fullest), pieces, "{tiles} {spans} {quantised}");
        }
    }
}
