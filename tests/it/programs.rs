//! Score programs, from text to the CPU kernel, against the interpreter in fp64.

use crate::random::{DECLARATIONS, Generator};
use flashtune::{DType, Distribution, Layout, Mask, MaskKind, Problem, Shape};
use flashtune_codegen::score::{BUILTINS, Elements, Program, Scalar, SideData, Storage};
use flashtune_codegen::{Arch, CpuIsa, CpuSchedule, Family, Kernel, Schedule, ShapeBucket, TemplateSet};
use flashtune_runtime::{CheckCase, CheckInputs, CpuDevice, Device, Module, Poison, compile};
use rand::Rng;
use std::sync::Arc;

/// A kernel of small blocks, so that small sizes have tiles of every kind, compiled for the host.
struct Compiled {
    device: Arc<dyn Device>,
    module: Arc<dyn Module>,
}

impl Compiled {
    fn new(program: &Program, dtype: DType, mask: MaskKind) -> Self {
        let device: Arc<dyn Device> = CpuDevice::open().unwrap();
        let problem = Problem::forward(dtype, 16, mask).unwrap().with_program(program.clone());
        let arch = device.arch();
        let Arch::Cpu(isa) = arch else { panic!("the CPU's arch") };
        let bucket = ShapeBucket { parallel: 8, group: 2, q_len: 64, kv_len: 64, ..Default::default() };
        let Schedule::Cpu(s) = Schedule::default_for(Family::ForwardCpu, &problem, arch, &bucket).unwrap() else {
            panic!("the CPU's schedule")
        };
        let isa = if dtype == DType::F32 { isa.min(CpuIsa::Avx512) } else { s.isa };
        let (unroll_q, block_kv) = if isa == CpuIsa::Amx { (2, 32) } else { (1, 2 * s.unroll_kv) };
        let schedule = CpuSchedule { isa, unroll_q, block_q: 2 * unroll_q * isa.lanes(), block_kv, ..s };
        let kernel = Kernel { problem, schedule: Schedule::Cpu(schedule), arch };
        let artifact = compile(&kernel, &TemplateSet::embedded()).unwrap_or_else(|e| panic!("{program}\n{e}"));
        let module = device.load(&artifact).unwrap();
        Self { device, module }
    }

    fn check(&self, shape: &Shape, data: &SideData, inputs: &CheckInputs) -> Result<(), String> {
        let problem = &self.module.kernel().problem;
        let case =
            CheckCase::with_side(self.device.clone(), problem, shape, inputs, data).map_err(|e| e.to_string())?;
        let report = case.check(&*self.module).unwrap();
        let program = problem.program.map_or("", |p| p.kept().text());
        if report.passed() { Ok(()) } else { Err(format!("{report}\n{program}\n{shape:?}\n{data:?}")) }
    }
}

/// Data for every scalar and tensor that a program declares.
fn data_for(program: &Program, sizes: &Shape, g: &mut Generator) -> SideData {
    use flashtune_codegen::score::Axis;
    let mut data = SideData::default();
    for d in program.declarations() {
        let range = d.int_range();
        let (lo, hi) = (range.lo.max(-20), range.hi.min(20));
        let Some(axes) = &d.axes else {
            let int = Scalar::Int(g.rng.random_range(lo..=hi));
            data = data.scalar(&d.name, if d.storage == Storage::F32 { Scalar::Float(5.0) } else { int });
            continue;
        };
        let length = |a: &Axis| a.length(sizes).unwrap_or(41);
        let shape: Vec<usize> = axes.iter().map(|a| length(a) as usize).collect();
        let n = shape.iter().product();
        let rng = &mut g.rng;
        let elements = match d.storage {
            Storage::Bool => Elements::Bool((0..n).map(|_| rng.random_bool(0.7)).collect()),
            Storage::I32 | Storage::I64 => {
                let mut x: Vec<i64> = (0..n).map(|_| rng.random_range(lo.max(0)..=hi.min(4))).collect();
                if d.nondecreasing {
                    x.chunks_mut(*shape.last().unwrap()).for_each(|r| r.sort());
                }
                Elements::Int(x)
            }
            // Values that every storage holds.
            _ => Elements::Float((0..n).map(|_| rng.random_range(-64..64) as f32 / 64.0).collect()),
        };
        data = data.tensor(&d.name, &shape, elements);
    }
    data
}

#[test]
fn every_built_in_is_right_on_the_cpu_in_every_dtype() {
    let mut g = Generator::new(31);
    let mut extra: Vec<(&str, Program)> = BUILTINS.iter().map(|b| (b.name, Program::parse(b.text).unwrap())).collect();
    let mut add = |name, text: &str| extra.push((name, Program::parse(text).unwrap()));
    add("all masked", "mask = kv < q and q < kv;");
    add("bf16 bias", "t: bf16[heads, q_len, kv_len]; score = score + t[h, q, kv];");
    add("f16 bias", "t: f16[kv_heads, 1, kv_len]; score = score * 2.0 + t[h_kv, q, kv];");
    add(
        "all at once",
        "s: float[heads]; mask = kv <= q + 3 and kv % 3 != 1; score = 4.0 * tanh(score * 0.25); sink = s[h];",
    );
    add("masked by the score", "score = select(kv <= q, score, -inf);");
    // A masked key's score is never seen.
    add("division by zero", "mask = kv != q; score = score / (kv - q) + log2(abs(kv - q)) * 0.1;");
    add(
        "functions",
        "score = 0.5 * log(1.0 + exp(min(score, 20.0))) + 3.0 * sigmoid(score) - sqrt(1.0 + score * score) \
         + exp(-0.05 * abs(q - kv));",
    );
    add(
        "floats as ints",
        "t: float[heads, 16]; n = abs(q - kv); \
         mask = int_round(0.5 * (kv - q)) % 5 != 1 and int_ceil(0.25 * kv) <= int_trunc(0.75 * q) + 40; \
         score = score + t[h, n if n < 8 else min(8 + int_floor(3.9 * log(n / 7.7)), 15)] * sqrt(n);",
    );
    add(
        "where functions end",
        "mask = (int_trunc(1e30 * (kv - 2)) < 0 or int_floor(log(kv - 5)) % 3 == 0 or sqrt(kv - 3) == 0.0) and \
         not sigmoid(q - kv - 200.0) == 0.5; \
         score = score + log(kv) * exp(select(kv % 2 == 1, -inf, -1.0)) + sigmoid(select(kv == q, inf, -inf));",
    );
    for (i, (name, program)) in extra.iter().enumerate() {
        let mask = if i % 4 == 3 { Mask::Causal } else { Mask::Full };
        let dtype = DType::ALL[i % 3];
        let compiled = Compiled::new(program, dtype, mask.kind());
        for (q_len, kv_len) in [(77, 77), (1, 90), (50, 3)] {
            let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len, kv_len, mask };
            let data = data_for(program, &shape, &mut g);
            for poison in [Poison::None, Poison::Nan, Poison::Infinite] {
                let inputs = CheckInputs { layout: Layout::Bshd, seed: i as u64, poison, ..CheckInputs::default() };
                compiled.check(&shape, &data, &inputs).unwrap_or_else(|e| panic!("{name} {dtype} {shape}: {e}"));
            }
        }
    }
}

#[test]
fn random_programs_agree_with_the_interpreter_on_the_cpu() {
    let mut g = Generator::new(33);
    for round in 0..10 {
        let mask = g.mask(1 + round % 5);
        // Bounded, so that the softmax does not turn the last digit of a large score into an error of any size.
        let score = format!("score + clamp({}, -4.0, 4.0)", g.score(1 + round % 4).text());
        let text = format!("{DECLARATIONS} mask = {}; score = {score};", mask.text());
        let program = Program::parse(&text).unwrap();
        let compiled = Compiled::new(&program, DType::F32, MaskKind::FULL);
        for seed in 0..12 {
            let sizes = g.sizes();
            let data = g.data(&sizes);
            let inputs = CheckInputs { distribution: Distribution::Normal, seed, ..CheckInputs::default() };
            compiled.check(&sizes, &data, &inputs).unwrap_or_else(|e| panic!("{round}: {e}"));
        }
    }
}

#[test]
fn programs_of_thousands_of_nodes_compile_in_seconds_and_are_right() {
    let list = |n: i32, item: &dyn Fn(i32) -> String, between: &str| {
        let items: Vec<String> = (0..n).map(item).collect();
        items.join(between)
    };
    // gcc's optimiser took minutes for each of them.
    for text in [
        format!("mask = {};", list(2000, &|i| format!("kv == q + {}", 3 * i), " or ")),
        format!("score = {}score{};", "tanh(".repeat(2000), ")".repeat(2000)),
        format!("score = min({});", list(10_000, &|i| format!("score + {i}.0"), ", ")),
        format!("score = score{};", list(2000, &|i| format!(" + {i}.5 * (kv % {})", i + 2), "")),
    ] {
        let program = Program::parse(&text).unwrap();
        let started = std::time::Instant::now();
        let compiled = Compiled::new(&program, DType::F32, MaskKind::FULL);
        let took = started.elapsed();
        assert!(took.as_secs() < 60, "{took:?}: {}", &text[..40]);
        let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 19, kv_len: 23, mask: Mask::Full };
        let inputs = CheckInputs { distribution: Distribution::Normal, ..CheckInputs::default() };
        compiled.check(&shape, &SideData::default(), &inputs).unwrap_or_else(|e| panic!("{}: {e}", &text[..40]));
    }
}

#[test]
fn what_cannot_compute_a_program_says_so() {
    let program = Program::mask_of("kv <= q and q - kv < 100").unwrap();
    let problem = Problem::forward(DType::Bf16, 64, MaskKind::FULL).unwrap().with_program(program);
    let hopper: Arch = "sm_90a".parse().unwrap();
    assert!(Family::ForwardSm90.supports(&problem, hopper).is_ok());
    let bias = Program::score_of("x: bf16[heads, q_len, kv_len]; score + x[h, q, kv]").unwrap();
    let wide = Problem::forward(DType::Bf16, 256, MaskKind::FULL).unwrap().with_program(bias);
    let e = Family::ForwardSm90.supports(&wide, hopper).unwrap_err().to_string();
    assert!(e.contains("forward/sm90") && e.contains("forward/sm80"), "{e}");
    assert!(Family::ForwardSm80.supports(&wide, hopper).is_ok());
    // Too long for the compiler, where a thread holds many scores.
    let long = |n: usize| {
        let terms: String = (0..n).map(|i| format!(" + {i}.5 * (kv % {})", i + 2)).collect();
        let program = Program::score_of(&format!("score{terms}")).unwrap();
        Problem::forward(DType::Bf16, 64, MaskKind::FULL).unwrap().with_program(program)
    };
    let best = |problem: &Problem| Family::candidates(problem, hopper)[0];
    let families = [10, 100, 1000].map(|n| best(&long(n)));
    assert_eq!(families, [Family::ForwardSm90, Family::ForwardSm80, Family::ForwardNaive]);
    assert!(Family::candidates(&long(2000), hopper).is_empty());
    let text = format!("score{}", " + 1.0".repeat(10_000));
    let sum = problem.with_program(Program::score_of(&text).unwrap());
    assert_eq!(best(&sum), Family::ForwardSm90, "a sum with the score costs nothing");
    let e = Family::ForwardSm90.supports(&long(100), hopper).unwrap_err().to_string();
    assert!(e.contains("256 operations") && e.contains("forward/sm80"), "{e}");
    let needs = Program::score_of("s: float[heads]; score + s[h]").unwrap();
    let shape = Shape { batch: 1, heads: 2, kv_heads: 2, q_len: 4, kv_len: 4, mask: Mask::Full };
    let problem = Problem::forward(DType::F32, 64, MaskKind::FULL).unwrap().with_program(needs);
    let device = CpuDevice::open().unwrap();
    let e =
        CheckCase::new(device, &problem, &shape, &CheckInputs::default()).err().expect("data is missing").to_string();
    assert!(e.contains("the tensor `s` is missing"), "{e}");
}
