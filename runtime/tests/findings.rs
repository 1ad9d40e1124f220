//! What is kept of masks for later launches, before a CUDA driver that runs nothing and writes down what it is asked
//! (`testdata/driver.c`): who finds, who waits, who gives memory back, and behind what.

use flashtune_cache::{Artifact, CompilerId, Facts, Recipe};
use flashtune_codegen::abi::{ABI_VERSION, ForwardArgs, MappedArgs};
use flashtune_codegen::score::{Program, ProgramRef};
use flashtune_codegen::{DType, Kernel, Mask, MaskKind, Problem, Schedule, Shape, ShapeBucket, Sm90Schedule};
use flashtune_runtime::{CudaDevice, Device, Findings, Module, SideTable, Stream, cuda};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::CString;
use std::mem::offset_of;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

/// The driver; absent on a machine that has a real one.
static DRIVER: LazyLock<Option<Library>> = LazyLock::new(|| {
    if cuda::driver_present() {
        println!("skipped: this machine has a CUDA driver");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let (source, library) =
        (concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/driver.c"), folder.path().join("driver.so"));
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut words = cc.split_whitespace();
    let mut cc = std::process::Command::new(words.next().unwrap());
    cc.args(words).args([
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pthread",
        "-Wl,-soname,libcuda.so.1",
        "-o",
    ]);
    assert!(cc.arg(&library).arg(source).status().unwrap().success());
    // Whoever asks for the name from now on is given this one.
    // SAFETY: the library has no constructors.
    let driver = unsafe { Library::open(Some(&library), RTLD_NOW | RTLD_GLOBAL) }.unwrap();
    // The kernels here write no residual, so `found` follows arguments that end before its fields.
    let residual = size_of::<ForwardArgs>() - offset_of!(ForwardArgs, residual);
    // SAFETY: the types are those of the source, here and below.
    unsafe { driver.get::<extern "C" fn(usize)>(b"fake_found_at").unwrap()(offset_of!(MappedArgs, found) - residual) };
    Some(driver)
});

/// The driver for one test at a time, in its usual state.
struct Fake {
    driver: &'static Library,
    _alone: MutexGuard<'static, ()>,
}

impl Fake {
    fn new() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let driver = DRIVER.as_ref()?;
        let this = Self { driver, _alone: ALONE.lock().unwrap_or_else(|e| e.into_inner()) };
        this.state(false, false, true);
        this.failing("");
        this.log();
        Some(this)
    }

    /// Whether streams are captured, events have come to pass, and streams have identifiers.
    fn state(&self, captured: bool, past: bool, ids: bool) {
        // SAFETY: as above.
        let set = unsafe { self.driver.get::<extern "C" fn(i32, i32, i32)>(b"fake_state") }.unwrap();
        set(captured.into(), past.into(), ids.into());
    }

    fn failing(&self, kernel: &str) {
        let name = CString::new(kernel).unwrap();
        // SAFETY: as above; the name is copied.
        unsafe { self.driver.get::<extern "C" fn(*const i8)>(b"fake_failing") }.unwrap()(name.as_ptr().cast());
    }

    /// What the driver was asked since the last time, a line for each.
    fn log(&self) -> Vec<String> {
        let mut text = vec![0u8; 1 << 18];
        // SAFETY: as above.
        let told = unsafe { self.driver.get::<extern "C" fn(*mut u8, usize) -> usize>(b"fake_log") }.unwrap();
        let n = told(text.as_mut_ptr(), text.len());
        String::from_utf8(text[..n].to_vec()).unwrap().lines().map(str::to_owned).collect()
    }
}

/// A kernel of `forward/sm90` for a mask, loaded, and a call of it.
struct Call {
    device: Arc<dyn Device>,
    module: Arc<dyn Module>,
    shape: Shape,
    table: SideTable,
}

const DILATED: &str = "mask = (q - kv) % 7 == 0;";
/// The ends of its runs come in no order.
const RUNS: &str = "mask = kv <= abs(q - 100) + 40;";
const A: Stream = Stream(21);
const B: Stream = Stream(22);

impl Call {
    fn new(mask: &str, block_kv: u32) -> Self {
        Self::on(0, mask, block_kv, MaskKind::FULL)
    }

    fn on(ordinal: usize, mask: &str, block_kv: u32, sides: MaskKind) -> Self {
        let device: Arc<dyn Device> = CudaDevice::open(ordinal).unwrap();
        let flashtune_codegen::Arch::Sm(sm) = device.fingerprint().arch else { unreachable!() };
        let mut problem = Problem::forward(DType::Bf16, 128, sides).unwrap();
        let bucket = ShapeBucket { parallel: 4, group: 1, q_len: 1024, kv_len: 1024, ..Default::default() };
        let program = ProgramRef::new(Program::parse(mask).unwrap());
        problem.program = Some(program);
        let mut s = Sm90Schedule::default_for(&problem, sm, &bucket);
        s.block_kv = block_kv;
        let kernel = Kernel { problem, schedule: Schedule::Sm90(s), arch: device.fingerprint().arch };
        let compiler = CompilerId { name: "none".into(), version: "0".into() };
        let recipe = Recipe { kernel, templates: "paper".into(), options: vec![], compiler, abi: ABI_VERSION };
        // A header without segments and sections: this driver looks at nothing.
        let bytes = [&b"\x7fELF\x02\x01\x01"[..], &[0; 57]].concat();
        let args = flashtune_codegen::abi::ArgsLayout::of(&recipe.kernel);
        let artifact = Artifact { recipe, args, entry: "kernel".into(), facts: Facts::default(), bytes };
        let module = device.load(&artifact).unwrap();
        let mask = if sides == MaskKind::CAUSAL { Mask::Causal } else { Mask::Full };
        let shape = Shape { batch: 1, heads: 4, kv_heads: 4, q_len: 1000, kv_len: 1000, mask };
        let table = SideTable::new(&program, &shape, &Default::default()).unwrap();
        Self { device, module, shape, table }
    }

    fn launch(&self, findings: Option<&dyn Findings>, stream: Stream) -> flashtune_runtime::Result<()> {
        let side = self.table.args();
        let strides = [4 * 1000 * 128, 1000 * 128, 128];
        let args = ForwardArgs {
            q: 0x10000,
            k: 0x20000,
            v: 0x30000,
            o: 0x40000,
            q_stride: strides,
            k_stride: strides,
            v_stride: strides,
            o_stride: strides,
            batch: 1,
            heads: 4,
            kv_heads: 4,
            q_len: 1000,
            kv_len: 1000,
            scale: 1.0,
            side: std::ptr::from_ref(&side) as u64,
            ..bytemuck::Zeroable::zeroed()
        };
        // SAFETY: nothing is run.
        unsafe { self.device.launch_shape_with(&*self.module, &self.shape, &args, findings, stream) }
    }

    fn findings(&self) -> Box<dyn Findings> {
        self.device.findings().expect("a CUDA device keeps what is found")
    }
}

/// The word of a line that follows another.
fn after<'a>(line: &'a str, word: &str) -> &'a str {
    line.split(' ').skip_while(|w| *w != word).nth(1).unwrap_or_else(|| panic!("no `{word}` in `{line}`"))
}

#[test]
fn without_a_block_mask_every_launch_finds_for_itself() {
    let Some(fake) = Fake::new() else { return };
    let call = Call::new(DILATED, 128);
    for _ in 0..2 {
        call.launch(None, A).unwrap();
        let log = fake.log();
        let at = after(&log[0], "take");
        let by = |name: &str| format!("launch {name} by {at} on 21");
        assert_eq!(log[1..], [by("kernel_classify"), by("kernel_gather"), by("kernel"), format!("free {at} on 21")]);
    }
}

#[test]
fn the_first_launch_finds_and_other_streams_wait_until_it_is_there() {
    let Some(fake) = Fake::new() else { return };
    for (mask, before) in [(DILATED, &["kernel_classify", "kernel_gather"][..]), (RUNS, &["kernel_runs"])] {
        let call = Call::new(mask, 128);
        let findings = call.findings();
        assert_eq!((findings.bytes(), findings.count()), (0, 0));
        fake.state(false, false, true);
        call.launch(Some(&*findings), A).unwrap();
        let log = fake.log();
        let (at, bytes) = (after(&log[0], "take").to_owned(), after(&log[0], "of").parse::<u64>().unwrap());
        let launched = |name: &str, stream: u64| format!("launch {name} by {at} on {stream}");
        let n = before.len();
        assert_eq!(log[1..=n], *before.iter().map(|name| launched(name, 21)).collect::<Vec<_>>());
        let there = after(&log[n + 1], "record").to_owned();
        let of_a = after(&log[n + 3], "record").to_owned();
        let recorded = |event: &str, stream: u64| format!("record {event} on {stream}");
        assert_eq!(log[n + 1..], [recorded(&there, 21), launched("kernel", 21), recorded(&of_a, 21)]);
        assert_eq!((findings.bytes(), findings.count()), (bytes, 1));
        // The stream that found it goes on in its own order.
        call.launch(Some(&*findings), A).unwrap();
        assert_eq!(fake.log(), [launched("kernel", 21), recorded(&of_a, 21)]);
        // Another one waits, and a third no longer.
        call.launch(Some(&*findings), B).unwrap();
        let log = fake.log();
        let of_b = after(&log[3], "record").to_owned();
        let waits = [format!("query {there}"), format!("wait {there} on 22 flags 0")];
        assert_eq!(log, [&waits[..], &[launched("kernel", 22), recorded(&of_b, 22)]].concat());
        fake.state(false, true, true);
        call.launch(Some(&*findings), Stream(23)).unwrap();
        let log = fake.log();
        assert_eq!((&log[0], &log[1]), (&format!("query {there}"), &launched("kernel", 23)));
        fake.state(false, false, true);
        call.launch(Some(&*findings), B).unwrap();
        assert_eq!(fake.log(), [launched("kernel", 22), recorded(&of_b, 22)], "it is known to be there");
        // The memory goes behind the last launch of every stream, on a stream of its own.
        drop(findings);
        let log = fake.log();
        let waited: Vec<&str> = log.iter().filter(|l| l.starts_with("wait")).map(|l| after(l, "wait")).collect();
        assert!([&there, &of_a, &of_b].iter().all(|e| waited.contains(&e.as_str())) && waited.len() == 4, "{log:?}");
        let own = after(&log[0], "on");
        assert!(!["21", "22", "23"].contains(&own));
        assert_eq!(log[4], format!("free {at} on {own}"));
        assert!(log[5..].len() == 4 && log[5..].iter().all(|l| l.starts_with("destroy")), "{log:?}");
    }
}

#[test]
fn every_geometry_is_found_once_beside_the_others() {
    let Some(fake) = Fake::new() else { return };
    let (wide, narrow) = (Call::new(DILATED, 128), Call::new(DILATED, 96));
    let causal = Call::on(0, DILATED, 128, MaskKind::CAUSAL);
    let findings = wide.findings();
    for _ in 0..2 {
        for call in [&wide, &narrow, &causal] {
            call.launch(Some(&*findings), A).unwrap();
        }
    }
    let log = fake.log();
    let count = |start: &str| log.iter().filter(|l| l.starts_with(start)).count();
    assert_eq!((count("take"), count("launch kernel_gather"), count("launch kernel by"), count("free")), (3, 3, 6, 0));
    let bytes = |c: &Call| c.module.kernel().plan(&c.shape).unwrap().mask_metadata().unwrap().0;
    assert_eq!((findings.count(), findings.bytes()), (3, bytes(&wide) + bytes(&narrow) + bytes(&causal)));
    // Runs of rows are the same for blocks of all sizes.
    let (wide, narrow) = (Call::new(RUNS, 128), Call::new(RUNS, 96));
    let findings = wide.findings();
    wide.launch(Some(&*findings), A).unwrap();
    narrow.launch(Some(&*findings), A).unwrap();
    assert_eq!(findings.count(), 1);
}

#[test]
fn graphs_go_by_what_is_there_and_find_what_is_not() {
    let Some(fake) = Fake::new() else { return };
    let call = Call::new(RUNS, 128);
    let findings = call.findings();
    fake.state(true, false, true);
    call.launch(Some(&*findings), A).unwrap();
    let log = fake.log();
    let at = after(&log[0], "take");
    let [of_graph, kernel] = ["kernel_runs", "kernel"].map(|name| format!("launch {name} by {at} on 21"));
    assert_eq!(log[1..], [of_graph, kernel, format!("free {at} on 21")], "the graph's own memory");
    assert_eq!((findings.count(), findings.bytes()), (0, 0));
    fake.state(false, false, true);
    call.launch(Some(&*findings), A).unwrap();
    let there = after(&fake.log()[2], "record").to_owned();
    // Not there yet: a graph that may be replayed on any stream waits for what lies outside of it.
    fake.state(true, false, true);
    call.launch(Some(&*findings), A).unwrap();
    let log = fake.log();
    assert_eq!(log[..2], [format!("query {there}"), format!("wait {there} on 21 flags 1")]);
    assert!(log.len() == 3 && log[2].starts_with("launch kernel by"), "{log:?}");
    fake.state(true, true, true);
    call.launch(Some(&*findings), A).unwrap();
    let log = fake.log();
    assert!(log.len() == 2 && log[1].starts_with("launch kernel by"), "{log:?}");
}

#[test]
fn what_fails_is_given_back_and_found_by_the_next_launch() {
    let Some(fake) = Fake::new() else { return };
    let call = Call::new(DILATED, 128);
    let findings = call.findings();
    fake.failing("kernel_gather");
    let e = call.launch(Some(&*findings), A).unwrap_err().to_string();
    assert!(e.contains("cuLaunchKernel"), "{e}");
    let log = fake.log();
    let at = after(&log[0], "take");
    assert_eq!(log.last().unwrap(), &format!("free {at} on 21"), "{log:?}");
    assert_eq!(findings.count(), 0);
    fake.failing("");
    call.launch(Some(&*findings), B).unwrap();
    assert_eq!(findings.count(), 1);
}

#[test]
fn threads_that_come_at_once_find_it_once() {
    let Some(fake) = Fake::new() else { return };
    let call = Call::new(RUNS, 128);
    for _ in 0..20 {
        let findings = call.findings();
        std::thread::scope(|scope| {
            for stream in [A, A, B, Stream(0)] {
                let (call, findings) = (&call, &findings);
                scope.spawn(move || call.launch(Some(&**findings), stream).unwrap());
            }
        });
        let log = fake.log();
        let count = |start: &str| log.iter().filter(|l| l.starts_with(start)).count();
        assert_eq!((count("take"), count("launch kernel_runs"), count("launch kernel by")), (1, 1, 4), "{log:?}");
        let place = |start: &str| log.iter().position(|l| l.starts_with(start)).unwrap();
        assert!(place("launch kernel_runs") < place("launch kernel by"));
        drop(findings);
        assert_eq!(fake.log().iter().filter(|l| l.starts_with("free")).count(), 1);
    }
}

#[test]
fn another_device_and_a_driver_without_identifiers() {
    let Some(fake) = Fake::new() else { return };
    let (call, other) = (Call::new(RUNS, 128), Call::on(1, RUNS, 128, MaskKind::FULL));
    let findings = other.findings();
    let e = call.launch(Some(&*findings), A).unwrap_err().to_string();
    assert!(e.contains("made by another device"), "{e}");
    // Nobody could tell who has to wait: each launch finds for itself.
    fake.state(false, false, false);
    let findings = call.findings();
    call.launch(Some(&*findings), A).unwrap();
    let log = fake.log();
    assert!(log[0].starts_with("take") && log.last().unwrap().starts_with("free"), "{log:?}");
    assert_eq!(findings.count(), 0);
}
