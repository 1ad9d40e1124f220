//! Low-precision operands with their scales.

use crate::engine_handle::ENGINES;
use crate::error::{Failure, Result, guard};
use crate::forward::{self, dtype, operand as view};
use crate::input;
use crate::ragged::{address, int_type, size};
use crate::types::{Descale, EngineHandle, Status, Tensor};
use engine::ScaleKind;
use engine::append::Ints;
use engine::quantise::{KeyMean, Quantise, QuantiseOperand, QuantiseRotary, RowPositions};
use std::ffi::c_void;

/// Neighbouring elements `2i` and `2i + 1` turn together in `flashtune_quantise_args`, and not `i` and
/// `i + rotary_dim / 2`.
pub const QUANTISE_INTERLEAVED: u32 = 1;

/// Rows of Q and K are multiplied by the Hadamard matrix over the root of the head dim, a power of two.
pub const QUANTISE_HADAMARD: u32 = 2;

/// K's mean over the rows of each head is taken from its rows.
pub const QUANTISE_MEAN: u32 = 4;

/// All of Q has one scale, which is written for each sequence and KV head.
pub const QUANTISE_Q_WHOLE: u32 = 8;

/// The same for K.
pub const QUANTISE_K_WHOLE: u32 = 16;

/// The same for V.
pub const QUANTISE_V_WHOLE: u32 = 32;

/// Q, K and V, or some of them, as e4m3 with their scales. Fill it with zeros, set `struct_size`, then what is wanted.
///
/// A row is rotated by its position, K's mean is taken from K, rows of Q and K are multiplied by the Hadamard matrix;
/// the scale is the largest finite magnitude of a head (of Q of all heads of a KV head), or of what else shares one,
/// over 448, and a code the nearest to an element over the scale. Where all are zero the scale is 1, and it is never
/// below 2^-126. NaN stays NaN, an infinity becomes 448 of its sign, and neither counts for a scale or the mean.
///
/// With the mean or the matrix O and the weights of an attention are what they are without, its log-sum-exp lacks
/// softmax_scale * q . mean where the mean was taken.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct QuantiseArgs {
    /// sizeof(flashtune_quantise_args).
    pub struct_size: u32,
    /// FLASHTUNE_QUANTISE_INTERLEAVED, _HADAMARD, _MEAN, _Q_WHOLE, _K_WHOLE, _V_WHOLE, or 0.
    pub flags: u32,
    /// [batch, heads, q_len, head_dim_qk] of f16, bf16 or f32; a data of NULL and a shape of zeros for none.
    pub q: Tensor,
    /// [batch, kv_heads, kv_len, head_dim_qk], or none.
    pub k: Tensor,
    /// [batch, kv_heads, kv_len, head_dim_v], or none.
    pub v: Tensor,
    /// Q in e4m3, of the same shape; written. Outputs must not overlap anything else.
    pub q_out: Tensor,
    /// K in e4m3; written.
    pub k_out: Tensor,
    /// V in e4m3; written.
    pub v_out: Tensor,
    /// What codes of Q are multiplied by, fp32 [batch, kv_heads], or as `q_descale_by` says, on the device; written, as
    /// `flashtune_forward_args` reads it.
    pub q_descale: *mut f32,
    /// The same for K.
    pub k_descale: *mut f32,
    /// The same for V.
    pub v_descale: *mut f32,
    /// Elements from one sequence, and from one KV head, to the next in `q_descale`; with FLASHTUNE_QUANTISE_Q_WHOLE
    /// they may be 0.
    pub q_descale_stride: [i64; 2],
    /// The same in `k_descale`.
    pub k_descale_stride: [i64; 2],
    /// The same in `v_descale`.
    pub v_descale_stride: [i64; 2],
    /// K's mean, fp32 [batch, kv_heads, head_dim_qk]; written with FLASHTUNE_QUANTISE_MEAN unless NULL.
    pub k_mean: *mut f32,
    /// Elements from one sequence, and from one KV head, to the next in `k_mean`.
    pub k_mean_stride: [i64; 2],
    /// KV heads; needed for Q alone, else 0 or those of K and V.
    pub kv_heads: i64,
    /// Cosines, [rotary_rows, rotary_dim / 2]; NULL: nothing is rotated by positions.
    pub cos: *const c_void,
    /// Sines.
    pub sin: *const c_void,
    /// From one position to the next in both.
    pub rotary_stride: i64,
    /// Positions that they have: rows at others become NaN where they would turn.
    pub rotary_rows: i64,
    /// Leading elements of a row that turn, an even number.
    pub rotary_dim: i64,
    /// Elements of both: a `flashtune_dtype`, F32 or that of Q and K.
    pub rotary_dtype: i32,
    /// Integers of `q_positions` and `k_positions`: 0 i32, 1 u32, 2 i64.
    pub position_type: i32,
    /// Position of each row of Q, [batch, q_len]; NULL: row i is at `q_first` and i.
    pub q_positions: *const c_void,
    /// The same for K.
    pub k_positions: *const c_void,
    /// Elements from one sequence to the next in `q_positions`; 0: all have the same.
    pub q_position_stride: i64,
    /// The same in `k_positions`.
    pub k_position_stride: i64,
    /// Position of the first row of Q in every sequence.
    pub q_first: i64,
    /// Position of the first row of K in every sequence.
    pub k_first: i64,
    /// What shares a scale in Q, beside FLASHTUNE_QUANTISE_Q_WHOLE heads', and the third stride of `q_descale`.
    pub q_descale_by: Descale,
    /// The same for K.
    pub k_descale_by: Descale,
    /// The same for V.
    pub v_descale_by: Descale,
}

/// Makes e4m3 operands and their scales on `stream` and returns at once (on the CPU when done): two launches, which
/// wait for nothing, allocate memory in the stream's order alone, and may be captured. The first call of a dtype and
/// head dims compiles. Does nothing without rows. The same bytes in every run.
///
/// `stream`: the CUstream to launch on, of the engine's context; NULL: the default stream. On the CPU NULL.
///
/// Addresses are checked as in `flashtune_forward`. Fails as it does.
///
/// # Safety
/// `args` is NULL or valid, its addresses are as said above, and `stream` is a live one of the engine's context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_quantise(
    engine: EngineHandle,
    args: *const QuantiseArgs,
    stream: *mut c_void,
) -> Status {
    guard(|| {
        let opened = ENGINES.get(engine)?;
        // SAFETY: by this function's contract.
        let quantise = quantise_of(&unsafe { input::read(args)? })?;
        let stream = forward::stream(&opened, stream)?;
        opened.engine.check_quantise_addresses(&quantise)?;
        // SAFETY: by this function's contract; sizes are checked by the engine.
        opened.remember(unsafe { opened.engine.quantise(&quantise, stream)? });
        Ok(())
    })
}

/// All of `flashtune_quantise` but the launch: compiles the kernel if need be and loads it, so that a call is launches
/// and no more. Reads and writes nothing that the arguments point to.
///
/// # Safety
/// As `flashtune_quantise`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_prepare_quantise(engine: EngineHandle, args: *const QuantiseArgs) -> Status {
    guard(|| {
        let opened = ENGINES.get(engine)?;
        // SAFETY: by this function's contract.
        let quantise = quantise_of(&unsafe { input::read(args)? })?;
        opened.engine.check_quantise_addresses(&quantise)?;
        opened.remember(opened.engine.prepare_quantise(&quantise)?);
        Ok(())
    })
}

/// The call in the engine's words.
fn quantise_of(args: &QuantiseArgs) -> Result<Quantise> {
    const KNOWN: u32 = 63;
    let has = |flag: u32| args.flags & flag != 0;
    if has(!KNOWN) {
        let message = format!("flags is {:#x}, but only FLASHTUNE_QUANTISE_... 1 to 32 are known", args.flags);
        return Err(Failure::argument(message));
    }
    let kv_heads = [args.k, args.v].iter().find(|t| is_given(t)).map_or(args.kv_heads, |t| t.shape[1]);
    let kv_heads = size("kv_heads", kv_heads)?;
    type Scales<'a> = (*mut f32, [i64; 2], &'a Descale, u32);
    let operand = |[name, out, by_name]: [&'static str; 3], from: &Tensor, to: &Tensor, scales: Scales<'_>| {
        if !is_given(from) {
            return Ok(None);
        }
        let from = view(name, from)?;
        let (scale, strides, by, whole) = scales;
        let kind = match (has(whole), forward::scale_kind(by_name, by)?) {
            (true, ScaleKind::Head) => ScaleKind::Tensor,
            (true, _) => {
                let message =
                    format!("{by_name}.kind is {}, but flags says one scale for all; give one of them", by.kind);
                return Err(Failure::argument(message));
            }
            (false, kind) => kind,
        };
        let scale = forward::descale(address(scale), kind, strides, by.stride, from.shape, kv_heads);
        Result::Ok(Some(QuantiseOperand { from, to: view(out, to)?, scale }))
    };
    let positions = |given: *const c_void, stride, first: (&str, i64)| match given.is_null() {
        true => Ok(RowPositions::From(size(first.0, first.1)?)),
        false => {
            let positions = Ints { address: address(given), kind: int_type("position_type", args.position_type)? };
            Result::Ok(RowPositions::Each { positions, stride })
        }
    };
    let rotary = match args.cos.is_null() {
        true => None,
        false => Some(QuantiseRotary {
            cos: address(args.cos),
            sin: address(args.sin),
            dtype: dtype("cos", args.rotary_dtype)?,
            stride: args.rotary_stride,
            rows: size("rotary_rows", args.rotary_rows)?,
            dim: size("rotary_dim", args.rotary_dim)?,
            interleaved: has(QUANTISE_INTERLEAVED),
            q: positions(args.q_positions, args.q_position_stride, ("q_first", args.q_first))?,
            k: positions(args.k_positions, args.k_position_stride, ("k_first", args.k_first))?,
        }),
    };
    let mean = KeyMean { address: address(args.k_mean), strides: args.k_mean_stride };
    Ok(Quantise {
        q: operand(
            ["q", "q_out", "q_descale_by"],
            &args.q,
            &args.q_out,
            (args.q_descale, args.q_descale_stride, &args.q_descale_by, QUANTISE_Q_WHOLE),
        )?,
        k: operand(
            ["k", "k_out", "k_descale_by"],
            &args.k,
            &args.k_out,
            (args.k_descale, args.k_descale_stride, &args.k_descale_by, QUANTISE_K_WHOLE),
        )?,
        v: operand(
            ["v", "v_out", "v_descale_by"],
            &args.v,
            &args.v_out,
            (args.v_descale, args.v_descale_stride, &args.v_descale_by, QUANTISE_V_WHOLE),
        )?,
        rotary,
        mean: has(QUANTISE_MEAN).then_some(mean),
        hadamard: has(QUANTISE_HADAMARD),
    })
}

/// Whether a tensor is there: one without elements may have no memory, but has a shape.
fn is_given(t: &Tensor) -> bool {
    !t.data.is_null() || t.shape.iter().any(|n| *n != 0)
}
