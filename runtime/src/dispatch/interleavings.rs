//! Threads that meet in one dispatcher, in orders that a model checker draws: at each lock, each look at what is
//! published and in the middle of each compilation, any of them may be next. `FLASHTUNE_INTERLEAVINGS` says how many
//! orders of each scene.

use super::binaries::Binary;
use super::flight::Flights;
use super::job::Job;
use super::key::PlanKey;
use super::plan::Plan;
use super::table::Table;
use super::{Dispatcher, DispatcherConfig, OnMiss, Policy};
use crate::sync::explored::{explore, point};
use crate::{Buffer, Compiler, Device, Error, Module, Result, Stream};
use flashtune_cache::{Artifact, CacheDir, CompilerId, DeviceFingerprint, Facts, Launches, Layers, Recipe};
use flashtune_codegen::abi::{ABI_VERSION, Args};
use flashtune_codegen::{
    Constraints, DType, Kernel, LaunchPlan, Mask, Problem, Shape, ShapeBucket, Source, TemplateSet,
};
use shuttle::thread::spawn;
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, LazyLock};

/// A processor that runs nothing, and counts.
struct Paper {
    fingerprint: DeviceFingerprint,
    compiler: Arc<Slow>,
    loads: AtomicU32,
}

/// A compiler that others may interrupt.
struct Slow {
    id: CompilerId,
    compiled: AtomicU32,
    /// Whether no compiler may begin any more, by what was promised.
    closed: AtomicBool,
}

impl Slow {
    fn new() -> Self {
        let id = CompilerId { name: "paper".into(), version: "1".into() };
        Self { id, compiled: AtomicU32::new(0), closed: AtomicBool::new(false) }
    }
}

struct Sheet(Kernel);

impl Module for Sheet {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn kernel(&self) -> &Kernel {
        &self.0
    }
}

impl Compiler for Slow {
    fn id(&self) -> &CompilerId {
        &self.id
    }
    fn compile(&self, _: &Source) -> Result<(Vec<u8>, Facts)> {
        assert!(!self.closed.load(SeqCst), "a compiler begins after the seal");
        point();
        self.compiled.fetch_add(1, SeqCst);
        point();
        assert!(!self.closed.load(SeqCst), "a compiler runs after the seal");
        Ok((b"on paper".to_vec(), Facts::default()))
    }
}

impl Device for Paper {
    fn fingerprint(&self) -> &DeviceFingerprint {
        &self.fingerprint
    }
    fn compiler(&self) -> Result<Arc<dyn Compiler>> {
        Ok(self.compiler.clone())
    }
    fn load(&self, artifact: &Artifact) -> Result<Arc<dyn Module>> {
        point();
        self.loads.fetch_add(1, SeqCst);
        Ok(Arc::new(Sheet(artifact.recipe.kernel)))
    }
    unsafe fn launch(&self, _: &dyn Module, _: &LaunchPlan, _: Args<'_>, _: Stream) -> Result<()> {
        unreachable!("nothing is launched on paper")
    }
    fn alloc(&self, _: usize) -> Result<Box<dyn Buffer>> {
        unreachable!("nothing is launched on paper")
    }
    fn upload(&self, _: &dyn Buffer, _: &[u8]) -> Result<()> {
        unreachable!("nothing is launched on paper")
    }
    fn download(&self, _: &dyn Buffer, _: &mut [u8], _: Stream) -> Result<()> {
        unreachable!("nothing is launched on paper")
    }
    fn fill(&self, _: &dyn Buffer, _: u8) -> Result<()> {
        unreachable!("nothing is launched on paper")
    }
    fn stream(&self) -> Stream {
        Stream::default()
    }
    fn synchronize(&self, _: Stream) -> Result<()> {
        Ok(())
    }
    fn flush_cache(&self, _: Stream) -> Result<()> {
        Ok(())
    }
    fn time_us(&self, _: Stream, _: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        unreachable!("nothing is launched on paper")
    }
}

/// A dispatcher with nothing in memory or anywhere else.
fn dispatcher() -> (Arc<Paper>, Arc<Dispatcher>) {
    static TEMPLATES: LazyLock<Arc<TemplateSet>> = LazyLock::new(|| Arc::new(TemplateSet::embedded()));
    let fingerprint = DeviceFingerprint {
        arch: "cpu-avx2".parse().unwrap(),
        name: "Paper".into(),
        units: 2,
        memory_bytes: 0,
        cache_bytes: 0,
        driver: String::new(),
    };
    let device = Arc::new(Paper { fingerprint, compiler: Arc::new(Slow::new()), loads: AtomicU32::new(0) });
    let layers = Arc::new(Layers::open(&CacheDir::at("/nonexistent"), &[], None).unwrap());
    let dispatcher = Dispatcher::new(DispatcherConfig {
        device: device.clone(),
        templates: TEMPLATES.clone(),
        policy: Policy::Default,
        launches: Launches::Eager,
        layers,
        paths: Default::default(),
        artifacts: None,
    });
    (device, Arc::new(dispatcher))
}

/// A class; those of equal head dims have one kernel.
fn class(head_dim: u32, len: u32) -> (Problem, Shape) {
    let mask = Mask::Full;
    let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: len, kv_len: len, mask };
    (Problem::forward(DType::F32, head_dim, mask.kind()).unwrap(), shape)
}

fn plan(dispatcher: &Dispatcher, (problem, shape): (Problem, Shape)) -> Result<Arc<Plan>> {
    dispatcher.plan(&problem, &shape, Constraints::NONE)
}

#[test]
fn threads_that_need_one_kernel_compile_and_load_it_once() {
    explore(2000, || {
        let (device, dispatcher) = dispatcher();
        // Two ask for one class, and one for another class of the same kernel.
        let threads: Vec<_> = [1024, 1024, 2048]
            .into_iter()
            .map(|len| {
                let dispatcher = dispatcher.clone();
                spawn(move || plan(&dispatcher, class(16, len)).unwrap())
            })
            .collect();
        let plans: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        assert!(Arc::ptr_eq(&plans[0], &plans[1]) && plans[2].kernel() == plans[0].kernel());
        assert_eq!((device.compiler.compiled.load(SeqCst), device.loads.load(SeqCst)), (1, 1));
        let counters = dispatcher.counters();
        assert_eq!((counters.compiled, counters.loaded, counters.classes), (1, 1, 2));
    });
}

#[test]
fn once_sealed_nothing_compiles_and_all_have_one_answer() {
    explore(2000, || calls_meet_seals(&[&[16, 24], &[24, 16]]));
    // Where one finds nothing to seal, and the other does a moment later.
    explore(5000, || calls_meet_seals(&[&[16]]));
}

fn calls_meet_seals(calls: &'static [&'static [u32]]) {
    let (device, dispatcher) = dispatcher();
    let callers: Vec<_> = calls
        .iter()
        .map(|dims| {
            let dispatcher = dispatcher.clone();
            spawn(move || dims.iter().map(|dim| plan(&dispatcher, class(*dim, 1024))).collect::<Vec<_>>())
        })
        .collect();
    let sealers: Vec<_> = [OnMiss::Nearest, OnMiss::Refuse]
        .into_iter()
        .map(|on_miss| {
            let (dispatcher, device) = (dispatcher.clone(), device.clone());
            spawn(move || {
                let seal = dispatcher.seal(on_miss);
                // Who has a seal in hand may rely on it, whatever happens to the other's.
                device.compiler.closed.fetch_or(seal.is_ok(), SeqCst);
                seal
            })
        })
        .collect();
    let called: Vec<_> = callers.into_iter().flat_map(|t| t.join().unwrap()).collect();
    let seals: Vec<_> = sealers.into_iter().filter_map(|t| t.join().unwrap().ok()).collect();
    assert!(called.iter().all(|c| !matches!(c, Err(e) if !matches!(e, Error::Sealed { .. }))));
    assert!(seals.iter().all(|s| Some(s) == dispatcher.sealed()), "two seals");
    if let Some(seal) = dispatcher.sealed() {
        assert!((1..=2).contains(&seal.classes), "{seal:?}");
        // From now on whoever asks has the same answer.
        for dim in [16, 24] {
            let answers = [(); 2].map(|()| plan(&dispatcher, class(dim, 1024)).ok());
            match answers {
                [Some(one), Some(other)] => assert!(Arc::ptr_eq(&one, &other)),
                [None, None] => {}
                _ => panic!("an answer and none"),
            }
        }
    }
}

#[test]
fn threads_that_miss_a_sealed_set_agree_on_what_serves() {
    explore(2000, || {
        let (_, dispatcher) = dispatcher();
        plan(&dispatcher, class(16, 1024)).unwrap();
        dispatcher.seal(OnMiss::Nearest).unwrap();
        let threads: Vec<_> = (0..3)
            .map(|i| {
                let dispatcher = dispatcher.clone();
                // Each class is met by two of them, as their first or their second.
                spawn(move || [i, (i + 1) % 3].map(|n| (n, plan(&dispatcher, class(16, 2048 << n)).unwrap())))
            })
            .collect();
        let plans: Vec<_> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
        for (n, plan) in &plans {
            assert!(plans.iter().filter(|(m, _)| m == n).all(|(_, other)| Arc::ptr_eq(plan, other)));
        }
        assert_eq!(dispatcher.counters().classes, 4);
    });
}

/// Two classes whose plans are in one chain of a table.
fn in_one_chain() -> [PlanKey; 2] {
    static FOUND: LazyLock<[PlanKey; 2]> = LazyLock::new(|| {
        let key = |q: u32, kv: u32| {
            let (problem, shape) = class(16, 1u32 << q);
            let bucket = ShapeBucket::of(&Shape { kv_len: 1u32 << kv, ..shape });
            PlanKey { problem, bucket, demands: Constraints::NONE }
        };
        let keys: Vec<_> = (0..20).flat_map(|q| (0..20).map(move |kv| key(q, kv))).collect();
        let table = Table::new();
        let pair = |(i, a): (usize, &PlanKey)| keys[..i].iter().find(|b| table.share_a_slot(a, b)).map(|b| [*a, *b]);
        keys.iter().enumerate().find_map(pair).expect("400 classes, 1024 slots")
    });
    *FOUND
}

#[test]
fn plans_that_threads_add_to_a_chain_are_all_found() {
    explore(5000, || {
        let table = Arc::new(Table::new());
        let keys = in_one_chain();
        assert!(table.share_a_slot(&keys[0], &keys[1]));
        let threads: Vec<_> = [keys, [keys[1], keys[0]]]
            .into_iter()
            .map(|keys| {
                let table = table.clone();
                spawn(move || {
                    keys.map(|key| {
                        let plan = table.insert(key, Arc::new(Plan::for_tests(&key))).clone();
                        let found = table.get(&key).expect("it was just added");
                        assert!(Arc::ptr_eq(found, &plan), "the answer changed");
                        plan
                    })
                })
            })
            .collect();
        let plans: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        assert!(Arc::ptr_eq(&plans[0][0], &plans[1][1]) && Arc::ptr_eq(&plans[0][1], &plans[1][0]));
        for (plan, key) in plans[0].iter().zip(&keys) {
            assert!(plan.bucket == key.bucket && Arc::ptr_eq(table.get(key).unwrap(), plan));
        }
    });
}

#[test]
fn work_of_a_key_is_never_done_by_two_and_leaves_nothing() {
    explore(5000, || {
        let flights = Arc::new(Flights::<u32>::default());
        let inside = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let threads: Vec<_> = [0, 0, 0, 1]
            .into_iter()
            .map(|key| {
                let (flights, inside) = (flights.clone(), inside.clone());
                spawn(move || {
                    flights.run(&key, || {
                        assert_eq!(inside[key as usize].fetch_add(1, SeqCst), 0, "two work on {key}");
                        point();
                        inside[key as usize].fetch_sub(1, SeqCst);
                    })
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert!(flights.is_empty());
    });
}

#[test]
fn a_result_of_the_background_is_taken_once_and_wakes_all() {
    explore(5000, || {
        let (problem, shape) = class(16, 64);
        let arch = "cpu-avx2".parse().unwrap();
        let family = flashtune_codegen::Family::ForwardCpu;
        let schedule =
            flashtune_codegen::Schedule::default_for(family, &problem, arch, &ShapeBucket::of(&shape)).unwrap();
        let recipe = Recipe {
            kernel: Kernel { problem, schedule, arch },
            templates: String::new(),
            options: Vec::new(),
            compiler: Slow::new().id,
            abi: ABI_VERSION,
        };
        let job = Arc::new(Job::new());
        let takers: Vec<_> = (0..3)
            .map(|_| {
                let job = job.clone();
                spawn(move || {
                    let known = job.is_ready();
                    let taken = job.take();
                    assert!(job.is_ready() || job.has_failed(), "it was waited for");
                    assert!(!known || job.is_ready(), "what was ready is not any more");
                    taken
                })
            })
            .collect();
        let of = job.clone();
        let args = flashtune_codegen::abi::ArgsLayout::of(&recipe.kernel);
        let artifact = Artifact { recipe, args, entry: String::new(), facts: Facts::default(), bytes: Vec::new() };
        let run = spawn(move || {
            of.run(|| -> Result<Binary> {
                point();
                Ok((artifact, String::new()))
            })
        });
        run.join().unwrap();
        let taken = takers.into_iter().filter_map(|t| t.join().unwrap()).count();
        assert_eq!(taken, 1);
    });
}
