//! Memory for a few launches that follow each other on a stream: taken and given back in the stream's order, so that
//! nothing waits, and a launch that is captured has it as part of its graph. What is kept longer ([`super::findings`])
//! is given back on a stream of the pool's own.
//!
//! It comes from a pool of our own, which keeps what it once had: no more than what the calls that were under way at
//! the same time have needed.

use super::context::{BesideCaptures, Context};
use crate::{Buffer, Error, Result};
use cudarc::driver::result::{free_async, mem_pool, stream};
use cudarc::driver::sys::{
    CUdevice_attribute, CUdeviceptr, CUevent, CUevent_wait_flags, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool,
    CUstream,
};
use std::any::Any;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// A pool of device memory.
pub(super) struct Pool {
    raw: CUmemoryPool,
    /// On which memory is given back that launches on several streams have used.
    stream: CUstream,
}

// SAFETY: the driver serialises what is done with a pool.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// A pool on a context's device. The context is current.
    pub(super) fn new(context: &Context) -> Result<Self> {
        if context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? == 0 {
            return Err(Error::Device {
                call: "cuMemPoolCreate",
                device: context.name.clone(),
                message: "the device has no memory pools, in which the scratch memory of this kernel lies".to_owned(),
                remedy: "use a kernel family that needs none",
            });
        }
        let mut props = MaybeUninit::<CUmemPoolProps>::zeroed();
        let device = u32::try_from(context.device).unwrap_or(0);
        // SAFETY: all versions of the struct begin with these four words (pinned memory, no handles, on a device, its
        // number), and zeros are good for the rest.
        unsafe { props.as_mut_ptr().cast::<[u32; 4]>().write([1, 0, 1, device]) };
        let _beside = BesideCaptures::begin();
        // SAFETY: the properties live; the context is current.
        let pool = unsafe { mem_pool::create(props.as_ptr()) }.map_err(|e| context.failed("cuMemPoolCreate", e))?;
        let mut this = Self { raw: pool, stream: std::ptr::null_mut() };
        let kind = stream::StreamKind::NonBlocking;
        this.stream = stream::create(kind).map_err(|e| context.failed("cuStreamCreate", e))?;
        let mut keep = u64::MAX;
        // SAFETY: the pool is alive, and the attribute is a word of 64 bits.
        let set = unsafe {
            let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            mem_pool::set_attribute(pool, attribute, (&raw mut keep).cast())
        };
        set.map_err(|e| context.failed("cuMemPoolSetAttribute", e))?;
        Ok(this)
    }
}

impl Pool {
    /// Memory in the order of a stream. The context is current, and the stream is one of it.
    pub(super) fn take(&self, context: &Context, bytes: u64, stream: CUstream) -> Result<CUdeviceptr> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).max(1);
        // SAFETY: pool and stream are alive. Nobody reads the memory before it is written.
        unsafe { mem_pool::alloc_async(self.raw, bytes, stream) }
            .map_err(|e| context.failed("cuMemAllocFromPoolAsync", e))
    }

    /// Gives memory back once events have come to pass. The context is current.
    ///
    /// # Safety
    /// The addresses came from [`Pool::take`], and nobody uses them behind the events, which are alive.
    pub(super) unsafe fn give_back(
        &self,
        addresses: impl Iterator<Item = CUdeviceptr>,
        behind: impl Iterator<Item = CUevent>,
    ) {
        for event in behind {
            // SAFETY: event and stream are alive. It fails when the context is lost, and the memory with it.
            let _ = unsafe { stream::wait_event(self.stream, event, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) };
        }
        for address in addresses {
            // SAFETY: given back once, by this function's contract behind every use.
            let _ = unsafe { free_async(address, self.stream) };
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: both were made in `new` and are destroyed once; the driver finishes what the stream has under way,
        // and waits for what was taken from the pool to be given back.
        unsafe {
            if !self.stream.is_null() {
                let _ = stream::destroy(self.stream);
            }
            let _ = mem_pool::destroy(self.raw);
        }
    }
}

/// Memory between two points of a stream: from where it is made to where it is dropped.
pub(super) struct Scratch {
    pub(super) address: CUdeviceptr,
    stream: CUstream,
}

impl Scratch {
    /// The context is current, and the stream is one of it.
    pub(super) fn new(context: &Context, pool: &Pool, bytes: u64, stream: CUstream) -> Result<Self> {
        Ok(Self { address: pool.take(context, bytes, stream)?, stream })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: taken in `new` on this stream, given back once, with the context still current.
        let _ = unsafe { free_async(self.address, self.stream) };
    }
}

/// The same for whoever launches through the device: it binds the context by itself.
pub(super) struct StreamBuffer {
    address: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
    context: Arc<Context>,
}

// SAFETY: stream handles may be used from any thread with the context current.
unsafe impl Send for StreamBuffer {}
// SAFETY: as above; nothing changes.
unsafe impl Sync for StreamBuffer {}

impl StreamBuffer {
    /// The context is current, and the stream is one of it.
    pub(super) fn new(context: &Arc<Context>, bytes: u64, stream: CUstream) -> Result<Self> {
        let address = context.pool()?.take(context, bytes, stream)?;
        Ok(Self { address, bytes: usize::try_from(bytes).unwrap_or(usize::MAX), stream, context: context.clone() })
    }
}

impl Buffer for StreamBuffer {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn address(&self) -> u64 {
        self.address
    }

    fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for StreamBuffer {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        // SAFETY: taken in `new` on this stream, given back once.
        let _ = unsafe { free_async(self.address, self.stream) };
    }
}
