//! `quantise/cuda` on the emulated machine: random calls, whose scales and codes are compared with fp64.
//!
//! Thread blocks run one after the other there, each taking from the list of items what those before have left: an item
//! that stands before what it waits for never ends, but a count that comes too early is not seen.

use crate::backward::{Loaded, Machine};
use crate::{search_with, setting, templates};
use flashtune::DType;
use flashtune_codegen::{Family, Kernel, MaskKind, Op, Problem, Schedule, ShapeBucket, TemplateSet};
use flashtune_runtime::check_quantise;

/// The kernel of a problem: of sm_89 and newer by the conversion that these have.
pub fn kernel_of(dtype: DType, dims: (u32, u32), arch: &str) -> Kernel {
    let problem = Problem::forward_qk_v(dtype, dims.0, dims.1, MaskKind::FULL).expect("legal");
    let (problem, arch) = (Problem { op: Op::Quantise, ..problem }, arch.parse().expect("an arch"));
    let schedule = Schedule::default_for(Family::QuantiseCuda, &problem, arch, &ShapeBucket::default());
    Kernel { problem, schedule: schedule.expect("supported"), arch }
}

/// Runs calls on it. What goes wrong comes back with what is needed to see it again.
pub fn try_quantise(kernel: &Kernel, templates: &TemplateSet, calls: u64, seed: u64) -> Result<(), String> {
    let machine = Machine::open(kernel, templates, seed)?;
    for call in 0..calls {
        let seed = seed.wrapping_mul(1000).wrapping_add(call);
        let checked = check_quantise(&*machine, &Loaded(*kernel), seed);
        checked.map_err(|e| e.to_string()).and_then(|checked| checked).map_err(|e| format!("call {seed}: {e}"))?;
    }
    Ok(())
}

#[test]
fn quantised_operands() {
    let templates = templates();
    let dims = [(64, 64), (128, 128), (256, 256), (192, 128), (16, 24), (59, 33), (96, 96), (1, 2)];
    search_with(dims.len() as u64, |number| {
        let n = number as usize;
        let arch = ["sm_75", "sm_90a", "sm_89"][n / 3 % 3];
        let kernel = kernel_of(DType::ALL[n % 3], dims[n % dims.len()], arch);
        try_quantise(&kernel, &templates, setting("EMULATE_CASES").unwrap_or(12), number)
    });
}
