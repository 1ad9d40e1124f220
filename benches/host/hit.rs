//! What a call costs before its launch once the engine is sealed, on the CPU.
//!
//!     cargo run --release --example hit
//!
//! Prints medians and the 99th percentile over blocks of calls, for one thread and for all cores at once.

use flashtune::{DType, DeviceSpec, Engine, Forward, Mask, OnMiss, Problem, Shape, TensorView};
use std::hint::black_box;
use std::time::Instant;

const BLOCKS: usize = 2000;
const CALLS: usize = 100;

/// Nanoseconds of one call, by block, sorted.
fn blocks(mut call: impl FnMut()) -> Vec<f64> {
    let mut times: Vec<f64> = (0..BLOCKS)
        .map(|_| {
            let start = Instant::now();
            (0..CALLS).for_each(|_| call());
            start.elapsed().as_secs_f64() * 1e9 / CALLS as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times
}

fn print(what: &str, times: &[f64]) {
    println!("{what:<44} median {:6.1} ns, p99 {:6.1} ns", times[BLOCKS / 2], times[BLOCKS * 99 / 100]);
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cache = tempfile::tempdir()?;
    let engine = Engine::builder().device(DeviceSpec::Cpu).cache_dir(cache.path()).build()?;
    let problem = Problem::forward(DType::F32, 64, Mask::Causal.kind())?;
    let shape = |len| Shape { batch: 1, heads: 8, kv_heads: 8, q_len: len, kv_len: len, mask: Mask::Causal };
    // A service knows some hundred classes: sixteen lengths, with as many query heads for each key head.
    let grouped = |group: u32, n: u32| Shape { heads: 8 * group, ..shape(1 << n) };
    for (group, n) in (1..=16).flat_map(|group| (0..16).map(move |n| (group, n))) {
        engine.plan(&problem, &grouped(group, n))?;
    }
    let view = |i: u64| TensorView::bhsd(i << 20, DType::F32, [1, 8, 1024, 64]);
    let call = Forward { mask: Mask::Causal, ..Forward::new(view(1), view(2), view(3), view(4)) };
    print("before sealing: plan", &blocks(|| drop(black_box(engine.plan(&problem, &shape(1024))))));
    let seal = engine.seal(OnMiss::Nearest)?;
    println!("sealed {} classes, {} kernels, digest {}", seal.classes, seal.kernels, seal.digest);
    print("sealed: plan", &blocks(|| drop(black_box(engine.plan(&problem, &shape(1024))))));
    print("sealed: all before the launch (prepare)", &blocks(|| drop(black_box(engine.prepare(&call)))));
    let threads = std::thread::available_parallelism()?.get();
    let all: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let run = || blocks(|| drop(black_box(engine.plan(&problem, &shape(1024)))));
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        threads.into_iter().map(|t| t.join().expect("no panic")).collect()
    });
    print(&format!("sealed: plan, one of {threads} threads on one class"), &all[0]);
    // Classes that were not foreseen, each for the first time.
    let mut misses: Vec<f64> = (17..=64)
        .flat_map(|group| (0..16).map(move |n| (group, n)))
        .map(|(group, n)| {
            let start = Instant::now();
            drop(black_box(engine.plan(&problem, &grouped(group, n))));
            start.elapsed().as_secs_f64() * 1e9
        })
        .collect();
    misses.sort_by(f64::total_cmp);
    let at = |share: usize| misses[misses.len() * share / 100];
    println!("{:<44} median {:6.1} ns, p90 {:6.1} ns", "sealed: a class for the first time", at(50), at(90));
    Ok(())
}
