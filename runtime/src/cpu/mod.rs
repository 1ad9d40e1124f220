//! The host processor as a device.
use crate::Result;
use std::sync::Arc;

/// The host processor.
pub struct CpuDevice {}

impl CpuDevice {
    /// The host processor with all cores that this process may use. One per process: threads are shared.
    pub fn open() -> Result<Arc<dyn crate::Device>> {
        todo!()
    }
    /// The instruction set of the host, or a lower one from `FLASHTUNE_CPU_ISA`.
    pub fn detect_isa() -> Result<flashtune_codegen::CpuIsa> {
        todo!()
    }
}
