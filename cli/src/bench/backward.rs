//! `flashtune bench --op backward`: gradients of Q, K and V, by the engine as a host calls it, and by other schedules.

use super::super::cases::Case;
use super::super::exit::usage;
use super::measure::{self, CHOSEN, facts, latency};
use super::named::named;
use super::others::WARM_UP;
use anyhow::Result;
use flashtune::{
    Backward, Builder, DType, Dispatch, Distribution, Dropout, Engine, Forward, HostTensor, Layout, SideInputs,
    TensorView,
};
use flashtune_codegen::{Kernel, Shape};
use flashtune_report::{Check, Measured, Point};
use flashtune_runtime::{
    BackwardCall, BackwardCase, BackwardTensors, Buffer, CheckInputs, Device, Module, SideBuffers, SideTable,
    backward_call, typical_side,
};
use std::sync::Arc;

/// Most rows and keys of the small case on which gradients are compared with fp64.
const CHECKED: u32 = 96;
const MIB: u64 = 1 << 20;

/// Options of gradients alone.
#[derive(clap::Args, Debug)]
pub(crate) struct BackwardArgs {
    /// Of --op backward: at most so many MiB of scratch memory; 1024 when absent. In docs/measuring.md: the help of
    /// `bench` is a page long
    #[arg(long, value_name = "N", hide = true)]
    scratch_mib: Option<u32>,
}

impl BackwardArgs {
    /// The engine with this limit.
    pub(crate) fn apply(&self, builder: Builder) -> Builder {
        match self.scratch_mib {
            Some(mib) => builder.scratch_limit(u64::from(mib) * MIB),
            None => builder,
        }
    }

    /// Whether any was given.
    pub(crate) fn any(&self) -> bool {
        self.scratch_mib.is_some()
    }
}

/// A tensor of the device.
struct Tensor {
    _buffer: Box<dyn Buffer>,
    view: TensorView,
}

impl Tensor {
    /// With numbers in it.
    fn holding(device: &dyn Device, host: &HostTensor) -> Result<Self> {
        let buffer = device.alloc(host.bytes().len())?;
        device.upload(&*buffer, host.bytes())?;
        let view = host.view_at(buffer.address());
        Ok(Self { _buffer: buffer, view })
    }

    /// To be written first.
    fn unwritten(device: &dyn Device, dtype: DType, shape: [usize; 4]) -> Result<Self> {
        let buffer = device.alloc(shape.iter().product::<usize>() * dtype.bytes())?;
        let view = TensorView::bhsd(buffer.address(), dtype, shape.map(|n| n as u64));
        Ok(Self { _buffer: buffer, view })
    }
}

/// Random numbers in tensors of these shapes, each by a thread of its own: one takes a second for 2^26 elements.
fn random<const N: usize>(dtype: DType, shapes: [[usize; 4]; N]) -> [HostTensor; N] {
    std::thread::scope(|scope| {
        let mut seed = 0;
        let threads = shapes.map(|shape| {
            seed += 1;
            scope.spawn(move || HostTensor::random(dtype, shape, Layout::Bhsd, seed, Distribution::Normal))
        });
        threads.map(|thread| thread.join().expect("random numbers need nothing that could fail"))
    })
}

/// A schedule that is timed beside the chosen one.
struct Other {
    name: String,
    module: Arc<dyn Module>,
}

/// The tensors of a case, and who computes their gradients.
struct Contest<'a> {
    engine: &'a Engine,
    case: &'a Case,
    backward: Backward<'a>,
    limit: &'a BackwardArgs,
    others: Vec<Other>,
}

impl Contest<'_> {
    fn chosen(&self) -> flashtune::Result<Option<Dispatch>> {
        // SAFETY: the addresses are those of buffers that live until the stream was waited for, of the sizes that the
        // views say.
        unsafe { self.engine.backward(&self.backward, self.engine.device().stream()) }
    }

    fn other(&self, resolved: &BackwardCall, other: &Other) -> flashtune::Result<()> {
        let device = self.engine.device();
        let mut plan = other.module.kernel().plan(&resolved.shape)?;
        if let Some(mib) = self.limit.scratch_mib {
            plan = plan.within(u64::from(mib) * MIB);
        }
        // SAFETY: as above, and what a score program reads lives as long.
        Ok(unsafe { device.launch(&*other.module, &plan, (&resolved.args).into(), device.stream()) }?)
    }

    /// Times of the chosen kernel and of each other one, launched in turn.
    fn times(&self, resolved: &BackwardCall, rounds: usize) -> Result<Vec<Vec<f64>>> {
        let device = self.engine.device();
        let stream = device.stream();
        let mut times = vec![Vec::new(); 1 + self.others.len()];
        for round in 0..rounds + WARM_UP {
            for (at, times) in times.iter_mut().enumerate() {
                device.flush_cache(stream)?;
                let mut failed = None;
                let us = device.time_us(stream, &mut || {
                    failed = match at {
                        0 => self.chosen().err(),
                        n => self.other(resolved, &self.others[n - 1]).err(),
                    };
                    Ok(())
                })?;
                if let Some(e) = failed {
                    return Err(e.into());
                }
                if round >= WARM_UP {
                    times.push(us);
                }
            }
        }
        device.synchronize(stream)?;
        Ok(times)
    }

    /// Compares a kernel with fp64 on a small case of the same problem.
    fn check(&self, contender: &str, module: &dyn Module) -> Result<Check> {
        let Case { problem: p, shape: s, .. } = self.case;
        let small = Shape {
            batch: 1,
            heads: s.heads / s.kv_heads,
            kv_heads: 1,
            q_len: s.q_len.min(CHECKED),
            kv_len: s.kv_len.min(CHECKED),
            mask: s.mask,
        };
        // Of rows that are padded the kernel is that of the padded ones.
        let problem = module.kernel().problem;
        let found = BackwardCase::new(self.engine.device().clone(), &problem, &small, &CheckInputs::default())?
            .check(module)?;
        Ok(Check {
            contender: contender.to_owned(),
            case: measure::facts(&Case::new(*p, &small)),
            max_error: Some(found.verdict.max_error),
            unfused_error: Some(found.verdict.unfused_error),
            passed: found.passed(),
            note: (!found.passed()).then(|| format!("wrong answer: {found}")),
        })
    }

    fn run(mut self, schedules: &[String], rounds: usize) -> Result<(Vec<Measured>, Vec<Check>)> {
        let dispatch = self.chosen()?.ok_or_else(|| usage("there is nothing to time; name sizes of at least 1"))?;
        let Backward { dout, q, k, v, o, residual, dropout, dq, dk, dv, side, .. } = self.backward;
        let rows = |address| TensorView::rows(address, [q.shape[0], q.shape[1], q.shape[2]]);
        let tensors = BackwardTensors { dout, q, k, v, o, lse: rows(self.backward.lse), dlse: None, dq, dk, dv };
        let mut resolved = backward_call(&tensors, self.case.shape.mask, None)?.with_dropout(&dropout)?;
        if let Some(residual) = residual {
            resolved = resolved.with_residual(&residual)?;
        }
        let table = match self.case.problem.program {
            None => None,
            Some(program) => {
                resolved = resolved.with_program(program);
                Some(SideTable::new(&program, &resolved.shape, &side).map_err(flashtune_codegen::Error::from)?)
            }
        };
        let side = table.as_ref().map(SideTable::args);
        resolved.args.side = side.as_ref().map_or(0, |side| std::ptr::from_ref(side) as u64);
        for name in schedules {
            if dispatch.plan.kernel().problem != resolved.problem {
                return Err(usage(
                    "--schedule: rows of this head dim are padded first, and no kernel takes them itself",
                ));
            }
            let module = named(self.engine, name, &resolved.problem, dispatch.plan.kernel())?;
            self.others.push(Other { name: name.clone(), module });
        }
        let mut checks = vec![self.check(CHOSEN, dispatch.plan.module())?];
        for other in &self.others {
            checks.push(self.check(&other.name, &*other.module)?);
        }
        let times = self.times(&resolved, rounds)?;
        let modules = std::iter::once(dispatch.plan.module()).chain(self.others.iter().map(|other| &*other.module));
        let results = modules.zip(times).zip(&checks).map(|((module, times), check)| {
            let Kernel { schedule, .. } = module.kernel();
            let status = (check.contender == CHOSEN).then(|| dispatch.plan.status().to_string());
            Measured {
                contender: check.contender.clone(),
                schedule: Some(format!("{} {schedule}", schedule.family())),
                latency_us: check.passed.then(|| latency(times)),
                absent: check.note.clone(),
                note: status.filter(|_| check.passed),
                ..Default::default()
            }
        });
        Ok((results.collect(), checks))
    }
}

/// Times of the gradients of a case, by the engine's choice and by the schedules named.
pub(crate) fn run(
    engine: &Engine,
    case: &Case,
    limit: &BackwardArgs,
    schedules: &[String],
    rounds: usize,
) -> Result<(Point, Vec<Check>)> {
    let Case { problem: p, shape: s, .. } = case;
    let device = &**engine.device();
    let stream = device.stream();
    let shape = |heads: u32, rows: u32, dim: u32| [s.batch, heads, rows, dim].map(|n| n as usize);
    let (dim, dim_v) = (p.head_dim_qk, p.head_dim_v);
    let [of_q, of_o] = [dim, dim_v].map(|dim| shape(s.heads, s.q_len, dim));
    let [of_k, of_v] = [dim, dim_v].map(|dim| shape(s.kv_heads, s.kv_len, dim));
    let [host_q, host_k, host_v, host_dout] = random(p.dtype, [of_q, of_k, of_v, of_o]);
    let [q, k] = [Tensor::holding(device, &host_q)?, Tensor::holding(device, &host_k)?];
    let [v, dout] = [Tensor::holding(device, &host_v)?, Tensor::holding(device, &host_dout)?];
    let unwritten = |shape| Tensor::unwritten(device, p.dtype, shape);
    let ([o, dq], [dk, dv]) = ([unwritten(of_o)?, unwritten(of_q)?], [unwritten(of_k)?, unwritten(of_v)?]);
    let lost = p.residual.then(|| Tensor::unwritten(device, DType::Bf16, of_o)).transpose()?;
    let residual = lost.as_ref().map(|lost| lost.view);
    let lse = device.alloc(s.batch as usize * s.heads as usize * s.q_len as usize * size_of::<f32>())?;
    let program = p.program;
    let side = match &program {
        Some(program) => Some(SideBuffers::new(device, program, s, &typical_side(program, s, 1))?),
        None => None,
    };
    // Any probability takes as long.
    let dropout = if p.dropout { Dropout::new(0.1, 1, 1) } else { Dropout::default() };
    let timed = |side: &SideInputs<'_>| -> Result<_> {
        let forward = Forward {
            mask: s.mask,
            lse: Some(lse.address()),
            residual,
            dropout,
            program,
            side: *side,
            ..Forward::new(q.view, k.view, v.view, o.view)
        };
        // SAFETY: every address is that of a buffer above with the view's extent, and they live until the stream was
        // waited for.
        unsafe { engine.forward(&forward, stream)? };
        let backward = Backward {
            dout: dout.view,
            q: q.view,
            k: k.view,
            v: v.view,
            o: o.view,
            lse: lse.address(),
            dlse: None,
            residual,
            dropout,
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
        Contest { engine, case, backward, limit, others: Vec::new() }.run(schedules, rounds)
    };
    let (results, checks) = match &side {
        Some(side) => side.with(timed),
        None => timed(&SideInputs::default()),
    }?;
    let element = p.dtype.bytes();
    let scores = f64::from(s.batch) * f64::from(s.heads) * f64::from(s.q_len) * f64::from(s.kv_len);
    let point = Point {
        suite: "backward".to_owned(),
        case: facts(case),
        // Five products where a forward pass has two.
        flops: 2.5 * s.forward_flops(p.head_dim_qk, p.head_dim_v),
        // Each tensor and its gradient.
        ideal_bytes: 2.0 * s.forward_bytes(p.head_dim_qk, p.head_dim_v, [element; 2]),
        scores_bytes: scores * element as f64,
        aim: None,
        conditions: None,
        results,
    };
    Ok((point, checks))
}
