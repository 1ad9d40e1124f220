//! `flashtune emit`: the generated source of a kernel, or what becomes of it.

use super::cases::{CaseArgs, RaggedArgs, default_case, family, only};
use super::context::Context;
use super::exit::usage;
use super::machine;
use anyhow::Result;
use clap::ValueEnum;
use flashtune_codegen::{Arch, Kernel, Schedule};
use serde_json::json;
use std::io::Write;

/// What a kernel computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Operation {
    /// Attention
    #[default]
    Forward,
    /// Gradients of Q, K and V
    Backward,
}

/// Which kernel: the problem, the size that its default schedule is for, and what else it is than the default.
#[derive(clap::Args, Debug)]
pub(crate) struct Selected {
    #[command(flatten)]
    case: CaseArgs,
    #[command(flatten)]
    ragged: RaggedArgs,
    /// What the kernel computes
    #[arg(long, value_enum, default_value_t, value_name = "OPERATION", hide_default_value = true)]
    op: Operation,
    /// Target: cpu-avx2, cpu-avx512, ..., sm_80, sm_90a, ...; this device's when absent
    #[arg(long, value_name = "ARCH")]
    arch: Option<Arch>,
    /// Kernel family, e.g. forward/sm80; the best one for the problem when absent
    #[arg(long, value_name = "FAMILY")]
    family: Option<String>,
    /// Name of a schedule as `tune` and `list` print it; the default one when absent
    #[arg(long, value_name = "SCHEDULE")]
    schedule: Option<String>,
}

impl Selected {
    /// The kernel, and the schedules of its space that fit the arch, the default one first.
    pub(crate) fn kernel(&self, cx: &mut Context) -> Result<(Kernel, Vec<Schedule>)> {
        let cases = self.ragged.apply(self.case.cases(&default_case())?)?;
        let arch = match self.arch {
            Some(arch) => arch,
            None => cx.device()?.fingerprint().arch,
        };
        // A family that is named says by itself which precision it has.
        let cases = if self.family.is_some() { cases } else { self.case.on(arch, cases) };
        let mut case = only(cases)?;
        if self.op == Operation::Backward {
            case.problem = case.problem.backward();
        }
        case.problem.validate_on(arch)?;
        let bucket = case.bucket(1);
        let family = family(self.family.as_deref(), &case.problem, arch, &bucket, &cx.paths(arch)?)?;
        let default = Schedule::default_for(family, &case.problem, arch, &bucket)?;
        let fits = |s: &Schedule| Kernel { problem: case.problem, schedule: *s, arch }.check().is_ok();
        let others = Schedule::space(family, &case.problem, arch).into_iter().filter(|s| *s != default);
        let space: Vec<Schedule> = std::iter::once(default).chain(others).filter(fits).collect();
        let schedule = match &self.schedule {
            None => default,
            // Also one that stands in while another is compiled.
            Some(name) => {
                let all = space.iter().copied().chain(space.iter().filter_map(|s| s.quick()));
                all.into_iter().find(|s| s.to_string() == *name).ok_or_else(|| {
                    let problem = &case.problem;
                    usage(format!("{family} has no schedule `{name}` for {problem} on {arch}; emit --space lists them"))
                })?
            }
        };
        Ok((Kernel { problem: case.problem, schedule, arch }, space))
    }
}

/// Options of `emit`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    selected: Selected,
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

pub(crate) fn run(cx: &mut Context, args: Args) -> Result<()> {
    let (kernel, space) = args.selected.kernel(cx)?;
    if args.space {
        if cx.json() {
            let names: Vec<String> = space.iter().map(Schedule::to_string).collect();
            return cx.print_json(&names);
        }
        for s in space {
            writeln!(cx.out, "{s}")?;
        }
        return Ok(());
    }
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
            "kernel": source.name, "entry": source.entry, "family": kernel.schedule.family().name(),
            "schedule": kernel.schedule.to_string(), "arch": kernel.arch.to_string(), "options": source.options,
                "resources": resources, "source": source.text,
        }));
    }
    write!(cx.out, "{}", source.text)?;
    Ok(())
}
