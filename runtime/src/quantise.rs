//! `e4m3` operands with their scales from wider ones, as the host states it.
//!
//! ```text
//! Quantise { q, k, v, rotary, mean, hadamard } -> checks -> QuantiseCall { problem, shape, args }
//! ```
//!
//! What comes out is what [`crate::ForwardCall::with_descales`] takes: codes and what they are multiplied by.

use crate::ragged::Ints;
use crate::ragged::layout::{LONGEST, MOST, common_words, number, span, unsupported};
use crate::tensor::{check_layout, check_output_rows, error, outer, same_shape, small};
use crate::{Descale, Result, ScaleKind, TensorView};
use bytemuck::Zeroable;
use flashtune_codegen::abi::QuantiseArgs;
use flashtune_codegen::{DType, Mask, MaskKind, Op, Problem, ScaleUnit, Shape};

/// What becomes of one of Q, K and V.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantiseOperand {
    /// Rows of f16, bf16 or f32, `[batch, heads, rows, head_dim]` by any strides with contiguous rows.
    pub from: TensorView,
    /// The same rows in e4m3; written.
    pub to: TensorView,
    /// Where the scales go, what the codes are multiplied by, and which elements share one. With [`ScaleKind::Tensor`]
    /// one number is written for every sequence and KV head; strides may be 0 there alone. Blocks have up to
    /// [`BLOCK_ROWS`] rows.
    pub scale: Descale,
}

/// Most rows of a head that share a scale by blocks in a quantisation: those of a tile.
pub const BLOCK_ROWS: u32 = 128;

/// Positions of the rows of Q or K.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowPositions {
    /// Row `i` of every sequence is at this and `i`.
    From(u64),
    /// Each row has its own, `[batch, rows]` on the device.
    Each {
        /// The first; those of a sequence follow each other.
        positions: Ints,
        /// From one sequence to the next; 0 where all have the same.
        stride: i64,
    },
}

/// A rotary embedding of Q and K before all else: pairs of elements turn by an angle that grows with the position. Rows
/// at a position that the tables have not become NaN where they would have turned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantiseRotary {
    /// Device address of the cosines, `[rows, dim / 2]`.
    pub cos: u64,
    /// Device address of the sines, of the same layout.
    pub sin: u64,
    /// Elements of both: fp32, or those of Q and K.
    pub dtype: DType,
    /// Distance in elements from one position to the next, the same in both.
    pub stride: i64,
    /// Positions that the tables have.
    pub rows: u64,
    /// Leading elements of a row that turn, an even number.
    pub dim: u64,
    /// Whether neighbours `2i` and `2i + 1` turn together (GPT-J), or `i` and `i + dim / 2` (NeoX).
    pub interleaved: bool,
    /// Where rows of Q are.
    pub q: RowPositions,
    /// Where rows of K are.
    pub k: RowPositions,
}

/// K's mean over the rows of a head: what is taken from each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyMean {
    /// Device address of fp32 `[batch, kv_heads, head_dim_qk]`; written, unless it is 0.
    pub address: u64,
    /// Distances in elements from one sequence, and from one KV head, to the next.
    pub strides: [i64; 2],
}

impl KeyMean {
    /// A mean that nobody wants to know.
    pub const UNSAID: Self = Self { address: 0, strides: [0; 2] };
}

/// Q, K and V, or some of them, as `e4m3`.
///
/// ```text
/// x = row, rotated by its position     K: x -= mean of x over the rows of the head
/// Q, K: x = H x / sqrt(head_dim)       scale = largest |x| / 448      code = x / scale
/// ```
///
/// The code is the nearest, of two the even one. Scores are `q * k` whatever `mean` and `hadamard` are, but for what
/// is taken from all scores of a row alike: weights and O of the attention are those of K, and its log-sum-exp lacks
/// `softmax_scale * q . mean`, with q as it was rotated by its position.
///
/// Elements that are not finite count neither for a scale nor for the mean: NaN stays NaN, and an infinity becomes 448
/// of its sign times the scale; `hadamard` makes both of the whole row. A mean that is beyond fp32 is 0. Where all
/// elements are zero the scale is 1, and it is never below 2^-126.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Quantise {
    /// Q, `[batch, heads, q_len, head_dim_qk]`.
    pub q: Option<QuantiseOperand>,
    /// K, `[batch, kv_heads, kv_len, head_dim_qk]`.
    pub k: Option<QuantiseOperand>,
    /// V, `[batch, kv_heads, kv_len, head_dim_v]`.
    pub v: Option<QuantiseOperand>,
    /// What rows of Q and K are rotated by.
    pub rotary: Option<QuantiseRotary>,
    /// Whether K's mean is taken from its rows, and where it is written.
    pub mean: Option<KeyMean>,
    /// Whether rows of Q and K are multiplied by the Hadamard matrix (Sylvester's) over the root of the head dim, a
    /// power of two: single large elements become many of the same size.
    pub hadamard: bool,
}

/// What a quantisation comes down to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantiseCall {
    /// What the kernel must be specialised to.
    pub problem: Problem,
    /// The sizes; no rows of what there is not.
    pub shape: Shape,
    /// The kernel's arguments.
    pub args: QuantiseArgs,
}

/// Names of an operand's tensors in errors: what is read, what is written, and its scales.
const NAMES: [[&str; 3]; 3] = [["q", "q_out", "q_descale"], ["k", "k_out", "k_descale"], ["v", "v_out", "v_descale"]];

/// Checks a call against what kernels take, and builds the arguments. Looks at no memory of the device. Sizes of zero
/// are legal.
///
/// # Errors
/// [`crate::Error::Tensor`] naming the tensor, the field and the remedy; [`crate::Error::Codegen`] for what no kernel
/// computes.
pub fn quantise_call(quantise: &Quantise) -> Result<QuantiseCall> {
    let operands = [quantise.q, quantise.k, quantise.v];
    let Some(first) = operands.iter().flatten().next() else {
        return unsupported("q, k and v", "absent", "there is at least one of them", "give what is to be quantised");
    };
    let (dtype, batch) = (first.from.dtype, first.from.shape[0]);
    if dtype == DType::E4m3 {
        let name = NAMES[operands.iter().position(Option::is_some).unwrap_or(0)][0];
        let expected = "what is quantised is f16, bf16 or f32";
        return Err(error(name, "dtype", dtype, expected, "give the operands of before, or leave this one out"));
    }
    let kv = quantise.k.or(quantise.v);
    // Of Q alone scales of rows say nothing of KV heads, and need none.
    let of_q = if first.scale.kind.rows().is_some() { first.from.shape[1] } else { first.scale.shape[1] };
    let kv_heads = kv.map_or(of_q, |kv| kv.from.shape[1]);
    let kv_len = kv.map_or(0, |kv| kv.from.shape[2]);
    let head_dim_qk = quantise.q.or(quantise.k).map(|t| t.from.shape[3]);
    let head_dim_v = quantise.v.map(|t| t.from.shape[3]);
    for (operand, names) in operands.iter().zip(NAMES).filter_map(|(operand, names)| Some((operand.as_ref()?, names))) {
        let is_q = names[0] == "q";
        let [_, heads, rows, dim] = operand.from.shape;
        let heads = if is_q { heads } else { kv_heads };
        let rows = if is_q { rows } else { kv_len };
        let dim = if names[0] == "v" { dim } else { head_dim_qk.unwrap_or(dim) };
        let rule = "[batch, heads, rows, head_dim]: all have one batch, K and V one length, Q and K one head dim";
        same_shape(names[0], &operand.from, [batch, heads, rows, dim], rule)?;
        check_operand(operand, names, dtype, kv_heads)?;
    }
    let [dim_qk, dim_v] = [head_dim_qk.or(head_dim_v), head_dim_v.or(head_dim_qk)].map(|dim| dim.unwrap_or(0));
    let [dim_qk, dim_v] = [small("q", "head dim", dim_qk)?, small("v", "head dim", dim_v)?];
    let problem = Problem::forward_qk_v(dtype, dim_qk, dim_v, MaskKind::FULL)?;
    let [heads, q_len] = quantise.q.map_or([kv_heads, 0], |q| [q.from.shape[1], q.from.shape[2]]);
    let shape = Shape {
        batch: small("q", "batch", batch)?,
        heads: small("q", "heads", heads)?,
        kv_heads: small("k", "heads", kv_heads)?,
        q_len: small("q", "rows", q_len)?,
        kv_len: small("k", "rows", kv_len)?,
        mask: Mask::Full,
    };
    shape.validate()?;
    if quantise.hadamard && head_dim_qk.is_some() && !dim_qk.is_power_of_two() {
        let remedy = "leave the Hadamard matrix out, or pad the rows of Q and K with zeros to a power of two";
        return unsupported("head_dim_qk", dim_qk, "Hadamard matrices here are those of powers of two", remedy);
    }
    check_mean(quantise, [batch, kv_heads, dim_qk.into()])?;
    check_rotary(quantise, dtype, dim_qk.into())?;
    Ok(QuantiseCall { problem: Problem { op: Op::Quantise, ..problem }, shape, args: arguments(quantise, &shape) })
}

fn check_operand(operand: &QuantiseOperand, names: [&'static str; 3], dtype: DType, kv_heads: u64) -> Result<()> {
    let QuantiseOperand { from, to, scale } = operand;
    let [name, out, of_scale] = names;
    if from.dtype != dtype {
        let expected = format!("what is quantised has one dtype, here {dtype}");
        return Err(error(name, "dtype", from.dtype, expected, "convert it"));
    }
    if to.dtype != DType::E4m3 {
        return Err(error(out, "dtype", to.dtype, "what is written is e4m3", "give a tensor of e4m3"));
    }
    same_shape(out, to, from.shape, "the shape of what is quantised")?;
    check_layout(name, from)?;
    check_layout(out, to)?;
    check_output_rows(out, to)?;
    scale.kind.check(of_scale)?;
    if let Some(rows) = scale.kind.rows().filter(|rows| *rows > BLOCK_ROWS) {
        let expected = format!("at most {BLOCK_ROWS} rows, which are read at once");
        return Err(error(
            of_scale,
            "rows of a block",
            rows,
            expected,
            "use blocks of 128 rows, or a scale for each head",
        ));
    }
    let shape = scale.kind.sizes(from.shape, kv_heads);
    if scale.shape != shape {
        let expected = format!("{shape:?}: {}", scale.kind);
        return Err(error(of_scale, "shape", format!("{:?}", scale.shape), expected, "give room for as many scales"));
    }
    if !from.is_empty() {
        check_layout(of_scale, &scale.view())?;
        if scale.kind != ScaleKind::Tensor {
            check_output_rows(of_scale, &scale.view())?;
        }
    }
    Ok(())
}

fn check_mean(quantise: &Quantise, [batch, kv_heads, dim]: [u64; 3]) -> Result<()> {
    let Some(mean) = quantise.mean else { return Ok(()) };
    if quantise.k.is_none() {
        return unsupported("mean", "K's", "there is no K", "leave the mean out, or give K");
    }
    if mean.address != 0 {
        let [b, h] = mean.strides;
        let strides = [b, h, 0, 1];
        let view = TensorView { address: mean.address, dtype: DType::F32, shape: [batch, kv_heads, 1, dim], strides };
        check_layout("k_mean", &view)?;
        check_output_rows("k_mean", &view)?;
    }
    Ok(())
}

fn check_rotary(quantise: &Quantise, dtype: DType, head_dim: u64) -> Result<()> {
    let Some(rotary) = quantise.rotary else { return Ok(()) };
    if rotary.dim < 2 || !rotary.dim.is_multiple_of(2) || rotary.dim > head_dim {
        let limit = format!("an even number from 2 to the head dim, {head_dim}");
        return unsupported("rotary_dim", rotary.dim, limit, "leave the rotary embedding out for none");
    }
    if rotary.dtype != DType::F32 && rotary.dtype != dtype {
        let expected = format!("cosines and sines are f32, or {dtype} as what is quantised");
        return Err(error("cos", "dtype", rotary.dtype, expected, "convert them"));
    }
    number("positions", rotary.rows, MOST, "cut the tables")?;
    if rotary.rows > 1 && rotary.stride < 0 {
        return Err(error("cos", "stride", rotary.stride, "strides are not negative", "make the table contiguous"));
    }
    let both = [("q_positions", rotary.q), ("k_positions", rotary.k)];
    for (name, positions) in both {
        match positions {
            RowPositions::From(first) => {
                number(name, first, LONGEST, "cut the tables")?;
            }
            RowPositions::Each { stride, .. } if stride < 0 => {
                let remedy = "make the positions contiguous";
                return Err(error(name, "batch stride", stride, "strides are not negative", remedy));
            }
            RowPositions::Each { .. } => {}
        }
    }
    common_words(both.map(|(name, positions)| match positions {
        RowPositions::From(_) => None,
        RowPositions::Each { positions, .. } => Some((name, positions)),
    }))?;
    each_table(quantise, &mut |_, _, _| Ok(()))
}

/// Calls with every range of a rotary embedding.
fn each_table(quantise: &Quantise, f: &mut dyn FnMut(&'static str, u64, u64) -> Result<()>) -> Result<()> {
    let Some(rotary) = quantise.rotary.filter(|r| r.rows > 0) else { return Ok(()) };
    let dims = [(rotary.rows, rotary.stride, "stride")];
    for (name, address) in [("cos", rotary.cos), ("sin", rotary.sin)] {
        f(name, address, span(name, address, &dims, rotary.dim / 2, rotary.dtype.bytes() as u64)?)?;
    }
    for (name, positions, operand) in [("q_positions", rotary.q, quantise.q), ("k_positions", rotary.k, quantise.k)] {
        if let (RowPositions::Each { positions, stride }, Some(operand)) = (positions, operand)
            && !operand.from.is_empty()
        {
            let [batch, _, rows, _] = operand.from.shape;
            let bytes =
                span(name, positions.address, &[(batch, stride, "batch stride")], rows, positions.kind.bytes())?;
            f(name, positions.address, bytes)?;
        }
    }
    Ok(())
}

fn arguments(quantise: &Quantise, shape: &Shape) -> QuantiseArgs {
    let mut args = QuantiseArgs::zeroed();
    for (t, operand) in [quantise.q, quantise.k, quantise.v].into_iter().enumerate() {
        let Some(operand) = operand.filter(|o| !o.from.is_empty()) else { continue };
        (args.from[t], args.to[t], args.scale[t]) = (operand.from.address, operand.to.address, operand.scale.address);
        args.from_stride[3 * t..3 * t + 3].copy_from_slice(&outer(&operand.from));
        args.to_stride[3 * t..3 * t + 3].copy_from_slice(&outer(&operand.to));
        let [of_batch, of_head, of_unit, _] = operand.scale.view().strides;
        args.scale_stride[2 * t..2 * t + 2].copy_from_slice(&[of_batch, of_head]);
        args.scale_unit_stride[t] = of_unit;
        let kind = operand.scale.kind;
        args.is_whole[t] = (kind == ScaleKind::Tensor).into();
        args.scale_kind[t] = match kind.unit() {
            ScaleUnit::Head => 0,
            ScaleUnit::Rows => 1,
            ScaleUnit::Channel => 2,
        };
        args.scale_rows_log2[t] = kind.rows().unwrap_or(1).ilog2() as i32;
    }
    (args.batch, args.heads, args.kv_heads) = (shape.batch as i32, shape.heads as i32, shape.kv_heads as i32);
    (args.q_len, args.kv_len) = (shape.q_len as i32, shape.kv_len as i32);
    args.is_mixed = quantise.hadamard.into();
    if let Some(mean) = quantise.mean {
        (args.subtracts_mean, args.mean, args.mean_stride) = (1, mean.address, mean.strides);
    }
    args.position_words = 1;
    if let Some(rotary) = quantise.rotary {
        // A table without positions has no address, but rotates.
        args.cos = if rotary.rows == 0 { u64::MAX } else { rotary.cos };
        args.sin = rotary.sin;
        args.rotary_stride = if rotary.rows > 1 { rotary.stride } else { 0 };
        (args.rotary_rows, args.rotary_dim) = (rotary.rows as i32, rotary.dim as i32);
        args.rotary_interleaved = rotary.interleaved.into();
        args.rotary_f32 = (rotary.dtype == DType::F32).into();
        for (t, positions) in [rotary.q, rotary.k].into_iter().enumerate() {
            match positions {
                RowPositions::From(first) => args.first_position[t] = first as i64,
                RowPositions::Each { positions, stride } => {
                    (args.positions[t], args.position_words) = (positions.address, positions.words());
                    args.position_stride[t] = if shape.batch > 1 { stride } else { 0 };
                }
            }
        }
    }
    args
}

impl Quantise {
    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        [self.q, self.k, self.v].iter().flatten().all(|operand| operand.from.is_empty())
    }

    /// Calls with every range of memory that the call touches: its name, address and size in bytes.
    ///
    /// # Errors
    /// What `f` says, and as [`quantise_call`] for layouts.
    pub fn each_range(&self, f: &mut dyn FnMut(&'static str, u64, u64) -> Result<()>) -> Result<()> {
        for (operand, [name, out, of_scale]) in [self.q, self.k, self.v].into_iter().zip(NAMES) {
            let Some(QuantiseOperand { from, to, scale, .. }) = operand.filter(|o| !o.from.is_empty()) else {
                continue;
            };
            f(name, from.address, from.extent_bytes().unwrap_or(1))?;
            f(out, to.address, to.extent_bytes().unwrap_or(1))?;
            let ([batch, heads, scale_units], [b, h, u]) = (scale.shape, scale.strides);
            let dims =
                [(batch, b, "batch stride"), (heads, h, "head stride"), (scale_units, u, "stride of the third axis")];
            f(of_scale, scale.address, span(of_scale, scale.address, &dims, 1, 4)?)?;
        }
        if let (Some(mean), Some(k)) = (self.mean.filter(|mean| mean.address != 0), self.k) {
            let [batch, heads, _, dim] = k.from.shape;
            let dims = [(batch, mean.strides[0], "batch stride"), (heads, mean.strides[1], "head stride")];
            f("k_mean", mean.address, span("k_mean", mean.address, &dims, dim, 4)?)?;
        }
        each_table(self, f)
    }
}
