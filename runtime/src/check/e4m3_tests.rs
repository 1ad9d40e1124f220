//! `forward/cpu_e4m3` within the bound of kernels that round P, and the faults that this check finds in it.

use super::*;
use crate::CpuDevice;
use crate::compile::memory::compile_or_plant;
use flashtune_codegen::{Family, Kernel, Mask, MaskKind, ScaleUnit, ScaleUnits, Schedule, ShapeBucket, TemplateSet};
use std::collections::BTreeMap;

fn module(device: &dyn Device, problem: &Problem, templates: &TemplateSet) -> Arc<dyn Module> {
    let arch = device.fingerprint().arch;
    let schedule = Schedule::default_for(Family::ForwardCpuE4m3, problem, arch, &ShapeBucket::default()).unwrap();
    device.load(&compile_or_plant(&Kernel { problem: *problem, schedule, arch }, templates).unwrap()).unwrap()
}

fn shape(mask: Mask, [batch, heads, kv_heads, q_len, kv_len]: [u32; 5]) -> Shape {
    Shape { batch, heads, kv_heads, q_len, kv_len, mask }
}

#[test]
fn the_host_computes_e4m3_within_the_bound() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let templates = TemplateSet::embedded();
    let window = Mask::Window { left: Some(20), right: Some(3) };
    let sizes = [(Mask::Full, [64, 64]), (Mask::Causal, [128, 48]), (window, [33, 80]), (Mask::Causal, [256, 256])];
    for (n, scales) in ScaleUnits::ALL.into_iter().enumerate() {
        let (mask, dims) = sizes[n % 4];
        let problem = Problem::forward_qk_v(DType::E4m3, dims[0], dims[1], mask.kind()).unwrap();
        let problem = problem.with_output(DType::OUTPUTS_OF_E4M3[n % 4]).with_scales(scales);
        let module = module(&*device, &problem, &templates);
        for (i, sizes) in
            [[2, 4, 2, 63, 129], [1, 2, 1, 70, 40], [1, 3, 1, 1, 300], [1, 2, 2, 5, 0]].into_iter().enumerate()
        {
            let poison = [Poison::None, Poison::Nan, Poison::Infinite][(n + i) % 3];
            let layout = Layout::ALL[(n + i) % Layout::ALL.len()];
            // Channels that are larger than others, and a mean of V.
            let distribution = if n % 2 == 0 { Distribution::Normal } else { Distribution::NormalWithOutliers };
            let inputs =
                CheckInputs { poison, layout, lse: true, seed: i as u64, distribution, ..CheckInputs::default() };
            let shape = shape(mask, sizes);
            let case = CheckCase::typical(device.clone(), &problem, &shape, &inputs).unwrap();
            let report = case.check(&*module).unwrap();
            assert!(report.passed(), "{problem} {shape} {inputs:?}: {report}");
        }
    }
}

/// Changes of the score, masks of every kind, sinks, and what tensors hold; with scales of every unit.
const PROGRAMS: [&str; 6] = [
    "cap: float; score = cap * tanh(score * (1.0 / cap));",
    "slope: float[heads]; score = score - slope[h] * abs(q + kv_len - q_len - kv);",
    "s: float[heads]; mask = kv <= q + 9 and kv % 3 != 1; score = 4.0 * tanh(score * 0.25); sink = s[h];",
    "doc: int[batch, kv_len]; sinks: float[heads]; mask = doc[b, kv] == doc[b, q]; sink = sinks[h];",
    "bias: bf16[heads, q_len, kv_len]; score = score + bias[h, q, kv];",
    "score = -inf if q % 5 == 2 else score;",
];

#[test]
fn the_host_computes_programs_of_e4m3_within_the_bound() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let templates = TemplateSet::embedded();
    let window = Mask::Window { left: Some(30), right: Some(3) };
    for (n, text) in PROGRAMS.into_iter().enumerate() {
        let mask = [Mask::Full, Mask::Causal, window][n % 3];
        let problem = Problem::forward_qk_v(DType::E4m3, [32, 80][n % 2], 48, mask.kind()).unwrap();
        let problem = problem.with_output(DType::OUTPUTS_OF_E4M3[n % 4]).with_scales(ScaleUnits::ALL[(n * 3) % 8]);
        let problem = problem.with_program(flashtune_codegen::score::Program::parse(text).unwrap());
        let module = module(&*device, &problem, &templates);
        for (i, sizes) in [[2, 4, 2, 63, 129], [1, 2, 1, 70, 40], [1, 3, 1, 1, 300]].into_iter().enumerate() {
            let poison = [Poison::None, Poison::Nan][(n + i) % 2];
            let inputs = CheckInputs { poison, lse: true, seed: i as u64, ..CheckInputs::default() };
            let shape = shape(mask, sizes);
            let case = CheckCase::typical(device.clone(), &problem, &shape, &inputs).unwrap();
            let report = case.check(&*module).unwrap();
            assert!(report.passed(), "{problem} {text} {shape} {inputs:?}: {report}");
        }
    }
}

#[test]
fn faults_of_e4m3_on_the_host_are_found() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let embedded = TemplateSet::embedded();
    let text = embedded.files().find(|(name, _)| *name == "forward/cpu_e4m3.c").unwrap().1;
    let shape = shape(Mask::Causal, [2, 4, 2, 40, 50]);
    let plain = Problem::forward(DType::E4m3, 32, MaskKind::CAUSAL).unwrap();
    let finer = plain.with_scales(ScaleUnits { q: ScaleUnit::Rows, k: ScaleUnit::Rows, v: ScaleUnit::Channel });
    let case = |problem: &Problem, seed| {
        let inputs = CheckInputs { poison: Poison::Nan, lse: true, seed, ..CheckInputs::default() };
        CheckCase::typical(device.clone(), problem, &shape, &inputs).unwrap()
    };
    // Rows have scales of their own in some, and in others share them.
    let (of_heads, of_finer) = (vec![case(&plain, 1)], (1..=4).map(|seed| case(&finer, seed)).collect::<Vec<_>>());
    let narrow = plain.with_output(DType::E4m3);
    let of_narrow = vec![case(&narrow, 1)];
    let of_output = [
        ("args->o_scale ? *args->o_scale : 1", "1"),
        ("to[i] = narrow_kv(from[i])", "to[i] = narrow_kv(from[i]) & 0x7f"),
        ("to[i] = narrow_kv(from[i])", "to[i] = narrow_kv(from[i] * 1.04f)"),
    ];
    let finers = [
        // Of another token, of another head, of the next channel, and of blocks.
        ("(key >> args->scale_rows_log2[1]) * args", "((key ^ 1) >> args->scale_rows_log2[1]) * args"),
        ("((first + i) >> args->scale_rows_log2[0]) * args", "((first + i / 2) >> args->scale_rows_log2[0]) * args"),
        ("args->q_descale_stride, batch, head, of_row)", "args->q_descale_stride, batch, kv_head, of_row)"),
        ("(d) * args->scale_stride[2]", "((d) ^ 1) * args->scale_stride[2]"),
        ("(scratch->scale[i] * k_scale)", "scratch->scale[i]"),
        ("(scratch->scale[i] * k_scale)", "(scratch->scale[0] * k_scale)"),
    ];
    let of_any = [
        ("scales[batch * stride[0] + head * stride[1]] : 1", "scales[batch * stride[0]] : 1"),
        ("scales[batch * stride[0] + head * stride[1]] : 1", "scales[head * stride[1]] : 1"),
        ("scale_of(args->k_descale, args->k_descale_stride", "scale_of(args->q_descale, args->q_descale_stride"),
        ("* inverse * V_SCALE(d)", "* inverse"),
        ("if (!live[i * pitch(args) + key - range.begin]) continue;", ""),
        ("code & 0x80) << 24", "code & 0x00) << 24"),
        ("scratch->maximum[i] * SCORE_LN", "scratch->maximum[i]"),
    ];
    for (from, to, problem, cases) in finers
        .map(|(from, to)| (from, to, finer, &of_finer))
        .into_iter()
        .chain(of_any.map(|(from, to)| (from, to, plain, &of_heads)))
        .chain(of_output.map(|(from, to)| (from, to, narrow, &of_narrow)))
    {
        assert!(text.contains(from), "{from}");
        let set = BTreeMap::from([("forward/cpu_e4m3.c".to_owned(), text.replacen(from, to, 1))]);
        let module = module(&*device, &problem, &TemplateSet::overlaid(set).unwrap());
        let reports: Vec<_> = cases.iter().map(|case| case.check(&*module).unwrap()).collect();
        assert!(reports.iter().any(|report| !report.passed()), "{to}: {}", reports[0]);
    }
}
