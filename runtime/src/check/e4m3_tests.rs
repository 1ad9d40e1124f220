//! `forward/cpu_e4m3`, and `forward/cpu_ragged` of e4m3 queries, within the bound of kernels that round P, and the
//! faults that this check finds in them.

use super::*;
use crate::CpuDevice;
use crate::compile::memory::compile_or_plant;
use flashtune_codegen::{
    Family, Kernel, KvElement, KvKind, KvScales, KvStore, Mask, MaskKind, ScaleUnit, ScaleUnits, Schedule, ShapeBucket,
    TemplateSet,
};
use std::collections::BTreeMap;

fn module(device: &dyn Device, problem: &Problem, templates: &TemplateSet) -> Arc<dyn Module> {
    let arch = device.fingerprint().arch;
    let family = if problem.kv.is_dense() { Family::ForwardCpuE4m3 } else { Family::ForwardCpuRagged };
    let bucket = ShapeBucket { q_len: 64, ..ShapeBucket::default() };
    let schedule = Schedule::default_for(family, problem, arch, &bucket).unwrap();
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

/// Q of codes beside stores of every element and scale, with O of every dtype; few rows and many.
#[test]
fn the_host_computes_ragged_batches_of_e4m3_queries_within_the_bound() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let templates = TemplateSet::embedded();
    let most = ragged::Most { sequences: 5, rows: 90, keys: 400, heads: 8 };
    let elements = [KvElement::E4m3, KvElement::E5m2, KvElement::E4m3, KvElement::Int8];
    let sinks = flashtune_codegen::score::Program::parse("s: float[heads]; sink = s[h];").unwrap();
    let mut rows = 0;
    for n in 0..6 {
        let (dims, mask) = ([[64, 64], [128, 48], [33, 80], [256, 256]][n % 4], MaskKind::ALL[n % 4]);
        let scales = if n % 3 == 2 { KvScales::PerToken } else { KvScales::PerHead };
        let store = KvStore { element: elements[n % 4], scales, v_columns: n == 5 };
        let problem = Problem::forward_qk_v(DType::E4m3, dims[0], dims[1], mask).unwrap();
        let problem = problem.with_output(DType::OUTPUTS_OF_E4M3[n % 4]).with_kv(KvKind::Ragged(store));
        let problem = if n % 4 == 1 { problem.with_program(sinks.clone()) } else { problem };
        let module = module(&*device, &problem, &templates);
        for seed in 0..12 {
            let batch = RaggedBatch::random(&problem, most, 100 * n as u64 + seed);
            let case = RaggedCase::new(device.clone(), &problem, &batch).unwrap();
            let report = case.check(&*module).unwrap();
            assert!(report.passed(), "{problem} {{{batch}}}: {report}");
            rows += report.verdict.rows;
        }
    }
    assert!(rows > 5_000, "{rows}");
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

/// The templates with a fault in one of those that know e4m3.
fn with_fault(from: &str, to: &str) -> TemplateSet {
    const FILES: [&str; 3] = ["forward/cpu_e4m3.c", "lib/cpu/codes.h", "forward/cpu_ragged.c"];
    let embedded = TemplateSet::embedded();
    let of = |file: &str| embedded.files().find(|(name, _)| *name == file).unwrap().1;
    let file = FILES.into_iter().find(|file| of(file).contains(from)).unwrap_or_else(|| panic!("{from}"));
    TemplateSet::overlaid(BTreeMap::from([(file.to_owned(), of(file).replacen(from, to, 1))])).unwrap()
}

#[test]
fn faults_of_ragged_batches_of_e4m3_queries_on_the_host_are_found() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let store = KvStore { element: KvElement::E4m3, scales: KvScales::PerHead, v_columns: false };
    let problem = Problem::forward(DType::E4m3, 32, MaskKind::CAUSAL).unwrap().with_kv(KvKind::Ragged(store));
    let problem = problem.with_output(DType::E4m3);
    let most = ragged::Most { sequences: 4, rows: 40, keys: 150, heads: 6 };
    let case = |seed| RaggedCase::new(device.clone(), &problem, &RaggedBatch::random(&problem, most, seed)).unwrap();
    let cases: Vec<_> = (0..20).map(case).collect();
    for (from, to) in [
        ("* (args)->q_scale_stride[0]", "* 0"),
        ("(head) * (args)->q_scale_stride[1]", "0"),
        ("* Q_SCALE(args, b, kv_head)", ""),
        ("inverse *= O_SCALE(args)", "inverse *= 1"),
        ("to[d] = narrow(of_code(from[d]))", "to[d] = narrow(of_code(from[d] & 0x7f))"),
        ("narrow_8(from[d], 448.0f, 7, 3, 9)", "narrow_8(from[d], 240.0f, 7, 3, 9)"),
    ] {
        let module = module(&*device, &problem, &with_fault(from, to));
        let mut reports = cases.iter().map(|case| case.check(&*module).unwrap());
        assert!(reports.any(|report| !report.passed()), "{from}: {to}");
    }
}

#[test]
fn faults_of_e4m3_on_the_host_are_found() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
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
        ("narrow_8(from[d], 448.0f, 7, 3, 9)", "narrow_8(from[d], 448.0f, 7, 3, 9) & 0x7f"),
        ("narrow_8(from[d], 448.0f, 7, 3, 9)", "narrow_8(from[d] * 1.04f, 448.0f, 7, 3, 9)"),
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
        let module = module(&*device, &problem, &with_fault(from, to));
        let reports: Vec<_> = cases.iter().map(|case| case.check(&*module).unwrap()).collect();
        assert!(reports.iter().any(|report| !report.passed()), "{to}: {}", reports[0]);
    }
}
