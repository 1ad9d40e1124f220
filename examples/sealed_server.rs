//! A server: every kernel is loaded before the first request, then the set is closed. From there on no call compiles,
//! reads a file or takes a lock, and the digest says whether two ranks run the same kernels.
//!
//!     cargo run --release --example sealed_server

use flashtune::{DType, Engine, HostTensor, Layout, ManifestEntry, Mask, OnMiss, Problem, Result, Shape};

/// Head dim, query heads and KV heads of the model.
const MODEL: [usize; 3] = [64, 8, 2];

fn shape(rows: u32) -> Shape {
    Shape { batch: 1, heads: MODEL[1] as u32, kv_heads: MODEL[2] as u32, q_len: rows, kv_len: rows, mask: Mask::Causal }
}

/// Starts, seals and serves.
pub fn main() -> Result<()> {
    let engine = Engine::builder().build()?;
    let problem = Problem::forward(DType::Bf16, MODEL[0] as u32, Mask::Causal.kind())?;
    let known: Vec<ManifestEntry> = [128, 512, 1024].map(|rows| ManifestEntry::new(problem, &shape(rows))).to_vec();
    // What a deployment ships in a bundle is loaded; the rest is compiled here, or is an error under Policy::Sealed.
    for (entry, why) in engine.preload(&known) {
        eprintln!("{entry} cannot be had: {why}");
    }
    let seal = engine.seal(OnMiss::Nearest)?;
    println!("sealed {} classes; digest {}", seal.classes, seal.digest);

    // Lengths that nobody foresaw run on the kernel of the nearest ones.
    for rows in [100, 512, 700] {
        let random = |heads, seed| {
            HostTensor::random(DType::Bf16, [1, heads, rows, MODEL[0]], Layout::Bhsd, seed, Default::default())
        };
        let (q, k, v) = (random(MODEL[1], 1), random(MODEL[2], 2), random(MODEL[2], 3));
        let out = engine.forward_host(&q, &k, &v, Mask::Causal, None)?;
        println!("{rows} rows: {}", out.plan.map_or("nothing to compute".to_owned(), |plan| plan.status().to_string()));
    }
    // For the scraper, and for the tuner: `flashtune tune --from untuned.jsonl` on a machine like this one.
    let counters = engine.counters();
    println!(
        "{} compiled, {} loaded, {} untuned classes met",
        counters.compiled,
        counters.loaded,
        engine.untuned().len()
    );
    Ok(())
}
