//! Device memory.

use super::context::Context;
use crate::{Buffer, Result};
use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;
use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// A block of device memory.
pub(super) struct CudaBuffer {
    pub(super) context: Arc<Context>,
    pub(super) address: CUdeviceptr,
    bytes: usize,
}

impl CudaBuffer {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _bound = context.bind()?;
        // The driver refuses blocks of no bytes.
        // SAFETY: the context is current. The memory is uninitialised, and only devices and byte copies look at it.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|e| context.failed("cuMemAlloc", e))?;
        Ok(Self { context: context.clone(), address, bytes })
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        // SAFETY: allocated in `new`, freed once. The driver waits for work that uses it. After a fault the context is
        // lost and the memory with it: nothing is left to report.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

impl Buffer for CudaBuffer {
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

/// Page-locked host memory.
pub(super) struct PinnedBytes {
    context: Arc<Context>,
    data: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory, owned.
unsafe impl Send for PinnedBytes {}
// SAFETY: as above; it is changed through exclusive references alone.
unsafe impl Sync for PinnedBytes {}

impl PinnedBytes {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _bound = context.bind()?;
        // SAFETY: the context is current; the driver refuses blocks of no bytes.
        let data = unsafe { result::malloc_host(bytes.max(1), 0) }.map_err(|e| context.failed("cuMemHostAlloc", e))?;
        let data = data.cast::<u8>();
        // SAFETY: so many bytes were just allocated.
        unsafe { data.write_bytes(0, bytes.max(1)) };
        Ok(Self { context: context.clone(), data, bytes })
    }
}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        // SAFETY: allocated in `new`, freed once; copies were waited for by whoever made them.
        let _ = unsafe { result::free_host(self.data.cast()) };
    }
}

impl Deref for PinnedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: so many initialised bytes, which live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }
}

impl DerefMut for PinnedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the reference is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}
