//! What O loses by rounding, on the emulated machine: forward passes that write it, gradients that read it, and faults
//! that are planted in either.

use crate::backward::{Loaded, Machine, SHORT, random_case, try_backward};
use crate::cases::Case;
use crate::faults::replaced;
use crate::schedules::{random_sm80, random_sm90};
use crate::{DTYPES, PROGRAMS, machine, planted, search_with, setting, templates, try_each, try_kernel, try_recorded};
use flashtune::{Distribution, Layout, Mask, Program, Shape};
use flashtune_codegen::{
    Arch, Family, Kernel, KvKind, MaskKind, Problem, Schedule, ShapeBucket, Sm80Schedule, Sm90Schedule, TemplateSet,
};
use flashtune_runtime::{BackwardCase, CheckInputs, GradientCase};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::time::Duration;

/// The kernel with a residual, by a schedule that it may have.
fn with_residual(kernel: Kernel) -> Kernel {
    let schedule = match kernel.schedule {
        Schedule::Sm90(s) => Schedule::Sm90(Sm90Schedule { lazy_rescale: false, ..s }),
        Schedule::Sm80(s) => Schedule::Sm80(Sm80Schedule { lazy_rescale: false, ..s }),
        other => other,
    };
    Kernel { problem: kernel.problem.with_residual(true), schedule, ..kernel }
}

fn default_of(family: Family, problem: Problem, arch: &str) -> Kernel {
    let arch: Arch = arch.parse().expect("an arch");
    let bucket = ShapeBucket { parallel: 4, group: 2, q_len: 256, kv_len: 256, ..Default::default() };
    Kernel { problem, schedule: Schedule::default_for(family, &problem, arch, &bucket).expect("supported"), arch }
}

/// Kernels of the three families in turn, every third with a score program.
fn random_forward(number: u64) -> Kernel {
    let rng = &mut StdRng::seed_from_u64(number);
    let program = number.is_multiple_of(3).then(|| *PROGRAMS.choose(rng).expect("not empty"));
    with_residual(match number % 4 {
        0 | 1 => random_sm90(rng, program),
        2 => random_sm80(rng, program),
        _ => {
            let mask = MaskKind::ALL[number as usize / 4 % 4];
            let problem = Problem::forward_qk_v(DTYPES[number as usize / 2 % 2], 24, 40, mask).expect("legal");
            default_of(Family::ForwardNaive, problem, "sm_80")
        }
    })
}

#[test]
fn forward_kernels_that_write_what_o_loses() {
    let templates = templates();
    search_with(8, |number| {
        let kernel = random_forward(number);
        let cases = setting("EMULATE_CASES").unwrap_or(4);
        try_kernel(&kernel, &templates, cases, number, |rng| Case { scale: None, ..Case::random(&kernel, rng) })
    });
}

/// Kernels of the three families in turn, dense and packed.
fn random_backward(number: u64) -> Kernel {
    let n = number as usize;
    let (family, arch) =
        [(Family::BackwardSm90, "sm_90a"), (Family::BackwardSm80, "sm_80"), (Family::BackwardNaive, "sm_75")][n % 3];
    let (qk, v) = [(64, 64), (24, 40), (136, 72), (128, 128)][n / 3 % 4];
    let problem = Problem::forward_qk_v(DTYPES[n / 2 % 2], qk, v, MaskKind::ALL[n / 3 % 4]).expect("legal").backward();
    let problem = if n % 2 == 1 { problem.with_kv(KvKind::RAGGED) } else { problem };
    default_of(family, problem.with_residual(true), arch)
}

#[test]
fn gradients_by_what_o_lost() {
    let templates = templates();
    search_with(6, |number| {
        try_backward(&random_backward(number), &templates, setting("EMULATE_CASES").unwrap_or(3), number)
    });
}

/// dQ of rows with weights of 0.8, 0.95 and 0.99: all digits with the residual, and without it those that unfused
/// gradients have, twice.
#[test]
fn rows_of_one_key_have_all_digits_by_what_o_lost() {
    let families =
        [(Family::BackwardSm90, "sm_90a"), (Family::BackwardSm80, "sm_80"), (Family::BackwardNaive, "sm_75")];
    try_recorded(0..6, Duration::MAX, |number| {
        let ((family, arch), residual) = (families[number as usize / 2], number % 2 == 0);
        let problem = Problem::forward(DTYPES[1], 64, MaskKind::FULL).expect("legal").with_residual(residual);
        let problem = problem.backward();
        let kernel = default_of(family, problem, arch);
        let device = Machine::open(&kernel, &templates(), 1).expect("it compiles");
        let shape = Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 100, kv_len: 130, mask: Mask::Full };
        let inputs = CheckInputs { lse: false, ..CheckInputs::default() };
        let case = BackwardCase::peaked(device, &problem, &shape, &inputs).expect("a case");
        for [own, unfused] in case.peaked_errors(&Loaded(kernel)).expect("it runs") {
            println!("{family} residual {residual}: {:.3} % off, unfused {:.3} %", own * 100.0, unfused * 100.0);
            let bound = if residual { 0.003 } else { 2.0 * unfused };
            if own.is_nan() || own > bound {
                return Err(format!("{family} {residual}: {own} {unfused}"));
            }
        }
        Ok(())
    });
}

#[test]
fn gradients_of_what_a_program_reads_by_what_o_lost() {
    if !machine::has_compiler() {
        return;
    }
    let text = "t: float[heads, kv_len]; score = score + t[h, kv];";
    let problem = Problem::forward(DTYPES[1], 24, MaskKind::FULL).expect("legal").with_residual(true);
    let problem = problem.with_program(Program::parse(text).expect("a program")).gradient_by("t").expect("it is read");
    let kernel = default_of(Family::GradientNaive, problem, "sm_80");
    let device = Machine::open(&kernel, &templates(), 1).expect("it compiles");
    let mut rng = StdRng::seed_from_u64(1);
    for _ in 0..3 {
        let (shape, inputs) = random_case(problem.mask, &SHORT, &mut rng);
        let stored = flashtune_codegen::score::Storage::F32;
        let case = GradientCase::new(device.clone(), &problem, &shape, &inputs, stored).expect("a case");
        let report = case.check(&Loaded(kernel)).expect("it runs");
        assert!(report.passed(), "{shape} {inputs:?}: {report}");
    }
}

/// What is wrong, the family, the file, the text in it, what is put in its place, and words of which what is said has
/// one.
type Fault = [&'static str; 6];

const WRITTEN: &str = "residual at|says that it lost";
const READ: &str = "with a residual 0.3 % at most";
const LIB: &str = "lib/cuda/attention/residual.cuh";
const FAULTS: &[Fault] = &[
    [
        "of another row",
        "forward/sm90",
        "forward/sm90/epilogue.cuh",
        "head, at >> args",
        "head, at + 1 >> args",
        "broke down|residual at",
    ],
    [
        "of another head",
        "forward/sm90",
        "forward/sm90/epilogue.cuh",
        "write_residual(o, tile)",
        "write_residual(o, Tile{tile.batch, tile.head ^ 1, tile.kv_head, tile.row, tile.rows})",
        WRITTEN,
    ],
    ["of no row", "forward/sm90", "forward/sm90/epilogue.cuh", "        write_residual(o, tile);", "", WRITTEN],
    [
        "of other columns",
        "forward/sm90",
        "forward/sm90/epilogue.cuh",
        "lane() % 4 * 2;\n#pragma",
        "lane() % 4 * 2 + 8;\n#pragma",
        "broke down|residual at|between",
    ],
    [
        "of rows that are not",
        "forward/sm90",
        "forward/sm90/epilogue.cuh",
        "if (packed >= tile.rows) continue;",
        "",
        "broke down|residual at",
    ],
    [
        "of another head",
        "forward/sm80",
        "forward/sm80.cu",
        "residual_row(args, out_tile.batch, out_tile.head,",
        "residual_row(args, out_tile.batch, out_tile.head ^ 1,",
        WRITTEN,
    ],
    [
        "of columns that are not",
        "forward/sm80",
        "forward/sm80.cu",
        "j * 8 < kHeadDimV",
        "true",
        "broke down|residual at",
    ],
    ["twice what it is", "forward/sm80", LIB, "? x - y : 0.0f", "? 2.0f * (x - y) : 0.0f", WRITTEN],
    ["O itself", "forward/naive", LIB, "? x - y : 0.0f", "? x : 0.0f", WRITTEN],
    ["the other way", "forward/naive", LIB, "? x - y : 0.0f", "? y - x : 0.0f", WRITTEN],
    [
        "forgotten in D",
        "backward/sm90",
        "backward/sm90/statistics.cuh",
        "+ sum_of_residual(a, entry, head, row, part, y)",
        "",
        READ,
    ],
    ["of the next row", "backward/sm90", LIB, "row * a.residual_stride[2]", "(row ^ 1) * a.residual_stride[2]", READ],
    [
        "of one element of two",
        "backward/sm90",
        "backward/sm90/statistics.cuh",
        "        sum = fmaf(to_float(bf16{u16(x >> 16)}), to_float(Element{u16(y >> 16)}), sum);\n    }",
        "    }",
        READ,
    ],
    ["forgotten in D", "backward/sm80", "backward/sm80/statistics.cuh", "sum += lost;", "", READ],
    [
        "of another head",
        "backward/sm80",
        "backward/sm80/statistics.cuh",
        "residual_row(args, tile.batch, tile.head,",
        "residual_row(args, tile.batch, tile.head ^ 1,",
        READ,
    ],
    [
        "packed: of another sequence",
        "backward/sm80",
        "lib/cuda/attention/packed.cuh",
        "from(s.residual, s.residual_stride, q)",
        "from(s.residual, s.residual_stride, kv)",
        READ,
    ],
    ["forgotten in D", "backward/naive", "backward/naive.cu", "sum += less;", "", READ],
    [
        "of the next row",
        "backward/naive",
        "backward/naive.cu",
        "tile.head, tile.row + row);\n            float less",
        "tile.head, tile.row + (row ^ 1));\n            float less",
        READ,
    ],
];

/// What is said of a kernel of a family with other templates; an empty text where nothing is.
fn verdict(family: &str, what: &str, templates: &TemplateSet) -> String {
    let family = Family::by_name(family).expect("a family");
    let arch = if family.name().ends_with("sm90") { "sm_90a" } else { "sm_80" };
    let problem = Problem::forward(DTYPES[1], if family.op().name() == "forward" { 72 } else { 64 }, MaskKind::FULL);
    let problem = problem.expect("legal").with_residual(true);
    if family.op().name() == "forward" {
        let kernel = default_of(family, problem, arch);
        let case = |rng: &mut StdRng| Case {
            sizes: [1, 4, 2, 130, 90],
            mask: Mask::Full,
            layout: Layout::Bhsd,
            values: Distribution::Normal,
            scale: None,
            lse: true,
            bad: [0; 3],
            below: 0.0,
            seed: rng.random(),
        };
        return try_kernel(&kernel, templates, 2, 1, case).err().unwrap_or_default();
    }
    let problem = problem.backward();
    let problem = if what.starts_with("packed") { problem.with_kv(KvKind::RAGGED) } else { problem };
    let kernel = default_of(family, problem, arch);
    let found = || -> Result<String, String> {
        let device = Machine::open(&kernel, templates, 1)?;
        let shape = Shape { batch: 1, heads: 4, kv_heads: 2, q_len: 70, kv_len: 90, mask: Mask::Full };
        let inputs = CheckInputs::default();
        let case = if problem.kv.is_dense() {
            BackwardCase::new(device, &problem, &shape, &inputs)
        } else {
            let lengths = vec![[70, 33], [20, 90], [33, 50]];
            let batch = flashtune_runtime::check::PackedBatch {
                heads: 4,
                kv_heads: 2,
                mask: Mask::Full,
                lengths,
                unused: 2,
                spare: 40,
                wide: [false, true],
            };
            BackwardCase::packed(device, &problem, &batch, &inputs)
        };
        let report = case.map_err(|e| e.to_string())?.check(&Loaded(kernel)).map_err(|e| e.to_string())?;
        Ok(if report.passed() { String::new() } else { report.to_string() })
    };
    found().unwrap_or_else(|e| e)
}

#[test]
fn faults_planted_in_what_o_loses_are_seen() {
    if !machine::has_compiler() {
        return;
    }
    let templates = templates();
    let families =
        ["forward/sm90", "forward/sm80", "forward/naive", "backward/sm90", "backward/sm80", "backward/naive"];
    let right = families.map(|family| ["nothing", family, "forward/sm90.cu", "// Problem.", "// Problem.", ""]);
    let all: Vec<&Fault> = right.iter().chain(FAULTS).collect();
    try_each(0..all.len() as u64, Duration::MAX, |number| {
        let [what, family, file, from, to, words] = *all[number as usize];
        let faulted = replaced(&templates, file, from, to);
        let of = Family::by_name(family).expect("a family");
        planted::unless_seen(of, &format!("residual, {family}, {what}"), &faulted, || {
            let said = verdict(family, what, &faulted);
            println!("{family}, {what}: {}", said.lines().next().unwrap_or("nothing"));
            let seen = if words.is_empty() { said.is_empty() } else { words.split('|').any(|w| said.contains(w)) };
            if !seen || said.contains("error:") {
                return Err(format!("{family}, {what} is not seen as what it is: `{said}`"));
            }
            Ok(())
        })
    });
}
