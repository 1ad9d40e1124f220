//! What `flashtune check` goes through: problems, schedules, sizes and inputs.

use flashtune::{DType, Distribution, Layout, Mask, MaskKind, Precision, Problem, Shape};
use flashtune_codegen::score::{Program, Type};
use flashtune_codegen::{Arch, Family, Kernel, KvKind, Op, ScaleUnits, Schedule, ShapeBucket};
use flashtune_runtime::{CheckInputs, Poison};
use serde::Serialize;

/// One check that did not pass.
#[derive(Serialize)]
pub(crate) struct Failure {
    pub kernel: String,
    pub shape: String,
    pub inputs: String,
    pub what: String,
}

/// How much to check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Under a minute.
    Quick,
    /// Everything that the templates can be asked for, sampled.
    Full,
}

/// The problems of the sweep.
pub(crate) fn problems(effort: Effort) -> Vec<Problem> {
    let dims: &[(u32, u32)] = match effort {
        Effort::Quick => &[(64, 64), (128, 128), (40, 72), (59, 33)],
        Effort::Full => &[
            (16, 16),
            (24, 24),
            (32, 32),
            (40, 40),
            (64, 64),
            (72, 72),
            (96, 96),
            (128, 128),
            (136, 136),
            (192, 192),
            (248, 248),
            (256, 256),
            (192, 128),
            (64, 128),
            (40, 72),
            (256, 16),
            (59, 59),
            (111, 111),
            (7, 250),
            (1, 1),
            (255, 5),
        ],
    };
    let mut problems = Vec::new();
    for (i, &(qk, v)) in dims.iter().enumerate() {
        for (j, dtype) in DType::ALL.into_iter().enumerate() {
            for (k, mask) in MaskKind::ALL.into_iter().enumerate() {
                // Quick: every pair of dims, dtype and mask meets, not every triple.
                if effort == Effort::Quick && (i + j + k) % 2 == 1 {
                    continue;
                }
                problems.push(Problem::forward_qk_v(dtype, qk, v, mask).expect("the dims above are supported"));
            }
        }
    }
    problems
}

/// The problems of e4m3: head dims of one to two chunks of 128 columns, whole and not, every dtype of O, and scales of
/// every unit, those of heads in half of them.
pub(crate) fn e4m3_problems(effort: Effort) -> Vec<Problem> {
    let dims: &[(u32, u32)] = match effort {
        Effort::Quick => &[(64, 64), (128, 128), (80, 48), (256, 256)],
        Effort::Full => &[
            (16, 16),
            (32, 32),
            (48, 48),
            (64, 64),
            (80, 80),
            (96, 96),
            (112, 112),
            (128, 128),
            (160, 160),
            (192, 192),
            (256, 256),
            (192, 128),
            (64, 128),
            (128, 64),
            (80, 48),
            (256, 16),
        ],
    };
    let mut problems = Vec::new();
    for (i, &(qk, v)) in dims.iter().enumerate() {
        for (j, mask) in MaskKind::ALL.into_iter().enumerate() {
            let problem = Problem::forward_qk_v(DType::E4m3, qk, v, mask).expect("the dims above are supported");
            let n = i * MaskKind::ALL.len() + j;
            let scales = if n.is_multiple_of(2) { ScaleUnits::default() } else { ScaleUnits::ALL[1 + n / 2 % 7] };
            problems.push(problem.with_output(DType::OUTPUTS_OF_E4M3[(i + j) % 4]).with_scales(scales));
        }
    }
    problems
}

/// The same with a score program or, where nobody brings one, without and some with caps, slopes, sinks, documents and
/// biases.
pub(crate) fn e4m3_with(effort: Effort, program: &Program) -> Vec<Problem> {
    let mut problems = e4m3_problems(effort);
    if !program.is_plain() {
        return problems.into_iter().map(|problem| problem.with_program(program.clone())).collect();
    }
    let every = problems.len() / E4M3_PROGRAMS.len();
    let some = problems.iter().step_by(every.max(1)).zip(E4M3_PROGRAMS);
    let some: Vec<_> =
        some.map(|(problem, text)| problem.with_program(Program::parse(text).expect("parses"))).collect();
    problems.extend(some);
    problems
}

const E4M3_PROGRAMS: [&str; 8] = [
    "cap: float usually in 0..50; score = cap * tanh(score * (1.0 / cap));",
    "slope: f32[heads]; score = score - slope[h] * abs(q + kv_len - q_len - kv);",
    "sinks: f32[heads]; sink = sinks[h];",
    "doc: i32[batch, kv_len] nondecreasing; mask = doc[b, kv] == doc[b, q];",
    "bias: bf16[heads, q_len, kv_len]; score = score + bias[h, q, kv];",
    "chunk: int in 1..4096; mask = kv // chunk == q // chunk and kv <= q + kv_len - q_len;",
    "s: f32[heads]; mask = kv <= q + 3 and kv % 3 != 1; score = 4.0 * tanh(score * 0.25); sink = s[h];",
    "score = select(q % 4 == 1, -inf, score);",
];

/// The problems of the sweep whose forward passes also write what O loses by rounding, and their gradients, dense and
/// packed, which read it.
pub(crate) fn residual_problems(effort: Effort, program: &Program) -> Vec<Problem> {
    let every = if effort == Effort::Full { 3 } else { 2 };
    let of_16_bits = problems(effort).into_iter().filter(|p| p.dtype != DType::F32);
    let some = of_16_bits.enumerate().filter(|(nth, _)| nth % every == 0);
    let some = some.map(|(_, p)| p.with_program(program.clone()).with_residual(true)).enumerate();
    some.flat_map(|(nth, p)| {
        let backward = p.backward();
        let packed = nth % 3 == 1 && program.is_plain();
        [p, if packed { backward.with_kv(KvKind::RAGGED) } else { backward }]
    })
    .collect()
}

/// The problems of the sweep with dropout and their gradients, dense and packed.
pub(crate) fn dropout_problems(effort: Effort, program: &Program) -> Vec<Problem> {
    let every = if effort == Effort::Full { 4 } else { 5 };
    let some = problems(effort).into_iter().enumerate().filter(|(nth, _)| nth % every == 0);
    let some = some.map(|(_, p)| p.with_program(program.clone()).with_dropout(true)).enumerate();
    some.flat_map(|(nth, p)| {
        let backward = p.backward();
        let packed = nth % 2 == 1 && program.is_plain();
        [p, backward].map(|p| if packed { p.with_kv(KvKind::RAGGED) } else { p })
    })
    .collect()
}

/// Programs whose gradients by `t` are checked where nobody brings one: pairs with an element each, sums over heads,
/// rows and columns, slopes, tables by computed indices, a sink, a scalar, and a tensor that is read twice.
const READS: [&str; 9] = [
    "t: f32[batch, heads, q_len, kv_len]; mask = kv % 3 != q % 5; score = score + t[b, h, q, kv];",
    "t: f32[q_len, kv_len]; score = 9.0 * tanh(score / 9.0) + t[q, kv];",
    "t: f32[heads]; score = score + t[h] * (kv - q);",
    "t: f32[heads, *]; score = score + t[h, clamp(kv - q, -20, 20) + 20];",
    "t: f32[heads]; score = max(score, 0.2 * score); sink = t[h];",
    "t: bf16[heads, kv_len]; mask = kv <= q + 40; score = score + t[h, kv];",
    "t: f32[batch, q_len]; score = score * (1.0 + 0.1 * t[b, q]);",
    "t: f32; score = t * score;",
    "t: f32[*]; doc: i32[batch, kv_len]; score = score + t[doc[b, kv]] + 0.5 * score * t[doc[b, kv] + 1];",
];

/// Kernels of `Op::Quantise`: every dtype, head dims with and without a Hadamard matrix, whole and broken vectors.
pub(crate) fn quantise_kernels(arch: Arch, effort: Effort) -> flashtune_codegen::Result<Vec<Kernel>> {
    let dims: &[(u32, u32)] = match effort {
        Effort::Quick => &[(64, 64), (128, 128), (256, 256), (192, 128), (59, 33), (96, 96)],
        Effort::Full => &[
            (64, 64),
            (128, 128),
            (256, 256),
            (192, 128),
            (59, 33),
            (96, 96),
            (16, 16),
            (32, 64),
            (80, 80),
            (1, 2),
            (8, 256),
            (256, 8),
        ],
    };
    let mut kernels = Vec::new();
    for (i, &(qk, v)) in dims.iter().enumerate() {
        let dtypes = if effort == Effort::Full { &DType::ALL[..] } else { &DType::ALL[i % 3..i % 3 + 1] };
        for &dtype in dtypes {
            let problem = Problem { op: Op::Quantise, ..Problem::forward_qk_v(dtype, qk, v, MaskKind::FULL)? };
            for family in Family::candidates(&problem, arch) {
                let schedule = Schedule::default_for(family, &problem, arch, &ShapeBucket::default())?;
                kernels.push(Kernel { problem, schedule, arch });
            }
        }
    }
    Ok(kernels)
}

/// The problems of gradients of what a program reads: by each float of a program that is brought.
pub(crate) fn gradients(effort: Effort, program: &Program) -> Vec<Problem> {
    let problems = problems(effort);
    let by_floats = |problem: Problem| -> Vec<Problem> {
        let floats = problem.program.map_or(&[][..], |p| p.kept().declarations()).iter();
        let floats = floats.filter(|d| d.storage.ty() == Type::Float);
        floats.filter_map(|d| problem.gradient_by(&d.name)).collect()
    };
    if !program.is_plain() {
        return problems.into_iter().map(|p| p.with_program(program.clone())).flat_map(by_floats).collect();
    }
    // Every program with some of the problems, others from one to the next.
    let each = if effort == Effort::Full { 6 } else { 2 };
    let reads = READS.iter().enumerate().flat_map(|(nth, text)| (0..each).map(move |i| (5 * nth + 7 * i, *text)));
    reads
        .flat_map(|(at, text)| {
            let program = Program::parse(text).expect("the programs above are in the language");
            by_floats(problems[at % problems.len()].with_program(program))
        })
        .collect()
}

/// Whether all rows of what a problem gives are compared, at several times the cost of a forward pass.
fn of_gradients(problem: &Problem) -> bool {
    matches!(problem.op, Op::Backward | Op::Gradient)
}

/// A problem in every precision that it has on the arch.
pub(crate) fn in_precisions(problem: Problem, arch: Arch) -> impl Iterator<Item = Problem> {
    Precision::ALL.into_iter().map(move |p| problem.in_precision(p)).filter(move |p| p.validate_on(arch).is_ok())
}

/// The kernels that are checked for a problem: the default one of every family, and some others of the searched space,
/// evenly spread over it. The same ones every time. Of one family alone when it is named.
pub(crate) fn kernels(problem: &Problem, arch: Arch, schedules: usize, family: Option<Family>) -> Vec<Kernel> {
    let of_sizes = |q_len, kv_len| {
        ShapeBucket::of(&Shape { batch: 2, heads: 4, kv_heads: 2, q_len, kv_len, mask: representative(problem.mask) })
    };
    let (prompt, step, few) = (of_sizes(256, 256), of_sizes(1, 1024), of_sizes(32, 1024));
    let mut kernels: Vec<Kernel> = Vec::new();
    let families = match family {
        Some(family) => vec![family],
        None => Family::candidates(problem, arch),
    };
    for family in families {
        if family.supports(problem, arch).is_err() {
            continue;
        }
        // Ragged batches are mostly steps of decoders, but for families that are not for them.
        let buckets = match problem.kv.is_dense() {
            true => vec![prompt],
            false if family.prefers(problem, &step) => vec![step],
            false => vec![prompt, few],
        };
        let kernel = |schedule| Kernel { problem: *problem, schedule, arch };
        let fits = |k: &Kernel| k.check().is_ok();
        for bucket in &buckets {
            kernels.extend(Schedule::default_for(family, problem, arch, bucket).map(kernel).ok().filter(fits));
        }
        let space: Vec<_> = Schedule::space(family, problem, arch).into_iter().map(kernel).filter(fits).collect();
        for i in 0..schedules {
            // Not the corners of the space: the middle of each of `schedules` equal parts, shifted by the problem.
            let shift = problem.head_dim_qk as usize / 8 + problem.head_dim_v as usize / 8 * 3;
            let part = space.len().div_ceil(schedules.max(1)).max(1);
            if let Some(k) = space.get(i * part + (part / 2 + shift) % part) {
                kernels.push(*k);
            }
        }
    }
    let mut seen = std::collections::HashSet::new();
    kernels.retain(|k| seen.insert(*k));
    kernels
}

fn representative(kind: MaskKind) -> Mask {
    let side = |bounded: bool, reach| bounded.then_some(reach);
    Mask::Window { left: side(kind.left, 32), right: side(kind.right, 0) }
}

/// The sizes that every kernel is checked with: batch, heads, KV heads, rows of Q, rows of K and V.
const SIZES: [[u32; 5]; 12] = [
    [1, 1, 1, 1, 1],
    [2, 2, 2, 7, 7],
    [1, 4, 2, 63, 129],
    [2, 2, 1, 129, 63],
    [1, 3, 1, 1, 1000],
    // With a bounded right side, 193 rows have nothing to attend to.
    [1, 2, 2, 200, 7],
    [1, 6, 2, 128, 128],
    [1, 2, 1, 257, 300],
    // No key at all: O is 0 and the LSE is -inf.
    [1, 2, 2, 5, 0],
    // No output at all.
    [0, 2, 2, 8, 8],
    [2, 0, 0, 8, 8],
    [1, 2, 2, 0, 9],
];

/// Pairs of queries and keys up to which the quick sweep has a backward pass: all rows of its gradients are compared,
/// and in a debug build the reference takes microseconds a pair.
const QUICK_BACKWARD: u64 = 40_000;

/// Longer sizes, for `--full` and for one mask and dtype in the quick sweep.
const LONG: [[u32; 5]; 2] = [[1, 2, 1, 1000, 1000], [1, 2, 2, 999, 1531]];

/// Sizes and inputs for a problem. `nth` varies the mixture from problem to problem.
pub(crate) fn cases(problem: &Problem, effort: Effort, nth: usize, seed: u64) -> Vec<(Shape, CheckInputs)> {
    let reaches: &[(u32, u32)] = match effort {
        Effort::Quick => &[(17, 5), (64, 0)],
        // None, a few, more than there are keys, and as many as can be said.
        Effort::Full => &[(17, 5), (64, 0), (0, 0), (5000, 3), (u32::MAX, u32::MAX)],
    };
    let long: &[[u32; 5]] = match (effort, nth % 6) {
        // All rows of gradients are compared, and their reference takes four times a forward pass's.
        _ if of_gradients(problem) => &[],
        (Effort::Full, _) => &LONG,
        (Effort::Quick, 0) => &LONG[..1],
        (Effort::Quick, _) => &[],
    };
    let distributions = [Distribution::Normal, Distribution::NormalWithOutliers, Distribution::Uniform];
    let mut cases = Vec::new();
    for (i, &[batch, heads, kv_heads, q_len, kv_len]) in SIZES.iter().chain(long).enumerate() {
        let pairs = [batch, heads, q_len, kv_len].map(u64::from).iter().product::<u64>();
        if of_gradients(problem) && effort == Effort::Quick && pairs > QUICK_BACKWARD {
            continue;
        }
        let (left, right) = reaches[(i + nth) % reaches.len()];
        let mask = match (problem.mask.left, problem.mask.right) {
            (false, false) => Mask::Full,
            // Causal and its generalisation share a kernel: both are asked for.
            (false, true) if (i + nth).is_multiple_of(2) => Mask::Causal,
            (false, true) => Mask::Window { left: None, right: Some(right) },
            (true, false) => Mask::Window { left: Some(left), right: None },
            (true, true) => Mask::Window { left: Some(left), right: Some(right) },
        };
        let n = i + nth;
        let inputs = CheckInputs {
            layout: Layout::ALL[n % 3],
            distribution: if n % 11 == 10 { Distribution::Constant(0.5) } else { distributions[n / 2 % 3] },
            seed: seed.wrapping_add(n as u64),
            lse: n % 4 != 3,
            poison: [Poison::Nan, Poison::None, Poison::Infinite, Poison::None][n % 4],
            scale: [None, None, Some(0.25), Some(0.0)][n % 4],
        };
        cases.push((Shape { batch, heads, kv_heads, q_len, kv_len, mask }, inputs));
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune_codegen::{CpuIsa, SmArch};

    #[test]
    fn the_quick_sweep_meets_every_dtype_mask_and_dim() {
        let quick = problems(Effort::Quick);
        for dtype in DType::ALL {
            for mask in MaskKind::ALL {
                assert!(quick.iter().any(|p| p.dtype == dtype && p.mask == mask), "{dtype} {mask}");
            }
        }
        assert!(problems(Effort::Full).len() >= 150);
    }

    #[test]
    fn every_problem_has_kernels_and_every_case_fits_its_problem() {
        for arch in [Arch::Cpu(CpuIsa::Avx512), Arch::Sm(SmArch { number: 90, specific: true })] {
            for (nth, problem) in problems(Effort::Full).iter().enumerate() {
                let kernels = kernels(problem, arch, 3, None);
                // f32 on CUDA, and rows that are no whole vectors, have one kernel, whose schedule is fixed.
                let fixed = matches!(arch, Arch::Sm(_)) && (problem.dtype == DType::F32 || problem.pads(arch));
                assert!(kernels.len() > usize::from(!fixed), "{problem} on {arch}: {}", kernels.len());
                assert!(kernels.iter().all(|k| k.check().is_ok()));
                for (shape, _) in cases(problem, Effort::Full, nth, 0) {
                    assert_eq!(shape.mask.kind(), problem.mask, "{problem} {shape}");
                    shape.validate().unwrap();
                }
            }
        }
    }
}
