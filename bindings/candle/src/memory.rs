//! Tensors of candle as addresses, shapes and strides, and new ones for results.

use crate::engines::Key;
use crate::{Error, error::Result};
use candle_core::backend::BackendStorage;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::{
    CudaDevice, CudaStorageSlice,
    cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop},
};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, DType, Device, Layout, Shape, Storage, Tensor};
use flashtune::score::Storage as Stored;
use flashtune::{SideView, Stream, TensorView};
use half::{bf16, f16};
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// Where a call computes, and in which order.
pub(crate) enum Place {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda {
        device: CudaDevice,
        stream: Arc<CudaStream>,
    },
}

impl Place {
    pub fn of(device: &Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Place::Cpu),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Ok(Self::of_cuda(device)),
            other => Err(unknown_device(format!("{:?}", other.location()))),
        }
    }

    #[cfg(feature = "cuda")]
    fn of_cuda(device: &CudaDevice) -> Self {
        Place::Cuda { device: device.clone(), stream: device.cuda_stream() }
    }

    pub fn key(&self) -> Key {
        match self {
            Place::Cpu => Key::Cpu,
            #[cfg(feature = "cuda")]
            Place::Cuda { stream, .. } => Key::Context(stream.context().cu_ctx() as usize),
        }
    }

    pub fn name(&self) -> String {
        match self {
            Place::Cpu => "cpu".to_owned(),
            #[cfg(feature = "cuda")]
            Place::Cuda { stream, .. } => format!("cuda:{}", stream.context().ordinal()),
        }
    }

    pub fn stream(&self) -> Stream {
        match self {
            Place::Cpu => Stream::default(),
            #[cfg(feature = "cuda")]
            Place::Cuda { stream, .. } => Stream(stream.cu_stream() as u64),
        }
    }

    /// Memory for a result: on the CPU zeros, on CUDA whatever it held before.
    pub fn alloc(&self, dtype: flashtune::DType, elements: usize) -> candle_core::Result<Storage> {
        // Drivers give no memory of no size.
        let elements = elements.max(1);
        use flashtune::DType::{Bf16, E4m3, F16, F32};
        if dtype == E4m3 {
            candle_core::bail!("O is in {dtype}, which kernels read and do not write; use f16, bf16 or f32");
        }
        match self {
            Place::Cpu => Ok(Storage::Cpu(match dtype {
                F16 => CpuStorage::F16(vec![f16::ZERO; elements]),
                Bf16 => CpuStorage::BF16(vec![bf16::ZERO; elements]),
                F32 => CpuStorage::F32(vec![0.0; elements]),
                E4m3 => unreachable!("refused above"),
            })),
            #[cfg(feature = "cuda")]
            Place::Cuda { device, .. } => {
                // SAFETY: a kernel writes every element before anything reads it, in the stream's order.
                let slice = unsafe {
                    match dtype {
                        F16 => CudaStorageSlice::F16(device.alloc(elements)?),
                        Bf16 => CudaStorageSlice::BF16(device.alloc(elements)?),
                        F32 => CudaStorageSlice::F32(device.alloc(elements)?),
                        E4m3 => unreachable!("refused above"),
                    }
                };
                Ok(Storage::Cuda(CudaStorage { slice, device: device.clone() }))
            }
        }
    }
}

fn unknown_device(found: String) -> Error {
    let expected = "kernels run on the CPU and, with the feature `cuda`, on CUDA devices";
    Error::Argument { argument: "device", found, expected: expected.to_owned(), remedy: "move the tensors there" }
}

/// The elements of what a tensor stands on, wherever a function got it from.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    Cpu(&'a CpuStorage),
    // Without the feature candle has a stand-in that nobody can make.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "candle's stand-in has no elements"))]
    Cuda(&'a CudaStorage),
}

impl<'a> Source<'a> {
    pub fn of(storage: &'a Storage) -> Result<Self> {
        match storage {
            Storage::Cpu(storage) => Ok(Source::Cpu(storage)),
            Storage::Cuda(storage) => Ok(Source::Cuda(storage)),
            Storage::Metal(_) => Err(unknown_device("Metal".to_owned())),
        }
    }

    fn dtype(self) -> DType {
        match self {
            Source::Cpu(storage) => storage.dtype(),
            Source::Cuda(storage) => storage.dtype(),
        }
    }

    /// Where the elements are.
    pub fn place(self) -> Result<Place> {
        match self {
            Source::Cpu(_) => Ok(Place::Cpu),
            #[cfg(feature = "cuda")]
            Source::Cuda(storage) => Ok(Place::of_cuda(&storage.device)),
            #[cfg(not(feature = "cuda"))]
            Source::Cuda(_) => Err(unknown_device("CUDA".to_owned())),
        }
    }
}

/// A tensor that a launch reads or writes: keep it until after the launch, then candle knows of the use.
pub(crate) struct Operand<'a> {
    address: u64,
    dtype: DType,
    layout: Layout,
    #[cfg(feature = "cuda")]
    _used: Option<SyncOnDrop<'a>>,
    #[cfg(not(feature = "cuda"))]
    _used: std::marker::PhantomData<&'a ()>,
}

/// Calls `$f` with the elements of a storage of any type, by the variants of `$kind`.
macro_rules! by_type {
    ($storage:expr, $kind:ident, $f:ident) => {
        match $storage {
            $kind::U8(x) => $f!(x, DType::U8),
            $kind::U32(x) => $f!(x, DType::U32),
            $kind::I32(x) => $f!(x, DType::I32),
            $kind::I64(x) => $f!(x, DType::I64),
            $kind::BF16(x) => $f!(x, DType::BF16),
            $kind::F16(x) => $f!(x, DType::F16),
            $kind::F32(x) => $f!(x, DType::F32),
            _ => None,
        }
    };
}

impl<'a> Operand<'a> {
    /// A tensor that is read.
    pub fn read(name: &str, place: &'a Place, source: Source<'a>, layout: &Layout) -> Result<Self> {
        let found = match (place, source) {
            (Place::Cpu, Source::Cpu(storage)) => {
                macro_rules! host {
                    ($x:ident, $dtype:expr) => {
                        Some(Self::at($x.as_ptr() as u64, $dtype, layout))
                    };
                }
                by_type!(storage, CpuStorage, host)
            }
            #[cfg(feature = "cuda")]
            (Place::Cuda { device, stream }, Source::Cuda(storage)) if same(device, &storage.device) => {
                macro_rules! slice {
                    ($x:ident, $dtype:expr) => {{
                        let (address, used) = $x.device_ptr(stream);
                        Some(Self { _used: Some(used), ..Self::at(address, $dtype, layout) })
                    }};
                }
                by_type!(&storage.slice, CudaStorageSlice, slice)
            }
            _ => {
                let expected = format!("q is on {}", place.name());
                return Err(Error::tensor(name, "device", "another", expected, "move it to q's device"));
            }
        };
        found.ok_or_else(|| {
            let expected = "kernels read f16, bf16 and f32, and integers of 8, 32 and 64 bits beside them";
            Error::tensor(name, "dtype", source.dtype(), expected, "convert it")
        })
    }

    /// A contiguous tensor that is written.
    pub fn write(name: &str, place: &'a Place, storage: &'a mut Storage, shape: &Shape) -> Result<Self> {
        let layout = &Layout::contiguous(shape);
        let found = match (place, storage) {
            (Place::Cpu, Storage::Cpu(storage)) => {
                macro_rules! host {
                    ($x:ident, $dtype:expr) => {
                        Some(Self::at($x.as_mut_ptr() as u64, $dtype, layout))
                    };
                }
                by_type!(storage, CpuStorage, host)
            }
            #[cfg(feature = "cuda")]
            (Place::Cuda { stream, .. }, Storage::Cuda(storage)) => {
                macro_rules! slice {
                    ($x:ident, $dtype:expr) => {{
                        let (address, used) = $x.device_ptr_mut(stream);
                        Some(Self { _used: Some(used), ..Self::at(address, $dtype, layout) })
                    }};
                }
                by_type!(&mut storage.slice, CudaStorageSlice, slice)
            }
            _ => None,
        };
        found.ok_or_else(|| Error::tensor(name, "device", "another", "results are on q's device", "report this"))
    }

    fn at(base: u64, dtype: DType, layout: &Layout) -> Self {
        let address = base + (layout.start_offset() * dtype.size_in_bytes()) as u64;
        Self { address, dtype, layout: layout.clone(), _used: Default::default() }
    }

    /// Address of the first element.
    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn dims(&self) -> &[usize] {
        self.layout.dims()
    }

    pub fn stride(&self) -> &[usize] {
        self.layout.stride()
    }

    pub fn float(&self, name: &str) -> Result<flashtune::DType> {
        float_type(name, self.dtype)
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// A `[batch, rows, heads, dim]` tensor.
    pub fn bshd(&self, name: &str) -> Result<TensorView> {
        let dtype = self.float(name)?;
        let &[b, s, h, d] = self.dims() else { return Err(wrong_rank(name, self.dims(), "[batch, rows, heads, dim]")) };
        let &[sb, ss, sh, sd] = self.stride() else { unreachable!("a stride for each dim") };
        let shape = [b, h, s, d].map(|n| n as u64);
        Ok(TensorView { address: self.address, dtype, shape, strides: [sb, sh, ss, sd].map(|n| n as i64) })
    }

    /// What a score program reads.
    pub fn side(&self, name: &str) -> Result<SideView> {
        let storage = match self.dtype {
            DType::F32 => Stored::F32,
            DType::F16 => Stored::F16,
            DType::BF16 => Stored::Bf16,
            // Of unsigned ones those below 2^31 mean the same.
            DType::I32 | DType::U32 => Stored::I32,
            DType::I64 => Stored::I64,
            DType::U8 => Stored::Bool,
            other => {
                let expected = "score programs read f32, f16, bf16, i32, u32, i64, and u8 as bools";
                return Err(Error::tensor(name, "dtype", other, expected, "convert it"));
            }
        };
        let shape: Vec<u64> = self.dims().iter().map(|&n| n as u64).collect();
        let mut view = SideView::contiguous(self.address, storage, &shape);
        for (stride, &of_tensor) in view.strides.iter_mut().zip(self.stride()) {
            *stride = of_tensor as i64;
        }
        Ok(view)
    }
}

#[cfg(feature = "cuda")]
fn same(a: &CudaDevice, b: &CudaDevice) -> bool {
    a.cuda_stream().context().cu_ctx() == b.cuda_stream().context().cu_ctx()
}

pub(crate) fn float_type(name: &str, dtype: DType) -> Result<flashtune::DType> {
    match dtype {
        DType::F16 => Ok(flashtune::DType::F16),
        DType::BF16 => Ok(flashtune::DType::Bf16),
        DType::F32 => Ok(flashtune::DType::F32),
        other => Err(Error::tensor(name, "dtype", other, "kernels take f16, bf16 and f32", "convert it")),
    }
}

pub(crate) fn wrong_rank(name: &str, dims: &[usize], expected: &str) -> Error {
    Error::tensor(name, "shape", dims, format!("it is {expected}"), "reshape it")
}

/// A tensor of what a kernel wrote, without a past.
pub(crate) fn tensor(storage: Storage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}
