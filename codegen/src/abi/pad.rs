//! The argument of the kernel that copies rows into rows of another length.

use super::declare::arguments;
use bytemuck::{Pod, Zeroable};

/// Tensors of one launch at most: those that a backward pass reads.
pub const PAD_TENSORS: usize = 5;

arguments! {
    /// Arguments of a copy of rows of 16-bit elements. Each array has an element for every tensor, 0 for those that a
    /// call has not; strides count elements, three for each tensor: batch, head, row.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
    pub struct PadArgs as "PadArgs" {
        /// Where rows are read.
        pub from: [u64; PAD_TENSORS] as "const void*",
        /// Where they are written.
        pub to: [u64; PAD_TENSORS] as "void*",
        /// Strides of what is read.
        pub from_stride: [i64; 3 * PAD_TENSORS],
        /// Strides of what is written.
        pub to_stride: [i64; 3 * PAD_TENSORS],
        /// Heads of a sequence.
        pub heads: [i32; PAD_TENSORS],
        /// Rows of a head.
        pub rows: [i32; PAD_TENSORS],
        /// Rows of all heads of all sequences.
        pub count: [i32; PAD_TENSORS],
        /// Elements of a row that is read.
        pub from_dim: [i32; PAD_TENSORS],
        /// Elements of a row that is written: those behind the ones that are read become 0.
        pub to_dim: [i32; PAD_TENSORS],
        /// The first thread block behind those of each tensor.
        pub blocks_end: [i32; PAD_TENSORS],
    }
}
