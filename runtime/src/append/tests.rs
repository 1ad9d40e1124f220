use super::*;
use crate::{CpuDevice, Device, compile};
use std::collections::HashMap;
use std::sync::Arc;

/// Random calls on the host processor: every layout, element, index, width, rotation and place, to the byte.
#[test]
fn appends_leave_what_they_must_and_nothing_else() {
    let device = CpuDevice::open().unwrap();
    let compiler = device.compiler().unwrap();
    let templates = flashtune_codegen::TemplateSet::embedded();
    let mut modules: HashMap<_, Arc<dyn crate::Module>> = HashMap::new();
    let mut wrong = Vec::new();
    for seed in 0..400u64 {
        // One of a few kernels: compiling is what takes the time.
        let kernel = AppendCase::random(seed, 1 << 20).kernel(&*device).unwrap();
        if !modules.contains_key(&kernel) {
            if modules.len() == 40 {
                continue;
            }
            let artifact = compile::compile_with(&*compiler, &kernel, &templates).unwrap();
            modules.insert(kernel, device.load(&artifact).unwrap());
        }
        match check_append(&*device, seed, |kernel| Ok(modules[kernel].clone())).unwrap() {
            Ok(()) => {}
            Err(e) => wrong.push(format!("{seed} {}: {e}", kernel.name())),
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
