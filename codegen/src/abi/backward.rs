//! The argument of backward kernels.

use super::TensorMap;
use super::declare::arguments;
use bytemuck::{Pod, Zeroable};

arguments! {
    /// Arguments of a backward kernel: the gradients dQ, dK and dV of a loss whose gradient by O is dO. Pointers are
    /// device addresses, 0 for what a call has not; strides count elements.
    ///
    /// With `q_begin` the rows of all sequences lie one after the other: tensors have no axis of the batch, whose
    /// strides are then 0, and the log-sum-exp is `[heads, q_rows]`.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
    pub struct BackwardArgs as "BackwardArgs" {
        /// dO, `[batch, heads, q_len, head_dim_v]` by strides.
        pub dout: u64 as "const void*",
        /// Q, `[batch, heads, q_len, head_dim_qk]` by strides.
        pub q: u64 as "const void*",
        /// K, `[batch, kv_heads, kv_len, head_dim_qk]` by strides.
        pub k: u64 as "const void*",
        /// V, `[batch, kv_heads, kv_len, head_dim_v]` by strides.
        pub v: u64 as "const void*",
        /// O of the forward pass, `[batch, heads, q_len, head_dim_v]` by strides.
        pub o: u64 as "const void*",
        /// Natural log-sum-exp of the forward pass, fp32, contiguous `[batch, heads, q_len]`: -inf of rows that attend
        /// to nothing.
        pub lse: u64 as "const float*",
        /// The loss's gradient by the log-sum-exp, fp32, contiguous `[batch, heads, q_len]`; or 0: it does not depend
        /// on it.
        pub dlse: u64 as "const float*",
        /// dQ, `[batch, heads, q_len, head_dim_qk]` by strides.
        pub dq: u64 as "void*",
        /// dK, `[batch, kv_heads, kv_len, head_dim_qk]` by strides: the sum over the query heads of a KV head.
        pub dk: u64 as "void*",
        /// dV, `[batch, kv_heads, kv_len, head_dim_v]` by strides: the same sum.
        pub dv: u64 as "void*",
        /// Scratch memory of the launch, for kernels whose plan has some; or 0.
        pub scratch: u64 as "void*",
        /// Strides of dO: batch, head, row.
        pub dout_stride: [i64; 3],
        /// Strides of Q: batch, head, row.
        pub q_stride: [i64; 3],
        /// Strides of K: batch, head, row.
        pub k_stride: [i64; 3],
        /// Strides of V: batch, head, row.
        pub v_stride: [i64; 3],
        /// Strides of O: batch, head, row.
        pub o_stride: [i64; 3],
        /// Strides of dQ: batch, head, row.
        pub dq_stride: [i64; 3],
        /// Strides of dK: batch, head, row.
        pub dk_stride: [i64; 3],
        /// Strides of dV: batch, head, row.
        pub dv_stride: [i64; 3],
        /// Number of sequences.
        pub batch: i32,
        /// Number of query heads.
        pub heads: i32,
        /// Number of KV heads.
        pub kv_heads: i32,
        /// Rows of Q; of packed sequences the most that one has, longer ones are cut.
        pub q_len: i32,
        /// Rows of K and V; the same.
        pub kv_len: i32,
        /// Keys visible before the query's position; read only by kernels whose left side is bounded.
        pub window_left: i32,
        /// Keys visible after the query's position; read only by kernels whose right side is bounded.
        pub window_right: i32,
        /// Softmax scale, applied to the scores.
        pub scale: f32,
        /// As `ForwardArgs.side`.
        pub side: u64 as "const void*",
        /// First row of each packed sequence in Q, O, dO, dQ and the log-sum-exp, and the end of the last one's,
        /// `[batch + 1]`; or 0: dense tensors.
        pub q_begin: u64 as "const int*",
        /// The same of K, V, dK and dV.
        pub kv_begin: u64 as "const int*",
        /// Rows of each sequence in Q that are used, `[batch]`, or 0: all. Those behind are not read, and have no
        /// gradient written.
        pub q_lengths: u64 as "const int*",
        /// The same of K.
        pub kv_lengths: u64 as "const int*",
        /// Rows of Q of all packed sequences: none behind is touched, whatever the arrays hold.
        pub q_rows: i64,
        /// The same of K.
        pub kv_rows: i64,
        /// 32-bit words of an element of `q_begin` and `q_lengths`: 1 or 2.
        pub q_words: i32,
        /// The same of `kv_begin` and `kv_lengths`.
        pub kv_words: i32,
        /// As `ForwardArgs.residual`, which D takes beside O.
        pub residual: u64 as "const void*",
        /// Strides of it: batch, head, row.
        pub residual_stride: [i64; 3],
        /// As `ForwardArgs.dropout_threshold`, and those that follow as theirs: what the forward pass had.
        pub dropout_threshold: u32,
        /// What kept weights are multiplied by.
        pub dropout_scale: f32,
        /// The seed, to which what lies at `dropout_seed_at` is added.
        pub dropout_seed: u64,
        /// The offset, to which what lies at `dropout_offset_at` is added.
        pub dropout_offset: u64,
        /// Address of 64 bits of a seed on the device, or 0.
        pub dropout_seed_at: u64 as "const void*",
        /// Address of 64 bits of an offset on the device, or 0.
        pub dropout_offset_at: u64 as "const void*",
    }
}

arguments! {
    /// The argument of kernels that take tensor maps beside [`BackwardArgs`], by value: that of one wave
    /// ([`crate::Waves`]), whose parts are pairs of a sequence and a KV head.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct BackwardMappedArgs as "Sm90BackwardArgs" {
        /// Q and dO by boxes of query tiles, K and V by boxes of key blocks, the gradients by boxes of 64 rows.
        pub maps: [TensorMap; 7] { q, dout, k, v, dq, dk, dv },
        /// What every backward kernel takes; `scratch` is that of the wave.
        pub backward: BackwardArgs,
        /// The first pair of the wave; of packed sequences, whose pairs are laid into waves on the device, its number.
        pub first_pair: i32,
        /// Pairs of the wave; of packed sequences of all of them.
        pub pairs: i32,
        /// Pairs whose key blocks take turns: more keep thread blocks of equal length together, fewer keep Q and dO in
        /// L2. Of packed sequences the rows of Q and dO that those pairs have at most.
        pub keys_section: i32,
        /// Pairs whose row blocks take turns: the same, and fewer keep K in L2. Of packed sequences rows.
        pub queries_section: i32,
        /// Bytes of scratch memory that dS of a wave of packed sequences has; 0 of dense tensors.
        pub ds_bytes: i64,
        /// Walks over a key block, by a thread block each, with as many of the query heads of a group; 1 where one has
        /// all of them.
        pub walks: i64,
    }
}
