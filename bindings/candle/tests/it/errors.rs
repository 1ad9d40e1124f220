//! What is refused: by type and name, with a remedy.

use crate::common::{device, noise};
use candle_core::{DType, Result, Tensor, Var};
use flashtune_candle::*;

/// The crate's error inside of candle's, and its words.
#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>) -> String {
    let e = result.expect_err("it is refused");
    assert!(e.to_string().contains("flashtune-candle"), "candle's error says whose it is: {e}");
    let found = error_of(&e).unwrap_or_else(|| panic!("not an error of this crate: {e}"));
    match found {
        Error::Tensor { .. } | Error::Argument { .. } | Error::Gradient { .. } | Error::Engine(_) => found.to_string(),
    }
}

#[track_caller]
fn assert_says<T: std::fmt::Debug>(result: Result<T>, words: &[&str]) {
    let message = refused(result);
    for word in words {
        assert!(message.contains(word), "`{word}` is not in: {message}");
    }
}

fn tensors() -> [Tensor; 3] {
    [noise(1, &[1, 4, 2, 64]), noise(2, &[1, 6, 2, 64]), noise(3, &[1, 6, 2, 64])]
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() -> Result<()> {
    let [q, k, v] = &tensors();
    assert_says(flash_attn(&q.squeeze(0)?, k, v, 1.0, false), &["tensor q", "[batch, rows, heads, dim]"]);
    assert_says(flash_attn(q, &k.narrow(3, 0, 63)?, v, 1.0, false), &["tensor k", "head dim", "63", "64"]);
    assert_says(flash_attn(q, k, &v.narrow(1, 0, 5)?, 1.0, false), &["tensor v", "shape"]);
    assert_says(flash_attn(q, &k.to_dtype(DType::F16)?, v, 1.0, false), &["tensor k", "dtype", "f16"]);
    let doubles = [q, k, v].map(|t| t.to_dtype(DType::F64).unwrap());
    assert_says(flash_attn(&doubles[0], &doubles[1], &doubles[2], 1.0, false), &["tensor q", "dtype", "f32"]);
    let three = noise(4, &[1, 4, 3, 64]);
    assert_says(flash_attn(&three, k, v, 1.0, false), &["heads"]);
    let wide = [4, 6, 6].map(|rows| noise(5, &[1, rows, 2, 512]));
    assert_says(flash_attn(&wide[0], &wide[1], &wide[2], 1.0, false), &["head_dim_qk", "512", "256"]);
    assert_says(flash_attn(q, k, v, f32::NAN, false), &["scale"]);
    Ok(())
}

#[test]
fn slopes_caps_and_ranges_are_checked() -> Result<()> {
    let [q, k, v] = &tensors();
    let slopes = Tensor::new(&[0.5f32, 0.25], &device())?;
    let half = slopes.to_dtype(DType::F16)?;
    assert_says(flash_attn_alibi(q, k, v, &half, 1.0, true), &["alibi_slopes", "f32", "convert"]);
    assert_says(flash_attn_alibi(q, k, v, &slopes.reshape((1, 1, 2))?, 1.0, true), &["alibi_slopes", "[heads]"]);
    let three = Tensor::new(&[0.5f32, 0.25, 0.1], &device())?;
    assert_says(flash_attn_alibi(q, k, v, &three, 1.0, true), &["slope"]);
    for cap in [-1.0, f32::NAN, f32::INFINITY] {
        let o = flash_attn_alibi_windowed_softcap(q, k, v, None, 1.0, None, None, cap);
        assert_says(o, &["softcap", "positive"]);
    }
    Ok(())
}

#[test]
fn programs_without_their_inputs_are_refused() -> Result<()> {
    let [q, k, v] = &tensors();
    let program = Program::parse("bias: f32[heads]; score = score + bias[h];").unwrap();
    assert_says(attention(q, k, v, &program, &[]), &["bias", "missing"]);
    let whole = Tensor::new(&[1i64, 2], &device())?;
    assert_says(attention(q, k, v, &program, &[("bias", &whole)]), &["bias", "i64"]);
    Ok(())
}

#[test]
fn gradients_that_nothing_computes_are_refused() -> Result<()> {
    let [q, k, v] = &tensors();
    let slopes = Var::new(&[0.5f32, 0.25], &device())?;
    assert_says(flash_attn_alibi(q, k, v, &slopes, 1.0, true), &["no gradient", "slope", "detach"]);
    assert!(flash_attn_alibi(q, k, v, &slopes.as_tensor().detach(), 1.0, true).is_ok());
    let q = Var::from_tensor(&q.squeeze(0)?)?;
    let ends = Tensor::new(&[0u32, 4], &device())?;
    let table = Tensor::new(&[[0u32]], &device())?;
    let o = flash_attn_varlen_paged_windowed(&q, k, v, &ends, &ends, &table, None, 4, 4, 1.0, None, None, 6, None);
    assert_says(o, &["no gradient", "pages", "detach"]);
    Ok(())
}

#[test]
fn packs_and_pages_that_do_not_fit_are_refused() -> Result<()> {
    let [q, k, v] = tensors().map(|t| t.squeeze(0).unwrap());
    let ends = |x: &[u32]| Tensor::new(x, &device()).unwrap();
    let call = |of_q: &Tensor, of_k: &Tensor, max_q| flash_attn_varlen(&q, &k, &v, of_q, of_k, max_q, 6, 1.0, true);
    let (good_q, good_k) = (ends(&[0, 4]), ends(&[0, 6]));
    assert!(call(&good_q, &good_k, 4).is_ok());
    assert_says(call(&good_q, &ends(&[0, 3, 6]), 4), &["seqlens_k", "[batch + 1]"]);
    assert_says(call(&good_q.to_dtype(DType::F32)?, &good_k, 4), &["seqlens_q", "u32"]);
    if device().is_cpu() {
        // Nobody reads the lengths of a GPU.
        assert_says(call(&good_q, &ends(&[0, 7]), 4), &["seqlens_k", "values", "6 rows"]);
        assert_says(call(&ends(&[0, 4, 3]), &ends(&[0, 3, 6]), 4), &["seqlens_q", "decrease"]);
        assert_says(call(&good_q, &good_k, 3), &["max_seqlen_q", "3", "4 rows"]);
    }
    let (k, v) = (k.unsqueeze(0)?, v.unsqueeze(0)?);
    let paged = |table: &Tensor, page, ranges: Option<&Tensor>| {
        flash_attn_varlen_paged_windowed(
            &q,
            &k,
            &v,
            &good_q,
            &good_k,
            table,
            ranges,
            4,
            6,
            1.0,
            None,
            Some(0),
            page,
            None,
        )
    };
    let table = ends(&[0]).unsqueeze(0)?;
    assert!(paged(&table, 6, None).is_ok());
    assert_says(paged(&table, 8, None), &["page_block_size", "8"]);
    assert_says(paged(&table.squeeze(0)?, 6, None), &["block_table", "[batch, pages]"]);
    assert_says(paged(&ends(&[0, 0]).unsqueeze(1)?, 6, None), &["block_table", "1 sequences"]);
    let many = Tensor::zeros((1, 17, 2), DType::I32, &device())?;
    assert_says(paged(&table, 6, Some(&many)), &["mm_prefix_ranges", "17", "16"]);
    Ok(())
}
