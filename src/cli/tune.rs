//! `flashtune tune`: the fastest schedules for a set of problems, on this device.

use super::agenda::{self, Agenda, ModelArgs};
use super::cases::{Case, CaseArgs};
use super::context::{Context, table};
use super::exit::{Failed, Unavailable, usage};
use super::progress;
use anyhow::Result;
use flashtune::cache::{Record, Trial, TrialResult};
use flashtune::tuner::{Error as TunerError, Event, Job, Observer, Outcome, Search, tune};
use indicatif::ProgressBar;
use serde_json::json;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Options of `tune`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Without a model and options that name a problem, a small set of common ones is tuned.")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cases: CaseArgs,
    /// Say what would be tuned, and tune nothing
    #[arg(long)]
    dry_run: bool,
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
    /// Try an even sample of the whole space instead of searching it, all of it when --trials allows: to record what the
    /// space is like (--json has every trial)
    #[arg(long)]
    exhaustive: bool,
    /// Seconds to wait for another process that is tuning the same, or uses the device; without end when absent
    #[arg(long, value_name = "SECONDS")]
    patience_s: Option<u32>,
    /// Run candidates in this process instead of a worker: one that faults ends the command
    #[arg(long)]
    in_process: bool,
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
    let mut runner = cx.runner(args.in_process)?;
    let agenda = Agenda::new(&args.model, &args.cases, runner.fingerprint())?;
    if args.dry_run {
        return agenda::print(cx, &agenda);
    }
    let cases = &agenda.cases;
    if cases.is_empty() {
        agenda::print(cx, &agenda)?;
        return Err(
            Unavailable("no kernel that can be tuned computes what the model needs; nothing was tuned".into()).into()
        );
    }
    let templates = cx.templates()?;
    let budget = budget.unwrap_or(Duration::from_secs_f64(agenda.default_budget_s));
    let dir = cx.cache_dir()?;

    if !cx.json() {
        let fingerprint = runner.fingerprint();
        writeln!(cx.out, "device {fingerprint}, cache {}, templates {}", dir.root().display(), templates.hash())?;
        cx.out.flush()?;
    }
    let watcher = Watcher { bar: progress::bar(cases.len() as u64, cx.json()), waited: Mutex::default() };
    let start = Instant::now();
    let (mut done, mut failures): (Vec<Outcome>, Vec<String>) = Default::default();
    for (i, Case { problem, shape }) in cases.iter().enumerate() {
        // What earlier cases left unused belongs to the later ones.
        let working = start.elapsed().saturating_sub(watcher.waited());
        let share = budget.saturating_sub(working) / (cases.len() - i) as u32;
        let job = Job::new(*problem, *shape);
        let job = Job {
            max_trials: args.trials.unwrap_or(job.max_trials),
            budget: share,
            seed: args.seed,
            force: args.force,
            search: if args.exhaustive { Search::Even } else { Search::Guided },
            patience: args.patience_s.map_or(job.patience, |s| Duration::from_secs(s.into())),
            ..job
        };
        match tune(&mut runner, &templates, &dir, &job, &watcher) {
            Ok(outcome) => done.push(outcome),
            // Another case may be easier to measure.
            Err(e @ (TunerError::Noise { .. } | TunerError::Busy { .. })) => failures.push(e.to_string()),
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
        cx.print_json(&json!({
            "model": agenda.model.as_ref().map(|_| agenda.summary()),
            "tuned": tuned,
            "failures": failures,
            "seconds": start.elapsed().as_secs_f64(),
        }))?;
    } else {
        agenda::print_gaps(cx, &agenda)?;
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
        "conditions": record.provenance.conditions.to_string(),
        "gain_over_unfused": gain_over_unfused(record),
        "cached": cached,
        "trials": trials.iter().map(trial).collect::<Vec<_>>(),
        "snapshot": snapshot.display().to_string(),
        "record": record,
    })
}

/// One schedule's fate, for scripts.
fn trial(trial: &Trial) -> serde_json::Value {
    let mut value = json!({ "schedule": trial.schedule.to_string(), "parameters": trial.schedule });
    let fate = match &trial.result {
        TrialResult::Timed { median_us, p10_us, p90_us, samples, max_error } => json!({
            "result": "timed",
            "median_us": median_us,
            "p10_us": p10_us,
            "p90_us": p90_us,
            "samples": samples,
            "max_error": max_error,
        }),
        TrialResult::Failed { stage, reason } => {
            json!({ "result": "failed", "stage": stage.to_string(), "reason": reason })
        }
    };
    if let (Some(value), serde_json::Value::Object(fate)) = (value.as_object_mut(), fate) {
        value.extend(fate);
    }
    value
}

/// Shows a job's events on a progress bar.
struct Watcher {
    bar: ProgressBar,
    /// Time that passed while others were at work: it does not count against the budget.
    waited: Mutex<Duration>,
}

impl Watcher {
    fn waited(&self) -> Duration {
        *self.waited.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
            Event::Waiting { what } => {
                tracing::info!("waiting: {what}");
                self.bar.set_message(format!("waiting: {what}"));
            }
            Event::Waited { duration } => {
                *self.waited.lock().unwrap_or_else(PoisonError::into_inner) += *duration;
            }
            Event::Resumed { lessons } => {
                tracing::info!(lessons, "going on with a job that was cut short");
                self.bar.set_message(format!("going on with a job that was cut short ({lessons} results are known)"));
            }
            Event::Cached(_) | Event::Dropped { .. } | Event::Winner(_) => {}
        }
    }
}
