//! Whole jobs on a device that computes plain attention in Rust and whose times, faults and lies are prescribed.

use super::measure::noise;
use super::*;
use crate::decide::Rounds;
use flashtune_cache::{Artifact, CacheDir, CompilerId, DeviceFingerprint, Facts, Layers, MatchQuality, Validity};
use flashtune_cache::{Conditions, Key};
use flashtune_codegen::abi::ForwardArgs;
use flashtune_codegen::{Arch, CpuIsa, DType, Family, Launch, Mask, MaskKind, Problem, Shape, Source};
use flashtune_codegen::{Kernel, Schedule};
use flashtune_runtime::{Buffer, Compiler, Device, Error as RuntimeError, Module, Stream};
use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

type RuntimeResult<T> = std::result::Result<T, RuntimeError>;

/// What a schedule does on the paper device.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Behaviour {
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
    /// Right, and takes either half or double the time of the default.
    Noisy,
}

struct PaperDevice {
    fingerprint: DeviceFingerprint,
    compiler: Arc<PaperCompiler>,
    behaviours: HashMap<Schedule, Behaviour>,
    /// Time of what was launched last.
    last_us: Mutex<f64>,
    launches: AtomicUsize,
    /// Answers by the hash of the question, because the same one is asked again and again.
    answers: Mutex<HashMap<Key, Arc<Answer>>>,
}

/// O and LSE, contiguous.
struct Answer {
    o: Vec<f32>,
    lse: Vec<f32>,
}

struct PaperCompiler {
    id: CompilerId,
    /// Kernel names that are refused.
    refused: Vec<String>,
    compiled: AtomicUsize,
}

struct PaperModule {
    kernel: Kernel,
    behaviour: Behaviour,
}

struct PaperBuffer(Vec<u64>, usize);

const ARCH: Arch = Arch::Cpu(CpuIsa::Generic);

impl Buffer for PaperBuffer {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }
    fn len(&self) -> usize {
        self.1
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

impl Compiler for PaperCompiler {
    fn id(&self) -> &CompilerId {
        &self.id
    }
    fn compile(&self, source: &Source) -> RuntimeResult<(Vec<u8>, Facts)> {
        self.compiled.fetch_add(1, Ordering::Relaxed);
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
    fn compiler(&self) -> RuntimeResult<Arc<dyn Compiler>> {
        Ok(self.compiler.clone())
    }
    fn load(&self, artifact: &Artifact) -> RuntimeResult<Arc<dyn Module>> {
        let kernel = artifact.recipe.kernel;
        let behaviour = self.behaviours[&kernel.schedule];
        if behaviour == Behaviour::DoesNotLoad {
            return Err(self.fault("load"));
        }
        Ok(Arc::new(PaperModule { kernel, behaviour }))
    }
    unsafe fn launch(&self, module: &dyn Module, _: &Launch, a: &ForwardArgs, _: Stream) -> RuntimeResult<()> {
        let n = self.launches.fetch_add(1, Ordering::Relaxed);
        let module = module.as_any().downcast_ref::<PaperModule>().expect("a paper module");
        let (mut us, mut by, mut rows) = (50.0, 0.0, a.q_len);
        match module.behaviour {
            Behaviour::Right { us: own } => us = own,
            Behaviour::Noisy => us = if (n.wrapping_mul(0x9E37_79B9) >> 13).is_multiple_of(2) { 50.0 } else { 200.0 },
            Behaviour::DoesNotLaunch => return Err(self.fault("launch")),
            Behaviour::Wrong { by: own } => by = own,
            Behaviour::SkipsTheLastRow => rows -= 1,
            Behaviour::WrongWhenLarge if a.kv_len > 400 => by = 0.5,
            Behaviour::Unrepeatable => by = (n % 7) as f32 * 1e-7,
            _ => {}
        }
        // A little noise, the same in every run of the test.
        *self.last_us.lock().unwrap() = us * (1.0 + 0.002 * (n * 7919 % 10) as f64);
        let question = Key::of(&question(a));
        let known = self.answers.lock().unwrap().get(&question).cloned();
        let answer = known.unwrap_or_else(|| Arc::new(attention(a)));
        write(a, &answer, rows, by);
        self.answers.lock().unwrap().insert(question, answer);
        Ok(())
    }
    fn alloc(&self, bytes: usize) -> RuntimeResult<Box<dyn Buffer>> {
        Ok(Box::new(PaperBuffer(vec![0; bytes.div_ceil(8) + 2], bytes)))
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

impl PaperDevice {
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

fn problem() -> Problem {
    Problem::forward(DType::F32, DIM as u32, MaskKind::CAUSAL).unwrap()
}

fn job() -> Job {
    let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 40, kv_len: 450, mask: Mask::Causal };
    Job::new(problem(), shape)
}

/// Every schedule of the job's space, the default first.
fn schedules() -> Vec<Schedule> {
    let bucket = ShapeBucket::of(&job().shape);
    let default = Schedule::default_for(Family::ForwardCpu, &problem(), ARCH, &bucket).unwrap();
    let space = Schedule::space(Family::ForwardCpu, &problem(), ARCH);
    std::iter::once(default).chain(space.into_iter().filter(|s| *s != default)).collect()
}

/// A device whose default takes 100 us and whose other schedules take 130, but for the given ones.
fn device(special: &[(usize, Behaviour)]) -> (Arc<dyn Device>, Arc<PaperCompiler>) {
    let (device, compiler) = paper(special);
    (device, compiler)
}

fn paper(special: &[(usize, Behaviour)]) -> (Arc<PaperDevice>, Arc<PaperCompiler>) {
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
    });
    let fingerprint = DeviceFingerprint {
        arch: ARCH,
        name: "paper".into(),
        units: 2,
        memory_bytes: 1 << 30,
        cache_bytes: 1 << 20,
        driver: "1".into(),
    };
    let device = PaperDevice {
        fingerprint,
        compiler: compiler.clone(),
        behaviours,
        last_us: Mutex::new(0.0),
        launches: AtomicUsize::new(0),
        answers: Mutex::default(),
    };
    (Arc::new(device), compiler)
}

/// A template set with text of its own for the family, so that these tests do not depend on the real kernel.
fn templates() -> &'static TemplateSet {
    static SET: OnceLock<TemplateSet> = OnceLock::new();
    SET.get_or_init(|| {
        let text = "/* @{ header }@ */ @{ block_q }@ @{ block_kv }@ @{ unroll_q }@ @{ unroll_kv }@\n";
        TemplateSet::from_files([(Family::ForwardCpu.template().to_owned(), text.to_owned())].into()).unwrap()
    })
}

struct Fixture {
    _tmp: tempfile::TempDir,
    dir: CacheDir,
}

fn fixture() -> Fixture {
    let tmp = tempfile::tempdir().unwrap();
    let dir = CacheDir::at(tmp.path());
    Fixture { dir, _tmp: tmp }
}

impl Fixture {
    fn tune(&self, device: &Arc<dyn Device>, job: &Job) -> Result<Outcome> {
        tune(&mut Runner::in_this_process(device.clone()), templates(), &self.dir, job, &())
    }

    fn store(&self) -> Store {
        Store::open_within(&self.dir, Duration::from_secs(9)).unwrap()
    }
}

fn failure(outcome: &Outcome, schedule: Schedule) -> Option<(Stage, String)> {
    match &outcome.trials.iter().find(|t| t.schedule == schedule)?.result {
        TrialResult::Failed { stage, reason } => Some((*stage, reason.clone())),
        TrialResult::Timed { .. } => None,
    }
}

#[test]
fn the_fastest_right_schedule_wins_over_faster_wrong_ones() {
    let special = [
        (1, Behaviour::Wrong { by: 0.01 }),
        (2, Behaviour::SkipsTheLastRow),
        (3, Behaviour::WrongWhenLarge),
        (4, Behaviour::Unrepeatable),
        (5, Behaviour::DoesNotCompile),
        (6, Behaviour::DoesNotLoad),
        (7, Behaviour::DoesNotLaunch),
        (8, Behaviour::Right { us: 80.0 }),
    ];
    let (device, _) = device(&special);
    let f = fixture();
    let outcome = f.tune(&device, &job()).unwrap();
    let all = schedules();
    assert_eq!(outcome.record.schedule, all[8]);
    let stages: Vec<_> = (1..8).map(|i| failure(&outcome, all[i]).map(|(stage, _)| stage)).collect();
    let check = Some(Stage::Check);
    assert_eq!(stages, [check, check, check, check, Some(Stage::Compile), Some(Stage::Load), check]);
    assert_eq!(outcome.trials.len(), all.len());
    let record = &outcome.record;
    assert!((1.2..1.3).contains(&record.gain_over_default().unwrap()), "{record:?}");
    assert!(record.finalists.len() == 3 && record.winner().unwrap().samples > 10);
    assert_eq!((record.provenance.space as usize, record.provenance.timed as usize), (all.len(), all.len() - 7));
    assert!(record.provenance.unfused_us.is_some());
    // What was found is in the journal, and readers see it.
    assert_eq!(f.store().trials(&record.key).unwrap().len(), all.len());
    let layers = Layers::open(&f.dir, &[], None).unwrap();
    let needed = Validity::new(ARCH, templates());
    let found = layers.find(&needed, device.fingerprint(), &problem(), &record.key.bucket);
    assert_eq!((found.matches[0].quality, &*found.matches[0].record), (MatchQuality::Exact, record));
    assert_eq!(layers.artifact(&record.artifact).unwrap().0.recipe.kernel.schedule, all[8]);
}

#[test]
fn an_advantage_within_the_noise_leaves_the_default() {
    let (device, _) = device(&[(3, Behaviour::Right { us: 99.6 })]);
    let outcome = fixture().tune(&device, &job()).unwrap();
    assert_eq!(outcome.record.schedule, schedules()[0]);
    assert!(outcome.record.winner().unwrap().is_default);
}

#[test]
fn when_noise_hides_who_is_faster_nothing_is_stored_and_the_reason_is_told() {
    let (device, _) = device(&[(2, Behaviour::Noisy)]);
    let f = fixture();
    let e = f.tune(&device, &job()).unwrap_err();
    let text = e.to_string();
    assert!(matches!(e, Error::Noise { .. }), "{text}");
    assert!(text.contains("300 rounds") && text.contains('%') && text.contains("nothing was stored"), "{text}");
    assert!(f.store().records().unwrap().is_empty() && !f.store().snapshot_path().exists());
    // What was measured is known all the same.
    let key =
        RecordKey { device: device.fingerprint().clone(), problem: problem(), bucket: ShapeBucket::of(&job().shape) };
    assert_eq!(f.store().trials(&key).unwrap().len(), schedules().len());
}

#[test]
fn a_disturbed_device_is_trusted_only_where_the_times_are_steady() {
    let rounds = |spread: f64| Rounds((0..20).map(|i| vec![100.0, 60.0 + spread * (i % 7) as f64]).collect());
    let foreign = Conditions { foreign_processes: Some(1), ..Conditions::default() };
    let hot = Conditions { throttling: vec!["thermal slowdown".into()], ..Conditions::default() };
    let why = |rounds: &Rounds, conditions: &Conditions| noise(rounds, 2, 0, 1, conditions);
    for disturbed in [&foreign, &hot] {
        assert_eq!(why(&rounds(0.1), disturbed), None);
        let reason = why(&rounds(3.0), disturbed).unwrap();
        assert!(reason.contains(&disturbed.disturbance().unwrap()), "{reason}");
    }
    assert_eq!(why(&rounds(3.0), &Conditions::default()), None, "a clear winner");
    // Cut short by the budget: the default has won, and that is no noise.
    assert_eq!(noise(&Rounds(vec![vec![100.0, 30.0]; 3]), 2, 0, 0, &Conditions::default()), None);
}

#[test]
fn a_job_is_answered_from_the_store_until_something_that_matters_changes() {
    let (paper, compiler) = device(&[]);
    let f = fixture();
    let first = f.tune(&paper, &job()).unwrap();
    let compiled = compiler.compiled.load(Ordering::Relaxed);
    assert!(!first.cached && compiled > 0);
    let again = f.tune(&paper, &job()).unwrap();
    assert!(again.cached && again.trials.is_empty());
    assert_eq!(again.record, first.record);
    // Another shape of the same bucket is the same question.
    let mut near = job();
    near.shape.kv_len = 440;
    assert!(f.tune(&paper, &near).unwrap().cached);
    // Forced: measured again, but nothing is compiled again.
    let forced = f.tune(&paper, &Job { force: true, ..job() }).unwrap();
    assert!(!forced.cached && compiler.compiled.load(Ordering::Relaxed) == compiled);
    // Other templates.
    let text = "// @{ header }@ @{ block_q }@\n".to_owned();
    let other = TemplateSet::from_files([(Family::ForwardCpu.template().to_owned(), text)].into()).unwrap();
    assert!(!tune(&mut Runner::in_this_process(paper.clone()), &other, &f.dir, &job(), &()).unwrap().cached);
}

#[test]
fn a_lost_snapshot_and_a_lost_kernel_are_restored_without_tuning() {
    let (paper, compiler) = device(&[]);
    let f = fixture();
    let first = f.tune(&paper, &job()).unwrap();
    std::fs::remove_file(&first.snapshot).unwrap();
    std::fs::remove_dir_all(f.dir.artifacts_path()).unwrap();
    let compiled = compiler.compiled.load(Ordering::Relaxed);
    let again = f.tune(&paper, &job()).unwrap();
    assert!(again.cached && compiler.compiled.load(Ordering::Relaxed) == compiled + 1);
    let layers = Layers::open(&f.dir, &[], None).unwrap();
    assert!(layers.artifact(&again.record.artifact).is_some());
}

#[test]
fn when_the_default_fails_another_wins() {
    let (device, _) = device(&[(0, Behaviour::Wrong { by: 1.0 }), (2, Behaviour::Right { us: 90.0 })]);
    let outcome = fixture().tune(&device, &job()).unwrap();
    assert_eq!(outcome.record.schedule, schedules()[2]);
    assert_eq!(outcome.record.gain_over_default(), None);
}

#[test]
fn when_nothing_works_the_first_reasons_are_told_and_nothing_is_stored() {
    let all: Vec<_> = (0..schedules().len()).map(|i| (i, Behaviour::DoesNotLaunch)).collect();
    let (device, _) = device(&all);
    let f = fixture();
    let e = f.tune(&device, &job()).unwrap_err();
    let text = e.to_string();
    assert!(matches!(e, Error::NothingWorks { .. }) && text.contains("prescribed"), "{text}");
    assert_eq!(text.matches("(check)").count(), REASONS);
    assert!(f.store().records().unwrap().is_empty());
    let key =
        RecordKey { device: device.fingerprint().clone(), problem: problem(), bucket: ShapeBucket::of(&job().shape) };
    assert_eq!(f.store().trials(&key).unwrap().len(), all.len());
}

#[test]
fn without_any_time_the_default_is_still_tuned() {
    let (device, _) = device(&[(1, Behaviour::Right { us: 10.0 })]);
    let outcome = fixture().tune(&device, &Job { budget: std::time::Duration::ZERO, ..job() }).unwrap();
    assert_eq!(outcome.record.schedule, schedules()[0]);
    assert!(outcome.trials.iter().filter(|t| matches!(t.result, TrialResult::Timed { .. })).count() == 1);
}

#[test]
fn a_winner_whose_kernel_cannot_be_kept_is_an_error() {
    let f = fixture();
    f.dir.create().unwrap();
    // A file where the folder of kernels should be.
    std::fs::write(f.dir.artifacts_path(), b"").unwrap();
    let e = f.tune(&device(&[]).0, &job()).unwrap_err();
    assert!(matches!(e, Error::Cache(flashtune_cache::Error::Io { .. })), "{e}");
    assert!(!f.dir.snapshot_path().exists());
}

#[test]
fn jobs_that_cannot_be_timed_are_refused() {
    let (device, _) = device(&[]);
    let f = fixture();
    let refused = |change: fn(&mut Job)| {
        let mut job = job();
        change(&mut job);
        f.tune(&device, &job).unwrap_err().to_string()
    };
    assert!(refused(|j| j.shape.q_len = 0).contains("nothing to compute"));
    assert!(refused(|j| j.shape.kv_len = 0).contains("nothing to compute"));
    assert!(refused(|j| j.shape.mask = Mask::Full).contains("mask"));
    assert!(refused(|j| (j.shape.heads, j.shape.kv_heads) = (3, 2)).contains("heads = 3"));
    assert!(refused(|j| j.problem.head_dim_v = 17).contains("head_dim_v"));
}

#[test]
fn the_observer_sees_the_phases_in_order_and_every_failure() {
    #[derive(Default)]
    struct Log(Mutex<(Vec<Phase>, usize, usize)>);
    impl Observer for Log {
        fn event(&self, event: &Event<'_>) {
            let mut log = self.0.lock().unwrap();
            match event {
                Event::Phase { phase, .. } => log.0.push(*phase),
                Event::Failed { .. } => log.1 += 1,
                Event::Winner(_) => log.2 += 1,
                _ => {}
            }
        }
    }
    let (device, _) = device(&[(1, Behaviour::DoesNotCompile), (2, Behaviour::Wrong { by: 1.0 })]);
    let f = fixture();
    let log = Log::default();
    tune(&mut Runner::in_this_process(device.clone()), templates(), &f.dir, &job(), &log).unwrap();
    let (phases, failures, winners) = log.0.into_inner().unwrap();
    let expected = [Phase::Space, Phase::Compile, Phase::Check, Phase::Race, Phase::Final, Phase::Publish];
    assert_eq!((phases.as_slice(), failures, winners), (&expected[..], 2, 1));
}

/// Ends the job at an event, as abruptly as a process can end itself from within.
struct Kill(AtomicUsize);

impl Observer for Kill {
    fn event(&self, _: &Event<'_>) {
        if self.0.fetch_sub(1, Ordering::SeqCst) == 1 {
            panic!("killed");
        }
    }
}

#[test]
fn a_job_that_was_killed_anywhere_repeats_nothing() {
    let special =
        [(2, Behaviour::DoesNotCompile), (3, Behaviour::Wrong { by: 0.1 }), (4, Behaviour::Right { us: 80.0 })];
    let launches = |device: &Arc<PaperDevice>| device.launches.load(Ordering::Relaxed);
    let run = |device: &Arc<PaperDevice>, f: &Fixture, observer: &dyn Observer| {
        let mut runner = Runner::in_this_process(device.clone());
        let tuned = || tune(&mut runner, templates(), &f.dir, &job(), observer);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(tuned))
    };
    let (whole, compiler) = paper(&special);
    let outcome = run(&whole, &fixture(), &()).unwrap().unwrap();
    let compiled = compiler.compiled.load(Ordering::Relaxed);
    // One candidate's launches: what can be lost at most, and what is seen of the unfused.
    let of_one = launches(&whole) / schedules().len();
    for at in (3..400).step_by(23) {
        let (device, compiler) = paper(&special);
        let f = fixture();
        if let Ok(finished) = run(&device, &f, &Kill(AtomicUsize::new(at))) {
            finished.unwrap();
            break;
        }
        let resumed = run(&device, &f, &()).unwrap().unwrap();
        assert_eq!(resumed.record.schedule, outcome.record.schedule, "killed at {at}");
        assert_eq!(resumed.trials.len(), outcome.trials.len());
        let total = launches(&device);
        assert!(total <= launches(&whole) + of_one, "killed at {at}: {total} launches, {} at once", launches(&whole));
        // On every core one compilation may have been lost.
        let again = compiler.compiled.load(Ordering::Relaxed) - compiled;
        assert!(again <= std::thread::available_parallelism().unwrap().get(), "killed at {at}: {again} compiled again");
    }
}

#[test]
fn what_neighbours_found_is_tried_first_and_what_never_compiled_is_not_tried_again() {
    let count = schedules().len();
    let special = [(count - 1, Behaviour::Right { us: 60.0 }), (1, Behaviour::DoesNotCompile)];
    let (device, _) = device(&special);
    let f = fixture();
    assert_eq!(f.tune(&device, &job()).unwrap().record.schedule, schedules()[count - 1]);
    let mut near = Job { max_trials: count / 2, ..job() };
    near.shape.kv_len = 250;
    let outcome = f.tune(&device, &near).unwrap();
    let tried: Vec<Schedule> = outcome.trials.iter().map(|t| t.schedule).collect();
    // The default, then the neighbour's winner; it is measured like all others.
    assert_eq!(tried[..2], [schedules()[0], schedules()[count - 1]]);
    assert_eq!(outcome.record.schedule, schedules()[count - 1]);
    assert!(!tried.contains(&schedules()[1]), "it never compiled");
    // Whoever forces a job may have repaired it.
    let forced = f.tune(&device, &Job { force: true, max_trials: count, ..near }).unwrap();
    assert_eq!(failure(&forced, schedules()[1]).map(|(stage, _)| stage), Some(Stage::Compile));
}
