//! The device with a kernel written by hand: loading, tiles, scratch, threads.

use super::threads::run;
use super::*;
use crate::{HostTensor, Layout};
use flashtune_cache::{CompilerId, Facts, Recipe};
use flashtune_codegen::abi::ABI_VERSION;
use flashtune_codegen::{
    CpuIsa, CpuSchedule, DType, Kernel, Language, Mask, MaskKind, Problem, Schedule, Shape, Source,
};
use rayon::prelude::*;

/// Plain f32 attention with one tile per (batch, head, row), which keeps its scores in scratch.
const NAIVE: &str = include_str!("../../testdata/plain.c");

fn artifact(text: &str, isa: CpuIsa) -> Artifact {
    let problem = Problem::forward(DType::F32, 16, MaskKind::FULL).unwrap();
    let schedule =
        CpuSchedule { isa: CpuIsa::Generic, block_q: 8, block_kv: 64, unroll_q: 1, unroll_kv: 1, threads: 0 };
    let kernel = Kernel { problem, schedule: Schedule::Cpu(schedule), arch: Arch::Cpu(isa) };
    let options: Vec<String> = ["-O1", "-shared", "-fPIC"].map(str::to_owned).to_vec();
    let source = Source {
        name: "naive".into(),
        entry: "ft_tile".into(),
        language: Language::C,
        options: options.iter().cloned().chain(["-Wl,--no-as-needed".into(), "-lm".into()]).collect(),
        text: text.into(),
    };
    let (bytes, _) = crate::compile::Cc::find().unwrap().compile(&source).unwrap();
    let compiler = CompilerId { name: "cc".into(), version: "test".into() };
    let recipe = Recipe { kernel, templates: "test".into(), options, compiler, abi: ABI_VERSION };
    let args = flashtune_codegen::abi::ArgsLayout::of(&recipe.kernel);
    Artifact { recipe, args, entry: "ft_tile".into(), facts: Facts::default(), bytes }
}

struct Case {
    tensors: [HostTensor; 4],
    shape: Shape,
}

impl Case {
    fn new(q_len: usize, seed: u64) -> Self {
        let random =
            |h, s, seed| HostTensor::random(DType::F32, [2, h, s, 16], Layout::Bshd, seed, crate::Distribution::Normal);
        let o = HostTensor::poisoned(DType::F32, [2, 4, q_len, 16], Layout::Padded);
        let tensors = [random(4, q_len, seed), random(2, 33, seed + 1), random(2, 33, seed + 2), o];
        let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: q_len as u32, kv_len: 33, mask: Mask::Full };
        Self { tensors, shape }
    }

    /// Launches once and returns the largest error against the oracle.
    fn run(&mut self, device: &CpuDevice, module: &dyn Module) -> Result<f64> {
        let [q, k, v, o] = &self.tensors;
        let tensors = crate::ForwardTensors { q: q.view(), k: k.view(), v: v.view(), o: o.view(), lse: None };
        let call = crate::forward_call(&tensors, Mask::Full, None)?;
        assert_eq!(call.shape, self.shape);
        let plan = module.kernel().plan(&call.shape)?;
        // SAFETY: the views are of tensors that outlive the call; nothing else writes to O.
        unsafe { device.launch(module, &plan, (&call.args).into(), Stream(0))? };
        let ids = crate::reference::all_rows(&self.shape);
        let want = crate::reference::oracle(q, k, v, Mask::Full, call.args.scale, &ids);
        Ok(o.values().iter().zip(&want.o).map(|(x, y)| (*x as f64 - y).abs()).fold(0.0, f64::max))
    }
}

#[test]
fn a_loaded_kernel_computes_with_tiles_and_scratch() {
    let device = CpuDevice::open().unwrap();
    let module = device.load(&artifact(NAIVE, CpuIsa::Generic)).unwrap();
    for q_len in [1, 7, 64] {
        let error = Case::new(q_len, 5).run(&device, &*module).unwrap();
        assert!(error < 1e-5, "{error}");
    }
}

#[test]
fn launches_from_many_threads_and_from_a_rayon_worker_do_not_mix() {
    let device = CpuDevice::open().unwrap();
    let module = device.load(&artifact(NAIVE, CpuIsa::Generic)).unwrap();
    std::thread::scope(|scope| {
        for t in 0..4 {
            let (device, module) = (&device, &module);
            scope.spawn(move || {
                for i in 0..5 {
                    let error = Case::new(40 + t, (t * 100 + i) as u64).run(device, &**module).unwrap();
                    assert!(error < 1e-5, "{error}");
                }
            });
        }
    });
    let worst =
        (0..8u64).into_par_iter().map(|i| Case::new(50, i).run(&device, &*module).unwrap()).reduce(|| 0.0, f64::max);
    assert!(worst < 1e-5, "{worst}");
}

#[test]
fn modules_loaded_at_the_same_time_are_different_libraries() {
    // The loader compares path names: a descriptor number used again must not give the older library.
    let device = CpuDevice::open().unwrap();
    let double = NAIVE.replace("acc[d] += p[j]", "acc[d] += 2 * p[j]");
    let plain = device.load(&artifact(NAIVE, CpuIsa::Generic)).unwrap();
    let doubled = device.load(&artifact(&double, CpuIsa::Generic)).unwrap();
    assert!(Case::new(9, 1).run(&device, &*plain).unwrap() < 1e-5);
    assert!(Case::new(9, 1).run(&device, &*doubled).unwrap() > 1e-2);
    drop(plain);
    let again = device.load(&artifact(NAIVE, CpuIsa::Generic)).unwrap();
    assert!(Case::new(9, 1).run(&device, &*again).unwrap() < 1e-5);
    assert!(Case::new(9, 1).run(&device, &*doubled).unwrap() > 1e-2);
}

#[test]
fn what_cannot_be_loaded_is_an_error_with_a_remedy() {
    let device = CpuDevice::open().unwrap();
    let load = |a: &Artifact| device.load(a).err().unwrap().to_string();
    let good = artifact(NAIVE, CpuIsa::Generic);
    let garbage = Artifact { bytes: b"not an object".to_vec(), ..good.clone() };
    assert!(load(&garbage).contains("compile the kernel again"));
    let failing = artifact(&NAIVE.replace("return 0; }", "return 7; }"), CpuIsa::Generic);
    assert!(load(&failing).contains("ft_init") && load(&failing).contains('7'));
    let renamed = artifact(&NAIVE.replace("ft_tiles", "other"), CpuIsa::Generic);
    assert!(load(&renamed).contains("ft_tiles"));
    let mut gpu = good.clone();
    gpu.recipe.kernel.arch = "sm_80".parse().unwrap();
    assert!(load(&gpu).contains("sm_80"));
}

#[test]
fn a_kernel_for_more_instructions_than_the_device_has_is_refused() {
    let host = CpuDevice::open().unwrap();
    let fingerprint = DeviceFingerprint { arch: Arch::Cpu(CpuIsa::Generic), ..host.fingerprint.clone() };
    let device = CpuDevice { fingerprint, threads: host.threads.clone(), pool: host.pool };
    let e = device.load(&artifact(NAIVE, CpuIsa::Amx)).err().unwrap().to_string();
    assert!(e.contains("cpu-amx") && e.contains("cpu-generic"), "{e}");
}

#[test]
fn buffers_hold_what_was_written_and_refuse_what_does_not_fit() {
    let device = CpuDevice::open().unwrap();
    let buffer = device.alloc(10).unwrap();
    device.fill(&*buffer, 9).unwrap();
    device.upload(&*buffer, &[1, 2, 3]).unwrap();
    let mut out = [0; 10];
    device.download(&*buffer, &mut out, Stream(0)).unwrap();
    assert_eq!(out, [1, 2, 3, 9, 9, 9, 9, 9, 9, 9]);
    assert_eq!(buffer.address() % 64, 0);
    assert!(device.upload(&*buffer, &[0; 11]).unwrap_err().to_string().contains("11 bytes"));
    assert!(device.download(&*buffer, &mut [0; 11], Stream(0)).is_err());
}

#[test]
fn time_is_that_of_the_work_and_its_error_passes_through() {
    let device = CpuDevice::open().unwrap();
    device.flush_cache(Stream(0)).unwrap();
    let us = device
        .time_us(Stream(0), &mut || {
            std::thread::sleep(std::time::Duration::from_millis(5));
            Ok(())
        })
        .unwrap();
    assert!((5e3..5e6).contains(&us), "{us}");
    assert!(device.time_us(Stream(0), &mut || Err(foreign("work"))).is_err());
}

/// A loop of threads of its own that calls some of the members alone.
struct Some(usize);

impl ParallelLoop for Some {
    fn threads(&self) -> usize {
        8
    }
    fn run(&self, members: usize, member: &(dyn Fn() + Sync)) {
        std::thread::scope(|scope| (0..members.min(self.0)).for_each(|_| drop(scope.spawn(member))));
    }
}

#[test]
fn a_loop_of_the_host_computes_the_same_bytes_with_any_number_of_members() {
    let own = CpuDevice::open().unwrap();
    let artifact = artifact(NAIVE, CpuIsa::Generic);
    let bytes = |device: &CpuDevice| {
        let module = device.load(&artifact).unwrap();
        let mut case = Case::new(700, 3);
        assert!(case.run(device, &*module).unwrap() < 1e-5);
        case.tensors[3].bytes().to_vec()
    };
    let expected = bytes(&own);
    for members in [0, 1, 3, 8] {
        let device = CpuDevice::open_with(Threads::Host(Arc::new(Some(members)))).unwrap();
        assert_eq!(bytes(&device), expected, "{members} members");
    }
}

#[test]
fn a_panic_of_a_member_goes_on_in_the_thread_that_called() {
    let calls = AtomicU64::new(0);
    let work = || {
        if calls.fetch_add(1, Ordering::Relaxed) == 1 {
            panic!("the second member");
        }
    };
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&Some(3), 3, &work, || false)));
    assert_eq!(outcome.unwrap_err().downcast_ref::<&str>(), Option::Some(&"the second member"));
    assert_eq!(calls.load(Ordering::Relaxed), 3);
    // What is left is computed here.
    let count = || {
        calls.fetch_add(1, Ordering::Relaxed);
    };
    run(&Some(0), 5, &count, || true);
    assert_eq!(calls.load(Ordering::Relaxed), 4);
}

#[test]
fn without_an_openmp_runtime_there_is_an_error_or_the_librarys_threads() {
    // No test of this crate loads one.
    let e = CpuDevice::open_with(Threads::OpenMp).err().unwrap().to_string();
    assert!(e.contains("libgomp") && e.contains("import torch"), "{e}");
    let device = CpuDevice::open_with(Threads::OpenMpIfLoaded).unwrap();
    let module = device.load(&artifact(NAIVE, CpuIsa::Generic)).unwrap();
    assert!(Case::new(33, 8).run(&device, &*module).unwrap() < 1e-5);
}
