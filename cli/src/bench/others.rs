//! `flashtune bench --op`: what is timed, and new rows of a KV cache, through the engine as a host calls it.

use super::super::cases::Case;
use super::super::context::Context;
use super::super::exit::usage;
use super::super::progress;
use super::backward::{self, BackwardArgs};
use super::cache::{Cache, Inputs, model_of};
use super::header;
use super::measure::{CHOSEN, facts, latency};
use super::trace::CacheArgs;
use anyhow::Result;
use clap::ValueEnum;
use flashtune::{Dispatch, Engine, Launches};
use flashtune_codegen::Kernel;
use flashtune_report::{Measured, Point, Report};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// Rounds that warm up before times are kept.
pub(crate) const WARM_UP: usize = 2;

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Operation {
    /// Attention
    #[default]
    Forward,
    /// Gradients of Q, K and V; of what a score program reads none
    Backward,
    /// Writing --q-len new rows of K and V for each of --batch sequences into pages of a KV cache, without rotary
    /// embedding
    Append,
}

/// What else is said of it.
#[derive(Clone, Copy)]
pub(crate) struct Options<'a> {
    pub cache: &'a CacheArgs,
    pub backward: &'a BackwardArgs,
    /// Schedules beside the chosen one.
    pub schedules: &'a [String],
    pub rounds: usize,
}

/// Times the operation for every case.
pub(crate) fn run(cx: &mut Context, operation: Operation, cases: &[Case], options: &Options<'_>) -> Result<Report> {
    let Options { cache, backward, schedules, rounds } = *options;
    cache.check()?;
    if operation != Operation::Backward && !schedules.is_empty() {
        return Err(usage("--schedule: appends have no other; leave it out"));
    }
    let engine = cx.engine_with(|builder| backward.apply(builder))?;
    if engine.launches() == Launches::Graph {
        return Err(usage("--op is timed with eager launches; leave --graph and FLASHTUNE_LAUNCHES out"));
    }
    let mut report = header::report(&engine);
    report.method[0] =
        "A time is that of one call of the engine, launched eagerly, after the caches were flushed; medians over the \
         rounds."
            .to_owned();
    let bar = progress::bar(cases.len() as u64, cx.hides_progress());
    for case in cases {
        bar.set_message(format!("{} {}", case.problem, case.shape));
        match operation {
            Operation::Forward => unreachable!("forward passes have contenders of their own"),
            Operation::Backward => {
                let (point, checks) = backward::run(&engine, case, backward, schedules, rounds)?;
                report.points.push(point);
                report.checks.extend(checks);
            }
            Operation::Append => report.points.push(append(&engine, case, cache, rounds)?),
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    report.derive();
    Ok(report)
}

/// Times of a call, in the order of the rounds.
fn time(
    engine: &Engine,
    rounds: usize,
    mut call: impl FnMut() -> flashtune::Result<Option<Dispatch>>,
) -> Result<(Vec<f64>, Dispatch)> {
    let device = engine.device();
    let stream = device.stream();
    let dispatch = call()?.ok_or_else(|| usage("there is nothing to time; name sizes of at least 1"))?;
    device.synchronize(stream)?;
    let mut times = Vec::new();
    for round in 0..rounds + WARM_UP {
        device.flush_cache(stream)?;
        let mut failed = None;
        let us = device.time_us(stream, &mut || {
            failed = call().err();
            Ok(())
        })?;
        if let Some(e) = failed {
            return Err(e.into());
        }
        if round >= WARM_UP {
            times.push(us);
        }
    }
    Ok((times, dispatch))
}

/// The one contender.
fn chosen(times: Vec<f64>, dispatch: &Dispatch) -> Measured {
    let Kernel { schedule, .. } = dispatch.plan.kernel();
    Measured {
        contender: CHOSEN.to_owned(),
        schedule: Some(format!("{} {schedule}", schedule.family())),
        latency_us: Some(latency(times)),
        note: Some(dispatch.plan.status().to_string()),
        ..Default::default()
    }
}

fn append(engine: &Engine, case: &Case, cache: &CacheArgs, rounds: usize) -> Result<Point> {
    let device = &**engine.device();
    let stream = device.stream();
    let model = model_of(case, cache.kv_dtype)?;
    let rows = case.shape.batch.checked_mul(case.shape.q_len).filter(|n| *n > 0);
    let rows = rows.ok_or_else(|| usage("--batch times --q-len is the number of new rows: 1 at least, and 32 bits"))?;
    let inputs = Inputs::new(device, model, 1, rows, 1)?;
    let pages = rows.div_ceil(cache.page);
    let store = Cache::new(device, &model, 1, pages, cache.page)?;
    // Tokens in no order.
    let mut slots: Vec<i64> = (0..i64::from(pages) * i64::from(cache.page)).collect();
    slots.shuffle(&mut StdRng::seed_from_u64(1));
    let bytes: Vec<u8> = slots[..rows as usize].iter().flat_map(|slot| slot.to_ne_bytes()).collect();
    let mapping = device.alloc(bytes.len())?;
    device.upload(&*mapping, &bytes)?;
    let call = store.append(&inputs, 0, rows, mapping.address());
    // SAFETY: the addresses are those of buffers that live until the stream was waited for, of the sizes that the call
    // says; slots are those of the cache.
    let (times, dispatch) = time(engine, rounds, || unsafe { engine.append(&call, stream) })?;
    device.synchronize(stream)?;
    let elements = 2.0 * f64::from(rows) * f64::from(model.kv_heads) * f64::from(model.head_dim);
    let written = f64::from(rows) * model.token_bytes() as f64;
    let mut measured = chosen(times, &dispatch);
    measured.note = Some(format!("{}; operations are elements", measured.note.unwrap_or_default()));
    let mut facts = facts(case);
    facts.store = Some(format!("pages of {}, {}", cache.page, model.element.name()));
    let point = Point {
        suite: "append".to_owned(),
        case: facts,
        flops: elements,
        ideal_bytes: elements * model.dtype.bytes() as f64 + written,
        scores_bytes: written,
        aim: None,
        conditions: None,
        results: vec![measured],
    };
    Ok(point)
}
