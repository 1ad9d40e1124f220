//! The same words with and without the patch.

use candle_core::{DType, Device, Result};
use flashtune_candle_llama::{Llama, config, generate, generate_original, weights};

const COUNT: usize = 32;

fn prompt(seed: u32) -> Vec<u32> {
    (0..30 + seed).map(|i| (i * 37 + seed * 101) % 512).collect()
}

fn device() -> Result<Device> {
    match std::env::var("FLASHTUNE_CANDLE_DEVICE").as_deref() {
        Ok("cuda") => Device::new_cuda(0),
        _ => Ok(Device::Cpu),
    }
}

#[test]
fn a_llama_says_the_same_words() -> Result<()> {
    let device = device()?;
    let vb = weights(&config(false), DType::F32, &device)?;
    let mut seen = std::collections::HashSet::new();
    for seed in 0..3 {
        let wanted = generate_original(&vb, &config(false), &prompt(seed), COUNT)?;
        let mut model = Llama::load(&vb, &config(false))?;
        assert_eq!(generate(&prompt(seed), COUNT, &device, |words, _| model.forward(words))?, wanted);
        if device.is_cuda() {
            // The same model, by `use_flash_attn`: what the patch is for.
            assert_eq!(generate_original(&vb, &config(true), &prompt(seed), COUNT)?, wanted);
        }
        seen.extend(wanted);
    }
    assert!(seen.len() > COUNT, "different words, {}", seen.len());
    Ok(())
}
