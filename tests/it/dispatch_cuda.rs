//! What the dispatcher decides for a GPU, on a device that only pretends to be one: nothing is launched here.

use crate::common::paper::{Instant, Paper};
use flashtune::{DType, Mask, Policy, Problem, Shape, Status};
use flashtune_cache::{CacheDir, Launches, Layers};
use flashtune_codegen::{Constraint, Constraints, Family, Paths, TemplateSet};
use flashtune_runtime::{Dispatcher, DispatcherConfig, Error};
use std::sync::Arc;

fn dispatcher(arch: &str, policy: Policy) -> Dispatcher {
    let layers = Arc::new(Layers::open(&CacheDir::at("/nonexistent"), &[], None).unwrap());
    let device = Paper::of(arch, Instant::holding("nothing"));
    let templates = Arc::new(TemplateSet::embedded());
    let (launches, paths) = (Launches::Eager, Paths::default());
    Dispatcher::new(DispatcherConfig { device, templates, policy, launches, layers, paths, artifacts: None })
}

fn call(dtype: DType) -> (Problem, Shape) {
    let mask = Mask::Causal;
    let problem = Problem::forward(dtype, 128, mask.kind()).unwrap();
    (problem, Shape { batch: 1, heads: 32, kv_heads: 8, q_len: 4096, kv_len: 4096, mask })
}

#[test]
fn f32_goes_to_the_exact_kernel_and_the_account_says_so() {
    for arch in ["sm_80", "sm_90a"] {
        let (problem, shape) = call(DType::F32);
        let plan = dispatcher(arch, Policy::Default).plan(&problem, &shape, Constraints::NONE).unwrap();
        assert_eq!(plan.kernel().schedule.family(), Family::ForwardNaive);
        let account = plan.explain();
        assert!(account.notes.iter().any(|n| n.contains("f32") && n.contains("exact")), "{account}");
        let refused = account.refusals.iter().find(|r| r.what == "forward/sm80").expect("an account of forward/sm80");
        assert!(refused.why.contains("f16 and bf16"), "{account}");
    }
}

#[test]
fn half_precision_goes_to_the_tensor_cores() {
    for (arch, dtype, family) in [
        ("sm_80", DType::F16, Family::ForwardSm80),
        ("sm_86", DType::Bf16, Family::ForwardSm80),
        ("sm_89", DType::F16, Family::ForwardSm80),
        ("sm_90a", DType::Bf16, Family::ForwardSm90),
        ("sm_100a", DType::Bf16, Family::ForwardSm80),
    ] {
        let (problem, shape) = call(dtype);
        let plan = dispatcher(arch, Policy::Default).plan(&problem, &shape, Constraints::NONE).unwrap();
        assert_eq!(plan.kernel().schedule.family(), family, "{arch}");
        assert_eq!(plan.status(), Status::Default);
        assert!(plan.refusals().iter().any(|r| r.what == "forward/naive"), "{}", plan.explain());
    }
    // No card is known to have run what forward/sm80 is made of before sm_80: the plain kernel, and the reason.
    let (problem, shape) = call(DType::F16);
    let plan = dispatcher("sm_75", Policy::Default).plan(&problem, &shape, Constraints::NONE).unwrap();
    assert_eq!(plan.kernel().schedule.family(), Family::ForwardNaive);
    assert!(plan.refusals().iter().any(|r| r.why.contains("--allow-path")), "{}", plan.explain());
}

#[test]
fn strides_that_the_copy_engine_cannot_take_leave_the_tensor_cores_of_sm80() {
    let (problem, shape) = call(DType::Bf16);
    let plan = dispatcher("sm_90a", Policy::Default).plan(&problem, &shape, Constraint::Strided.into()).unwrap();
    assert_eq!(plan.kernel().schedule.family(), Family::ForwardSm80);
    assert!(plan.refusals().iter().any(|r| r.what == "forward/sm90"), "{}", plan.explain());
    let tunable = |demand: Constraint| Family::is_tunable(demand.into(), "sm_90a".parse().unwrap());
    assert!(tunable(Constraint::Strided) && !tunable(Constraint::Unaligned) && !tunable(Constraint::Weights));
}

#[test]
fn strides_of_e4m3_leave_mma_sync() {
    let (problem, shape) = call(DType::E4m3);
    let plan = dispatcher("sm_90a", Policy::Default).plan(&problem, &shape, Constraint::Strided.into()).unwrap();
    assert_eq!(plan.kernel().schedule.family(), Family::ForwardSm89Fp8);
    assert!(plan.refusals().iter().any(|r| r.what == "forward/sm90_fp8"), "{}", plan.explain());
}

#[test]
fn biases_that_the_copy_engine_cannot_bring_are_loaded_by_threads() {
    let (problem, shape) = call(DType::Bf16);
    let text = "bias: bf16[heads, q_len, kv_len]; score = score + bias[h, q, kv];";
    let problem = problem.with_program(flashtune::Program::parse(text).unwrap());
    let gpu = dispatcher("sm_90a", Policy::Default);
    let brought = gpu.plan(&problem, &shape, Constraints::NONE).unwrap();
    let loaded = gpu.plan(&problem, &shape, Constraint::LooseBiases.into()).unwrap();
    let loose = Constraints::from(Constraint::LooseBiases);
    assert!(brought.kernel().schedule.unfit(loose).is_some(), "{}", brought.explain());
    assert!(loaded.kernel().schedule.unfit(loose).is_none(), "{}", loaded.explain());
    assert_eq!(loaded.kernel().schedule.family(), Family::ForwardSm90);
    assert!(loaded.explain().to_string().contains("not for calls with loose biases"), "{}", loaded.explain());
    assert!(!Family::is_tunable(loose, "sm_90a".parse().unwrap()));
}

#[test]
fn the_weights_come_from_the_plain_kernel_alone() {
    let (problem, shape) = call(DType::Bf16);
    let gpu = dispatcher("sm_90a", Policy::Default);
    let with = gpu.plan(&problem, &shape, Constraint::Weights.into()).unwrap();
    assert_eq!(with.kernel().schedule.family(), Family::ForwardNaive);
    assert!(
        with.refusals().iter().any(|r| r.what == "forward/sm80" && r.why.contains("weights")),
        "{}",
        with.explain()
    );
    // Calls with and without them do not share a plan.
    let without = gpu.plan(&problem, &shape, Constraints::NONE).unwrap();
    assert_eq!(without.kernel().schedule.family(), Family::ForwardSm90);
    let error = dispatcher("sm_90a", Policy::Sealed).plan(&problem, &shape, Constraint::Weights.into()).unwrap_err();
    assert!(matches!(&error, Error::Sealed { reason, .. } if reason.contains("weights")), "{error}");
}

#[test]
fn rows_off_the_16_byte_grid_go_to_the_plain_kernel_with_the_reason() {
    let (problem, shape) = call(DType::Bf16);
    let plan = dispatcher("sm_90a", Policy::Default).plan(&problem, &shape, Constraint::Unaligned.into()).unwrap();
    assert_eq!(plan.kernel().schedule.family(), Family::ForwardNaive);
    let refused = plan.refusals().iter().find(|r| r.what == "forward/sm80").expect("an account of forward/sm80");
    assert!(refused.why.contains("16 bytes"), "{}", plan.explain());
}
