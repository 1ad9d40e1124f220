//! The argument of kernels that write new rows of K and V into a store.

use super::declare::arguments;
use bytemuck::{Pod, Zeroable};

arguments! {
    /// Arguments of an append: new rows of K and V go into a store that is indexed at run time, rotated and quantised
    /// on the way; rows of Q may be rotated beside them. Pointers are device addresses, 0 for what a call has not;
    /// strides count elements.
    ///
    /// Where a new row goes is said by `slot_mapping`, or follows from the length of its sequence: new row `i` of
    /// sequence `b` goes to place `p = length(b) + i` of the sequence's row in the store, in page `p / page_tokens` of
    /// that row at `p % page_tokens`, by the same tables as `RaggedArgs` has. Rows whose place is behind `kv_len`,
    /// behind the last page or in no page of the store are not written.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
    pub struct AppendArgs as "AppendArgs" {
        /// New rows of K.
        pub k_new: u64 as "const void*",
        /// New rows of V.
        pub v_new: u64 as "const void*",
        /// Rows of Q to rotate, or 0.
        pub q: u64 as "const void*",
        /// Where they go; may be `q` with the same strides.
        pub q_out: u64 as "void*",
        /// The store of K.
        pub k: u64 as "void*",
        /// The store of V.
        pub v: u64 as "void*",
        /// For each new row the token of the store, counted through its pages, that it becomes; negative ones are
        /// skipped. Or 0: places follow from lengths.
        pub slot_mapping: u64 as "const int32_t*",
        /// Identifiers of K's pages, or 0.
        pub k_table: u64 as "const int32_t*",
        /// Identifiers of V's pages; K's where they are the same; 0 without a table.
        pub v_table: u64 as "const int32_t*",
        /// First entry of each sequence in the tables and the end of the last one's, `[batch + 1]`, or 0.
        pub pages_begin: u64 as "const int32_t*",
        /// Which page of a store without a table is a sequence's, `[batch]`, or 0.
        pub slots: u64 as "const int32_t*",
        /// Tokens of each sequence in the store, `[batch]`, padding before them included; or 0: by `length_sums`, or by
        /// `pages_begin` and `last_page`.
        pub lengths: u64 as "const int32_t*",
        /// The same as the differences of `[batch + 1]`, or 0.
        pub length_sums: u64 as "const int32_t*",
        /// Tokens of the last page of each sequence, `[batch]`, for tables with `pages_begin`; or 0.
        pub last_page: u64 as "const int32_t*",
        /// First new row of each sequence, and the end of the last one's, `[batch + 1]`; or 0: `new_len` rows each.
        pub new_begin: u64 as "const int32_t*",
        /// First row of each sequence in Q, and the end of the last one's, `[batch + 1]`; or 0: `q_len` rows each.
        pub q_begin: u64 as "const int32_t*",
        /// Position of every new row, by which K is rotated; or 0: it follows from `first_position`.
        pub k_positions: u64 as "const int32_t*",
        /// Position of every row of Q; or 0: as for K.
        pub q_positions: u64 as "const int32_t*",
        /// Position of the first new row of each sequence, `[batch]`; or 0: its length before.
        pub first_position: u64 as "const int32_t*",
        /// Cosines, a row of `rotary_dim / 2` for each position; or 0: nothing is rotated.
        pub cos: u64 as "const void*",
        /// Sines.
        pub sin: u64 as "const void*",
        /// What an element of a quantised K is multiplied by when it is read, fp32, or 0 for 1.
        pub k_scale: u64 as "float*",
        /// The same for V.
        pub v_scale: u64 as "float*",
        /// Strides of the new K: batch, head, row. That of the batch is of no meaning where rows are packed.
        pub k_new_stride: [i64; 3],
        /// Strides of the new V: batch, head, row.
        pub v_new_stride: [i64; 3],
        /// Strides of Q: batch, head, row.
        pub q_stride: [i64; 3],
        /// Strides of the rotated Q: batch, head, row.
        pub q_out_stride: [i64; 3],
        /// Strides of K: page, token, head, and the next 16 bytes of a row.
        pub k_stride: [i64; 4],
        /// Strides of V: page, token, head, and column.
        pub v_stride: [i64; 4],
        /// Strides of K's scales: sequence, head, 0; or, for scales of tokens, page, head, token.
        pub k_scale_stride: [i64; 3],
        /// The same for V's.
        pub v_scale_stride: [i64; 3],
        /// Entries of the tables from one sequence to the next.
        pub table_stride: i64,
        /// Pages of the stores: identifiers outside of 0 to this are those of no page.
        pub pages: i64,
        /// From one position to the next in `cos` and `sin`.
        pub rotary_stride: i64,
        /// Number of sequences; 1 with a slot mapping.
        pub batch: i32,
        /// Number of query heads, 0 without Q.
        pub heads: i32,
        /// Number of KV heads.
        pub kv_heads: i32,
        /// New rows of K and V, of all sequences.
        pub new_rows: i32,
        /// New rows of a sequence where they are not packed.
        pub new_len: i32,
        /// Rows of Q, of all sequences.
        pub q_rows: i32,
        /// Rows of Q of a sequence where they are not packed.
        pub q_len: i32,
        /// Tokens that a sequence has at most.
        pub kv_len: i32,
        /// Tokens of a page.
        pub page_tokens: i32,
        /// Positions that `cos` and `sin` have.
        pub rotary_rows: i32,
        /// Leading elements of a row of K or Q that are rotated, an even number.
        pub rotary_dim: i32,
        /// 1 where neighbours are rotated together, and 0 where element i is with i + rotary_dim / 2.
        pub rotary_interleaved: i32,
        /// 1 where cosines and sines are fp32, and 0 where they have the dtype of K.
        pub rotary_f32: i32,
        /// How far the position advances from a row of Q to the next of its sequence: 1, or 0 for one of all.
        pub q_advance: i32,
        /// 1 where `lengths` count the new rows already.
        pub lengths_after: i32,
        /// 1 where scales of tokens are found from the rows and written, and 0 where they are read.
        pub finds_scales: i32,
        /// 32-bit words of an entry of the tables and of `slots`: 1 or 2.
        pub table_words: i32,
        /// 32-bit words of an element of the arrays of lengths and of first rows: 1 or 2.
        pub length_words: i32,
        /// 32-bit words of an element of `slot_mapping`: 1 or 2.
        pub slot_words: i32,
        /// 32-bit words of a position: 1 or 2.
        pub position_words: i32,
    }
}
