//! Device memory.

use super::context::Context;
use crate::{Buffer, Result};
use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;
use std::any::Any;
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
