//! Devices that a host opens itself, for [`Builder::on`](crate::Builder::on). Most hosts name one instead
//! ([`Builder::device`](crate::Builder::device)).

#[doc(inline)]
pub use flashtune_cache::DeviceFingerprint;
#[doc(inline)]
pub use flashtune_codegen::{Arch, CpuIsa, SmArch};
#[doc(inline)]
pub use flashtune_runtime::cuda::{Element, SliceTensor, driver_present, read_slice, write_slice};
#[doc(inline)]
pub use flashtune_runtime::{Buffer, CpuDevice, CudaDevice, Device};
