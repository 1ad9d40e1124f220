//! New rows of K and V into a KV store, as the host states it: one call takes the rows of vLLM's `reshape_and_cache`
//! (a slot for each) and those that flash-attention appends (behind the length of each sequence).
//!
//! ```text
//! Append { rows, store, target, queries, rotary } -> checks -> AppendCall { problem, shape, args }
//! ```
//!
//! Store, index and lengths are those of a [`crate::RaggedBatch`]: the attention that follows takes the same.

mod cases;
mod check;
#[cfg(test)]
mod tests;

pub use cases::{AppendCase, check_append};

use crate::Result;
use crate::ragged::{Index, Ints, KeyLengths, Store};
use flashtune_codegen::abi::AppendArgs;
use flashtune_codegen::{DType, Problem, Shape};

/// Rows of a tensor, by address and strides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Device address of the first element.
    pub address: u64,
    /// Distance in elements from one batch entry, head and row to the next. That of the batch has no meaning where rows
    /// are packed. Elements of a row are contiguous.
    pub strides: [i64; 3],
}

/// How rows belong to sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowCount {
    /// `[batch, rows]`: every sequence has as many.
    Each(u64),
    /// `[total]`: those of all sequences one after the other. Rows before the first and behind the last sequence are
    /// those of none, and left out.
    Packed {
        /// First row of each sequence, and the end of the last one's, `[batch + 1]`.
        begin: Ints,
        /// Rows of the tensor.
        total: u64,
    },
}

/// Where new rows go. No two rows of a call may go to one place: which of them is kept is not said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// To a token each, counted through the pages of the store: that of page `slot / page_tokens` at
    /// `slot % page_tokens`. Negative slots are skipped, as are those behind the last page. The call is then one
    /// sequence of all rows.
    Slots {
        /// One for each row.
        mapping: Ints,
    },
    /// Behind the tokens that each sequence has. Rows behind `max_kv` are left out, as are those in a page that the
    /// store has not.
    Lengths {
        /// Sequences.
        batch: u64,
        /// Where the tokens of a sequence lie in the store; packed ones have no room behind them and are refused.
        index: Index,
        /// How many there are, as the attention that follows is told: [`KeyLengths::Each`] with rows that came behind
        /// them says the lengths before this call, everything else those after it.
        keys: KeyLengths,
        /// Tokens that a sequence has at most after the call.
        max_kv: u64,
    },
}

/// Where rows are rotated to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Positions {
    /// New row `i` of a sequence to the place that it gets: the length before, padding included, and `i`. Row `i` of Q
    /// likewise.
    OfPlaces,
    /// New row `i` of a sequence to its first position and `i`.
    From {
        /// First position of each sequence, `[batch]`.
        first: Ints,
    },
    /// Each row to a position of its own.
    Each {
        /// Those of the new rows.
        k: Ints,
        /// Address of those of Q's rows, of the same kind; K's where absent.
        q: Option<u64>,
    },
}

/// A rotary embedding: pairs of elements turn by an angle that grows with the position. Rows at a position that the
/// tables have not become NaN where they would have turned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rotary {
    /// Device address of the cosines, `[rows, dim / 2]`.
    pub cos: u64,
    /// Device address of the sines, of the same layout.
    pub sin: u64,
    /// Elements of both: fp32, or those of the new rows.
    pub dtype: DType,
    /// Distance in elements from one position to the next, the same in both: tables may lie side by side.
    pub stride: i64,
    /// Positions that the tables have.
    pub rows: u64,
    /// Leading elements of a row that turn, an even number; the others stay as they are.
    pub dim: u64,
    /// Whether neighbours `2i` and `2i + 1` turn together (GPT-J), or `i` and `i + dim / 2` (NeoX).
    pub interleaved: bool,
    /// Where rows are rotated to.
    pub positions: Positions,
}

/// Rows of Q that are rotated in the same pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AppendQueries {
    /// What is read.
    pub from: Rows,
    /// What is written: other memory, or the very same rows.
    pub to: Rows,
    /// Query heads.
    pub heads: u64,
    /// How rows belong to sequences: with slots, one sequence of all rows.
    pub rows: RowCount,
    /// Whether row `i` of a sequence is `i` positions behind its first one; all are at the first otherwise, as
    /// flash-attention has it without a causal mask. Of no meaning where each row has its position.
    pub advance: bool,
}

/// New rows of K and V into a store.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Append {
    /// Elements of the new rows and of Q.
    pub dtype: DType,
    /// Elements of a row of K and of Q.
    pub head_dim: u64,
    /// New rows of K.
    pub k: Rows,
    /// New rows of V, of the store's `head_dim_v` elements.
    pub v: Rows,
    /// How they belong to sequences.
    pub rows: RowCount,
    /// Where they go: elements are rounded to nearest even after they were divided by their scale, and beyond the
    /// largest finite value are that value. NaN stays NaN in e4m3 and e5m2, and is 0 in int8. Under a scale of 0 every
    /// number is stored as 0.
    pub store: Store,
    /// To which of its tokens.
    pub target: Target,
    /// Rows of Q beside them, if any; only with a rotary embedding.
    pub queries: Option<AppendQueries>,
    /// What K and Q are rotated by.
    pub rotary: Option<Rotary>,
    /// Whether the scales of tokens are found from the rows, so that the finite elements of each fill the range of the
    /// store's, and written; they are read otherwise.
    pub finds_scales: bool,
}

/// What an append comes down to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AppendCall {
    /// What the kernel must be specialised to.
    pub problem: Problem,
    /// The bounds, by which a launch goes: one sequence of all rows.
    pub shape: Shape,
    /// The kernel's arguments.
    pub args: AppendArgs,
}

/// Checks a call against what kernels take, and builds the arguments. Looks at no memory of the device. Sizes of zero
/// are legal.
///
/// # Errors
/// [`crate::Error::Tensor`] naming the tensor, the field and the remedy; [`crate::Error::Codegen`] for what no kernel
/// computes.
pub fn append_call(append: &Append) -> Result<AppendCall> {
    check::call(append)
}

impl Append {
    /// Calls with every range of memory that the call may touch: its name, address and size in bytes. Of what the
    /// device alone knows the size of, the first element.
    ///
    /// # Errors
    /// What `f` says, and as [`append_call`] for layouts.
    pub fn each_range(&self, f: &mut dyn FnMut(&'static str, u64, u64) -> Result<()>) -> Result<()> {
        check::ranges(self, f)
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        let new = self.new_rows() == 0 || self.store.kv_heads == 0;
        new && self.queries.is_none_or(|q| q.heads == 0 || self.rows_of(q.rows) == 0)
    }

    /// Sequences: one with slots.
    fn batch(&self) -> u64 {
        match self.target {
            Target::Slots { .. } => 1,
            Target::Lengths { batch, .. } => batch,
        }
    }

    /// New rows of all sequences.
    fn new_rows(&self) -> u64 {
        self.rows_of(self.rows)
    }

    fn rows_of(&self, rows: RowCount) -> u64 {
        match rows {
            RowCount::Each(rows) => self.batch().saturating_mul(rows),
            RowCount::Packed { total, .. } => total,
        }
    }
}
