//! Which device to use, as a user names it.

use crate::compile::Nvrtc;
use crate::{Compiler, CpuDevice, CudaDevice, Device, Error, Result, cuda};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A device by name: `auto`, `cpu`, `cuda` or `cuda:N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DeviceSpec {
    /// The first CUDA device, or the CPU when there is none.
    #[default]
    Auto,
    /// The host processor.
    Cpu,
    /// The CUDA device with this ordinal.
    Cuda(usize),
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceSpec::Auto => f.write_str("auto"),
            DeviceSpec::Cpu => f.write_str("cpu"),
            DeviceSpec::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}

impl FromStr for DeviceSpec {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let bad = || Error::from(flashtune_codegen::Error::parse("device", s, "auto, cpu, cuda or cuda:N"));
        match s {
            "auto" => Ok(DeviceSpec::Auto),
            "cpu" => Ok(DeviceSpec::Cpu),
            "cuda" => Ok(DeviceSpec::Cuda(0)),
            _ => {
                let n = s.strip_prefix("cuda:").ok_or_else(bad)?;
                // `parse` would also take a sign.
                if !n.bytes().all(|b| b.is_ascii_digit()) {
                    return Err(bad());
                }
                n.parse().map(DeviceSpec::Cuda).map_err(|_| bad())
            }
        }
    }
}

/// As [`open`], for a process that will compile: where the device is a GPU, its compiler is found and warmed up at the
/// same time, which takes about as long.
///
/// # Errors
/// As [`open`]; what the compiler has to complain about is told when it is asked for.
pub fn open_to_compile(spec: DeviceSpec) -> Result<Arc<dyn Device>> {
    std::thread::scope(|scope| {
        if spec != DeviceSpec::Cpu && cuda::driver_present() {
            let warm_up = || Nvrtc::find().map(|nvrtc| nvrtc.warm_up());
            // Without a thread the first compilation does it.
            let _ = std::thread::Builder::new().spawn_scoped(scope, warm_up);
        }
        open(spec)
    })
}

/// Opens a device. With [`DeviceSpec::Auto`] a GPU that cannot be opened is reported as a warning and the CPU is used.
pub fn open(spec: DeviceSpec) -> Result<Arc<dyn Device>> {
    match spec {
        DeviceSpec::Cpu => Ok(CpuDevice::open()?),
        DeviceSpec::Cuda(n) => Ok(CudaDevice::open(n)?),
        DeviceSpec::Auto => {
            // A machine without a driver is no reason to warn.
            if !cuda::driver_present() {
                return Ok(CpuDevice::open()?);
            }
            match CudaDevice::open(0) {
                Ok(device) => Ok(device),
                Err(e) => {
                    tracing::warn!(error = %e, "no CUDA device can be used, taking the CPU");
                    Ok(CpuDevice::open()?)
                }
            }
        }
    }
}

/// Every device of this machine, GPUs first, the CPU last. A device that is there but cannot be opened is in the list
/// with its error; a missing CUDA driver is not an entry ([`cuda::device_count`] tells why there is none).
pub fn all_devices() -> Vec<(DeviceSpec, Result<Arc<dyn Device>>)> {
    let gpus = cuda::device_count().unwrap_or(0);
    (0..gpus).map(DeviceSpec::Cuda).chain([DeviceSpec::Cpu]).map(|spec| (spec, open(spec))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_bad_ones_tell_the_accepted_forms() {
        for (name, spec) in [("auto", DeviceSpec::Auto), ("cpu", DeviceSpec::Cpu), ("cuda:3", DeviceSpec::Cuda(3))] {
            assert_eq!(name.parse::<DeviceSpec>().unwrap(), spec);
            assert_eq!(spec.to_string(), name);
        }
        assert_eq!("cuda".parse::<DeviceSpec>().unwrap(), DeviceSpec::Cuda(0));
        for bad in ["", "gpu", "cuda:", "cuda:x", "cuda:+1", "cuda:-1", "CPU", "cuda:99999999999999999999"] {
            let e = bad.parse::<DeviceSpec>().unwrap_err().to_string();
            assert!(e.contains("cuda:N"), "{bad}: {e}");
        }
    }
}
