//! Families of gradients on the emulated machine, by runtime's own check: the machine is a device to it.

use crate::cases::address;
use crate::machine::{Emulated, Launch, map_bytes};
use crate::{DTYPES, PROGRAMS, machine, search_with, setting, templates};
use flashtune::{DType, Distribution, Layout, Mask, MaskKind, Problem, Program, Shape, Stream};
use flashtune_cache::{Artifact, DeviceFingerprint};
use flashtune_codegen::abi::{
    Args, ArgsLayout, BackwardArgs, BackwardMappedArgs, GradientArgs, QuantiseArgs, SideArgs, SideTensorArg,
};
use flashtune_codegen::{
    Arch, Family, Kernel, KvKind, LaunchPlan, Schedule, ShapeBucket, StageEntry, TemplateSet, Waves,
};
use flashtune_runtime::check::PackedBatch;
use flashtune_runtime::{
    BackwardCase, Buffer, CheckInputs, Compiler, Device, Error, Module, Poison, Result, compiler_for,
};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// A kernel on the machine, as a device that has this one kernel and memory for its calls.
pub struct Machine {
    fingerprint: DeviceFingerprint,
    state: Mutex<State>,
}

struct State {
    emulated: Emulated,
    rng: StdRng,
    /// What was allocated, in its order.
    memory: Vec<Arc<Memory>>,
    /// Waves at the end that are not launched: a fault.
    lost_waves: usize,
}

/// Device memory.
struct Memory {
    address: u64,
    bytes: Mutex<Vec<u8>>,
}

struct Allocated(Arc<Memory>, usize);

impl Buffer for Allocated {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn address(&self) -> u64 {
        self.0.address
    }
    fn len(&self) -> usize {
        self.1
    }
}

pub struct Loaded(pub Kernel);

impl Module for Loaded {
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn kernel(&self) -> &Kernel {
        &self.0
    }
}

impl Machine {
    pub fn open(kernel: &Kernel, templates: &TemplateSet, seed: u64) -> Result<Arc<Self>, String> {
        let emulated = Emulated::build(kernel, templates)?;
        let (arch, name, driver) = (kernel.arch, "an emulated machine".to_owned(), String::new());
        let fingerprint = DeviceFingerprint { arch, name, units: 4, memory_bytes: 0, cache_bytes: 1 << 20, driver };
        let state = State { emulated, rng: StdRng::seed_from_u64(seed), memory: Vec::new(), lost_waves: 0 };
        Ok(Arc::new(Self { fingerprint, state: Mutex::new(state) }))
    }

    fn of(buffer: &dyn Buffer) -> &Memory {
        &buffer.as_any().downcast_ref::<Allocated>().expect("the machine's own").0
    }

    fn failed(&self, message: String) -> Error {
        let remedy = "see the machine's message";
        Error::Device { call: "launch", device: self.fingerprint.to_string(), message, remedy }
    }
}

impl State {
    /// The stages of every wave, within a limit that is drawn anew: the bytes that come out are the same. The scratch
    /// memory begins as NaN and as pointers to nowhere, and nothing can be read behind it.
    fn run_waves(
        &mut self,
        kernel: &Kernel,
        plan: &LaunchPlan,
        waves: Waves,
        args: &BackwardArgs,
    ) -> Result<(), String> {
        let mut side = side_of(kernel, args.side);
        let layout = ArgsLayout::of(kernel);
        side.resize(side.len().next_multiple_of(align_of::<BackwardMappedArgs>()), 0);
        let Self { emulated, rng, memory, .. } = self;
        let limit = waves.part_bytes * *[0, 2, 3, 1 << 20].choose(rng).expect("not empty");
        let waves = Waves { limit, ..waves }.of_rows([args.q_rows, args.kv_rows].map(|rows| rows as u64));
        memory.retain(|m| Arc::strong_count(m) > 1);
        let mut scratch = vec![0xff; waves.bytes() as usize];
        let at = address(100, scratch.len());
        let args = BackwardArgs { scratch: at, ..*args };
        let maps = kernel.backward_tensor_maps(&args).ok_or("no tensor maps")?;
        let mut locked: Vec<_> = memory.iter().map(|m| (m.address, m.bytes.lock().expect("no panic"))).collect();
        let mut buffers: Vec<machine::Buffer> = locked
            .iter_mut()
            .map(|(address, bytes)| machine::Buffer { address: *address, bytes: &mut bytes[..], written: true })
            .collect();
        buffers.push(machine::Buffer { address: at, bytes: &mut scratch, written: true });
        for (first, count) in waves.iter().take(waves.iter().count() - self.lost_waves) {
            let mut bytes: Vec<u8> = maps.iter().flat_map(map_bytes).collect();
            bytes.extend_from_slice(&Args::Backward(&args).bytes()[..layout.forward as usize]);
            // Of packed sequences in rows.
            let unit = if waves.packed.is_some() { 200 } else { 1 };
            let sections = waves.sections.map(|n| n.min(unit << rng.random_range(0..3)));
            bytes.extend([first, count, sections[0], sections[1]].into_iter().flat_map(u32::to_ne_bytes));
            bytes.extend(waves.shared_bytes().to_ne_bytes());
            bytes.extend(u64::from(waves.walks).to_ne_bytes());
            bytes.resize(layout.base(), 0);
            for (stage, of) in plan.stages().enumerate() {
                let of = of.of_parts(count, waves.parts);
                let launch = Launch {
                    seed: rng.random(),
                    stage: stage as u32,
                    prelude: ([0; 2], [0; 2]),
                    grid: of.blocks(rng.random_range(1..=5)),
                    threads: of.threads,
                    smem_bytes: of.smem_bytes,
                    args: bytes.clone(),
                    any_order: true,
                    late: false,
                    hopper: None,
                    side: side.clone(),
                };
                emulated.run(&launch, &mut buffers).map_err(|e| format!("{}: {e}", of.entry.suffix))?;
            }
        }
        Ok(())
    }
}

/// What a score program reads, as it lies behind the arguments.
fn side_of(kernel: &Kernel, address: u64) -> Vec<u8> {
    let mut side = Vec::new();
    if let Some(program) = kernel.problem.program {
        let tensors = program.declarations().iter().filter(|d| d.axes.is_some()).count();
        let scalars = program.declarations().len() - tensors;
        let mut table = |address: u64, bytes: usize| {
            // SAFETY: `side` is the address of the program's tables by the caller's promise, which have room for more
            // than any program reads.
            side.extend(unsafe { std::slice::from_raw_parts(address as usize as *const u8, bytes) });
        };
        // SAFETY: as above.
        let tables = unsafe { &*(address as usize as *const SideArgs) };
        table(tables.tensors, tensors.max(1) * size_of::<SideTensorArg>());
        table(tables.scalars, scalars.max(1) * size_of::<u64>());
    }
    side
}

impl Device for Machine {
    fn fingerprint(&self) -> &DeviceFingerprint {
        &self.fingerprint
    }
    fn compiler(&self) -> Result<Arc<dyn Compiler>> {
        compiler_for(self.fingerprint.arch)
    }
    fn load(&self, artifact: &Artifact) -> Result<Arc<dyn Module>> {
        Ok(Arc::new(Loaded(artifact.recipe.kernel)))
    }
    unsafe fn launch(&self, module: &dyn Module, plan: &LaunchPlan, args: Args<'_>, _: Stream) -> Result<()> {
        let mut state = self.state.lock().expect("no panic");
        if let (Some(waves), Args::Backward(args)) = (plan.waves, args) {
            return state.run_waves(module.kernel(), plan, waves, args).map_err(|e| self.failed(e));
        }
        let mut before = [0; 2];
        let stages = || plan.stages().filter(|s| s.entry != StageEntry::MAIN).zip(0..);
        stages().for_each(|(stage, i): (_, usize)| before[i] = stage.grid);
        let main = plan.stages().find(|s| s.entry == StageEntry::MAIN).expect("every kernel has one");
        if plan.is_empty() {
            return Ok(());
        }
        // The machine has one size for all stages.
        let resources = module.kernel().resources();
        assert!(plan.stages().all(|s| s.threads == resources.threads), "stages of other threads");
        assert_eq!(plan.stages().map(|s| s.smem_bytes).max(), Some(resources.smem_bytes), "other shared memory");
        let State { emulated, rng, memory, .. } = &mut *state;
        let side = side_of(module.kernel(), args.side());
        // Partial sums begin as NaN, and nothing can be read behind them.
        let mut sums = vec![0xff; plan.partial_sums().unwrap_or(0) as usize];
        let sums_at = address(100, sums.len());
        let forward = ArgsLayout::of(module.kernel()).forward as usize;
        let args = match args {
            Args::Gradient(args) => {
                let backward = BackwardArgs { scratch: sums_at, ..args.backward };
                let args = GradientArgs { backward, ..*args };
                let (backward, tail) = bytemuck::bytes_of(&args).split_at(size_of::<BackwardArgs>());
                [&backward[..forward], tail].concat()
            }
            Args::Quantise(args) => Args::Quantise(&QuantiseArgs { scratch: sums_at, ..*args }).bytes().to_vec(),
            args => args.bytes()[..forward].to_vec(),
        };
        let launch = Launch {
            seed: rng.random(),
            stage: 0,
            prelude: (before, [0; 2]),
            grid: main.blocks(rng.random_range(1..=5)),
            threads: main.threads,
            smem_bytes: resources.smem_bytes,
            args,
            any_order: true,
            late: false,
            hopper: None,
            side,
        };
        // Of a case that is over, memory is no one's any more.
        memory.retain(|m| Arc::strong_count(m) > 1);
        let mut locked: Vec<_> = memory.iter().map(|m| (m.address, m.bytes.lock().expect("no panic"))).collect();
        let mut buffers: Vec<machine::Buffer> = locked
            .iter_mut()
            .map(|(address, bytes)| machine::Buffer { address: *address, bytes: &mut bytes[..], written: true })
            .collect();
        if !sums.is_empty() {
            buffers.push(machine::Buffer { address: sums_at, bytes: &mut sums, written: true });
        }
        emulated.run(&launch, &mut buffers).map_err(|e| self.failed(e))
    }
    fn alloc(&self, bytes: usize) -> Result<Box<dyn Buffer>> {
        let mut state = self.state.lock().expect("no panic");
        let place = (0..).find(|n| state.memory.iter().all(|m| m.address >> 36 != address(*n, bytes) >> 36));
        let address = address(place.expect("there is always another"), bytes);
        let memory = Arc::new(Memory { address, bytes: Mutex::new(vec![0; bytes]) });
        state.memory.push(memory.clone());
        Ok(Box::new(Allocated(memory, bytes)))
    }
    fn upload(&self, to: &dyn Buffer, bytes: &[u8]) -> Result<()> {
        Self::of(to).bytes.lock().expect("no panic")[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
    fn download(&self, from: &dyn Buffer, bytes: &mut [u8], _: Stream) -> Result<()> {
        bytes.copy_from_slice(&Self::of(from).bytes.lock().expect("no panic")[..bytes.len()]);
        Ok(())
    }
    fn fill(&self, to: &dyn Buffer, byte: u8) -> Result<()> {
        Self::of(to).bytes.lock().expect("no panic").fill(byte);
        Ok(())
    }
    fn stream(&self) -> Stream {
        Stream(0)
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

/// A kernel of `backward/sm90` for a random problem: the default schedule or another of the space.
fn random_sm90(number: u64) -> Kernel {
    let rng = &mut StdRng::seed_from_u64(number);
    let dims = [(16, 16), (24, 40), (64, 64), (256, 72), (40, 128), (128, 128), (192, 128), (136, 256)];
    let (qk, v) = dims[number as usize % dims.len()];
    let mask = MaskKind::ALL[(number as usize + number as usize / 4) % 4];
    let problem = Problem::forward_qk_v(DTYPES[number as usize % 2], qk, v, mask).expect("legal").backward();
    let problem = match number % 3 {
        0 => {
            let program = Program::parse(PROGRAMS.choose(rng).expect("not empty")).expect("a program");
            Problem { mask: MaskKind::FULL, ..problem }.with_program(program)
        }
        _ => problem,
    };
    let arch: Arch = "sm_90a".parse().expect("an arch");
    let problem = every_other_packed(problem, number);
    let space = Schedule::space(Family::BackwardSm90, &problem, arch);
    Kernel { problem, schedule: *space.choose(rng).expect("not empty"), arch }
}

/// A kernel of a random problem, every other with a score program.
fn random_kernel(number: u64) -> Kernel {
    let rng = &mut StdRng::seed_from_u64(number);
    let dims = [(16, 16), (24, 40), (64, 64), (128, 72), (256, 16)];
    let (qk, v) = *dims.choose(rng).expect("not empty");
    let arch: Arch = if number.is_multiple_of(3) { "sm_75" } else { "sm_90a" }.parse().expect("an arch");
    let mask = MaskKind::ALL[number as usize % 4];
    let problem = Problem::forward_qk_v(DType::ALL[number as usize / 4 % 3], qk, v, mask).expect("legal").backward();
    let text = PROGRAMS.choose(rng).expect("not empty");
    let problem = match number % 2 {
        0 => Problem { mask: MaskKind::FULL, ..problem }.with_program(Program::parse(text).expect("a program")),
        _ => problem,
    };
    kernel_of(every_other_packed(problem, number), arch)
}

/// Dense and packed problems take turns with each of four masks.
pub fn every_other_packed(problem: Problem, number: u64) -> Problem {
    if (number + number / 4).is_multiple_of(2) { problem.with_kv(KvKind::RAGGED) } else { problem }
}

fn kernel_of(problem: Problem, arch: Arch) -> Kernel {
    let bucket = ShapeBucket { parallel: 4, group: 2, q_len: 64, kv_len: 64, ..Default::default() };
    let schedule = Schedule::default_for(Family::BackwardNaive, &problem, arch, &bucket).expect("supported");
    Kernel { problem, schedule, arch }
}

/// Lengths at and around what the tiles of `backward/naive` divide.
pub const SHORT: [u32; 10] = [0, 1, 7, 16, 31, 32, 33, 48, 65, 70];
/// The same of `backward/sm90`.
const LONG: [u32; 10] = [0, 1, 7, 63, 65, 127, 129, 200, 257, 300];

pub fn random_case(kind: MaskKind, lengths: &[u32], rng: &mut StdRng) -> (Shape, CheckInputs) {
    let length = |rng: &mut StdRng| *lengths.choose(rng).expect("not empty");
    let reach = |bounded: bool, rng: &mut StdRng| {
        bounded.then(|| *[0, 1, 9, 40, 150, 1000, u32::MAX].choose(rng).expect("not empty"))
    };
    let mask = match (kind.left, kind.right) {
        (false, false) => Mask::Full,
        (false, true) if rng.random() => Mask::Causal,
        (left, right) => Mask::Window { left: reach(left, rng), right: reach(right, rng) },
    };
    let kv_heads = rng.random_range(1..=2);
    let (q_len, kv_len) = (length(rng), length(rng));
    let heads = kv_heads * rng.random_range(1..=2);
    let shape = Shape { batch: rng.random_range(1..=2), heads, kv_heads, q_len, kv_len, mask };
    let inputs = CheckInputs {
        layout: *Layout::ALL.choose(rng).expect("not empty"),
        distribution: *[Distribution::Normal, Distribution::Uniform].choose(rng).expect("not empty"),
        seed: rng.random(),
        lse: rng.random(),
        poison: *[Poison::None, Poison::Nan, Poison::Infinite].choose(rng).expect("not empty"),
        scale: rng.random_bool(0.3).then_some(-0.3),
    };
    (shape, inputs)
}

/// Checks calls of a kernel. What goes wrong comes back with what is needed to see it again.
pub fn try_backward(kernel: &Kernel, templates: &TemplateSet, calls: u64, seed: u64) -> Result<(), String> {
    let device = Machine::open(kernel, templates, seed)?;
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..calls {
        let lengths = if kernel.schedule.family() == Family::BackwardSm90 { &LONG } else { &SHORT };
        let (shape, inputs) = random_case(kernel.problem.mask, lengths, &mut rng);
        let (case, sizes) = match kernel.problem.kv {
            KvKind::Dense => (BackwardCase::new(device.clone(), &kernel.problem, &shape, &inputs), shape.to_string()),
            KvKind::Ragged(_) => {
                let batch = PackedBatch::random(kernel.problem.mask, lengths, 4, rng.random());
                (BackwardCase::packed(device.clone(), &kernel.problem, &batch, &inputs), batch.to_string())
            }
        };
        let case = case.map_err(|e| e.to_string())?;
        let report = case.check(&Loaded(*kernel)).map_err(|e| format!("{} {sizes} {inputs:?}: {e}", kernel.name()))?;
        if !report.passed() {
            let program = kernel.problem.program.map_or("", |p| p.kept().text());
            return Err(format!("{} {sizes} {inputs:?}: {report}\n{program}", kernel.name()));
        }
    }
    Ok(())
}

#[test]
fn backward_kernels() {
    let templates = templates();
    search_with(8, |number| {
        try_backward(&random_kernel(number), &templates, setting("EMULATE_CASES").unwrap_or(5), number)
    });
}

#[test]
fn backward_sm90_kernels() {
    let templates = templates();
    search_with(6, |number| {
        try_backward(&random_sm90(number), &templates, setting("EMULATE_CASES").unwrap_or(3), number)
    });
}

/// One of the schedules of `backward/sm90` that reduce dQ by key blocks in turns: up to head dim 64 with one buffer of
/// K and V or, where `nth` is odd, with two.
fn in_turns(problem: &Problem, nth: usize) -> Kernel {
    let arch: Arch = "sm_90a".parse().expect("an arch");
    let mut turns = Schedule::space(Family::BackwardSm90, problem, arch);
    turns.retain(|s| s.to_string().ends_with("-turns"));
    turns.sort_by_key(|s| s.to_string().contains("-ks2-"));
    Kernel { problem: *problem, schedule: turns[nth % turns.len()], arch }
}

/// One of the schedules that walk the heads of a group apart: those that reduce dQ in turns first.
fn in_walks(problem: &Problem, nth: usize) -> Kernel {
    let arch: Arch = "sm_90a".parse().expect("an arch");
    let mut all = Schedule::space(Family::BackwardSm90, problem, arch);
    all.retain(|s| s.to_string().ends_with("-walks"));
    all.sort_by_key(|s| !s.to_string().contains("-turns-"));
    Kernel { problem: *problem, schedule: all[nth % all.len()], arch }
}

/// Heads of a group walked by several thread blocks: dQ in turns, beside dK and dV, and in a launch of its own, where
/// both warpgroups have each gradient and where each has one, and with a score program.
#[test]
fn backward_sm90_kernels_with_heads_apart() {
    let templates = templates();
    let text = "mask = q // 170 == kv // 170; score = 2.0 * tanh(score);";
    let program = Program::parse(text).expect("a program");
    search_with(6, |number| {
        let number = number as usize;
        let (qk, v) = [(24, 40), (128, 96), (192, 64), (64, 64), (40, 136), (16, 72)][number % 6];
        let mut mask = MaskKind::ALL[(number + number / 4) % 4];
        mask.left &= qk <= 64;
        let problem = Problem::forward_qk_v(DTYPES[number % 2], qk, v, mask).expect("legal").backward();
        let problem = if number % 6 == 5 { problem.with_program(program.clone()) } else { problem };
        let calls = setting("EMULATE_CASES").unwrap_or(3);
        try_backward(&in_walks(&problem, number / 3), &templates, calls, number as u64)
    });
}

/// Each mask that there is, both ways to halve dQ, queries up to head dim 64, columns above, and one and two buffers of
/// K and V.
#[test]
fn backward_sm90_kernels_with_dq_in_turns() {
    let templates = templates();
    search_with(6, |number| {
        let (qk, v) = [(24, 40), (128, 96), (64, 64), (40, 24), (72, 128), (64, 48)][number as usize % 6];
        let mut mask = MaskKind::ALL[(number as usize + number as usize / 4) % 4];
        mask.left &= qk <= 64;
        let problem = Problem::forward_qk_v(DTYPES[number as usize % 2], qk, v, mask).expect("legal").backward();
        try_backward(
            &in_turns(&problem, number as usize / 2),
            &templates,
            setting("EMULATE_CASES").unwrap_or(3),
            number,
        )
    });
}

/// What is said of `backward/sm90` with a fault; an empty text when nothing is. Several key blocks for a thread block,
/// tiles that are cut on both sides, groups of two heads, NaN in what nobody may see, two waves and more.
pub fn verdict(templates: &TemplateSet, seed: u64, what: &str) -> String {
    let kind = MaskKind { left: true, right: true };
    let of = |dim, kind| Problem::forward(DType::Bf16, dim, kind).expect("legal").backward();
    // Tiles that the mask cuts, some that it leaves out, and some whole ones.
    let text = "mask = q // 170 == kv // 170; score = 2.0 * tanh(score);";
    let problem = match what.split_once(':') {
        Some(("by gradient", _)) => of(136, kind),
        Some(("joint", _)) => of(24, MaskKind::CAUSAL),
        Some(("turns", _)) => of(72, MaskKind::CAUSAL),
        Some(("two buffers" | "walks", _)) => of(40, MaskKind::CAUSAL),
        Some(("program", _)) => of(24, MaskKind::FULL).with_program(Program::parse(text).expect("a program")),
        Some(("packed", _)) => of(24, kind).with_kv(KvKind::RAGGED),
        _ => of(24, kind),
    };
    let arch: Arch = "sm_90a".parse().expect("an arch");
    let bucket = ShapeBucket { parallel: 4, group: 2, q_len: 256, kv_len: 256, ..Default::default() };
    let schedule = Schedule::default_for(Family::BackwardSm90, &problem, arch, &bucket).expect("supported");
    let kernel = match what.split_once(':') {
        Some(("turns", _)) => in_turns(&problem, 0),
        Some(("two buffers", _)) => in_turns(&problem, 1),
        Some(("walks", _)) => in_walks(&problem, 0),
        // Whose heads are walked together.
        _ => {
            let name = schedule.to_string();
            let space = Schedule::space(Family::BackwardSm90, &problem, arch);
            let plain = space.into_iter().find(|s| s.to_string() == name.trim_end_matches("-walks"));
            Kernel { problem, schedule: plain.unwrap_or(schedule), arch }
        }
    };
    let bounded = Mask::Window { left: Some(130), right: Some(20) };
    let mask = match problem.mask {
        MaskKind::FULL => Mask::Full,
        MaskKind::CAUSAL => Mask::Causal,
        _ => bounded,
    };
    let shape = Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 330, kv_len: 300, mask };
    let found = || -> Result<String, String> {
        let device = Machine::open(&kernel, templates, seed)?;
        device.state.lock().expect("no panic").lost_waves = usize::from(what == "a wave too few");
        for seed in 0..4 {
            // A NaN of a query is in dK of all keys that it sees, which says nothing of their sums: without first.
            let poison = if seed % 2 == 0 { Poison::None } else { Poison::Nan };
            let inputs = CheckInputs { poison, lse: true, seed, ..CheckInputs::default() };
            let case = if problem.kv.is_dense() {
                BackwardCase::new(device.clone(), &problem, &shape, &inputs)
            } else {
                let lengths = vec![[330, 300], [0, 9], [20, 0], [129, 200], [70, 65]];
                let batch =
                    PackedBatch { heads: 6, kv_heads: 3, mask, lengths, unused: 2, spare: 40, wide: [false, true] };
                BackwardCase::packed(device.clone(), &problem, &batch, &inputs)
            };
            // Most faults are seen in the first launch, which takes a third of the time of all three.
            let case = case.map_err(|e| e.to_string())?;
            for launches in [1, 2] {
                let report = case.check_launches(&Loaded(kernel), launches).map_err(|e| e.to_string())?;
                if !report.passed() {
                    return Ok(report.to_string());
                }
            }
        }
        Ok(String::new())
    };
    found().unwrap_or_else(|e| e)
}

/// A change of the template, and a word of what is then said.
const FAULTS: [(&str, &str, &str); 8] = [
    ("h < (kv_head + 1) * group; h++", "h < (kv_head + 1) * group; h += 2", "oracle"),
    ("row < last; row += kBlockQ", "row < last - kBlockQ; row += kBlockQ", "oracle"),
    ("key - diagonal - args.window_right", "key + 1 - diagonal - args.window_right", "oracle"),
    ("kv < live.first || kv > live.last", "kv < live.first", "oracle"),
    ("sum - args.dlse[out_row + row]", "sum", "oracle"),
    ("if (p_tile[at] < 0.0f) continue;", "", "oracle"),
    ("store_rows<kRows, kOutQK, kHeadDimQK>(to,", "if (tile.row == 0) store_rows<kRows, kOutQK, kHeadDimQK>(to,", "dQ"),
    (
        "            products<kHeadDimQK>(s, m.third, m.first);\n            __syncthreads();",
        "            products<kHeadDimQK>(s, m.third, m.first);",
        "",
    ),
];

#[test]
fn faults_planted_in_gradients_are_seen() {
    if !machine::has_compiler() {
        return;
    }
    let embedded = TemplateSet::embedded();
    let text = embedded.files().find(|(name, _)| *name == "backward/naive.cu").expect("embedded").1;
    let problem = Problem::forward(DType::F32, 16, MaskKind::CAUSAL).expect("legal").backward();
    let kernel = kernel_of(problem, "sm_80".parse().expect("an arch"));
    let shape = Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 70, kv_len: 65, mask: Mask::Causal };
    for (from, to, what) in FAULTS {
        assert!(text.contains(from), "the text of a fault is gone: {from}");
        let changed = BTreeMap::from([("backward/naive.cu".to_owned(), text.replace(from, to))]);
        let device =
            Machine::open(&kernel, &TemplateSet::overlaid(changed).expect("it renders"), 1).expect("it compiles");
        let inputs = CheckInputs { poison: Poison::Nan, lse: true, ..CheckInputs::default() };
        let case = BackwardCase::new(device, &problem, &shape, &inputs).expect("a case");
        let found = match case.check(&Loaded(kernel)) {
            Ok(report) => (!report.passed()).then(|| report.to_string()),
            Err(e) => Some(e.to_string()),
        };
        assert!(found.as_ref().is_some_and(|found| found.contains(what)), "{to}: {found:?}");
    }
}
