//! Which engine computes. In a process of its own: engines are the process's.

use candle_core::{Device, Result, Tensor};
use flashtune_candle::{engine, engine_builder, error_of, flash_attn, set_engine};
use std::sync::Arc;

#[test]
fn the_engine_that_was_set_computes() -> Result<()> {
    let device = match std::env::var("FLASHTUNE_CANDLE_DEVICE").as_deref() {
        Ok("cuda") => Device::new_cuda(0)?,
        _ => Device::Cpu,
    };
    let cache = tempfile::tempdir()?;
    let build = || Arc::new(engine_builder(&device).unwrap().cache_dir(cache.path()).build().unwrap());
    let (first, second) = (build(), build());
    assert!(set_engine(&device, first.clone())?.is_none());
    let q = Tensor::randn(0f32, 1.0, (1, 8, 2, 32), &device)?;
    flash_attn(&q, &q, &q, 1.0, true)?;
    let before = set_engine(&device, second.clone())?.expect("the first one");
    assert!(Arc::ptr_eq(&before, &first) && Arc::ptr_eq(&engine(&device)?, &second));
    flash_attn(&q, &q, &q, 1.0, true)?;
    flash_attn(&q, &q, &q, 1.0, false)?;
    assert_eq!([&first, &second].map(|engine| engine.counters().classes), [1, 2]);

    if device.is_cuda() {
        let e = set_engine(&Device::Cpu, second).err().expect("it is of another device");
        let message = error_of(&e).expect("an error of this crate").to_string();
        assert!(message.contains("engine is") && message.contains("cpu"), "{message}");
    }
    Ok(())
}
