//! Rows far from zero, as float masks make them: all keys of a row are left out by one large number, and it attends to
//! them alike. The bounds of other tests grow with the scores; here errors are those of results of about 1.

use crate::backward::{Loaded, Machine, SHORT, random_case};
use crate::cases::Case;
use crate::faults::replaced;
use crate::machine::Emulated;
use crate::schedules::{random_sm80, random_sm80_f32, random_sm90};
use crate::{templates, try_recorded};
use flashtune::{DType, Distribution, Mask, Problem, Program};
use flashtune_codegen::{Arch, Family, Kernel, MaskKind, Precision, Schedule, ShapeBucket, TemplateSet};
use flashtune_runtime::{BackwardCase, CheckInputs, Poison};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::time::Duration;

/// Every row, some rows, some keys of a row by a smaller number than others, in blocks before and behind those that a
/// row attends to, large and positive, and beside a sink.
const PROGRAMS: [&str; 6] = [
    "score = select(kv <= q - 20, score, -3.4028234e38);",
    "bias: bf16[heads, q_len, kv_len]; score = score + select(q % 3 == 0, -3.4028234e38, bias[h, q, kv]);",
    "bias: f32[kv_len]; mask = kv <= q + 90; \
     score = score + bias[kv] + select(q % 2 == 1, select(kv % 3 == 0, -3.0e38, -3.4e38), 0.0);",
    "score = select(q % 4 == 1, -1.0e9, score);",
    "score = select(q % 2 == 0, 3.0e38, score);",
    "s: f32[heads]; score = select(q % 2 == 0, -1.0e30, score); sink = s[h] - 2.0e30;",
];

/// What rounding makes of a result of about 1, and of weights and sums on the way.
fn bound(problem: &Problem) -> f64 {
    match problem.dtype {
        DType::F32 if problem.precision == Precision::Tf32 => 4e-3,
        DType::F32 => 1e-4,
        DType::F16 => 6e-3,
        DType::Bf16 => 4e-2,
        DType::E4m3 => unreachable!("kernels of e4m3 have no programs"),
    }
}

fn try_forward(kernel: &Kernel, templates: &TemplateSet, seed: u64) -> Result<(), String> {
    let mut emulated = Emulated::build(kernel, templates).map_err(|e| format!("{}: {e}", kernel.name()))?;
    let rng = &mut StdRng::seed_from_u64(seed);
    for _ in 0..3 {
        let values = Distribution::Normal;
        let case = Case { bad: [0; 3], below: 0.0, scale: None, values, lse: true, ..Case::random(kernel, rng) };
        let expected = case.expected(kernel);
        let o = expected
            .run(kernel, &mut emulated, rng.random(), 3)
            .map_err(|e| format!("{} {case:?}: {e}", kernel.name()))?;
        let error = expected.largest_error(&o);
        if error > bound(&kernel.problem) {
            let program = kernel.problem.program.map_or("", |p| p.kept().text());
            return Err(format!("{} {case:?}: O is off by {error:.1e}\n{program}", kernel.name()));
        }
    }
    Ok(())
}

/// A kernel of a program, by family in turn.
fn forward_kernel(number: u64) -> Kernel {
    let (program, rng) = (Some(PROGRAMS[number as usize % PROGRAMS.len()]), &mut StdRng::seed_from_u64(77 + number));
    match number / PROGRAMS.len() as u64 {
        0 | 1 => random_sm90(rng, program),
        2 => random_sm80(rng, program),
        _ => random_sm80_f32(rng, program),
    }
}

#[test]
fn rows_far_from_zero_attend_to_all_keys_alike() {
    let templates = templates();
    try_recorded(0..4 * PROGRAMS.len() as u64, Duration::MAX, |n| try_forward(&forward_kernel(n), &templates, n));
}

fn backward_kernel(number: u64) -> Kernel {
    let program = Program::parse(PROGRAMS[number as usize % 5]).expect("a program");
    let (family, arch): (_, Arch) = match number / 5 {
        0 => (Family::BackwardNaive, "sm_75".parse().expect("an arch")),
        1 => (Family::BackwardSm80, "sm_80".parse().expect("an arch")),
        _ => (Family::BackwardSm90, "sm_90a".parse().expect("an arch")),
    };
    let dtype =
        if family == Family::BackwardNaive { DType::F32 } else { [DType::F16, DType::Bf16][number as usize % 2] };
    let problem = Problem::forward_qk_v(dtype, 24, 40, MaskKind::FULL).expect("legal").backward().with_program(program);
    let bucket = ShapeBucket { parallel: 4, group: 2, q_len: 64, kv_len: 64, ..Default::default() };
    Kernel { problem, schedule: Schedule::default_for(family, &problem, arch, &bucket).expect("supported"), arch }
}

/// The largest error of gradients, in parts of the bound.
fn error_of_gradients(kernel: &Kernel, templates: &TemplateSet, seed: u64) -> Result<f64, String> {
    let device = Machine::open(kernel, templates, seed)?;
    let (mut worst, rng) = (0.0f64, &mut StdRng::seed_from_u64(seed));
    for _ in 0..2 {
        let (shape, inputs) = random_case(MaskKind::FULL, &SHORT[4..], rng);
        let shape = flashtune::Shape { mask: Mask::Full, ..shape };
        let inputs = CheckInputs { poison: Poison::None, distribution: Distribution::Normal, scale: None, ..inputs };
        let case = BackwardCase::new(device.clone(), &kernel.problem, &shape, &inputs).map_err(|e| e.to_string())?;
        let error = case.largest_error(&Loaded(*kernel)).map_err(|e| e.to_string())?;
        // Gradients of keys are sums over the queries that attend to them.
        worst = worst.max(error / (4.0 * bound(&kernel.problem)));
    }
    Ok(worst)
}

#[test]
fn gradients_of_rows_far_from_zero_are_those_of_equal_weights() {
    let templates = templates();
    // Weights of one and not of one part in n, which a log-sum-exp alone says.
    let alone = replaced(&templates, "lib/cuda/attention/far_rows.cuh", "FarRow{m, logf(l)}", "FarRow{m, 0.0f}");
    try_recorded(0..15, Duration::MAX, |number| {
        let kernel = backward_kernel(number);
        let [right, wrong] = [&templates, &alone].map(|t| error_of_gradients(&kernel, t, number));
        let (right, wrong) = (right?, wrong?);
        if right > 1.0 || wrong <= 1.0 {
            let program = kernel.problem.program.map_or("", |p| p.kept().text());
            return Err(format!("{}: {right:.2} of the bound, without sums {wrong:.2}\n{program}", kernel.name()));
        }
        Ok(())
    });
}

#[test]
fn without_the_difference_first_rows_are_lost() {
    let templates = templates();
    let lost = replaced(&templates, "lib/cuda/attention/far.cuh", "return kProgramFar && ", "return false && ");
    try_recorded(0..4, Duration::MAX, |family| {
        let mut numbers = (0..PROGRAMS.len() as u64).map(|n| family * PROGRAMS.len() as u64 + n);
        let seen = numbers.any(|n| try_forward(&forward_kernel(n), &lost, n).is_err());
        if seen { Ok(()) } else { Err(forward_kernel(family * PROGRAMS.len() as u64).name()) }
    });
}
