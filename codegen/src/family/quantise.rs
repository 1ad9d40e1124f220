//! What the families of `Op::Quantise` have in common: their problems, and the memory that their stages share.

use crate::{DType, Error, Problem, Result, Shape};

/// 32-bit words before the counters of KV heads.
const HEAD: u64 = 4;
/// Rows of a tile are a multiple of this, so that blocks of rows that share a scale lie in one.
pub(super) const BLOCK_ROWS: u32 = 128;

/// What the stages of a quantisation leave for each other: counters and largest magnitudes of each KV head of a
/// sequence and of its channels of V, its mean of K, and sums of each tile of K. In 32-bit words, of which the first
/// ones are zero before it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantiseScratch {
    /// Words that are zero before.
    pub counters: u64,
    /// All words.
    pub words: u64,
}

impl QuantiseScratch {
    /// For tiles of so many rows.
    pub fn new(problem: &Problem, shape: &Shape, tile_rows: u32) -> Self {
        let batch_kv_heads = u64::from(shape.batch) * u64::from(shape.kv_heads);
        let row = u64::from(problem.head_dim_qk);
        // Of each of three tensors what is done and the largest, and of K what has arrived and whether it is ready.
        let counters = HEAD + 8 * batch_kv_heads + batch_kv_heads * u64::from(problem.head_dim_v);
        let sums = batch_kv_heads * u64::from(shape.kv_len.div_ceil(tile_rows)) * row;
        Self { counters, words: counters + batch_kv_heads * row + sums }
    }

    /// Bytes of all.
    pub const fn bytes(&self) -> u64 {
        4 * self.words
    }
}

/// What any kernel of the operation computes.
pub(super) fn supports(family: &'static str, problem: &Problem) -> Result<()> {
    if problem.mask.any() || problem.program.is_some() {
        let limit = format!("{family} converts rows, which have no scores");
        return Err(Error::unsupported("mask", problem.mask, limit, "leave mask and score program out"));
    }
    debug_assert!(problem.dtype != DType::E4m3, "refused by all families that do not compute it");
    Ok(())
}

/// Tiles of all tensors, for the grid of a launch, where a tile is written so many tiles after it was read.
///
/// # Errors
/// More items than kernels count.
pub(super) fn tiles(shape: &Shape, tile_rows: u32, ahead: u32) -> Result<u64> {
    let batch_kv_heads = u64::from(shape.batch) * u64::from(shape.kv_heads);
    let of = |heads: u32, rows: u32| u64::from(heads) * u64::from(rows.div_ceil(tile_rows));
    let (q, kv) = (of(shape.group(), shape.q_len), of(1, shape.kv_len));
    // Slots are twice the KV heads and one more, and twice as many as have the tiles ahead; each has the tiles of Q
    // and V twice and of K three times.
    let of_slot = 2 * q + 5 * kv;
    let items = (2 * batch_kv_heads + 3).saturating_mul(of_slot).saturating_add(2 * u64::from(ahead));
    if items > i32::MAX as u64 {
        let limit = "at most 2^31 tiles, of which one scale for all takes as many again, in one launch";
        return Err(Error::unsupported("rows of all heads", items, limit, "quantise parts of the batch, or Q apart"));
    }
    Ok(batch_kv_heads * (q + 2 * kv))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arch, Family, Kernel, Mask, MaskKind, Op, Schedule, ShapeBucket, StageEntry};

    #[test]
    fn scratch_memory_follows_from_the_sizes_and_too_many_rows_are_refused() {
        let problem = Problem::forward(DType::Bf16, 128, MaskKind::FULL).unwrap();
        let problem = Problem { op: Op::Quantise, ..problem };
        let shape = Shape { batch: 2, heads: 8, kv_heads: 2, q_len: 100, kv_len: 200, mask: Mask::Full };
        let arch: Arch = "sm_90a".parse().unwrap();
        let schedule = Schedule::default_for(Family::QuantiseCuda, &problem, arch, &ShapeBucket::of(&shape)).unwrap();
        let kernel = Kernel { problem, schedule, arch };
        let plan = kernel.plan(&shape).unwrap();
        // Tiles of 128 rows: counters, channels, means and sums of two tiles.
        assert_eq!(plan.partial_sums(), Some(4 * (4 + 8 * 4 + 4 * 128 + 4 * 128 + 4 * 2 * 128)));
        let main = plan.stages().find(|stage| stage.entry == StageEntry::MAIN).unwrap();
        assert_eq!(main.grid, 4 * (4 + 2 + 2));
        let e = kernel.plan(&Shape { batch: 1 << 20, q_len: 1 << 20, ..shape }).unwrap_err().to_string();
        assert!(e.contains("rows of all heads") && e.contains("parts of the batch"), "{e}");
    }
}
