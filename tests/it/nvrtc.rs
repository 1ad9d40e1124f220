//! Every CUDA template renders and compiles to a cubin, without a GPU.

use crate::common;
use crate::common::compiled::{Compiled, compiled};
use flashtune::{DType, Mask, MaskKind, Problem, Program, Shape};
use flashtune_codegen::{
    Arch, Family, Kernel, KvElement, KvKind, KvScales, KvStore, Op, ScaleUnits, Schedule, ShapeBucket, TemplateSet,
};
use flashtune_runtime::Compiler;
use flashtune_runtime::compile::{Nvrtc, compile_with};
use flashtune_runtime::elf;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::sync::Mutex;

const ARCHS: [&str; 4] = ["sm_80", "sm_86", "sm_89", "sm_90a"];

fn arch(name: &str) -> Arch {
    name.parse().expect("a known arch")
}

fn bucket(problem: &Problem, len: u32) -> ShapeBucket {
    let side = |bounded: bool| bounded.then_some(64);
    let mask = Mask::Window { left: side(problem.mask.left), right: side(problem.mask.right) };
    ShapeBucket::of(&Shape { batch: 1, heads: 16, kv_heads: 4, q_len: len, kv_len: len, mask })
}

/// The default kernel of a family.
pub(crate) fn default_kernel(family: Family, problem: Problem, arch: Arch, len: u32) -> Kernel {
    let schedule = Schedule::default_for(family, &problem, arch, &bucket(&problem, len)).expect("a default");
    Kernel { problem, schedule, arch }
}

/// Compiles on all cores and collects what went wrong.
fn compile_all(kernels: &[Kernel], most_spilled: u32) {
    let nvrtc = Nvrtc::find().expect("checked by the caller");
    let templates = TemplateSet::embedded();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, |n| n.get()) {
            scope.spawn(|| {
                while let Some(kernel) = kernels.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    if let Err(e) = compile_one(&nvrtc, kernel, &templates, most_spilled) {
                        wrong.lock().unwrap().push(format!("{}: {e}", kernel.name()));
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {} kernels:\n{}", wrong.len(), kernels.len(), wrong.join("\n"));
}

/// Of gradients on Hopper in turns of 128 queries, tiles that a mask cuts have steps of their own, which spill.
/// The loop of the others does not, and is 5 to 7 % faster for being alone. No other kernel spills.
fn compile_gradients(kernels: Vec<Kernel>) {
    let cuts = |k: &Kernel| {
        let name = k.schedule.to_string();
        name.starts_with("q128-") && name.ends_with("-turns")
    };
    // Walks of some heads of a group keep where their sums lie besides.
    let in_walks = |k: &Kernel| k.schedule.to_string().ends_with("-walks");
    let (walks, others): (Vec<Kernel>, Vec<Kernel>) = kernels.into_iter().partition(in_walks);
    let (two_loops, others): (Vec<Kernel>, Vec<Kernel>) = others.into_iter().partition(cuts);
    compile_all(&others, 0);
    compile_all(&two_loops, 232);
    compile_all(&walks, 360);
}

fn compile_one(nvrtc: &Nvrtc, kernel: &Kernel, templates: &TemplateSet, most_spilled: u32) -> Result<(), String> {
    let source = kernel.render(templates).map_err(|e| e.to_string())?;
    let Compiled { registers, spill_bytes } = compiled(nvrtc.id(), &source, || {
        let artifact = compile_with(nvrtc, kernel, templates).map_err(|e| e.to_string())?;
        elf::check(&artifact.bytes).map_err(|why| format!("the result is no cubin: {why}"))?;
        let entry = artifact.entry.as_bytes();
        if !artifact.bytes.windows(entry.len()).any(|w| w == entry) {
            return Err(format!("the cubin has no symbol {}", artifact.entry));
        }
        let facts = &artifact.facts;
        if !facts.warnings.is_empty() {
            return Err(facts.warnings.join("; "));
        }
        Ok(Compiled { registers: facts.registers, spill_bytes: facts.spill_bytes })
    })?;
    if registers == 0 {
        return Err("the log told no register count".into());
    }
    // Registers of the block must exist; otherwise the launch fails on the device.
    let all = registers.next_multiple_of(8) * kernel.resources().threads;
    if all > 65536 {
        return Err(format!("{all} registers for one block"));
    }
    if spill_bytes > most_spilled {
        return Err(format!("{spill_bytes} bytes of spills at {registers} registers"));
    }
    Ok(())
}

#[test]
fn default_schedules_compile_without_spills() {
    if common::nvrtc_or_skip("default_schedules_compile_without_spills").is_none() {
        return;
    }
    let mut kernels = Vec::new();
    // The head dims that models use, and one on each side of what the defaults switch at; every arch and mask meets.
    for (i, dims) in
        [(64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (40, 72), (16, 16)].into_iter().enumerate()
    {
        for (j, name) in ARCHS.into_iter().enumerate() {
            let dtype = [DType::Bf16, DType::F16][(i + j) % 2];
            let mask = MaskKind::ALL[(i + j) % 4];
            let problem = Problem::forward_qk_v(dtype, dims.0, dims.1, mask).unwrap();
            kernels.push(default_kernel(Family::ForwardSm80, problem, arch(name), [4096, 64][i % 2]));
        }
        let dtype = DType::ALL[i % 3];
        let problem = Problem::forward_qk_v(dtype, dims.0, dims.1, MaskKind::ALL[i % 4]).unwrap();
        kernels.push(default_kernel(Family::ForwardNaive, problem, arch(ARCHS[i % 4]), 1024));
    }
    for mask in MaskKind::ALL {
        let problem = Problem::forward(DType::Bf16, 128, mask).unwrap();
        kernels.push(default_kernel(Family::ForwardSm80, problem, arch("sm_90a"), 4096));
    }
    compile_all(&kernels, 0);
}

/// On the oldest arch too, whose shared memory is the smallest.
/// What O loses is written straight from registers, and read by the stage of statistics.
#[test]
fn kernels_with_a_residual_compile() {
    if common::nvrtc_or_skip("kernels_with_a_residual_compile").is_none() {
        return;
    }
    let mut kernels = Vec::new();
    for (i, (qk, v)) in [(64, 64), (128, 128), (256, 256), (192, 128), (40, 72)].into_iter().enumerate() {
        let (dtype, mask) = ([DType::Bf16, DType::F16][i % 2], MaskKind::ALL[i % 4]);
        let forward = Problem::forward_qk_v(dtype, qk, v, mask).expect("legal").with_residual(true);
        let backward = forward.backward();
        let packed = backward.with_kv(KvKind::RAGGED);
        let hopper =
            [(Family::ForwardSm90, forward), (Family::BackwardSm90, if i % 2 == 0 { backward } else { packed })];
        kernels.extend(hopper.map(|(family, problem)| default_kernel(family, problem, arch("sm_90a"), 4096)));
        kernels.push(default_kernel(Family::ForwardSm80, forward, arch("sm_80"), 4096));
        kernels.extend(kernels.clone().iter().filter_map(|k| Some(Kernel { schedule: k.schedule.quick()?, ..*k })));
        if i < 2 {
            kernels.push(default_kernel(Family::BackwardSm80, backward, arch("sm_80"), 4096));
            kernels.push(default_kernel(Family::ForwardNaive, forward, arch("sm_75"), 4096));
            kernels.push(default_kernel(Family::BackwardNaive, packed, arch("sm_75"), 4096));
        }
    }
    kernels.sort_by_key(Kernel::name);
    kernels.dedup();
    compile_gradients(kernels);
}

/// Philox takes registers of its own: what a Hopper step has besides is just left.
#[test]
fn kernels_with_dropout_compile_with_few_spills() {
    if common::nvrtc_or_skip("kernels_with_dropout_compile_with_few_spills").is_none() {
        return;
    }
    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    for (i, (qk, v)) in [(64, 64), (128, 128), (256, 256), (192, 128)].into_iter().enumerate() {
        let (dtype, mask) = ([DType::Bf16, DType::F16][i % 2], [MaskKind::FULL, MaskKind::CAUSAL][i % 2]);
        let problem = Problem::forward_qk_v(dtype, qk, v, mask).expect("legal").with_dropout(true);
        forward.push(default_kernel(Family::ForwardSm90, problem, arch("sm_90a"), 4096));
        forward.push(default_kernel(Family::ForwardSm80, problem, arch("sm_80"), 4096));
        backward.push(default_kernel(Family::BackwardSm90, problem.backward(), arch("sm_90a"), 4096));
        if i < 2 {
            backward.push(default_kernel(Family::BackwardSm80, problem.backward(), arch("sm_80"), 4096));
            forward.push(default_kernel(Family::ForwardNaive, problem, arch("sm_75"), 4096));
        }
    }
    // Of forward/sm80 at head dim 128, which takes 255 registers without.
    compile_all(&forward, 16);
    // Of head dim 64, whose steps have 128 queries.
    compile_all(&backward, 200);
}

#[test]
fn plain_backward_kernels_compile_without_spills() {
    if common::nvrtc_or_skip("plain_backward_kernels_compile_without_spills").is_none() {
        return;
    }
    let dims = [(64, 64), (128, 128), (256, 256), (192, 128), (40, 72), (16, 256)];
    let programs = [
        "slopes: float[heads]; score = 30.0 * tanh(score / 30.0) - slopes[h] * abs(q - kv);",
        "doc: int[batch, kv_len] nondecreasing; sinks: float[heads]; mask = doc[b, kv] == doc[b, q]; sink = sinks[h];",
        "bias: bf16[heads, q_len, kv_len]; mask = kv % 3 != q % 4; score = max(score, 0.1 * score) + bias[h, q, kv];",
    ];
    let mut kernels = Vec::new();
    for (i, (dim_qk, dim_v)) in dims.into_iter().enumerate() {
        let problem = Problem::forward_qk_v(DType::ALL[i % 3], dim_qk, dim_v, MaskKind::ALL[i % 4]).unwrap().backward();
        kernels.push(default_kernel(Family::BackwardNaive, problem, arch(["sm_75", "sm_90a"][i % 2]), 1024));
        let program = Program::parse(programs[i % 3]).unwrap();
        let problem = Problem { mask: MaskKind::FULL, ..problem }.with_program(program);
        kernels.push(default_kernel(Family::BackwardNaive, problem, arch(["sm_80", "sm_75"][i % 2]), 1024));
    }
    compile_all(&kernels, 0);
}

/// Gradients of what a program reads: pairs with an element each, sums of rows and columns, tables, sinks and scalars.
#[test]
fn plain_kernels_of_gradients_compile_without_spills() {
    if common::nvrtc_or_skip("plain_kernels_of_gradients_compile_without_spills").is_none() {
        return;
    }
    let programs = [
        "t: bf16[batch, heads, q_len, kv_len]; mask = kv <= q + 9; score = score + t[b, h, q, kv];",
        "t: float[heads]; score = 30.0 * tanh(score / 30.0) - t[h] * abs(q - kv);",
        "t: float[heads, kv_len]; doc: int[batch, kv_len]; mask = doc[b, kv] == doc[b, q]; score = score + t[h, kv];",
        "t: float[heads, *]; score = max(score, 0.1 * score) + t[h, clamp(kv - q, -64, 64) + 64]; sink = t[h, 0];",
        "t: float; score = score * t;",
    ];
    let dims = [(64, 64), (128, 128), (256, 256), (192, 128), (16, 256)];
    let kernels: Vec<Kernel> = (0..10)
        .map(|i| {
            let (dim_qk, dim_v) = dims[i % 5];
            let problem = Problem::forward_qk_v(DType::ALL[i % 3], dim_qk, dim_v, MaskKind::ALL[i % 4]).unwrap();
            let problem = problem.with_program(Program::parse(programs[(i + i / 5) % 5]).unwrap());
            let problem = problem.gradient_by("t").unwrap();
            default_kernel(Family::GradientNaive, problem, arch(["sm_75", "sm_90a", "sm_80"][i % 3]), 1024)
        })
        .collect();
    compile_all(&kernels, 0);
}

/// Head dims of every kind of tile, and archs of less shared memory. Of 256 threads with all of their registers a few
/// bytes leave them, of addresses that are read again at the start of a step.
#[test]
fn backward_sm80_kernels_compile_with_next_to_no_spills() {
    if common::nvrtc_or_skip("backward_sm80_kernels_compile_with_next_to_no_spills").is_none() {
        return;
    }
    let dims = [(64, 64), (128, 128), (256, 256), (192, 128), (40, 72), (16, 256)];
    let programs = [
        "slopes: float[heads]; score = 30.0 * tanh(score / 30.0) - slopes[h] * abs(q - kv);",
        "doc: int[batch, kv_len] nondecreasing; sinks: float[heads]; mask = doc[b, kv] == doc[b, q]; sink = sinks[h];",
        "bias: bf16[heads, q_len, kv_len]; mask = kv % 3 != q % 4; score = max(score, 0.1 * score) + bias[h, q, kv];",
    ];
    let dtypes = [DType::F16, DType::Bf16];
    let (mut kernels, mut packed) = (Vec::new(), Vec::new());
    for (i, (dim_qk, dim_v)) in dims.into_iter().enumerate() {
        let problem = Problem::forward_qk_v(dtypes[i % 2], dim_qk, dim_v, MaskKind::ALL[i % 4]).unwrap().backward();
        let program = Program::parse(programs[i % 3]).unwrap();
        let with_program = Problem { mask: MaskKind::FULL, ..problem }.with_program(program);
        for (problem, arch_name) in [(problem, ["sm_90a", "sm_80"][i % 2]), (with_program, ["sm_86", "sm_90a"][i % 2])]
        {
            kernels.push(default_kernel(Family::BackwardSm80, problem, arch(arch_name), 1024));
        }
        // Of packed sequences kernels with a program and without take turns.
        let of_pack = if i % 2 == 0 { problem } else { with_program }.with_kv(KvKind::RAGGED);
        packed.push(default_kernel(Family::BackwardSm80, of_pack, arch(["sm_90a", "sm_80"][i / 2 % 2]), 1024));
    }
    compile_all(&kernels, 16);
    // Lengths and first rows of a sequence are in registers, those of dense tensors in constant memory.
    compile_all(&packed, 32);
}

/// Spills would be loads and stores among matrix instructions, and products that the compiler serialises would wait for
/// each other: `compile_one` fails on either.
#[test]
fn hopper_backward_kernels_compile_as_they_are_written() {
    if common::nvrtc_or_skip("hopper_backward_kernels_compile_as_they_are_written").is_none() {
        return;
    }
    let hopper = arch("sm_90a");
    let mut kernels = Vec::new();
    for (i, dims) in [(128, 128), (64, 64), (96, 80), (40, 24), (64, 128)].into_iter().enumerate() {
        let dtype = [DType::F16, DType::Bf16][i % 2];
        let problem = Problem::forward_qk_v(dtype, dims.0, dims.1, MaskKind::ALL[i % 4]).unwrap().backward();
        kernels.push(default_kernel(Family::BackwardSm90, problem, hopper, [4096, 512][i % 2]));
    }
    for (i, dims) in [(128, 128), (64, 64), (192, 128), (256, 256)].into_iter().enumerate() {
        let problem = Problem::forward_qk_v(DType::Bf16, dims.0, dims.1, MaskKind::ALL[i]).unwrap().backward();
        kernels.push(default_kernel(Family::BackwardSm90, problem.with_kv(KvKind::RAGGED), hopper, 1024));
    }
    for (dim, mask) in [(128, MaskKind { left: true, right: true }), (64, MaskKind::CAUSAL)] {
        let problem = Problem::forward(DType::Bf16, dim, mask).unwrap().backward();
        let space = Schedule::space(Family::BackwardSm90, &problem, hopper);
        kernels.extend(space.into_iter().map(|schedule| Kernel { problem, schedule, arch: hopper }));
    }
    compile_gradients(kernels);
}

/// Programs take registers beside the sums, so that up to 172 bytes are spilled; more would be another kernel.
#[test]
fn hopper_gradients_of_packed_programs_compile() {
    if common::nvrtc_or_skip("hopper_gradients_of_packed_programs_compile").is_none() {
        return;
    }
    // Whose scores may be far from zero, as biases are, is no problem of this family.
    let programs = PROGRAMS.into_iter().enumerate().step_by(2).filter(|(_, text)| !text.starts_with("bias"));
    let kernels = programs.map(|(i, text)| {
        let program = flashtune::Program::parse(text).unwrap();
        let problem = Problem::forward(DType::Bf16, [64, 128][i / 2 % 2], MaskKind::FULL).unwrap().backward();
        let packed = problem.with_program(program).with_kv(KvKind::RAGGED);
        default_kernel(Family::BackwardSm90, packed, arch("sm_90a"), 1024)
    });
    compile_all(&kernels.collect::<Vec<_>>(), 192);
}

/// Stores of every kind, and programs with each of their parts.
#[test]
fn plain_ragged_kernels_compile_without_spills() {
    if common::nvrtc_or_skip("plain_ragged_kernels_compile_without_spills").is_none() {
        return;
    }
    let elements = [KvElement::Same, KvElement::E4m3, KvElement::E5m2, KvElement::Int8];
    let dims = [(64, 64), (128, 128), (256, 256), (192, 128), (40, 72), (16, 16)];
    let mut kernels = Vec::new();
    for i in 0..12 {
        let scales = [KvScales::PerHead, KvScales::PerToken][i / 2 % 2];
        let store = KvStore { element: elements[i % 4], scales, v_columns: i % 3 == 0 };
        let (dim_qk, dim_v) = dims[i % 6];
        let mut problem = Problem::forward_qk_v(DType::ALL[i % 3], dim_qk, dim_v, MaskKind::ALL[i / 3 % 4]).unwrap();
        problem = problem.with_kv(KvKind::Ragged(store));
        if i % 5 == 4 {
            problem = problem.with_program(flashtune::Program::parse(PROGRAMS[8]).unwrap());
        }
        kernels.push(default_kernel(
            Family::ForwardNaiveRagged,
            problem,
            arch(["sm_75", "sm_80", "sm_90a", "sm_120a"][i % 4]),
            1024,
        ));
    }
    compile_all(&kernels, 0);
}

#[test]
fn quick_schedules_compile_to_little_and_without_spills() {
    if common::nvrtc_or_skip("quick_schedules_compile_to_little_and_without_spills").is_none() {
        return;
    }
    let program = |text| flashtune::Program::parse(text).unwrap();
    let problem = |i: usize, d| Problem::forward([DType::Bf16, DType::F16][i % 2], d, MaskKind::ALL[i % 4]).unwrap();
    let mut problems: Vec<_> = [64, 128, 256, 96].into_iter().enumerate().map(|(i, d)| problem(i, d)).collect();
    problems.push(problem(0, 128).with_program(program("s: f32[heads]; score = score + s[h] * (kv - q);")));
    let kernels: Vec<Kernel> = problems
        .into_iter()
        .map(|problem| {
            let default = default_kernel(Family::ForwardSm90, problem, arch("sm_90a"), 4096);
            Kernel { schedule: default.schedule.quick().expect("one"), ..default }
        })
        .collect();
    compile_all(&kernels, 0);
    // What a compiler's time goes by, and no other process disturbs.
    let size = |kernel| compile_with(&*Nvrtc::find().unwrap(), kernel, &TemplateSet::embedded()).unwrap().bytes.len();
    let default = default_kernel(Family::ForwardSm90, problem(1, 128), arch("sm_90a"), 4096);
    let quick = Kernel { schedule: default.schedule.quick().expect("one"), ..default };
    let (quick, default) = (size(&quick), size(&default));
    assert!(quick * 5 < default * 3, "{quick} and {default} bytes");
}

#[test]
fn a_sample_of_the_searched_space_compiles_on_every_arch() {
    if common::nvrtc_or_skip("a_sample_of_the_searched_space_compiles_on_every_arch").is_none() {
        return;
    }
    let mut rng = StdRng::seed_from_u64(20);
    let mut kernels: Vec<Kernel> = Vec::new();
    while kernels.len() < 18 {
        let dim = |rng: &mut StdRng| rng.random_range(2..=32) * 8;
        let dim_qk = dim(&mut rng);
        let dim_v = if rng.random_bool(0.7) { dim_qk } else { dim(&mut rng) };
        let dtype = [DType::F16, DType::Bf16][rng.random_range(0..2)];
        let mask = MaskKind::ALL[rng.random_range(0..4)];
        let problem = Problem::forward_qk_v(dtype, dim_qk, dim_v, mask).unwrap();
        let arch = arch(ARCHS[kernels.len() % ARCHS.len()]);
        let space: Vec<Kernel> = Schedule::space(Family::ForwardSm80, &problem, arch)
            .into_iter()
            .map(|schedule| Kernel { problem, schedule, arch })
            .filter(|k| k.check().is_ok())
            .collect();
        kernels.extend(space.choose(&mut rng));
    }
    // A schedule of the space may spill: that is what the tuner prunes by the log.
    compile_all(&kernels, u32::MAX);
}

/// Masks and changes of the score that hosts use, by shape of what they cost: bounds, tensors, divisions, functions.
const PROGRAMS: [&str; 12] = [
    "mask = kv <= q and q - kv < 1024;",
    "chunk: int in 1..1073741824; mask = kv // chunk == q // chunk and kv <= q;",
    "prefix: i32[batch]; mask = kv < prefix[b] or kv <= q + kv_len - q_len;",
    "d: i32[batch, kv_len] nondecreasing; mask = d[b, q] == d[b, kv] and kv <= q;",
    "slope: f32[heads]; score = score + slope[h] * (kv - (q + kv_len - q_len));",
    "cap: float; score = cap * tanh(score * (1.0 / cap));",
    "bias: bf16[heads, q_len, kv_len]; score = score + bias[h, q, kv];",
    "bias: f32[heads, *]; score = score + bias[h, clamp(kv - q, -128, 128) + 128];",
    "s: float[heads]; mask = kv <= q + 3 and kv % 3 != 1; score = 4.0 * tanh(score * 0.25); sink = s[h];",
    "score = 30.0 * tanh(score / 30.0);",
    "score = sigmoid(score) * sqrt(1.0 + score * score) + exp(-0.05 * abs(q - kv));",
    "t: float[heads, *]; n = abs(q - kv); mask = int_round(0.5 * n) < 900; \
     score = score + t[h, n if n < 8 else min(8 + int_floor(3.9 * log(n / 7.7)), 15)];",
];

const DOCUMENTS_WITH_BIASES: &str = "bias: bf16[heads, q_len, kv_len]; d: i32[batch, kv_len] nondecreasing; \
                                     mask = d[b, q] == d[b, kv]; score = score + bias[h, q, kv];";

#[test]
fn score_programs_compile_without_spills_in_default_schedules() {
    if common::nvrtc_or_skip("score_programs_compile_without_spills_in_default_schedules").is_none() {
        return;
    }
    let mut kernels = Vec::new();
    for (i, text) in PROGRAMS.into_iter().enumerate() {
        let program = flashtune::Program::parse(text).unwrap();
        let mask = MaskKind::ALL[i % 3];
        let with = |dtype, dim| Problem::forward(dtype, dim, mask).unwrap().with_program(program.clone());
        for dim in [128, [64, 96, 256][i % 3]] {
            let (dtype, arch) = ([DType::Bf16, DType::F16][i % 2], arch(["sm_80", "sm_90a"][i % 2]));
            kernels.push(default_kernel(Family::ForwardSm80, with(dtype, dim), arch, 4096));
        }
        if i % 3 == 0 {
            kernels.push(default_kernel(Family::ForwardNaive, with(DType::F32, 64), arch(ARCHS[i % 4]), 1024));
        }
        for dim in [128, [96, 64][i / 3 % 2]] {
            kernels.push(default_kernel(Family::ForwardSm90, with(DType::Bf16, dim), arch("sm_90a"), 4096));
        }
    }
    // Biases that are brought, beside a mask whose runs are found first.
    let program = flashtune::Program::parse(DOCUMENTS_WITH_BIASES).unwrap();
    for (dim, mask) in [(128, MaskKind::FULL), (64, MaskKind::CAUSAL)] {
        let problem = Problem::forward(DType::Bf16, dim, mask).unwrap().with_program(program.clone());
        kernels.push(default_kernel(Family::ForwardSm90, problem, arch("sm_90a"), 4096));
    }
    compile_all(&kernels, 0);
}

/// A Hopper kernel whose matrix instructions the compiler serialises, or whose registers it does not hand over, is a
/// different kernel from the one that was written: `compile_one` fails on any such note, and on a spill.
#[test]
fn hopper_kernels_compile_as_they_are_written() {
    if common::nvrtc_or_skip("hopper_kernels_compile_as_they_are_written").is_none() {
        return;
    }
    let hopper = arch("sm_90a");
    let mut kernels = Vec::new();
    let dims = [(64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (40, 72), (16, 16), (192, 192), (80, 80)];
    for (i, dims) in dims.into_iter().enumerate() {
        for j in 0..2 {
            let dtype = [DType::Bf16, DType::F16][(i + j) % 2];
            let problem = Problem::forward_qk_v(dtype, dims.0, dims.1, MaskKind::ALL[(i + 2 * j) % 4]).unwrap();
            kernels.push(default_kernel(Family::ForwardSm90, problem, hopper, [4096, 64][i % 2]));
        }
    }
    for mask in MaskKind::ALL {
        let problem = Problem::forward(DType::Bf16, 128, mask).unwrap();
        kernels.push(default_kernel(Family::ForwardSm90, problem, hopper, 4096));
    }
    compile_all(&kernels, 0);
    // What the estimate lets through must hold, wherever in the space. A few values that the producer parks once per
    // tile are no matter there: the tuner measures such kernels.
    kernels.clear();
    let mut rng = StdRng::seed_from_u64(90);
    while kernels.len() < 18 {
        let dim = rng.random_range(2..=32) * 8;
        let problem = Problem::forward(DType::Bf16, dim, MaskKind::ALL[rng.random_range(0..4)]).unwrap();
        let space: Vec<Kernel> = Schedule::space(Family::ForwardSm90, &problem, hopper)
            .into_iter()
            .map(|schedule| Kernel { problem, schedule, arch: hopper })
            .filter(|k| k.check().is_ok())
            .collect();
        assert!(space.len() > 50, "{problem}: {} schedules", space.len());
        kernels.extend(space.choose(&mut rng));
    }
    compile_all(&kernels, u32::MAX);
}

/// A few registers of a tile's beginning and of its producer may be spilled, more where a program is asked, and most
/// at a head dim of 256 under a mask on the left, or where rows of K have scales.
#[test]
fn hopper_kernels_of_e4m3_compile_with_few_spills() {
    if common::nvrtc_or_skip("hopper_kernels_of_e4m3_compile_with_few_spills").is_none() {
        return;
    }
    let (mut plain, mut finer, mut programs) = (Vec::new(), Vec::new(), Vec::new());
    for (i, dim) in [64, 128, 256, 80, 192].into_iter().enumerate() {
        let problem = Problem::forward(DType::E4m3, dim, MaskKind::ALL[i % 4]).unwrap();
        let problem = problem.with_output(DType::OUTPUTS_OF_E4M3[i % 4]);
        let with_scales = problem.with_scales(ScaleUnits::ALL[i + 1]);
        let default = |problem| default_kernel(Family::ForwardSm90Fp8, problem, arch("sm_90a"), [4096, 16384][i % 2]);
        plain.push(default(problem));
        finer.push(default(with_scales));
        for text in [PROGRAMS[2 * i], PROGRAMS[2 * i + 1]] {
            let problem = problem.with_program(Program::parse(text).unwrap());
            programs.push(default_kernel(Family::ForwardSm90Fp8, problem, arch("sm_90a"), 4096));
        }
    }
    compile_all(&plain, 240);
    compile_all(&finer, 300);
    compile_all(&programs, 128);
}

/// The same over pages and packs, of e4m3 and e5m2: tiles are read again from shared memory behind the products.
#[test]
fn hopper_kernels_of_e4m3_in_ragged_batches_compile_with_few_spills() {
    if common::nvrtc_or_skip("hopper_kernels_of_e4m3_in_ragged_batches_compile_with_few_spills").is_none() {
        return;
    }
    let mut kernels = [Vec::new(), Vec::new()];
    for (i, dim) in [64, 128, 256, 128, 192].into_iter().enumerate() {
        let problem = Problem::forward(DType::E4m3, dim, MaskKind::ALL[i % 4]).unwrap();
        let element = [KvElement::E4m3, KvElement::E5m2][i % 2];
        let store = KvStore { element, ..KvStore::default() };
        let problem = problem.with_output(DType::OUTPUTS_OF_E4M3[i % 4]).with_kv(KvKind::Ragged(store));
        let problem = match i {
            3 => problem.with_program(Program::parse("s: float[heads]; sink = s[h];").unwrap()),
            _ => problem,
        };
        kernels[i % 2].push(default_kernel(Family::ForwardSm90Fp8Ragged, problem, arch("sm_90a"), 1024));
    }
    let [e4m3, e5m2] = kernels;
    compile_all(&e4m3, 80);
    // Scores of e5m2 keys are summed step by step: at head dim 128 blocks of 96 keys spill nothing, and take 1 to 2 %
    // longer.
    compile_all(&e5m2, 440);
}

/// What no card has run: forward/sm80 on sm_75, and e4m3 by mma.sync.
#[test]
fn emulated_paths_compile_without_spills() {
    if common::nvrtc_or_skip("emulated_paths_compile_without_spills").is_none() {
        return;
    }
    let mut kernels = Vec::new();
    for (i, dim) in [16, 40, 64, 96, 128, 192, 256].into_iter().enumerate() {
        let problem = Problem::forward(DType::F16, dim, MaskKind::ALL[i % 4]).unwrap();
        kernels.push(default_kernel(Family::ForwardSm80, problem, arch("sm_75"), 1024));
        let problem = Problem::forward(DType::E4m3, dim.next_multiple_of(16), MaskKind::ALL[i % 4]).unwrap();
        // With scales of all three, head dims above 128 spill up to 536 bytes.
        let scales = ScaleUnits::ALL[[0, 1, 2, 3, 3, 1, 1][i]];
        let problem = problem.with_output(DType::OUTPUTS_OF_E4M3[i % 4]).with_scales(scales);
        // Hopper has the instruction, too.
        for name in ["sm_89", ["sm_120a", "sm_90a"][i % 2]] {
            kernels.push(default_kernel(Family::ForwardSm89Fp8, problem, arch(name), [1024, 32][i / 4]));
        }
    }
    let capped = "s: float[heads]; cap: float; score = cap * tanh(score / cap); mask = kv <= q + 3; sink = s[h];";
    let problem = Problem::forward(DType::F16, 64, MaskKind::CAUSAL).unwrap();
    let problem = problem.with_program(Program::parse(capped).unwrap());
    kernels.push(default_kernel(Family::ForwardSm80, problem, arch("sm_75"), 1024));
    compile_all(&kernels, 0);
}

#[test]
fn f32_on_every_arch_compiles_on_the_exact_path() {
    if common::nvrtc_or_skip("f32_on_every_arch_compiles_on_the_exact_path").is_none() {
        return;
    }
    let mut kernels = Vec::new();
    for (i, name) in ARCHS.into_iter().enumerate() {
        for dim in [16, 128, 256] {
            let problem = Problem::forward(DType::F32, dim, MaskKind::ALL[(i + dim as usize) % 4]).unwrap();
            assert_eq!(Family::candidates(&problem, arch(name)), [Family::ForwardNaive]);
            kernels.push(default_kernel(Family::ForwardNaive, problem, arch(name), 1024));
        }
    }
    compile_all(&kernels, 0);
}

/// Every element of a store, and every layout that is a constant of the code.
#[test]
fn append_kernels_compile_without_spills() {
    if common::nvrtc_or_skip("append_kernels_compile_without_spills").is_none() {
        return;
    }
    let mut kernels = Vec::new();
    let dims = [(128, 128), (64, 64), (256, 256), (192, 128), (80, 80), (24, 40), (16, 16), (59, 111)];
    let elements = [KvElement::Same, KvElement::E4m3, KvElement::E5m2, KvElement::Int8];
    for (i, (dim_qk, dim_v)) in dims.into_iter().enumerate() {
        for (j, element) in elements.into_iter().enumerate() {
            let dtype = DType::ALL[(i + j) % 3];
            let scales = [KvScales::PerHead, KvScales::PerToken][(i + j) % 2];
            let store = KvStore { element, scales, v_columns: (i + 2 * j) % 3 == 0 };
            let problem = Problem::forward_qk_v(dtype, dim_qk, dim_v, MaskKind::FULL).unwrap();
            let problem = Problem { op: Op::Append, ..problem.with_kv(KvKind::Ragged(store)) };
            let arch = arch(["sm_75", "sm_80", "sm_89", "sm_90a"][(i + j) % 4]);
            assert_eq!(Family::candidates(&problem, arch), [Family::AppendCuda]);
            kernels.push(default_kernel(Family::AppendCuda, problem, arch, 1));
        }
    }
    compile_all(&kernels, 0);
}

#[test]
fn copies_of_rows_compile_without_spills() {
    if common::nvrtc_or_skip("copies_of_rows_compile_without_spills").is_none() {
        return;
    }
    let kernel = |name| default_kernel(Family::PadCuda, Problem::pad(), arch(name), 1);
    compile_all(&["sm_75", "sm_80", "sm_89", "sm_90a"].map(kernel), 0);
}

/// Every dtype, both widths of a row's threads, head dims with and without a Hadamard matrix, and both conversions.
#[test]
fn quantise_kernels_compile_without_spills() {
    if common::nvrtc_or_skip("quantise_kernels_compile_without_spills").is_none() {
        return;
    }
    let dims = [(128, 128), (64, 64), (256, 256), (192, 128), (80, 80), (16, 16), (59, 111)];
    let kernels: Vec<Kernel> = (0..dims.len() * 3)
        .map(|n| {
            let (dim_qk, dim_v) = dims[n % dims.len()];
            let problem = Problem::forward_qk_v(DType::ALL[n % 3], dim_qk, dim_v, MaskKind::FULL).unwrap();
            let problem = Problem { op: Op::Quantise, ..problem };
            let arch = arch(["sm_90a", "sm_75", "sm_80", "sm_89"][(n + n / 4) % 4]);
            default_kernel(Family::QuantiseCuda, problem, arch, 1)
        })
        .collect();
    compile_all(&kernels, 0);
}

#[test]
fn a_bundle_for_gpus_is_built_where_none_is() {
    if common::nvrtc_or_skip("a_bundle_for_gpus_is_built_where_none_is").is_none() {
        return;
    }
    let place = common::Place::new();
    let out = place.path("gpu.ftb");
    let args = ["build", "--arch", "sm_80,sm_90a", "--dtype", "f16,bf16", "--head-dim", "64", "--mask", "causal"];
    let summary = place.json(&[&args[..], &["--out", out.to_str().unwrap()]].concat());
    assert_eq!(summary["records"], 4, "{summary}");
    for kernel in summary["kernels"].as_array().unwrap() {
        assert_eq!(kernel["spill_bytes"], "0", "{kernel}");
    }
    let listed = place.json(&["list", "--bundle", out.to_str().unwrap()]);
    assert_eq!(listed.as_array().unwrap().len(), 4);
    // Another device's bundle is of no use here, and says so.
    common::fails(&mut place.flashtune(&["import", out.to_str().unwrap()]), 2, &["arch", "sm_"]);
}

/// The oldest compiler that devices are known to have: what a newer one takes may be new to it, as `__builtin_offsetof`
/// was.
#[test]
fn the_oldest_compiler_takes_every_family() {
    let name = "the_oldest_compiler_takes_every_family";
    let Some(oldest) = std::env::var_os("FLASHTUNE_OLDEST_NVRTC").filter(|v| !v.is_empty()) else {
        assert!(std::env::var_os("CI").is_none(), "{name} needs FLASHTUNE_OLDEST_NVRTC; `cargo xtask test` sets it");
        return eprintln!("skipped {name}: FLASHTUNE_OLDEST_NVRTC names no folder");
    };
    let document = "kv <= q and (q // 100) == (kv // 100)";
    let cases: [&[&str]; 5] = [
        &["--arch", "sm_80,sm_90a", "--dtype", "f16,bf16", "--head-dim", "64", "--mask", "full"],
        &["--arch", "sm_80,sm_90a", "--dtype", "bf16", "--head-dim", "128", "--mask", "causal"],
        &["--arch", "sm_90a", "--dtype", "bf16", "--head-dim", "256", "--mask", "window:100,0"],
        &["--arch", "sm_80,sm_90a", "--dtype", "f32", "--head-dim", "64", "--mask", "causal"],
        &["--arch", "sm_80,sm_90a", "--dtype", "bf16", "--head-dim", "64", "--mask", document, "--score", "alibi"],
    ];
    for case in cases {
        let place = common::Place::new();
        let out = place.path("gpu.ftb");
        let args = [&["build"][..], case, &["--out", out.to_str().unwrap(), "--json"]].concat();
        // The wheel alone: nothing tells the loader where the compiler's other library lies.
        let built = common::json(place.flashtune(&args).env("FLASHTUNE_NVRTC", &oldest).env_remove("LD_LIBRARY_PATH"));
        assert!(built["records"].as_u64().unwrap() > 0, "{case:?}: {built}");
    }
}

/// What is built without a GPU is what would have been built beside one: nothing of the process, the user or the folder
/// is in it.
#[test]
fn whoever_compiles_a_kernel_for_a_gpu_has_the_same_bytes() {
    if common::nvrtc_or_skip("whoever_compiles_a_kernel_for_a_gpu_has_the_same_bytes").is_none() {
        return;
    }
    let build = |problem: &'static [&str]| {
        let place = common::Place::new();
        let (out, home) = (place.path("gpu.ftb"), place.path("home"));
        std::fs::create_dir(&home).unwrap();
        let args = [&["build", "--arch", "sm_80,sm_90a", "--out", out.to_str().unwrap()], problem].concat();
        let mut command = place.flashtune(&args);
        command.env("HOME", &home).env("TMPDIR", &home).env("SOURCE_DATE_EPOCH", "1700000000").current_dir(&home);
        common::json(command.arg("--json"));
        std::fs::read(out).unwrap()
    };
    let problem: &[&str] = &["--dtype", "f16", "--head-dim", "64", "--mask", "full"];
    let bundles =
        std::thread::scope(|scope| [(); 2].map(|()| scope.spawn(|| build(problem))).map(|t| t.join().unwrap()));
    assert!(bundles[0] == bundles[1]);
    assert!(bundles[0] != build(&["--dtype", "bf16", "--head-dim", "64", "--mask", "full"]));
}
