//! `gradient/cpu` against the gradients in fp64, and the faults that this check finds in it.

use super::*;
use crate::compile::memory::compile_or_plant;
use crate::{CpuDevice, GradientCase, typical_side};
use flashtune_codegen::score::{Elements, Program, Storage};
use flashtune_codegen::{Arch, CpuIsa, Family, Kernel, Mask, Schedule, ShapeBucket, TemplateSet};
use std::collections::BTreeMap;

fn shape(mask: Mask, [batch, heads, kv_heads, q_len, kv_len]: [u32; 5]) -> Shape {
    Shape { batch, heads, kv_heads, q_len, kv_len, mask }
}

/// Compiles the default kernel of a problem.
fn module(device: &dyn Device, problem: &Problem, isa: Option<CpuIsa>, templates: &TemplateSet) -> Arc<dyn Module> {
    let Arch::Cpu(host) = device.fingerprint().arch else { panic!("the host") };
    let arch = Arch::Cpu(isa.map_or(host, |isa| isa.min(host)));
    let bucket = ShapeBucket::of(&shape(Mask::Full, [1, 1, 1, 64, 64]));
    let schedule = Schedule::default_for(Family::GradientCpu, problem, arch, &bucket).unwrap();
    let kernel = Kernel { problem: *problem, schedule, arch };
    device.load(&compile_or_plant(&kernel, templates).unwrap()).unwrap()
}

fn problem(dtype: DType, dims: [u32; 2], mask: Mask, program: &str, by: &str) -> Problem {
    let problem = Problem::forward_qk_v(dtype, dims[0], dims[1], mask.kind()).unwrap();
    problem.with_program(Program::parse(program).unwrap()).gradient_by(by).unwrap()
}

/// Within blocks of 64, over several, none, rows and keys that see nothing, groups.
const SIZES: [[u32; 5]; 8] = [
    [2, 4, 2, 63, 129],
    [2, 2, 1, 129, 40],
    [1, 3, 1, 1, 300],
    [3, 6, 2, 70, 128],
    [1, 2, 2, 5, 0],
    [1, 2, 2, 0, 9],
    [0, 2, 2, 8, 8],
    [1, 1, 1, 1, 1],
];

/// Programs, what they are derived by, and whether all axes of that are of one element.
const READS: [(&str, &str); 12] = [
    ("slopes: float[heads]; score = score + slopes[h] * (kv - q);", "slopes"),
    ("t: bf16[batch, heads, q_len, kv_len]; mask = kv % 3 != q % 5; score = score + t[b, h, q, kv];", "t"),
    ("t: float[q_len, kv_len]; score = 9.0 * tanh(score / 9.0) + t[q, kv];", "t"),
    ("t: f16[heads, kv_len]; score = score + t[h, kv];", "t"),
    ("t: float[batch, q_len]; score = score * (1.0 + 0.1 * t[b, q]);", "t"),
    ("sinks: float[heads]; score = max(score, 0.2 * score); sink = sinks[h];", "sinks"),
    ("sinks: float[heads, *]; score = score + sinks[h, 1]; sink = sinks[h, q % 3];", "sinks"),
    ("table: float[heads, *]; score = score + table[h, clamp(kv - q, -9, 9) + 9];", "table"),
    ("doc: int[batch, kv_len]; t: float[*]; mask = doc[b, kv] % 4 != 1; score = score + t[doc[b, kv]] * score;", "t"),
    ("cap: float in 1..50; score = cap * tanh(score / cap);", "cap"),
    ("t: float[kv_heads]; low: float[heads]; score = score + clamp(t[h_kv] * float(q), low[h], 2.0);", "low"),
    ("t: float[*, *]; score = score + t[q, kv] + 0.5 * t[kv, q];", "t"),
];

#[test]
fn the_cpu_template_sums_gradients_of_what_is_read() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let templates = TemplateSet::embedded();
    let window = Mask::Window { left: Some(30), right: Some(3) };
    for (nth, (text, by)) in READS.into_iter().enumerate() {
        let mask = [Mask::Full, Mask::Causal, window][nth % 3];
        let isa = [None, Some(CpuIsa::Avx2), None, Some(CpuIsa::Generic)][nth % 4];
        let problem = problem(DType::ALL[nth % 3], [[64, 40], [24, 72], [16, 16]][nth % 3], mask, text, by);
        let module = module(&*device, &problem, isa, &templates);
        for (i, sizes) in SIZES.into_iter().enumerate() {
            let inputs = CheckInputs {
                layout: Layout::ALL[(i + nth) % 3],
                distribution: [Distribution::Normal, Distribution::Uniform][(i + nth) % 2],
                seed: (100 * nth + i) as u64,
                lse: i % 2 == 0,
                poison: [Poison::None, Poison::Nan, Poison::Infinite][(i / 2 + nth) % 3],
                scale: (i % 4 == 1).then_some(-0.3),
            };
            let shape = shape(mask, sizes);
            let stored = [Storage::F32, Storage::Bf16, Storage::F16][(i + nth) % 3];
            let mut data = typical_side(problem.program.unwrap().kept(), &shape, inputs.seed);
            // Of every other shape some axis is broadcast.
            if let Some(tensor) = data.tensors.get_mut(by).filter(|t| i % 2 == 1 && !t.shape.contains(&0)) {
                let axis = (i / 2) % tensor.shape.len();
                let Elements::Float(values) = &mut tensor.elements else { panic!("floats") };
                values.truncate(values.len() / tensor.shape[axis]);
                tensor.shape[axis] = 1;
            }
            let case = GradientCase::with_side(device.clone(), &problem, &shape, &inputs, stored, &data).unwrap();
            let report = case.check(&*module).unwrap();
            assert!(report.passed(), "{problem} {shape} {inputs:?} {stored:?}: {report}\n{text}");
        }
    }
}

#[test]
fn every_kind_of_fault_in_sums_of_gradients_is_found() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let embedded = TemplateSet::embedded();
    let text = embedded.files().find(|(name, _)| *name == "gradient/cpu.c").unwrap().1;
    let shape = shape(Mask::Causal, [2, 4, 2, 100, 90]);
    let program = "t: float[heads, *]; score = score + t[h, (q - kv) % 5]; sink = t[h, 2];";
    let problem = problem(DType::F32, [16, 16], Mask::Causal, program, "t");
    let inputs = CheckInputs { poison: Poison::None, layout: Layout::Padded, lse: true, ..CheckInputs::default() };
    let data = typical_side(problem.program.unwrap().kept(), &shape, 1);
    let case = GradientCase::with_side(device.clone(), &problem, &shape, &inputs, Storage::F32, &data).unwrap();
    for (from, to, what) in [
        ("nth < places * (part + 1) / args->splits", "nth < places * (part + 1) / args->splits - 1", "dt["),
        ("at[1] * counts->of[2] + at[2]", "at[1] + at[2]", "dt["),
        ("part < args->splits; part++", "part < args->splits - 1; part++", "dt["),
        ("if (key == counts.keys)", "if (key < 0)", "dt["),
        ("* -scratch->delta[i]", "* scratch->delta[i]", "dt["),
        ("sum -= args->dlse[row + i]", "sum += args->dlse[row + i]", "dt["),
        ("+ args->window_right;", "+ args->window_right + 1;", "dt["),
        ("ft_clamp64(index, args->length[axis])", "0 * ft_clamp64(index, args->length[axis])", "dt["),
        (
            "store(args, at, sum);",
            "static float more;\n        store(args, at, sum + (more += 1e-6f));",
            "different bytes",
        ),
        ("((float *)args->out)[at] = x", "((float *)args->out)[at + 1] = x", "were written"),
    ] {
        assert!(text.contains(from), "{from}");
        let set = BTreeMap::from([("gradient/cpu.c".to_owned(), text.replacen(from, to, 1))]);
        let module = module(&*device, &problem, Some(CpuIsa::Generic), &TemplateSet::overlaid(set).unwrap());
        let report = case.check(&*module).unwrap();
        assert!(!report.passed() && report.to_string().contains(what), "{to}: {report}");
    }
}
