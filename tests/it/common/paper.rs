//! A GPU, of Hopper unless said otherwise, that exists on paper: kernels are compiled for it, and a launch is only
//! written down. Its own compiler takes no time, except that a test can hold back the kernels that it names.

use flashtune::{DType, Forward, Mask, Problem, Shape, Stream, TensorView};
use flashtune_cache::{Artifact, CompilerId, DeviceFingerprint, Facts};
use flashtune_codegen::abi::Args;
use flashtune_codegen::{Kernel, LaunchPlan, Source};
use flashtune_runtime::{Buffer, Compiler, Device, Error, Module, Result};
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};

pub(crate) struct Paper {
    fingerprint: DeviceFingerprint,
    compiler: Arc<dyn Compiler>,
    /// Whether every stream is captured.
    pub capturing: AtomicBool,
    /// Names of the kernels that were launched.
    pub launched: Mutex<Vec<String>>,
}

/// Binaries of eight bytes.
pub(crate) struct Instant {
    id: CompilerId,
    /// Compilations of kernels with this word in their names wait until it is taken away.
    held: Mutex<Option<&'static str>>,
    freed: Condvar,
    /// Kernels with this word in their names do not compile.
    pub refused: Mutex<Option<&'static str>>,
    pub compiled: AtomicU32,
}

impl Instant {
    pub(crate) fn holding(word: &'static str) -> Arc<Self> {
        let id = CompilerId { name: "paper".into(), version: "1".into() };
        let held = Mutex::new(Some(word));
        Arc::new(Self { id, held, freed: Condvar::new(), refused: Mutex::default(), compiled: AtomicU32::new(0) })
    }

    pub(crate) fn free(&self) {
        *self.held.lock().unwrap() = None;
        self.freed.notify_all();
    }
}

impl Compiler for Instant {
    fn id(&self) -> &CompilerId {
        &self.id
    }

    fn compile(&self, source: &Source) -> Result<(Vec<u8>, Facts)> {
        assert!(source.text.contains(&source.entry), "the source defines its entry point");
        let names = |word: &Option<&str>| word.is_some_and(|word| source.name.contains(word));
        let _freed = self.freed.wait_while(self.held.lock().unwrap(), |word| names(word)).unwrap();
        self.compiled.fetch_add(1, Ordering::SeqCst);
        if names(&self.refused.lock().unwrap()) {
            let (compiler, kernel) = (self.id.to_string(), source.name.clone());
            return Err(Error::Compile { compiler, kernel, log: "refused by the test".into() });
        }
        Ok((b"on paper".to_vec(), Facts::default()))
    }
}

/// Memory of a stream, at an address that nobody reads.
struct Somewhere(usize);

impl Buffer for Somewhere {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn address(&self) -> u64 {
        7 << 32
    }
    fn len(&self) -> usize {
        self.0
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

impl Paper {
    pub(crate) fn new(compiler: Arc<dyn Compiler>) -> Arc<Self> {
        Self::of("sm_90a", compiler)
    }

    pub(crate) fn of(arch: &str, compiler: Arc<dyn Compiler>) -> Arc<Self> {
        let fingerprint = DeviceFingerprint {
            arch: arch.parse().unwrap(),
            name: "Paper".into(),
            units: 132,
            memory_bytes: 0,
            cache_bytes: 0,
            driver: "none".into(),
        };
        let (capturing, launched) = (AtomicBool::new(false), Mutex::default());
        Arc::new(Self { fingerprint, compiler, capturing, launched })
    }

    fn nothing<T>(&self, call: &'static str) -> Result<T> {
        let (device, message) = ("paper".to_owned(), "there is no memory on paper".to_owned());
        Err(Error::Device { call, device, message, remedy: "only launch" })
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
        Ok(Arc::new(Sheet(artifact.recipe.kernel)))
    }
    unsafe fn launch(&self, module: &dyn Module, _: &LaunchPlan, _: Args<'_>, _: Stream) -> Result<()> {
        self.launched.lock().unwrap().push(module.kernel().name());
        Ok(())
    }
    fn alloc(&self, _: usize) -> Result<Box<dyn Buffer>> {
        self.nothing("alloc")
    }
    fn stream_memory(&self, bytes: u64, _: Stream) -> Result<Box<dyn Buffer>> {
        Ok(Box::new(Somewhere(bytes as usize)))
    }
    fn upload(&self, _: &dyn Buffer, _: &[u8]) -> Result<()> {
        self.nothing("upload")
    }
    fn download(&self, _: &dyn Buffer, _: &mut [u8], _: Stream) -> Result<()> {
        self.nothing("download")
    }
    fn fill(&self, _: &dyn Buffer, _: u8) -> Result<()> {
        self.nothing("fill")
    }
    fn stream(&self) -> Stream {
        Stream(0)
    }
    fn is_capturing(&self, _: Stream) -> bool {
        self.capturing.load(Ordering::SeqCst)
    }
    fn synchronize(&self, _: Stream) -> Result<()> {
        Ok(())
    }
    fn flush_cache(&self, _: Stream) -> Result<()> {
        Ok(())
    }
    fn time_us(&self, _: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        work().map(|()| 1.0)
    }
}

/// A causal call of so many rows, on addresses that nobody reads, with its problem and sizes.
pub(crate) fn call(rows: u64) -> (Forward<'static>, Problem, Shape) {
    let view = |i: u64| TensorView::bhsd(i << 32, DType::Bf16, [1, 16, rows, 128]);
    let mut call = Forward::new(view(1), view(2), view(3), view(4));
    call.mask = Mask::Causal;
    let problem = Problem::forward(DType::Bf16, 128, Mask::Causal.kind()).unwrap();
    let n = rows as u32;
    (call, problem, Shape { batch: 1, heads: 16, kv_heads: 16, q_len: n, kv_len: n, mask: Mask::Causal })
}
