//! What O loses by rounding, on the CPU: the forward pass writes it, gradients read it, and the check sees what is
//! wrong with either.

use super::*;
use crate::compile::memory::compile_or_plant;
use crate::{BackwardCase, CpuDevice, GradientCase, Poison};
use flashtune_codegen::score::{Program, Storage};
use flashtune_codegen::{Arch, CpuIsa, Family, Kernel, KvKind, Mask, Schedule, ShapeBucket, TemplateSet};
use std::collections::BTreeMap;

fn module(
    device: &dyn Device,
    family: Family,
    problem: &Problem,
    isa: Option<CpuIsa>,
    templates: &TemplateSet,
) -> Arc<dyn Module> {
    let Arch::Cpu(host) = device.fingerprint().arch else { panic!("the host") };
    let arch = Arch::Cpu(isa.map_or(host, |isa| isa.min(host)));
    let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 64, kv_len: 64, mask: Mask::Full };
    let schedule = Schedule::default_for(family, problem, arch, &ShapeBucket::of(&shape)).unwrap();
    let kernel = Kernel { problem: *problem, schedule, arch };
    device.load(&compile_or_plant(&kernel, templates).unwrap()).unwrap()
}

fn problem(dtype: DType, mask: Mask) -> Problem {
    Problem::forward_qk_v(dtype, 40, 72, mask.kind()).unwrap().with_residual(true)
}

const SIZES: [[u32; 5]; 4] = [[2, 4, 2, 63, 129], [1, 2, 1, 200, 70], [1, 3, 1, 1, 300], [1, 2, 2, 0, 9]];

fn shape(mask: Mask, [batch, heads, kv_heads, q_len, kv_len]: [u32; 5]) -> Shape {
    Shape { batch, heads, kv_heads, q_len, kv_len, mask }
}

#[test]
fn the_cpu_templates_write_and_read_what_o_loses() {
    let (device, templates): (Arc<dyn Device>, _) = (CpuDevice::open().unwrap(), TemplateSet::embedded());
    let window = Mask::Window { left: Some(20), right: Some(3) };
    for (nth, (dtype, mask, isa)) in [
        (DType::Bf16, Mask::Full, None),
        (DType::F16, Mask::Causal, None),
        (DType::Bf16, window, Some(CpuIsa::Avx2)),
        (DType::F16, Mask::Full, Some(CpuIsa::Generic)),
    ]
    .into_iter()
    .enumerate()
    {
        let forward = problem(dtype, mask);
        let of_forward = module(&*device, Family::ForwardCpu, &forward, isa, &templates);
        let of_backward = module(&*device, Family::BackwardCpu, &forward.backward(), isa, &templates);
        for (i, sizes) in SIZES.into_iter().enumerate() {
            let poison = [Poison::None, Poison::Nan, Poison::Infinite][(i + nth) % 3];
            let layout = Layout::ALL[(i + nth) % 3];
            let inputs = CheckInputs { seed: (10 * nth + i) as u64, poison, layout, ..CheckInputs::default() };
            let shape = shape(mask, sizes);
            let case = CheckCase::new(device.clone(), &forward, &shape, &inputs).unwrap();
            let report = case.check(&*of_forward).unwrap();
            assert!(report.passed(), "{forward} {shape} {inputs:?}: {report}");
            let case = BackwardCase::new(device.clone(), &forward.backward(), &shape, &inputs).unwrap();
            let report = case.check(&*of_backward).unwrap();
            assert!(report.passed(), "{} {shape} {inputs:?}: {report}", forward.backward());
        }
    }
}

#[test]
fn packed_gradients_and_those_of_what_a_program_reads_take_what_o_lost() {
    let (device, templates): (Arc<dyn Device>, _) = (CpuDevice::open().unwrap(), TemplateSet::embedded());
    let packed = problem(DType::Bf16, Mask::Full).backward().with_kv(KvKind::RAGGED);
    let lengths = vec![[70, 133], [0, 40], [64, 64], [20, 300]];
    let wide = [false, true];
    let batch = PackedBatch { heads: 4, kv_heads: 2, mask: Mask::Full, lengths, unused: 2, spare: 9, wide };
    let case = BackwardCase::packed(device.clone(), &packed, &batch, &CheckInputs::default()).unwrap();
    let report = case.check(&*module(&*device, Family::BackwardCpu, &packed, None, &templates)).unwrap();
    assert!(report.passed(), "{report}");
    let text = "t: f32[heads, kv_len]; score = score + t[h, kv];";
    let reads = problem(DType::Bf16, Mask::Full).with_program(Program::parse(text).unwrap());
    let by = reads.gradient_by("t").unwrap();
    let shape = shape(Mask::Full, SIZES[0]);
    for (by, word) in [(by, "residual"), (by.with_residual(false), "gradient")] {
        assert!(by.to_string().contains(word));
        let case = GradientCase::new(device.clone(), &by, &shape, &CheckInputs::default(), Storage::F32).unwrap();
        let report = case.check(&*module(&*device, Family::GradientCpu, &by, None, &templates)).unwrap();
        assert!(report.passed(), "{report}");
    }
}

/// The largest relative error of dQ over rows of each weight, with the residual and without, and without a fused
/// kernel.
#[test]
fn rows_of_one_key_have_all_digits_with_what_o_lost() {
    let (device, templates): (Arc<dyn Device>, _) = (CpuDevice::open().unwrap(), TemplateSet::embedded());
    for dtype in [DType::Bf16, DType::F16] {
        for residual in [true, false] {
            let problem = problem(dtype, Mask::Full).with_residual(residual).backward();
            let inputs = CheckInputs { lse: false, ..CheckInputs::default() };
            let case = BackwardCase::peaked(device.clone(), &problem, &shape(Mask::Full, SIZES[0]), &inputs).unwrap();
            let kernel = module(&*device, Family::BackwardCpu, &problem, None, &templates);
            for (weight, [own, unfused]) in residual::WEIGHTS.into_iter().zip(case.peaked_errors(&*kernel).unwrap()) {
                let most = if residual { 0.003 } else { 2.0 * unfused };
                assert!(own <= most, "{dtype}, weight {weight}, residual {residual}: {own} of {most}");
                // Without it the digits are lost: what is shown is not there anyway.
                assert!(residual || dtype == DType::F16 || weight < 0.9 || own > 0.005, "{weight}: {own}");
            }
        }
    }
}

#[test]
fn every_kind_of_fault_in_what_o_loses_is_found() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let embedded = TemplateSet::embedded();
    let shape = shape(Mask::Full, [1, 4, 2, 100, 90]);
    let (forward, inputs) = (problem(DType::Bf16, Mask::Full), CheckInputs::default());
    let (write, read) = ("the residual", "0.3 % at most");
    for (file, from, to, what) in [
        (
            "forward/cpu.c",
            "store_lost(tile->residual + (query + i)",
            "store_lost(tile->residual + (query + (i ^ 1))",
            write,
        ),
        (
            "forward/cpu.c",
            "scratch->rows + i * O_ROWS, HEAD_DIM_V);\n#endif",
            "scratch->rows, HEAD_DIM_V);\n#endif",
            write,
        ),
        ("lib/cpu/residual.h", "row[d] - widen(rounded[d])", "widen(rounded[d]) - row[d]", write),
        ("lib/cpu/residual.h", "d < n; d++) {", "d < n - 1; d++) {", write),
        ("backward/cpu.c", "sum += lost_product(", "(void)lost_product(", read),
        ("backward/cpu.c", "head->head * rs[1] + at * rs[2]", "head->head * rs[1] + (at ^ 1) * rs[2]", read),
        ("backward/cpu.c", "head->head * rs[1] + at * rs[2]", "head->kv_head * rs[1] + at * rs[2]", read),
    ] {
        let text = embedded.files().find(|(name, _)| *name == file).unwrap().1;
        assert!(text.contains(from), "{from}");
        let set = BTreeMap::from([(file.to_owned(), text.replacen(from, to, 1))]);
        let set = TemplateSet::overlaid(set).unwrap();
        let report = if what == write {
            let module = module(&*device, Family::ForwardCpu, &forward, Some(CpuIsa::Generic), &set);
            CheckCase::new(device.clone(), &forward, &shape, &inputs).unwrap().check(&*module).unwrap()
        } else {
            let problem = forward.backward();
            let module = module(&*device, Family::BackwardCpu, &problem, Some(CpuIsa::Generic), &set);
            BackwardCase::new(device.clone(), &problem, &shape, &inputs).unwrap().check(&*module).unwrap()
        };
        assert!(!report.passed() && report.to_string().contains(what), "{to}: {report}");
    }
}
