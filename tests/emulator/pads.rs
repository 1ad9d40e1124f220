//! `pad/cuda` on the emulated machine: random copies of rows, compared to the byte.

use crate::backward::{Loaded, Machine};
use crate::{search_with, setting, templates};
use flashtune::Problem;
use flashtune_codegen::{Kernel, PadCudaSchedule, Schedule, TemplateSet};
use flashtune_runtime::check_pad;

/// The one kernel.
pub fn kernel() -> Kernel {
    let schedule = Schedule::PadCuda(PadCudaSchedule { threads: 256 });
    Kernel { problem: Problem::pad(), schedule, arch: "sm_90a".parse().expect("an arch") }
}

/// Runs calls on it. What goes wrong comes back with what is needed to see it again.
pub fn try_pads(kernel: &Kernel, templates: &TemplateSet, calls: u64, seed: u64) -> Result<(), String> {
    let machine = Machine::open(kernel, templates, seed)?;
    for call in 0..calls {
        let seed = seed.wrapping_mul(1000).wrapping_add(call);
        let wrong = check_pad(&*machine, &Loaded(*kernel), seed).map_err(|e| e.to_string()).and_then(|checked| checked);
        wrong.map_err(|e| format!("call {seed}: {e}"))?;
    }
    Ok(())
}

#[test]
fn pads() {
    let templates = templates();
    search_with(2, |number| try_pads(&kernel(), &templates, setting("EMULATE_CASES").unwrap_or(20), number));
}
