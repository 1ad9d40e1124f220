//! `flashtune tune`: the fastest schedules for a set of problems, on this device.

use super::cases::{Case, CaseArgs, default_case, fixed};
use super::context::{Context, table};
use super::exit::{Failed, usage};
use super::progress;
use anyhow::Result;
use flashtune::cache::{ArtifactFiles, Record, Store};
use flashtune::codegen::Arch;
use flashtune::tuner::{Event, Job, Observer, Outcome, tune};
use flashtune::{DType, Mask};
use indicatif::ProgressBar;
use serde_json::json;
use std::io::Write;
use std::time::{Duration, Instant};

/// Seconds for the whole built-in set.
const CPU_BUDGET: f64 = 90.0;
const CUDA_BUDGET: f64 = 400.0;
/// Seconds for each case that the options name.
const CASE_BUDGET: f64 = 60.0;
/// How long to wait for another process that tunes into the same cache.
const PATIENCE: Duration = Duration::from_secs(10);

/// Options of `tune`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Without options that name a problem, a small set of common ones is tuned.")]
pub struct Args {
    #[command(flatten)]
    cases: CaseArgs,
    /// Largest number of schedules to compile for each problem
    #[arg(long, value_name = "N")]
    trials: Option<usize>,
    /// Seconds for the whole command
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    budget_s: Option<f64>,
    /// Seed of the inputs and of the random picks
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// Tune again what is already in the cache
    #[arg(long)]
    force: bool,
}

/// The built-in set: what a user's first run tunes.
fn common_cases(arch: Arch) -> Vec<Case> {
    use DType::{Bf16, F16, F32};
    use Mask::{Causal, Full};
    match arch {
        Arch::Cpu(_) => vec![
            fixed(F32, 64, Full, 1, (8, 8), 1024),
            fixed(F32, 64, Causal, 1, (8, 8), 1024),
            fixed(F32, 128, Causal, 1, (8, 2), 1024),
            fixed(Bf16, 64, Causal, 1, (8, 8), 1024),
            fixed(Bf16, 128, Full, 1, (8, 8), 1024),
            fixed(Bf16, 128, Causal, 1, (8, 2), 2048),
            fixed(F32, 64, Full, 1, (8, 8), 128),
            fixed(Bf16, 128, Causal, 1, (8, 2), 128),
        ],
        Arch::Sm(_) => vec![
            fixed(Bf16, 64, Full, 4, (16, 16), 4096),
            fixed(Bf16, 64, Causal, 4, (16, 16), 4096),
            fixed(Bf16, 128, Full, 4, (32, 8), 4096),
            fixed(Bf16, 128, Causal, 4, (32, 8), 4096),
            fixed(Bf16, 128, Causal, 1, (32, 8), 16384),
            fixed(Bf16, 256, Causal, 2, (16, 8), 4096),
            fixed(Bf16, 128, Causal, 8, (32, 8), 512),
            fixed(F16, 64, Causal, 4, (16, 16), 4096),
            fixed(F16, 128, Causal, 4, (32, 8), 4096),
        ],
    }
}

pub fn run(cx: &mut Context, args: Args) -> Result<()> {
    let budget = match args.budget_s.map(Duration::try_from_secs_f64) {
        None => None,
        Some(Ok(budget)) if !budget.is_zero() => Some(budget),
        Some(_) => {
            return Err(usage("--budget-s must be a positive number of seconds, and no more than 64 bits of them"));
        }
    };
    if args.trials == Some(0) {
        return Err(usage("--trials must be at least 1: the default schedule is always tried"));
    }
    let (device, templates) = (cx.device()?, cx.templates()?);
    let arch = device.fingerprint().arch;
    let (cases, default_budget) = match (args.cases.is_empty(), arch) {
        (true, Arch::Cpu(_)) => (common_cases(arch), CPU_BUDGET),
        (true, Arch::Sm(_)) => (common_cases(arch), CUDA_BUDGET),
        (false, _) => {
            let cases = args.cases.cases(&default_case())?;
            let budget = CASE_BUDGET * cases.len() as f64;
            (cases, budget)
        }
    };
    if let Some(empty) = cases.iter().find(|c| c.shape.is_empty() || c.shape.kv_len == 0) {
        return Err(usage(format!("there is nothing to time in {}; name sizes of at least 1", empty.shape)));
    }
    let budget = budget.unwrap_or(Duration::from_secs_f64(default_budget));
    let dir = cx.cache_dir()?;
    let store = Store::open_within(&dir, PATIENCE)?;
    let artifacts = ArtifactFiles::new(&dir);

    if !cx.json() {
        let fingerprint = device.fingerprint();
        writeln!(cx.out, "device {fingerprint}, cache {}, templates {}", dir.root().display(), templates.hash())?;
        cx.out.flush()?;
    }
    let watcher = Watcher { bar: progress::bar(cases.len() as u64, cx.json()) };
    let start = Instant::now();
    let (mut done, mut failures): (Vec<Outcome>, Vec<String>) = Default::default();
    for (i, Case { problem, shape }) in cases.iter().enumerate() {
        // What earlier cases left unused belongs to the later ones.
        let share = budget.saturating_sub(start.elapsed()) / (cases.len() - i) as u32;
        let job = Job::new(*problem, *shape);
        let job = Job {
            max_trials: args.trials.unwrap_or(job.max_trials),
            budget: share,
            seed: args.seed,
            force: args.force,
            ..job
        };
        match tune(&device, &templates, &store, &artifacts, &job, &watcher) {
            Ok(outcome) => done.push(outcome),
            // A missing compiler or a full disk stops every case; anything else only this one.
            Err(e) if failures.is_empty() && done.is_empty() => {
                watcher.bar.finish_and_clear();
                return Err(flashtune::Error::from(e).into());
            }
            Err(e) => failures.push(format!("{problem} {shape}: {e}")),
        }
        watcher.bar.inc(1);
    }
    watcher.bar.finish_and_clear();

    if cx.json() {
        let tuned: Vec<_> = done.iter().map(summary).collect();
        cx.print_json(&json!({ "tuned": tuned, "failures": failures, "seconds": start.elapsed().as_secs_f64() }))?;
    } else {
        report(cx, &done, start.elapsed())?;
    }
    match failures.as_slice() {
        [] => Ok(()),
        some => Err(Failed(format!("{} of {} cases failed: {}", some.len(), cases.len(), some.join("; "))).into()),
    }
}

fn report(cx: &mut Context, done: &[Outcome], elapsed: Duration) -> Result<()> {
    let mut rows = table(&["problem", "shape", "winner", "us", "GFLOP/s", "vs default", "vs unfused", "tried"]);
    let ratio = |x: Option<f64>| x.map_or("-".to_owned(), |x| format!("{x:.2}x"));
    for Outcome { record, cached, .. } in done {
        let us = record.winner().map(|w| w.median_us);
        rows.add_row([
            record.key.problem.to_string(),
            record.provenance.shape.to_string(),
            record.schedule.to_string(),
            us.map_or("-".to_owned(), |us| format!("{us:.0}")),
            gflops(record).map_or("-".to_owned(), |g| format!("{g:.0}")),
            ratio(record.gain_over_default()),
            ratio(gain_over_unfused(record)),
            if *cached { "cached".to_owned() } else { record.provenance.timed.to_string() },
        ]);
    }
    writeln!(cx.out, "{rows}")?;
    let cached = done.iter().filter(|o| o.cached).count();
    writeln!(
        cx.out,
        "{} tuned, {cached} answered from the cache, in {:.1} s",
        done.len() - cached,
        elapsed.as_secs_f64()
    )?;
    if let Some(last) = done.last() {
        writeln!(cx.out, "snapshot {}", last.snapshot.display())?;
    }
    Ok(())
}

fn gflops(record: &Record) -> Option<f64> {
    let p = &record.key.problem;
    let flops = record.provenance.shape.forward_flops(p.head_dim_qk, p.head_dim_v);
    Some(flops / record.winner()?.median_us / 1e3)
}

fn gain_over_unfused(record: &Record) -> Option<f64> {
    Some(record.provenance.unfused_us? / record.winner()?.median_us)
}

fn summary(outcome: &Outcome) -> serde_json::Value {
    let Outcome { record, cached, trials, snapshot } = outcome;
    json!({
        "problem": record.key.problem.to_string(),
        "shape": record.provenance.shape.to_string(),
        "device": record.key.device.to_string(),
        "schedule": record.schedule.to_string(),
        "median_us": record.winner().map(|w| w.median_us),
        "gflops": gflops(record),
        "gain_over_default": record.gain_over_default(),
        "gain_over_unfused": gain_over_unfused(record),
        "cached": cached,
        "trials": trials.len(),
        "snapshot": snapshot.display().to_string(),
        "record": record,
    })
}

/// Shows a job's events on a progress bar.
struct Watcher {
    bar: ProgressBar,
}

impl Observer for Watcher {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Phase { phase, .. } => self.bar.set_message(phase.name()),
            Event::Space { total, legal, chosen } => {
                self.bar.set_message(format!("{chosen} of {legal} schedules that fit ({total} in the space)"));
            }
            Event::Compiled { schedule, done, total } => {
                self.bar.set_message(format!("compile {done}/{total} {schedule}"));
            }
            Event::Checked { schedule, done, total } => {
                self.bar.set_message(format!("check {done}/{total} {schedule}"))
            }
            Event::Timed { schedule, round, us } => {
                self.bar.set_message(format!("round {round}: {schedule} {us:.0} us"));
            }
            Event::Failed { schedule, stage, reason } => {
                tracing::debug!(%schedule, %stage, reason, "a schedule failed");
            }
            Event::Cached(_) | Event::Dropped { .. } | Event::Winner(_) => {}
        }
    }
}
