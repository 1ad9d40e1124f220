//! `flashtune bench`: the dispatcher's choice against the default schedule and unfused attention.

use super::cases::{Case, CaseArgs, default_case, family};
use super::context::{Context, table};
use super::exit::usage;
use super::progress;
use anyhow::Result;
use flashtune::codegen::{Arch, Kernel, Schedule, ShapeBucket};
use flashtune::runtime::reference::unfused;
use flashtune::runtime::{CheckCase, CheckInputs, Module, compile};
use flashtune::{Distribution, Engine, HostTensor, Layout};
use serde::Serialize;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

/// Options of `bench`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    cases: CaseArgs,
    /// Timed rounds; in each, every contender runs once, after the caches were flushed
    #[arg(long, default_value_t = 30, value_name = "N")]
    rounds: usize,
}

/// One line of the result: a case and a contender.
#[derive(Serialize)]
struct Row {
    problem: String,
    shape: String,
    contender: &'static str,
    schedule: String,
    median_us: f64,
    p10_us: f64,
    p90_us: f64,
    /// On live (query, key) pairs.
    gflops: f64,
    /// Q, K, V read and O written once.
    bytes: f64,
    gbytes_per_s: f64,
    /// Time of the default schedule over this one's.
    vs_default: Option<f64>,
}

pub fn run(cx: &mut Context, args: Args) -> Result<()> {
    if args.rounds == 0 {
        return Err(usage("--rounds must be at least 1"));
    }
    let cases = args.cases.cases(&default_case())?;
    if let Some(empty) = cases.iter().find(|c| c.shape.is_empty() || c.shape.kv_len == 0) {
        return Err(usage(format!("there is nothing to time in {}; name sizes of at least 1", empty.shape)));
    }
    let engine = cx.engine()?;
    let bar = progress::bar(cases.len() as u64, cx.json());
    let mut rows = Vec::new();
    for case in &cases {
        bar.set_message(format!("{} {}", case.problem, case.shape));
        rows.extend(measure(&engine, case, args.rounds)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    if cx.json() {
        return cx.print_json(&rows);
    }
    writeln!(cx.out, "device {}", engine.device().fingerprint())?;
    let mut printed =
        table(&["problem", "shape", "contender", "schedule", "us", "p10..p90", "GFLOP/s", "GB/s", "vs default"]);
    for r in &rows {
        printed.add_row([
            r.problem.clone(),
            r.shape.clone(),
            r.contender.to_owned(),
            r.schedule.clone(),
            format!("{:.1}", r.median_us),
            format!("{:.1}..{:.1}", r.p10_us, r.p90_us),
            format!("{:.0}", r.gflops),
            format!("{:.1}", r.gbytes_per_s),
            r.vs_default.map_or("-".to_owned(), |g| format!("{g:.2}x")),
        ]);
    }
    writeln!(cx.out, "{printed}")?;
    Ok(())
}

/// The model's choice for a case, as a module of its own.
fn default_module(engine: &Engine, case: &Case) -> Result<Arc<dyn Module>> {
    let device = engine.device();
    let arch = device.fingerprint().arch;
    let bucket = ShapeBucket::of(&case.shape);
    let family = family(None, &case.problem, arch)?;
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

fn measure(engine: &Engine, case: &Case, rounds: usize) -> Result<Vec<Row>> {
    let plan = engine.plan(&case.problem, &case.shape)?;
    let device = engine.device();
    let data = CheckCase::new(device.clone(), &case.problem, &case.shape, &CheckInputs::default())?;
    let default = match engine.policy().may_compile() {
        true => Some(default_module(engine, case)?),
        false => None,
    };
    let same = default.as_ref().is_some_and(|d| d.kernel() == plan.kernel());
    let mut contenders: Vec<(&'static str, &dyn Module)> = vec![("chosen", plan.module())];
    if let Some(default) = default.as_deref().filter(|_| !same) {
        contenders.push(("default", default));
    }
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); contenders.len()];
    let stream = device.stream();
    for round in 0..rounds + 2 {
        for (i, (_, module)) in contenders.iter().enumerate() {
            device.flush_cache(stream)?;
            let us = device.time_us(stream, &mut || data.launch(*module))?;
            // Two rounds to warm up.
            if round >= 2 {
                times[i].push(us);
            }
        }
    }
    let mut rows: Vec<Row> = Vec::new();
    for ((contender, module), times) in contenders.iter().zip(times) {
        rows.push(row(case, contender, module.kernel().schedule.to_string(), times));
    }
    if same {
        rows[0].contender = "chosen = default";
    }
    if let Arch::Cpu(_) = device.fingerprint().arch {
        rows.push(row(case, "unfused", "-".to_owned(), time_unfused(case, rounds.min(5))));
    }
    let default_us = rows.iter().find(|r| r.contender.ends_with("default")).map(|r| r.median_us);
    for r in &mut rows {
        r.vs_default = default_us.map(|d| d / r.median_us);
    }
    Ok(rows)
}

/// Microseconds of unfused attention on all cores, in the problem's dtype.
fn time_unfused(case: &Case, rounds: usize) -> Vec<f64> {
    let (p, s) = (&case.problem, &case.shape);
    let tensor = |heads: u32, rows: u32, dim: u32, seed| {
        let shape = [s.batch, heads, rows, dim].map(|n| n as usize);
        HostTensor::random(p.dtype, shape, Layout::Bhsd, seed, Distribution::Normal)
    };
    let q = tensor(s.heads, s.q_len, p.head_dim_qk, 1);
    let k = tensor(s.kv_heads, s.kv_len, p.head_dim_qk, 2);
    let v = tensor(s.kv_heads, s.kv_len, p.head_dim_v, 3);
    let mut times = Vec::new();
    for round in 0..=rounds {
        let start = Instant::now();
        std::hint::black_box(unfused(&q, &k, &v, s.mask, p.default_scale()));
        // One round to warm up.
        if round > 0 {
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    times
}

fn row(case: &Case, contender: &'static str, schedule: String, mut times: Vec<f64>) -> Row {
    times.sort_by(f64::total_cmp);
    let at = |q: f64| times[((times.len() - 1) as f64 * q).round() as usize];
    let p = &case.problem;
    let flops = case.shape.forward_flops(p.head_dim_qk, p.head_dim_v);
    let bytes = case.shape.forward_bytes(p.head_dim_qk, p.head_dim_v, p.dtype.bytes());
    Row {
        problem: p.to_string(),
        shape: case.shape.to_string(),
        contender,
        schedule,
        median_us: at(0.5),
        p10_us: at(0.1),
        p90_us: at(0.9),
        gflops: flops / at(0.5) / 1e3,
        bytes,
        gbytes_per_s: bytes / at(0.5) / 1e3,
        vs_default: None,
    }
}
