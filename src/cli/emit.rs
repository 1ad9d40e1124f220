//! `flashtune emit`: the generated source of a kernel, or what becomes of it.

use super::cases::{CaseArgs, RaggedArgs, default_case, family, only};
use super::context::Context;
use super::exit::usage;
use super::machine;
use anyhow::Result;
use flashtune::codegen::{Arch, Kernel, Schedule};
use serde_json::json;
use std::io::Write;

/// Options of `emit`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    case: CaseArgs,
    #[command(flatten)]
    ragged: RaggedArgs,
    /// Target: cpu-avx2, cpu-avx512, ..., sm_80, sm_90a, ...; this device's when absent
    #[arg(long, value_name = "ARCH")]
    arch: Option<Arch>,
    /// Kernel family, e.g. forward/sm80; the best one for the problem when absent
    #[arg(long, value_name = "FAMILY")]
    family: Option<String>,
    /// Name of a schedule as `tune` and `list` print it; the default one when absent
    #[arg(long, value_name = "SCHEDULE")]
    schedule: Option<String>,
    /// List the schedules of the searched space instead, those that fit the arch
    #[arg(long, group = "instead")]
    space: bool,
    /// The PTX instead, of CUDA kernels
    #[arg(long, group = "instead")]
    ptx: bool,
    /// The machine code instead, by nvdisasm or, for the cpu, objdump
    #[arg(long, group = "instead")]
    sass: bool,
    /// What the compiled kernel takes instead: registers, spills, shared memory
    #[arg(long, group = "instead")]
    resources: bool,
}

pub fn run(cx: &mut Context, args: Args) -> Result<()> {
    let case = only(args.ragged.apply(args.case.cases(&default_case())?)?)?;
    let arch = match args.arch {
        Some(arch) => arch,
        None => cx.device()?.fingerprint().arch,
    };
    let bucket = case.bucket(1);
    let family = family(args.family.as_deref(), &case.problem, arch, &bucket)?;
    let default = Schedule::default_for(family, &case.problem, arch, &bucket)?;
    let fits = |s: &Schedule| Kernel { problem: case.problem, schedule: *s, arch }.check().is_ok();
    let space = || {
        let others = Schedule::space(family, &case.problem, arch).into_iter().filter(|s| *s != default);
        std::iter::once(default).chain(others).filter(fits)
    };
    if args.space {
        if cx.json() {
            let names: Vec<String> = space().map(|s| s.to_string()).collect();
            return cx.print_json(&names);
        }
        for s in space() {
            writeln!(cx.out, "{s}")?;
        }
        return Ok(());
    }
    let schedule = match &args.schedule {
        None => default,
        // Also one that stands in while another is compiled.
        Some(name) => {
            space().chain(space().filter_map(|s| s.quick())).find(|s| s.to_string() == *name).ok_or_else(|| {
                usage(format!("{family} has no schedule `{name}` for {} on {arch}; --space lists them", case.problem))
            })?
        }
    };
    let kernel = Kernel { problem: case.problem, schedule, arch };
    if args.sass {
        return machine::sass(cx, &kernel);
    }
    if args.resources {
        return machine::resources(cx, &kernel);
    }
    let source = kernel.render(&*cx.templates()?)?;
    if args.ptx {
        return machine::ptx(cx, &source);
    }
    if cx.json() {
        let resources = kernel.resources();
        return cx.print_json(&json!({
            "kernel": source.name, "entry": source.entry, "family": family.name(), "schedule": schedule.to_string(),
            "arch": arch.to_string(), "options": source.options, "resources": resources, "source": source.text,
        }));
    }
    write!(cx.out, "{}", source.text)?;
    Ok(())
}
