//! `backward/cpu` against the fp64 gradients, and the faults that this check finds in it.

use super::*;
use crate::compile::memory::compile_or_plant;
use crate::{BackwardCase, CpuDevice};
use flashtune_codegen::score::Program;
use flashtune_codegen::{Arch, CpuIsa, Family, Kernel, Mask, Schedule, ShapeBucket, TemplateSet};
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
    let cases = [
        (problem(DType::F32, [64, 40], WINDOW, None), None, WINDOW),
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
