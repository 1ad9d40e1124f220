//! The device with a kernel written by hand. Without a GPU these tests say that they were skipped;
//! `FLASHTUNE_TEST_GPU=1` makes that a failure.

use super::*;
use crate::{CheckInputs, Layout, Poison, check_kernel, compile_with};
use flashtune_cache::{CompilerId, Facts, Recipe};
use flashtune_codegen::abi::ABI_VERSION;
use flashtune_codegen::abi::ForwardArgs;
use flashtune_codegen::{
    DType, Family, Kernel, Language, Mask, MaskKind, NaiveSchedule, Problem, Schedule, Shape, ShapeBucket, Source,
    StageEntry,
};

/// Writes `q[i] * scale` to `o[i]` for `q_len` floats, one thread each, and what it has in shared memory.
const SCALE: &str = r#"
struct Args {
    unsigned long long q, k, v, o, lse, weights;
    long long q_stride[3], k_stride[3], v_stride[3], o_stride[3];
    int batch, heads, kv_heads, q_len, kv_len, window_left, window_right;
    float scale;
};
extern "C" __global__ void scale(const __grid_constant__ Args a) {
    extern __shared__ float shared[];
    shared[blockDim.x * 194 + threadIdx.x] = a.scale;
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.q_len) ((float *)a.o)[i] = ((const float *)a.q)[i] * shared[blockDim.x * 194 + (threadIdx.x ^ 1)];
}
"#;

fn device() -> Option<Arc<CudaDevice>> {
    match CudaDevice::open(0) {
        Ok(device) => Some(device),
        Err(e) => {
            assert!(std::env::var_os("FLASHTUNE_TEST_GPU").is_none(), "{e}");
            eprintln!("skipped: {e}");
            None
        }
    }
}

fn kernel(arch: Arch) -> Kernel {
    let problem = Problem::forward(DType::F32, 64, MaskKind::FULL).unwrap();
    let schedule = NaiveSchedule { block_q: 64, block_kv: 64, threads: 256 };
    Kernel { problem, schedule: Schedule::Naive(schedule), arch }
}

fn artifact(device: &CudaDevice) -> Artifact {
    let source = Source {
        name: "scale".into(),
        entry: "scale".into(),
        language: Language::Cuda,
        options: vec![format!("--gpu-architecture={}", device.arch)],
        text: SCALE.into(),
    };
    let (bytes, facts) = device.compiler().unwrap().compile(&source).unwrap();
    let compiler = CompilerId { name: "nvrtc".into(), version: "test".into() };
    let kernel = kernel(device.fingerprint.arch);
    let recipe = Recipe { kernel, templates: "test".into(), options: source.options, compiler, abi: ABI_VERSION };
    let args = flashtune_codegen::abi::ArgsLayout::of(&recipe.kernel);
    Artifact { recipe, args, entry: source.entry, facts, bytes }
}

/// A call over `n` floats, with its buffers.
struct Call {
    q: Box<dyn Buffer>,
    o: Box<dyn Buffer>,
    args: ForwardArgs,
    plan: LaunchPlan,
}

impl Call {
    fn new(device: &CudaDevice, n: usize) -> Self {
        let (q, o) = (device.alloc(4 * n).unwrap(), device.alloc(4 * n).unwrap());
        let values: Vec<u8> = (0..n).flat_map(|i| (i as f32).to_ne_bytes()).collect();
        device.upload(&*q, &values).unwrap();
        device.fill(&*o, 0xff).unwrap();
        let args =
            ForwardArgs { q: q.address(), o: o.address(), q_len: n as i32, scale: 3.0, ..bytemuck::Zeroable::zeroed() };
        // What `kernel()` asks for: more than the 48 KiB that need no permission.
        let stage = Stage::of(StageEntry::MAIN, n.div_ceil(64) as u32, 64, 64 * 195 * 4);
        Self { q, o, args, plan: LaunchPlan::new([stage], [], None) }
    }

    fn is_done(&self, device: &CudaDevice, stream: Stream) -> bool {
        let mut bytes = vec![0; self.o.len()];
        device.download(&*self.o, &mut bytes, stream).unwrap();
        let values = bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap()));
        values.enumerate().all(|(i, x)| x == i as f32 * 3.0)
    }
}

#[test]
fn launches_copies_and_times_on_streams_and_threads() {
    let Some(device) = device() else { return };
    let f = device.fingerprint();
    assert!(f.units > 0 && f.memory_bytes > 0 && f.cache_bytes > 0 && f.driver.contains("CUDA"), "{f:?}");
    let module = device.load(&artifact(&device)).unwrap();
    std::thread::scope(|scope| {
        for stream in [device.stream(), Stream(0)] {
            let (device, module) = (&device, &module);
            scope.spawn(move || {
                let call = Call::new(device, 100_003);
                // SAFETY: the buffers outlive the launch; the kernel writes `q_len` floats.
                let us = device
                    .time_us(stream, &mut || unsafe {
                        device.launch(&**module, &call.plan, (&call.args).into(), stream)
                    })
                    .unwrap();
                assert!(us > 0.0 && us < 1e5, "{us}");
                assert!(call.is_done(device, stream));
                device.flush_cache(stream).unwrap();
                device.synchronize(stream).unwrap();
                assert_eq!(call.q.len(), 400_012);
            });
        }
    });
}

#[test]
fn launches_can_be_captured_in_a_graph() {
    use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
    let Some(device) = device() else { return };
    let host = CudaContext::new(0).unwrap();
    let device_of_host = CudaDevice::of_context(&host).unwrap();
    assert!(device_of_host.context.is(&device.context), "the primary context is shared");
    let module = device.load(&artifact(&device)).unwrap();
    let call = Call::new(&device, 1000);
    let stream = host.new_stream().unwrap();
    let ours = Stream(stream.cu_stream() as usize as u64);
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    // SAFETY: the buffers outlive the graph's launches.
    unsafe { device.launch(&*module, &call.plan, (&call.args).into(), ours).unwrap() };
    let graph = stream
        .end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
        .unwrap()
        .expect("one kernel was captured");
    assert!(!call.is_done(&device, ours), "nothing ran while it was captured");
    graph.launch().unwrap();
    assert!(call.is_done(&device, ours));
}

#[test]
fn captured_launches_are_replayed_and_a_failed_capture_leaves_the_stream_usable() {
    let Some(device) = device() else { return };
    let module = device.load(&artifact(&device)).unwrap();
    let call = Call::new(&device, 1000);
    let stream = device.stream();
    // SAFETY: the buffers outlive the graph's launches.
    let mut launch = || unsafe { device.launch(&*module, &call.plan, (&call.args).into(), stream) };
    let graph = device.capture(stream, &mut launch).unwrap();
    assert!(!call.is_done(&device, stream), "nothing ran while it was captured");
    // SAFETY: as above.
    unsafe { graph.replay(stream).unwrap() };
    assert!(call.is_done(&device, stream));
    let failing = device.capture(stream, &mut || Err(device.foreign("launch")));
    assert!(failing.is_err());
    launch().unwrap();
    device.synchronize(stream).unwrap();
}

#[test]
fn a_warm_launch_costs_the_host_little() {
    let Some(device) = device() else { return };
    let module = device.load(&artifact(&device)).unwrap();
    let call = Call::new(&device, 64);
    let stream = device.stream();
    let mut best = f64::INFINITY;
    for _ in 0..20 {
        device.synchronize(stream).unwrap();
        let start = std::time::Instant::now();
        for _ in 0..50 {
            // SAFETY: the buffers outlive the launch.
            unsafe { device.launch(&*module, &call.plan, (&call.args).into(), stream).unwrap() };
        }
        best = best.min(start.elapsed().as_secs_f64() * 1e6 / 50.0);
    }
    device.synchronize(stream).unwrap();
    assert!(best < 5.0, "{best} us");
}

#[test]
fn cudarc_slices_become_tensors() {
    let Some(device) = device() else { return };
    let host = CudaContext::new(0).unwrap();
    let stream = host.default_stream();
    let q = stream.clone_htod(&[0.0f32, 1.0, 2.0, 3.0]).unwrap();
    let mut o = stream.alloc_zeros::<f32>(4).unwrap();
    let module = device.load(&artifact(&device)).unwrap();
    {
        let q = read_slice("q", &q, &stream, [1, 1, 1, 4]).unwrap();
        let o = write_slice("o", &mut o, &stream, [1, 1, 1, 4]).unwrap();
        let mut call = Call::new(&device, 4);
        call.args.q = q.view().address;
        call.args.o = o.view().address;
        // SAFETY: the slices outlive the launch.
        unsafe {
            device
                .launch(&*module, &call.plan, (&call.args).into(), Stream(stream.cu_stream() as usize as u64))
                .unwrap()
        };
        device.synchronize(Stream(stream.cu_stream() as usize as u64)).unwrap();
    }
    assert_eq!(stream.clone_dtoh(&o).unwrap(), [0.0, 3.0, 6.0, 9.0]);
    assert!(read_slice("q", &q, &stream, [1, 1, 1, 5]).is_err());
}

#[test]
fn what_does_not_fit_the_device_is_an_error_with_a_remedy() {
    let Some(device) = device() else { return };
    let good = artifact(&device);
    let load = |a: &Artifact| device.load(a).err().unwrap().to_string();
    assert!(load(&Artifact { bytes: b"not a cubin".to_vec(), ..good.clone() }).contains("no cubin"));
    assert!(load(&Artifact { entry: "other".into(), ..good.clone() }).contains("cuModuleGetFunction"));
    let mut foreign = good.clone();
    foreign.recipe.kernel.arch = "sm_75".parse().unwrap();
    assert!(load(&foreign).contains("sm_75"));
    assert!(CudaDevice::open(10_000).err().unwrap().to_string().contains("flashtune doctor"));
    let e = device.alloc(1 << 50).err().unwrap().to_string();
    assert!(e.contains("OUT_OF_MEMORY") && e.contains("free device memory"), "{e}");
    // The device still works: none of these errors stays.
    assert_eq!(device.alloc(16).unwrap().len(), 16);
    let cpu = crate::CpuDevice::open().unwrap();
    assert!(device.fill(&*cpu.alloc(8).unwrap(), 0).is_err());
}

#[test]
fn addresses_of_the_host_are_told_from_those_of_the_device() {
    let Some(device) = device() else { return };
    let buffer = device.alloc(64).unwrap();
    device.check_address("q", buffer.address() + 32, 32).unwrap();
    let host = [0u8; 64];
    let e = device.check_address("q", host.as_ptr() as u64, 64).unwrap_err().to_string();
    assert!(e.contains("tensor q") && e.contains("host memory"), "{e}");
    let e = device.check_address("q", buffer.address(), 1 << 46).unwrap_err().to_string();
    assert!(e.contains("extent") && e.contains("strides"), "{e}");
}

#[test]
fn a_context_of_the_caller_is_worked_in() {
    let Some(device) = device() else { return };
    let host = CudaContext::new(0).unwrap();
    // SAFETY: the context outlives the device.
    let adopted = unsafe { CudaDevice::adopt(host.cu_ctx().cast()).unwrap() };
    assert!(adopted.context.is(&device.context) && adopted.fingerprint() == device.fingerprint());
    assert_eq!(adopted.alloc(16).unwrap().len(), 16);
}

#[test]
fn the_naive_template_passes_the_check() {
    let Some(cuda) = device() else { return };
    let device: Arc<dyn Device> = cuda;
    let templates = flashtune_codegen::TemplateSet::embedded();
    for mask in [Mask::Full, Mask::Causal] {
        let problem = Problem::forward(DType::F32, 64, mask.kind()).unwrap();
        let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 129, kv_len: 200, mask };
        let bucket = ShapeBucket::of(&shape);
        let schedule = Schedule::default_for(Family::ForwardNaive, &problem, device.arch(), &bucket).unwrap();
        let kernel = Kernel { problem, schedule, arch: device.arch() };
        let artifact = compile_with(&*device.compiler().unwrap(), &kernel, &templates).unwrap();
        assert_eq!(artifact.facts, Facts { spill_bytes: 0, ..artifact.facts.clone() });
        let module = device.load(&artifact).unwrap();
        for layout in Layout::ALL {
            let inputs = CheckInputs { layout, poison: Poison::Nan, ..CheckInputs::default() };
            let report = check_kernel(&device, &*module, &shape, &inputs).unwrap();
            assert!(report.passed(), "{mask} {layout:?}: {report}");
        }
    }
}

#[test]
fn the_ceilings_of_a_gpu_are_measured_or_say_what_is_missing() {
    let Some(device) = device() else { return };
    use crate::ceilings::{Ceiling, measure};
    let copy = measure(&*device, Ceiling::Copy).unwrap();
    assert!((5e10..1e14).contains(&copy.per_second), "{copy:?}");
    for dtype in DType::ALL {
        match measure(&*device, Ceiling::Matmul(dtype)) {
            Ok(rate) => assert!((1e12..1e16).contains(&rate.per_second) && rate.how.contains("cuBLAS"), "{rate:?}"),
            Err(e) => assert!(e.to_string().contains("libcublas"), "{e}"),
        }
    }
}
