//! cuBLAS, loaded from where it is found: matrix multiplication as NVIDIA ships it, as the ceiling that kernels are
//! held against. Nothing but measuring needs it.

use crate::error::chain;
use crate::library_search::Surroundings;
use crate::{Error, Result};
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use flashtune_codegen::DType;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_int, c_void};
use std::path::Path;

type Handle = *mut c_void;
type Status = c_int;

/// `CUBLAS_OP_N`, `CUBLAS_COMPUTE_32F`, `CUBLAS_GEMM_DEFAULT` of cublas_api.h.
const OP_N: c_int = 0;
const COMPUTE_F32: c_int = 68;
const ALGO_DEFAULT: c_int = -1;

type GemmEx = unsafe extern "C" fn(
    Handle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const f32,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    c_int,
    c_int,
    *const f32,
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
) -> Status;

/// The library with a handle for the context that was current when it was opened.
pub(super) struct Cublas {
    handle: Handle,
    version: c_int,
    destroy: unsafe extern "C" fn(Handle) -> Status,
    set_stream: unsafe extern "C" fn(Handle, CUstream) -> Status,
    gemm: GemmEx,
    _library: Library,
}

impl Cublas {
    /// Finds and opens the library. A CUDA context must be current; the handle belongs to it.
    ///
    /// # Errors
    /// [`Error::Missing`] when no file can be used.
    pub(super) fn open() -> Result<Self> {
        let mut tried = Vec::new();
        for path in Surroundings::of_process().search("libcublas.so") {
            match Self::of(&path) {
                Ok(cublas) => return Ok(cublas),
                Err(why) => tried.push(format!("{}: {why}", path.display())),
            }
        }
        let searched = match tried.is_empty() {
            true => "CUDA_HOME, CUDA_PATH, /usr/local/cuda*, the loader's path, Python environments".to_owned(),
            false => tried.join("; "),
        };
        let remedy = "install a CUDA toolkit or pip install nvidia-cublas to have the matmul ceiling measured";
        Err(Error::Missing { what: "cuBLAS (libcublas.so)", searched, remedy })
    }

    fn of(path: &Path) -> Result<Self, String> {
        // The wheels' libcublas names no folder for the library that it needs: it is taken from beside it, if there.
        if let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|n| n.to_str())) {
            let beside = folder.join(name.replace("libcublas.so", "libcublasLt.so"));
            // SAFETY: cuBLAS's constructors set up its own state only.
            let loaded = unsafe { Library::open(Some(&beside), RTLD_NOW | RTLD_GLOBAL) };
            // It stays loaded with the process, for the one that needs it.
            if let Ok(library) = loaded {
                std::mem::forget(library);
            }
        }
        // SAFETY: as above.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| chain(&e))?;
        // SAFETY: names and types are those of cublas_api.h, unchanged since CUDA 11.
        unsafe {
            let create: unsafe extern "C" fn(*mut Handle) -> Status = symbol(&library, "cublasCreate_v2")?;
            let get_version: unsafe extern "C" fn(Handle, *mut c_int) -> Status =
                symbol(&library, "cublasGetVersion_v2")?;
            let mut cublas = Self {
                handle: std::ptr::null_mut(),
                version: 0,
                destroy: symbol(&library, "cublasDestroy_v2")?,
                set_stream: symbol(&library, "cublasSetStream_v2")?,
                gemm: symbol(&library, "cublasGemmEx")?,
                _library: library,
            };
            ok("cublasCreate", create(&mut cublas.handle))?;
            ok("cublasGetVersion", get_version(cublas.handle, &mut cublas.version))?;
            Ok(cublas)
        }
    }

    /// E.g. `cuBLAS 13.0.2`.
    pub(super) fn name(&self) -> String {
        let v = self.version;
        // From 12 on the major number counts ten thousands, as the minor one hundreds.
        format!("cuBLAS {}.{}.{}", v / 10_000, v / 100 % 100, v % 100)
    }

    /// Enqueues `C = A * B` of square matrices of `n` rows, accumulated in fp32.
    ///
    /// # Safety
    /// The addresses hold `n * n` elements each, on the device of the handle's context, which is current; they live
    /// until the stream, one of that context, has completed.
    pub(super) unsafe fn square(
        &mut self,
        dtype: DType,
        n: i32,
        [a, b, c]: [CUdeviceptr; 3],
        stream: CUstream,
    ) -> Result<(), String> {
        // `CUDA_R_16F`, `CUDA_R_16BF`, `CUDA_R_32F` of library_types.h.
        let kind = match dtype {
            DType::F16 => 2,
            DType::Bf16 => 14,
            DType::F32 => 0,
            DType::E4m3 => return Err("cublasGemmEx multiplies no matrices of e4m3".to_owned()),
        };
        let (alpha, beta) = (1.0f32, 0.0f32);
        let pointer = |address: CUdeviceptr| address as usize as *mut c_void;
        // SAFETY: the handle is alive; matrices and stream are valid by this function's contract; the two factors are
        // read before the call returns (host pointer mode is the default).
        unsafe {
            ok("cublasSetStream", (self.set_stream)(self.handle, stream))?;
            let code = (self.gemm)(
                self.handle,
                OP_N,
                OP_N,
                n,
                n,
                n,
                &alpha,
                pointer(a),
                kind,
                n,
                pointer(b),
                kind,
                n,
                &beta,
                pointer(c),
                kind,
                n,
                COMPUTE_F32,
                ALGO_DEFAULT,
            );
            ok("cublasGemmEx", code)
        }
    }

    /// Gives the handle back.
    ///
    /// # Safety
    /// The context of the handle is current. Nothing is called afterwards.
    pub(super) unsafe fn close(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: created in `of`, destroyed once.
            let _ = unsafe { (self.destroy)(std::mem::replace(&mut self.handle, std::ptr::null_mut())) };
        }
    }
}

/// # Safety
/// `T` is the type of the function that `name` is.
unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: by this function's contract.
    unsafe { library.get::<T>(name) }.map(|s| *s).map_err(|e| chain(&e))
}

fn ok(call: &str, status: Status) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(format!("{call} gave status {status}")) }
}
