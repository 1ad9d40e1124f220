//! The forward pass over tensors as DLPack describes them.
//!
//! A `DLTensor` is borrowed for the call and nothing of it is kept, so no deleter is needed: whoever has a
//! `DLManagedTensor` or a `DLManagedTensorVersioned` passes the address of its `dl_tensor`.

use crate::engine_handle::{ENGINES, Opened};
use crate::error::{Failure, Result, guard};
use crate::forward::{Places, with_args};
use crate::input;
use crate::types::{Dtype, EngineHandle, ForwardArgs, Status, Tensor};
use engine::device::Arch;
use engine::{DeviceSpec, Forward, RuntimeError, Stream};
use std::ffi::c_void;

/// A tensor as DLPack describes it: the layout of its struct DLTensor, which all versions up to 1.x share. Pass the
/// address of one of those.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DlTensor {
    /// Memory of the device.
    pub data: *mut c_void,
    /// A DLDeviceType: 1 (host), 2 (CUDA), 3 (pinned host memory), 13 (managed memory of CUDA).
    pub device_type: i32,
    /// The number of the device.
    pub device_id: i32,
    /// Number of axes.
    pub ndim: i32,
    /// A DLDataTypeCode: 2 (float), 4 (bfloat).
    pub code: u8,
    /// Bits of an element.
    pub bits: u8,
    /// 1.
    pub lanes: u16,
    /// Length of each axis.
    pub shape: *const i64,
    /// Distance between neighbours along each axis, in elements; NULL: compact and row-major.
    pub strides: *const i64,
    /// Where the first element lies behind `data`.
    pub byte_offset: u64,
}

/// A tensor of DLPack with its owner, as `flashtune_empty_dl` gives it: the same layout as DLManagedTensor of
/// dlpack.h, in the place of which it may be passed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DlManagedTensor {
    /// The tensor.
    pub dl_tensor: DlTensor,
    /// The library's own.
    pub manager_ctx: *mut c_void,
    /// Gives the tensor and its memory back; called once, with the address of this struct.
    pub deleter: Option<unsafe extern "C" fn(tensor: *mut DlManagedTensor)>,
}

/// The tensors of `flashtune_forward_dl`. Fill it with zeros, then set what it has.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DlTensors {
    /// sizeof(flashtune_dl_tensors).
    pub struct_size: u32,
    /// Order of the axes: 0: [batch, heads, rows, head_dim]; 1: [batch, rows, heads, head_dim].
    pub layout: i32,
    /// Q, with `heads` heads.
    pub q: *const DlTensor,
    /// K, with a number of heads that divides Q's.
    pub k: *const DlTensor,
    /// V, as K; its head dim may be another.
    pub v: *const DlTensor,
    /// O, as Q with V's head dim; written. It must not overlap the others.
    pub o: *const DlTensor,
    /// Log-sum-exp, contiguous float32 [batch, heads, rows]; written unless NULL.
    pub lse: *const DlTensor,
}

#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<DlTensor>() == 48 && std::mem::offset_of!(DlTensor, byte_offset) == 40);

/// `DLDeviceType`: host memory, also pinned, and memory that a GPU of CUDA reaches.
const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;

/// `DLDataTypeCode`.
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;

/// Axes of q, k, v and o.
const AXES: i32 = 4;

/// `flashtune_forward` of tensors that DLPack describes: `tensors` has Q, K, V, O and the log-sum-exp, `args` all
/// else. The tensors of `args` and its `lse` stay zero.
///
/// Tensors are borrowed: nothing of a DLTensor is kept beyond the call. Whoever has a DLManagedTensor or a
/// DLManagedTensorVersioned passes `&managed->dl_tensor`; whether O may be written is in the flags of the latter, and
/// the caller's to look at, and so is that what the tensors' producer has launched comes before `args->stream`. A
/// DLTensor without strides is compact and row-major.
///
/// Fails as `flashtune_forward`; with INVALID_TENSOR for another number of axes than four (of the log-sum-exp three),
/// dtypes other than float16, bfloat16 and float32 of one lane, a device that is not the engine's, and sizes and
/// offsets that exceed 64 bits.
///
/// # Safety
/// As `flashtune_forward`; the DLTensors are valid, and their shapes and strides have `ndim` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_forward_dl(
    engine: EngineHandle,
    tensors: *const DlTensors,
    args: *const ForwardArgs,
) -> Status {
    guard(|| {
        // SAFETY: by this function's contract.
        unsafe {
            with_call(engine, tensors, args, |opened, call, stream| {
                // SAFETY: as above; the sizes are checked by the engine.
                opened.remember(opened.engine.forward(call, stream)?);
                Ok(())
            })
        }
    })
}

/// `flashtune_prepare` of tensors that DLPack describes.
///
/// # Safety
/// As `flashtune_forward_dl`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_prepare_dl(
    engine: EngineHandle,
    tensors: *const DlTensors,
    args: *const ForwardArgs,
) -> Status {
    guard(|| {
        // SAFETY: by this function's contract.
        unsafe {
            with_call(engine, tensors, args, |opened, call, _| {
                opened.remember(opened.engine.prepare(call)?);
                Ok(())
            })
        }
    })
}

/// Reads the tensors into the arguments, and goes on as for those.
///
/// # Safety
/// As [`flashtune_forward_dl`].
unsafe fn with_call(
    handle: EngineHandle,
    tensors: *const DlTensors,
    args: *const ForwardArgs,
    f: impl FnOnce(&Opened, &Forward<'_>, Stream) -> Result<()>,
) -> Result<()> {
    let opened = ENGINES.get(handle)?;
    // SAFETY: by this function's contract.
    let (given, mut args) = unsafe { (input::read(tensors)?, input::read(args)?) };
    for (name, t) in [("q", &args.q), ("k", &args.k), ("v", &args.v), ("o", &args.o)] {
        if !t.data.is_null() || t.dtype != 0 {
            let message = format!("{name} of args is given beside that of tensors; leave the tensors of args zero");
            return Err(Failure::argument(message));
        }
    }
    if !args.lse.is_null() {
        return Err(Failure::argument("lse of args is given; pass it in tensors, as a DLTensor"));
    }
    let order = match given.layout {
        0 => [0, 1, 2, 3],
        1 => [0, 2, 1, 3],
        n => {
            let message = format!("layout is {n}, but it is 0 ([B, H, S, D]) or 1 ([B, S, H, D])");
            return Err(Failure::argument(message));
        }
    };
    // SAFETY: by this function's contract, for each.
    let read = |name, t| unsafe { tensor(&opened, name, t, order) };
    (args.q, args.k) = (read("q", given.q)?, read("k", given.k)?);
    (args.v, args.o) = (read("v", given.v)?, read("o", given.o)?);
    if !given.lse.is_null() {
        // SAFETY: as above.
        args.lse = unsafe { rows(&opened, given.lse, &args.q.shape)? };
    }
    // SAFETY: as above.
    unsafe { with_args(&opened, &args, Places::LookedUp, f) }
}

/// One tensor in the header's words, its axes in the order of `from`.
///
/// # Safety
/// `t` is null or a valid DLTensor.
unsafe fn tensor(opened: &Opened, name: &'static str, t: *const DlTensor, from: [usize; 4]) -> Result<Tensor> {
    // SAFETY: by this function's contract.
    let (t, shape, strides) = unsafe { axes::<4>(opened, name, t)? };
    let dtype = match (t.code, t.bits, t.lanes) {
        (FLOAT, 16, 1) => Dtype::F16,
        (BFLOAT, 16, 1) => Dtype::Bf16,
        (FLOAT, 32, 1) => Dtype::F32,
        (code, bits, lanes) => {
            let found = format!("code {code} of {bits} bits and {lanes} lanes");
            let expected = "float16, bfloat16 or float32, one lane";
            return Err(bad(name, "dtype", found, expected, "convert the tensor"));
        }
    };
    let address = address(name, t)?;
    Ok(Tensor {
        data: address as usize as *mut c_void,
        shape: from.map(|i| shape[i]),
        strides: from.map(|i| strides[i]),
        dtype: dtype as i32,
        reserved: 0,
    })
}

/// The log-sum-exp: a contiguous number for each batch, head and query of Q.
///
/// # Safety
/// `t` is a valid DLTensor.
unsafe fn rows(opened: &Opened, t: *const DlTensor, q: &[i64; 4]) -> Result<*mut f32> {
    // SAFETY: by this function's contract.
    let (t, shape, strides) = unsafe { axes::<3>(opened, "lse", t)? };
    if (t.code, t.bits, t.lanes) != (FLOAT, 32, 1) {
        let found = format!("code {} of {} bits and {} lanes", t.code, t.bits, t.lanes);
        return Err(bad("lse", "dtype", found, "float32, one lane", "allocate it so"));
    }
    if shape[..] != q[..3] {
        let expected = "[batch, heads, q_len] of q";
        return Err(bad("lse", "shape", format!("{shape:?}"), expected, "allocate it so"));
    }
    let dense = compact("lse", shape)?;
    let apart = shape.iter().zip(strides.iter().zip(dense)).any(|(n, (have, want))| *n > 1 && *have != want);
    if apart && !shape.contains(&0) {
        return Err(bad("lse", "strides", format!("{strides:?}"), "it is contiguous", "allocate it so"));
    }
    Ok(address("lse", t)? as usize as *mut f32)
}

/// A tensor of `N` axes with its shape and strides, on the engine's device.
///
/// # Safety
/// `t` is null or a valid DLTensor.
unsafe fn axes<const N: usize>(
    opened: &Opened,
    name: &'static str,
    t: *const DlTensor,
) -> Result<(DlTensor, [i64; N], [i64; N])> {
    if t.is_null() {
        return Err(Failure::argument(format!("the DLTensor {name} is null")));
    }
    // SAFETY: by this function's contract; it may lie at any address.
    let t = unsafe { t.read_unaligned() };
    // Before the shape is read: a struct of something else mostly shows here.
    if t.ndim != N as i32 {
        let expected = if t.ndim > 0 && N as i32 == AXES {
            "it has four axes, in the order that layout says"
        } else {
            "q, k, v and o have four axes, lse has three"
        };
        return Err(bad(name, "ndim", t.ndim.to_string(), expected, "add or take out axes of length 1"));
    }
    if t.shape.is_null() {
        return Err(bad(name, "shape", "null".to_owned(), "it points to ndim sizes", "set it"));
    }
    on_device(opened, name, &t)?;
    // SAFETY: as above.
    let shape = unsafe { t.shape.cast::<[i64; N]>().read_unaligned() };
    if shape.iter().any(|n| *n < 0) {
        return Err(bad(name, "shape", format!("{shape:?}"), "sizes are not negative", "check the tensor"));
    }
    let strides = match t.strides.is_null() {
        true => compact(name, shape)?,
        // SAFETY: as above.
        false => unsafe { t.strides.cast::<[i64; N]>().read_unaligned() },
    };
    Ok((t, shape, strides))
}

/// Strides of a compact row-major tensor.
fn compact<const N: usize>(name: &'static str, shape: [i64; N]) -> Result<[i64; N]> {
    let mut strides = [1i64; N];
    for i in (1..N).rev() {
        // No axis of length 0 makes the others' strides 0: nothing is read then.
        strides[i - 1] = strides[i].checked_mul(shape[i].max(1)).ok_or_else(|| {
            bad(name, "shape", format!("{shape:?}"), "the elements are less than 2^63", "check the tensor")
        })?;
    }
    Ok(strides)
}

/// The address of the first element.
fn address(name: &'static str, t: DlTensor) -> Result<u64> {
    (t.data as usize as u64).checked_add(t.byte_offset).ok_or_else(|| {
        let found = format!("{} behind {:?}", t.byte_offset, t.data);
        bad(name, "byte_offset", found, "the tensor begins within 64-bit addresses", "check the tensor")
    })
}

fn on_device(opened: &Opened, name: &'static str, t: &DlTensor) -> Result<()> {
    let device = opened.engine.device();
    let fits = match (device.arch(), t.device_type) {
        (Arch::Cpu(_), CPU | CUDA_HOST) => true,
        // In a context of the host's own the ordinal is not known; addresses are looked at all the same.
        (Arch::Sm(_), CUDA) => match device.spec() {
            Some(DeviceSpec::Cuda(ordinal)) => usize::try_from(t.device_id) == Ok(ordinal),
            _ => true,
        },
        (Arch::Sm(_), CUDA_MANAGED) => true,
        _ => false,
    };
    if fits {
        return Ok(());
    }
    let found = format!("type {} number {}", t.device_type, t.device_id);
    let expected = match device.arch() {
        Arch::Cpu(_) => "the engine computes on the cpu (1; pinned memory, 3)",
        Arch::Sm(_) => "the engine computes on a GPU of CUDA (2, with the GPU's number; managed memory, 13)",
    };
    Err(bad(name, "device", found, expected, "copy the tensor there, or use an engine on its device"))
}

fn bad(tensor: &'static str, field: &'static str, found: String, expected: &str, remedy: &'static str) -> Failure {
    Failure::from(RuntimeError::Tensor { tensor, field, found, expected: expected.to_owned(), remedy })
}
