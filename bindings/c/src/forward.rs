//! The forward pass.

use crate::engine_handle::{ENGINES, Opened};
use crate::error::{Failure, Result, guard};
use crate::prepared::BLOCK_MASKS;
use crate::types::{
    self, DescaleKind, Dropout, Dtype, EngineHandle, FORWARD_EXACT, FORWARD_SCALE, FORWARD_TF32, FORWARD_TF32X3,
    ForwardArgs, Mask, NO_BLOCK_MASK, Status, Tensor,
};
use crate::{input, program};
use engine::device::Arch;
use engine::{DType, Descale, Descales, Dispatch, Forward, Precision, RuntimeError, ScaleKind, Stream, TensorView};
use std::ffi::c_void;
use std::sync::PoisonError;

/// No process has memory below this address, so no handle lies there.
const LOWEST_HANDLE: u64 = 4096;

/// Where the tensors of a call are. The driver is asked twice for each that is looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Places {
    LookedUp,
    /// The package that the tensors are of says that they are on the engine's device.
    Known,
}

/// Computes on `args->stream` and returns at once (on the CPU when done). The first call of a class of sizes may
/// compile or tune, by policy; later ones launch, allocate nothing and wait for nothing, and may be captured in a CUDA
/// graph (a mask of which something is found first, as of documents, takes memory for that, in the stream's order; a
/// block mask keeps it). Does nothing when O has no element.
///
/// Every address must be valid for what its shape and strides span until the work is done. That is checked as far as it
/// can be told: on CUDA a tensor that begins or ends in memory of the host, of another GPU or in none is
/// INVALID_TENSOR; on the CPU the address of a GPU is not noticed. A stream of another context or GPU is an error of
/// the driver (DEVICE); a stream that was destroyed is not noticed, and may end the process.
///
/// Fails with INVALID_ARGUMENT, INVALID_HANDLE, INVALID_TENSOR, UNSUPPORTED, SEALED, and with what compilers and
/// drivers report. Nothing was launched then.
///
/// # Safety
/// `args` is NULL or valid, its addresses are as said above, its strings end with a zero byte, and its stream is a live
/// one of the engine's context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_forward(engine: EngineHandle, args: *const ForwardArgs) -> Status {
    // SAFETY: by this function's contract.
    unsafe { forward(engine, args, Places::LookedUp) }
}

/// [`flashtune_forward`], with tensors looked up or not.
///
/// # Safety
/// As [`flashtune_forward`].
pub(crate) unsafe fn forward(engine: EngineHandle, args: *const ForwardArgs, places: Places) -> Status {
    guard(|| {
        // SAFETY: by this function's contract.
        unsafe {
            with_call(engine, args, places, |opened, call, stream| {
                // SAFETY: as above; the sizes are checked by the engine.
                opened.remember(opened.engine.forward(call, stream)?);
                Ok(())
            })
        }
    })
}

/// All of `flashtune_forward` but the launch: finds, compiles or tunes the kernel and loads it, so that a call with the
/// same arguments is a launch and no more. Reads and writes no tensor; the addresses matter for their alignment.
///
/// # Safety
/// As `flashtune_forward`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_prepare(engine: EngineHandle, args: *const ForwardArgs) -> Status {
    guard(|| {
        // SAFETY: by this function's contract.
        unsafe {
            with_call(engine, args, Places::LookedUp, |opened, call, _| {
                opened.remember(opened.engine.prepare(call)?);
                Ok(())
            })
        }
    })
}

impl Opened {
    /// Keeps what ran for the next question.
    pub(crate) fn remember(&self, dispatch: Option<Dispatch>) {
        let Some(dispatch) = dispatch else { return };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let previous = last.replace(dispatch);
        drop(last);
        // It may be the last owner of a kernel: that is unloaded after the lock is free.
        drop(previous);
    }
}

/// Reads and checks the call, and passes it on.
///
/// # Safety
/// `args` is null or readable for the size that it states, and what it points to is as [`flashtune_forward`] says.
unsafe fn with_call(
    handle: EngineHandle,
    args: *const ForwardArgs,
    places: Places,
    f: impl FnOnce(&Opened, &Forward<'_>, Stream) -> Result<()>,
) -> Result<()> {
    let opened = ENGINES.get(handle)?;
    // SAFETY: by this function's contract.
    unsafe { with_args(&opened, &input::read(args)?, places, f) }
}

/// Checks a call that was read, and passes it on.
///
/// # Safety
/// What `args` points to is as [`flashtune_forward`] says.
pub(crate) unsafe fn with_args(
    opened: &Opened,
    args: &ForwardArgs,
    places: Places,
    f: impl FnOnce(&Opened, &Forward<'_>, Stream) -> Result<()>,
) -> Result<()> {
    let prepared = (args.block_mask != NO_BLOCK_MASK).then(|| BLOCK_MASKS.get(args.block_mask)).transpose()?;
    // SAFETY: by this function's contract; the strings are read before this returns.
    let program = unsafe { program::of_call(args, prepared.as_deref())? };
    let mut call = call(args)?;
    if let Some((program, inputs)) = &program {
        call = call.with_program(*program, inputs.side());
    }
    if let Some(prepared) = &prepared {
        call = call.with_block_mask(&prepared.block_mask);
    }
    let stream = stream(opened, args.stream)?;
    if places == Places::LookedUp {
        opened.engine.check_addresses(&call)?;
    }
    if opened.checked {
        opened.engine.check_overlaps(&call)?;
    }
    f(opened, &call, stream)
}

/// A stream of the engine's device.
pub(crate) fn stream(opened: &Opened, stream: *mut c_void) -> Result<Stream> {
    let on_cpu = matches!(opened.engine.device().arch(), Arch::Cpu(_));
    if on_cpu && !stream.is_null() {
        let message = "stream is not null, but the engine computes on the cpu, which has none; pass NULL";
        return Err(Failure::argument(message));
    }
    let stream = stream as usize as u64;
    // The driver would read from such an address. 1 and 2 stand for the two kinds of the default stream.
    if (3..LOWEST_HANDLE).contains(&stream) {
        let message =
            format!("stream is {stream:#x}, which is no CUstream; pass a live one, or NULL for the default stream");
        return Err(Failure::argument(message));
    }
    Ok(Stream(stream))
}

/// The call in the engine's words, without its score program.
fn call(args: &ForwardArgs) -> Result<Forward<'static>> {
    let precision = match args.flags & (FORWARD_EXACT | FORWARD_TF32X3 | FORWARD_TF32) {
        0 => None,
        FORWARD_EXACT => Some(Precision::Exact),
        FORWARD_TF32X3 => Some(Precision::Tf32x3),
        FORWARD_TF32 => Some(Precision::Tf32),
        n => {
            return Err(Failure::argument(format!(
                "flags has several precisions ({n:#x}); set one of FLASHTUNE_FORWARD_EXACT, _TF32X3 and _TF32, or none"
            )));
        }
    };
    let scale = match args.flags & !(FORWARD_EXACT | FORWARD_TF32X3 | FORWARD_TF32) {
        FORWARD_SCALE => Some(args.softmax_scale),
        0 if args.softmax_scale == 0.0 => None,
        0 => {
            return Err(Failure::argument(format!(
                "softmax_scale is {}, but flags lacks FLASHTUNE_FORWARD_SCALE; set the flag, or leave the scale 0",
                args.softmax_scale
            )));
        }
        _ => {
            return Err(Failure::argument(format!(
                "flags is {:#x}, but only FLASHTUNE_FORWARD_SCALE (1) and the precisions (2, 4, 8) are known",
                args.flags
            )));
        }
    };
    let (q, k, v) = (operand("q", &args.q)?, operand("k", &args.k)?, operand("v", &args.v)?);
    let o = operand("o", &args.o)?;
    let lse = (!args.lse.is_null()).then_some(args.lse as usize as u64);
    Ok(Forward {
        lse,
        residual: residual(&args.residual)?,
        dropout: dropout(&args.dropout),
        weights: (!args.weights.is_null()).then_some(args.weights as usize as u64),
        mask: mask(args.mask, (args.window_left, args.window_right))?,
        scale,
        precision,
        descales: descales(args, [&q, &k, &v])?,
        o_scale: (!args.o_scale.is_null()).then_some(args.o_scale as usize as u64),
        ..Forward::new(q, k, v, o)
    })
}

/// What O loses by rounding, where a call has it.
pub(crate) fn residual(tensor: &Tensor) -> Result<Option<TensorView>> {
    if tensor.data.is_null() { Ok(None) } else { view("residual", tensor).map(Some) }
}

/// Which scores a call drops, in the engine's words, who checks them.
pub(crate) fn dropout(of: &Dropout) -> engine::Dropout {
    let Dropout { p, seed, offset, seed_at, offset_at } = *of;
    let address = |at: *const u64| at as usize as u64;
    engine::Dropout { p, seed, offset, seed_at: address(seed_at), offset_at: address(offset_at) }
}

/// The scales of e4m3 operands.
fn descales(args: &ForwardArgs, [q, k, v]: [&TensorView; 3]) -> Result<Descales> {
    let of = |name, scales: *const f32, strides, by: &types::Descale, operand: &TensorView| {
        let kind = scale_kind(name, by)?;
        let scale = descale(scales as usize as u64, kind, strides, by.stride, operand.shape, k.shape[1]);
        Result::Ok((!scales.is_null()).then_some(scale))
    };
    Ok(Descales {
        q: of("q_descale_by", args.q_descale, args.q_descale_stride, &args.q_descale_by, q)?,
        k: of("k_descale_by", args.k_descale, args.k_descale_stride, &args.k_descale_by, k)?,
        v: of("v_descale_by", args.v_descale, args.v_descale_stride, &args.v_descale_by, v)?,
    })
}

/// What shares a scale, by a struct of the header.
pub(crate) fn scale_kind(name: &'static str, by: &types::Descale) -> Result<ScaleKind> {
    const HEAD: i32 = DescaleKind::Head as i32;
    const TOKEN: i32 = DescaleKind::Token as i32;
    const BLOCK: i32 = DescaleKind::Block as i32;
    const CHANNEL: i32 = DescaleKind::Channel as i32;
    let kind = match by.kind {
        HEAD => ScaleKind::Head,
        TOKEN => ScaleKind::Token,
        BLOCK => ScaleKind::Block(u32::try_from(by.rows).unwrap_or(0)),
        CHANNEL => ScaleKind::Channel,
        n => {
            let message = format!("{name}.kind is {n}, but a flashtune_descale_kind is a number from 0 to 3");
            return Err(Failure::argument(message));
        }
    };
    if by.kind != BLOCK && by.rows != 0 {
        let message = format!("{name}.rows is {}, but it belongs to blocks of rows; leave it 0", by.rows);
        return Err(Failure::argument(message));
    }
    Ok(kind)
}

/// Scales of an operand, of the shape that their kind gives them.
pub(crate) fn descale(
    address: u64,
    kind: ScaleKind,
    [of_batch, of_head]: [i64; 2],
    of_unit: i64,
    operand: [u64; 4],
    kv_heads: u64,
) -> Descale {
    Descale { address, kind, shape: kind.sizes(operand, kv_heads), strides: [of_batch, of_head, of_unit] }
}

/// A `flashtune_dtype`.
pub(crate) fn dtype(tensor: &'static str, number: i32) -> Result<DType> {
    const F16: i32 = Dtype::F16 as i32;
    const BF16: i32 = Dtype::Bf16 as i32;
    const F32: i32 = Dtype::F32 as i32;
    match number {
        F16 => Ok(DType::F16),
        BF16 => Ok(DType::Bf16),
        F32 => Ok(DType::F32),
        n => Err(Failure::from(RuntimeError::Tensor {
            tensor,
            field: "dtype",
            found: n.to_string(),
            expected: "a flashtune_dtype is 1 (f16), 2 (bf16) or 3 (f32), and 4 (e4m3) of a forward pass".to_owned(),
            remedy: "convert the tensor to one of them",
        })),
    }
}

/// As [`dtype`], of Q or O of a forward pass, which may be e4m3.
pub(crate) fn operand_dtype(tensor: &'static str, number: i32) -> Result<DType> {
    if number == Dtype::E4m3 as i32 { Ok(DType::E4m3) } else { dtype(tensor, number) }
}

/// Of Q, K, V or O of a forward pass, which may be e4m3.
pub(crate) fn operand(tensor: &'static str, t: &Tensor) -> Result<TensorView> {
    match t.dtype {
        n if n == Dtype::E4m3 as i32 => view_of(tensor, t, DType::E4m3),
        _ => view(tensor, t),
    }
}

pub(crate) fn view(tensor: &'static str, t: &Tensor) -> Result<TensorView> {
    view_of(tensor, t, dtype(tensor, t.dtype)?)
}

fn view_of(tensor: &'static str, t: &Tensor, dtype: DType) -> Result<TensorView> {
    let error = |field, found: String, expected: &str, remedy| {
        Failure::from(RuntimeError::Tensor { tensor, field, found, expected: expected.to_owned(), remedy })
    };
    if t.reserved != 0 {
        return Err(error("reserved", t.reserved.to_string(), "it is 0", "fill the struct with zeros first"));
    }
    if t.shape.iter().any(|n| *n < 0) {
        let found = format!("{:?}", t.shape);
        return Err(error("shape", found, "sizes are not negative", "give [batch, heads, rows, head_dim]"));
    }
    Ok(TensorView { address: t.data as usize as u64, dtype, shape: t.shape.map(|n| n as u64), strides: t.strides })
}

/// A `flashtune_mask` with its reaches.
pub(crate) fn mask(number: i32, window: (i64, i64)) -> Result<engine::Mask> {
    const FULL: i32 = Mask::Full as i32;
    const CAUSAL: i32 = Mask::Causal as i32;
    const WINDOW: i32 = Mask::Window as i32;
    match number {
        FULL | CAUSAL if window != (0, 0) => Err(Failure::argument(format!(
            "window_left and window_right are {window:?}, but mask is {number}; use FLASHTUNE_MASK_WINDOW, or leave \
             them 0"
        ))),
        FULL => Ok(engine::Mask::Full),
        CAUSAL => Ok(engine::Mask::Causal),
        WINDOW => {
            Ok(engine::Mask::Window { left: reach("window_left", window.0)?, right: reach("window_right", window.1)? })
        }
        n => Err(Failure::argument(format!("mask is {n}, but a flashtune_mask is 0, 1 or 2"))),
    }
}

/// Keys on one side; what exceeds every length is as good as the largest number.
fn reach(field: &str, n: i64) -> Result<Option<u32>> {
    match n {
        -1 => Ok(None),
        0.. => Ok(Some(u32::try_from(n).unwrap_or(u32::MAX))),
        _ => {
            Err(Failure::argument(format!("{field} is {n}, but it is -1 (all keys of that side) or a number of keys")))
        }
    }
}
