//! Unfused attention.
use super::{HostTensor, RowId, Rows};
use flashtune_codegen::Mask;

/// Unfused attention of everything, on all cores: what `tune` and `bench` compare against on the CPU.
pub fn unfused(_q: &HostTensor, _k: &HostTensor, _v: &HostTensor, _mask: Mask, _scale: f32) -> HostTensor {
    todo!()
}

/// Unfused attention of some rows: the yardstick of errors.
pub fn unfused_rows(_q: &HostTensor, _k: &HostTensor, _v: &HostTensor, _mask: Mask, _scale: f32, _ids: &[RowId]) -> Rows {
    todo!()
}
