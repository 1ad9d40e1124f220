//! Memory for a few launches that follow each other on a stream: taken and given back in the stream's order, so that nothing
//! waits, and a launch that is captured has it as part of its graph.
//!
//! It comes from a pool of our own, which keeps what it once had: no more than what the calls that were under way at the same
//! time have needed.

use super::context::{BesideCaptures, Context};
use crate::{Error, Result};
use cudarc::driver::result::{free_async, mem_pool};
use cudarc::driver::sys::{
    CUdevice_attribute, CUdeviceptr, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUstream,
};
use std::mem::MaybeUninit;

/// A pool of device memory.
pub(super) struct Pool(CUmemoryPool);

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
                message: "the device has no memory pools, from which comes what is found of this mask".to_owned(),
                remedy: "use a kernel of forward/sm80 for this mask",
            });
        }
        let mut props = MaybeUninit::<CUmemPoolProps>::zeroed();
        let device = u32::try_from(context.device).unwrap_or(0);
        // SAFETY: all versions of the struct begin with these four words (pinned memory, no handles, on a device, its number), and
        // zeros are good for the rest.
        unsafe { props.as_mut_ptr().cast::<[u32; 4]>().write([1, 0, 1, device]) };
        let _beside = BesideCaptures::begin();
        // SAFETY: the properties live; the context is current.
        let pool = unsafe { mem_pool::create(props.as_ptr()) }.map_err(|e| context.failed("cuMemPoolCreate", e))?;
        let this = Self(pool);
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

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once; the driver waits for what was taken from it to be given back.
        let _ = unsafe { mem_pool::destroy(self.0) };
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
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).max(1);
        // SAFETY: pool and stream are alive. Nobody reads the memory before it is written.
        let address = unsafe { mem_pool::alloc_async(pool.0, bytes, stream) }
            .map_err(|e| context.failed("cuMemAllocFromPoolAsync", e))?;
        Ok(Self { address, stream })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: taken in `new` on this stream, given back once, with the context still current.
        let _ = unsafe { free_async(self.address, self.stream) };
    }
}
