//! What of a warm call is ours and what is the driver's: the launch of a kernel that does nothing, with the parameters
//! and the geometry of a real one and with the least there can be, beside the pieces of our own work before it.
//!
//!     cargo run --release --example launch
//!
//! Host time in microseconds, medians. *Idle*: the device is waited for before every launch, so no queue is measured.
//! *Burst*: 32 launches after one wait, as a model makes them. *Pieces*: a thousand in a row, so that caches are warm.
use cudarc::driver::sys::{self, CUresult};
use flashtune::{DType, Engine, Forward, HostTensor, Layout, Mask, TensorView};
use flashtune_codegen::abi::{MappedArgs, TensorMap};
use flashtune_codegen::{Language, Source};
use flashtune_runtime::compile::Nvrtc;
use flashtune_runtime::{Compiler, CudaDevice, Device};
use std::ffi::{CString, c_void};
use std::hint::black_box;
use std::time::Instant;

type Answer<T> = Result<T, Box<dyn std::error::Error>>;

const HEADS: u64 = 16;
const HEAD_DIM: u64 = 128;
const ROUNDS: usize = 300;
const BURST: usize = 32;
/// As the default kernel of head dim 128 has it on Hopper.
const SHARED_BYTES: u32 = 200 << 10;

fn check(code: CUresult) -> Answer<()> {
    code.result().map_err(|e| format!("{:?}", e.0).into())
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Kernels that do nothing, and one that keeps the device busy.
fn source() -> Source {
    let bytes = size_of::<MappedArgs>();
    let text = format!(
        "struct alignas(64) Large {{ char bytes[{bytes}]; }};\n\
         extern \"C\" __global__ void small(unsigned long long) {{}}\n\
         extern \"C\" __global__ void large(const __grid_constant__ Large) {{}}\n\
         extern \"C\" __global__ void busy(unsigned long long ns) {{\n\
             unsigned long long start, now;\n\
             asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(start));\n\
             do asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(now)); while (now - start < ns);\n\
         }}\n"
    );
    let options = vec!["--gpu-architecture=sm_90a".to_owned(), "--std=c++17".to_owned()];
    Source { name: "launch".into(), entry: "small".into(), language: Language::Cuda, options, text }
}

/// One launch of `function` by the plain call.
#[derive(Clone, Copy)]
struct Launch {
    function: sys::CUfunction,
    blocks: u32,
    threads: u32,
    shared: u32,
    stream: sys::CUstream,
}

impl Launch {
    fn with_pointers(&self, parameter: *mut c_void) -> CUresult {
        let mut parameters = [parameter];
        let Self { function, blocks, threads, shared, stream } = *self;
        // SAFETY: the function takes one parameter, which lives until the call returns.
        unsafe {
            let parameters = parameters.as_mut_ptr();
            sys::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, stream, parameters, std::ptr::null_mut())
        }
    }

    fn with_buffer(&self, parameter: *mut c_void, mut bytes: usize) -> CUresult {
        // CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END.
        let tag = std::ptr::without_provenance_mut::<c_void>;
        let mut extra = [tag(1), parameter, tag(2), (&raw mut bytes).cast(), tag(0)];
        let Self { function, blocks, threads, shared, stream } = *self;
        // SAFETY: as above; the buffer holds `bytes` bytes.
        unsafe {
            let extra = extra.as_mut_ptr();
            sys::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, stream, std::ptr::null_mut(), extra)
        }
    }
}

fn main() -> Answer<()> {
    let device = CudaDevice::open(0)?;
    let stream = device.stream();
    let raw = stream.0 as usize as sys::CUstream;
    println!("{}", device.fingerprint());
    let (cubin, _) = Nvrtc::find()?.compile(&source())?;
    // An allocation makes the device's context current on this thread.
    let shape = [1, HEADS, 1024, HEAD_DIM];
    let tensors = (0..4)
        .map(|seed| {
            let shape = shape.map(|n| n as usize);
            let host = HostTensor::random(DType::Bf16, shape, Layout::Bhsd, seed, Default::default());
            let buffer = device.alloc(host.bytes().len())?;
            device.upload(&*buffer, host.bytes())?;
            Ok(buffer)
        })
        .collect::<Answer<Vec<_>>>()?;
    let mut module = std::ptr::null_mut();
    let function = |module, name: &str| -> Answer<sys::CUfunction> {
        let (mut function, name) = (std::ptr::null_mut(), CString::new(name)?);
        // SAFETY: the module is loaded, the name ends with a zero byte.
        check(unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) })?;
        Ok(function)
    };
    // SAFETY: the bytes are a whole cubin.
    check(unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) })?;
    let (small, large, busy) = (function(module, "small")?, function(module, "large")?, function(module, "busy")?);
    for f in [small, large] {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to a loaded module.
        check(unsafe { sys::cuFuncSetAttribute(f, attribute, SHARED_BYTES as i32) })?;
    }

    let wait = || device.synchronize(stream);
    let occupy = |us: u64| -> Answer<()> {
        let mut ns = us * 1000;
        let launch = Launch { function: busy, blocks: 1, threads: 32, shared: 0, stream: raw };
        check(launch.with_pointers((&raw mut ns).cast()))
    };
    // Host time of one launch, of one of a burst, and of one after a kernel of 1.5 ms.
    let report = |name: &str, work: &mut dyn FnMut() -> Answer<()>| -> Answer<()> {
        let mut time = |before: u64, launches: usize, rounds: usize| -> Answer<f64> {
            let mut all = Vec::new();
            for _ in 0..rounds {
                if before > 0 {
                    occupy(before)?;
                }
                wait()?;
                let start = Instant::now();
                for _ in 0..launches {
                    work()?;
                }
                all.push(start.elapsed().as_secs_f64() * 1e6 / launches as f64);
            }
            wait()?;
            Ok(median(all))
        };
        time(0, 1, 50)?;
        let (idle, burst, after) = (time(0, 1, ROUNDS)?, time(0, BURST, ROUNDS / 10)?, time(1500, 1, ROUNDS / 5)?);
        println!("{name:<46} {idle:7.2} {burst:7.2} {after:7.2}");
        Ok(())
    };
    println!("{:<46} {:>7} {:>7} {:>7}", "launches", "idle", "burst", "1.5 ms");
    let mut number = 0u64;
    let mut parameter = TensorMapBlock([0; size_of::<MappedArgs>()]);
    let number_at: *mut c_void = (&raw mut number).cast();
    let parameter_at: *mut c_void = (&raw mut parameter).cast();
    let least = Launch { function: small, blocks: 1, threads: 32, shared: 0, stream: raw };
    let real = Launch { function: small, blocks: 132, threads: 384, shared: SHARED_BYTES, stream: raw };
    let real_large = Launch { function: large, ..real };
    report("empty, 8 bytes, 1 x 32 threads", &mut || check(least.with_pointers(number_at)))?;
    report("empty, 8 bytes, 132 x 384 threads, 200 KiB", &mut || check(real.with_pointers(number_at)))?;
    let bytes = size_of::<MappedArgs>();
    report(&format!("empty, {bytes} bytes, the same"), &mut || check(real_large.with_pointers(parameter_at)))?;
    report(&format!("empty, {bytes} bytes by a buffer, the same"), &mut || {
        check(real_large.with_buffer(parameter_at, bytes))
    })?;

    let cache = tempfile::tempdir()?;
    let engine = Engine::builder().on(device.clone()).cache_dir(cache.path()).build()?;
    let lse = device.alloc((HEADS * 1024 * 4) as usize)?;
    let view = |i: usize| TensorView::bhsd(tensors[i].address(), DType::Bf16, shape);
    let mut call = Forward::new(view(0), view(1), view(2), view(3));
    (call.mask, call.lse) = (Mask::Causal, Some(lse.address()));
    let dispatch = engine.prepare(&call)?.ok_or("nothing to compute")?;
    report("Engine::forward", &mut || {
        // SAFETY: the views describe live buffers of these sizes.
        unsafe { engine.forward(&call, stream)? };
        Ok(())
    })?;
    println!("ran {}", dispatch.plan.kernel().name());

    println!("{:<46} {:>7}", "pieces", "us");
    let piece = |name: &str, work: &mut dyn FnMut() -> Answer<()>| -> Answer<()> {
        let mut all = Vec::new();
        for _ in 0..20 {
            let start = Instant::now();
            for _ in 0..1000 {
                work()?;
            }
            all.push(start.elapsed().as_secs_f64() * 1e3);
        }
        println!("{name:<46} {:7.3}", median(all));
        Ok(())
    };
    piece("checks and the plan (Engine::prepare)", &mut || {
        black_box(engine.prepare(black_box(&call))?);
        Ok(())
    })?;
    let kernel = *dispatch.plan.kernel();
    piece("the geometry", &mut || {
        black_box(kernel.plan(black_box(&dispatch.shape))?);
        Ok(())
    })?;
    pieces_of_the_driver(&tensors[0].address(), raw, &piece)?;
    Ok(())
}

#[repr(C, align(64))]
struct TensorMapBlock([u8; size_of::<MappedArgs>()]);

type Piece<'a> = dyn Fn(&str, &mut dyn FnMut() -> Answer<()>) -> Answer<()> + 'a;

/// What a launch asks the driver for before it.
fn pieces_of_the_driver(address: &u64, stream: sys::CUstream, piece: &Piece<'_>) -> Answer<()> {
    piece("cuCtxGetCurrent", &mut || {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes one pointer.
        check(unsafe { sys::cuCtxGetCurrent(&mut context) })
    })?;
    piece("cuStreamIsCapturing", &mut || {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive, the driver writes one word.
        check(unsafe { sys::cuStreamIsCapturing(stream, &mut status) })
    })?;
    piece("cuStreamGetId", &mut || {
        let mut id = 0;
        // SAFETY: as above.
        check(unsafe { sys::cuStreamGetId(stream, &mut id) })
    })?;
    let mut map = TensorMap::default();
    piece("cuTensorMapEncodeTiled, one of four", &mut || {
        let dims = [HEAD_DIM, 1, 1024, HEADS, 1];
        let strides = [HEAD_DIM * 2, HEAD_DIM * 2, HEAD_DIM * 2048, HEADS * HEAD_DIM * 2048];
        let (tile, steps) = ([64u32, 1, 64, 1, 1], [1u32; 5]);
        // SAFETY: the arrays hold five numbers (strides one fewer), the map is 128 bytes at a multiple of 64.
        check(unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                5,
                *address as usize as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        })
    })?;
    black_box(map);
    Ok(())
}
