//! Generates from a small Llama with random weights, by candle's own attention and by flashtune's.
//!
//!     cargo run -p flashtune-candle-llama            # on the CPU
//!     cargo run -p flashtune-candle-llama --features cuda

use candle_core::{DType, Device, Result};
use flashtune_candle_llama::{Llama, config, generate, generate_original, weights};

fn main() -> Result<()> {
    let device = Device::cuda_if_available(0)?;
    let prompt: Vec<u32> = (0..40).map(|i| i * 37 % 512).collect();
    let vb = weights(&config(false), DType::F32, &device)?;
    println!("on {:?}", device.location());
    println!(
        "candle-transformers' Llama, its own attention:  {:?}",
        generate_original(&vb, &config(false), &prompt, 12)?
    );
    if cfg!(feature = "cuda") && device.is_cuda() {
        let words = generate_original(&vb, &config(true), &prompt, 12)?;
        println!("candle-transformers' Llama, use_flash_attn:     {words:?}");
    }
    let mut model = Llama::load(&vb, &config(false))?;
    let words = generate(&prompt, 12, &device, |words, _| model.forward(words))?;
    println!("this program's Llama, candle_flash_attn:        {words:?}");

    let q = candle_core::Tensor::zeros((1, prompt.len(), 4, 32), DType::F32, &device)?;
    let kv = q.narrow(2, 0, 2)?;
    let account = candle_flash_attn::explain(&q, &kv, &kv, 0.17, true)?;
    println!("\nits prompt runs on\n{}", account.expect("there are rows"));
    Ok(())
}
