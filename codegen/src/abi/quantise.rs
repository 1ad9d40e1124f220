//! The argument of kernels that make `e4m3` operands with their scales.

use super::declare::arguments;
use bytemuck::{Pod, Zeroable};

arguments! {
    /// Arguments of a quantisation: rows of Q, K and V become e4m3, with the scales that they are multiplied by when
    /// they are read; rotated and freed of K's mean on the way. Arrays have an element for each of Q, K and V, 0 for
    /// what a call has not; strides count elements.
    ///
    /// Rows of a KV head of a sequence, of Q those of its query heads, are a unit: they share a scale, unless
    /// `scale_kind` says otherwise, and of K a mean.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
    pub struct QuantiseArgs as "QuantiseArgs" {
        /// What is read, or 0.
        pub from: [u64; 3] as "const void*",
        /// Where e4m3 is written.
        pub to: [u64; 3] as "void*",
        /// Where the scales are written, fp32 `[batch, kv_heads]` by strides, or with a third axis by `scale_kind`.
        pub scale: [u64; 3] as "float*",
        /// Where K's mean is written, fp32 `[batch, kv_heads, head_dim_qk]` by strides, or 0.
        pub mean: u64 as "float*",
        /// Cosines, a row of `rotary_dim / 2` for each position; or 0: nothing is rotated by them.
        pub cos: u64 as "const void*",
        /// Sines.
        pub sin: u64 as "const void*",
        /// Positions of the rows of Q and of K, `[batch, rows]`; or 0: row `i` is at `first_position` and `i`.
        pub positions: [u64; 2] as "const int32_t*",
        /// What the stages leave for each other.
        pub scratch: u64 as "void*",
        /// Strides of what is read: batch, head, row of each.
        pub from_stride: [i64; 9],
        /// Strides of what is written: batch, head, row of each.
        pub to_stride: [i64; 9],
        /// Strides of the scales: batch, head of each.
        pub scale_stride: [i64; 6],
        /// Strides of K's mean: batch, KV head.
        pub mean_stride: [i64; 2],
        /// From one position to the next in `cos` and `sin`.
        pub rotary_stride: i64,
        /// From one sequence to the next in `positions`.
        pub position_stride: [i64; 2],
        /// Position of the first row of Q and of K in every sequence.
        pub first_position: [i64; 2],
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
        /// 1 where all units of a tensor have one scale.
        pub is_whole: [i32; 3],
        /// Positions that `cos` and `sin` have.
        pub rotary_rows: i32,
        /// Leading elements of a row of Q or K that are rotated by them, an even number.
        pub rotary_dim: i32,
        /// 1 where neighbours are rotated together, and 0 where element i is with i + rotary_dim / 2.
        pub rotary_interleaved: i32,
        /// 1 where cosines and sines are fp32, and 0 where they have the dtype of Q.
        pub rotary_f32: i32,
        /// 32-bit words of a position: 1 or 2.
        pub position_words: i32,
        /// 1 where K's mean over the rows of a unit is taken from them.
        pub subtracts_mean: i32,
        /// 1 where rows of Q and K are multiplied by the Hadamard matrix.
        pub is_mixed: i32,
        /// On the host processor: which of the stages it is.
        pub step: i32,
        /// From a scale of rows or of a channel to the next, of each.
        pub scale_unit_stride: [i64; 3],
        /// What shares a scale in each: 0 a unit, or with `is_whole` all of them; 1 rows, as many as `scale_rows_log2`
        /// says; 2 of V a channel of a unit. Heads of scales of rows are those of the tensor.
        pub scale_kind: [i32; 3],
        /// log2 of the rows that share a scale, which divide those of a tile.
        pub scale_rows_log2: [i32; 3],
    }
}
