//! A device that computes plain attention in Rust and whose times, faults and lies are prescribed.

use flashtune_cache::{Artifact, CompilerId, DeviceFingerprint, Facts, Key, Reading};
use flashtune_codegen::abi::{Args, ForwardArgs};
use flashtune_codegen::{
    Arch, CpuIsa, DType, Family, Kernel, LaunchPlan, Mask, MaskKind, Problem, Schedule, Shape, ShapeBucket, Source,
    TemplateSet,
};
use flashtune_runtime::{Buffer, Compiler, Device, Error as RuntimeError, Graph, Module, Stream};
use std::any::Any;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::Job;

type RuntimeResult<T> = std::result::Result<T, RuntimeError>;

/// What a schedule does on the paper device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Behaviour {
    Right {
        us: f64,
    },
    DoesNotCompile,
    DoesNotLoad,
    DoesNotLaunch,
    /// Adds to every output.
    Wrong {
        by: f32,
    },
    /// Leaves the last row of every head as it was.
    SkipsTheLastRow,
    /// Right on small inputs, wrong on those of the job.
    WrongWhenLarge,
    /// Another answer each time.
    Unrepeatable,
    /// The same answer in its first so many launches, then another one.
    UnrepeatableAfter {
        launches: usize,
        us: f64,
    },
    /// Right, and takes either half or double the time of the default.
    Noisy,
    /// Right, with times up to a third longer than that.
    Unsteady {
        us: f64,
    },
    /// Right, and another time in a graph.
    Replayed {
        us: f64,
    },
    /// Right, but not when it is replayed.
    WrongWhenReplayed,
}

pub(crate) struct PaperDevice {
    pub fingerprint: DeviceFingerprint,
    pub compiler: Arc<PaperCompiler>,
    behaviours: HashMap<Schedule, Behaviour>,
    /// Time of what was launched last.
    last_us: Mutex<f64>,
    pub launches: AtomicUsize,
    /// Whose they were, and the rows of O that they wrote at this number of keys.
    pub rows: Mutex<Vec<(Schedule, i32, i32)>>,
    /// Bytes of its memory in use, and the most that were.
    in_use: Arc<AtomicUsize>,
    pub most_in_use: AtomicUsize,
    /// Whether there are graphs.
    pub graphs: AtomicBool,
    /// What a look at it shows.
    pub reading: Mutex<Reading>,
    /// Whether its times are the prescribed ones, without noise.
    pub exact: AtomicBool,
    /// What loading a kernel takes, in milliseconds.
    pub loads_ms: AtomicUsize,
    /// What is being captured.
    capturing: Mutex<Option<Vec<(PaperModule, ForwardArgs)>>>,
    me: Weak<PaperDevice>,
    /// Answers by the hash of the question, because the same one is asked again and again.
    answers: Mutex<HashMap<Key, Arc<Answer>>>,
}

/// O and LSE, contiguous.
struct Answer {
    o: Vec<f32>,
    lse: Vec<f32>,
}

pub(crate) struct PaperCompiler {
    id: CompilerId,
    /// Kernel names that are refused.
    refused: Vec<String>,
    pub compiled: AtomicUsize,
    /// What a compilation takes, in milliseconds, and how many are going on.
    pub takes_ms: AtomicUsize,
    pub going_on: AtomicUsize,
    /// A file that outlives the process, with a `c` for each compilation and an `l` for each launch, from before it
    /// begins.
    pub notes: Mutex<Option<File>>,
}

#[derive(Clone, Copy)]
struct PaperModule {
    kernel: Kernel,
    behaviour: Behaviour,
}

/// Memory of the device, which counts what is in use.
struct PaperBuffer {
    words: Vec<u64>,
    bytes: usize,
    in_use: Arc<AtomicUsize>,
}

impl Drop for PaperBuffer {
    fn drop(&mut self) {
        self.in_use.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

pub(crate) const ARCH: Arch = Arch::Cpu(CpuIsa::Generic);

impl Buffer for PaperBuffer {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn address(&self) -> u64 {
        self.words.as_ptr() as u64
    }
    fn len(&self) -> usize {
        self.bytes
    }
}

impl Module for PaperModule {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn kernel(&self) -> &Kernel {
        &self.kernel
    }
}

impl PaperCompiler {
    fn note(&self, what: &[u8]) {
        if let Some(notes) = &mut *self.notes.lock().unwrap() {
            notes.write_all(what).expect("a writable folder");
        }
    }
}

impl Compiler for PaperCompiler {
    fn id(&self) -> &CompilerId {
        &self.id
    }
    fn compile(&self, source: &Source) -> RuntimeResult<(Vec<u8>, Facts)> {
        self.note(b"c");
        let number = self.compiled.fetch_add(1, Ordering::Relaxed);
        self.going_on.fetch_add(1, Ordering::Relaxed);
        // Some take half as long again as others.
        let ms = self.takes_ms.load(Ordering::Relaxed) * (4 + number * 7 % 3) / 4;
        std::thread::sleep(std::time::Duration::from_millis(ms as u64));
        self.going_on.fetch_sub(1, Ordering::Relaxed);
        if self.refused.contains(&source.name) {
            return Err(RuntimeError::Compile {
                compiler: self.id.to_string(),
                kernel: source.name.clone(),
                log: "error: refused on paper".into(),
            });
        }
        Ok((source.text.clone().into_bytes(), Facts::default()))
    }
}

impl Device for PaperDevice {
    fn fingerprint(&self) -> &DeviceFingerprint {
        &self.fingerprint
    }
    fn reading(&self) -> Reading {
        self.reading.lock().unwrap().clone()
    }
    fn compiler(&self) -> RuntimeResult<Arc<dyn Compiler>> {
        Ok(self.compiler.clone())
    }
    fn load(&self, artifact: &Artifact) -> RuntimeResult<Arc<dyn Module>> {
        std::thread::sleep(std::time::Duration::from_millis(self.loads_ms.load(Ordering::Relaxed) as u64));
        let kernel = artifact.recipe.kernel;
        // Other sizes have schedules that nothing is prescribed for.
        let usual = Behaviour::Right { us: 130.0 };
        let behaviour = self.behaviours.get(&kernel.schedule).copied().unwrap_or(usual);
        if behaviour == Behaviour::DoesNotLoad {
            return Err(self.fault("load"));
        }
        Ok(Arc::new(PaperModule { kernel, behaviour }))
    }
    unsafe fn launch(&self, module: &dyn Module, _: &LaunchPlan, args: Args<'_>, _: Stream) -> RuntimeResult<()> {
        let Args::Forward(a) = args else { unreachable!("dense problems alone are tuned here") };
        let module = *module.as_any().downcast_ref::<PaperModule>().expect("a paper module");
        if let Some(captured) = &mut *self.capturing.lock().unwrap() {
            captured.push((module, *a));
            return Ok(());
        }
        self.run(module, a, false)
    }
    fn has_graphs(&self) -> bool {
        self.graphs.load(Ordering::Relaxed)
    }
    fn capture(&self, _: Stream, work: &mut dyn FnMut() -> RuntimeResult<()>) -> RuntimeResult<Box<dyn Graph>> {
        assert!(self.has_graphs(), "nobody asks a device without graphs for one");
        *self.capturing.lock().unwrap() = Some(Vec::new());
        let done = work();
        let captured = self.capturing.lock().unwrap().take().expect("it was being captured");
        done?;
        Ok(Box::new(PaperGraph { device: self.me.upgrade().expect("alive"), captured }))
    }
    fn alloc(&self, bytes: usize) -> RuntimeResult<Box<dyn Buffer>> {
        let in_use = self.in_use.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.most_in_use.fetch_max(in_use, Ordering::Relaxed);
        Ok(Box::new(PaperBuffer { words: vec![0; bytes.div_ceil(8) + 2], bytes, in_use: self.in_use.clone() }))
    }
    fn upload(&self, to: &dyn Buffer, bytes: &[u8]) -> RuntimeResult<()> {
        assert!(bytes.len() <= to.len());
        // SAFETY: the buffer has as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.address() as *mut u8, bytes.len()) };
        Ok(())
    }
    fn download(&self, from: &dyn Buffer, bytes: &mut [u8], _: Stream) -> RuntimeResult<()> {
        assert!(bytes.len() <= from.len());
        // SAFETY: the buffer has as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.address() as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
    fn fill(&self, buffer: &dyn Buffer, byte: u8) -> RuntimeResult<()> {
        // SAFETY: the buffer has as many bytes.
        unsafe { std::ptr::write_bytes(buffer.address() as *mut u8, byte, buffer.len()) };
        Ok(())
    }
    fn stream(&self) -> Stream {
        Stream::default()
    }
    fn synchronize(&self, _: Stream) -> RuntimeResult<()> {
        Ok(())
    }
    fn flush_cache(&self, _: Stream) -> RuntimeResult<()> {
        Ok(())
    }
    fn time_us(&self, _: Stream, work: &mut dyn FnMut() -> RuntimeResult<()>) -> RuntimeResult<f64> {
        work()?;
        Ok(*self.last_us.lock().unwrap())
    }
}

/// Launches to be repeated.
struct PaperGraph {
    device: Arc<PaperDevice>,
    captured: Vec<(PaperModule, ForwardArgs)>,
}

impl Graph for PaperGraph {
    unsafe fn replay(&self, _: Stream) -> RuntimeResult<()> {
        self.captured.iter().try_for_each(|(module, args)| self.device.run(*module, args, true))
    }
}

impl PaperDevice {
    fn run(&self, module: PaperModule, a: &ForwardArgs, replayed: bool) -> RuntimeResult<()> {
        self.compiler.note(b"l");
        let n = self.launches.fetch_add(1, Ordering::Relaxed);
        self.rows.lock().unwrap().push((module.kernel.schedule, a.batch * a.heads * a.q_len, a.kv_len));
        let (mut us, mut by, mut rows) = (50.0, 0.0, a.q_len);
        match module.behaviour {
            Behaviour::Right { us: own } => us = own,
            Behaviour::Noisy => us = if (n.wrapping_mul(0x9E37_79B9) >> 13).is_multiple_of(2) { 50.0 } else { 200.0 },
            Behaviour::Unsteady { us: least } => us = least * (1.0 + (n * 7919 % 11) as f64 / 30.0),
            Behaviour::DoesNotLaunch => return Err(self.fault("launch")),
            Behaviour::Wrong { by: own } => by = own,
            Behaviour::SkipsTheLastRow => rows -= 1,
            Behaviour::WrongWhenLarge if a.kv_len > 400 => by = 0.5,
            Behaviour::UnrepeatableAfter { launches, us: own } => {
                us = own;
                let own = self.rows.lock().unwrap().iter().filter(|r| r.0 == module.kernel.schedule).count();
                by = if own > launches { (n % 7) as f32 * 1e-7 } else { 0.0 };
            }
            Behaviour::Unrepeatable => by = (n % 7) as f32 * 1e-7,
            Behaviour::Replayed { us: own } => us = if replayed { own } else { 130.0 },
            Behaviour::WrongWhenReplayed if replayed => by = 0.5,
            _ => {}
        }
        // A little noise, the same in every run of the test.
        let noise = if self.exact.load(Ordering::Relaxed) { 0.0 } else { 0.002 * (n * 7919 % 10) as f64 };
        *self.last_us.lock().unwrap() = us * (1.0 + noise);
        let question = Key::of(&question(a));
        let known = self.answers.lock().unwrap().get(&question).cloned();
        let answer = known.unwrap_or_else(|| Arc::new(attention(a)));
        write(a, &answer, rows, by);
        self.answers.lock().unwrap().insert(question, answer);
        Ok(())
    }

    fn fault(&self, call: &'static str) -> RuntimeError {
        RuntimeError::Device {
            call,
            device: self.fingerprint.name.clone(),
            message: "prescribed".into(),
            remedy: "none",
        }
    }
}

/// A row of a tensor of the arguments, which is f32 host memory with rows of [`DIM`] values.
fn row(base: u64, strides: [i64; 3], [b, h, s]: [i32; 3]) -> &'static mut [f32] {
    let elements = b as i64 * strides[0] + h as i64 * strides[1] + s as i64 * strides[2];
    // SAFETY: the launch's caller promises live tensors; nothing else uses them during the launch.
    unsafe { std::slice::from_raw_parts_mut((base as *mut f32).offset(elements as isize), DIM) }
}

/// Everything that the answer depends on.
fn question(a: &ForwardArgs) -> Vec<u8> {
    let mut bytes = bytemuck::bytes_of(&[a.batch, a.heads, a.kv_heads, a.q_len, a.kv_len]).to_vec();
    let tensors = [
        (a.q, a.q_stride, a.heads, a.q_len),
        (a.k, a.k_stride, a.kv_heads, a.kv_len),
        (a.v, a.v_stride, a.kv_heads, a.kv_len),
    ];
    for (base, strides, heads, rows) in tensors {
        for (b, h) in (0..a.batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            (0..rows).for_each(|s| bytes.extend_from_slice(bytemuck::cast_slice(row(base, strides, [b, h, s]))));
        }
    }
    bytes
}

/// Causal attention in f64.
fn attention(a: &ForwardArgs) -> Answer {
    let group = a.heads / a.kv_heads;
    let mut answer = Answer { o: Vec::new(), lse: Vec::new() };
    for (b, h) in (0..a.batch).flat_map(|b| (0..a.heads).map(move |h| (b, h))) {
        for i in 0..a.q_len {
            let q = row(a.q, a.q_stride, [b, h, i]);
            let live = Mask::Causal.live(i as u64, a.q_len as u64, a.kv_len as u64);
            let dot = |k: &[f32]| q.iter().zip(k).map(|(x, y)| *x as f64 * *y as f64).sum::<f64>() * a.scale as f64;
            let scores: Vec<f64> = live.clone().map(|j| dot(row(a.k, a.k_stride, [b, h / group, j as i32]))).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
            let mut o = [0.0f64; DIM];
            for (j, s) in live.zip(&scores) {
                let v = row(a.v, a.v_stride, [b, h / group, j as i32]);
                o.iter_mut().zip(v).for_each(|(o, v)| *o += (s - top).exp() / sum * *v as f64);
            }
            answer.o.extend(o.map(|o| o as f32));
            answer.lse.push(if scores.is_empty() { f64::NEG_INFINITY } else { top + sum.ln() } as f32);
        }
    }
    answer
}

/// Writes the first `rows` rows of every head, plus `by`.
fn write(a: &ForwardArgs, answer: &Answer, rows: i32, by: f32) {
    for (b, h) in (0..a.batch).flat_map(|b| (0..a.heads).map(move |h| (b, h))) {
        for i in 0..rows {
            let index = ((b * a.heads + h) * a.q_len + i) as usize;
            let out = row(a.o, a.o_stride, [b, h, i]);
            out.iter_mut().zip(&answer.o[index * DIM..]).for_each(|(x, o)| *x = o + by);
            if a.lse != 0 {
                // SAFETY: the LSE has a value for every row.
                unsafe { *(a.lse as *mut f32).add(index) = answer.lse[index] };
            }
        }
    }
}

const DIM: usize = 16;

pub(crate) fn problem() -> Problem {
    Problem::forward(DType::F32, DIM as u32, MaskKind::CAUSAL).unwrap()
}

pub(crate) fn job() -> Job {
    let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 40, kv_len: 450, mask: Mask::Causal };
    Job::new(problem(), shape)
}

/// Every schedule of the job's space, the default first.
pub(crate) fn schedules() -> Vec<Schedule> {
    let bucket = ShapeBucket::of(&job().shape);
    let default = Schedule::default_for(Family::ForwardCpu, &problem(), ARCH, &bucket).unwrap();
    let space = Schedule::space(Family::ForwardCpu, &problem(), ARCH);
    std::iter::once(default).chain(space.into_iter().filter(|s| *s != default)).collect()
}

/// A device whose default takes 100 us and whose other schedules take 130, but for the given ones.
pub(crate) fn device(special: &[(usize, Behaviour)]) -> (Arc<dyn Device>, Arc<PaperCompiler>) {
    let (device, compiler) = paper(special);
    (device, compiler)
}

pub(crate) fn paper(special: &[(usize, Behaviour)]) -> (Arc<PaperDevice>, Arc<PaperCompiler>) {
    let schedules = schedules();
    let mut behaviours: HashMap<_, _> = schedules.iter().map(|s| (*s, Behaviour::Right { us: 130.0 })).collect();
    behaviours.insert(schedules[0], Behaviour::Right { us: 100.0 });
    behaviours.extend(special.iter().map(|(i, b)| (schedules[*i], *b)));
    let refused = behaviours.iter().filter(|(_, b)| **b == Behaviour::DoesNotCompile);
    let name = |s: &Schedule| Kernel { problem: problem(), schedule: *s, arch: ARCH }.name();
    let compiler = Arc::new(PaperCompiler {
        id: CompilerId { name: "papercc".into(), version: "1".into() },
        refused: refused.map(|(s, _)| name(s)).collect(),
        compiled: AtomicUsize::new(0),
        takes_ms: AtomicUsize::new(0),
        going_on: AtomicUsize::new(0),
        notes: Mutex::default(),
    });
    let fingerprint = DeviceFingerprint {
        arch: ARCH,
        name: "paper".into(),
        units: 2,
        memory_bytes: 1 << 30,
        cache_bytes: 1 << 20,
        driver: "1".into(),
    };
    let device = Arc::new_cyclic(|me| PaperDevice {
        fingerprint,
        compiler: compiler.clone(),
        behaviours,
        last_us: Mutex::new(0.0),
        launches: AtomicUsize::new(0),
        rows: Mutex::default(),
        in_use: Arc::default(),
        most_in_use: AtomicUsize::new(0),
        graphs: AtomicBool::new(true),
        reading: Mutex::default(),
        exact: AtomicBool::new(false),
        loads_ms: AtomicUsize::new(0),
        capturing: Mutex::default(),
        me: me.clone(),
        answers: Mutex::default(),
    });
    (device, compiler)
}

/// A template set with text of its own for the family, so that these tests do not depend on the real kernel.
pub(crate) fn templates() -> &'static TemplateSet {
    static SET: OnceLock<TemplateSet> = OnceLock::new();
    SET.get_or_init(|| {
        let text = "/* @{ header }@ */ @{ block_q }@ @{ block_kv }@ @{ unroll_q }@ @{ unroll_kv }@\n";
        TemplateSet::from_files([(Family::ForwardCpu.template().to_owned(), text.to_owned())].into()).unwrap()
    })
}
