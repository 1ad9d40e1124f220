//! Launches that may start before the launch before them has ended (programmatic dependent launch).

use cudarc::driver::sys::{
    self, CUfunction, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig, CUresult, CUstream,
};
use flashtune_codegen::Stage;
use std::ffi::c_void;
use std::mem::zeroed;

/// Launches a stage whose kernel waits for the launch before it by itself. In a capture the edge from a kernel before
/// it becomes a programmatic one.
///
/// # Safety
/// That of `cuLaunchKernel`; the kernel executes `griddepcontrol.wait` before it writes
/// memory or relies on what it read of it.
pub(super) unsafe fn launch(
    function: CUfunction,
    stage: &Stage,
    units: u32,
    stream: CUstream,
    parameters: *mut *mut c_void,
) -> CUresult {
    // SAFETY: all bits zero are a value of this union of numbers and handles.
    let mut early: CUlaunchAttribute = unsafe { zeroed() };
    early.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    early.value.programmaticStreamSerializationAllowed = 1;
    let config = CUlaunchConfig {
        gridDimX: stage.blocks(units),
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: stage.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: stage.smem_bytes,
        hStream: stream,
        attrs: &mut early,
        numAttrs: 1,
    };
    // SAFETY: by the caller's promise; the driver reads the configuration before it returns.
    unsafe { sys::cuLaunchKernelEx(&config, function, parameters, std::ptr::null_mut()) }
}
