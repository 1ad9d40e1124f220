//! New memory on an engine's device as a tensor of DLPack, for libraries whose own arrays cannot be written.

use crate::dlpack::{DlManagedTensor, DlTensor};
use crate::engine_handle::ENGINES;
use crate::error::{Failure, Result, guard};
use crate::input;
use crate::types::{EngineHandle, Status};
use engine::DeviceSpec;
use engine::device::{Arch, Buffer};
use std::ffi::c_void;

/// No tensor of ours has more, and no consumer is known that takes more.
const MOST_AXES: usize = 8;

/// What `flashtune_empty_dl` gives away, and its deleter takes back.
struct Owned {
    tensor: DlManagedTensor,
    /// Sizes, then strides.
    axes: [i64; 2 * MOST_AXES],
    _memory: Box<dyn Buffer>,
}

/// New uninitialised memory on the engine's device, compact and row-major, as a DLManagedTensor (of DLPack before
/// version 1, which every library takes). Whoever takes it over calls `(*tensor)->deleter(*tensor)` once, on any
/// thread, also when the engine is closed: that waits for work that uses the memory, and gives it back.
///
/// `shape`: `ndim` sizes, 0 to 8 of them. `code`, `bits`: of an element, a DLDataTypeCode and 8, 16, 32 or 64.
/// `tensor`: receives it, NULL on failure.
///
/// For results of few calls: on CUDA it is an allocation of the driver's, with no pool.
///
/// Fails with INVALID_ARGUMENT; with UNSUPPORTED for an engine in a context of the host's own, whose GPU has no number;
/// and with DEVICE where there is no room.
///
/// # Safety
/// `shape` has `ndim` numbers, and `tensor` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_empty_dl(
    engine: EngineHandle,
    shape: *const i64,
    ndim: i32,
    code: u8,
    bits: u8,
    tensor: *mut *mut DlManagedTensor,
) -> Status {
    guard(|| {
        // Before anything else, so that a failure leaves no stale address.
        // SAFETY: by this function's contract.
        unsafe { input::write(tensor, "the tensor", std::ptr::null_mut())? };
        // SAFETY: as above.
        let shape = unsafe { sizes(shape, ndim)? };
        let owned = allocate(engine, &shape[..ndim as usize], code, bits)?;
        // SAFETY: as above.
        unsafe { input::write(tensor, "the tensor", owned) }
    })
}

/// # Safety
/// `shape` is null or has `ndim` numbers.
unsafe fn sizes(shape: *const i64, ndim: i32) -> Result<[i64; MOST_AXES]> {
    let Some(axes) = usize::try_from(ndim).ok().filter(|n| *n <= MOST_AXES) else {
        return Err(Failure::argument(format!("ndim is {ndim}, but a tensor has 0 to {MOST_AXES} axes")));
    };
    let mut sizes = [1; MOST_AXES];
    if axes > 0 && shape.is_null() {
        return Err(Failure::argument("the pointer to shape is null; pass ndim sizes"));
    }
    for (i, size) in sizes.iter_mut().enumerate().take(axes) {
        // SAFETY: by this function's contract; it may lie at any address.
        *size = unsafe { shape.add(i).read_unaligned() };
        if *size < 0 {
            return Err(Failure::argument(format!("shape[{i}] is {size}, but sizes are not negative")));
        }
    }
    Ok(sizes)
}

fn allocate(engine: EngineHandle, shape: &[i64], code: u8, bits: u8) -> Result<*mut DlManagedTensor> {
    if !matches!(bits, 8 | 16 | 32 | 64) {
        return Err(Failure::argument(format!("bits is {bits}, but an element has 8, 16, 32 or 64")));
    }
    let opened = ENGINES.get(engine)?;
    let device = opened.engine.device();
    let (device_type, device_id) = match (device.arch(), device.spec()) {
        (Arch::Cpu(_), _) => (1, 0),
        (Arch::Sm(_), Some(DeviceSpec::Cuda(number))) => (2, number as i32),
        _ => {
            let message = "the engine's context is the host's own, and DLPack asks for its GPU's number; open an \
                           engine by the device's name";
            return Err(Failure::new(Status::Unsupported, message));
        }
    };
    let mut strides = [1i64; MOST_AXES];
    let mut elements = 1i64;
    for (i, size) in shape.iter().enumerate().rev() {
        strides[i] = elements;
        let next = elements.checked_mul((*size).max(1)).filter(|n| n.checked_mul(8).is_some());
        let too_large = || Failure::argument(format!("a tensor of {shape:?} has more bytes than addresses have bits"));
        elements = next.ok_or_else(too_large)?;
    }
    // Axes of length 0 count as 1 in strides, and there is nothing behind them.
    let elements = if shape.contains(&0) { 0 } else { elements as usize };
    let memory = device.alloc(elements * usize::from(bits / 8))?;
    let mut owned = Box::new(Owned {
        tensor: DlManagedTensor {
            dl_tensor: DlTensor {
                data: memory.address() as usize as *mut c_void,
                device_type,
                device_id,
                ndim: shape.len() as i32,
                code,
                bits,
                lanes: 1,
                shape: std::ptr::null(),
                strides: std::ptr::null(),
                byte_offset: 0,
            },
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(give_back),
        },
        axes: [0; 2 * MOST_AXES],
        _memory: memory,
    });
    owned.axes[..shape.len()].copy_from_slice(shape);
    owned.axes[MOST_AXES..][..shape.len()].copy_from_slice(&strides[..shape.len()]);
    let owned = Box::into_raw(owned);
    // SAFETY: a live block, which nobody else has yet.
    unsafe {
        (*owned).tensor.manager_ctx = owned.cast();
        let axes = (&raw const (*owned).axes).cast::<i64>();
        (*owned).tensor.dl_tensor.shape = axes;
        (*owned).tensor.dl_tensor.strides = axes.add(MOST_AXES);
        Ok(&raw mut (*owned).tensor)
    }
}

/// The deleter of [`flashtune_empty_dl`].
///
/// # Safety
/// `tensor` is what it gave, and this is the only call.
unsafe extern "C" fn give_back(tensor: *mut DlManagedTensor) {
    // SAFETY: by this function's contract; `manager_ctx` is the block that was given away.
    drop(unsafe { Box::from_raw((*tensor).manager_ctx.cast::<Owned>()) });
}
