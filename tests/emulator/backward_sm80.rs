//! Schedules of `backward/sm80` on the emulated machine, and faults that are planted in it.

use crate::backward::{Loaded, Machine, every_other_packed, try_backward};
use crate::faults::replaced;
use crate::{DTYPES, PROGRAMS, machine, planted, search_with, setting, templates, try_each};
use flashtune::{DType, Distribution, Mask, MaskKind, Problem, Program, Shape};
use flashtune_codegen::{Arch, BackwardSm80Schedule, Family, Kernel, KvKind, Schedule, TemplateSet, TileOrder};
use flashtune_runtime::check::PackedBatch;
use flashtune_runtime::{BackwardCase, CheckInputs, Poison};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use std::time::Duration;

fn arch() -> Arch {
    "sm_80".parse().expect("an arch")
}

/// A kernel of a random problem and schedule, every other with a score program.
fn random_kernel(number: u64) -> Kernel {
    let rng = &mut StdRng::seed_from_u64(number);
    let dims = [(16, 16), (24, 40), (64, 64), (96, 72), (144, 16), (16, 160)];
    let (qk, v) = *dims.choose(rng).expect("not empty");
    let dtype = DTYPES[number as usize / 4 % 2];
    let problem = Problem::forward_qk_v(dtype, qk, v, MaskKind::ALL[number as usize % 4]).expect("legal").backward();
    let text = PROGRAMS.choose(rng).expect("not empty");
    let problem = match number % 2 {
        0 => Problem { mask: MaskKind::FULL, ..problem }.with_program(Program::parse(text).expect("a program")),
        _ => problem,
    };
    let problem = every_other_packed(problem, number);
    let mut one_of = |values: &[u32]| *values.choose(rng).expect("not empty");
    let schedule = BackwardSm80Schedule {
        warps: one_of(&[1, 2, 3]),
        key_rows: one_of(&[16, 32]),
        step_q: one_of(&[16, 32, 48]),
        stages_q: one_of(&[1, 2]),
        parts: one_of(&[1, 2, 3]),
        query_rows: one_of(&[16, 32]),
        step_kv: one_of(&[16, 32, 64]),
        stages_kv: one_of(&[1, 2]),
        blocks_per_sm: 1,
        order: [TileOrder::HeadMajor, TileOrder::BlockMajor][one_of(&[0, 1]) as usize],
    };
    // Registers of large tiles: the machine has as many as it takes.
    let kernel = |schedule| Kernel { problem, schedule: Schedule::BackwardSm80(schedule), arch: arch() };
    let small = BackwardSm80Schedule { key_rows: 16, query_rows: 16, step_kv: 16, parts: 2, ..schedule };
    Some(kernel(schedule)).filter(|k| k.check().is_ok()).unwrap_or(kernel(small))
}

#[test]
fn backward_sm80_kernels() {
    let templates = templates();
    search_with(10, |number| {
        try_backward(&random_kernel(number), &templates, setting("EMULATE_CASES").unwrap_or(3), number)
    });
}

/// What is wrong, the file, the text in it, what is put in its place, and words of which the verdict has one.
type Fault = [&'static str; 5];

const FAULTS: &[Fault] = &[
    ["a key too many", "backward/sm80/weights.cuh", "= at > last ||", "= at > last + 1 ||", "oracle"],
    ["a key before the window", "backward/sm80/weights.cuh", "at < first)", "at < first - 1)", "oracle"],
    ["the last tile is lost", "backward/sm80/walk.cuh", "n < r.last ?", "n < r.last - 1 ?", "oracle"],
    [
        "tiles that a window cuts are lost",
        "backward/sm80/walk.cuh",
        ": whole && kind > 0 ? 1 : 0;",
        ": whole ? 1 : -1;",
        "oracle",
    ],
    ["cut tiles count as whole", "backward/sm80/walk.cuh", ": whole && kind > 0 ? 1 : 0;", ": 1;", "oracle"],
    ["queries too late", "backward/sm80/keys.cuh", "key - diagonal - args.w", "key + 16 - diagonal - args.w", "oracle"],
    ["one head of a group", "backward/sm80/keys.cuh", "(kv_head + 1) * (args", "1 + kv_head * (args", "oracle"],
    [
        "KV heads take turns",
        "backward/sm80/queries.cuh",
        "tile.kv_head, key);",
        "tile.head % args.kv_heads, key);",
        "oracle",
    ],
    ["dK is not zeroed", "backward/sm80/keys.cuh", "clear(dk), clear(dv);", "clear(dv);", "oracle"],
    ["no D", "backward/sm80/statistics.cuh", "? sum - args.dlse[at] : sum;", "? -args.dlse[at] : 0.0f;", "oracle"],
    ["no gradient by the log-sum-exp", "backward/sm80/statistics.cuh", "sum - args.dlse[at]", "sum", "oracle"],
    ["statistics of other queries", "backward/sm80/keys.cuh", "8 * a * kBytesS", "8 * (a ^ 1) * kBytesS", "oracle"],
    [
        "no stage of statistics",
        "backward/sm80/statistics.cuh",
        "if (!exists || lane != 0) return;",
        "return;",
        "oracle",
    ],
    ["dK without the scale", "backward/sm80/keys.cuh", "part, args.scale);", "part, 1.0f);", "oracle"],
    ["every part the first columns", "backward/sm80/products.cuh", "columns + part * (", "columns + 0 * (", "oracle"],
    ["by rows where by columns", "backward/sm80/products.cuh", "ldmatrix_x4_trans(b,", "ldmatrix_x4(b,", "oracle"],
    ["zero times NaN", "backward/sm80/keys.cuh", "|| met_non_finite(dp));", ");", "oracle"],
    ["zero times NaN of a key", "backward/sm80/queries.cuh", "|| met_non_finite(s));", ");", "oracle"],
    ["NaN is lost", "backward/sm80/products.cuh", "__int_as_float(0x7fffffff)", "0.0f", "oracle"],
    [
        "a row behind the last",
        "backward/sm80/products.cuh",
        "(row < rows &&",
        "(row <= rows &&",
        "broke down|between its rows|oracle",
    ],
    [
        "no barrier for the keys' tiles",
        "backward/sm80/keys.cuh",
        "__syncthreads();  // this step's",
        "// this step's",
        "on its way",
    ],
    [
        "no barrier for the queries' tiles",
        "backward/sm80/queries.cuh",
        "__syncthreads();  // this step's",
        "// this step's",
        "on its way",
    ],
    [
        "tiles are used before they arrive",
        "backward/sm80/keys.cuh",
        "cp_async_wait<0>();\n        __sync",
        "cp_async_wait<1>();\n        __sync",
        "on its way",
    ],
    [
        "one stage, refilled while it is read",
        "backward/sm80/keys.cuh",
        "__syncthreads();  // everyone is done with the one stage",
        "",
        "on its way|oracle",
    ],
    ["no slope of the program", "backward/sm80/weights.cuh", " * g.slope;", ";", "oracle"],
    ["a score of -inf takes part", "backward/sm80/weights.cuh", "g.value == -FT_INFINITY;", "false;", "oracle"],
    [
        "the program's mask is not asked",
        "backward/sm80/weights.cuh",
        "if (kProgramMask) out",
        "if (false) out",
        "oracle",
    ],
    ["packed: rows of another sequence", PACKED, "from(s.q, s.q_stride, q)", "from(s.q, s.q_stride, kv)", "oracle"],
    ["packed: dV into another's rows", PACKED, "from(s.dv, s.dv_stride, kv)", "from(s.dv, s.dv_stride, q)", "oracle"],
    ["packed: a query of the next", PACKED, "s.q_len = q.rows,", "s.q_len = q.rows + 1,", "oracle|no sequence"],
    ["packed: a key of the next", PACKED, "s.kv_len = kv.rows;", "s.kv_len = kv.rows + 1;", "oracle|no sequence"],
    ["packed: rows that are not used", ROWS, "if (lengths != nullptr)", "if (false)", "oracle|no sequence"],
    ["packed: the log-sum-exp of another", PACKED, "s.lse += q.first;", "", "oracle"],
    ["packed: dLSE of another", PACKED, "s.dlse += q.first;", "s.dlse += 0;", "oracle"],
    ["packed: the log-sum-exp by bounds", PACKED, "head * args.q_rows", "head * args.q_len", "oracle"],
    ["packed: the last tile of queries", PACKED, "return tile.rows > 0;", "return tile.rows >= most;", "oracle"],
    [
        "packed: the last block of keys",
        "backward/sm80/keys.cuh",
        "key >= args.kv_len) return;",
        "key + kBlockKeys > args.kv_len) return;",
        "oracle",
    ],
    [
        "packed: all dK to the first",
        "backward/sm80/keys.cuh",
        "FT_SEQUENCE(args, to.batch);",
        "FT_SEQUENCE(args, 0);",
        "oracle|no sequence|broke down",
    ],
    [
        "packed: all dQ to the first",
        "backward/sm80/queries.cuh",
        "FT_SEQUENCE(args, to.batch);",
        "FT_SEQUENCE(args, 0);",
        "oracle|no sequence|broke down",
    ],
];
const PACKED: &str = "lib/cuda/attention/packed.cuh";
const ROWS: &str = "lib/cuda/attention/packed_rows.cuh";

/// The kernel in which a fault shows.
fn kernel_of(what: &str) -> Kernel {
    let small = BackwardSm80Schedule {
        warps: 2,
        key_rows: 16,
        step_q: 16,
        stages_q: if what.contains("one stage") { 1 } else { 2 },
        parts: if what.contains("part the") { 2 } else { 1 },
        query_rows: 16,
        step_kv: 16,
        stages_kv: 2,
        blocks_per_sm: 1,
        order: TileOrder::BlockMajor,
    };
    let dim = if what.contains("part the") { 48 } else { 16 };
    let program = match what {
        "no slope of the program" => Some("score = 2.0 * tanh(score);"),
        "a score of -inf takes part" => Some("score = select(kv % 3 == 0, -inf, score);"),
        "the program's mask is not asked" => Some("mask = kv % 3 != q % 2;"),
        _ => None,
    };
    // Tiles without a cut pair, of which the barrier is another, are those of full masks.
    let whole = program.is_some() || what.contains("no barrier");
    let mask = if whole { MaskKind::FULL } else { MaskKind { left: true, right: true } };
    let problem = Problem::forward(DType::Bf16, dim, mask).expect("legal").backward();
    let problem = program.map_or(problem, |p| problem.with_program(Program::parse(p).expect("a program")));
    let problem = if what.starts_with("packed") { problem.with_kv(KvKind::RAGGED) } else { problem };
    Kernel { problem, schedule: Schedule::BackwardSm80(small), arch: arch() }
}

/// What is said of a fault, in shapes with keys that no query sees and with queries that see no key.
fn verdict(what: &str, faulted: &TemplateSet) -> Result<Option<String>, String> {
    let kernel = kernel_of(what);
    let device = Machine::open(&kernel, faulted, 1)?;
    let inputs =
        CheckInputs { poison: Poison::Nan, lse: true, distribution: Distribution::Normal, ..CheckInputs::default() };
    let mask = if kernel.problem.mask.left { Mask::Window { left: Some(20), right: Some(5) } } else { Mask::Full };
    for (q_len, kv_len) in [(70, 133), (80, 65)] {
        let shape = Shape { batch: 1, heads: 4, kv_heads: 2, q_len, kv_len, mask };
        let case = if kernel.problem.kv.is_dense() {
            BackwardCase::new(device.clone(), &kernel.problem, &shape, &inputs)
        } else {
            let lengths = vec![[q_len, kv_len], [20, 45], [0, 9], [33, 50]];
            let batch = PackedBatch { heads: 4, kv_heads: 2, mask, lengths, unused: 2, spare: 40, wide: [false, true] };
            BackwardCase::packed(device.clone(), &kernel.problem, &batch, &inputs)
        };
        let case = case.map_err(|e| e.to_string())?;
        let found = match case.check(&Loaded(kernel)) {
            Ok(report) => (!report.passed()).then(|| report.to_string()),
            Err(e) => Some(e.to_string()),
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

#[test]
fn faults_planted_in_backward_sm80_are_seen() {
    if !machine::has_compiler() {
        return;
    }
    let templates = templates();
    let unchanged =
        ["nothing", "packed: nothing"].map(|what| [what, "backward/sm80.cu", "// Problem.", "// Problem.", ""]);
    let faults: Vec<&Fault> = unchanged.iter().chain(FAULTS).collect();
    try_each(0..faults.len() as u64, Duration::MAX, |number| {
        let [what, file, from, to, words] = *faults[number as usize];
        let faulted = replaced(&templates, file, from, to);
        planted::unless_seen(Family::BackwardSm80, &format!("backward_sm80, {what}"), &faulted, || {
            let said = verdict(what, &faulted);
            let right = match &said {
                Ok(Some(said)) => !words.is_empty() && words.split('|').any(|word| said.contains(word)),
                Ok(None) => words.is_empty(),
                Err(_) => false,
            };
            right.then_some(()).ok_or_else(|| format!("{what}: {said:?}"))
        })
    });
}
