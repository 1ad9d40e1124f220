//! Schedules that are named on the command line to be timed beside the chosen one.

use super::super::exit::usage;
use anyhow::Result;
use flashtune::Engine;
use flashtune_codegen::{Family, Kernel, Problem, Schedule};
use flashtune_runtime::{Module, compile};
use std::sync::Arc;

/// The kernel of a schedule's name, of the chosen one's family where the name of none stands before it.
pub(crate) fn named(engine: &Engine, name: &str, problem: &Problem, chosen: &Kernel) -> Result<Arc<dyn Module>> {
    let device = engine.device();
    let arch = chosen.arch;
    let (family, name) = match name.split_once(' ') {
        Some((family, name)) => (family.parse::<Family>()?, name.trim_start()),
        None => (chosen.schedule.family(), name),
    };
    let is_chosen = chosen.schedule.family() == family && chosen.schedule.to_string() == name;
    let schedule = Schedule::space(family, problem, arch).into_iter().find(|s| s.to_string() == name);
    let schedule = schedule.or(is_chosen.then_some(chosen.schedule)).ok_or_else(|| {
        usage(format!(
            "{family} has no schedule `{name}` for {problem} on {arch}; `--schedule` takes those of its space"
        ))
    })?;
    let kernel = Kernel { problem: *problem, schedule, arch };
    kernel.check()?;
    Ok(device.load(&compile::compile_with(&*device.compiler()?, &kernel, engine.templates())?)?)
}
