//! What a call costs beside the kernel: the first one with nothing cached, the first one of the kernel that is to stay,
//! the first one from a snapshot, and a warm one.
//!
//!     cargo run --release --example latency [-- cpu|cuda|auto]
//!
//! Prints milliseconds (microseconds for warm calls), and on CUDA the device memory that went beyond the tensors. Warm
//! calls are timed in rounds, each after a wait for the device, so that no queue is measured. Run it in several
//! processes: cores of a shared host differ. NVRTC keeps what it compiled in `~/.nv/ComputeCache`: name another HOME
//! for a first compilation.
use flashtune::{
    DType, DeviceSpec, Engine, Forward, HostTensor, Layout, Mask, MaskKind, Problem, Shape, Status, TensorView,
};
use flashtune_tuner::Job;
use std::time::{Duration, Instant};

const BATCH: u32 = 1;
const HEADS: u32 = 16;
const HEAD_DIM: u32 = 128;
const ROUNDS: usize = 400;
const BURST: usize = 16;

type Answer<T> = Result<T, Box<dyn std::error::Error>>;

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Free memory of the GPU; asked for only where there is one, because cudarc panics without a driver.
fn free_memory(cuda: bool) -> Option<usize> {
    cuda.then(cudarc::driver::result::mem_get_info)?.ok().map(|(free, _)| free)
}

/// The value that a share of them is below.
fn quantile(all: &mut [f64], share: f64) -> f64 {
    all.sort_by(f64::total_cmp);
    all[((all.len() - 1) as f64 * share) as usize]
}

fn main() -> Answer<()> {
    let spec: DeviceSpec = std::env::args().nth(1).as_deref().unwrap_or("auto").parse()?;
    let cache = tempfile::tempdir()?;
    let start = Instant::now();
    let opened = Engine::builder().device(spec).cache_dir(cache.path()).build()?;
    let opened_ms = ms(start);
    let device = opened.device().clone();
    let cuda = !device.fingerprint().arch.to_string().starts_with("cpu");
    println!("device               {}", device.fingerprint());
    println!("engine               {opened_ms:9.2} ms to open the device and the empty cache");

    // The CPU would take minutes for the long one.
    for length in if cuda { &[1024u32, 16384][..] } else { &[1024] } {
        let length = *length;
        let shape = [BATCH, HEADS, length, HEAD_DIM].map(u64::from);
        let mut views = Vec::new();
        let mut buffers = Vec::new();
        for seed in 0..4 {
            let host =
                HostTensor::random(DType::Bf16, shape.map(|n| n as usize), Layout::Bhsd, seed, Default::default());
            let buffer = device.alloc(host.bytes().len())?;
            device.upload(&*buffer, host.bytes())?;
            views.push(TensorView::bhsd(buffer.address(), DType::Bf16, shape));
            buffers.push(buffer);
        }
        let lse = device.alloc((HEADS * length * 4) as usize)?;
        let mut call = Forward::new(views[0], views[1], views[2], views[3]);
        (call.mask, call.lse) = (Mask::Causal, Some(lse.address()));
        let stream = device.stream();
        let forward = |engine: &Engine| -> Answer<(f64, Status)> {
            let start = Instant::now();
            // SAFETY: the views describe live buffers of these sizes.
            let dispatch = unsafe { engine.forward(&call, stream)? }.ok_or("nothing to compute")?;
            device.synchronize(stream)?;
            Ok((ms(start), dispatch.plan.status()))
        };
        let output = || -> Answer<Vec<u8>> {
            let mut bytes = vec![0; buffers[3].len()];
            device.download(&*buffers[3], &mut bytes, stream)?;
            Ok(bytes)
        };

        println!("bf16 d{HEAD_DIM} causal, {HEADS} heads, {length} rows:");
        let before = free_memory(cuda);
        let since = Instant::now();
        let (call_ms, status) = forward(&opened)?;
        match length {
            1024 => {
                let total = opened_ms + call_ms;
                println!("  empty cache        {total:9.2} ms to the first result, opening included ({status})")
            }
            _ => println!("  kernel in memory   {call_ms:9.2} ms to the first result of these sizes ({status})"),
        }
        if let (Some(before), Some(after)) = (before, free_memory(cuda)) {
            println!("  memory             {:9} bytes beyond the tensors", before as i64 - after as i64);
        }
        if status == Status::Quick {
            let quick = output()?;
            let mut longest = 0f64;
            let taken_over = loop {
                let (call_ms, status) = forward(&opened)?;
                longest = longest.max(call_ms);
                if status != Status::Quick {
                    break ms(since);
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            let same = if quick == output()? { "the same bits" } else { "OTHER BITS" };
            println!(
                "  its own kernel     {taken_over:9.2} ms after the first call, {same}; longest call till then \
                 {longest:.2} ms"
            );
        }
        // A record makes it a snapshot; tuning with one trial is the shortest way to one.
        let problem = Problem::forward(DType::Bf16, HEAD_DIM, MaskKind::CAUSAL)?;
        let sizes =
            Shape { batch: BATCH, heads: HEADS, kv_heads: HEADS, q_len: length, kv_len: length, mask: Mask::Causal };
        opened.tune_job(&Job { max_trials: 1, ..Job::new(problem, sizes) }, &())?;
        let start = Instant::now();
        let snapshot = Engine::builder().on(device.clone()).cache_dir(cache.path()).build()?;
        let snapshot_ms = ms(start);
        let (call_ms, status) = forward(&snapshot)?;
        println!(
            "  from the snapshot  {:9.2} ms to the first result, engine included ({status})",
            snapshot_ms + call_ms
        );

        // Host time of one piece of work: alone, and in a row of them.
        let time = |work: &mut dyn FnMut() -> Answer<()>, row: usize| -> Answer<Vec<f64>> {
            let mut all = Vec::new();
            for round in 0..ROUNDS + 20 {
                let start = Instant::now();
                for _ in 0..row {
                    work()?;
                }
                let us = start.elapsed().as_secs_f64() * 1e6 / row as f64;
                device.synchronize(stream)?;
                // The first rounds warm up.
                if round >= 20 {
                    all.push(us);
                }
            }
            Ok(all)
        };
        let mut launch = || {
            // SAFETY: as above.
            unsafe { snapshot.forward(&call, stream)? };
            Ok(())
        };
        let mut alone = time(&mut launch, 1)?;
        let mut row = if cuda && length == 1024 { time(&mut launch, BURST)? } else { alone.clone() };
        let mut choosing = time(
            &mut || {
                snapshot.prepare(&call)?;
                Ok(())
            },
            1,
        )?;
        let note = if cuda { "host time" } else { "whole call: the CPU computes before it returns" };
        let [low, mid, high] = [0.1, 0.5, 0.9].map(|share| quantile(&mut alone, share));
        println!(
            "  warm               {mid:9.2} us, median of {ROUNDS} ({note}; 10 and 90 %: {low:.2}, {high:.2}), \
             in a row {:.2}, until the launch {:.2}",
            quantile(&mut row, 0.5),
            quantile(&mut choosing, 0.5)
        );
    }
    Ok(())
}
