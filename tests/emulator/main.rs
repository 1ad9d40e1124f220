//! `forward/sm90` without a GPU: its sources, inline assembly replaced by calls, run on an emulated multiprocessor that
//! schedules threads, copies and matrix instructions at random and tells of deadlocks and races (`machine/`).
//!
//! What this cannot show: the hardware's own rounding inside of matrix instructions, and speed.

mod cases;
mod machine;
mod side;
mod translate;

use cases::Case;
use flashtune::codegen::{
    Family, Kernel, MaskKind, Problem, Schedule, ShapeBucket, Sm90Schedule, Sm90Scheduler, TemplateSet,
};
use flashtune::{DType, Distribution, Layout, Mask, Program, TEMPLATES_VARIABLE};
use machine::Emulated;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The element types of the family.
const DTYPES: [DType; 2] = [DType::F16, DType::Bf16];

/// The templates of the build, or those of a folder.
fn templates() -> TemplateSet {
    match std::env::var(TEMPLATES_VARIABLE) {
        Ok(folder) => flashtune::read_templates(folder.as_ref()).expect("a folder of templates"),
        Err(_) => TemplateSet::embedded(),
    }
}

fn random_kernel(rng: &mut StdRng, program: Option<&str>) -> Kernel {
    const DIMS: [u32; 9] = [16, 40, 64, 72, 96, 128, 136, 192, 256];
    loop {
        let dim_qk = *DIMS.choose(rng).expect("not empty");
        let dim_v = if rng.random_bool(0.7) { dim_qk } else { *DIMS.choose(rng).expect("not empty") };
        let mask = *MaskKind::ALL.choose(rng).expect("not empty");
        let dtype = *DTYPES.choose(rng).expect("not empty");
        let mut problem = Problem::forward_qk_v(dtype, dim_qk, dim_v, mask).expect("a legal problem");
        if let Some(text) = program {
            problem = problem.with_program(Program::parse(text).expect("a program"));
        }
        let consumers = rng.random_range(1..=3);
        let masked_loop = rng.random();
        let scheduler =
            *[Sm90Scheduler::Single, Sm90Scheduler::Stride, Sm90Scheduler::Queue].choose(rng).expect("some");
        let schedule = Schedule::Sm90(Sm90Schedule {
            consumers,
            block_kv: rng.random_range(1..=12) * 16,
            stages: rng.random_range(1..=4),
            overlap: rng.random(),
            take_turns: consumers > 1 && rng.random(),
            p_in_shared: rng.random(),
            masked_loop,
            lazy_rescale: rng.random_bool(0.2),
            pack_group: rng.random(),
            scheduler,
            chain: rng.random(),
            exp2_eighths: if masked_loop && rng.random_bool(0.3) { rng.random_range(1..=4) } else { 0 },
            cluster: rng.random_range(1..=2),
            blocks_per_sm: rng.random_range(1..=2),
            section_mib: *[0, 1, Sm90Schedule::WALK_ALL].choose(rng).expect("not empty"),
        });
        let kernel = Kernel { problem, schedule, arch: "sm_90a".parse().expect("an arch") };
        if kernel.check().is_ok() {
            return kernel;
        }
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
    if !machine::has_compiler() {
        return;
    }
    let (begin, templates) = (Instant::now(), templates());
    let next = AtomicU64::new(numbers.start);
    let failures = Mutex::new(Vec::new());
    let work = || {
        while begin.elapsed() < limit {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= numbers.end {
                return;
            }
            let kernel = kernel(number);
            if let Err(e) = try_kernel(&kernel, &templates, cases, number, |rng| Case::random(&kernel, rng)) {
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
    let seconds = setting("EMULATE_SECONDS");
    let from = setting("EMULATE_FROM").unwrap_or(1);
    let count = if seconds.is_some() { 1 << 40 } else { 16 };
    let limit = seconds.map_or(Duration::MAX, Duration::from_secs);
    try_all(from..from + count, setting("EMULATE_CASES").unwrap_or(6), limit, |number| {
        random_kernel(&mut StdRng::seed_from_u64(number), None)
    });
}

/// Masks, changes of the score and sinks: bounds from scalars and tensors, blocks without any visible key between others,
/// rows and keys at the ends of tensors, scores of -inf.
const PROGRAMS: [&str; 27] = [
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
];

/// Score programs under random schedules; `EMULATE_SECONDS` as above.
#[test]
fn score_programs() {
    let seconds = setting("EMULATE_SECONDS");
    let from = setting("EMULATE_FROM").unwrap_or(0);
    let count = if seconds.is_some() { 1 << 40 } else { PROGRAMS.len() as u64 };
    let limit = seconds.map_or(Duration::MAX, Duration::from_secs);
    try_all(from..from + count, setting("EMULATE_CASES").unwrap_or(4), limit, |number| {
        random_kernel(&mut StdRng::seed_from_u64(900 + number), Some(PROGRAMS[number as usize % PROGRAMS.len()]))
    });
}

/// What runs when nothing is tuned, for the head dims that models use.
#[test]
fn default_schedules() {
    const DIMS: [(u32, u32); 8] =
        [(64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (40, 72), (16, 16), (72, 256)];
    try_all(0..16, 4, Duration::MAX, |i| {
        let (dim_qk, dim_v) = DIMS[i as usize % 8];
        // Every dim with a mask on the right, which most calls have, and with one of the other three.
        let mask = match i / 8 {
            0 => MaskKind::CAUSAL,
            _ => [MaskKind::FULL, MaskKind { left: true, right: false }, MaskKind { left: true, right: true }]
                [i as usize % 3],
        };
        let problem = Problem::forward_qk_v(DTYPES[(i + i / 8) as usize % 2], dim_qk, dim_v, mask).expect("legal");
        let bucket = match i % 3 {
            0 => ShapeBucket { parallel: 16, group: 4, q_len: 64, kv_len: 512, window: 0 },
            _ => ShapeBucket { parallel: 16, group: 1, q_len: 4096, kv_len: 4096, window: 0 },
        };
        let arch = "sm_90a".parse().expect("an arch");
        let schedule = Schedule::default_for(Family::ForwardSm90, &problem, arch, &bucket).expect("supported");
        Kernel { problem, schedule, arch }
    });
}

/// Defects that the machine must see: a file of the templates, a text in it and what to put in its place.
const DEFECTS: &[[&str; 4]] = &[
    ["no order between writes and asynchronous reads", "lib/cuda/tma.cuh", "fence.proxy.async.shared::cta;", ""],
    ["barriers not announced to the copy engine", "lib/cuda/mbarrier.cuh", "fence.mbarrier_init.release.cluster;", ""],
    ["columns of V a wrong distance apart", "lib/cuda/wgmma.cuh", "u64(column_bytes >> 4) << 16", "u64(64) << 16"],
    [
        "an A operand with rows swapped",
        "forward/sm90/consumer.cuh",
        "x[2], x[3]), pack<Element>(x[4], x[5])",
        "x[4], x[5]), pack<Element>(x[2], x[3])",
    ],
    [
        "a stage of K freed too early",
        "forward/sm90.cu",
        "kEmptyK + s * 8, kCluster * kConsumers * 4",
        "kEmptyK + s * 8, kCluster * kConsumers * 4 - 1",
    ],
    [
        "a stage of V never freed",
        "forward/sm90.cu",
        "kEmptyV + s * 8, kCluster * kConsumers * 4",
        "kEmptyV + s * 8, kCluster * kConsumers * 4 + 1",
    ],
    ["scores used while they are computed", "forward/sm90/consumer.cuh", "wgmma_wait<1>();", ""],
    [
        "a turn that is never passed",
        "forward/sm90/consumer.cuh",
        "if (kTakeTurns) barrier_arrive(",
        "if (false) barrier_arrive(",
    ],
    ["one key too many", "forward/sm90/consumer.cuh", "live.last + 1 - column", "live.last + 2 - column"],
    ["O overwritten while it is copied", "lib/cuda/tma.cuh", "cp.async.bulk.wait_group.read 0;", ""],
    ["threads that disagree about non-finite elements", "lib/cuda/warpgroup.cuh", "return any != 0;", "return x != 0;"],
    [
        "V used before it is clean",
        "forward/sm90/producer.cuh",
        "? Layout::kRawV : Layout::kFullV",
        "? Layout::kFullV : Layout::kFullV",
    ],
    [
        "more registers than there are",
        "forward/sm90.cu",
        "registers_take<kConsumerRegisters>",
        "registers_take<kConsumerRegisters + 8>",
    ],
    [
        "a block that ends before its cluster",
        "forward/sm90.cu",
        "    if constexpr (kCluster > 1) cluster_sync();\n}",
        "}",
    ],
    [
        "barriers that the cluster does not know yet",
        "forward/sm90.cu",
        "        cluster_sync();\n    } else {\n",
        "        __syncthreads();\n    } else {\n",
    ],
    ["keys for one block of a cluster", "forward/sm90/producer.cuh", "(1 << kCluster) - 1", "1"],
    [
        "a buffer that is filled again while the other block reads it",
        "forward/sm90/consumer.cuh",
        "mbarrier_arrive_at(empty, lane())",
        "mbarrier_arrive_at(empty, cluster_rank())",
    ],
    [
        "O in the place of V while another consumer multiplies",
        "forward/sm90/consumer.cuh",
        "barrier_sync(1 + 2 * kConsumers, kConsumers * 128);",
        "",
    ],
    [
        "the place of V given away under O",
        "forward/sm90/producer.cuh",
        "mbarrier_wait(smem + Layout::kAdmitV, admit_parity);",
        "",
    ],
    ["a scan for non-finite elements that skips some", "lib/cuda/non_finite.cuh", "sums[0] | sums[1] | ", ""],
    [
        "a kernel that never waits for Q",
        "forward/sm90/consumer.cuh",
        "mbarrier_wait(smem + Layout::kFullQ + q_at * 8, q_ring.parity);",
        "",
    ],
];

/// Several tiles per thread block, masked blocks on both sides, non-finite values.
const DEFECT_CASE: Case = Case {
    sizes: [1, 4, 2, 130, 200],
    mask: Mask::Window { left: Some(60), right: Some(20) },
    layout: Layout::Bhsd,
    values: Distribution::Normal,
    scale: None,
    lse: true,
    bad: [0, 6, 0],
    seed: 0,
};

/// The machine is no judge if it lets these pass.
#[test]
fn defects_are_seen() {
    if !machine::has_compiler() {
        return;
    }
    let templates = templates();
    let files: BTreeMap<&str, &str> = templates.files().collect();
    let problem = Problem::forward_qk_v(DType::Bf16, 72, 72, MaskKind { left: true, right: true }).expect("legal");
    // Defects in what clusters do show in clusters, those of a block that runs ahead in one alone; O takes the place of V
    // where it fits.
    let schedule = |what: &str| Sm90Schedule {
        consumers: 2,
        block_kv: if what.contains("place of V") { 64 } else { 32 },
        stages: 2,
        overlap: true,
        take_turns: true,
        p_in_shared: true,
        masked_loop: true,
        lazy_rescale: false,
        pack_group: true,
        scheduler: Sm90Scheduler::Stride,
        chain: false,
        exp2_eighths: 0,
        cluster: if what.contains("cluster") || what.contains("other block") { 2 } else { 1 },
        blocks_per_sm: 1,
        section_mib: 0,
    };
    for (i, [what, file, from, to]) in DEFECTS.iter().enumerate() {
        let schedule = Schedule::Sm90(schedule(what));
        let kernel = Kernel { problem, schedule, arch: "sm_90a".parse().expect("an arch") };
        let case = |rng: &mut StdRng| Case { seed: rng.random(), ..DEFECT_CASE };
        let text = files[file];
        assert!(text.contains(from), "{file} has no `{from}` any more: say how to break it now");
        let broken = BTreeMap::from([((*file).to_owned(), text.replace(from, to))]);
        let others = files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        let set = TemplateSet::from_files(others.chain(broken).collect()).expect("templates that parse");
        let verdict = try_kernel(&kernel, &set, 40, i as u64, case);
        println!("{what}: {}", verdict.as_ref().err().map_or("NOT SEEN", |e| e.rsplit("}: ").next().unwrap_or(e)));
        assert!(verdict.is_err(), "{what}: not seen");
        assert!(!verdict.unwrap_err().contains("error:"), "{what}: it does not compile");
    }
}
