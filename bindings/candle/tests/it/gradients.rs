//! Gradients beside those that candle derives of unfused attention.

use crate::common::{Changes, alibi, assert_close, device, in_window, noise, unfused};
use candle_core::{DType, Result, Tensor, Var};
use flashtune_candle::*;

fn variables(shapes: [&[usize]; 3]) -> Result<[Var; 3]> {
    let [q, k, v] = shapes;
    Ok([Var::from_tensor(&noise(7, q))?, Var::from_tensor(&noise(8, k))?, Var::from_tensor(&noise(9, v))?])
}

/// dQ, dK and dV of a loss that weighs every element of O differently.
fn gradients(o: &Tensor, variables: &[Var; 3]) -> Result<[Tensor; 3]> {
    let weights = noise(10, o.dims());
    let loss = (o.to_dtype(DType::F32)? * weights)?.sum_all()?;
    let all = loss.backward()?;
    Ok(variables.each_ref().map(|v| all.get(v).expect("a gradient").clone()))
}

#[track_caller]
fn assert_same(what: &str, found: &[Tensor; 3], wanted: &[Tensor; 3], most: f32) {
    for ((name, found), wanted) in ["dq", "dk", "dv"].iter().zip(found).zip(wanted) {
        assert_close(&format!("{what}, {name}"), found, wanted, most);
    }
}

#[test]
fn gradients_match_those_that_candle_derives() -> Result<()> {
    let (q_len, kv_len) = (21, 30);
    let slopes = [0.5f32, 0.25, 0.125, 0.0625];
    let on_device = Tensor::new(&slopes, &device())?;
    let bias = alibi(&slopes, q_len, kv_len);
    // With and without zeros behind the rows; groups of heads, and keys that nobody sees.
    for dim in [64, 59] {
        let of_k = [2, kv_len, 2, dim];
        let vars = variables([&[2, q_len, 4, dim], &of_k, &of_k])?;
        let [q, k, v] = vars.each_ref().map(Var::as_tensor);
        let check = |what: &str, o: Tensor, changes: &Changes<'_>, window: [Option<i64>; 2]| -> Result<()> {
            let visible = in_window(window[0], window[1], q_len, kv_len);
            let (wanted, _) = unfused([q, k, v], 0.4, changes, visible)?;
            assert_close(what, &o, &wanted, 2e-5);
            assert_same(what, &gradients(&o, &vars)?, &gradients(&wanted, &vars)?, 5e-5);
            Ok(())
        };
        check("plain", flash_attn(q, k, v, 0.4, false)?, &Changes::default(), [None, None])?;
        check("causal", flash_attn(q, k, v, 0.4, true)?, &Changes::default(), [None, Some(0)])?;
        let o = flash_attn_windowed(q, k, v, 0.4, Some(4), Some(2))?;
        check("window", o, &Changes::default(), [Some(4), Some(2)])?;
        let o = flash_attn_alibi_windowed_softcap(q, k, v, Some(&on_device), 0.4, None, Some(0), 1.5)?;
        check("slopes and a cap", o, &Changes { cap: Some(1.5), bias: Some(&bias) }, [None, Some(0)])?;
    }
    Ok(())
}

#[test]
fn gradients_of_half_precision_are_rounded_ones() -> Result<()> {
    for (dtype, most) in [(DType::F16, 4e-3), (DType::BF16, 4e-2)] {
        let vars = variables([&[1, 33, 2, 64], &[1, 33, 2, 64], &[1, 33, 2, 64]])?;
        let [q, k, v] = vars.each_ref().map(|t| t.as_tensor().to_dtype(dtype));
        let (q, k, v) = (q?, k?, v?);
        let o = flash_attn(&q, &k, &v, 0.125, true)?;
        let (wanted, _) = unfused([&q, &k, &v], 0.125, &Changes::default(), in_window(None, Some(0), 33, 33))?;
        assert_same(&format!("{dtype:?}"), &gradients(&o, &vars)?, &gradients(&wanted, &vars)?, most);
    }
    Ok(())
}

#[test]
fn gradients_go_through_transposed_tensors() -> Result<()> {
    let shape: &[usize] = &[2, 4, 18, 64];
    let vars = variables([shape, shape, shape])?;
    let [q, k, v] = vars.each_ref().map(|t| t.as_tensor().transpose(1, 2));
    let (q, k, v) = (q?, k?, v?);
    let o = flash_attn(&q, &k, &v, 0.3, true)?.transpose(1, 2)?;
    let (wanted, _) = unfused([&q, &k, &v], 0.3, &Changes::default(), in_window(None, Some(0), 18, 18))?;
    assert_same("transposed", &gradients(&o, &vars)?, &gradients(&wanted.transpose(1, 2)?, &vars)?, 5e-5);
    Ok(())
}

#[test]
fn gradients_of_packs_are_those_of_their_sequences() -> Result<()> {
    let (q_lens, kv_lens) = ([3usize, 0, 9], [5usize, 4, 9]);
    let vars = variables([&[12, 4, 64], &[18, 2, 64], &[18, 2, 64]])?;
    let [q, k, v] = vars.each_ref().map(Var::as_tensor);
    let of_q = Tensor::new(&[0u32, 3, 3, 12], &device())?;
    let of_k = Tensor::new(&[0u32, 5, 9, 18], &device())?;
    let slopes = noise(11, &[3, 4]).abs()?;
    let (o, lse) = flash_attn_varlen_alibi_with_lse(q, k, v, &slopes, &of_q, &of_k, 9, 9, 0.3, true)?;
    let mut parts = Vec::new();
    let (mut q_at, mut kv_at) = (0, 0);
    for (i, (&q_len, &kv_len)) in q_lens.iter().zip(&kv_lens).enumerate() {
        if q_len > 0 {
            let part = |t: &Tensor, at, n| t.narrow(0, at, n)?.unsqueeze(0);
            let sequence = [part(q, q_at, q_len)?, part(k, kv_at, kv_len)?, part(v, kv_at, kv_len)?];
            let bias = alibi(&slopes.get(i)?.to_vec1::<f32>()?, q_len, kv_len);
            let changes = Changes { bias: Some(&bias), ..Changes::default() };
            let visible = in_window(None, Some(0), q_len, kv_len);
            parts.push(unfused(sequence.each_ref(), 0.3, &changes, visible)?.0.squeeze(0)?);
        }
        (q_at, kv_at) = (q_at + q_len, kv_at + kv_len);
    }
    let wanted = Tensor::cat(&parts, 0)?;
    assert_close("o", &o, &wanted, 2e-5);
    assert_same("packs", &gradients(&o, &vars)?, &gradients(&wanted, &vars)?, 5e-5);
    // The same without gradients, which is one launch.
    let [q, k, v] = [q, k, v].map(Tensor::detach);
    let (o, one) = flash_attn_varlen_alibi_with_lse(&q, &k, &v, &slopes, &of_q, &of_k, 9, 9, 0.3, true)?;
    assert_close("o of one launch", &o, &wanted, 2e-5);
    assert_close("lse", &lse, &one, 2e-5);
    Ok(())
}

#[test]
fn a_step_of_training_lowers_the_loss() -> Result<()> {
    let vars = variables([&[1, 16, 2, 64], &[1, 16, 2, 64], &[1, 16, 2, 64]])?;
    let goal = noise(12, &[1, 16, 2, 64]);
    let loss = || -> Result<Tensor> {
        let [q, k, v] = vars.each_ref().map(Var::as_tensor);
        (flash_attn(q, k, v, 0.2, true)? - &goal)?.sqr()?.sum_all()
    };
    let mut before = f32::INFINITY;
    for _ in 0..5 {
        let now = loss()?;
        let value = now.to_scalar::<f32>()?;
        assert!(value < before, "{value} after {before}");
        before = value;
        let all = now.backward()?;
        for var in &vars {
            var.set(&(var.as_tensor() - (all.get(var).expect("a gradient") * 0.05)?)?)?;
        }
    }
    Ok(())
}
