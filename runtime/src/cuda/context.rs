//! The CUDA context that a device works in, and making it current on the calling thread.

use super::driver::failed;
use super::scratch::Pool;
use crate::{Error, Result};
use cudarc::driver::CudaContext;
use cudarc::driver::result::{self, ctx, primary_ctx};
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};
use std::sync::{Arc, OnceLock};

/// Who keeps the context alive.
enum Owner {
    /// We hold one reference to the device's primary context.
    Primary,
    /// A host's cudarc context, kept by its own reference count.
    Cudarc(#[allow(dead_code, reason = "held for its lifetime")] Arc<CudaContext>),
    /// The caller, by the contract of [`super::CudaDevice::adopt`].
    Caller,
}

/// A context and its device.
pub(super) struct Context {
    raw: CUcontext,
    pub(super) device: CUdevice,
    /// For messages, e.g. `cuda:0`.
    pub(super) name: String,
    owner: Owner,
    /// Where scratch memory comes from, once a kernel has asked for some.
    pool: OnceLock<Pool>,
}

// SAFETY: a CUDA context may be used from any thread; it is made current on each (`bind`).
unsafe impl Send for Context {}
// SAFETY: as above; the driver serialises what needs to be.
unsafe impl Sync for Context {}

/// Puts back the context that the caller had, when it was another one.
#[must_use]
pub(super) struct Bound {
    previous: Option<CUcontext>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: it was current on this thread when `bind` was called.
            let _ = unsafe { ctx::set_current(previous) };
        }
    }
}

impl Context {
    /// The primary context of a device: the one that the CUDA runtime, cudarc and PyTorch use.
    pub(super) fn primary(ordinal: usize) -> Result<Self> {
        let name = format!("cuda:{ordinal}");
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let device = result::device::get(ordinal).map_err(|e| failed("cuDeviceGet", &name, e))?;
        // SAFETY: the device came from `device::get`.
        let raw = unsafe { primary_ctx::retain(device) }.map_err(|e| failed("cuDevicePrimaryCtxRetain", &name, e))?;
        Ok(Self { raw, device, name, owner: Owner::Primary, pool: OnceLock::new() })
    }

    /// A host's cudarc context.
    pub(super) fn of_cudarc(context: &Arc<CudaContext>) -> Self {
        Self {
            raw: context.cu_ctx(),
            device: context.cu_device(),
            name: format!("cuda:{}", context.ordinal()),
            owner: Owner::Cudarc(context.clone()),
            pool: OnceLock::new(),
        }
    }

    /// The context that is current on the calling thread.
    ///
    /// # Safety
    /// It outlives the value.
    pub(super) unsafe fn current() -> Result<Self> {
        let raw =
            ctx::get_current().map_err(|e| failed("cuCtxGetCurrent", "cuda", e))?.ok_or_else(|| Error::Device {
                call: "cuCtxGetCurrent",
                device: "cuda".to_owned(),
                message: "no context is current on this thread".to_owned(),
                remedy: "make one current first, or open a device by its number",
            })?;
        // SAFETY: a current context is alive; it stays so by this function's contract.
        unsafe { Self::given(raw) }
    }

    /// A context that the caller made.
    ///
    /// # Safety
    /// `raw` is a CUDA context that outlives the value.
    pub(super) unsafe fn given(raw: CUcontext) -> Result<Self> {
        let pool = OnceLock::new();
        let mut this = Self { raw, device: 0, name: "cuda".to_owned(), owner: Owner::Caller, pool };
        let _bound = this.bind()?;
        // SAFETY: the pointer is to a live device number, and a context is current.
        unsafe { sys::cuCtxGetDevice(&mut this.device) }.result().map_err(|e| this.failed("cuCtxGetDevice", e))?;
        this.name = format!("cuda:{}", this.device);
        Ok(this)
    }

    /// Makes the context current on the calling thread. A caller that had none keeps this one, so that its next call
    /// costs one comparison; a caller that had another one gets it back when the answer is dropped.
    pub(super) fn bind(&self) -> Result<Bound> {
        let current = ctx::get_current().map_err(|e| self.failed("cuCtxGetCurrent", e))?;
        if current == Some(self.raw) {
            return Ok(Bound { previous: None });
        }
        // SAFETY: the context is alive by the owner's promise.
        unsafe { ctx::set_current(self.raw) }.map_err(|e| self.failed("cuCtxSetCurrent", e))?;
        Ok(Bound { previous: current })
    }

    /// Where scratch memory comes from. The context is current.
    pub(super) fn pool(&self) -> Result<&Pool> {
        if let Some(pool) = self.pool.get() {
            return Ok(pool);
        }
        let pool = Pool::new(self)?;
        Ok(self.pool.get_or_init(|| pool))
    }

    /// Whether both are the same CUDA context.
    pub(super) fn is(&self, other: &Context) -> bool {
        self.raw == other.raw
    }

    /// The value of a device attribute.
    pub(super) fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<u32> {
        // SAFETY: the device is valid, it came from the driver.
        let value = unsafe { result::device::get_attribute(self.device, attribute) }
            .map_err(|e| self.failed("cuDeviceGetAttribute", e))?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// An error of a driver call on this device.
    pub(super) fn failed(&self, call: &'static str, error: cudarc::driver::DriverError) -> Error {
        failed(call, &self.name, error)
    }
}

/// Whether launches on a stream of the current context are captured, as far as the driver tells.
pub(super) fn is_capturing(stream: CUstream) -> bool {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is one of this context by the launch's contract; the driver writes one word.
    let answer = unsafe { sys::cuStreamIsCapturing(stream, &mut status) }.result();
    answer.is_err() || status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
}

/// While it lives, this thread may load and allocate although another one captures a stream: what it does is no part of
/// the capture, which would otherwise be lost.
pub(super) struct BesideCaptures(CUstreamCaptureMode);

impl BesideCaptures {
    pub(super) fn begin() -> Self {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver exchanges one word. It fails without a context only, and so does what follows then.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        Self(mode)
    }
}

impl Drop for BesideCaptures {
    fn drop(&mut self) {
        // SAFETY: as above; the mode is the one that the thread had.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.0) };
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.pool.get().is_some() {
            let _bound = self.bind();
            self.pool.take();
        }
        if let Owner::Primary = self.owner {
            // SAFETY: retained once in `primary`, and everything that was made in it holds a reference to `self`.
            let _ = unsafe { primary_ctx::release(self.device) };
        }
    }
}
