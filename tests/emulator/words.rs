//! Every word of the language for floats and for floats as ints in the CUDA families that the machine runs, against
//! fp64: values as models have them, and those at the ends of what the words are defined for.

use crate::backward::try_backward;
use crate::cases::Case;
use crate::faults::replaced;
use crate::ragged::try_ragged;
use crate::{planted, setting, templates, try_each, try_kernel, try_recorded};
use flashtune::{DType, Program};
use flashtune_codegen::{Family, Kernel, KvKind, MaskKind, Op, Problem, Schedule, ShapeBucket};
use flashtune_runtime::check::{Most, RaggedBatch};
use rand::Rng;
use std::time::Duration;

/// Names, a mask and a score. What a mask reads at an end is a number that stands for it, and a score of NaN is masked.
const WORDS: [[&str; 3]; 3] = [
    [
        "",
        "",
        "0.5 * log(1.0 + exp(min(score, 20.0))) + 3.0 * sigmoid(score) - sqrt(1.0 + score * score) + exp(-0.05 * abs(q - kv))",
    ],
    [
        "t: f32[heads, *]; n = abs(q - kv);",
        "mask = int_round(0.5 * (kv - q)) % 5 != 1 and int_ceil(0.25 * kv) <= int_trunc(0.75 * q) + 40;",
        "score + t[h, n if n < 8 else min(8 + int_floor(3.9 * log(n / 7.7)), 15)] * sqrt(n)",
    ],
    [
        "",
        "mask = (int_trunc(1e30 * (kv - 2)) < 0 or int_floor(log(kv - 5)) % 3 == 0 or sqrt(kv - 3) == 0.0) and \
         not sigmoid(q - kv - 200.0) == 0.5;",
        "score + log(kv) * exp(select(kv % 2 == 1, -inf, -1.0)) + sigmoid(select(kv == q, inf, -inf)) + \
         select(kv > 9, sqrt(abs(score)), log(max(1.5 - kv, 0.5)))",
    ],
];

const PATHS: [(Family, &str, bool); 7] = [
    (Family::ForwardSm90, "sm_90a", false),
    (Family::ForwardSm80, "sm_80", false),
    (Family::ForwardSm90Ragged, "sm_90a", true),
    (Family::ForwardSm80Ragged, "sm_80", true),
    (Family::ForwardNaiveRagged, "sm_75", true),
    (Family::BackwardNaive, "sm_75", false),
    (Family::BackwardSm80, "sm_80", false),
];

fn kernel(family: Family, arch: &str, is_ragged: bool, dtype: DType, text: &str) -> Kernel {
    let arch = arch.parse().expect("an arch");
    let problem = Problem::forward(dtype, 64, MaskKind::FULL).expect("legal");
    let problem = if is_ragged { problem.with_kv(KvKind::RAGGED) } else { problem };
    let problem = if family.op() == Op::Backward { problem.backward() } else { problem };
    let problem = problem.with_program(Program::parse(text).expect("a program"));
    let bucket = ShapeBucket { parallel: 4, group: 2, q_len: 64, kv_len: 64, ..Default::default() };
    let schedule = Schedule::default_for(family, &problem, arch, &bucket).expect("the family takes it");
    Kernel { problem, schedule, arch }
}

#[test]
fn every_word_is_right_in_every_cuda_family() {
    let templates = templates();
    let calls = setting("EMULATE_CASES").unwrap_or(2);
    try_recorded(0..(PATHS.len() * WORDS.len()) as u64, Duration::MAX, |number| {
        let (family, arch, is_ragged) = PATHS[number as usize % PATHS.len()];
        let [names, mask, score] = WORDS[number as usize / PATHS.len()];
        // This one has masks by rows alone.
        let mask = if family == Family::ForwardSm90Ragged { "" } else { mask };
        let text = &format!("{names} {mask} score = {score};");
        let dtype = if arch == "sm_75" { DType::F32 } else { DType::Bf16 };
        let kernel = kernel(family, arch, is_ragged, dtype, text);
        let told = |e: String| format!("{e}\n{text}");
        if kernel.problem.op == Op::Backward {
            return try_backward(&kernel, &templates, calls, number).map_err(told);
        }
        if is_ragged {
            let most = Most { sequences: 3, rows: 40, keys: 200, heads: 4 };
            let batch = |rng: &mut rand::rngs::StdRng| RaggedBatch::random(&kernel.problem, most, rng.random());
            return try_ragged(&kernel, &templates, calls, number, batch).map(drop).map_err(told);
        }
        try_kernel(&kernel, &templates, calls, number, |rng| Case::random(&kernel, rng)).map_err(told)
    });
}

/// What is written in what programs call, and what is put in its place.
const FAULTS: [[&str; 2]; 10] = [
    ["return expf(x);", "return expf(1.001f * x);"],
    ["return logf(x);", "return 1.001f * logf(x);"],
    ["sqrt.rn.f32", "ex2.approx.f32"],
    ["1.0f + expf(-x)", "1.0f + expf(x)"],
    ["cvt.rmi.s64.f32", "cvt.rpi.s64.f32"],
    ["cvt.rpi.s64.f32", "cvt.rmi.s64.f32"],
    ["cvt.rzi.s64.f32", "cvt.rpi.s64.f32"],
    ["cvt.rni.s64.f32", "cvt.rzi.s64.f32"],
    // NaN, which is 0 as an int.
    ["return x != x ? 0 : r;", "return r;"],
    ["return x != x ? 0 : r;", "return x != x ? 1 : r;"],
];

#[test]
fn faults_planted_in_words_are_seen() {
    let templates = templates();
    try_each(0..FAULTS.len() as u64, Duration::MAX, |number| {
        let [from, to] = FAULTS[number as usize];
        let set = replaced(&templates, "lib/cuda/score/score.cuh", from, to);
        let [names, mask, score] = WORDS[match number {
            0..4 => 0,
            4..8 => 1,
            _ => 2,
        }];
        let text = format!("{names} {mask} score = {score};");
        let kernel = kernel(Family::ForwardSm80, "sm_80", false, DType::F16, &text);
        planted::unless_seen(Family::ForwardSm80, &format!("words, {number}, {to}"), &set, || {
            match try_kernel(&kernel, &set, 6, number, |rng| Case::random(&kernel, rng)) {
                Err(e) if e.contains("the oracle says") => Ok(()),
                Err(e) => Err(format!("{to}: {e}")),
                Ok(()) => Err(format!("{to}: nobody saw it")),
            }
        })
    });
}
