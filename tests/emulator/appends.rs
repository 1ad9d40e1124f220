//! `append/cuda` on the emulated machine: random calls of random problems, compared to the byte.

use crate::machine::{Buffer, Emulated, Launch};
use crate::{search_with, setting, templates};
use flashtune_codegen::{Arch, Kernel, TemplateSet};
use flashtune_runtime::{AppendCase, append_call};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Where the memory of a call begins: at a page.
const BASE: u64 = 0x2000_0000_0000;

/// Runs calls on a kernel. What goes wrong comes back with what is needed to see it again.
pub fn try_appends(kernel: &Kernel, templates: &TemplateSet, calls: u64, seed: u64) -> Result<(), String> {
    let mut emulated = Emulated::build(kernel, templates).map_err(|e| format!("{}: {e}", kernel.name()))?;
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..calls {
        let (call, schedule, units) = (rng.random(), rng.random(), rng.random_range(1..=5));
        run(kernel, &mut emulated, call, schedule, units)
            .map_err(|e| format!("{} on {units} units, call {call}, seed {schedule}: {e}", kernel.name()))?;
    }
    Ok(())
}

fn run(kernel: &Kernel, emulated: &mut Emulated, call: u64, seed: u64, units: u32) -> Result<(), String> {
    let case = AppendCase::random_of(&kernel.problem, call, BASE);
    let call = append_call(&case.append).map_err(|e| e.to_string())?;
    if call.problem != kernel.problem {
        return Err(format!("a call of {}", call.problem));
    }
    let mut memory = case.memory.clone();
    if !call.shape.is_empty() {
        let plan = kernel.plan(&call.shape).map_err(|e| e.to_string())?;
        let main = *plan.main().ok_or("nothing to launch")?;
        let launch = Launch {
            seed,
            stage: 0,
            prelude: ([0; 2], [0; 2]),
            grid: main.blocks(units),
            threads: main.threads,
            smem_bytes: main.smem_bytes,
            args: bytemuck::bytes_of(&call.args).to_vec(),
            any_order: true,
            late: false,
            hopper: None,
            side: Vec::new(),
        };
        let mut buffers = [Buffer { address: BASE, bytes: &mut memory, written: true }];
        emulated.run(&launch, &mut buffers)?;
    }
    case.compare(&memory)
}

/// The kernel of a random call's problem.
pub fn random_kernel(seed: u64) -> Kernel {
    let arch: Arch = "sm_80".parse().expect("an arch");
    // Few calls of a kind of store in columns have pages of one token, where columns are rows.
    AppendCase::random(seed, BASE).kernel_for(arch).expect("a legal call")
}

#[test]
fn appends() {
    let templates = templates();
    search_with(6, |number| {
        let calls = setting("EMULATE_CASES").unwrap_or(20);
        try_appends(&random_kernel(9000 + number), &templates, calls, number)
    });
}
