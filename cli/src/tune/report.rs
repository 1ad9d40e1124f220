//! What a tuning prints.

use crate::command_line;
use crate::context::Context;
use crate::table::table;
use anyhow::Result;
use flashtune_cache::{Record, Trial, TrialResult};
use flashtune_codegen::Op;
use flashtune_tuner::Outcome;
use serde_json::json;
use std::io::Write;
use std::time::Duration;

pub(crate) fn report(cx: &mut Context, done: &[Outcome], elapsed: Duration) -> Result<()> {
    let mut rows = table(&["problem", "shape", "winner", "us", "GFLOP/s", "vs default", "vs unfused", "tried"]);
    let ratio = |x: Option<f64>| x.map_or("-".to_owned(), |x| format!("{x:.2}x"));
    for Outcome { record, cached, .. } in done {
        let us = record.winner().map(|w| w.median_us);
        rows.add_row([
            record.key.problem.to_string(),
            record.sizes().to_string(),
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

/// One case's result in a line.
pub(crate) fn winner(record: &Record, cached: bool) -> String {
    let mut told = format!("{} {}: {}", record.key.problem, record.sizes(), record.schedule);
    if let Some(winner) = record.winner() {
        told.push_str(&format!(", {:.0} us", winner.median_us));
    }
    match record.gain_over_default() {
        Some(_) if record.winner().is_some_and(|w| w.is_default) => told.push_str(", the default"),
        Some(gain) => told.push_str(&format!(", {gain:.2}x the default")),
        None => {}
    }
    match (cached, &record.provenance) {
        (true, _) => told.push_str(" (kept from before)"),
        (false, p) => told.push_str(&format!(" ({} timed in {:.1} s)", p.timed, p.seconds)),
    }
    told
}

/// What to do with what was found.
pub(crate) fn next_steps(cx: &mut Context, cached: usize) -> Result<()> {
    let cache = cx.cache_option();
    let steps = [
        (format!("flashtune{cache} export tuned.ftb"), "one file of it for other machines"),
        (
            "flashtune sign tuned.ftb --key KEY.secret".to_owned(),
            "so that who trusts the key uses it; `keygen` makes one",
        ),
        (repeated(), if cached > 0 { "tunes all of it again" } else { "tunes the same again" }),
    ];
    let widest = steps.iter().map(|(command, _)| command.len()).max().unwrap_or(0).min(60);
    writeln!(cx.out, "next:")?;
    for (command, what) in &steps {
        writeln!(cx.out, "  {command:<widest$}  # {what}")?;
    }
    Ok(())
}

/// The command of this process, so that nothing is answered from the cache.
fn repeated() -> String {
    let line = command_line::typed();
    let forced = std::env::args_os().any(|word| word == "--force" || word == "--only" || word == "--contested");
    if forced { line } else { line + " --force" }
}

fn gflops(record: &Record) -> Option<f64> {
    let p = &record.key.problem;
    // Five products where a forward pass has two.
    let products = if p.op == Op::Backward { 2.5 } else { 1.0 };
    let flops = products * record.provenance.shape.forward_flops(p.head_dim_qk, p.head_dim_v);
    Some(flops / record.winner()?.median_us / 1e3)
}

fn gain_over_unfused(record: &Record) -> Option<f64> {
    Some(record.provenance.unfused_us? / record.winner()?.median_us)
}

pub(crate) fn summary(outcome: &Outcome) -> serde_json::Value {
    let Outcome { record, cached, trials, snapshot } = outcome;
    json!({
        "problem": record.key.problem.to_string(),
        "shape": record.sizes().to_string(),
        "device": record.key.device.to_string(),
        "launches": record.key.launches,
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
        TrialResult::Timed { median_us, p10_us, p90_us, samples, max_error, .. } => json!({
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
