//! The driver library: whether it is there, and what its error codes mean.

use super::graph_objects::{CaptureInfo, CreateUserObject, RetainUserObject, UserObjects};
use crate::error::chain;
use crate::{Error, Result};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::sync::OnceLock;

/// `cuEventElapsedTime` under the name that every driver has; cudarc's bindings of CUDA 13 ask for a newer name.
type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;

/// `cuStreamGetId`, which drivers have since CUDA 12.
type StreamId = unsafe extern "C" fn(sys::CUstream, *mut u64) -> CUresult;

/// The driver library, initialised.
pub(super) struct Driver {
    pub(super) elapsed_time: ElapsedTime,
    pub(super) stream_id: Option<StreamId>,
    pub(super) user_objects: Option<UserObjects>,
    _library: Library,
}

impl Driver {
    /// The identifier of a stream of the current context, unique in the life of the process: handles come again, and
    /// two of them mean another stream in every thread. `None` where the driver has none. Not to be asked while the
    /// stream is captured: that would end the capture.
    pub(super) fn id_of(&self, stream: sys::CUstream) -> Option<u64> {
        let mut id = 0;
        // SAFETY: the stream is alive by the caller's word; the driver writes one word.
        unsafe { self.stream_id?(stream, &mut id) }.result().ok().map(|()| id)
    }
}

/// Why there is no driver to work with.
#[derive(Clone)]
enum Absent {
    Missing(String),
    Failed(&'static str, DriverError),
}

/// Loads and initialises the driver, once. cudarc panics when the library is missing, so every path into it leads
/// through here.
pub(super) fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver, Absent>> = OnceLock::new();
    DRIVER.get_or_init(load).as_ref().map_err(|absent| match absent {
        Absent::Missing(searched) => Error::Missing {
            what: "the CUDA driver (libcuda.so.1)",
            searched: searched.clone(),
            remedy: "install the NVIDIA driver, or in a container make the host's visible (--gpus all); without a GPU \
                     name the device cpu",
        },
        Absent::Failed(call, e) => failed(call, "cuda", *e),
    })
}

/// Whether the driver library is on this machine (it may still find no GPU).
pub fn driver_present() -> bool {
    open_library().is_ok()
}

fn open_library() -> Result<Library, String> {
    let open = |name: &str| {
        // SAFETY: the driver's constructors set up its own state only.
        unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| chain(&e))
    };
    open("libcuda.so.1").or_else(|first| open("libcuda.so").map_err(|_| first))
}

fn load() -> Result<Driver, Absent> {
    let library = open_library().map_err(Absent::Missing)?;
    // SAFETY: name and type are those of cuda.h, unchanged since CUDA 2.
    let elapsed_time = unsafe { library.get::<ElapsedTime>("cuEventElapsedTime") }
        .map(|s| *s)
        .map_err(|e| Absent::Missing(chain(&e)))?;
    // SAFETY: name and type are those of cuda.h.
    let stream_id = unsafe { library.get::<StreamId>("cuStreamGetId") }.map(|s| *s).ok();
    // SAFETY: names and types are those of cuda.h since CUDA 11.3.
    let user_objects = unsafe {
        let capture_info = library.get::<CaptureInfo>("cuStreamGetCaptureInfo_v2").map(|s| *s).ok();
        let create = library.get::<CreateUserObject>("cuUserObjectCreate").map(|s| *s).ok();
        let retain = library.get::<RetainUserObject>("cuGraphRetainUserObject").map(|s| *s).ok();
        capture_info.zip(create).zip(retain)
    };
    let user_objects =
        user_objects.map(|((capture_info, create), retain)| UserObjects { capture_info, create, retain });
    result::init().map_err(|e| Absent::Failed("cuInit", e))?;
    Ok(Driver { elapsed_time, stream_id, user_objects, _library: library })
}

/// An error of a driver call.
pub(super) fn failed(call: &'static str, device: &str, error: DriverError) -> Error {
    let name = error.error_name().map_or_else(|_| format!("{:?}", error.0), |n| n.to_string_lossy().into_owned());
    let text = error.error_string().map_or_else(|_| String::new(), |t| format!(": {}", t.to_string_lossy()));
    Error::Device { call, device: device.to_owned(), message: format!("{name}{text}"), remedy: remedy(error.0) }
}

/// Whether an error stays: every later call in the context fails with it, in this process.
pub(super) fn is_sticky(code: CUresult) -> bool {
    use CUresult::*;
    matches!(
        code,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
    )
}

fn remedy(code: CUresult) -> &'static str {
    use CUresult::*;
    match code {
        _ if is_sticky(code) => {
            "the CUDA context of this process is lost: start the process again, and if the address came from the \
             caller, check that its tensors live until the launch has completed"
        }
        CUDA_ERROR_OUT_OF_MEMORY => "free device memory or use smaller tensors",
        CUDA_ERROR_NO_DEVICE => "check nvidia-smi and CUDA_VISIBLE_DEVICES, or name the device cpu",
        CUDA_ERROR_INVALID_DEVICE => "name a device that `flashtune doctor` lists",
        CUDA_ERROR_NO_BINARY_FOR_GPU
        | CUDA_ERROR_INVALID_IMAGE
        | CUDA_ERROR_INVALID_SOURCE
        | CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            "the binary is for another GPU or newer than the driver: compile it on this machine, with an NVRTC no \
             newer than the driver's CUDA version, or update the driver"
        }
        CUDA_ERROR_NOT_FOUND => "the binary lacks the symbol: remove it from the cache and compile it again",
        CUDA_ERROR_STUB_LIBRARY => "a toolkit's stub of libcuda is first on the loader's path: remove it from there",
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH | CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "the driver library does not match the kernel driver: reboot after an update, or remove a cuda-compat \
             package"
        }
        CUDA_ERROR_INVALID_HANDLE | CUDA_ERROR_INVALID_CONTEXT => {
            "the stream or context is another device's or was destroyed: give a stream of the engine's own context"
        }
        CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES => "use a schedule with smaller blocks",
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        | CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        | CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => {
            "only launches belong into a stream capture: load, allocate and synchronise before it"
        }
        _ => "look the code up in the documentation of the CUDA driver API, and see `flashtune doctor`",
    }
}

/// CUDA version of the driver and version of the kernel driver, e.g. `CUDA 13.0, 580.65.06`.
pub(super) fn version() -> Result<String> {
    let mut n = 0;
    // SAFETY: the pointer is to a live integer.
    unsafe { sys::cuDriverGetVersion(&mut n) }.result().map_err(|e| failed("cuDriverGetVersion", "cuda", e))?;
    let cuda = format!("CUDA {}.{}", n / 1000, n % 1000 / 10);
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    Ok(match kernel_driver(&text) {
        Some(kernel) => format!("{cuda}, {kernel}"),
        None => cuda,
    })
}

/// The version in the first line of `/proc/driver/nvidia/version`.
fn kernel_driver(text: &str) -> Option<&str> {
    let line = text.lines().find(|l| l.starts_with("NVRM version"))?;
    line.split_whitespace().find(|w| w.contains('.') && w.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_drivers_version_is_found_in_both_formats() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.07  Sat Feb 17 22:55:48 UTC 2024\n\
                      GCC version:  gcc version 12.2.0\n";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n";
        assert_eq!(kernel_driver(closed), Some("535.161.07"));
        assert_eq!(kernel_driver(open), Some("580.65.06"));
        assert_eq!(kernel_driver(""), None);
    }

    #[test]
    fn a_missing_driver_is_an_error_and_not_a_panic() {
        if driver_present() {
            return;
        }
        for e in [super::super::device_count().err(), super::super::CudaDevice::open(0).err()] {
            let e = e.expect("there is no driver").to_string();
            assert!(e.contains("libcuda.so.1") && e.contains("device cpu") && !e.contains("--device"), "{e}");
        }
    }

    #[test]
    fn faults_of_a_kernel_are_sticky_and_shortages_are_not() {
        assert!(is_sticky(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS) && is_sticky(CUresult::CUDA_ERROR_LAUNCH_FAILED));
        assert!(!is_sticky(CUresult::CUDA_ERROR_OUT_OF_MEMORY) && !is_sticky(CUresult::CUDA_ERROR_INVALID_VALUE));
        assert!(remedy(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS).contains("start the process again"));
    }
}
