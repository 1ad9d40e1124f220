//! One case: its contenders, their answers, and the clock.

use super::super::cases::{Case, family};
use super::named::named;
use anyhow::Result;
use flashtune::{Distribution, Engine, HostTensor, Launches, Layout};
use flashtune_codegen::score::{Program, SideData};
use flashtune_codegen::{Arch, Error, Kernel, Schedule, ShapeBucket};
use flashtune_report::{self as report, Check, Latency, Measured, Point};
use flashtune_runtime::reference::unfused;
use flashtune_runtime::{CheckCase, CheckInputs, Graph, Module, Plan, compile, typical_side, visible_part};
use std::sync::Arc;
use std::time::Instant;

/// Rounds that warm up before times are kept.
const WARM_UP: usize = 2;
/// Most samples of unfused attention; it is slow, and its time is not what the report is about.
const UNFUSED_SAMPLES: usize = 5;
/// Unfused attention is not run where the fused kernel takes this long already.
const UNFUSED_LIMIT_US: f64 = 1e6;

/// The names of the contenders.
pub(crate) const CHOSEN: &str = "chosen";
pub(crate) const DEFAULT: &str = "default";
pub(crate) const UNFUSED: &str = "unfused";

/// One case on the device, ready to be measured.
pub(crate) struct Contest<'a> {
    engine: &'a Engine,
    case: Case,
    plan: Arc<Plan>,
    /// The default schedule, or why it does not run.
    default: Result<Arc<dyn Module>, String>,
    data: CheckCase,
    /// What the score program's mask leaves of the scores.
    part: f64,
}

/// A kernel that runs, with its samples in microseconds.
struct Runner<'a> {
    name: &'a str,
    module: &'a dyn Module,
    /// Its launch, captured, where replays are timed.
    graph: Option<Box<dyn Graph>>,
    times: Vec<f64>,
}

impl<'a> Contest<'a> {
    /// Chooses the kernels, makes the inputs, and computes what the answers must be.
    pub(crate) fn new(engine: &'a Engine, case: &Case) -> Result<Self> {
        let plan = engine.plan(&case.problem, &case.shape)?;
        let (problem, shape, inputs) = (&case.problem, &case.shape, CheckInputs::default());
        let side = problem.program.map_or(SideData::default(), |p| typical_side(&p, shape, inputs.seed));
        let part = match problem.program {
            Some(program) => visible_part(&program, shape, &side).map_err(Error::from)?,
            None => 1.0,
        };
        let data = CheckCase::with_side(engine.device().clone(), problem, shape, &inputs, &side)?;
        let default = match engine.policy().may_compile() {
            true => {
                let default = default_module(engine, case)?;
                match default.kernel() == plan.kernel() {
                    true => Err("the dispatcher chose the default schedule".to_owned()),
                    false => Ok(default),
                }
            }
            false => Err("the sealed policy runs no compiler".to_owned()),
        };
        Ok(Self { engine, case: *case, plan, default, data, part })
    }

    /// Checks every kernel's answer, those of schedules that are named as well, then times them in turn.
    pub(crate) fn run(&self, schedules: &[String], rounds: usize) -> Result<(Point, Vec<Check>)> {
        let others = schedules.iter().map(|name| named(self.engine, name, &self.case.problem, self.plan.kernel()));
        let others = others.collect::<Result<Vec<_>>>()?;
        let mut runners = vec![self.runner(CHOSEN, self.plan.module())?];
        if let Ok(default) = &self.default {
            runners.push(self.runner(DEFAULT, &**default)?);
        }
        for (name, module) in schedules.iter().zip(&others) {
            runners.push(self.runner(name, &**module)?);
        }
        let mut checks = Vec::new();
        let mut wrong = Vec::new();
        for runner in &runners {
            let found = self.data.check(runner.module)?;
            if !found.passed() {
                wrong.push((runner.name.to_owned(), format!("wrong answer: {found}")));
            }
            checks.push(Check {
                contender: runner.name.to_owned(),
                case: facts(&self.case),
                max_error: Some(found.verdict.max_error),
                unfused_error: Some(found.verdict.unfused_error),
                passed: found.passed(),
                note: (!found.passed()).then(|| found.to_string()),
            });
        }
        runners.retain(|r| !wrong.iter().any(|(name, _)| name == r.name));
        let unfused = self.time(&mut runners, rounds)?;

        let mut results: Vec<Measured> = runners.into_iter().map(|r| self.measured(r)).collect();
        let absent = |name: &str, why| Measured { contender: name.into(), absent: Some(why), ..Default::default() };
        results.extend(wrong.into_iter().map(|(name, why)| absent(&name, why)));
        results.extend(self.default.as_ref().err().map(|why| absent(DEFAULT, why.clone())));
        results.push(match unfused {
            Ok(times) => Measured { contender: UNFUSED.into(), latency_us: Some(latency(times)), ..Default::default() },
            Err(why) => absent(UNFUSED, why),
        });
        Ok((self.point(results), checks))
    }

    fn runner<'m>(&self, name: &'m str, module: &'m dyn Module) -> Result<Runner<'m>> {
        let device = self.engine.device();
        let graph = match self.engine.launches() {
            Launches::Eager => None,
            Launches::Graph => Some(device.capture(device.stream(), &mut || self.data.launch(module))?),
        };
        Ok(Runner { name, module, graph, times: Vec::new() })
    }

    /// Times the kernels in rounds, and unfused attention in some of them; its samples, or why it has none.
    fn time(&self, runners: &mut [Runner], rounds: usize) -> Result<Result<Vec<f64>, String>> {
        let device = self.engine.device();
        let stream = device.stream();
        let mut unfused = self.unfused();
        let mut times = Vec::new();
        let every = rounds.div_ceil(UNFUSED_SAMPLES);
        for round in 0..rounds + WARM_UP {
            for runner in runners.iter_mut() {
                device.flush_cache(stream)?;
                let us = device.time_us(stream, &mut || match &runner.graph {
                    // SAFETY: captured in `runner` on buffers of `data` and a module that lives; rounds wait for each
                    // other.
                    Some(graph) => unsafe { graph.replay(stream) },
                    None => self.data.launch(runner.module),
                })?;
                if round >= WARM_UP {
                    runner.times.push(us);
                } else if us > UNFUSED_LIMIT_US && unfused.is_ok() {
                    unfused = Err(format!("left out: the fused kernel takes {:.1} s already", us / 1e6));
                }
            }
            let Ok(unfused) = &mut unfused else { continue };
            // Its first run, in the last round that warms up, is not kept.
            if round + 1 == WARM_UP {
                unfused.run();
            } else if round >= WARM_UP && (round - WARM_UP).is_multiple_of(every) {
                device.flush_cache(stream)?;
                times.push(unfused.run());
            }
        }
        Ok(unfused.map(|_| times))
    }

    /// Unfused attention of the case, or why there is none.
    fn unfused(&self) -> Result<Unfused, String> {
        match self.engine.device().arch() {
            Arch::Cpu(_) if self.case.problem.program.is_some() => {
                Err("unfused attention is timed without score programs".to_owned())
            }
            Arch::Cpu(_) if self.case.problem.dropout => Err("unfused attention is timed without dropout".to_owned()),
            Arch::Cpu(_) => Ok(Unfused::new(&self.case)),
            Arch::Sm(_) => Err("there is no unfused attention for CUDA in this build".to_owned()),
        }
    }

    fn measured(&self, runner: Runner) -> Measured {
        let kernel = runner.module.kernel();
        let device = self.engine.device().fingerprint();
        let traffic = kernel.traffic(&self.case.shape, device.units, device.cache_bytes);
        Measured {
            contender: runner.name.to_owned(),
            schedule: Some(format!("{} {}", kernel.schedule.family(), kernel.schedule)),
            latency_us: Some(latency(runner.times)),
            tile_bytes: Some(traffic.tile_bytes),
            memory_bytes: Some(traffic.memory_bytes),
            note: (runner.name == CHOSEN).then(|| self.plan.status().to_string()),
            ..Default::default()
        }
    }

    fn point(&self, results: Vec<Measured>) -> Point {
        let (p, s) = (&self.case.problem, &self.case.shape);
        let element = p.dtype.bytes();
        let pairs = s.batch as f64 * s.heads as f64 * s.q_len as f64 * s.kv_len as f64;
        Point {
            suite: "forward".to_owned(),
            case: facts(&self.case),
            flops: s.forward_flops(p.head_dim_qk, p.head_dim_v) * self.part,
            ideal_bytes: s.forward_bytes(p.head_dim_qk, p.head_dim_v, p.element_bytes()),
            scores_bytes: pairs * element as f64,
            aim: None,
            conditions: None,
            results,
        }
    }
}

/// A case as reports have it.
pub(crate) fn facts(case: &Case) -> report::Case {
    let (p, s) = (&case.problem, &case.shape);
    let dropped = if p.dropout { " with dropout" } else { "" };
    report::Case {
        name: None,
        store: None,
        dtype: p.dtype.to_string(),
        head_dim_qk: p.head_dim_qk,
        head_dim_v: p.head_dim_v,
        mask: match p.program {
            Some(program) => format!("{} {}{dropped}", s.mask, one_line(&program)),
            None => format!("{}{dropped}", s.mask),
        },
        batch: s.batch,
        heads: s.heads,
        kv_heads: s.kv_heads,
        q_len: s.q_len,
        kv_len: s.kv_len,
    }
}

/// A program's text, or as much of it as fits a table.
fn one_line(program: &Program) -> String {
    const WIDEST: usize = 60;
    let text = program.text();
    // What it reads is declared first, in lines of their own.
    let start = ["mask =", "score =", "sink ="].iter().filter_map(|word| text.find(word)).min().unwrap_or(0);
    let text = text[start..].split_whitespace().collect::<Vec<_>>().join(" ");
    match text.char_indices().nth(WIDEST) {
        Some((end, _)) => format!("{}... ({})", &text[..end], program.name()),
        None => text,
    }
}

/// The default schedule for a case, as a module of its own.
fn default_module(engine: &Engine, case: &Case) -> Result<Arc<dyn Module>> {
    let device = engine.device();
    let arch = device.fingerprint().arch;
    let bucket = ShapeBucket::of(&case.shape);
    let family = family(None, &case.problem, arch, &bucket, &engine.paths())?;
    let schedule = Schedule::default_for(family, &case.problem, arch, &bucket)?;
    let kernel = Kernel { problem: case.problem, schedule, arch };
    let compiler = device.compiler()?;
    let key = compile::recipe(&kernel, engine.templates(), compiler.id()).key();
    let artifact = match engine.layers().artifact(&key) {
        Some((artifact, _)) => artifact,
        None => compile::compile_with(&*compiler, &kernel, engine.templates())?,
    };
    Ok(device.load(&artifact)?)
}

/// Unfused attention on the host, on all cores, in the problem's dtype.
struct Unfused {
    case: Case,
    inputs: [HostTensor; 3],
}

impl Unfused {
    fn new(case: &Case) -> Self {
        let (p, s) = (&case.problem, &case.shape);
        let tensor = |heads: u32, rows: u32, dim: u32, seed| {
            let shape = [s.batch, heads, rows, dim].map(|n| n as usize);
            HostTensor::random(p.dtype, shape, Layout::Bhsd, seed, Distribution::Normal)
        };
        let q = tensor(s.heads, s.q_len, p.head_dim_qk, 1);
        let k = tensor(s.kv_heads, s.kv_len, p.head_dim_qk, 2);
        let v = tensor(s.kv_heads, s.kv_len, p.head_dim_v, 3);
        Self { case: *case, inputs: [q, k, v] }
    }

    /// One run; its time in microseconds.
    fn run(&self) -> f64 {
        let [q, k, v] = &self.inputs;
        let start = Instant::now();
        std::hint::black_box(unfused(q, k, v, self.case.shape.mask, self.case.problem.default_scale()));
        start.elapsed().as_secs_f64() * 1e6
    }
}

/// Median and percentiles of samples, of which there is one at least.
pub(crate) fn latency(times: Vec<f64>) -> Latency {
    let mut sorted = times.clone();
    sorted.sort_by(f64::total_cmp);
    let at = |p: f64| sorted[((sorted.len() - 1) as f64 * p).round() as usize];
    let samples = times.len() as u64;
    Latency { median: at(0.5), p10: at(0.1), p90: at(0.9), samples, times, repeats: Vec::new() }
}
