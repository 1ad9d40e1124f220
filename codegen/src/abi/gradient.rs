//! The argument of kernels that sum the gradient of what a score program reads.

use super::BackwardArgs;
use super::declare::arguments;
use bytemuck::{Pod, Zeroable};

arguments! {
    /// Arguments of a kernel that sums the gradient of one tensor or scalar that a score program reads, over the places
    /// that read each element. Strides count elements; axes that a tensor has not have the length 1.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
    pub struct GradientArgs as "GradientArgs" {
        /// What a backward pass takes; dQ, dK and dV are 0. `scratch` has the partial sums, fp32
        /// `[splits, elements]`, where `direct` is 0.
        pub backward: BackwardArgs,
        /// The gradient, by strides.
        pub out: u64 as "void*",
        /// Strides of the gradient.
        pub out_stride: [i64; 4],
        /// Where an element of a place in the tensor lies: among the partial sums, or, where `direct` is 1, in the
        /// gradient itself.
        pub place_stride: [i64; 4],
        /// Elements of the gradient.
        pub elements: i64,
        /// Parts of the places of a group, each with partial sums of its own.
        pub splits: i64,
        /// Length of each axis.
        pub length: [i32; 4],
        /// Elements of the gradient: 0 fp32, 1 f16, 2 bf16.
        pub out_type: i32,
        /// Coordinates of which each value has its own elements, in bits: 1 sequences, 2 KV heads, 4 the query heads of
        /// one, 8 queries, 16 keys. The places of one value of all of these, a group, are walked in one order.
        pub keeps: i32,
        /// Whether the pairs of a query and a key have an element each, so that their sums stay in registers.
        pub direct: i32,
        /// On the CPU, 1 where partial sums are added up and written.
        pub step: i32,
    }
}

/// Bits of [`GradientArgs::keeps`].
pub mod keeps {
    /// Sequences.
    pub const BATCH: i32 = 1;
    /// KV heads.
    pub const KV_HEADS: i32 = 2;
    /// The query heads of a KV head.
    pub const MEMBERS: i32 = 4;
    /// Queries.
    pub const QUERIES: i32 = 8;
    /// Keys.
    pub const KEYS: i32 = 16;
}
