//! One call over a ragged batch, as the host states it: sequences of different lengths, whose K and V lie in a store
//! that is indexed on the device.
//!
//! ```text
//! RaggedBatch { queries, store, index, keys, output, bounds, expected } -> checks -> RaggedCall { problem, args, .. }
//! ```
//!
//! The types take the layouts of serving hosts as they are: nothing is copied, permuted or gathered. Every length and
//! every table is an address on the device; the host knows bounds, strides and a hint. So nothing of a call waits for
//! the device, and a call that was captured is replayed with other lengths and pages.

mod check;
pub(crate) mod layout;
#[cfg(test)]
mod tests;

use crate::Result;
use crate::tensor::windows;
use flashtune_codegen::abi::RaggedArgs;
use flashtune_codegen::score::ProgramRef;
use flashtune_codegen::{CallSizes, DType, KvElement, Mask, PageClass, Problem, Shape};

/// Integers of an array on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IntKind {
    /// 32-bit signed.
    I32,
    /// 32-bit unsigned. Values from 2^31 on are out of every range.
    U32,
    /// 64-bit signed.
    I64,
}

impl IntKind {
    /// Size of one in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            IntKind::I32 | IntKind::U32 => 4,
            IntKind::I64 => 8,
        }
    }

    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            IntKind::I32 => "i32",
            IntKind::U32 => "u32",
            IntKind::I64 => "i64",
        }
    }
}

/// A contiguous array of integers on the device: lengths, first rows, identifiers of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ints {
    /// Device address of the first.
    pub address: u64,
    /// What they are. All lengths and first rows of a call are of one size, and all tables of one.
    pub kind: IntKind,
}

impl Ints {
    /// 32-bit signed ones.
    pub const fn i32(address: u64) -> Self {
        Self { address, kind: IntKind::I32 }
    }

    /// 64-bit signed ones.
    pub const fn i64(address: u64) -> Self {
        Self { address, kind: IntKind::I64 }
    }
}

/// How the rows of Q, of O and of the log-sum-exp belong to sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryRows {
    /// `[batch, max_q]`: every sequence has `max_q` rows.
    Uniform,
    /// `[total_q]`: those of all sequences one after the other.
    Packed {
        /// First row of each sequence, and the end of the last one's, `[batch + 1]`.
        begin: Ints,
    },
}

/// Q.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Queries {
    /// Device address of the first element.
    pub address: u64,
    /// Elements of Q and, but beside `e4m3`, of O.
    pub dtype: DType,
    /// Query heads, a multiple of the store's.
    pub heads: u64,
    /// Elements of a row of Q and K.
    pub head_dim: u64,
    /// Distance in elements from one batch entry, head and row to the next. That of the batch has no meaning where rows
    /// are packed.
    pub strides: [i64; 3],
    /// How rows belong to sequences.
    pub rows: QueryRows,
    /// Rows of each sequence that are used, `[batch]`: those behind are neither read nor written. All where absent.
    pub used: Option<Ints>,
    /// Ancestors of each row in a tree of drafts, one word of 64 bits a row, `[total_q]`. No kernel takes them yet: a
    /// call that has them is refused.
    pub tree: Option<u64>,
}

/// Elements of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreType {
    /// Those of the queries.
    Float(DType),
    /// OCP FP8 E4M3.
    E4m3,
    /// OCP FP8 E5M2.
    E5m2,
    /// Two's complement.
    Int8,
}

impl StoreType {
    /// What a kernel is specialised to.
    pub const fn element(self) -> KvElement {
        match self {
            StoreType::E4m3 | StoreType::Float(DType::E4m3) => KvElement::E4m3,
            StoreType::Float(_) => KvElement::Same,
            StoreType::E5m2 => KvElement::E5m2,
            StoreType::Int8 => KvElement::Int8,
        }
    }

    /// Size of one in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            StoreType::Float(dtype) => dtype.bytes(),
            StoreType::E4m3 | StoreType::E5m2 | StoreType::Int8 => 1,
        }
    }

    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            StoreType::Float(dtype) => dtype.name(),
            quantised => quantised.element().name(),
        }
    }
}

/// What the elements of a quantised store are multiplied by, fp32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    /// 1.
    One,
    /// One for each KV head of each sequence; one for each head with a stride of 0 along the sequences, and one for all
    /// with two of 0.
    PerHead {
        /// Device address of the first.
        address: u64,
        /// Distance in elements from one sequence and KV head to the next.
        strides: [i64; 2],
    },
    /// One for each KV head of each token, in pages as the tokens are.
    PerToken {
        /// Device address of the first.
        address: u64,
        /// Distance in elements from one page, KV head and token to the next.
        strides: [i64; 3],
    },
}

/// Where K or V lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreRows {
    /// Device address of the first element.
    pub address: u64,
    /// Its elements.
    pub element: StoreType,
    /// Distance in elements from one page, token and KV head to the next. They need not be products of sizes: pages of
    /// many layers may lie in one pool.
    pub strides: [i64; 3],
    /// Distance in elements from a piece of a row to the next one's, where rows are not contiguous: of K from 16 bytes
    /// to the next 16, as in `[pages, kv_heads, head_dim / x, page_tokens, x]`; of V from a column to the next, as in
    /// `[pages, kv_heads, head_dim, page_tokens]`, whose tokens lie side by side.
    pub inner: Option<i64>,
    /// What elements are multiplied by.
    pub scales: Scales,
}

impl StoreRows {
    /// Contiguous rows without scales.
    pub const fn new(address: u64, element: StoreType, strides: [i64; 3]) -> Self {
        Self { address, element, strides, inner: None, scales: Scales::One }
    }

    /// The same rows with scales.
    #[must_use]
    pub const fn with_scales(self, scales: Scales) -> Self {
        Self { scales, ..self }
    }
}

/// K and V. A page is what an index names: of a cache without a table the room of one sequence, of packed rows all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Store {
    /// K, rows of the queries' `head_dim` elements.
    pub k: StoreRows,
    /// V, rows of `head_dim_v` elements.
    pub v: StoreRows,
    /// Elements of a row of V and O.
    pub head_dim_v: u64,
    /// KV heads.
    pub kv_heads: u64,
    /// Pages. Identifiers that are none of 0 to this are of no page: their keys are masked.
    pub pages: u64,
    /// Tokens of a page.
    pub page_tokens: u64,
}

/// Where the keys of a sequence lie in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Index {
    /// A sequence is a page, that of its own number where no `slots` are given.
    Dense {
        /// Page of each sequence, `[batch]`.
        slots: Option<Ints>,
    },
    /// The keys of all sequences lie one after the other in the only page, whose tokens are those of all.
    Packed {
        /// First key of each sequence, and the end of the last one's, `[batch + 1]`.
        begin: Ints,
    },
    /// A table with a row for each sequence. What lies behind a sequence's length in it is never read.
    Table {
        /// Identifiers of K's pages, `[batch, capacity]`.
        k: Ints,
        /// Address of those of V's, of the same kind and layout; K's own where absent.
        v: Option<u64>,
        /// Distance in entries from one sequence to the next.
        stride: i64,
        /// Entries of a row.
        capacity: u64,
    },
    /// Identifiers of the pages of all sequences one after the other.
    Csr {
        /// First entry of each sequence, and the end of the last one's, `[batch + 1]`.
        begin: Ints,
        /// Identifiers of K's pages.
        k: Ints,
        /// Address of those of V's, of the same kind; K's own where absent.
        v: Option<u64>,
    },
}

/// Rows that sequences gained in this step, behind the lengths that are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Added {
    /// None: lengths are those after the step's rows were appended.
    Nothing,
    /// As many for every sequence.
    Rows(u64),
    /// The differences of `[batch + 1]` first rows.
    Packed {
        /// They.
        begin: Ints,
    },
}

/// How many keys a sequence has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyLengths {
    /// What the index says: the differences of a pack's first rows, all pages of CSR; `max_kv` where it says nothing.
    OfIndex,
    /// Those of an array.
    Each {
        /// Keys of each sequence, `[batch]`.
        lengths: Ints,
        /// What came behind them.
        added: Added,
    },
    /// The differences of an array of sums.
    Cumulative {
        /// `[batch + 1]`.
        sums: Ints,
    },
    /// All pages of CSR but the last, which has so many tokens.
    LastPage {
        /// 1 to `page_tokens` for each sequence with pages, `[batch]`.
        tokens: Ints,
    },
}

/// The base of a log-sum-exp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogBase {
    /// The natural logarithm.
    #[default]
    E,
    /// The logarithm of base 2.
    Two,
}

/// The log-sum-exp of the scaled scores, fp32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lse {
    /// Device address of the first.
    pub address: u64,
    /// Distance in elements from one batch entry, head and row to the next. That of the batch has no meaning where rows
    /// are packed.
    pub strides: [i64; 3],
    /// Its base.
    pub base: LogBase,
    /// What marks a row that attends to nothing: negative or positive infinity.
    pub empty: f32,
}

/// O and what comes with it. Rows are those of Q.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Output {
    /// Device address of O's first element.
    pub address: u64,
    /// Elements of O: those of Q; beside `e4m3` queries any.
    pub dtype: DType,
    /// Distance in elements from one batch entry, head and row to the next. That of the batch has no meaning where rows
    /// are packed.
    pub strides: [i64; 3],
    /// The log-sum-exp; written when given.
    pub lse: Option<Lse>,
}

/// What a host promises of all lengths that the device will read. What exceeds it is cut, and never read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Sequences.
    pub batch: u64,
    /// Rows of Q where they are packed; of no meaning otherwise.
    pub total_q: u64,
    /// Rows of Q that a sequence has at most.
    pub max_q: u64,
    /// Keys that a sequence has at most, padding before them included.
    pub max_kv: u64,
}

/// What a host expects of the lengths: the choice of a kernel goes by it. It may be wrong, and changes neither what is
/// read nor what is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Expected {
    /// Keys of all sequences together; 0 where unknown.
    pub total_keys: u64,
    /// Keys of the longest sequence; 0 where unknown.
    pub longest: u64,
}

/// The tensors of one call over a ragged batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RaggedBatch {
    /// Q.
    pub queries: Queries,
    /// K and V.
    pub store: Store,
    /// Where the keys of a sequence lie in the store.
    pub index: Index,
    /// How many there are.
    pub keys: KeyLengths,
    /// Tokens before each sequence's first key, `[batch]`: part of the lengths, never read, and of no position.
    pub left_pad: Option<Ints>,
    /// O.
    pub output: Output,
    /// What holds of all lengths.
    pub bounds: Bounds,
    /// What is expected of them.
    pub expected: Expected,
}

/// What a call over a ragged batch comes down to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RaggedCall {
    /// What the kernel must be specialised to.
    pub problem: Problem,
    /// The bounds, by which a launch goes.
    pub shape: Shape,
    /// The sizes of a usual sequence of the batch, by which a kernel is chosen.
    pub usual: Shape,
    /// How keys lie, as far as a kernel is chosen by it.
    pub pages: PageClass,
    /// The kernel's arguments.
    pub args: RaggedArgs,
    /// Whether every row, or piece of a row, starts at a multiple of 16 bytes, as the fast CUDA kernels need.
    pub aligned: bool,
}

impl RaggedCall {
    /// The same call with a score program beside its mask. As much of the program's mask as is a window at all lengths
    /// becomes the call's own mask, since kernels have windows built in.
    #[must_use]
    pub fn with_program(self, program: ProgramRef) -> Self {
        let (problem, shape) = Problem { program: Some(program), ..self.problem }.with_windows(self.shape);
        let [window_left, window_right] = windows(&shape);
        let usual = Shape { mask: shape.mask, ..self.usual };
        Self { problem, shape, usual, args: RaggedArgs { window_left, window_right, ..self.args }, ..self }
    }

    /// By what tuning results are found: the usual sequence and the class of pages.
    pub fn sizes(&self) -> CallSizes {
        CallSizes::ragged(self.usual, self.pages)
    }

    /// Whether no row of O exists.
    pub fn is_empty(&self) -> bool {
        self.usual.is_empty()
    }
}

/// Checks a call against what kernels take, and builds the arguments. Looks at no memory of the device.
///
/// `scale` defaults to `1 / sqrt(head_dim)`. Sizes of zero are legal. Reaches of windows beyond the bounds are clamped
/// to them, which changes nothing.
///
/// # Errors
/// [`crate::Error::Tensor`] naming the tensor, the field and the remedy; [`crate::Error::Codegen`] for what no kernel
/// computes: head dims, head counts, bounds, trees.
pub fn ragged_call(batch: &RaggedBatch, mask: Mask, scale: Option<f32>) -> Result<RaggedCall> {
    check::call(batch, mask, scale)
}

impl RaggedBatch {
    /// Calls with every range of memory that the call may touch: its name, address and size in bytes. Of what the
    /// device alone knows the size of, the first element.
    ///
    /// # Errors
    /// What `f` says, and as [`ragged_call`] for layouts.
    pub fn each_range(&self, f: &mut dyn FnMut(&'static str, u64, u64) -> Result<()>) -> Result<()> {
        check::ranges(self, f)
    }

    /// Whether no row of O exists.
    pub fn is_empty(&self) -> bool {
        let Bounds { batch, total_q, max_q, .. } = self.bounds;
        let packed = matches!(self.queries.rows, QueryRows::Packed { .. });
        batch == 0 || self.queries.heads == 0 || max_q == 0 || packed && total_q == 0
    }
}
