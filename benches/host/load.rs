//! What it costs to load a kernel that is stored: reading and verifying its file, and what the device does with it.
//!
//!     cargo run --release --example load [-- cpu|cuda|auto]
//!
//! Prints medians and the 99th percentile of 500 loads of each kernel, each unloaded before the next.

use flashtune::{DType, DeviceSpec, Mask, Problem, Shape};
use flashtune_cache::{ArtifactFiles, CacheDir};
use flashtune_codegen::{Arch, Family, Kernel, Schedule, ShapeBucket, TemplateSet};
use flashtune_runtime::{compile_with, open};
use std::time::Instant;

const LOADS: usize = 500;

fn print(what: &str, mut ms: Vec<f64>) {
    ms.sort_by(f64::total_cmp);
    println!("  {what:<28} median {:7.3} ms, p99 {:7.3} ms", ms[LOADS / 2], ms[LOADS * 99 / 100]);
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let spec: DeviceSpec = std::env::args().nth(1).as_deref().unwrap_or("auto").parse()?;
    let device = open(spec)?;
    let arch = device.fingerprint().arch;
    let families = match arch {
        Arch::Cpu(_) => vec![Family::ForwardCpu],
        Arch::Sm(sm) if sm.number == 90 => vec![Family::ForwardSm90, Family::ForwardSm80],
        Arch::Sm(_) => vec![Family::ForwardSm80],
    };
    println!("{}", device.fingerprint());
    let (compiler, templates, cache) = (device.compiler()?, TemplateSet::embedded(), tempfile::tempdir()?);
    let files = ArtifactFiles::new(&CacheDir::at(cache.path().join("cache")));
    let mask = Mask::Causal;
    let shape = Shape { batch: 1, heads: 16, kv_heads: 4, q_len: 4096, kv_len: 4096, mask };
    for (family, head_dim) in families.into_iter().flat_map(|family| [64, 128, 256].map(|dim| (family, dim))) {
        let problem = Problem::forward(DType::Bf16, head_dim, mask.kind())?;
        let schedule = Schedule::default_for(family, &problem, arch, &ShapeBucket::of(&shape))?;
        let kernel = Kernel { problem, schedule, arch };
        let key = files.put(&compile_with(&*compiler, &kernel, &templates)?)?;
        let (mut store, mut all) = (Vec::new(), Vec::new());
        for _ in 0..LOADS {
            let start = Instant::now();
            let artifact = files.get(&key).ok_or("the file was just written")?;
            store.push(start.elapsed().as_secs_f64() * 1e3);
            let module = device.load(&artifact)?;
            all.push(start.elapsed().as_secs_f64() * 1e3);
            drop(module);
        }
        let bytes = files.get(&key).map_or(0, |artifact| artifact.bytes.len());
        println!("{}, {bytes} bytes", kernel.name());
        print("reading and verifying it", store);
        print("all until it can be launched", all);
    }
    Ok(())
}
