//! Tensors as the host hands them over, and their way into kernel arguments.
//!
//! Everything that a kernel takes for granted (matching sizes, a contiguous last dim, 16-byte vectors) is checked here,
//! once, with an error that names the tensor.

use crate::{Error, Result};
use flashtune_codegen::abi::ForwardArgs;
use flashtune_codegen::{Arch, DType, Mask, Problem, Shape};

/// A tensor on a device: where it is and how it is laid out. Owns nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorView {
    /// Device address of element `[0, 0, 0, 0]`.
    pub address: u64,
    /// Element type.
    pub dtype: DType,
    /// Batch, heads, rows, elements of a row.
    pub shape: [u64; 4],
    /// Distance in elements between neighbours along each dimension of `shape`.
    pub strides: [i64; 4],
}

impl TensorView {
    /// A contiguous `[batch, heads, rows, dim]` tensor.
    pub fn bhsd(address: u64, dtype: DType, shape: [u64; 4]) -> Self {
        let [_, h, s, d] = shape.map(to_stride);
        let strides = [h.saturating_mul(s).saturating_mul(d), s.saturating_mul(d), d, 1];
        Self { address, dtype, shape, strides }
    }

    /// A contiguous `[batch, rows, heads, dim]` tensor. `shape` is in memory order; the view's is batch, heads, rows,
    /// dim as everywhere.
    pub fn bshd(address: u64, dtype: DType, shape: [u64; 4]) -> Self {
        let [b, s, h, d] = shape;
        let [_, sh, hh, dh] = shape.map(to_stride);
        let strides = [sh.saturating_mul(hh).saturating_mul(dh), dh, hh.saturating_mul(dh), 1];
        Self { address, dtype, shape: [b, h, s, d], strides }
    }

    /// A contiguous fp32 `[batch, heads, rows]` tensor, as the log-sum-exp is: a view whose last dim is 1.
    pub fn rows(address: u64, [b, h, s]: [u64; 3]) -> Self {
        Self::bhsd(address, DType::F32, [b, h, s, 1])
    }

    /// The same tensor with other strides (in elements: batch, head, row, element).
    pub fn with_strides(self, strides: [i64; 4]) -> Self {
        Self { strides, ..self }
    }

    /// Whether the tensor has no element.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Bytes from the first element's start to the last element's end, or `None` when that exceeds 64 bits or a stride
    /// is negative.
    pub fn extent_bytes(&self) -> Option<u64> {
        if self.is_empty() {
            return Some(0);
        }
        let mut last = 0u64;
        for (n, stride) in self.shape.iter().zip(self.strides) {
            last = last.checked_add((n - 1).checked_mul(u64::try_from(stride).ok()?)?)?;
        }
        last.checked_add(1)?.checked_mul(self.dtype.bytes() as u64)
    }
}

fn to_stride(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// The tensors of one forward call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardTensors {
    /// Q, `[batch, heads, q_len, head_dim_qk]`.
    pub q: TensorView,
    /// K, `[batch, kv_heads, kv_len, head_dim_qk]`.
    pub k: TensorView,
    /// V, `[batch, kv_heads, kv_len, head_dim_v]`.
    pub v: TensorView,
    /// O, `[batch, heads, q_len, head_dim_v]`; written.
    pub o: TensorView,
    /// Log-sum-exp, contiguous fp32 `[batch, heads, q_len, 1]` ([`TensorView::rows`]); written when given.
    pub lse: Option<TensorView>,
}

/// What a forward call comes down to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForwardCall {
    /// What the kernel must be specialised to.
    pub problem: Problem,
    /// The sizes.
    pub shape: Shape,
    /// The kernel's arguments (`weights` is 0).
    pub args: ForwardArgs,
}

/// Checks the tensors against each other and against what kernels of `arch` take, and builds the arguments.
///
/// `scale` defaults to `1 / sqrt(head_dim_qk)`. Sizes of zero are legal. Window reaches beyond the lengths are clamped
/// to them, which changes nothing and keeps the kernels' 32-bit sums in range.
///
/// # Errors
/// [`Error::Tensor`] naming the tensor, the field and the remedy; [`Error::Codegen`] for head dims, head counts and
/// lengths that no kernel supports.
pub fn forward_call(tensors: &ForwardTensors, mask: Mask, scale: Option<f32>, arch: Arch) -> Result<ForwardCall> {
    let _ = (tensors, mask, scale, arch);
    todo!()
}
