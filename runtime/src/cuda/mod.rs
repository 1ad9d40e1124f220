//! CUDA devices.
use crate::Result;
use std::sync::Arc;

/// A CUDA device.
pub struct CudaDevice {}

impl CudaDevice {
    /// Opens a device on its primary context, which cudarc, candle and the CUDA runtime share.
    pub fn open(ordinal: usize) -> Result<Arc<dyn crate::Device>> {
        let _ = ordinal;
        todo!()
    }
    /// Uses the context that is current on the calling thread. It must outlive the device.
    ///
    /// # Safety
    /// The context is not destroyed while the device or anything made by it lives.
    pub unsafe fn adopt_current() -> Result<Arc<dyn crate::Device>> {
        todo!()
    }
}

/// Whether the CUDA driver library can be loaded.
pub fn driver_present() -> bool {
    todo!()
}

/// Number of CUDA devices; an error that tells why when the driver is missing or does not work.
pub fn device_count() -> Result<usize> {
    todo!()
}
