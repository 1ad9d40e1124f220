//! `forward/sm90` and `forward/sm80` without a GPU: their sources, inline assembly replaced by calls, run on an
//! emulated multiprocessor that schedules threads, copies and matrix instructions at random and tells of deadlocks and
//! races (`machine/`). `faults/` plants faults in them, each of which must be seen.
//!
//! What this cannot show: the hardware's own rounding inside of matrix instructions, and speed.

// A program has no users: what is `pub` here is for its other modules.
#![allow(unreachable_pub)]

mod appends;
mod backward;
mod backward_sm80;
mod block_masks;
mod cases;
mod dropout;
mod far;
mod faults;
mod gradient;
mod machine;
mod pads;
mod passed;
mod planted;
mod quantise;
mod quick;
mod ragged;
mod residual;
mod schedules;
mod side;
mod translate;
mod words;

use cases::Case;
use flashtune::{DType, TEMPLATES_VARIABLE};
use flashtune_codegen::{Family, Kernel, MaskKind, Precision, Problem, Schedule, ShapeBucket, TemplateSet};
use machine::Emulated;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use schedules::{random_sm75, random_sm80, random_sm80_f32, random_sm89_fp8, random_sm90, random_sm90_fp8};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The element types of the families.
const DTYPES: [DType; 2] = [DType::F16, DType::Bf16];

/// The templates of the build, or those of a folder.
fn templates() -> TemplateSet {
    match std::env::var(TEMPLATES_VARIABLE) {
        Ok(folder) => flashtune::read_templates(folder.as_ref()).expect("a folder of templates"),
        Err(_) => TemplateSet::embedded(),
    }
}

/// Runs cases on a kernel. What goes wrong comes back with what is needed to see it again.
fn try_kernel(
    kernel: &Kernel,
    templates: &TemplateSet,
    cases: u64,
    seed: u64,
    case: impl Fn(&mut StdRng) -> Case,
) -> Result<(), String> {
    let mut emulated = Emulated::build(kernel, templates).map_err(|e| format!("{}: {e}", kernel.name()))?;
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..cases {
        let case = case(&mut rng);
        let expected = case.expected(kernel);
        let mut first = None;
        // Twice, under schedules of the machine that differ: the bits must not.
        for _ in 0..2 {
            let (seed, units) = (rng.random(), rng.random_range(1..=5));
            let o = expected
                .run(kernel, &mut emulated, seed, units)
                .map_err(|e| format!("{} on {units} units, seed {seed}, {case:?}: {e}", kernel.name()))?;
            if first.as_ref().is_some_and(|first| *first != o) && expected.is_finite() {
                return Err(format!("{} {case:?}: not the same bits in two runs", kernel.name()));
            }
            first = Some(o);
        }
    }
    Ok(())
}

/// Tries numbered kernels on all processors and fails if any is wrong.
fn try_all(numbers: std::ops::Range<u64>, cases: u64, limit: Duration, kernel: impl Fn(u64) -> Kernel + Sync) {
    let templates = templates();
    try_recorded(numbers, limit, |number| {
        let kernel = kernel(number);
        try_kernel(&kernel, &templates, cases, number, |rng| Case::random(&kernel, rng))
    });
}

/// The same, less most of the numbers of a test that passed before ([`passed`]).
fn try_recorded(numbers: std::ops::Range<u64>, limit: Duration, one: impl Fn(u64) -> Result<(), String> + Sync) {
    if !machine::has_compiler() {
        return;
    }
    let test = passed::Test::of_this_thread();
    let left_out = AtomicU64::new(0);
    try_each(numbers, limit, |number| {
        if test.as_ref().is_some_and(passed::Test::leaves_out) {
            left_out.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        one(number)
    });
    println!("{} of them passed before", left_out.into_inner());
    if let Some(test) = test {
        test.passed();
    }
}

/// Tries what numbers name on all processors and fails if any is wrong.
fn try_each(numbers: std::ops::Range<u64>, limit: Duration, one: impl Fn(u64) -> Result<(), String> + Sync) {
    if !machine::has_compiler() {
        return;
    }
    let begin = Instant::now();
    let next = AtomicU64::new(numbers.start);
    let failures = Mutex::new(Vec::new());
    let work = || {
        while begin.elapsed() < limit {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= numbers.end {
                return;
            }
            if let Err(e) = one(number) {
                println!("number {number}: {e}");
                failures.lock().expect("no panic").push(number);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let tried = next.into_inner().min(numbers.end);
    println!("numbers {} to {tried} in {:.0} s", numbers.start, begin.elapsed().as_secs_f64());
    let failures = failures.into_inner().expect("no panic");
    assert!(failures.is_empty(), "wrong: {failures:?}");
}

fn setting(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} is no number: {value}")))
}

/// A few on CI. `EMULATE_SECONDS` makes it a search of that length; `EMULATE_FROM` is the first number,
/// `EMULATE_CASES` the calls of each kernel.
#[test]
fn random_schedules() {
    search(12, |number| random_sm90(&mut StdRng::seed_from_u64(number), None));
}

/// The same for `forward/sm90_fp8`, whose sums the machine cuts to 13 bits as Hopper does; every second with a score
/// program.
#[test]
fn random_sm90_fp8_schedules() {
    search(10, |number| {
        let program = number.is_multiple_of(2).then(|| PROGRAMS[number as usize / 2 * 7 % PROGRAMS.len()]);
        random_sm90_fp8(&mut StdRng::seed_from_u64(number), program)
    });
}

/// The same for `forward/sm80`, every third with a score program: how those are lowered is shown below.
#[test]
fn random_sm80_schedules() {
    search(6, |number| {
        let program = number.is_multiple_of(3).then(|| PROGRAMS[number as usize * 7 % PROGRAMS.len()]);
        random_sm80(&mut StdRng::seed_from_u64(number), program)
    });
}

/// The same for `forward/sm80` on sm_75.
#[test]
fn random_sm75_schedules() {
    search(3, |number| {
        let program = number.is_multiple_of(3).then(|| PROGRAMS[number as usize * 7 % PROGRAMS.len()]);
        random_sm75(&mut StdRng::seed_from_u64(number), program)
    });
}

/// The same for `forward/sm89_fp8`, whose sums the machine cuts to 13 bits.
#[test]
fn random_sm89_fp8_schedules() {
    search(4, |number| random_sm89_fp8(&mut StdRng::seed_from_u64(number)));
}

/// The same for `forward/sm80_f32`.
#[test]
fn random_sm80_f32_schedules() {
    search(5, |number| {
        let program = number.is_multiple_of(3).then(|| PROGRAMS[number as usize * 7 % PROGRAMS.len()]);
        random_sm80_f32(&mut StdRng::seed_from_u64(number), program)
    });
}

/// Sums over more keys than the registers of `forward/sm80_f32` hold before they go to memory.
#[test]
fn long_sums_of_f32() {
    let problem = Problem::forward_qk_v(DType::F32, 32, 40, MaskKind { left: true, right: true }).expect("legal");
    let problem = Problem { precision: Precision::Tf32x3, ..problem };
    let schedule = faults::sm80_f32::schedule("");
    let kernel = Kernel { problem, schedule, arch: "sm_80".parse().expect("an arch") };
    try_recorded(0..2, Duration::MAX, |number| {
        let base = [faults::sm80_f32::GATHERED, faults::sm80_f32::LONG][number as usize];
        let sizes = [1, 2, 1, 20, 9000 + number as usize];
        try_kernel(&kernel, &templates(), 2, number, |rng| Case { sizes, seed: rng.random(), ..base })
    });
}

fn search(on_ci: u64, kernel: impl Fn(u64) -> Kernel + Sync) {
    let (templates, cases) = (templates(), setting("EMULATE_CASES").unwrap_or(4));
    search_with(on_ci, |number| {
        let kernel = kernel(number);
        try_kernel(&kernel, &templates, cases, number, |rng| Case::random(&kernel, rng))
    });
}

/// Tries what numbers name, a few on CI and as `EMULATE_SECONDS` says otherwise.
fn search_with(on_ci: u64, one: impl Fn(u64) -> Result<(), String> + Sync) {
    let seconds = setting("EMULATE_SECONDS");
    let from = setting("EMULATE_FROM").unwrap_or(1);
    let count = if seconds.is_some() { 1 << 40 } else { on_ci };
    let limit = seconds.map_or(Duration::MAX, Duration::from_secs);
    try_recorded(from..from + count, limit, one);
}

/// Masks, changes of the score and sinks: bounds from scalars and tensors, blocks without any visible key between
/// others, rows and keys at the ends of tensors, scores of -inf, rows of one key under a cap.
const PROGRAMS: [&str; 41] = [
    "mask = kv <= q and q - kv < 70;",
    "prefix: i32[batch]; mask = kv < 9 * prefix[b] or kv <= q + kv_len - q_len;",
    "d: i32[batch, *] nondecreasing; mask = d[b, q] == d[b, kv] and kv <= q + 20;",
    "chunk: int in 1..40; mask = kv // (5 * chunk) == q // (5 * chunk) and kv <= q;",
    "slope: f32[heads]; score = score + slope[h] * (kv - (q + kv_len - q_len));",
    "cap: float; score = cap * tanh(score * (1.0 / cap));",
    "bias: f32[heads, q_len, kv_len]; score = score + bias[h, q, kv];",
    "s: f32[heads]; mask = kv <= q + 3 and kv % 3 != 1; score = 4.0 * tanh(score * 0.25); sink = s[h];",
    "mask = kv < 5 or (kv <= q and q - kv < 20) or kv == 100;",
    "seen: bool[batch, heads, q_len, kv_len]; mask = seen[b, h, q, kv];",
    "score = select(kv <= q, score, -inf);",
    "step: int in 1..40; mask = (q - kv) % step == 0;",
    "s: f32[kv_heads]; mask = kv < q and q < kv; sink = s[h_kv];",
    "d: i32[batch, q_len] nondecreasing; e: i32[batch, kv_len] nondecreasing; s: f32[heads]; mask = d[b, q] == e[b, kv]; \
     score = score + s[h] * (kv - q);",
    "d: i32[kv_len] nondecreasing; mask = d[kv] <= 5 - q // 20 and d[kv] >= q // 70;",
    "mask = kv // 64 >= 3 - q // 50 and kv <= abs(q - 100) + 40;",
    "s: f32[heads]; cap: float; score = cap * tanh(score / cap) + s[h] * (kv - q);",
    "s: f32[heads]; score = 0.5 - score * s[h] + 3.0 * tanh(0.01 * kv);",
    "s: f32[heads]; mask = kv <= q and q - kv < 90; score = 0.125 * kv + score - s[h] * 0.1;",
    "score = select(kv > q + 9, score, -inf);",
    "s: f32[heads]; mask = kv >= q // 50; score = select(kv > q, score * 2.0, -inf); sink = s[h];",
    "bias: bf16[heads, q_len, kv_len]; score = score + bias[h, q, kv];",
    "bias: bf16[kv_len]; other: f32[kv_len]; mask = kv <= q; score = score * bias[kv] + other[kv];",
    "mask = kv <= q + 30; score = score + select(q % 3 == 0, -inf, 0.5) + 0.125 * kv;",
    "t: f32[*]; reach: int in 0..20; score = score + t[clamp(kv - q, -reach, reach) + reach];",
    "s: f32[heads]; score = 50.0 * tanh(score * s[h]);",
    "s: f32[heads]; mask = kv <= q and q - kv < 90; score = tanh(-1.5 * score) * -2.0; sink = s[h];",
    "bias: bf16[heads, 1, kv_len]; other: bf16[q_len, kv_len]; mask = kv <= q + 9; score = score * bias[h, q, kv] + other[q, kv];",
    "cap: float in 1..40; s: f32[heads]; mask = kv <= q + 5; score = cap * tanh(score * 0.125); sink = s[h];",
    "t: bool[batch, kv_heads, 1, *]; mask = t[b, h_kv, q // 64, kv // 40] and kv <= q + 70;",
    "bias: bf16[heads, q_len, kv_len]; mask = kv % 3 != 1; score = score + 0.5 * tanh(score) + bias[h, q, kv];",
    "bias: f16[batch, kv_heads, q_len, kv_len]; other: bf16[q_len, kv_len]; mask = kv <= q + 9 and q - kv < 90; \
     score = score * 0.5 + bias[b, h_kv, q, kv] + other[q, kv];",
    "bias: bf16[*, q_len, kv_len]; d: i32[batch, *] nondecreasing; mask = d[b, q] == d[b, kv]; score = score + bias[h % 3, q, kv];",
    "bias: f16[heads, q_len, kv_len]; t: bool[batch, kv_heads, 1, *]; mask = t[b, h_kv, q // 64, kv // 40]; \
     score = score + bias[h, q, kv];",
    "s: f32[heads]; score = score - s[h] * (kv - q);",
    "cap: float usually in 0..50; score = cap * tanh(score * (1.0 / cap));",
    "bias: bf16[kv_heads, q_len, kv_len]; t: f32[kv_len]; s: f32[heads]; mask = kv <= q + 30; \
     score = t[kv] - s[h] * (kv - q) + score - 2.0 * bias[h_kv, q, kv];",
    "seen: bool[batch, *, q_len, kv_len]; mask = seen[b, 0, q, kv];",
    "seen: bool[q_len, kv_len]; s: f32[heads]; mask = not seen[q, kv] and (q + kv) % 5 != h; sink = s[h];",
    "seen: bool[batch, 1, q_len, kv_len]; pad: bool[batch, kv_len]; \
     mask = seen[b, 0, q, kv] and pad[b, kv // 70] and kv <= q + 60;",
    "mask = kv == q // 3; score = 15.0 * tanh(score / 15.0);",
];

/// Score programs under random schedules; `EMULATE_SECONDS` as above, `EMULATE_PROGRAM` is the number of one that is
/// tried alone.
#[test]
fn score_programs() {
    let seconds = setting("EMULATE_SECONDS");
    let (from, program) = (setting("EMULATE_FROM").unwrap_or(0), setting("EMULATE_PROGRAM"));
    let count = if seconds.is_some() { 1 << 40 } else { PROGRAMS.len() as u64 };
    let limit = seconds.map_or(Duration::MAX, Duration::from_secs);
    try_all(from..from + count, setting("EMULATE_CASES").unwrap_or(2), limit, |number| {
        random_sm90(
            &mut StdRng::seed_from_u64(900 + number),
            Some(PROGRAMS[program.unwrap_or(number) as usize % PROGRAMS.len()]),
        )
    });
}

/// What runs when nothing is tuned, for the head dims that models use.
#[test]
fn default_schedules() {
    const DIMS: [(u32, u32); 8] =
        [(64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (40, 72), (16, 16), (72, 256)];
    try_all(0..16, 2, Duration::MAX, |i| {
        let (dim_qk, dim_v) = DIMS[i as usize % 8];
        // Every dim with a mask on the right, which most calls have, and with one of the other three.
        let mask = match i / 8 {
            0 => MaskKind::CAUSAL,
            _ => [MaskKind::FULL, MaskKind { left: true, right: false }, MaskKind { left: true, right: true }]
                [i as usize % 3],
        };
        let problem = Problem::forward_qk_v(DTYPES[(i + i / 8) as usize % 2], dim_qk, dim_v, mask).expect("legal");
        let bucket = match i % 3 {
            0 => ShapeBucket { parallel: 16, group: 4, q_len: 64, kv_len: 512, ..Default::default() },
            _ => ShapeBucket { parallel: 16, group: 1, q_len: 4096, kv_len: 4096, ..Default::default() },
        };
        let arch = "sm_90a".parse().expect("an arch");
        let schedule = Schedule::default_for(Family::ForwardSm90, &problem, arch, &bucket).expect("supported");
        Kernel { problem, schedule, arch }
    });
}
