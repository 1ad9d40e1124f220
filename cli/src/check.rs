//! `flashtune check`: kernels against the fp64 reference, on the device that is here.

use super::cases::family_named;
use super::context::{Context, unix_time};
use super::exit::{Failed, usage};
use super::lists::{MaskChoice, Masks, ScoreChange, joined};
use super::progress;
use super::ragged_sweep;
use super::sweep::{self, Effort, Failure};
use super::table::table;
use super::weights;
use anyhow::Result;
use flashtune::{Mask, Problem, Shape};
use flashtune_cache::{Artifact, ArtifactFiles, KeptLevel, Levels, Needed};
use flashtune_codegen::score::{Program, ProgramRef, Storage};
use flashtune_codegen::{
    Arch, Constraint, Constraints, Evidence, Family, InstructionPath, Kernel, Level, Op, Paths, Purpose, Schedule,
    ShapeBucket, TemplateSet, ragged_unaddressable,
};
use flashtune_runtime::{
    self as runtime, BackwardCase, CheckCase, CheckInputs, CheckReport, Compiler, Device, GradientCase, Module, Poison,
    RaggedCase, check_append, check_pad, check_quantise, compile,
};
use rayon::prelude::*;
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

/// Failures that the table shows; all of them are in the JSON output.
const SHOWN: usize = 40;
/// Characters of a failure that the table shows.
const WIDEST: usize = 240;

/// Options of `check`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// All dtypes and masks, head dims from 16 to 256, more sizes and more schedules
    #[arg(long)]
    full: bool,
    /// Schedules of the searched space to check beside the default one, for each problem
    #[arg(long, value_name = "N")]
    schedules: Option<usize>,
    /// Only problems whose name contains this text, e.g. bf16-d128
    #[arg(long, value_name = "TEXT")]
    problem: Option<String>,
    /// Only kernels whose name contains this text, e.g. .naive.
    #[arg(long, value_name = "TEXT")]
    kernel: Option<String>,
    /// Only this kernel family, e.g. forward/sm90
    #[arg(long, value_name = "FAMILY")]
    family: Option<String>,
    /// Give every problem of the sweep this score program's mask beside its own: a name or a text. What it reads is
    /// made up
    #[arg(long, value_name = "PROGRAM")]
    mask: Option<Masks>,
    /// Give every problem of the sweep this change of the score: a name or a text
    #[arg(long, value_name = "PROGRAM")]
    score: Option<ScoreChange>,
    /// Seed of the inputs
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
}

#[derive(Default)]
struct Tally {
    kernels: usize,
    checks: usize,
    /// Largest error over its bound, and where.
    worst: (f64, String),
    failures: Vec<Failure>,
    /// Of each instruction path, what this build knows of it, and whether all of its kernels passed.
    paths: BTreeMap<InstructionPath, (Evidence, bool)>,
}

/// The score program that the options name.
fn program(args: &Args) -> Result<Program> {
    let mut named: Vec<ProgramRef> = args.score.iter().map(|s| s.0).collect();
    for choice in args.mask.iter().flat_map(|m| &m.0) {
        match choice {
            MaskChoice::Program(program) => named.push(*program),
            MaskChoice::Window(mask) => {
                return Err(usage(format!("--mask {mask}: the sweep has it already; name a score program")));
            }
        }
    }
    Ok(joined(&named)?)
}

/// A kernel ready to run, or why it is not.
type Prepared = (Kernel, Result<Arc<dyn Module>, String>);

pub(crate) fn run(cx: &mut Context, args: Args) -> Result<()> {
    let (device, templates) = (cx.device()?, cx.templates()?);
    let compiler = device.compiler()?;
    let files = cx.cache_dir().ok().map(|dir| ArtifactFiles::new(&dir));
    let effort = if args.full { Effort::Full } else { Effort::Quick };
    let schedules = args.schedules.unwrap_or(if args.full { 4 } else { 1 });
    let named = |text: &Option<String>, name: String| text.as_ref().is_none_or(|t| name.contains(t));

    let arch = device.fingerprint().arch;
    let family = args.family.as_deref().map(family_named).transpose()?;
    if let Some(family) = family.filter(|f| !f.runs_on(arch)) {
        return Err(usage(format!(
            "--family {family} does not run on {arch}, which this device is; name another by --device, or run its \
             templates on the emulator (`cargo test --test emulator`)"
        )));
    }
    let mut work: Vec<(usize, Problem, Vec<Kernel>)> = Vec::new();
    let program = program(&args)?;
    let e4m3 = sweep::e4m3_with(effort, &program);
    let dense = sweep::problems(effort).into_iter().map(|problem| problem.with_program(program.clone())).chain(e4m3);
    let dense = dense.enumerate().flat_map(|(nth, p)| sweep::in_precisions(p, arch).map(move |p| (nth, p)));
    let ragged = ragged_sweep::problems(effort, &program);
    let backward = sweep::problems(effort).into_iter().map(|problem| problem.with_program(program.clone()).backward());
    let packed = ragged_sweep::backward_problems(effort, &program).into_iter();
    let gradients = sweep::gradients(effort, &program).into_iter();
    let residual = sweep::residual_problems(effort, &program).into_iter();
    let dense = dense.chain(backward.enumerate()).chain(packed.enumerate()).chain(gradients.enumerate());
    let dropout = sweep::dropout_problems(effort, &program).into_iter().enumerate();
    let dropout = dropout.flat_map(|(nth, p)| sweep::in_precisions(p, arch).map(move |p| (nth, p)));
    let dense = dense.chain(residual.enumerate()).chain(dropout);
    for (nth, problem) in dense.chain(ragged.into_iter().enumerate()) {
        if named(&args.problem, problem.to_string()) {
            let mut kernels = sweep::kernels(&problem, arch, schedules, family);
            kernels.retain(|k| named(&args.kernel, k.name()));
            if !kernels.is_empty() {
                work.push((nth, problem, kernels));
            }
        }
    }
    let copies = matches!(arch, Arch::Sm(_)) && family.is_some_and(|f| f.op() == Op::Pad);
    let append = (&args.problem, &args.kernel) == (&None, &None) && family.is_none_or(|f| f.op() == Op::Append);
    let quantise = family.is_some_and(|f| f.op() == Op::Quantise);
    if work.is_empty() && !append && !copies && !quantise {
        let ragged = ragged_sweep::problems(effort, &program);
        let names: Vec<_> = sweep::problems(effort)
            .iter()
            .chain(&sweep::e4m3_with(effort, &program))
            .chain(&ragged)
            .map(Problem::to_string)
            .collect();
        return Err(usage(format!(
            "no kernel of the sweep matches; leave out --kernel and --family, or give --problem a part of one of {}",
            names.join(", ")
        )));
    }
    let total = work.iter().map(|(_, _, k)| k.len()).sum::<usize>();
    if !cx.json() {
        let fingerprint = device.fingerprint();
        writeln!(cx.out, "checking {total} kernels of {} problems on {fingerprint}", work.len())?;
        cx.out.flush()?;
    }

    let start = Instant::now();
    let bar = progress::bar(total as u64, cx.hides_progress());
    let mut tally = Tally::default();
    // Problems in groups: compile one group on all cores, then run it.
    for group in work.chunks(8) {
        let kernels: Vec<Kernel> = group.iter().flat_map(|(_, _, k)| k.iter().copied()).collect();
        let mut prepared = kernels
            .par_iter()
            .map(|k| (*k, prepare(k, &*device, &*compiler, &templates, files.as_ref()).map_err(|e| e.to_string())))
            .collect::<Vec<Prepared>>()
            .into_iter();
        for (nth, problem, kernels) in group {
            let ready: Vec<Prepared> = prepared.by_ref().take(kernels.len()).collect();
            bar.set_message(problem.to_string());
            check_problem(&device, problem, (effort, *nth, args.seed), &ready, &mut tally)?;
            bar.inc(kernels.len() as u64);
        }
    }
    bar.finish_and_clear();
    if append {
        check_appends(&*device, effort, args.seed, &mut tally, |kernel| {
            prepare(kernel, &*device, &*compiler, &templates, files.as_ref())
        })?;
    }
    if let (Arch::Sm(_), None, None) = (arch, &args.problem, &args.kernel)
        && family.is_none_or(|f| f.op() == Op::Pad)
    {
        let bucket = ShapeBucket::of(&Shape { batch: 1, heads: 1, kv_heads: 1, q_len: 1, kv_len: 0, mask: Mask::Full });
        let (problem, family) = (Problem::pad(), Family::PadCuda);
        let kernel = Kernel { problem, schedule: Schedule::default_for(family, &problem, arch, &bucket)?, arch };
        let module = prepare(&kernel, &*device, &*compiler, &templates, files.as_ref())?;
        tally.kernels += 1;
        for seed in (0..if effort == Effort::Full { 400 } else { 60 }).map(|i| args.seed.wrapping_add(i)) {
            tally.checks += 1;
            if let Err(wrong) = check_pad(&*device, &*module, seed).unwrap_or_else(|e| Err(e.to_string())) {
                tally.fail(&kernel, "-", &format!("copies {seed}"), wrong);
            }
        }
    }
    if (&args.problem, &args.kernel) == (&None, &None) && family.is_none_or(|f| f.op() == Op::Quantise) {
        for kernel in sweep::quantise_kernels(arch, effort)? {
            let module = prepare(&kernel, &*device, &*compiler, &templates, files.as_ref())?;
            tally.kernels += 1;
            for seed in (0..if effort == Effort::Full { 100 } else { 20 }).map(|i| args.seed.wrapping_add(i)) {
                tally.checks += 1;
                if let Err(wrong) = check_quantise(&*device, &*module, seed).unwrap_or_else(|e| Err(e.to_string())) {
                    tally.fail(&kernel, "-", &format!("quantisation {seed}"), wrong);
                }
            }
        }
    }
    if let (None, None) = (&args.problem, &args.kernel) {
        for outcome in weights::check(&cx.engine()?)? {
            tally.checks += 1;
            if let Err(failure) = outcome {
                tally.failures.push(failure);
            }
        }
    }

    // What was left out of the sweep was not shown to run.
    let whole = args.problem.is_none() && args.kernel.is_none() && args.mask.is_none() && args.score.is_none();
    let raised = keep_levels(cx, &tally, whole)?;
    let Tally { kernels, checks, worst, failures, .. } = &tally;
    let seconds = start.elapsed().as_secs_f64();
    if cx.json() {
        cx.print_json(&json!({
            "device": device.fingerprint().to_string(), "kernels": kernels, "checks": checks, "failures": failures,
            "worst": { "error_over_bound": worst.0, "at": worst.1 }, "seconds": seconds, "raised": raised,
        }))?;
    } else {
        if !failures.is_empty() {
            let mut printed = table(&["kernel", "shape", "inputs", "what"]);
            for f in failures.iter().take(SHOWN) {
                printed.add_row([f.kernel.as_str(), &f.shape, &f.inputs, &clip(&f.what)]);
            }
            writeln!(cx.out, "{printed}")?;
            if failures.len() > SHOWN {
                writeln!(cx.out, "... and {} more; --json prints all", failures.len() - SHOWN)?;
            }
        }
        writeln!(
            cx.out,
            "{checks} checks of {kernels} kernels in {seconds:.1} s: {} failed; largest error {:.2} of its bound ({})",
            failures.len(),
            worst.0,
            worst.1
        )?;
    }
    if let (false, [_, ..]) = (cx.json(), &raised[..]) {
        writeln!(cx.out, "ran here, which is kept: {}", raised.join(", "))?;
    }
    match failures.len() {
        0 => Ok(()),
        n => Err(Failed(format!("{n} of {checks} checks failed on {}", device.fingerprint())).into()),
    }
}

/// Keeps the levels of the instruction paths that passed where nobody knew that such a card had executed them, if the
/// whole sweep of each was gone through, and takes back those that failed. Gives those that were raised.
fn keep_levels(cx: &mut Context, tally: &Tally, whole: bool) -> Result<Vec<String>> {
    let fingerprint = cx.device()?.fingerprint().clone();
    let arch = fingerprint.arch;
    // Without a folder nothing is kept.
    let Ok(dir) = cx.cache_dir() else { return Ok(Vec::new()) };
    let (levels, needed, paths) = (Levels::new(&dir), Needed::new(arch, &*cx.templates()?), cx.paths(arch)?);
    let mut raised = Vec::new();
    for path in tally.failed() {
        levels.lower(path, arch);
    }
    for path in tally.shown(&paths, arch).filter(|_| whole) {
        let level = KeptLevel::new(*path, &needed, Level::Ran, &fingerprint.name, "check", unix_time());
        match levels.raise(&level) {
            Ok(_) => raised.push(path.to_string()),
            Err(e) => tracing::warn!(%path, error = %e, "that it ran here is not kept"),
        }
    }
    Ok(raised)
}

/// Compiles a kernel, or takes it from the artifact files, and loads it.
fn prepare(
    kernel: &Kernel,
    device: &dyn Device,
    compiler: &dyn Compiler,
    templates: &TemplateSet,
    files: Option<&ArtifactFiles>,
) -> runtime::Result<Arc<dyn Module>> {
    let key = compile::recipe(kernel, templates, compiler.id()).key();
    let artifact: Artifact = match files.and_then(|f| f.get(&key)) {
        Some(artifact) => artifact,
        None => {
            let artifact = compile::compile_with(compiler, kernel, templates)?;
            // Keeping it only saves time later.
            if let Some(Err(e)) = files.map(|f| f.put(&artifact)) {
                tracing::debug!(error = %e, "a compiled kernel was not kept");
            }
            artifact
        }
    };
    device.load(&artifact)
}

fn check_problem(
    device: &Arc<dyn Device>,
    problem: &Problem,
    (effort, nth, seed): (Effort, usize, u64),
    kernels: &[Prepared],
    tally: &mut Tally,
) -> Result<()> {
    tally.kernels += kernels.len();
    let mut modules = Vec::new();
    for (kernel, module) in kernels {
        match module {
            Ok(module) => {
                tally.meet(kernel);
                modules.push((kernel, module));
            }
            Err(e) => {
                tally.checks += 1;
                tally.fail(kernel, "-", "-", e.clone());
            }
        }
    }
    let mut modules_that = |can: &dyn Fn(Family) -> bool,
                            [shape, inputs]: [&str; 2],
                            check: &dyn Fn(&dyn Module) -> runtime::Result<CheckReport>| {
        for (kernel, module) in modules.iter().filter(|(kernel, _)| can(kernel.schedule.family())) {
            tally.checks += 1;
            match check(&***module) {
                Ok(report) => {
                    let ratio = report.verdict.worst_ratio;
                    if ratio > tally.worst.0 {
                        tally.worst = (ratio, format!("{} {shape}", kernel.name()));
                    }
                    if !report.passed() {
                        tally.fail(kernel, shape, inputs, report.to_string());
                    }
                }
                Err(e) => tally.fail(kernel, shape, inputs, e.to_string()),
            }
        }
    };
    if problem.op == Op::Backward && !problem.kv.is_dense() {
        for (batch, inputs) in ragged_sweep::packed(problem, effort, nth, seed) {
            let case = BackwardCase::packed(device.clone(), problem, &batch, &inputs)?;
            let inputs = format!("{batch} {}", describe(&inputs));
            modules_that(&|_| true, [&case.shape().to_string(), &inputs], &|module| case.check(module));
        }
        return Ok(());
    }
    if problem.op == Op::Backward {
        for (shape, inputs) in sweep::cases(problem, effort, nth, seed) {
            let case = BackwardCase::new(device.clone(), problem, &shape, &inputs)?;
            modules_that(&|_| true, [&shape.to_string(), &describe(&inputs)], &|module| case.check(module));
        }
        return Ok(());
    }
    if problem.op == Op::Gradient {
        for (n, (shape, inputs)) in sweep::cases(problem, effort, nth, seed).into_iter().enumerate() {
            let stored = [Storage::F32, Storage::Bf16, Storage::F16][(nth + n) % 3];
            let case = GradientCase::new(device.clone(), problem, &shape, &inputs, stored)?;
            let inputs = format!("{}, written as {}", describe(&inputs), stored.name());
            modules_that(&|_| true, [&shape.to_string(), &inputs], &|module| case.check(module));
        }
        return Ok(());
    }
    if problem.kv.is_dense() {
        for (shape, inputs) in sweep::cases(problem, effort, nth, seed) {
            let case = CheckCase::typical(device.clone(), problem, &shape, &inputs)?;
            modules_that(&|_| true, [&shape.to_string(), &describe(&inputs)], &|module| case.check(module));
        }
        return Ok(());
    }
    for batch in ragged_sweep::batches(problem, effort, nth, seed) {
        let case = RaggedCase::new(device.clone(), problem, &batch)?;
        // Fast kernels take whole vectors of 16 bytes, some of them by TMA; calls with others are not given to them.
        let strided =
            Constraints::NONE.with_if(Constraint::Strided, ragged_unaddressable(problem, case.args()).is_some());
        let can = |family: Family| {
            (case.data().is_aligned() || family.purpose() == Purpose::Plain) && family.unmet(strided).is_none()
        };
        let shape = case.data().shape().to_string();
        modules_that(&can, [&shape, &batch.to_string()], &|module| case.check(module));
    }
    Ok(())
}

/// Random appends to caches, against an exact reference.
fn check_appends(
    device: &dyn Device,
    effort: Effort,
    seed: u64,
    tally: &mut Tally,
    prepare: impl Fn(&Kernel) -> runtime::Result<Arc<dyn Module>>,
) -> Result<()> {
    let count = if effort == Effort::Full { 400 } else { 60 };
    let mut modules: HashMap<Kernel, Arc<dyn Module>> = HashMap::new();
    for seed in (0..count).map(|i| seed.wrapping_add(i)) {
        let mut name = None;
        let outcome = check_append(device, seed, |kernel| {
            name = Some(*kernel);
            if let Some(module) = modules.get(kernel) {
                return Ok(module.clone());
            }
            let module = prepare(kernel)?;
            modules.insert(*kernel, module.clone());
            Ok(module)
        });
        tally.checks += 1;
        let wrong = match outcome {
            Ok(Ok(())) => continue,
            Ok(Err(wrong)) => wrong,
            Err(e) => e.to_string(),
        };
        match name {
            Some(kernel) => tally.fail(&kernel, "-", &format!("append {seed}"), wrong),
            None => return Err(Failed(format!("append {seed}: {wrong}")).into()),
        }
    }
    tally.kernels += modules.len();
    Ok(())
}

impl Tally {
    /// The path of a kernel, which passes unless something fails.
    fn meet(&mut self, kernel: &Kernel) -> &mut bool {
        let Kernel { problem, schedule, arch } = kernel;
        let family = schedule.family();
        let path = InstructionPath::of(family, problem, *arch);
        &mut self.paths.entry(path).or_insert_with(|| (family.evidence(problem, *arch), true)).1
    }

    /// The paths of which a kernel was wrong.
    fn failed(&self) -> impl Iterator<Item = &InstructionPath> {
        self.paths.iter().filter(|(_, (_, passed))| !passed).map(|(path, _)| path)
    }

    /// Those that passed, and of which nobody knew that a card of the arch had executed them.
    fn shown(&self, paths: &Paths, arch: Arch) -> impl Iterator<Item = &InstructionPath> {
        let is_new = move |(path, (evidence, passed)): &(&InstructionPath, &(Evidence, bool))| {
            *passed && paths.would_raise(path, evidence, arch, Level::Ran)
        };
        self.paths.iter().filter(is_new).map(|(path, _)| path)
    }

    fn fail(&mut self, kernel: &Kernel, shape: &str, inputs: &str, what: String) {
        *self.meet(kernel) = false;
        let (kernel, shape, inputs) = (kernel.name(), shape.to_owned(), inputs.to_owned());
        self.failures.push(Failure { kernel, shape, inputs, what });
    }
}

/// One line that fits a table; --json has the whole text.
fn clip(text: &str) -> String {
    let line = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(WIDEST) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

fn describe(inputs: &CheckInputs) -> String {
    let CheckInputs { layout, distribution, seed, lse, poison, scale } = inputs;
    let mut text = format!("{} {distribution:?} seed {seed}", layout.name());
    if *lse {
        text.push_str(" lse");
    }
    if *poison != Poison::None {
        text.push_str(&format!(" poison {}", poison.name()));
    }
    if let Some(scale) = scale {
        text.push_str(&format!(" scale {scale}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune::{DType, MaskKind};

    #[test]
    fn a_path_of_which_no_kernel_fails_is_shown_once() {
        let arch: Arch = "sm_75".parse().unwrap();
        let kernel = |dtype, family| {
            let problem = Problem::forward(dtype, 64, MaskKind::FULL).unwrap();
            let schedule = Schedule::default_for(family, &problem, arch, &ShapeBucket::default()).unwrap();
            Kernel { problem, schedule, arch }
        };
        let turing = kernel(DType::F16, Family::ForwardSm80);
        let mut tally = Tally::default();
        tally.meet(&turing);
        tally.meet(&kernel(DType::F16, Family::ForwardNaive));
        let names = |tally: &Tally, paths: &Paths| tally.shown(paths, arch).map(|p| p.to_string()).collect::<Vec<_>>();
        let none = Paths::default();
        assert_eq!(names(&tally, &none), ["forward/sm80:f16-m16n8k8", "forward/naive:f16"]);
        assert_eq!(tally.failed().count(), 0);
        let raised = flashtune_codegen::Raised { level: Level::Ran, device: "T4".into() };
        let known = Paths::default().with_raised([("forward/sm80:f16-m16n8k8".parse().unwrap(), raised)]);
        assert_eq!(names(&tally, &known), ["forward/naive:f16"]);
        tally.fail(&turing, "-", "-", "wrong".into());
        tally.meet(&turing);
        assert_eq!(names(&tally, &none), ["forward/naive:f16"]);
        assert_eq!(tally.failed().map(|p| p.to_string()).collect::<Vec<_>>(), ["forward/sm80:f16-m16n8k8"]);
    }
}
