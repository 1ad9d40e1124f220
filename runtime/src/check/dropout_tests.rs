//! Dropout on the CPU: forward pass and gradients drop the scores that the definition says, and the check sees what is
//! wrong with either.

use super::*;
use crate::compile::memory::compile_or_plant;
use crate::{BackwardCase, CpuDevice, Poison};
use flashtune_codegen::score::Program;
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
    Problem::forward_qk_v(dtype, 40, 72, mask.kind()).unwrap().with_dropout(true)
}

const SIZES: [[u32; 5]; 4] = [[2, 4, 2, 63, 129], [1, 2, 1, 200, 70], [2, 3, 1, 1, 300], [1, 2, 2, 0, 9]];

fn shape(mask: Mask, [batch, heads, kv_heads, q_len, kv_len]: [u32; 5]) -> Shape {
    Shape { batch, heads, kv_heads, q_len, kv_len, mask }
}

#[test]
fn the_cpu_templates_drop_what_the_definition_says() {
    let (device, templates): (Arc<dyn Device>, _) = (CpuDevice::open().unwrap(), TemplateSet::embedded());
    let window = Mask::Window { left: Some(20), right: Some(3) };
    for (nth, (dtype, mask, isa, residual, text)) in [
        (DType::Bf16, Mask::Full, None, false, ""),
        (DType::F16, Mask::Causal, None, true, "score = score + 0.25 * (kv - q); mask = (q + kv) % 5 != 0;"),
        (DType::F32, window, Some(CpuIsa::Avx2), false, ""),
        (DType::F16, Mask::Full, Some(CpuIsa::Generic), false, "s: f32[heads]; sink = s[h];"),
    ]
    .into_iter()
    .enumerate()
    {
        let plain = problem(dtype, mask).with_residual(residual);
        let forward = plain.with_program(Program::parse(text).unwrap());
        let of_forward = module(&*device, Family::ForwardCpu, &forward, isa, &templates);
        let of_backward = module(&*device, Family::BackwardCpu, &forward.backward(), isa, &templates);
        for (i, sizes) in SIZES.into_iter().enumerate() {
            let poison = [Poison::None, Poison::Nan, Poison::Infinite][(i + nth) % 3];
            let layout = Layout::ALL[(i + nth) % 3];
            let inputs = CheckInputs { seed: (10 * nth + i) as u64, poison, layout, ..CheckInputs::default() };
            let shape = shape(mask, sizes);
            let case = CheckCase::typical(device.clone(), &forward, &shape, &inputs).unwrap();
            let report = case.check(&*of_forward).unwrap();
            assert!(report.passed(), "{forward} {shape} {inputs:?}: {report}");
            let case = BackwardCase::new(device.clone(), &forward.backward(), &shape, &inputs).unwrap();
            let report = case.check(&*of_backward).unwrap();
            assert!(report.passed(), "{} {shape} {inputs:?}: {report}", forward.backward());
        }
    }
}

#[test]
fn packed_sequences_count_their_rows_from_their_own_first() {
    let (device, templates): (Arc<dyn Device>, _) = (CpuDevice::open().unwrap(), TemplateSet::embedded());
    let packed = problem(DType::Bf16, Mask::Causal).backward().with_kv(KvKind::RAGGED);
    let lengths = vec![[70, 133], [0, 40], [64, 64], [20, 300]];
    let wide = [false, true];
    let batch = PackedBatch { heads: 4, kv_heads: 2, mask: Mask::Causal, lengths, unused: 2, spare: 9, wide };
    let case = BackwardCase::packed(device.clone(), &packed, &batch, &CheckInputs::default()).unwrap();
    let report = case.check(&*module(&*device, Family::BackwardCpu, &packed, None, &templates)).unwrap();
    assert!(report.passed(), "{report}");
}

#[test]
fn every_kind_of_fault_in_what_is_dropped_is_found() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let embedded = TemplateSet::embedded();
    let shape = shape(Mask::Full, [2, 4, 2, 60, 90]);
    let (forward, inputs) = (problem(DType::F32, Mask::Full), CheckInputs::default());
    let (lib, write, read) = ("lib/cpu/dropout.h", "forward/cpu.c", "backward/cpu.c");
    for (of, file, from, to) in [
        (write, lib, ">> k % 2 * 16", ">> (k + 1) % 2 * 16"),
        (write, lib, "0xbb67ae85u)", "0xbb67ae84u)"),
        (write, lib, "(uint32_t)(offset >> 32)}", "0}"),
        (write, lib, "if (seed_at) seed += *seed_at;", ""),
        (write, write, ".pair = head_index,", ".pair = kv_head,"),
        (write, write, "vf_load(inverse) * vf_set1(tile->dropout.scale)", "vf_load(inverse)"),
        (write, "lib/cpu/softmax.h", "some[x] += weight;", "some[x] += KEPT_WEIGHT(weight, at);"),
        (read, lib, "if (offset_at) offset += *offset_at;", ""),
        (read, read, "(kept * vf_set1(dropout.scale))", "kept"),
        (read, read, "const vf left = weight * kept;", "const vf left = weight;"),
        (read, read, "const float dv_scale = args->dropout_scale;", "const float dv_scale = 1;"),
        (read, read, "head->batch * args->heads + head->head", "head->head"),
    ] {
        let text = embedded.files().find(|(name, _)| *name == file).unwrap().1;
        assert!(text.contains(from), "{from}");
        let set = BTreeMap::from([(file.to_owned(), text.replacen(from, to, 1))]);
        let set = TemplateSet::overlaid(set).unwrap();
        let report = if of == write {
            let case = CheckCase::new(device.clone(), &forward, &shape, &inputs).unwrap();
            case.check(&*module(&*device, Family::ForwardCpu, &forward, None, &set)).unwrap()
        } else {
            let case = BackwardCase::new(device.clone(), &forward.backward(), &shape, &inputs).unwrap();
            case.check(&*module(&*device, Family::BackwardCpu, &forward.backward(), None, &set)).unwrap()
        };
        assert!(!report.passed(), "not seen in {of}: {to}");
    }
}
