//! `forward/cpu_e4m3` within the bound of kernels that round P, and the faults that this check finds in it.

use super::*;
use crate::CpuDevice;
use crate::compile::memory::compile_or_plant;
use flashtune_codegen::{Family, Kernel, Mask, MaskKind, Schedule, ShapeBucket, TemplateSet};
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
    for (n, (mask, dims)) in
        [(Mask::Full, [64, 64]), (Mask::Causal, [128, 48]), (window, [33, 80]), (Mask::Causal, [256, 256])]
            .into_iter()
            .enumerate()
    {
        let problem = Problem::forward_qk_v(DType::E4m3, dims[0], dims[1], mask.kind()).unwrap();
        let problem = problem.with_output(DType::ALL[n % 3]);
        let module = module(&*device, &problem, &templates);
        for (i, sizes) in
            [[2, 4, 2, 63, 129], [1, 2, 1, 70, 40], [1, 3, 1, 1, 300], [1, 2, 2, 5, 0]].into_iter().enumerate()
        {
            let poison = [Poison::None, Poison::Nan, Poison::Infinite][(n + i) % 3];
            let layout = Layout::ALL[(n + i) % Layout::ALL.len()];
            let inputs = CheckInputs { poison, layout, lse: true, seed: i as u64, ..CheckInputs::default() };
            let shape = shape(mask, sizes);
            let case = CheckCase::typical(device.clone(), &problem, &shape, &inputs).unwrap();
            let report = case.check(&*module).unwrap();
            assert!(report.passed(), "{problem} {shape} {inputs:?}: {report}");
        }
    }
}

#[test]
fn faults_of_e4m3_on_the_host_are_found() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let embedded = TemplateSet::embedded();
    let text = embedded.files().find(|(name, _)| *name == "forward/cpu_e4m3.c").unwrap().1;
    let shape = shape(Mask::Causal, [2, 4, 2, 40, 50]);
    let problem = Problem::forward(DType::E4m3, 32, MaskKind::CAUSAL).unwrap();
    let inputs = CheckInputs { poison: Poison::Nan, lse: true, ..CheckInputs::default() };
    let case = CheckCase::typical(device.clone(), &problem, &shape, &inputs).unwrap();
    for (from, to) in [
        ("scales[batch * stride[0] + kv_head * stride[1]]", "scales[batch * stride[0]]"),
        ("scales[batch * stride[0] + kv_head * stride[1]]", "scales[kv_head * stride[1]]"),
        ("scale_of(args->k_descale, args->k_descale_stride", "scale_of(args->q_descale, args->q_descale_stride"),
        ("* inverse * v_scale", "* inverse"),
        ("key >= key_end(args, first + i)) continue;", "key >= key_end(args, first + i)) {}"),
        ("code & 0x80) << 24", "code & 0x00) << 24"),
        ("scratch->maximum[i] * LN2", "scratch->maximum[i]"),
    ] {
        assert!(text.contains(from), "{from}");
        let set = BTreeMap::from([("forward/cpu_e4m3.c".to_owned(), text.replacen(from, to, 1))]);
        let report = case.check(&*module(&*device, &problem, &TemplateSet::overlaid(set).unwrap())).unwrap();
        assert!(!report.passed(), "{to}: {report}");
    }
}
