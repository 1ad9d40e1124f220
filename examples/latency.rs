//! What a call costs beside the kernel: the first one with nothing cached, the first one from a snapshot, and a warm one.
//!
//!     cargo run --release --example latency [-- cpu|cuda|auto]
//!
//! Prints milliseconds (microseconds for warm calls), and on CUDA the device memory that went beyond the tensors.
use flashtune::tuner::Job;
use flashtune::{DType, DeviceSpec, Engine, Forward, HostTensor, Layout, Mask, MaskKind, Problem, Shape, TensorView};
use std::time::Instant;

const BATCH: u32 = 1;
const HEADS: u32 = 16;
const HEAD_DIM: u32 = 128;
const CALLS: usize = 400;

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Free memory of the GPU; asked for only where there is one, because cudarc panics without a driver.
fn free_memory(cuda: bool) -> Option<usize> {
    cuda.then(cudarc::driver::result::mem_get_info)?.ok().map(|(free, _)| free)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let spec: DeviceSpec = std::env::args().nth(1).as_deref().unwrap_or("auto").parse()?;
    let cache = tempfile::tempdir()?;
    let start = Instant::now();
    let opened = Engine::builder().device(spec).cache_dir(cache.path()).build()?;
    let opened_ms = ms(start);
    let device = opened.device().clone();
    println!("device               {}", device.fingerprint());
    println!("engine               {opened_ms:9.2} ms to open the device and the empty cache");
    let engine = || {
        Engine::builder().on(device.clone()).cache_dir(cache.path()).build().map_err(Box::<dyn std::error::Error>::from)
    };

    for length in [1024u32, 16384] {
        let cuda = !device.fingerprint().arch.to_string().starts_with("cpu");
        if length > 1024 && !cuda {
            continue; // minutes on a host
        }
        let shape = [BATCH, HEADS, length, HEAD_DIM].map(u64::from);
        let random = |seed| {
            let shape = shape.map(|n| n as usize);
            HostTensor::random(DType::Bf16, shape, Layout::Bhsd, seed, Default::default())
        };
        let mut views = Vec::new();
        let mut buffers = Vec::new();
        for seed in 0..4 {
            let host = random(seed);
            let buffer = device.alloc(host.bytes().len())?;
            device.upload(&*buffer, host.bytes())?;
            views.push(TensorView::bhsd(buffer.address(), DType::Bf16, shape));
            buffers.push(buffer);
        }
        let lse = device.alloc((HEADS * length * 4) as usize)?;
        let mut call = Forward::new(views[0], views[1], views[2], views[3]);
        (call.mask, call.lse) = (Mask::Causal, Some(lse.address()));
        let stream = device.stream();
        let first = |engine: &Engine| -> Result<f64, Box<dyn std::error::Error>> {
            let start = Instant::now();
            // SAFETY: the views describe live buffers of these sizes.
            unsafe { engine.forward(&call, stream)? };
            device.synchronize(stream)?;
            Ok(ms(start))
        };
        println!("bf16 d{HEAD_DIM} causal, {HEADS} heads, {length} rows:");
        let before = free_memory(cuda);
        let call_ms = first(&opened)?;
        match length {
            1024 => {
                println!("  empty cache        {:9.2} ms to the first result, opening included", opened_ms + call_ms)
            }
            _ => println!("  kernel in memory   {call_ms:9.2} ms to the first result of these sizes"),
        }
        if let (Some(before), Some(after)) = (before, free_memory(cuda)) {
            println!("  memory             {:9} bytes beyond the tensors", before as i64 - after as i64);
        }
        // A record makes it a snapshot; tuning with one trial is the shortest way to one.
        let problem = Problem::forward(DType::Bf16, HEAD_DIM, MaskKind::CAUSAL)?;
        let sizes =
            Shape { batch: BATCH, heads: HEADS, kv_heads: HEADS, q_len: length, kv_len: length, mask: Mask::Causal };
        opened.tune_job(&Job { max_trials: 1, ..Job::new(problem, sizes) }, &())?;
        let start = Instant::now();
        let snapshot = engine()?;
        let snapshot_ms = ms(start);
        println!(
            "  from the snapshot  {:9.2} ms to the first result, engine included",
            snapshot_ms + first(&snapshot)?
        );
        println!("  ran                {}", snapshot.plan(&problem, &sizes)?.status());

        // The host's part of a warm call: the queue is kept short, so that launches never wait for room in it.
        let median_us = |work: &mut dyn FnMut() -> Result<(), Box<dyn std::error::Error>>| {
            let mut all = Vec::new();
            for _ in 0..CALLS {
                let start = Instant::now();
                work()?;
                all.push(start.elapsed().as_secs_f64() * 1e6);
                device.synchronize(stream)?;
            }
            all.sort_by(f64::total_cmp);
            Ok::<_, Box<dyn std::error::Error>>(all[CALLS / 2])
        };
        let call_us = median_us(&mut || {
            // SAFETY: as above.
            unsafe { snapshot.forward(&call, stream)? };
            Ok(())
        })?;
        let choosing_us = median_us(&mut || {
            snapshot.prepare(&call)?;
            Ok(())
        })?;
        let note = if cuda { "host time" } else { "whole call: the CPU computes before it returns" };
        println!("  warm               {call_us:9.2} us, median ({note}), {choosing_us:.2} of them until the launch");
    }
    Ok(())
}
