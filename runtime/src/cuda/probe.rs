//! What a CUDA device reaches at best: the driver's copy, and cuBLAS.

use super::cublas::Cublas;
use super::{CudaBuffer, CudaDevice, raw};
use crate::ceilings::normals;
use crate::{Buffer, Ceiling, Device, Error, Probe, Result, Stream};
use cudarc::driver::result;
use flashtune_codegen::DType;
use std::sync::Arc;

/// The probe of a ceiling on a device.
///
/// # Errors
/// When the device has no memory left, or cuBLAS is not on this machine.
pub(super) fn probe(device: &CudaDevice, ceiling: Ceiling) -> Result<Box<dyn Probe>> {
    match ceiling {
        Ceiling::Copy => Ok(Box::new(Copy::new(device)?)),
        Ceiling::Matmul(dtype) => Ok(Box::new(Matmul::new(device, dtype)?)),
    }
}

/// `cuMemcpyDtoDAsync` between two blocks.
struct Copy {
    from: CudaBuffer,
    to: CudaBuffer,
}

impl Copy {
    fn new(device: &CudaDevice) -> Result<Self> {
        // Far beyond the L2 cache, and an eighth of the memory at most.
        let bytes = (device.fingerprint.memory_bytes / 16).clamp(64 << 20, 2 << 30) as usize;
        let buffer = || CudaBuffer::new(&device.context, bytes);
        let (from, to) = (buffer()?, buffer()?);
        device.fill(&from, 0x5a)?;
        Ok(Self { from, to })
    }
}

impl Probe for Copy {
    fn how(&self) -> String {
        format!("cuMemcpyDtoDAsync of {} MiB", self.from.len() >> 20)
    }

    fn amount(&self) -> f64 {
        2.0 * self.from.len() as f64
    }

    fn run(&mut self, stream: Stream) -> Result<()> {
        let context = &self.from.context;
        let _bound = context.bind()?;
        // SAFETY: both blocks have this size, do not overlap and live as long as the probe, which outlives the wait.
        unsafe { result::memcpy_dtod_async(self.to.address, self.from.address, self.from.len(), raw(stream)) }
            .map_err(|e| context.failed("cuMemcpyDtoDAsync", e))
    }
}

/// cuBLAS on square matrices of normals: data costs power, and power lowers the clock.
struct Matmul {
    cublas: Cublas,
    dtype: DType,
    side: usize,
    /// A, B and their product.
    matrices: [CudaBuffer; 3],
}

impl Matmul {
    fn new(device: &CudaDevice, dtype: DType) -> Result<Self> {
        // Large enough for the tensor cores to be full; fp32 takes longer and is full sooner.
        let side: usize = if dtype == DType::F32 { 4096 } else { 8192 };
        let bytes = side * side * dtype.bytes();
        let context: &Arc<_> = &device.context;
        let buffer = || CudaBuffer::new(context, bytes);
        let matrices = [buffer()?, buffer()?, buffer()?];
        for (seed, matrix) in matrices[..2].iter().enumerate() {
            device.upload(matrix, &normals(dtype, bytes, seed as u64 + 1))?;
        }
        let _bound = context.bind()?;
        Ok(Self { cublas: Cublas::open()?, dtype, side, matrices })
    }
}

impl Probe for Matmul {
    fn how(&self) -> String {
        format!("{}, {} x {} {}", self.cublas.name(), self.side, self.side, self.dtype)
    }

    fn amount(&self) -> f64 {
        2.0 * (self.side as f64).powi(3)
    }

    fn run(&mut self, stream: Stream) -> Result<()> {
        let context = self.matrices[0].context.clone();
        let _bound = context.bind()?;
        let addresses = [0, 1, 2].map(|i| self.matrices[i].address);
        // SAFETY: three matrices of this size, which live as long as the probe; the context is current.
        unsafe { self.cublas.square(self.dtype, self.side as i32, addresses, raw(stream)) }.map_err(|message| {
            Error::Device {
                call: "matrix multiplication",
                device: context.name.clone(),
                message,
                remedy: "use the cuBLAS of the CUDA version that the driver supports",
            }
        })
    }
}

impl Drop for Matmul {
    fn drop(&mut self) {
        let context = self.matrices[0].context.clone();
        let Ok(_bound) = context.bind() else { return };
        // SAFETY: the handle was made in this context, which is current, and is not used again.
        unsafe { self.cublas.close() };
    }
}
