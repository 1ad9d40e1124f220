//! Score programs, engines and their accounts.

use crate::common::{Changes, assert_close, device, noise, unfused};
use candle_core::{DType, Result, Tensor};
use flashtune_candle::{Attention, Program, attention, explain};

fn tensors() -> [Tensor; 3] {
    [noise(1, &[2, 20, 4, 32]), noise(2, &[2, 30, 2, 32]), noise(3, &[2, 30, 2, 32])]
}

#[test]
fn a_program_reads_tensors_and_numbers_by_name() -> Result<()> {
    let [q, k, v] = &tensors();
    let text = "bias: f32[heads, q_len, kv_len]; n: int; score = score + bias[h, q, kv]; mask = kv - q < n;";
    let program = Program::parse(text).unwrap();
    let bias = noise(4, &[4, 20, 30]);
    let n = Tensor::new(7i64, &device())?;
    let o = attention(q, k, v, &program, &[("bias", &bias), ("n", &n)])?;
    let changes = Changes { bias: Some(&bias), ..Changes::default() };
    let (wanted, wanted_lse) = unfused([q, k, v], 1.0 / 32f32.sqrt(), &changes, |q, kv| kv - q < 7)?;
    assert_close("o", &o, &wanted, 2e-5);
    let call = Attention::new().scale(1.0 / 32f32.sqrt()).program(&program).value("bias", &bias).value("n", 7);
    let (o, lse) = call.forward_with_lse(q, k, v)?;
    assert_close("o of the call", &o, &wanted, 2e-5);
    assert_close("lse", &lse, &wanted_lse, 2e-5);
    // Of any strides, without a copy.
    let turned = bias.t()?.contiguous()?.t()?;
    assert_close("strided", &attention(q, k, v, &program, &[("bias", &turned), ("n", &n)])?, &o, 1e-6);
    Ok(())
}

#[test]
fn masks_in_memory_are_bytes() -> Result<()> {
    let [q, k, v] = &tensors();
    let bytes: Vec<u8> = (0..20 * 30).map(|i| u8::from(i % 7 != 3 && i / 30 != 5)).collect();
    let seen = |q: i64, kv: i64| bytes[(q * 30 + kv) as usize] != 0;
    let visible = Tensor::from_slice(&bytes, (1, 1, 20, 30), &device())?;
    let program = Program::parse("visible: bool[batch, heads, q_len, kv_len]; mask = visible[b, h, q, kv];").unwrap();
    let o = attention(q, k, v, &program, &[("visible", &visible)])?;
    let (wanted, _) = unfused([q, k, v], 1.0 / 32f32.sqrt(), &Changes::default(), seen)?;
    assert_close("o", &o, &wanted, 2e-5);
    Ok(())
}

#[test]
fn windows_hold_beside_a_program() -> Result<()> {
    let [q, k, v] = &tensors();
    let program = Program::parse("mask = kv % 3 != 1;").unwrap();
    let o = Attention::new().scale(0.3).window(Some(6), Some(2)).program(&program).forward(q, k, v)?;
    let window = crate::common::in_window(Some(6), Some(2), 20, 30);
    let (wanted, _) = unfused([q, k, v], 0.3, &Changes::default(), |q, kv| window(q, kv) && kv % 3 != 1)?;
    assert_close("o", &o, &wanted, 2e-5);
    Ok(())
}

#[test]
fn explain_names_kernel_device_and_reasons() -> Result<()> {
    let [q, k, v] = tensors().map(|t| t.to_dtype(DType::BF16).unwrap());
    let account = explain(&q, &k, &v, 0.3, true)?.expect("there are rows");
    assert_eq!(account.problem, "forward-bf16-d32-causal");
    assert_eq!(account.family.contains("cpu"), device().is_cpu(), "{account}");
    assert!(account.shape.contains("20") && account.shape.contains("30"), "{account}");
    let none = q.narrow(1, 0, 0)?;
    assert!(explain(&none, &k, &v, 0.3, true)?.is_none());
    Ok(())
}
