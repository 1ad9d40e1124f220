//! The tensor maps of a ragged batch: Q and O as packs or batches of rows, K and V as the whole of their store; of
//! `forward/sm90_ragged`, and of `forward/sm90_fp8_ragged`, whose O leaves by ordinary stores.

use super::Sm90RaggedSchedule;
use crate::abi::RaggedArgs;
use crate::family::forward_sm90::{STRIDE_LIMIT, TensorMapSpec, spec};
use crate::{DType, Kernel, Problem, Schedule, Sm90Fp8RaggedSchedule, Tiling};
use std::fmt;

/// What the tokens of a page must be a multiple of: blocks of keys are, so that boxes of as many tile both.
const BOX: i32 = 16;

/// Why TMA cannot address a tensor of a call. Asked of every call, so that nothing is allocated before it is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RaggedUnaddressable {
    /// So many tokens of a page.
    Pages(i32),
    /// Sequences in pages that begin behind padding.
    Padding,
    /// Of a tensor.
    Address(&'static str),
    /// Of a tensor's axis, in elements, and of how many it must be a multiple.
    Stride(&'static str, &'static str, i64, i64),
    /// K in pieces of 16 bytes.
    Pieces,
}

impl fmt::Display for RaggedUnaddressable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pages(tokens) => write!(f, "pages of {tokens} tokens: TMA takes {BOX} at a time of one page"),
            Self::Padding => write!(f, "sequences in pages begin behind padding, and boxes of keys with pages"),
            Self::Address(name) => write!(f, "{name} starts at an address that is no multiple of 16 bytes"),
            Self::Stride(name, axis, stride, step) => {
                let most = STRIDE_LIMIT.ilog2() - 4 + step.ilog2();
                write!(
                    f,
                    "the {axis} stride of {name} is {stride} elements: TMA takes positive multiples of {step} below \
                     2^{most}"
                )
            }
            Self::Pieces => write!(f, "the elements of a row of K do not lie side by side"),
        }
    }
}

/// Why TMA cannot address the tensors of a call, if it cannot: it needs addresses and strides in multiples of 16 bytes,
/// strides above zero and below 2^40 bytes, rows whose elements lie side by side, and of a store with page tables pages
/// of a multiple of 16 tokens that sequences begin with.
pub fn ragged_unaddressable(problem: &Problem, args: &RaggedArgs) -> Option<RaggedUnaddressable> {
    if args.k_table != 0 || args.v_table != 0 {
        if args.page_tokens % BOX != 0 {
            return Some(RaggedUnaddressable::Pages(args.page_tokens));
        }
        if args.left_pad != 0 {
            return Some(RaggedUnaddressable::Padding);
        }
    }
    // Elements of Q, K and V in 16 bytes.
    let step = 16 / problem.dtype.bytes() as i64;
    let (heads, kv_heads) = (i64::from(args.heads), i64::from(args.kv_heads));
    let (batches, tokens) = (if args.q_begin != 0 { 1 } else { i64::from(args.batch) }, i64::from(args.page_tokens));
    let keys = if args.pages == 0 || args.kv_len == 0 { [0; 3] } else { [args.pages, kv_heads, tokens] };
    let of_store = |[page, token, head, _]: [i64; 4]| [page, head, token];
    for (name, address, strides, dims) in [
        ("Q", args.q, args.q_stride, [batches, heads, args.q_rows]),
        ("K", args.k, of_store(args.k_stride), keys),
        ("V", args.v, of_store(args.v_stride), keys),
        ("O", args.o, args.o_stride, [batches, heads, args.q_rows]),
    ] {
        // An O beside e4m3 operands has no map.
        if dims.contains(&0) || name == "O" && problem.dtype == DType::E4m3 {
            continue;
        }
        if !address.is_multiple_of(16) {
            return Some(RaggedUnaddressable::Address(name));
        }
        for ((stride, dim), axis) in strides.into_iter().zip(dims).zip(["batch or page", "head", "row"]) {
            if dim > 1 && (stride <= 0 || stride % step != 0 || stride as u64 >= STRIDE_LIMIT / 16 * step as u64) {
                return Some(RaggedUnaddressable::Stride(name, axis, stride, step));
            }
        }
    }
    // Pieces of 16 bytes of K. V's columns lie side by side in the stores that the family takes, whatever stands for
    // their stride, which nobody reads there.
    let together = keys.contains(&0) || args.k_stride[3] == step;
    (!together).then_some(RaggedUnaddressable::Pieces)
}

impl Kernel {
    /// The maps of Q, K, V and O for one launch over a ragged batch, and the keys of a box; none for families without.
    /// In O's place that of Q again where O leaves by ordinary stores.
    pub fn ragged_tensor_maps(&self, tiling: &Tiling, args: &RaggedArgs) -> Option<([TensorMapSpec; 4], i32)> {
        let block_kv = match self.schedule {
            Schedule::Sm90Ragged(Sm90RaggedSchedule(s)) => s.block_kv,
            Schedule::Sm90Fp8Ragged(Sm90Fp8RaggedSchedule(s)) => s.block_kv,
            _ => return None,
        };
        let p = &self.problem;
        // Elements in 128 bytes.
        let columns = 128 / p.dtype.bytes() as u32;
        let group = 1u64 << tiling.group_shift;
        let batches = if args.q_begin != 0 { 1 } else { args.batch as u64 };
        let box_keys = match args.k_table {
            0 => block_kv,
            _ => greatest_divisor(block_kv, args.page_tokens.max(1) as u32),
        };
        // Something that exists keeps the encoder content where nothing is ever loaded.
        let rows = |address: u64, head_dim: u32, [batch, head, row]: [i64; 3]| {
            let dims = [head_dim as u64, group, (args.q_rows as u64).max(1), tiling.unit_heads as u64, batches];
            let strides = [head, row, head * group as i64, batch];
            spec(p.dtype, address, 5, dims, strides, [columns, group as u32, 64 / group as u32, 1, 1])
        };
        let keys = |address: u64, head_dim: u32, [page, token, head, _]: [i64; 4]| {
            let (address, dims) = match args.pages == 0 || args.kv_len == 0 {
                true => (args.q, [head_dim as u64, 1, 1, 1, 1]),
                false => {
                    let (tokens, heads) = (args.page_tokens as u64, args.kv_heads as u64);
                    (address, [head_dim as u64, tokens, heads, args.pages as u64, 1])
                }
            };
            spec(p.dtype, address, 4, dims, [token, head, page, 0], [columns, box_keys, 1, 1, 1])
        };
        let q = rows(args.q, p.head_dim_qk, args.q_stride);
        let o = if p.dtype == DType::E4m3 { q } else { rows(args.o, p.head_dim_v, args.o_stride) };
        let (k, v) = (keys(args.k, p.head_dim_qk, args.k_stride), keys(args.v, p.head_dim_v, args.v_stride));
        Some(([q, k, v, o], box_keys as i32))
    }
}

/// The largest number that divides both.
fn greatest_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { greatest_divisor(b, a % b) }
}
