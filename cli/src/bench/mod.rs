//! `flashtune bench`: the dispatcher's choice against the default schedule and unfused attention, beside what the
//! device can do at best; ragged batches over a KV cache (`ragged`), and whole steps of a server (`trace`).

mod backward;
mod cache;
mod grid;
mod header;
mod lengths;
mod measure;
mod named;
mod others;
mod print;
mod ragged;
mod trace;

use super::cases::{Case, CaseArgs};
use super::compare::{self, Percent};
use super::context::Context;
use super::exit::{Failed, usage};
use super::progress;
use super::report::Outputs;
use anyhow::Result;
use backward::BackwardArgs;
use flashtune::Launches;
use flashtune_report::{Comparison, Report};
use grid::GridArgs;
use lengths::Lengths;
use measure::Contest;
use others::Operation;
use ragged::BatchArgs;
use std::io::Write;
use std::path::PathBuf;
use trace::{CacheArgs, Trace, TraceArgs};

/// Options of `bench`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// What is timed
    #[arg(long, value_enum, default_value_t, value_name = "OPERATION", hide_default_value = true)]
    op: Operation,
    #[command(flatten)]
    cases: CaseArgs,
    #[command(flatten)]
    grid: GridArgs,
    /// File with the lengths of real sequences: latency at their percentiles is reported too. One number per line, or
    /// JSON: an array, or one value per line, of numbers or objects with `length`, `num_tokens` or `input_length`.
    /// They are the rows of Q, K and V; of K and V alone when --q-len is given
    #[arg(long, value_name = "FILE", conflicts_with = "kv_len")]
    lengths: Option<PathBuf>,
    /// How many lengths of the file are timed; those between follow from their neighbours
    #[arg(long, default_value_t = 20, value_name = "N", requires = "lengths")]
    length_points: usize,
    /// Timed rounds; in each, every contender runs once, after the caches were flushed
    #[arg(long, default_value_t = 30, value_name = "N")]
    rounds: usize,
    /// Time replays of captured CUDA graphs instead of eager launches, of kernels that were tuned for them if there are
    /// any
    #[arg(long)]
    graph: bool,
    /// As `precise=True` calls it: forward passes also write what O loses by rounding, and gradients read it; f16 and
    /// bf16
    #[arg(long)]
    precise: bool,
    /// Do not measure what the device reaches at best; shares of it are left out
    #[arg(long)]
    no_ceilings: bool,
    /// An earlier report (`--report`) of the same cases: what became slower or faster is printed, with 99 % intervals
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Exit with 1 when the choice for a case is slower than the baseline's by more than this, with confidence
    #[arg(long, value_name = "PERCENT", requires = "baseline")]
    fail_over: Option<Percent>,
    /// Schedules that are timed beside the chosen one, as `emit --space` names them, of another family behind its name:
    /// "forward/sm90_ragged c1-kv128-s2-overlap-pack-queue-two-b1-all"; may be repeated
    #[arg(long, value_name = "SCHEDULE", conflicts_with = "trace")]
    schedule: Vec<String>,
    #[command(flatten)]
    backward: BackwardArgs,
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    ragged: BatchArgs,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    outputs: Outputs,
}

pub(crate) fn run(cx: &mut Context, args: Args) -> Result<()> {
    if args.rounds == 0 {
        return Err(usage("--rounds must be at least 1"));
    }
    args.outputs.check()?;
    // Read before anything is measured: what cannot be read is told at once.
    let baseline = args.baseline.as_deref().map(compare::read_report).transpose()?;
    let told = Told { outputs: &args.outputs, baseline: baseline.as_ref(), fail_over: args.fail_over };
    if let Some(file) = &args.trace.trace {
        let trace = Trace::new(cx, file, &args.trace, &args.cache, &args.cases)?;
        let engine = cx.engine_for(args.graph.then_some(Launches::Graph))?;
        let mut report = header::report(&engine);
        trace.serve(cx, &engine, &mut report)?;
        return told.tell(cx, &report, trace::print);
    }
    if args.op != Operation::Backward && args.backward.any() {
        return Err(usage("--scratch-mib: of --op backward; other operations take no scratch memory of a limit"));
    }
    if args.op != Operation::Forward {
        let cases = precise(args.grid.cases(&args.cases)?, args.precise)?;
        let (cache, backward, schedules, rounds) = (&args.cache, &args.backward, &args.schedule[..], args.rounds);
        let options = others::Options { cache, backward, schedules, rounds };
        let report = others::run(cx, args.op, &cases, &options)?;
        return told.tell(cx, &report, print::report);
    }
    if !args.ragged.kv_lens.is_empty() {
        let report =
            ragged::run(cx, &args.ragged, &args.schedule, &args.cache, &args.cases, args.rounds, !args.no_ceilings)?;
        return told.tell(cx, &report, ragged::print);
    }
    let lengths = args.lengths.as_deref().map(|file| Lengths::read(file, args.length_points)).transpose()?;
    let cases = match &lengths {
        Some(lengths) => args.grid.over_lengths(&args.cases, &lengths.timed)?,
        None => args.grid.cases(&args.cases)?,
    };
    let engine = cx.engine_for(args.graph.then_some(Launches::Graph))?;
    let cases = precise(args.cases.on(engine.device().arch(), cases), args.precise)?;
    let mut report = header::report(&engine);
    let device = &**engine.device();
    if !args.no_ceilings {
        header::measure_ceilings(&mut report.ceilings, device, &cases)?;
    }
    let bar = progress::bar(cases.len() as u64, cx.hides_progress());
    for case in &cases {
        bar.set_message(format!("{} {}", case.problem, case.shape));
        let contest = Contest::new(&engine, case)?;
        let (mut point, checks) = contest.run(&args.schedule, args.rounds)?;
        if lengths.is_some() {
            point.suite = "lengths".into();
        }
        report.points.push(point);
        report.checks.extend(checks);
        bar.inc(1);
    }
    bar.finish_and_clear();
    if !args.no_ceilings {
        header::measure_ceilings(&mut report.ceilings, device, &cases)?;
    }
    report.derive();
    report.lengths = lengths.map(|lengths| lengths.report(&report.points));
    told.tell(cx, &report, print::report)
}

/// The cases with what O loses by rounding, where that is asked for.
fn precise(mut cases: Vec<Case>, precise: bool) -> Result<Vec<Case>> {
    for case in cases.iter_mut().filter(|_| precise) {
        case.problem = case.problem.with_residual(true);
        case.problem.validate()?;
    }
    Ok(cases)
}

/// Where results go, and what they are held against.
struct Told<'a> {
    outputs: &'a Outputs,
    baseline: Option<&'a Report>,
    fail_over: Option<Percent>,
}

/// A report beside its comparison with the baseline.
#[derive(serde::Serialize)]
struct Compared<'a> {
    #[serde(flatten)]
    report: &'a Report,
    comparison: &'a Comparison,
}

impl Told<'_> {
    /// Writes and prints a report.
    fn tell(&self, cx: &mut Context, report: &Report, print: fn(&mut Context, &Report) -> Result<()>) -> Result<()> {
        self.outputs.write(report)?;
        let limit = self.fail_over.unwrap_or(compare::LIMIT);
        let comparison = self.baseline.map(|before| Comparison::of_reports(before, report, limit.0));
        match (cx.json(), &comparison) {
            (true, None) => cx.print_json(report)?,
            (true, Some(comparison)) => cx.print_json(&Compared { report, comparison })?,
            (false, None) => print(cx, report)?,
            (false, Some(comparison)) => {
                print(cx, report)?;
                writeln!(cx.out)?;
                compare::print(cx, comparison)?;
            }
        }
        wrong_answers(report)?;
        match (comparison, self.fail_over) {
            (Some(comparison), Some(_)) => compare::fail_over(&compare::paired(comparison)?),
            _ => Ok(()),
        }
    }
}

/// A kernel that computes something else has no speed: the command fails after it has told everything.
fn wrong_answers(report: &Report) -> Result<()> {
    match report.checks.iter().filter(|c| !c.passed).count() {
        0 => Ok(()),
        n => Err(Failed(format!("{n} of {} answers are wrong; see `flashtune check`", report.checks.len())).into()),
    }
}
