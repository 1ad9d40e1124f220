//! The argument structs of kernels, on every device.
//!
//! CUDA kernels receive theirs by value as `const __grid_constant__`, CPU kernels by pointer. Templates paste the
//! declarations that [`declaration`] writes from the structs here; [`ABI_VERSION`] is part of every key, so a kernel
//! built for another layout is refused, never called.

mod append;
mod backward;
mod declare;
mod gradient;
mod layout;
mod pad;
mod quantise;

pub use append::AppendArgs;
pub use backward::{BackwardArgs, BackwardMappedArgs};
use declare::declaration_without;
pub use declare::{Declared, Field, Spelt, declaration};
pub use gradient::{GradientArgs, keeps};
pub use layout::ArgsLayout;
pub use pad::{PAD_TENSORS, PadArgs};
pub use quantise::QuantiseArgs;

use crate::score::MAX_BIASES;
use crate::{DType, Language, Op, Problem, ScaleUnits};
use bytemuck::{Pod, Zeroable};
use declare::arguments;
use std::mem::offset_of;

/// Version of [`ForwardArgs`], [`RaggedArgs`], [`AppendArgs`], [`BackwardArgs`], [`PadArgs`], [`QuantiseArgs`] and of
/// the entry points.
/// Any change to one of them needs a new number, but for fields that are appended to a segment of [`ArgsLayout`]:
/// kernels of before are then given what they were compiled for.
///
/// The same holds for what else host and kernel agree in by numbers that are rendered, and that no template's hash
/// shows: [`TILE_QUEUES`], and how block lists and key ranges lie in memory.
pub const ABI_VERSION: u32 = 6;

arguments! {
    /// Arguments of a forward kernel. Pointers are device addresses; strides count elements.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
    pub struct ForwardArgs as "ForwardArgs" {
        /// Q, `[batch, heads, q_len, head_dim_qk]` by strides.
        pub q: u64 as "const void*",
        /// K, `[batch, kv_heads, kv_len, head_dim_qk]` by strides.
        pub k: u64 as "const void*",
        /// V, `[batch, kv_heads, kv_len, head_dim_v]` by strides.
        pub v: u64 as "const void*",
        /// O, `[batch, heads, q_len, head_dim_v]` by strides.
        pub o: u64 as "void*",
        /// Log-sum-exp, fp32, contiguous `[batch, heads, q_len]`, or 0.
        pub lse: u64 as "float*",
        /// Attention weights, fp32, contiguous `[batch, heads, q_len, kv_len]`, or 0. `forward/naive` and
        /// `forward/cpu` write them.
        pub weights: u64 as "float*",
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
        /// Address in host memory, on every device, of the [`SideArgs`] of a kernel with a score program, or 0. Whoever
        /// launches on a GPU copies the tables into the launch; kernels there never see this address.
        pub side: u64 as "const void*",
        /// What an element of an `e4m3` Q is multiplied by, fp32 `[batch, kv_heads]` by strides, or 0 for 1.
        pub q_descale: u64 as "const float*",
        /// The same for K.
        pub k_descale: u64 as "const float*",
        /// The same for V.
        pub v_descale: u64 as "const float*",
        /// Strides of Q's scales: batch, KV head.
        pub q_descale_stride: [i64; 2],
        /// Strides of K's scales: batch, KV head.
        pub k_descale_stride: [i64; 2],
        /// Strides of V's scales: batch, KV head.
        pub v_descale_stride: [i64; 2],
        /// O less its rounded self, bf16, `[batch, heads, q_len, head_dim_v]` by strides: of problems with
        /// [`Problem::residual`].
        pub residual: u64 as "void*",
        /// Strides of it: batch, head, row.
        pub residual_stride: [i64; 3],
        /// The probability of keeping a score, of 65536, from 1 to 65536 ([`crate::Dropout::threshold`]), and what
        /// follows on which those are: of problems with [`Problem::dropout`].
        pub dropout_threshold: u32,
        /// What kept weights are multiplied by, one over the probability of keeping one.
        pub dropout_scale: f32,
        /// The seed, to which what lies at `dropout_seed_at` is added.
        pub dropout_seed: u64,
        /// The offset, to which what lies at `dropout_offset_at` is added.
        pub dropout_offset: u64,
        /// Address of 64 bits of a seed on the device, or 0.
        pub dropout_seed_at: u64 as "const void*",
        /// Address of 64 bits of an offset on the device, or 0.
        pub dropout_offset_at: u64 as "const void*",
        /// From a scale of Q and of K to that of the next rows, and of V to that of the next channel: of problems with
        /// [`Problem::scales`]. There heads of Q's scales are those of Q.
        pub scale_stride: [i64; 3],
        /// log2 of the rows of Q, and of K, that share a scale.
        pub scale_rows_log2: [i32; 2],
        /// Address of what O is multiplied by before it is rounded, one fp32 on the device, or 0 for 1: of problems
        /// whose O is `e4m3`.
        pub o_scale: u64 as "const float*",
    }
}

arguments! {
    /// Arguments of a forward kernel over a ragged batch: sequences of different lengths, whose K and V lie in a store
    /// that is indexed at run time. Pointers are device addresses, 0 for what a call has not; strides count elements.
    ///
    /// Token `t` of sequence `b` is at place `p = t + kv_begin[b] + left_pad[b]` of the sequence's row in the store: in
    /// page `p / page_tokens` of that row, at `p % page_tokens` of the page. The row's pages are the table's entries
    /// from `pages_begin[b]` on (CSR) or from `b * table_stride`; without a table a row is the one page `slots[b]`, or
    /// `b`, or where `kv_begin` is given 0, the pack that all sequences share.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
    pub struct RaggedArgs as "RaggedArgs" {
        /// Q, rows of `head_dim_qk` elements.
        pub q: u64 as "const void*",
        /// The store of K.
        pub k: u64 as "const void*",
        /// The store of V.
        pub v: u64 as "const void*",
        /// O, rows of `head_dim_v` elements of [`Problem::output_dtype`].
        pub o: u64 as "void*",
        /// Log-sum-exp, fp32, or 0.
        pub lse: u64 as "float*",
        /// Identifiers of K's pages, or 0.
        pub k_table: u64 as "const int32_t*",
        /// Identifiers of V's pages; K's where they are the same; 0 without a table.
        pub v_table: u64 as "const int32_t*",
        /// First entry of each sequence in the tables and the end of the last one's, `[batch + 1]`, or 0.
        pub pages_begin: u64 as "const int32_t*",
        /// Which page of a store without a table is a sequence's, `[batch]`, or 0.
        pub slots: u64 as "const int32_t*",
        /// First row of each sequence in a pack of keys, and the end of the last one's, `[batch + 1]`, or 0.
        pub kv_begin: u64 as "const int32_t*",
        /// Keys of each sequence, `[batch]`, padding before them included; or 0: those of `kv_begin`, of `last_page`,
        /// or `kv_len`.
        pub kv_lengths: u64 as "const int32_t*",
        /// Tokens of the last page of each sequence, `[batch]`, for tables with `pages_begin`; or 0.
        pub last_page: u64 as "const int32_t*",
        /// Tokens before a sequence's first key, `[batch]`, or 0: they are not read, and count in no length of the
        /// mask.
        pub left_pad: u64 as "const int32_t*",
        /// Rows that each sequence gained behind `kv_lengths`, or has where those are 0, as the differences of
        /// `[batch + 1]`; or 0.
        pub kv_added_begin: u64 as "const int32_t*",
        /// First row of each sequence in Q, and the end of the last one's, `[batch + 1]`; or 0: rows by `q_stride`'s
        /// batch.
        pub q_begin: u64 as "const int32_t*",
        /// Rows of each sequence in Q that are used, `[batch]`, or 0: all. Those behind are not written.
        pub q_lengths: u64 as "const int32_t*",
        /// What an element of a quantised K is multiplied by, fp32, or 0 for 1.
        pub k_scale: u64 as "const float*",
        /// The same for V.
        pub v_scale: u64 as "const float*",
        /// What a step's preparation has found of the lengths, or 0.
        pub prepared: u64 as "const void*",
        /// Partial results of split keys: counters, zero before and after, and behind them partial sums; or 0.
        pub scratch: u64 as "void*",
        /// Strides of Q: batch, head, row. That of the batch is of no meaning beside `q_begin`.
        pub q_stride: [i64; 3],
        /// Strides of O: batch, head, row.
        pub o_stride: [i64; 3],
        /// Strides of the log-sum-exp: batch, head, row.
        pub lse_stride: [i64; 3],
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
        /// Pages of the stores: identifiers outside of 0 to this are those of no page, and their keys masked.
        pub pages: i64,
        /// Number of sequences.
        pub batch: i32,
        /// Number of query heads.
        pub heads: i32,
        /// Number of KV heads.
        pub kv_heads: i32,
        /// Rows of Q that a sequence has at most.
        pub q_len: i32,
        /// Keys that a sequence has at most; longer ones are cut.
        pub kv_len: i32,
        /// Tokens of a page.
        pub page_tokens: i32,
        /// 32-bit words of an entry of the tables and of `slots`: 1 or 2.
        pub table_words: i32,
        /// 32-bit words of an element of the arrays of lengths and of first rows: 1 or 2.
        pub length_words: i32,
        /// Rows that every sequence gained behind `kv_lengths`.
        pub kv_added: i32,
        /// Keys visible before the query's position; read only by kernels whose left side is bounded.
        pub window_left: i32,
        /// Keys visible after the query's position; read only by kernels whose right side is bounded.
        pub window_right: i32,
        /// Softmax scale, applied to the scores.
        pub scale: f32,
        /// What the natural log-sum-exp is multiplied by: 1, or log2(e) for one of base 2.
        pub lse_unit: f32,
        /// The log-sum-exp of a row that attends to nothing.
        pub lse_empty: f32,
        /// As [`ForwardArgs::side`].
        pub side: u64 as "const void*",
        /// Rows of Q and O: of the pack beside `q_begin`, else of one sequence.
        pub q_rows: i64,
        /// As `ForwardArgs.dropout_threshold`, and those that follow as theirs: of problems with dropout.
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
        /// What an element of an `e4m3` Q is multiplied by, fp32 `[batch, kv_heads]` by strides, or 0 for 1; and what
        /// follows, of problems with such queries.
        pub q_scale: u64 as "const float*",
        /// Strides of Q's scales: sequence, KV head.
        pub q_scale_stride: [i64; 2],
        /// As [`ForwardArgs::o_scale`].
        pub o_scale: u64 as "const float*",
    }
}

/// The arguments of one operation, as a launch is given them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Args<'a> {
    /// A forward pass over dense tensors.
    Forward(&'a ForwardArgs),
    /// A forward pass over a ragged batch.
    Ragged(&'a RaggedArgs),
    /// New rows of K and V into a store.
    Append(&'a AppendArgs),
    /// A backward pass.
    Backward(&'a BackwardArgs),
    /// The gradient of what a score program reads.
    Gradient(&'a GradientArgs),
    /// Rows into rows of another length.
    Pad(&'a PadArgs),
    /// Low-precision operands with their scales.
    Quantise(&'a QuantiseArgs),
}

impl<'a> Args<'a> {
    /// The bytes of the struct.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Args::Forward(args) => bytemuck::bytes_of(args),
            Args::Ragged(args) => bytemuck::bytes_of(args),
            Args::Append(args) => bytemuck::bytes_of(args),
            Args::Backward(args) => bytemuck::bytes_of(args),
            Args::Gradient(args) => bytemuck::bytes_of(args),
            Args::Pad(args) => bytemuck::bytes_of(args),
            Args::Quantise(args) => bytemuck::bytes_of(args),
        }
    }

    /// Host address of what a score program reads, or 0.
    pub const fn side(self) -> u64 {
        match self {
            Args::Forward(args) => args.side,
            Args::Ragged(args) => args.side,
            Args::Append(_) | Args::Pad(_) | Args::Quantise(_) => 0,
            Args::Backward(args) => args.side,
            Args::Gradient(args) => args.backward.side,
        }
    }

    /// What they are the arguments of, in a word.
    pub const fn name(self) -> &'static str {
        match self {
            Args::Forward(_) => "dense tensors",
            Args::Ragged(_) => "a ragged batch",
            Args::Append(_) => "an append",
            Args::Backward(_) => "a backward pass",
            Args::Gradient(_) => "the gradient of what a score program reads",
            Args::Pad(_) => "a copy of rows",
            Args::Quantise(_) => "a quantisation",
        }
    }

    /// Whether a problem's kernels take these.
    pub const fn are_of(self, problem: &Problem) -> bool {
        match self {
            Args::Forward(_) => matches!(problem.op, Op::Forward) && problem.kv.is_dense(),
            Args::Ragged(_) => matches!(problem.op, Op::Forward) && !problem.kv.is_dense(),
            Args::Append(_) => matches!(problem.op, Op::Append),
            Args::Backward(_) => matches!(problem.op, Op::Backward),
            Args::Gradient(_) => matches!(problem.op, Op::Gradient) && problem.kv.is_dense(),
            Args::Pad(_) => matches!(problem.op, Op::Pad),
            Args::Quantise(_) => matches!(problem.op, Op::Quantise),
        }
    }
}

impl<'a> From<&'a ForwardArgs> for Args<'a> {
    fn from(args: &'a ForwardArgs) -> Self {
        Args::Forward(args)
    }
}

impl<'a> From<&'a RaggedArgs> for Args<'a> {
    fn from(args: &'a RaggedArgs) -> Self {
        Args::Ragged(args)
    }
}

impl<'a> From<&'a AppendArgs> for Args<'a> {
    fn from(args: &'a AppendArgs) -> Self {
        Args::Append(args)
    }
}

impl<'a> From<&'a PadArgs> for Args<'a> {
    fn from(args: &'a PadArgs) -> Self {
        Args::Pad(args)
    }
}

impl<'a> From<&'a QuantiseArgs> for Args<'a> {
    fn from(args: &'a QuantiseArgs) -> Self {
        Args::Quantise(args)
    }
}

impl<'a> From<&'a BackwardArgs> for Args<'a> {
    fn from(args: &'a BackwardArgs) -> Self {
        Args::Backward(args)
    }
}

impl<'a> From<&'a GradientArgs> for Args<'a> {
    fn from(args: &'a GradientArgs) -> Self {
        Args::Gradient(args)
    }
}

arguments! {
    /// What a score program reads besides the scores: host addresses of arrays in the order of the program's
    /// declarations.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
    pub struct SideArgs as "Side" {
        /// [`SideTensorArg`]s.
        pub tensors: u64 as "const SideTensor*",
        /// Scalars of 8 bytes: an int in all of them, a float in the first four.
        pub scalars: u64 as "const SideScalar*",
    }
}

arguments! {
    /// A side tensor of up to four axes.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
    pub struct SideTensorArg as "SideTensor" {
        /// Address of the first element.
        pub data: u64 as "const void*",
        /// Elements from one index to the next, 0 along an axis of length 1.
        pub stride: [i64; 4],
        /// Length of each axis; unused ones are 0.
        pub length: [i32; 4],
    }
}

/// How many bytes at the end of [`ForwardArgs`], [`BackwardArgs`] or [`RaggedArgs`] a kernel does not know. Fields that
/// only some problems have lie there in the order in which the structs grew, a residual's, those of dropout, those of
/// finer scales, that of O: a kernel knows them up to the last that its problem has, so that one without any of them is
/// what it was, and what knows of dropout still is when scales are appended behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Bytes that are left out at the end.
    pub(crate) bytes: usize,
}

impl Cut {
    /// What every kernel knows of other structs.
    pub(crate) const NONE: Self = Self { bytes: 0 };

    /// Of [`ForwardArgs`] in a problem's kernels.
    pub(crate) fn of_forward(problem: &Problem) -> Self {
        let known = if problem.output_dtype() == DType::E4m3 {
            size_of::<ForwardArgs>()
        } else if problem.scales != ScaleUnits::default() {
            offset_of!(ForwardArgs, o_scale)
        } else if problem.dropout {
            offset_of!(ForwardArgs, scale_stride)
        } else if problem.residual {
            offset_of!(ForwardArgs, dropout_threshold)
        } else {
            offset_of!(ForwardArgs, residual)
        };
        Self { bytes: size_of::<ForwardArgs>() - known }
    }

    /// Of [`BackwardArgs`], which have no scales.
    pub(crate) const fn of_backward(problem: &Problem) -> Self {
        let known = match (problem.dropout, problem.residual) {
            (true, _) => size_of::<BackwardArgs>(),
            (false, true) => offset_of!(BackwardArgs, dropout_threshold),
            (false, false) => offset_of!(BackwardArgs, residual),
        };
        Self { bytes: size_of::<BackwardArgs>() - known }
    }

    /// Of [`RaggedArgs`], which have no residual either.
    pub(crate) const fn of_ragged(problem: &Problem) -> Self {
        let known = match (problem.dtype, problem.dropout) {
            (DType::E4m3, _) => size_of::<RaggedArgs>(),
            (_, true) => offset_of!(RaggedArgs, q_scale),
            (_, false) => offset_of!(RaggedArgs, dropout_threshold),
        };
        Self { bytes: size_of::<RaggedArgs>() - known }
    }

    /// Whether it is of the struct of this name in kernels: others are whole, or have it inside.
    pub(crate) fn is_of(name: &str) -> bool {
        [ForwardArgs::NAME, BackwardArgs::NAME, RaggedArgs::NAME].contains(&name)
    }
}

/// A tensor as the copy engine takes it: opaque, encoded by the driver.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TensorMap(pub [u64; 16]);

impl Spelt for TensorMap {
    const C: &'static str = "TensorMap";
    const CUDA: &'static str = "TensorMap";
}

arguments! {
    /// The argument of kernels that take tensor maps beside [`ForwardArgs`], by value.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct MappedArgs as "Sm90Args" {
        /// Q, K, V and O.
        pub maps: [TensorMap; 4] { q, k, v, o },
        /// Biases of a score program, those that `biases_mapped` says.
        pub biases: [TensorMap; MAX_BIASES],
        /// What every kernel takes.
        pub forward: ForwardArgs,
        /// How the launch divides the rows. Members of this struct in the kernel: beside a struct in between, NVRTC
        /// orders the instructions of some kernels otherwise.
        pub tiling: Tiling { group_shift, unit_heads, blocks, leading, section, tiles },
        /// Which of the kernel's counters deals tiles to thread blocks that take them from a queue: one that no other
        /// launch uses at the same time. -1 lets them take tiles by stride.
        pub queue: i32,
        /// One bit for each bias that the copy engine brings; the kernel's threads copy others.
        pub biases_mapped: u32,
        /// Memory for the mask metadata ([`crate::Holds::MaskMetadata`]), or 0.
        pub found: u64 as "void*",
        /// Memory for the masks of cut blocks, or 0: the kernel then evaluates them itself.
        pub masks: u64 as "u32*",
    }
}

arguments! {
    /// The argument of kernels that take tensor maps beside [`RaggedArgs`], by value.
    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct RaggedMappedArgs as "Sm90Args" {
        /// Q, K, V and O.
        pub maps: [TensorMap; 4] { q, k, v, o },
        /// What every kernel of ragged batches takes.
        pub forward: RaggedArgs,
        /// How tiles are numbered: `section` is the rows of keys of one head that are walked together, `tiles` the most
        /// that there can be.
        pub tiling: Tiling { group_shift, unit_heads, blocks, leading, section, tiles },
        /// As [`MappedArgs::queue`].
        pub queue: i32,
        /// Keys of a box of K or V: a block of them, or of a store with page tables as many as divide block and page.
        pub box_keys: i32,
    }
}

/// Counters, of 4 bytes each, that a kernel's module holds for launches whose persistent thread blocks take tiles from
/// one: more than ten thousand captured launches of one kernel may live at once.
///
/// A compiled kernel has as many, and the host gives it indexes below this: another number needs a new [`ABI_VERSION`].
pub const TILE_QUEUES: usize = 1 << 14;

/// How a launch of `forward/sm90` divides the query rows into tiles, computed once by the host.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// log2 of the query heads of a KV head that share a tile; 0 when they do not.
    pub group_shift: i32,
    /// Heads or, sharing tiles, KV heads: units of one batch.
    pub unit_heads: i32,
    /// Tiles of one unit.
    pub blocks: i32,
    /// Units that are walked one KV head after the other, before the sections.
    pub leading: i32,
    /// Units that are walked together.
    pub section: i32,
    /// Tiles of the whole problem.
    pub tiles: i32,
}

/// Of each of the members that it becomes.
impl Spelt for Tiling {
    const C: &'static str = "int32_t";
    const CUDA: &'static str = "int";
}

/// The declarations that a template pastes, by the names that it has for them. Structs end before the fields of what a
/// problem has not, so that kernels which do not know those are what they were.
pub(crate) fn fields(language: Language, problem: &Problem) -> Vec<(&'static str, String)> {
    let (forward, backward) = (Cut::of_forward(problem), Cut::of_backward(problem));
    let ragged = Cut::of_ragged(problem);
    let common = [
        ("forward_args", declaration_without::<ForwardArgs>(language, forward)),
        ("ragged_args", declaration_without::<RaggedArgs>(language, ragged)),
        ("append_args", declaration::<AppendArgs>(language)),
        ("backward_args", declaration_without::<BackwardArgs>(language, backward)),
        ("sums_args", declaration_without::<GradientArgs>(language, backward)),
        ("pad_args", declaration::<PadArgs>(language)),
        ("quantise_args", declaration::<QuantiseArgs>(language)),
        ("side_tensor", declaration::<SideTensorArg>(language)),
    ];
    let own = match language {
        Language::C => vec![("side_args", declaration::<SideArgs>(language))],
        Language::Cuda => vec![
            ("sm90_args", declaration_without::<MappedArgs>(language, forward)),
            ("sm90_ragged_args", declaration_without::<RaggedMappedArgs>(language, ragged)),
            ("sm90_backward_args", declaration_without::<BackwardMappedArgs>(language, backward)),
        ],
    };
    common.into_iter().chain(own).collect()
}

// What the macro declares is `pub`, as all arguments are.
#[cfg(test)]
#[allow(unreachable_pub)]
mod tests {
    use super::*;

    arguments! {
        /// Of [`Tiling`].
        #[repr(C)]
        #[derive(Debug)]
        pub struct Small as "Little" {
            /// Where it lies.
            pub at: u64 as "const float*",
            /// Two numbers, ...
            /// or none.
            pub numbers: [i32; 2],
            /// A pair.
            pub pair: [u64; 2] { first, second },
        }
    }

    #[test]
    fn a_declaration_has_every_member_where_rust_has_it() {
        let c = declaration::<Small>(Language::C);
        let body = "/* Of Tiling. */\ntypedef struct {\n    /* Where it lies. */\n    const float* at;\n    \
                    /* Two numbers, ... or none. */\n    int32_t numbers[2];\n    /* A pair. */\n    uint64_t first, second;\n} Little;\n";
        assert!(c.starts_with(body), "{c}");
        let cuda = declaration::<Small>(Language::Cuda);
        for line in ["// Of Tiling.\nstruct Little {\n", "    int numbers[2];\n", "    u64 first, second;\n};\n"] {
            assert!(cuda.contains(line), "{line}\n{cuda}");
        }
        let size = "ssert(sizeof(Little) == 32, ";
        assert!(c.contains(size) && cuda.contains(size), "{c}\n{cuda}");
        for (member, offset) in [("at", 0), ("numbers", 8), ("first", 16), ("second", 24)] {
            let line = format!("_Static_assert(__builtin_offsetof(Little, {member}) == {offset}, ");
            assert!(c.contains(&line), "{line}\n{c}");
        }
        // NVRTC 13.0 has neither.
        assert!(!cuda.contains("offsetof"), "{cuda}");
    }

    #[test]
    fn no_byte_of_an_argument_struct_is_without_a_member() {
        fn gaps<T: Declared>() -> usize {
            let fields: usize = T::FIELDS.iter().map(|f| f.size).sum();
            T::SIZE - fields
        }
        // Structs with tensor maps are padded to the alignment of those.
        let plain = [gaps::<ForwardArgs>(), gaps::<RaggedArgs>(), gaps::<SideArgs>(), gaps::<SideTensorArg>()];
        assert_eq!((plain, gaps::<AppendArgs>(), gaps::<BackwardArgs>(), gaps::<PadArgs>()), ([0; 4], 0, 0, 0));
        assert_eq!((gaps::<GradientArgs>(), gaps::<QuantiseArgs>()), (0, 0));
        for padding in [gaps::<MappedArgs>(), gaps::<RaggedMappedArgs>(), gaps::<BackwardMappedArgs>()] {
            assert!(padding < 64, "{padding}");
        }
    }

    #[test]
    fn structs_end_behind_the_last_fields_that_a_problem_has() {
        use crate::{DType, Family, Kernel, MaskKind, ScaleUnit, Schedule, Shape, ShapeBucket};
        let plain = Problem::forward(DType::Bf16, 64, MaskKind::FULL).unwrap();
        let shape = Shape { batch: 1, heads: 8, kv_heads: 8, q_len: 1024, kv_len: 1024, mask: crate::Mask::Full };
        let arch = "sm_90a".parse().unwrap();
        let layout = |family, problem: Problem, of: Problem| {
            let schedule = Schedule::default_for(family, &of, arch, &ShapeBucket::of(&shape)).unwrap();
            ArgsLayout::of(&Kernel { problem, schedule, arch })
        };
        let finer = ScaleUnits { q: ScaleUnit::Rows, ..ScaleUnits::default() };
        // Bytes of a residual, of dropout, of scales, and of that of O.
        let groups = [32, 40, 32, 8];
        assert_eq!(groups.iter().sum::<usize>(), size_of::<ForwardArgs>() - offset_of!(ForwardArgs, residual));
        assert_eq!(groups[0] + groups[1], size_of::<BackwardArgs>() - offset_of!(BackwardArgs, residual));
        for has in 0..16 {
            let [residual, dropout, scales, of_o] = [1, 2, 4, 8].map(|bit| has & bit != 0);
            let scales_of = if scales { finer } else { ScaleUnits::default() };
            let problem = plain.with_residual(residual).with_dropout(dropout).with_scales(scales_of);
            let problem = if of_o { problem.with_output(DType::E4m3) } else { problem };
            let known = [residual || dropout || scales || of_o, dropout || scales || of_o, scales || of_o, of_o];
            // A gradient has no scales, and a ragged batch neither these nor a residual.
            let known_backward = [residual || dropout, dropout, false, false];
            let known_ragged = [false, dropout, false, false];
            let bytes =
                |known: [bool; 4]| -> usize { groups.iter().zip(known).map(|(n, is)| n * usize::from(is)).sum() };
            for language in [Language::C, Language::Cuda] {
                let declared = fields(language, &problem);
                for (name, known, before) in [
                    ("forward_args", known, offset_of!(ForwardArgs, residual)),
                    ("backward_args", known_backward, offset_of!(BackwardArgs, residual)),
                    ("ragged_args", known_ragged, offset_of!(RaggedArgs, dropout_threshold)),
                ] {
                    let (_, text) = declared.iter().find(|(found, _)| *found == name).unwrap();
                    let members = ["residual_stride[3];", "dropout_offset_at;", "scale_rows_log2[2];", "o_scale;"];
                    assert_eq!(members.map(|member| text.contains(member)), known, "{problem} {name}");
                    let size = format!(") == {}, ", before + bytes(known));
                    assert!(text.contains(&size), "{problem} {name}: {size}\n{text}");
                }
            }
            for family in [Family::ForwardSm80, Family::ForwardSm90] {
                let (full, found) = (family.args(), layout(family, problem, plain));
                let forward = (offset_of!(ForwardArgs, residual) + bytes(known)) as u32;
                assert_eq!(found, ArgsLayout { forward, ..full }, "{problem} {family}");
            }
            for family in [Family::BackwardSm80, Family::BackwardSm90] {
                let (full, found) = (family.args(), layout(family, problem.backward(), plain.backward()));
                let forward = (offset_of!(BackwardArgs, residual) + bytes(known_backward)) as u32;
                assert_eq!(found, ArgsLayout { forward, ..full }, "{problem} {family}");
            }
        }
    }

    #[test]
    fn ragged_batches_of_e4m3_queries_have_scales_behind_dropout() {
        use crate::{DType, KvElement, KvKind, KvStore, MaskKind};
        let store = KvStore { element: KvElement::E4m3, ..KvStore::default() };
        let ragged = |dtype| Problem::forward(dtype, 64, MaskKind::FULL).unwrap().with_kv(KvKind::Ragged(store));
        for (problem, size) in [
            (ragged(DType::E4m3), size_of::<RaggedArgs>()),
            (ragged(DType::Bf16), offset_of!(RaggedArgs, dropout_threshold)),
            (ragged(DType::Bf16).with_dropout(true), offset_of!(RaggedArgs, q_scale)),
        ] {
            let declared = fields(Language::Cuda, &problem);
            let (_, text) = declared.iter().find(|(found, _)| *found == "ragged_args").unwrap();
            assert!(text.contains(&format!(") == {size}, ")), "{problem}: {text}");
        }
    }

    #[test]
    fn the_members_that_a_tiling_becomes_are_its_fields() {
        let tiling = MappedArgs::FIELDS.iter().find(|f| f.members.contains(&"tiles")).expect("a field");
        let tiling: Vec<(&str, usize)> =
            tiling.members.iter().enumerate().map(|(i, &member)| (member, 4 * i)).collect();
        macro_rules! offsets {
            ($($field:ident),*) => { [$((stringify!($field), std::mem::offset_of!(Tiling, $field))),*] };
        }
        assert_eq!(tiling, offsets!(group_shift, unit_heads, blocks, leading, section, tiles));
        assert_eq!(size_of::<Tiling>(), 4 * tiling.len());
    }
}
