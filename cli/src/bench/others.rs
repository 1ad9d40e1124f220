//! `flashtune bench --op`: gradients, and new rows of a KV cache, through the engine as a host calls it.

use super::super::cases::Case;
use super::super::context::Context;
use super::super::exit::usage;
use super::super::progress;
use super::cache::{Cache, Inputs, model_of};
use super::measure::{CHOSEN, facts, latency};
use super::trace::CacheArgs;
use super::{header, measure};
use anyhow::Result;
use clap::ValueEnum;
use flashtune::codegen::{Kernel, Shape};
use flashtune::runtime::{BackwardCase, Buffer, CheckInputs, Device, SideBuffers, typical_side};
use flashtune::{
    Backward, DType, Dispatch, Distribution, Engine, Forward, HostTensor, Launches, Layout, SideInputs, TensorView,
};
use flashtune_report::{Check, Measured, Point, Report};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// Rounds that warm up before times are kept.
const WARM_UP: usize = 2;
/// Most rows and keys of the small case on which gradients are compared with fp64.
const CHECKED: u32 = 96;

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Operation {
    /// Attention
    #[default]
    Forward,
    /// Gradients of Q, K and V; of what a score program reads none
    Backward,
    /// Writing --q-len new rows of K and V for each of --batch sequences into pages of a KV cache, without rotary
    /// embedding
    Append,
}

/// Times the operation for every case.
pub fn run(cx: &mut Context, operation: Operation, cases: &[Case], cache: &CacheArgs, rounds: usize) -> Result<Report> {
    cache.check()?;
    let engine = cx.engine_for(None)?;
    if engine.launches() == Launches::Graph {
        return Err(usage("--op is timed with eager launches; leave --graph and FLASHTUNE_LAUNCHES out"));
    }
    let mut report = header::report(&engine);
    report.method[0] =
        "A time is that of one call of the engine, launched eagerly, after the caches were flushed; medians over the rounds."
            .to_owned();
    let bar = progress::bar(cases.len() as u64, cx.hides_progress());
    for case in cases {
        bar.set_message(format!("{} {}", case.problem, case.shape));
        let (point, check) = match operation {
            Operation::Forward => unreachable!("forward passes have contenders"),
            Operation::Backward => backward(&engine, case, rounds)?,
            Operation::Append => append(&engine, case, cache, rounds)?,
        };
        report.points.push(point);
        report.checks.extend(check);
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
fn chosen(times: Vec<f64>, dispatch: &Dispatch, wrong: Option<String>) -> Measured {
    let Kernel { schedule, .. } = dispatch.plan.kernel();
    let schedule = Some(format!("{} {schedule}", schedule.family()));
    let contender = CHOSEN.to_owned();
    match wrong {
        Some(why) => Measured { contender, schedule, absent: Some(why), ..Default::default() },
        None => {
            let (latency_us, note) = (Some(latency(times)), Some(dispatch.plan.status().to_string()));
            Measured { contender, schedule, latency_us, note, ..Default::default() }
        }
    }
}

/// A tensor of the device with numbers in it.
struct Tensor {
    _buffer: Box<dyn Buffer>,
    view: TensorView,
}

impl Tensor {
    fn new(device: &dyn Device, dtype: DType, shape: [u32; 4], seed: u64) -> Result<Self> {
        let host = HostTensor::random(dtype, shape.map(|n| n as usize), Layout::Bhsd, seed, Distribution::Normal);
        let buffer = device.alloc(host.bytes().len())?;
        device.upload(&*buffer, host.bytes())?;
        let view = host.view_at(buffer.address());
        Ok(Self { _buffer: buffer, view })
    }
}

fn backward(engine: &Engine, case: &Case, rounds: usize) -> Result<(Point, Option<Check>)> {
    let Case { problem: p, shape: s, .. } = case;
    let device = &**engine.device();
    let stream = device.stream();
    let tensor =
        |heads: u32, rows: u32, dim: u32, seed: u64| Tensor::new(device, p.dtype, [s.batch, heads, rows, dim], seed);
    let (dim, dim_v) = (p.head_dim_qk, p.head_dim_v);
    let [q, o] = [tensor(s.heads, s.q_len, dim, 1)?, tensor(s.heads, s.q_len, dim_v, 2)?];
    let [k, v] = [tensor(s.kv_heads, s.kv_len, dim, 3)?, tensor(s.kv_heads, s.kv_len, dim_v, 4)?];
    let [dout, dq] = [tensor(s.heads, s.q_len, dim_v, 5)?, tensor(s.heads, s.q_len, dim, 6)?];
    let [dk, dv] = [tensor(s.kv_heads, s.kv_len, dim, 7)?, tensor(s.kv_heads, s.kv_len, dim_v, 8)?];
    let lse = device.alloc(s.batch as usize * s.heads as usize * s.q_len as usize * size_of::<f32>())?;
    let program = p.program;
    let side = match &program {
        Some(program) => Some(SideBuffers::new(device, program, s, &typical_side(program, s, 1))?),
        None => None,
    };
    let timed = |side: &SideInputs<'_>| -> Result<_> {
        let forward = Forward {
            mask: s.mask,
            lse: Some(lse.address()),
            program,
            side: *side,
            ..Forward::new(q.view, k.view, v.view, o.view)
        };
        // SAFETY: every address is that of a buffer above with the view's extent, and they live until the stream was
        // waited for.
        unsafe { engine.forward(&forward, stream)? };
        let call = Backward {
            dout: dout.view,
            q: q.view,
            k: k.view,
            v: v.view,
            o: o.view,
            lse: lse.address(),
            dlse: None,
            dq: dq.view,
            dk: dk.view,
            dv: dv.view,
            mask: s.mask,
            scale: None,
            program,
            side: *side,
            packed: None,
            gradients: &[],
        };
        // SAFETY: as above; rounds wait for each other.
        time(engine, rounds, || unsafe { engine.backward(&call, stream) })
    };
    let (times, dispatch) = match &side {
        Some(side) => side.with(timed),
        None => timed(&SideInputs::default()),
    }?;
    device.synchronize(stream)?;
    let small = Shape {
        batch: 1,
        heads: s.heads / s.kv_heads,
        kv_heads: 1,
        q_len: s.q_len.min(CHECKED),
        kv_len: s.kv_len.min(CHECKED),
        mask: s.mask,
    };
    // Of rows that are padded the kernel is that of the padded ones.
    let kernel = dispatch.plan.kernel();
    let found = BackwardCase::new(engine.device().clone(), &kernel.problem, &small, &CheckInputs::default())?
        .check(dispatch.plan.module())?;
    let wrong = (!found.passed()).then(|| format!("wrong answer: {found}"));
    let check = Check {
        contender: CHOSEN.to_owned(),
        case: measure::facts(&Case::new(*p, &small)),
        max_error: Some(found.verdict.max_error),
        unfused_error: Some(found.verdict.unfused_error),
        passed: found.passed(),
        note: wrong.clone(),
    };
    let element = p.dtype.bytes();
    let scores = f64::from(s.batch) * f64::from(s.heads) * f64::from(s.q_len) * f64::from(s.kv_len);
    let point = Point {
        suite: "backward".to_owned(),
        case: facts(case),
        // Five products where a forward pass has two.
        flops: 2.5 * s.forward_flops(p.head_dim_qk, p.head_dim_v),
        // Each tensor and its gradient.
        ideal_bytes: 2.0 * s.forward_bytes(p.head_dim_qk, p.head_dim_v, element),
        scores_bytes: scores * element as f64,
        aim: None,
        conditions: None,
        results: vec![chosen(times, &dispatch, wrong)],
    };
    Ok((point, Some(check)))
}

fn append(engine: &Engine, case: &Case, cache: &CacheArgs, rounds: usize) -> Result<(Point, Option<Check>)> {
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
    let mut measured = chosen(times, &dispatch, None);
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
    Ok((point, None))
}
