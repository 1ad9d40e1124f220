//! `backward/cpu` against the fp64 gradients, and the faults that this check finds in it.

use super::*;
use crate::compile::memory::compile_or_plant;
use crate::{BackwardCase, CpuDevice};
use flashtune_codegen::score::Program;
use flashtune_codegen::{Arch, CpuIsa, Family, Kernel, KvKind, Mask, Schedule, ShapeBucket, TemplateSet};
use std::collections::BTreeMap;

const WINDOW: Mask = Mask::Window { left: Some(20), right: Some(3) };

fn shape(mask: Mask, [batch, heads, kv_heads, q_len, kv_len]: [u32; 5]) -> Shape {
    Shape { batch, heads, kv_heads, q_len, kv_len, mask }
}

/// Compiles the default kernel of a problem, with other instructions where they are named and the host has them.
fn module(device: &dyn Device, problem: &Problem, isa: Option<CpuIsa>, templates: &TemplateSet) -> Arc<dyn Module> {
    let Arch::Cpu(host) = device.fingerprint().arch else { panic!("the host") };
    let arch = Arch::Cpu(isa.map_or(host, |isa| isa.min(host)));
    let bucket = ShapeBucket::of(&shape(Mask::Full, [1, 1, 1, 64, 64]));
    let schedule = Schedule::default_for(Family::BackwardCpu, problem, arch, &bucket).unwrap();
    let kernel = Kernel { problem: *problem, schedule, arch };
    device.load(&compile_or_plant(&kernel, templates).unwrap()).unwrap()
}

fn problem(dtype: DType, dims: [u32; 2], mask: Mask, program: Option<&str>) -> Problem {
    let problem = Problem::forward_qk_v(dtype, dims[0], dims[1], mask.kind()).unwrap().backward();
    program.map_or(problem, |text| problem.with_program(Program::parse(text).unwrap()))
}

/// Blocks of 64: within one, over several, none, rows and keys that see nothing, groups.
const SIZES: [[u32; 5]; 10] = [
    [1, 1, 1, 1, 1],
    [2, 4, 2, 63, 129],
    [2, 2, 1, 129, 63],
    [1, 3, 1, 1, 300],
    [1, 2, 2, 200, 7],
    [1, 6, 2, 128, 128],
    [1, 2, 2, 5, 0],
    [1, 2, 2, 0, 9],
    [0, 2, 2, 8, 8],
    [2, 0, 0, 8, 8],
];

#[test]
fn the_cpu_template_computes_gradients() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let templates = TemplateSet::embedded();
    let program = "slopes: float[heads]; bias: bf16[q_len, kv_len]; doc: int[batch, kv_len]; \
                   mask = kv <= q + 70 and doc[b, kv] % 3 != q % 5; \
                   score = 20.0 * tanh(score / 20.0) + slopes[h] * (kv - q) + bias[q, kv];";
    let sinks = "sinks: float[heads]; score = max(score, 0.2 * score); sink = sinks[h];";
    let words = "t: float[heads, 16]; n = abs(q - kv); mask = int_round(0.5 * (kv - q)) % 5 != 1 and sqrt(n) < 11.5; \
                 score = 0.5 * log(1.0 + exp(min(score, 20.0))) + 3.0 * sigmoid(score) - sqrt(1.0 + score * score) + \
                         t[h, n if n < 8 else min(8 + int_floor(3.9 * log(n / 7.7)), 15)];";
    let cases = [
        (problem(DType::F32, [64, 40], WINDOW, None), None, WINDOW),
        (problem(DType::F32, [24, 32], Mask::Full, Some(words)), None, Mask::Full),
        (problem(DType::Bf16, [24, 72], Mask::Causal, None), Some(CpuIsa::Avx2), Mask::Causal),
        (problem(DType::F16, [40, 40], Mask::Full, Some(program)), None, Mask::Full),
        (problem(DType::F32, [16, 24], Mask::Causal, Some(sinks)), Some(CpuIsa::Generic), Mask::Causal),
        (problem(DType::Bf16, [128, 128], Mask::Full, None), None, Mask::Full),
    ];
    let poisons = [Poison::None, Poison::Nan, Poison::Infinite];
    let distributions = [Distribution::Normal, Distribution::NormalWithOutliers, Distribution::Uniform];
    for (nth, (problem, isa, mask)) in cases.into_iter().enumerate() {
        let module = module(&*device, &problem, isa, &templates);
        for (i, sizes) in SIZES.into_iter().enumerate() {
            let inputs = CheckInputs {
                layout: Layout::ALL[(i + nth) % 3],
                distribution: distributions[(i + nth) % 3],
                seed: (100 * nth + i) as u64,
                lse: i % 2 == 0,
                poison: poisons[(i / 2 + nth) % 3],
                scale: (i % 4 == 1).then_some(-0.3),
            };
            let shape = shape(mask, sizes);
            let case = BackwardCase::new(device.clone(), &problem, &shape, &inputs).unwrap();
            let report = case.check(&*module).unwrap();
            assert!(report.passed(), "{problem} {shape} {inputs:?}: {report}");
        }
    }
}

/// Sequences of a block and of several, none of either side, and both sides of what blocks divide.
const MIXES: [&[[u32; 2]]; 5] = [
    &[[70, 133], [0, 40], [64, 64], [1, 300], [129, 0], [5, 200]],
    &[[200, 7]],
    &[[0, 0], [3, 9], [0, 1], [66, 65]],
    &[[1, 147], [113, 203], [128, 217]],
    &[[0, 9], [9, 0]],
];

fn packed_batch(mask: Mask, lengths: &[[u32; 2]], nth: usize) -> PackedBatch {
    let (unused, spare) = ([0, 3][nth % 2], [0, 70][nth / 2 % 2]);
    let wide = [nth.is_multiple_of(3), nth % 3 == 1];
    PackedBatch { heads: 4, kv_heads: 2, mask, lengths: lengths.to_vec(), unused, spare, wide }
}

#[test]
fn the_cpu_template_computes_gradients_of_packed_sequences() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let templates = TemplateSet::embedded();
    let program = "slopes: float[heads]; bias: bf16[batch, q_len]; doc: int[batch, kv_len]; \
                   mask = kv <= q + kv_len - q_len + 70 and doc[b, kv] % 3 != q % 5; \
                   score = 20.0 * tanh(score / 20.0) + slopes[h] * (kv - (q + kv_len - q_len)) + bias[b, q];";
    let cases = [
        (problem(DType::F32, [64, 40], WINDOW, None), WINDOW),
        (problem(DType::Bf16, [24, 72], Mask::Causal, None), Mask::Causal),
        (problem(DType::F16, [40, 40], Mask::Full, Some(program)), Mask::Full),
    ];
    for (nth, (problem, mask)) in cases.into_iter().enumerate() {
        let problem = problem.with_kv(KvKind::RAGGED);
        let module = module(&*device, &problem, None, &templates);
        for (i, lengths) in MIXES.into_iter().enumerate() {
            let inputs = CheckInputs {
                layout: Layout::ALL[(i + nth) % 3],
                seed: (100 * nth + i) as u64,
                lse: i % 2 == 0,
                poison: [Poison::None, Poison::Nan, Poison::Infinite][(i + nth) % 3],
                ..CheckInputs::default()
            };
            let batch = packed_batch(mask, lengths, i + nth);
            let case = BackwardCase::packed(device.clone(), &problem, &batch, &inputs).unwrap();
            let report = case.check(&*module).unwrap();
            assert!(report.passed(), "{problem} {batch} {inputs:?}: {report}");
        }
    }
}

/// Where the rows of a pack are taken from and put.
#[test]
fn every_kind_of_fault_in_packed_gradients_is_found() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let embedded = TemplateSet::embedded();
    let text = embedded.files().find(|(name, _)| *name == "backward/cpu.c").unwrap().1;
    let problem = problem(DType::F32, [16, 16], Mask::Causal, None).with_kv(KvKind::RAGGED);
    let batch = packed_batch(Mask::Causal, &[[70, 133], [20, 90], [0, 7], [65, 64]], 1);
    // Rows that a fault has two threads write have other bytes in some runs: one thread alone runs all.
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for (from, to) in [
        ("s.q_len = (int32_t)q.rows", "s.q_len = (int32_t)q.rows + 1"),
        ("s.kv_len = (int32_t)kv.rows", "s.kv_len = (int32_t)kv.rows + 1"),
        ("lengths ? min64", "0 ? min64"),
        ("rows_from(s.k, s.k_stride, kv)", "rows_from(s.k, s.k_stride, q)"),
        ("rows_from(s.dv, s.dv_stride, kv)", "rows_from(s.dv, s.dv_stride, q)"),
        ("s.lse += q.first;", ""),
        ("if (s.dlse) s.dlse += q.first;", ""),
        ("head * args->q_rows", "head * args->q_len"),
        ("if (key < args.kv_len)", "if (key + BLOCK_KV <= args.kv_len)"),
        ("if (query < args.q_len)", "if (batch == 0 && query < args.q_len)"),
    ] {
        assert!(text.contains(from), "{from}");
        let set = BTreeMap::from([("backward/cpu.c".to_owned(), text.replacen(from, to, 1))]);
        let module = module(&*device, &problem, Some(CpuIsa::Generic), &TemplateSet::overlaid(set).unwrap());
        let inputs = CheckInputs { lse: true, ..CheckInputs::default() };
        let case = BackwardCase::packed(device.clone(), &problem, &batch, &inputs).unwrap();
        let report = alone.install(|| case.check(&*module).unwrap());
        assert!(!report.passed() && report.repeatable, "{to}: {report}");
    }
}

#[test]
fn every_kind_of_fault_in_gradients_is_found() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let embedded = TemplateSet::embedded();
    let text = embedded.files().find(|(name, _)| *name == "backward/cpu.c").unwrap().1;
    let problem = problem(DType::F32, [16, 16], Mask::Causal, None);
    let shape = shape(Mask::Causal, [1, 4, 2, 100, 90]);
    let case = |poison| {
        let inputs = CheckInputs { poison, layout: Layout::Padded, lse: true, ..CheckInputs::default() };
        BackwardCase::new(device.clone(), &problem, &shape, &inputs).unwrap()
    };
    for (from, to, what) in [
        ("key - diagonal(args) - args->window_right", "key - diagonal(args) - args->window_right + 1", "dV["),
        ("g < group; g++", "g < group - 1; g++", "dV["),
        ("sum -= head->dlse[at]", "sum += head->dlse[at]", "dQ["),
        ("element *dq = (element *)args->dq", "if (query > 0) return;\n    element *dq = (element *)args->dq", "dQ["),
        ("to[i * width + d] = 0;", "to[i * width + d] = 0;\n    if (n) ((float *)from)[0] += 1;", "was written"),
        ("narrow_row(to + i * stride, row, dim)", "narrow_row(to + i * stride, row, dim + 8)", "between its rows"),
        ("if (n < all)", "static float more;\n    to[0] += more += 1e-6f;\n    if (n < all)", "different bytes"),
    ] {
        assert!(text.contains(from), "{from}");
        let set = BTreeMap::from([("backward/cpu.c".to_owned(), text.replacen(from, to, 1))]);
        let module = module(&*device, &problem, Some(CpuIsa::Generic), &TemplateSet::overlaid(set).unwrap());
        let report = case(Poison::None).check(&*module).unwrap();
        assert!(!report.passed() && report.to_string().contains(what), "{to}: {report}");
    }
    // What a query may not see is given the weight 0.
    let leak = text.replace("if (seen && !seen[of[i] - a + k * a_step]) continue;", "");
    assert_ne!(leak, text);
    let set = TemplateSet::overlaid(BTreeMap::from([("backward/cpu.c".to_owned(), leak)])).unwrap();
    let module = module(&*device, &problem, Some(CpuIsa::Generic), &set);
    assert!(case(Poison::None).check(&*module).unwrap().passed());
    assert!(!case(Poison::Nan).check(&*module).unwrap().passed());
}
