//! fp64.
use super::HostTensor;
use flashtune_codegen::{Mask, Shape};

/// One row of O.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowId {
    /// Sequence.
    pub batch: u32,
    /// Query head.
    pub head: u32,
    /// Query row.
    pub row: u32,
}

/// Results of some rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Rows {
    /// Which rows.
    pub ids: Vec<RowId>,
    /// Length of a row of O.
    pub dim: usize,
    /// O, `ids.len()` rows of `dim`.
    pub o: Vec<f64>,
    /// Natural log-sum-exp per row.
    pub lse: Vec<f64>,
}

/// Every row of a shape, in `[batch, heads, rows]` order.
pub fn all_rows(_shape: &Shape) -> Vec<RowId> {
    todo!()
}

/// At most `count` rows, first and last of some heads and random ones.
pub fn sample_rows(_shape: &Shape, _count: usize, _seed: u64) -> Vec<RowId> {
    todo!()
}

/// Attention in fp64 for some rows.
pub fn oracle(_q: &HostTensor, _k: &HostTensor, _v: &HostTensor, _mask: Mask, _scale: f32, _ids: &[RowId]) -> Rows {
    todo!()
}
