//! The one argument struct that every forward kernel takes, on every device.
//!
//! CUDA kernels receive it by value as `const __grid_constant__ ForwardArgs`, CPU kernels by pointer. Its layout is
//! repeated in `templates/lib/cuda/abi.cuh` and `templates/lib/cpu/abi.h`; [`ABI_VERSION`] is part of every key, so a
//! kernel built for another layout is refused, never called.

use bytemuck::{Pod, Zeroable};

/// Version of [`ForwardArgs`] and of the entry points. Any change to either needs a new number.
pub const ABI_VERSION: u32 = 1;

/// Arguments of a forward kernel. Pointers are device addresses; strides count elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct ForwardArgs {
    /// Q, `[batch, heads, q_len, head_dim_qk]` by strides.
    pub q: u64,
    /// K, `[batch, kv_heads, kv_len, head_dim_qk]` by strides.
    pub k: u64,
    /// V, `[batch, kv_heads, kv_len, head_dim_v]` by strides.
    pub v: u64,
    /// O, `[batch, heads, q_len, head_dim_v]` by strides.
    pub o: u64,
    /// Log-sum-exp, fp32, contiguous `[batch, heads, q_len]`, or 0.
    pub lse: u64,
    /// Attention weights, fp32, contiguous `[batch, heads, q_len, kv_len]`, or 0. Only `forward/naive` writes them.
    pub weights: u64,
    /// Strides of Q: batch, head, row.
    pub q_stride: [i64; 3],
    /// Strides of K: batch, head, row.
    pub k_stride: [i64; 3],
    /// Strides of V: batch, head, row.
    pub v_stride: [i64; 3],
    /// Strides of O: batch, head, row.
    pub o_stride: [i64; 3],
    /// Number of sequences.
    pub batch: i32,
    /// Number of query heads.
    pub heads: i32,
    /// Number of KV heads.
    pub kv_heads: i32,
    /// Rows of Q.
    pub q_len: i32,
    /// Rows of K and V.
    pub kv_len: i32,
    /// Keys visible before the query's position; read only by kernels whose left side is bounded.
    pub window_left: i32,
    /// Keys visible after the query's position; read only by kernels whose right side is bounded.
    pub window_right: i32,
    /// Softmax scale, applied to the scores.
    pub scale: f32,
}
