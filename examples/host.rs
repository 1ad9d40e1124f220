//! A host program: attention over tensors in memory, on the device that is there.
use flashtune::{DType, Engine, HostTensor, Layout, Mask};

fn main() -> flashtune::Result<()> {
    // A GPU if there is one, else the CPU. Kernels come from the cache, from bundles, or are compiled now.
    let engine = Engine::builder().build()?;

    // [batch, heads, rows, head dim]; four query heads share one head of K and V.
    let shape = |heads| [2, heads, 1024, 128];
    let random = |heads, seed| HostTensor::random(DType::Bf16, shape(heads), Layout::Bhsd, seed, Default::default());
    let (q, k, v) = (random(16, 1), random(4, 2), random(4, 3));

    let out = engine.forward_host(&q, &k, &v, Mask::Causal, None)?;
    println!("o[0, 0, 0, 0] = {}, lse[0] = {}", out.o.get([0, 0, 0, 0]), out.lse[0]);
    if let Some(plan) = out.plan {
        print!("{}", plan.explain()); // which kernel ran, from where, and why
    }
    Ok(())
}
