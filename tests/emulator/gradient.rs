//! Gradients of what a score program reads on the emulated machine, by runtime's own check, and faults that are planted
//! in them.

use crate::backward::{Loaded, Machine, SHORT, random_case};
use crate::{machine, planted, search_with, setting, templates, try_each};
use flashtune::{DType, Mask, MaskKind, Problem, Program, Shape};
use flashtune_codegen::score::{Elements, Storage};
use flashtune_codegen::{Arch, Family, Kernel, Schedule, ShapeBucket, TemplateSet};
use flashtune_runtime::{CheckInputs, GradientCase, typical_side};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::time::Duration;

/// Programs, and by what they are derived: pairs with an element each, sums of rows, of columns, of all, tables by
/// computed indices, sinks, scalars, and tensors that are read in several places.
const READS: [(&str, &str); 14] = [
    ("t: bf16[batch, heads, q_len, kv_len]; mask = kv % 3 != q % 5; score = score + t[b, h, q, kv];", "t"),
    ("slopes: float[heads]; score = score + slopes[h] * (kv - q);", "slopes"),
    ("table: float[heads, *]; score = score + table[h, clamp(kv - q, -9, 9) + 9];", "table"),
    ("t: float[q_len, kv_len]; score = 9.0 * tanh(score / 9.0) + t[q, kv];", "t"),
    ("t: f16[heads, kv_len]; mask = kv <= q + 9; score = score + t[h, kv];", "t"),
    ("t: float[batch, q_len]; score = score * (1.0 + 0.1 * t[b, q]);", "t"),
    ("sinks: float[heads]; score = max(score, 0.2 * score); sink = sinks[h];", "sinks"),
    ("sinks: float[heads, *]; score = score + sinks[h, 1]; sink = sinks[h, q % 3];", "sinks"),
    ("doc: int[batch, kv_len]; t: float[*]; mask = doc[b, kv] % 4 != 1; score = score + t[doc[b, kv]] * score;", "t"),
    ("cap: float in 1..50; score = cap * tanh(score / cap);", "cap"),
    ("t: float[kv_heads, q_len, kv_len]; score = score + 0.5 * t[h_kv, q, kv];", "t"),
    ("t: float[*, *]; score = score + t[q, kv] + 0.5 * t[kv, q];", "t"),
    ("t: float[heads, kv_len]; u: float[heads, q_len]; score = score + t[h, kv] * u[h, q] + t[h, 0];", "t"),
    ("t: float[heads]; mask = t[h] > 0.0; score = score;", "t"),
];

fn kernel_of(family: Family, problem: Problem, arch: &str) -> Kernel {
    let arch: Arch = arch.parse().expect("an arch");
    let bucket = ShapeBucket { parallel: 4, group: 2, q_len: 64, kv_len: 64, ..Default::default() };
    Kernel { problem, schedule: Schedule::default_for(family, &problem, arch, &bucket).expect("supported"), arch }
}

fn problem_of(dtype: DType, dims: (u32, u32), mask: MaskKind, (text, by): (&str, &str)) -> Problem {
    let problem = Problem::forward_qk_v(dtype, dims.0, dims.1, mask).expect("legal");
    problem.with_program(Program::parse(text).expect("a program")).gradient_by(by).expect("it is read")
}

/// A kernel of a random problem. Every program has its turn.
fn random_kernel(number: u64) -> Kernel {
    let n = number as usize;
    let dims = [(16, 16), (24, 40), (64, 64), (256, 16)][n / 3 % 4];
    let problem = problem_of(DType::ALL[n % 3], dims, MaskKind::ALL[n / 2 % 4], READS[n % READS.len()]);
    kernel_of(Family::GradientNaive, problem, if n.is_multiple_of(3) { "sm_75" } else { "sm_90a" })
}

/// Checks calls of a kernel, of which some read tensors that are broadcast.
fn try_gradient(kernel: &Kernel, templates: &TemplateSet, calls: u64, seed: u64) -> Result<(), String> {
    let device = Machine::open(kernel, templates, seed)?;
    let mut rng = StdRng::seed_from_u64(seed);
    let program = kernel.problem.program.expect("it has one").kept();
    let by = &kernel.problem.derives_by().expect("it has one").name;
    for call in 0..calls {
        let (shape, inputs) = random_case(kernel.problem.mask, &SHORT, &mut rng);
        let stored = [Storage::F32, Storage::Bf16, Storage::F16][rng.random_range(0..3)];
        let mut data = typical_side(program, &shape, inputs.seed);
        if let Some(tensor) = data.tensors.get_mut(by).filter(|t| call % 2 == 1 && !t.shape.contains(&0)) {
            let axis = rng.random_range(0..tensor.shape.len());
            if let Elements::Float(values) = &mut tensor.elements {
                values.truncate(values.len() / tensor.shape[axis]);
                tensor.shape[axis] = 1;
            }
        }
        let case = GradientCase::with_side(device.clone(), &kernel.problem, &shape, &inputs, stored, &data);
        let case = case.map_err(|e| e.to_string())?;
        let report = case.check(&Loaded(*kernel)).map_err(|e| format!("{} {shape} {inputs:?}: {e}", kernel.name()))?;
        if !report.passed() {
            return Err(format!("{} {shape} {inputs:?}: {report}\n{program}", kernel.name()));
        }
    }
    Ok(())
}

#[test]
fn gradient_kernels() {
    let templates = templates();
    search_with(READS.len() as u64, |number| {
        try_gradient(&random_kernel(number), &templates, setting("EMULATE_CASES").unwrap_or(4), number)
    });
}

/// What is wrong, the file, the text in it, what is put in its place, the program in which it shows, and a word of what
/// is then said: by the name of the tensor.
type Fault = (&'static str, &'static str, &'static str, &'static str, usize, &'static str);

const PLACES: &str = "gradient/places.cuh";
const NAIVE: &str = "gradient/naive.cu";
const FAULTS: [Fault; 16] = [
    (
        "the last tile of a part is lost",
        NAIVE,
        "nth < places * (part + 1) / args.splits; nth++",
        "nth < places * (part + 1) / args.splits - 1; nth++",
        1,
        "dslopes[",
    ),
    (
        "heads of a group are those of others",
        NAIVE,
        "p.kv_head * counts.of[2] + p.member, p.kv_head, row",
        "p.kv_head + p.member, p.kv_head, row",
        1,
        "dslopes[",
    ),
    ("one head of a group", PLACES, "sizes.heads / sizes.kv_heads : 0", "1 : 0", 3, "dt["),
    ("a broadcast axis is not summed", PLACES, "c.of[0] = sizes.batch;", "c.of[0] = 1;", 3, "dt["),
    (
        "the last part is not added",
        PLACES,
        "part < args.splits; part++",
        "part < args.splits - 1; part++",
        2,
        "dtable[",
    ),
    ("sums are not cleared", PLACES, "sums[i] = 0.0f;", "if (i > 0) sums[i] = 0.0f;", 2, "dtable["),
    ("values of one place overwrite each other", PLACES, "sum += values[e];", "sum = values[e];", 2, "dtable["),
    (
        "a place is lost where it changes",
        PLACES,
        "if (at >= 0) sums[at] += sum;\n            at = place",
        "at = place",
        11,
        "dt[",
    ),
    (
        "two threads have one place",
        PLACES,
        "if (u32(place) % kThreads != threadIdx.x) continue;",
        "if (threadIdx.x > 1) continue;",
        2,
        "dtable[",
    ),
    ("no sink", PLACES, "(kSinkTerms > 0 ? 1 : 0)", "0", 6, "dsinks["),
    ("the sink has a value", NAIVE, "* -m.delta[row];", "* (1.0f - m.delta[row]);", 6, "dsinks["),
    ("no gradient by the log-sum-exp", NAIVE, "sum - args.dlse[out_row + row]", "sum", 3, "dt["),
    ("masked pairs add", NAIVE, "factor[t][i][j] = masked ? 0.0f : ds", "factor[t][i][j] = ds", 0, "dt["),
    (
        "rows are sums of half",
        NAIVE,
        "for (int i = 1; i < kAcross; i *= 2) x +=",
        "for (int i = 2; i < kAcross; i *= 2) x +=",
        5,
        "dt[",
    ),
    ("columns are sums of half", NAIVE, "row < kDown; row++) sum", "row < kDown / 2; row++) sum", 4, "dt["),
    (
        "elements by the strides of others",
        PLACES,
        "rest /= args.length[axis];",
        "rest /= args.length[axis] + (axis == 1);",
        4,
        "dt[",
    ),
];

/// The templates with a fault in them.
fn planted_in(&(_, file, from, to, ..): &Fault) -> Result<TemplateSet, String> {
    let embedded = TemplateSet::embedded();
    let text = embedded.files().find(|(name, _)| *name == file).ok_or("no such file")?.1;
    if !text.contains(from) {
        return Err("its text is gone".into());
    }
    let changed = BTreeMap::from([(file.to_owned(), text.replacen(from, to, 1))]);
    TemplateSet::overlaid(changed).map_err(|e| e.to_string())
}

/// What is said of a fault; nothing when all seems right.
fn verdict(fault: &Fault, templates: &TemplateSet) -> Result<Option<String>, String> {
    let problem = problem_of(DType::F32, (16, 16), MaskKind::CAUSAL, READS[fault.4]);
    let kernel = kernel_of(Family::GradientNaive, problem, "sm_80");
    let device = Machine::open(&kernel, templates, 1)?;
    let inputs = CheckInputs { lse: true, ..CheckInputs::default() };
    let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 70, kv_len: 65, mask: Mask::Causal };
    let data = typical_side(problem.program.expect("it has one").kept(), &shape, 1);
    let case = GradientCase::with_side(device, &problem, &shape, &inputs, Storage::F32, &data);
    match case.map_err(|e| e.to_string())?.check(&Loaded(kernel)) {
        Ok(report) => Ok((!report.passed()).then(|| report.to_string())),
        Err(e) => Ok(Some(e.to_string())),
    }
}

#[test]
fn faults_planted_in_gradients_of_reads_are_seen() {
    if !machine::has_compiler() {
        return;
    }
    let unchanged = ("nothing", NAIVE, "// Problem.", "// Problem.", 3, "");
    let unplanted = planted_in(&unchanged).expect("it renders");
    assert_eq!(verdict(&unchanged, &unplanted), Ok(None));
    try_each(0..FAULTS.len() as u64, Duration::MAX, |number| {
        let fault = &FAULTS[number as usize];
        let faulted = planted_in(fault)?;
        planted::unless_seen(Family::GradientNaive, &format!("gradient, {}", fault.0), &faulted, || {
            let said = verdict(fault, &faulted);
            let seen = matches!(&said, Ok(Some(said)) if said.contains(fault.5));
            seen.then_some(()).ok_or_else(|| format!("{}: {said:?}", fault.0))
        })
    });
}
