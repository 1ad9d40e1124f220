use super::*;
use crate::compile::memory::compile_once;
use crate::{CpuDevice, compiler_for};
use flashtune_codegen::abi::ABI_VERSION;
use flashtune_codegen::{Arch, CpuIsa, Kernel, Language, Mask, MaskKind, Schedule, ShapeBucket, Source, TemplateSet};

/// A correct kernel for f32 and head dim 16 that marks the places where a test can plant a fault.
const KERNEL: &str = include_str!("../../testdata/plain.c");

fn problem(mask: MaskKind) -> Problem {
    Problem::forward(DType::F32, 16, mask).unwrap()
}

fn module(device: &dyn Device, text: &str, mask: MaskKind) -> Arc<dyn Module> {
    let options = ["-O1", "-shared", "-fPIC", "-lm"].map(str::to_owned).to_vec();
    let source = Source {
        name: "plain".into(),
        entry: "ft_tile".into(),
        language: Language::C,
        options: options.clone(),
        text: text.into(),
    };
    let compiler = compiler_for(Arch::Cpu(CpuIsa::Generic)).unwrap();
    let (bytes, facts) = compiler.compile(&source).unwrap();
    let shape = Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 64, kv_len: 64, mask: Mask::Full };
    let family = flashtune_codegen::Family::ForwardCpu;
    let arch = Arch::Cpu(CpuIsa::Generic);
    let schedule = Schedule::default_for(family, &problem(mask), arch, &ShapeBucket::of(&shape)).unwrap();
    let recipe = flashtune_cache::Recipe {
        kernel: Kernel { problem: problem(mask), schedule, arch },
        templates: "test".into(),
        options,
        compiler: compiler.id().clone(),
        abi: ABI_VERSION,
    };
    let args = flashtune_codegen::abi::ArgsLayout::of(&recipe.kernel);
    device.load(&flashtune_cache::Artifact { recipe, args, entry: source.entry, facts, bytes }).unwrap()
}

fn shape(mask: Mask) -> Shape {
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 37, kv_len: 45, mask }
}

fn check(text: &str, mask: Mask, inputs: &CheckInputs) -> CheckReport {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    check_kernel(&device, &*module(&*device, text, mask.kind()), &shape(mask), inputs).unwrap()
}

#[test]
fn a_correct_kernel_passes_in_every_layout_distribution_and_mask() {
    let window = Mask::Window { left: Some(9), right: Some(2) };
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    for mask in [Mask::Full, Mask::Causal, window] {
        let module = module(&*device, KERNEL, mask.kind());
        for layout in Layout::ALL {
            for distribution in [Distribution::Normal, Distribution::NormalWithOutliers, Distribution::Constant(3.0)] {
                for poison in [Poison::None, Poison::Nan, Poison::Infinite] {
                    let inputs = CheckInputs { layout, distribution, poison, ..CheckInputs::default() };
                    let report = check_kernel(&device, &*module, &shape(mask), &inputs).unwrap();
                    assert!(report.passed(), "{mask} {inputs:?}: {report}");
                    assert_eq!(report.verdict.rows, 2 * 4 * 37);
                }
            }
        }
    }
    let without_lse = CheckInputs { lse: false, scale: Some(-0.5), ..CheckInputs::default() };
    assert!(check(KERNEL, Mask::Full, &without_lse).passed());
}

/// The kernel with one line changed.
fn with_fault(from: &str, to: &str) -> String {
    assert!(KERNEL.contains(from), "{from}");
    KERNEL.replace(from, to)
}

#[test]
fn every_kind_of_fault_is_found() {
    let padded = CheckInputs { layout: Layout::Padded, ..CheckInputs::default() };
    let wrong = |from: &str, to: &str, mask: Mask, inputs: &CheckInputs| {
        let report = check(&with_fault(from, to), mask, inputs);
        assert!(!report.passed(), "{to}: {report}");
        report.to_string()
    };
    let plain = CheckInputs::default();
    assert!(wrong("end = position + RIGHT + 1", "end = position + RIGHT + 2", Mask::Causal, &plain).contains("oracle"));
    assert!(wrong("max + logf(sum)", "max + log2f(sum)", Mask::Full, &plain).contains("LSE"));
    assert!(wrong("o[d] = acc[d] / sum", "if (i != 5) o[d] = acc[d] / sum", Mask::Full, &plain).contains("row 5"));
    assert!(wrong("/* after */", "if (i == 0) o[-1] = 0;", Mask::Full, &padded).contains("written"));
    assert!(wrong("/* after */", "o[16] = 0;", Mask::Full, &padded).contains("between its rows"));
    assert!(wrong("/* after */", "((float *)q)[0] += 1;", Mask::Full, &plain).contains("q was written"));
    assert!(wrong("/* after */", "static int n; o[3] += 1e-7f * n++;", Mask::Full, &plain).contains("two launches"));
    // Reading a masked row and giving it the weight 0 leaks its NaN.
    let leak = with_fault("continue; /* masked rows of V */", "p[j] = 0;");
    assert!(check(&leak, Mask::Causal, &plain).passed());
    assert!(!check(&leak, Mask::Causal, &CheckInputs { poison: Poison::Nan, ..plain }).passed());
    assert!(!check(&leak, Mask::Causal, &CheckInputs { poison: Poison::Infinite, ..plain }).passed());
    // Large scores in the place of infinite ones: of inf, which leaves no number, and of -inf, which takes no part.
    for (clamped, kind) in [("p[j] > 0 ? 99 : p[j]", Poison::Infinite), ("p[j] < 0 ? -2 : p[j]", Poison::Infinite)] {
        let text =
            with_fault("p[j] = dot * a->scale;", &format!("p[j] = dot * a->scale; if (isinf(p[j])) p[j] = {clamped};"));
        for poison in [Poison::None, Poison::Nan, Poison::Infinite] {
            let passed = check(&text, Mask::Full, &CheckInputs { poison, ..plain }).passed();
            assert_eq!(passed, poison != kind, "{clamped}: {poison:?}");
        }
    }
}

/// Poison that left no number anywhere would hide every error.
#[test]
fn what_is_poisoned_leaves_numbers_to_compare() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let window = Mask::Window { left: Some(9), right: None };
    for (mask, poison) in
        [Mask::Full, Mask::Causal, window].into_iter().flat_map(|m| [(m, Poison::Nan), (m, Poison::Infinite)])
    {
        for (heads, kv_heads) in [(4, 2), (8, 1), (1, 1)] {
            let shape = Shape { heads, kv_heads, ..shape(mask) };
            let inputs = CheckInputs { poison, ..CheckInputs::default() };
            let case = CheckCase::new(device.clone(), &problem(mask.kind()), &shape, &inputs).unwrap();
            let rows = case.oracle.ids.len();
            let numbers = case.oracle.o.iter().filter(|x| x.is_finite()).count();
            assert!(
                numbers * 3 >= rows * 16 && numbers < rows * 16,
                "{mask} {poison:?} {heads}: {numbers} of {}",
                rows * 16
            );
        }
    }
}

#[test]
fn large_shapes_are_checked_on_a_sample_of_rows() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let shape = Shape { batch: 1, heads: 2, kv_heads: 1, q_len: 3000, kv_len: 3000, mask: Mask::Causal };
    let module = module(&*device, KERNEL, MaskKind::CAUSAL);
    let case = CheckCase::new(device, &problem(MaskKind::CAUSAL), &shape, &CheckInputs::default()).unwrap();
    assert!((64..6000).contains(&case.rows()), "{}", case.rows());
    let report = case.check(&*module).unwrap();
    assert!(report.passed(), "{report}");
}

#[test]
fn zero_sizes_pass_and_foreign_problems_are_refused() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let module = module(&*device, KERNEL, MaskKind::FULL);
    for empty in [
        Shape { batch: 0, ..shape(Mask::Full) },
        Shape { q_len: 0, ..shape(Mask::Full) },
        Shape { kv_len: 0, ..shape(Mask::Full) },
    ] {
        let report = check_kernel(&device, &*module, &empty, &CheckInputs::default()).unwrap();
        assert!(report.passed(), "{empty}: {report}");
    }
    let other = problem(MaskKind::CAUSAL);
    let case = CheckCase::new(device.clone(), &other, &shape(Mask::Causal), &CheckInputs::default()).unwrap();
    assert!(case.check(&*module).unwrap_err().to_string().contains("causal"));
    assert!(CheckCase::new(device, &other, &shape(Mask::Full), &CheckInputs::default()).is_err());
}

#[test]
fn the_cpu_template_passes() {
    let device: Arc<dyn Device> = CpuDevice::open().unwrap();
    let templates = TemplateSet::embedded();
    let window = Mask::Window { left: Some(20), right: Some(3) };
    for (dtype, mask) in [(DType::F32, window), (DType::Bf16, Mask::Causal), (DType::F16, Mask::Full)] {
        let problem = Problem::forward_qk_v(dtype, 64, 40, mask.kind()).unwrap();
        let shape = Shape { q_len: 130, kv_len: 111, ..shape(mask) };
        let family = flashtune_codegen::Family::ForwardCpu;
        let bucket = ShapeBucket::of(&shape);
        let schedule = Schedule::default_for(family, &problem, device.arch(), &bucket).unwrap();
        let kernel = Kernel { problem, schedule, arch: device.arch() };
        let artifact = compile_once(&kernel, &templates).unwrap();
        let module = device.load(&artifact).unwrap();
        let inputs = CheckInputs { layout: Layout::Bshd, poison: Poison::Nan, ..CheckInputs::default() };
        let report = check_kernel(&device, &*module, &shape, &inputs).unwrap();
        assert!(report.passed(), "{dtype} {mask}: {report}");
    }
}
