//! The cpu device counting what is asked of it, and an allocator that counts.

use super::Place;
use flashtune::{DType, DeviceSpec, Engine, Mask, Policy, Problem, Shape, Stream};
use flashtune_cache::{Artifact, CompilerId, DeviceFingerprint, Facts};
use flashtune_codegen::abi::Args;
use flashtune_codegen::{LaunchPlan, Source};
use flashtune_runtime::{Buffer, Compiler, Device, Module, Result};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

thread_local! {
    pub static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting per thread.
pub(crate) struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// The cpu device, counting what is asked of it.
pub(crate) struct Counted {
    inner: Arc<dyn Device>,
    pub compilers: AtomicU32,
    pub compiles: Arc<AtomicU32>,
    pub loads: AtomicU32,
}

struct CountedCompiler {
    inner: Arc<dyn Compiler>,
    compiles: Arc<AtomicU32>,
}

impl Compiler for CountedCompiler {
    fn id(&self) -> &CompilerId {
        self.inner.id()
    }
    fn compile(&self, source: &Source) -> Result<(Vec<u8>, Facts)> {
        self.compiles.fetch_add(1, Ordering::SeqCst);
        self.inner.compile(source)
    }
}

impl Device for Counted {
    fn fingerprint(&self) -> &DeviceFingerprint {
        self.inner.fingerprint()
    }
    fn compiler(&self) -> Result<Arc<dyn Compiler>> {
        self.compilers.fetch_add(1, Ordering::SeqCst);
        Ok(Arc::new(CountedCompiler { inner: self.inner.compiler()?, compiles: self.compiles.clone() }))
    }
    fn load(&self, artifact: &Artifact) -> Result<Arc<dyn Module>> {
        self.loads.fetch_add(1, Ordering::SeqCst);
        self.inner.load(artifact)
    }
    unsafe fn launch(&self, module: &dyn Module, launch: &LaunchPlan, args: Args<'_>, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.launch(module, launch, args, stream) }
    }
    fn alloc(&self, bytes: usize) -> Result<Box<dyn Buffer>> {
        self.inner.alloc(bytes)
    }
    fn upload(&self, to: &dyn Buffer, bytes: &[u8]) -> Result<()> {
        self.inner.upload(to, bytes)
    }
    fn download(&self, from: &dyn Buffer, bytes: &mut [u8], stream: Stream) -> Result<()> {
        self.inner.download(from, bytes, stream)
    }
    fn fill(&self, buffer: &dyn Buffer, byte: u8) -> Result<()> {
        self.inner.fill(buffer, byte)
    }
    fn stream(&self) -> Stream {
        self.inner.stream()
    }
    fn synchronize(&self, stream: Stream) -> Result<()> {
        self.inner.synchronize(stream)
    }
    fn flush_cache(&self, stream: Stream) -> Result<()> {
        self.inner.flush_cache(stream)
    }
    fn time_us(&self, stream: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        self.inner.time_us(stream, work)
    }
}

pub(crate) fn counted() -> Arc<Counted> {
    Arc::new(Counted {
        inner: flashtune_runtime::open(DeviceSpec::Cpu).unwrap(),
        compilers: AtomicU32::new(0),
        compiles: Arc::default(),
        loads: AtomicU32::new(0),
    })
}

pub(crate) fn engine(place: &Place, device: &Arc<Counted>, policy: Policy) -> Engine {
    Engine::builder().on(device.clone()).cache_dir(place.cache()).policy(policy).build().unwrap()
}

/// The problem that `Place::tune_small` tunes.
pub(crate) fn small(q_len: u32) -> (Problem, Shape) {
    let mask = Mask::Causal;
    let problem = Problem::forward(DType::F32, 32, mask.kind()).unwrap();
    (problem, Shape { batch: 1, heads: 2, kv_heads: 2, q_len, kv_len: q_len, mask })
}
