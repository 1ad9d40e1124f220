//! `forward/sm90_fp8_ragged`: `forward/sm90_fp8` for ragged batches, whose thread blocks find their tiles from lengths
//! in device memory, as those of `forward/sm90_ragged` do, or pieces of them.

use super::account::{RaggedAccount, Usual};
use super::fields::{Constants, Fields, Place};
use super::forward_sm90_ragged::{Pieces, TABLE_BYTES, TABLE_ENTRIES, ragged_tiling};
use super::{Dtypes, KernelFamily, forward_sm90_fp8::Sm90Fp8Schedule};
use crate::abi::ArgsLayout;
use crate::launch::{Holds, LaunchPlan, Region, Stage, StageEntry};
use crate::traffic::Walk;
use crate::{
    Arch, Constraint, Constraints, Error, KvElement, KvScales, Op, Problem, Resources, Result, Shape, ShapeBucket,
    Tiling,
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// How a Hopper GPU computes a ragged batch of e4m3: a schedule of `forward/sm90_fp8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Sm90Fp8RaggedSchedule(pub Sm90Fp8Schedule);

impl fmt::Display for Sm90Fp8RaggedSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Fields for Sm90Fp8RaggedSchedule {
    fn places(&self) -> Vec<(&'static str, Place)> {
        self.0.places()
    }

    fn launch_places(&self) -> Vec<Place> {
        self.0.launch_places()
    }

    fn render(&self, constants: &mut Constants) {
        self.0.render(constants);
    }
}

/// Whether heads of a KV head share tiles: programs tell them apart.
fn packs(problem: &Problem) -> bool {
    problem.program.is_none()
}

impl Sm90Fp8RaggedSchedule {
    fn pieces(&self) -> Pieces {
        Pieces { consumers: self.0.consumers }
    }

    fn tiling(&self, problem: &Problem, shape: &Shape) -> Result<Tiling> {
        let row_bytes = u64::from(problem.head_dim_qk + problem.head_dim_v);
        ragged_tiling(shape, packs(problem), self.0.block_q(), self.0.section_mib, row_bytes)
    }

    /// As `Layout` in the template.
    fn smem_bytes(&self, problem: &Problem) -> u32 {
        let behind = TABLE_BYTES + (4 * self.0.stages).next_multiple_of(16);
        self.0.smem_bytes_of(problem, SLOT_BYTES).next_multiple_of(16) + behind
    }
}

/// Bytes of a slot of the loader's, which holds a tile.
const SLOT_BYTES: u32 = 80;

impl KernelFamily for Sm90Fp8RaggedSchedule {
    const NAME: &'static str = "forward/sm90_fp8_ragged";
    const TEMPLATE: &'static str = "forward/sm90_fp8_ragged.cu";
    const OP: Op = Op::Forward;
    const ARGS: ArgsLayout = ArgsLayout::RAGGED_MAPPED;
    const RAGGED: bool = true;
    const QUERIES: Dtypes = Dtypes::E4m3;

    fn runs_on(arch: Arch) -> Result<()> {
        <Sm90Fp8Schedule as KernelFamily>::runs_on(arch)
    }

    fn supports(problem: &Problem, arch: Arch) -> Result<()> {
        let no = |limit: &str| Err(Error::unsupported("family", Self::NAME, limit, "use forward/sm80_ragged"));
        let store = problem.kv.store().unwrap_or_default();
        if ![KvElement::E4m3, KvElement::E5m2].contains(&store.element)
            || store.scales != KvScales::PerHead
            || store.v_columns
        {
            return no("reads stores of e4m3 and e5m2 with scales of heads, whose columns of V lie side by side");
        }
        <Sm90Fp8Schedule as KernelFamily>::supports(problem, arch)
    }

    fn unmet(constraint: Constraint) -> Option<&'static str> {
        match constraint {
            Constraint::Strided => Some(
                "TMA takes keys of packs, of dense slots and of pages of a multiple of 16 tokens, by strides above \
                 zero and below 2^40 bytes: these lie otherwise",
            ),
            other => <Sm90Fp8Schedule as KernelFamily>::unmet(other),
        }
    }

    /// Of few rows `forward/sm80_ragged` reads keys of e4m3 as fast as memory gives them.
    fn prefers(problem: &Problem, bucket: &ShapeBucket) -> bool {
        let rows = u64::from(bucket.q_len) * if packs(problem) { u64::from(bucket.group) } else { 1 };
        rows > FEW_ROWS && bucket.pages.demands() == Constraints::NONE
    }

    fn default_for(problem: &Problem, arch: Arch, bucket: &ShapeBucket) -> Self {
        // Heads of a group fill tiles together, and keys are many: three consumers, as for long sequences, are first
        // with few rows, too (D128, causal, us by three and by two: 16 of 512 rows beside 4096 keys 643 and 755, of
        // 1024 beside as many 256 and 295; 512 beside 8192 100 and 101).
        let bucket = &ShapeBucket { q_len: bucket.q_len.max(8192), ..*bucket };
        let fits = |s: &Self| {
            let resources = KernelFamily::resources(s, problem);
            s.0.validate(problem).is_ok() && resources.check(arch, s.0.blocks_per_sm).is_ok()
        };
        let base = Sm90Fp8Schedule::default_for(problem, bucket);
        let smaller = (1..base.block_kv / 32).rev().map(|n| Sm90Fp8Schedule { block_kv: n * 32, ..base });
        std::iter::once(base).chain(smaller).map(Self).find(fits).unwrap_or(Self(base))
    }

    fn space(problem: &Problem, _: Arch) -> Vec<Self> {
        Sm90Fp8Schedule::space(problem).into_iter().map(Self).collect()
    }

    fn validate(&self, problem: &Problem, _: Arch) -> Result<()> {
        self.0.validate(problem)
    }

    fn resources(&self, problem: &Problem) -> Resources {
        Resources { smem_bytes: self.smem_bytes(problem), ..KernelFamily::resources(&self.0, problem) }
    }

    fn blocks_per_sm(&self) -> u32 {
        self.0.blocks_per_sm
    }

    fn constants(&self, problem: &Problem, constants: &mut Constants) {
        KernelFamily::constants(&self.0, problem, constants);
        constants.extend([
            ("pack_group", packs(problem).to_string()),
            ("table_entries", TABLE_ENTRIES.to_string()),
            ("table_bytes", TABLE_BYTES.to_string()),
        ]);
        self.pieces().constants(problem, constants);
    }

    fn plan(&self, problem: &Problem, shape: &Shape) -> Result<LaunchPlan> {
        let tiling = self.tiling(problem, shape)?;
        let pieces = self.pieces();
        let grid = pieces.grid(tiling.tiles as u64, shape.kv_len, self.0.block_kv);
        let main = Stage::of(StageEntry::MAIN, grid, self.0.threads(), self.smem_bytes(problem));
        let main = Stage { resident: Some(self.0.blocks_per_sm), ..main.starting_early() };
        let regions = [pieces.region(problem), Region { holds: Holds::TileCounter, bytes: 16 }];
        Ok(LaunchPlan::new([main], regions, Some(tiling)))
    }

    fn ragged_account(&self, usual: &Usual<'_>) -> Option<RaggedAccount> {
        let s = &self.0;
        let tiling = self.tiling(usual.problem, &usual.sizes.shape).ok()?;
        let [split, merge] = self.pieces().told(usual.problem, usual.seen(s.block_q().into()));
        let split = format!(
            "up to {} tiles of up to {} rows over {} thread blocks, the longest sequences first; {split}",
            tiling.tiles,
            s.block_q(),
            usual.units * s.blocks_per_sm
        );
        Some(RaggedAccount { split, merge, pages: format!("TMA, {} keys a block: {}", s.block_kv, usual.index()) })
    }

    fn walk(&self, _: &Problem, shape: &Shape) -> Walk {
        Walk::plain(self.0.block_q(), self.0.block_kv, shape)
    }
}

/// Rows of a KV head up to which a call is left to the other family.
const FEW_ROWS: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Kernel, KvKind, KvStore, MaskKind, Schedule};

    #[test]
    fn every_default_is_legal() {
        let store = KvStore { element: KvElement::E4m3, ..KvStore::default() };
        for d in (16..=256).step_by(16) {
            for mask in MaskKind::ALL {
                for q_len in [1, 100, 16384] {
                    let problem = Problem::forward(DType::E4m3, d, mask).unwrap().with_kv(KvKind::Ragged(store));
                    let bucket = ShapeBucket { parallel: 32, group: 4, q_len, kv_len: 16384, ..Default::default() };
                    let arch = "sm_90a".parse().unwrap();
                    let schedule = Schedule::Sm90Fp8Ragged(Sm90Fp8RaggedSchedule::default_for(&problem, arch, &bucket));
                    Kernel { problem, schedule, arch }.check().unwrap();
                }
            }
        }
    }

    #[test]
    fn boxes_are_128_bytes_wide_and_begin_with_pages() {
        use crate::abi::RaggedArgs;
        use crate::{Mask, ragged_unaddressable};
        use bytemuck::Zeroable;
        let store = KvStore { element: KvElement::E4m3, ..KvStore::default() };
        let problem = Problem::forward_qk_v(DType::E4m3, 192, 128, MaskKind::CAUSAL).unwrap();
        let problem = problem.with_kv(KvKind::Ragged(store));
        let shape = Shape { batch: 3, heads: 8, kv_heads: 2, q_len: 100, kv_len: 300, mask: Mask::Causal };
        let arch = "sm_90a".parse().unwrap();
        let schedule = Sm90Fp8RaggedSchedule(Sm90Fp8Schedule { block_kv: 96, consumers: 2, ..Default::default() });
        let kernel = Kernel { problem, schedule: Schedule::Sm90Fp8Ragged(schedule), arch };
        // 240 packed rows, and 20 pages of 16 tokens of two heads.
        let args = RaggedArgs {
            q: 0x1000,
            k: 0x2000,
            v: 0x3000,
            q_begin: 0x4000,
            k_table: 0x5000,
            q_stride: [0, 192, 1536],
            k_stride: [6144, 384, 192, 16],
            v_stride: [4096, 256, 128, 1],
            pages: 20,
            page_tokens: 16,
            batch: 3,
            heads: 8,
            kv_heads: 2,
            kv_len: 300,
            q_rows: 240,
            ..RaggedArgs::zeroed()
        };
        assert_eq!(ragged_unaddressable(&problem, &args), None);
        let tiling = schedule.tiling(&problem, &shape).unwrap();
        assert_eq!((tiling.group_shift, tiling.unit_heads, tiling.tiles), (2, 2, 4 * 2 * 3));
        let ([q, k, v, _], keys) = kernel.ragged_tensor_maps(&tiling, &args).unwrap();
        assert_eq!((keys, q.tile, k.tile), (16, [128, 4, 16, 1, 1], [128, 16, 1, 1, 1]));
        assert_eq!((q.dims, q.strides[..3].to_vec()), ([192, 4, 240, 2, 1], vec![192, 1536, 768]));
        assert_eq!((k.dims, k.strides[..3].to_vec()), ([192, 16, 2, 20, 1], vec![384, 192, 6144]));
        assert_eq!((v.dims, v.strides[..3].to_vec()), ([128, 16, 2, 20, 1], vec![256, 128, 4096]));
        // Strides are of multiples of 16 bytes, which here are as many elements; pieces of K have 16.
        let refused = |args: RaggedArgs| ragged_unaddressable(&problem, &args).unwrap().to_string();
        let odd = refused(RaggedArgs { k_stride: [6152, 384, 192, 16], ..args });
        assert!(odd.contains("positive multiples of 16 below 2^40"), "{odd}");
        assert!(refused(RaggedArgs { k_stride: [6144, 384, 192, 8], ..args }).contains("side by side"));
        assert!(refused(RaggedArgs { page_tokens: 8, ..args }).contains("pages of 8 tokens"));
    }
}
